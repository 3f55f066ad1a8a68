"""Memory for received data, bytes objects that are filled before other code sees them, and for large batches."""

import collections
import ctypes
import functools
import os
import sys
import weakref
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from granular.aio.runtime.pools import CORES
from granular.errors import StoreError

_new = ctypes.pythonapi.PyBytes_FromStringAndSize
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_HEAD: Final = bytes.__basicsize__ - 1
_WRITE: Final = 0x200  # PyBUF_WRITE


# glibc returns freed memory to the system on every free, and must fetch it again page by page for the next batch, which
# takes longer than reading it. It adapts to the largest block freed (M_TRIM_THRESHOLD in mallopt(3)): allocating and
# freeing this block costs two system calls, and up to twice its size may stay with each arena afterwards.
_LESSON: Final = (32 << 20) - (64 << 10)
# glibc gives each thread an arena of its own, up to eight per core. With as many, a Loader would keep a gigabyte.
_ARENAS: Final = max(2, min(8, CORES))
_M_ARENA_MAX: Final = -8

# glibc returns larger blocks in any case: those of a batch of images would be cleared by the system, page by page, for
# each batch, which takes a tenth of the time of decoding them.
_LARGE: Final = range((32 << 20) - (64 << 10), 256 << 20)


class Space(NamedTuple):
    """Memory that is being filled, and the object that owns it: a view of ``blank`` memory keeps nothing alive."""

    owner: Any
    view: memoryview

    def part(self, start: int, stop: int) -> 'Space':
        """Return a part of this memory, with the same owner."""
        return Space(self.owner, self.view[start:stop])


def blank(size: int, name: object = '') -> Space:
    """Return uninitialised bytes and a view through which to fill them, once, before other code gets them.

    This is how C code creates bytes: ``PyBytes_FromStringAndSize(NULL, size)``, which may be written to as long as no
    other code holds a reference (https://docs.python.org/3/c-api/bytes.html). The name is for a ``StoreError``: so much
    memory may not be available, for example because a store claims a huge object size.
    """
    if not size:
        return Space(b'', memoryview(bytearray()))
    try:
        data: bytes = _new(None, min(size, sys.maxsize))
    except (MemoryError, OverflowError) as error:
        raise StoreError(f'{name}: no memory for {size} bytes') from error
    view: memoryview = _view(id(data) + _HEAD, size, _WRITE)
    return Space(data, view)


@functools.cache
def keep_freed() -> None:
    """Make the allocator keep freed memory for the next batch: up to 64 MB in each of a few arenas.

    It is a setting of the whole process, made by its first read, unless the environment has GRANULAR_KEEP_FREED=0.
    """
    if not _keeps():
        return
    chosen = 'MALLOC_ARENA_MAX' in os.environ or 'arena_max' in os.environ.get('GLIBC_TUNABLES', '')
    if sys.platform == 'linux' and not chosen and (mallopt := getattr(ctypes.CDLL(None), 'mallopt', None)) is not None:
        mallopt(_M_ARENA_MAX, _ARENAS)
    blank(_LESSON)


@functools.cache
def _keeps() -> bool:
    return os.environ.get('GRANULAR_KEEP_FREED', '1') != '0'


def uninitialised(size: int) -> NDArray[np.uint8]:
    """Return an array of bytes for a batch.

    The memory of a large one, of 32 to 256 MB, is used again once nothing refers to it: the last two that were freed
    are kept, unless the environment has GRANULAR_KEEP_FREED=0.
    """
    if size not in _LARGE or not _keeps():
        return np.empty(size, np.uint8)
    for _ in range(len(_freed)):
        try:
            freed = _freed.popleft()
        except IndexError:  # another thread took it
            break
        if freed.block.nbytes == size:
            return np.asarray(_Block(freed.block))
        _freed.append(freed)
    return np.asarray(_Block(np.empty(size, np.uint8)))


class _Freed(weakref.ref['_Block']):
    """A reference to a block that has its memory once the block is gone."""

    __slots__ = ('block',)

    block: NDArray[np.uint8]


class _Block:
    """The base of all arrays in a block, however they were made. With the last of them, its memory may be used again.

    This is done without a frame of Python, in which Ctrl-C would be lost.
    """

    __slots__ = ('__array_interface__', '__weakref__', '_freed')

    def __init__(self, block: NDArray[np.uint8]) -> None:
        self.__array_interface__ = block.__array_interface__
        self._freed = _Freed(self, _freed.append)
        self._freed.block = block


_freed: Final[collections.deque[_Freed]] = collections.deque(maxlen=2)


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a view of an array that cannot be changed: a function that changes its element would change the array."""
    view = array.view()
    view.flags.writeable = False
    return view

"""Memory for received data: bytes objects that are filled before other code sees them, so that nothing is copied."""

import ctypes
import functools
import os
import sys
from typing import Any, Final, NamedTuple

from granular.aio.runtime.threads import CORES
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


class Space(NamedTuple):
    """Memory that is being filled, and the object that owns it: a view of ``blank`` memory keeps nothing alive."""

    owner: Any
    view: memoryview

    def part(self, start: int, stop: int) -> 'Space':
        """Return a part of this memory, with the same owner."""
        return Space(self.owner, self.view[start:stop])


def blank(size: int, name: str = '') -> Space:
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
    if os.environ.get('GRANULAR_KEEP_FREED', '1') == '0':
        return
    chosen = 'MALLOC_ARENA_MAX' in os.environ or 'arena_max' in os.environ.get('GLIBC_TUNABLES', '')
    if sys.platform == 'linux' and not chosen and (mallopt := getattr(ctypes.CDLL(None), 'mallopt', None)) is not None:
        mallopt(_M_ARENA_MAX, _ARENAS)
    blank(_LESSON)

"""Memory for what is received: bytes that are filled before anybody has seen them, so that nothing is copied."""

import ctypes
import sys
from typing import Any, Final, NamedTuple

from granular.errors import StoreError

_new = ctypes.pythonapi.PyBytes_FromStringAndSize
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_HEAD: Final = bytes.__basicsize__ - 1
_WRITE: Final = 0x200  # PyBUF_WRITE


# What glibc gives back to the system on every free, it must fetch page by page again for the next batch, which takes
# longer than reading it. It learns from the largest block that was freed (M_TRIM_THRESHOLD in mallopt(3)): this one
# costs two system calls, and up to twice as much may stay with the process afterwards.
_LESSON: Final = (32 << 20) - (64 << 10)


class Space(NamedTuple):
    """Memory that is being filled, and what it belongs to: a view of ``blank`` keeps nothing alive."""

    owner: Any
    view: memoryview

    def part(self, start: int, stop: int) -> 'Space':
        """A part of the part."""
        return Space(self.owner, self.view[start:stop])


def blank(size: int) -> Space:
    """Bytes of undefined content, and a view through which to fill them, once, before they are handed to anybody.

    That is how C code makes bytes: ``PyBytes_FromStringAndSize(NULL, size)``, which may be written to as long as
    nobody else has it (https://docs.python.org/3/c-api/bytes.html).

    Raises:
      StoreError: if there is no memory for so much, as a store may claim an object to have.
    """
    if not size:
        return Space(b'', memoryview(bytearray()))
    try:
        data: bytes = _new(None, min(size, sys.maxsize))
    except (MemoryError, OverflowError) as error:
        raise StoreError(f'no memory for {size} bytes') from error
    view: memoryview = _view(id(data) + _HEAD, size, _WRITE)
    return Space(data, view)


def keep_freed() -> None:
    """Have the allocator keep what is freed, up to some tens of megabytes, for the next batch."""
    blank(_LESSON)

"""Blocking file objects over byte ranges, for parsers that require a file."""

import abc
import io
from typing import Any


class SeekableFile(io.RawIOBase, abc.ABC):
    """A read-only file object of a fixed size that keeps a position. Subclasses return the bytes there."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self._position = size, 0

    @abc.abstractmethod
    def _bytes_at(self, start: int, size: int) -> bytes | memoryview:
        """Return the bytes from a position on: ``size`` or fewer, and none at the end of the file."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = max(0, offset + (0, self._position, self._size)[whence])
        return self._position

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            return self.readall()
        data = self._bytes_at(self._position, size)
        self._position += len(data)
        return bytes(data)  # no copy if it is bytes

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast('B')
        data = self._bytes_at(self._position, len(view))
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

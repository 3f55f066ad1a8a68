"""Open files."""

import operator
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from granular.aio.http.reply import Reply
from granular.aio.paths.pure import PurePath
from granular.aio.runtime.forking import each_after_fork
from granular.aio.runtime.lock import Lock
from granular.aio.stores import ObjectWriter
from granular.errors import ClosedError, InvalidArgumentError, ObjectChangedError, OutOfRangeError, UnsupportedError

Progress = Callable[[int], object]
"""A function of the user, called with the number of bytes, records or shards since the last call."""


def bytes_of(data: bytes | bytearray | memoryview, path: PurePath) -> bytes:
    """Return the bytes to write: those of the items of an array, whose ``len`` is another number."""
    try:
        return data if isinstance(data, bytes) else bytes(memoryview(data))
    except TypeError:
        raise InvalidArgumentError(f'{path}: expected bytes to write, got {type(data).__name__}') from None


class File:
    """An open file: reads at any position, or writes from the beginning. ``async with`` closes it.

    Concurrent writes take turns, in call order. A write that fails or is cancelled may have written a part of its
    bytes, so the file is not published after it.
    """

    def __init__(self, path: PurePath, size: int, writer: ObjectWriter | None) -> None:
        self._path = path
        self._size = size
        self._writer = writer
        self._position = 0
        self._closed = self._failed = False
        self._pinned: Reply | None = None  # the first reply, whose version the further ones must have
        self._kept: object = None  # what keeps a file open that is read
        self._turns = Lock()
        if writer is not None:
            _written.add(self)

    @classmethod
    async def open(cls, path: PurePath, size: int) -> Self:
        """Open a file of ``size`` bytes for reading."""
        file = cls(path, size, None)
        if path.store.local and size:
            # The file stays open: it is read as it is now, even if it is replaced later.
            file._kept = path.store.keep_open(path.key)
            reply = file._pinned = await path.store.read(path.key, 0, 0)
            file._size = reply.size
        return file

    async def read(self, size: int = -1) -> bytes:
        """Return the next bytes, at most ``size`` of them; ``b''`` at the end."""
        self._check(writing=False)
        size = operator.index(size)
        stop = self._size if size < 0 else min(self._position + size, self._size)
        if stop <= self._position:
            return b''
        pinned = self._pinned
        try:
            reply = await self._path.store.read(self._path.key, self._position, stop, pinned and pinned.version)
        except OutOfRangeError as error:
            raise self._replaced(f'{error}') from error  # it had enough bytes when it was opened
        if reply.size != (self._size if pinned is None else pinned.size):
            raise self._replaced(f'{self._size} bytes became {reply.size}')
        self._pinned, self._position = pinned or reply._replace(data=b''), stop
        return reply.data

    def _replaced(self, detail: str) -> ObjectChangedError:
        return ObjectChangedError(
            f'{self._path}: it was replaced while it was being read: {detail}', path=f'{self._path}'
        )

    async def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append bytes; return their number."""
        data = bytes_of(data, self._path)
        async with self._turns.turn():
            writer = self._check(writing=True)
            if self._failed:
                raise ClosedError(f'{self._path}: a write failed before: write the file again')
            self._failed = True  # until all bytes are written
            await writer.write(data)
            self._failed = False
            self._position += len(data)
            return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a position, from the beginning (0), the current position (1) or the end (2), and return it."""
        self._check(writing=False)
        if whence not in (0, 1, 2):
            raise InvalidArgumentError(f'{self._path}: whence: expected 0, 1 or 2, got {whence!r}')
        position = operator.index(offset) + (0, self._position, self._size)[whence]
        if position < 0:
            raise InvalidArgumentError(f'{self._path}: cannot seek to {position}')
        self._position = position
        return position

    def tell(self) -> int:
        """Return the position of the next read or write."""
        return self._position

    @property
    def size(self) -> int:
        """The size of the file in bytes; while writing, the bytes written so far."""
        return self._size if self._writer is None else self._position

    async def aclose(self) -> None:
        """Close the file; a written file appears now.

        Raises:
          ClosedError: if a write failed before; then nothing appears.
        """
        async with self._turns.turn():
            if (writer := self._end()) is None:
                return
            try:
                if self._failed:
                    raise ClosedError(f'{self._path}: a write failed before, so it is not published')
                await writer.close()
            except BaseException:
                await writer.abort()
                raise

    async def abort(self) -> None:
        """Close the file and discard what was written."""
        if (writer := self._end()) is not None:
            async with self._turns.turn():  # a write that is in progress could begin an upload afterwards
                await writer.abort()

    def _end(self) -> ObjectWriter | None:
        """Close the file. Return the writer of what is to be published or discarded."""
        writer = None if self._closed else self._writer
        self._closed = True
        self._pinned = None
        self._kept = None
        return writer

    def _check(self, writing: bool) -> Any:
        if self._closed:
            raise ClosedError(f'{self._path}: the file is closed, or belongs to the process that this was forked from')
        if writing != (self._writer is not None):
            raise UnsupportedError(
                f'{self._path}: is open for {"reading" if writing else "writing"} only', path=f'{self._path}'
            )
        return self._writer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.aclose()
        else:
            await self.abort()


def _disown(file: File) -> None:
    """In a forked child, leave a file that is written to the parent, which completes or discards it."""
    file._closed = True


_written: Final = each_after_fork(_disown)

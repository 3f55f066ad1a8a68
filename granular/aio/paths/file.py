"""Open files."""

from types import TracebackType
from typing import Any, Self

from granular.aio.http.reply import Reply
from granular.aio.paths.pure import PurePath
from granular.aio.runtime.lock import Lock
from granular.aio.stores import ObjectWriter
from granular.errors import ClosedError, InvalidArgumentError, ObjectChangedError, OutOfRangeError, UnsupportedError


class File:
    """An open file: reads at any position, or writes from the beginning. ``async with`` closes it.

    Concurrent writes take turns, in call order. A write that fails or is cancelled may have handed on a part of its
    bytes, so the file is not published after it.
    """

    def __init__(self, path: PurePath, size: int, writer: ObjectWriter | None) -> None:
        self._path, self._size, self._writer = path, size, writer
        self._at = 0
        self._closed = self._failed = False
        self._pinned: Reply | None = None  # the first reply: those after it are of its version
        self._turns = Lock()

    @classmethod
    async def opened(cls, path: PurePath, size: int) -> Self:
        """A file to read, of that many bytes."""
        file = cls(path, size, None)
        if path.store.local and size:
            # It is kept open, and read as it is now whatever lies at its path later on.
            reply = file._pinned = await path.store.read(path.key, 0, 0)
            file._size = reply.size
        return file

    async def read(self, size: int = -1) -> bytes:
        """Return the next bytes, at most ``size`` of them; ``b''`` at the end."""
        self._check(writing=False)
        stop = self._size if size < 0 else min(self._at + size, self._size)
        if stop <= self._at:
            return b''
        pinned = self._pinned
        try:
            reply = await self._path.store.read(self._path.key, self._at, stop, pinned and pinned.version)
        except OutOfRangeError as error:
            # It had as many bytes when it was opened.
            raise ObjectChangedError(f'{self._path}: it was replaced while it was being read: {error}') from error
        if reply.size != (self._size if pinned is None else pinned.size):
            raise ObjectChangedError(
                f'{self._path}: it was replaced while it was being read: {self._size} bytes became {reply.size}'
            )
        self._pinned, self._at = pinned or reply._replace(data=b''), stop
        return reply.data

    async def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append bytes; return their number."""
        async with self._turns.turn():
            writer = self._check(writing=True)
            if self._failed:
                raise ClosedError(f'{self._path}: a write failed before: write the file anew')
            self._failed = True  # until all of it is handed on
            await writer.write(data)
            self._failed = False
            self._at += len(data)
            return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a position, from the beginning (0), the current position (1) or the end (2), and return it."""
        self._check(writing=False)
        at = offset + (0, self._at, self._size)[whence]
        if at < 0:
            raise InvalidArgumentError(f'{self._path}: cannot seek to {at}')
        self._at = at
        return at

    def tell(self) -> int:
        """Return the position of the next read or write."""
        return self._at

    @property
    def size(self) -> int:
        """The size of the file in bytes; while writing, the bytes written so far."""
        return self._size if self._writer is None else self._at

    async def aclose(self) -> None:
        """Close the file; a written file appears now.

        Raises:
          ClosedError: if a write failed before; then nothing appears.
        """
        async with self._turns.turn():
            if self._closed:
                return
            self._closed, self._pinned = True, None
            if self._writer is not None:
                try:
                    if self._failed:
                        raise ClosedError(f'{self._path}: a write failed before, so it is not published')
                    await self._writer.close()
                except BaseException:
                    await self._writer.abort()
                    raise

    async def abort(self) -> None:
        """Close the file and discard what was written."""
        if not self._closed:
            self._closed, self._pinned = True, None
            if self._writer is not None:
                await self._writer.abort()

    def _check(self, writing: bool) -> Any:
        if self._closed:
            raise ClosedError(f'{self._path}: the file is closed')
        if writing != (self._writer is not None):
            raise UnsupportedError(f'{self._path}: is open for {"reading" if writing else "writing"} only')
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

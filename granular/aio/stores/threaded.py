"""Stores without async reads: their blocking calls run in threads."""

import abc
import contextlib
import errno
import operator
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar

from granular._support.redact import hidden
from granular.aio.http.reply import Reply
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.threads import offload, offload_whole
from granular.aio.runtime.tracebacks import summary
from granular.aio.stores.base import Entry, ObjectWriter, Stat, Store
from granular.aio.stores.errors import translated
from granular.config import MiB
from granular.errors import GranularError, StoreError, UnsupportedError
from granular.metrics import counters

T = TypeVar('T')


def third_party_error(name: str, error: Exception) -> GranularError | None:
    """Convert an exception of another library's file system, which may be of any class."""
    if isinstance(error, OSError | MemoryError):
        return None  # by its class
    if isinstance(error, NotImplementedError):
        return UnsupportedError(f'{name}: its file system does not support this operation')
    return StoreError(f'{name}: {hidden(summary(error))}')


class ThreadedStore(Store):
    """A store whose blocking calls run in the thread pool."""

    async def call(self, key: str, call_now: Callable[[], T]) -> T:
        """Run a blocking call in a thread, and convert its exceptions to ``GranularError`` subclasses."""
        await to_loop()
        return await offload(self._translating, key, call_now)

    async def change(self, key: str, call_now: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Run a call that changes files, as ``call`` does, but so that it never outlives its caller."""
        await to_loop()
        return await offload_whole(self._translating, key, call_now, undo=undo)

    def _translating(self, key: str, call_now: Callable[[], T]) -> T:
        with translated(self.url(key), third_party_error):
            return call_now()

    # --- blocking calls, with the meaning and errors of those of ``Store``

    @abc.abstractmethod
    def stat_now(self, key: str) -> Stat: ...

    @abc.abstractmethod
    def list_now(self, key: str) -> list[Entry]: ...

    @abc.abstractmethod
    def exists_now(self, key: str) -> bool: ...

    @abc.abstractmethod
    def open_now(self, key: str) -> Any:
        """Open a file for writing."""

    @abc.abstractmethod
    def mkdir_now(self, key: str, parents: bool) -> None: ...

    @abc.abstractmethod
    def remove_now(self, key: str) -> None:
        """Delete a file; raise FileNotFoundError if there is none, or do nothing."""

    # --- operations

    async def stat(self, key: str) -> Stat:
        return await self.call(key, lambda: self.stat_now(key))

    async def scan(self, key: str, prefix: str = '') -> AsyncGenerator[Entry, None]:
        for entry in await self.call(key, lambda: sorted(self.list_now(key), key=operator.attrgetter('key'))):
            yield entry

    async def open_writer(self, key: str, new: bool = False) -> ObjectWriter:
        writer = ThreadedWriter(self, key, new)
        if new:
            await self.change(key, writer.create_now, undo=lambda _: writer.discard_now())
        return writer

    async def mkdir(self, key: str, parents: bool, exist_ok: bool) -> None:
        def call_now() -> None:
            if not self.exists_now(key):
                self.mkdir_now(key, parents)
            elif not exist_ok or not self.stat_now(key).is_dir:
                raise FileExistsError(key)

        await self.change(key, call_now)

    async def delete(self, keys: Sequence[str]) -> None:
        def call_now() -> None:
            for key in keys:
                with translated(self.url(key), third_party_error), contextlib.suppress(FileNotFoundError):
                    self.remove_now(key)

        await self.change(keys[0] if keys else '', call_now)

    def reply_of(self, key: str, data: bytes, first: int, end: int, size: int, version: str) -> Reply:
        """Check the length of the data read, count the request, and return the reply."""
        if len(data) != end - first:
            raise StoreError(f'{self.url(key)}: expected {end - first} bytes, got {len(data)}', path=self.url(key))
        metrics = counters.store(self.root.partition('://')[0] or 'file')
        metrics.ok += 1
        metrics.bytes += len(data)
        return Reply(bytes(data), first, size, version)


class ThreadedWriter(ObjectWriter):
    """Writer to a file object in a thread, at least 1 MiB at a time.

    A file that is to be replaced is opened with the first megabyte, or the end, because opening may empty it.
    """

    def __init__(self, store: ThreadedStore, key: str, new: bool) -> None:
        self._store = store
        self._key = key
        self._new = new
        self._file: Any = None  # while there is something to discard
        self._buffer = bytearray()
        self._size = 0

    def create_now(self) -> None:
        """Open a new file: most file systems then show it to other writers."""
        if self._store.exists_now(self._key):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._key)
        self._file = self._store.open_now(self._key)

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        self._buffer += data
        if len(self._buffer) >= MiB:
            await self._drain()

    async def _drain(self, last: bool = False) -> None:
        data, self._buffer = bytes(self._buffer), bytearray()
        self._size += len(data)

        def call_now() -> None:
            if self._file is None:
                self._file = self._store.open_now(self._key)
            self._file.write(data)
            if last:
                self._publish_now()

        await self._store.change(self._key, call_now)

    def _publish_now(self) -> None:
        uploads = _uploads(self._file)
        try:
            self._file.close()
        except BaseException:
            # Nothing appeared, so there is nothing to remove but what the file was to replace.
            self._file = None if uploads else self._file
            raise
        if (size := self._store.stat_now(self._key).size) != self._size:
            raise StoreError(f'{self._store.url(self._key)}: expected {self._size} bytes after writing, got {size}')
        if not self._new:
            self._file = None  # it has replaced another one: removing it would leave neither

    async def close(self) -> None:
        await self._drain(last=True)

    async def abort(self) -> None:
        self._buffer.clear()
        if self._file is not None:
            await self._store.change(self._key, self.discard_now)

    def discard_now(self) -> None:
        """Close the file, and remove what was written."""
        if hasattr(self._file, 'discard'):
            self._file.discard()
        if _uploads(self._file):
            self._file.closed = True  # closing would publish what was written
            return
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(FileNotFoundError):
            self._store.remove_now(self._key)


def _uploads(file: Any) -> bool:
    """Return whether a file of fsspec appears when it is closed, and has not been closed."""
    from fsspec.spec import AbstractBufferedFile

    return isinstance(file, AbstractBufferedFile) and not file.closed

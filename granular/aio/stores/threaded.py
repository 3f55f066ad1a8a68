"""Stores without async reads: their blocking calls run in threads."""

import abc
import contextlib
import errno
import operator
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from granular._redact import hidden
from granular.aio.reply import Reply, changed
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.threads import offload
from granular.aio.runtime.tracebacks import summary
from granular.aio.stores.base import Entry, ObjectWriter, Stat, Store
from granular.aio.stores.errors import translated
from granular.config import MiB
from granular.errors import GranularError, StoreError
from granular.metrics import counters

T = TypeVar('T')


def third_party_error(name: str, error: Exception) -> GranularError | None:
    """Convert an exception of another library's file system, which may be of any class."""
    if isinstance(error, OSError | MemoryError):
        return None  # by its class
    return StoreError(f'{name}: {hidden(summary(error))}')


class ThreadedStore(Store):
    """A store whose blocking calls run in the thread pool."""

    async def call(self, key: str, call_now: Callable[[], T]) -> T:
        """Run a blocking call in a thread, and convert its exceptions to ``GranularError`` subclasses."""
        await ensure_event_loop()

        def guarded() -> T:
            with translated(self.url(key), third_party_error):
                return call_now()

        return await offload(guarded)

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

    async def scan(self, key: str, prefix: str = '') -> AsyncIterator[Entry]:
        for entry in await self.call(key, lambda: sorted(self.list_now(key), key=operator.attrgetter('key'))):
            yield entry

    async def open_writer(self, key: str, new: bool = False) -> ObjectWriter:
        def create() -> Any:
            if self.exists_now(key):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), key)
            return self.open_now(key)

        # A new file is opened now: most file systems then show it to other writers.
        return ThreadedWriter(self, key, await self.call(key, create) if new else None)

    async def mkdir(self, key: str, parents: bool, exist_ok: bool) -> None:
        def call_now() -> None:
            if not self.exists_now(key):
                self.mkdir_now(key, parents)
            elif not exist_ok:
                raise FileExistsError(key)

        await self.call(key, call_now)

    async def delete(self, keys: Sequence[str]) -> None:
        def call_now() -> None:
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    self.remove_now(key)

        await self.call(keys[0] if keys else '', call_now)

    def check_unchanged(self, key: str, before: str, now: str) -> None:
        """Check that a file still has its earlier version."""
        if before != now:
            raise changed(self.url(key), before, now)

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

    def __init__(self, store: ThreadedStore, key: str, file: Any) -> None:
        self._store, self._key, self._file = store, key, file
        self._buffer = bytearray()
        self._size = 0

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
                uploads = _uploads(self._file)
                try:
                    self._file.close()
                except BaseException:
                    # Nothing appeared, so there is nothing to remove but what the file was to replace.
                    self._file = None if uploads else self._file
                    raise

        await self._store.call(self._key, call_now)

    async def close(self) -> None:
        await self._drain(last=True)
        if (size := (await self._store.stat(self._key)).size) != self._size:
            raise StoreError(
                f'{self._store.url(self._key)}: expected {self._size} bytes after writing, got {size}',
                path=self._store.url(self._key),
            )

    async def abort(self) -> None:
        def call_now() -> None:
            if hasattr(self._file, 'discard'):
                self._file.discard()
            if _uploads(self._file):
                self._file.closed = True  # closing would publish what was written
                return
            with contextlib.suppress(OSError):
                self._file.close()
            with contextlib.suppress(FileNotFoundError):
                self._store.remove_now(self._key)

        self._buffer.clear()
        if self._file is not None:
            await self._store.call(self._key, call_now)


def _uploads(file: Any) -> bool:
    """Return whether a file of fsspec appears when it is closed, and has not been closed."""
    from fsspec.spec import AbstractBufferedFile

    return isinstance(file, AbstractBufferedFile) and not file.closed

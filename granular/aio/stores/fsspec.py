"""Stores without async reads, called in threads: other fsspec schemes, and path objects of other libraries."""

import abc
import contextlib
import errno
import io
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, Self, TypeVar

from granular._redact import hidden
from granular.aio.http.reply import Reply, changed, counters, stand_in
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.threads import offload
from granular.aio.stores.base import Entry, ObjectWriter, Stat, Store
from granular.aio.stores.errors import translated
from granular.config import IOConfig, MiB
from granular.errors import MissingExtraError, NotFoundError, OutOfRangeError, StoreError, UnknownSchemeError

# Fields in which file systems report the identity of a file's content, or the time of its last change.
_VERSION_FIELDS: Final = (
    *('etag', 'ETag', 'generation', 'md5', 'checksum', 'blob_id', 'oid'),
    *('mtime', 'modified', 'last_modified', 'LastModified', 'created'),
)

T = TypeVar('T')


class ThreadedStore(Store):
    """A store whose blocking calls run in the thread pool."""

    async def call(self, key: str, call_now: Callable[[], T]) -> T:
        """Run a blocking call in a thread, and convert its exceptions to ``GranularError`` subclasses."""
        await ensure_event_loop()

        def guarded() -> T:
            with translated(self.url(key)):
                return call_now()

        return await offload(guarded)

    @abc.abstractmethod
    def exists_now(self, key: str) -> bool:
        """Return whether a file or folder exists, on the calling thread."""

    def check_range(self, key: str, start: int, stop: int | None, size: int) -> tuple[int, int]:
        """Return the first byte of a read and the one after its last.

        Raises:
          OutOfRangeError: if the object ends before.
        """
        first = max(0, size + start) if start < 0 else start
        end = size if stop is None else stop
        if first > size or end > size:
            raise OutOfRangeError(f'{self.url(key)}: bytes {start} to {stop} were requested, but it has {size}')
        return first, end

    def check_unchanged(self, key: str, before: str, now: str) -> None:
        """Check that a file still has its earlier version.

        Raises:
          ObjectChangedError: if it has another one.
        """
        if before != now:
            raise changed(self.url(key), before, now)

    def reply_of(self, key: str, data: bytes, first: int, end: int, size: int, version: str) -> Reply:
        """Check the length of the data read, count the request, and return the reply."""
        if len(data) != end - first:
            raise StoreError(f'{self.url(key)}: expected {end - first} bytes, got {len(data)}')
        counters.requests += 1
        counters.bytes += len(data)
        return Reply(bytes(data), first, size, version)


class FsspecStore(ThreadedStore):
    """A file system of fsspec, such as ``memory://``, ``abfs://`` or ``hf://``."""

    def __init__(self, root: str, config: IOConfig, options: Mapping[str, Any]) -> None:
        super().__init__(root, config, options)
        cls = _filesystem_class(root)
        with translated(hidden(root)):
            self._fs = cls(**{**cls._get_kwargs_from_urls(root), **options})
        self._cut = len(cls._strip_protocol(root).strip('/'))

    def address(self, key: str) -> str:
        return f'{self.root}{key}' if self.root.endswith('://') else super().address(key)

    def url(self, key: str) -> str:
        return hidden(self.address(key)) if '@' in self.root else self.address(key)

    def _path(self, key: str) -> str:
        return f'{self._fs.root_marker}{key}'

    def _key(self, name: str) -> str:
        return name.strip('/')[self._cut :].strip('/')

    async def read(self, key: str, start: int = 0, stop: int | None = None, version: str | None = None) -> Reply:
        def call_now() -> Reply:
            size, current = self._size_and_version(key)
            self.check_unchanged(key, version or current, current)
            first, end = self.check_range(key, start, stop, size)
            data = self._fs.cat_file(self._path(key), first, end) if end > first else b''
            self.check_unchanged(key, current, self._size_and_version(key)[1])
            return self.reply_of(key, data, first, end, size, current)

        return await self.call(key, call_now)

    def _size_and_version(self, key: str) -> tuple[int, str]:
        """Return the size and version of a file; the version combines the size and ``_VERSION_FIELDS``."""
        path = self._path(key)
        self._fs.invalidate_cache(self._fs._parent(path))  # listings, which may be outdated
        info = self._fs.info(path)
        if info['type'] == 'directory':
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), key)
        size = info.get('size')
        if size is None:
            raise StoreError(f'{self.url(key)}: its size is unknown')
        fields = [f'{name} {info[name]}' for name in _VERSION_FIELDS if info.get(name) is not None]
        return size, stand_in(size, *fields)

    async def stat(self, key: str) -> Stat:
        def call_now() -> Stat:
            info = self._fs.info(self._path(key))
            if info['type'] == 'directory':
                return Stat(0, is_dir=True)
            return Stat(info['size'], _modified_of(info))

        return await self.call(key, call_now)

    async def scan(self, key: str, prefix: str = '') -> AsyncIterator[Entry]:
        def call_now(folder: str) -> list[Entry]:
            infos = self._fs.ls(self._path(folder), detail=True)
            if len(infos) == 1 and infos[0]['type'] == 'file' and self._key(infos[0]['name']) == folder:
                raise NotFoundError(f'{self.url(folder)}: is a file, not a folder')
            entries = [
                Entry(self._key(info['name']), info['type'] == 'directory', info.get('size') or 0, _modified_of(info))
                for info in infos
            ]
            return sorted(entries, key=lambda entry: entry.key)

        for entry in await self.call(key, lambda: call_now(key)):
            yield entry

    async def open_writer(self, key: str, new: bool = False) -> ObjectWriter:
        path = self._path(key)

        def open_file() -> Any:
            parent = os.path.dirname(path)
            if parent:
                self._fs.makedirs(parent, exist_ok=True)
            return self._fs.open(path, 'wb')

        return await ThreadedWriter.open(self, key, new, open_file, lambda: self._fs.rm_file(path))

    def exists_now(self, key: str) -> bool:
        self._fs.invalidate_cache(self._fs._parent(self._path(key)))
        try:
            self._fs.info(self._path(key))
        except FileNotFoundError:
            return False
        return True

    async def mkdir(self, key: str, parents: bool, exist_ok: bool) -> None:
        def call_now() -> None:
            if self._fs.exists(self._path(key)):
                if not exist_ok:
                    raise FileExistsError(key)
                return
            self._fs.mkdir(self._path(key), create_parents=parents)

        await self.call(key, call_now)

    async def delete(self, keys: Sequence[str]) -> None:
        def call_now() -> None:
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(key))

        await self.call(keys[0] if keys else '', call_now)

    async def delete_empty(self, key: str) -> bool:
        def call_now() -> bool:
            if self._fs.ls(self._path(key)):
                return False
            self._fs.rmdir(self._path(key))
            return True

        return await self.call(key, call_now)

    async def delete_tree(self, key: str) -> None:
        def call_now() -> None:
            if self._fs.isfile(self._path(key)):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), key)
            self._fs.rm(self._path(key), recursive=True)

        await self.call(key, call_now)

    async def copy_within(self, source: str, target: str) -> bool:
        await self.call(source, lambda: self._fs.cp_file(self._path(source), self._path(target)))
        return True


class ForeignStore(ThreadedStore):
    """A path object of another library, such as PyPI's ``elements``: keys are joined to it with ``/``.

    It needs ``/``, ``name``, ``parent``, ``exists``, ``open('rb')`` and ``glob``; to write, also ``open('wb')`` and
    ``mkdir``; to delete, also ``remove`` or ``unlink``.
    """

    def __init__(self, root: str, config: IOConfig, options: Mapping[str, Any]) -> None:
        super().__init__(root, config, options)
        self._base = options['path']

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.root, self.config, self.options)

    def _path(self, key: str) -> Any:
        return self._base / key if key else self._base

    async def read(self, key: str, start: int = 0, stop: int | None = None, version: str | None = None) -> Reply:
        def call_now() -> Reply:
            with self._path(key).open('rb') as file:
                size = file.seek(0, io.SEEK_END)
                size = file.tell() if size is None else size
                current = self._version(key, size)
                self.check_unchanged(key, version or current, current)
                first, end = self.check_range(key, start, stop, size)
                file.seek(first)
                data = file.read(end - first)
            self.check_unchanged(key, current, self._version(key, size))
            return self.reply_of(key, data, first, end, size, current)

        return await self.call(key, call_now)

    def _version(self, key: str, size: int) -> str:
        """Return the version of a file: its size, and the time of its last change if its path has ``stat``."""
        path = self._path(key)
        info = path.stat() if hasattr(path, 'stat') else None
        fields = [f'{name} {getattr(info, name)}' for name in ('st_mtime_ns', 'st_mtime') if hasattr(info, name)]
        return stand_in(size, *fields)

    async def stat(self, key: str) -> Stat:
        def call_now() -> Stat:
            path = self._path(key)
            if not path.exists():
                raise NotFoundError(f'{self.url(key)}: no such file or folder')
            try:
                with path.open('rb') as file:
                    file.seek(0, io.SEEK_END)
                    return Stat(file.tell())
            except OSError:
                return Stat(0, is_dir=True)

        return await self.call(key, call_now)

    async def scan(self, key: str, prefix: str = '') -> AsyncIterator[Entry]:
        def call_now(folder: str) -> list[Entry]:
            children = list(self._path(folder).glob('*'))
            if not children and not self._path(folder).exists():
                raise NotFoundError(f'{self.url(folder)}: no such folder')
            entries = [Entry(f'{folder}/{child.name}'.strip('/'), _is_dir(child)) for child in children]
            return sorted(entries, key=lambda entry: entry.key)

        for entry in await self.call(key, lambda: call_now(key)):
            yield entry

    async def open_writer(self, key: str, new: bool = False) -> ObjectWriter:
        return await ThreadedWriter.open(self, key, new, lambda: self._path(key).open('wb'), lambda: self._remove(key))

    def exists_now(self, key: str) -> bool:
        return bool(self._path(key).exists())

    def _remove(self, key: str) -> None:
        path = self._path(key)
        (path.remove if hasattr(path, 'remove') else path.unlink)()

    async def mkdir(self, key: str, parents: bool, exist_ok: bool) -> None:
        def call_now() -> None:
            if self._path(key).exists():
                if not exist_ok:
                    raise FileExistsError(key)
                return
            self._path(key).mkdir()

        await self.call(key, call_now)

    async def delete(self, keys: Sequence[str]) -> None:
        def call_now() -> None:
            for key in keys:
                if self._path(key).exists():
                    self._remove(key)

        await self.call(keys[0] if keys else '', call_now)


class ThreadedWriter(ObjectWriter):
    """Writer to a file object in a thread, at least 1 MiB at a time.

    A file that is to be replaced is opened with the first megabyte, or the end, because opening may empty it.
    """

    def __init__(self, store: ThreadedStore, key: str, open_file: Callable[[], Any], remove: Callable[[], object]):
        self._store, self._key, self._open_file, self._remove = store, key, open_file, remove
        self._file: Any = None
        self._buffer = bytearray()
        self._size = 0

    @classmethod
    async def open(
        cls, store: ThreadedStore, key: str, new: bool, open_file: Callable[[], Any], remove: Callable[[], object]
    ) -> Self:
        """Open a writer. A new file is opened now: most file systems then show it to other writers.

        Raises:
          AlreadyExistsError: if the file must be new and exists.
        """
        writer = cls(store, key, open_file, remove)

        def create() -> Any:
            if store.exists_now(key):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), key)
            return open_file()

        if new:
            writer._file = await store.call(key, create)
        return writer

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        self._buffer += data
        if len(self._buffer) >= MiB:
            await self._drain()

    async def _drain(self, last: bool = False) -> None:
        data, self._buffer = bytes(self._buffer), bytearray()
        self._size += len(data)

        def call_now() -> None:
            if self._file is None:
                self._file = self._open_file()
            self._file.write(data)
            if last:
                self._file.close()

        await self._store.call(self._key, call_now)

    async def close(self) -> None:
        await self._drain(last=True)
        if (size := (await self._store.stat(self._key)).size) != self._size:
            raise StoreError(f'{self._store.url(self._key)}: expected {self._size} bytes after writing, got {size}')

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
                self._remove()

        self._buffer.clear()
        if self._file is not None:
            await self._store.call(self._key, call_now)


def _uploads(file: Any) -> bool:
    """Return whether a file of fsspec appears when it is closed, and has not been closed."""
    from fsspec.spec import AbstractBufferedFile

    return isinstance(file, AbstractBufferedFile) and not file.closed


def _modified_of(info: Mapping[str, Any]) -> float | None:
    """Return the time of a file's last change; None if its file system does not report it."""
    time: Any = info.get('mtime') or info.get('LastModified') or info.get('last_modified') or info.get('created')
    seconds = time.timestamp() if hasattr(time, 'timestamp') else time
    return float(seconds) if isinstance(seconds, int | float) else None


def _filesystem_class(root: str) -> Any:
    import fsspec

    protocol = root.partition('://')[0]
    try:
        return fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise MissingExtraError(f'{hidden(root)}: {error}') from error
    except ValueError as error:
        raise UnknownSchemeError(f'{hidden(root)}: unknown scheme {protocol!r}: {error}') from error


def fsspec_root(url: str) -> str:
    """Return the part of a URL that names its file system: the scheme, with the host if the scheme has one."""
    protocol, _, rest = url.partition('://')
    host = _filesystem_class(url)._get_kwargs_from_urls(url).get('host')
    return f'{protocol}://{rest.split("/")[0]}' if host else f'{protocol}://'


def _is_dir(path: Any) -> bool:
    for name in ('is_dir', 'isdir'):
        if hasattr(path, name):
            return bool(getattr(path, name)())
    try:  # without these methods, a folder is a path that cannot be opened
        path.open('rb').close()
    except OSError:
        return True
    return False

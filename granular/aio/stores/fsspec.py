"""Stores without async reads, used through threads: other fsspec schemes, and path objects of other libraries."""

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
_TOLD: Final = (
    *('etag', 'ETag', 'generation', 'md5', 'checksum', 'blob_id', 'oid'),
    *('mtime', 'modified', 'last_modified', 'LastModified', 'created'),
)

T = TypeVar('T')


class ThreadedStore(Store):
    """A store whose blocking calls run in the thread pool."""

    async def call(self, key: str, fn: Callable[[], T]) -> T:
        """Run a blocking call in a thread, and convert its exceptions to ours."""
        await ensure_event_loop()

        def guarded() -> T:
            with translated(self.url(key)):
                return fn()

        return await offload(guarded)

    def slice_of(self, key: str, start: int, stop: int | None, size: int) -> tuple[int, int]:
        """Return the first byte of a read and the one after its last, checked against the object's size."""
        first = max(0, size + start) if start < 0 else start
        behind = size if stop is None else stop
        if first > size or behind > size:
            raise OutOfRangeError(f'{self.url(key)}: bytes {start} to {stop} were asked for, but it has {size}')
        return first, behind

    def check_same(self, key: str, before: str, now: str) -> None:
        """Check that a file still has its earlier version."""
        if before != now:
            raise changed(self.url(key), before, now)

    def reply_of(self, key: str, data: bytes, first: int, behind: int, size: int, version: str) -> Reply:
        """Check the length of the data read, count the request, and return the reply."""
        if len(data) != behind - first:
            raise StoreError(f'{self.url(key)}: {len(data)} bytes came instead of {behind - first}')
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
        def fn() -> Reply:
            size, found = self._look(key)
            self.check_same(key, version or found, found)
            first, behind = self.slice_of(key, start, stop, size)
            data = self._fs.cat_file(self._path(key), first, behind) if behind > first else b''
            self.check_same(key, found, self._look(key)[1])
            return self.reply_of(key, data, first, behind, size, found)

        return await self.call(key, fn)

    def _look(self, key: str) -> tuple[int, str]:
        """Return the size and version of a file; the version consists of the size and the fields in ``_TOLD``."""
        path = self._path(key)
        self._fs.invalidate_cache(self._fs._parent(path))  # listings, which may be outdated
        info = self._fs.info(path)
        if info['type'] == 'directory':
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), key)
        size = info.get('size')
        if size is None:
            raise StoreError(f'{self.url(key)}: its size is unknown')
        told = [f'{name} {info[name]}' for name in _TOLD if info.get(name) is not None]
        return size, stand_in(size, *told)

    async def stat(self, key: str) -> Stat:
        def fn() -> Stat:
            info = self._fs.info(self._path(key))
            if info['type'] == 'directory':
                return Stat(0, is_dir=True)
            return Stat(info['size'], _when(info))

        return await self.call(key, fn)

    async def scan(self, key: str, prefix: str = '') -> AsyncIterator[Entry]:
        def fn(folder: str) -> list[Entry]:
            infos = self._fs.ls(self._path(folder), detail=True)
            if len(infos) == 1 and infos[0]['type'] == 'file' and self._key(infos[0]['name']) == folder:
                raise NotFoundError(f'{self.url(folder)}: is a file, not a folder')
            entries = [
                Entry(self._key(info['name']), info['type'] == 'directory', info.get('size') or 0, _when(info))
                for info in infos
            ]
            return sorted(entries, key=lambda entry: entry.key)

        for entry in await self.call(key, lambda: fn(key)):
            yield entry

    async def open_writer(self, key: str, new: bool = False) -> ObjectWriter:
        def fn() -> Any:
            parent = os.path.dirname(self._path(key))
            if parent:
                self._fs.makedirs(parent, exist_ok=True)
            return self._fs.open(self._path(key), 'wb')

        return await ThreadedWriter.begin(self, key, new, fn, lambda: self._fs.rm_file(self._path(key)))

    async def mkdir(self, key: str, parents: bool, exist_ok: bool) -> None:
        def fn() -> None:
            if self._fs.exists(self._path(key)):
                if not exist_ok:
                    raise FileExistsError(key)
                return
            self._fs.mkdir(self._path(key), create_parents=parents)

        await self.call(key, fn)

    async def delete(self, keys: Sequence[str]) -> None:
        def fn() -> None:
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(key))

        await self.call(keys[0] if keys else '', fn)

    async def delete_empty(self, key: str) -> bool:
        def fn() -> bool:
            if self._fs.ls(self._path(key)):
                return False
            self._fs.rmdir(self._path(key))
            return True

        return await self.call(key, fn)

    async def delete_tree(self, key: str) -> None:
        def fn() -> None:
            if self._fs.isfile(self._path(key)):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), key)
            self._fs.rm(self._path(key), recursive=True)

        await self.call(key, fn)

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
        def fn() -> Reply:
            with self._path(key).open('rb') as file:
                size = file.seek(0, io.SEEK_END)
                size = file.tell() if size is None else size
                found = self._version(key, size)
                self.check_same(key, version or found, found)
                first, behind = self.slice_of(key, start, stop, size)
                file.seek(first)
                data = file.read(behind - first)
            self.check_same(key, found, self._version(key, size))
            return self.reply_of(key, data, first, behind, size, found)

        return await self.call(key, fn)

    def _version(self, key: str, size: int) -> str:
        """Return the version of a file: its size, and the time of its last change if its path has ``stat``."""
        path = self._path(key)
        info = path.stat() if hasattr(path, 'stat') else None
        told = [f'{name} {getattr(info, name)}' for name in ('st_mtime_ns', 'st_mtime') if hasattr(info, name)]
        return stand_in(size, *told)

    async def stat(self, key: str) -> Stat:
        def fn() -> Stat:
            path = self._path(key)
            if not path.exists():
                raise NotFoundError(f'{self.url(key)}: no such file or folder')
            try:
                with path.open('rb') as file:
                    file.seek(0, io.SEEK_END)
                    return Stat(file.tell())
            except OSError:
                return Stat(0, is_dir=True)

        return await self.call(key, fn)

    async def scan(self, key: str, prefix: str = '') -> AsyncIterator[Entry]:
        def fn(folder: str) -> list[Entry]:
            found = list(self._path(folder).glob('*'))
            if not found and not self._path(folder).exists():
                raise NotFoundError(f'{self.url(folder)}: no such folder')
            keys = {path.name: f'{folder}/{path.name}'.strip('/') for path in found}
            return sorted((Entry(keys[p.name], _is_dir(p)) for p in found), key=lambda entry: entry.key)

        for entry in await self.call(key, lambda: fn(key)):
            yield entry

    async def open_writer(self, key: str, new: bool = False) -> ObjectWriter:
        return await ThreadedWriter.begin(self, key, new, lambda: self._path(key).open('wb'), lambda: self._remove(key))

    def _remove(self, key: str) -> None:
        path = self._path(key)
        (path.remove if hasattr(path, 'remove') else path.unlink)()

    async def mkdir(self, key: str, parents: bool, exist_ok: bool) -> None:
        def fn() -> None:
            if self._path(key).exists():
                if not exist_ok:
                    raise FileExistsError(key)
                return
            self._path(key).mkdir()

        await self.call(key, fn)

    async def delete(self, keys: Sequence[str]) -> None:
        def fn() -> None:
            for key in keys:
                if self._path(key).exists():
                    self._remove(key)

        await self.call(keys[0] if keys else '', fn)


class ThreadedWriter(ObjectWriter):
    """Writer to a file object in a thread, at least 1 MiB at a time.

    Opening may empty the file that is there: one that is to be replaced is opened with the first megabyte, or the end.
    """

    def __init__(self, store: ThreadedStore, key: str, open_file: Callable[[], Any], remove: Callable[[], object]):
        self._store, self._key, self._open_file, self._remove = store, key, open_file, remove
        self._file: Any = None
        self._buffer = bytearray()
        self._size = 0

    @classmethod
    async def begin(
        cls, store: ThreadedStore, key: str, new: bool, open_file: Callable[[], Any], remove: Callable[[], object]
    ) -> Self:
        """A writer, of a file that is made now if it is to be new, so that other writers see it."""
        writer = cls(store, key, open_file, remove)
        if new:
            writer._file = await store.call(key, open_file)
        return writer

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        self._buffer += data
        if len(self._buffer) >= MiB:
            await self._drain()

    async def _drain(self, last: bool = False) -> None:
        data, self._buffer = bytes(self._buffer), bytearray()
        self._size += len(data)

        def fn() -> None:
            if self._file is None:
                self._file = self._open_file()
            self._file.write(data)
            if last:
                self._file.close()

        await self._store.call(self._key, fn)

    async def close(self) -> None:
        await self._drain(last=True)
        if (size := (await self._store.stat(self._key)).size) != self._size:
            raise StoreError(f'{self._store.url(self._key)}: expected {self._size} bytes after writing, got {size}')

    async def abort(self) -> None:
        def fn() -> None:
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
            await self._store.call(self._key, fn)


def _uploads(file: Any) -> bool:
    """Return whether a file of fsspec appears when it is closed, and has not been closed."""
    from fsspec.spec import AbstractBufferedFile

    return isinstance(file, AbstractBufferedFile) and not file.closed


def _when(info: Mapping[str, Any]) -> float | None:
    """Return the time of a file's last change; None if its file system does not report it."""
    when: Any = info.get('mtime') or info.get('LastModified') or info.get('last_modified') or info.get('created')
    found = when.timestamp() if hasattr(when, 'timestamp') else when
    return float(found) if isinstance(found, int | float) else None


def _filesystem_class(root: str) -> Any:
    import fsspec

    protocol = root.partition('://')[0]
    try:
        return fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise MissingExtraError(f'{hidden(root)}: {error}') from error
    except ValueError as error:
        raise UnknownSchemeError(f'{hidden(root)}: there is no store for scheme {protocol!r}: {error}') from error


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

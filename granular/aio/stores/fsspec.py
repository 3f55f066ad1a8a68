"""File systems of fsspec."""

import errno
import os
from collections.abc import Mapping
from typing import Any, Final

from granular._support.redact import hidden
from granular.aio.http.reply import Reply, check_same, stand_in
from granular.aio.runtime.tracebacks import summary
from granular.aio.stores.base import Entry, Stat
from granular.aio.stores.errors import translated
from granular.aio.stores.lent import current, options_of
from granular.aio.stores.options import without_secrets
from granular.aio.stores.threaded import ThreadedStore, third_party_error
from granular.config import IOConfig
from granular.errors import (
    GranularError,
    InvalidArgumentError,
    MissingExtraError,
    NotFoundError,
    StoreError,
    UnknownSchemeError,
)

# Fields in which file systems report the identity of a file's content, or the time of its last change.
_VERSION_FIELDS: Final = (
    *('etag', 'ETag', 'generation', 'md5', 'checksum', 'blob_id', 'oid'),
    *('mtime', 'modified', 'last_modified', 'LastModified', 'created'),
)


class FsspecStore(ThreadedStore):
    """A file system of fsspec, such as ``memory://``, ``sftp://`` or ``webdav://``."""

    def __init__(self, root: str, config: IOConfig, options: Mapping[str, Any], fs: Any = None) -> None:
        super().__init__(root, config, options)
        cls = _filesystem_class(root) if fs is None else type(fs)
        with translated(hidden(root), _construction_error):
            self._made = fs or cls(**{**cls._get_kwargs_from_urls(root), **options})
            stripped = cls._strip_protocol(root)
        self._recipe = None if fs is None else _Recipe(fs)
        self._cut = len(stripped.strip('/'))
        # Those of web servers take addresses.
        self._prefix = self._made.root_marker if '://' not in stripped else root if root.endswith('://') else f'{root}/'

    @property
    def _fs(self) -> Any:
        return current(self._made)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.root, self.config, pickled(self.options), self._recipe)

    def _identity(self) -> tuple[Any, ...]:
        return *super()._identity(), type(self._made)

    def address(self, key: str) -> str:
        return f'{self.root}{key}' if self.root.endswith('://') else super().address(key)

    def url(self, key: str) -> str:
        return hidden(self.address(key)) if '@' in self.root else self.address(key)

    def _path(self, key: str) -> str:
        return f'{self._prefix}{key}'

    def _key(self, name: str) -> str:
        return name.strip('/')[self._cut :].strip('/')

    async def read(self, key: str, start: int = 0, stop: int | None = None, version: str | None = None) -> Reply:
        def call_now() -> Reply:
            size, current = self._size_and_version(key)
            check_same(self.url(key), [version or current, current])
            first, end = self.check_range(key, start, stop, size)
            data = self._fs.cat_file(self._path(key), first, end) if end > first else b''
            check_same(self.url(key), [current, self._size_and_version(key)[1]])
            return self.reply_of(key, data, first, end, size, current)

        return await self.call(key, call_now)

    def _size_and_version(self, key: str) -> tuple[int, str]:
        """Return the size of a file, and its version, made of the size and ``_VERSION_FIELDS``."""
        info = self._info(key)
        if info['type'] == 'directory':
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), key)
        size = self._size_of(key, info)
        fields = [f'{name} {info[name]}' for name in _VERSION_FIELDS if info.get(name) is not None]
        return size, stand_in(size, *fields)

    def _info(self, key: str) -> Mapping[str, Any]:
        """Return what the file system knows of a file or folder now, not when it last listed the folder above."""
        path = self._path(key)
        self._fs.invalidate_cache(self._fs._parent(path))
        info: Mapping[str, Any] = self._fs.info(path)
        return info

    def _listed(self, key: str) -> list[Mapping[str, Any]]:
        path = self._path(key)
        self._fs.invalidate_cache(path)
        entries: list[Mapping[str, Any]] = self._fs.ls(path, detail=True)
        return entries

    def stat_now(self, key: str) -> Stat:
        info = self._info(key)
        if info['type'] == 'directory':
            return Stat(0, is_dir=True)
        return Stat(self._size_of(key, info), _modified_of(info))

    def _size_of(self, key: str, info: Mapping[str, Any]) -> int:
        if (size := info.get('size')) is None:
            raise StoreError(f'{self.url(key)}: its size is unknown')
        return int(size)

    def list_now(self, key: str) -> list[Entry]:
        infos = self._listed(key)
        if len(infos) == 1 and infos[0]['type'] == 'file' and self._key(infos[0]['name']) == key:
            raise NotFoundError(f'{self.url(key)}: is a file, not a folder', path=self.url(key))
        return [
            Entry(self._key(info['name']), info['type'] == 'directory', info.get('size') or 0, _modified_of(info))
            for info in infos
        ]

    def exists_now(self, key: str) -> bool:
        try:
            self._info(key)
        except FileNotFoundError:
            return False
        return True

    def open_now(self, key: str) -> Any:
        path = self._path(key)
        if parent := os.path.dirname(path):
            self._fs.makedirs(parent, exist_ok=True)
        return self._fs.open(path, 'wb')

    def mkdir_now(self, key: str, parents: bool) -> None:
        self._fs.mkdir(self._path(key), create_parents=parents)

    def remove_now(self, key: str) -> None:
        self._fs.rm_file(self._path(key))

    async def delete_empty(self, key: str) -> bool:
        def call_now() -> bool:
            if self._listed(key):
                return False
            self._fs.rmdir(self._path(key))
            return True

        return await self.change(key, call_now)

    async def delete_tree(self, key: str) -> None:
        def call_now() -> None:
            if self._fs.isfile(self._path(key)):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), key)
            if set('*?[{').isdisjoint(self._path(key)):
                self._fs.rm(self._path(key), recursive=True)
            else:  # which rm would take for a pattern
                self._delete_each(self._path(key))

        await self.change(key, call_now)

    def _delete_each(self, path: str) -> None:
        if not self._fs.exists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        found = self._fs.find(path, withdirs=True, detail=True)
        folders = {path, *(name for name, info in found.items() if info['type'] == 'directory')}
        for name in found.keys() - folders:
            self._fs.rm_file(name)
        for name in sorted(folders, key=len, reverse=True):
            if self._fs.exists(name):  # some stores have folders only while they contain files
                self._fs.rmdir(name)

    async def copy_within(self, source: str, target: str) -> bool:
        def call_now() -> bool:
            try:
                self._fs.cp_file(self._path(source), self._path(target))
            except NotImplementedError:  # as sftp does
                return False
            return True

        return await self.change(source, call_now)


class _Recipe:
    """A file system that pickles without credentials, as do those in its options, and unpickles as a file system."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (type(self._fs), pickled(options_of(self._fs)))


def pickled(value: Any) -> Any:
    from fsspec.spec import AbstractFileSystem

    if isinstance(value, AbstractFileSystem):
        return _Recipe(value)
    if isinstance(value, Mapping):
        return {name: pickled(item) for name, item in without_secrets(value).items()}
    return value


def _make(cls: Any, options: Mapping[str, Any]) -> Any:
    with translated(cls.__name__, _construction_error):
        return cls(**options)


def _construction_error(name: str, error: Exception) -> GranularError | None:
    if isinstance(error, ImportError):
        return MissingExtraError(f'{name}: {error}')
    if isinstance(error, TypeError | ValueError):
        return InvalidArgumentError(f'{name}: its options do not fit: {hidden(summary(error))}')
    return third_party_error(name, error)


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
        raise UnknownSchemeError(
            f'{hidden(root)}: unknown scheme {protocol!r}: expected s3, gs, az, hf, http, https, or one of fsspec'
        ) from error


def fsspec_root(url: str, fs: Any) -> str:
    """Return the part of a URL that names its file system: the scheme, with the host if the scheme has one."""
    protocol, _, rest = url.partition('://')
    with translated(hidden(url), _construction_error):
        cls = _filesystem_class(url) if fs is None else type(fs)
        host = cls._get_kwargs_from_urls(url).get('host')
    return f'{protocol}://{rest.split("/")[0]}' if host else f'{protocol}://'

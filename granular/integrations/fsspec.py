"""Read-only file systems of fsspec over granular's requests: ``granular+s3://`` and ``granular+gs://``.

pandas, pyarrow, zarr, xarray and all that takes an address of fsspec, such as
``pandas.read_parquet('granular+s3://my-bucket/table.parquet')``, read through them.

fsspec finds them where granular is installed; elsewhere, import this module first.
"""

import datetime
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, ClassVar

import fsspec
from fsspec.asyn import AsyncFileSystem, get_loop, sync
from fsspec.spec import AbstractBufferedFile, make_instance

from granular.aio.paths.path import Path
from granular.aio.stores import split_bucket
from granular.aio.stores.base import Entry, Request, Stat, Store
from granular.aio.stores.fanout import read_all
from granular.aio.stores.fsspec import pickled
from granular.config import IOConfig
from granular.errors import (
    BucketNotFoundError,
    GranularError,
    NotFoundError,
    OutOfRangeError,
    StoreError,
    UnsupportedError,
)

__all__ = ['FileSystem', 'GSFileSystem', 'S3FileSystem']


class FileSystem(AsyncFileSystem):  # type: ignore[misc]
    """A read-only file system of fsspec.

    Its calls run under fsspec's event loop, or with ``asynchronous=True`` under that of the caller. Pickles hold no
    credentials, as those of ``granular.Path``.

    Args:
      config: the settings for reading, a ``granular.IOConfig``.
      asynchronous, loop, batch_size: as for all file systems of fsspec.
      options: options of the store, as those of ``granular.Path``: ``endpoint_url``, ``key``, ``token``, ``fs`` ...
    """

    protocol: ClassVar[str]
    cachable = False  # equal stores share their connections, and a new one sees the environment of now
    _pid: int
    _loop: Any

    def __init__(
        self,
        *,
        config: IOConfig | None = None,
        asynchronous: bool = False,
        loop: Any = None,
        batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(asynchronous=asynchronous, loop=loop, batch_size=batch_size)
        self._config, self._options = config, options
        self._stores: dict[str, Store] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return make_instance, (type(self), (), pickled(self.storage_options))

    @property
    def loop(self) -> Any:
        """The event loop; in a forked child, that of the child."""
        if self._pid != os.getpid():
            self._pid, self._loop = os.getpid(), None if self.asynchronous else get_loop()
        return self._loop

    def _at(self, path: str) -> Path:
        bucket, key = split_bucket(self._strip_protocol(path).lstrip('/'))
        if not bucket:
            raise UnsupportedError(f'{self.protocol}://: expected a bucket: buckets are not listed')
        if (store := self._stores.get(bucket)) is None:
            scheme = self.protocol.partition('+')[2]
            store = self._stores[bucket] = Path(f'{scheme}://{bucket}', config=self._config, **self._options).store
        return Path.of(store, key)

    def _described(self, path: Path, found: Stat | Entry) -> dict[str, Any]:
        return {
            'name': self._strip_protocol(str(path)),
            'size': found.size,
            'type': 'directory' if found.is_dir else 'file',
            'mtime': found.modified,
            'version': getattr(found, 'version', None),
        }

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        scheme = cls.protocol.partition('+')[2]
        path = super()._strip_protocol(path)
        return path.removeprefix(f'{scheme}://') if isinstance(path, str) else path

    async def _info(self, path: str, **arguments: Any) -> dict[str, Any]:
        found = self._at(path)
        return self._described(found, await found.stat())

    async def _ls(self, path: str, detail: bool = True, **arguments: Any) -> list[Any]:
        folder = self._at(path)
        try:
            entries = [entry async for entry in folder.store.scan(folder.key)]
            infos = [self._described(Path.of(folder.store, entry.key), entry) for entry in entries]
        except NotFoundError:
            infos = [await self._info(path)]  # a file; raises if there is none
        return infos if detail else [info['name'] for info in infos]

    async def _isfile(self, path: str) -> bool:
        return (await self._kind(path)) == 'file'

    async def _isdir(self, path: str) -> bool:
        return (await self._kind(path)) == 'directory'

    async def _kind(self, path: str) -> str:
        """Return the type of what is at a path; empty if there is nothing, which any error is to the base class."""
        try:
            return str((await self._info(path))['type'])
        except BucketNotFoundError:
            raise
        except NotFoundError:
            return ''

    async def _walk(
        self, path: str, maxdepth: int | None = None, topdown: bool = True, on_error: Any = 'omit', **arguments: Any
    ) -> AsyncIterator[tuple[str, Any, Any]]:
        """Walk as the base class does, but by default only a missing folder is empty, not one that cannot be listed."""
        on_error = _raise_other if on_error == 'omit' else on_error
        async for level in super()._walk(path, maxdepth, topdown, on_error, **arguments):
            yield level

    async def _find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        prefix: str = '',
        **arguments: Any,
    ) -> Any:
        """Find as the base class does. ``prefix`` is the beginning of the names below the path."""
        found = await super()._find(path, maxdepth, withdirs, detail=True, **arguments)
        start = f'{self._strip_protocol(path)}/{prefix}' if prefix else ''
        chosen = {name: info for name, info in found.items() if name.startswith(start)}
        return chosen if detail else list(chosen)

    async def _cat_file(
        self, path: str, start: int | None = None, end: int | None = None, version: str | None = None, **arguments: Any
    ) -> bytes:
        file = self._at(path)
        try:
            if end is None:
                return (await file.store.read(file.key, start or 0, None, version)).data
            if 0 <= (start or 0) <= end:
                return (await file.read_ranges([start or 0], [end], version=version))[0]
        except OutOfRangeError:
            pass  # the limits are those of a slice, which may be behind the end
        start, end, _ = slice(start, end).indices((await file.stat()).size)
        return (await file.read_ranges([start], [max(start, end)], version=version))[0]

    async def _cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        batch_size: int | None = None,
        on_error: str = 'return',
        **arguments: Any,
    ) -> list[Any]:
        """Read many ranges of many files by one plan per bucket. What ``max_gap`` says in fsspec, the plan decides."""
        limits = [list(value) if isinstance(value, Iterable) else [value] * len(paths) for value in (starts, ends)]
        pairs = list(zip(*limits, strict=False))
        if len(paths) == len(limits[0]) == len(limits[1]) and all(
            start is not None and end is not None and 0 <= start <= end for start, end in pairs
        ):
            try:
                return await self._planned(paths, pairs)
            except GranularError as error:  # each range has its own result or error
                if on_error != 'return' and not isinstance(error, OutOfRangeError):
                    raise
        ranges: list[Any] = await super()._cat_ranges(
            paths, *limits, batch_size=batch_size, on_error=on_error, **arguments
        )
        return ranges

    async def _planned(self, paths: Sequence[str], pairs: Sequence[tuple[int, int]]) -> list[bytes]:
        values = [b''] * len(paths)
        files: dict[Path, list[int]] = {}
        for i, path in enumerate(paths):
            files.setdefault(self._at(path), []).append(i)
        for store in dict.fromkeys(file.store for file in files):
            read = {file.key: indices for file, indices in files.items() if file.store == store}
            requests = [
                Request(key, [pairs[i][0] for i in indices], [pairs[i][1] for i in indices])
                for key, indices in read.items()
            ]
            for indices, pieces in zip(read.values(), await read_all(store, requests), strict=True):
                for i, piece in zip(indices, pieces, strict=True):
                    values[i] = piece
        return values

    async def _get_file(self, rpath: str, lpath: str, callback: Any = None, **arguments: Any) -> None:
        source = self._at(rpath)
        stat = await source.stat()
        if stat.is_dir:
            os.makedirs(lpath, exist_ok=True)
            return
        os.makedirs(os.path.dirname(lpath) or '.', exist_ok=True)
        if callback is not None:
            callback.set_size(stat.size)
        await source.copy(lpath, progress=None if callback is None else callback.relative_update)

    def modified(self, path: str) -> datetime.datetime:
        """Return the time of the last change, in UTC."""
        found = self.info(path)['mtime']
        if found is None:
            raise UnsupportedError(f'{path}: the store reports no time of its last change')
        return datetime.datetime.fromtimestamp(found, datetime.UTC)

    def to_dict(self, *, include_password: bool = True) -> dict[str, Any]:
        """Return a description as all file systems of fsspec do; ``include_password`` is about all credentials."""
        described: dict[str, Any] = super().to_dict(include_password=include_password)
        if not include_password:
            for name in self.storage_options.keys() - pickled(self.storage_options).keys():
                del described[name]
        return described

    async def _refuse(self, path: Any, *arguments: Any, **options: Any) -> Any:
        raise UnsupportedError(f'{path}: {self.protocol} only reads: write through granular.Path')

    def _refuse_blocking(self, path: Any, *arguments: Any, **options: Any) -> Any:
        raise UnsupportedError(f'{path}: {self.protocol} only reads: write through granular.Path')

    _copy = _cp_file = _makedirs = _mkdir = _mv_file = _pipe = _pipe_file = _put = _put_file = _rm = _rm_file = _refuse
    makedir = mkdirs = mv = rmdir = touch = write_bytes = write_text = _refuse_blocking

    def created(self, path: str) -> datetime.datetime:
        raise UnsupportedError(f'{path}: stores report the time of the last change, as modified() does, not the first')

    def sign(self, path: str, expiration: int = 100, **arguments: Any) -> str:
        raise UnsupportedError(f'{path}: granular signs no links: use the file system of the store, such as s3fs')

    async def open_async(self, path: str, mode: str = 'rb', **arguments: Any) -> Any:
        raise UnsupportedError(f'{path}: has no asynchronous files: use granular.aio.Path.open')

    def _open(self, path: str, mode: str = 'rb', **arguments: Any) -> '_File':
        if mode != 'rb':
            raise UnsupportedError(f"{path}: expected mode 'rb', got {mode!r}: write through granular.Path")
        if self.asynchronous:
            raise UnsupportedError(f'{path}: expected a file system without asynchronous=True: open() blocks')
        return _File(self, path, mode, **arguments)


def _raise_other(error: Exception) -> None:
    """Raise the error of a listing, unless it is that the folder does not exist."""
    if not isinstance(error, NotFoundError) or isinstance(error, BucketNotFoundError):
        raise error


class _File(AbstractBufferedFile):  # type: ignore[misc]
    """A file that is read in the version that it had when it was opened."""

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        if self.details['type'] == 'directory':
            raise StoreError(f'{self.path}: is a folder, not a file', path=self.path)

    def _fetch_range(self, start: int, end: int) -> bytes:
        data: bytes = sync(self.fs.loop, self.fs._cat_file, self.path, start, end, version=self.details['version'])
        return data


class S3FileSystem(FileSystem):
    """``granular+s3://``."""

    protocol = 'granular+s3'


class GSFileSystem(FileSystem):
    """``granular+gs://``."""

    protocol = 'granular+gs'


for _class in (S3FileSystem, GSFileSystem):
    fsspec.register_implementation(_class.protocol, _class, clobber=True)

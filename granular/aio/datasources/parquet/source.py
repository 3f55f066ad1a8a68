"""Reads Parquet files at random: the column chunks of row groups by range requests, decoded by pyarrow."""

import contextlib
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Final, Self, SupportsIndex

import numpy as np

from granular._lazy import need
from granular.aio.datasources.parquet.file import Footer, footer_length, parse_footer
from granular.aio.datasources.parquet.row_groups import RowGroups
from granular.aio.http.reply import changed
from granular.aio.paths.path import Path
from granular.aio.paths.pure import PurePath
from granular.aio.runtime.lifecycle import AsyncResource
from granular.aio.runtime.loops import gather
from granular.aio.runtime.readahead import pages
from granular.aio.runtime.sharing import sharing
from granular.aio.runtime.threads import offload
from granular.config import MiB
from granular.errors import CorruptDatasetError, InvalidArgumentError, UnknownKeyError
from granular.indexing import index_of, indices_of

Fields = Iterable[str] | Mapping[str, bool] | None

CACHE: Final = 512 * MiB


class ParquetDataSource(AsyncResource):
    """Random access to the rows of Parquet files, on a disk or in buckets, in the order given.

    ::

        async with granular.aio.ParquetDataSource('s3://bucket/train.parquet', columns=['title', 'label']) as source:
            row = await source.get(0)
            rows = await source.fetch([3, 1, 4], ('title',))  # only this column is read

    A row is a dict of its columns. Numbers, booleans and times are numpy scalars; strings, bytes and decimals are
    Python objects; a list is a new numpy array and a struct a dict, as in Google Grain. A null is NaN in a float
    column, NaT in a time column and None otherwise (:func:`granular.aio.datasources.parquet.arrow_values.values_of`).

    Opening takes one request of ``IOConfig.tail`` bytes per file, or two if its footer is longer. For a batch, the byte
    ranges of its columns in its row groups are read from all files concurrently; decoded columns are cached, so that
    reads of neighbouring rows need no request. A file is pinned to the ETag or generation that it was opened with.

    Parquet is read by the row group, however few rows are needed: in random order over row groups that are not cached,
    each row costs its row group. Choose few columns, small row groups, ``shuffle.Blocks``, or ``ParquetIterDataset``
    with ``window_shuffle``.

    Memory: the footers, ``cache_bytes``, and during a read the column chunks and decoded columns that it needs.

    Args:
      paths: a file, or a sequence of files.
      columns: the names of the columns to read, in the order wanted; all by default.
      cache_bytes: limit on the bytes of decoded columns in the LRU cache; 0 for no cache.

    Raises:
      CorruptError: if a file is not a Parquet file, or is damaged.
      UnsupportedError: if it is encrypted, or has several columns of one name.
      CorruptDatasetError: if a file has other columns than the first.
      UnknownKeyError: if a column of ``columns`` does not exist.
    """

    def __init__(
        self,
        paths: PurePath | str | os.PathLike[str] | Sequence[Any],
        columns: Sequence[str] | None = None,
        cache_bytes: int = CACHE,
    ) -> None:
        super().__init__()
        need('pyarrow', 'parquet')
        self.paths = paths_of(paths)
        if isinstance(columns, str) or (columns is not None and not all(type(name) is str for name in columns)):
            raise InvalidArgumentError(f'columns: expected a sequence of names, got {columns!r:.100}')
        if not isinstance(cache_bytes, int) or cache_bytes < 0:
            raise InvalidArgumentError(f'cache_bytes is {cache_bytes!r}: want an integer from 0 on')
        self._chosen = None if columns is None else tuple(dict.fromkeys(columns))
        self._columns: tuple[str, ...] = ()
        self._cache_bytes = cache_bytes
        self._name = f'{self.paths[0]}' if len(self.paths) == 1 else f'{self.paths[0]} and {len(self.paths) - 1} more'
        self._footers: list[Footer] | None = None  # pickled with the source
        self._groups = RowGroups([], cache_bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        args = (self.paths, self._chosen, self._cache_bytes)
        if sharing.get() and self._groups.footers:
            return _shared, (type(self), args, self._groups.footers)
        return type(self), args

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self._name!r})'

    # --- opening

    async def _open(self) -> None:
        footers = self._footers
        if footers is None:
            for path in self.paths:
                await path.store.ready()
            footers = await gather([_read_footer(path) for path in self.paths])
        first = footers[0]
        for footer in footers:
            if set(footer.names) != set(first.names):
                raise CorruptDatasetError(
                    f'{footer.path}: has columns {sorted(footer.names)}, but {first.path} has {sorted(first.names)}'
                )
        self._columns = first.names if self._chosen is None else self._chosen
        self._choose(self._columns, first.names)
        self._groups = RowGroups(footers, self._cache_bytes)

    async def _close(self) -> None:
        await self._groups.release()

    # --- properties

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of a row's columns."""
        self._check_open()
        return self._columns

    @property
    def _identity(self) -> tuple[Any, ...]:
        """The files in order, each by store, address, bytes and version, and the columns."""
        return *(
            (f.path.store.fingerprint, f'{f.path}', f.size, f.version) for f in self._groups.footers
        ), self._columns

    @property
    def size(self) -> int:
        """Bytes of all files."""
        self._check_open()
        return sum(footer.size for footer in self._groups.footers)

    def __len__(self) -> int:
        self._check_open()
        return self._groups.length

    def copy(self) -> Self:
        """Return an independently closable source of the same files, with a cache of its own."""
        self._check_open()
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__, _groups=self._groups.copy())
        return twin

    # --- reading

    async def get(self, index: SupportsIndex | slice, mask: Fields = None) -> Any:
        """Return a row, or ``{column: [values]}`` for a slice.

        Args:
          index: an integer, negative from the end, or a slice.
          mask: the columns to return.

        Raises:
          OutOfRangeError: an ``IndexError``, for an index past the end.
          UnknownKeyError: a ``KeyError``, for a column that does not exist.
        """
        await self._ensure_open()
        names = self._choose(mask)
        if isinstance(index, slice | range):
            return await self._groups.read(indices_of(index, len(self), self._name), names)
        values = await self._groups.read(np.array([index_of(index, len(self), self._name)]), names)
        return {name: column[0] for name, column in values.items()}

    async def fetch(self, indices: Any, mask: Fields = None) -> list[dict[str, Any]]:
        """Return many rows, reading all files, row groups and columns concurrently.

        Args:
          indices: a 1-D sequence of integers, in any order, repeated or negative; or a slice or range.
          mask: as for ``get``.

        Returns:
          The rows, in the order requested.
        """
        await self._ensure_open()
        rows = indices_of(indices, len(self), self._name)
        values = await self._groups.read(rows, self._choose(mask))
        if not values:
            return [{} for _ in rows]
        return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        await self._ensure_open()
        async with contextlib.aclosing(pages(self.fetch, len(self), self.size, False)) as items:
            async for row in items:
                yield row

    def _choose(self, mask: Fields, known: Sequence[str] | None = None) -> tuple[str, ...]:
        """Return the columns that a mask selects.

        Raises:
          UnknownKeyError: for a column that does not exist.
        """
        if mask is None:
            return self._columns
        if isinstance(mask, Mapping):
            wanted = [name for name, want in mask.items() if want]
        else:
            wanted = [mask] if isinstance(mask, str) else list(mask)
        known = self._columns if known is None else known
        if unknown := [name for name in wanted if name not in known]:
            raise UnknownKeyError(f'{self._name}: has no columns {unknown}, only {list(known)}')
        return tuple(dict.fromkeys(wanted))


def paths_of(paths: Any) -> tuple[Path, ...]:
    """Return one path or several as a tuple.

    Raises:
      InvalidArgumentError: if there is none.
    """
    if isinstance(paths, str | os.PathLike | PurePath) or not isinstance(paths, Iterable):
        paths = [paths]
    result = tuple(map(Path, paths))
    if not result:
        raise InvalidArgumentError('expected one path or more, got none')
    return result


def _shared(kind: type[ParquetDataSource], args: tuple[Any, ...], footers: list[Footer]) -> ParquetDataSource:
    """Unpickle a source in a worker process, with the footers that its parent has read."""
    source = kind(*args)
    source._footers = footers
    return source


async def _read_footer(path: Path) -> Footer:
    reply = await path.store.read(path.key, -path.store.config.tail)
    length = footer_length(path, reply.size, reply.data)
    tail = reply.data[-length:]
    if length > len(reply.data):
        start = reply.size - length
        more = await path.store.read(path.key, start, start + length - len(reply.data), reply.version)
        if more.version != reply.version:
            raise changed(f'{path}', f'{reply.version}', more.version)
        tail = more.data + reply.data
    return await offload(parse_footer, path, reply.size, reply.version, tail)

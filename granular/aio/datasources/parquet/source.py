"""Reads Parquet files at random: the column chunks of row groups by range requests, decoded by pyarrow."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, Self, SupportsIndex, TypeVar, overload

import numpy as np

from granular._lazy import import_extra
from granular._typing import Datapoint_co
from granular.aio.datasources.arguments import Mask, Paths, names_in
from granular.aio.datasources.indexed_files import IndexedFiles
from granular.aio.datasources.parquet.arrow_values import values_of
from granular.aio.datasources.parquet.column_cache import ColumnCache, Key, Load
from granular.aio.datasources.parquet.file import Footer, chunk_ranges, decode, footer_length, parse_footer, weight
from granular.aio.http.reply import changed
from granular.aio.paths.path import Path
from granular.aio.runtime.background import background, cancel_idle, wait_shared
from granular.aio.runtime.scope import PerLoop
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import CORES, map_threads, offload
from granular.aio.stores import Store
from granular.aio.stores.fanout import Job, read_all
from granular.config import MiB
from granular.errors import CorruptDatasetError, CorruptError, InvalidArgumentError
from granular.indexing import Ints, check_integer, index_of, indices_of

CACHE: Final = 512 * MiB

T = TypeVar('T')
Values = dict[str, list[Any]]
"""The values of rows, by column."""


class ParquetDataSource(IndexedFiles[Footer, Datapoint_co]):
    """Random access to the rows of Parquet files, on a disk or in buckets, in the order given.

    ::

        async with granular.aio.ParquetDataSource('s3://bucket/train.parquet', columns=['title', 'label']) as source:
            row = await source.get(0)
            rows = await source.fetch([3, 1, 4], ('title',))  # only this column is read

    A row is a dict of its columns. Numbers, booleans and times are numpy scalars; strings, bytes and decimals are
    Python objects; a list is a new numpy array and a struct a dict, as in Google Grain. A null is NaN in a float
    column, NaT in a time column and None otherwise.

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
        paths: Paths,
        columns: Sequence[str] | None = None,
        cache_bytes: int = CACHE,
    ) -> None:
        import_extra('pyarrow', 'parquet')
        super().__init__(paths)
        if isinstance(columns, str) or (columns is not None and not all(type(name) is str for name in columns)):
            raise InvalidArgumentError(f'columns: expected a sequence of names, got {columns!r:.100}')
        self._requested = None if columns is None else tuple(dict.fromkeys(columns))
        self._columns: tuple[str, ...] = ()
        self._cache_bytes = check_integer('cache_bytes', cache_bytes, 0)
        self._group_stops = np.zeros(0, np.int64)  # cumulative rows up to the end of each row group, over all files
        self._owners = np.zeros(0, np.int64)  # the file of each row group
        self._firsts = np.zeros(0, np.int64)  # the first row group of each file
        self._caches = self._new_caches()

    def _arguments(self) -> tuple[Any, ...]:
        return self.paths, self._requested, self._cache_bytes

    # --- opening

    async def _read_indices(self) -> list[Footer]:
        for path in self.paths:
            await path.store.ready()
        return await gather([_read_footer(path) for path in self.paths])

    async def _open(self) -> None:
        await super()._open()
        first = self._indices[0]
        for footer in self._indices:
            if set(footer.names) != set(first.names):
                raise CorruptDatasetError(
                    f'{footer.path}: expected the columns of {first.path}, {sorted(first.names)}, got '
                    f'{sorted(footer.names)}'
                )
        self._columns = first.names if self._requested is None else self._requested
        self._choose(self._columns, first.names)
        counts = [len(footer.stops) for footer in self._indices]
        self._group_stops = np.concatenate(
            [footer.stops + (stop - footer.length) for footer, stop in zip(self._indices, self._stops, strict=True)]
        )
        self._owners = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        self._firsts = np.cumsum(counts, dtype=np.int64) - counts

    async def _close(self) -> None:
        await self._release()

    # --- properties

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of a row's columns."""
        self._check_open()
        return self._columns

    @property
    def _identity(self) -> tuple[Any, ...]:
        """The files, and the columns."""
        return *super()._identity, self._columns

    @property
    def _immediate(self) -> bool:
        return False  # decoding takes place in threads

    def copy(self) -> Self:
        """Return an independently closable source of the same files, with a cache of its own."""
        copy = super().copy()
        copy._caches = self._new_caches()
        return copy

    # --- reading

    @overload
    async def get(self, index: SupportsIndex, mask: Mask) -> dict[str, Any]: ...
    @overload
    async def get(self, index: SupportsIndex, mask: None = None) -> Datapoint_co: ...
    @overload
    async def get(self, index: slice | range, mask: Mask = None) -> dict[str, list[Any]]: ...
    async def get(self, index: SupportsIndex | slice | range, mask: Mask = None) -> Any:
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
            return await self._read(indices_of(index, len(self), self._name), names, _columns)
        values = await self._read(np.array([index_of(index, len(self), self._name)]), names, _columns)
        return {name: column[0] for name, column in values.items()}

    @overload
    async def fetch(self, indices: Any, mask: Mask) -> list[dict[str, Any]]: ...
    @overload
    async def fetch(self, indices: Any, mask: None = None) -> list[Datapoint_co]: ...
    async def fetch(self, indices: Any, mask: Mask = None) -> list[Any]:
        """Return many rows, reading all files, row groups and columns concurrently.

        Args:
          indices: a 1-D sequence of integers, in any order, repeated or negative; or a slice or range.
          mask: as for ``get``.

        Returns:
          The rows, in the order requested.
        """
        await self._ensure_open()
        positions = indices_of(indices, len(self), self._name)
        return await self._read(positions, self._choose(mask), _rows)

    def _choose(self, mask: Mask, available: Sequence[str] | None = None) -> tuple[str, ...]:
        """Return the columns that a mask selects.

        Raises:
          UnknownKeyError: for a column that does not exist.
        """
        if mask is None:
            return self._columns
        return names_in(mask, self._columns if available is None else available, 'columns', self._name)

    def _groups_of(self, positions: Ints) -> Ints:
        """Return the row group of each row, counted over all files."""
        return np.searchsorted(self._group_stops, positions, side='right')

    def _weight(self, group: int, names: tuple[str, ...]) -> int:
        """Estimate the decoded bytes of some columns of a row group."""
        owner = int(self._owners[group])
        return weight(self._indices[owner], group - int(self._firsts[owner]), names)

    async def _expect(self, groups: Sequence[int], names: tuple[str, ...]) -> None:
        """Start to read row groups that will be requested soon, and protect them from eviction."""
        cache = await self._caches.get()
        cache.expected = {(group, name) for group in groups for name in names}
        for group in groups:
            self._start_loading(cache, [(group, name) for name in names])

    async def _release(self) -> None:
        """Cancel prefetches that no caller is waiting for, and clear the cache."""
        if (cache := await self._caches.peek()) is not None:
            cache.clear()
            await cancel_idle({load.task for load in cache.loads.values()})

    def _new_caches(self) -> PerLoop[ColumnCache]:
        return PerLoop(functools.partial(ColumnCache, self._cache_bytes))  # per event loop, because tasks fill them

    async def _read(self, positions: Ints, names: tuple[str, ...], convert: Callable[[int, Values], T]) -> T:
        """Convert the values of rows, by column, in a thread."""
        if not len(positions) or not names:
            return convert(len(positions), {name: [] for name in names})
        cache = await self._caches.get()
        owners = self._groups_of(positions)
        groups = distinct(owners)
        keys = [(group, name) for group in groups for name in names]
        if damaged := cache.damaged.keys() & set(keys):
            raise CorruptError(cache.damaged[min(damaged)])
        columns = {key: cache.get(key) for key in keys}
        missing = [key for key, column in columns.items() if column is None]
        self._start_loading(cache, missing)
        loads = {key: cache.loads[key] for key in missing}
        await wait_shared({load.task for load in loads.values()})
        columns |= {key: load.columns[key] for key, load in loads.items()}
        return await offload(
            lambda: convert(len(positions), self._select_rows(positions, owners, groups, names, columns))
        )

    def _start_loading(self, cache: ColumnCache, keys: Sequence[Key]) -> None:
        """Start to load the columns that are neither cached nor being loaded, concurrently."""
        missing = [key for key in keys if not cache.has(key)]
        if missing:
            load = Load()
            load.task = background(self._load(cache, load, missing))
            cache.loads.update(dict.fromkeys(missing, load))

    async def _load(self, cache: ColumnCache, load: Load, keys: list[Key]) -> None:
        try:
            load.columns = await self._read_columns(cache, keys)
            cache.add(load.columns)
        finally:
            for key in keys:
                if cache.loads.get(key) is load:
                    del cache.loads[key]

    async def _read_columns(self, cache: ColumnCache, keys: list[Key]) -> dict[Key, Any]:
        """Read columns of row groups concurrently, and decode them in threads."""
        names_by_group: dict[int, list[str]] = {}
        for group, name in keys:
            names_by_group.setdefault(group, []).append(name)
        parts: list[tuple[int, Footer, int, tuple[str, ...]]] = []
        for group, names in names_by_group.items():
            owner = int(self._owners[group])
            # Opening a file in pyarrow takes longer the more columns it has: split columns into no more parts than
            # there are cores.
            count = min(len(names), -(-CORES // len(names_by_group)))
            parts += [
                (group, self._indices[owner], group - int(self._firsts[owner]), tuple(names[i::count]))
                for i in range(count)
            ]
        ranges = await offload(lambda: [chunk_ranges(footer, inner, names) for _, footer, inner, names in parts])
        chunks = await _read_ranges([footer for _, footer, _, _ in parts], ranges)

        def decode_part(i: int) -> dict[Key, Any]:
            group, footer, inner, names = parts[i]
            data, chunks[i] = chunks[i], []  # so that the bytes are freed after decoding
            try:
                return {(group, name): column for name, column in decode(footer, inner, names, data).items()}
            except CorruptError:
                for name in names:  # find the damaged column
                    try:
                        decode(footer, inner, (name,), data)
                    except CorruptError as error:
                        cache.damaged[group, name] = str(error)
                        raise
                raise

        return {key: column for part in await map_threads(decode_part, len(parts)) for key, column in part.items()}

    def _select_rows(
        self, positions: Ints, owners: Ints, groups: list[int], names: tuple[str, ...], columns: dict[Key, Any]
    ) -> Values:
        pa = import_extra('pyarrow', 'parquet')
        values: Values = {}
        for group in groups:
            targets = np.flatnonzero(owners == group) if len(groups) > 1 else slice(None)
            rows = positions[targets] - (int(self._group_stops[group - 1]) if group else 0)
            consecutive = len(rows) == 1 or bool((np.diff(rows) == 1).all())
            for name in names:
                column = columns[group, name]
                part = column.slice(int(rows[0]), len(rows)) if consecutive else column.take(pa.array(rows))
                group_values = values_of(part)
                if isinstance(targets, slice):
                    values[name] = group_values
                    continue
                column_values = values.setdefault(name, [None] * len(positions))
                for target, value in zip(targets.tolist(), group_values, strict=True):
                    column_values[target] = value
        return values


def distinct(groups: Ints) -> list[int]:
    """Return the different row groups of rows, in order."""
    changes = groups[np.flatnonzero(np.diff(groups, prepend=-1))]  # few for rows in order: np.unique hashes each value
    return [int(group) for group in np.unique(changes)]


def _columns(count: int, values: Values) -> Values:
    return values


def _rows(count: int, values: Values) -> list[dict[str, Any]]:
    """Return rows as dicts, given their values by column."""
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, column in values.items():
        for row, value in zip(rows, column, strict=True):
            row[name] = value
    return rows


async def _read_footer(path: Path) -> Footer:
    reply = await path.store.read(path.key, -path.store.config.tail)
    length = footer_length(path, reply.size, reply.data)
    tail = reply.data[-length:]
    if length > len(reply.data):
        start = reply.size - length
        rest = await path.store.read(path.key, start, start + length - len(reply.data), reply.version)
        if rest.version != reply.version:
            raise changed(f'{path}', f'{reply.version}', rest.version)
        tail = rest.data + reply.data
    return await offload(parse_footer, path, reply.size, reply.version, tail)


async def _read_ranges(
    footers: Sequence[Footer], ranges: Sequence[list[tuple[int, int]]]
) -> list[list[tuple[int, bytes]]]:
    """Read byte ranges of files concurrently. Returns (start, bytes) pairs for each file."""
    stores: dict[Store, list[int]] = {}
    for i, footer in enumerate(footers):
        stores.setdefault(footer.path.store, []).append(i)
    chunks: list[list[tuple[int, bytes]]] = [[] for _ in footers]

    async def read(store: Store, numbers: list[int]) -> None:
        jobs = []
        for i in numbers:
            limits = np.array(ranges[i], np.int64).reshape(-1, 2)
            jobs.append(Job(footers[i].path.key, limits[:, 0], limits[:, 1], footers[i].version))
        for i, file_data in zip(numbers, await read_all(store, jobs), strict=True):
            chunks[i] = [(start, data) for (start, _), data in zip(ranges[i], file_data, strict=True)]

    await gather([read(store, numbers) for store, numbers in stores.items()])
    return chunks

"""The row groups of Parquet files: their columns are read by range requests, decoded by pyarrow, and cached."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from granular._lazy import import_extra
from granular.aio.datasources.parquet.arrow_values import values_of
from granular.aio.datasources.parquet.column_cache import ColumnCache, Key, Load
from granular.aio.datasources.parquet.file import Footer, chunk_ranges, decode, weight
from granular.aio.runtime.background import background, cancel_idle, wait_shared
from granular.aio.runtime.loop_resources import PerLoop
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import CORES, map_threads, offload
from granular.aio.stores import Store
from granular.aio.stores.base import Request
from granular.aio.stores.fanout import read_all
from granular.errors import CorruptError, DatapointError
from granular.indexing import Ints

T = TypeVar('T')
Values = dict[str, list[Any]]
"""The values of rows, by column."""


class RowGroups:
    """The row groups of files, counted over all files, with a cache of their decoded columns.

    Args:
      footers: those of the files, in order.
      cache_bytes: limit on the bytes of decoded columns in the LRU cache.

    Attributes:
      footers: those of the files.
      stops: the cumulative number of rows up to the end of each row group, over all files.
    """

    def __init__(self, footers: Sequence[Footer], cache_bytes: int) -> None:
        self.footers, self._cache_bytes = footers, cache_bytes
        counts = [len(footer.stops) for footer in footers]
        ends = np.cumsum([footer.length for footer in footers], dtype=np.int64)
        stops = [footer.stops + (end - footer.length) for footer, end in zip(footers, ends.tolist(), strict=True)]
        self.stops: Ints = np.concatenate([np.zeros(0, np.int64), *stops])
        self._owners = np.repeat(np.arange(len(counts), dtype=np.int64), counts)  # the file of each row group
        self._firsts = np.cumsum(counts, dtype=np.int64) - counts  # the first row group of each file
        # Per event loop, because tasks fill them.
        self._caches: PerLoop[ColumnCache] = PerLoop(functools.partial(ColumnCache, cache_bytes))

    def copy(self) -> 'RowGroups':
        """Return the same row groups with a cache of their own."""
        return RowGroups(self.footers, self._cache_bytes)

    def of_rows(self, positions: Ints) -> Ints:
        """Return the row group of each row, counted over all files."""
        return np.searchsorted(self.stops, positions, side='right')

    def nbytes(self, group: int, names: tuple[str, ...]) -> int:
        """Estimate the decoded bytes of some columns of a row group."""
        owner = int(self._owners[group])
        return weight(self.footers[owner], group - int(self._firsts[owner]), names)

    async def expect(self, groups: Sequence[int], names: tuple[str, ...]) -> None:
        """Start to read row groups that will be requested soon, and protect them from eviction."""
        cache = await self._caches.get()
        cache.expected = {(group, name) for group in groups for name in names}
        for group in groups:
            self._start_loading(cache, [(group, name) for name in names])

    async def release(self) -> None:
        """Cancel prefetches that no caller is waiting for, and clear the cache."""
        if (cache := await self._caches.peek()) is not None:
            cache.clear()
            await cancel_idle({load.task for load in cache.loads.values()})

    async def read(self, positions: Ints, names: tuple[str, ...], convert: Callable[[int, Values], T]) -> T:
        """Convert the values of rows, by column, in a thread."""
        if not len(positions) or not names:
            return convert(len(positions), {name: [] for name in names})
        cache = await self._caches.get()
        owners = self.of_rows(positions)
        groups = distinct(owners)
        keys = [(group, name) for group in groups for name in names]
        if damaged := cache.damaged.keys() & set(keys):
            raise CorruptError(cache.damaged[min(damaged)])
        columns = {key: cache.get(key) for key in keys}
        missing = [key for key, column in columns.items() if column is None]
        self._start_loading(cache, missing)
        loads = {key: cache.loads[key] for key in missing}
        if await wait_shared({load.task for load in loads.values()}):
            columns |= {key: load.columns[key] for key, load in loads.items()}
        else:
            columns |= await self._read_columns(cache, missing)
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
                (group, self.footers[owner], group - int(self._firsts[owner]), tuple(names[i::count]))
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
            rows = positions[targets] - (int(self.stops[group - 1]) if group else 0)
            consecutive = len(rows) == 1 or bool((np.diff(rows) == 1).all())
            for name in names:
                column = columns[group, name]
                part = column.slice(int(rows[0]), len(rows)) if consecutive else column.take(pa.array(rows))
                try:
                    group_values = values_of(part)
                except MemoryError:
                    raise
                except (pa.ArrowException, ValueError) as error:
                    raise self._unconvertible(group, name, rows, part) from error
                if isinstance(targets, slice):
                    values[name] = group_values
                    continue
                column_values = values.setdefault(name, [None] * len(positions))
                for target, value in zip(targets.tolist(), group_values, strict=True):
                    column_values[target] = value
        return values

    def _unconvertible(self, group: int, name: str, rows: Ints, part: Any) -> DatapointError:
        """Create the error for values of a column of which one cannot be converted, such as text that is not UTF-8."""
        pa = import_extra('pyarrow', 'parquet')
        owner = int(self._owners[group])
        footer, inner = self.footers[owner], group - int(self._firsts[owner])
        first = int(footer.stops[inner - 1]) if inner else 0
        for i, row in enumerate(rows.tolist()):
            one = part.take(pa.array([i]))
            try:
                values_of(one)
            except (pa.ArrowException, ValueError) as error:
                return DatapointError(
                    f'{footer.path}: row {first + row}, column {name!r}: cannot be converted: {_reason(one, error)}: '
                    f'write text that is not UTF-8 as binary, or read other columns with columns='
                )
        return DatapointError(f'{footer.path}: row group {inner}, column {name!r}: cannot be converted at once')


def _reason(value: Any, error: Exception) -> str:
    try:
        value.validate(full=True)
    except ValueError as invalid:  # ArrowInvalid, which describes the layers around the value, too
        return f'{invalid}'.rpartition('Invalid: ')[2]
    return f'{error}'


def distinct(groups: Ints) -> list[int]:
    """Return the different row groups of rows, in order."""
    changes = groups[np.flatnonzero(np.diff(groups, prepend=-1))]  # few for rows in order: np.unique hashes each value
    return [int(group) for group in np.unique(changes)]


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
            jobs.append(Request(footers[i].path.key, limits[:, 0], limits[:, 1], footers[i].version))
        for i, file_data in zip(numbers, await read_all(store, jobs), strict=True):
            chunks[i] = [(start, data) for (start, _), data in zip(ranges[i], file_data, strict=True)]

    await gather([read(store, numbers) for store, numbers in stores.items()])
    return chunks

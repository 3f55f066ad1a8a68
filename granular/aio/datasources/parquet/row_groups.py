"""The row groups of Parquet files: their columns are read by range requests, decoded by pyarrow, and cached."""

import asyncio
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from granular._support.indexing import Ints, grouped, placed
from granular._support.lazy import import_extra
from granular._support.lru import LRU
from granular.aio.datasources.indexed_files import read_files
from granular.aio.datasources.parquet.file import Footer, chunk_ranges, decode, null_count, weight
from granular.aio.runtime.background import background, cancel_idle, wait_shared
from granular.aio.runtime.loop_resources import PerLoop
from granular.aio.runtime.pools import CORES
from granular.aio.runtime.threads import map_threads, offload
from granular.aio.stores import Request
from granular.errors import CorruptError, DatapointError
from granular.formats.arrow_values import values_of
from granular.metrics import DECODE, timed

T = TypeVar('T')
Values = dict[str, list[Any]]
"""The values of rows, by column."""


Key = tuple[int, str]
"""A row group, counted over all files, and a column."""

# The remedies for values that cannot be converted, by words of the error.
_REMEDIES: Final = {
    'UTF8': 'write text that is not UTF-8 as binary',
    'in a list with a null': 'write an integer in place of the null',
    'fields of one name': 'rename them',
    'nanoseconds': 'write times of day in microseconds',
}


class _Cache:
    """The decoded columns for one event loop: an LRU cache of at most ``limit`` bytes beside the expected columns."""

    def __init__(self, limit: int) -> None:
        expected: set[Key] = set()
        self.expected = expected  # they are not evicted
        self.columns: LRU[Key, Any] = LRU(limit, _bytes_of, in_use=lambda key, _: key in expected)
        self.loads: dict[Key, asyncio.Task[dict[Key, Any]]] = {}  # in flight
        # Errors of columns that cannot be decoded: another try would not help, as files are pinned to their versions.
        self.damaged: dict[Key, str] = {}

    def has(self, key: Key) -> bool:
        return key in self.columns or ((load := self.loads.get(key)) is not None and not load.cancelling())

    def expect(self, keys: Iterable[Key]) -> None:
        self.expected.clear()
        self.expected.update(keys)


def _bytes_of(column: Any) -> int:
    return int(column.nbytes)


class RowGroups:
    """The row groups of files, counted over all files, with an LRU cache of ``cache_bytes`` bytes of their decoded
    columns. ``stops`` is the cumulative number of rows up to the end of each.
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
        self._caches: PerLoop[_Cache] = PerLoop(functools.partial(_Cache, cache_bytes))

    def copy(self) -> 'RowGroups':
        """Return the same row groups with a cache of their own."""
        return RowGroups(self.footers, self._cache_bytes)

    def of_rows(self, positions: Ints) -> Ints:
        """Return the row group of each row, counted over all files."""
        return np.searchsorted(self.stops, positions, side='right')

    def nbytes(self, group: int, names: tuple[str, ...]) -> int:
        """Estimate the decoded bytes of some columns of a row group."""
        return weight(*self._place(group), names)

    def _place(self, group: int) -> tuple[Footer, int]:
        """Return the footer of the file of a row group, and the number of the row group there."""
        owner = int(self._owners[group])
        return self.footers[owner], group - int(self._firsts[owner])

    def may_have_nulls(self, name: str) -> bool:
        """Return whether a column may have nulls, also in its lists and structs, by the statistics."""
        return any(null_count(*self._place(group), name) != 0 for group in range(len(self.stops)))

    async def has_nulls(self, name: str) -> bool:
        """Return whether a value of a column is missing. Row groups are read where their statistics do not tell."""
        cache = await self._caches.get()
        for group in range(len(self.stops)):
            count = null_count(*self._place(group), name)
            if count is None:
                columns = await self._read_columns(cache, [(group, name)])
                count = columns[group, name].null_count
            if count:
                return True
        return False

    async def expect(self, groups: Sequence[int], names: tuple[str, ...]) -> None:
        """Start to read row groups that will be requested soon, and protect them from eviction."""
        cache = await self._caches.get()
        cache.expect((group, name) for group in groups for name in names)
        for group in groups:
            self._start_loading(cache, [(group, name) for name in names])

    async def release(self) -> None:
        """Cancel prefetches that no caller is waiting for, and clear the cache."""
        if (cache := await self._caches.peek()) is not None:
            cache.expect(())
            cache.columns.clear()
            await cancel_idle(set(cache.loads.values()))

    async def read(self, positions: Ints, names: tuple[str, ...], convert: Callable[[int, Values], T]) -> T:
        """Convert the values of rows, by column, in a thread."""
        if not len(positions) or not names:
            return convert(len(positions), {name: [] for name in names})
        cache = await self._caches.get()
        groups = grouped(self.of_rows(positions))
        keys = [(group, name) for group, _ in groups for name in names]
        if damaged := cache.damaged.keys() & set(keys):
            raise CorruptError(cache.damaged[min(damaged)])
        columns = {key: cache.columns.get(key) for key in keys}
        missing = [key for key, column in columns.items() if column is None]
        self._start_loading(cache, missing)
        loads = {key: cache.loads[key] for key in missing}
        if await wait_shared(set(loads.values())):
            columns |= {key: load.result()[key] for key, load in loads.items()}
        else:
            columns |= await self._read_columns(cache, missing)
        return await offload(lambda: convert(len(positions), self._select_rows(positions, groups, names, columns)))

    def _start_loading(self, cache: _Cache, keys: Sequence[Key]) -> None:
        """Start to load the columns that are neither cached nor being loaded, concurrently."""
        missing = [key for key in keys if not cache.has(key)]
        if missing:
            load = background(self._load(cache, missing))
            cache.loads.update(dict.fromkeys(missing, load))

    async def _load(self, cache: _Cache, keys: list[Key]) -> dict[Key, Any]:
        own = asyncio.current_task()
        try:
            columns = await self._read_columns(cache, keys)
            for key, column in columns.items():
                cache.columns.put(key, column)
            return columns
        finally:
            for key in keys:
                if cache.loads.get(key) is own:
                    del cache.loads[key]

    async def _read_columns(self, cache: _Cache, keys: list[Key]) -> dict[Key, Any]:
        """Read columns of row groups concurrently, and decode them in threads."""
        names_by_group: dict[int, list[str]] = {}
        for group, name in keys:
            names_by_group.setdefault(group, []).append(name)
        parts: list[tuple[int, Footer, int, tuple[str, ...]]] = []
        for group, names in names_by_group.items():
            # Opening a file in pyarrow takes longer the more columns it has: split columns into no more parts than
            # there are cores.
            count = min(len(names), -(-CORES // len(names_by_group)))
            parts += [(group, *self._place(group), tuple(names[i::count])) for i in range(count)]
        ranges = await offload(lambda: [chunk_ranges(footer, inner, names) for _, footer, inner, names in parts])
        chunks = await read_files(
            [
                (footer.path.store, Request(footer.path.key, *limits, footer.version))
                for (_, footer, _, _), limits in zip(parts, ranges, strict=True)
            ]
        )

        def decode_part(i: int) -> dict[Key, Any]:
            group, footer, inner, names = parts[i]
            starts, data, chunks[i] = ranges[i][0], chunks[i], []  # so that the bytes are freed after decoding
            try:
                return {(group, name): column for name, column in decode(footer, inner, names, starts, data).items()}
            except CorruptError:
                for name in names:  # find the damaged column
                    try:
                        decode(footer, inner, (name,), starts, data)
                    except CorruptError as error:
                        cache.damaged[group, name] = str(error)
                        raise
                raise

        decoded = await map_threads(timed(f'{DECODE}parquet', decode_part), len(parts))
        return {key: column for part in decoded for key, column in part.items()}

    def _select_rows(
        self, positions: Ints, groups: list[tuple[int, Ints]], names: tuple[str, ...], columns: dict[Key, Any]
    ) -> Values:
        pa = import_extra('pyarrow', 'parquet')
        values: dict[str, list[list[Any]]] = {name: [] for name in names}
        for group, targets in groups:
            rows = positions[targets] - (int(self.stops[group - 1]) if group else 0)
            consecutive = len(rows) == 1 or bool((np.diff(rows) == 1).all())
            for name in names:
                column = columns[group, name]
                part = column.slice(int(rows[0]), len(rows)) if consecutive else _take(column, rows)
                try:
                    values[name].append(values_of(part))
                except MemoryError:
                    raise
                except (pa.ArrowException, ValueError) as error:
                    raise self._unconvertible(group, name, rows, part) from error
        return {name: placed(groups, column, len(positions)) for name, column in values.items()}

    def _unconvertible(self, group: int, name: str, rows: Ints, part: Any) -> DatapointError:
        """Create the error for values of a column of which one cannot be converted, such as text that is not UTF-8."""
        pa = import_extra('pyarrow', 'parquet')
        footer, inner = self._place(group)
        first = int(footer.stops[inner - 1]) if inner else 0
        for i, row in enumerate(rows.tolist()):
            one = part.slice(i, 1)
            try:
                values_of(one)
            except (pa.ArrowException, ValueError) as error:
                reason = _reason(one, error)
                remedy = next((f'{remedy}, or ' for words, remedy in _REMEDIES.items() if words in reason), '')
                return DatapointError(
                    f'{footer.path}: row {first + row}, column {name!r}: cannot be converted: {reason}: '
                    f'{remedy}read other columns with columns='
                )
        return DatapointError(f'{footer.path}: row group {inner}, column {name!r}: cannot be converted at once')


def _take(column: Any, rows: Ints) -> Any:
    """Return the values of rows of a chunked array, one by one of types of which pyarrow takes none, such as views."""
    pa = import_extra('pyarrow', 'parquet')
    try:
        return column.take(pa.array(rows))
    except pa.ArrowNotImplementedError:
        return pa.chunked_array([chunk for row in rows.tolist() for chunk in column.slice(row, 1).chunks], column.type)


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

"""The row groups of Parquet files: read by byte ranges, decoded in threads, and cached."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from granular._lazy import need
from granular.aio.datasources.parquet.arrow_values import values_of
from granular.aio.datasources.parquet.column_cache import ColumnCache, Key, Load
from granular.aio.datasources.parquet.file import Footer, chunks, decode, estimate_nbytes
from granular.aio.runtime.loops import PerLoop, cancel_idle, gather, shared_task, wait_shared
from granular.aio.runtime.threads import CORES, map_threads, offload
from granular.aio.stores import Store
from granular.aio.stores.fanout import Job, read_all
from granular.errors import CorruptError
from granular.indexing import Ints


class RowGroups:
    """The row groups of Parquet files, counted over all files.

    Args:
      footers: the footers of the files.
      cache_bytes: as for ``ParquetDataSource``.

    Attributes:
      footers: the footers of the files.
      length: the number of rows of all files.
    """

    def __init__(self, footers: list[Footer], cache_bytes: int) -> None:
        self.footers, self._cache_bytes = footers, cache_bytes
        counts = [len(footer.stops) for footer in footers]
        rows = [int(footer.stops[-1]) if len(footer.stops) else 0 for footer in footers]
        bases = np.cumsum(rows, dtype=np.int64) - rows
        # The cumulative number of rows up to the end of each row group.
        stops = [footer.stops + base for footer, base in zip(footers, bases.tolist(), strict=True)]
        self._stops = np.concatenate([np.zeros(0, np.int64), *stops])
        self._owners = np.repeat(np.arange(len(counts), dtype=np.int64), counts)  # the file of each row group
        self._firsts = np.cumsum(counts, dtype=np.int64) - counts  # the first row group of each file
        self.length = sum(rows)
        # Per event loop, because tasks fill them.
        self._caches = PerLoop(functools.partial(ColumnCache, cache_bytes))

    def copy(self) -> 'RowGroups':
        """Return the same row groups with a cache of their own."""
        return RowGroups(self.footers, self._cache_bytes)

    def groups_of(self, indices: Ints) -> Ints:
        """Return the row group of each row, counted over all files."""
        return np.searchsorted(self._stops, indices, side='right')

    def estimate_nbytes(self, group: int, names: tuple[str, ...]) -> int:
        """Estimate the decoded bytes of some columns of a row group."""
        owner = int(self._owners[group])
        return estimate_nbytes(self.footers[owner], group - int(self._firsts[owner]), names)

    async def prefetch(self, groups: Sequence[int], names: tuple[str, ...]) -> None:
        """Start to read row groups that will be requested soon, and protect them from eviction."""
        cache = await self._caches.get()
        cache.expected = {(group, name) for group in groups for name in names}
        for group in groups:
            self._start(cache, [(group, name) for name in names])

    async def release(self) -> None:
        """Cancel prefetches that no caller is waiting for, and clear the cache."""
        if (cache := await self._caches.peek()) is not None:
            cache.clear()
            await cancel_idle({load.task for load in cache.loads.values()})

    async def read(self, indices: Ints, names: tuple[str, ...]) -> dict[str, list[Any]]:
        """Return the values of rows, by column."""
        if not len(indices) or not names:
            return {name: [] for name in names}
        cache = await self._caches.get()
        owners = self.groups_of(indices)
        groups = np.unique(owners).tolist()
        keys = [(group, name) for group in groups for name in names]
        if damaged := cache.damaged.keys() & set(keys):
            raise CorruptError(cache.damaged[min(damaged)])
        columns = {key: cache.take(key) for key in keys}
        missing = [key for key, column in columns.items() if column is None]
        self._start(cache, missing)
        loads = {key: cache.loads[key] for key in missing}
        await wait_shared({load.task for load in loads.values()})
        columns |= {key: load.columns[key] for key, load in loads.items()}
        return await offload(self._take, indices, owners, groups, names, columns)

    def _start(self, cache: ColumnCache, keys: Sequence[Key]) -> None:
        """Start to load the columns that are neither cached nor being loaded, concurrently."""
        missing = [key for key in keys if not cache.has(key)]
        if missing:
            load = Load()
            load.task = shared_task(self._load(cache, load, missing))
            cache.loads.update(dict.fromkeys(missing, load))

    async def _load(self, cache: ColumnCache, load: Load, keys: list[Key]) -> None:
        try:
            load.columns = await self._decode(cache, keys)
            cache.add(load.columns)
        finally:
            for key in keys:
                if cache.loads.get(key) is load:
                    del cache.loads[key]

    async def _decode(self, cache: ColumnCache, keys: list[Key]) -> dict[Key, Any]:
        """Read columns of row groups concurrently, and decode them in threads."""
        names_of: dict[int, list[str]] = {}
        for group, name in keys:
            names_of.setdefault(group, []).append(name)
        parts: list[tuple[int, Footer, int, tuple[str, ...]]] = []
        for group, names in names_of.items():
            owner = int(self._owners[group])
            # Opening a file in pyarrow takes longer the more columns it has: split columns into no more parts than
            # there are cores.
            count = min(len(names), -(-CORES // len(names_of)))
            parts += [
                (group, self.footers[owner], group - int(self._firsts[owner]), tuple(names[i::count]))
                for i in range(count)
            ]
        ranges = await offload(lambda: [chunks(footer, inner, names) for _, footer, inner, names in parts])
        contents = await _read_ranges([footer for _, footer, _, _ in parts], ranges)

        def decode_part(i: int) -> dict[Key, Any]:
            group, footer, inner, names = parts[i]
            content, contents[i] = contents[i], []
            try:
                return {(group, name): column for name, column in decode(footer, inner, names, content).items()}
            except CorruptError as error:
                failure = error
            if damage := _find_damage(footer, inner, names, content):
                name, failure = damage
                cache.damaged[group, name] = str(failure)
            raise failure

        return {key: column for part in await map_threads(decode_part, len(parts)) for key, column in part.items()}

    def _take(
        self, indices: Ints, owners: Ints, groups: list[int], names: tuple[str, ...], columns: dict[Key, Any]
    ) -> dict[str, list[Any]]:
        pa = need('pyarrow', 'parquet')
        out: dict[str, list[Any]] = {name: [None] * len(indices) for name in names}
        for group in groups:
            positions = np.flatnonzero(owners == group)
            rows = indices[positions] - (int(self._stops[group - 1]) if group else 0)
            straight = len(rows) == 1 or bool((np.diff(rows) == 1).all())
            for name in names:
                column = columns[group, name]
                part = column.slice(int(rows[0]), len(rows)) if straight else column.take(pa.array(rows))
                values, target = values_of(part), out[name]
                for position, value in zip(positions.tolist(), values, strict=True):
                    target[position] = value
        return out


def _find_damage(
    footer: Footer, group: int, names: tuple[str, ...], content: list[tuple[int, bytes]]
) -> tuple[str, CorruptError] | None:
    """Return the first column that cannot be decoded, and its error."""
    for name in names:
        try:
            decode(footer, group, (name,), content)
        except CorruptError as error:
            return name, error
    return None


async def _read_ranges(
    footers: Sequence[Footer], ranges: Sequence[list[tuple[int, int]]]
) -> list[list[tuple[int, bytes]]]:
    """Read byte ranges of files concurrently. Returns (start, bytes) pairs for each file."""
    stores: dict[Store, list[int]] = {}
    for i, footer in enumerate(footers):
        stores.setdefault(footer.path.store, []).append(i)
    out: list[list[tuple[int, bytes]]] = [[] for _ in footers]

    async def read(store: Store, numbers: list[int]) -> None:
        jobs = []
        for i in numbers:
            limits = np.array(ranges[i], np.int64).reshape(-1, 2)
            jobs.append(Job(footers[i].path.key, limits[:, 0], limits[:, 1], footers[i].version))
        for i, contents in zip(numbers, await read_all(store, jobs), strict=True):
            out[i] = [(start, data) for (start, _), data in zip(ranges[i], contents, strict=True)]

    await gather([read(store, numbers) for store, numbers in stores.items()])
    return out

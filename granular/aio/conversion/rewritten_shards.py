"""The shards of a rewrite: whole bags are copied, the records of others are read and written."""

import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final

import numpy as np

from granular._support.indexing import Ints
from granular.aio.bags.copied import CopiedBag, copied_sizes
from granular.aio.conversion.changed_keys import ChangedKeys
from granular.aio.conversion.chosen import AHEAD, chunk_of, cut_evenly
from granular.aio.conversion.dataset_sources import DatasetSources
from granular.aio.datasets.column_reads import checked_references
from granular.aio.datasets.sharded_writer import length_of_shard
from granular.aio.datasets.stored_columns import StoredColumn
from granular.aio.datasets.writer import DatasetWriter, append_columns, copy_bags, write_anew
from granular.aio.paths.path import Path
from granular.aio.runtime.lifecycle import ensure_open
from granular.aio.runtime.readahead import whole_pages
from granular.aio.runtime.tasks import for_each
from granular.errors import AlreadyExistsError
from granular.formats.layout import Layout, shard_name

_TOGETHER: Final = 16  # shards whose bags are looked up at a time

Ranges = Mapping[int, tuple[int, int]]


class RewrittenShards:
    """The shards of a rewrite, for ``Run``: shard ``i`` has the rows in the range ``ranges[i]``."""

    skip = False

    def __init__(
        self,
        directory: Path,
        sources: DatasetSources,
        rows: Ints,
        ranges: Ranges,
        keys: ChangedKeys,
        is_sharded: bool,
        layout: Layout,
        checksums: bool,
    ) -> None:
        self.directory = directory
        self._sources = sources
        self._rows = rows
        self._ranges = ranges
        self._keys = keys
        self.is_sharded = is_sharded
        self._layout, self._checksums = layout, checksums
        self._copies: dict[int, dict[str, CopiedBag]] = {}  # to each shard, by key
        self.copied: int = 0  # bytes

    def plan(self) -> dict[str, Any]:
        """Return what a run is recognised by."""
        bounds = np.array(sorted(self._ranges.values()), np.int64)
        chosen = hashlib.sha256(self._rows.astype('<i8').tobytes() + bounds.astype('<i8').tobytes())
        return {
            'source': self._sources.name, 'format': 'rewrite', 'files': self._sources.digest(),
            'records': len(self._rows), 'shards': len(self._ranges), 'rows': chosen.hexdigest()[:16],
            'spec': self._keys.spec, 'keys': self._keys.origins, 'values': self._keys.digests(),
            'layout': self._layout, 'checksums': self._checksums,
        }  # fmt: skip

    def folder(self, number: int) -> Path:
        return self.directory / shard_name(number) if self.is_sharded else self.directory

    def shard_of(self, record: int) -> int:
        starts = sorted(start for start, _ in self._ranges.values())
        return int(np.searchsorted(starts, record, 'right')) - 1

    async def length_of(self, number: int) -> int | None:
        return await length_of_shard(self.folder(number), self._keys.spec, self._layout)

    async def prepare(self, finished: Collection[int]) -> None:
        """Find the bags that are copied to the shards that are not finished, and the checksums of what is read for
        these.
        """
        left = [number for number in self._ranges if number not in finished]
        await for_each(left, self._find_copies, _TOGETHER)
        wanted: dict[int, set[str]] = {}
        for number in left:
            first, end = self._ranges[number]
            owners = np.unique(np.searchsorted(self._sources.stops, self._rows[first:end], 'right'))
            for shard in owners.tolist():
                wanted.setdefault(shard, set()).update(self._read(self._copies[number]))
        self._sources = await self._sources.verifying(wanted)

    def _read(self, copies: Collection[str]) -> set[str]:
        """Return the keys of the source that are read for a shard, given the keys of the result that are copied."""
        out: set[str] = set()
        for target in self._keys.spec:
            if target not in copies:
                new = self._keys.values.get(target)
                out.update([self._keys.origins[target]] if new is None else new.keys)
        return out

    async def start(self, number: int, first: int, end: int, tell: Callable[[int], Awaitable[None]]) -> DatasetWriter:
        """Write a shard, and return its writer: close it to copy whole bags, and to publish the shard."""
        folder = self.folder(number)
        writer = DatasetWriter(folder, self._keys.spec, None, self._layout, 'discard', self._checksums)
        write_anew(writer, False, False)
        whole = self._sources.whole_shard(self._rows[first:end])
        copies = self._copies[number]
        copy_bags(writer, copies)
        await ensure_open(writer)
        if len(writer):
            await writer.abort()
            raise AlreadyExistsError(f'{folder}: another writer has finished it meanwhile')
        written = [target for target in self._keys.spec if target not in copies]
        stored = {target: self._keys.origins[target] for target in written if target not in self._keys.values}
        new = [target for target in written if target in self._keys.values]
        read = self._read(copies)

        async def fetch(positions: range) -> dict[str, StoredColumn]:
            rows = self._rows[positions.start : positions.stop]
            found = await self._sources.read(rows, read, self._checksums)
            columns: dict[str, StoredColumn] = {target: found[origin] for target, origin in stored.items()}
            columns |= await self._keys.new_columns(new, rows, found)
            if copies and whole is not None:
                columns |= await self._references(copies, whole, rows)
            return columns

        try:
            step = cut_evenly(end - first, chunk_of(self._sources, read, self._rows[first:end]))
            async with contextlib.aclosing(whole_pages(fetch, end, step, AHEAD, first)) as chunks:
                async for columns in chunks:
                    count = min(step, end - first)
                    await append_columns(writer, columns, count)
                    await tell(count)
                    first += count
        except BaseException:
            await writer.abort()
            raise
        self.copied += sum(bag.size for bag in copies.values())
        return writer

    async def _find_copies(self, number: int) -> None:
        """Find the bags that are copied to a shard as they are, if it has the datapoints of one of the source."""
        first, end = self._ranges[number]
        rows, folder = self._rows[first:end], self.folder(number)
        copies = self._copies[number] = dict[str, CopiedBag]()
        if (whole := self._sources.whole_shard(rows)) is None:
            return
        source = self._sources.shards[whole]
        if source.layout != self._layout:
            return
        for target, origin in self._keys.origins.items():
            if (new := self._keys.values.get(target)) is not None and not new.keeps(rows):
                continue
            bag = source.bags[origin]
            is_whole = source.layout == 'refs' or bag.length == source.length
            sizes = await copied_sizes(bag, self._checksums) if is_whole else None
            if sizes is not None:
                copies[target] = CopiedBag(folder / f'{target}.bag', bag, sizes)
        if len(copies) == len(self._keys.spec) and self._layout == 'columns' and not folder.store.local:
            # A bag that is written decides between writers, as a copy by the store replaces what is there.
            del copies[min(copies, key=lambda target: copies[target].size)]

    async def _references(self, copies: Mapping[str, CopiedBag], whole: int, rows: Ints) -> dict[str, StoredColumn]:
        """Return the references of datapoints to the records of bags that are copied."""
        source = self._sources.shards[whole]
        indices = rows - self._sources.starts[whole]
        if source.refs is None:
            return {target: (indices, np.ones(len(indices), np.int64)) for target in copies}
        firsts, counts = await checked_references(source, indices)
        numbers = {key: i for i, key in enumerate(source.spec)}
        places = {target: numbers[self._keys.origins[target]] for target in copies}
        return {target: (firsts[:, place], counts[:, place]) for target, place in places.items()}

"""The datasets that a rewrite reads: their datapoints, one dataset behind the other, and their shards."""

import contextlib
import hashlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Self

import numpy as np

from granular._support.indexing import Ints
from granular.aio.datasets.column_reads import JoinedColumn, join_columns, read_joined_columns
from granular.aio.datasets.columns import Columns
from granular.aio.datasets.index import index_path
from granular.aio.datasets.picks import Concatenation, Datasets, Picks
from granular.aio.datasets.reader import DatapointReader
from granular.aio.datasets.sharded_reader import AnyReader, ShardedDatasetReader, columns_of_shards, compare_shards
from granular.aio.datasources.detect import open as open_dataset
from granular.aio.paths.copy import in_one_store, is_within
from granular.aio.paths.path import Path, has_optional
from granular.aio.runtime.tasks import for_each, gather
from granular.aio.runtime.threads import offload
from granular.errors import InvalidArgumentError, SpecError
from granular.formats.checksums import SUFFIX
from granular.formats.layout import Layout, Spec

_TOGETHER: Final = 32  # bags whose checksums are read at a time


class DatasetSources:
    """Open datasets of one spec. The index of a datapoint is its place among those of all datasets.

    ``checked`` tells for each dataset whether it has checksums; ``stack`` closes what is opened.
    """

    def __init__(self, readers: Sequence[AnyReader], checked: Sequence[bool], stack: contextlib.AsyncExitStack) -> None:
        self._readers = readers
        self._checked = checked
        self._stack = stack
        first, more = readers[0].directory, len(readers) - 1
        self.name = f'{first} and {more} more' if more else f'{first}'
        self.shards: list[Columns] = [columns for reader in readers for columns in columns_of_shards(reader)]
        lengths = np.array([columns.length for columns in self.shards], np.int64)
        self.stops: Ints = np.cumsum(lengths)
        self.starts: Ints = self.stops - lengths
        self._positions = Concatenation(lengths)
        # Of each dataset, those of its shards, once they are read, and the number of its first shard.
        self._datasets: list[Datasets | None] = [None] * len(readers)
        self._firsts: Ints = np.cumsum([0, *(len(columns_of_shards(reader)) for reader in readers)])

    @classmethod
    async def open(cls, paths: Sequence[Path], target: Path, stack: contextlib.AsyncExitStack) -> Self:
        """Open datasets until the stack is closed; refuse a target that is, or is in, one of them, or the reverse."""
        readers: list[Any] = []
        for path in paths:
            if in_one_store(target, path) and (await is_within(target, path) or await is_within(path, target)):
                raise InvalidArgumentError(
                    f'{target}: is {path}, or one of them is in the other: a dataset is not rewritten in place, as it '
                    f'may be read: pass another folder'
                )
            reader = await open_dataset(path, None)
            await stack.enter_async_context(contextlib.aclosing(reader))
            if not isinstance(reader, DatapointReader):
                raise InvalidArgumentError(
                    f'{path}: is no dataset of granular: make one with granular.convert, or `granular convert`'
                )
            readers.append(reader)
            if reader.spec != readers[0].spec:
                raise SpecError(f'{path}: {_difference(reader.spec, readers[0].spec)} {readers[0].directory} has')
        for reader in readers:
            await compare_shards(reader)
        return cls(readers, await gather([_has_checksums(reader) for reader in readers]), stack)

    def __len__(self) -> int:
        return int(self.stops[-1])

    @property
    def spec(self) -> Spec:
        return self.shards[0].spec

    @property
    def layout(self) -> Layout:
        return self.shards[0].layout

    @property
    def is_sharded(self) -> bool:
        return len(self._readers) > 1 or isinstance(self._readers[0], ShardedDatasetReader)

    @property
    def have_checksums(self) -> bool:
        """True if the first dataset has checksums."""
        return self._checked[0]

    @property
    def max_gap(self) -> int:
        """The largest number of bytes between two records that is read with them."""
        return max(reader.directory.store.merge.max_gap for reader in self._readers)

    async def have_index(self) -> bool:
        sharded = [reader for reader in self._readers if isinstance(reader, ShardedDatasetReader)]
        return any(await gather([has_optional(index_path(reader.directory)) for reader in sharded]))

    def digest(self) -> str:
        """Return a digest of the names, lengths, sizes and versions of all bags."""
        found = hashlib.sha256()
        for columns in self.shards:
            bags = {key: (bag.length, bag.size, bag.target.version) for key, bag in columns.all_bags.items()}
            found.update(repr((columns.name, columns.length, bags)).encode())
        return found.hexdigest()[:16]

    def size_of(self, keys: Collection[str]) -> int:
        """Return the bytes of the bags of some keys."""
        return sum(columns.bags[key].size for columns in self.shards for key in keys)

    def whole_shard(self, indices: Ints) -> int | None:
        """Return the shard of which these are all datapoints, in order; None if there is none."""
        if not len(indices):
            return None
        shard = int(np.searchsorted(self.stops, indices[0], 'right'))
        start, stop = int(self.starts[shard]), int(self.stops[shard])
        is_whole = len(indices) == stop - start and np.array_equal(indices, np.arange(start, stop))
        return shard if is_whole else None

    async def verifying(self, keys: Mapping[int, Collection[str]]) -> Self:
        """Return the same datasets, which compare what they read of some keys of each shard, and the references to it,
        with their checksums, if the dataset has any.
        """
        readers = [reader.copy() for reader in self._readers]
        for reader in readers:
            self._stack.push_async_callback(reader.aclose)
        copies = type(self)(readers, self._checked, self._stack)
        checked = [
            is_checked
            for reader, is_checked in zip(readers, self._checked, strict=True)
            for _ in columns_of_shards(reader)
        ]
        bags = [
            bag
            for shard, own in keys.items()
            if checked[shard]
            for key, bag in copies.shards[shard].all_bags.items()
            if key in own or bag is copies.shards[shard].refs
        ]
        await for_each(bags, lambda bag: bag.read_sums(), _TOGETHER)
        return copies

    async def read(self, indices: Ints, keys: Collection[str], summed: bool = False) -> dict[str, JoinedColumn]:
        """Return records as they are stored, by key; with ``summed``, with the checksums of all."""
        if not keys or not len(indices):
            return {}
        numbers, counts, within, order = self._positions.divide(indices)
        edges = np.searchsorted(numbers, self._firsts).tolist()
        ends = np.append(0, np.cumsum(counts))
        read: list[list[JoinedColumn]] = []
        for i, (first, stop) in enumerate(itertools.pairwise(edges)):
            if first < stop:
                own = within[ends[first] : ends[stop]]
                picks = Picks(self._datasets_of(i), numbers[first:stop] - self._firsts[i], counts[first:stop], own)
                read.append(await read_joined_columns(picks, picks.datasets.first.choose(tuple(keys)), summed))
        names = [key for key in self.spec if key in keys]
        columns = {key: join_columns(own) for key, own in zip(names, zip(*read, strict=True), strict=True)}
        if order is None:
            return columns
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return await offload(lambda: {key: column.taken(places) for key, column in columns.items()})

    def _datasets_of(self, reader: int) -> Datasets:
        if (datasets := self._datasets[reader]) is None:
            first, stop = self._firsts[reader : reader + 2].tolist()
            datasets = self._datasets[reader] = Datasets.of(self.shards[first:stop])
        return datasets

    async def fetch(self, indices: Ints, keys: Collection[str]) -> dict[str, list[Any]]:
        """Return records as they are stored, by key: of a sequence, lists of them."""
        if not len(indices):
            return {key: [] for key in keys}
        return {key: column.by_datapoint() for key, column in (await self.read(indices, keys)).items()}


async def _has_checksums(reader: AnyReader) -> bool:
    """Return whether the first shard of a dataset has checksums."""
    bag = next(iter(columns_of_shards(reader)[0].all_bags.values()))
    return await has_optional(bag.require_path().with_suffix(SUFFIX))


def _difference(spec: Spec, expected: Spec) -> str:
    """Describe how a spec differs, for a sentence that ends in the dataset that has the expected one."""
    differ = {key: (spec.get(key), expected.get(key)) for key in {**expected, **spec}}
    key, (own, other) = next((key, pair) for key, pair in differ.items() if pair[0] != pair[1])
    texts = [f'key {key!r} of type {kind!r}' if kind else f'no key {key!r}' for kind in (own, other)]
    remedy = 'rewrite one of them first, with drop, rename or values'
    return f'datasets are concatenated if their specs are equal: {remedy}: it has {texts[0]}, and {texts[1]} is what'

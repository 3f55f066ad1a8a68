"""The requests that fetch datapoints of a dataset, by its tables."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

import granular
from granular import metrics
from granular.aio.datasets.columns import Columns, Picks, record_rows
from granular.aio.datasets.sharded_reader import columns_of_shards, indexed_shards_of
from granular.aio.stores import ranges
from granular.cli.describe import open_any, refuse_other_formats
from granular.config import KiB
from granular.errors import BucketNotFoundError, InvalidArgumentError, NotFoundError
from granular.indexing import Ints
from granular.sync.datasets import DatasetReader, ShardedDatasetReader

CACHE_BLOCK: Final = 64 * KiB
_ADDRESS: Final = 46  # bits of a position in an object


class Planner:
    """Plans the requests for datapoints of an opened dataset, by the tables that its reader holds.

    Args:
      keys: the keys that are read; None for all.
      cached: the keys that the reader holds in memory (``cache_keys``).
    """

    def __init__(self, path: granular.Path, keys: Sequence[str] | None = None, cached: Sequence[str] = ()) -> None:
        self._reader, self.opening, self.opening_nbytes = _open(path, cached)
        self.indexed = indexed_shards_of(self._reader.aio) is not None
        self._reads_references = self._reader.layout == 'refs' and 'refs' not in cached and not self.indexed
        if self._reads_references or self.indexed:
            # References tell which records a datapoint has, so that they are held here in any case. An index holds
            # tables in another form.
            held = {*cached, 'refs'} if self._reader.layout == 'refs' else cached
            self._reader.close()
            self._reader, _, _ = _open(path, tuple(held), index=False)
        self._parts: list[Columns] = columns_of_shards(self._reader.aio)
        self.lengths = np.array([part.length for part in self._parts], np.int64)
        self._stops = np.cumsum(self.lengths)
        self._cached = frozenset(cached)
        self.concurrency = path.store.config.concurrency
        self._choices = self._parts[0].choose(keys)
        self.merge, self.local = path.store.merge, path.store.local
        self.length = int(self._stops[-1])
        if not self.length:
            raise InvalidArgumentError(f'{path}: expected a dataset with datapoints, got an empty one')
        names = [choice.field.key for choice in self._choices if choice.field.key not in self._cached]
        self.rounds = int(self._reads_references) + bool(names)
        self.nbytes = sum(part.bags[name].datasize for part in self._parts for name in names)
        self.blocks = sum(-(-part.bags[name].size // CACHE_BLOCK) for part in self._parts for name in names)
        if self._reads_references:
            self.blocks += sum(-(-part.refs.size // CACHE_BLOCK) for part in self._parts if part.refs is not None)

    def close(self) -> None:
        self._reader.close()

    def reads(self, indices: Ints) -> tuple[int, int]:
        """Return the requests, and the bytes of their replies, that fetch these datapoints together."""
        shards = np.searchsorted(self._stops, indices, side='right')
        references: list[tuple[Ints, Ints]] = []
        records: list[tuple[Ints, Ints]] = []
        for number in np.unique(shards).tolist():
            part = self._parts[number]
            own = indices[shards == number] - (self._stops[number] - self.lengths[number])
            base = number * (len(self._choices) + 1)
            if self._reads_references:
                references.append(self._located(part.refs, own, base))
            if part.references is None:
                firsts, counts = own[:, None], np.ones((1, 1), np.int64)
            else:
                firsts, counts = part.references.at(own)
            for i, choice in enumerate(self._choices, 1):
                if choice.field.key not in self._cached:
                    ((bag,), _, wanted), _ = record_rows(Picks.of(part, own), choice, (firsts, counts))
                    records.append(self._located(bag, wanted, base + i))
        plans = [self._planned(found) for found in (references, records)]
        return sum(count for count, _ in plans), sum(nbytes for _, nbytes in plans)

    def _located(self, bag: Any, indices: Ints, number: int) -> tuple[Ints, Ints]:
        if (limits := bag.limits(indices)) is None:
            raise InvalidArgumentError(f'{bag.name}: expected its table in memory')
        return limits[0] + (number << _ADDRESS), limits[1] + (number << _ADDRESS)

    def _planned(self, located: Sequence[tuple[Ints, Ints]]) -> tuple[int, int]:
        if not located:
            return 0, 0
        starts, stops = (np.concatenate([limits[i] for limits in located]) for i in (0, 1))
        plan = ranges.plan(starts, stops, max_gap=self.merge.max_gap)
        sizes = plan.stops - plan.starts
        return int((-(-sizes // self.merge.max_request)).sum()), int(sizes.sum())


def _open(
    path: granular.Path, cached: Sequence[str], index: bool = True
) -> tuple[DatasetReader | ShardedDatasetReader, int, int]:
    """Open a dataset. Returns its reader, and the number of requests that opened it and the bytes of their replies."""
    store = path.store
    # Caches would hide requests.
    config = dataclasses.replace(store.config, index_cache='', cache_dir='')
    plain = granular.Path.of(store.with_config(config), path.key)
    readers: tuple[Callable[[], DatasetReader | ShardedDatasetReader], ...] = (
        lambda: DatasetReader(plain, None, cache_keys=cached),
        lambda: ShardedDatasetReader(plain, None, cache_keys=cached, index=index),
    )
    for open_reader in readers:
        before = metrics.snapshot()
        try:
            reader = open_reader()
            reader.spec  # noqa: B018 - which opens it
        except BucketNotFoundError:
            raise
        except NotFoundError:
            continue
        now = metrics.snapshot()
        requests, nbytes = (now.total(name) - before.total(name) for name in ('requests', 'bytes'))
        return reader, requests, nbytes
    refuse_other_formats(path)
    open_any(plain, None).close()  # usually raises an error that says what is there
    raise NotFoundError(f'{path}: is not a dataset: it has neither a spec.json nor shards')

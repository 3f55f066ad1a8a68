"""Samplers: the datapoint and the random generator of each index, as in Google Grain."""

import bisect
import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from granular._support.indexing import MOST, Ints, check_index, check_integer
from granular._support.other_names import answering
from granular.aio.pipeline.nodes.identities import identity_of
from granular.aio.pipeline.nodes.indices import ENDLESS, shuffled
from granular.aio.pipeline.nodes.patterns import Shares
from granular.aio.pipeline.nodes.source import Node, Source
from granular.aio.pipeline.orders import MAX_SEED, Index
from granular.aio.pipeline.position import EvenTurns
from granular.aio.pipeline.shards import RANK_ARGUMENTS, ShardOptions, as_shard
from granular.aio.runtime.threads import offload
from granular.aio.runtime.user_functions import call_user
from granular.errors import InvalidArgumentError, OutOfRangeError


@dataclasses.dataclass(slots=True)
class RecordMetadata:
    """The datapoint that a sampler chose for an index.

    Attributes:
      index: index of the sampler.
      record_key: index of the datapoint in the data source.
      rng: random generator for its transformations; None if the sampler has no seed.
    """

    index: int
    record_key: int | None = None
    rng: np.random.Generator | None = None

    def __str__(self) -> str:
        return f'RecordMetadata(index={self.index}, record_key={self.record_key}, rng={self.rng})'


class IndexSampler:
    """Datapoints in order or shuffled, for a number of epochs; each shard has a contiguous part of the data.

    Indices interleave the shards: shard ``s`` has the indices ``s``, ``s + shard_count``, and so on. Shards of unequal
    length are exact: each yields all of its datapoints once per epoch (Grain drops or repeats some)::

        sampler = granular.grain.samplers.IndexSampler(len(reader), shuffle=True, num_epochs=3, seed=0)

    Args:
      num_records: number of datapoints in the data source.
      shard_options: part of the data for this process.
      shuffle: True to shuffle each epoch differently, in the order of ``MapDataset.shuffle``.
      num_epochs: number of epochs; None for infinitely many.
      seed: integer from 0 to 2**32 - 1, required to shuffle; index ``index`` gets the random generator
        ``Philox(key=seed + index)``.
    """

    num_records: int
    shuffle: bool

    @answering(**RANK_ARGUMENTS, weights='nothing: oversample() and MapDataset.mix(datasets, weights) choose shares')
    def __init__(
        self,
        num_records: int,
        shard_options: ShardOptions | None = None,
        shuffle: bool = False,
        num_epochs: int | None = None,
        seed: int | None = None,
    ) -> None:
        if shuffle and seed is None:
            raise InvalidArgumentError('shuffle=True requires a seed')
        self.num_records, self.shuffle = check_integer('num_records', num_records, 1, MOST), shuffle
        self.num_epochs: int | None = None if num_epochs is None else check_integer('num_epochs', num_epochs, 1)
        self.seed: int | None = None if seed is None else check_integer('seed', seed, 0, MAX_SEED)
        self.shard_options: ShardOptions = as_shard(shard_options)

    def __repr__(self) -> str:
        return self.described(self.shard_options)

    def described(self, shard: ShardOptions) -> str:
        return (
            f'IndexSampler(num_records={self.num_records}, shard_options={shard!r}, shuffle={self.shuffle}, '
            f'num_epochs={self.num_epochs}, seed={self.seed})'
        )

    @property
    def _part(self) -> tuple[int, int]:
        """The start and end of this shard."""
        return self.shard_options.split(self.num_records)

    @property
    def shard_length(self) -> int:
        """Number of indices of this shard."""
        start, stop = self._part
        length = stop - start
        return ENDLESS if self.num_epochs is None and length else min(ENDLESS, length * (self.num_epochs or 0))

    def __len__(self) -> int:
        return min(ENDLESS, self.shard_length * self.shard_options.shard_count)

    def record_keys(self, positions: Ints) -> Ints:
        """Return the indices in the data source for positions in this shard, counted from 0."""
        start, stop = self._part
        length = max(1, stop - start)
        if self.shuffle and self.seed is not None:
            positions = shuffled(positions, length, Index(), self.seed)
        return positions % length + start

    def __getitem__(self, index: int) -> RecordMetadata:
        index = check_index(index, type(self).__name__)
        position = index // self.shard_options.shard_count
        if index < 0 or position >= self.shard_length:
            raise OutOfRangeError(f'index {index} is out of range: the sampler has {len(self)} indices')
        key = int(self.record_keys(np.array([position]))[0])
        return RecordMetadata(index, key, self.rng(index))

    def rng(self, index: int) -> np.random.Generator | None:
        """Return the random generator of an index; None without a seed."""
        return None if self.seed is None else np.random.Generator(np.random.Philox(key=self.seed + int(index)))


class SequentialSampler(IndexSampler):
    """Datapoints in order, for one epoch; index ``i`` is datapoint ``i`` for any number of shards.

    Shards take the datapoints in turn; in a ``DataLoader`` over a mix, each gets the weights of the mix.

    ::

        sampler = granular.grain.samplers.SequentialSampler(len(reader))
        loader = granular.grain.DataLoader(data_source=reader, sampler=sampler)

    The arguments are those of :class:`~granular.grain.samplers.IndexSampler`.
    """

    @answering(**RANK_ARGUMENTS)
    def __init__(self, num_records: int, shard_options: ShardOptions | None = None, seed: int | None = None) -> None:
        super().__init__(num_records, shard_options, False, 1, seed)

    def record_keys(self, positions: Ints) -> Ints:
        return positions * self.shard_options.shard_count + self.shard_options.shard_index

    @property
    def shard_length(self) -> int:
        shard = self.shard_options
        each, over = divmod(self.num_records, shard.shard_count)
        return each if shard.drop_remainder else each + (shard.shard_index < over)


def _count_indices(sampler: Any) -> int:
    """Return the number of indices of a sampler without a length: later ones raise an IndexError."""

    def is_beyond(index: int) -> bool:
        try:
            call_user(sampler.__getitem__, index)
        except IndexError:
            return True
        return False

    return bisect.bisect_left(range(ENDLESS), True, key=is_beyond)


class Sampled(Node):
    """The datapoints that a sampler chooses for a shard, each paired with its metadata."""

    passes_epochs = False

    def __init__(self, source: Source, sampler: Any, shard: ShardOptions) -> None:
        super().__init__(source)
        self._sampler, self._shard = sampler, shard
        if isinstance(sampler, IndexSampler):
            if sampler.num_records > len(source):
                raise InvalidArgumentError(
                    f'the sampler has num_records={sampler.num_records}, and the data source {len(source)} datapoints'
                )
            self._length: int | None = None
            return
        if not hasattr(sampler, '__getitem__'):
            raise InvalidArgumentError(f'{type(sampler).__name__} is not a sampler: define __getitem__ and __len__')
        count = len(sampler) if hasattr(sampler, '__len__') else _count_indices(sampler)
        self._length = -(-(count - shard.shard_index) // shard.shard_count)
        if self._length:
            self._check(shard.shard_index, call_user(sampler.__getitem__, shard.shard_index))

    @functools.cached_property
    def _turns(self) -> EvenTurns | None:
        """The turns of the shards of a sequential sampler over a mix."""
        sampler, pattern = self._sampler, self.parents[0].pattern()
        if not isinstance(sampler, SequentialSampler) or pattern is None or sampler.shard_options.shard_count == 1:
            return None
        own = sampler.shard_options
        shares = Shares(own.shard_index, own.shard_count, pattern, self.parents[0].owners)
        return EvenTurns(own.shard_index, own.shard_count, own.drop_remainder, shares, sampler.num_records)

    def _check(self, number: int, entry: Any) -> None:
        key, length = getattr(entry, 'record_key', None), len(self.parents[0])
        if not isinstance(key, int | np.integer) or not hasattr(entry, 'index'):
            raise InvalidArgumentError(
                f'the sampler returned {entry!r:.100} at index {number}: expected a RecordMetadata with a record_key'
            )
        if not 0 <= key < length:
            raise OutOfRangeError(
                f'the sampler has record_key={key} at index {number}: the data source has {length} datapoints'
            )

    def _entries(self, numbers: Sequence[int]) -> list[Any]:
        """Return what the user's sampler chooses for some of its indices."""
        entries = [self._sampler[number] for number in numbers]
        for number, entry in zip(numbers, entries, strict=True):
            self._check(number, entry)
        return entries

    def __len__(self) -> int:
        return self._sampler.shard_length if self._length is None else self._length

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        positions = np.asarray(indices, np.int64)
        numbers = (positions * self._shard.shard_count + self._shard.shard_index).tolist()
        sampler = self._sampler
        metadata: list[Any]
        if isinstance(sampler, IndexSampler):
            if self._turns is None:
                keys = sampler.record_keys(positions)
            else:
                keys = await offload(self._turns.taken, positions * self._turns.count)
                numbers = keys.tolist()
            datapoints: Sequence[Any] = await self.parents[0].fetch(keys)
            metadata = [RecordMetadata(number, key) for number, key in zip(numbers, keys.tolist(), strict=True)]
        else:
            metadata = await offload(self._entries, numbers)
            datapoints = await self.parents[0].fetch([int(entry.record_key) for entry in metadata])
        return list(zip(metadata, datapoints, strict=True))

    def describe(self) -> str:
        shard = self._shard
        if isinstance(self._sampler, IndexSampler):  # which names its shard, by numbers where they are known
            own = self._sampler.shard_options
            with contextlib.suppress(InvalidArgumentError):
                own = ShardOptions(own.shard_index, own.shard_count, own.drop_remainder)
            return self._sampler.described(own)
        if shard.shard_count == 1:
            return self._description
        return f'{self._description}, shard {shard.shard_index} of {shard.shard_count}'

    @functools.cached_property
    def _description(self) -> str:
        kind: Any = type(self._sampler)
        if kind.__repr__ is object.__repr__:
            with contextlib.suppress(InvalidArgumentError):
                return identity_of(self._sampler)  # the same in another process
        return repr(self._sampler)

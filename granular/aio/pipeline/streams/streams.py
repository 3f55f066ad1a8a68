"""Streams: the stages of an IterDataset, and how they run.

A ``Stream`` describes a stage; ``flow`` starts it. A ``Flow`` returns elements one after another and has, between any
two of them, the state from which the next one follows: indices, not data. Operations on single elements that directly
follow the reading of a MapDataset are merged into it, so that they share its fan-out, its threads and its worker
processes.
"""

import abc
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from granular.aio.execution.failures import Errors, Failure, OnError, outline
from granular.aio.execution.prefetch import END, Prefetch
from granular.aio.pipeline.describe import fingerprint
from granular.aio.pipeline.nodes import elements
from granular.aio.pipeline.nodes.base import ENDLESS, Repeat, Slice, default_seed
from granular.aio.pipeline.nodes.elements import Batch
from granular.aio.pipeline.nodes.source import Source, all_stages, estimate_nbytes
from granular.aio.pipeline.streams.filtered import FilterCheck
from granular.aio.pipeline.streams.flow import Flow
from granular.aio.pipeline.streams.flows import Applying, Batching, Iterating, NamedMixing
from granular.aio.pipeline.transforms import DatasetOptions, MultiprocessingOptions, ReadOptions, ShardOptions
from granular.aio.runtime.loops import ensure_event_loop
from granular.errors import InvalidArgumentError, StateError
from granular.indexing import Seed, check_integer

if TYPE_CHECKING:
    from granular.aio.execution.workers import Workers

_CHUNK: Final = 64  # datapoints per fetch, unless they are small; the first fetches are of fewer
_CHUNKS: Final = 8  # minimum number of chunks that the read-ahead is divided into
_SMALL: Final = 1 << 18  # bytes; smaller chunks grow if loading them is quick and waits for nothing


class Stream(abc.ABC):
    """A stage of an IterDataset.

    Attributes:
      parents: the previous stages, or the source.
      declared_seed: the seed that this stage sets for later ones; None if it sets none.
    """

    parents: tuple[Any, ...] = ()
    declared_seed: Seed | None = None

    @abc.abstractmethod
    def flow(self) -> Flow:
        """Start the stage."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Describe the stage in one line."""

    def merged(self) -> 'Read | None':
        """Return this stage and all before it as one read of a source, or None if they cannot be merged."""
        return None

    def with_workers(self, options: MultiprocessingOptions) -> 'Stream':
        """Return the same stream, read by worker processes."""
        share = dataclasses.replace(options, num_workers=max(1, options.num_workers // max(1, len(self.parents))))
        return self._over([parent.with_workers(share) for parent in self.parents])

    def with_options(self, options: DatasetOptions) -> 'Stream':
        """Return the same stream with options."""
        return self._over([parent.with_options(options) for parent in self.parents])

    def _over(self, parents: Sequence[Any]) -> 'Stream':
        stream = type(self).__new__(type(self))
        stream.__dict__.update(self.__dict__, parents=tuple(parents))
        return stream

    def sharded(self, part: ShardOptions) -> 'Stream':
        """Return a shard of the stream: every ``shard_count``-th element of all that it reads.

        Raises:
          InvalidArgumentError: if it reads a source that cannot be sharded.
        """
        if not self.parents:
            raise InvalidArgumentError(f'{self.describe()} cannot be divided into {part.shard_count} shards')
        return self._over([parent.sharded(part) for parent in self.parents])

    def at_epoch(self, epoch: int) -> 'Stream':
        """Return the stream of a later epoch, in which shuffled parts have a different order.

        Raises:
          InvalidArgumentError: if its source has no next epoch.
        """
        if not self.parents:
            raise InvalidArgumentError(f'{self.describe()} has no epoch {epoch}')
        return self._over([parent.at_epoch(epoch) for parent in self.parents])

    def default_seed(self) -> int | None:
        """Return the seed for a random operation after this stage, or None."""
        return default_seed([self])

    def roots(self) -> 'list[Read]':
        """Return the reads that the stream starts from."""
        return [root for parent in self.parents for root in parent.roots()]


class Read(Stream):
    """The elements of a source, read ahead in chunks."""

    source: Source
    options: ReadOptions
    allow_nones: bool
    shard: ShardOptions
    workers: MultiprocessingOptions | None
    filters: DatasetOptions

    def __init__(
        self,
        source: Source,
        options: ReadOptions,
        allow_nones: bool = False,
        shard: ShardOptions | None = None,
        on_error: OnError = 'raise',
        workers: MultiprocessingOptions | None = None,
        filters: DatasetOptions | None = None,
    ) -> None:
        self.parents: tuple[Any, ...] = (source,)
        self.source, self.options, self.allow_nones = source, options, allow_nones
        self.shard, self.workers, self.filters = shard or ShardOptions(0, 1), workers, filters or DatasetOptions()
        self.on_error: OnError = Errors(on_error).on_error  # validated here; each iteration counts its own errors

    def replaced(self, **changes: Any) -> 'Read':
        """Return a copy with some arguments changed."""
        arguments = {
            'source': self.source, 'options': self.options, 'allow_nones': self.allow_nones, 'shard': self.shard,
            'on_error': self.on_error, 'workers': self.workers, 'filters': self.filters,
        }  # fmt: skip
        return type(self)(**{**arguments, **changes})

    def merged(self) -> 'Read | None':
        return self

    def with_workers(self, options: MultiprocessingOptions) -> Stream:
        return self.replaced(workers=options)

    def with_options(self, options: DatasetOptions) -> Stream:
        return self.replaced(filters=options)

    def sharded(self, part: ShardOptions) -> Stream:
        # Element k of shard s of n, taken within shard p of m, is element (k * n + s) * m + p of the source.
        own = self.shard
        index = own.shard_index + own.shard_count * part.shard_index
        drop = own.drop_remainder or part.drop_remainder
        return self.replaced(shard=ShardOptions(index, own.shard_count * part.shard_count, drop))

    def at_epoch(self, epoch: int) -> Stream:
        length = len(self.source)
        if length >= ENDLESS:
            raise InvalidArgumentError(f'an infinitely repeated dataset has no epoch {epoch}')
        part = slice(epoch * length, (epoch + 1) * length)
        return self.replaced(source=Slice(Repeat(self.source, None), part))

    def roots(self) -> 'list[Read]':
        return [self]

    def flow(self) -> Flow:
        return Reading(self)

    def describe(self) -> str:
        # Omits shard and workers: a state fits any number of either.
        return f'to_iter_dataset({"allow_nones=True" if self.allow_nones else ""})'


class _ChunkTask:
    """Loads chunks of a source, in this process or in a worker."""

    captures = True

    def __init__(self, source: Source, stride: int) -> None:
        self._source, self._stride = source, stride

    def stages(self) -> Sequence[Source]:
        return all_stages(self._source)

    async def make(self, position: int, count: int) -> list[Any]:
        return await self._source.fetch(np.arange(position, position + self._stride * count, self._stride))


class Reading(Flow):
    """Reads a source. Its state is the position of the next element in the whole source, independent of the shard."""

    errors: Errors

    _workers: 'Workers | None'

    def __init__(self, read: Read, chunk: int = _CHUNK) -> None:
        self._read, self.errors = read, Errors(read.on_error)
        self.calls_functions: bool = callable(read.on_error)
        shard, options = read.shard, read.options
        self._stride = shard.shard_count
        length = len(read.source)
        self._stop = length // self._stride * self._stride if shard.drop_remainder else length
        weight = _weight(read.source)
        self._most = max(1, options.prefetch_buffer_size // _CHUNKS)
        chunk = max(1, min(chunk // weight, self._most))
        task = _ChunkTask(read.source, self._stride)
        self._workers = None
        depth = _CHUNKS
        if read.workers is not None and read.workers.num_workers:
            from granular.aio.execution.workers import Workers

            self._workers = Workers(task, read.workers.num_workers, read.workers.start_method)
            depth = max(depth, read.workers.num_workers * read.workers.per_worker_buffer_size)
        make = task.make if self._workers is None else self._workers.make
        self.ahead: Prefetch[list[Any]] = Prefetch(
            make, self._stride, weight, max(1, options.num_threads), 'stream', True
        )
        self._depth = min(depth, -(-options.prefetch_buffer_size // chunk))
        self.ahead.depth, self.ahead.stop, self.ahead.most = self._depth, self._stop, chunk
        self._chunk_rest: list[Any] = []  # the elements of the chunk that are left, in reverse
        self._chunk_stop = 0  # position after the last element of the chunk in the source
        self._plain = False  # True if all elements of the chunk are returned as they are
        self._largest = 1  # bytes of an element
        self.ahead.position = shard.shard_index
        self._elements, self._bytes = 0, 0  # elements include those that are left
        drops = read.source.sparse and not read.allow_nones
        self._check = FilterCheck(read.filters, _filters_of(read.source)) if drops else None

    @property
    def counts(self) -> dict[str, int]:
        """The number of elements returned, and the estimated bytes read."""
        return {'elements': self._elements - len(self._chunk_rest), 'bytes': self._bytes}

    def ready(self) -> list[Any]:
        return self._chunk_rest if self._plain else []

    async def next(self) -> Any:
        while True:
            if not self._chunk_rest and not await self._load():
                return END
            rest = self._chunk_rest
            element = rest[-1]
            if type(element) is Failure:
                if self.errors.raises:
                    await self._seek(self._position())
                    raise element.error
                self.errors.report([outline(element)])
                element = self.errors.resolve(element)
                if element is None:
                    rest.pop()
                    self._elements -= 1
                    continue
            if self._check is not None:
                self._check.count(element is None)
            rest.pop()
            if element is not None or self._read.allow_nones:
                return element
            self._elements -= 1

    async def _load(self) -> bool:
        """Take the next chunk. Returns False at the end."""
        position = self.ahead.position
        chunk: Any = await self.ahead.take()
        if chunk is END:
            return False
        kinds = set(map(type, chunk))
        plain = Failure not in kinds and (type(None) not in kinds or self._read.allow_nones)
        self._plain = plain and self._check is None
        self._learn(chunk)
        self._elements += len(chunk)
        self._chunk_stop = position + len(chunk) * self._stride
        self._chunk_rest = chunk[::-1]
        return bool(chunk)

    def _learn(self, chunk: list[Any]) -> None:
        """Limit the read-ahead to the memory setting, and enlarge chunks of small elements."""
        ahead, memory = self.ahead, self._read.options.memory
        size = estimate_nbytes(chunk)
        self._bytes += size
        if ahead.cheap and size < _SMALL and ahead.most == len(chunk) < self._most:
            ahead.most = min(self._most, 2 * ahead.most)  # each fetch has the same overhead
        elif size <= self._largest * len(chunk):
            return
        self._largest = max(self._largest, size // len(chunk))
        ahead.most = max(1, min(ahead.most, memory // (2 * self._largest)))
        if self._depth:
            ahead.depth = max(1, min(self._depth, memory // (self._largest * ahead.most) - 1))

    def bind(self, token: object) -> None:
        self.ahead.token = token

    def state(self) -> int:
        return self._position() - self._read.shard.shard_index

    def _position(self) -> int:
        rest = len(self._chunk_rest)
        return self._chunk_stop - rest * self._stride if rest else self.ahead.position

    async def restore(self, state: Any) -> None:
        if not isinstance(state, int) or state < 0:
            raise StateError(f'expected the position of an element, got {state!r:.100}')
        # All shards have read everything before this position; this shard continues with its first element from there.
        index, count = self._read.shard.shard_index, self._stride
        position = index + -(-max(0, state - index) // count) * count
        if position != self._position():  # otherwise what is read ahead is kept
            await self._seek(position)

    async def _seek(self, position: int) -> None:
        self._elements -= len(self._chunk_rest)
        self._chunk_rest = []
        await self.ahead.seek(position)

    async def begin(self) -> None:
        if not self._chunk_rest:
            await ensure_event_loop()
            self.ahead.begin()

    async def aclose(self) -> None:
        await self.ahead.aclose()
        await self._read.source.release()
        if self._workers is not None:
            await self._workers.aclose()


def _filters_of(source: Source) -> str:
    """Describe the stages of a source that drop elements."""
    stages: list[str] = []
    while source.parents:
        if isinstance(source, elements.Filter | elements.FlatMap) or len(source.parents) > 1:
            stages.append(source.describe())
        source = source.parents[0]
    return ', '.join(reversed(stages)) or 'the operations'


def _weight(source: Source) -> int:
    """Return the number of datapoints per element of a source."""
    source_weight = max((_weight(parent) for parent in source.parents), default=1)
    return source_weight * source.size if isinstance(source, Batch) else source_weight


# --- operations on single elements, merged into the read if possible


class Each(Stream):
    """An operation on single elements."""

    name: str
    transform: Any
    seed: Seed | None

    def __init__(self, parent: Stream, name: str, transform: Any, seed: Seed | None = None) -> None:
        self.parents: tuple[Any, ...] = (parent,)
        self.name, self.transform, self.seed = name, transform, seed
        self.method = elements.method_of(transform, name)
        self.filters: DatasetOptions = DatasetOptions()

    def merged(self) -> Read | None:
        read: Read | None = self.parents[0].merged()
        if read is None:
            return None
        source = read.source
        # Operations that number elements can be merged only if no earlier filter drops any.
        dense = not source.sparse
        if self.name == 'map':
            return read.replaced(source=elements.Map(source, self.transform))
        if self.name == 'filter' and not read.allow_nones:
            return read.replaced(source=elements.Filter(source, self.transform))
        if self.name == 'map_with_index' and dense and read.shard.shard_count == 1:
            return read.replaced(source=elements.MapWithIndex(source, self.transform))
        if self.name == 'random_map' and dense and self.seed is not None:
            return read.replaced(source=elements.RandomMap(source, self.transform, self.seed))
        return None

    def flow(self) -> Flow:
        read = self.merged()
        if read is not None:
            return read.flow()
        check = FilterCheck(self.filters, self.describe()) if self.name == 'filter' else None
        return Applying(self.parents[0].flow(), self.name, self.method, self.seed, check)

    def with_options(self, options: DatasetOptions) -> Stream:
        stream = super().with_options(options)
        stream.__dict__['filters'] = options
        return stream

    def describe(self) -> str:
        return f'{self.name}({elements.name_of(self.method)}{"" if self.seed is None else f", seed={self.seed}"})'


class BatchOf(Stream):
    """Batches of consecutive elements."""

    drop_remainder: bool

    def __init__(
        self, parent: Stream, size: int, drop_remainder: bool, batch_fn: Callable[[Sequence[Any]], Any] | None
    ) -> None:
        self.parents: tuple[Any, ...] = (parent,)
        self.size: int = check_integer('batch_size', size, 1)
        self.drop_remainder, self.fn = drop_remainder, batch_fn or elements.stack

    def flow(self) -> Flow:
        return Batching(self.parents[0].flow(), self.size, self.drop_remainder, self.fn)

    def describe(self) -> str:
        batch_fn = '' if self.fn is elements.stack else f', batch_fn={elements.name_of(self.fn)}'
        return f'batch({self.size}{", drop_remainder=True" if self.drop_remainder else ""}{batch_fn})'


class SeededStream(Stream):
    """A stage that sets the default seed for later random operations."""

    def __init__(self, parent: Stream, seed: Seed) -> None:
        self.parents: tuple[Any, ...] = (parent,)
        self.declared_seed = seed

    def merged(self) -> Read | None:
        read: Read | None = self.parents[0].merged()
        return read

    def flow(self) -> Flow:
        flow: Flow = self.parents[0].flow()
        return flow

    def describe(self) -> str:
        return f'seed({self.declared_seed})'


class Staged(Stream):
    """A stage with one or more parents, whose flow is created by a function."""

    def __init__(self, parents: Sequence[Stream], description: str, make: Callable[..., Flow], *args: Any) -> None:
        self.parents: tuple[Any, ...] = tuple(parents)
        self._description, self._make, self._args = description, make, args

    def flow(self) -> Flow:
        return self._make([parent.flow() for parent in self.parents], *self._args)

    def describe(self) -> str:
        return self._description


class NamedMix(Stream):
    """A mix of streams that have names. Its state fits other streams and weights."""

    named = True

    def __init__(self, parents: Mapping[str, Stream], weights: Sequence[int]) -> None:
        self.parents: tuple[Any, ...] = tuple(parents.values())
        self._names, self._weights = tuple(parents), tuple(weights)

    def flow(self) -> Flow:
        named = dict(zip(self._names, self.parents, strict=True))
        lines = {name: fingerprint(parent) for name, parent in named.items()}
        return NamedMixing({name: parent.flow() for name, parent in named.items()}, self._weights, lines)

    def describe(self) -> str:
        weights = ', '.join(f'{name}: {weight}' for name, weight in zip(self._names, self._weights, strict=True))
        return f'mix of {{{weights}}}'


class Iterated(Stream):
    """The elements of an iterable of the user's, whose iterators have ``get_state`` and ``set_state``."""

    def __init__(self, dataset: Any, parents: Sequence[Stream]) -> None:
        self.parents: tuple[Any, ...] = tuple(parents)
        self._dataset = dataset

    def _over(self, parents: Sequence[Any]) -> Stream:
        # Its iterators read ``_parents`` of the dataset.
        dataset = copy.copy(self._dataset)
        dataset._parents = tuple(
            type(parent)._of(stream) for parent, stream in zip(dataset._parents, parents, strict=True)
        )
        dataset._stream = Iterated(dataset, parents)
        return dataset._stream  # type: ignore[no-any-return]

    def sharded(self, part: ShardOptions) -> Stream:
        raise InvalidArgumentError(f'{self.describe()} cannot be divided into {part.shard_count} shards')

    def at_epoch(self, epoch: int) -> Stream:
        raise InvalidArgumentError(f'{self.describe()} has no epoch {epoch}')

    def flow(self) -> Flow:
        return Iterating(self._dataset)

    def describe(self) -> str:
        return type(self._dataset).__qualname__.replace('<locals>.', '')

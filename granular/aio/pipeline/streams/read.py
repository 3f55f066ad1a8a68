"""Reading: the elements of a source, in chunks that are read ahead."""

from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np

from granular.aio.pipeline.execution.failures import Errors, Failure, Handler, OnError
from granular.aio.pipeline.execution.prefetch import END, Crew, Prefetch
from granular.aio.pipeline.nodes import elements
from granular.aio.pipeline.nodes.elements import NONE, Batch, KeptNone
from granular.aio.pipeline.nodes.indices import ENDLESS, LONGEST, IndexNode, Repeat, Slice, part_of
from granular.aio.pipeline.nodes.left_out import leaving_out
from granular.aio.pipeline.nodes.outlines import length_if_known, outline_of
from granular.aio.pipeline.nodes.patterns import nested
from granular.aio.pipeline.nodes.size_batches import SizeBatches
from granular.aio.pipeline.nodes.source import Source, all_stages, estimate_nbytes
from granular.aio.pipeline.origins import Picked
from granular.aio.pipeline.position import FREE, EvenTurns, RestoreRules, Turns
from granular.aio.pipeline.shards import ShardOptions, as_shard
from granular.aio.pipeline.streams.changed import position_after
from granular.aio.pipeline.streams.decoding import Decoding, small_nbytes
from granular.aio.pipeline.streams.flow import FilterCheck, Flow, number_of
from granular.aio.pipeline.streams.stream import Stream
from granular.aio.pipeline.transforms import DatasetOptions, MultiprocessingOptions, ReadOptions, as_read_options
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.threads import offload
from granular.errors import InvalidArgumentError, StateError

if TYPE_CHECKING:
    from granular.aio.pipeline.execution.workers import Workers

_CHUNK: Final = 64  # datapoints per fetch, unless they are small; the first fetches are of fewer
_CHUNKS: Final = 8  # minimum number of chunks that the read-ahead is divided into
_BLIND: Final = 1  # chunks ahead while the size of elements is unknown: four elements before it is limited by memory
_DROPPED: Final = 1000  # elements in a row that were dropped, after which the following ones are looked up
_SHOWN: Final = 5  # stages that drop elements, in a message
_SMALL: Final = 1 << 18  # bytes; smaller chunks grow if loading them is quick and waits for nothing


class Read(Stream):
    """The elements of a source, read ahead in chunks."""

    awaited = False  # True if it belongs to the async API
    workers: MultiprocessingOptions | None = None

    def __init__(
        self,
        source: Source,
        options: ReadOptions | None,
        allow_nones: bool = False,
        shard: ShardOptions | None = None,
        on_error: OnError = 'raise',
    ) -> None:
        super().__init__(source)
        self.options = as_read_options(options)
        self.allow_nones = allow_nones
        self.shard = as_shard(shard)
        # The parts that the shard is divided into in turn, from the outermost: those of ranks, then those of workers.
        self.parts: tuple[ShardOptions, ...] = (self.shard,)
        self.on_error: OnError = Errors(on_error).on_error  # validated here; each iteration counts its own errors

    @property
    def source(self) -> Source:
        return cast(Source, self.parents[0])

    @property
    def turns(self) -> Turns:
        shard, pattern = self.shard, self.source.pattern() if self.shard.shard_count > 1 else None
        if pattern is None:
            return Turns.of(shard)
        parts = [(part.shard_index, part.shard_count) for part in self.parts if part.shard_count > 1]
        shares = nested(parts, pattern, self.source.owners)
        return EvenTurns(shard.shard_index, shard.shard_count, shard.drop_remainder, shares, len(self.source))

    @property
    def drops(self) -> bool:
        """True if elements are dropped: hosts do not advance equally, as others come in their place."""
        return self.on_error != 'raise' or (self.source.sparse and not self.allow_nones)

    @property
    def weight(self) -> int:
        """The number of datapoints in an element."""
        return weight_of(self.source)

    @property
    def is_batched(self) -> bool:
        """True if its elements are batches, also of one datapoint."""
        return any(isinstance(stage, Batch | SizeBatches) for stage in all_stages(self.source))

    @property
    def hosts(self) -> int:
        return self.shard.shard_count

    def merged(self) -> 'Read | None':
        return self

    def with_workers(self, options: MultiprocessingOptions) -> Stream:
        return self.replaced(workers=options)

    def with_options(self, options: DatasetOptions) -> Stream:
        return self.replaced(dataset_options=options)

    def sliced(self, part: slice) -> Stream:
        return self.over([Slice(self.source, part)])

    def in_part(self, part: ShardOptions) -> Stream:
        return self.over([part_of(self.source, part)])

    def sharded(self, part: ShardOptions) -> Stream:
        # Element k of shard s of n, taken within shard p of m, is element (k * n + s) * m + p of the source.
        own = self.shard
        index = own.shard_index + own.shard_count * part.shard_index
        drop = own.drop_remainder or part.drop_remainder
        shard = ShardOptions(index, own.shard_count * part.shard_count, drop)
        return self.replaced(shard=shard, parts=(*self.parts, part))

    async def divisions(self) -> set[int]:
        return {self.hosts}

    def expecting(self, parts: int) -> Stream:
        if self.hosts != parts:
            raise InvalidArgumentError(
                f'{self.describe()}: the stream is divided into {self.hosts} shards, those before it into {parts}: '
                f'pass the same shard_options to each'
            )
        return self

    def at_epoch(self, epoch: int) -> Stream:
        if not epoch:
            return self
        length = len(self.source)
        if length > LONGEST:
            raise InvalidArgumentError(
                f'epoch {epoch}: the dataset is repeated infinitely: leave out repeat(), or call it of the stream, as '
                f'in dataset.batch(64).to_iter_dataset().repeat()'
            )
        return self.over([Slice(Repeat(self.source, None), slice(epoch * length, (epoch + 1) * length))])

    def roots(self) -> 'list[Read]':
        return [self]

    def length(self) -> int:
        if self.source.sparse and not self.allow_nones:
            raise InvalidArgumentError(f'{_filters_of(self.source)}: elements that remain after a filter have no index')
        if self.on_error != 'raise':
            raise InvalidArgumentError('on_error: elements that remain after failed ones have no index')
        return self.turns.rounds(0, len(self.source))

    def index_of(self, state: Any) -> int:
        length, turns = self.length(), self.turns
        position = turns.at(state, FREE)
        if position >= len(self.source):
            return length
        if position % turns.stride:
            raise StateError(
                f'elements have no index since the stream resumed at element {position} of the whole with '
                f'{turns.count} shards: expected a multiple of {turns.count}'
            )
        return min(length, int(position) // turns.stride)

    def state_at(self, index: int) -> Any:
        return self.turns.state(min(len(self.source), index * self.turns.stride), False)

    def outline(self) -> dict[str, Any]:
        source, whole = self.source, {'whole': True} if self.shard.drop_remainder else {}
        return {'read': outline_of(source), 'length': length_if_known(source), 'drops': self.drops, **whole}

    def traced_back(self, picked: Picked) -> list[tuple[Any, Picked]]:
        self.length()
        turns = self.turns
        return [(self.source, picked._replace(indices=turns.taken(picked.indices * turns.stride)))]

    def flow(self) -> Flow:
        return Reading(self)

    def describe(self) -> str:
        # Omits shard and workers: a state fits any number of either.
        return f'to_iter_dataset({"allow_nones=True" if self.allow_nones else ""})'


class _Chunk(NamedTuple):
    """Elements in reverse, as they are taken from the end; their estimated size in bytes, and their types."""

    rest: list[Any]
    nbytes: int
    kinds: set[type]


class _ChunkTask:
    """Loads chunks of a source, in this process or in a worker."""

    captures = True

    def __init__(self, source: Source, turns: Turns, memory: int) -> None:
        self._source, self._turns = source, turns
        self._decoding = Decoding(source, weight_of(source), memory)

    def stages(self) -> list[Source]:
        return all_stages(self._source)

    async def compute(self, position: int, count: int) -> _Chunk:
        turns, stride = self._turns, self._turns.stride
        rounds = np.arange(position, position + stride * count, stride)
        indices = await offload(turns.taken, rounds) if isinstance(turns, EvenTurns) else turns.taken(rounds)
        chunk = await self._decoding.fetch(indices)
        return _Chunk(chunk[::-1], estimate_nbytes(chunk), set(map(type, chunk)))


class Reading(Flow):
    """Reads a source. Its state is the position in the ``Turns`` of the shards, which take turns from there on."""

    _workers: 'Workers | None' = None

    def __init__(self, read: Read, chunk: int = _CHUNK) -> None:
        self._read, self.errors = read, Errors(read.on_error)
        self.calls_functions: bool = callable(read.on_error)
        self._later = elements.after_handled(read.source)
        self.turns, options = read.turns, read.options
        self._stride = self.turns.stride
        self._drops = self.keeps_host = read.drops
        self._alone = self.turns.count == 1
        self._length, self._start = len(read.source), 0  # hosts take turns from the start to the end of the length
        self._ended = False
        weight = read.weight
        self._chunk_size = max(1, chunk // weight)
        processes = 0 if read.workers is None else read.workers.num_workers
        task = _ChunkTask(read.source, self.turns, options.memory // max(1, processes))
        compute: Callable[..., Coroutine[Any, Any, _Chunk]] = task.compute
        ask = None
        self._deepest = _CHUNKS
        if (workers := read.workers) is not None and workers.num_workers:
            from granular.aio.pipeline.execution.workers import Workers

            self._workers = Workers(task, workers.num_workers, workers.start_method, workers.worker_init_fn)
            compute, ask = self._workers.compute, self._workers.ask
            self._deepest = max(_CHUNKS, workers.num_workers * workers.per_worker_buffer_size)
        self.ahead: Prefetch[_Chunk] = Prefetch(
            compute, ask, self._stride, weight, max(1, options.num_threads), 'stream', True
        )
        # The bytes of the largest element, and until one is read, of a small stored one; 0 if neither is known.
        self._largest = small_nbytes(read.source, weight)
        self._measured = False
        self._set_buffer(options.prefetch_buffer_size)
        self._chunk_rest: list[Any] = []  # the elements of the chunk that are left, in reverse
        self._chunk_stop = 0  # position after the last element of the chunk in the source
        self._plain = False  # True if all elements of the chunk are returned as they are
        self.ahead.stop = self.turns.stop(0, self._length)
        self._elements, self._bytes = 0, 0  # elements include those that are left
        self._sparse = read.source.sparse and not read.allow_nones
        self._check = None if read.allow_nones else FilterCheck(read.dataset_options, _filters_of(read.source))
        self._dropped = 0  # elements in a row that the source has dropped; negative once those that follow are known

    async def nullable_keys(self) -> frozenset[str]:
        return await self._read.source.nullable_keys()

    @property
    def even(self) -> bool:
        return self._alone or (not self._drops and self.turns.even(self._length - self._start))

    @property
    def apart(self) -> bool:
        return self._drops and not self._alone

    @property
    def in_step(self) -> bool:
        return self.even or self._position() <= self._length

    def stats(self) -> dict[str, float]:
        ready, in_flight = self.ahead.counts()
        return {
            'read': self._elements - len(self._chunk_rest),
            'bytes': self._bytes,
            'wait_seconds': self.ahead.waited,
            'consumer_seconds': self.ahead.consumed,
            'ready': ready,
            'in_flight': in_flight,
            'errors': self.errors.count,
        }

    def sources(self) -> list[Source]:
        return [self._read.source]

    def received(self, seconds: float) -> None:
        self.ahead.received(seconds)

    def failures(self) -> list[tuple[int, str]]:
        return list(self.errors.recent)

    async def set_prefetch(self, size: int) -> bool:
        self._set_buffer(size)
        return True

    def _set_buffer(self, size: int) -> None:
        """Divide the read-ahead into chunks."""
        self._buffer = size
        self._most = max(1, size // _CHUNKS)
        self.ahead.most = min(self._chunk_size, self._most)
        self._depth = self.ahead.depth = min(self._deepest, -(-size // self.ahead.most))
        self._limit_memory()

    def ready(self) -> list[Any]:
        return self._chunk_rest if self._plain else []

    async def next(self) -> Any:
        while True:
            if not self._chunk_rest and not await self._load():
                return END
            rest = self._chunk_rest
            element = rest[-1]
            if type(element) is Failure:
                if self.errors.raises_for(element) or (self._later and not element.handled):
                    await self._seek(self._position())
                    raise element.release()
                failure, failed = element, [(element.index, element.message)] if element.counts else []
                if failure.batched:
                    element, failed = await self._handle_batch(failure)
                else:
                    element = self.errors.resolve(failure)
                is_skipped = element is None
                if self._later and not is_skipped:
                    element = await elements.replaced(self._later, element, self._index())
                self.errors.report(failed)  # not before: what raised an error is tried again
                failure.release()
                if is_skipped:
                    rest.pop()
                    self._elements -= 1
                    continue
            if self._check is not None:
                self._check.count(element is None)
            rest.pop()
            if element is NONE:
                return None
            if element is not None or self._read.allow_nones:
                return element
            self._elements -= 1

    def _index(self) -> int:
        """Return the index of the next element of this host in the source."""
        return int(self.turns.taken(np.array([self._position()]))[0])

    async def _handle_batch(self, failure: Failure) -> tuple[Any, list[tuple[int, str]]]:
        """Return an element again, with those replaced that failed in its batch, and the index and message of these.

        What fails as a whole is replaced as any other datapoint.
        """
        handler = Handler(self.errors, failure)
        source = elements.before_handled(self._read.source)
        element = await handler.fetch(source, self._index())
        if type(element) is Failure:
            element = await handler.replaced(element)
        return element, handler.failed if failure.counts else []

    async def _load(self) -> bool:
        """Take the next chunk. Returns False at the end."""
        position = self.ahead.position
        chunk: Any = await self.ahead.take()
        if chunk is END:
            self._ended = True
            self.errors.summarise()
            if self._check is not None:
                self._check.end()
            return False
        kinds = chunk.kinds
        plain = Failure not in kinds and KeptNone not in kinds and (type(None) not in kinds or self._read.allow_nones)
        self._plain = plain and not self._sparse
        if self._plain and self._check is not None:
            self._check.restart()
        self._learn(chunk)
        if self._sparse and self._dropped >= 0 and self._length >= ENDLESS:
            self._dropped = self._dropped + len(chunk.rest) if kinds == {type(None)} else 0
            if self._dropped >= _DROPPED:
                self._dropped = 0
                await offload(self._check_remaining)
                self._dropped = -1
        rest, count = chunk.rest, len(chunk.rest)
        self._elements += count
        self._chunk_stop = position + count * self._stride
        self._chunk_rest = rest
        return count > 0

    def _check_remaining(self) -> None:
        """Raise ``InvalidArgumentError`` if all elements of this host are excluded from a source without end."""
        excluding = leaving_out(self._read.source, lambda rounds: self.turns.taken(rounds * self._stride))
        if not excluding:
            return
        host = '' if self._alone else f' of host {self.turns.index} of {self.turns.count}'
        names = ' and '.join(sorted({stage.describe() for stage in excluding}))
        raise InvalidArgumentError(
            f'{names} leaves out all elements{host}, which are repeated without end: exclude others, or shuffle after '
            f'exclude()'
        )

    def _learn(self, chunk: _Chunk) -> None:
        """Limit the read-ahead to the memory setting, and enlarge chunks of small elements."""
        ahead, size, count = self.ahead, chunk.nbytes, len(chunk.rest)
        self._bytes += size
        if not self._measured and chunk.kinds - {type(None)}:
            self._measured, self._largest = True, size // count
            self._set_buffer(self._buffer)
        if ahead.cheap and size < _SMALL and ahead.most == count < self._most:
            ahead.most = min(self._most, 2 * ahead.most)  # each fetch has the same overhead
        elif size <= self._largest * count:
            return
        self._largest = max(self._largest, size // count)
        self._limit_memory()

    def _limit_memory(self) -> None:
        ahead, memory = self.ahead, self._read.options.memory
        if not self._largest:
            ahead.depth = min(self._depth, _BLIND)
            return
        ahead.most = max(1, min(ahead.most, memory // (8 * self._largest)))
        # Beside the chunks ahead there are the next one, that which is consumed, and what a later stage combines.
        ahead.depth = max(0, min(self._depth, memory // (self._largest * ahead.most) - 3))

    def bind(self, token: object, crew: Crew) -> None:
        self.ahead.bind(token, crew)

    def state(self) -> Any:
        # At the end, shards may have read different numbers of elements.
        at = self._length if self._ended else min(self._length, self._position())
        return at if self._alone else self.turns.state(at, self.keeps_host)

    def _position(self) -> int:
        rest = len(self._chunk_rest)
        return self._chunk_stop - rest * self._stride if rest else self.ahead.position

    async def restore(self, state: Any, rules: RestoreRules = FREE) -> None:
        if self._drops:
            stage, kind = f'after {_filters_of(self._read.source)}', 'elements dropped'
            if self._read.on_error != 'raise':
                stage, kind = 'whose on_error leaves out elements that fail', 'on_error'
            rules = rules.of(f'to_iter_dataset, {stage}', f'to_iter_dataset, {kind}', False)
        position = self.turns.at(self._unnumbered(state), rules)
        position = position_after(rules, self._read.source, position)
        if type(position) is not int or not 0 <= position < 1 << 63:
            raise StateError(f'{self._read.describe()}: expected the position of an element, got {state!r:.100}')
        if position > self._length:
            raise StateError(
                f'{self._read.describe()}: the state is at element {position}, the source has {self._length} elements'
            )
        self._ended = False
        if position != self._position():  # otherwise what is read ahead is kept
            self._start = position
            self.ahead.stop = self.turns.stop(position, self._length)
            await self._seek(position)
            if self._check is not None:
                self._check.restart()

    def _unnumbered(self, state: Any) -> Any:
        """Return the state of the reading in one of stages that numbered its elements, which are a part of it now."""
        counts = []
        while isinstance(state, Mapping) and state.keys() == {'parent', 'count'}:
            counts.append(number_of(state, 'count'))
            state = state['parent']
        if any(count != state for count in counts):
            raise StateError(
                f'{self._read.describe()}: the state has other numbers of elements, {counts}, than its position, '
                f'{state!r:.100}: continue with the on_error, and with each prefetch, that saved the state'
            )
        return state

    async def _seek(self, position: int) -> None:
        self._elements -= len(self._chunk_rest)
        self._chunk_rest = []
        await self.ahead.seek(position)

    async def begin(self) -> None:
        if not self._chunk_rest:
            await to_loop()
            self.ahead.begin()

    async def aclose(self) -> None:
        position = self._position()
        try:
            await self.ahead.aclose()
            await self._seek(position)  # frees the elements that are left, as the iterator may live on
            await self._read.source.release()
        finally:
            self.errors.summarise()
            if self._workers is not None:
                await self._workers.aclose()


def _filters_of(source: Source) -> str:
    """Describe the stages of a source that drop elements: filters, or if there are none, functions."""
    stages = all_stages(source)[::-1]
    kinds = (elements.Filter | elements.FlatMap | elements.Excluded, elements.Function)
    found = ([s.describe() for s in stages if isinstance(s, kind)] for kind in kinds)
    names = list(dict.fromkeys(next(filter(None, found), [source.describe()])))
    more = f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''
    return ', '.join(names[:_SHOWN]) + more


def gapless(source: Source) -> bool:
    """Return whether no element of a source is None, as far as this is known without computing them."""
    if isinstance(source, IndexNode | Batch) and not source.sparse:
        return isinstance(source, Batch) or gapless(source.parents[0])
    return bool(getattr(source, 'gapless', False))


def weight_of(source: Source) -> int:
    """Return the number of datapoints per element of a source."""
    source_weight = max((weight_of(parent) for parent in source.parents), default=1)
    return source_weight * source.size if isinstance(source, Batch) else source_weight

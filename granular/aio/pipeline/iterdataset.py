"""The operations of an IterDataset, of which both faces have the same, and its iterator."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from granular.aio.lifecycle import Running
from granular.aio.loops import await_user
from granular.aio.pipeline import flows, nodes, streams
from granular.aio.pipeline.ahead import END
from granular.aio.pipeline.elements import method_of, name_of
from granular.aio.pipeline.flow import Flow
from granular.aio.pipeline.rendering import fingerprint, rendered
from granular.aio.pipeline.streams import Reading, Stream
from granular.aio.pipeline.transforms import (
    FilterTransform,
    FlatMapTransform,
    MapTransform,
    MapWithIndexTransform,
    MultiprocessingOptions,
    RandomMapTransform,
    Transformation,
    apply,
)
from granular.errors import InvalidArgumentError, StateError


class IterOperations:
    """What an IterDataset can be made into. Each operation gives a new one; nothing is read before it is iterated."""

    _stream: Stream

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def _derive(self, stream: Stream) -> Self:
        return type(self)(stream)

    def _staged(self, said: str, make: Callable[..., Flow], *args: Any) -> Self:
        return self._derive(streams.Staged([self._stream], said, make, *args))

    @classmethod
    def mix(cls, datasets: Sequence['IterOperations'], weights: Sequence[float] | None = None) -> Self:
        """Streams mixed evenly, in proportion to their weights, until one of them ends."""
        parts = nodes.proportions(len(datasets), weights)
        said = f'mix of {len(datasets)}, weights {":".join(map(str, parts))}'
        return cls(streams.Staged([dataset._stream for dataset in datasets], said, flows.Mixing, parts))

    @classmethod
    def interleave(cls, datasets: Sequence['IterOperations'], cycle_length: int) -> Self:
        """Elements of some streams in turn; one that ends makes room for the next.

        Args:
          datasets: the streams.
          cycle_length: how many are read at a time.
        """
        if not datasets or not isinstance(cycle_length, int) or cycle_length < 1:
            raise InvalidArgumentError(f'want datasets and a cycle_length from 1 on, got {cycle_length!r}')
        said = f'interleave of {len(datasets)}, {cycle_length} at a time'
        return cls(streams.Staged([dataset._stream for dataset in datasets], said, flows.Interleaving, cycle_length))

    def seed(self, seed: int) -> Self:
        """The seed of those operations further on that are given none: each derives one of its own from it."""
        return self._derive(streams.SeededStream(self._stream, seed))

    def map(self, transform: MapTransform | Callable[[Any], Any]) -> Self:
        """A function of each element, called in threads."""
        return self._derive(streams.Each(self._stream, 'map', transform))

    def map_with_index(self, transform: MapWithIndexTransform | Callable[[int, Any], Any]) -> Self:
        """A function of each element and its number in this stream."""
        return self._derive(streams.Each(self._stream, 'map_with_index', transform))

    def random_map(
        self, transform: RandomMapTransform | Callable[[Any, np.random.Generator], Any], *, seed: int | None = None
    ) -> Self:
        """A function of element and random numbers, which are a function of seed and the element's number."""
        if seed is None:
            seed = self._stream.default_seed()
        if seed is None:
            raise InvalidArgumentError('random_map needs a seed: pass seed=, or call seed() before it')
        return self._derive(streams.Each(self._stream, 'random_map', transform, seed))

    def filter(self, transform: FilterTransform | Callable[[Any], bool]) -> Self:
        """The elements for which a function is true."""
        return self._derive(streams.Each(self._stream, 'filter', transform))

    def flat_map(self, transform: FlatMapTransform | Callable[[Any], Sequence[Any]]) -> Self:
        """Several elements for each one, or none."""
        method = method_of(transform, 'flat_map')
        return self._staged(f'flat_map({name_of(method)})', flows.FlatMapping, method)

    def batch(
        self,
        batch_size: int,
        *,
        drop_remainder: bool = False,
        batch_fn: Callable[[Sequence[Any]], Any] | None = None,
    ) -> Self:
        """Batches of elements, each leaf of which (in dicts, tuples, lists) is stacked along a new first dimension."""
        return self._derive(streams.BatchOf(self._stream, batch_size, drop_remainder, batch_fn))

    def window_shuffle(self, window_size: int, seed: int) -> Self:
        """Another order within each window of consecutive elements."""
        if not isinstance(window_size, int) or window_size < 1:
            raise InvalidArgumentError(f'window_size is {window_size!r}: want an integer from 1 on')
        return self._staged(f'window_shuffle({window_size}, seed={seed})', flows.WindowShuffling, window_size, seed)

    def pack(
        self, length_struct: Mapping[str, int], *, num_packing_bins: int = 64, meta_features: Sequence[str] = ()
    ) -> Self:
        """Sequences put together in rows of fixed lengths, each into the first of some rows that has room.

        Each row is a dict of the keys of ``length_struct``, padded with zeros, and for each key that is no meta feature
        ``{key}_segment_ids`` (int32: 1 for the first sequence in the row, and so on; 0 for padding) and
        ``{key}_positions`` (int32, within its sequence).

        Args:
          length_struct: the length of a row, for each key.
          num_packing_bins: rows that are filled at a time.
          meta_features: keys without segments and positions.
        """
        lengths = dict(length_struct)
        return self._staged(
            f'pack({lengths}, {num_packing_bins})', flows.Packing, lengths, num_packing_bins, meta_features
        )

    def prefetch(self, buffer_size: int = 2) -> Self:
        """Elements of all that stands before, made ahead of the consumer.

        Args:
          buffer_size: how many.
        """
        if not isinstance(buffer_size, int) or buffer_size < 1:
            raise InvalidArgumentError(f'buffer_size is {buffer_size!r}: want an integer from 1 on')
        return self._staged(f'prefetch({buffer_size})', flows.Prefetching, buffer_size)

    def mp_prefetch(self, options: MultiprocessingOptions | int) -> Self:
        """The same elements in the same order, read and computed in worker processes.

        What stands before the first operation that depends on several elements runs there, in chunks; the rest here.
        Over a MapDataset that was batched, whole batches come back, in shared memory.

        Args:
          options: how many processes, or more in detail.
        """
        chosen = MultiprocessingOptions(num_workers=options) if isinstance(options, int) else options
        return self if not chosen.num_workers else self._derive(self._stream.with_workers(chosen))

    def apply(self, transformations: Transformation | Sequence[Transformation]) -> Self:
        """Transformations one after the other."""
        applied: Self = apply(self, transformations)
        return applied

    def pipe(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """``func(self, *args, **kwargs)``, for functions of your own in a chain of operations."""
        return func(self, *args, **kwargs)

    def __str__(self) -> str:
        return rendered(self._stream)

    def __repr__(self) -> str:
        return f'<{type(self).__name__}: {self._stream.describe()}>'


class Iterator(Running):
    """Where a stream stands: its elements one after the other, and the state from which the next one follows.

    An element that fails raises, and the state stays before it: the next call tries it again.
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream
        self._flow = stream.flow()
        self._fingerprint = fingerprint(stream)
        self._moves = 0  # that were begun: each makes an element, or restores a state
        self._before: Any = None  # the mark before the last of them
        self._astray = False  # whether the flow is to go back there: the last move is not over, or it failed
        self._count = 0

    async def next(self) -> Any:
        """The next element, or ``END``."""
        return (await self.take())[0]

    async def take(self) -> tuple[Any, int]:
        """The next element, or ``END``, and the number of the move that made it."""
        async with self.turn.turn():
            self.check()
            try:
                await self._begin_move()
                element = await await_user(self._flow.next())
                self._astray = False
            finally:
                if self._loop is None:
                    await self.settle()
            self._count += element is not END
            return element, self._moves

    def take_back(self, taken: tuple[Any, int]) -> None:
        """Let an element that did not reach the consumer come again, unless it was another's turn since."""
        element, move = taken
        if move == self._moves and element is not END:
            self._astray = True
            self._count -= 1

    async def _return(self) -> None:
        """Go back to where the last move began, if it failed: so late, neither errors nor cancellations prevent it."""
        if self._astray:
            await self._flow.restore(self._before)
            self._astray = False

    async def _begin_move(self) -> None:
        await self._return()
        self._before = self._flow.mark()
        self._astray = True
        self._moves += 1

    def get_state(self) -> dict[str, Any]:
        """From where the next element follows: plain JSON, of indices alone.

        While an element is being made, for another thread, it is the state before that element.
        """
        while True:
            moves = self._moves
            state = self._flow.unmark(self._before) if self._astray else self._flow.state()
            if moves == self._moves:
                return {'state': state, 'pipeline': self._fingerprint}

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
          StateError: if it is none, or one of another pipeline; it says what differs.
        """
        if not isinstance(state, Mapping) or 'state' not in state:
            raise StateError(f'want a state such as {self.get_state()}, got {state!r:.200}')
        check_fingerprint(state.get('pipeline'), self._fingerprint)
        async with self.turn.turn():
            self.check()
            try:
                await self._begin_move()
                await self._flow.restore(state['state'])
                self._astray = False
            except (KeyError, TypeError, ValueError) as error:
                raise StateError(f'no state of this pipeline: {type(error).__name__}: {error}') from error
            finally:
                await self.settle()

    async def start_prefetch(self) -> None:
        """Begin to read, before the first element is asked for."""
        async with self.turn.turn():
            self.check()
            try:
                await self._return()
                await self._flow.begin()
            finally:
                await self.settle()

    def stats(self) -> dict[str, float]:
        """Elements handed out; of what is read: elements, bytes, seconds waited for it, chunks ready and in flight."""
        readings = list(_readings(self._flow))
        counts = [reading.ahead.counts() for reading in readings]
        return {
            'elements': self._count,
            'read': sum(reading.counts['elements'] for reading in readings),
            'bytes': sum(reading.counts['bytes'] for reading in readings),
            'wait_seconds': sum(reading.ahead.waited for reading in readings),
            'consumer_seconds': max((reading.ahead.consumed for reading in readings), default=0.0),
            'ready': sum(ready for ready, _ in counts),
            'in_flight': sum(in_flight for _, in_flight in counts),
            'errors': sum(reading.errors.count for reading in readings),
        }

    @property
    def errors(self) -> list[tuple[int, str]]:
        """Index and message of the elements that could not be made, the last thousand of each source."""
        return [error for reading in _readings(self._flow) for error in reading.errors.recent]

    async def _close(self) -> None:
        await self._flow.aclose()


def _readings(flow: Flow) -> Sequence[Reading]:
    if isinstance(flow, Reading):
        return [flow]
    return [reading for parent in flow.parents for reading in _readings(parent)]


def check_fingerprint(said: Any, own: Sequence[str]) -> None:
    """Raise if a state is of another pipeline.

    Raises:
      StateError: with the first stage that differs.
    """
    if said is None or list(said) == list(own):
        return
    for i in range(max(len(said), len(own))):
        there, here = (lines[i] if i < len(lines) else 'nothing' for lines in (said, own))
        if there != here:
            raise StateError(
                f'the state is of another pipeline: stage {i + 1} was {there.strip()!r}, here {here.strip()!r}'
            )


class DatasetIterator(AsyncIterator[Any]):
    """The elements of a stream, with ``async for``; between any two of them, its state can be had and restored."""

    def __init__(self, stream: Stream) -> None:
        self._core = Iterator(stream)
        self._core.close_with(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        element = await self._core.next()
        if element is END:
            raise StopAsyncIteration
        return element

    def get_state(self) -> dict[str, Any]:
        """From where the next element follows: plain JSON, of indices alone."""
        return self._core.get_state()

    async def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
          StateError: if it is none, or one of another pipeline; it says what differs.
        """
        await self._core.restore(state)

    async def start_prefetch(self) -> None:
        """Begin to read, before the first element is asked for."""
        await self._core.start_prefetch()

    def stats(self) -> dict[str, float]:
        """Elements handed out; of what is read: elements, bytes, seconds waited for it, chunks ready and in flight."""
        return self._core.stats()

    @property
    def errors(self) -> list[tuple[int, str]]:
        """Index and message of the elements that could not be made, the last thousand of each source."""
        return self._core.errors

    async def aclose(self) -> None:
        """End: its tasks, threads and processes. More than once is no error."""
        await self._core.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.aclose()


class IterDataset(IterOperations):
    """A stream of elements, with ``async for``."""

    def __aiter__(self) -> DatasetIterator:
        return DatasetIterator(self._stream)

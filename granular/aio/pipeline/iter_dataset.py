"""The operations of an IterDataset, shared by the sync and the async API, and its iterator."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from granular.aio.execution.prefetch import END
from granular.aio.pipeline.describe import fingerprint, format_pipeline
from granular.aio.pipeline.nodes import base as nodes
from granular.aio.pipeline.nodes.elements import method_of, name_of
from granular.aio.pipeline.streams import flows, streams
from granular.aio.pipeline.streams.flow import Flow
from granular.aio.pipeline.streams.streams import Reading, Stream
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
from granular.aio.runtime.lifecycle import Running
from granular.aio.runtime.user_functions import await_user
from granular.errors import InvalidArgumentError, StateError
from granular.indexing import check_integer


class IterOperations:
    """Operations of an IterDataset. Each returns a new one; nothing is read before iteration."""

    _stream: Stream

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def _derive(self, stream: Stream) -> Self:
        return type(self)(stream)

    def _staged(self, said: str, make: Callable[..., Flow], *args: Any) -> Self:
        return self._derive(streams.Staged([self._stream], said, make, *args))

    @classmethod
    def mix(cls, datasets: Sequence['IterOperations'], weights: Sequence[float] | None = None) -> Self:
        """Mix streams evenly, in proportion to their weights, until one of them ends.

        Args:
          datasets: the streams.
          weights: numbers above 0, with any sum; equal by default.
        """
        parts = nodes.proportions(len(datasets), weights)
        said = f'mix of {len(datasets)}, weights {":".join(map(str, parts))}'
        return cls(streams.Staged([dataset._stream for dataset in datasets], said, flows.Mixing, parts))

    @classmethod
    def interleave(cls, datasets: Sequence['IterOperations'], cycle_length: int) -> Self:
        """Take elements from several streams in turn; the next stream replaces one that ends.

        Args:
          datasets: the streams.
          cycle_length: number of streams to read concurrently.
        """
        if not datasets:
            raise InvalidArgumentError('expected one dataset or more, got none')
        cycle_length = check_integer('cycle_length', cycle_length, 1)
        said = f'interleave of {len(datasets)}, {cycle_length} at a time'
        return cls(streams.Staged([dataset._stream for dataset in datasets], said, flows.Interleaving, cycle_length))

    def seed(self, seed: int) -> Self:
        """Set the seed of all later operations that are given none: each derives a seed of its own from it."""
        return self._derive(streams.SeededStream(self._stream, seed))

    def map(self, transform: MapTransform | Callable[[Any], Any]) -> Self:
        """Apply a function to each element, in threads."""
        return self._derive(streams.Each(self._stream, 'map', transform))

    def map_with_index(self, transform: MapWithIndexTransform | Callable[[int, Any], Any]) -> Self:
        """Apply a function to each element and its number in this stream: ``transform(number, element)``."""
        return self._derive(streams.Each(self._stream, 'map_with_index', transform))

    def random_map(
        self, transform: RandomMapTransform | Callable[[Any, np.random.Generator], Any], *, seed: int | None = None
    ) -> Self:
        """Apply a function to each element and a random generator, which depends only on seed and element number."""
        if seed is None:
            seed = self._stream.default_seed()
        if seed is None:
            raise InvalidArgumentError('random_map needs a seed: pass seed=, or call seed() before it')
        return self._derive(streams.Each(self._stream, 'random_map', transform, seed))

    def filter(self, transform: FilterTransform | Callable[[Any], bool]) -> Self:
        """Keep the elements for which a function returns True."""
        return self._derive(streams.Each(self._stream, 'filter', transform))

    def flat_map(self, transform: FlatMapTransform | Callable[[Any], Sequence[Any]]) -> Self:
        """Replace each element by the elements that a function returns for it, possibly none."""
        method = method_of(transform, 'flat_map')
        return self._staged(f'flat_map({name_of(method)})', flows.FlatMapping, method)

    def batch(
        self,
        batch_size: int,
        *,
        drop_remainder: bool = False,
        batch_fn: Callable[[Sequence[Any]], Any] | None = None,
    ) -> Self:
        """Combine consecutive elements to batches, stacking each leaf (of dicts, tuples, lists) along a new first axis.

        Args:
          batch_size: elements per batch.
          drop_remainder: True to drop a smaller last batch.
          batch_fn: function from a list of elements to a batch, instead of stacking.
        """
        return self._derive(streams.BatchOf(self._stream, batch_size, drop_remainder, batch_fn))

    def window_shuffle(self, window_size: int, seed: int) -> Self:
        """Shuffle the elements within each window of consecutive elements.

        Args:
          window_size: elements per window.
          seed: the order of a window depends on the seed and the number of the window.
        """
        window_size = check_integer('window_size', window_size, 1)
        return self._staged(f'window_shuffle({window_size}, seed={seed})', flows.WindowShuffling, window_size, seed)

    def pack(
        self, length_struct: Mapping[str, int], *, num_packing_bins: int = 64, meta_features: Sequence[str] = ()
    ) -> Self:
        """Pack sequences into rows of fixed lengths; each sequence goes into the first open row with enough space.

        Each row is a dict with the keys of ``length_struct``, padded with zeros. For each key that is not a meta
        feature, it also has ``{key}_segment_ids`` (int32: 1 for the first sequence in the row, and so on; 0 for
        padding) and ``{key}_positions`` (int32, position within the sequence)::

            stream.pack({'tokens': 2048})  # elements such as {'tokens': np.array([17, 4, 2])}

        Args:
          length_struct: length of a row, for each key.
          num_packing_bins: number of rows that are open at a time.
          meta_features: keys without segment ids and positions.
        """
        lengths = dict(length_struct)
        return self._staged(
            f'pack({lengths}, {num_packing_bins})', flows.Packing, lengths, num_packing_bins, meta_features
        )

    def prefetch(self, buffer_size: int = 2) -> Self:
        """Compute the elements of all previous operations ahead of the consumer.

        Args:
          buffer_size: number of elements.
        """
        buffer_size = check_integer('buffer_size', buffer_size, 1)
        return self._staged(f'prefetch({buffer_size})', flows.Prefetching, buffer_size)

    def mp_prefetch(self, options: MultiprocessingOptions | int) -> Self:
        """Read and compute the elements in worker processes; elements and order stay the same.

        The operations before the first one that combines several elements run in the workers, in chunks; the others run
        in this process. If the MapDataset was batched, the workers return whole batches, in shared memory::

            dataset.shuffle(seed=0).map(decode).batch(64).to_iter_dataset().mp_prefetch(4)

        Args:
          options: number of processes, or all settings.
        """
        chosen = MultiprocessingOptions(num_workers=options) if isinstance(options, int) else options
        return self if not chosen.num_workers else self._derive(self._stream.with_workers(chosen))

    def apply(self, transformations: Transformation | Sequence[Transformation]) -> Self:
        """Apply one transformation, or several in order."""
        applied: Self = apply(self, transformations)
        return applied

    def pipe(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return ``func(self, *args, **kwargs)``, to use your own functions in a chain of operations."""
        return func(self, *args, **kwargs)

    def __str__(self) -> str:
        return format_pipeline(self._stream)

    def __repr__(self) -> str:
        return f'<{type(self).__name__}: {self._stream.describe()}>'


class Iterator(Running):
    """The position in a stream: returns its elements one after another, and the state from which the next one follows.

    If an element fails, its error is raised and the state stays before it: the next call tries the element again.
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream
        self._flow = stream.flow()
        self._fingerprint = fingerprint(stream)
        self._moves = 0  # operations begun: each computes an element or restores a state
        self._before: Any = None  # the mark before the last of them
        self._astray = False  # True if the flow must go back to it: the last operation is unfinished, or it failed
        self._count = 0

    async def next(self) -> Any:
        """Return the next element, or ``END``."""
        return (await self.take())[0]

    async def take(self) -> tuple[Any, int]:
        """Return the next element, or ``END``, and the number of the operation that computed it."""
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
        """Return the state from which the next element follows: plain JSON with indices, not data.

        While another thread waits for an element, this is the state before that element.
        """
        while True:
            moves = self._moves
            state = self._flow.unmark(self._before) if self._astray else self._flow.state()
            if moves == self._moves:
                return {'state': state, 'pipeline': self._fingerprint}

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.

        Raises:
          StateError: if this is not a state, or belongs to a different pipeline; the message names the first
            difference.
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
        """Start reading before the first element is requested."""
        async with self.turn.turn():
            self.check()
            try:
                await self._return()
                await self._flow.begin()
            finally:
                await self.settle()

    def stats(self) -> dict[str, float]:
        """Return the counters of this iterator.

        ``elements`` returned; ``read`` elements and ``bytes`` (estimated) of the sources; ``wait_seconds`` that the
        consumer waited for them, and ``consumer_seconds`` that it spent itself; chunks ``ready`` and ``in_flight``;
        failed elements (``errors``).
        """
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
        """Index and message of failed elements, the last 1,000 of each source."""
        return [error for reading in _readings(self._flow) for error in reading.errors.recent]

    async def _close(self) -> None:
        await self._flow.aclose()


def _readings(flow: Flow) -> Sequence[Reading]:
    if isinstance(flow, Reading):
        return [flow]
    return [reading for parent in flow.parents for reading in _readings(parent)]


def check_fingerprint(said: Any, own: Sequence[str]) -> None:
    """Check that a state belongs to this pipeline.

    Raises:
      StateError: if it does not; the message names the first stage that differs.
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
    """The elements of a stream, for ``async for``; its state can be saved and restored between any two elements.

    ::

        iterator = aiter(stream)
        element = await anext(iterator)
        state = iterator.get_state()  # plain JSON
        await iterator.set_state(state)  # continues after that element
    """

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
        """Return the state from which the next element follows: plain JSON with indices, not data."""
        return self._core.get_state()

    async def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.

        Raises:
          StateError: if this is not a state, or belongs to a different pipeline; the message names the first
            difference.
        """
        await self._core.restore(state)

    async def start_prefetch(self) -> None:
        """Start reading before the first element is requested."""
        await self._core.start_prefetch()

    def stats(self) -> dict[str, float]:
        """Return the counters of this iterator.

        ``elements`` returned; ``read`` elements and ``bytes`` (estimated) of the sources; ``wait_seconds`` that the
        consumer waited for them, and ``consumer_seconds`` that it spent itself; chunks ``ready`` and ``in_flight``;
        failed elements (``errors``).
        """
        return self._core.stats()

    @property
    def errors(self) -> list[tuple[int, str]]:
        """Index and message of failed elements, the last 1,000 of each source."""
        return self._core.errors

    async def aclose(self) -> None:
        """Close the iterator: stop its tasks, threads and processes. Closing twice is allowed."""
        await self._core.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.aclose()


class IterDataset(IterOperations):
    """A stream of elements, for ``async for``; create one with ``MapDataset.to_iter_dataset``.

    ::

        stream = MapDataset.source(reader).shuffle(seed=0).to_iter_dataset().filter(is_valid).batch(64)
        async for batch in stream:
            ...
    """

    def __aiter__(self) -> DatasetIterator:
        return DatasetIterator(self._stream)

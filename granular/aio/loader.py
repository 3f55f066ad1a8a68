"""The loader: batches in order, prefetched, resumable from a step."""

import collections
import functools
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, cast

from granular.aio.assembly import Assembly, Batch, Made, Spec, spec_of
from granular.aio.lifecycle import Running
from granular.aio.loops import Lock, await_user, need_loop
from granular.aio.pipeline.ahead import END, Ahead
from granular.aio.pipeline.errors import Errors, OnError
from granular.aio.pipeline.rendering import fingerprint
from granular.aio.pipeline.source import Source, convert, length_of, of_datapoint
from granular.errors import ClosedError, InvalidArgumentError, StateError

if TYPE_CHECKING:
    from granular.aio.pipeline.processes import Workers

_TRIED: Final = 100  # datapoints, of which one must be whole, if those that are not are skipped


class Loader:
    """Batches of a source, in order, the same for the same seed and step however they are fetched.

    Batch ``k`` of shard ``s`` holds the source's steps from ``(k * num_shards + s) * batch`` on. Over an endless source
    (``Epochs``, ``Sample``) it goes on for ever; over a finite one it ends with the last step that gives every shard
    a whole batch.

    Memory is bounded by ``prefetch + 1`` batches and what is in flight for them.

    Args:
      source: anything that :func:`granular.aio.sources.convert` takes; its datapoints are dicts of numbers and arrays.
      batch: datapoints in a batch.
      prefetch: batches that are fetched ahead.
      workers: threads that decode and transform. Reads need none: they are the event loop's. With ``mp``, processes.
      recycle_after: use the memory of a batch again after this many more were handed out; False for fresh memory.
      shard_id, num_shards: which of several loaders this is, each of which gets its own part of every global batch.
      mp: a start method ('spawn', 'forkserver', 'fork') or context of :mod:`multiprocessing`, to make batches in worker
        processes, which hand them over in shared memory. Source and functions must pickle, unless they are forked.
      on_error: what becomes of a datapoint that cannot be made: 'raise', 'skip', which makes its batch smaller, or a
        function of step and error, which gives one in its place, or None to skip it, or raises. What a store fails with
        is always raised.

    Raises (while iterating):
      DatapointError: for a datapoint whose keys, dtypes or shapes are not those of the first. Never is one cast or cut.
      Exception: what the source raised, as it was raised, with a note of the step. The loader stays at the batch that
        failed: to go on behind it, ``load`` a later step.
      WorkerError: if a worker process died.
    """

    def __init__(
        self,
        source: Any,
        batch: int,
        prefetch: int = 8,
        workers: int = 32,
        recycle_after: int | bool = False,
        shard_id: int = 0,
        num_shards: int = 1,
        mp: Any = None,
        on_error: OnError = 'raise',
    ) -> None:
        for name, value, least in (('batch', batch, 1), ('prefetch', prefetch, 0), ('workers', workers, 1)):
            if not isinstance(value, int) or value < least:
                raise InvalidArgumentError(f'{name} is {value!r}: want an integer from {least} on')
        if not 0 <= shard_id < num_shards:
            raise InvalidArgumentError(f'want 0 <= shard_id < num_shards, got {shard_id} and {num_shards}')
        self.source: Source = convert(source)
        self.batch, self.prefetch, self.workers = batch, prefetch, workers
        self.shard_id, self.num_shards, self.recycle_after = shard_id, num_shards, recycle_after
        self._core = _Core(self.source, batch, prefetch, workers, recycle_after, shard_id, num_shards, mp, on_error)
        self._core.close_with(self)

    # --- state

    @property
    def consumed(self) -> int:
        """The source's steps that lie before the next batch: those of all shards, as ``'step'`` of ``save``."""
        return self._core.ahead.position

    def save(self) -> dict[str, int]:
        """The state: plain JSON, of the batch that comes next, whatever is prefetched."""
        return {'step': self.consumed, 'seed': self.source.seed}

    def load(self, state: Mapping[str, int]) -> None:
        """Go on from a state, also while running: what was prefetched is dropped.

        Raises:
          StateError: if it is no state, or one of another seed or other batches.
        """
        step, seed = state.get('step'), state.get('seed', self.source.seed)
        if not isinstance(step, int) or step < 0:
            raise StateError(f'want a state such as {self.save()}, got {dict(state)}')
        if seed != self.source.seed:
            raise StateError(f'the state was saved with seed {seed}, this source has {self.source.seed}')
        self._core.check()
        self._core.ahead.drop()
        self._core.ahead.position = step

    state_dict = save
    load_state_dict = load

    def fingerprint(self) -> list[str]:
        """What it reads, a line for each stage: a state fits a loader with the same."""
        return [*fingerprint(self.source), f'Loader(batch={self.batch})']

    def stats(self) -> dict[str, float]:
        """What was handed out, and how fast; who waited for whom; what is read ahead.

        Batches, datapoints and bytes; batches and bytes per second; seconds that the consumer waited, and seconds that
        it spent on its own; batches that are ready and in flight; datapoints that could not be made.
        """
        core = self._core
        ready, in_flight = core.ahead.counts()
        times = {'wait_seconds': core.ahead.waited, 'consumer_seconds': core.ahead.consumed}
        seconds = max(sum(times.values()), 1e-9)
        rates = {f'{name}_per_second': core.counts[name] / seconds for name in ('batches', 'bytes')}
        return {**core.counts, **rates, **times, 'ready': ready, 'in_flight': in_flight, 'errors': core.errors.count}

    @property
    def errors(self) -> list[tuple[int, str]]:
        """Step and message of the datapoints that could not be made, the last thousand."""
        return list(self._core.errors.recent)

    # --- batches

    async def spec(self) -> Spec:
        """Of each key the dtype and shape of a datapoint, learned from the first one."""
        return await self._core.spec()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        batch, _ = await self.take()
        if batch is END:
            raise StopAsyncIteration
        return cast(Batch, batch)

    async def take(self) -> tuple[Any, int]:
        """The next batch, or ``END``, and the step behind it."""
        return await self._core.take()

    def take_back(self, taken: tuple[Any, int]) -> None:
        """Let a batch that did not reach the consumer come again, unless another was taken or a state loaded since."""
        self._core.take_back(*taken)

    # --- end

    async def aclose(self) -> None:
        """End: cancel what is being fetched, its threads and processes. More than once is no error."""
        await self._core.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class _Core(Running):
    """A loader at work; it knows nothing of the loader that the user holds."""

    def __init__(
        self,
        source: Source,
        batch: int,
        prefetch: int,
        workers: int,
        recycle_after: int | bool,
        shard_id: int,
        num_shards: int,
        mp: Any,
        on_error: OnError,
    ) -> None:
        super().__init__()
        self._source, self._batch, self._workers, self._mp = source, batch, workers, mp
        self._first, self._recycle_after = shard_id * batch, recycle_after
        self._processes: Workers | None = None
        self._stride = batch * num_shards
        self.ahead: Ahead[Made] = Ahead(
            self._make, self._stride, batch, workers, 'granular-loader', on_error != 'raise'
        )
        self.ahead.depth = prefetch
        self._assembly: Assembly | None = None
        self._handed: collections.deque[Batch] = collections.deque()
        self._spec: Spec | None = None
        self._learning = Lock()
        self.errors = Errors(on_error)
        self.counts = {'batches': 0, 'datapoints': 0, 'bytes': 0}

    @functools.cached_property
    def _limit(self) -> int | None:
        """The step behind the last batch; None if there is no end."""
        return None if self._source.endless else length_of(self._source) // self._stride * self._stride

    async def spec(self) -> Spec:
        """Of each key the dtype and shape of a datapoint, learned from the first one."""
        await need_loop()
        async with self._learning.turn():
            if self._spec is None:
                self._spec = await self._learn()
        return self._spec

    async def _learn(self) -> Spec:
        with self.ahead.using_pool():
            for step in range(1 if self.errors.raises else _TRIED):
                try:
                    return spec_of((await self._source.fetch([step]))[0])
                except Exception as error:
                    failed: Exception = error
                    if not of_datapoint(error):
                        break
        raise failed

    async def take(self) -> tuple[Any, int]:
        """The next batch, or ``END``, and the step behind it; one at a time."""
        await need_loop()
        async with self.turn.turn():
            self.check()
            await self.settle()
            batch = await await_user(self._next())
            return batch, self.ahead.position

    def take_back(self, batch: Any, position: int) -> None:
        """Let a batch come again, if it is the last that was taken."""
        if batch is END or self.ahead.position != position:
            return
        self.ahead.drop()
        self.ahead.position -= self._stride
        self.counts['batches'] -= 1
        self.counts['bytes'] -= sum(array.nbytes for array in batch.values())

    async def _next(self) -> Any:
        if self._assembly is None:
            self.ahead.stop = self._limit
            if self._limit is not None and self.ahead.position >= self._limit:
                return END
            self._assembly = Assembly(self._source, self._batch, await self.spec(), self.errors.on_error)
            if self._mp is not None:
                from granular.aio.pipeline.processes import Workers

                self._processes = Workers(self._assembly, self._workers, self._mp)
        found: Any = await self.ahead.take()
        if found is END:
            return END
        made: Made = found
        if made.failed:
            self.errors.report(made.failed)
        batch = made.batch
        self.counts['batches'] += 1
        self.counts['datapoints'] += self._batch - len(made.failed)
        self.counts['bytes'] += sum(array.nbytes for array in batch.values())
        if self._recycle_after:
            self._handed.append(batch)
            if len(self._handed) > self._recycle_after:
                self._assembly.recycled.append(self._handed.popleft())
        return batch

    async def _make(self, step: int) -> Made:
        first = step + self._first
        if self._processes is not None:
            made: Made = await self._processes.make(first)
            return made
        if self._assembly is None:
            raise ClosedError('the loader is closed')
        return await self._assembly.make(first)

    async def _close(self) -> None:
        await need_loop()
        await self.ahead.aclose()
        await self._source.release()
        if self._processes is not None:
            await self._processes.aclose()
        self._assembly = None
        self._handed.clear()

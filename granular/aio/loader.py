"""The loader: batches in order, prefetched, resumable from a step."""

import asyncio
import collections
import functools
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from granular.aio.assembly import Assembly, Batch, Made, Spec, spec_of
from granular.aio.loops import need_loop
from granular.aio.pipeline.ahead import END, Ahead
from granular.aio.pipeline.errors import Errors, OnError
from granular.aio.pipeline.rendering import fingerprint
from granular.aio.pipeline.source import Source, convert, length_of
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
        self._mp = mp
        self._processes: Workers | None = None
        self._stride = batch * num_shards
        self._ahead: Ahead[Made] = Ahead(
            self._make, self._stride, batch, workers, 'granular-loader', on_error != 'raise'
        )
        self._ahead.depth = prefetch
        self._assembly: Assembly | None = None
        self._handed: collections.deque[Batch] = collections.deque()
        self._spec: Spec | None = None
        self._spec_lock = asyncio.Lock()
        self._closed = False
        self._errors = Errors(on_error)
        self._counts = {'batches': 0, 'datapoints': 0, 'bytes': 0}

    # --- state

    @functools.cached_property
    def _limit(self) -> int | None:
        """The step behind the last batch; None if there is no end."""
        return None if self.source.endless else length_of(self.source) // self._stride * self._stride

    @property
    def consumed(self) -> int:
        """The source's steps that lie before the next batch: those of all shards, as ``'step'`` of ``save``."""
        return self._ahead.position

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
        self._ahead.drop()
        self._ahead.position = step

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
        ready, in_flight = self._ahead.counts()
        times = {'wait_seconds': self._ahead.waited, 'consumer_seconds': self._ahead.consumed}
        seconds = max(sum(times.values()), 1e-9)
        rates = {f'{name}_per_second': self._counts[name] / seconds for name in ('batches', 'bytes')}
        return {**self._counts, **rates, **times, 'ready': ready, 'in_flight': in_flight, 'errors': self._errors.count}

    @property
    def errors(self) -> list[tuple[int, str]]:
        """Step and message of the datapoints that could not be made, the last thousand."""
        return list(self._errors.recent)

    # --- batches

    async def spec(self) -> Spec:
        """Of each key the dtype and shape of a datapoint, learned from the first one."""
        await need_loop()
        async with self._spec_lock:
            if self._spec is None:
                self._spec = await self._learn()
        return self._spec

    async def _learn(self) -> Spec:
        with self._ahead.using_pool():
            for step in range(1 if self._errors.raises else _TRIED):
                try:
                    return spec_of((await self.source.fetch([step]))[0])
                except Exception as error:
                    failed: Exception = error
                    if isinstance(error, OSError | ClosedError):
                        break
        raise failed

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        await need_loop()
        if self._closed:
            raise ClosedError('the loader is closed')
        if self._assembly is None:
            self._ahead.stop = None if self._limit is None else self._limit
            if self._limit is not None and self._ahead.position >= self._limit:
                raise StopAsyncIteration
            self._assembly = Assembly(self.source, self.batch, await self.spec(), self._errors.on_error)
            if self._mp is not None:
                from granular.aio.pipeline.processes import Workers

                self._processes = Workers(self._assembly, self.workers, self._mp)
        found: Any = await self._ahead.take()
        if found is END:
            raise StopAsyncIteration
        made: Made = found
        if made.failed:
            self._errors.report(made.failed)
        batch = made.batch
        self._counts['batches'] += 1
        self._counts['datapoints'] += self.batch - len(made.failed)
        self._counts['bytes'] += sum(array.nbytes for array in batch.values())
        if self.recycle_after:
            self._handed.append(batch)
            if len(self._handed) > self.recycle_after:
                self._assembly.recycled.append(self._handed.popleft())
        return batch

    async def _make(self, step: int) -> Made:
        first = step + self.shard_id * self.batch
        if self._processes is not None:
            made: Made = await self._processes.make(first)
            return made
        if self._assembly is None:
            raise ClosedError('the loader is closed')
        return await self._assembly.make(first)

    # --- end

    async def aclose(self) -> None:
        """End: cancel what is being fetched, its threads and processes. More than once is no error."""
        await need_loop()
        self._closed = True
        await self._ahead.aclose()
        await self.source.release()
        if self._processes is not None:
            await self._processes.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

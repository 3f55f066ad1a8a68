"""The loader: batches in order, prefetched, resumable from a step."""

import asyncio
import collections
import functools
import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from granular.aio.loops import Begun, need_loop
from granular.aio.sources import Source, convert, length_of
from granular.aio.threads import CORES, Threads, Timer, begun, current, offload
from granular.config import MiB
from granular.errors import ClosedError, DatapointError, InvalidArgumentError, StateError, UnsupportedError

Batch = dict[str, NDArray[Any]]
Spec = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]

# What a loop may assemble by itself, in less than a millisecond: bytes copied, and values looked at.
_IN_PLACE: Final = MiB
_VALUES_IN_PLACE: Final = 512
# Seconds of a batch, and of each of its datapoints, above which several batches are made at a time.
_LONG: Final = 0.005
_LONG_EACH: Final = 0.0001
_PATIENCE: Final = 3  # such batches


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
      workers: threads that decode and transform. Reads need none: they are the event loop's.
      recycle_after: use the memory of a batch again after this many more were handed out; False for fresh memory.
      shard_id, num_shards: which of several loaders this is, each of which gets its own part of every global batch.
      mp: reserved for worker processes.

    Raises (while iterating):
      DatapointError: for a datapoint whose keys, dtypes or shapes are not those of the first. Never is one cast or cut.
      Exception: what the source raised, as it was raised, with a note of the step. The loader stays at the batch that
        failed: to go on behind it, ``load`` a later step.
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
    ) -> None:
        for name, value, least in (('batch', batch, 1), ('prefetch', prefetch, 0), ('workers', workers, 1)):
            if not isinstance(value, int) or value < least:
                raise InvalidArgumentError(f'{name} is {value!r}: want an integer from {least} on')
        if not 0 <= shard_id < num_shards:
            raise InvalidArgumentError(f'want 0 <= shard_id < num_shards, got {shard_id} and {num_shards}')
        if mp is not None:
            raise UnsupportedError('worker processes (mp=) are not available yet: leave mp=None for threads')
        self.source: Source = convert(source)
        self.batch, self.prefetch, self.workers = batch, prefetch, workers
        self.shard_id, self.num_shards, self.recycle_after = shard_id, num_shards, recycle_after
        self._stride = batch * num_shards
        self._step = 0  # of the batch that is handed out next
        self._ahead: collections.deque[asyncio.Task[Batch]] = collections.deque()
        self._recycled: collections.deque[Batch] = collections.deque()
        self._pool: Threads | None = None
        self._spec: Spec | None = None
        self._spec_lock = asyncio.Lock()
        # One batch at a time: threads that read the page cache only get in each other's way, and what is slow is spread
        # over the pool by itself.
        self._lane = Threads(1, 'granular-loader-lane')
        self._long = 0  # batches that took long, one after the other
        self._waits = False  # whether batches wait for something, such as a bucket
        self._closed = False
        self._counts = {'batches': 0, 'datapoints': 0, 'bytes': 0, 'wait_seconds': 0.0}

    # --- state

    @functools.cached_property
    def _limit(self) -> int | None:
        """The step behind the last batch; None if there is no end."""
        return None if self.source.endless else length_of(self.source) // self._stride * self._stride

    def save(self) -> dict[str, int]:
        """The state: plain JSON, of the batch that comes next, whatever is prefetched."""
        return {'step': self._step, 'seed': self.source.seed}

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
        self._drop()
        self._step = step

    state_dict = save
    load_state_dict = load

    def stats(self) -> dict[str, float]:
        """Batches, datapoints and bytes handed out, seconds the consumer waited, and batches in flight or ready."""
        ready = sum(task.done() for task in self._ahead)
        return {**self._counts, 'ready': ready, 'in_flight': len(self._ahead) - ready}

    # --- batches

    async def spec(self) -> Spec:
        """Of each key the dtype and shape of a datapoint, learned from the first one."""
        await need_loop()
        async with self._spec_lock:
            if self._spec is None:
                with self._using_pool():
                    point = (await self.source.fetch([0]))[0]
                self._spec = _spec_of(point)
        return self._spec

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        await need_loop()
        if self._closed:
            raise ClosedError('the loader is closed')
        self._request()
        if not self._ahead:
            raise StopAsyncIteration
        began = time.perf_counter()
        task = self._ahead[0]
        try:
            batch = await asyncio.shield(task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if task.cancelled() and current is not None and not current.cancelling():
                return await self.__anext__()  # a state was loaded meanwhile
            raise  # the consumer gave up waiting; the batch is kept for whoever asks next
        except BaseException:
            self._drop()
            raise
        if not self._ahead or self._ahead[0] is not task:
            return await self.__anext__()  # a state was loaded meanwhile
        self._ahead.popleft()
        self._step += self._stride
        self._request()
        self._counts['wait_seconds'] += time.perf_counter() - began
        self._counts['batches'] += 1
        self._counts['datapoints'] += self.batch
        self._counts['bytes'] += sum(array.nbytes for array in batch.values())
        if self.recycle_after:
            self._recycled.append(batch)
        return batch

    def _request(self) -> None:
        """Begin to fetch what is not yet, up to ``prefetch`` batches behind the next one."""
        wanted = self.prefetch + 1
        while len(self._ahead) < wanted:
            step = self._step + len(self._ahead) * self._stride
            if self._limit is not None and step >= self._limit:
                return
            task = asyncio.create_task(self._fetch(step + self.shard_id * self.batch))
            task.add_done_callback(_seen)
            self._ahead.append(task)

    async def _fetch(self, first: int) -> Batch:
        spec = await self.spec()
        with self._using_pool():
            if not self._waits:
                found = await begun(lambda: self._make_timed(first, spec), self._lane)
                if not isinstance(found, Begun):
                    return found
                self._waits = True
                return await found
            return await self._make(first, spec)

    async def _make_timed(self, first: int, spec: Spec) -> Batch:
        timer = Timer()
        batch = await self._make(first, spec)
        self._long = self._long + 1 if timer.wall > max(_LONG, _LONG_EACH * self.batch) else 0
        if self._long > _PATIENCE and self._lane.width == 1:
            # What takes long lets go of the interpreter meanwhile, as decoders of images do: one batch for each core.
            self._lane, before = Threads(CORES, 'granular-loader-lane'), self._lane
            before.shutdown(wait=False)
        return batch

    async def _make(self, first: int, spec: Spec) -> Batch:
        points = await self.source.fetch(np.arange(first, first + self.batch))
        if self._is_small(spec):
            return self._assemble(points, first, spec)
        return await offload(self._assemble, points, first, spec)

    def _is_small(self, spec: Spec) -> bool:
        size = sum(dtype.itemsize * math.prod(shape) for dtype, shape in spec.values())
        return self.batch * size <= _IN_PLACE and self.batch * len(spec) <= _VALUES_IN_PLACE

    def _assemble(self, points: list[Any], first: int, spec: Spec) -> Batch:
        for i, point in enumerate(points):
            if type(point) is not dict or point.keys() != spec.keys():
                _check_keys(point, first + i, spec)
        out = self._memory(spec)
        for key, (dtype, shape) in spec.items():
            target = out[key]
            for i, point in enumerate(points):
                value = point[key]
                if type(value) is not np.ndarray:
                    value = np.asarray(value)
                if (value.dtype is not dtype and value.dtype != dtype) or value.shape != shape:
                    raise _differing(key, value, first + i, dtype, shape)
                target[i] = value
        return out

    def _memory(self, spec: Spec) -> Batch:
        if self.recycle_after and len(self._recycled) > self.recycle_after:
            return self._recycled.popleft()
        return {key: np.empty((self.batch, *shape), dtype) for key, (dtype, shape) in spec.items()}

    def _using_pool(self) -> '_Using':
        if self._pool is None:
            self._pool = Threads(self.workers, 'granular-loader')
        return _Using(self._pool)

    # --- end

    def _drop(self) -> None:
        while self._ahead:
            self._ahead.pop().cancel()

    async def aclose(self) -> None:
        """End: cancel what is being fetched and its threads. More than once is no error."""
        await need_loop()
        self._closed = True
        tasks = list(self._ahead)
        self._drop()
        await asyncio.gather(*tasks, return_exceptions=True)
        pool, self._pool = self._pool, None
        for threads in (self._lane, pool):
            if threads is not None:
                threads.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class _Using:
    """Within its block, the loader's threads do what blocks."""

    def __init__(self, pool: Threads) -> None:
        self._pool = pool

    def __enter__(self) -> None:
        self._token = current.set(self._pool)

    def __exit__(self, *args: object) -> None:
        current.reset(self._token)


def _seen(task: asyncio.Task[Batch]) -> None:
    # A batch that nobody comes for, because a state was loaded or the program ends, fails in silence.
    if not task.cancelled():
        task.exception()


def _check_keys(point: Any, step: int, spec: Spec) -> None:
    if not isinstance(point, Mapping):
        raise DatapointError(f'step {step}: want a dict for a datapoint, got {type(point).__name__}')
    if point.keys() != spec.keys():
        raise DatapointError(f'step {step}: keys are {sorted(point)}, those of the first {sorted(spec)}')


def _spec_of(point: Any) -> Spec:
    if not isinstance(point, Mapping):
        raise DatapointError(f'step 0: want a dict for a datapoint, got {type(point).__name__}')
    arrays = {key: np.asarray(value) for key, value in point.items()}
    for key, value in arrays.items():
        if value.dtype == object:
            raise _differing(key, value, 0)
    return {key: (value.dtype, value.shape) for key, value in arrays.items()}


def _differing(
    key: str, value: NDArray[Any], step: int, dtype: np.dtype[Any] | None = None, shape: tuple[int, ...] = ()
) -> DatapointError:
    if value.dtype == object:
        return DatapointError(f'step {step}, key {key!r}: makes no array of numbers: leave it out in a transform')
    return DatapointError(
        f'step {step}, key {key!r}: dtype {value.dtype} and shape {value.shape}, the first has {dtype} and {shape}: '
        f'make them equal in a transform'
    )

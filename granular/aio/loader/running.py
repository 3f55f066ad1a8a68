"""The running part of a Loader: its batches are loaded ahead, and each reaches one thread."""

import collections
import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from granular.aio.execution.failures import Errors, Failure, OnError, fetch_capturing
from granular.aio.execution.prefetch import END, NOT_READY, Prefetch
from granular.aio.loader.collate import Assembly, Batch, Counts, LoadedBatch, Spec, spec_of
from granular.aio.pipeline.nodes.source import Source, length_of
from granular.aio.pipeline.position import Turns
from granular.aio.runtime.lifecycle import Running
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.user_functions import await_user
from granular.errors import ClosedError, DatapointError, GranularError, InvalidArgumentError

if TYPE_CHECKING:
    from granular.aio.execution.workers import Workers

_JUDGED: Final = 200  # batches after which the share of the interpreter is judged
_TRIED: Final = 100  # datapoints tried for the spec if failed ones are skipped


class RunningLoader(Running):
    """The running part of a loader. It holds no reference to the Loader, so that a dropped Loader can be closed."""

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
        self.source, self.batch, self._workers, self._mp = source, batch, workers, mp
        self._recycle_after = recycle_after
        self._recycles = bool(recycle_after) and mp is None  # worker processes have memory of their own
        self.turns = Turns(shard_id, num_shards, batch, whole=True)
        self._length: int | None = None
        self._start = 0  # the step from which shards take turns
        self._ended = False  # True once the consumer was told the end of the epoch
        # The last batch, until it was received: where it begins, the thread to which it is on its way (0 for none), and
        # whether it is to come again, because it failed or did not reach its thread.
        self._before, self._recipient, self._astray = 0, 0, False
        self._processes: Workers | None = None
        self.ahead: Prefetch[LoadedBatch] = Prefetch(
            self._load_batch, self.turns.stride, batch, workers, 'loader', on_error != 'raise'
        )
        self.ahead.depth, self.ahead.token = prefetch, self.token
        self._assembly: Assembly | None = None
        self._returned: collections.deque[Batch] = collections.deque()
        self._spec: Spec | None = None
        self.errors = Errors(on_error, 'step')
        self._reported = -1  # where the last batch begins of which failures were reported
        self.counts = Counts()
        self._counted = self.counts  # before the last batch
        self._last: Batch | None = None

    def __getstate__(self) -> dict[str, Any]:
        with contextlib.suppress(GranularError):  # it is raised by the iteration
            self.length  # noqa: B018 - where it is unpickled, a reader is not open yet
        return super().__getstate__()

    @property
    def length(self) -> int | None:
        """The number of datapoints; None if the source is endless."""
        if self._length is None and not self.source.endless:
            self._length = length_of(self.source)
        return self._length

    @property
    def batches(self) -> int | None:
        """The number of batches; None if the source is endless. One with too few datapoints for a batch is refused."""
        if (length := self.length) is None:
            return None
        turns = self.turns
        if length < turns.stride:
            of_shards = f' of each of {turns.count} shards' if turns.count > 1 else ''
            raise InvalidArgumentError(
                f'{self.source.describe()}: expected {turns.stride} datapoints or more for a batch of {self.batch}'
                f'{of_shards}, got {length}: choose a smaller batch, or repeat the source'
            )
        return turns.rounds(0, length)

    @property
    def position(self) -> int:
        """The step of the first batch that was not received."""
        return self._before if self._astray or self._recipient else self.ahead.position

    def seek(self, step: int) -> None:
        """Continue from a step of the source, from which shards take turns: shard ``i`` takes the ``i``-th batch."""
        self.ahead.drop()
        self.ahead.position = self._start = step
        self._ended, self._recipient, self._astray, self._reported = False, 0, False, -1
        if self.ahead.stop is not None:
            self._set_stop()

    def begin_epoch(self) -> None:
        """Continue from the first step, if the last iteration came to its end."""
        if self._ended:
            self.seek(0)  # nothing is prefetched, which could only be dropped on the loop

    def _set_stop(self) -> None:
        """Let a source end where a shard would get no whole batch: an endless one where steps exceed 63 bits."""
        length = sys.maxsize if self.batches is None or self.length is None else self.length
        self.ahead.stop = self.turns.stop(self._start, length)

    async def spec(self) -> Spec:
        if self._spec is None:
            await ensure_event_loop()
            async with self.turn():
                self.check()
                return await self.compute(self._learned_spec())
        return self._spec

    async def _learned_spec(self) -> Spec:
        if self._spec is None:
            with self.ahead.using_pool():
                self._spec = await self._first_spec()
        return self._spec

    async def _first_spec(self) -> Spec:
        """Return the spec of the first datapoint; unless failures are raised, of the first one that has a spec."""
        if self.errors.raises:
            return spec_of((await self.source.fetch([0]))[0], 0)
        for step in range(_TRIED if self.length is None else min(_TRIED, self.length)):
            datapoint = (await fetch_capturing(self.source, [step]))[0]
            if type(datapoint) is not Failure:
                try:
                    return spec_of(datapoint, step)
                except DatapointError as error:
                    datapoint = Failure(step, error)
            if self.errors.raises_for(datapoint):
                break
        raise datapoint.release()

    async def take(self) -> Any:
        """Return the next batch, or ``END``; concurrent calls wait for each other.

        Call ``received`` right before the batch is handed to the consumer: otherwise the thread gets it again.
        """
        asked, recipient = time.perf_counter(), threading.get_ident()
        async with self.turn():
            self.check()
            if self._assembly is None or self._astray or self._recipient == recipient:
                await ensure_event_loop()  # to begin, or to go back
                self._return(recipient)
            if self._loop is None:
                await self.settle()
            self._before, self._counted = self.ahead.position, self.counts
            self._astray, self._recipient = True, recipient
            if self._recycles:
                self._recycle()
            loaded = NOT_READY if self._assembly is None else self.ahead.take_ready(asked)
            if loaded is NOT_READY:
                loaded = await await_user(self.compute(self._next(asked)))
            batch = self._counted_batch(loaded)
            self._ended = batch is END
            if self._ended:
                self._recipient = 0
            self._astray = False
            return batch

    def _return(self, recipient: int) -> None:
        """Go back to the last batch, if it failed or did not reach this thread."""
        if self._astray or self._recipient == recipient:
            if self.ahead.position != self._before:
                self.ahead.drop()
                self.ahead.position = self._before
            self.counts, self._last = self._counted, None
            self._astray, self._recipient = False, 0

    def received(self) -> None:
        """Note that the batch that this thread took reaches its consumer, without a further call."""
        this = threading.get_ident()
        if self._recipient == this:  # otherwise another thread has taken a batch since
            self._recipient = 0

    def is_expected(self) -> bool:
        """Return whether the last batch has not reached this thread yet, which asked for it."""
        return self._recipient == threading.get_ident()

    def take_back(self) -> None:
        """Let a batch that did not reach this thread come again, unless another one was taken or a state loaded."""
        if self._recipient == threading.get_ident():
            self._astray = True

    async def _next(self, asked: float) -> Any:
        if self._assembly is None:
            self._set_stop()
            if self.ahead.stop is not None and self.ahead.position >= self.ahead.stop:
                return END
            spec = await self._learned_spec()
            self._assembly = Assembly(self.source, self.batch, spec, self.errors.on_error, self._recycles)
            if self._mp is not None:
                from granular.aio.execution.workers import Workers

                count = min(self._workers, self.ahead.depth + 1)  # others would wait for their turn without work
                self._processes = Workers(self._assembly, count, self._mp)
        return await self.ahead.take(asked)

    def _counted_batch(self, loaded: Any) -> Any:
        """Return the batch of what was loaded, counted, or ``END``."""
        if loaded is END:
            self.errors.summarise()
            return END
        batch, rows, size, failed = loaded
        if failed and self._before != self._reported:  # not again for one that comes again
            self.errors.report(failed)
            self._reported = self._before
        batches, datapoints, nbytes = self.counts
        self.counts = Counts(batches + 1, datapoints + rows, nbytes + size)
        if self._recycles and all(len(array) == self.batch for array in batch.values()):
            self._last = batch.copy()  # the consumer may change its own
        if batches + 1 == _JUDGED and self._mp is None:
            self.ahead.judge_interpreter()
        return batch

    def _recycle(self) -> None:
        """Let the memory of an earlier batch be used again, as one more was received."""
        last, self._last = self._last, None  # first: an interrupt may come after the call, and a state be loaded then
        if last is None:
            return
        self._returned.append(last)
        if len(self._returned) > self._recycle_after and self._assembly is not None:
            self._assembly.recycled.append(self._returned.popleft())

    async def _load_batch(self, step: int, _: int) -> LoadedBatch:
        first = step + self.turns.offset
        task = self._processes or self._assembly
        if task is None:
            raise ClosedError('the loader is closed')
        try:
            loaded: LoadedBatch = await task.compute(first)
        except Exception as error:
            error.add_note(f'in the batch of the steps {first} to {first + self.batch - 1} of the Loader')
            raise
        return loaded

    async def _close(self) -> None:
        await ensure_event_loop()
        try:
            await self.ahead.aclose()
            await self.source.release()
        finally:
            self.errors.summarise()
            if self._processes is not None:
                await self._processes.aclose()
        self._assembly = None
        self._returned.clear()

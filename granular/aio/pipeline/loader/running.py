"""The running part of a Loader: its batches are loaded ahead, and each reaches one consumer."""

import collections
import contextlib
import sys
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import ArrayLike

from granular._support.indexing import Ints
from granular._support.text import counted
from granular.aio.pipeline.cursor import Cursor
from granular.aio.pipeline.epochs import Epochs, Loops
from granular.aio.pipeline.execution.failures import Errors, Failure, OnError, fetch_capturing
from granular.aio.pipeline.execution.prefetch import END, Crew, Prefetch
from granular.aio.pipeline.loader.collate import Assembly, Batch, Counts, LoadedBatch, Spec, spec_of
from granular.aio.pipeline.nodes.indices import ENDLESS
from granular.aio.pipeline.nodes.source import Source, length_of
from granular.aio.pipeline.origins import Origins, Picked, origins_of, steps_of
from granular.aio.pipeline.position import FREE, RestoreRules, Turns
from granular.aio.pipeline.shards import warn_of_no_shard
from granular.aio.pipeline.streams.flow import Flow
from granular.aio.pipeline.summary import ExecutionSummary, StageSummary, Times
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.lifecycle import Computing
from granular.errors import (
    ClosedError,
    DatapointError,
    GranularError,
    InvalidArgumentError,
    OutOfRangeError,
    StateError,
)

if TYPE_CHECKING:
    from granular.aio.pipeline.execution.workers import Workers

_JUDGED: Final = 200  # batches after which the share of the interpreter is judged
_TRIED: Final = 100  # datapoints tried for the spec if failed ones are skipped


class Loading(Flow):
    """The batches of a source, loaded ahead into memory that is used again. The state is the step of the next one."""

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
        memory: int,
    ) -> None:
        self.source, self.batch = source, batch
        self._recycle_after = recycle_after
        self._recycles = bool(recycle_after) and mp is None  # worker processes have memory of their own
        self.turns = Turns(shard_id, num_shards, batch, whole=True)
        self._length: int | None = None
        self.goal: int | None = 0  # the step at which the next batch is to be read, None for the one after the last
        self._stops = False  # True once the end of the epoch of the next batch is known
        processes = 1 if mp is None else min(workers, prefetch + 1)
        self._assembly = Assembly(
            source, batch, self.turns.offset, on_error, self._recycles, memory, prefetch, processes
        )
        compute: Callable[..., Coroutine[Any, Any, LoadedBatch]] = self._assembly.compute
        self._processes = None if mp is None else _processes(self._assembly, processes, mp)
        ask = None
        if self._processes is not None:
            compute, ask = self._processes.compute, self._processes.ask
        self.ahead: Prefetch[LoadedBatch] = Prefetch(
            compute, ask, self.turns.stride, batch, workers, 'loader', on_error != 'raise'
        )
        self._returned: collections.deque[Batch] = collections.deque()
        self._last: Batch | None = None  # unless it did not reach its consumer
        self.errors = Errors(on_error, 'step')
        self._reported = -1  # where the last batch begins of which failures were reported
        self.counts = Counts()
        self._counted = self.counts  # before the last batch
        self.times = Times(self.sources())

    def __getstate__(self) -> dict[str, Any]:
        with contextlib.suppress(GranularError):  # it is raised by the iteration
            self.length  # noqa: B018 - where it is unpickled, a reader is not open yet
        return self.__dict__

    @property
    def length(self) -> int | None:
        """The number of datapoints; None if the source is endless."""
        if self._length is None and not self.source.endless:
            self._length = length_of(self.source)
        return None if self._length is None or self._length >= ENDLESS else self._length

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
    def epochs(self) -> Epochs | None:
        """The epochs of the source; None if it is endless."""
        return None if (length := self.length) is None else Epochs(length, self.turns)

    def first_steps(self, numbers: Ints) -> Ints:
        """Return the step of the source that each batch begins with over all shards, by its number over all epochs."""
        if (batches := self.batches) is None or (epochs := self.epochs) is None:
            return numbers * self.turns.stride
        epoch, place = np.divmod(numbers, batches)
        steps: Ints = epoch * epochs.length + place * self.turns.stride
        return steps

    def number_at(self, step: int) -> int:
        """Return the number of the batch at a step; raise ``StateError`` between two batches."""
        batches, epochs = self.batches, self.epochs
        epoch, place = (0, step) if epochs is None else divmod(step, epochs.length)
        number, rest = divmod(place, self.turns.stride)
        if rest:
            raise StateError(
                f'batches have no number since the loader resumed at step {place} of an epoch: expected a multiple of '
                f'{self.turns.stride}, the datapoints of a batch of {counted(self.turns.count, "shard")}: '
                f'set_next_index continues at a number'
            )
        return epoch * (batches or 0) + number

    def origins(self, steps: ArrayLike) -> Origins:
        """Return which datapoints batches are made of, by their numbers over all epochs."""
        numbers, batch = steps_of(steps), self.batch
        if (numbers < 0).any():
            raise OutOfRangeError(f'indices: batches count from 0, got {numbers[numbers < 0][0]}')
        rows = np.tile(np.arange(batch), len(numbers))
        indices = np.repeat(self.first_steps(numbers) + self.turns.offset, batch) + rows
        zeros = np.zeros_like(rows)
        picked = Picked(np.repeat(np.arange(len(numbers)), batch), rows, indices, zeros, zeros - 1)
        return origins_of(numbers, self.source, picked)

    def epochs_if_open(self) -> Epochs | None:
        """Return the epochs of the source; None also while it is not open."""
        with contextlib.suppress(ClosedError):
            return self.epochs
        return None

    @property
    def known_epochs(self) -> Epochs | None:
        """The epochs of the source, if its length was asked for."""
        return None if self._length is None else self.epochs

    def settled(self, step: int) -> int:
        """Return the step of the next whole batch of all shards, in this epoch or the next one."""
        epochs = self.known_epochs
        return step if epochs is None or epochs.length < self.turns.stride else epochs.settled(step)

    async def spec(self) -> Spec:
        if not self._assembly.spec:
            with self.ahead.using_pool():
                self._assembly.spec = await Computing(self._first_spec(), self.ahead.token)
        return self._assembly.spec

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

    def sources(self) -> list[Source]:
        return [self.source]

    def bind(self, token: object, crew: Crew) -> None:
        self.ahead.bind(token, crew)

    def summary(self) -> ExecutionSummary:
        """Return where the time went, from the source to the consumer."""
        consumer = StageSummary('consumer', self.counts.batches, self.ahead.consumed, self.ahead.waited)
        return ExecutionSummary([*self.times.parts(), *self.times.stages(self.sources())], [consumer])

    def received(self, seconds: float) -> None:
        self.ahead.received(seconds)

    def mark(self) -> int:
        return self.ahead.position if self.goal is None else self.goal

    state = mark

    async def restore(self, state: int, rules: RestoreRules = FREE) -> None:
        self.forget()
        if self.goal is None:
            await self._seek(state)

    def read_from(self, step: int) -> None:
        """Let the next batch be that of a step, from which shards take turns."""
        self.goal, self._reported = step, -1

    def forget(self) -> None:
        """Forget the last batch, which failed or did not reach its consumer."""
        self.counts, self._last = self._counted, None

    async def next(self) -> Any:
        asked = time.perf_counter()
        self._recycle()
        self._counted = self.counts
        loaded: Any = None
        while loaded is None or self.goal is not None:  # which may be set meanwhile
            if self.goal is not None:
                await to_loop()  # tasks may only be touched on their loop
                await self._seek(self.settled(self.goal))
                self.goal, self._stops = None, False
            begin = self.ahead.position
            if not self._stops:
                await self._begin(begin)
            self.ahead.depth = self._assembly.depth
            try:
                loaded = await self.ahead.take(asked)
            except Exception as error:
                if self.goal is None:
                    first = begin + self.turns.offset
                    error.add_note(f'in the batch of the steps {first} to {first + self.batch - 1} of the Loader')
                    raise
        if loaded is END:
            self.errors.summarise()
            return END
        batch, rows, size, failed = loaded
        if failed and begin != self._reported:  # not again for one that comes again
            self.errors.report(failed)
            self._reported = begin
        batches, datapoints, nbytes = self.counts
        self.counts = Counts(batches + 1, datapoints + rows, nbytes + size)
        if self._recycles and all(len(array) == self.batch for array in batch.values()):
            self._last = batch.copy()  # the consumer may change its own
        if batches + 1 == _JUDGED and self._processes is None:
            self.ahead.judge_interpreter()
        return batch

    async def _seek(self, step: int) -> None:
        if self.ahead.position != step:  # otherwise what is loaded ahead is kept
            await self.ahead.seek(step)

    async def _begin(self, step: int) -> None:
        """Determine where a loop from a step on ends, and what its batches are."""
        if self.turns.count == 1:
            warn_of_no_shard(f'a Loader of {self.source.describe()}', 'pass shard_id=rank, num_shards=number of ranks')
        if self.batches is None or (epochs := self.epochs) is None:
            self.ahead.stop = self.turns.stop(step, sys.maxsize)  # where steps exceed 63 bits
        else:
            self.ahead.stop = epochs.stop(step)
        await self.spec()
        self._assembly.find_depth()
        self._stops = True

    def _recycle(self) -> None:
        """Let the memory of an earlier batch be used again, as one more was received."""
        last, self._last = self._last, None
        if last is None:
            return
        self._returned.append(last)
        if len(self._returned) > self._recycle_after:
            self._assembly.recycled.append(self._returned.popleft())

    async def aclose(self) -> None:
        await to_loop()
        try:
            await self.ahead.aclose()
            await self.source.release()
        finally:
            self.errors.summarise()
            if self._processes is not None:
                await self._processes.aclose()
        self._assembly.recycled.clear()
        self._returned.clear()


def _processes(assembly: Assembly, count: int, mp: Any) -> 'Workers':
    from granular.aio.pipeline.execution.workers import Workers

    return Workers(assembly, count, mp)


class RunningLoader(Cursor):
    """The position of a Loader, over all its loops.

    It holds no reference to the Loader, so that a dropped Loader can be closed.
    """

    flow: Loading
    _before: int

    def __init__(self, flow: Loading) -> None:
        super().__init__(flow)
        self.loops = Loops()
        self.driven = False  # True if what drives it tells its loops what was handed out, which is behind what it took
        self._before = 0

    @property
    def epoch(self) -> int:
        """The epoch of the next batch; 0 if the source is endless."""
        step = self.position
        return 0 if not step or (epochs := self.flow.epochs) is None else epochs.epoch_of(step)

    @property
    def position(self) -> int:
        """The step of the first batch that its consumer did not receive."""
        return self._before if not self.driven and self._in_move() else self.loops.step

    @property
    def reading(self) -> int:
        """The step of the first batch that was not taken from here."""
        return self.flow.settled(self._before if self.flow.goal is None and self._in_move() else self.flow.mark())

    def load(self, step: int) -> None:
        """Continue from the step of a state: shard ``i`` takes the ``i``-th batch from there on."""
        self._go(self.loops.load(self.flow.settled(step)))

    def begin_loop(self) -> None:
        """Begin a loop, in the next epoch if the last one left this one."""
        self._go(self.loops.begin(self.flow.known_epochs))

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop begin an epoch of a finite source."""
        if (epochs := self.flow.epochs) is not None:
            self._go(self.loops.set_epoch(epoch, epochs))

    def _go(self, loops: Loops) -> None:
        self.loops = loops
        self.flow.read_from(loops.step)
        if self._in_move():  # another batch follows than the last one, which failed or is on its way
            self.flow.forget()
        self._undelivered = self._expected = False

    def received(self, element: Any) -> None:
        super().received(element)
        if self.driven:
            return
        loops = self._last = self.loops
        self.loops = loops.end() if element is END else loops.give(self.flow.settled(self.flow.mark()))

    def _failed(self) -> None:
        if not self.driven:
            self.loops = self.loops.fail()

    def _take_back(self, *_: object) -> None:
        super()._take_back()
        if self._last is not None:
            self.loops = self._last

    async def spec(self) -> Spec:
        async with self.turn():
            self.check()
            return await self.flow.spec()

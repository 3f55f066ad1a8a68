"""Prefetching: items computed ahead of their consumer, in threads or on the loop, and returned in order."""

import abc
import asyncio
import collections
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Generic, Literal, TypeVar

from granular._support.text import logger
from granular.aio.pipeline.execution.failures import capturing
from granular.aio.runtime.immediate import Rest, running_loop, to_loop
from granular.aio.runtime.pools import CORES, Threads, current
from granular.aio.runtime.tasks import end_tasks, outcome, result_of, start_task
from granular.aio.runtime.threads import Timer, start_inline
from granular.aio.runtime.user_functions import mark_computing
from granular.errors import ClosedError, GranularError
from granular.metrics import counters

T = TypeVar('T')

_LONG: Final = 0.005  # seconds for an item, and for each of its datapoints, above which several are computed at a time
_LONG_EACH: Final = 0.0001
_LATER: Final = 0.005  # seconds by which the next items start later, where others are ready
_LATER_SHARE: Final = 0.05  # of the time between two requests, which is less
_NOW: Final = 0.0005  # seconds of these that are not worth a timer
_CHEAP: Final = 0.002  # seconds below which an item is cheap
_PATIENCE: Final = 3  # slow items in a row
_JUDGED: Final = 2.0  # seconds after which the shares of the interpreter are judged
_SHARE: Final = 15  # percent of the time that each of two threads must compute
_BUSY: Final = 85  # percent that both must compute together
END: Final = object()
"""Sentinel returned after the last item."""
NOT_READY: Final = object()
"""Sentinel returned in place of an item that is not ready."""


class Item(abc.ABC, Generic[T]):
    """An item that is computed, or ready."""

    __slots__ = ('position', 'value')

    def __init__(self, position: int) -> None:
        self.position = position
        self.value: Any = NOT_READY  # until it is ready, and if it fails

    @property
    @abc.abstractmethod
    def is_done(self) -> bool:
        """True once it is ready, has failed, or was cancelled."""

    @property
    @abc.abstractmethod
    def is_cancelled(self) -> bool: ...

    @abc.abstractmethod
    async def result(self) -> T:
        """Wait for the item, under a loop. Raise its error; and ``CancelledError`` if it or the caller is cancelled."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Let it not be computed, if it is not done."""


class _Computed(Item[T]):
    """An item of this process. Its task ends on its loop: Ctrl-C in the end of one would be lost."""

    __slots__ = ('task',)

    def __init__(self, task: 'asyncio.Task[T]', position: int) -> None:
        super().__init__(position)
        self.task = task
        task.add_done_callback(self._end)

    def _end(self, task: 'asyncio.Task[T]') -> None:
        # The error of an item that is never taken, because a state was loaded or the program ends, is not reported.
        if not task.cancelled() and task.exception() is None:
            self.value = task.result()

    @property
    def is_done(self) -> bool:
        return self.task.done()

    @property
    def is_cancelled(self) -> bool:
        return self.task.cancelled()

    async def result(self) -> T:
        return await outcome(result_of(self.task))

    def cancel(self) -> None:
        self.task.cancel()


class Crew:
    """The threads of an iterator, which all of its prefetches share, however many streams it combines.

    One lane computes items that never wait, one after the other. If they are slow, it has a thread for each core. Pools
    decode and transform, one for each number of threads.
    """

    def __init__(self) -> None:
        self._pools: dict[int, Threads] = {}
        self._lane: Threads | None = None
        self._retired: list[Threads] = []
        self._width = 1  # threads in the lane

    def pool(self, workers: int, kind: str) -> Threads:
        """Return the threads that decode and transform; with 1, functions are called one at a time."""
        if (pool := self._pools.get(workers)) is None:
            pool = self._pools[workers] = Threads(workers, f'granular-{kind}')
        return pool

    def lane(self, kind: str) -> Threads:
        """Return the threads that compute items."""
        if self._lane is None:
            self._lane = Threads(self._width, f'granular-{kind}-lane')
        return self._lane

    def widen_lane(self) -> None:
        """Compute one item per core: slow items release the interpreter lock, as image decoders do."""
        if self._width == 1:
            self._width = CORES
            if self._lane is not None:
                self._retired.append(self._lane)
            self._lane = None

    def retire(self) -> None:
        """Let the threads end after the calls that are queued."""
        pools = [*self._pools.values(), *self._retired, *([] if self._lane is None else [self._lane])]
        self._pools = {}
        self._lane = None
        self._retired = []
        for threads in pools:
            threads.retire()


class Prefetch(Generic[T]):
    """Computes items by position, up to ``depth`` of them ahead of the next one.

    Items that never wait, such as reads from a local disk, are computed on one thread, one after the other: threads
    that read the page cache only slow each other down, and slow reads are spread over the pool anyway. Items that wait,
    as for a bucket, are computed on the loop, concurrently. A consumer in another thread takes an item that is ready
    there, and only tells the loop to start the next one. The first item in the queue is the position, so that taking
    it is one step, which neither another thread nor Ctrl-C can divide.

    An item covers ``count`` positions. Counts grow from one to ``most``, each item being as large as all before it: the
    first element does not wait for a whole item.

    Args:
      compute: computes the item for a position and a count.
      ask: asks another process for that item, without waiting; returns None if it must be computed.
      stride: the step from one position to the next.
      weight: the number of datapoints in an item of one position.
      workers: the number of threads that decode and transform; with 1, functions are called one at a time.
      kind: the consumer, for metrics and the names of threads.
      captures: True if failures are returned as ``Failure``.
    """

    def __init__(
        self,
        compute: Callable[[int, int], Coroutine[Any, Any, T]],
        ask: Callable[[int, int], Item[T] | None] | None,
        stride: int,
        weight: int,
        workers: int,
        kind: Literal['loader', 'stream', 'interleave'],
        captures: bool,
    ) -> None:
        self._compute, self._ask_for = compute, ask
        self._stride = stride
        self._weight = weight
        self._workers, self._captures = workers, captures
        self._kind: Literal['loader', 'stream', 'interleave'] = kind
        self._wait_times, self._consumer_times = counters.times(kind)
        self.stop: int | None = None  # the position after the last; None if there is no end
        self.depth: int = 0  # the number of items computed beyond the next one
        self._frontier = 0  # the position behind the items that were started
        self.most = 1  # the largest count of an item
        self._begun = 0  # positions of the items started since the last change of the position
        self.token: object = None  # of the iterator that consumes the items
        self.cheap: bool = False  # True if the last item took almost no time, and did not wait
        self.waited = 0.0  # seconds that the consumer waited for items
        self.consumed = 0.0  # seconds between the return of an item and the request for the next
        self.consumer_cpu = 0.0  # seconds of these in which the consumer's thread computed
        self.loop_cpu = 0.0  # seconds in which the thread of the loop computed, since the first item was started
        self._consumer_clock, self._loop_clock = _Clock(), _Clock()
        self._asked = 0.0  # when the next item was requested, or the last one
        self._returned: float | None = None  # when the last item was returned
        self._spent = 0.0  # seconds from there to the request for the next one
        self._arriving = False  # True until its consumer has received it
        self._items: collections.deque[Item[T]] = collections.deque()
        self._crew = self._own_crew = Crew()
        self._long = 0  # slow items, one after the other
        self._waits = False  # True if items wait, for example for a bucket
        self._loop: asyncio.AbstractEventLoop | None = None  # once items were started
        self._closed = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._wait_times, self._consumer_times = counters.times(self._kind)

    def bind(self, token: object, crew: Crew) -> None:
        """Compute items for the iterator with this token, in its threads. Call it before any is computed."""
        self.token, self._crew = token, crew

    @property
    def position(self) -> int:
        """The position of the next item. It may be set once the items are dropped."""
        while True:
            frontier = self._frontier
            try:
                return self._items[0].position
            except IndexError:
                if frontier == self._frontier:
                    return frontier

    @position.setter
    def position(self, position: int) -> None:
        self._frontier = position

    def counts(self) -> tuple[int, int]:
        """Return the numbers of items that are ready and that are in progress."""
        ready = sum(item.is_done for item in self._items.copy())
        return ready, len(self._items) - ready

    async def take(self, asked: float | None = None) -> Any:
        """Return the next item, or ``END``. After an error, the position stays at the item that failed.

        ``asked`` is the time of the request, by ``time.perf_counter``, if it was made before this call.
        """
        self._ask(time.perf_counter() if asked is None else asked)  # before the switch to a loop that may be busy
        item: Any = self._take_ready() if running_loop() is None else NOT_READY
        if item is NOT_READY:
            await to_loop()
            item = await self._take_next()
        self._give(item)
        return item

    def _ask(self, asked: float) -> None:
        """Count the time since the last item was returned, which its consumer spent."""
        returned = self._returned
        if returned is None:
            self._asked = max(self._asked, asked)
        else:
            self._asked = max(asked, returned)  # two consumers may wait at a time
            spent = self._spent = self._asked - returned
            self.consumed += spent
            self._consumer_times.observe(spent)
            self.consumer_cpu += self._consumer_clock.elapsed()
            self._returned = None

    def judge_interpreter(self) -> None:
        """Log if the interpreter, which runs one thread at a time, is shared by two that need it all the time."""
        seconds = self.waited + self.consumed
        if seconds < _JUDGED or self._consumer_clock.thread == self._loop_clock.thread:
            return
        program, loop = (100 * cpu / seconds for cpu in (self.consumer_cpu, self.loop_cpu))
        if min(program, loop) >= _SHARE and program + loop >= _BUSY:
            logger.warning(
                'the Python interpreter is the limit: of %.1f seconds, the thread of the program computed for %.0f %%, '
                "and that of granular's event loop for %.0f %%, mostly one at a time: load in another process, by "
                "Loader(..., mp='spawn', workers=1)",
                seconds,
                program,
                loop,
            )

    def _give(self, item: Any) -> None:
        """Count the time since an item was requested, which is returned now."""
        if item is not END:
            self._returned, self._arriving = time.perf_counter(), True
            waited = self._returned - self._asked
            self.waited += waited
            self._wait_times.observe(waited)

    async def _take_next(self) -> Any:
        """Return the next item, or ``END``, under the loop of the items."""
        while True:
            if self._closed:
                raise ClosedError('the iterator is closed')
            self.begin()
            if not self._items:
                return END
            item = self._items[0]
            value = await self._wait(item) if item.value is NOT_READY else item.value
            if self._is_next(item):
                self._items.popleft()
                self.begin()
                return value
            # The position was changed in the meantime.

    def _take_ready(self) -> Any:
        """Return the next item, or ``END``, in another thread than that of the loop, if it is there already."""
        if self._closed:
            raise ClosedError('the iterator is closed')
        try:
            first = self._items[0]
        except IndexError:
            ended = self.stop is not None and self._frontier >= self.stop
            return END if ended and not self._items else NOT_READY
        if first.value is NOT_READY:
            return NOT_READY
        try:
            taken = self._items.popleft()
        except IndexError:  # dropped, because a state was loaded in another thread
            return NOT_READY
        if taken is not first:
            self._items.appendleft(taken)
            return NOT_READY
        if self._loop is not None:
            try:  # noqa: SIM105 - twice as fast, for each item
                self._loop.call_soon_threadsafe(self._begin_more)
            except RuntimeError:  # the loop is closed
                pass
        return first.value

    def _begin_more(self) -> None:
        """Start the items that are due, unless all were taken: the consumer may then continue elsewhere.

        Where another item is ready, they start a little later, so that the consumer has the interpreter for the start
        of its step, such as for the first kernels on a GPU.
        """
        items = self._items.copy()  # from which the consumer may take one meanwhile
        delay = min(_LATER, self._spent * _LATER_SHARE) if items and items[0].value is not NOT_READY else 0.0
        if delay > _NOW:
            asyncio.get_running_loop().call_later(delay, self._begin_due)
        else:
            self._begin_due()

    def _begin_due(self) -> None:
        if self._items and not self._closed:
            self.begin()

    def received(self, seconds: float) -> None:
        """Add the time that the last item took to reach a consumer in another thread, which may wake up late."""
        returned = self._returned
        if returned is None or not self._arriving:
            return
        self._consumer_clock.elapsed()
        self.waited += seconds
        self._wait_times.sum += seconds
        if self._returned == returned:  # otherwise another thread has requested an item since
            self._returned, self._arriving = returned + seconds, False

    async def _wait(self, item: Item[T]) -> T | None:
        """Return the value of an item; None if it was cancelled because the position was changed."""
        try:
            return await item.result()
        except asyncio.CancelledError:
            consumer = asyncio.current_task()
            if not item.is_cancelled or consumer is None or consumer.cancelling():
                raise  # the consumer stopped waiting; the item is left for the next request
            if not self._is_next(item):
                return None
            self.drop()
            raise GranularError(f'the item at {self.position} was cancelled while it was computed') from None
        except BaseException:
            self.drop()
            raise

    def _is_next(self, item: Item[T]) -> bool:
        return bool(self._items) and self._items[0] is item

    def begin(self) -> None:
        """Start the items that are due and not in progress. Requires a running loop."""
        self.loop_cpu += self._loop_clock.elapsed()
        self._loop = asyncio.get_running_loop()
        while len(self._items) <= self.depth:
            position = self._frontier
            count = max(1, min(self.most, self._begun))
            if self.stop is not None:
                if position >= self.stop:
                    return
                count = min(count, -(-(self.stop - position) // self._stride))
            item = None if self._ask_for is None else self._ask_for(position, count)
            self._items.append(item or _Computed(start_task(self._run(position, count)), position))
            self._frontier = position + count * self._stride  # last: without items, it is the position
            self._begun += count

    async def seek(self, position: int) -> None:
        """Continue from another position; items computed ahead are discarded."""
        if self._items:
            await to_loop()  # tasks may only be accessed there
        self.drop()
        self._frontier = position

    def drop(self) -> None:
        """Discard the items computed ahead. Call it under the loop of the consumer."""
        self._begun = 0
        while self._items:
            frontier = self._frontier
            try:
                self._frontier = self._items[-1].position
                item = self._items.pop()
            except IndexError:  # the consumer has taken it
                self._frontier = frontier
            else:
                item.cancel()

    def using_pool(self) -> '_Using':
        """Return a context manager in which blocking calls run in threads of this object."""
        return _Using(self._crew.pool(self._workers, self._kind))

    async def _run(self, position: int, count: int) -> T:
        capturing.set(self._captures)  # in the context of this task alone, as is the next mark
        mark_computing(self.token)
        with self.using_pool():
            if self._waits or self._workers == 1:  # the thread of the lane would be a second one
                return await self._compute(position, count)
            started = await start_inline(lambda: self._timed(position, count), self._crew.lane(self._kind))
            if not isinstance(started, Rest):
                return started
            self._waits, self.cheap = True, False
            return await started

    async def _timed(self, position: int, count: int) -> T:
        timer = Timer()
        item = await self._compute(position, count)
        self.cheap = not self._waits and timer.wall < _CHEAP
        self._long = self._long + 1 if timer.wall > max(_LONG, _LONG_EACH * self._weight * count) else 0
        if self._long > _PATIENCE:
            self._crew.widen_lane()
        return item

    async def aclose(self) -> None:
        """Cancel the items in progress, and shut down threads of its own. Further calls do nothing."""
        self._closed = True
        if self._items:
            await to_loop()
            self._frontier, items = self.position, [*self._items]
            self._items.clear()
            for item in items:
                if not isinstance(item, _Computed):
                    item.cancel()
            await end_tasks([item.task for item in items if isinstance(item, _Computed)])
        self._own_crew.retire()


class _Clock:
    """Measures the processor time of a thread between calls that it makes."""

    def __init__(self) -> None:
        self.thread = 0
        self._last = 0.0

    def elapsed(self) -> float:
        """Return the seconds since the last call; 0 if that was made by another thread."""
        thread, then = self.thread, self._last
        self.thread, self._last = threading.get_ident(), time.thread_time()
        return self._last - then if thread == self.thread else 0.0


class _Using:
    """A context manager in which blocking calls run in these threads."""

    def __init__(self, pool: Threads) -> None:
        self._pool = pool

    def __enter__(self) -> None:
        self._token = current.set(self._pool)

    def __exit__(self, *args: object) -> None:
        with contextlib.suppress(ValueError):  # a coroutine that is garbage-collected ends in another context
            current.reset(self._token)

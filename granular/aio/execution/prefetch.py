"""Items made ahead of their consumer: several at a time, in threads or on the loop, and handed out in order."""

import asyncio
import collections
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Generic, TypeVar

from granular.aio.execution.failures import capturing
from granular.aio.runtime.loops import Begun, begin_task, end_tasks, need_loop, outcome
from granular.aio.runtime.threads import CORES, Threads, Timer, begun, current
from granular.errors import ClosedError, GranularError

T = TypeVar('T')

_LONG: Final = 0.005  # seconds that an item may take, and for each of its datapoints, before several are made at a time
_LONG_EACH: Final = 0.0001
_CHEAP: Final = 0.002  # seconds
_PATIENCE: Final = 3  # long ones in a row
END: Final = object()
"""What stands behind the last item."""


class Ahead(Generic[T]):
    """Makes items of positions, up to some of them ahead of the one that is taken next.

    What never waits, such as reading from a local disk, is made on one thread, one item after the other: threads that
    read the page cache only get in each other's way, and what is slow is spread over the pool by itself. What waits, as
    for a bucket, is made on the loop, all at a time.

    Args:
      make: makes the item of a position.
      stride: from one position to the next, at first.
      weight: datapoints in an item.
      workers: threads that decode and transform.
      name: of the threads.
      captures: whether what fails is given as a ``Failure``.

    Attributes:
      position: of the item that is taken next.
      stop: the position behind the last; None if there is no end.
      depth: items that are made beyond the next one.
      stride: from one position to the next.
      cheap: whether the last item took next to no time, and waited for nothing.
      waited: seconds that the consumer waited for items.
      consumed: seconds between an item and the next time that one was asked for.
    """

    def __init__(
        self,
        make: Callable[[int], Coroutine[Any, Any, T]],
        stride: int,
        weight: int,
        workers: int,
        name: str,
        captures: bool,
    ) -> None:
        self._make, self.stride, self._weight = make, stride, weight
        self._workers, self._name, self._captures = workers, name, captures
        self.position, self.stop, self.depth = 0, None, 0  # type: int, int | None, int
        self.cheap = False
        self.waited = self.consumed = 0.0
        self._handed: float | None = None  # when the last item was
        self._items: collections.deque[asyncio.Task[T]] = collections.deque()
        self._pool: Threads | None = None
        self._lane: Threads | None = None
        self._retired: list[Threads] = []
        self._width = 1  # of the lane
        self._long = 0  # items that took long, one after the other
        self._waits = False  # whether items wait for something, such as a bucket
        self._closed = False

    def counts(self) -> tuple[int, int]:
        """Items that are ready, and items that are being made."""
        ready = sum(task.done() for task in self._items)
        return ready, len(self._items) - ready

    async def take(self) -> T | object:
        """The next item, or ``END``. An error leaves it at the item that failed."""
        await need_loop()
        began = time.perf_counter()
        if self._handed is not None:
            self.consumed += began - self._handed
            self._handed = None
        while True:
            if self._closed:
                raise ClosedError('the iterator is closed')
            self.begin()
            if not self._items:
                return END
            task = self._items[0]
            try:
                item = await outcome(asyncio.shield(task))
            except asyncio.CancelledError:
                waiting = asyncio.current_task()
                if task.cancelled() and waiting is not None and not waiting.cancelling():
                    if self._items and self._items[0] is task:
                        self.drop()
                        raise GranularError(f'the item at {self.position} was cancelled while it was made') from None
                    continue  # it was sent elsewhere meanwhile
                raise  # the consumer gave up waiting; the item is kept for whoever asks next
            except BaseException:
                self.drop()
                raise
            if not self._items or self._items[0] is not task:
                continue  # it was sent elsewhere meanwhile
            self._items.popleft()
            self.position += self.stride
            self.begin()
            self._handed = time.perf_counter()
            self.waited += self._handed - began
            return item

    def begin(self) -> None:
        """Begin to make what is not yet. Under a loop."""
        while len(self._items) <= self.depth:
            position = self.position + len(self._items) * self.stride
            if self.stop is not None and position >= self.stop:
                return
            task = begin_task(self._run(position))
            task.add_done_callback(_seen)
            self._items.append(task)

    async def seek(self, position: int) -> None:
        """Go on from another position; what was made is dropped."""
        if self._items:
            await need_loop()  # tasks may only be touched there
            self.drop()
        self.position = position

    def drop(self) -> None:
        """Forget what was made ahead. Under the loop of the consumer."""
        while self._items:
            self._items.pop().cancel()

    def using_pool(self) -> '_Using':
        """Within its block, threads of its own do what blocks."""
        if self._pool is None:
            self._pool = Threads(self._workers, self._name)
        return _Using(self._pool)

    async def _run(self, position: int) -> T:
        capturing.set(self._captures)  # in the context of this task alone
        with self.using_pool():
            if self._waits:
                return await self._make(position)
            if self._lane is None:
                self._lane = Threads(self._width, f'{self._name}-lane')
            found = await begun(lambda: self._timed(position), self._lane)
            if not isinstance(found, Begun):
                return found
            self._waits, self.cheap = True, False
            return await found

    async def _timed(self, position: int) -> T:
        timer = Timer()
        item = await self._make(position)
        self.cheap = not self._waits and timer.wall < _CHEAP
        self._long = self._long + 1 if timer.wall > max(_LONG, _LONG_EACH * self._weight) else 0
        if self._long > _PATIENCE and self._width == 1:
            # What takes long lets go of the interpreter meanwhile, as decoders of images do: one item for each core.
            self._width = CORES
            if self._lane is not None:
                self._retired.append(self._lane)
            self._lane = None
        return item

    async def aclose(self) -> None:
        """End: cancel what is being made, and its threads. More than once is no error."""
        self._closed = True
        if self._items:
            await need_loop()
            tasks = list(self._items)
            self._items.clear()
            await end_tasks(tasks)
        pools = [pool for pool in (self._pool, self._lane, *self._retired) if pool is not None]
        self._pool, self._lane, self._retired = None, None, []
        for threads in pools:
            threads.shutdown(wait=False, cancel_futures=True)


class _Using:
    """Within its block, these threads do what blocks."""

    def __init__(self, pool: Threads) -> None:
        self._pool = pool

    def __enter__(self) -> None:
        self._token = current.set(self._pool)

    def __exit__(self, *args: object) -> None:
        current.reset(self._token)


def _seen(task: 'asyncio.Task[Any]') -> None:
    # An item that nobody comes for, because a state was loaded or the program ends, fails in silence.
    if not task.cancelled():
        task.exception()

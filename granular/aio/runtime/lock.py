"""A lock for coroutines of any event loops and threads."""

import asyncio
import collections
import contextlib
import inspect
from typing import Any, Final, Self

from granular.aio.runtime.forking import after_fork
from granular.aio.runtime.immediate import running_loop, to_loop
from granular.aio.runtime.nesting import Root, calls, here, nested_call

_CHECK_INTERVAL: Final = 1.0  # seconds between checks for a lost wake-up
_generation: Final = [0]  # forks between the first process and this one


class Lock:
    """A lock for coroutines of any event loops and threads, granted in the order of arrival.

    Use it by ``async with lock.turn()``. It contains no thread lock, so that a coroutine may leave it wherever the
    garbage collector ends it; its only state is a queue whose operations are atomic.
    """

    def __init__(self) -> None:
        self.queue: collections.deque[Turn] = collections.deque()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def turn(self) -> 'Turn':
        """Return a turn in the queue, taken by ``async with``."""
        return Turn(self)


class Turn:
    """A coroutine's turn in the queue of a lock; the first in the queue holds the lock."""

    __slots__ = ('_generation', '_lock', '_loop', '_root', '_wake_up')

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._generation = _generation[0]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._root: Root | None = None  # the coroutine of the blocking call that takes the turn, if one does
        self._wake_up: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        queue, self._loop = self._lock.queue, running_loop()
        if self._loop is None:
            self._root = here.coro
        elif roots := calls.get():
            self._root = roots[-1]
        queue.append(self)
        if queue[0] is not self:
            try:
                await self._wait(queue)
            except BaseException:
                self._leave()
                raise
        return self

    async def __aexit__(self, *args: object) -> None:
        self._leave()

    async def _wait(self, queue: 'collections.deque[Turn]') -> None:
        beneath = here.beneath if self._loop is None else calls.get()[:-1]
        if beneath and any(turn._root in beneath for turn in [*queue]):
            raise nested_call()
        await to_loop()
        self._loop = asyncio.get_running_loop()
        while True:
            self._wake_up = self._loop.create_future()
            self._wake_first()
            if queue[0] is self:
                return
            # An interrupt between leaving and waking loses a wake-up, so check now and then.
            await asyncio.wait([self._wake_up], timeout=_CHECK_INTERVAL)

    def _leave(self) -> None:
        queue = self._lock.queue
        try:  # noqa: SIM105 - twice as fast, for each batch
            queue.remove(self)
        except ValueError:  # it was removed because its loop is closed
            pass
        if queue:
            self._wake_first()

    def _wake_first(self) -> None:
        """Wake the first in the queue; remove those whose loop was closed, or whose coroutine was."""
        queue = self._lock.queue
        while queue:
            try:
                first = queue[0]
            except IndexError:  # another thread removed it
                return
            if first._abandoned():
                with contextlib.suppress(ValueError):
                    queue.remove(first)
                continue
            if (wake_up := first._wake_up) is not None:
                with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
                    wake_up.get_loop().call_soon_threadsafe(_complete, wake_up)
            return

    def _abandoned(self) -> bool:
        """Return whether its coroutine ended without leaving, or runs in the process that this one was forked from."""
        if self._generation != _generation[0]:
            return True
        if self._loop is not None:
            return self._loop.is_closed()
        return self._root is not None and inspect.getcoroutinestate(self._root) == inspect.CORO_CLOSED


def _complete(future: 'asyncio.Future[None]') -> None:
    if not future.done():
        future.set_result(None)


def _count_fork() -> None:
    _generation[0] += 1


after_fork(_count_fork)

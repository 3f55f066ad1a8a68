"""Virtual time: event loops that never wait, one for each host, driven by one clock.

The library keeps the state of a host with its event loop (clients, pools, limits), so a host is a loop. All loops share
the callbacks that are ready and the timers: when nothing is ready, the time jumps to the next timer. What threads would
do is done at once, in no time. The order of everything follows from the seed.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import contextvars
import heapq
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol
from unittest import mock

from granular.aio import aclose
from granular.aio.http import connection, pool
from granular.aio.runtime.pools import Threads
from granular.errors import StoreError

_START = 1000.0  # of the clock, as those of real machines do not begin at 0 either


class Network(Protocol):
    """The server to which the hosts of a world connect."""

    async def connect(self, host: 'Host', protocol: asyncio.BufferedProtocol) -> asyncio.Transport:
        """Return a new connection of a host, or raise OSError."""


class World:
    """The clock and the hosts.

    Args:
      seed: of all chance.

    Attributes:
      now: the time in seconds.
      random: the source of chance of the simulated parts.
      silent: the descriptor that stands for all sockets: nothing ever arrives on it.
    """

    network: Network

    def __init__(self, seed: int = 0) -> None:
        self.now = _START
        self.seed, self.random = seed, random.Random(seed)
        self.hosts: list[Host] = []
        self.silent = -1
        self._ready: collections.deque[asyncio.Handle] = collections.deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self._failures: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def begun(self) -> Iterator['World']:
        """Let the library live in this world inside the block, and close what the hosts have opened at its end."""
        state = random.getstate()
        with contextlib.ExitStack() as stack:
            self.silent, other = os.pipe()
            stack.callback(os.close, self.silent)
            stack.callback(os.close, other)
            stack.callback(random.setstate, state)
            random.seed(self.seed)
            for place, name in (
                (time, 'monotonic'), (time, 'perf_counter'), (connection, 'now'), (pool, 'now'),
            ):  # fmt: skip
                stack.enter_context(mock.patch.object(place, name, self.time))
            stack.enter_context(mock.patch.object(time, 'thread_time', float))
            stack.enter_context(mock.patch.object(Threads, 'submit', _submit))
            yield self
            for host in self.hosts:
                host.end()
            self.run(1)

    def time(self) -> float:
        """Return the time."""
        return self.now

    def host(self) -> 'Host':
        """Return a new host."""
        self.hosts.append(Host(self, len(self.hosts)))
        return self.hosts[-1]

    def run(self, seconds: float) -> None:
        """Let time pass.

        Raises:
          RuntimeError: if a callback failed.
        """
        end, ready, timers = self.now + seconds, self._ready, self._timers
        outer, running = asyncio._get_running_loop(), asyncio._set_running_loop
        try:
            while True:
                while ready:
                    handle = ready.popleft()
                    if not handle.cancelled():
                        running(handle._loop)
                        handle._run()
                if not timers or timers[0][0] > end:
                    break
                self.now = max(self.now, timers[0][0])
                while timers and timers[0][0] <= self.now:
                    ready.append(heapq.heappop(timers)[2])
        finally:
            running(outer)
        self.now = end
        if self._failures:
            failure = self._failures[0]
            raise RuntimeError(f'a callback failed: {failure}') from failure.get('exception')

    def soon(self, handle: asyncio.Handle) -> None:
        """Run a callback now, after those that are ready."""
        self._ready.append(handle)

    def later(self, handle: asyncio.TimerHandle) -> None:
        """Run a callback at its time."""
        heapq.heappush(self._timers, (handle.when(), next(self._numbers), handle))

    def failed(self, context: dict[str, Any]) -> None:
        """Record an error that no code handles."""
        self._failures.append(context)


class Host(asyncio.AbstractEventLoop):
    """The event loop of a host.

    Args:
      world: the clock.
      number: of the host.

    Attributes:
      requests, done, refused: the requests that the network has had from it, that it has answered well, and refused.
      error: of the store, by which its program ended.
    """

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.requests = self.done = self.refused = 0
        self.error: StoreError | None = None
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self, coro: Coroutine[Any, Any, Any]) -> 'asyncio.Task[Any]':
        """Run a program on the host. An error of the store ends it, any other the run of the world."""
        task = self.create_task(coro)
        task.add_done_callback(self._ended)
        self._tasks.append(task)
        return task

    def _ended(self, task: 'asyncio.Task[Any]') -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, StoreError):
            self.error = error
        else:
            self.world.failed({'message': f'host {self.number}', 'exception': error})

    def end(self) -> None:
        """Kill the host: its programs and its connections end."""
        for task in self._tasks:
            task.cancel()
        self._tasks = [self.create_task(aclose())]

    # --- what the library uses of an event loop

    def time(self) -> float:
        return self.world.now

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self.world.soon(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self.world.now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self.world.later(handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def create_future(self) -> 'asyncio.Future[Any]':
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None, **_: Any) -> 'asyncio.Task[Any]':
        return asyncio.Task(coro, loop=self, name=name, context=context)

    async def create_connection(self, factory: Callable[[], Any], *_: Any, **__: Any) -> Any:  # type: ignore[override]
        protocol = factory()
        transport = await self.world.network.connect(self, protocol)
        protocol.connection_made(transport)
        return transport, protocol

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.world.failed(context)


def _submit(_: Threads, fn: Callable[..., Any], /, *args: Any) -> 'concurrent.futures.Future[Any]':
    """Make the call that a thread would make, where no loop runs as in a thread."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def call() -> None:
        try:
            future.set_result(fn(*args))
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return future

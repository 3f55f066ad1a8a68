"""From a thread to the core: one background event loop, and running a coroutine of the library from outside it.

``run`` steps a coroutine on the thread that called. What never waits, such as a read from a local disk, ends there and
needs no loop at all. What must wait says so (:func:`granular.aio.loops.need_loop`), and goes on under the one loop of
the process, on a daemon thread, while the caller waits for its result.
"""

import asyncio
import atexit
import concurrent.futures
import contextvars
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Final, TypeVar

from granular.aio.loops import Begun, begin, running_loop
from granular.errors import ClosedError, GranularError

T = TypeVar('T')

_STOP_TIMEOUT: Final = 5.0


class Bridge:
    """An event loop on a daemon thread; uvloop's if it is installed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended = False

    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop, started on first use."""
        with self._lock:
            if self._ended:
                raise ClosedError('the interpreter is shutting down')
            if self._loop is None:
                started = threading.Event()
                self._loop = _new_loop()
                self._thread = threading.Thread(
                    target=_main, args=(self._loop, started), name='granular-loop', daemon=True
                )
                self._thread.start()
                started.wait()
            return self._loop

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Have a coroutine run on the loop."""
        try:
            if threading.current_thread() is self._thread:
                raise GranularError(
                    'a blocking call was made on the loop that is to answer it: await the one of granular.aio'
                )
            # The caller's context, so that what it set is seen on the loop as well.
            return contextvars.copy_context().run(asyncio.run_coroutine_threadsafe, coro, self.loop())
        except BaseException:
            coro.close()
            raise

    def stop(self) -> None:
        """Cancel what runs, close sessions and sockets, and end the thread."""
        with self._lock:
            self._ended = True
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(_STOP_TIMEOUT)

    def after_fork(self) -> None:
        """In a forked child: the thread did not come along. The parent's loop is neither used nor collected."""
        _inherited.append((self._loop, self._thread))
        self.__init__()  # type: ignore[misc]


_inherited: list[Any] = []
bridge: Final = Bridge()
atexit.register(bridge.stop)
os.register_at_fork(after_in_child=bridge.after_fork)


def run(coro: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine of the library, from any thread, with or without a loop of its own.

    An interrupt (Ctrl-C) cancels the coroutine and waits for it to clean up.
    """
    outer = running_loop()
    if outer is not None:
        # A thread with a running loop, as in Jupyter: our coroutine must not take it for its own.
        asyncio._set_running_loop(None)
    try:
        found: Any = begin(coro)
    finally:
        if outer is not None:
            asyncio._set_running_loop(outer)
    if not isinstance(found, Begun):
        return found  # type: ignore[no-any-return]
    rest: Begun[T] = found
    future = bridge.submit(_resumed(rest))
    try:
        return future.result()
    except BaseException:
        if not future.done():
            future.cancel()
            concurrent.futures.wait([future], _STOP_TIMEOUT)
        raise


def iterate(make: Callable[[], AsyncIterator[T]]) -> Iterator[T]:
    """The items of an asynchronous iterator, one by one, as they come."""
    items = make()
    try:
        while True:
            try:
                yield run(_next(items))
            except StopAsyncIteration:
                return
    finally:
        if (close := getattr(items, 'aclose', None)) is not None:
            run(close())


async def _next(items: AsyncIterator[T]) -> T:
    return await anext(items)


async def _resumed(rest: Begun[T]) -> T:
    value: T = await rest
    return value


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _main(loop: asyncio.AbstractEventLoop, started: threading.Event) -> None:
    asyncio.set_event_loop(loop)
    loop.call_soon(started.set)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()

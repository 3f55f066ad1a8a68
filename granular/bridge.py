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
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, Generic, TypeVar

from granular.aio.loops import Begun, HeldError, begin, begin_task, running_loop
from granular.errors import ClosedError, GranularError

T = TypeVar('T')

_STOP_TIMEOUT: Final = 5.0
_LOOK: Final = 1.0  # seconds


class Call(Generic[T]):
    """The rest of a coroutine, to be run on a loop, and what comes of it.

    All of it may be interrupted anywhere: what counts is set on the loop, which Ctrl-C never reaches.
    """

    def __init__(self, rest: Begun[T], undo: Callable[[T], None] | None) -> None:
        self._rest, self._begun, self._undo = rest, False, undo
        self._context = contextvars.copy_context()  # what the caller has set is seen on the loop as well
        self._loop: asyncio.AbstractEventLoop | None = None
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def send(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have it run."""
        self._loop = loop
        loop.call_soon_threadsafe(self._start, context=self._context)

    def cancel(self) -> None:
        """Cancel it and wait until it has cleaned up."""
        if self._loop is None:
            self._rest.close()
            return
        if self._loop.is_closed():
            return
        if self.future.done():
            if self._undo is not None and not self.future.cancelled() and self.future.exception() is None:
                undone = Call(Begun(_called(self._undo, self.future.result())), None)
                undone.send(self._loop)
                concurrent.futures.wait([undone.future], _STOP_TIMEOUT)
            return
        self.future.cancel()
        self.send(self._loop)  # whether it was sent before, nobody knows
        concurrent.futures.wait([self.future], _STOP_TIMEOUT)

    def check(self) -> None:
        """Raise if its loop has ended: nothing will come of it."""
        if self._loop is not None and self._loop.is_closed() and not self.future.done():
            raise GranularError('the event loop of granular ended before this call was done')

    def _start(self) -> None:
        if self._begun:
            return
        self._begun = True
        if self.future.cancelled():
            self._rest.close()
            self.future.set_running_or_notify_cancel()
            return
        loop, task = asyncio.get_running_loop(), begin_task(_resumed(self._rest))
        task.add_done_callback(self._done)

        def cancel(future: concurrent.futures.Future[T]) -> None:
            if future.cancelled():
                loop.call_soon_threadsafe(task.cancel)

        self.future.add_done_callback(cancel)

    def _done(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.future.cancel()
        elif self._undo is not None and self.future.cancelled() and task.exception() is None:
            self._undo(task.result())
        if not self.future.set_running_or_notify_cancel():
            return
        if (error := task.exception()) is not None:
            self.future.set_exception(error.error if isinstance(error, HeldError) else error)
        else:
            self.future.set_result(task.result())


class Bridge:
    """An event loop on a daemon thread; uvloop's if it is installed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[tuple[asyncio.AbstractEventLoop, threading.Thread]] = []
        self.ended = False

    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop, started on first use."""
        with self._lock:
            if self.ended:
                raise ClosedError('the interpreter is shutting down')
            if not self._running:
                started, failed = threading.Event(), list[BaseException]()
                threading.Thread(target=self._main, args=(started, failed), name='granular-loop', daemon=True).start()
                started.wait()
                if failed:
                    raise failed[0]
            return self._running[0][0]

    def submit(self, call: Call[Any]) -> None:
        """Have a coroutine go on under the loop."""
        if any(threading.current_thread() is thread for _, thread in self._running):
            raise GranularError(
                'a blocking call was made on the loop that is to answer it: await the one of granular.aio'
            )
        call.send(self.loop())

    def stop(self) -> None:
        """Cancel what runs, close sessions and sockets, and end the thread."""
        with self._lock:
            self.ended = True
            running, self._running = self._running, []
        for loop, thread in running:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(_STOP_TIMEOUT)

    def after_fork(self) -> None:
        """In a forked child: the thread did not come along. The parent's loop is neither used nor collected."""
        _inherited.append(self._running)
        self.__init__()  # type: ignore[misc]

    def _main(self, started: threading.Event, failed: list[BaseException]) -> None:
        try:
            loop = _new_loop()
        except BaseException as error:  # such as for want of descriptors: of the call that asked for it
            failed.append(error)
            started.set()
            return
        asyncio.set_event_loop(loop)
        # Told here, as who began this thread may be interrupted before it knows that there is one.
        self._running.append((loop, threading.current_thread()))
        loop.call_soon(started.set)
        try:
            while not self.ended:
                try:
                    loop.run_forever()
                except (SystemExit, KeyboardInterrupt) as error:  # of a callback; signals reach the main thread alone
                    message = 'a callback on the loop of granular raised what ends a program: the loop goes on'
                    loop.call_exception_handler({'message': message, 'exception': error})
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            self._running = [entry for entry in self._running if entry[0] is not loop]  # the next call begins another
            asyncio.set_event_loop(None)
            loop.close()


_inherited: list[Any] = []
bridge: Final = Bridge()
atexit.register(bridge.stop)
os.register_at_fork(after_in_child=bridge.after_fork)


def run(coro: Coroutine[Any, Any, T], undo: Callable[[T], None] | None = None) -> T:
    """The result of a coroutine of the library, from any thread, with or without a loop of its own.

    An interrupt (Ctrl-C) cancels the coroutine and waits for it to clean up.

    Args:
      coro: the coroutine.
      undo: called on the loop with a result that an interrupt kept from the caller.
    """
    outer = running_loop()
    if outer is not None:
        # A thread with a running loop, as in Jupyter: our coroutine must not take it for its own, nor give it its
        # asynchronous generators to close.
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(None, None)
        asyncio._set_running_loop(None)
    try:
        found: Any = begin(coro)
    finally:
        if outer is not None:
            asyncio._set_running_loop(outer)
            sys.set_asyncgen_hooks(*hooks)
    if not isinstance(found, Begun):
        return found  # type: ignore[no-any-return]
    call: Call[T] | None = None
    try:
        call = Call(found, undo)
        bridge.submit(call)
        while True:
            try:
                call.future.exception(_LOOK)
            except TimeoutError:
                call.check()
                continue  # Python does not see an interrupt that comes right before it waits: it looks now and then
            return call.future.result()
    except BaseException:
        if call is None:
            found.close()
        else:
            call.cancel()
        if bridge.ended and threading.current_thread().daemon:
            # The interpreter ends, and with it this thread: as quietly as any other daemon thread.
            raise SystemExit from None
        raise


async def _called(function: Callable[[T], None], value: T) -> None:
    function(value)


async def _resumed(rest: Begun[T]) -> T:
    value: T = await rest
    return value


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()

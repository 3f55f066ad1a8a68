"""The bridge from threads to the async core: one background event loop, and ``run``, which blocks.

``run`` steps a coroutine on the calling thread. A coroutine that never waits, such as a read from a local disk,
finishes there and needs no loop. A coroutine that must wait asks for a loop
(:func:`granular.aio.runtime.loops.ensure_event_loop`) and resumes on the background loop of the process, on a daemon
thread, while the caller waits for its result.
"""

import asyncio
import atexit
import concurrent.futures
import contextvars
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, Generic, TypeVar

from granular._lazy import import_if_installed
from granular.aio.runtime import threads
from granular.aio.runtime.forking import after_fork, inherited
from granular.aio.runtime.loops import StartedCoroutine, running_loop, start_coroutine
from granular.aio.runtime.tasks import HeldError, start_task
from granular.aio.runtime.tracebacks import shorten
from granular.errors import ClosedError, GranularError

T = TypeVar('T')

_STOP_TIMEOUT: Final = 5.0
_CHECK_INTERVAL: Final = 1.0  # seconds between checks for interrupts


class Call(Generic[T]):
    """The rest of a coroutine, to be run on a loop, and its result.

    Its methods may be interrupted at any point: the state that counts is set on the loop, which Ctrl-C never reaches.
    """

    def __init__(self, rest: StartedCoroutine[T], undo: Callable[[T], None] | None) -> None:
        self._rest, self._started, self._undo = rest, False, undo
        self._context = contextvars.copy_context()  # so that the loop sees the context variables of the caller
        self._loop: asyncio.AbstractEventLoop | None = None
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def send(self, loop: asyncio.AbstractEventLoop) -> None:
        """Schedule the coroutine on a loop."""
        self._loop = loop
        loop.call_soon_threadsafe(self._start, context=self._context)

    def cancel(self) -> None:
        """Cancel the coroutine and wait until it has cleaned up."""
        if self._loop is None:
            self._rest.close()
            return
        if self._loop.is_closed():
            return
        if self.future.done():
            if self._undo is not None and not self.future.cancelled() and self.future.exception() is None:
                undone = Call(StartedCoroutine(_called(self._undo, self.future.result())), None)
                undone.send(self._loop)
                concurrent.futures.wait([undone.future], _STOP_TIMEOUT)
            return
        self.future.cancel()
        self.send(self._loop)  # it may not have been sent yet
        concurrent.futures.wait([self.future], _STOP_TIMEOUT)

    def check(self) -> None:
        """Raise an error if its loop has ended: no result will come."""
        if self._loop is not None and self._loop.is_closed() and not self.future.done():
            raise GranularError('the event loop of granular ended before this call completed')

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        if self.future.cancelled():
            self._rest.close()
            self.future.set_running_or_notify_cancel()
            return
        loop, task = asyncio.get_running_loop(), start_task(_resumed(self._rest))
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
        self.ended: bool = False

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop; it is started on first use."""
        with self._lock:
            if self.ended:
                raise ClosedError('the interpreter is shutting down')
            if not self._running:
                started, failed = threading.Event(), list[BaseException]()
                thread = threading.Thread(target=self._main, args=(started, failed), name='granular-loop', daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    if not threads.is_refused_at_exit(error):
                        raise
                    self.ended = True
                    raise ClosedError('the interpreter is shutting down') from None
                started.wait()
                if failed:
                    raise failed[0]
            return self._running[0][0]

    def submit(self, call: Call[Any]) -> None:
        """Resume a coroutine on the loop."""
        if any(threading.current_thread() is thread for _, thread in self._running):
            raise GranularError(
                'a blocking call on the loop that would have to run it: await the method of granular.aio instead'
            )
        call.send(self.loop())

    def stop(self) -> None:
        """Cancel all tasks, close sessions and sockets, and end the thread."""
        with self._lock:
            self.ended = True
            running, self._running = self._running, []
        for loop, thread in running:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(_STOP_TIMEOUT)

    def after_fork(self) -> None:
        """Reset in a forked child, which has no copy of the thread. The parent's loop is neither used nor collected."""
        inherited.append(self._running)
        self.__init__()  # type: ignore[misc]

    def _main(self, started: threading.Event, failed: list[BaseException]) -> None:
        try:
            loop = _new_loop()
        except BaseException as error:  # for example for lack of descriptors: raised in the call that needs the loop
            failed.append(error)
            started.set()
            return
        asyncio.set_event_loop(loop)
        # Registered here, as the thread that started this one may be interrupted before it knows of it.
        self._running.append((loop, threading.current_thread()))
        loop.call_soon(started.set)
        try:
            while not self.ended:
                try:
                    loop.run_forever()
                except (SystemExit, KeyboardInterrupt) as error:  # of a callback; signals reach only the main thread
                    message = 'a callback on the loop of granular raised an exception that ends programs: ignored'
                    loop.call_exception_handler({'message': message, 'exception': error})
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            self._running = [entry for entry in self._running if entry[0] is not loop]  # the next call starts another
            asyncio.set_event_loop(None)
            loop.close()


bridge: Final = Bridge()
atexit.register(bridge.stop)
after_fork(bridge.after_fork)


def run(coro: Coroutine[Any, Any, T], undo: Callable[[T], None] | None = None) -> T:
    """Run a coroutine of the library and return its result, from any thread, with or without a running loop.

    An interrupt (Ctrl-C) cancels the coroutine and waits for it to clean up.

    Args:
      coro: the coroutine.
      undo: called on the loop with a result that an interrupt kept from the caller.
    """
    outer = running_loop()
    if outer is not None:
        # In a thread with a running loop, as in Jupyter, our coroutine must not use that loop, nor leave its
        # asynchronous generators for that loop to close.
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(None, None)
        asyncio._set_running_loop(None)
    try:
        outcome: Any = start_coroutine(coro)
    except Exception as error:
        shorten(error)
        raise
    finally:
        if outer is not None:
            asyncio._set_running_loop(outer)
            sys.set_asyncgen_hooks(*hooks)
    if not isinstance(outcome, StartedCoroutine):
        return outcome  # type: ignore[no-any-return]
    call: Call[T] | None = None
    try:
        call = Call(outcome, undo)
        bridge.submit(call)
        while True:
            try:
                call.future.exception(_CHECK_INTERVAL)
            except TimeoutError:
                call.check()
                continue  # Python misses an interrupt that comes right before it waits, so it wakes up now and then
            return call.future.result()
    except BaseException as error:
        if call is None:
            outcome.close()
        else:
            call.cancel()
        if (bridge.ended or threads.exiting.is_set()) and threading.current_thread().daemon:
            # The interpreter exits, and this thread with it: as silently as any other daemon thread.
            raise SystemExit from None
        shorten(error)
        raise


async def _called(function: Callable[[T], None], value: T) -> None:
    function(value)


async def _resumed(rest: StartedCoroutine[T]) -> T:
    value: T = await rest
    return value


def _new_loop() -> asyncio.AbstractEventLoop:
    uvloop = import_if_installed('uvloop')
    loop: asyncio.AbstractEventLoop = (uvloop or asyncio).new_event_loop()
    return loop

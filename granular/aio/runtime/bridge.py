"""The bridge from threads to the async core: one background event loop, and ``run``, which blocks.

``run`` steps a coroutine on the calling thread. A coroutine that never waits, such as a read from a local disk,
finishes there and needs no loop. A coroutine that must wait asks for a loop
(:func:`granular.aio.runtime.loops.ensure_event_loop`) and resumes on the background loop of the process, on a daemon
thread, while the caller waits for its result.
"""

import asyncio
import concurrent.futures.thread
import contextvars
import inspect
import logging
import queue
import threading
import time
import types
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, Generic, TypeVar

from granular._lazy import at_exit, import_if_installed
from granular._words import logger
from granular.aio.runtime import threads
from granular.aio.runtime.forking import after_fork, inherited
from granular.aio.runtime.loops import StartedCoroutine, end_coroutine, outside_loops, running_loop, start_coroutine
from granular.aio.runtime.nesting import blocking_call
from granular.aio.runtime.tasks import HeldError, start_task
from granular.aio.runtime.tracebacks import shorten
from granular.errors import ClosedError, GranularError

T = TypeVar('T')


_STOP_TIMEOUT: Final = 5.0
_CHECK_INTERVAL: Final = 1.0  # seconds between checks for interrupts
# Modules that hold locks of threads, in all functions but those below which threads run, and those that wait, in which
# handlers of signals are called.
_LOCKING: Final = frozenset(
    function.__code__.co_filename
    for function in (
        threading.Thread.start,
        concurrent.futures.ThreadPoolExecutor.submit,
        concurrent.futures.Future.set_result,
        logging.Logger.log,
    )
)
_FREE: Final = frozenset((
    *('_bootstrap', '_bootstrap_inner', 'run', '_worker'),
    *('join', '_wait_for_tstate_lock', 'wait', 'wait_for', 'result', 'exception', 'shutdown', '__exit__'),
))  # fmt: skip
# The function of all pools of threads that takes a call, and the lock that it holds meanwhile.
_SUBMIT: Final = concurrent.futures.ThreadPoolExecutor.submit.__code__
_SUBMITTING: Final = concurrent.futures.thread._global_shutdown_lock


class Call(Generic[T]):
    """The rest of a coroutine, to be run on a loop, and its result.

    The caller may be interrupted at any point: the state that counts is set on the loop, which Ctrl-C never reaches,
    and the caller waits for a queue, because an interrupt can leave the lock of a future locked, and with it the loop.
    """

    def __init__(self, rest: StartedCoroutine[T], undo: Callable[[T], None] | None) -> None:
        self._rest, self._undo = rest, undo
        self._context = contextvars.copy_context()  # so that the loop sees the context variables of the caller
        self._context.run(threads.fix_depth)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[T] | None = None  # while it runs
        self._sent = self._begun = self._done = self._abandoned = self._ended = False
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # gets an item when it is done, and when it has ended

    def send(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        loop.call_soon_threadsafe(self._start, context=self._context)

    def result(self) -> T:
        # Python misses an interrupt that comes right before it waits, so it wakes up now and then.
        while not self._wait(_CHECK_INTERVAL):
            if self._loop is not None and self._loop.is_closed() and not self._done:
                raise GranularError('the event loop of granular ended before this call completed')
        if (error := self._error) is None:
            return self._results[0]
        try:
            raise error
        finally:
            del error, self._error  # an error that its own traceback refers to would keep everything alive

    def cancel(self, error: BaseException) -> None:
        """Cancel the coroutine and wait until it has cleaned up, or its result was undone."""
        if self._loop is None:
            self._rest.close(error)
            return
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._cancel, context=self._context)
        end = time.monotonic() + _STOP_TIMEOUT
        while not self._ended and (left := end - time.monotonic()) > 0:
            self._wait(left)

    def _wait(self, seconds: float) -> bool:
        try:
            self._news.get(timeout=seconds)
        except queue.Empty:
            return False
        return True

    # --- on the loop

    def _start(self) -> None:
        if self._sent:
            return
        self._sent = True
        self._task = start_task(self._resume())
        self._task.add_done_callback(self._finish)

    async def _resume(self) -> T:
        self._begun = True
        return await self._rest

    def _finish(self, task: 'asyncio.Task[T]') -> None:
        self._task, self._done = None, True
        if task.cancelled():
            self._error = concurrent.futures.CancelledError()
        elif (error := task.exception()) is not None:
            self._error = error.error if isinstance(error, HeldError) else error
        else:
            self._results.append(task.result())
        if self._abandoned:
            self._end()
        self._news.put(None)

    def _cancel(self) -> None:
        self._abandoned = True
        self._start()  # it may not have been sent yet
        if self._task is None:
            self._end()
        elif self._begun:
            self._task.cancel()
        else:  # it cleans up by awaiting, so it must begin
            asyncio.get_running_loop().call_soon(self._cancel)

    def _end(self) -> None:
        """Undo a result that the caller does not get."""
        try:
            if self._undo is not None and self._results:
                self._undo(self._results.pop())
        finally:
            self._ended = True
            self._news.put(None)


class Bridge:
    """An event loop on a daemon thread; uvloop's if it is installed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the handler of a signal may need the loop while it starts, and starts another
        self._running: list[tuple[asyncio.AbstractEventLoop, threading.Thread]] = []
        self.ended = False

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop; it is started on first use."""
        with self._lock:
            if self.ended:
                raise ClosedError('the interpreter is shutting down')
            if not self._running:
                started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
                thread = threading.Thread(target=self._main, args=(started,), name='granular-loop', daemon=True)
                try:
                    threads.start_thread(thread)
                except ClosedError:
                    self.ended = True
                    raise
                if (failure := started.get()) is not None:
                    raise failure
            return self._running[0][0]

    def runs(self, loop: asyncio.AbstractEventLoop) -> bool:
        return any(loop is running for running, _ in self._running)

    def is_current(self) -> bool:
        return any(threading.current_thread() is thread for _, thread in self._running)

    def submit(self, call: Call[Any]) -> None:
        if self.is_current():
            raise GranularError(
                'a blocking call on the loop that would have to run it: await the method of granular.aio instead'
            )
        if _SUBMITTING.locked() and any(code is _SUBMIT for code in _callers()):
            raise GranularError(
                'a blocking call while this thread passes a call to a pool, and so holds a lock that the event loop '
                'needs: by a `__del__`, or the handler of a signal: let another thread make it'
            )
        call.send(self.loop())

    def send(self, call: Call[Any]) -> None:
        """Resume a coroutine on the loop, if there is one, without waiting for anything."""
        for loop, _ in self._running[:1]:
            call.send(loop)

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

    def _main(self, started: 'queue.SimpleQueue[BaseException | None]') -> None:
        try:
            loop: asyncio.AbstractEventLoop = (import_if_installed('uvloop') or asyncio).new_event_loop()
        except BaseException as error:  # the call that needs the loop raises it, as for lack of descriptors
            started.put(error)
            return
        asyncio.set_event_loop(loop)
        # Registered here, as the thread that started this one may be interrupted before it knows of it.
        self._running.append((loop, threading.current_thread()))
        loop.call_soon(started.put, None)
        try:
            while not self.ended:
                try:
                    loop.run_forever()
                except (SystemExit, KeyboardInterrupt) as error:
                    # A callback raised it, as signals reach the main thread.
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
at_exit(bridge.stop)
after_fork(bridge.after_fork)


@blocking_call
def run(coro: Coroutine[Any, Any, T], undo: Callable[[T], None] | None = None) -> T:
    """Run a coroutine of the library and return its result, from any thread, with or without a running loop.

    An interrupt (Ctrl-C) cancels the coroutine and waits for it to clean up; ``undo`` is called on the loop with a
    result that it kept from the caller.
    """
    call: Call[T] | None = None
    try:
        outcome = _start(coro)
        if not isinstance(outcome, StartedCoroutine):
            return outcome
        call = Call(outcome, undo)
        bridge.submit(call)
        return call.result()
    except BaseException as error:
        if call is None:
            end_coroutine(coro, error)
        else:
            call.cancel(error)
        if (bridge.ended or threads.exiting.is_set()) and threading.current_thread().daemon:
            # The interpreter exits, and this thread with it: as silently as any other daemon thread.
            raise SystemExit from None
        shorten(error)
        raise


def call_uninterrupted(fn: Callable[[], object]) -> None:
    """Call a function that does not wait where Ctrl-C does not reach: on the loop, soon, if this is the main thread."""
    if threading.current_thread() is threading.main_thread():
        bridge.loop().call_soon_threadsafe(fn)
    else:
        fn()


def run_close(coro: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that closes something, as ``run`` does; it waits only where it may wait."""
    try:
        waits = may_wait()
    except BaseException:  # an interrupt
        coro.close()
        raise
    if waits:
        run(coro)
    elif isinstance(rest := _start(_logged(coro)), StartedCoroutine):
        bridge.send(Call(rest, None))


def may_wait() -> bool:
    """Return whether what closes something may wait in this thread for others.

    The garbage collector calls a ``__del__`` of the user anywhere: on the loop, or while this thread passes a call to a
    pool, and so holds a lock that the loop needs.
    """
    return not (bridge.is_current() or _holds_lock())


async def _logged(coro: Coroutine[Any, Any, None]) -> None:
    try:
        await coro
    except Exception as error:
        logger.warning('closing a dropped object failed', exc_info=error)


def _holds_lock() -> bool:
    """Return whether this call comes from within a function of the standard library that holds a lock of threads."""
    return any(code.co_filename in _LOCKING and code.co_name not in _FREE for code in _callers())


def _callers() -> Iterator[types.CodeType]:
    """Yield the code of each function that this call comes from, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _start(coro: Coroutine[Any, Any, T]) -> T | StartedCoroutine[T]:
    """Step a coroutine on this thread. Returns its result, or the rest of it if it needs a loop."""
    if running_loop() is None:
        return start_coroutine(coro)
    # In a thread with a running loop, as in Jupyter, our coroutine must not use that loop.
    return outside_loops(start_coroutine, coro)

"""The portal from threads to the async core: one background event loop, and ``run``, which blocks until it is done."""

import asyncio
import concurrent.futures
import contextvars
import queue
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Generic, TypeVar, cast

from granular._support.lazy import at_exit, import_if_installed
from granular._support.text import logger
from granular.aio.runtime import pools
from granular.aio.runtime.forking import after_fork, inherited
from granular.aio.runtime.immediate import Rest, end_coroutine, start_coroutine
from granular.aio.runtime.nesting import blocked, call_on_own_loop, outside_loops
from granular.aio.runtime.tasks import HeldError, start_task
from granular.aio.runtime.tracebacks import shorten
from granular.errors import ClosedError, GranularError

T = TypeVar('T')

_STOP_TIMEOUT: Final = 5.0
_CHECK_INTERVAL: Final = 1.0  # seconds between checks for interrupts


def has_news(news: 'queue.SimpleQueue[None]', seconds: float = _CHECK_INTERVAL) -> bool:
    """Take an item of a queue; return False if there is none for some seconds.

    Python misses an interrupt that comes right before it waits, so who waits for longer asks again.
    """
    try:
        news.get(timeout=seconds)
    except queue.Empty:
        return False
    return True


class Call(Generic[T]):
    """The rest of a coroutine, to be run on the loop, and its result.

    The caller may be interrupted anywhere: the state that counts is set on the loop, which Ctrl-C never reaches, and
    the caller waits for a queue, because an interrupt can leave the lock of a future locked, and with it the loop.
    """

    def __init__(self, rest: Rest[T], undo: Callable[[T], None] | None) -> None:
        self._rest, self._undo = rest, undo
        self.context: Final = contextvars.copy_context()  # so that the loop sees the context variables of the caller
        self.context.run(pools.fix_depth)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[T] | None = None  # while it runs
        self._sent = False
        self._begun = False
        self._done = False
        self._abandoned = False
        self._ended = False
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # gets an item when it is done, and when it has ended

    def send(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        loop.call_soon_threadsafe(self._start, context=self.context)

    def result(self, closes: bool) -> T:
        """Return the result; what ``closes`` something is left to a loop that has not responded for five seconds."""
        responded = [time.monotonic()]
        while not has_news(self._news):
            if self._loop is not None and self._loop.is_closed() and not self._done:
                raise GranularError('the event loop of granular ended before this call completed')
            if closes and self._loop is not None:
                if time.monotonic() - responded[-1] > _STOP_TIMEOUT:
                    return cast(T, None)
                self._loop.call_soon_threadsafe(lambda: responded.append(time.monotonic()))
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
        self._loop.call_soon_threadsafe(self._cancel, context=self.context)
        end = time.monotonic() + _STOP_TIMEOUT
        while not self._ended and (left := end - time.monotonic()) > 0:
            has_news(self._news, left)

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


class Portal:
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
                    pools.start_thread(thread)
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
            raise call_on_own_loop()
        if pools.is_submitting():
            raise GranularError(
                'a blocking call while this thread passes a call to a pool, and so holds a lock that the event loop '
                'needs: by a `__del__`, or the handler of a signal: let another thread make it'
            )
        call.send(self.loop())

    def send(self, call: Call[Any]) -> None:
        """Run a coroutine on the loop, if there is one, without waiting for anything."""
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


portal: Final = Portal()
at_exit(portal.stop)
after_fork(portal.after_fork)


def run(
    coro: Coroutine[Any, Any, T],
    undo: Callable[[T], None] | None = None,
    *,
    immediate: bool = False,
    closes: bool = False,
) -> T:
    """Run a coroutine of the library on the portal's loop and return its result, from any thread.

    An interrupt (Ctrl-C) cancels the coroutine and waits up to five seconds for it to clean up; a second one stops
    waiting.

    Args:
      coro: the coroutine.
      undo: called on the loop with a result that an interrupt kept from the caller.
      immediate: True for what often need not wait, and changes nothing that an interrupt must not divide: it begins on
        this thread, and moves to the loop where it must wait; but not in a thread that runs a loop, as in a notebook.
      closes: True for what closes an object, maybe by a ``__del__`` of the user, which the garbage collector calls
        anywhere: if this thread holds a lock that the loop needs, it goes on after five seconds.
    """
    call: Call[T] | None = None
    try:
        if immediate and sys.get_asyncgen_hooks().firstiter is None:
            outcome = start_coroutine(coro)
        elif portal.is_current():
            outcome = outside_loops(start_coroutine, coro)
        else:
            outcome = Rest(coro)
        if not isinstance(outcome, Rest):
            return outcome
        call = Call(outcome, undo)
        with blocked(coro, call.context):
            portal.submit(call)
            return call.result(closes)
    except BaseException as error:
        if call is None:
            end_coroutine(coro, error)
        else:
            call.cancel(error)
        if (portal.ended or pools.exiting.is_set()) and threading.current_thread().daemon:
            # The interpreter exits, and this thread with it: as silently as any other daemon thread.
            raise SystemExit from None
        shorten(error)
        raise


def call_on_loop(fn: Callable[[], object]) -> None:
    """Call a function that does not wait soon, on the loop: where no interrupt comes."""
    portal.loop().call_soon_threadsafe(fn)


def run_close(coro: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that closes something, as ``run`` does; it waits only where it may wait."""
    if may_wait():
        run(coro, immediate=True, closes=True)
    elif isinstance(rest := outside_loops(start_coroutine, _logged(coro)), Rest):
        portal.send(Call(rest, None))


def may_wait() -> bool:
    """Return whether what closes something may wait in this thread for others.

    The garbage collector calls a ``__del__`` of the user anywhere: on the loop, or while this thread passes a call to a
    pool, and so holds a lock that the loop needs.
    """
    return not (portal.is_current() or pools.is_submitting())


async def _logged(coro: Coroutine[Any, Any, None]) -> None:
    try:
        await coro
    except Exception as error:
        logger.warning('closing a dropped object failed', exc_info=error)

"""Calls in threads beside the event loop: blocking calls are made there, and many calls are spread over the threads."""

import asyncio
import bisect
import concurrent.futures
import contextlib
import contextvars
import functools
import inspect
import itertools
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final, Generic, TypeVar, TypeVarTuple

from granular.aio.runtime.forking import after_fork
from granular.aio.runtime.immediate import Rest, is_immediate, start_coroutine, to_loop
from granular.aio.runtime.pools import CORES, Threads, descend, threads
from granular.aio.runtime.portal import call_on_loop
from granular.aio.runtime.tasks import result_of, wait_cancelled
from granular.aio.runtime.user_functions import await_user, call_user
from granular.errors import GranularError

R = TypeVar('R')
T = TypeVar('T')
Ts = TypeVarTuple('Ts')

READS: Final = 64
SLOW: Final = 0.005
"""After ``READS`` reads of a disk that took more than ``SLOW`` seconds, spent waiting, the others go to threads."""

_computing: Final[set[int]] = set()  # threads that compute, so that no more are started than there are cores
after_fork(_computing.clear)


async def offload(fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call a blocking function: in a thread under a loop, so that the loop is never blocked, and directly without one.

    It may be a user function: it is called by :func:`granular.aio.runtime.user_functions.call_user`.
    """
    return call_user(fn, *args) if is_immediate() else await call_in(threads(), fn, *args)


async def call_or_await(fn: Callable[..., Any], *args: Any) -> Any:
    """Call a user's blocking function, as ``offload`` does, or await a coroutine function on a loop."""
    if not inspect.iscoroutinefunction(fn):
        return await offload(fn, *args)
    await to_loop()
    return await await_user(fn(*args))


async def call_in(pool: Threads, fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call a blocking function in a thread of the pool, under a loop."""
    call, result = _submit(pool, fn, *args)
    result.add_done_callback(functools.partial(_cancel, call))
    try:
        return await result
    finally:
        del call, result  # an error would keep its traceback, and with it all that its frames hold


async def offload_whole(
    fn: Callable[[*Ts], T],
    *args: *Ts,
    undo: Callable[[T], object] | None = None,
    stop: Callable[[], object] | None = None,
) -> T:
    """Call a blocking function that changes files, as ``offload`` does, so that it never outlives its caller.

    If the caller is cancelled, ``stop`` is called, and a call that has begun is awaited; then ``undo`` is called with
    its result in a thread.
    """
    if undo is not None or stop is not None:
        await to_loop()
    if is_immediate():
        return fn(*args)
    call, result = _submit(threads(), fn, *args)
    try:
        return await result_of(result)
    except asyncio.CancelledError:
        if not call.cancel():
            if stop is not None:
                stop()
            await wait_cancelled(result)
            if undo is not None and result.exception() is None:
                await wait_cancelled(_submit(threads(), undo, result.result())[1])
        raise
    finally:
        del call, result


def _cancel(call: concurrent.futures.Future[Any], _: object) -> None:
    call.cancel()


def _submit(
    pool: Threads, fn: Callable[[*Ts], T], *args: *Ts
) -> 'tuple[concurrent.futures.Future[T], asyncio.Future[T]]':
    """Start a call in a copy of the caller's context."""
    context = contextvars.copy_context()
    if pool is threads():
        context.run(descend)
    call = pool.submit(context.run, lambda: call_user(fn, *args))
    return call, on_this_loop(call)


def on_this_loop(call: 'concurrent.futures.Future[T]') -> 'asyncio.Future[T]':
    """Return a future of the running loop with the outcome of a call elsewhere, which goes on if it is cancelled."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()
    # Not `call` itself: a call that its own callback refers to would keep its result until the garbage is collected.
    call.add_done_callback(lambda ended: _deliver(ended, result, loop))
    return result


def _deliver(call: concurrent.futures.Future[T], result: 'asyncio.Future[T]', loop: asyncio.AbstractEventLoop) -> None:
    """Pass the result of a thread to a loop; unlike ``asyncio.wrap_future``, silently if the loop is closed by now."""
    try:
        loop.call_soon_threadsafe(_copy_outcome, call, result)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _copy_outcome(call: concurrent.futures.Future[T], result: 'asyncio.Future[T]') -> None:
    if result.done():
        return
    if call.cancelled():
        result.cancel()
    elif (error := call.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(call.result())


async def start_inline(make: Callable[[], Coroutine[Any, Any, T]], pool: Threads) -> T | Rest[T]:
    """Run a coroutine in a thread of the pool until it needs a loop. Returns its result, or the rest of it.

    The thread counts as computing all the time: if each core has such a thread, ``map_threads`` starts no others. If
    the caller is cancelled, ``map_threads`` makes no further call in that thread.
    """
    abandoned = threading.Event()

    def start() -> T | Rest[T]:
        _abandoned.set(abandoned)  # in the context of this call, a copy of its caller's
        with _counted():
            return start_coroutine(make())

    try:
        return await call_in(pool, start)
    except asyncio.CancelledError:
        abandoned.set()
        raise


class Calls(Generic[T]):
    """Calls of a function for i < count, and a function that makes something of all their results."""

    def __init__(self, call: Callable[[int], Any], count: int, finish: Callable[[list[Any]], T]) -> None:
        self.call: Callable[[int], Any] = call
        self.count: int = count
        self.finish: Callable[[list[Any]], T] = finish

    def then(self, function: Callable[[T], R]) -> 'Calls[R]':
        """Return these calls, with the result of a function in place of what is made of theirs."""
        return Calls(self.call, self.count, lambda results: function(self.finish(results)))

    @staticmethod
    def all_of(parts: 'Sequence[Calls[T]]') -> 'Calls[list[T]]':
        """Return the calls of several, with the list of what is made of the results of each."""
        if len(parts) == 1:
            return parts[0].then(lambda made: [made])
        ends = list(itertools.accumulate(part.count for part in parts))

        def call(i: int) -> Any:
            number = bisect.bisect_right(ends, i)
            part = parts[number]
            return part.call(i - ends[number] + part.count)

        def finish(results: list[Any]) -> list[T]:
            return [part.finish(results[end - part.count : end]) for part, end in zip(parts, ends, strict=True)]

        return Calls(call, sum(part.count for part in parts), finish)

    @staticmethod
    def none(value: R) -> 'Calls[R]':
        """Return no calls, of which a value is made that is there already."""
        return Calls(lambda i: i, 0, lambda _: value)


async def map_threads(call: Callable[[int], T], count: int, before: Calls[Any] | None = None) -> list[T]:
    """Return ``call(i)`` for i < count, computed in threads, in any order; without a loop, starting on this thread.

    The calls in ``before``, if there are any, are made first, without another hop to a thread.

    One thread starts, as threads that compute in Python take turns anyway. If it is not done after a millisecond, as
    with images, one thread per core joins; if after 5 ms it was mostly waiting, the whole pool does. The first error
    ends them all, once the running calls have returned.
    """
    calls = _ParallelCalls(call, count)
    first = None if before is None else _ParallelCalls(before.call, before.count)

    def run() -> list[T]:
        if before is not None and first is not None:
            before.finish(first.run())
        return calls.run()

    try:
        return await offload(calls.run if first is None else run)
    finally:
        calls.stopped = True  # the caller may have been cancelled: no thread starts another call
        if first is not None:
            first.stopped = True


def map_threads_now(call: Callable[[int], T], count: int) -> list[T]:
    """Like ``map_threads``, but start on this thread in any case."""
    return _ParallelCalls(call, count).run()


def map_inline_then_threads(call: Callable[[int], T], count: int) -> list[T]:
    """Like ``map_threads_now``, for calls that rarely wait: threads join only once some calls were slow, and waited."""
    results: list[T] = []
    while len(results) < count:
        timer = Timer()
        results += [call(i) for i in range(len(results), min(len(results) + READS, count))]
        if timer.is_slow:
            break
    done = len(results)
    return results + map_threads_now(lambda i: call(done + i), count - done) if done < count else results


class Timer:
    """Elapsed time and CPU time of the current thread since its creation."""

    def __init__(self) -> None:
        self._wall, self._busy = time.perf_counter(), time.thread_time()

    @property
    def wall(self) -> float:
        return time.perf_counter() - self._wall

    @property
    def waited(self) -> bool:
        """True if the thread computed for less than an eighth of the time."""
        return time.thread_time() - self._busy < self.wall / 8

    @property
    def is_slow(self) -> bool:
        """True if more than ``SLOW`` seconds were spent waiting."""
        return self.wall > SLOW and self.waited


class _ParallelCalls(Generic[T]):
    def __init__(self, call: Callable[[int], T], count: int) -> None:
        self._call, self._count = call, count
        self._abandoned = _abandoned.get()
        self._threads, self._context = threads(), contextvars.copy_context()
        self._numbers = itertools.count()  # shared by the threads: its next() is atomic
        self._results: list[Any] = [None] * count
        self._errors: list[BaseException] = []
        # Not the futures of the helpers: an interrupt could leave the lock of one held, for which its helper waits.
        self._helping: list[None] = []  # an item for each helper that has begun and not ended
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._next_check = 0.005  # seconds from the start
        self.stopped = False

    def run(self) -> list[T]:
        timer = Timer()
        with _counted():
            if self._run_alone():
                return self._results
            try:
                helpers = self._start_helpers(min(min(CORES, self._count) - len(_computing), self._threads.width - 1))
                while True:
                    if timer.wall > self._next_check:
                        helpers += self._start_more_helpers(timer, helpers)
                    if not self._step():
                        break
                # Helpers that have not started are not awaited: the pool may be full of threads that wait as this does.
                while self._helping:
                    self._ended.get()
            finally:
                self.stopped = True  # no helper makes another call
        if self._errors:
            del self._errors[1:]  # the traceback of an error refers to this object
            raise self._errors.pop()
        return self._results

    def _run_alone(self) -> bool:
        """Start without helpers. Returns whether all calls were done, or stopped, within a millisecond."""
        call, results = self._call, self._results
        until = time.perf_counter() + 0.001
        for i in range(self._count):
            results[i] = call(i)
            self._check_caller()
            if self.stopped or time.perf_counter() > until:
                self._numbers = itertools.count(i + 1)
                return self.stopped or i + 1 == self._count
        return True

    def _start_helpers(self, count: int) -> int:
        """Start helpers; return how many. One that begins when the calls are done and dropped does nothing."""
        if count <= 0:
            return 0
        start = functools.partial(_start_helpers, self._threads, self._context, weakref.ref(self), count)
        if threading.current_thread() is threading.main_thread():
            call_on_loop(start)
        else:
            start()
        return count

    def _start_more_helpers(self, timer: Timer, running: int) -> int:
        """Start as many helpers as the pool has threads if this thread has mostly waited; else check again later."""
        if not timer.waited:
            self._next_check *= 2
            return 0
        self._next_check = math.inf
        return self._start_helpers(min(self._threads.width, self._count) - 1 - running)

    def fail(self, error: GranularError) -> None:
        self._errors.append(error)

    def help(self) -> None:
        self._helping.append(None)
        try:
            descend()
            with _counted():
                while self._step():
                    pass
        finally:
            self._helping.pop()
            self._ended.put(None)

    def _step(self) -> bool:
        if self.stopped or self._errors or (i := next(self._numbers)) >= self._count:
            return False
        try:
            self._check_caller()
            self._results[i] = self._call(i)
        except BaseException as error:
            self._errors.append(error)
        return True

    def _check_caller(self) -> None:
        if self._abandoned is not None and self._abandoned.is_set():
            raise asyncio.CancelledError


def _start_helpers(
    pool: Threads, context: contextvars.Context, calls: 'weakref.ref[_ParallelCalls[Any]]', count: int
) -> None:
    try:
        for _ in range(count):
            pool.submit(context.copy().run, _help, calls)
    except GranularError as error:
        if (existing := calls()) is not None:
            existing.fail(error)


def _help(calls: 'weakref.ref[_ParallelCalls[Any]]') -> None:
    if (existing := calls()) is not None:
        existing.help()


_abandoned: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar('abandoned', default=None)


@contextlib.contextmanager
def _counted() -> Iterator[None]:
    """Count this thread as one that computes; once, however often it is entered."""
    thread = threading.get_ident()
    if thread in _computing:
        yield
        return
    _computing.add(thread)
    try:
        yield
    finally:
        _computing.discard(thread)

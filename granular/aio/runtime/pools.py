"""Thread pools, and the threads of the process.

Their locks are those of the standard library, which an interrupt (Ctrl-C) would leave held: calls are passed to them,
and threads are started, on other threads than the main one (:func:`granular.aio.runtime.portal.call_on_loop`).
"""

import atexit
import concurrent.futures
import contextvars
import functools
import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from granular._support.lazy import at_exit
from granular.aio.runtime.cores import usable_cores
from granular.aio.runtime.forking import after_fork
from granular.aio.runtime.nesting import outside_loops
from granular.errors import ClosedError, GranularError

T = TypeVar('T')

CORES: Final = usable_cores()

exiting: Final = threading.Event()
"""Set once the interpreter is known to shut down: a handler at exit runs, or a call came too late for a thread."""


def expect_exit() -> None:
    """Let ``exiting`` be set at exit, before the handlers run that were registered by now, such as finalizers."""
    atexit.unregister(_begin_exit)
    atexit.register(_begin_exit)


def _begin_exit() -> None:
    """Set ``exiting``; from here on, daemon threads and their loops, which Python stops anywhere, end silently."""
    if exiting.is_set():
        return
    exiting.set()
    warnings.filterwarnings('ignore', "coroutine '.*' was never awaited", RuntimeWarning)
    logging.getLogger('asyncio').addFilter(lambda record: 'granular' not in record.getMessage())
    hook = threading.excepthook

    def report(args: threading.ExceptHookArgs) -> None:
        if args.thread is None or not args.thread.daemon or not isinstance(args.exc_value, GranularError):
            hook(args)

    threading.excepthook = report


at_exit(_begin_exit)


class _Submitting(threading.local):
    active = False


_submitting: Final = _Submitting()


def is_submitting() -> bool:
    """Return whether this thread passes a call to a pool of the library, and so holds a lock of all pools."""
    return _submitting.active


class Threads(concurrent.futures.ThreadPoolExecutor):
    """A thread pool that knows its width, and that tasks may still use when it is closed.

    While the interpreter exits, when it has no threads any more, it refuses calls, as those of iterators that would go
    on; one that ``lasts`` makes them on the calling thread, so that a handler at exit can read, and close a writer.
    """

    def __init__(self, width: int, name: str, lasts: bool = False) -> None:
        super().__init__(width, name, self._begin)
        self._lasts = lasts
        self.width = width
        self._begun = 0  # threads
        self._retired = False

    def _begin(self) -> None:
        self._begun += 1

    def retire(self) -> None:
        """Let the threads end after the calls that are queued; the threads of the process make all further calls.

        The owner cancels its own calls. The others are of tasks that it started and shares, such as one that renews
        the credentials of a bucket.
        """
        self._retired = True
        self.shutdown(wait=False)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> 'concurrent.futures.Future[T]':
        result: concurrent.futures.Future[T] = concurrent.futures.Future()
        call = _Call(result, functools.partial(fn, *args, **kwargs))
        outer, _submitting.active = _submitting.active, True
        try:
            super().submit(call.make)
        except RuntimeError as error:
            refused = f'{error}'
        else:
            return result
        finally:
            _submitting.active = outer
        ended = 'shutdown' in refused
        if ended and self._retired:
            return _process_threads().submit(fn, *args, **kwargs)
        if ended and self._lasts:
            _begin_exit()
            outside_loops(call.make)
        elif ended or not self._begun:  # else another thread makes the call, which is queued
            result.cancel()
            raise _refusal(refused)
        return result


class _Call(Generic[T]):
    """A call of a pool, which keeps nothing alive once it was made: the frames of an error lead to it."""

    def __init__(self, result: 'concurrent.futures.Future[T]', fn: Callable[[], T]) -> None:
        self._parts = [(result, fn)]

    def make(self) -> None:
        """Make the call, unless it was cancelled."""
        result, fn = self._parts.pop()
        if not result.set_running_or_notify_cancel():
            return
        try:
            value = fn()
            del fn  # before others go on, which may count what is left
        except BaseException as error:
            result.set_exception(error)
            del result, error  # which would refer to each other by the traceback
        else:
            result.set_result(value)


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, or raise the error for one that is refused."""
    try:
        thread.start()
    except RuntimeError as error:
        raise _refusal(f'{error}') from None


def _refusal(reason: str) -> GranularError:
    if 'shutdown' in reason:  # Python has no flag for it until all threads have ended
        _begin_exit()
        return ClosedError('the interpreter is shutting down')
    return GranularError(
        f'no thread can be started ({reason}): the memory, `ulimit -u`, or the limit of the container (memory, pids) '
        f'is used up: raise it, or use fewer workers'
    )


current: contextvars.ContextVar[Threads | None] = contextvars.ContextVar('threads', default=None)
"""The threads of the loader whose batch is being read; None for those of the process."""
_depth: contextvars.ContextVar[int | None] = contextvars.ContextVar('depth', default=None)
"""The number of calls in threads that this context is within: a function may read, and wait for the threads of that."""
_pools: Final[dict[int, Threads]] = {}  # of the process, by depth: calls of one pool could all wait for each other


def threads() -> Threads:
    """Return the threads that decode, transform and wait for blocking calls."""
    return current.get() or _process_threads()


def depth() -> int:
    """Return how many calls in threads this one is within: also those of a function that waits for this thread."""
    if (known := _depth.get()) is not None:
        return known
    return int(threading.current_thread() is not threading.main_thread())


def fix_depth() -> None:
    """Let what this context starts in other threads, such as on a loop, have its depth."""
    _depth.set(depth())


def _process_threads() -> Threads:
    level = depth()
    return _pools.get(level) or _pools.setdefault(level, Threads(min(32, 4 * CORES), f'granular_{level}', lasts=True))


def descend() -> None:
    """Let calls that are made within this one use other threads than it does."""
    _depth.set(depth() + 1)
    current.set(None)


def _forget_threads() -> None:
    current.set(None)
    _depth.set(None)
    _pools.clear()


after_fork(_forget_threads)

"""Switching to an event loop, for coroutines that start without one.

A coroutine of this library that never waits needs no loop: a local read runs to its end on the calling thread
(:mod:`granular.aio.runtime.bridge`). A coroutine that must wait first does ``await ensure_event_loop()``, which costs
nothing under a running loop; elsewhere, the bridge takes over at that point.
"""

import asyncio
import concurrent.futures.thread
import contextlib
import inspect
import sys
import threading
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, Generic, TypeVar, TypeVarTuple, cast

from granular.errors import GranularError

T = TypeVar('T')
Ts = TypeVarTuple('Ts')


_SWITCH_TO_LOOP: Final = object()  # yielded by a coroutine that needs an event loop when none is running

running_loop = asyncio._get_running_loop


def outside_loops(fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call a function where no loop seems to run: it may run another one, also within a task of this thread's loop.

    Asynchronous generators that it starts are not left to that loop to close.
    """
    outer, hooks = running_loop(), sys.get_asyncgen_hooks()
    task = None if outer is None else asyncio.current_task(outer)
    try:
        if outer is not None and task is not None:  # from Python 3.14 on, a thread has one task, whatever its loop
            asyncio._leave_task(outer, task)
        sys.set_asyncgen_hooks(None, None)
        asyncio._set_running_loop(None)
        return fn(*args)
    finally:
        asyncio._set_running_loop(outer)
        sys.set_asyncgen_hooks(*hooks)
        if outer is not None and task is not None and asyncio.current_task(outer) is None:
            asyncio._enter_task(outer, task)


@types.coroutine
def ensure_event_loop() -> Generator[Any, Any, None]:
    """Switch to an event loop: return at once if one is running, on the bridge's loop otherwise."""
    if running_loop() is None:
        yield _SWITCH_TO_LOOP


@types.coroutine
def ensure_uninterrupted() -> Generator[Any, Any, None]:
    """Continue where Ctrl-C does not reach: leave the main thread for a loop, before something that must be undone.

    On the loop, an interrupt of the caller is a cancellation, which comes at an ``await``. Other threads are never
    interrupted, and while the interpreter exits, no thread can be started: there, the caller stays on its thread.
    """
    on_main_thread = running_loop() is None and threading.current_thread() is threading.main_thread()
    # Not `is_alive` of the main thread: interrupted, it declares the thread ended, before Python 3.13.
    if on_main_thread and not concurrent.futures.thread._shutdown:
        yield _SWITCH_TO_LOOP


class StartedCoroutine(Generic[T]):
    """The rest of a coroutine that started without a loop and asked for one; await it under a loop."""

    def __init__(self, coro: Coroutine[Any, Any, T]) -> None:
        self._coro = coro

    def close(self, error: BaseException) -> None:
        """End the coroutine, by an interrupt that came before it was resumed."""
        end_coroutine(self._coro, error)

    def __await__(self) -> Generator[Any, Any, T]:
        # `yield from` refuses a coroutine that has started, so its steps are written out here.
        value: Any = None
        error: BaseException | None = None
        try:
            while True:
                try:
                    yielded = self._step(value, error)
                except StopIteration as end:
                    return cast(T, end.value)
                value, error = None, None
                try:
                    value = yield yielded
                except GeneratorExit:
                    raise
                except BaseException as thrown:
                    error = thrown
        finally:
            yielded = error = None  # the traceback of an error refers to this frame
            self._coro.close()

    def _step(self, value: Any, error: BaseException | None) -> Any:
        try:
            return self._coro.send(value) if error is None else self._coro.throw(error)
        finally:
            del error


def start_coroutine(coro: Coroutine[Any, Any, T]) -> T | StartedCoroutine[T]:
    """Step a coroutine of the library without a loop. Returns its result, or the rest of it if it must wait."""
    outer = stepped.coro
    try:
        stepped.coro = coro
        if (yielded := coro.send(None)) is None or yielded is _SWITCH_TO_LOOP:  # `asyncio.sleep(0)` yields None
            return StartedCoroutine(coro)
        raise GranularError('a coroutine waited without requesting a loop: this is a bug in granular')
    except StopIteration as end:
        return cast(T, end.value)
    except BaseException as error:
        end_coroutine(coro, error)  # an interrupt may have come after its step, and it may hold a lock
        raise
    finally:
        stepped.coro = outer


def end_coroutine(coro: Coroutine[Any, Any, Any], error: BaseException) -> None:
    """End a coroutine that waits for a loop, by an interrupt that came meanwhile.

    ``close`` would leave asynchronous generators that it awaits running, before Python 3.13.
    """
    if inspect.getcoroutinestate(coro) == inspect.CORO_SUSPENDED:
        trace = error.__traceback__
        with contextlib.suppress(BaseException):  # the caller raises the error
            coro.throw(error)
        error.__traceback__ = trace  # without this frame, which refers to the error and so would keep all of them
    coro.close()


class _Stepped(threading.local):
    """The coroutine that ``start_coroutine`` runs on this thread, if it runs one."""

    coro: Coroutine[Any, Any, Any] | None = None


stepped: Final = _Stepped()

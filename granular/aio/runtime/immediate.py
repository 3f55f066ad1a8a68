"""Coroutines that begin on the thread of their caller, and need no loop as long as they do not wait.

A read of local data that is open takes a few microseconds, and handing it to a loop in another thread takes a hundred.
So blocking calls of what often need not wait begin on the calling thread (:mod:`granular.aio.runtime.portal`). Where
such a coroutine must wait, or shall not block its caller's thread, it does ``await to_loop()``, which costs nothing
under a loop; the portal then resumes it on its own loop, from there on.
"""

import asyncio
import contextlib
import inspect
import sys
import types
from collections.abc import Coroutine, Generator
from typing import Any, Final, Generic, TypeVar, cast

from granular.aio.runtime.nesting import here
from granular.errors import GranularError

T = TypeVar('T')

_TO_LOOP: Final = object()  # yielded by a coroutine that needs an event loop


def is_immediate() -> bool:
    """Return whether the caller is a coroutine that has no loop so far: it may block its thread, and cannot wait."""
    # A loop that a function of the user runs within has hooks in this thread.
    return here.coro is not None and sys.get_asyncgen_hooks().firstiter is None


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the loop of the calling coroutine; None if it has no loop so far."""
    if is_immediate():
        return None
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


@types.coroutine
def to_loop() -> Generator[Any, Any, None]:
    """Continue under a loop: return at once if there is one, on the loop of the portal otherwise."""
    if is_immediate():
        yield _TO_LOOP


class Rest(Generic[T]):
    """A coroutine, or the rest of one that began without a loop and asked for one; await it under a loop."""

    def __init__(self, coro: Coroutine[Any, Any, T]) -> None:
        self._coro = coro

    def close(self, error: BaseException) -> None:
        """End the coroutine by an error that came before it was resumed."""
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


def start_coroutine(coro: Coroutine[Any, Any, T]) -> T | Rest[T]:
    """Begin a coroutine of the library on this thread. Returns its result, or the rest of it if it needs a loop."""
    outer = here.coro
    if outer is not None:
        here.beneath = (*here.beneath, outer)
    try:
        here.coro = coro
        if (yielded := coro.send(None)) is None or yielded is _TO_LOOP:  # `asyncio.sleep(0)` yields None
            return Rest(coro)
        raise GranularError('a coroutine waited without requesting a loop: this is a bug in granular')
    except StopIteration as end:
        return cast(T, end.value)
    except BaseException as error:
        end_coroutine(coro, error)  # an interrupt may have come after its step, and it may hold a lock
        raise
    finally:
        here.coro = outer
        if outer is not None:
            here.beneath = here.beneath[:-1]


def end_coroutine(coro: Coroutine[Any, Any, Any], error: BaseException) -> None:
    """End a coroutine that waits for a loop, by an error that came meanwhile.

    ``close`` would leave asynchronous generators that it awaits running, before Python 3.13.
    """
    if inspect.getcoroutinestate(coro) == inspect.CORO_SUSPENDED:
        trace = error.__traceback__
        with contextlib.suppress(BaseException):  # the caller raises the error
            coro.throw(error)
        error.__traceback__ = trace  # without this frame, which refers to the error and so would keep all of them
    coro.close()

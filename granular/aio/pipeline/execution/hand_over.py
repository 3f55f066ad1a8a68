"""The hand-over of elements to their consumers: each reaches one of them, and comes again if it did not."""

import abc
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from granular.aio.pipeline.execution.prefetch import END
from granular.aio.runtime.forking import each_after_fork
from granular.aio.runtime.nesting import call_on_own_loop, nested_call
from granular.aio.runtime.portal import portal
from granular.aio.runtime.tracebacks import shorten
from granular.aio.runtime.user_functions import computing

R = TypeVar('R')
T = TypeVar('T')

READY: Final = object()
"""Sentinel returned in place of an element, once there are elements that are ready."""


class Exclusive:
    """Runs the blocking calls of one object, one at a time; one within another of the same thread is an error.

    The event loop never waits for them, as they wait for it. It has another lock when it is pickled or copied, and in a
    forked child whose parent's thread holds it.
    """

    def __init__(self) -> None:
        self.lock, self.busy = threading.RLock(), False
        _all.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def call(self, function: Callable[[], R]) -> R:
        with self.lock:
            if self.busy:
                raise nested_call()
            self.busy = True
            try:
                return function()
            finally:
                self.busy = False


def _renew(calls: Exclusive) -> None:
    if calls.lock.acquire(blocking=False):
        calls.lock.release()
    else:
        calls.lock, calls.busy = threading.RLock(), False


_all: Final = each_after_fork(_renew)


class HandOver(Iterator[T]):
    """An iterator that hands elements to its consumers, any number of threads.

    A call that fails or is interrupted (Ctrl-C) leaves its element to the next one, also if that was taken already.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls = Exclusive()
        self._ready: list[T] = []  # the next elements, in reverse, which need no operation: ``pop`` takes one
        self._moves = 0  # operations begun, each of which takes an element or goes to another place
        self._last: Any = None  # what to take back, until an element has reached its consumer

    @abc.abstractmethod
    def _take(self) -> Any:
        """Return the next element, which was received; ``END``; or ``READY``. It may block."""

    @abc.abstractmethod
    def _take_back(self) -> None:
        """Let the element of the last operation, which did not reach its consumer, come again."""

    def __next__(self) -> T:
        if computing.get():
            self._check_caller()
        element: Any = READY
        while element is READY:
            if ready := self._ready:
                left = len(ready)
                try:
                    last = ready[-1]
                    return ready.pop()
                except IndexError:  # another thread has taken it
                    pass
                except BaseException:
                    if len(ready) < left:
                        ready.append(last)
                    raise
            try:
                element = self._wait()
            except Exception as error:
                shorten(error)
                raise
        result: T = element
        return result

    def _wait(self) -> Any:
        """Take an element, unless another thread has made some ready while this one waited for it."""
        self._check_caller()
        calls, moves = self._calls, -1
        try:
            with calls.lock:
                if calls.busy:
                    raise nested_call()
                if self._ready:
                    return READY
                calls.busy = True
                try:
                    moves = self._moves
                    element = self._take()
                finally:
                    calls.busy = False
        except BaseException:
            if self._moves != moves >= 0:
                self._take_back()
            raise
        self._last = None
        if element is END:
            raise StopIteration
        return element

    def _check_caller(self) -> None:
        """Raise an error if the caller can only wait for itself."""
        if self._calls.busy and portal.is_current():
            raise call_on_own_loop()


def exclusively(hand_over: HandOver[Any], function: Callable[[], R]) -> R:
    """Call a function that goes to another place, while no thread waits for an element."""
    hand_over._check_caller()
    return hand_over._calls.call(function)

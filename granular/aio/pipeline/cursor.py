"""A position in a running flow, which hands its elements over one after another."""

import threading
import time
from typing import Any

from granular.aio.pipeline.execution.hand_over import HandOver
from granular.aio.pipeline.execution.prefetch import END, Crew
from granular.aio.pipeline.streams.flow import Flow
from granular.aio.runtime.lifecycle import Running
from granular.aio.runtime.portal import run
from granular.aio.runtime.user_functions import await_user, refuse_own_use


class Cursor(HandOver[Any], Running):
    """The position in a flow, and the state from which the next element follows.

    If an element fails, its error is raised and the state stays before it: the next call tries the element again. So
    does the next call after one that was interrupted (Ctrl-C).
    """

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.flow, self._crew = flow, Crew()
        flow.bind(self.token, self._crew)
        self._calls_functions = _calls_functions(flow)
        self._before: Any = None  # the mark before the last operation
        self._undelivered = False  # True if the flow must go back to it: the last operation is unfinished, or it failed
        self._expected = False  # True until the last element was received
        self._count = 0
        self._count_before = 0  # before the last operation
        self._page: list[Any] = []  # what was ready after it
        self._shown = 0  # the number of elements of the page that are counted
        self._left = 0, 0.0  # the thread and the time in which the last element was returned

    async def take(self) -> Any:
        """Return the next element, or ``END``; call ``received`` where it reaches its consumer."""
        async with self.turn():
            self.check()
            await self._go_back()
            try:
                self._move()
                step = self.flow.next()
                element = await await_user(self.compute(step) if self._calls_functions else step)
                if self.closed:  # meanwhile: a stage may have taken a closed one before it for one that ended or begins
                    self.check()
                self._count += element is not END
                self._undelivered = False
            except Exception:
                self._failed()
                raise
            finally:
                if self._loop is None:
                    await self.settle()
            self._page = self.flow.ready()
            self._shown = len(self._page)
            self._left = threading.get_ident(), time.perf_counter()
            return element

    def _failed(self) -> None:
        """Note that an element failed."""

    def received(self, element: Any) -> None:
        """Count the last element, or ``END``, as received, and let those behind it be taken.

        The time since ``take`` returned in another thread, from which the consumer woke up, counts as waiting.
        """
        thread, left = self._left
        self.flow.received(0.0 if thread == threading.get_ident() else time.perf_counter() - left)
        self._ready, self._expected = self._page, False

    def _take(self) -> Any:
        element = run(self.take(), self._take_back, immediate=True)
        self.received(element)
        return element

    def _take_back(self, *_: object) -> None:
        self.hide()
        self._undelivered = True

    def _check_caller(self) -> None:
        refuse_own_use(self.token)
        super()._check_caller()

    def forked(self) -> None:
        super().forked()
        self.hide()

    def hide(self) -> None:
        """Let elements be taken by operations only, and count those that were taken without one."""
        self._ready = []
        left = len(self._page)
        self._count += self._shown - left
        self._shown = left

    async def _go_back(self) -> None:
        """Begin an operation, before the last element if that failed or did not reach its consumer."""
        if self._loop is None:
            await self.settle()  # before there are tasks, which only their loop may end
        self._expected = False
        self.hide()
        if self._undelivered:  # so late that neither errors nor cancellations prevent it
            await self.flow.restore(self._before)
            self._count, self._undelivered = self._count_before, False

    def _move(self) -> None:
        self._before, self._count_before = self.flow.mark(), self._count
        self._undelivered = True
        self._expected = True
        self._last = None
        self._moves += 1

    def _in_move(self) -> bool:
        """Return whether the last element was not received."""
        return self._undelivered or self._expected

    def elements(self) -> int:
        """Return the number of elements that were received."""
        return self._count_before if self._in_move() else self._count + self._shown - len(self._page)

    async def aclose(self) -> None:
        self.hide()
        self._page, self._shown = [], 0
        await super().aclose()

    async def _close(self) -> None:
        try:
            await self.flow.aclose()
        finally:
            self._crew.retire()


def _calls_functions(flow: Flow) -> bool:
    return flow.calls_functions or any(map(_calls_functions, flow.parents))

"""Elements computed before they are requested."""

import asyncio
import contextlib
from typing import Any

from granular.aio.pipeline.execution.prefetch import END
from granular.aio.pipeline.position import FREE, RestoreRules
from granular.aio.pipeline.streams.flow import Flow
from granular.aio.pipeline.streams.stream import Stream, Unchanged
from granular.aio.runtime.immediate import running_loop, to_loop
from granular.aio.runtime.tasks import end_tasks
from granular.errors import ClosedError


class Prefetched(Unchanged):
    """Elements computed before they are requested; ``unlisted`` if the user did not ask for that."""

    stateless = True

    def __init__(self, parent: Stream, size: int, unlisted: bool = False) -> None:
        super().__init__(parent)
        self._size, self.unlisted = size, unlisted

    def flow(self) -> Flow:
        return Prefetching(self.parent.flow(), self._size)

    def describe(self) -> str:
        return self.parent.describe() if self.unlisted else f'prefetch({self._size})'


class Prefetching(Flow):
    """Elements computed before they are requested, by a separate task."""

    passes = True

    def __init__(self, parent: Flow, size: int) -> None:
        self.parents: tuple[Flow, ...] = (parent,)
        self._parent, self._size = parent, size
        self.calls_functions: bool = not size
        self._after, self._in_step = self._parent.state(), parent.in_step
        self._rules = FREE
        self._task: asyncio.Task[None] | None = None
        # Elements, the states after them, and whether hosts are in step there; an error in place of the last state.
        self._ready: asyncio.Queue[tuple[Any, Any, bool]] | None = None
        self._room = asyncio.Event()  # set if the task may compute another element
        self._taken = False  # True while an element is taken: if that is cut, it is lost
        self._computing = False
        self._closed = False

    @property
    def in_step(self) -> bool:
        return self._in_step

    def keep_host(self) -> None:
        super().keep_host()
        if self._task is None:
            self._after = self._parent.state()

    async def next(self) -> Any:
        if self._closed:
            raise ClosedError('the iterator is closed')
        if not self._size and self._task is not None:
            await to_loop()  # where the task does not begin an element meanwhile
        if not self._size and not self._pending():
            await self._stop()
            element = await self._parent.next()
            self._after, self._in_step = self._parent.state(), self._parent.in_step
            return element
        ready, self._taken = self._ready, True
        if running_loop() is None and self._task is not None and ready is not None and not ready.empty():
            element, after, in_step = ready.get_nowait()  # on the thread of the consumer
            with contextlib.suppress(RuntimeError):  # its loop is closed
                self._task.get_loop().call_soon_threadsafe(self._set_room)
        else:
            await self.begin()
            if self._ready is None:
                return END
            element, after, in_step = await self._ready.get()
            self._set_room()
        if isinstance(after, BaseException):
            self._task = None
            try:
                raise after
            finally:
                del after  # whose traceback refers to this frame
        if element is END:
            self._task = None
        self._after = after
        self._in_step = in_step
        self._taken = False
        return element

    def _pending(self) -> bool:
        """Return whether the task has computed, or is computing, an element that was not requested."""
        return self._task is not None and self._ready is not None and (self._computing or not self._ready.empty())

    def _set_room(self) -> None:
        if self._ready is None or self._ready.qsize() < self._size:
            self._room.set()
        else:
            self._room.clear()

    async def _fill(self, ready: 'asyncio.Queue[tuple[Any, Any, bool]]') -> None:
        element: Any = None
        while element is not END:
            await self._room.wait()
            self._computing = True
            try:
                element = await self._parent.next()
                ready.put_nowait((element, self._parent.state(), self._parent.in_step))
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                ready.put_nowait((None, error, True))
                return
            finally:
                self._computing = False
            self._set_room()

    async def set_prefetch(self, size: int) -> bool:
        self._size = size
        if self._task is not None:
            self._set_room()
        return True

    def received(self, seconds: float) -> None:
        pass  # the stages before this one are consumed by its task

    def state(self) -> Any:
        return self._after

    async def restore(self, state: Any, rules: RestoreRules = FREE) -> None:
        follows = self._ready is not None and self._task is not None and not self._taken
        if follows and state == self._after and rules == self._rules:
            return  # what is made ahead follows from there
        await self._stop()
        await self._parent.restore(state, rules)
        self._after, self._in_step = self._parent.state(), self._parent.in_step
        self._rules, self._taken = rules.later(), False

    async def begin(self) -> None:
        await to_loop()
        if self._task is None:
            await self._parent.begin()
            if not self._taken:
                self._after = self._parent.state()
        if self._size and self._task is None:
            self._ready = asyncio.Queue()
            self._set_room()
            self._task = asyncio.create_task(self._fill(self._ready))

    async def _stop(self) -> None:
        task, self._ready = self._task, None
        if task is not None:
            await to_loop()
            await end_tasks([task])
            self._task = None

    async def aclose(self) -> None:
        self._closed, ready = True, self._ready
        try:
            await self._stop()
            if ready is not None and ready.empty():  # wake a consumer that waits for an element
                ready.put_nowait((None, ClosedError('the iterator is closed'), True))
        finally:
            await super().aclose()

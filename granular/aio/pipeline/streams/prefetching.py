"""Elements computed before they are requested."""

import asyncio
from typing import Any

from granular.aio.execution.prefetch import END
from granular.aio.pipeline.position import FREE, Terms
from granular.aio.pipeline.streams.flow import Flow
from granular.aio.pipeline.streams.stream import Stream, Unchanged
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.tasks import end_tasks
from granular.errors import ClosedError


class Prefetched(Unchanged):
    """Elements computed before they are requested."""

    def __init__(self, parent: Stream, size: int) -> None:
        super().__init__(parent)
        self._size = size

    def flow(self) -> Flow:
        return Prefetching(self.parents[0].flow(), self._size)

    def describe(self) -> str:
        return f'prefetch({self._size})'


class Prefetching(Flow):
    """Elements computed before they are requested, by a separate task."""

    def __init__(self, parent: Flow, size: int) -> None:
        self.parents: tuple[Flow, ...] = (parent,)
        self._parent, self._size = parent, size
        self.calls_functions: bool = not size
        self._after = self._parent.state()
        self._terms = FREE
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Queue[tuple[Any, Any]] | None = None  # elements and the states after them
        self._room = asyncio.Event()  # set if the task may compute another element
        self._computing = False
        self._closed = False

    async def next(self) -> Any:
        if self._closed:
            raise ClosedError('the iterator is closed')
        if not self._size and not self._pending():
            await self._stop()
            element = await self._parent.next()
            self._after = self._parent.state()
            return element
        await self.begin()
        if self._ready is None:
            return END
        element, after = await self._ready.get()
        self._set_room()
        if isinstance(after, _Raised):
            self._task = None
            raise after.error
        if element is END:
            self._task = None
        self._after = after
        return element

    def _pending(self) -> bool:
        """Return whether the task has computed, or is computing, an element that was not requested."""
        return self._task is not None and self._ready is not None and (self._computing or not self._ready.empty())

    def _set_room(self) -> None:
        if self._ready is None or self._ready.qsize() < self._size:
            self._room.set()
        else:
            self._room.clear()

    async def _fill(self, ready: 'asyncio.Queue[tuple[Any, Any]]') -> None:
        element: Any = None
        while element is not END:
            await self._room.wait()
            self._computing = True
            try:
                element = await self._parent.next()
                ready.put_nowait((element, self._parent.state()))
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                ready.put_nowait((None, _Raised(error)))
                return
            finally:
                self._computing = False
            self._set_room()

    async def set_prefetch(self, size: int) -> bool:
        self._size = size
        if self._task is not None:
            await ensure_event_loop()
            self._set_room()
        return True

    def received(self, seconds: float) -> None:
        pass  # the stages before this one are consumed by its task

    def state(self) -> Any:
        return self._after

    async def restore(self, state: Any, terms: Terms = FREE) -> None:
        if self._ready is not None and self._task is not None and state == self._after and terms == self._terms:
            return  # what is made ahead follows from there
        await self._stop()
        await self._parent.restore(state, terms)
        self._after, self._terms = self._parent.state(), terms

    async def begin(self) -> None:
        await ensure_event_loop()
        if self._task is None:
            await self._parent.begin()
        if self._size and self._task is None:
            self._ready = asyncio.Queue()
            self._set_room()
            self._task = asyncio.create_task(self._fill(self._ready))

    async def _stop(self) -> None:
        task, self._ready = self._task, None
        if task is not None:
            await ensure_event_loop()
            await end_tasks([task])
            self._task = None

    async def aclose(self) -> None:
        self._closed, ready = True, self._ready
        await self._stop()
        if ready is not None and ready.empty():  # wake a consumer that waits for an element
            ready.put_nowait((None, _Raised(ClosedError('the iterator is closed'))))
        await super().aclose()


class _Raised:
    """The error that ended the computation of the next element."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

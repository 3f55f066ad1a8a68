"""Stages of streams that depend on earlier elements: batches, windows, mixtures and buffers."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from granular.aio.execution.prefetch import END
from granular.aio.pipeline.nodes.base import turns
from granular.aio.pipeline.nodes.elements import generator, stack, stacked
from granular.aio.pipeline.streams.flow import Flow
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.tasks import end_tasks
from granular.aio.runtime.threads import offload
from granular.errors import ClosedError
from granular.shuffle import permute


class Applying(Flow):
    """A function of each element, after a stage that drops or combines elements."""

    calls_functions = True

    def __init__(self, parent: Flow, name: str, fn: Callable[..., Any], seed: int | None) -> None:
        self.parents = (parent,)
        self._parent, self._name, self._fn, self._count = parent, name, fn, 0
        self._key = None if seed is None else np.random.Philox(seed).state['state']['key']

    async def next(self) -> Any:
        while True:
            element = await self._parent.next()
            if element is END:
                return END
            index, self._count = self._count, self._count + 1
            if element is None:
                return None
            if self._name == 'filter':
                if await offload(self._fn, element):
                    return element
            elif self._name == 'map_with_index':
                return await offload(self._fn, index, element)
            elif self._name == 'random_map':
                return await offload(self._fn, element, generator(self._key, index))
            else:
                return await offload(self._fn, element)

    def state(self) -> Any:
        if self._name in ('map', 'filter'):
            return self._parent.state()
        return {'parent': self._parent.state(), 'count': self._count}

    async def restore(self, state: Any) -> None:
        if self._name in ('map', 'filter'):
            await self._parent.restore(state)
        else:
            await self._parent.restore(state['parent'])
            self._count = state['count']


class Batching(Flow):
    """Batches of consecutive elements."""

    def __init__(self, parent: Flow, size: int, drop: bool, fn: Callable[[Sequence[Any]], Any]) -> None:
        self.parents = (parent,)
        self._parent, self._size, self._drop, self._fn = parent, size, drop, fn
        self.calls_functions = fn is not stack

    async def next(self) -> Any:
        elements: list[Any] = []
        while (missing := self._size - len(elements)) > 0:
            if ready := self._parent.ready():
                elements += ready[: -missing - 1 : -1]
                del ready[-missing:]
                continue
            element = await self._parent.next()
            if element is END:
                break
            elements.append(element)
        if not elements or (self._drop and len(elements) < self._size):
            return END
        return await stacked(self._fn, elements)

    def state(self) -> Any:
        return self._parent.state()

    async def restore(self, state: Any) -> None:
        await self._parent.restore(state)


class FlatMapping(Flow):
    """Several elements for each one."""

    calls_functions = True

    def __init__(self, parents: Sequence[Flow], fn: Callable[[Any], Sequence[Any]]) -> None:
        self.parents = tuple(parents)
        self._parent, self._fn = parents[0], fn
        self._computed: Sequence[Any] | None = ()  # None until those are made again of which a state was restored
        self._next_index = 0
        self._before = self._parent.state()

    async def next(self) -> Any:
        if self._computed is None:
            self._computed = list(await offload(self._fn, await self._parent.next()))
        while self._next_index >= len(self._computed):
            self._before, self._computed, self._next_index = self._parent.state(), (), 0
            element = await self._parent.next()
            if element is END:
                return END
            self._computed = list(await offload(self._fn, element))
        self._next_index += 1
        return self._computed[self._next_index - 1]

    def state(self) -> Any:
        if self._computed is not None and self._next_index >= len(self._computed):
            return {'parent': self._parent.state(), 'place': 0}
        return {'parent': self._before, 'place': self._next_index}

    async def restore(self, state: Any) -> None:
        await self._parent.restore(state['parent'])
        self._before, self._next_index = state['parent'], state['place']
        self._computed = None if self._next_index else ()


class WindowShuffling(Flow):
    """Windows of consecutive elements, each shuffled, in the order of Google Grain."""

    def __init__(self, parents: Sequence[Flow], size: int, seed: int) -> None:
        self.parents = tuple(parents)
        self._parent, self._size, self._seed = parents[0], size, seed
        self._window: list[Any] = []
        self._number = 0
        self._before = self._parent.state()
        self._length = 0
        self._skipped = 0  # elements of the next window that came before a state that was restored

    async def next(self) -> Any:
        if not self._window and not await self._fill():
            return END
        element = self._window.pop()
        if not self._window:
            self._number += 1
        return element

    async def _fill(self) -> bool:
        before = self._parent.state()
        window: list[Any] = []
        while len(window) < self._size and (element := await self._parent.next()) is not END:
            window.append(element)
        order = permute(np.arange(len(window)), len(window), self._seed + self._number).tolist()
        self._window, self._before, self._length = [window[position] for position in order], before, len(window)
        del self._window[len(window) - self._skipped :]
        self._skipped = 0
        return bool(self._window)

    def state(self) -> Any:
        if not self._window:
            return {'parent': self._parent.state(), 'window': self._number, 'place': self._skipped}
        return {'parent': self._before, 'window': self._number, 'place': self._length - len(self._window)}

    async def restore(self, state: Any) -> None:
        await self._parent.restore(state['parent'])
        self._window, self._number, self._skipped = [], state['window'], state['place']


class Mixing(Flow):
    """Elements of several streams in proportion to their weights, until one of them ends."""

    def __init__(self, parents: Sequence[Flow], weights: Sequence[int]) -> None:
        self.parents, self._weights = tuple(parents), weights
        self._count, self._ended = 0, False

    async def next(self) -> Any:
        if self._ended:
            return END
        owners, _ = turns(np.array([self._count]), self._weights)
        element = await self.parents[int(owners[0])].next()
        self._ended = element is END
        self._count += not self._ended
        return element

    def state(self) -> Any:
        return {'parents': [parent.state() for parent in self.parents], 'count': self._count}

    async def restore(self, state: Any) -> None:
        for parent, parent_state in zip(self.parents, state['parents'], strict=True):
            await parent.restore(parent_state)
        self._count, self._ended = state['count'], False


class Interleaving(Flow):
    """Elements of several streams in turn; the next stream replaces one that ends."""

    def __init__(self, parents: Sequence[Flow], cycle: int) -> None:
        self.parents = tuple(parents)
        self._open: list[int | None] = [i if i < len(parents) else None for i in range(cycle)]
        self._turn, self._begun = 0, min(cycle, len(parents))
        self._starts = [parent.state() for parent in parents]

    async def next(self) -> Any:
        while any(number is not None for number in self._open) or self._begun < len(self.parents):
            number = self._open[self._turn]
            if number is None and self._begun < len(self.parents):
                number = self._open[self._turn] = self._begun
                self._begun += 1
            if number is None:
                self._turn = (self._turn + 1) % len(self._open)
                continue
            element = await self.parents[number].next()
            if element is not END:
                self._turn = (self._turn + 1) % len(self._open)
                return element
            self._open[self._turn] = None
            self._turn = (self._turn + 1) % len(self._open)
        return END

    def state(self) -> Any:
        states = {str(number): self.parents[number].state() for number in self._open if number is not None}
        return {'open': list(self._open), 'turn': self._turn, 'begun': self._begun, 'parents': states}

    async def restore(self, state: Any) -> None:
        self._open, self._turn, self._begun = list(state['open']), state['turn'], state['begun']
        for number, parent in enumerate(self.parents):
            if number >= self._begun or number in self._open:
                await parent.restore(state['parents'].get(str(number), self._starts[number]))

    async def begin(self) -> None:
        for number in self._open:
            if number is not None:
                await self.parents[number].begin()


class Prefetching(Flow):
    """Elements computed before they are requested, by a separate task."""

    def __init__(self, parents: Sequence[Flow], size: int) -> None:
        self.parents = tuple(parents)
        self._parent, self._size = parents[0], size
        self._after = self._parent.state()
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Queue[tuple[Any, Any]] | None = None  # elements and the states after them
        self._closed = False

    async def next(self) -> Any:
        if self._closed:
            raise ClosedError('the iterator is closed')
        await self.begin()
        if self._ready is None:
            return END
        element, after = await self._ready.get()
        if isinstance(after, _Raised):
            self._task = None
            raise after.error
        if element is END:
            self._task = None
        else:
            self._after = after
        return element

    async def _fill(self, ready: 'asyncio.Queue[tuple[Any, Any]]') -> None:
        element: Any = None
        while element is not END:
            try:
                element = await self._parent.next()
                await ready.put((element, self._parent.state()))
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                await ready.put((None, _Raised(error)))
                return

    def state(self) -> Any:
        return self._after

    async def restore(self, state: Any) -> None:
        if self._ready is not None and self._task is not None and state == self._after:
            return  # what is made ahead follows from there
        await self._stop()
        await self._parent.restore(state)
        self._after = state

    async def begin(self) -> None:
        await ensure_event_loop()
        if self._task is None:
            self._ready = asyncio.Queue(self._size)
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

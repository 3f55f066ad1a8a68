"""Functions of single elements, merged into the read if possible."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from granular.aio.execution.prefetch import END
from granular.aio.pipeline.nodes import elements
from granular.aio.pipeline.nodes.elements import generator
from granular.aio.pipeline.nodes.functions import method_of, name_of
from granular.aio.pipeline.position import FREE, Terms
from granular.aio.pipeline.streams.filtered import FilterCheck
from granular.aio.pipeline.streams.flow import Counter, Flow, number_of
from granular.aio.pipeline.streams.held import Held
from granular.aio.pipeline.streams.read import Read, gapless
from granular.aio.pipeline.streams.stream import Stream
from granular.aio.pipeline.transforms import DatasetOptions
from granular.errors import StateError
from granular.indexing import Seed


class ElementFunction(Stream):
    """An operation on single elements."""

    name: str
    transform: Any
    seed: Seed | None

    def __init__(self, parent: Stream, name: str, transform: Any, seed: Seed | None = None) -> None:
        self.parents: tuple[Any, ...] = (parent,)
        self.name, self.transform, self.seed = name, transform, seed
        self.method = method_of(transform, name)
        self.filters: DatasetOptions = DatasetOptions()

    def merged(self) -> Read | None:
        read: Read | None = self.parents[0].merged()
        if read is None:
            return None
        source = read.source
        if read.on_error != 'raise' and not elements.after_handled(source):
            source = elements.Handled(source)
        # Operations that number elements can be merged only if no earlier filter, or on_error, drops any.
        dense = not source.sparse and read.on_error == 'raise'
        if self.name == 'map':
            return read.replaced(source=elements.Streamed(elements.Map(source, self.transform)))
        if self.name == 'filter' and not read.allow_nones:
            return read.replaced(source=elements.Filter(source, self.transform))
        if self.name == 'map_with_index' and read.shard.shard_count == 1 and dense and gapless(source):
            return read.replaced(source=elements.Streamed(elements.MapWithIndex(source, self.transform)))
        if self.name == 'random_map' and dense and self.seed is not None:
            return read.replaced(source=elements.Streamed(elements.RandomMap(source, self.transform, self.seed)))
        return None

    @property
    def transparent(self) -> bool:  # type: ignore[override]
        return not self._numbers() or self.merged() is not None

    def _numbers(self) -> bool:
        """Return whether the function gets the number of the element, or what follows from it."""
        return self.name in ('map_with_index', 'random_map')

    def length(self) -> int:
        if (read := self.merged()) is not None:
            return read.length()
        if self.name == 'filter':
            return super().length()
        return cast(int, self.parents[0].length())

    def index_of(self, state: Any) -> int:
        if (read := self.merged()) is not None:
            return read.index_of(state)
        if self._numbers():
            self.length()
            return cast(int, state['count'])
        return super().index_of(state)

    def state_at(self, index: int) -> Any:
        if (read := self.merged()) is not None:
            return read.state_at(index)
        state = super().state_at(index)
        return {'parent': state, 'count': index} if self._numbers() else state

    def flow(self) -> Flow:
        read = self.merged()
        if read is not None:
            return read.flow()
        check = FilterCheck(self.filters, self.describe()) if self.name == 'filter' else None
        return Applying(self.parents[0].flow(), self.name, self.method, self.seed, check, self.describe())

    def with_options(self, options: DatasetOptions) -> Stream:
        stream = super().with_options(options)
        stream.__dict__['filters'] = options
        return stream

    def describe(self) -> str:
        return f'{self.name}({name_of(self.method)}{"" if self.seed is None else f", seed={self.seed}"})'


class Applying(Flow):
    """A function of each element, after a stage that drops or combines elements."""

    calls_functions = True

    def __init__(
        self,
        parent: Flow,
        name: str,
        fn: Callable[..., Any],
        seed: Seed | None,
        check: FilterCheck | None,
        description: str,
    ) -> None:
        self.parents: tuple[Flow, ...] = (parent,)
        self._parent, self._name, self._fn, self._count = parent, name, fn, 0
        self._check, self._counter, self._stage = check, Counter(description), description
        if name == 'filter':
            self.kind = 'filter'
            parent.keep_host()
        self._key = None if seed is None else np.random.Philox(seed).state['state']['key']

    async def next(self) -> Any:
        call = self._counter.call
        while True:
            element = await self._parent.next()
            if element is END:
                return END
            index, self._count = self._count, self._count + 1
            if self._name == 'filter':
                kept = await call(self._fn, element)
                if self._check is not None:
                    self._check.count(not kept)
                if kept:
                    return element
            elif element is None:
                return None
            elif self._name == 'map_with_index':
                return await call(self._fn, index, element)
            elif self._name == 'random_map':
                return await call(self._fn, element, generator(self._key, index))
            else:
                return await call(self._fn, element)

    def state(self) -> Any:
        if self._name in ('map', 'filter'):
            return self._parent.state()
        return {'parent': self._parent.state(), 'count': self._count}

    async def restore(self, state: Any, terms: Terms = FREE) -> None:
        self._counter.restart()
        if self._name in ('map', 'filter'):
            await self._parent.restore(state, terms.of(self._stage, self._name, False))
        else:
            if not isinstance(state, Mapping) or 'parent' not in state:
                raise StateError(
                    f'{self._stage}: the state was saved on another number of hosts, each of which numbers its own '
                    f'elements: continue on as many hosts as before'
                )
            count = number_of(state, 'count')
            await self._parent.restore(state['parent'], terms)
            self._count = count


class FlatMapping(Flow):
    """Several elements for each one."""

    kind = 'flat_map'
    calls_functions = True

    def __init__(self, parents: Sequence[Flow], fn: Callable[[Any], Sequence[Any]]) -> None:
        self.parents: tuple[Flow, ...] = tuple(parents)
        self._fn, self._stage = fn, f'flat_map({name_of(fn)})'
        self._held = Held(parents[0], self._stage, self.kind)
        self._counter = Counter(self._stage)
        self._computed: Sequence[Any] | None = ()  # None until those are made again of which a state was restored
        self._next_index = 0

    async def next(self) -> Any:
        if self._computed is None:
            element = await self._held.next()
            self._computed = () if element is END else await self._parts(element)
        while self._next_index >= len(self._computed):
            self._computed, self._next_index = (), 0
            self._held.release()
            element = await self._held.next()
            if element is END:
                return END
            self._computed = await self._parts(element)
        part = self._computed[self._next_index]
        self._next_index += 1
        if self._next_index == len(self._computed):
            self._held.release()
        return part

    async def _parts(self, element: Any) -> list[Any]:
        return elements.parts_of(await self._counter.call(self._fn, element), self._stage)

    def state(self) -> Any:
        place = self._next_index if self._computed is None or self._next_index < len(self._computed) else 0
        held = self._held
        return held.state(place > 0, place=place) if held.adapts else {'parent': held.before, 'place': place}

    async def restore(self, state: Any, terms: Terms = FREE) -> None:
        self._counter.restart()
        next_index = number_of(state, 'place')
        await self._held.restore(state, next_index > 0, terms)
        self._next_index = next_index
        self._computed = None if next_index else ()

"""Functions of single elements, merged into the read if possible."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from granular._support.indexing import Seed
from granular.aio.pipeline.changes import AugmentationSeed
from granular.aio.pipeline.execution.prefetch import END
from granular.aio.pipeline.lines import Line
from granular.aio.pipeline.nodes.batches import Batch
from granular.aio.pipeline.nodes.elements import NONE, OPERATIONS, Element, Handled, Streamed, after_handled, parts_of
from granular.aio.pipeline.nodes.indices import IndexNode, Wrapped, seed_in_epoch
from granular.aio.pipeline.nodes.source import Source
from granular.aio.pipeline.position import FREE, Fit, RestoreRules
from granular.aio.pipeline.streams.flow import Counter, FilterCheck, Flow, number_of
from granular.aio.pipeline.streams.held import Holding
from granular.aio.pipeline.streams.read import Read
from granular.aio.pipeline.streams.stream import Stream
from granular.aio.runtime.threads import offload
from granular.aio.runtime.user_functions import call_checked, method_of, name_of
from granular.errors import StateError


class ElementFunction(Stream):
    """An operation on single elements."""

    def __init__(self, parent: Stream, name: str, transform: Any, seed: Seed | None = None) -> None:
        super().__init__(parent)
        self.name = name
        self.transform = transform
        self.seed = seed
        self.epoch = 0
        self.method = method_of(transform, name)

    def merged(self) -> Read | None:
        read: Read | None = self.parent.merged()
        if read is None:
            return None
        source: Source = read.source
        if read.on_error != 'raise' and not after_handled(source):
            source = Handled(source)
        # Operations that number elements can be merged only if no earlier filter, or on_error, drops any.
        dense = not source.sparse and read.on_error == 'raise'
        if self.name == 'filter':
            fits = not read.allow_nones
        elif self.name == 'map_with_index':
            fits = read.shard.shard_count == 1 and dense and _gapless(source)
        else:
            fits = dense or self.name == 'map'
        return read.replaced(parents=(self.node(source),)) if fits else None

    def node(self, source: Source) -> Element:
        seeds = () if self.seed is None else (seed_in_epoch(self.seed, self.epoch),)
        function = OPERATIONS[self.name](source, self.transform, *seeds)
        return function if self.name == 'filter' else Streamed(function)

    def reseeded(self, epoch: int) -> Stream:
        return self if self.seed is None else self.replaced(epoch=epoch)

    @property
    def transparent(self) -> bool:  # type: ignore[override]
        return self.name not in ('map_with_index', 'random_map') or self.merged() is not None

    def length(self) -> int:
        return super().length() if self.name == 'filter' else self.parent.length()

    def index_of(self, state: Any) -> int:
        return super().index_of(state) if self.transparent else self.counted_index(state)

    def state_at(self, index: int) -> Any:
        state = super().state_at(index)
        return state if self.transparent else {'parent': state, 'count': index}

    def outline(self) -> dict[str, Any]:
        return {**super().outline(), 'drops': True} if self.name == 'filter' else super().outline()

    def flow(self) -> Flow:
        read = self.merged()
        return Applying(self.parent.flow(), self) if read is None else read.flow()

    def line(self) -> Line:
        epoch = None if self.seed is None else self.epoch or None
        return Line(self.name, function=name_of(self.method), seed=self.seed, epoch=epoch)

    def describe(self) -> str:
        return str(self.line())


class Applying(Flow):
    """A function of each element, after a stage that drops or combines elements."""

    calls_functions = True

    def __init__(self, parent: Flow, stage: ElementFunction) -> None:
        self.parents: tuple[Flow, ...] = (parent,)
        self._parent = parent
        self._name = stage.name
        self._stage = stage.describe()
        self._count = 0
        self._counter, self._check = Counter(self._stage), FilterCheck(stage.dataset_options, self._stage)
        if stage.name == 'filter':
            self.kind, self.passes = 'filter', True
            parent.keep_host()
        self._node = stage.node(Wrapped(()))  # whose source is not read

    def row_source(self) -> Flow | None:
        return self._parent.row_source() if self._name == 'map' else None

    async def next(self) -> Any:
        while True:
            element = await self._parent.next()
            if element is END:
                self._check.end()
                return END
            index, self._count = self._count, self._count + 1
            if element is None:
                element = NONE
            element = await self._counter.count(offload(self._node.call, element, index))
            if self.kind:
                self._check.count(element is None)
            if element is not None:
                return None if element is NONE else element

    def state(self) -> Any:
        if self._name in ('map', 'filter'):
            return self._parent.state()
        return {'parent': self._parent.state(), 'count': self._count}

    async def restore(self, state: Any, rules: RestoreRules = FREE) -> None:
        self._counter.restart()
        self._check.restart()
        if self._name in ('map', 'filter'):
            await self._parent.restore(state, rules.of(self._stage, self._name, False))
        else:
            if type(state) is int and self.hosts == 1:  # one of elements that no stage had left out
                state = {'parent': state, 'count': state}
            if not isinstance(state, Mapping) or 'parent' not in state:
                if isinstance(state, Mapping) and state.get('hosts') == self.hosts:
                    raise StateError(
                        f'{self._stage}: numbers the elements of this host, and those of all hosts in the state: '
                        f'continue with the on_error, and with each prefetch before this stage, that saved the state'
                    )
                raise StateError(
                    f'{self._stage}: the state was saved on another number of hosts, each of which numbers its own '
                    f'elements: continue on as many hosts as before'
                )
            count = number_of(state, 'count')
            await self._parent.restore(state['parent'], rules)
            self._count = count


class FlatMapping(Holding):
    kind = 'flat_map'
    fit = Fit(False, 'the rest of an element', remedy='call flat_map of the MapDataset, with allow_nones=True')
    calls_functions = True

    def __init__(self, parent: Flow, stage: str, fn: Callable[[Any], Sequence[Any]]) -> None:
        super().__init__(parent, stage)
        self._fn, self._counter = fn, Counter(stage)
        self._computed: Sequence[Any] | None = ()  # None until those are made again of which a state was restored
        self._next_index = 0

    async def next(self) -> Any:
        if self._computed is None:
            element = await self._held.next()
            computed = () if element is END else await self._parts(element)
            self._held.check_place(self._next_index, len(computed))
            self._computed = computed
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
        parts = offload(call_checked, 'flat_map calls fn(element)', self._fn, element)
        return parts_of(await self._counter.count(parts), self._stage)

    def state(self) -> Any:
        place = self._next_index if self._computed is None or self._next_index < len(self._computed) else 0
        held = self._held
        return held.state(place > 0, place=place) if held.adapts else {'parent': held.before, 'place': place}

    async def restore(self, state: Any, rules: RestoreRules = FREE) -> None:
        self._counter.restart()
        next_index = number_of(state, 'place')
        rules.of(self._stage, self.kind, next_index > 0).check_held(AugmentationSeed)
        await self._held.restore(state, next_index > 0, rules)
        self._next_index = next_index
        self._computed = None if next_index else ()

    def _forget(self) -> None:
        super()._forget()
        self._computed = self._computed and [None] * len(self._computed)


def _gapless(source: Source) -> bool:
    """Return whether no element of a source is None, as far as this is known without computing them."""
    if isinstance(source, IndexNode | Batch) and not source.sparse:
        return isinstance(source, Batch) or _gapless(source.parents[0])
    return bool(getattr(source, 'gapless', False))

"""Several streams combined into one."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from granular.aio.execution.prefetch import END
from granular.aio.pipeline.describe import check_fingerprint, fingerprint
from granular.aio.pipeline.nodes.base import turns
from granular.aio.pipeline.streams.flow import Flow
from granular.aio.pipeline.streams.stream import Stream
from granular.errors import DatapointError


class Zipping(Flow):
    """Tuples of the elements of several streams."""

    def __init__(self, parents: Sequence[Flow], strict: bool) -> None:
        self.parents: tuple[Flow, ...] = tuple(parents)
        self._strict, self._count = strict, 0

    async def next(self) -> Any:
        elements: list[Any] = []
        for parent in self.parents:
            elements.append(await parent.next())
            if elements[-1] is END and not self._strict:
                return END
        ended = [element is END for element in elements]
        if all(ended):
            return END
        if any(ended):
            raise DatapointError(
                f'zip: stream {ended.index(True)} ended after {self._count} elements, and stream {ended.index(False)} '
                f'did not: pass strict=False to end with the first'
            )
        self._count += 1
        return tuple(elements)

    def state(self) -> Any:
        return {'parents': [parent.state() for parent in self.parents], 'count': self._count}

    async def restore(self, state: Any) -> None:
        for parent, parent_state in zip(self.parents, state['parents'], strict=True):
            await parent.restore(parent_state)
        self._count = state['count']


class Mixing(Flow):
    """Elements of several streams in proportion to their weights, until one of them ends."""

    def __init__(self, parents: Sequence[Flow], weights: Sequence[int]) -> None:
        self.parents: tuple[Flow, ...] = tuple(parents)
        self._weights = weights
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


class NamedMix(Stream):
    """A mix of streams that have names. Its state fits other streams and weights."""

    named = True

    def __init__(self, parents: Mapping[str, Stream], weights: Sequence[int]) -> None:
        self.parents: tuple[Any, ...] = tuple(parents.values())
        self._names, self._weights = tuple(parents), tuple(weights)

    def flow(self) -> Flow:
        named = dict(zip(self._names, self.parents, strict=True))
        lines = {name: fingerprint(parent) for name, parent in named.items()}
        return NamedMixing({name: parent.flow() for name, parent in named.items()}, self._weights, lines)

    def describe(self) -> str:
        weights = ', '.join(f'{name}: {weight}' for name, weight in zip(self._names, self._weights, strict=True))
        return f'mix of {{{weights}}}'


class NamedMixing(Mixing):
    """A mix whose streams are restored by name; one that a state does not name begins."""

    def __init__(self, parents: Mapping[str, Flow], weights: Sequence[int], lines: Mapping[str, Sequence[str]]) -> None:
        super().__init__(list(parents.values()), weights)
        self._named, self._lines = parents, lines
        self._starts = {name: parent.state() for name, parent in parents.items()}

    def state(self) -> Any:
        states = {
            name: {'state': parent.state(), 'pipeline': list(self._lines[name])} for name, parent in self._named.items()
        }
        return {'parents': states, 'count': self._count}

    async def restore(self, state: Any) -> None:
        for name, parent in self._named.items():
            saved = state['parents'].get(name)
            if saved is not None:
                check_fingerprint(saved['pipeline'], self._lines[name], self.strict)
            await parent.restore(self._starts[name] if saved is None else saved['state'])
        self._count, self._ended = state['count'], False

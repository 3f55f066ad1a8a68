"""The elements of a stream again and again, or the first of them only."""

from collections.abc import Sequence
from typing import Any, cast

from granular.aio.execution.prefetch import END
from granular.aio.pipeline.nodes.indices import ENDLESS
from granular.aio.pipeline.streams.flow import Flow, number_of
from granular.aio.pipeline.streams.stream import Stream
from granular.errors import StateError


class Repeated(Stream):
    """The elements of a stream, again and again."""

    def __init__(self, parent: Stream, epochs: int | None) -> None:
        self.parents: tuple[Any, ...] = (parent,)
        self._epochs = epochs

    def length(self) -> int:
        length: int = self.parents[0].length()
        return ENDLESS if self._epochs is None and length else min(ENDLESS, length * (self._epochs or 1))

    def index_of(self, state: Any) -> int:
        return min(
            self.length(), cast(int, state['epoch'] * self.parents[0].length() + super().index_of(state['parent']))
        )

    def state_at(self, index: int) -> Any:
        epoch, index = divmod(index, max(1, self.parents[0].length()))
        return {'parent': super().state_at(index), 'epoch': epoch, 'empty': not index}

    def flow(self) -> Flow:
        return Repeating(self.parents[0].flow(), self._epochs)

    def describe(self) -> str:
        return f'repeat({self._epochs})'


class Limited(Stream):
    """The first elements of a stream."""

    def __init__(self, parent: Stream, limit: int) -> None:
        self.parents: tuple[Any, ...] = (parent,)
        self._limit = limit

    def length(self) -> int:
        length: int = self.parents[0].length()
        return min(self._limit, length)

    def index_of(self, state: Any) -> int:
        self.length()
        return cast(int, state['count'])

    def state_at(self, index: int) -> Any:
        return {'parent': super().state_at(index), 'count': index}

    def flow(self) -> Flow:
        return Limiting(self.parents[0].flow(), self._limit)

    def describe(self) -> str:
        return f'limit({self._limit})'


class Repeating(Flow):
    """The elements of a stream, again and again."""

    def __init__(self, parent: Flow, epochs: int | None) -> None:
        self.parents: tuple[Flow, ...] = (parent,)
        self._parent, self._epochs = parent, epochs
        self._start = self._parent.state()
        self._epoch, self._empty = 0, True  # True until this epoch has returned an element

    async def next(self) -> Any:
        while self._epochs is None or self._epoch < self._epochs:
            element = await self._parent.next()
            if element is not END:
                self._empty = False
                return element
            if self._empty:
                break
            await self._parent.restore(self._start)
            self._epoch, self._empty = self._epoch + 1, True
        return END

    def state(self) -> Any:
        return {'parent': self._parent.state(), 'epoch': self._epoch, 'empty': self._empty}

    async def restore(self, state: Any) -> None:
        epoch = number_of(state, 'epoch')
        await self._parent.restore(state['parent'])
        self._epoch, self._empty = epoch, bool(state['empty'])


class Limiting(Flow):
    """The first elements of a stream."""

    def __init__(self, parent: Flow, limit: int) -> None:
        self.parents: tuple[Flow, ...] = (parent,)
        self._parent, self._limit, self._count = parent, limit, 0

    async def next(self) -> Any:
        if self._count >= self._limit:
            return END
        element = await self._parent.next()
        self._count += element is not END
        return element

    def state(self) -> Any:
        return {'parent': self._parent.state(), 'count': self._count}

    async def restore(self, state: Any) -> None:
        count = number_of(state, 'count')
        await self._parent.restore(state['parent'])
        self._count = count


class Caching(Flow):
    """The elements of a stream, kept in memory. The stream only ever moves on: its elements come once."""

    def __init__(self, parents: Sequence[Flow]) -> None:
        self.parents: tuple[Flow, ...] = tuple(parents)
        self._parent = parents[0]
        self._cached: list[Any] = []
        self._complete = False
        self._next_index = 0
        self._after = self._parent.state()  # after the last cached element
        self._astray = False  # True if the stream must go back there, because its next element failed

    async def next(self) -> Any:
        while self._next_index >= len(self._cached):
            if self._complete:
                return END
            if self._astray:
                await self._parent.restore(self._after)
            self._astray = True
            element = await self._parent.next()
            self._after, self._astray = self._parent.state(), False
            if element is END:
                self._complete = True
            else:
                self._cached.append(element)
        self._next_index += 1
        return self._cached[self._next_index - 1]

    def state(self) -> int:
        return self._next_index

    async def restore(self, state: Any) -> None:
        if type(state) is not int or not 0 <= state < 1 << 63:
            raise StateError(f'expected the number of an element, got {state!r:.100}')
        self._next_index = state

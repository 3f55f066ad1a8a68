"""The elements of a stream again and again, or the first of them only."""

from typing import Any

import numpy as np

from granular.aio.pipeline.execution.prefetch import END
from granular.aio.pipeline.lines import Line
from granular.aio.pipeline.nodes.indices import ENDLESS
from granular.aio.pipeline.origins import Picked
from granular.aio.pipeline.position import FREE, Fit, RestoreRules, same_position
from granular.aio.pipeline.streams.flow import Flow, Outlasting, flag_of, number_of
from granular.aio.pipeline.streams.held import Holding
from granular.aio.pipeline.streams.stream import Staged, Stream
from granular.aio.runtime.buffers import read_only


class Repeated(Staged):
    """The elements of a stream, again and again."""

    def __init__(self, parent: Stream, epochs: int | None) -> None:
        super().__init__(parent, Line(f'repeat({epochs})'), Repeating, epochs)
        self._epochs = epochs

    def length(self) -> int:
        length = self.parent.length()
        return ENDLESS if self._epochs is None and length else min(ENDLESS, length * (self._epochs or 1))

    def index_of(self, state: Any) -> int:
        index: int = state['epoch'] * self.parent.length() + super().index_of(state['parent'])
        return min(self.length(), index)

    def state_at(self, index: int) -> Any:
        epoch, index = divmod(index, max(1, self.parent.length()))
        return {'parent': super().state_at(index), 'epoch': epoch, 'empty': not index}

    def traced_back(self, picked: Picked) -> list[tuple[Any, Picked]]:
        return [(self.parent, picked._replace(indices=picked.indices % max(1, self.parent.length())))]


class Limited(Stream):
    """The first elements of a stream."""

    def __init__(self, parent: Stream, limit: int) -> None:
        super().__init__(parent)
        self._limit = limit

    def length(self) -> int:
        return min(self._limit, self.parent.length())

    def index_of(self, state: Any) -> int:
        return self.counted_index(state)

    def state_at(self, index: int) -> Any:
        return {'parent': super().state_at(index), 'count': index}

    def flow(self) -> Flow:
        return Limiting(self.parent.flow(), self._limit)

    def describe(self) -> str:
        return f'limit({self._limit})'


class Repeating(Outlasting):
    passes = True

    def __init__(self, parent: Flow, stage: str, epochs: int | None) -> None:
        self.parents: tuple[Flow, ...] = (parent,)
        self._parent = parent
        self._epochs = epochs
        self._stage = stage
        self._own = self._start = parent.state()  # the state before an epoch, and that with the weights of this mix
        self._rules, self._adapts = FREE, parent.adapts
        self._epoch, self._empty = 0, True  # True until this epoch has returned an element
        self._shared: bool | None = None  # by hosts that may have different numbers of elements; None if not known yet
        if not parent.even:
            parent.keep_host()

    async def next(self) -> Any:
        while self._epochs is None or self._epoch < self._epochs:
            element = await self._parent.next()
            if element is not END:
                self._empty = False
                if self._shared is None:
                    self._shared = not self._parent.even
                return element
            if self._empty:
                self._uneven = self._shared = not self.even  # other hosts may have elements
                break
            self._uneven, self._mixes = not self.even, self._mixes_after(self._parent)
            await self._parent.restore(self._start, self._rules)
            self._epoch = self._epoch + 1
            self._empty = True
            self._shared = self._uneven or None
        return END

    def state(self) -> Any:
        state = {'parent': self._parent.state(), 'epoch': self._epoch, 'empty': self._empty}
        if self._shared and not self.in_step:
            state['uneven'] = True
        if self._adapts:
            state['start'] = self._start
        if self._mixes:
            state['mixes'] = self._mixes
        return state

    async def restore(self, state: Any, rules: RestoreRules = FREE) -> None:
        epoch, uneven = number_of(state, 'epoch'), flag_of(state, 'uneven')
        mixes = number_of({'mixes': 0, **state}, 'mixes')
        if uneven:
            rules = rules.of(self._stage, 'repeat, shards of unequal length', False)
        empty = flag_of(state, 'empty', None)
        await self._parent.restore(state['parent'], rules)
        self._epoch = epoch
        self._empty = empty
        self._uneven = uneven
        self._mixes = mixes
        self._shared = uneven or None
        # Elements that a later stage holds are read again with the same weights, also beyond this epoch.
        self._rules, self._start = (
            rules.later(),
            state.get('start', self._own) if rules.weights == 'saved' else self._own,
        )


class Limiting(Flow):
    passes = True

    def __init__(self, parent: Flow, limit: int) -> None:
        self.parents: tuple[Flow, ...] = (parent,)
        self._parent = parent
        self._limit = limit
        self._count = 0

    async def next(self) -> Any:
        if self._count >= self._limit:
            return END
        element = await self._parent.next()
        self._count += element is not END
        return element

    def state(self) -> Any:
        return {'parent': self._parent.state(), 'count': self._count}

    async def restore(self, state: Any, rules: RestoreRules = FREE) -> None:
        count = number_of(state, 'count')
        await self._parent.restore(state['parent'], rules)
        self._count = count


class Caching(Holding):
    """The elements of a stream, kept in memory. The stream only ever moves on: its elements come once."""

    kind = 'cache'
    fit = Fit(True, 'an epoch', remedy='repeat without cache')
    passes = True

    def __init__(self, parent: Flow, stage: str) -> None:
        super().__init__(parent, stage)
        self._parent = parent
        self._cached: list[Any] = []
        self._complete = False
        self._next_index = 0
        # After the last cached element; None while those of a state are read again.
        self._after: tuple[Any, int] | None = self._held.place()
        self._undelivered = False  # True if the stream must go back there, because its next element failed

    async def next(self) -> Any:
        while self._next_index >= len(self._cached):
            if self._complete:
                return END
            self._undelivered = True
            element = await self._held.next()
            self._after, self._undelivered = self._held.place(), False
            if element is END:
                self._complete = True
            else:
                self._cached.append(element)
        element = _protected(self._cached[self._next_index])
        self._next_index += 1
        return element

    def state(self) -> Any:
        held = self._held
        if not held.adapts:
            return {'parent': held.before, 'place': self._next_index}
        state = held.state(held.holds, place=self._next_index)
        if 'held' in state:
            state['cached'] = state.pop('held')  # may be more than what was given out
        return state

    async def restore(self, state: Any, rules: RestoreRules = FREE) -> None:
        if self._undelivered and self._after is not None:
            await self._held.go_back(self._after)
            self._undelivered = False
        place, own = number_of(state, 'place'), self._held.before
        exact = state['parent'] is own or (state == self.state() if self._parent.adapts else state['parent'] == own)
        rewinds = not place and not rules.held and same_position(state['parent'], own)
        if self._after is None or not (self._held.holds and (exact or rewinds)):
            cached, self._after = state.get('cached'), None
            await self._held.restore({**state, 'held': cached}, place > 0 or (rules.held and cached is not None), rules)
            self._cached, self._complete = self._held.take_again()
            self._after, self._undelivered = self._held.place(), False
        self._next_index = place

    def _forget(self) -> None:
        super()._forget()
        self._cached = []


def _protected(value: Any) -> Any:
    """Return a value with dicts of its own and read-only arrays, so that a function cannot change the cache."""
    if type(value) is dict:
        return {key: _protected(part) for key, part in value.items()}
    if type(value) is tuple:
        return tuple(_protected(part) for part in value)
    return read_only(value) if isinstance(value, np.ndarray) else value

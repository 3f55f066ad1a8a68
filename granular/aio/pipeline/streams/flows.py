"""Stages of streams that depend on earlier elements: batches, windows, mixtures and buffers."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from granular.aio.execution.prefetch import END
from granular.aio.pipeline.describe import check_fingerprint
from granular.aio.pipeline.nodes.base import turns
from granular.aio.pipeline.nodes.elements import combine, generator, stack, stacked
from granular.aio.pipeline.streams.filtered import FilterCheck
from granular.aio.pipeline.streams.flow import Flow
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.tasks import end_tasks
from granular.aio.runtime.threads import offload
from granular.aio.runtime.user_functions import call_user
from granular.errors import ClosedError, DatapointError, InvalidArgumentError, StateError
from granular.indexing import Seed
from granular.shuffle import permute


class Applying(Flow):
    """A function of each element, after a stage that drops or combines elements."""

    calls_functions = True

    def __init__(
        self, parent: Flow, name: str, fn: Callable[..., Any], seed: Seed | None, check: FilterCheck | None
    ) -> None:
        self.parents: tuple[Flow, ...] = (parent,)
        self._parent, self._name, self._fn, self._count = parent, name, fn, 0
        self._check = check
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
                kept = await offload(self._fn, element)
                if self._check is not None:
                    self._check.count(not kept)
                if kept:
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
        self.parents: tuple[Flow, ...] = (parent,)
        self._parent, self._size, self._drop, self._fn = parent, size, drop, fn
        self.calls_functions: bool = fn is not stack

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
        self.parents: tuple[Flow, ...] = tuple(parents)
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
        self.parents: tuple[Flow, ...] = tuple(parents)
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


class Rebatching(Flow):
    """Batches of another size, cut out of the batches of a stream."""

    def __init__(self, parents: Sequence[Flow], size: int, drop: bool) -> None:
        self.parents: tuple[Flow, ...] = tuple(parents)
        self._parent, self._size, self._drop = parents[0], size, drop
        self._batch: Any = None  # None until it is read again, after a state was restored
        self._rows = 0  # of this batch
        self._next_row = 0
        self._before = self._parent.state()

    async def next(self) -> Any:
        parts: list[Any] = []
        missing = self._size
        while missing:
            if self._batch is None or self._next_row >= self._rows:
                before = self._parent.state()
                batch = await self._parent.next()
                if batch is END:
                    break
                rows = _rows_of(batch)
                if self._batch is not None:
                    self._next_row = 0
                self._batch, self._rows, self._before = batch, rows, before
            stop = min(self._rows, self._next_row + missing)
            if stop > self._next_row:
                part = slice(self._next_row, stop)
                parts.append(_cut(self._batch, part))
                missing -= stop - self._next_row
                self._next_row = stop
        if not parts or (missing and self._drop):
            return END
        return parts[0] if len(parts) == 1 else await stacked(_concatenate, parts)

    def state(self) -> Any:
        if self._batch is not None and self._next_row >= self._rows:
            return {'parent': self._parent.state(), 'place': 0}
        return {'parent': self._before, 'place': self._next_row}

    async def restore(self, state: Any) -> None:
        await self._parent.restore(state['parent'])
        self._before, self._next_row, self._batch = state['parent'], state['place'], None


def _rows_of(batch: Any) -> int:
    """Return the number of rows of a batch."""
    rows: set[int] = set()

    def count(leaves: Sequence[Any]) -> None:
        if not np.ndim(leaves[0]) or not hasattr(leaves[0], '__getitem__'):
            raise DatapointError(f'rebatch: expected a batch of arrays, got a {type(leaves[0]).__name__}')
        rows.add(len(leaves[0]))

    combine([batch], count)
    if len(rows) != 1:
        raise DatapointError(f'rebatch: expected arrays of one length in a batch, got {sorted(rows)}')
    return rows.pop()


def _cut(batch: Any, part: slice) -> Any:
    return combine([batch], lambda leaves: leaves[0][part])


def _concatenate(parts: Sequence[Any]) -> Any:
    return combine(parts, _concatenate_leaves)


def _concatenate_leaves(leaves: Sequence[Any]) -> Any:
    if len({leaf.shape[1:] for leaf in leaves}) > 1:
        raise DatapointError(f'rebatch: expected rows of one shape, got {[leaf.shape[1:] for leaf in leaves]}')
    return np.concatenate(leaves)


class Repeating(Flow):
    """The elements of a stream, again and again."""

    def __init__(self, parents: Sequence[Flow], epochs: int | None) -> None:
        self.parents: tuple[Flow, ...] = tuple(parents)
        self._parent, self._epochs = parents[0], epochs
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
        await self._parent.restore(state['parent'])
        self._epoch, self._empty = state['epoch'], state['empty']


class Limiting(Flow):
    """The first elements of a stream."""

    def __init__(self, parents: Sequence[Flow], limit: int) -> None:
        self.parents: tuple[Flow, ...] = tuple(parents)
        self._parent, self._limit, self._count = parents[0], limit, 0

    async def next(self) -> Any:
        if self._count >= self._limit:
            return END
        element = await self._parent.next()
        self._count += element is not END
        return element

    def state(self) -> Any:
        return {'parent': self._parent.state(), 'count': self._count}

    async def restore(self, state: Any) -> None:
        await self._parent.restore(state['parent'])
        self._count = state['count']


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
        if not isinstance(state, int) or state < 0:
            raise StateError(f'expected the number of an element, got {state!r:.100}')
        self._next_index = state


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


class Interleaving(Flow):
    """Elements of several streams in turn; the next stream replaces one that ends."""

    def __init__(self, parents: Sequence[Flow], cycle: int) -> None:
        self.parents: tuple[Flow, ...] = tuple(parents)
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
        self.parents: tuple[Flow, ...] = tuple(parents)
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


class Iterating(Flow):
    """An iterator of the user's."""

    calls_functions = True

    def __init__(self, dataset: Any) -> None:
        self._iterator = call_user(iter, dataset)
        for name in ('get_state', 'set_state'):
            if not callable(getattr(self._iterator, name, None)):
                raise InvalidArgumentError(f'an iterator of {type(dataset).__name__} has no method {name}')

    async def next(self) -> Any:
        return await offload(next, self._iterator, END)

    def state(self) -> Any:
        return call_user(self._iterator.get_state)

    async def restore(self, state: Any) -> None:
        await offload(self._iterator.set_state, state)

    async def aclose(self) -> None:
        close = getattr(self._iterator, 'close', None)
        if callable(close):
            await offload(close)

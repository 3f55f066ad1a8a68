"""Batches of consecutive elements."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from granular._support.indexing import check_integer
from granular._support.text import counted
from granular.aio.pipeline.changes import BatchSize
from granular.aio.pipeline.execution.prefetch import END
from granular.aio.pipeline.nodes.stacking import combine, concatenate, line_of_batch, stack, stacked, warn_of_no_batch
from granular.aio.pipeline.origins import Picked
from granular.aio.pipeline.position import FREE, Fit, RestoreRules
from granular.aio.pipeline.streams.flow import Counter, Flow, number_of
from granular.aio.pipeline.streams.held import Holding
from granular.aio.pipeline.streams.stream import Staged, Stream
from granular.aio.runtime.threads import offload
from granular.aio.runtime.user_functions import function_or
from granular.errors import DatapointError, StateError


class BatchOf(Staged):
    """Batches of consecutive elements."""

    transparent = True

    def __init__(
        self, parent: Stream, size: int, drop_remainder: bool, batch_fn: Callable[[Sequence[Any]], Any] | None
    ) -> None:
        self.size: int = check_integer('batch_size', size, 1)
        self.drop_remainder, self.fn = drop_remainder, function_or('batch_fn', batch_fn, stack)
        arguments = self.size, self.drop_remainder, self.fn
        super().__init__(parent, line_of_batch(*arguments), Batching, *arguments)

    def length(self) -> int:
        elements = self.parent.length()
        return elements // self.size if self.drop_remainder else -(-elements // self.size)

    def index_of(self, state: Any) -> int:
        index = self.parent.index_of(state)
        if index == self.parent.length():
            return self.length()
        if index % self.size:
            raise StateError(
                f'{self.describe()}: batches have no index since the stream resumed at element {index} with another '
                f'batch size: expected a multiple of {self.size}'
            )
        return min(self.length(), index // self.size)

    def state_at(self, index: int) -> Any:
        return self.parent.state_at(min(index * self.size, self.parent.length()))

    def traced_back(self, picked: Picked) -> list[tuple[Any, Picked]]:
        return [(self.parent, picked.unbatched(self.size, self.parent.length(), picked.indices))]


class Batching(Flow):
    def __init__(self, parent: Flow, stage: str, size: int, drop: bool, fn: Callable[[Sequence[Any]], Any]) -> None:
        self.parents: tuple[Flow, ...] = (parent,)
        self._parent = parent
        self._stage = stage
        self._size = size
        self._drop = drop
        self._fn = fn
        self._counter = Counter(stage, 'batch')
        self.calls_functions: bool = fn is not stack
        self._nullable: frozenset[str] | None = None  # once they are known

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
            if elements and self._counter.has_none:
                warn_of_no_batch(self._stage, counted(len(elements), 'element'))
            return END
        if self._nullable is None:
            self._nullable = frozenset() if self.calls_functions else await self._parent.nullable_keys()
        return await self._counter.count(stacked(self._fn, elements, self._nullable))

    def state(self) -> Any:
        return self._parent.state()

    async def restore(self, state: Any, rules: RestoreRules = FREE) -> None:
        self._counter.restart()
        rules.check_held(BatchSize)
        await self._parent.restore(state, rules)


class Rebatching(Holding):
    """Batches of another size, cut out of the batches of a stream."""

    kind = 'rebatch'
    fit = Fit(False, 'the rest of a batch', remedy='call batch instead')

    def __init__(self, parent: Flow, stage: str, size: int, drop: bool) -> None:
        super().__init__(parent, stage)
        self._size, self._drop = size, drop
        self._batch: Any = None  # None until it is read again, after a state was restored
        self._rows = 0  # of this batch
        self._next_row = 0
        self._fresh = True  # False once there was a batch, or a state was restored

    async def next(self) -> Any:
        parts: list[Any] = []
        missing = self._size
        while missing:
            if self._batch is None or self._next_row >= self._rows:
                batch = await self._held.next()
                rows = 0 if batch is END else _rows_of(batch)
                if self._batch is None:
                    self._held.check_place(self._next_row, rows)
                if batch is END:
                    break
                if self._batch is not None:
                    self._next_row = 0
                self._batch, self._rows = batch, rows
            stop = min(self._rows, self._next_row + missing)
            if stop > self._next_row:
                part = slice(self._next_row, stop)
                parts.append(_cut(self._batch, part))
                missing -= stop - self._next_row
                self._next_row = stop
            if stop == self._rows:
                self._held.release()
        if not parts or (missing and self._drop):
            if parts and self._fresh:
                warn_of_no_batch(self._stage, counted(self._size - missing, 'row'))
            return END
        self._fresh = False
        return parts[0] if len(parts) == 1 else await offload(combine, parts, _concatenate)

    def state(self) -> Any:
        place = self._next_row if self._batch is None or self._next_row < self._rows else 0
        return self._held.state(place > 0, place=place)

    async def restore(self, state: Any, rules: RestoreRules = FREE) -> None:
        row = number_of(state, 'place')
        await self._held.restore(state, row > 0, rules)
        self._next_row = row
        self._batch = None
        self._fresh = False

    def _forget(self) -> None:
        super()._forget()
        if self._batch is not None:
            self._batch = END


def _rows_of(batch: Any) -> int:
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


def _concatenate(leaves: Sequence[Any]) -> Any:
    if len({leaf.shape[1:] for leaf in leaves}) > 1:
        raise DatapointError(f'rebatch: expected rows of one shape, got {[leaf.shape[1:] for leaf in leaves]}')
    return concatenate(leaves)

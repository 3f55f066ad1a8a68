"""The blocking iterator over a stream."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from numpy.typing import ArrayLike

from granular._support.typing import Element_co
from granular.aio.pipeline.execution.hand_over import exclusively
from granular.aio.pipeline.iterator import CursorHandle, StreamCursor, cursor_of
from granular.aio.pipeline.origins import Origins, traced_elements
from granular.aio.pipeline.streams.flow import Flow, sum_stats
from granular.aio.pipeline.streams.stream import Stream
from granular.aio.runtime.lifecycle import Closing
from granular.aio.runtime.portal import run, run_close
from granular.errors import InvalidArgumentError


class DatasetIterator(CursorHandle, Closing, Iterator[Element_co]):
    """The elements of a stream, for ``for``; its state can be saved and restored between any two elements.

    ::

        iterator = iter(dataset.to_iter_dataset())
        element = next(iterator)
        state = iterator.state_dict()  # plain JSON
        iterator.load_state_dict(state)  # continues after that element

    A subclass, for a subclass of ``IterDataset``, overrides ``__next__``, ``get_state`` and ``set_state``, as Grain's.

    Args:
      parents: for subclasses: the iterator, or the iterators, that elements are made of.
    """

    _parents: 'tuple[DatasetIterator, ...]' = ()
    _runs = False  # until it is constructed

    def __init__(self, parents: 'Stream | DatasetIterator | Sequence[DatasetIterator]' = ()) -> None:
        self._runs = isinstance(parents, Stream)
        if isinstance(parents, Stream):
            super().__init__(parents)
            return
        for name in ('__next__', 'get_state', 'set_state'):
            if getattr(type(self), name) is getattr(DatasetIterator, name):
                raise InvalidArgumentError(f'{type(self).__name__} does not override {name}')
        self._parents = (parents,) if isinstance(parents, DatasetIterator) else tuple(parents)

    @property
    def _parent(self) -> 'DatasetIterator':
        return self._parents[0]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Element_co:
        # Not `next`: an interrupt that comes where a function in C returns would keep its result from this one.
        return self._cursor.__next__()  # type: ignore[no-any-return]

    def set_state(self, state: Mapping[str, Any], changes: Sequence[Any] = ()) -> None:
        exclusively(self._cursor, lambda: run(self._cursor.restore(state, changes)))

    def set_next_index(self, index: int) -> None:
        cursor = self._cursor_for('set_next_index')
        exclusively(cursor, lambda: run(cursor.seek(index)))

    def indices(self, steps: ArrayLike) -> Origins:
        return traced_elements(self._cursor_for('indices').numbered(), steps)

    def set_prefetch_buffer_size(self, buffer_size: int) -> None:
        cursor = self._cursor_for('set_prefetch_buffer_size')
        exclusively(cursor, lambda: run(cursor.set_prefetch(buffer_size)))

    def _cursor_for(self, method: str) -> StreamCursor:
        if not self._runs:
            raise InvalidArgumentError(f'{type(self).__name__} does not override {method}')
        return self._cursor

    def load_state_dict(self, state: Mapping[str, Any], changes: Sequence[Any] = ()) -> None:
        if changes:
            self.set_state(state, changes)
        else:
            self.set_state(state)  # subclasses need no other argument

    def stats(self) -> dict[str, float]:
        if self._runs:
            return super().stats()
        parts = [parent.stats() for parent in self._parents]
        return {'elements': sum(part.get('elements', 0) for part in parts), **sum_stats(parts)}

    @property
    def errors(self) -> list[tuple[int, str]]:
        if self._runs:
            return super().errors
        return [error for parent in self._parents for error in parent.errors]

    def start_prefetch(self) -> None:
        for parent in self._parents:
            parent.start_prefetch()
        if self._runs:
            exclusively(self._cursor, lambda: run(self._cursor.start_prefetch()))

    def close(self) -> None:
        """Close the iterator: stop its tasks, threads and processes. Closing twice is allowed."""
        with contextlib.ExitStack() as stack:  # the others are closed also if one fails
            for parent in self._parents:
                stack.callback(parent.close)
        if self._runs:
            run_close(self._cursor.aclose())


def flows_of(iterator: Any) -> list[Flow]:
    """Return the running stages that an iterator takes its elements from, as far as it has them as parents."""
    if not isinstance(iterator, DatasetIterator):
        return []
    if iterator._runs:
        return [cursor_of(iterator).flow]
    return [flow for parent in iterator._parents for flow in flows_of(parent)]

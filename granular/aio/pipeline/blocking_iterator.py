"""The blocking iterator over a stream."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, Self

from granular.aio.execution.prefetch import END
from granular.aio.pipeline.iterator import CursorHandle
from granular.aio.runtime.bridge import run
from granular.aio.runtime.user_functions import computing

_computing: Final = computing.get


class DatasetIterator(CursorHandle, Iterator[Any]):
    """The elements of a stream, for ``for``; its state can be saved and restored between any two elements.

    ::

        iterator = iter(dataset.to_iter_dataset())
        element = next(iterator)
        state = iterator.get_state()  # plain JSON
        iterator.set_state(state)  # continues after that element
    """

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if not _computing():  # otherwise a function may be using the iterator that calls it
            for element in self._cursor.page:
                return element
        element, *_ = run(self._cursor.take(), self._cursor.take_back)
        if element is END:
            raise StopIteration
        return element

    def set_state(self, state: Mapping[str, Any]) -> None:
        run(self._cursor.restore(state))

    state_dict = CursorHandle.get_state
    load_state_dict = set_state

    def start_prefetch(self) -> None:
        run(self._cursor.start_prefetch())

    def close(self) -> None:
        """Close the iterator: stop its tasks, threads and processes. Closing twice is allowed."""
        run(self._cursor.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

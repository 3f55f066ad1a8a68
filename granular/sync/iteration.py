"""Blocking iterators over async ones, one item at a time."""

import abc
from collections.abc import AsyncIterator, Callable
from collections.abc import Iterator as StandardIterator
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

from granular.aio.execution.prefetch import END
from granular.aio.runtime.bridge import run
from granular.aio.runtime.lifecycle import Running

T = TypeVar('T')


class Closing(abc.ABC):
    """A context manager that is closed at its end."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close it. Closing it again has no effect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Iteration(Running, Generic[T]):
    """A running async iterator whose items are converted one by one."""

    def __init__(self, make: Callable[[], AsyncIterator[Any]], convert: Callable[[Any], T] | None) -> None:
        super().__init__()
        self._items, self._convert = make(), convert

    async def next(self) -> T | object:
        """Return the next item, or ``END``, also after an error."""
        async with self.turn():
            if self.closed:
                return END
            self.check()
            try:
                item = await anext(self._items, END)
            finally:
                if self._loop is None:
                    await self.settle()
            return item if item is END or self._convert is None else self._convert(item)

    async def _close(self) -> None:
        close = getattr(self._items, 'aclose', None)
        if close is not None:
            async with self.turn():  # a running generator cannot be closed
                await close()


class Iteration(Closing, StandardIterator[T]):
    """Blocking iterator over an async one. Each item is returned once, to one of any number of threads.

    It is closed when it is garbage-collected.
    """

    def __init__(self, make: Callable[[], AsyncIterator[Any]], convert: Callable[[Any], T] | None = None) -> None:
        self._core = _Iteration(make, convert)
        self._core.close_with(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        item = run(self._core.next())
        if item is END:
            raise StopIteration
        return cast(T, item)

    def close(self) -> None:
        """Stop the iterator's tasks and requests. Closing it again has no effect."""
        run(self._core.aclose())

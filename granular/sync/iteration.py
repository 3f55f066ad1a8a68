"""Blocking iterators over async ones, one item at a time."""

import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Iterator as StandardIterator
from typing import Any, Final, Self, TypeVar

from granular.aio.pipeline.execution.hand_over import READY, HandOver
from granular.aio.pipeline.execution.prefetch import END
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.lifecycle import Closing, Running, copied
from granular.aio.runtime.portal import run, run_close
from granular.errors import ClosedError, UnsupportedError

T = TypeVar('T')

_PAGE_SECONDS: Final = 0.01
_MAX_ITEMS: Final = 1024


class _Iteration(HandOver[T], Running):
    """A running async iterator whose items are converted one by one.

    An interrupt (Ctrl-C) may end the async iterator, which is then made anew from the next item on. Several items are
    computed at a time, if they come at once, so that changing threads costs little.
    """

    def __init__(self, make: Callable[[int], AsyncIterator[Any]], convert: Callable[[Any], T] | None) -> None:
        super().__init__()
        self._make, self._convert = make, convert
        self._items: AsyncIterator[Any] | None = make(0)  # None while it computes items, and after an interrupt
        self._count, self._most = 0, 1  # the items computed, and those to compute next
        self._error: Exception | None = None  # raised after the items before it
        self._ended = False

    def __getstate__(self) -> dict[str, Any]:
        raise UnsupportedError(
            'an iterator of a reader or a folder is neither pickled nor copied: iterate the reader or the folder again'
        )

    def _take(self) -> object:
        return run(self._more(), immediate=True)

    def _take_back(self) -> None:
        pass  # what was computed is ready, or is computed again

    async def _more(self) -> object:
        """Compute the next items. Returns ``END`` if there are none, also after an error."""
        async with self.turn():
            if self.closed:
                return END
            if self._error is not None:
                error, self._error = self._error, None
                try:
                    raise error
                finally:
                    del error  # whose traceback refers to this frame
            if self._ended:
                return END
            self.check()
            if self._loop is not None:
                await to_loop()
            try:
                await self._compute()
            finally:
                if self._loop is None:
                    await self.settle()
            return READY

    async def _compute(self) -> None:
        items, self._items = self._items or self._make(self._count), None
        ready: list[Any] = []
        end, ended, error = time.monotonic() + _PAGE_SECONDS, False, None
        try:
            while len(ready) < self._most and (not ready or time.monotonic() < end):
                item = await anext(items, END)
                if item is END:
                    ended = True
                    break
                ready.append(item if self._convert is None else self._convert(item))
        except Exception as failed:
            ended, error = True, failed
        ready.reverse()
        count, most = self._count + len(ready), min(2 * self._most, _MAX_ITEMS)
        self._items = items
        self._most = most
        self._error = error
        self._ended = ended
        self._ready, self._count = ready, count
        error = None  # the traceback refers to this frame

    async def _close(self) -> None:
        async with self.turn():  # a running generator cannot be closed
            self._ready = []
            close = getattr(self._items, 'aclose', None)
            if close is not None:
                await close()


class Iteration(Closing, StandardIterator[T]):
    """Blocking iterator over an async one. Each item is returned once, to one of any number of threads.

    It is closed when it is garbage-collected. ``make`` starts the async iterator, from the item with a number on.
    """

    def __init__(self, make: Callable[[int], AsyncIterator[Any]], convert: Callable[[Any], T] | None = None) -> None:
        self._core = _Iteration(make, convert)
        self._core.close_with(self)

    __copy__ = copied

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        return self._core.__next__()

    def close(self) -> None:
        """Stop the iterator's tasks and requests. Closing it again has no effect."""
        run_close(self._core.aclose())


def listing(make: Callable[[], AsyncIterator[Any]]) -> Callable[[int], AsyncIterator[Any]]:
    """Return a function that starts a listing. It refuses the items from a number on: those before may have changed."""

    def start(number: int) -> AsyncIterator[Any]:
        if number:
            raise ClosedError('the listing was interrupted: list again')
        return make()

    return start

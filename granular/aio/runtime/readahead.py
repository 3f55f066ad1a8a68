"""Sequential reads, a page at a time, with the next pages prefetched."""

import asyncio
import collections
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Final, TypeVar

from granular.aio.runtime.loops import background, end_tasks, ensure_event_loop, outcome
from granular.config import MiB

T = TypeVar('T')

_PAGE: Final = 4 * MiB
_LONGEST: Final = 1024  # items
_AHEAD: Final = 8


async def pages(
    fetch: Callable[[range], Coroutine[Any, Any, list[T]]], length: int, size: int, local: bool
) -> AsyncGenerator[T, None]:
    """Yield all items, in order.

    Args:
      fetch: returns the items at some indices.
      length: the number of items.
      size: the bytes of all items. A page has about 4 MiB, and at most eight pages are in flight, which bounds memory.
      local: True if items come without waiting; then nothing is prefetched.
    """
    step = max(1, min(_LONGEST, _PAGE * length // max(1, size)))
    starts = iter(range(0, length, step))
    ahead: collections.deque[asyncio.Task[list[T]]] = collections.deque()
    try:
        for _ in range(0, length, step):
            if local:
                start = next(starts)
                items = await fetch(range(start, min(start + step, length)))
            else:
                await ensure_event_loop()  # each item may be requested from another thread than the one before
                while len(ahead) < _AHEAD and (at := next(starts, None)) is not None:
                    ahead.append(background(fetch(range(at, min(at + step, length)))))
                items = await outcome(ahead[0])
                ahead.popleft()
            for item in items:
                yield item
    finally:
        if ahead:
            await ensure_event_loop()
            await end_tasks(ahead)

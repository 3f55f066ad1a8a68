"""Sequential reads, a page at a time, with the next pages prefetched."""

import asyncio
import collections
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Final, TypeVar

from granular.aio.runtime.background import background
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.tasks import end_tasks, outcome
from granular.config import MiB

T = TypeVar('T')

_PAGE: Final = 4 * MiB
_MAX_ITEMS: Final = 1024  # of a page
_AHEAD: Final = 8  # pages in flight


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
    step = max(1, min(_MAX_ITEMS, _PAGE * length // max(1, size)))
    ranges = (range(start, min(start + step, length)) for start in range(0, length, step))
    if local:
        for indices in ranges:
            for item in await fetch(indices):
                yield item
        return
    ahead: collections.deque[asyncio.Task[list[T]]] = collections.deque()
    try:
        for _ in range(0, length, step):
            await ensure_event_loop()  # each item may be requested from another thread than the one before
            for indices in itertools.islice(ranges, _AHEAD - len(ahead)):
                ahead.append(background(fetch(indices)))
            items = await outcome(ahead[0])
            ahead.popleft()
            for item in items:
                yield item
    finally:
        if ahead:
            await ensure_event_loop()
            await end_tasks(ahead)

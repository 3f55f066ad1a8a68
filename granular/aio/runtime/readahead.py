"""Sequential reads, a page at a time, with the next pages prefetched."""

import asyncio
import collections
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Final, TypeVar

from granular.aio.runtime.background import background
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.tasks import end_tasks, outcome
from granular.config import MiB

T = TypeVar('T')

_PAGE: Final = 4 * MiB
_MAX_ITEMS: Final = 1024  # of a page
_AHEAD: Final = 8  # pages in flight


async def pages(
    fetch: Callable[[range], Coroutine[Any, Any, list[T]]], length: int, size: int, local: bool, start: int = 0
) -> AsyncGenerator[T, None]:
    """Yield all items, in order, or those from an index on: ``fetch`` returns those at some indices.

    They have ``size`` bytes together. A page has about 4 MiB, and at most eight pages are in flight, or two of larger
    items, which bounds memory; nothing is prefetched if they are ``local``: they come without waiting.
    """
    step = max(1, min(_MAX_ITEMS, _PAGE * length // max(1, size)))
    ahead = max(2, min(_AHEAD, _AHEAD * _PAGE * length // max(1, step * size)))
    async with contextlib.aclosing(whole_pages(fetch, length, step, 0 if local else ahead, start)) as fetched:
        async for items in fetched:
            for item in items:
                yield item


async def whole_pages(
    fetch: Callable[[range], Coroutine[Any, Any, T]], length: int, step: int, ahead: int, start: int = 0
) -> AsyncGenerator[T, None]:
    """Yield the pages of some items, in order: ``fetch`` returns that of the items at some indices, ``step`` of them.

    At most ``ahead`` pages are in flight; nothing is prefetched if it is 0.
    """
    ranges = (range(first, min(first + step, length)) for first in range(start, length, step))
    if not ahead:
        for indices in ranges:
            yield await fetch(indices)
        return
    tasks: collections.deque[asyncio.Task[T]] = collections.deque()
    try:
        for _ in range(start, length, step):
            await to_loop()  # each page may be requested from another thread than the one before
            for indices in itertools.islice(ranges, ahead - len(tasks)):
                tasks.append(background(fetch(indices)))
            page = await outcome(tasks[0])
            tasks.popleft()
            yield page
    finally:
        if tasks:
            await to_loop()
            await end_tasks(tasks)

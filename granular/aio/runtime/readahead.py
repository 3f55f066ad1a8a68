"""Reading from the first to the last, a page at a time, with the next pages on their way."""

import asyncio
import collections
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Final, TypeVar

from granular.aio.runtime.loops import background, end_tasks, need_loop, outcome
from granular.config import MiB

T = TypeVar('T')

_PAGE: Final = 4 * MiB
_LONGEST: Final = 1024  # items
_AHEAD: Final = 8


async def pages(
    fetch: Callable[[range], Coroutine[Any, Any, list[T]]], length: int, size: int, local: bool
) -> AsyncGenerator[T, None]:
    """All items, in order.

    Args:
      fetch: gives those at some indices.
      length: how many there are.
      size: their bytes. A page has about 4 MiB of them, and eight pages are on their way: memory is bounded by that.
      local: whether they come without waiting; then nothing is fetched ahead.
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
                await need_loop()  # whoever asks for an item may do so from another thread than before
                while len(ahead) < _AHEAD and (at := next(starts, None)) is not None:
                    ahead.append(background(fetch(range(at, min(at + step, length)))))
                items = await outcome(ahead[0])
                ahead.popleft()
            for item in items:
                yield item
    finally:
        if ahead:
            await need_loop()
            await end_tasks(ahead)

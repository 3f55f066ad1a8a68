"""Memory of what is decoded: the chunks of a stream share it, and fetch parts that fit."""

import asyncio
import collections
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

from granular._support.indexing import Ints
from granular.aio.pipeline.nodes.source import Source, all_stages, estimate_nbytes
from granular.aio.runtime.immediate import to_loop

_TINY: Final = 1 << 12  # bytes of a stored datapoint that takes little memory in any case
_EXPANSION: Final = 64  # the size of a decoded datapoint by that of a small stored one


def small_nbytes(source: Source, weight: int) -> int:
    """Return the stored bytes of an element that takes little memory in any case; 0 if it may be a picture."""
    stored = int(source.stored_nbytes() or 0)
    return stored if stored <= _TINY * weight else 0


def measured_roots(source: Source) -> list[Any]:
    """Return the data sources that measure what they return: ``largest`` has the bytes of the largest datapoint."""
    return [stage for stage in all_stages(source) if hasattr(stage, 'largest')]


class Decoding:
    """Fetches elements of a source in parts, so that what is decoded at a time takes a limited memory.

    What data sources return is measured, before functions make it smaller. Until it is known, one element is fetched
    at a time, unless what is stored is small. A part has at least one element, which may be larger than the memory.

    Args:
      source: the source.
      weight: the number of datapoints in an element.
      memory: bytes of what may be decoded at a time.
    """

    def __init__(self, source: Source, weight: int, memory: int) -> None:
        self._source = source
        self._weight = weight
        self._memory = max(1, memory)
        self._roots = measured_roots(source)
        # Of the largest datapoint, about; 0 until one is known.
        self._size = _EXPANSION * small_nbytes(source, weight) // weight
        self._is_measured = False
        self._reserved, self._lock = 0, threading.Lock()
        self._waiting: collections.deque[Callable[[], object]] = collections.deque()

    def __reduce__(self) -> tuple[Any, ...]:
        return Decoding, (self._source, self._weight, self._memory)

    async def fetch(self, indices: Ints) -> list[Any]:
        """Return the elements at some indices."""
        elements: list[Any] = []
        while len(elements) < len(indices):
            async with self._reserving(len(indices) - len(elements)) as count:
                part = await self._source.fetch(indices[len(elements) : len(elements) + count])
                elements += part
                self._learn(part, count)
        return elements

    def _learn(self, part: Sequence[Any], count: int) -> None:
        known = [root.largest for root in self._roots] or [estimate_nbytes(part) // (count * self._weight)]
        self._size = max(self._size if self._is_measured else 1, *known)
        self._is_measured = True

    @contextlib.asynccontextmanager
    async def _reserving(self, count: int) -> AsyncIterator[int]:
        """Reserve memory for so many elements, or as many as fit at a time, once it is free; yield their number."""
        while (reserved := self._reserve(count)) is None:
            await to_loop()
            await self._wait()
        try:
            yield reserved[0]
        finally:
            with self._lock:
                self._reserved -= reserved[1]
                woken, self._waiting = self._waiting, collections.deque()
            for wake in woken:
                wake()

    def _reserve(self, count: int) -> tuple[int, int] | None:
        """Reserve memory; return the number of elements and the bytes, or None if others must end first."""
        with self._lock:
            each = self._size * self._weight
            if each:
                count = max(1, min(count, self._memory // (2 * each)))
                nbytes = min(count * each, self._memory)
            else:
                count, nbytes = 1, self._memory
            if self._reserved and self._reserved + nbytes > self._memory:
                return None
            self._reserved += nbytes
            return count, nbytes

    async def _wait(self) -> None:
        """Wait until memory was released since."""
        loop = asyncio.get_running_loop()
        released: asyncio.Future[None] = loop.create_future()

        def finish() -> None:
            if not released.done():
                released.set_result(None)

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(finish)

        with self._lock:
            if not self._reserved:
                return
            self._waiting.append(wake)
        await released

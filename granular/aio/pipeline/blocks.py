"""A buffer of blocks, so that one range request serves all the records of a block, whenever they come."""

import asyncio
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike

from granular.aio.loops import cancel_idle, need_loop, shared_task, wait_shared
from granular.aio.pipeline.source import Node, Source, weigh
from granular.aio.reply import counters

logger = logging.getLogger('granular')

MEMORY: Final = 1 << 30
_TAKEN: Final = object()


class BlockBuffer(Node):
    """Reads whole blocks of neighbours, each once, and keeps of them what was not asked for yet.

    Args:
      parent: what is read; index ``len + i`` is of the next epoch.
      block: datapoints in a block.
      memory: bytes of blocks that are kept at most, each until all of it was taken. Beyond, the oldest one is dropped
        and read again if need be, which costs speed, not order: it is logged once.
    """

    def __init__(self, parent: Source, block: int, memory: int = MEMORY) -> None:
        super().__init__(parent)
        self._block, self._memory = block, memory
        self._reset(None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_loop': None, '_blocks': {}, '_kept': 0}

    def _reset(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._loop = loop
        self._blocks: dict[tuple[int, int], _Block] = {}
        self._kept = 0
        self._warned = False

    def select(self, fields: Sequence[str]) -> Self | None:
        below = self.parents[0].select(fields)
        return None if below is None else type(self)(below, self._block, self._memory)

    async def expect(self, keys: Sequence[tuple[int, int]]) -> None:
        """Begin to read blocks, by epoch and number, that will be asked for."""
        await self._enter()
        self._begin(keys)

    async def release(self) -> None:
        if any(not block.task.done() for block in self._blocks.values()):
            await self._enter()
            await cancel_idle({block.task for block in self._blocks.values()})
        await super().release()

    async def _enter(self) -> None:
        await need_loop()
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._reset(loop)

    def _begin(self, keys: Iterable[tuple[int, int]]) -> None:
        missing = [key for key in keys if key not in self._blocks]
        if missing:
            task = shared_task(self._read(missing))
            for key in missing:
                self._blocks[key] = _Block(task)

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        await self._enter()
        steps = np.asarray(indices, np.int64)
        epochs, places = np.divmod(steps, len(self))
        numbers, within = np.divmod(places, self._block)
        keys = list(zip(epochs.tolist(), numbers.tolist(), strict=True))
        wanted = dict.fromkeys(keys)
        there = {key for key in wanted if key in self._blocks}
        counters.cached += sum(key in there for key in keys)
        self._begin(wanted)
        blocks = {key: self._blocks[key] for key in wanted}
        await wait_shared({block.task for block in blocks.values() if not block.task.done()})
        out: list[Any] = []
        again: list[int] = []
        for i, (key, place) in enumerate(zip(keys, within.tolist(), strict=True)):
            point = blocks[key].take(place)
            if point is _TAKEN:
                again.append(i)
            out.append(point)
        for key, block in blocks.items():
            if not block.left and self._blocks.get(key) is block:
                del self._blocks[key]
                self._kept -= block.size
        if again:  # they were handed out before: a state was loaded, or a block dropped
            for i, point in zip(again, await self.parents[0].fetch(steps[again]), strict=True):
                out[i] = point
        return out

    async def _read(self, keys: list[tuple[int, int]]) -> None:
        length, block = len(self), self._block
        ranges = [(epoch * length, number * block, min(length, (number + 1) * block)) for epoch, number in keys]
        try:
            points = iter(
                await self.parents[0].fetch(
                    np.concatenate([np.arange(start, stop) + base for base, start, stop in ranges])
                )
            )
        except BaseException:
            for key in keys:
                self._blocks.pop(key, None)
            raise
        for key, (_, start, stop) in zip(keys, ranges, strict=True):
            entry = self._blocks[key]
            entry.fill(list(itertools.islice(points, stop - start)))
            entry.size = weigh(entry.points)
            self._kept += entry.size
        self._evict(keys)

    def _evict(self, new: Sequence[tuple[int, int]]) -> None:
        for key in list(self._blocks):
            if self._kept <= self._memory:
                return
            block = self._blocks[key]
            if not block.task.done() or key in new:
                continue
            if not self._warned:
                self._warned = True
                logger.warning(
                    'the windows that are being read hold more than %d bytes: blocks are dropped and read again: '
                    'choose smaller ones, or fewer blocks to a window',
                    self._memory,
                )
            self._kept -= block.size
            del self._blocks[key]


class _Block:
    """What is left of a block."""

    __slots__ = ('left', 'points', 'size', 'task')

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task
        self.points: list[Any] = []
        self.left = 1
        self.size = 0

    def fill(self, points: list[Any]) -> None:
        self.points, self.left = points, len(points)

    def take(self, place: int) -> Any:
        if place >= len(self.points):
            return _TAKEN
        point, self.points[place] = self.points[place], _TAKEN
        if point is not _TAKEN:
            self.left -= 1
        return point

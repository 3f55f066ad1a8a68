"""A buffer of blocks: one range request serves all records of a block, whenever they are requested."""

import asyncio
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike

from granular.aio.http.reply import counters
from granular.aio.pipeline.nodes.source import Node, Source, estimate_nbytes
from granular.aio.runtime.background import background, cancel_idle, wait_shared
from granular.aio.runtime.scope import PerLoop

logger = logging.getLogger('granular')

MEMORY: Final = 1 << 30
_TAKEN: Final = object()


class BlockBuffer(Node):
    """Reads whole blocks of consecutive datapoints, each once, and buffers the datapoints that were not requested yet.

    Args:
      parent: the source; index ``len + i`` belongs to the next epoch.
      block: datapoints per block.
      memory: maximum number of bytes in buffered blocks; a block is freed when all of its datapoints were taken. Beyond
        this limit, the oldest block is dropped and its datapoints are read again on request, which costs speed and
        leaves the order unchanged. A warning is logged once.
    """

    def __init__(self, parent: Source, block: int, memory: int = MEMORY) -> None:
        super().__init__(parent)
        self._block, self._memory = block, memory
        self._warned = False
        self._buffers = PerLoop(_Buffer)  # tasks of one event loop fill a buffer

    def select(self, fields: Sequence[str]) -> Self | None:
        source = self.parents[0].select(fields)
        return None if source is None else type(self)(source, self._block, self._memory)

    async def expect(self, keys: Sequence[tuple[int, int]]) -> None:
        """Start to read blocks, given by epoch and number, ahead of requests for them."""
        self._begin(await self._buffers.get(), keys)

    async def release(self) -> None:
        if (buffer := await self._buffers.peek()) is not None:
            await cancel_idle({block.task for block in buffer.blocks.values()})
        await super().release()

    def _begin(self, buffer: '_Buffer', keys: Iterable[tuple[int, int]]) -> None:
        missing = [key for key in keys if key not in buffer.blocks]
        if missing:
            task = background(self._read(buffer, missing))
            for key in missing:
                buffer.blocks[key] = _Block(task)

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        buffer = await self._buffers.get()
        steps = np.asarray(indices, np.int64)
        epochs, positions = np.divmod(steps, len(self))
        numbers, within = np.divmod(positions, self._block)
        keys = list(zip(epochs.tolist(), numbers.tolist(), strict=True))
        needed = dict.fromkeys(keys)
        buffered = {key for key in needed if key in buffer.blocks}
        counters.cached += sum(key in buffered for key in keys)
        self._begin(buffer, needed)
        blocks = {key: buffer.blocks[key] for key in needed}
        await wait_shared({block.task for block in blocks.values() if not block.task.done()})
        out: list[Any] = []
        again: list[int] = []
        for i, (key, position) in enumerate(zip(keys, within.tolist(), strict=True)):
            datapoint = blocks[key].take(position)
            if datapoint is _TAKEN:
                again.append(i)
            out.append(datapoint)
        for key, block in blocks.items():
            if not block.left and buffer.blocks.get(key) is block:
                del buffer.blocks[key]
                buffer.nbytes -= block.size
        if again:  # already taken (a state was restored) or dropped with their block
            for i, datapoint in zip(again, await self.parents[0].fetch(steps[again]), strict=True):
                out[i] = datapoint
        return out

    async def _read(self, buffer: '_Buffer', keys: list[tuple[int, int]]) -> None:
        length, block = len(self), self._block
        ranges = [(epoch * length, number * block, min(length, (number + 1) * block)) for epoch, number in keys]
        try:
            datapoints = iter(
                await self.parents[0].fetch(
                    np.concatenate([np.arange(start, stop) + base for base, start, stop in ranges])
                )
            )
        except BaseException:
            for key in keys:
                buffer.blocks.pop(key, None)
            raise
        for key, (_, start, stop) in zip(keys, ranges, strict=True):
            entry = buffer.blocks[key]
            entry.fill(list(itertools.islice(datapoints, stop - start)))
            entry.size = estimate_nbytes(entry.datapoints)
            buffer.nbytes += entry.size
        self._evict(buffer, keys)

    def _evict(self, buffer: '_Buffer', new: Sequence[tuple[int, int]]) -> None:
        for key in list(buffer.blocks):
            if buffer.nbytes <= self._memory:
                return
            block = buffer.blocks[key]
            if not block.task.done() or key in new:
                continue
            if not self._warned:
                self._warned = True
                logger.warning(
                    'the open windows contain more than %d bytes, so blocks are dropped and read again: '
                    'choose smaller blocks, or fewer of them per window',
                    self._memory,
                )
            buffer.nbytes -= block.size
            del buffer.blocks[key]


class _Buffer:
    """The blocks of one event loop, and their size in bytes."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], _Block] = {}
        self.nbytes = 0


class _Block:
    """The datapoints of a block that were not taken yet."""

    __slots__ = ('datapoints', 'left', 'size', 'task')

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task
        self.datapoints: list[Any] = []
        self.left = 1
        self.size = 0

    def fill(self, datapoints: list[Any]) -> None:
        self.datapoints, self.left = datapoints, len(datapoints)

    def take(self, position: int) -> Any:
        if position >= len(self.datapoints):
            return _TAKEN
        datapoint, self.datapoints[position] = self.datapoints[position], _TAKEN
        if datapoint is not _TAKEN:
            self.left -= 1
        return datapoint

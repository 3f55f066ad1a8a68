"""A buffer of blocks: one range request serves all records of a block, whenever they are requested."""

import asyncio
import functools
import itertools
from collections.abc import Iterable
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike

from granular._support.indexing import Ints
from granular._support.text import logger
from granular.aio.pipeline.execution.failures import Failure, capturing
from granular.aio.pipeline.nodes.source import Node, Source, estimate_nbytes
from granular.aio.pipeline.orders import Blocks
from granular.aio.runtime.background import background, cancel_idle, wait_shared
from granular.aio.runtime.loop_resources import PerLoop
from granular.metrics import counters

MEMORY: Final = 1 << 30
_TAKEN: Final = object()


class BlockBuffer(Node):
    """Reads whole blocks of consecutive datapoints, each once, and buffers those that were not requested yet.

    Index ``len + i`` of the source belongs to the next epoch. Beyond ``memory`` bytes in buffered blocks, the oldest
    block is dropped, and its datapoints are read again on request. A warning is logged once.
    """

    selects = True

    def __init__(self, parent: Source, block: int, memory: int = MEMORY) -> None:
        super().__init__(parent)
        self._block, self._memory = block, memory  # datapoints, bytes
        self._warned = False
        self._buffers = PerLoop(_Buffer)  # tasks of one event loop fill a buffer

    def copy_over(self, *parents: Source) -> Self:
        (parent,) = parents
        return type(self)(parent, self._block, self._memory)

    async def read_ahead(self, order: Blocks, seed: int, steps: Ints, endless: bool) -> None:
        """Start to read the blocks that are needed one window after a batch, and after batches since the last call.

        ``endless`` tells that an epoch follows on that of the steps.
        """
        buffer, length = await self._buffers.get(), len(self)
        least, most = int(steps.min()), int(steps.max())
        group = order.group_ahead(most, length)
        if group == buffer.group:
            return
        buffer.span = order.groups_per_window(length)
        if 0 < buffer.group - group <= buffer.span:
            return  # concurrent batches: a later one was first
        if 0 < group - buffer.group <= buffer.span:
            first = buffer.group + 1
        else:  # the first batch, or a jump
            first = order.group_ahead(least, length) if most - least < len(steps) else group
        buffer.group = group
        blocks = np.concatenate([order.group(number, length, seed) for number in range(first, group + 1)])
        if not endless:  # nothing follows the last epoch
            blocks = blocks[blocks < (most // length + 1) * self._count]
        self._begin(buffer, blocks.tolist())

    async def release(self) -> None:
        if (buffer := await self._buffers.peek()) is not None:
            await cancel_idle({block.task for block in buffer.blocks.values()})
        await super().release()

    @functools.cached_property
    def _count(self) -> int:
        """Blocks of an epoch."""
        return -(-len(self) // self._block)

    def _begin(self, buffer: '_Buffer', keys: Iterable[int]) -> None:
        missing = [key for key in keys if not buffer.has(key)]
        if missing:
            task = background(self._read(buffer, missing))
            for key in missing:
                buffer.blocks[key] = _Block(task, buffer.group)

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        buffer = await self._buffers.get()
        steps = np.asarray(indices, np.int64)
        epochs, positions = np.divmod(steps, len(self))
        numbers, within = np.divmod(positions, self._block)
        keys: list[int] = (numbers + epochs * self._count).tolist()
        needed = dict.fromkeys(keys)
        missing = {key for key in needed if not buffer.has(key)}
        counters.cached += len(keys) - (sum(key in missing for key in keys) if missing else 0)
        self._begin(buffer, missing)
        blocks = {key: buffer.blocks[key] for key in needed}
        if waiting := {block.task for block in blocks.values() if not block.task.done()}:
            await wait_shared(waiting)
        out: list[Any] = []
        captures = capturing.get()
        again: list[int] = []
        for i, (key, position) in enumerate(zip(keys, within.tolist(), strict=True)):
            datapoint = blocks[key].take(position)
            if datapoint is _TAKEN or (type(datapoint) is Failure and not captures):
                again.append(i)
            out.append(datapoint)
        for key, block in blocks.items():
            if buffer.blocks.get(key) is block:
                buffer.nbytes -= block.freed()
                if not block.left:
                    del buffer.blocks[key]
        # Taken already (a state was restored), dropped with their block, or failed, for or beside another consumer.
        if again:
            for i, datapoint in zip(again, await self.parents[0].fetch(steps[again]), strict=True):
                out[i] = datapoint
        return out

    async def _read(self, buffer: '_Buffer', keys: list[int]) -> None:
        length, block = len(self), self._block
        ranges = []
        for key in keys:
            epoch, number = divmod(key, self._count)
            ranges.append(np.arange(number * block, min(length, (number + 1) * block)) + epoch * length)
        try:
            datapoints = iter(await self.parents[0].fetch(np.concatenate(ranges)))
        except BaseException:
            for key in keys:
                if buffer.blocks[key].task is asyncio.current_task():  # otherwise it was cancelled, and replaced
                    del buffer.blocks[key]
            raise
        for key, steps in zip(keys, ranges, strict=True):
            buffer.nbytes += buffer.blocks[key].fill(list(itertools.islice(datapoints, len(steps))))
        if buffer.nbytes > self._memory:
            self._evict(buffer)

    def _evict(self, buffer: '_Buffer') -> None:
        for key in list(buffer.blocks):
            if buffer.nbytes <= self._memory:
                return
            block = buffer.blocks[key]
            if not block.task.done():  # as those that were just read
                continue
            # Blocks of past windows remain if other processes take some of their datapoints.
            if not self._warned and block.group >= buffer.group - 2 * buffer.span:
                self._warned = True
                logger.warning(
                    'the open windows contain more than %d bytes, so blocks are dropped and read again: '
                    'choose smaller blocks, or fewer of them per window',
                    self._memory,
                )
            buffer.nbytes -= block.nbytes
            del buffer.blocks[key]


class _Buffer:
    """The blocks of one event loop by number, counted over all epochs, and their size in bytes."""

    def __init__(self) -> None:
        self.blocks: dict[int, _Block] = {}
        self.nbytes = 0
        self.group = -1  # the last group that was read ahead
        self.span = 0  # groups per window

    def has(self, key: int) -> bool:
        """Return whether a block was read, or is being read, and not cancelled."""
        block = self.blocks.get(key)
        return block is not None and (block.task.done() or not block.task.cancelling())


class _Block:
    """The datapoints of a block that were not taken yet."""

    __slots__ = ('_size', 'datapoints', 'group', 'left', 'nbytes', 'task')

    def __init__(self, task: asyncio.Task[None], group: int) -> None:
        self.task, self.group = task, group
        self.datapoints: list[Any] = []
        self.left = 1
        self._size = self.nbytes = 0

    def fill(self, datapoints: list[Any]) -> int:
        """Put the datapoints into the block, and return their size."""
        self.datapoints, self.left = datapoints, len(datapoints)
        self._size = self.nbytes = estimate_nbytes(datapoints)
        return self.nbytes

    def take(self, position: int) -> Any:
        """Return a datapoint, and forget it; ``_TAKEN`` if it was taken before."""
        if position >= len(self.datapoints):
            return _TAKEN
        datapoint, self.datapoints[position] = self.datapoints[position], _TAKEN
        if datapoint is not _TAKEN:
            self.left -= 1
        return datapoint

    def freed(self) -> int:
        """Return the bytes of the datapoints that were taken since the last call."""
        left = self._size * self.left // max(1, len(self.datapoints))
        freed, self.nbytes = self.nbytes - left, left
        return freed

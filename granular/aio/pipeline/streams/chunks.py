"""Chunks: consecutive elements of a source, loaded in this process or in a worker."""

from typing import Any, NamedTuple

import numpy as np

from granular.aio.pipeline.nodes.batches import weight_of
from granular.aio.pipeline.nodes.source import Source, all_stages, estimate_nbytes
from granular.aio.pipeline.position import EvenTurns, Turns
from granular.aio.pipeline.streams.decoding import Decoding
from granular.aio.runtime.threads import offload


class Chunk(NamedTuple):
    """Elements in reverse, as they are taken from the end; their estimated size in bytes, and their types."""

    rest: list[Any]
    nbytes: int
    kinds: set[type]


class ChunkTask:
    """Loads chunks of a source, in this process or in a worker."""

    captures = True

    def __init__(self, source: Source, turns: Turns, memory: int) -> None:
        self._source, self._turns = source, turns
        self._decoding = Decoding(source, weight_of(source), memory)

    def stages(self) -> list[Source]:
        return all_stages(self._source)

    async def compute(self, position: int, count: int) -> Chunk:
        turns, stride = self._turns, self._turns.stride
        rounds = np.arange(position, position + stride * count, stride)
        indices = await offload(turns.taken, rounds) if isinstance(turns, EvenTurns) else turns.taken(rounds)
        chunk = await self._decoding.fetch(indices)
        return Chunk(chunk[::-1], estimate_nbytes(chunk), set(map(type, chunk)))

"""Datasets one after the other, opened when they are first read."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from granular._support.indexing import Ints, indices_of
from granular.aio.bags.records import Adjacent
from granular.aio.datasets.reader import DatasetReader, fetch_buffers
from granular.aio.pipeline.data_source import Mask
from granular.aio.pipeline.nodes.source import Source
from granular.aio.runtime.tasks import gather

T = TypeVar('T')


class Concatenation(Source):
    """The datapoints of several datasets. It can be pickled; readers are then opened by the process that reads.

    A reader is closed once nothing is read from it and another dataset is: sequential reads have few open. ``make``
    returns that of the dataset with a number; ``lengths`` are the numbers of datapoints.
    """

    def __init__(self, make: Callable[[int], DatasetReader], lengths: Sequence[int]) -> None:
        self._make = make
        self._stops = np.cumsum(np.array([0, *lengths], np.int64))[1:]
        self._starts = self._stops - np.array(lengths, np.int64)
        self._readers: dict[int, DatasetReader] = {}
        self._users: dict[int, int] = {}  # reads in progress, by dataset
        self._last = -1

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_readers': {}, '_users': {}}

    def __len__(self) -> int:
        return int(self._stops[-1]) if len(self._stops) else 0

    async def fetch(self, indices: ArrayLike, mask: Mask = None) -> list[Any]:
        positions = indices_of(indices, len(self), 'the datasets')
        parts = await self._read(positions, lambda reader, indices: reader.fetch(indices, mask))
        return [datapoint for part in parts for datapoint in part]

    async def fetch_buffers(self, indices: range, mask: Mask = None) -> list[dict[str, list[Any] | Adjacent]]:
        """Return the values at consecutive indices by key, for each dataset; raw records in one buffer if possible."""
        positions = indices_of(indices, len(self), 'the datasets')
        return await self._read(
            positions, lambda reader, indices: fetch_buffers(reader, range(indices[0], indices[-1] + 1), mask)
        )

    async def _read(self, positions: Ints, read: Callable[[DatasetReader, Ints], Coroutine[Any, Any, T]]) -> list[T]:
        numbers = np.searchsorted(self._stops, positions, side='right')
        used = np.unique(numbers).tolist()
        if not used:
            return []
        self._last = used[-1]
        for number in used:
            self._users[number] = self._users.get(number, 0) + 1
            if number not in self._readers:
                self._readers[number] = self._make(number)
        try:
            return await gather(
                [read(self._readers[number], positions[numbers == number] - self._starts[number]) for number in used]
            )
        finally:
            for number in used:
                self._users[number] -= 1
            await self._close_idle()

    async def _close_idle(self) -> None:
        idle = [number for number in self._readers if not self._users[number] and number != self._last]
        for number in idle:
            await self._readers.pop(number).aclose()

    async def aclose(self) -> None:
        self._last = -1
        await self._close_idle()

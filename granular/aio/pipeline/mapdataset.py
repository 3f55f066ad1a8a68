"""The asynchronous MapDataset."""

import operator
from collections.abc import AsyncIterator
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from granular.aio.pipeline.iterdataset import IterDataset
from granular.aio.pipeline.operations import MapOperations


class MapDataset(MapOperations):
    """A lazy sequence of elements, each a pure function of its index, fetched many at a time.

    Index ``len + i`` is element ``i`` of the next epoch, negative ones are of the epochs before. What a filter left out
    is None; iteration skips it.
    """

    _stream = IterDataset

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        """The elements at many indices, in the order asked, in one fan-out."""
        return await self._node.fetch(np.asarray(indices, np.int64))

    async def get(self, index: SupportsIndex) -> Any:
        """The element at an index."""
        return (await self._node.fetch(np.array([operator.index(index)])))[0]

    def __aiter__(self) -> AsyncIterator[Any]:
        stream: IterDataset = self.to_iter_dataset()
        return aiter(stream)

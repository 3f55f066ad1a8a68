"""The asynchronous MapDataset."""

import operator
from collections.abc import AsyncIterator
from typing import Any, Self, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from granular.aio.pipeline.iter_dataset import IterDataset
from granular.aio.pipeline.nodes import selection as choosing
from granular.aio.pipeline.nodes.operations import MapOperations
from granular.filters import Strategy


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

    async def filter_classes(
        self, field: str = 'label', valid_classes: Any = None, invalid_classes: Any = None
    ) -> Self:
        """The elements of some classes, or of all others. Their labels are read once, and nothing else of them.

        Where the order differs from epoch to epoch, the elements are those of the first: shuffle behind it.

        Args:
          field: the key of the labels, of which a sample may have one or a sequence.
          valid_classes: those that stay: a list, a range or an array of integers or strings.
          invalid_classes: in place of it, those that do not.
        """
        return self._derive(await choosing.filtered(self._node, field, valid_classes, invalid_classes))

    async def oversample(
        self, field: str = 'label', strategy: Strategy = 'multiply', unlabeled: int | str | None = -1
    ) -> Self:
        """Elements of rare classes repeated. Their labels are read once, and nothing else of them.

        Args:
          field: the key of the labels.
          strategy: ``'multiply'``: what fits k times into the count of the largest class comes k times;
            ``'exact'``: each class comes to that count exactly.
          unlabeled: the label that stands for no class; its elements come once. None if there is none.
        """
        return self._derive(await choosing.oversampled(self._node, field, strategy, unlabeled))

    def __aiter__(self) -> AsyncIterator[Any]:
        stream: IterDataset = self.to_iter_dataset()
        return aiter(stream)

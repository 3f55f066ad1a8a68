"""The async API of MapDataset."""

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

    Operations return a new dataset and read nothing::

        dataset = MapDataset.source(reader).seed(0).shuffle().map(decode).batch(64)
        first, second = await dataset.fetch([0, 1])
        async for batch in dataset:
            ...

    Index ``len + i`` is element ``i`` of the next epoch; negative indices belong to earlier epochs. An element removed
    by ``filter`` is None here; iteration skips it.
    """

    _stream = IterDataset

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        """Return the elements at the given indices, in the order of the indices, in one fan-out."""
        return await self._node.fetch(np.asarray(indices, np.int64))

    async def get(self, index: SupportsIndex) -> Any:
        """Return the element at an index."""
        return (await self._node.fetch(np.array([operator.index(index)])))[0]

    async def filter_classes(
        self, field: str = 'label', valid_classes: Any = None, invalid_classes: Any = None
    ) -> Self:
        """Keep the elements of some classes, or of all other classes.

        Reads only the labels, once. If the order changes from epoch to epoch, the first epoch decides which indices are
        kept: shuffle after filtering.

        Args:
          field: key of the label; an element may have one label or a sequence of labels.
          valid_classes: classes to keep: a list, range or array of integers or strings.
          invalid_classes: classes to remove, instead of ``valid_classes``.
        """
        return self._derive(await choosing.filtered(self._node, field, valid_classes, invalid_classes))

    async def oversample(
        self, field: str = 'label', strategy: Strategy = 'multiply', unlabeled: int | str | None = -1
    ) -> Self:
        """Repeat elements of rare classes. Reads only the labels, once.

        Args:
          field: key of the label.
          strategy: ``'multiply'``: each element appears k times, where k is how often its class fits into the largest
            class; ``'exact'``: elements of each class are repeated until it is as large as the largest class.
          unlabeled: label that means "no class": its elements appear once. None if there is no such label.
        """
        return self._derive(await choosing.oversampled(self._node, field, strategy, unlabeled))

    def __aiter__(self) -> AsyncIterator[Any]:
        stream: IterDataset = self.to_iter_dataset()
        return aiter(stream)

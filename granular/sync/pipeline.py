"""The sync API of MapDataset."""

import operator
from typing import Any, Self, SupportsIndex, overload

import numpy as np
from numpy.typing import ArrayLike

from granular.aio.pipeline import map_dataset as core
from granular.aio.pipeline.blocking_iterator import DatasetIterator
from granular.aio.pipeline.nodes import selection
from granular.aio.runtime.bridge import run
from granular.filters import Strategy
from granular.sync.base import Batched


class MapDataset(core.MapOperations, Batched):
    """A lazy sequence of elements, each a pure function of its index, fetched many at a time.

    ::

        dataset = granular.MapDataset.source(reader).shuffle(seed=1).map(preprocess).batch(64)
        batch = dataset[0]
        for batch in dataset:
            train_step(batch)

    ``dataset[i]`` is an element, ``dataset[a:b:c]`` a dataset of the selected elements. Index ``len + i`` is element
    ``i`` of the next epoch; negative indices are in the previous epochs. A filtered-out element is None; iteration
    skips it.

    Attributes:
      aio: the async counterpart, which does the work.
    """

    @property
    def aio(self) -> core.MapDataset:
        """The async counterpart, which does the work."""
        return core.MapDataset(self._node)

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    @overload
    def __getitem__(self, index: SupportsIndex) -> Any: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        return run(self._node.fetch(np.array([operator.index(index)])))[0]

    def fetch(self, indices: ArrayLike) -> list[Any]:
        """Return the elements at many indices, in the order requested, with concurrent reads."""
        return run(self._node.fetch(np.asarray(indices, np.int64)))

    def filter_classes(self, field: str = 'label', valid_classes: Any = None, invalid_classes: Any = None) -> Self:
        return self._derive(run(selection.filtered(self._node, field, valid_classes, invalid_classes)))

    def oversample(
        self, field: str = 'label', strategy: Strategy = 'multiply', unlabeled: int | str | None = -1
    ) -> Self:
        return self._derive(run(selection.oversampled(self._node, field, strategy, unlabeled)))

    def __iter__(self) -> DatasetIterator:
        return iter(self.to_iter_dataset())

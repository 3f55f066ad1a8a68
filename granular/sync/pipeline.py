"""The sync API of :mod:`granular.aio.pipeline`: lazy datasets and their streams."""

import operator
from collections.abc import Iterator as StandardIterator
from collections.abc import Mapping
from typing import Any, Self, SupportsIndex, overload

import numpy as np
from numpy.typing import ArrayLike

from granular.aio.execution.prefetch import END
from granular.aio.pipeline import map_dataset as core
from granular.aio.pipeline.iter_dataset import DatasetIterator as AsyncDatasetIterator
from granular.aio.pipeline.iter_dataset import Iterator, IterOperations
from granular.aio.pipeline.nodes import selection as choosing
from granular.aio.pipeline.nodes.operations import MapOperations
from granular.aio.pipeline.streams.streams import Stream
from granular.aio.runtime.bridge import run
from granular.filters import Strategy
from granular.sync.base import Batched


class DatasetIterator(StandardIterator[Any]):
    """Iterator over the elements of a stream. Its state can be saved and restored between any two elements.

    ::

        iterator = iter(dataset.to_iter_dataset())
        element = next(iterator)
        state = iterator.get_state()  # of the next element
        iterator.set_state(state)
    """

    def __init__(self, stream: Stream) -> None:
        self._core = Iterator(stream)
        self._core.close_with(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        element, _ = run(self._core.take(), self._core.take_back)
        if element is END:
            raise StopIteration
        return element

    def get_state(self) -> dict[str, Any]:
        """Return the position of the next element, as plain JSON that contains only indices."""
        return self._core.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Resume from a state.

        Raises:
          StateError: if it is not a state, or belongs to another pipeline; the message describes the difference.
        """
        run(self._core.restore(state))

    state_dict = get_state
    load_state_dict = set_state

    def start_prefetch(self) -> None:
        """Start to prefetch before the first element is requested."""
        run(self._core.start_prefetch())

    def stats(self) -> dict[str, float]:
        """Return the number of elements returned, and of the prefetch: elements, bytes, seconds waited, chunks ready
        and in flight.
        """
        return self._core.stats()

    @property
    def errors(self) -> list[tuple[int, str]]:
        """Index and message of the elements that failed to load, the last thousand of each source."""
        return self._core.errors

    def close(self) -> None:
        """Stop the iterator's tasks, threads and processes. Closing it again has no effect."""
        run(self._core.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


class IterDataset(IterOperations):
    """A stream of elements, for ``for`` or ``async for``.

    ::

        stream = granular.MapDataset.source(reader).shuffle(seed=1).to_iter_dataset().batch(64)
        for batch in stream:
            train_step(batch)
    """

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(self._stream)

    def __aiter__(self) -> AsyncDatasetIterator:
        return AsyncDatasetIterator(self._stream)


class MapDataset(MapOperations, Batched):
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

    _stream = IterDataset

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
        """Return the elements of some classes, or of all others. Only their labels are read to select them, once.

        If the order differs from epoch to epoch, the first epoch's elements are selected: shuffle after this stage.

        Args:
          field: the key of the labels; an element may have one label or a sequence.
          valid_classes: the classes to keep: a list, a range or an array of integers or strings.
          invalid_classes: alternatively, the classes to drop.
        """
        return self._derive(run(choosing.filtered(self._node, field, valid_classes, invalid_classes)))

    def oversample(
        self, field: str = 'label', strategy: Strategy = 'multiply', unlabeled: int | str | None = -1
    ) -> Self:
        """Return the elements, with those of rare classes repeated. Only their labels are read to select them, once.

        Args:
          field: the key of the labels.
          strategy: ``'multiply'``: a class that fits k times into the count of the largest class appears k times;
            ``'exact'``: each class is repeated to exactly that count.
          unlabeled: the label that stands for no class; its elements are not repeated. None if there is none.
        """
        return self._derive(run(choosing.oversampled(self._node, field, strategy, unlabeled)))

    def __iter__(self) -> DatasetIterator:
        stream: IterDataset = self.to_iter_dataset()
        return iter(stream)

"""Datasets of lazy elements and their streams, for programs that block."""

import operator
from collections.abc import Iterator as StandardIterator
from collections.abc import Mapping
from typing import Any, Self, SupportsIndex, overload

import numpy as np
from numpy.typing import ArrayLike

from granular.aio.pipeline import choosing
from granular.aio.pipeline import mapdataset as core
from granular.aio.pipeline.ahead import END
from granular.aio.pipeline.iterdataset import DatasetIterator as AsyncDatasetIterator
from granular.aio.pipeline.iterdataset import Iterator, IterOperations
from granular.aio.pipeline.operations import MapOperations
from granular.aio.pipeline.streams import Stream
from granular.bridge import run
from granular.face import Batched
from granular.filters import Strategy


class DatasetIterator(StandardIterator[Any]):
    """The elements of a stream; between any two of them, its state can be had and restored."""

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
        """From where the next element follows: plain JSON, of indices alone."""
        return self._core.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
          StateError: if it is none, or one of another pipeline; it says what differs.
        """
        run(self._core.restore(state))

    state_dict = get_state
    load_state_dict = set_state

    def start_prefetch(self) -> None:
        """Begin to read, before the first element is asked for."""
        run(self._core.start_prefetch())

    def stats(self) -> dict[str, float]:
        """Elements handed out; of what is read: elements, bytes, seconds waited for it, chunks ready and in flight."""
        return self._core.stats()

    @property
    def errors(self) -> list[tuple[int, str]]:
        """Index and message of the elements that could not be made, the last thousand of each source."""
        return self._core.errors

    def close(self) -> None:
        """End: its tasks, threads and processes. More than once is no error."""
        run(self._core.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


class IterDataset(IterOperations):
    """A stream of elements, with ``for``, or ``async for``."""

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(self._stream)

    def __aiter__(self) -> AsyncDatasetIterator:
        return AsyncDatasetIterator(self._stream)


class MapDataset(MapOperations, Batched):
    """A lazy sequence of elements, each a pure function of its index, fetched many at a time.

    ``dataset[i]`` is an element, ``dataset[a:b:c]`` a dataset of some. Index ``len + i`` is element ``i`` of the next
    epoch, negative ones are of the epochs before. What a filter left out is None; iteration skips it.

    Attributes:
      aio: the asynchronous twin, which does the work.
    """

    _stream = IterDataset

    @property
    def aio(self) -> core.MapDataset:
        """The asynchronous twin, which does the work."""
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
        """The elements at many indices, in the order asked, in one fan-out."""
        return run(self._node.fetch(np.asarray(indices, np.int64)))

    def filter_classes(self, field: str = 'label', valid_classes: Any = None, invalid_classes: Any = None) -> Self:
        """The elements of some classes, or of all others. Their labels are read once, and nothing else of them.

        Where the order differs from epoch to epoch, the elements are those of the first: shuffle behind it.

        Args:
          field: the key of the labels, of which a sample may have one or a sequence.
          valid_classes: those that stay: a list, a range or an array of integers or strings.
          invalid_classes: in place of it, those that do not.
        """
        return self._derive(run(choosing.filtered(self._node, field, valid_classes, invalid_classes)))

    def oversample(
        self, field: str = 'label', strategy: Strategy = 'multiply', unlabeled: int | str | None = -1
    ) -> Self:
        """Elements of rare classes repeated. Their labels are read once, and nothing else of them.

        Args:
          field: the key of the labels.
          strategy: ``'multiply'``: what fits k times into the count of the largest class comes k times;
            ``'exact'``: each class comes to that count exactly.
          unlabeled: the label that stands for no class; its elements come once. None if there is none.
        """
        return self._derive(run(choosing.oversampled(self._node, field, strategy, unlabeled)))

    def __iter__(self) -> DatasetIterator:
        stream: IterDataset = self.to_iter_dataset()
        return iter(stream)

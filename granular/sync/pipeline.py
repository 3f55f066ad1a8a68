"""The sync API of MapDataset."""

import copy
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, SupportsIndex, TypeVar, cast, overload

import numpy as np
from numpy.typing import ArrayLike

from granular._support.indexing import check_index, integers_of
from granular._support.typing import Element_co
from granular.aio.pipeline import map_dataset as core
from granular.aio.pipeline.blocking_iterator import DatasetIterator
from granular.aio.pipeline.execution.failures import without_failures
from granular.aio.pipeline.map_dataset import MapOperations
from granular.aio.pipeline.nodes.elements import Computed
from granular.aio.pipeline.nodes.source import AnySource, Source
from granular.aio.pipeline.origins import Origins, traced
from granular.aio.pipeline.transforms import (
    FlatMapFunction,
    IndexedFunction,
    MapFunction,
    RandomFunction,
    Transformation,
)
from granular.aio.runtime.portal import run
from granular.errors import InvalidArgumentError
from granular.sync.base import Batched, blocking, documented_by, passed_on

T = TypeVar('T')
D = TypeVar('D', bound='MapDataset[Any]')
P = ParamSpec('P')


def _operation(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, Any]],
) -> Callable[Concatenate[D, P], D]:
    """Make an operation of the sync API of one that the async API awaits, with its signature and docstring."""
    awaited = blocking(method)

    @functools.wraps(awaited)
    def operation(self: D, /, *args: P.args, **kwargs: P.kwargs) -> D:
        return self._of(awaited(self, *args, **kwargs).node)

    return operation


class MapDataset(MapOperations[Element_co], Batched):
    """A lazy sequence of elements, each a pure function of its index, fetched many at a time.

    ::

        dataset = granular.MapDataset.source(reader).shuffle(seed=1).map(preprocess).batch(64)
        batch = dataset[0]
        for batch in dataset:
            train_step(batch)

    ``dataset[i]`` is an element, ``dataset[a:b:c]`` a dataset of the selected elements. Index ``len + i`` is element
    ``i`` of the next epoch; negative indices are in the previous epochs. A filtered-out element is None; iteration
    skips it.

    A subclass computes elements of its own: it overrides ``__getitem__``, and ``__len__`` if its length differs::

        class Doubled(granular.MapDataset):
            def __getitem__(self, index):
                return [self._parent[index]] * 2

        dataset = Doubled(granular.MapDataset.range(10)).shuffle(seed=0).batch(2)

    Args:
      parents: for subclasses: the dataset, or the datasets, that elements are computed from.

    Attributes:
      aio: the async counterpart, which does the work.
    """

    def __init__(self, parents: 'Source | MapDataset | Sequence[MapDataset]' = ()) -> None:
        if isinstance(parents, Source):
            super().__init__(parents)
            return
        kind = type(self)
        if kind.__getitem__ is MapDataset.__getitem__:
            raise InvalidArgumentError('use MapDataset.source(...), or a subclass that overrides __getitem__')
        self._parents = (parents,) if isinstance(parents, MapDataset) else tuple(parents)
        length = None if kind.__len__ is MapDataset.__len__ else self.__len__
        if length is None and not self._parents:
            raise InvalidArgumentError(f'{kind.__name__} has no parents: define __len__')
        super().__init__(Computed([parent.node for parent in self._parents], self, length, _rebuilt))

    @classmethod
    def _of(cls, node: Source) -> Self:
        return cast(Self, MapDataset(node))

    @property
    def _parent(self) -> 'MapDataset':
        return self._parents[0]

    @property
    def aio(self) -> core.MapDataset[Element_co]:
        """The async counterpart, which does the work."""
        return core.MapDataset(self._node)

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    @overload
    def __getitem__(self, index: SupportsIndex) -> Element_co: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        return without_failures(run(self._node.fetch(np.array([check_index(index, 'MapDataset')])), immediate=True))[0]

    def fetch(self, indices: ArrayLike) -> list[Element_co]:
        return without_failures(run(self._node.fetch(integers_of(indices, 'fetch')), immediate=True))

    @documented_by(MapOperations.indices)
    def indices(self, steps: ArrayLike) -> Origins:
        return traced(self._node, steps)

    filter_classes = _operation(core.MapDataset.filter_classes)
    oversample = _operation(core.MapDataset.oversample)
    pack = _operation(core.MapDataset.pack)
    batch_by_size = _operation(core.MapDataset.batch_by_size)
    shapes: list[tuple[int, int]] = passed_on(core.MapDataset.shapes)

    def __iter__(self) -> DatasetIterator[Element_co]:
        return iter(self.to_iter_dataset())

    if TYPE_CHECKING:  # the types of elements

        @classmethod
        def source(cls, source: AnySource[T]) -> 'MapDataset[T]': ...
        @classmethod
        def range(cls, start: int, stop: int | None = None, step: int = 1) -> 'MapDataset[int]': ...
        @classmethod
        def mix(
            cls, datasets: Sequence[MapOperations[T]], weights: Sequence[float] | None = None
        ) -> 'MapDataset[T]': ...
        @classmethod
        def select_from_datasets(cls, datasets: Sequence[MapOperations[T]], selection_map: Any) -> 'MapDataset[T]': ...
        @classmethod
        def concatenate(cls, datasets: Sequence[MapOperations[T]]) -> 'MapDataset[T]': ...
        @classmethod
        def zip(cls, datasets: Sequence[MapOperations[Any]]) -> 'MapDataset[tuple[Any, ...]]': ...
        def map(self, transform: MapFunction[Element_co, T]) -> 'MapDataset[T]': ...
        def map_with_index(self, transform: IndexedFunction[Element_co, T]) -> 'MapDataset[T]': ...
        def random_map(
            self, transform: RandomFunction[Element_co, T], *, seed: int | Sequence[int] | None = None
        ) -> 'MapDataset[T]': ...
        def flat_map(
            self, transform: FlatMapFunction[Element_co, T], *, max_fan_out: int | None = None
        ) -> 'MapDataset[T]': ...
        @overload
        def batch(
            self, batch_size: int, *, drop_remainder: bool = False, batch_fn: Callable[[Sequence[Element_co]], T]
        ) -> 'MapDataset[T]': ...
        @overload
        def batch(
            self: 'MapDataset[dict[str, Any]]', batch_size: int, *, drop_remainder: bool = False, batch_fn: None = None
        ) -> 'MapDataset[dict[str, Any]]': ...
        @overload
        def batch(
            self, batch_size: int, *, drop_remainder: bool = False, batch_fn: None = None
        ) -> 'MapDataset[Any]': ...
        def batch(self, batch_size: int, *, drop_remainder: bool = False, batch_fn: Any = None) -> Any: ...
        def apply(self, transformations: Transformation | Sequence[Transformation]) -> 'MapDataset[Any]': ...


def _rebuilt(dataset: MapDataset, parents: Sequence[Source]) -> Computed:
    """Return the node of a copy of a dataset of a subclass, whose parents are others."""
    rebuilt = copy.copy(dataset)
    rebuilt._parents = tuple(MapDataset(parent) for parent in parents)
    length = None if type(dataset).__len__ is MapDataset.__len__ else rebuilt.__len__
    node = rebuilt._node = Computed(parents, rebuilt, length, _rebuilt)
    return node

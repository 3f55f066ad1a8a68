"""MapDataset: its operations, which the sync and the async API share, and its async API."""

import abc
import builtins
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, SupportsIndex, TypeVar, cast, overload

import numpy as np
from numpy.typing import ArrayLike

from granular._support.indexing import Ints, check_index, check_integer, check_seed, integers_of
from granular._support.other_names import Awaited, answering
from granular._support.text import counted
from granular._support.typing import Element_co
from granular.aio.pipeline import iterator
from granular.aio.pipeline.describe import format_pipeline
from granular.aio.pipeline.execution.failures import OnError, without_failures
from granular.aio.pipeline.filters import Strategy, percent_range, repetitions_of
from granular.aio.pipeline.iter_dataset import IterDataset
from granular.aio.pipeline.nodes import combinations, elements, selection
from granular.aio.pipeline.nodes import indices as nodes
from granular.aio.pipeline.nodes.batches import Batch
from granular.aio.pipeline.nodes.blocks import BlockBuffer
from granular.aio.pipeline.nodes.source import AnySource, Source
from granular.aio.pipeline.nodes.stacking import warn_of_no_batch
from granular.aio.pipeline.orders import MAX_SEED, Index, Order
from granular.aio.pipeline.origins import Origins, Traceable, traced
from granular.aio.pipeline.planned_operations import PlannedOperations
from granular.aio.pipeline.shards import RANK_ARGUMENTS, ShardOptions
from granular.aio.pipeline.streams.read import Read
from granular.aio.pipeline.transforms import (
    BATCH_ARGUMENTS,
    EPOCH_ARGUMENTS,
    FUNCTION_ARGUMENTS,
    MAP_ARGUMENTS,
    MIX_ARGUMENTS,
    OF_CHAINS,
    WINDOW_ARGUMENTS,
    Chain,
    FlatMapFunction,
    IndexedFunction,
    MapFunction,
    Predicate,
    RandomFunction,
    ReadOptions,
    Transformation,
    range_between,
)
from granular.aio.runtime.threads import offload
from granular.errors import InvalidArgumentError

T = TypeVar('T')

_datasets: 'weakref.WeakValueDictionary[int, MapOperations[Any]]' = weakref.WeakValueDictionary()  # by their sources


class MapOperations(Traceable, Chain, abc.ABC, Generic[Element_co]):
    """Operations of a MapDataset. Each returns a new dataset; nothing is read until elements are requested.

    Those that change the type of the elements return Any here: the MapDatasets of both APIs declare which of their own
    they return.
    """

    _node: Source
    _answers: ClassVar[Mapping[str, str]] = {
        **OF_CHAINS,
        **dict.fromkeys((name for name in vars(IterDataset) if name[0] != '_'), 'call to_iter_dataset() before it'),
        'limit': 'slice it, as in dataset[:n]',
        'take': 'slice it, as in dataset[:n]',
        'skip': 'slice it, as in dataset[n:]',
        **dict.fromkeys(
            ('train_test_split', 'random_split'),
            'call shuffle(seed=0) after taking percent(to_percent=0.8) and percent(from_percent=0.8)',
        ),
        'with_epoch': 'slice it behind repeat(), as in dataset.repeat()[:n]',
        **dict.fromkeys(('features', 'column_names'), 'the spec of the reader has the keys and types'),
        'split': 'take percent(to_percent=0.8) and percent(from_percent=0.8)',
        'enumerate': 'call map_with_index',
        'shard': 'pass to_iter_dataset(shard_options=granular.ShardOptions(0, 8)), or slice it, as in dataset[0::8]',
    }

    def __init__(self, parents: Any = ()) -> None:
        if not isinstance(parents, Source):
            raise InvalidArgumentError(f'use {type(self).__name__}.source(...); subclasses are those of the sync API')
        self._node = parents
        _datasets.setdefault(id(parents), self)

    @classmethod
    @abc.abstractmethod
    def _of(cls, node: Source) -> Self:
        """Return the MapDataset of a source; not of a subclass, whose constructor has other arguments."""

    @property
    def node(self) -> Source:
        """The source of the dataset."""
        return self._node

    @property
    def parents(self) -> list[Self]:
        """The datasets that this one is computed from; none if it is a source."""
        nodes_above = [node.parents[0] if isinstance(node, BlockBuffer) else node for node in self._node.parents]
        return [] if isinstance(self._node, nodes.Wrapped) else [self._known(node) for node in nodes_above]

    def _known(self, node: Source) -> Self:
        """Return the dataset of a source: the same one as before, if it still exists."""
        dataset = _datasets.get(id(node))
        same_api = isinstance(dataset, type(self)) or isinstance(self, type(dataset))
        return cast(Self, dataset) if dataset is not None and same_api else self._of(node)

    # --- constructors

    @classmethod
    def source(cls, source: Any) -> Any:
        """Create a dataset over a reader, a list, an array, or any other source."""
        return cls._of(nodes.Wrapped(source))

    @classmethod
    def range(cls, start: int, stop: int | None = None, step: int = 1) -> Any:
        """Create a dataset of integers, those of ``range(start, stop, step)``."""
        bounds = (start,) if stop is None else (start, stop, step)
        return cls._of(nodes.Wrapped(range_between(*bounds)))

    @classmethod
    @answering(**MIX_ARGUMENTS)
    def mix(cls, datasets: Sequence['MapOperations'], weights: Sequence[float] | None = None) -> Any:
        """Mix datasets evenly, in proportion to their weights, until the first of them is exhausted.

        ::

            MapDataset.mix([web.seed(1).shuffle().repeat(), books.seed(2).shuffle().repeat()], weights=[0.9, 0.1])

        Args:
          datasets: datasets to mix, each shuffled or repeated first where needed.
          weights: numbers from 0 on, with any sum; equal by default. As in Grain, they are rounded down to integers,
            the smallest of which is 100: the mix may end a few elements early, such as after 9 of 3 and 7 with
            [0.3, 0.7]. A dataset of weight 0 is not read.
        """
        return cls._of(combinations.Proportional(_nodes(datasets), weights))

    @classmethod
    def select_from_datasets(cls, datasets: Sequence['MapOperations'], selection_map: Any) -> Any:
        """Mix datasets by a map that has a length and returns ``(number of the dataset, index in it)`` for an index."""
        if not (hasattr(selection_map, '__getitem__') and hasattr(selection_map, '__len__')):
            raise InvalidArgumentError(
                f'selection_map: expected an object with a length and indices, got {selection_map!r:.100}'
            )
        return cls._of(combinations.Selection(_nodes(datasets), selection_map.__getitem__, len(selection_map)))

    @classmethod
    @answering()
    def concatenate(cls, datasets: Sequence['MapOperations']) -> Any:
        """Concatenate datasets; each epoch of the result contains one epoch of each of them."""
        return cls._of(combinations.Concatenate(_nodes(datasets)))

    @classmethod
    @answering()
    def zip(cls, datasets: Sequence['MapOperations']) -> Any:
        """Combine datasets of equal length: each element is a tuple of their elements at the same index."""
        return cls._of(combinations.Zip(_nodes(datasets)))

    # --- order and selection

    def seed(self, seed: int | Sequence[int]) -> Self:
        """Set the seed of all later operations that are given none: each derives a seed of its own from it.

        Args:
          seed: integer >= 0 of any size, or a sequence of such integers.
        """
        return self._of(nodes.Seeded(self._node, check_seed(seed)))

    @answering(
        buffer_size='nothing: all elements are shuffled; window_shuffle(n, seed) shuffles windows',
        reshuffle_each_iteration='nothing, and call repeat() after it: each epoch has an order of its own',
    )
    def shuffle(self, seed: int | None = None, order: Order | None = None) -> Self:
        """Shuffle all elements, in a different order every epoch.

        Args:
          seed: integer from 0 to 2**32 - 1; by default derived from :meth:`seed`. In ``shuffle(1000)``, 1000
            is the seed, not the size of a buffer: all elements are shuffled.
          order: an order of :mod:`granular.shuffle`; by default ``Index()``, the order of Google Grain. ``Blocks()``
            reads many records with one request.
        """
        seed = check_integer('seed', nodes.seed_of(seed, self._node, 'shuffle'), 0, MAX_SEED)
        return self._of(nodes.Shuffle(self._node, order or Index(), seed))

    @answering(**WINDOW_ARGUMENTS)
    def window_shuffle(self, window_size: int, seed: int | None = None) -> Self:
        """Shuffle the elements within each window of consecutive elements.

        Args:
          window_size: elements per window; the last window of an epoch may be smaller.
          seed: as for :meth:`shuffle`. Each window has an order of its own.
        """
        seed = check_integer('seed', nodes.seed_of(seed, self._node, 'window_shuffle'), 0, MAX_SEED)
        return self._of(nodes.WindowShuffle(self._node, window_size, seed))

    def slice(self, sl: builtins.slice | Sequence[int] | Ints) -> Self:
        """Select a part of the dataset, by a slice or by indices of elements."""
        return self._of(nodes.Slice(self._node, sl))

    def subset(self, indices: Sequence[int] | Ints) -> Self:
        """Select elements by indices, in that order. They may repeat; negative ones count from the end."""
        return self._of(nodes.Slice(self._node, indices, 'subset'))

    @answering()
    def percent(self, from_percent: float | None = None, to_percent: float | None = None) -> Self:
        """Select a contiguous part of the dataset. Adjacent ranges neither share nor omit elements.

        ::

            train, test = dataset.percent(to_percent=0.9), dataset.percent(from_percent=0.9)

        Args:
          from_percent: start of the part, from 0 to 1; None for 0.
          to_percent: end of the part, from 0 to 1; None for 1. 0.29 of 100 elements are 29; 0 gives an empty part.
        """
        nodes.check_finite(self._node, 'percent', 'call percent() before repeat()')
        return self.slice(builtins.slice(*percent_range(len(self), from_percent, to_percent)))

    @answering(**EPOCH_ARGUMENTS)
    def repeat(
        self, num_epochs: int | None = None, *, min_size: int | None = None, reseed_each_epoch: bool = True
    ) -> Self:
        """Repeat the dataset for several epochs, or forever if both ``num_epochs`` and ``min_size`` are None.

        Args:
          num_epochs: number of epochs, 1 or more.
          min_size: minimum number of elements, instead of ``num_epochs``; rounded up to whole epochs.
          reseed_each_epoch: True if random operations differ from epoch to epoch. A selection behind ``shuffle`` then
            has other elements in each epoch, as in Google Grain, and a warning is logged: slice before shuffle.
        """
        if min_size is not None:
            num_epochs = repetitions_of(len(self), num_epochs, min_size)
        if num_epochs is None and not len(self._node):
            shown = self._node.describe()
            raise InvalidArgumentError(f'repeat: the dataset is empty, and so would be its endless repetition: {shown}')
        if reseed_each_epoch and num_epochs != 1:
            selection.warn_of_other_elements(self._node)
        return self._of(nodes.Repeat(self._node, num_epochs, reseed_each_epoch))

    # --- elements

    @answering(**MAP_ARGUMENTS)
    def map(self, transform: MapFunction[Any, Any]) -> Any:
        """Apply a function to each element, in threads. None, which ``filter`` leaves, is passed through."""
        return self._of(elements.Map(self._node, transform))

    @answering(**FUNCTION_ARGUMENTS)
    def map_with_index(self, transform: IndexedFunction[Any, Any]) -> Any:
        """Apply a function to each index and element: ``transform(index, element)``. Later epochs of ``repeat`` have
        indices from the length on.
        """
        return self._of(elements.MapWithIndex(self._node, transform))

    @answering(**FUNCTION_ARGUMENTS)
    def random_map(self, transform: RandomFunction[Any, Any], *, seed: int | Sequence[int] | None = None) -> Any:
        """Apply a function to each element and a random generator: ``transform(element, rng)``.

        The random numbers depend only on seed and index. An index from the length on belongs to a later epoch, and has
        other numbers; a map-style ``DataLoader`` of torch asks for the same indices in each of its epochs, and so gets
        the same numbers: pass it ``repeat()``, or an ``IterableDataset`` with ``set_epoch``.
        """
        return self._of(elements.RandomMap(self._node, transform, nodes.seed_of(seed, self._node, 'random_map')))

    @answering(**FUNCTION_ARGUMENTS)
    def flat_map(self, transform: FlatMapFunction[Any, Any], *, max_fan_out: int | None = None) -> Any:
        """Replace each element by ``max_fan_out`` elements: those that a function returns for it, and then None.

        ::

            words = MapDataset.source(['a b', 'c']).flat_map(str.split, max_fan_out=3)
            # 6 elements: 'a', 'b', None, 'c', None, None

        Iteration skips None, as after ``filter``. The function is called once per element and fetch.

        Args:
          transform: function from an element to at most ``max_fan_out`` elements.
          max_fan_out: the fixed number of elements; by default the attribute of that name of ``transform``.
        """
        if max_fan_out is None:
            max_fan_out = getattr(transform, 'max_fan_out', None)
        if max_fan_out is None:
            raise InvalidArgumentError(
                'flat_map of a MapDataset requires max_fan_out: pass it, or call to_iter_dataset() first'
            )
        return self._of(elements.FlatMap(self._node, transform, max_fan_out))

    @answering(**FUNCTION_ARGUMENTS)
    def filter(self, transform: Predicate[Any]) -> Self:
        """Replace each element for which a function returns False by None. Iteration skips these elements."""
        return self._of(elements.Filter(self._node, transform))

    def exclude(self, indices: Sequence[int] | Ints) -> Self:
        """Replace the elements at some indices by None, in all epochs. They are not read, and iteration skips them.

        The order of the other elements stays: call it of the source, before ``shuffle``. A training that has begun
        continues with :class:`granular.changes.Excluded`.

        Args:
          indices: indices of elements, negative ones from the end.
        """
        node = elements.Excluded(self._node, indices)
        return self._of(node if node.leaves_out else self._node)

    def select(self, fields: Sequence[str]) -> Self:
        """Keep some fields of each element, a dict. A reader reads only these fields."""
        if isinstance(fields, Mapping) or not isinstance(fields, Iterable):
            raise InvalidArgumentError(f'fields: expected a sequence of keys, got {fields!r:.100}')
        fields = [fields] if isinstance(fields, str) else list(fields)
        return self._of(elements.selected(self._node, fields))

    @answering(**BATCH_ARGUMENTS)
    def batch(self, batch_size: int, *, drop_remainder: bool = False, batch_fn: Any = None) -> Any:
        """Combine consecutive elements to batches, stacking each leaf (of dicts, tuples, lists) along a new first axis.

        Args:
          batch_size: elements per batch.
          drop_remainder: True to drop a smaller last batch.
          batch_fn: function from a list of elements to a batch, instead of stacking.

        Raises:
          InvalidArgumentError: if the dataset was filtered: call ``to_iter_dataset()`` before ``batch()``.
        """
        batches = Batch(self._node, batch_size, drop_remainder, batch_fn)
        if batches.source_length and not len(batches):
            warn_of_no_batch(batches.describe(), counted(batches.source_length, 'element'))
        return self._of(batches)

    @answering(
        batch_size='nothing, and call batch(64) of the stream',
        shuffle='nothing, and call shuffle(seed=0) before to_iter_dataset()',
        num_workers='nothing: functions run in threads; mp_prefetch(8) of the stream takes processes',
        prefetch_factor='read_options=granular.ReadOptions(prefetch_buffer_size=...)',
        shard='shard_options',
        pin_memory="nothing, and the stream to granular.integrations.torch.Batches(stream, device='cuda')",
        **RANK_ARGUMENTS,
    )
    def to_iter_dataset(
        self,
        read_options: ReadOptions | None = None,
        *,
        allow_nones: bool = False,
        shard_options: ShardOptions | None = None,
        on_error: OnError = 'raise',
    ) -> IterDataset[Element_co]:
        """Convert to an IterDataset, a stream of the elements with read-ahead.

        Args:
          read_options: limits of the read-ahead.
          allow_nones: True to return None for filtered elements instead of skipping them.
          shard_options: the shard of this process, which gets every ``shard_count``-th element from ``shard_index`` on;
            of a mix, it gets one of each ``shard_count`` elements, so that every process has the weights of the mix.
            The state of such a stream fits any number of shards.
          on_error: policy for an element that fails: 'raise', 'skip', or a function of index and error that returns a
            replacement, returns None to skip the element, or raises. Store errors are always raised, and so are those
            of later operations, which get replacements as any other element.
        """
        read = Read(self._node, read_options, allow_nones, shard_options, on_error)
        read.awaited = isinstance(self, Awaited)
        return IterDataset(read)

    # --- length and description

    def __len__(self) -> int:
        return len(self._node)

    def __str__(self) -> str:
        return format_pipeline(self._node)

    def __repr__(self) -> str:
        return f'<{type(self).__name__} of {counted(len(self), "element")}: {self._node.describe()}>'


class MapDataset(Awaited, PlannedOperations, MapOperations[Element_co]):
    """A lazy sequence of elements, each a pure function of its index, fetched many at a time.

    Operations return a new dataset and read nothing::

        dataset = MapDataset.source(reader).seed(0).shuffle().map(decode).batch(64)
        first, second = await dataset.fetch([0, 1])
        async for batch in dataset:
            ...

    Index ``len + i`` is element ``i`` of the next epoch; negative indices belong to earlier epochs. An element removed
    by ``filter`` is None here; iteration skips it.
    """

    @classmethod
    def _of(cls, node: Source) -> Self:
        return cast(Self, MapDataset(node))

    async def fetch(self, indices: ArrayLike) -> list[Element_co]:
        """Return the elements at the given indices, in the order of the indices, in one fan-out."""
        return without_failures(await self._node.fetch(integers_of(indices, 'fetch')))

    async def get(self, index: SupportsIndex) -> Element_co:
        """Return the element at an index."""
        fetched: list[Element_co] = await self._node.fetch(np.array([check_index(index, 'MapDataset')]))
        return without_failures(fetched)[0]

    async def indices(self, steps: ArrayLike) -> Origins:
        return await offload(traced, self._node, steps)

    @answering()
    async def filter_classes(
        self, field: str = 'label', valid_classes: Any = None, invalid_classes: Any = None
    ) -> Self:
        """Keep the elements of some classes, or of all other classes.

        Reads only the labels, once. If the order changes from epoch to epoch, the first epoch decides which indices are
        kept: shuffle after filtering.

        Args:
          field: key of the label; an element may have one label or a sequence of labels.
          valid_classes: classes to keep: a list, range or array of integers or strings. If no element has one of them,
            the dataset is empty, as for ``subset([])``.
          invalid_classes: classes to remove, instead of ``valid_classes``.
        """
        return self._of(await selection.filtered(self._node, field, valid_classes, invalid_classes))

    @answering()
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
        return self._of(await selection.oversampled(self._node, field, strategy, unlabeled))

    def __aiter__(self) -> iterator.DatasetIterator[Element_co]:
        return aiter(self.to_iter_dataset())

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


def _nodes(datasets: Sequence[MapOperations]) -> list[Source]:
    if isinstance(datasets, Mapping):
        raise InvalidArgumentError(
            f'expected a list of MapDatasets, got names {list(datasets)!r:.100}: IterDataset.mix takes them'
        )
    if isinstance(datasets, MapOperations) or not isinstance(datasets, Iterable):
        raise InvalidArgumentError(f'expected a list of MapDatasets, got {datasets!r:.100}')
    for i, dataset in enumerate(datasets):
        if not isinstance(dataset, MapOperations):
            stream = isinstance(dataset, IterDataset)
            raise InvalidArgumentError(
                f'dataset {i}: expected a MapDataset, got {dataset!r:.100}: '
                f'{"IterDataset has mix and zip of streams" if stream else "pass MapDataset.source(...) of it"}'
            )
    return [dataset._node for dataset in datasets]

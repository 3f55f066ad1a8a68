"""The operations of a MapDataset, of which both faces have the same."""

import builtins
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from granular.aio.execution.failures import OnError
from granular.aio.pipeline.describe import rendered
from granular.aio.pipeline.iter_dataset import IterOperations
from granular.aio.pipeline.nodes import base as nodes
from granular.aio.pipeline.nodes import elements
from granular.aio.pipeline.nodes.source import RandomAccessDataSource, Source
from granular.aio.pipeline.streams.streams import Read
from granular.aio.pipeline.transforms import (
    FilterTransform,
    MapTransform,
    MapWithIndexTransform,
    RandomMapTransform,
    ReadOptions,
    ShardOptions,
    Transformation,
    apply,
)
from granular.errors import InvalidArgumentError
from granular.filters import percent_range, repetitions_of
from granular.indexing import Ints
from granular.shuffle import Index, Order


class MapOperations:
    """What a MapDataset can be made into. Each operation gives a new one; nothing is read before it is asked for."""

    _node: Source
    _stream: type[IterOperations]

    def __init__(self, node: Source) -> None:
        self._node = node

    def _derive(self, node: Source) -> Self:
        return type(self)(node)

    @property
    def node(self) -> Source:
        """The source that it is made of."""
        return self._node

    # --- beginnings

    @classmethod
    def source(cls, source: RandomAccessDataSource | Any) -> Self:
        """A dataset over a reader, a list, an array, or anything else that can be a source."""
        return cls(nodes.Wrapped(source))

    @classmethod
    def range(cls, start: int, stop: int | None = None, step: int = 1) -> Self:
        """A dataset of whole numbers, as ``range`` has them."""
        return cls(nodes.Wrapped(range(start) if stop is None else range(start, stop, step)))

    @classmethod
    def mix(cls, datasets: Sequence['MapOperations'], weights: Sequence[float] | None = None) -> Self:
        """Datasets mixed evenly, in proportion to their weights, until one of them is used up.

        Args:
          datasets: what to mix, each shuffled or repeated before if need be.
          weights: above 0, of any sum; equal by default.
        """
        return cls(nodes.Proportional(_nodes(datasets), weights))

    @classmethod
    def select_from_datasets(cls, datasets: Sequence['MapOperations'], selection_map: Any) -> Self:
        """Datasets mixed by a map with a length, which gives ``(which dataset, index in it)`` for an index."""
        return cls(nodes.Selection(_nodes(datasets), selection_map.__getitem__, len(selection_map)))

    @classmethod
    def concatenate(cls, datasets: Sequence['MapOperations']) -> Self:
        """Datasets one after the other; each epoch of it holds an epoch of each."""
        return cls(nodes.Concatenate(_nodes(datasets)))

    @classmethod
    def zip(cls, datasets: Sequence['MapOperations']) -> Self:
        """Tuples of what stands at the same index of datasets of one length."""
        return cls(nodes.Zip(_nodes(datasets)))

    # --- orders

    def seed(self, seed: int) -> Self:
        """The seed of those operations further on that are given none: each derives one of its own from it."""
        _check_seed(seed)
        return self._derive(nodes.Seeded(self._node, seed))

    def shuffle(self, seed: int | None = None, order: Order | None = None) -> Self:
        """All elements in another order, and in yet another one every epoch.

        Args:
          seed: from 0 to 2**32 - 1; by default that which :meth:`seed` gave.
          order: one of :mod:`granular.shuffle`; by default ``Index()``, the order of Google Grain. ``Blocks()`` reads
            many records with one request.
        """
        return self._derive(nodes.Shuffle(self._node, order or Index(), self._seed_of(seed, 'shuffle')))

    def slice(self, sl: builtins.slice | Sequence[int] | Ints) -> Self:
        """A part: by a slice, or by the indices of the elements themselves."""
        return self._derive(nodes.Slice(self._node, sl))

    def subset(self, indices: Sequence[int] | Ints) -> Self:
        """The elements at some indices, in the order given, which may repeat; negative ones from the end."""
        return self.slice(indices)

    def percent(self, from_percent: float | None = None, to_percent: float | None = None) -> Self:
        """A part, of which ranges that meet share no element and leave out none.

        Args:
          from_percent: from 0 to 1, where it begins; None for 0.
          to_percent: from 0 to 1, where it ends; None for 1. 0.29 of 100 elements are 29, 0 is none.
        """
        if len(self) >= nodes.ENDLESS:
            raise InvalidArgumentError('what is repeated for ever has no percentages: call percent() before repeat()')
        return self.slice(builtins.slice(*percent_range(len(self), from_percent, to_percent)))

    def repeat(
        self, num_epochs: int | None = None, *, min_size: int | None = None, reseed_each_epoch: bool = True
    ) -> Self:
        """Several epochs as one; None for ever.

        Args:
          num_epochs: 1 or more.
          min_size: in place of it, elements that there are to be, or somewhat more, as epochs are whole.
          reseed_each_epoch: whether what is random differs from epoch to epoch.
        """
        if min_size is not None:
            num_epochs = repetitions_of(len(self), num_epochs, min_size)
        return self._derive(nodes.Repeat(self._node, num_epochs, reseed_each_epoch))

    # --- elements

    def map(self, transform: MapTransform | Callable[[Any], Any]) -> Self:
        """A function of each element, called in threads. None, which a filter leaves behind, is passed on."""
        return self._derive(elements.Map(self._node, transform))

    def map_with_index(self, transform: MapWithIndexTransform | Callable[[int, Any], Any]) -> Self:
        """A function of index and element."""
        return self._derive(elements.MapWithIndex(self._node, transform))

    def random_map(
        self, transform: RandomMapTransform | Callable[[Any, np.random.Generator], Any], *, seed: int | None = None
    ) -> Self:
        """A function of element and random numbers, which are a function of seed and index."""
        return self._derive(elements.RandomMap(self._node, transform, self._seed_of(seed, 'random_map')))

    def filter(self, transform: FilterTransform | Callable[[Any], bool]) -> Self:
        """None in the place of each element for which a function is false. Iteration leaves them out."""
        return self._derive(elements.Filter(self._node, transform))

    def select(self, fields: Sequence[str]) -> Self:
        """Some fields of each element, a dict. Over a reader, what is not chosen is not read."""
        fields = [fields] if isinstance(fields, str) else list(fields)
        return self._derive(elements.selected(self._node, fields))

    def batch(
        self,
        batch_size: int,
        *,
        drop_remainder: bool = False,
        batch_fn: Callable[[Sequence[Any]], Any] | None = None,
    ) -> Self:
        """Batches of elements, each leaf of which (in dicts, tuples, lists) is stacked along a new first dimension.

        Args:
          batch_size: elements in a batch.
          drop_remainder: whether to leave out a last batch that is smaller.
          batch_fn: makes a batch of a list of elements.
        """
        return self._derive(elements.Batch(self._node, batch_size, drop_remainder, batch_fn))

    def apply(self, transformations: Transformation | Sequence[Transformation]) -> Self:
        """Transformations one after the other."""
        applied: Self = apply(self, transformations)
        return applied

    def pipe(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """``func(self, *args, **kwargs)``, for functions of your own in a chain of operations."""
        return func(self, *args, **kwargs)

    def to_iter_dataset(
        self,
        read_options: ReadOptions | None = None,
        *,
        allow_nones: bool = False,
        shard_options: ShardOptions | None = None,
        on_error: OnError = 'raise',
    ) -> Any:
        """A stream of the elements, read ahead.

        Args:
          read_options: how far.
          allow_nones: whether what a filter left behind is passed on as None.
          shard_options: which of several processes this is: it gets every ``shard_count``-th element from
            ``shard_index`` on. The state of such a stream fits any number of shards.
          on_error: what becomes of an element that cannot be made: 'raise', 'skip', or a function of index and error,
            which gives an element in its place, or None to skip it, or raises. What a store fails with is raised.
        """
        read = Read(self._node, read_options or ReadOptions(), allow_nones, shard_options, on_error)
        return self._stream(read)

    # --- what it is

    def __len__(self) -> int:
        return len(self._node)

    def __str__(self) -> str:
        return rendered(self._node)

    def __repr__(self) -> str:
        return f'<{type(self).__name__} of {len(self)} elements: {self._node.describe()}>'

    def _seed_of(self, seed: int | None, what: str) -> int:
        if seed is None:
            seed = nodes.default_seed([self._node])
        if seed is None:
            raise InvalidArgumentError(f'{what} needs a seed: pass seed=, or call seed() before it')
        _check_seed(seed)
        return int(seed)


def _check_seed(seed: int) -> None:
    if not isinstance(seed, int | np.integer) or not 0 <= seed < 1 << 32:
        raise InvalidArgumentError(f'the seed is {seed!r}: want an integer from 0 to 2**32 - 1')


def _nodes(datasets: Sequence[MapOperations]) -> list[Source]:
    return [dataset._node for dataset in datasets]

"""IterDataset, the description of a stream, which is iterated by ``for`` or ``async for``."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar, cast, overload

from granular._support.indexing import check_integer, check_seed
from granular._support.other_names import Unindexed, answering
from granular._support.typing import Element_co
from granular.aio.pipeline import blocking_iterator, iterator
from granular.aio.pipeline.describe import format_pipeline
from granular.aio.pipeline.lines import Line
from granular.aio.pipeline.nodes import indices as nodes
from granular.aio.pipeline.nodes.adapters import convert
from granular.aio.pipeline.nodes.combinations import proportions
from granular.aio.pipeline.nodes.source import Node
from granular.aio.pipeline.orders import MAX_SEED
from granular.aio.pipeline.shards import ShardOptions, warn_of_no_shard
from granular.aio.pipeline.streams.batches import BatchOf, Rebatching
from granular.aio.pipeline.streams.element_functions import ElementFunction, FlatMapping
from granular.aio.pipeline.streams.interleaving import Interleaved, InterleavedSource, InterleaveSettings
from granular.aio.pipeline.streams.mixing import Mixed, NamedMix, Zipped
from granular.aio.pipeline.streams.packing import Packed
from granular.aio.pipeline.streams.packing_options import Recipe, Strategy
from granular.aio.pipeline.streams.prefetching import Prefetched
from granular.aio.pipeline.streams.repeating import Caching, Limited, Repeated
from granular.aio.pipeline.streams.stream import SeededStream, Staged, Stream
from granular.aio.pipeline.streams.user_iterators import Iterated
from granular.aio.pipeline.streams.windows import WindowShuffled
from granular.aio.pipeline.transforms import (
    BATCH_ARGUMENTS,
    COUNT_ARGUMENTS,
    EPOCH_ARGUMENTS,
    FUNCTION_ARGUMENTS,
    MAP_ARGUMENTS,
    MIX_ARGUMENTS,
    OF_CHAINS,
    OF_DATASETS,
    PREFETCH_ARGUMENTS,
    WINDOW_ARGUMENTS,
    Chain,
    DatasetOptions,
    FlatMapFunction,
    IndexedFunction,
    MapFunction,
    MultiprocessingOptions,
    Predicate,
    RandomFunction,
    Transformation,
)
from granular.aio.runtime.immediate import running_loop
from granular.aio.runtime.pools import CORES
from granular.aio.runtime.user_functions import method_of, name_of
from granular.errors import InvalidArgumentError

T = TypeVar('T')


class IterDataset(Unindexed, Chain, Generic[Element_co]):
    """A stream of elements, for ``for`` or ``async for``; create one with ``MapDataset.to_iter_dataset``.

    Operations return a new stream; nothing is read before iteration::

        stream = MapDataset.source(reader).shuffle(seed=0).to_iter_dataset().filter(is_valid).batch(64)
        for batch in stream:  # or: async for batch in stream
            train_step(batch)

    A subclass makes elements of its own: its ``__iter__`` returns an iterator with ``__next__``, ``get_state`` and
    ``set_state``, such as a subclass of ``granular.grain.DatasetIterator``, over ``iter(self._parent)``.

    Args:
      parents: for subclasses: the stream, or the streams, that elements are made of.
    """

    _answers: ClassVar[Mapping[str, str]] = {
        **OF_CHAINS,
        **OF_DATASETS,
        'shuffle': 'call shuffle before to_iter_dataset(), or window_shuffle',
        'take': 'call limit',
        'skip': 'slice the MapDataset, as in dataset[n:], before to_iter_dataset()',
        'shard': 'pass to_iter_dataset(shard_options=granular.ShardOptions(0, 8))',
        'with_epoch': 'slice the MapDataset behind repeat(), as in dataset.repeat()[:n]',
        'indices': 'call it of an iterator, as in iter(stream).indices(3)',
        **dict.fromkeys(('batch_by_size', 'shapes'), 'call batch_by_size before to_iter_dataset()'),
        'to_iter_dataset': 'it is a stream; shard_options belong to the MapDatasets that it reads',
    }

    def __init__(self, parents: 'Stream | IterDataset | Sequence[IterDataset]' = ()) -> None:
        if isinstance(parents, Stream):
            self._stream: Stream = parents
            return
        if type(self).__iter__ is IterDataset.__iter__:
            raise InvalidArgumentError('use MapDataset.to_iter_dataset(), or a subclass that overrides __iter__')
        self._parents = (parents,) if isinstance(parents, IterDataset) else tuple(parents)
        self._stream = Iterated(self, [parent._stream for parent in self._parents], _rebuilt)

    @property
    def _parent(self) -> 'IterDataset':
        return self._parents[0]

    @classmethod
    def _of(cls, stream: Stream) -> Self:
        """Return the IterDataset of a stream; not of a subclass, whose constructor has other arguments."""
        return cast(Self, IterDataset(stream))

    @classmethod
    @answering(**MIX_ARGUMENTS)
    def mix(
        cls, datasets: Sequence[Any] | Mapping[str, Any], weights: Sequence[float] | Mapping[str, float] | None = None
    ) -> 'IterDataset[Any]':
        """Mix streams evenly, in proportion to their weights, until one of them ends.

        ::

            IterDataset.mix({'web': web, 'books': books}, {'web': 0.9, 'books': 0.1})

        The state of a mix of named streams fits other streams and weights: streams continue by name, new ones begin.

        Args:
          datasets: streams or MapDatasets, or a dict of these by name.
          weights: numbers from 0 on, with any sum, or a dict of these by name; equal by default. A stream of weight 0
            is not read, and keeps its place in states.
        """
        if isinstance(datasets, Mapping):
            if not all(isinstance(name, str) for name in datasets):  # as JSON has them, of which states are made
                raise InvalidArgumentError(f'expected text as names of datasets, got {list(datasets)!r:.100}')
            streams = dict(zip(names := list(datasets), _streams(list(datasets.values())), strict=True))
            if isinstance(weights, Mapping):
                if weights.keys() != datasets.keys():
                    raise InvalidArgumentError(f'expected weights of {names}, got weights of {list(weights)}')
                weights = [weights[name] for name in names]
            return cls._of(NamedMix(streams, proportions(len(names), weights)))
        if isinstance(weights, Mapping):
            raise InvalidArgumentError('weights with names require datasets with names: pass a dict of datasets')
        unnamed = _streams(datasets)
        return cls._of(Mixed(unnamed, proportions(len(unnamed), weights)))

    @classmethod
    @answering()
    def interleave(
        cls,
        datasets: Any,
        cycle_length: int,
        *,
        num_make_iter_threads: int = 1,
        make_iter_buffer_size: int = 1,
        iter_buffer_size: int = 1,
    ) -> 'IterDataset[Any]':
        """Take elements from several streams in turn; the next stream replaces one that ends.

        ::

            files = MapDataset.range(8).shuffle(seed=0).map(lambda n: MapDataset.range(10 * n).to_iter_dataset())
            stream = IterDataset.interleave(files, cycle_length=4)  # opens one after the other

        Args:
          datasets: a list of streams or MapDatasets; or a MapDataset, or another object with a length and indices, of
            streams or MapDatasets: each is made shortly before its turn, and None is skipped.
          cycle_length: number of streams to read concurrently.
          num_make_iter_threads: threads that make datasets.
          make_iter_buffer_size: number of datasets that are made, and begin to read, before their turn.
          iter_buffer_size: number of elements of each stream to compute ahead, if it does not do so itself.
        """
        settings = InterleaveSettings(
            check_integer('cycle_length', cycle_length, 1),
            check_integer('num_make_iter_threads', num_make_iter_threads, 1),
            check_integer('make_iter_buffer_size', make_iter_buffer_size, 0),
            check_integer('iter_buffer_size', iter_buffer_size, 0),
        )
        if isinstance(datasets, list | tuple):
            stage = Interleaved(_streams(datasets), settings)
        else:
            source = convert(datasets)  # a MapDataset has epochs of its own
            stage = InterleavedSource(source if isinstance(source, Node) else nodes.Wrapped(source), settings, _stream)
        if not len(stage):
            raise InvalidArgumentError('expected one dataset or more, got none')
        return cls._of(stage)

    @classmethod
    @answering()
    def zip(cls, datasets: Sequence[Any], *, strict: bool = True) -> 'IterDataset[tuple[Any, ...]]':
        """Combine streams: each element is a tuple of their next elements.

        ::

            pairs = IterDataset.zip([dataset, dataset.map(decode)])

        Args:
          datasets: streams or MapDatasets.
          strict: True to raise a ``DatapointError`` if one stream ends before another; False to end with the first.
        """
        return IterDataset(Zipped(_streams(datasets), strict))

    def seed(self, seed: int | Sequence[int]) -> Self:
        """Set the seed of all later operations that are given none, as ``MapDataset.seed``."""
        return self._of(SeededStream(self._stream, check_seed(seed)))

    @answering(**MAP_ARGUMENTS)
    def map(self, transform: MapFunction[Element_co, T]) -> 'IterDataset[T]':
        """Apply a function to each element, in threads."""
        return IterDataset(ElementFunction(self._stream, 'map', transform))

    @answering(**FUNCTION_ARGUMENTS)
    def map_with_index(self, transform: IndexedFunction[Element_co, T]) -> 'IterDataset[T]':
        """Apply a function to each element and its number in this stream: ``transform(number, element)``."""
        return IterDataset(ElementFunction(self._stream, 'map_with_index', transform))

    @answering(**FUNCTION_ARGUMENTS)
    def random_map(
        self, transform: RandomFunction[Element_co, T], *, seed: int | Sequence[int] | None = None
    ) -> 'IterDataset[T]':
        """Apply a function to each element and a random generator.

        The random numbers depend only on seed and element number, and on the epoch where ``set_epoch`` of an
        ``IterableDataset`` tells one. Behind ``batch``, ``filter`` and such, each host numbers its own elements, so
        that all draw the same numbers; ``random_map`` of the MapDataset, also of its batches, draws others on each.
        """
        seed = nodes.seed_of(seed, self._stream, 'random_map')
        return IterDataset(ElementFunction(self._stream, 'random_map', transform, seed))

    @answering(**FUNCTION_ARGUMENTS)
    def filter(self, transform: Predicate[Element_co]) -> Self:
        """Keep the elements for which a function returns True."""
        return self._of(ElementFunction(self._stream, 'filter', transform))

    @answering(**FUNCTION_ARGUMENTS)
    def flat_map(self, transform: FlatMapFunction[Element_co, T]) -> 'IterDataset[T]':
        """Replace each element by the elements that a function returns for it, possibly none."""
        method = method_of(transform, 'flat_map')
        return IterDataset(Staged(self._stream, Line('flat_map', function=name_of(method)), FlatMapping, method))

    @overload
    def batch(
        self, batch_size: int, *, drop_remainder: bool = False, batch_fn: Callable[[Sequence[Element_co]], T]
    ) -> 'IterDataset[T]': ...
    @overload
    def batch(
        self: 'IterDataset[dict[str, Any]]', batch_size: int, *, drop_remainder: bool = False, batch_fn: None = None
    ) -> 'IterDataset[dict[str, Any]]': ...
    @overload
    def batch(self, batch_size: int, *, drop_remainder: bool = False, batch_fn: None = None) -> 'IterDataset[Any]': ...
    @answering(**BATCH_ARGUMENTS)
    def batch(
        self, batch_size: int, *, drop_remainder: bool = False, batch_fn: Callable[[Sequence[Any]], Any] | None = None
    ) -> 'IterDataset[Any]':
        """Combine consecutive elements to batches, as ``MapDataset.batch``."""
        return IterDataset(BatchOf(self._stream, batch_size, drop_remainder, batch_fn))

    @answering(batch='batch_size', size='batch_size', n='batch_size', drop_last='drop_remainder')
    def rebatch(self, batch_size: int, *, drop_remainder: bool = False) -> Self:
        """Combine or split batches to batches of another size, along the first axis of each array.

        ``stream.batch(64).rebatch(100)`` yields batches of 100 rows; ``drop_remainder`` drops a smaller last one.
        """
        batch_size = check_integer('batch_size', batch_size, 1)
        line = Line(f'rebatch({batch_size}{", drop_remainder=True" if drop_remainder else ""})')
        return self._of(Staged(self._stream, line, Rebatching, batch_size, drop_remainder))

    @answering(**EPOCH_ARGUMENTS)
    def repeat(self, num_epochs: int | None = None) -> Self:
        """Repeat the stream, each time with the same elements; ``MapDataset.repeat`` shuffles each epoch differently.

        Without ``num_epochs``, it is repeated forever. A stream without elements ends at once.
        """
        if num_epochs is not None:
            num_epochs = check_integer('num_epochs', num_epochs, 1)
        return self._of(Repeated(self._stream, num_epochs))

    @answering(**COUNT_ARGUMENTS)
    def limit(self, count: int) -> Self:
        """End the stream after ``count`` elements, 1 or more."""
        return self._of(Limited(self._stream, check_integer('count', count, 1)))

    def cache(self) -> Self:
        """Keep all elements in memory, so that the epochs of a later ``repeat`` compute nothing again.

        Each iterator keeps its own. One that continues from a state computes the elements before it again. Arrays are
        read-only, and each epoch returns another dict; do not modify other objects in it, which are the same.
        """
        return self._of(Staged(self._stream, Line('cache()'), Caching))

    @answering(**WINDOW_ARGUMENTS)
    def window_shuffle(self, window_size: int, seed: int) -> Self:
        """Shuffle the elements within each window of ``window_size`` consecutive elements.

        The order of a window depends on its number and on the seed, an integer from 0 to 2**32 - 1, and on the epoch
        where ``set_epoch`` of an ``IterableDataset`` tells one.
        """
        window_size = check_integer('window_size', window_size, 1)
        seed = check_integer('seed', seed, 0, MAX_SEED)
        return self._of(WindowShuffled(self._stream, window_size, seed))

    @answering()
    def pack(
        self,
        length: Mapping[str, Any],
        *,
        strategy: Strategy = 'first_fit',
        num_packing_bins: int = 64,
        meta_features: Sequence[str] = (),
        max_segments: int | None = None,
        split_long: bool = False,
        shuffle_bins: bool = False,
        seed: int = 0,
        alignment: int | Mapping[str, Any] | None = None,
        padding: Any = None,
        bos: Any = None,
        bos_parts: bool = True,
        shard_options: ShardOptions | None = None,
    ) -> 'IterDataset[dict[str, Any]]':
        """Pack sequences into rows of fixed lengths.

        Each row is a dict with the features of ``length``, padded. Beside each feature that is not a meta feature, it
        has ``{name}_segment_ids`` (int32: 1 for the first sequence in the row, and so on; 0 for padding) and
        ``{name}_positions`` (int32: position within the sequence, or within the part of it in this row)::

            stream.pack({'tokens': 2048})  # elements such as {'tokens': np.array([17, 4, 2])}
            stream.pack({'inputs': {'ids': 2048, 'mask': 2048}, 'targets': 512}, strategy='best_fit')
            stream.pack({'tokens': 2048}, strategy='concat_then_split', bos=1)

        Rows do not depend on the number of worker processes. A pack of rows holds the sequences of
        ``num_packing_bins`` rows in memory; ``concat_then_split`` holds those of one row.

        Args:
          length: length of a row, for each feature; nested as the elements are. Features of an element that are not
            named are dropped. A scalar is a sequence of length 1.
          strategy: ``'first_fit'`` puts a sequence into the first open row with enough space, ``'best_fit'`` into the
            fullest of them. When a sequence fits into none, all open rows are yielded. ``'concat_then_split'``
            fills one row after the other, and splits the sequence that does not fit.
          num_packing_bins: number of rows that are open at a time.
          meta_features: top-level keys without segment ids and positions, which are never split. A key that is not in
            ``length`` becomes a list with a value for each sequence in the row.
          max_segments: maximum number of sequences in a row.
          split_long: True to cut a sequence that is longer than a row, instead of raising an error.
          shuffle_bins: True to shuffle the rows that are open together.
          seed: the order of shuffled rows depends on the seed and the number of earlier rows, as in Google Grain, and
            on the epoch where ``set_epoch`` of an ``IterableDataset`` tells one.
          alignment: sequences start at multiples of this integer. Like ``padding`` and ``bos``, one value for all
            features, or a mapping from features to values.
          padding: the value of positions without a sequence, 0 by default.
          bos: value that replaces the first one of each sequence, and of each part of a sequence; not in meta features,
            unless they are named.
          bos_parts: False to replace the first value of each sequence alone, and keep those of its later parts.
          shard_options: yield each ``shard_count``-th row only. Every process then reads all sequences, rows are the
            same for any number of processes, and so are states. With ``drop_remainder``, a process returns a row once
            each of them has one, so that all return equally many. Without ``shard_options``, shard the reading, by
            ``to_iter_dataset(shard_options=...)``: each process then packs the sequences that it reads.

        Raises:
          DatapointError: in iteration, for an element that lacks a feature, is too long, or differs from the others in
            dtype or shape. It names the number of the element in the stream.
        """
        recipe = Recipe(
            length, strategy, num_packing_bins, meta_features, max_segments, split_long, shuffle_bins, seed, alignment,
            padding, bos, bos_parts, shard_options,
        )  # fmt: skip
        return IterDataset(Packed(self._stream, recipe))

    @answering(**PREFETCH_ARGUMENTS)
    def prefetch(self, buffer_size: int = 2) -> Self:
        """Compute ``buffer_size`` elements of all previous operations ahead of the consumer.

        With 0, each element is computed on request. ``iterator.set_prefetch_buffer_size(10)`` changes the number.
        """
        if isinstance(buffer_size, MultiprocessingOptions):
            raise InvalidArgumentError(f'buffer_size: expected an integer, got {buffer_size}: mp_prefetch takes it')
        return self._of(Prefetched(self._stream, check_integer('buffer_size', buffer_size, 0)))

    @answering(num_workers='the number alone, as in mp_prefetch(8)')
    def mp_prefetch(
        self,
        options: MultiprocessingOptions | int | None = None,
        worker_init_fn: Callable[[int, int], object] | None = None,
        sequential_slice: bool = False,
    ) -> Self:
        """Read and compute the elements in worker processes; elements and order stay the same.

        The operations before the first one that combines several elements run in the workers, in chunks; the others run
        in this process. If the MapDataset was batched, the workers return whole batches, in shared memory::

            dataset.shuffle(seed=0).map(decode).batch(64).to_iter_dataset().mp_prefetch(4)

        Args:
          options: number of processes, or all settings; by default a process per core.
          worker_init_fn: as that of :class:`granular.grain.MultiprocessingOptions`.
          sequential_slice: True if each process reads a contiguous part of the data sources, as in Google Grain. The
            elements then come from the processes in turn: order and states depend on the number of processes.

        Raises:
          InvalidArgumentError: if a stage cannot be divided for ``sequential_slice``.
        """
        if not isinstance(options, MultiprocessingOptions):
            options = MultiprocessingOptions(CORES if options is None else options)
        if worker_init_fn is not None:
            options = dataclasses.replace(options, worker_init_fn=worker_init_fn)
        count = options.num_workers
        if not count:
            return self
        if not sequential_slice or count == 1:
            return self._of(self._stream.with_workers(options))
        parts = []
        for i in range(count):
            initialize = options.worker_init_fn
            if initialize is not None:
                initialize = functools.partial(_init, initialize, i, count)
            own = dataclasses.replace(options, num_workers=1, worker_init_fn=initialize)
            parts.append(self._stream.in_part(ShardOptions(i, count)).with_workers(own))
        return self._of(Interleaved(parts, InterleaveSettings(count, count, count, 1)))

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Restrict this stream, in place, to a part of the elements that it reads. Streams made of it stay as they are.

        Args:
          sl: the part, such as ``slice(1, None, 4)``; of streams of several files or of other streams, it selects whole
            ones.
          sequential_slice: True if ``slice(i, None, n)`` is the ``i``-th of ``n`` contiguous parts of the data sources.

        Raises:
          InvalidArgumentError: if a stage cannot be divided.
        """
        if not isinstance(sl, slice):
            raise InvalidArgumentError(f'sl: expected a slice, got {sl!r:.100}')
        if not sequential_slice:
            stream = self._stream.sliced(sl)
        elif sl.stop is not None:
            raise InvalidArgumentError(f'sl: expected slice(i, None, n) for sequential_slice=True, got {sl}')
        else:
            stream = self._stream.in_part(ShardOptions(sl.start or 0, sl.step or 1))
        self._stream = stream
        if isinstance(stream, Iterated):
            self._parents = tuple(map(IterDataset, stream.parents))

    def with_options(self, options: DatasetOptions) -> Self:
        """Set options of all previous operations, such as when a filter that drops most elements warns or raises."""
        if not isinstance(options, DatasetOptions):
            raise InvalidArgumentError(f'options: expected DatasetOptions, got {options!r:.100}')
        return self._of(self._stream.with_options(options))

    def apply(self, transformations: Transformation | Sequence[Transformation]) -> 'IterDataset[Any]':
        applied: IterDataset[Any] = super().apply(transformations)
        return applied

    def __iter__(self) -> blocking_iterator.DatasetIterator[Element_co]:
        # Streams of the sync API may block a running loop: that of a notebook runs in each cell.
        if running_loop() is not None and any(getattr(root, 'awaited', False) for root in self._stream.roots()):
            raise InvalidArgumentError(
                'a stream of granular.aio: use `async for`, as `for` would block the event loop of this thread; '
                'granular.MapDataset makes streams for `for`'
            )
        self._warn_of_no_shard()
        return blocking_iterator.DatasetIterator(self._stream)

    def __aiter__(self) -> iterator.DatasetIterator[Element_co]:
        self._warn_of_no_shard()
        return iterator.DatasetIterator(self._stream)

    def _warn_of_no_shard(self) -> None:
        if self._stream.hosts == 1:
            warn_of_no_shard(
                f'a stream ({self._stream.describe()})', 'call to_iter_dataset(shard_options=ShardByTorchRank())'
            )

    def __str__(self) -> str:
        return format_pipeline(self._stream)

    def __repr__(self) -> str:
        return f'<{type(self).__name__}: {self._stream.describe()}>'


def stream_of(dataset: IterDataset[Any]) -> Stream:
    return dataset._stream


def _rebuilt(dataset: IterDataset[Any], parents: Sequence[Stream]) -> Iterated:
    """Return the stage of a copy of a dataset of a subclass, whose parents are others."""
    rebuilt = copy.copy(dataset)
    rebuilt._parents = tuple(IterDataset(parent) for parent in parents)
    stage = rebuilt._stream = Iterated(rebuilt, parents, _rebuilt)
    return stage


def _streams(datasets: Sequence[Any]) -> list[Stream]:
    if isinstance(datasets, IterDataset) or not isinstance(datasets, Iterable):
        raise InvalidArgumentError(f'expected a list of streams or MapDatasets, got {datasets!r:.100}')
    if not datasets:
        raise InvalidArgumentError('expected one dataset or more, got none')
    return [_stream(i, dataset) for i, dataset in enumerate(datasets)]


def _stream(number: int, dataset: Any) -> Stream:
    if not isinstance(dataset, IterDataset):
        convert = getattr(dataset, 'to_iter_dataset', None)
        if convert is None:
            raise InvalidArgumentError(f'dataset {number}: expected a stream or MapDataset, got {dataset!r:.100}')
        dataset = convert()
    return stream_of(dataset)


def _init(initialize: Callable[[int, int], object], number: int, count: int, *_: int) -> None:
    initialize(number, count)

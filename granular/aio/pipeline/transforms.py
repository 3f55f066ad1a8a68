"""Transformation classes, options and shards, with the names of Google Grain."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar, cast

import numpy as np

from granular._support.indexing import MOST_WORKERS, check_integer, index_of
from granular._support.other_names import OtherNames, answering
from granular._support.typing import In_contra, Out_co
from granular.errors import InvalidArgumentError
from granular.formats.display import html_lines

In = TypeVar('In')
Out = TypeVar('Out')
Options = TypeVar('Options')
_START_METHODS: Final = ('spawn', 'forkserver', 'fork')

# Names of other libraries, each with what to write instead.
BATCH_ARGUMENTS: Final = {
    **dict.fromkeys(('batch', 'size', 'n'), 'batch_size'),
    'drop_last': 'drop_remainder',
    'collate_fn': 'batch_fn',
    'on_error': "on_error='skip' to to_iter_dataset",
    'shuffle': 'nothing, and call shuffle(seed=0) of a MapDataset before batch',
    **dict.fromkeys(
        ('num_workers', 'num_parallel_calls'), 'nothing: it is read ahead; mp_prefetch(8) of the stream takes processes'
    ),
}
FUNCTION_ARGUMENTS: Final = dict.fromkeys(
    ('fn', 'func', 'function', 'map_func', 'predicate', 'condition'), 'transform, or the function alone'
)
COUNT_ARGUMENTS: Final = dict.fromkeys(('n', 'num', 'num_elements', 'size'), 'count, or the number alone')
MIX_ARGUMENTS: Final = dict.fromkeys(('proportions', 'proportion', 'probabilities', 'probs', 'ratios'), 'weights')
EPOCH_ARGUMENTS: Final = dict.fromkeys(('count', 'n', 'times', 'epochs', 'nepochs', 'num_repeats'), 'num_epochs')
WINDOW_ARGUMENTS: Final = dict.fromkeys(('buffer_size', 'size', 'n', 'bufsize', 'shuffle_block_size'), 'window_size')
MAP_ARGUMENTS: Final = {
    **FUNCTION_ARGUMENTS,
    **dict.fromkeys(
        ('num_parallel_calls', 'num_workers', 'num_proc'),
        'nothing: functions run in threads; mp_prefetch(8) of the stream takes processes',
    ),
    'on_error': "on_error='skip' to to_iter_dataset",
    'fn_kwargs': 'functools.partial(function, ...)',
    'batched': 'nothing, and call map after batch(64)',
}
PREFETCH_ARGUMENTS: Final = {
    **dict.fromkeys(('n', 'size', 'prefetch_factor', 'num_batches'), 'buffer_size'),
    **dict.fromkeys(('num_workers', 'options'), 'nothing: mp_prefetch(8) takes processes'),
}
OF_CHAINS: Final = {
    **dict.fromkeys(
        (
            'get_state', 'set_state', 'state_dict', 'load_state_dict', 'get_next_index', 'set_next_index', 'stats',
            'errors', 'close',
        ),
        'it belongs to an iterator: `with iter(stream) as iterator`',
    ),
    'set_epoch': 'call repeat() behind shuffle(seed=0): each epoch has an order of its own',
    'unbatch': 'call flat_map(list), if an element is a sequence',
    'batched': 'call batch',
    'padded_batch': 'pass granular.grain.experimental.batch_and_pad as batch_fn of batch, or call batch_by_size',
    'bucket_by_sequence_length': 'call batch_by_size of the MapDataset',
    'element_spec': 'granular.grain.experimental.get_element_spec(dataset) returns it',
    'as_numpy_iterator': 'elements are of numpy: use `for element in dataset`',
    'decode': 'values are decoded by the reader: pass decoders= to granular.open',
    **dict.fromkeys(
        ('to', 'with_format', 'set_format'), 'granular.integrations.torch.Batches(stream, device) makes tensors'
    ),
    **dict.fromkeys(('remove_columns', 'select_columns'), 'call select of the MapDataset, with the keys to keep'),
    **dict.fromkeys(('rename_column', 'rename_columns', 'to_tuple', 'map_dict'), 'call map'),
}  # fmt: skip
OF_DATASETS: Final = dict.fromkeys(
    ('select', 'slice', 'subset', 'percent', 'filter_classes', 'oversample', 'concatenate', 'exclude', 'fetch', 'get'),
    'call it before to_iter_dataset()',
)


class MapTransform(abc.ABC, Generic[In_contra, Out_co]):
    """A function of each element, as an object.

    ::

        class Normalize(granular.grain.transforms.Map):
            def map(self, element):
                return {**element, 'image': element['image'] / 255}

        dataset = dataset.map(Normalize())
    """

    @abc.abstractmethod
    def map(self, element: In_contra) -> Out_co:
        """Return the transformed element."""


class MapWithIndexTransform(abc.ABC, Generic[In_contra, Out_co]):
    """A function of each element and its index, as an object.

    ::

        class Number(granular.grain.transforms.MapWithIndex):
            def map_with_index(self, index, element):
                return {**element, 'number': index}

        dataset = dataset.map_with_index(Number())
    """

    @abc.abstractmethod
    def map_with_index(self, index: int, element: In_contra) -> Out_co:
        """Return the transformed element."""


class RandomMapTransform(abc.ABC, Generic[In_contra, Out_co]):
    """A function of each element and a random generator that depends only on the seed and the index, as an object.

    ::

        class Flip(granular.grain.transforms.RandomMap):
            def random_map(self, element, rng):
                return element[:, ::-1] if rng.random() < 0.5 else element
    """

    @abc.abstractmethod
    def random_map(self, element: In_contra, rng: np.random.Generator) -> Out_co:
        """Return the transformed element."""


class FilterTransform(abc.ABC, Generic[In_contra]):
    """A predicate that removes elements, as an object.

    ::

        class IsEven(granular.grain.transforms.Filter):
            def filter(self, element):
                return element['label'] % 2 == 0

        dataset = dataset.filter(IsEven())
    """

    @abc.abstractmethod
    def filter(self, element: In_contra) -> bool:
        """Return whether to keep the element."""


class FlatMapTransform(abc.ABC, Generic[In_contra, Out_co]):
    """A function from each element to several elements, as an object.

    ::

        class Words(granular.grain.experimental.FlatMapTransform):
            max_fan_out = 100

            def flat_map(self, element):
                return element.split()

    Attributes:
      max_fan_out: largest number of elements for one element; required for a MapDataset.
    """

    max_fan_out: int | None = None

    @abc.abstractmethod
    def flat_map(self, element: In_contra) -> Sequence[Out_co]:
        """Return the elements that replace this one."""


@answering(**BATCH_ARGUMENTS)
@dataclasses.dataclass(frozen=True)
class Batch:
    """The transformation that combines consecutive elements to batches, for a ``DataLoader`` or ``apply``.

    ::

        batches = dataset.apply([preprocess, granular.grain.transforms.Batch(64, drop_remainder=True)])

    Args:
      batch_size: elements per batch.
      drop_remainder: True to drop a smaller last batch.
      batch_fn: function from a list of elements to a batch; by default each leaf is stacked along a new first axis.
    """

    batch_size: int
    drop_remainder: bool = False
    batch_fn: Callable[[Sequence[Any]], Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, 'batch_size', check_integer('batch_size', self.batch_size, 1))


MapFunction = MapTransform[In, Out] | Callable[[In], Out]
IndexedFunction = MapWithIndexTransform[In, Out] | Callable[[int, In], Out]
RandomFunction = RandomMapTransform[In, Out] | Callable[[In, np.random.Generator], Out]
Predicate = FilterTransform[In] | Callable[[In], bool]
FlatMapFunction = FlatMapTransform[In, Out] | Callable[[In], Sequence[Out]]
Transformation = (
    MapTransform | MapWithIndexTransform | RandomMapTransform | FilterTransform | FlatMapTransform | Batch
    | Callable[[Any], Any]
)  # fmt: skip


@answering(
    num_workers='num_threads; mp_prefetch(8) of the stream takes processes',
    **dict.fromkeys(('buffer_size', 'prefetch', 'prefetch_factor'), 'prefetch_buffer_size, which counts elements'),
)
@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """Limits of the read-ahead of a stream.

    ::

        options = granular.ReadOptions(prefetch_buffer_size=100, memory=64 << 20)
        stream = dataset.to_iter_dataset(options)

    Args:
      num_threads: threads that decode and transform, which the streams of a mix share; with 1, one datapoint at a time.
        Reads need no threads.
      prefetch_buffer_size: maximum number of elements to read ahead; with 0, only one or two elements.
      memory: maximum number of bytes of elements to read ahead, and of datapoints that are decoded for them at a time,
        estimated from those so far; at least one element is read ahead.
    """

    num_threads: int = 16
    prefetch_buffer_size: int = 500
    memory: int = 512 << 20

    def __post_init__(self) -> None:
        for name in ('num_threads', 'prefetch_buffer_size', 'memory'):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), 0))


@answering()
@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Options of a stream, for ``IterDataset.with_options``.

    ::

        options = granular.grain.experimental.DatasetOptions(filter_raise_threshold_ratio=0.99)
        stream = dataset.filter(is_valid).to_iter_dataset().with_options(options)

    The ratios are those of dropped elements among 1,000 consecutive ones, from 0 to 1. Filters that run together, those
    before the first operation that combines several elements, are counted together.

    Args:
      filter_warn_threshold_ratio: ratio from which a warning is logged, at most once a minute, and at the end if all
        elements were dropped; None for never.
      filter_raise_threshold_ratio: ratio from which a ``DatapointError`` is raised; None for never.
      stage_timing: True to time the stages, for ``DatasetIterator.execution_summary``; costs about 0.5 us each.
      debug: True to time the stages, and log each element that a stage yields, with the level INFO of the logger
        ``granular``. Subclasses of ``MapDataset`` and ``IterDataset`` are copied for this, so that the datasets in
        their ``_parents`` are logged too. The stream then has no worker processes.
    """

    filter_warn_threshold_ratio: float | None = 0.9
    filter_raise_threshold_ratio: float | None = None
    stage_timing: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        for name in ('filter_warn_threshold_ratio', 'filter_raise_threshold_ratio'):
            ratio = getattr(self, name)
            if ratio is not None and not (isinstance(ratio, int | float | np.number) and 0 <= ratio <= 1):
                raise InvalidArgumentError(f'{name}: expected a number from 0 to 1 or None, got {ratio!r:.100}')


@answering(
    num_processes='num_workers',
    prefetch_factor='per_worker_buffer_size',
    multiprocessing_context="start_method='spawn'",
    enable_profiling='granular.grain.experimental.DatasetOptions(stage_timing=True) to with_options',
)
@dataclasses.dataclass(frozen=True)
class MultiprocessingOptions:
    """Settings of worker processes.

    ::

        options = granular.grain.MultiprocessingOptions(num_workers=4, start_method='forkserver')
        stream = dataset.to_iter_dataset().mp_prefetch(options)

    Args:
      num_workers: number of processes; 0 for none.
      per_worker_buffer_size: chunks or batches that each process may have ready.
      start_method: 'spawn', 'forkserver' or 'fork'.
      worker_init_fn: function of the number of a process and their number, called when the process starts.
    """

    num_workers: int = 0
    per_worker_buffer_size: int = 2
    start_method: str = 'spawn'
    worker_init_fn: Callable[[int, int], object] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, 'num_workers', check_integer('num_workers', self.num_workers, 0, MOST_WORKERS))
        size = check_integer('per_worker_buffer_size', self.per_worker_buffer_size, 1)
        object.__setattr__(self, 'per_worker_buffer_size', size)
        if self.start_method not in _START_METHODS:
            raise InvalidArgumentError(
                f'start_method: expected one of {_START_METHODS}, got {self.start_method!r:.100}'
            )
        if self.worker_init_fn is not None and not callable(self.worker_init_fn):
            raise InvalidArgumentError(f'worker_init_fn: expected a function or None, got {self.worker_init_fn!r:.100}')


def divided(options: MultiprocessingOptions, parts: int) -> MultiprocessingOptions:
    """Return the options of one of several streams that share the processes, at least one for each."""
    return dataclasses.replace(options, num_workers=max(1, options.num_workers // max(1, parts)))


def as_read_options(options: Any) -> ReadOptions:
    """Return the argument ``read_options``; None stands for the defaults. Options of Grain are converted."""
    return options_of('read_options', ReadOptions() if options is None else options, ReadOptions)


def options_of(name: str, options: Any, kind: type[Options]) -> Options:
    """Return options as those of a class of granular, of which Grain's have the fields."""
    if isinstance(options, kind):
        return options
    try:
        return kind(**{field.name: getattr(options, field.name) for field in dataclasses.fields(cast(Any, kind))})
    except AttributeError:
        raise InvalidArgumentError(f'{name}: expected a granular.{kind.__name__}, got {options!r:.100}') from None


def range_between(*bounds: Any) -> range:
    """Return ``range(*bounds)``; raise ``InvalidArgumentError`` if a bound is not an integer, or the step is 0."""
    try:
        out = range(*bounds)
        len(out)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgumentError(f'range: expected integers whose step is not 0, got {bounds}: {error}') from error
    return out


class RangeDataSource:
    """The integers of ``range(start, stop, step)``, as a data source.

    ::

        dataset = granular.MapDataset.source(granular.grain.sources.RangeDataSource(0, 100, 2))  # 0, 2, 4, ...
    """

    @answering()
    def __init__(self, start: int, stop: int, step: int) -> None:
        self._range = range_between(start, stop, step)

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, record_key: int) -> int:
        return self._range[index_of(record_key, len(self), 'RangeDataSource')]

    def __repr__(self) -> str:
        return f'RangeDataSource(start={self._range.start}, stop={self._range.stop}, step={self._range.step})'


def operation_of(transformation: Any) -> str:
    """Return the operation of a transformation: the name of its method, ``'batch'``, or ``'map'`` for a function."""
    if isinstance(transformation, Batch):
        return 'batch'
    for name in ('map_with_index', 'random_map', 'flat_map', 'filter', 'map'):
        if callable(getattr(transformation, name, None)):
            return name
    if not callable(transformation):
        raise InvalidArgumentError(f'{transformation!r:.100} is not a transformation')
    return 'map'


class Chain(OtherNames):
    """Base of MapDataset and IterDataset: chains of operations."""

    def apply(self, transformations: Transformation | Sequence[Transformation]) -> Any:
        """Apply one transformation, or several in order."""
        dataset: Any = self
        for transformation in transformations if isinstance(transformations, Sequence) else [transformations]:
            name = operation_of(transformation)
            if isinstance(transformation, Batch):
                options = {'drop_remainder': transformation.drop_remainder, 'batch_fn': transformation.batch_fn}
                dataset = dataset.batch(transformation.batch_size, **options)
            else:
                dataset = getattr(dataset, name)(transformation)
        return dataset

    def pipe(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return ``func(self, *args, **kwargs)``, to use your own functions in a chain of operations."""
        return func(self, *args, **kwargs)

    def _repr_html_(self) -> str:
        return html_lines(f'{self!r}\n{self}')

"""A DataLoader like that of Google Grain: a data source, a sampler and operations."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from granular._support.indexing import MOST_WORKERS, check_integer
from granular._support.other_names import answering
from granular.aio.pipeline import blocking_iterator, iterator
from granular.aio.pipeline.describe import format_pipeline
from granular.aio.pipeline.execution.failures import Failure, OnError
from granular.aio.pipeline.iter_dataset import IterDataset, stream_of
from granular.aio.pipeline.lines import Line
from granular.aio.pipeline.nodes.adapters import convert
from granular.aio.pipeline.nodes.elements import Element
from granular.aio.pipeline.nodes.indices import Wrapped
from granular.aio.pipeline.nodes.source import Source
from granular.aio.pipeline.samplers import IndexSampler, RecordMetadata, Sampled
from granular.aio.pipeline.shards import RANK_ARGUMENTS, ShardOptions, as_shard
from granular.aio.pipeline.streams.prefetching import Prefetched
from granular.aio.pipeline.streams.read import Read
from granular.aio.pipeline.transforms import (
    Batch,
    MultiprocessingOptions,
    ReadOptions,
    Transformation,
    as_read_options,
    operation_of,
)
from granular.aio.runtime.pools import CORES
from granular.aio.runtime.user_functions import call_checked, method_of, name_of
from granular.errors import InvalidArgumentError

_BATCHES_AHEAD: Final = 2
_NO_SEED: Final = 'random_map requires random numbers: pass a seed to the sampler'


class _Applied(Element):
    """Operations on single datapoints, which share the random generator of their index."""

    def __init__(self, parent: Source, singles: Sequence[tuple[str, Any]], sampler: Any) -> None:
        super().__init__(parent)
        self._operations, self._sampler = tuple(singles), sampler
        self._random = any(name == 'random_map' for name, _ in singles)
        self._parent_sparse: bool = self.sparse
        self.sparse = self.sparse or any(name == 'filter' for name, _ in singles)

    def call(self, datapoint: Any, index: int) -> Any:
        metadata: RecordMetadata
        metadata, data = datapoint
        if type(data) is Failure:
            return data.at(metadata.index, data.counts)
        if data is None and self._parent_sparse:
            return None
        rng = metadata.rng
        if self._random and rng is None and isinstance(self._sampler, IndexSampler):
            rng = self._sampler.rng(metadata.index)
        for name, fn in self._operations:
            if name == 'filter':
                if not call_checked('filter calls fn(element)', fn, data):
                    return None
            elif name == 'random_map':
                if rng is None:
                    raise InvalidArgumentError(_NO_SEED)
                data = call_checked('random_map calls fn(element, rng)', fn, data, rng)
            elif name == 'map_with_index':
                data = call_checked('map_with_index calls fn(index, element)', fn, metadata.index, data)
            else:
                data = call_checked('map calls fn(element)', fn, data)
        return data

    def line(self) -> Line:
        names = ', '.join(name for name, _ in self._operations)
        return Line(names or 'no operations', functions=[name_of(fn) for _, fn in self._operations] or None)

    def describe(self) -> str:
        return str(self.line())


class DataLoader:
    """Load elements from a data source, in the order of a sampler, through operations.

    ::

        loader = DataLoader(
            data_source=reader,
            sampler=granular.grain.samplers.IndexSampler(len(reader), shuffle=True, num_epochs=1, seed=0),
            operations=[decode, granular.grain.transforms.Batch(64, drop_remainder=True)],
            worker_count=4,
        )

    Iterate it with ``for`` or ``async for``; each iteration starts from the beginning. Batches do not depend on the
    number of workers, and neither do states: a state saved with four workers can be restored with none.

    Args:
      data_source: a reader, a list, or any other source.
      sampler: order of the datapoints: an :class:`~granular.grain.samplers.IndexSampler`, or an object with a
        :class:`RecordMetadata` for each index, and an IndexError after the last. Without ``__len__``, the last index is
        found by bisection.
      operations: transformations: functions, or objects with ``map``, ``map_with_index``, ``random_map``, ``filter`` or
        ``flat_map``, and :class:`~granular.grain.transforms.Batch`.
      worker_count: processes that read and compute; 0 to use threads of this process.
      worker_buffer_size: chunks that each worker may have ready.
      shard_options: part of the data for this process; by default that of the sampler.
      read_options: limits of the read-ahead. Unless its ``prefetch_buffer_size`` is 0, two batches are computed ahead.
      on_error: policy for a datapoint that fails: 'raise', 'skip', or a function of index and error that returns a
        replacement, returns None to skip it, or raises. Store errors are always raised.
      start_method: start method of the processes: 'spawn', 'forkserver' or 'fork'.
    """

    @answering(
        batch_size='operations=[granular.grain.transforms.Batch(64)]',
        num_workers='worker_count',
        prefetch_factor='worker_buffer_size',
        pin_memory="granular.integrations.torch.Batches(loader, device='cuda'), which pins memory",
        drop_last='operations=[granular.grain.transforms.Batch(64, drop_remainder=True)]',
        shuffle='sampler=granular.grain.samplers.IndexSampler(len(source), shuffle=True, seed=0)',
        collate_fn='operations=[granular.grain.transforms.Batch(64, batch_fn=...)]',
        persistent_workers='nothing: the workers of an iteration end with it',
        dataset='data_source',
        **RANK_ARGUMENTS,
    )
    def __init__(
        self,
        *,
        data_source: Any,
        sampler: Any,
        operations: Sequence[Transformation] = (),
        worker_count: int | None = 0,
        worker_buffer_size: int = 2,
        shard_options: ShardOptions | None = None,
        read_options: ReadOptions | None = None,
        on_error: OnError = 'raise',
        start_method: str = 'spawn',
    ) -> None:
        own = getattr(sampler, 'shard_options', None) or getattr(sampler, '_shard_options', None)  # ours, or Grain's
        own = None if own is None else as_shard(own)
        shard = as_shard(own if shard_options is None else shard_options)
        given = own is not None and shard_options is not None  # otherwise no rank is asked for yet
        if own and given and (own.shard_index, own.shard_count) != (shard.shard_index, shard.shard_count):
            raise InvalidArgumentError(f'the sampler has the shard {own}, the loader {shard}: pass it once')
        count = CORES if worker_count is None else check_integer('worker_count', worker_count, 0, MOST_WORKERS)
        buffer = max(1, check_integer('worker_buffer_size', worker_buffer_size, 0))
        workers = MultiprocessingOptions(count, buffer, start_method)
        singles: list[tuple[str, Any]] = []
        rest = _listed(operations, 'operations')
        while rest and (name := operation_of(rest[0])) not in ('batch', 'flat_map'):
            singles.append((name, method_of(rest.pop(0), name)))
        seed = getattr(sampler, 'seed', None)
        if isinstance(sampler, IndexSampler) and seed is None and any(name == 'random_map' for name, _ in singles):
            raise InvalidArgumentError(_NO_SEED)
        # A sampler that knows its shard numbers the datapoints of this shard; those of another are those of the whole.
        sampled = Sampled(Wrapped(data_source), sampler, as_shard(None) if own is None else shard)
        turns = shard if own is None else None
        source = _Applied(sampled, singles, sampler)
        dataset = IterDataset(Read(source, read_options, shard=turns, on_error=on_error))
        if seed is not None:
            dataset = dataset.seed(seed)
        dataset = dataset.apply(rest).mp_prefetch(workers)
        if rest and as_read_options(read_options).prefetch_buffer_size:
            dataset = IterDataset(Prefetched(stream_of(dataset), _BATCHES_AHEAD, unlisted=True))
        self._dataset = dataset

    def __iter__(self) -> blocking_iterator.DatasetIterator:
        return iter(self._dataset)

    def __aiter__(self) -> iterator.DatasetIterator:
        return aiter(self._dataset)

    def __str__(self) -> str:
        return format_pipeline(stream_of(self._dataset))


def _listed(transformations: Any, name: str) -> list[Any]:
    if isinstance(transformations, str) or not isinstance(transformations, Iterable):
        raise InvalidArgumentError(f'{name}: expected a sequence of transformations, got {transformations!r:.100}')
    return list(transformations)


def dataset_of(loader: DataLoader) -> IterDataset[Any]:
    return loader._dataset


@answering()
def load(
    source: Any,
    *,
    num_epochs: int | None = None,
    shuffle: bool = False,
    seed: int | None = None,
    shard_options: ShardOptions | None = None,
    transformations: Sequence[Transformation] = (),
    batch_size: int | None = None,
    drop_remainder: bool = False,
    worker_count: int | None = 0,
    read_options: ReadOptions | None = None,
) -> DataLoader:
    """Load batches from a data source, by a ``DataLoader`` with an ``IndexSampler`` and a ``Batch``.

    ::

        for batch in granular.grain.load(reader, shuffle=True, seed=0, num_epochs=1, batch_size=64):
            print(batch['label'])

    Iterate it with ``for`` or ``async for``. The order and the batches are those of ``grain.load``, which has the same
    arguments; uneven shards are exact here.

    Args:
      source: a reader, a list, or any other source with a length.
      num_epochs, shuffle, seed, shard_options: as for :class:`~granular.grain.samplers.IndexSampler`.
      transformations: functions, or objects with the methods of a transformation, applied to each datapoint.
      batch_size: datapoints per batch; None for single elements.
      drop_remainder: True to drop the last batch if it is smaller.
      worker_count: processes that read and compute; 0 or None to use threads of this process.
      read_options: limits of the read-ahead.
    """
    operations = _listed(transformations, 'transformations')
    if batch_size is not None:
        operations.append(Batch(batch_size, drop_remainder=drop_remainder))
    sampler = IndexSampler(len(convert(source)), shard_options, shuffle=shuffle, num_epochs=num_epochs, seed=seed)
    return DataLoader(
        data_source=source,
        sampler=sampler,
        operations=operations,
        worker_count=worker_count or 0,
        read_options=read_options,
    )

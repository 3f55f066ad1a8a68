"""The DataLoader of programs that block."""

from collections.abc import Sequence
from typing import Any

from granular.aio.pipeline.dataloader import build
from granular.aio.pipeline.errors import OnError
from granular.aio.pipeline.rendering import rendered
from granular.aio.pipeline.transforms import MultiprocessingOptions, ReadOptions, ShardOptions, Transformation
from granular.mapdataset import DatasetIterator, IterDataset


class DataLoader:
    """Elements of a data source in the order of a sampler, through operations; iterated with ``for``.

    Each iteration begins anew. Batches are the same for any number of workers, and so are states: one that was taken
    with four workers is restored with none.

    Args:
      data_source: a reader, a list, or anything else that can be a source.
      sampler: which records come, such as an :class:`IndexSampler`.
      operations: transformations: functions, or objects with ``map``, ``map_with_index``, ``random_map``, ``filter`` or
        ``flat_map``, and :class:`Batch`.
      worker_count: processes that read and compute; 0 for threads of this one.
      worker_buffer_size: chunks that each may have ready.
      shard_options: which part of the data this process has; by default the sampler's.
      read_options: how far to read ahead.
      on_error: what becomes of a record that cannot be made: 'raise', 'skip', or a function of index and error.
      start_method: of the processes: 'spawn', 'forkserver' or 'fork'.
    """

    def __init__(
        self,
        *,
        data_source: Any,
        sampler: Any,
        operations: Sequence[Transformation] = (),
        worker_count: int = 0,
        worker_buffer_size: int = 2,
        shard_options: ShardOptions | None = None,
        read_options: ReadOptions | None = None,
        on_error: OnError = 'raise',
        start_method: str = 'spawn',
    ) -> None:
        workers = MultiprocessingOptions(worker_count, worker_buffer_size, start_method)
        self._dataset = build(
            IterDataset, data_source, sampler, operations, shard_options, read_options, workers, on_error
        )

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(self._dataset._stream)

    def __str__(self) -> str:
        return rendered(self._dataset._stream)

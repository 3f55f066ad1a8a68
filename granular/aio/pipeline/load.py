"""One call from a source to batches, as ``grain.load``."""

from collections.abc import Sequence
from typing import Any

from granular.aio.pipeline.data_loader import DataLoader
from granular.aio.pipeline.samplers import IndexSampler
from granular.aio.pipeline.transforms import Batch, ReadOptions, ShardOptions, Transformation


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
    """Load batches from a data source: a :class:`DataLoader` with an :class:`IndexSampler` and a :class:`Batch`.

    ::

        for batch in granular.load(reader, shuffle=True, seed=0, num_epochs=1, batch_size=64):
            print(batch['label'])

    Iterate it with ``for`` or ``async for``. The order and the batches are those of ``grain.load``, which has the same
    arguments; uneven shards are exact here.

    Args:
      source: a reader, a list, or any other source with a length.
      num_epochs: number of passes over the data; None to repeat it without end.
      shuffle: True for another random order in each epoch, which requires a seed.
      seed: seed of the order and of random transformations.
      shard_options: part of the data for this process; by default all of it.
      transformations: functions, or objects with the methods of a transformation, applied to each datapoint.
      batch_size: datapoints per batch; None for single elements.
      drop_remainder: True to drop the last batch if it is smaller.
      worker_count: processes that read and compute; 0 or None to use threads of this process.
      read_options: limits of the read-ahead.

    Raises:
      InvalidArgumentError: if an argument is out of its range.
    """
    operations = list(transformations)
    if batch_size is not None:
        operations.append(Batch(batch_size, drop_remainder=drop_remainder))
    sampler = IndexSampler(len(source), shard_options, shuffle=shuffle, num_epochs=num_epochs, seed=seed)
    return DataLoader(
        data_source=source,
        sampler=sampler,
        operations=operations,
        worker_count=worker_count or 0,
        read_options=read_options,
    )

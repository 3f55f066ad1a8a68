"""``grain.python``: the names of earlier releases of Grain, in one module."""

import importlib
from typing import Any

from granular._support.other_names import no_module_name
from granular.aio.caches.memory_source import SharedMemoryDataSource as InMemoryDataSource
from granular.aio.pipeline.blocking_iterator import DatasetIterator
from granular.aio.pipeline.data_loader import DataLoader, load
from granular.aio.pipeline.iter_dataset import IterDataset
from granular.aio.pipeline.nodes.source import RandomAccessDataSource
from granular.aio.pipeline.samplers import IndexSampler, RecordMetadata, SequentialSampler
from granular.aio.pipeline.shards import NoSharding, ShardByJaxProcess, ShardOptions
from granular.aio.pipeline.transforms import (
    Batch,
    FilterTransform,
    MapTransform,
    MapWithIndexTransform,
    MultiprocessingOptions,
    RandomMapTransform,
    RangeDataSource,
    ReadOptions,
    Transformation,
)
from granular.grain import experimental
from granular.sync.datasources import ArrayRecordDataSource
from granular.sync.pipeline import MapDataset

__all__ = [
    'ArrayRecordDataSource',
    'Batch',
    'DataLoader',
    'DataLoaderIterator',
    'DatasetIterator',
    'FilterTransform',
    'InMemoryDataSource',
    'IndexSampler',
    'IterDataset',
    'MapDataset',
    'MapTransform',
    'MapWithIndexTransform',
    'MultiprocessingOptions',
    'NoSharding',
    'PyGrainDatasetIterator',
    'RandomAccessDataSource',
    'RandomMapTransform',
    'RangeDataSource',
    'ReadOptions',
    'RecordMetadata',
    'SequentialSampler',
    'ShardByJaxProcess',
    'ShardOptions',
    'Transformation',
    'experimental',
    'load',
]

DataLoaderIterator = PyGrainDatasetIterator = DatasetIterator
_CHECKPOINT = 'PyGrainCheckpoint'


def __getattr__(name: str) -> Any:
    if name in [f'{_CHECKPOINT}{end}' for end in ('Handler', 'Restore', 'Save')]:  # they take Orbax
        return getattr(importlib.import_module('granular.grain.checkpoint'), name.removeprefix('PyGrain'))
    raise no_module_name(__name__, name)

"""Stream training data out of S3 and GCS buckets, in random order, as fast as they allow.

The names here block; those of :mod:`granular.aio` are awaited.
"""

from typing import TYPE_CHECKING

from granular import aio, errors, filters, formats, shuffle, sources
from granular.aio.pipeline.samplers import IndexSampler, RecordMetadata, SequentialSampler
from granular.aio.pipeline.source import RandomAccessDataSource
from granular.aio.pipeline.transforms import (
    Batch,
    FilterTransform,
    FlatMapTransform,
    MapTransform,
    MapWithIndexTransform,
    MultiprocessingOptions,
    NoSharding,
    RandomMapTransform,
    RangeDataSource,
    ReadOptions,
    ShardByJaxProcess,
    ShardByTorchRank,
    ShardOptions,
)
from granular.aio.reply import io_stats
from granular.bag import BagReader, BagWriter
from granular.checkpoints import load_state, save_state
from granular.cleaning import clean
from granular.config import IOConfig
from granular.dataloader import DataLoader
from granular.dataset import DatasetReader, DatasetWriter
from granular.errors import GranularError
from granular.extras import later
from granular.formats import decoders, encoders
from granular.loader import Loader
from granular.mapdataset import DatasetIterator, IterDataset, MapDataset
from granular.path import Path
from granular.progress import progress
from granular.sharded import ShardedDatasetReader, ShardedDatasetWriter
from granular.verifying import verify

if TYPE_CHECKING:
    from granular.aio.caches.memorysource import InMemoryDataSource
    from granular.caches import RedisCache, SharedMemoryCache
    from granular.converting import Conversion, convert
    from granular.datasources import ArrayRecordDataSource, ParquetDataSource, ParquetIterDataset, WebDatasetDataSource
    from granular.fields import (
        ClassFilterWrapper,
        FieldConcat,
        FieldDataset,
        FieldWrapper,
        ModeWrapper,
        OversamplingWrapper,
        PercentFilterWrapper,
        RepeatWrapper,
        ShuffleWrapper,
        SubsetWrapper,
    )
    from granular.localcopies import LocalCopy, copy_to_local

__version__ = '1.0.0a1'

__all__ = [
    'ArrayRecordDataSource',
    'BagReader',
    'BagWriter',
    'Batch',
    'ClassFilterWrapper',
    'Conversion',
    'DataLoader',
    'DatasetIterator',
    'DatasetReader',
    'DatasetWriter',
    'FieldConcat',
    'FieldDataset',
    'FieldWrapper',
    'FilterTransform',
    'FlatMapTransform',
    'GranularError',
    'IOConfig',
    'InMemoryDataSource',
    'IndexSampler',
    'IterDataset',
    'Loader',
    'LocalCopy',
    'MapDataset',
    'MapTransform',
    'MapWithIndexTransform',
    'ModeWrapper',
    'MultiprocessingOptions',
    'NoSharding',
    'OversamplingWrapper',
    'ParquetDataSource',
    'ParquetIterDataset',
    'Path',
    'PercentFilterWrapper',
    'RandomAccessDataSource',
    'RandomMapTransform',
    'RangeDataSource',
    'ReadOptions',
    'RecordMetadata',
    'RedisCache',
    'RepeatWrapper',
    'SequentialSampler',
    'ShardByJaxProcess',
    'ShardByTorchRank',
    'ShardOptions',
    'ShardedDatasetReader',
    'ShardedDatasetWriter',
    'SharedMemoryCache',
    'ShuffleWrapper',
    'SubsetWrapper',
    'WebDatasetDataSource',
    'aio',
    'clean',
    'convert',
    'copy_to_local',
    'decoders',
    'encoders',
    'errors',
    'filters',
    'formats',
    'io_stats',
    'load_state',
    'progress',
    'save_state',
    'shuffle',
    'sources',
    'verify',
]

if not TYPE_CHECKING:
    __getattr__ = later(
        __name__,
        {
            'granular.aio.caches.memorysource': 'InMemoryDataSource',
            'granular.caches': 'RedisCache SharedMemoryCache',
            'granular.converting': 'Conversion convert',
            'granular.datasources': 'ArrayRecordDataSource ParquetDataSource ParquetIterDataset WebDatasetDataSource',
            'granular.fields': (
                'FieldDataset FieldWrapper ModeWrapper ClassFilterWrapper FieldConcat '
                'OversamplingWrapper PercentFilterWrapper RepeatWrapper ShuffleWrapper SubsetWrapper'
            ),
            'granular.localcopies': 'LocalCopy copy_to_local',
        },
    )

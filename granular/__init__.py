"""Stream training data from S3 and GCS buckets in random order, at the full speed of the store.

The functions of this package block; those of :mod:`granular.aio` are coroutines::

    reader = granular.DatasetReader('s3://bucket/data', granular.decoders)
    datapoints = reader.fetch([3, 1, 2])
"""

from typing import TYPE_CHECKING

from granular import aio, errors, filters, formats, metrics, shuffle, sources
from granular._lazy import lazy_getattr
from granular.aio.pipeline.blocking_iterator import DatasetIterator
from granular.aio.pipeline.data_loader import DataLoader
from granular.aio.pipeline.data_source import DataSource
from granular.aio.pipeline.iter_dataset import IterDataset
from granular.aio.pipeline.load import load
from granular.aio.pipeline.nodes.source import RandomAccessDataSource
from granular.aio.pipeline.nodes.stacking import batch_and_pad
from granular.aio.pipeline.samplers import IndexSampler, RecordMetadata, SequentialSampler
from granular.aio.pipeline.spec import ShapeDtypeStruct
from granular.aio.pipeline.transforms import (
    Batch,
    DatasetOptions,
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
from granular.config import IOConfig
from granular.errors import GranularError
from granular.formats.codecs import decoders, encoders
from granular.metrics import io_stats
from granular.sync.bags import BagReader, BagWriter
from granular.sync.datasets import DatasetReader, DatasetWriter, ShardedDatasetReader, ShardedDatasetWriter
from granular.sync.loader import Loader
from granular.sync.path import Path
from granular.sync.pipeline import MapDataset
from granular.sync.progress import progress

if TYPE_CHECKING:
    from granular.aio.caches.memory_source import InMemoryDataSource
    from granular.sync.caches import RedisCache, SharedMemoryCache
    from granular.sync.datasources import (
        ArrayRecordDataSource,
        ParquetDataSource,
        ParquetIterDataset,
        TFRecordDataSource,
        TFRecordIterDataset,
        TokenWindows,
        WebDatasetDataSource,
        open,  # noqa: A004
    )
    from granular.sync.fields import (
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
    from granular.sync.functions import (
        Conversion,
        LocalCopy,
        build_index,
        clean,
        convert,
        copy_to_local,
        get_element_spec,
        load_state,
        save_state,
        verify,
    )

__version__ = '1.0.0a1'

__all__ = [
    'ArrayRecordDataSource',
    'BagReader',
    'BagWriter',
    'Batch',
    'ClassFilterWrapper',
    'Conversion',
    'DataLoader',
    'DataSource',
    'DatasetIterator',
    'DatasetOptions',
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
    'ShapeDtypeStruct',
    'ShardByJaxProcess',
    'ShardByTorchRank',
    'ShardOptions',
    'ShardedDatasetReader',
    'ShardedDatasetWriter',
    'SharedMemoryCache',
    'ShuffleWrapper',
    'SubsetWrapper',
    'TFRecordDataSource',
    'TFRecordIterDataset',
    'TokenWindows',
    'WebDatasetDataSource',
    'aio',
    'batch_and_pad',
    'build_index',
    'clean',
    'convert',
    'copy_to_local',
    'decoders',
    'encoders',
    'errors',
    'filters',
    'formats',
    'get_element_spec',
    'io_stats',
    'load',
    'load_state',
    'metrics',
    'open',
    'progress',
    'save_state',
    'shuffle',
    'sources',
    'verify',
]


def __dir__() -> list[str]:
    return [*__all__, '__version__']


if not TYPE_CHECKING:
    __getattr__ = lazy_getattr(
        __name__,
        {
            'granular.aio.caches.memory_source': 'InMemoryDataSource',
            'granular.sync.caches': 'RedisCache SharedMemoryCache',
            'granular.sync.datasources': (
                'ArrayRecordDataSource ParquetDataSource ParquetIterDataset TFRecordDataSource TFRecordIterDataset '
                'TokenWindows WebDatasetDataSource open'
            ),
            'granular.sync.fields': (
                'FieldDataset FieldWrapper ModeWrapper ClassFilterWrapper FieldConcat '
                'OversamplingWrapper PercentFilterWrapper RepeatWrapper ShuffleWrapper SubsetWrapper'
            ),
            'granular.sync.functions': (
                'Conversion LocalCopy build_index clean convert copy_to_local get_element_spec load_state save_state '
                'verify'
            ),
        },
    )

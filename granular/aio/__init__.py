"""The async API: the same names as :mod:`granular`, awaited.

::

    async with granular.aio.DatasetReader('s3://bucket/data', granular.decoders) as reader:
        datapoints = await reader.fetch([3, 1, 41])
"""

from typing import TYPE_CHECKING

from granular._lazy import lazy_getattr
from granular.aio import sources
from granular.aio.bags.reader import BagReader
from granular.aio.bags.writer import BagWriter
from granular.aio.datasets.build_index import build_index
from granular.aio.datasets.clean import clean
from granular.aio.datasets.reader import DatasetReader
from granular.aio.datasets.sharded_reader import ShardedDatasetReader
from granular.aio.datasets.sharded_writer import ShardedDatasetWriter
from granular.aio.datasets.verify import verify
from granular.aio.datasets.writer import DatasetWriter
from granular.aio.loader.checkpoints import load_state, save_state
from granular.aio.loader.loader import Loader
from granular.aio.paths.path import Path
from granular.aio.pipeline.data_loader import DataLoader
from granular.aio.pipeline.iter_dataset import IterDataset
from granular.aio.pipeline.iterator import DatasetIterator
from granular.aio.pipeline.load import load
from granular.aio.pipeline.map_dataset import MapDataset
from granular.aio.pipeline.spec import get_element_spec
from granular.aio.runtime.loop_resources import aclose

if TYPE_CHECKING:
    from granular.aio.caches.memory_source import InMemoryDataSource
    from granular.aio.caches.redis_cache import RedisCache
    from granular.aio.caches.shared_cache import SharedMemoryCache
    from granular.aio.conversion.convert import convert
    from granular.aio.datasources import (
        ArrayRecordDataSource,
        ParquetDataSource,
        ParquetIterDataset,
        TFRecordDataSource,
        TFRecordIterDataset,
        TokenWindows,
        WebDatasetDataSource,
    )
    from granular.aio.datasources.detect import open  # noqa: A004
    from granular.aio.fields.fields import FieldDataset, FieldWrapper
    from granular.aio.fields.mode_wrapper import ModeWrapper
    from granular.aio.fields.wrappers import (
        ClassFilterWrapper,
        FieldConcat,
        OversamplingWrapper,
        PercentFilterWrapper,
        RepeatWrapper,
        ShuffleWrapper,
        SubsetWrapper,
    )
    from granular.aio.transfer.local_copy import copy_to_local

__all__ = [
    'ArrayRecordDataSource',
    'BagReader',
    'BagWriter',
    'ClassFilterWrapper',
    'DataLoader',
    'DatasetIterator',
    'DatasetReader',
    'DatasetWriter',
    'FieldConcat',
    'FieldDataset',
    'FieldWrapper',
    'InMemoryDataSource',
    'IterDataset',
    'Loader',
    'MapDataset',
    'ModeWrapper',
    'OversamplingWrapper',
    'ParquetDataSource',
    'ParquetIterDataset',
    'Path',
    'PercentFilterWrapper',
    'RedisCache',
    'RepeatWrapper',
    'ShardedDatasetReader',
    'ShardedDatasetWriter',
    'SharedMemoryCache',
    'ShuffleWrapper',
    'SubsetWrapper',
    'TFRecordDataSource',
    'TFRecordIterDataset',
    'TokenWindows',
    'WebDatasetDataSource',
    'aclose',
    'build_index',
    'clean',
    'convert',
    'copy_to_local',
    'get_element_spec',
    'load',
    'load_state',
    'open',
    'save_state',
    'sources',
    'verify',
]


def __dir__() -> list[str]:
    return [*__all__]


if not TYPE_CHECKING:
    __getattr__ = lazy_getattr(
        __name__,
        {
            'granular.aio.caches.memory_source': 'InMemoryDataSource',
            'granular.aio.caches.redis_cache': 'RedisCache',
            'granular.aio.caches.shared_cache': 'SharedMemoryCache',
            'granular.aio.conversion.convert': 'convert',
            'granular.aio.datasources': (
                'ArrayRecordDataSource ParquetDataSource ParquetIterDataset TFRecordDataSource TFRecordIterDataset '
                'TokenWindows WebDatasetDataSource'
            ),
            'granular.aio.datasources.detect': 'open',
            'granular.aio.fields.fields': 'FieldDataset FieldWrapper',
            'granular.aio.fields.wrappers': (
                'ClassFilterWrapper FieldConcat OversamplingWrapper PercentFilterWrapper '
                'RepeatWrapper ShuffleWrapper SubsetWrapper'
            ),
            'granular.aio.transfer.local_copy': 'copy_to_local',
            'granular.aio.fields.mode_wrapper': 'ModeWrapper',
        },
    )

"""The asynchronous core: the same names as :mod:`granular`, awaited."""

from typing import TYPE_CHECKING

from granular.aio import sources
from granular.aio.bag import BagReader
from granular.aio.bagwriter import BagWriter
from granular.aio.checkpoints import load_state, save_state
from granular.aio.cleaning import clean
from granular.aio.dataset import DatasetReader
from granular.aio.datasetwriter import DatasetWriter
from granular.aio.loader import Loader
from granular.aio.loops import aclose
from granular.aio.path import Path
from granular.aio.pipeline.dataloader import DataLoader
from granular.aio.pipeline.iterdataset import DatasetIterator, IterDataset
from granular.aio.pipeline.mapdataset import MapDataset
from granular.aio.sharded import ShardedDatasetReader
from granular.aio.shardedwriter import ShardedDatasetWriter
from granular.aio.verifying import verify
from granular.extras import later

if TYPE_CHECKING:
    from granular.aio.caches.memorysource import InMemoryDataSource
    from granular.aio.caches.rediscache import RedisCache
    from granular.aio.caches.sharedcache import SharedMemoryCache
    from granular.aio.converting import convert
    from granular.aio.datasources import (
        ArrayRecordDataSource,
        ParquetDataSource,
        ParquetIterDataset,
        WebDatasetDataSource,
    )
    from granular.aio.fields import FieldDataset, FieldWrapper
    from granular.aio.fieldwrappers import (
        ClassFilterWrapper,
        FieldConcat,
        OversamplingWrapper,
        PercentFilterWrapper,
        RepeatWrapper,
        ShuffleWrapper,
        SubsetWrapper,
    )
    from granular.aio.localcopies import copy_to_local
    from granular.aio.modewrapper import ModeWrapper

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
    'WebDatasetDataSource',
    'aclose',
    'clean',
    'convert',
    'copy_to_local',
    'load_state',
    'save_state',
    'sources',
    'verify',
]

if not TYPE_CHECKING:
    __getattr__ = later(
        __name__,
        {
            'granular.aio.caches.memorysource': 'InMemoryDataSource',
            'granular.aio.caches.rediscache': 'RedisCache',
            'granular.aio.caches.sharedcache': 'SharedMemoryCache',
            'granular.aio.converting': 'convert',
            'granular.aio.datasources': (
                'ArrayRecordDataSource ParquetDataSource ParquetIterDataset WebDatasetDataSource'
            ),
            'granular.aio.fields': 'FieldDataset FieldWrapper',
            'granular.aio.fieldwrappers': (
                'ClassFilterWrapper FieldConcat OversamplingWrapper PercentFilterWrapper '
                'RepeatWrapper ShuffleWrapper SubsetWrapper'
            ),
            'granular.aio.localcopies': 'copy_to_local',
            'granular.aio.modewrapper': 'ModeWrapper',
        },
    )

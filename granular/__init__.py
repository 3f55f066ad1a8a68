"""Stream training data from S3 and GCS buckets in random order, at the full speed of the store.

The functions of this package block; those of :mod:`granular.aio` are coroutines::

    reader = granular.DatasetReader('s3://bucket/data', granular.decoders)
    datapoints = reader.fetch([3, 1, 2])
"""

from typing import TYPE_CHECKING

from granular._support.lazy import lazy_names
from granular.errors import *  # noqa: F403  # their page lists them

__version__ = '1.0.0rc1'

if TYPE_CHECKING:
    from granular import aio as aio
    from granular import changes as changes
    from granular import errors as errors
    from granular import filters as filters
    from granular import formats as formats
    from granular import grain as grain
    from granular import kappadata as kappadata
    from granular import metrics as metrics
    from granular import shuffle as shuffle
    from granular import sources as sources
    from granular import testing as testing
    from granular.aio.pipeline.data_source import DataSource as DataSource
    from granular.aio.pipeline.iter_dataset import IterDataset as IterDataset
    from granular.aio.pipeline.shards import ShardByTorchRank as ShardByTorchRank
    from granular.aio.pipeline.shards import ShardOptions as ShardOptions
    from granular.aio.pipeline.state_description import describe_state as describe_state
    from granular.aio.pipeline.transforms import ReadOptions as ReadOptions
    from granular.config import IOConfig as IOConfig
    from granular.errors import GranularError as GranularError
    from granular.formats.codecs import decoders as decoders
    from granular.formats.codecs import encoders as encoders
    from granular.metrics import io_stats as io_stats
    from granular.sync.bags import BagReader as BagReader
    from granular.sync.bags import BagWriter as BagWriter
    from granular.sync.caches import RedisCache as RedisCache
    from granular.sync.caches import SharedMemoryCache as SharedMemoryCache
    from granular.sync.datasets import DatasetReader as DatasetReader
    from granular.sync.datasets import ShardedDatasetReader as ShardedDatasetReader
    from granular.sync.datasources import ArrayRecordDataSource as ArrayRecordDataSource
    from granular.sync.datasources import LeRobotDataSource as LeRobotDataSource
    from granular.sync.datasources import MegatronDataSource as MegatronDataSource
    from granular.sync.datasources import ParquetDataSource as ParquetDataSource
    from granular.sync.datasources import TFRecordDataSource as TFRecordDataSource
    from granular.sync.datasources import WebDatasetDataSource as WebDatasetDataSource
    from granular.sync.datasources import Windows as Windows
    from granular.sync.datasources import open as open  # noqa: A004
    from granular.sync.functions import build_index as build_index
    from granular.sync.functions import clean as clean
    from granular.sync.functions import convert as convert
    from granular.sync.functions import copy_to_local as copy_to_local
    from granular.sync.functions import load_state as load_state
    from granular.sync.functions import rewrite as rewrite
    from granular.sync.functions import save_state as save_state
    from granular.sync.functions import verify as verify
    from granular.sync.loader import Loader as Loader
    from granular.sync.path import Path as Path
    from granular.sync.pipeline import MapDataset as MapDataset
    from granular.sync.progress import progress as progress
    from granular.sync.writers import DatasetWriter as DatasetWriter
    from granular.sync.writers import ShardedDatasetWriter as ShardedDatasetWriter
else:
    # Programs import what they use: names of the package are looked up in these modules on first access.
    lazy_names(
        __name__,
        {
            'granular': 'aio changes errors filters formats grain kappadata metrics shuffle sources testing',
            'granular.aio.pipeline.data_source': 'DataSource',
            'granular.aio.pipeline.iter_dataset': 'IterDataset',
            'granular.aio.pipeline.shards': 'ShardByTorchRank ShardOptions',
            'granular.aio.pipeline.state_description': 'describe_state',
            'granular.aio.pipeline.transforms': 'ReadOptions',
            'granular.config': 'IOConfig',
            'granular.errors': 'GranularError',
            'granular.formats.codecs': 'decoders encoders',
            'granular.metrics': 'io_stats',
            'granular.sync.bags': 'BagReader BagWriter',
            'granular.sync.caches': 'RedisCache SharedMemoryCache',
            'granular.sync.datasets': 'DatasetReader ShardedDatasetReader',
            'granular.sync.datasources': (
                'ArrayRecordDataSource LeRobotDataSource MegatronDataSource ParquetDataSource TFRecordDataSource '
                'WebDatasetDataSource Windows open'
            ),
            'granular.sync.functions': 'build_index clean convert copy_to_local load_state rewrite save_state verify',
            'granular.sync.loader': 'Loader',
            'granular.sync.path': 'Path',
            'granular.sync.pipeline': 'MapDataset',
            'granular.sync.progress': 'progress',
            'granular.sync.writers': 'DatasetWriter ShardedDatasetWriter',
        },
    )

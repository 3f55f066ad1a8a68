"""The async API: the same names as :mod:`granular`, awaited.

::

    async with granular.aio.DatasetReader('s3://bucket/data', granular.decoders) as reader:
        datapoints = await reader.fetch([3, 1, 41])
"""

from typing import TYPE_CHECKING

from granular._support.lazy import lazy_names

if TYPE_CHECKING:
    from granular.aio import kappadata as kappadata
    from granular.aio import sources as sources
    from granular.aio.bags.reader import BagReader as BagReader
    from granular.aio.bags.writer import BagWriter as BagWriter
    from granular.aio.caches.redis_cache import RedisCache as RedisCache
    from granular.aio.caches.shared_cache import SharedMemoryCache as SharedMemoryCache
    from granular.aio.conversion.convert import convert as convert
    from granular.aio.conversion.local_copy import copy_to_local as copy_to_local
    from granular.aio.conversion.rewrite import rewrite as rewrite
    from granular.aio.datasets.build_index import build_index as build_index
    from granular.aio.datasets.clean import clean as clean
    from granular.aio.datasets.reader import DatasetReader as DatasetReader
    from granular.aio.datasets.sharded_reader import ShardedDatasetReader as ShardedDatasetReader
    from granular.aio.datasets.sharded_writer import ShardedDatasetWriter as ShardedDatasetWriter
    from granular.aio.datasets.verify import verify as verify
    from granular.aio.datasets.writer import DatasetWriter as DatasetWriter
    from granular.aio.datasources.arrayrecord.source import ArrayRecordDataSource as ArrayRecordDataSource
    from granular.aio.datasources.detect import open as open  # noqa: A004
    from granular.aio.datasources.lerobot import LeRobotDataSource as LeRobotDataSource
    from granular.aio.datasources.megatron.source import MegatronDataSource as MegatronDataSource
    from granular.aio.datasources.parquet.source import ParquetDataSource as ParquetDataSource
    from granular.aio.datasources.tfrecord.source import TFRecordDataSource as TFRecordDataSource
    from granular.aio.datasources.webdataset.source import WebDatasetDataSource as WebDatasetDataSource
    from granular.aio.datasources.windows import Windows as Windows
    from granular.aio.paths.path import Path as Path
    from granular.aio.pipeline.iter_dataset import IterDataset as IterDataset
    from granular.aio.pipeline.iterator import DatasetIterator as DatasetIterator
    from granular.aio.pipeline.loader.checkpoints import load_state as load_state
    from granular.aio.pipeline.loader.checkpoints import save_state as save_state
    from granular.aio.pipeline.loader.loader import Loader as Loader
    from granular.aio.pipeline.map_dataset import MapDataset as MapDataset
    from granular.aio.pipeline.spec import get_element_spec as get_element_spec
    from granular.aio.runtime.loop_resources import aclose as aclose
else:
    # Programs import what they use: names of the package are looked up in these modules on first access.
    lazy_names(
        __name__,
        {
            'granular.aio': 'kappadata sources',
            'granular.aio.bags.reader': 'BagReader',
            'granular.aio.bags.writer': 'BagWriter',
            'granular.aio.caches.redis_cache': 'RedisCache',
            'granular.aio.caches.shared_cache': 'SharedMemoryCache',
            'granular.aio.conversion.convert': 'convert',
            'granular.aio.conversion.rewrite': 'rewrite',
            'granular.aio.datasets.build_index': 'build_index',
            'granular.aio.datasets.clean': 'clean',
            'granular.aio.datasets.reader': 'DatasetReader',
            'granular.aio.datasets.sharded_reader': 'ShardedDatasetReader',
            'granular.aio.datasets.sharded_writer': 'ShardedDatasetWriter',
            'granular.aio.datasets.verify': 'verify',
            'granular.aio.datasets.writer': 'DatasetWriter',
            'granular.aio.datasources.arrayrecord.source': 'ArrayRecordDataSource',
            'granular.aio.datasources.detect': 'open',
            'granular.aio.datasources.lerobot': 'LeRobotDataSource',
            'granular.aio.datasources.megatron.source': 'MegatronDataSource',
            'granular.aio.datasources.parquet.source': 'ParquetDataSource',
            'granular.aio.datasources.tfrecord.source': 'TFRecordDataSource',
            'granular.aio.datasources.windows': 'Windows',
            'granular.aio.datasources.webdataset.source': 'WebDatasetDataSource',
            'granular.aio.pipeline.loader.checkpoints': 'load_state save_state',
            'granular.aio.pipeline.loader.loader': 'Loader',
            'granular.aio.paths.path': 'Path',
            'granular.aio.pipeline.iter_dataset': 'IterDataset',
            'granular.aio.pipeline.iterator': 'DatasetIterator',
            'granular.aio.pipeline.map_dataset': 'MapDataset',
            'granular.aio.pipeline.spec': 'get_element_spec',
            'granular.aio.runtime.loop_resources': 'aclose',
            'granular.aio.conversion.local_copy': 'copy_to_local',
        },
    )

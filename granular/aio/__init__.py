"""The asynchronous core: the same names as :mod:`granular`, awaited."""

from granular.aio import sources
from granular.aio.bag import BagReader
from granular.aio.bagwriter import BagWriter
from granular.aio.cleaning import clean
from granular.aio.dataset import DatasetReader
from granular.aio.datasetwriter import DatasetWriter
from granular.aio.loader import Loader
from granular.aio.loops import aclose
from granular.aio.path import Path
from granular.aio.sharded import ShardedDatasetReader
from granular.aio.shardedwriter import ShardedDatasetWriter
from granular.aio.verifying import verify

__all__ = [
    'BagReader',
    'BagWriter',
    'DatasetReader',
    'DatasetWriter',
    'Loader',
    'Path',
    'ShardedDatasetReader',
    'ShardedDatasetWriter',
    'aclose',
    'clean',
    'sources',
    'verify',
]

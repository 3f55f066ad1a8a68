"""Stream training data out of S3 and GCS buckets, in random order, as fast as they allow.

The names here block; those of :mod:`granular.aio` are awaited.
"""

from granular import aio, errors, formats, shuffle, sources
from granular.aio.reply import io_stats
from granular.bag import BagReader, BagWriter
from granular.cleaning import clean
from granular.config import IOConfig
from granular.dataset import DatasetReader, DatasetWriter
from granular.errors import GranularError
from granular.formats import decoders, encoders
from granular.loader import Loader
from granular.path import Path
from granular.sharded import ShardedDatasetReader, ShardedDatasetWriter
from granular.verifying import verify

__version__ = '1.0.0a1'

__all__ = [
    'BagReader',
    'BagWriter',
    'DatasetReader',
    'DatasetWriter',
    'GranularError',
    'IOConfig',
    'Loader',
    'Path',
    'ShardedDatasetReader',
    'ShardedDatasetWriter',
    'aio',
    'clean',
    'decoders',
    'encoders',
    'errors',
    'formats',
    'io_stats',
    'shuffle',
    'sources',
    'verify',
]

"""Data sources: ArrayRecord, Parquet, TFRecord and WebDataset files, and windows over tokens."""

from granular.aio.datasources.parquet.stream import ParquetIterDataset
from granular.aio.datasources.tfrecord.stream import TFRecordIterDataset
from granular.sync.datasources.arrayrecord import ArrayRecordDataSource
from granular.sync.datasources.detect import open  # noqa: A004
from granular.sync.datasources.parquet import ParquetDataSource
from granular.sync.datasources.tfrecord import TFRecordDataSource
from granular.sync.datasources.token_windows import TokenWindows
from granular.sync.datasources.webdataset import WebDatasetDataSource

__all__ = [
    'ArrayRecordDataSource',
    'ParquetDataSource',
    'ParquetIterDataset',
    'TFRecordDataSource',
    'TFRecordIterDataset',
    'TokenWindows',
    'WebDatasetDataSource',
    'open',
]

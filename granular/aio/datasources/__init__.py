"""Data sources: ArrayRecord, Parquet, TFRecord and WebDataset files, and windows over tokens. Async API."""

from granular.aio.datasources.arrayrecord.source import ArrayRecordDataSource
from granular.aio.datasources.parquet.source import ParquetDataSource
from granular.aio.datasources.parquet.stream import ParquetIterDataset
from granular.aio.datasources.tfrecord.source import TFRecordDataSource
from granular.aio.datasources.tfrecord.stream import TFRecordIterDataset
from granular.aio.datasources.token_windows import TokenWindows
from granular.aio.datasources.webdataset.source import WebDatasetDataSource

__all__ = [
    'ArrayRecordDataSource',
    'ParquetDataSource',
    'ParquetIterDataset',
    'TFRecordDataSource',
    'TFRecordIterDataset',
    'TokenWindows',
    'WebDatasetDataSource',
]

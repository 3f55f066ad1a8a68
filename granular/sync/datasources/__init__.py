"""Data sources that read other formats: ArrayRecord, Parquet and WebDataset."""

from granular.aio.datasources.parquet.stream import ParquetIterDataset
from granular.sync.datasources.arrayrecord import ArrayRecordDataSource
from granular.sync.datasources.detect import open  # noqa: A004
from granular.sync.datasources.parquet import ParquetDataSource
from granular.sync.datasources.webdataset import WebDatasetDataSource

__all__ = ['ArrayRecordDataSource', 'ParquetDataSource', 'ParquetIterDataset', 'WebDatasetDataSource', 'open']

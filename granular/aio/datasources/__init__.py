"""Data sources that read other formats: ArrayRecord, Parquet and WebDataset. Async API."""

from granular.aio.datasources.arrayrecord.source import ArrayRecordDataSource
from granular.aio.datasources.parquet.source import ParquetDataSource
from granular.aio.datasources.parquet.stream import ParquetIterDataset
from granular.aio.datasources.webdataset.source import WebDatasetDataSource

__all__ = ['ArrayRecordDataSource', 'ParquetDataSource', 'ParquetIterDataset', 'WebDatasetDataSource']

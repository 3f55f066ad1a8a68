"""Data sources that read other formats: ArrayRecord, Parquet and WebDataset."""

from granular.sync.datasources.arrayrecord import ArrayRecordDataSource
from granular.sync.datasources.parquet import ParquetDataSource, ParquetIterDataset
from granular.sync.datasources.webdataset import WebDatasetDataSource

__all__ = ['ArrayRecordDataSource', 'ParquetDataSource', 'ParquetIterDataset', 'WebDatasetDataSource']

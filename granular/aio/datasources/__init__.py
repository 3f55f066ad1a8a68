"""Sources in the formats of others, asynchronous."""

from granular.aio.datasources.arrayrecord import ArrayRecordDataSource
from granular.aio.datasources.parquet import ParquetDataSource
from granular.aio.datasources.parquetstream import ParquetIterDataset
from granular.aio.datasources.tar import WebDatasetDataSource

__all__ = ['ArrayRecordDataSource', 'ParquetDataSource', 'ParquetIterDataset', 'WebDatasetDataSource']

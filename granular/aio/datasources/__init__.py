"""Sources in the formats of others, asynchronous."""

from granular.aio.datasources.arrayrecord import ArrayRecordDataSource
from granular.aio.datasources.parquet import ParquetDataSource

__all__ = ['ArrayRecordDataSource', 'ParquetDataSource']

"""Sources in the formats of others."""

from granular.datasources.arrayrecord import ArrayRecordDataSource
from granular.datasources.parquet import ParquetDataSource

__all__ = ['ArrayRecordDataSource', 'ParquetDataSource']

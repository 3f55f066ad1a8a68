"""Sources in the formats of others."""

from granular.datasources.arrayrecord import ArrayRecordDataSource
from granular.datasources.parquet import ParquetDataSource, ParquetIterDataset
from granular.datasources.tar import WebDatasetDataSource

__all__ = ['ArrayRecordDataSource', 'ParquetDataSource', 'ParquetIterDataset', 'WebDatasetDataSource']

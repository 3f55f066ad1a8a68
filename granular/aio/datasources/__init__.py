"""Sources in the formats of others, asynchronous."""

from granular.aio.datasources.parquet import ParquetDataSource
from granular.aio.datasources.parquetstream import ParquetIterDataset

__all__ = ['ParquetDataSource', 'ParquetIterDataset']

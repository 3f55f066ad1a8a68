"""Sources in the formats of others, asynchronous."""

from granular.aio.datasources.parquet import ParquetDataSource

__all__ = ['ParquetDataSource']

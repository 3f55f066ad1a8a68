"""Sources in the formats of others."""

from granular.datasources.parquet import ParquetDataSource

__all__ = ['ParquetDataSource']

"""Sources in the formats of others."""

from granular.datasources.parquet import ParquetDataSource, ParquetIterDataset

__all__ = ['ParquetDataSource', 'ParquetIterDataset']

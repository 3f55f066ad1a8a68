"""Sources in the formats of others."""

from granular.datasources.arrayrecord import ArrayRecordDataSource

__all__ = ['ArrayRecordDataSource']

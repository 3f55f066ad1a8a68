"""Sources in the formats of others, asynchronous."""

from granular.aio.datasources.arrayrecord import ArrayRecordDataSource

__all__ = ['ArrayRecordDataSource']

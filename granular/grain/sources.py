"""``grain.sources``: what datasets are made of."""

from granular.aio.caches.memory_source import SharedMemoryDataSource
from granular.aio.pipeline.nodes.source import RandomAccessDataSource
from granular.aio.pipeline.transforms import RangeDataSource
from granular.sync.datasources import ArrayRecordDataSource

__all__ = [
    'ArrayRecordDataSource',
    'RandomAccessDataSource',
    'RangeDataSource',
    'SharedMemoryDataSource',
]

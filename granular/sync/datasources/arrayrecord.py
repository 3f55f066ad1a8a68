"""The sync API of :mod:`granular.aio.datasources.arrayrecord.source`."""

from granular.aio.datasources.arrayrecord import source as core
from granular.sync.base import Batched, RecordReader, constructing, sync_doc


class ArrayRecordDataSource(RecordReader[core.ArrayRecordDataSource], Batched):
    __doc__ = sync_doc(core.ArrayRecordDataSource)

    aio: core.ArrayRecordDataSource

    @constructing(core.ArrayRecordDataSource)
    def __init__(self) -> None: ...

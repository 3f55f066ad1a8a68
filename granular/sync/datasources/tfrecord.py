"""The sync API of :mod:`granular.aio.datasources.tfrecord`."""

from typing import Self

from granular.aio.datasources.tfrecord import source as core
from granular.sync.base import Batched, RecordReader, constructing, copy_of, passed_on, sync_doc


class TFRecordDataSource(RecordReader[core.TFRecordDataSource], Batched):
    __doc__ = sync_doc(core.TFRecordDataSource)

    aio: core.TFRecordDataSource

    @constructing(core.TFRecordDataSource)
    def __init__(self) -> None: ...

    size: int = passed_on(core.TFRecordDataSource.size)

    def copy(self) -> Self:
        """Return an independently closable source of the same files that shares their index."""
        return copy_of(self)

"""The sync API of :mod:`granular.aio.datasources.tfrecord`."""

from typing import Self

from granular.aio.datasources.tfrecord import source as core
from granular.sync.base import Batched, RecordReader, constructing, copy_of, sync_doc


class TFRecordDataSource(RecordReader[core.TFRecordDataSource], Batched):
    __doc__ = sync_doc(core.TFRecordDataSource)

    aio: core.TFRecordDataSource

    @constructing(core.TFRecordDataSource)
    def __init__(self) -> None: ...

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return self.aio.size

    def copy(self) -> Self:
        """Return an independently closable source of the same files that shares their index."""
        return copy_of(self)

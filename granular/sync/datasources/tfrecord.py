"""The sync API of :mod:`granular.aio.datasources.tfrecord`."""

import os
from collections.abc import Sequence
from typing import Any, Self

from granular.aio.datasources.tfrecord import source as core
from granular.aio.paths.pure import PurePath
from granular.sync.base import Batched, RecordReader, copy_of, sync_doc


class TFRecordDataSource(RecordReader[core.TFRecordDataSource], Batched):
    __doc__ = sync_doc(core.TFRecordDataSource)

    aio: core.TFRecordDataSource

    def __init__(self, paths: PurePath | str | os.PathLike[str] | Sequence[Any]) -> None:
        self._open(core.TFRecordDataSource(paths))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return self.aio.size

    def copy(self) -> Self:
        """Return an independently closable source of the same files that shares their index."""
        return copy_of(self)

"""The sync API of :mod:`granular.aio.datasources.arrayrecord.source`."""

from collections.abc import Sequence
from typing import Any

from granular.aio.datasources.arrayrecord import source as core
from granular.sync.base import Batched, RecordReader, sync_doc


class ArrayRecordDataSource(RecordReader[core.ArrayRecordDataSource], Batched):
    __doc__ = sync_doc(core.ArrayRecordDataSource)

    aio: core.ArrayRecordDataSource

    def __init__(self, paths: core.FileSpec | Sequence[core.FileSpec] | Any, verify: bool = False) -> None:
        self._open(core.ArrayRecordDataSource(paths, verify))

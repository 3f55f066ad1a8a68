"""The sync API of :mod:`granular.aio.bags.reader` and :mod:`granular.aio.bags.writer`."""

import os
from typing import Any, Literal, Self

from granular.aio.bags import reader, writer
from granular.aio.paths.pure import PurePath
from granular.formats.plain import Buffer
from granular.sync.base import RecordReader, SyncObject, blocking, copy_of, sync_doc


class BagReader(RecordReader[reader.BagReader]):
    __doc__ = sync_doc(reader.BagReader)

    aio: reader.BagReader

    def __init__(
        self,
        source: PurePath | str | os.PathLike[str] | Buffer | Any,
        cache_index: bool = True,
        cache_data: bool = False,
        *,
        index: PurePath | str | os.PathLike[str] | Buffer | Any = None,
        verify: bool = False,
    ) -> None:
        self._open(reader.BagReader(source, cache_index, cache_data, index=index, verify=verify))

    @property
    def version(self) -> int:
        """The version of the bag's format: 1, 2 or 3."""
        return self.aio.version

    @property
    def size(self) -> int:
        """Bytes of the records and of the table."""
        return self.aio.size

    def copy(self) -> Self:
        """Return an independently closable reader of the same bag that shares its caches."""
        return copy_of(self)


class BagWriter(SyncObject[writer.BagWriter]):
    __doc__ = sync_doc(writer.BagWriter)

    def __init__(
        self,
        path: PurePath | str | os.PathLike[str] | Any,
        version: int = 2,
        resume: Literal['check', 'discard'] = 'check',
        checksums: bool = True,
    ) -> None:
        self._open(writer.BagWriter(path, version, resume, checksums))

    @property
    def size(self) -> int:
        """Bytes of the appended records and of their table."""
        return self.aio.size

    def __len__(self) -> int:
        return len(self.aio)

    append = blocking(writer.BagWriter.append)
    flush = blocking(writer.BagWriter.flush)

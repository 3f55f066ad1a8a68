"""The sync API of :mod:`granular.aio.bags.reader` and :mod:`granular.aio.bags.writer`."""

import os
from collections.abc import Iterator
from typing import Any, Literal, Self, SupportsIndex, cast, overload

from granular.aio.bags import reader as core
from granular.aio.bags import writer as corewriter
from granular.aio.bags.reader import Buffer
from granular.aio.paths.pure import PurePath
from granular.aio.runtime.bridge import run
from granular.sync.base import Reader, SyncObject, blocking
from granular.sync.iteration import Iteration


class BagReader(Reader[core.BagReader]):
    """Random access to the records of a bag of any version, from a path or from bytes.

    ::

        with granular.BagReader('s3://bucket/data/title.bag') as reader:
            record = reader[0]
            last_ten = reader[-10:]
            records = reader.fetch([3, 1, 4])

    Args:
      source: the ``.bag`` file, or its content.
      cache_index: keep the table of limits in memory, so that a read is one request. Otherwise only the limits needed
        are read.
      cache_data: keep the records in memory.
      index: the ``.idx`` file of a bag of version 3, or its content; by default the file of that name beside the bag.
      verify: check each record against its checksum, which the writer must have stored. Memory: 4 bytes per record.
    """

    def __init__(
        self,
        source: PurePath | str | os.PathLike[str] | Buffer | Any,
        cache_index: bool = True,
        cache_data: bool = False,
        *,
        index: PurePath | str | os.PathLike[str] | Buffer | Any = None,
        verify: bool = False,
    ) -> None:
        self._open(core.BagReader(source, cache_index, cache_data, index=index, verify=verify))

    @property
    def version(self) -> int:
        """The version of the bag's format: 1, 2 or 3."""
        return self.aio.version

    @property
    def size(self) -> int:
        """Bytes of the records and of the table."""
        return self.aio.size

    def __len__(self) -> int:
        return len(self.aio)

    @overload
    def __getitem__(self, index: SupportsIndex) -> bytes: ...
    @overload
    def __getitem__(self, index: slice | range) -> list[bytes]: ...
    def __getitem__(self, index: SupportsIndex | slice | range) -> bytes | list[bytes]:
        return cast(bytes | list[bytes], run(self.aio.get(index)))

    def get(self, index: SupportsIndex | slice | range) -> bytes | list[bytes]:
        """Return the record at an index, or the records of a slice, like ``reader[index]``."""
        return cast(bytes | list[bytes], run(self.aio.get(index)))

    def fetch(self, indices: Any) -> list[bytes]:
        """Return the records at many indices; neighbouring ones share a request. Indices may repeat or be negative."""
        return run(self.aio.fetch(indices))

    def copy(self) -> Self:
        """Return an independently closable reader of the same bag that shares its caches."""
        twin = type(self).__new__(type(self))
        twin.aio = self.aio.copy()
        return twin

    def __iter__(self) -> Iterator[bytes]:
        return Iteration(self.aio.__aiter__)


class BagWriter(SyncObject[corewriter.BagWriter]):
    """Appends records to a new bag, or to an existing local bag of version 3.

    ::

        with granular.BagWriter('./titles.bag', checksums=True) as writer:
            for title in titles:
                writer.append(title.encode())

    Args:
      path: the ``.bag`` file, which must not exist unless it is a local bag of version 3.
      version: 1, 2 or 3. A bag of version 2 that holds an empty record is written as version 1, which can represent it.
      resume: how to treat bytes after the last limit of a version 3 bag, left by a crash: ``'check'`` that the records
        appended next are the same bytes, or ``'discard'`` them.
      checksums: store a CRC32C of each record beside the bag, for readers that verify. Appending to a bag that has
        checksums always stores them.
    """

    def __init__(
        self,
        path: PurePath | str | os.PathLike[str] | Any,
        version: int = 2,
        resume: Literal['check', 'discard'] = 'check',
        checksums: bool = False,
    ) -> None:
        self._open(corewriter.BagWriter(path, version, resume, checksums))

    @property
    def size(self) -> int:
        """Bytes of the appended records and of their table."""
        return self.aio.size

    def __len__(self) -> int:
        return len(self.aio)

    def append(self, record: bytes | bytearray | memoryview, flush: bool = True) -> int:
        """Append a record and return its index.

        Args:
          record: the bytes of the record.
          flush: flush at once, see ``flush``. In a bucket, bytes are uploaded in parts, each when it is full.
        """
        return run(self.aio.append(record, flush))

    flush = blocking(corewriter.BagWriter.flush)

"""Bags, with I/O that blocks: the synchronous face of :mod:`granular.aio.bags.reader`."""

import os
from collections.abc import Iterator
from typing import Any, Literal, Self, SupportsIndex, cast, overload

from granular.aio.bags import reader as core
from granular.aio.bags import writer as corewriter
from granular.aio.bags.reader import Buffer
from granular.aio.paths.pure import PurePath
from granular.aio.runtime.bridge import run
from granular.sync.base import Face, Reader
from granular.sync.iteration import Iteration


class BagReader(Reader[core.BagReader]):
    """Random access to the records of a bag of any version, from a place or from bytes.

    Args:
      source: the ``.bag`` file, or its content.
      cache_index: keep the table of limits, so that a read is one request. Without it, only the limits needed are read.
      cache_data: keep the records.
      index: the ``.idx`` file of a bag of version 3, or its content; by default it is looked for beside the bag.
      verify: check each record against its checksum, which the writer must have kept. Memory: 4 bytes a record.
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
        """1, 2 or 3."""
        return self.aio.version

    @property
    def size(self) -> int:
        """Bytes of records and table."""
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
        """The record at an index, or the records of a slice; as ``reader[index]``."""
        return cast(bytes | list[bytes], run(self.aio.get(index)))

    def fetch(self, indices: Any) -> list[bytes]:
        """The records at many indices, with neighbours in one request; repeated and negative ones are welcome."""
        return run(self.aio.fetch(indices))

    def copy(self) -> Self:
        """Another reader of the same bag, with a life of its own, that shares what is cached."""
        twin = type(self).__new__(type(self))
        twin.aio = self.aio.copy()
        return twin

    def __iter__(self) -> Iterator[bytes]:
        return Iteration(self.aio.__aiter__)


class BagWriter(Face[corewriter.BagWriter]):
    """Appends records to a new bag, or to a local one of version 3.

    Args:
      path: the ``.bag`` file, which must not exist, unless it is a local one of version 3.
      version: 1, 2 or 3. A bag asked for as 2 that holds an empty record is written as version 1, which can say so.
      resume: what to do with bytes behind the last limit of a version 3 bag, as a crash leaves them: ``'check'`` that
        the records appended next are those bytes, or ``'discard'`` them.
      checksums: keep a CRC32C of each record beside the bag, for readers that verify. A bag that is appended to and
        has them keeps them in any case.
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
        """Bytes of the records appended and of their table."""
        return self.aio.size

    def __len__(self) -> int:
        return len(self.aio)

    def append(self, record: bytes | bytearray | memoryview, flush: bool = True) -> int:
        """Append a record; returns its index.

        Args:
          record: its bytes.
          flush: hand it on now. To a bucket, bytes go in parts, whenever one is full.
        """
        return run(self.aio.append(record, flush))

    def flush(self) -> None:
        """Hand on what was appended: to the file, or to the part of the upload that is being filled."""
        run(self.aio.flush())

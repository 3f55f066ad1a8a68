"""Reads TFRecord files at random: indexed once, then read by range requests."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final, Self, SupportsIndex, overload

import numpy as np

from granular.aio.datasources.arguments import Paths, as_paths, name_of
from granular.aio.datasources.scanning import forget_indices, index_files
from granular.aio.datasources.tfrecord.index import Index, Scanner, pack, unpack
from granular.aio.paths.path import Path
from granular.aio.runtime.readahead import pages
from granular.aio.runtime.sampling import Sampling
from granular.aio.runtime.sharing import sharing
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import offload
from granular.aio.stores import Store
from granular.aio.stores.fanout import Job, read_all
from granular.config import MiB
from granular.errors import ObjectChangedError
from granular.formats.tfrecord import OVERHEAD, check_data
from granular.indexing import Ints, index_of, indices_of

_INLINE: Final = MiB  # up to this many bytes of records, checksums are computed on the event loop
_FOOTER: Final = 4


class TFRecordDataSource(Sampling[bytes]):
    """Random access to the records of TFRecord files, on a disk or in buckets, in the order given.

    ::

        async with granular.aio.TFRecordDataSource('s3://bucket/train.tfrecord') as source:
            record = await source.get(0)
            last_ten = await source.get(slice(-10, None))
            records = await source.fetch([3, 1, 4])

    Records are bytes; ``granular.formats.decode_example`` returns the features of those that are a
    ``tf.train.Example``. TensorFlow is not needed.

    TFRecord files have no index, so opening reads the headers once, of eight files at a time: with reads of 16 MiB that
    include the data, or with small reads from header to header where records are larger than 4 MiB on average. With
    ``IOConfig.index_cache`` the index of a file in a bucket is cached on the local disk, bound to the file's ETag or
    generation, and validated with one request. After that a batch reads only the byte ranges of its records, from all
    files concurrently.

    Both checksums of a record are checked: that of its length while the file is indexed, that of its data at each read.
    A file is pinned to the version that was indexed. Memory: 8 bytes per record.

    Args:
      paths: a file, or a sequence of files, not compressed. ``TFRecordIterDataset`` reads compressed files, in order.

    Raises:
      CorruptRecordError: if a checksum is wrong, or a file is truncated or is not a TFRecord file.
      UnsupportedError: if it is compressed.
    """

    def __init__(self, paths: Paths) -> None:
        super().__init__()
        self.paths: tuple[Path, ...] = as_paths(paths)
        self._name = name_of(self.paths)
        self._indices: list[Index] = []
        self._stops = np.zeros(0, np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        if sharing.get() and self._indices:
            return _shared, (type(self), self.paths, self._indices)
        return type(self), (self.paths,)

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self._name!r})'

    # --- opening

    async def _open(self) -> None:
        if not self._indices:
            self._indices = await index_files(self.paths, 'TFRecord', Scanner, pack, unpack)
        self._stops = np.cumsum([len(index.stops) for index in self._indices], dtype=np.int64)

    async def _close(self) -> None:
        pass

    @property
    def size(self) -> int:
        """Bytes of all files."""
        self._check_open()
        return sum(index.size for index in self._indices)

    def _size_of(self, mask: Any) -> int | None:
        return self.size if self._state == 'open' else None

    @property
    def _identity(self) -> tuple[Any, ...]:
        """The files in order, each by store, address, bytes and version."""
        return tuple(
            (p.store.fingerprint, f'{p}', i.size, i.version) for p, i in zip(self.paths, self._indices, strict=True)
        )

    def __len__(self) -> int:
        self._check_open()
        return int(self._stops[-1])

    def copy(self) -> Self:
        """Return an independently closable source of the same files that shares their index."""
        self._check_open()
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        return copy

    # --- reading

    @overload
    async def get(self, index: SupportsIndex) -> bytes: ...
    @overload
    async def get(self, index: slice | range) -> list[bytes]: ...
    async def get(self, index: SupportsIndex | slice | range) -> bytes | list[bytes]:
        """Return the record at an index, negative from the end, or the records of a slice.

        Raises:
          OutOfRangeError: an ``IndexError``.
        """
        await self._ensure_open()
        if isinstance(index, slice | range):
            return await self.fetch(index)
        return (await self.fetch([index_of(index, len(self), self._name)]))[0]

    async def fetch(self, indices: Any) -> list[bytes]:
        """Return many records, read from all files concurrently.

        Args:
          indices: a 1-D sequence of integers, in any order, repeated or negative; or a slice or range.

        Returns:
          The records, in the order requested.

        Raises:
          CorruptRecordError: if a checksum is wrong; it names the file and the record's number in it.
        """
        await self._ensure_open()
        positions = indices_of(indices, len(self), self._name)
        owners = np.searchsorted(self._stops, positions, side='right')
        stores: dict[Store, list[tuple[int, Ints, Job]]] = {}
        for owner in np.unique(owners).tolist():
            index, path = self._indices[owner], self.paths[owner]
            targets = np.flatnonzero(owners == owner)
            numbers = positions[targets] - (self._stops[owner - 1] if owner else 0)
            starts, stops = index.limits(numbers)
            job = Job(path.key, starts, stops, index.version)
            stores.setdefault(path.store, []).append((owner, targets, job))
        try:
            read = await gather([read_all(store, [job for *_, job in jobs]) for store, jobs in stores.items()])
        except ObjectChangedError:
            await forget_indices(self.paths[owner] for owner in np.unique(owners).tolist())
            raise
        raw: list[bytes] = [b''] * len(positions)
        for jobs, store_data in zip(stores.values(), read, strict=True):
            for (_, targets, _), data in zip(jobs, store_data, strict=True):
                for target, piece in zip(targets.tolist(), data, strict=True):
                    raw[target] = piece
        if sum(map(len, raw)) <= _INLINE:
            return self._checked(raw, positions, owners)
        return await offload(self._checked, raw, positions, owners)

    def _checked(self, raw: list[bytes], positions: Ints, owners: Ints) -> list[bytes]:
        """Check the data of records against the checksums behind them, and return them."""
        records = []
        for piece, position, owner in zip(raw, positions.tolist(), owners.tolist(), strict=True):
            number = position - (int(self._stops[owner - 1]) if owner else 0)
            records.append(check_data(piece[:-_FOOTER], piece[-_FOOTER:], number, f'{self.paths[owner]}'))
        return records

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await self._ensure_open()
        local = all(path.store.local for path in self.paths)
        size = self.size - OVERHEAD * len(self)
        async with contextlib.aclosing(pages(self.fetch, len(self), size, local)) as items:
            async for record in items:
                yield record


def _shared(kind: type[TFRecordDataSource], paths: tuple[Path, ...], indices: list[Index]) -> TFRecordDataSource:
    """Unpickle a source in a worker process, with the indices that its parent has read."""
    source = kind(paths)
    source._indices = indices
    return source

"""Read bags: consecutive records and a table of their limits."""

from typing import Any, Self, SupportsIndex, overload

import numpy as np

from granular._support.indexing import Ints, cut_to, index_of, indices_of
from granular.aio.bags.bag import Bag, read_digests
from granular.aio.bags.identity import Identity, PinnedSource
from granular.aio.bags.index_cache import take_first
from granular.aio.bags.records import FEW, Rows, read_records
from granular.aio.paths.path import Path
from granular.aio.paths.pure import AnyPath
from granular.aio.runtime.immediate import is_immediate
from granular.aio.runtime.threads import offload
from granular.aio.stores.fanout import retry_if_corrupt
from granular.aio.stores.local.files import IN_PLACE
from granular.formats.base import Buffer
from granular.metrics import timing


class BagReader(PinnedSource[bytes]):
    """Random access to the records of a bag of any version, from a file or from bytes.

    Opening takes one round trip, and two for a bag of version 3, whose two files must be of one bag; a table larger
    than ``IOConfig.tail``, ``cache_data`` and ``verify`` each add at most one. Memory: 8 bytes per record with
    ``cache_index``; the whole bag with ``cache_data``.

    Args:
      source: the ``.bag`` file, or its content.
      cache_index: keep the table of limits in memory, so that a read takes one request. Otherwise only the limits that
        a read needs are fetched.
      cache_data: keep the records in memory.
      index: the ``.idx`` file of a version 3 bag, or its content; by default the file beside the bag, if there is one.
      verify: check each record against its checksum; the bag must have been written with checksums, as by default.
        Memory: 4 bytes per record.

    Example::

        async with granular.aio.BagReader('s3://bucket/digits/image.bag') as bag:
            print(len(bag), await bag.get(-1))
            records = await bag.fetch([3, 1, 41])
    """

    def __init__(
        self,
        source: AnyPath | Buffer,
        cache_index: bool = True,
        cache_data: bool = False,
        *,
        index: AnyPath | Buffer | None = None,
        verify: bool = False,
    ) -> None:
        super().__init__()
        self._source = bytes(source) if isinstance(source, Buffer) else Path(source)
        self._index = bytes(index) if isinstance(index, Buffer) else None if index is None else Path(index)
        self._options = (cache_index, cache_data, verify)
        self._bag = Bag(self._source, cache_index, cache_data, index=self._index, verify=verify)
        self._name = self._bag.name

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cache_index, cache_data, verify = self._options
        return (self._source, cache_index, cache_data), {'index': self._index, 'verify': verify}

    def identity(self) -> tuple[Any, ...]:
        size, version, table = self._bag.identity().told
        return self._bag.origin, size, '' if self._bag.path is None else version, table

    async def _identify(self) -> None:
        await self._bag.read_digest()

    async def _open(self) -> None:
        await self._bag.open()
        path = self._bag.path
        await read_digests({} if path is None else {path.name: self._bag}, self._expected)
        await offload(self._check_files)

    def _opened_files(self) -> Identity | None:
        path = self._bag.path
        return None if path is None else Identity.of([path.store], {path.name: self._bag.identity()})

    async def _close(self) -> None:
        self._bag.close()

    def copy(self) -> Self:
        """Return an independently closable reader of the same bag that shares its caches."""
        return self._copied(_bag=self._bag.copy())

    @property
    def version(self) -> int:
        """The version of the bag's format: 1, 2 or 3."""
        self._check_open()
        return self._bag.version

    @property
    def size(self) -> int:
        """Bytes of records and table."""
        self._check_open()
        return self._bag.size

    def __len__(self) -> int:
        self._check_open()
        return self._bag.length

    @overload
    async def get(self, index: SupportsIndex) -> bytes: ...
    @overload
    async def get(self, index: slice | range) -> list[bytes]: ...
    async def get(self, index: SupportsIndex | slice | range) -> bytes | list[bytes]:
        """Return the record at an index, or the records of a slice, or of a range, which is cut at the last record.

        Raises:
          OutOfRangeError: an ``IndexError``, for an index out of range, or a range that begins beyond the end.
        """
        if self._state != 'open':
            await self._ensure_open()
        if isinstance(index, slice | range):
            return await self.fetch(cut_to(index, self._bag.length))
        bag = self._bag
        position = index_of(index, bag.length, bag.name)
        if bag.immediate and (is_immediate() or bag.size_of(position) <= IN_PLACE):
            return bag.read_now(position)
        return (await self._fetch(np.array([position])))[0]

    async def fetch(self, indices: Any) -> list[bytes]:
        if self._state != 'open':
            await self._ensure_open()
        return await self._fetch(indices_of(indices, self._bag.length, self._bag.name))

    async def _fetch(self, indices: Ints) -> list[bytes]:
        bag = self._bag
        if bag.proof is not None:
            await take_first([bag.proof])
        if len(indices) <= FEW and bag.immediate and not timing.on:
            positions = indices.tolist()
            if is_immediate() or sum(map(bag.size_of, positions)) <= IN_PLACE:
                return [bag.read_now(position) for position in positions]
        return await retry_if_corrupt(self._bag.is_remote, lambda: read_records(Rows.of(self._bag, indices)))

    def _file_bytes(self, mask: Any) -> int | None:
        return self._bag.size if self._state == 'open' else None

    async def _reading(self) -> tuple[int, bool]:
        return self._bag.size, not self._bag.is_remote


def reader_of_bag(bag: Bag, cache_index: bool, cache_data: bool, verify: bool) -> BagReader:
    """Return a reader of a bag, open if the bag is."""
    reader = BagReader(bag.require_path(), cache_index, cache_data, verify=verify)
    if bag.opened:
        reader._bag, reader._state = bag.copy(), 'open'
    return reader


def bag_of(reader: BagReader) -> Bag:
    return reader._bag

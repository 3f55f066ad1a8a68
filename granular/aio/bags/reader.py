"""Read bags: consecutive records and a table of their limits. docs/format.md describes the bytes."""

import contextlib
import hashlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Self, SupportsIndex, TypeVar, overload

import numpy as np

from granular.aio.bags.identity import FileIdentity, Identity, reopened
from granular.aio.bags.index_cache import BagState
from granular.aio.http.reply import Reply, changed, counters, stands_in
from granular.aio.paths.path import Path
from granular.aio.runtime.lifecycle import AsyncResource
from granular.aio.runtime.loops import running_loop
from granular.aio.runtime.readahead import pages
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import offload
from granular.aio.stores.errors import translated
from granular.aio.stores.fanout import Job, read_all
from granular.aio.stores.local.files import IN_PLACE, files
from granular.config import MiB
from granular.errors import CorruptBagError, CorruptError, InvalidArgumentError, NotFoundError, UnsupportedError
from granular.formats import layout
from granular.formats.checksums import SUFFIX, Sums, check, load
from granular.indexing import Ints, index_of, indices_of

Buffer = bytes | bytearray | memoryview
T = TypeVar('T')

logger = logging.getLogger('granular')


class BagReader(AsyncResource):
    """Random access to the records of a bag of any version, from a file or from bytes.

    Opening takes one round trip; a table larger than ``IOConfig.tail``, ``cache_data`` and ``verify`` each add at
    most one. Memory: 8 bytes per record with ``cache_index``; the whole bag with ``cache_data``.

    Args:
      source: the ``.bag`` file, or its content.
      cache_index: keep the table of limits in memory, so that a read takes one request. Otherwise only the limits that
        a read needs are fetched.
      cache_data: keep the records in memory.
      index: the ``.idx`` file of a version 3 bag, or its content; by default the file beside the bag, if there is one.
      verify: check each record against its checksum; the bag must have been written with ``checksums=True``. Memory:
        4 bytes per record.

    Example::

        async with granular.aio.BagReader('s3://bucket/digits/image.bag') as bag:
            print(len(bag), await bag.get(-1))
            records = await bag.fetch([3, 1, 41])
    """

    def __init__(
        self,
        source: Path | str | os.PathLike[str] | Buffer | Any,
        cache_index: bool = True,
        cache_data: bool = False,
        *,
        index: Path | str | os.PathLike[str] | Buffer | Any = None,
        verify: bool = False,
    ) -> None:
        super().__init__()
        self._data: bytes | None = bytes(source) if isinstance(source, Buffer) else None
        self._index: bytes | None = bytes(index) if isinstance(index, Buffer) else None
        self._path = None if self._data is not None else Path(source)
        self._index_path = None if index is None or self._index is not None else Path(index)
        self._split: bool | None = None if index is None else True
        self.cache_index, self.cache_data, self.verify = cache_index, cache_data, verify
        self._sums: Sums | None = None
        self.name = f'<{len(source)} bytes>' if isinstance(source, Buffer) else f'{self._path}'
        self._limits: Ints | None = None
        self._view: memoryview | None = None
        self._version = self._length = self._datasize = self._size = 0
        self._pin: str | None = None
        self._handle: tuple[str, str] | None = None
        self._table: tuple[Path, int, str | None] | None = None
        self._known: BagState | None = None
        self._files: list[tuple[Path, FileIdentity]] = []
        self.expected: Identity | None = None

    @classmethod
    def of_version(
        cls, path: Path, split: bool, cache_index: bool, cache_data: bool, verify: bool, known: BagState | None = None
    ) -> Self:
        """Return a reader for a bag known to be of version 3 (``split``) or not, or whose whole state is known."""
        reader = cls(path, cache_index, cache_data, verify=verify)
        reader._split, reader._known = split, known
        return reader

    def __reduce__(self) -> tuple[Any, ...]:
        source = self._path if self._path is not None else self._data
        index = self._index_path if self._index is None else self._index
        options = {'index': index, 'verify': self.verify}
        identity = None
        if self._path is not None and self._state == 'open':
            identity = Identity.of(self._path.store, {self._path.name: self.identity})
        return reopened, (type(self), (source, self.cache_index, self.cache_data), options, identity)

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self.name!r})'

    @property
    def origin(self) -> str:
        """The identity of the store and the file; for a bag in memory, a digest of its bytes."""
        if self._path is None:
            return hashlib.sha256((self._data or b'') + (self._index or b'')).hexdigest()
        return f'{self._path.store.fingerprint} {self.name}'

    # --- opening

    async def _open(self) -> None:
        try:
            await self._open_whole()
        except CorruptBagError:
            if not self.is_remote:
                raise
            await self._open_whole()  # retry: the bytes may have been damaged on the way
        if self.expected is not None and self._path is not None:
            self.expected.check(Identity.of(self._path.store, {self._path.name: self.identity}), self.name)

    async def _open_whole(self) -> None:
        self._files = []
        await self._open_bag()
        if self.verify:
            path = self.beside(SUFFIX)
            try:
                data = await path.read_bytes()
            except NotFoundError as error:
                raise CorruptBagError(
                    f'{self.name}: has no checksums to verify: it was written without checksums=True: {error}'
                ) from error
            self._sums = load(data, self._length, f'{path}')

    async def _open_bag(self) -> None:
        if self._path is None:
            await self._open_buffer(self._data or b'')
            return
        await self._path.store.ready()
        if self._known is not None:
            await self._recall(self._known, self._path)
            return
        tail = self._path.store.config.tail
        index = self._index_path or self._path.with_suffix('.idx')
        asked = [self._path.store.read(self._path.key, -tail)]
        if self._split is not False and self._index is None and index != self._path:
            asked.append(_or_none(index, tail, missing_ok=self._split is None))
        replies = await gather(asked)
        end, index_end = replies[0], replies[1] if len(replies) > 1 else None
        if index_end is not None and layout.last_limit(index_end.data, index_end.size) > end.size:
            # A writer may have appended between the two reads: the index is newer than the end of the bag.
            end = await self._path.store.read(self._path.key, -tail)
        self._opened(self._path, end)
        self._pin = end.version
        if self._pin is not None:
            self._handle = self._path.key, self._pin
        if index_end is not None:
            self._opened(index, index_end)
        if index_end is not None or self._index is not None:
            await self._open_split(end, index, index_end)
        else:
            await self._open_single(end)
        if self.cache_data:
            whole = Job(self._path.key, np.array([0]), np.array([end.size]), self._pin)
            self._data = (await read_all(self._path.store, [whole]))[0][0] if end.start else end.data

    def _opened(self, path: Path, end: Reply) -> None:
        """Record the identity of an opened file.

        Raises:
          UnsupportedError: if the file has no version, so that later reads could not detect a replacement.
        """
        if end.version is None and end.size:
            raise UnsupportedError(
                f'{path}: the server gives neither an ETag nor a Last-Modified, by which to tell whether it is '
                f'replaced while it is read: copy it to a disk first, or have the server send one of them'
            )
        self._files.append((path, FileIdentity(end.size, end.version)))

    @property
    def identity(self) -> FileIdentity:
        """The size of an open bag with its table, and the version of the file that holds the records."""
        return FileIdentity(self._size, self._pin)

    async def check_versions(self) -> None:
        """Check that the files are still those that were opened.

        Raises:
          ObjectChangedError: if a file was replaced.
          NotFoundError: if a file was removed.
        """
        await gather([_check_version(path, identity) for path, identity in self._files])

    async def _recall(self, known: BagState, path: Path) -> None:
        """Open the bag from cached state. The first read fails if the file was replaced since."""
        self._version, self._size, self._datasize, self._pin, self._limits = known
        self._length, self._view = len(self._limits) - 1, layout.view_of(self._limits)
        self._handle = path.key, known.pin
        end = self._datasize if self._version == 3 else self._size
        self._files.append((path, FileIdentity(end, self._pin)))
        if self.cache_data:
            self._data = (await path.read_ranges([0], [end], version=self._pin))[0]

    @property
    def known(self) -> BagState | None:
        """The state of an open bag for the index cache; None without the table in memory or with a stand-in version."""
        if self._limits is None or self._pin is None or stands_in(self._pin):
            return None
        return BagState(self._version, self._size, self._datasize, self._pin, self._limits)

    async def _open_buffer(self, data: bytes) -> None:
        end = Reply(data, 0, len(data), None)
        if self._index is not None or self._index_path is not None:
            index_end = None if self._index_path is None else await self._index_path.store.read(self._index_path.key)
            await self._open_split(end, self._index_path, index_end)
        else:
            await self._open_single(end)

    async def _open_single(self, end: Reply) -> None:
        self._size = end.size
        if not end.size:
            self._version, self._limits = 2, layout.blank_limits(0, self.name)
            self._view = layout.view_of(self._limits)
            return
        start = self._datasize = layout.table_start(end.data, end.size, self.name)
        if self.cache_index or self._data is not None or self.cache_data:
            filled = await self._table_into(self._path, start, end)
            self._version, self._limits = layout.finish_limits(filled, start, self.name)
            self._length, self._view = len(self._limits) - 1, layout.view_of(self._limits)
            return
        path = self._require_path()
        if start >= end.start:
            first = end.data[start - end.start : start - end.start + layout.LIMIT]
        else:
            first = (await path.read_ranges([start], [start + layout.LIMIT], version=self._pin))[0]
        self._version = 1 if not int.from_bytes(first, 'little') else 2
        skip = layout.LIMIT if self._version == 1 else 0
        self._length = (end.size - start - skip) // layout.LIMIT
        self._table = (path, start + skip, self._pin)

    async def _open_split(self, end: Reply, index: Path | None, index_end: Reply | None) -> None:
        if index_end is None:
            index_end = Reply(self._index or b'', 0, len(self._index or b''), None)
        self._version, self._datasize = 3, end.size
        self._length = layout.check_count(index_end.size // layout.LIMIT, self.name)
        self._size = end.size + index_end.size
        if self.cache_index or self.cache_data or index is None or not self._length:
            usable = self._length * layout.LIMIT
            kept = index_end._replace(data=index_end.data[: max(0, usable - index_end.start)], size=usable)
            filled = await self._table_into(index, 0, kept)
            self._limits = layout.check_limits(filled, end.size, self.name)
            self._view = layout.view_of(self._limits)
        else:
            self._table = (index, 0, index_end.version)

    async def _table_into(self, path: Path | None, start: int, end: Reply) -> Ints:
        """Return a zero and the limits from ``start`` to the end of a file, of which ``end`` is read already."""
        filled = layout.blank_limits((end.size - start) // layout.LIMIT, self.name)
        target = memoryview(filled[1:].data).cast('B')
        have = max(start, end.start)
        target[have - start :] = memoryview(end.data)[have - end.start :]
        if start < have:
            table = path or self._require_path()
            await table.store.read_into(table.key, start, have, end.version, target[: have - start])
        return filled

    def _require_path(self) -> Path:
        if self._path is None:
            raise InvalidArgumentError(f'{self.name}: has no place')
        return self._path

    async def _close(self) -> None:
        self._limits = self._view = None
        self._data = None if self._path is not None else self._data

    def copy(self) -> Self:
        """Return an independently closable reader of the same bag that shares its caches."""
        self._check_open()
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    # --- properties

    @property
    def version(self) -> int:
        """1, 2 or 3."""
        self._check_open()
        return self._version

    @property
    def size(self) -> int:
        """Bytes of records and table."""
        self._check_open()
        return self._size

    def __len__(self) -> int:
        self._check_open()
        return self._length

    @property
    def immediate(self) -> bool:
        """True if a record can be read without waiting: its limits are in memory, the record too or on a local disk."""
        return self._view is not None and (self._data is not None or self._require_path().store.local)

    # --- reading

    @overload
    async def get(self, index: SupportsIndex) -> bytes: ...
    @overload
    async def get(self, index: slice | range) -> list[bytes]: ...
    async def get(self, index: SupportsIndex | slice | range) -> bytes | list[bytes]:
        """Return the record at an index, or the records of a slice.

        Raises:
          OutOfRangeError: an ``IndexError``, for an index out of range.
        """
        await self._ensure_open()
        if isinstance(index, slice | range):
            return await self.fetch(index)
        place = index_of(index, self._length, self.name)
        if self.immediate and (running_loop() is None or self.length_of(place) <= IN_PLACE):
            return self.get_now(place)
        return (await self._fetch(np.array([place])))[0]

    async def fetch(self, indices: Any) -> list[bytes]:
        """Return the records at many indices, repeated and negative ones included; neighbours share a request."""
        await self._ensure_open()
        return await self._fetch(indices_of(indices, self._length, self.name))

    async def _fetch(self, places: Ints) -> list[bytes]:
        async def read(fresh: bool) -> list[bytes]:
            return (await read_records([(self, places)], fresh))[0]

        return await once_more(read, self.is_remote)

    @property
    def is_remote(self) -> bool:
        """True if the bag is read over a network, where the bytes of an intact file may arrive damaged."""
        return self._path is not None and not self._path.store.local

    def length_of(self, place: int) -> int:
        """Return the bytes of a record of an immediate bag."""
        view: Any = self._view
        return int(view[place + 1] - view[place])

    def get_now(self, place: int) -> bytes:
        """Return a record of an immediate bag."""
        view: Any = self._view
        start, stop = view[place], view[place + 1]
        if self._data is not None:
            return self.checked(place, self._data[start:stop])
        handle: Any = self._handle
        try:
            file = files.opened.get(handle) or files.pinned(*handle)
            data = os.pread(file.fd, stop - start, start) if stop - start <= IN_PLACE else b''
            if len(data) != stop - start:
                data = file.exactly(handle[0], start, stop)
            file.check(handle[0])
        except OSError:
            with translated(handle[0]):
                raise
        counters.ranges += 1
        counters.requests += 1
        counters.bytes += stop - start
        return self.checked(place, data)

    def checked(self, place: int, record: bytes) -> bytes:
        """Return a record after comparing it with its checksum, if checksums are verified."""
        if self._sums is not None:
            check(self._sums, np.array([place]), [record], self.name)
        return record

    def beside(self, suffix: str) -> Path:
        """Return the path of this bag with another suffix."""
        return self._require_path().with_suffix(suffix)

    @property
    def sums(self) -> Sums | None:
        """The checksums of all records, if they are verified."""
        return self._sums

    def limits(self, places: Ints) -> tuple[Ints, Ints] | None:
        """Return the starts and stops of records, if the table is in memory."""
        self._check_open()
        return None if self._limits is None else (self._limits[places], self._limits[places + 1])

    def table_job(self, places: Ints) -> Job:
        """Return the read of the table entries that hold the limits of records, if the table is not in memory."""
        if self._table is None:
            raise InvalidArgumentError(f'{self.name}: its table is cached')
        path, start, pin = self._table
        at = start + layout.LIMIT * places
        return Job(path.key, np.where(places > 0, at - layout.LIMIT, at), at + layout.LIMIT, pin)

    def limits_in(self, places: Ints, pieces: Sequence[bytes]) -> tuple[Ints, Ints]:
        """Return the starts and stops of records, from the bytes read by ``table_job``."""
        flat = np.frombuffer(b''.join(pieces), '<i8')
        # The first record's start is not in the table: it has one limit, the others have two.
        behind = np.cumsum(np.where(places > 0, 2, 1)) - 1
        stops = flat[behind]
        starts = np.where(places > 0, flat[behind - 1], 0)
        bad = (starts < 0) | (stops < starts) | (stops > self._datasize)
        if bad.any():
            i = int(np.argmax(bad))
            raise CorruptBagError(
                f'{self.name}: record {places[i]} has limits {starts[i]} to {stops[i]}, of {self._datasize} bytes'
            )
        return starts, stops

    def data_job(self, starts: Ints, stops: Ints) -> Job:
        """Return the read of the bytes of records."""
        return Job(self._require_path().key, starts, stops, self._pin)

    def in_memory(self, starts: Ints, stops: Ints) -> list[bytes] | None:
        """Return the bytes of records, if they are in memory."""
        data = self._data
        if data is None:
            return None
        return [data[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await self._ensure_open()
        local = self._path is None or self._path.store.local
        async with contextlib.aclosing(pages(self.fetch, self._length, self._size, local)) as items:
            async for record in items:
                yield record


async def once_more(read: Callable[[bool], Awaitable[T]], remote: bool) -> T:
    """Return ``read(False)``, or, if that finds corrupt data, ``read(True)``, which bypasses the store's caches.

    An intact file may arrive damaged, or be damaged in a cache. A local disk is read only once: a retry would return
    the same bytes.
    """
    try:
        return await read(False)
    except CorruptError as error:
        if not remote:
            raise
        logger.warning('read once more, as what came is corrupt: %s', error)
        return await read(True)


async def read_records(wanted: Sequence[tuple[BagReader, Ints]], fresh: bool = False) -> list[list[bytes]]:
    """Read records of many bags of one store: one fan-out for the limits that are not in memory, one for the data.

    Args:
      wanted: the bags, each with the indices of its records.
      fresh: bypass the store's caches.
    """
    limits = [bag.limits(places) for bag, places in wanted]
    unknown = [i for i, found in enumerate(limits) if found is None]
    remote = next((bag for bag, _ in wanted if bag._path is not None), None)
    store = None if remote is None else remote._require_path().store
    if unknown and store is not None:
        tables = await read_all(store, [wanted[i][0].table_job(wanted[i][1]) for i in unknown], fresh)
        for i, pieces in zip(unknown, tables, strict=True):
            limits[i] = wanted[i][0].limits_in(wanted[i][1], pieces)
    known = [found for found in limits if found is not None]
    for (bag, places), (starts, stops) in zip(wanted, known, strict=True):
        if (total := int((stops - starts).sum())) > bag._datasize:
            if len(np.unique(places)) == len(places):
                raise CorruptBagError(f'{bag.name}: {len(places)} records have {total} bytes of {bag._datasize}')
            return await _read_once(wanted, fresh)
    out = [bag.in_memory(*found) for (bag, _), found in zip(wanted, known, strict=True)]
    absent = [i for i, records in enumerate(out) if records is None]
    if absent and store is not None:
        pieces_of = await read_all(store, [wanted[i][0].data_job(*known[i]) for i in absent], fresh)
        for i, records in zip(absent, pieces_of, strict=True):
            out[i] = records
    found = [records for records in out if records is not None]
    for (bag, places), records in zip(wanted, found, strict=True):
        if bag.sums is not None:
            if sum(map(len, records)) <= MiB:
                check(bag.sums, places, records, bag.name)
            else:
                await offload(check, bag.sums, places, records, bag.name)
    return found


async def _read_once(wanted: Sequence[tuple[BagReader, Ints]], fresh: bool) -> list[list[bytes]]:
    """Read records as ``read_records``, for indices that repeat: each record is read and stored once."""
    distinct = [np.unique(places, return_inverse=True) for _, places in wanted]
    found = await read_records([(bag, once) for (bag, _), (once, _) in zip(wanted, distinct, strict=True)], fresh)
    return [[records[i] for i in again.tolist()] for records, (_, again) in zip(found, distinct, strict=True)]


async def _check_version(path: Path, identity: FileIdentity) -> None:
    if identity.size and identity.version is not None:  # an empty file has no first byte to request
        await path.store.check_version(path.key, identity.version)
    elif (size := (await path.store.read(path.key, -path.store.config.tail)).size) != identity.size:
        raise changed(f'{path}', f'of {identity.size} bytes', f'of {size} bytes')


async def _or_none(path: Path, tail: int, missing_ok: bool) -> Any:
    try:
        return await path.store.read(path.key, -tail)
    except NotFoundError:
        if not missing_ok:
            raise
        return None

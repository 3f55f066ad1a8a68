"""An opened bag: its limits, the reads of its records, and its cached data. docs/format.md describes the bytes."""

import copy
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from granular._support.indexing import Ints
from granular.aio.bags.identity import FileIdentity, Identity, check_files
from granular.aio.bags.index_cache import BagState, Proof
from granular.aio.bags.tables import ArrayTables, PackedTable, Tables
from granular.aio.http.reply import Reply, changed
from granular.aio.paths.path import Path
from granular.aio.runtime.tasks import gather
from granular.aio.stores.base import Target
from granular.aio.stores.errors import translated
from granular.aio.stores.local.files import IN_PLACE, files
from granular.aio.stores.local.locks import is_at
from granular.errors import (
    AccessDeniedError,
    ClosedError,
    CorruptBagError,
    InvalidArgumentError,
    NotFoundError,
    UnsupportedError,
)
from granular.formats import layout
from granular.formats.checksums import SUFFIX, Sums, check, load
from granular.formats.dataset_index import digest_of_limits
from granular.metrics import counters, local_files


class IndexedBag(NamedTuple):
    """A bag as the index of its dataset has it."""

    version: int
    records: int
    size: int  # with the table
    datasize: int
    pin: str | None  # the version of the object that holds the records; None if it is empty
    limits: PackedTable | None  # None to read them from the bag itself, which must be of version 1 or 2


class Bag:
    """A bag for the readers of this package, which check indices and whether they are open.

    Args:
      source, cache_index, cache_data, index, verify: as for ``BagReader``.
      split: True if the limits are in an ``.idx`` file, as in version 3; None if unknown.
      state: the state from an index cache, to open without a request.
    """

    def __init__(
        self,
        source: Path | bytes,
        cache_index: bool = True,
        cache_data: bool = False,
        *,
        index: Path | bytes | None = None,
        verify: bool = False,
        split: bool | None = None,
        state: BagState | None = None,
    ) -> None:
        self.path: Path | None = None if isinstance(source, bytes) else source  # the file
        self.data: bytes | None = source if isinstance(source, bytes) else None  # the file, if it is in memory
        self._index = index
        self._cache_index = cache_index
        self._cache_data = cache_data
        self._verify = verify
        self._alone, self._cached_state = split is None, state  # alone: not of a dataset
        self._split = split if index is None else True
        self.name: str = f'<{len(source)} bytes>' if isinstance(source, bytes) else f'{source}'
        self.opened: bool = False
        # True if records can be read without waiting: limits in memory, records in memory or on a local disk.
        self.immediate: bool = False
        self.version: int = 0
        self.length: int = 0
        self.datasize: int = 0  # bytes of records
        self.size: int = 0  # with the table
        self.sums: Sums | None = None
        self.proof: Proof | None = None  # that its folder is the one of the index that it was opened by
        self.target: Target = Target('' if self.path is None else self.path.key)  # the file that holds the records
        self.tables: Tables | None = None  # that have the limits, under a number; None to read them from the bag itself
        self.number: int = 0
        self._limits: Ints | None = None
        self._view: memoryview | PackedTable | None = None  # It yields an int in a third of the time of an array.
        self.packed: PackedTable | None = None  # the limits, if they are in the index of the dataset
        self._table: tuple[Path, int, Target] | None = None  # file and start, if it is not in memory
        self.files: list[tuple[Path, FileIdentity]] = []
        self._digest: str = ''  # of the limits, once it was asked for

    def copy(self) -> Self:
        """Return an independently closable bag that shares what is cached."""
        return copy.copy(self)

    def close(self) -> None:
        """Drop what is cached."""
        self.opened = self.immediate = False
        self._limits = None
        self._view = None
        self.packed = None
        self.tables = None
        self.proof = None
        self._table = None
        self.target = self.target._replace(kept=None)
        if self.path is not None:
            self.data = None

    async def open(self) -> None:
        try:
            await self._open()
        except CorruptBagError:
            if not self.is_remote:
                raise
            await self._open()  # the bytes may have been damaged on the way
        self.immediate = self._view is not None and (self.data is not None or not self.is_remote)
        self.opened = True

    def open_indexed(self, state: IndexedBag, proof: Proof | None = None) -> None:
        """Open the bag as an index has it, without reading anything. A read fails if the file was replaced since.

        With a proof, records are not read without waiting before ``confirm`` is called, once it was taken.
        """
        path = self.require_path()
        self.version = state.version
        self.length = state.records
        self.size = state.size
        self.datasize = state.datasize
        self.packed = state.limits
        self.target = _kept_open(path, state.pin)
        self.files = [(path, FileIdentity(self.datasize if self.version == 3 else self.size, state.pin))]
        if self.packed is None:
            self._table = (path, self.datasize + (layout.LIMIT if self.version == 1 else 0), self.target)
        else:
            self.tables, self.number = self.packed.tables, self.packed.number
            if self.packed.tables.in_memory:
                self._view = self.packed
        self.proof = proof
        self.opened = True
        if proof is None:
            self.confirm()

    def expect(self, identity: FileIdentity, length: int) -> None:
        """Note the size, version and length of a bag that is not open."""
        self.size, self.length = identity.size, length
        self.target = self.target._replace(version=identity.version)

    def confirm(self) -> None:
        """Read without waiting where that is possible, as the bag is the one in the index."""
        self.proof = None
        self.immediate = self._view is not None and (self.data is not None or not self.is_remote)

    async def read_extras(self) -> None:
        """Read what the options of an indexed bag need in memory: its records, its checksums."""
        path = self.require_path()
        if self._cache_data:
            self.data = await self._read_data(path, self.files[0][1].size)
            self.immediate = self._view is not None
        if self._verify:
            await self.read_sums()

    async def _open(self) -> None:
        self.files = []
        if self.path is None:
            await self._open_content(self.data or b'')
        else:
            await self.path.store.ready()
            self.target = _kept_open(self.path, None)
            if self._cached_state is not None:
                await self._open_state(self._cached_state, self.path)
            else:
                await self._open_file(self.path)
        if self._verify:
            await self.read_sums()

    async def read_sums(self) -> None:
        """Read the checksums of all records, against which those that are read are compared from then on."""
        path = self.require_path().with_suffix(SUFFIX)
        try:
            content = await path.read_bytes()
        except NotFoundError as error:
            raise CorruptBagError(
                f'{self.name}: has no checksums to verify: it was written with checksums=False, or by another '
                f'program: {error}'
            ) from error
        self.sums = load(content, self.length, f'{path}')

    async def _open_content(self, data: bytes) -> None:
        if self._index is None:
            await self._open_single(_whole(data))
        elif isinstance(self._index, bytes):
            await self._open_split(_whole(data), None, _whole(self._index))
        else:
            await self._open_split(_whole(data), self._index, await self._index.store.read(self._index.key))

    async def _open_state(self, state: BagState, path: Path) -> None:
        """Open the bag from cached state. The first read fails if the file was replaced since."""
        self.version = state.version
        self.size = state.size
        self.datasize = state.datasize
        self._keep_limits(state.limits)
        self.target = self.target._replace(version=state.pin)
        self.files = state.files(path)
        if self._cache_data:
            self.data = await self._read_data(path, self.files[0][1].size)

    async def _open_file(self, path: Path) -> None:
        store, tail = path.store, path.store.config.tail
        index = path.with_suffix('.idx') if self._index is None else self._index
        if self._split is False or not isinstance(index, Path) or index == path:
            end, index_end = await store.read(path.key, -tail), None
        elif store.local:
            end = await store.read(path.key, -tail)
            index_end = await _read_end(index, tail, missing_ok=self._split is None)
        else:
            reads = [store.read(path.key, -tail), _read_end(index, tail, missing_ok=self._split is None)]
            end, index_end = await gather(reads)
        denied = None
        if isinstance(index_end, AccessDeniedError):
            denied, index_end = index_end, None
        if index_end is not None and layout.last_limit(index_end.data, index_end.size) > end.size:
            # A writer may have appended between the two reads: the index is newer than the end of the bag.
            end = await store.read(path.key, -tail)
        self._add_file(path, end)
        self.target = self.target._replace(version=end.version)
        if isinstance(index, bytes):
            await self._open_split(end, None, _whole(index))
        elif index_end is not None:
            self._add_file(index, index_end)
            await self._open_split(end, index, index_end)
        else:
            if denied is not None and not end.size:  # of version 2, or of version 3 with empty records
                raise denied
            await self._open_single(end)
        if self._cache_data:
            self.data = await self._read_data(path, end.size) if end.start else end.data
        if self._alone and len(self.files) == 2:
            await self._check_pair(path)

    async def _check_pair(self, path: Path) -> None:
        """Check that the records and the table, in two files, are of one bag. A dataset is checked by its spec."""
        if self.is_remote:
            await check_files(self.files)
        elif not is_at(files.get(path.key, self.target.version).fd, path.key):  # it was read first, and may have grown
            raise changed(self.name, f'{self.target.version}', None)

    async def _read_data(self, path: Path, size: int) -> bytes:
        return (await path.read_ranges([0], [size], version=self.target.version))[0]

    def _keep_limits(self, limits: Ints) -> None:
        self.length = len(limits) - 1
        self._keep_in(ArrayTables(limits), 0)

    def _keep_in(self, tables: ArrayTables, number: int) -> None:
        self.tables, self.number = tables, number
        self._limits = tables.part(number, self.length + 1)
        self._view = memoryview(self._limits.data).cast('B').cast('q')

    def _add_file(self, path: Path, end: Reply) -> None:
        """Record the identity of an opened file; raise ``UnsupportedError`` if it has no version."""
        if end.version is None and end.size:
            raise UnsupportedError(
                f'{path}: the server sends neither an ETag nor a Last-Modified header, by which to detect that the '
                f'file is replaced while it is read: copy it to a disk first, or have the server send one of them'
            )
        self.files.append((path, FileIdentity(end.size, end.version)))

    async def _open_single(self, end: Reply) -> None:
        """Open a bag of version 1 or 2, whose table is at its end."""
        self.size = end.size
        if not end.size:
            self.version = 2
            self._keep_limits(layout.blank_limits(0, self.name))
            return
        start = self.datasize = layout.table_start(end.data, end.size, self.name)
        if self._cache_index or self.data is not None or self._cache_data:
            filled = await self._read_limits(self.path, start, end)
            self.version = 2 if filled[1] else 1  # whose table itself begins with a zero
            self._keep_limits(layout.check_limits(filled[1:] if self.version == 1 else filled, start, self.name))
            return
        path = self.require_path()
        if start >= end.start:
            first = end.data[start - end.start : start - end.start + layout.LIMIT]
        else:
            first = (await path.read_ranges([start], [start + layout.LIMIT], version=self.target.version))[0]
        self.version = 1 if not int.from_bytes(first, 'little') else 2
        skip = layout.LIMIT if self.version == 1 else 0
        self.length = (end.size - start - skip) // layout.LIMIT
        self._table = (path, start + skip, self.target)

    async def _open_split(self, end: Reply, index: Path | None, index_end: Reply) -> None:
        """Open a bag of version 3, whose table is a file of its own, or in memory."""
        self.version, self.datasize = 3, end.size
        self.length = layout.check_count(index_end.size // layout.LIMIT, self.name)
        self.size = end.size + index_end.size
        store = None if self.path is None else self.path.store  # from which reads request limits, too
        if self._cache_index or self._cache_data or index is None or index.store != store or not self.length:
            size = self.length * layout.LIMIT  # without a limit that is being written
            index_end = index_end._replace(data=index_end.data[: max(0, size - index_end.start)], size=size)
            filled = await self._read_limits(index, 0, index_end)
            self._keep_limits(layout.check_limits(filled, end.size, self.name))
        else:
            self._table = (index, 0, _kept_open(index, index_end.version))

    async def _read_limits(self, path: Path | None, start: int, end: Reply) -> Ints:
        """Return a zero and the limits from ``start`` to the end of a file, of which ``end`` is read already."""
        filled = layout.blank_limits((end.size - start) // layout.LIMIT, self.name)
        target = memoryview(filled[1:].data).cast('B')
        stop = max(start, end.start)
        target[stop - start :] = memoryview(end.data)[stop - end.start :]
        if start < stop:
            table = path or self.require_path()
            await table.store.read_into(table.key, start, stop, end.version, target[: stop - start])
        return filled

    def require_path(self) -> Path:
        """Return the file; raise ``InvalidArgumentError`` if the bag was given as bytes."""
        if self.path is None:
            raise InvalidArgumentError(f'{self.name}: is not a file')
        return self.path

    def identity(self) -> FileIdentity:
        """Return the size with the table, the version of the file that holds the records, and what tells the limits."""
        return FileIdentity(self.size, self.target.version, self._told_table() if self.version == 3 else '')

    def _told_table(self) -> str:
        if self.packed is not None:
            self._digest = self.packed.digest
        elif self._limits is not None:
            self._digest = self._digest or digest_of_limits(self._limits)
        return self._digest or self.files[1][1].told[1]

    async def read_digest(self) -> None:
        """Read the limits if they are in a file and not in memory, so that the identity has a digest of them.

        Then it does not depend on how the bag was opened.
        """
        if self.version == 3 and self._table is not None and not self._digest:
            path, start, target = self._table
            size = start + self.length * layout.LIMIT
            limits = await self._read_limits(path, start, Reply(b'', size, size, target.version))
            self._digest = digest_of_limits(limits)

    @property
    def origin(self) -> str:
        """The identity of the store and the file; for a bag in memory, a digest of its bytes."""
        if self.path is None:
            return hashlib.sha256(self.data or b'').hexdigest()
        return f'{self.path.store.fingerprint} {self.path!s}'  # with the query, which may select the file

    @property
    def state(self) -> BagState | None:
        """The state for the index cache; None without the table in memory or with a stand-in version."""
        pin = self.target.version
        if self._limits is None or pin is None or not FileIdentity(self.size, pin).is_proof:
            return None
        table_pin = self.files[1][1].version if self.version == 3 else None
        return BagState(self.version, self.size, self.datasize, pin, table_pin or '', self._limits)

    @property
    def is_remote(self) -> bool:
        """True if the bag is read over a network, where the bytes of an intact file may arrive damaged."""
        return self.path is not None and not self.path.store.local

    # --- one record of an immediate bag, on this thread

    def size_of(self, index: int) -> int:
        view: Any = self._view
        try:
            start, stop = view.pair(index) if self.packed is not None else (view[index], view[index + 1])
            return int(stop - start)
        except (TypeError, AttributeError):
            self.check_open()  # another thread has closed it
            raise

    def read_now(self, index: int) -> bytes:
        view: Any = self._view
        data = self.data
        try:
            start, stop = view.pair(index) if self.packed is not None else (view[index], view[index + 1])
        except (TypeError, AttributeError):
            self.check_open()  # another thread has closed it
            raise
        if data is not None:
            record = data[start:stop]
        else:
            key, pin, kept = self.target
            try:
                file = (kept and pin and kept.get(pin)) or files.get(key, pin)
                record = os.pread(file.fd, stop - start, start) if stop - start <= IN_PLACE else b''
                if len(record) != stop - start:
                    record = file.read_exactly(key, start, stop)
                file.check(key)
            except OSError:
                with translated(key):
                    raise
            counters.ranges += 1
            local_files.ok += 1
            local_files.bytes += stop - start
        if self.sums is not None:
            check(self.sums, np.array([index]), [record], self.name)
        return record

    # --- many records, as byte ranges for a fan-out over many bags

    def limits(self, indices: Ints) -> tuple[Ints, Ints] | None:
        limits = self._limits
        return None if limits is None else (limits[indices], limits[indices + 1])

    def all_limits(self) -> Ints:
        if self._limits is None:
            raise InvalidArgumentError(f'{self.name}: its table is not in memory')
        return self._limits

    def check_open(self) -> None:
        if not self.opened:
            raise ClosedError(f'the reader of {self.name} is closed')

    def limits_read(self, indices: Ints) -> tuple[Target, Ints, Ints]:
        """Return the object with the table, and the ranges in it that hold the limits of records, if the table is not
        in memory.
        """
        self.check_open()
        if self._table is None:
            raise InvalidArgumentError(f'{self.name}: its table is cached')
        _, start, target = self._table
        entries = start + layout.LIMIT * indices
        starts = np.where(indices > 0, entries - layout.LIMIT, entries)
        return target, starts, entries + layout.LIMIT

    def parse_limits(self, indices: Ints, entries: Sequence[bytes]) -> tuple[Ints, Ints]:
        """Return the starts and stops of records from the table entries of ``limits_read``."""
        numbers = np.frombuffer(b''.join(entries), '<i8')
        # The first record's start is not in the table: it has one limit, all other records have two.
        ends = np.cumsum(np.where(indices > 0, 2, 1)) - 1
        stops = numbers[ends]
        starts = np.where(indices > 0, numbers[ends - 1], 0)
        bad = (starts < 0) | (stops < starts) | (stops > self.datasize)
        if bad.any():
            i = int(np.argmax(bad))
            raise CorruptBagError(
                f'{self.name}: record {indices[i]} has limits {starts[i]} to {stops[i]}, of {self.datasize} bytes'
            )
        return starts, stops

    def cached_records(self, starts: Ints, stops: Ints) -> list[bytes] | None:
        data = self.data
        if data is None:
            return None
        return [data[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]


def join_limits(bags: Sequence[Bag]) -> None:
    """Put the limits that some bags have in memory into one array, so that those of many bags are read together."""
    own = [(bag, limits) for bag in bags if (limits := bag._limits) is not None]
    if len(own) > 1:
        tables, numbers = ArrayTables.join([limits for _, limits in own])
        for (bag, _), number in zip(own, numbers, strict=True):
            bag._keep_in(tables, number)


async def read_digests(bags: Mapping[str, Bag], expected: Identity | None) -> None:
    """Read the limits that bags do not keep if a reader compares them by their digests: those of files, by name."""
    files = {} if expected is None else expected.files
    await gather([bag.read_digest() for name, bag in bags.items() if name in files and files[name].has_digest])


def _kept_open(path: Path, version: str | None) -> Target:
    return Target(path.key, version, path.store.keep_open(path.key))


def _whole(content: bytes) -> Reply:
    return Reply(content, 0, len(content), None)


async def _read_end(path: Path, tail: int, missing_ok: bool) -> Any:
    try:
        return await path.store.read(path.key, -tail)
    except path.store.absent as error:
        if not missing_ok:
            raise
        return error if isinstance(error, AccessDeniedError) else None

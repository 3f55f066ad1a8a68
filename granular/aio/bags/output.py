"""The files of a bag that is being written."""

import array
import contextlib
import functools
import itertools
import os
from collections.abc import Collection, Sequence
from typing import BinaryIO, Final, Literal

import numpy as np
from numpy.typing import NDArray

from granular._support.text import logger
from granular.aio.bags.published import Published, remove
from granular.aio.bags.records import Adjacent
from granular.aio.paths.claims import is_claim
from granular.aio.paths.path import Path
from granular.aio.runtime.lifecycle import AsyncResource
from granular.aio.runtime.tasks import finish_within, gather, settle
from granular.aio.runtime.threads import offload, offload_whole
from granular.aio.stores import ObjectWriter
from granular.aio.stores.errors import translated
from granular.aio.stores.local.locks import is_at
from granular.aio.stores.local.store import LocalStore
from granular.aio.stores.local.writing import remove_own, sync
from granular.config import MiB
from granular.errors import (
    AlreadyExistsError,
    ClosedError,
    CorruptBagError,
    InvalidArgumentError,
    OutOfRangeError,
    StoreError,
)
from granular.formats import layout
from granular.formats.checksums import SUFFIX, checksums_in, crc32c

_FULL: Final = MiB  # bytes buffered at most before they are written, even if the caller does not flush
_CHUNK: Final = 8 * MiB  # bytes read at a time to compute checksums, or one record


class BagOutput(AsyncResource):
    """The files of a bag that is being written, for one caller at a time; the arguments are as for ``BagWriter``."""

    def __init__(self, path: Path, version: int, resume: Literal['check', 'discard'], checksums: bool) -> None:
        super().__init__()
        if version not in (1, 2, 3):
            raise InvalidArgumentError(f'{path}: expected version 1, 2 or 3, got {version!r}')
        if resume not in ('check', 'discard'):
            raise InvalidArgumentError(f"{path}: expected resume 'check' or 'discard', got {resume!r}")
        self.path: Path = path
        self.version, self._resume = version, resume
        self._index_path = self.path.with_suffix('.idx')
        self._sums_path = self.path.with_suffix(SUFFIX)
        # Both have an item for each record, or for version 3 only for those that are not flushed yet.
        self._sums = array.array('I') if checksums else None
        self._ends = array.array('q')
        self.length: int = 0
        self._offset = 0
        self._pending: list[bytes] = []
        self._pending_size = 0
        self._max_length: int | None = None
        self._writers: list[ObjectWriter] = []
        self._files: list[BinaryIO] = []
        self._opened: dict[str, os.stat_result] = {}  # all that were opened to be appended to
        self._published: dict[Path, Published] = {}  # the files that closing published
        self._uncertain: dict[Path, Published] = {}  # files whose publishing failed, but which may exist nevertheless
        # False for the bags of a dataset, whose writer compares the folder, and calls ``verify`` after ``aclose``.
        self.alone = True
        self.has_copies = False  # True if other processes may publish the same bytes in the same files of a bucket
        self._tail: _Tail | None = None
        self._failed = False
        self.flushed: int = 0  # records

    def __repr__(self) -> str:
        return f'BagWriter({f"{self.path}"!r})'

    async def _open(self) -> None:
        if self.version == 3 and isinstance(self.path.store, LocalStore):
            await self._open_local(self.path.store)
            return
        both = [self.path, self._index_path]
        paths = both if self.version == 3 else [self.path]
        # A table that is left beside a bag of another version would be read as the table of that.
        looked_for = [] if self.has_copies else both if self.alone else paths
        existing = [path for path in looked_for if await path.exists()]
        if existing == [self.path] and self.version == 3:  # its writer was killed before it published the table
            if self._resume != 'discard':
                raise AlreadyExistsError(
                    f'{self.path}: exists already, without its table {self._index_path.name}: another writer is '
                    f"writing it, or was killed: if no other writer is running, pass resume='discard' to write it anew"
                )
            await self.path.store.delete([self.path.key])
        elif existing:
            raise AlreadyExistsError(
                f'{existing[0]}: exists already, and only bags of version 3 on a local disk can be appended to: choose '
                f'another name, or remove it'
            )
        self._writers = [await path.store.open_writer(path.key, new=not self.has_copies) for path in paths]

    async def _open_local(self, store: LocalStore) -> None:
        with contextlib.ExitStack() as opened:
            # Each is locked before it is looked at: until then, another writer may append to it.
            files = [opened.enter_context(await store.open_appender(self.path.key, self._opened))]
            datasize = files[0].tell()
            if self.alone and datasize and not await self._index_path.exists():
                raise AlreadyExistsError(
                    f'{self.path}: exists already, without the table {self._index_path.name} that a bag of version 3 '
                    f'has: only such bags on a local disk can be appended to'
                )
            files.append(opened.enter_context(await store.open_appender(self._index_path.key, self._opened)))
            index = await self._index_path.read_bytes()
            self.length = len(index) // layout.LIMIT
            if self._max_length is not None:
                self.length = min(self.length, self._max_length)
            filled = layout.blank_limits(self.length, f'{self._index_path}')
            memoryview(filled[1:].data).cast('B')[:] = memoryview(index)[: self.length * layout.LIMIT]
            self._offset = int(layout.check_limits(filled, datasize, f'{self.path}')[-1])
            if datasize > self._offset and self._resume == 'check':
                self._tail = _Tail(self.path.key, self._offset, datasize)
            self.flushed = self.length
            sizes = [self._offset if self._tail is None else datasize, self.length * layout.LIMIT]
            if (sums := await self._resume_sums(filled)) is not None:
                files.append(opened.enter_context(await store.open_appender(self._sums_path.key, self._opened)))
                sizes.append(4 * sums)
            for file, size in zip(files, sizes, strict=True):
                if file.tell() != size:
                    await store.truncate(file.name, size)
            self._files = files
            opened.pop_all()

    async def _resume_sums(self, limits: NDArray[np.int64]) -> int | None:
        """Compute the checksums that a continued bag lacks; return how many it has, or None if none are written."""
        found = await self._sums_path.store.find(self._sums_path.key)
        if found is None and self._sums is None:
            return None
        existing = 0 if found is None else min(found.size // 4, self.length)
        self._sums = array.array('I')
        if existing < self.length:
            logger.warning(
                '%s: %d of its %d records have no checksum: reading them to compute it',
                self.path, self.length - existing, self.length,
            )  # fmt: skip
        start = existing
        while start < self.length:
            stop = max(start + 1, int(np.searchsorted(limits, limits[start] + _CHUNK, 'right')) - 1)
            self._sums.extend(await offload(_sums_of, self.path.key, limits[start : stop + 1]))
            start = stop
        return existing

    def open_at_most(self, records: int) -> None:
        """Discard the records after the first ``records`` when the bag is opened."""
        self._max_length = records

    @property
    def size(self) -> int:
        return self._offset + layout.LIMIT * (self.length + (self.version == 1))

    async def append(self, record: bytes | bytearray | memoryview, flush: bool) -> int:
        if self.is_resuming:
            await self.check(record)
        self.add(record)
        if flush or self.is_full:
            await self.flush()
        return self.length - 1

    @property
    def is_resuming(self) -> bool:
        """True if a killed writer left bytes that the next records must equal: call ``check`` before ``add``."""
        return self._tail is not None and self._tail.left > 0

    async def check(self, record: bytes | bytearray | memoryview) -> None:
        """Compare the next record with the bytes that a killed writer left; raise ``CorruptBagError`` if it differs."""
        if self._tail is not None and isinstance(record, bytes | bytearray | memoryview):
            await offload(self._tail.check, bytes(record), self.length)

    def add(self, record: bytes | bytearray | memoryview) -> None:
        """Append a record to the buffer, without writing it."""
        self._check_open()
        self._check_whole()
        if not isinstance(record, bytes | bytearray | memoryview):
            raise InvalidArgumentError(f'{self.path}: expected bytes for a record, got {type(record).__name__}')
        if self.length >= layout.MAX_RECORDS:
            raise OutOfRangeError(f'{self.path}: the bag is full: it holds {layout.MAX_RECORDS} records')
        record = bytes(record)
        fresh = record if self._tail is None else self._tail.advance(record)
        if not record and self.version == 2:
            self.version = 1
        self.length += 1
        self._offset += len(record)
        self._ends.append(self._offset)
        if self._sums is not None:
            self._sums.append(crc32c(record))
        if fresh:
            self._pending.append(fresh)
            self._pending_size += len(fresh)

    def extend(self, records: Adjacent) -> None:
        """Append records to the buffer of a bag that resumes nothing, without writing them."""
        self._check_open()
        self._check_whole()
        count = len(records.limits) - 1
        if not count:
            return
        if self.length + count > layout.MAX_RECORDS:
            raise OutOfRangeError(f'{self.path}: the bag is full: it holds {layout.MAX_RECORDS} records')
        if self.version == 2 and not np.diff(records.limits).all():
            self.version = 1
        self._ends.frombytes((self._offset + records.limits[1:]).tobytes())
        self._offset += len(records.data)
        self.length += count
        if self._sums is not None:
            sums = checksums_in(records.data, records.limits) if records.sums is None else records.sums
            self._sums.frombytes(sums.tobytes())
        if records.data:
            self._pending.append(records.data)
            self._pending_size += len(records.data)

    @property
    def is_full(self) -> bool:
        return self._pending_size >= _FULL

    async def flush(self) -> None:
        self._check_open()
        await self._flush()

    async def _flush(self) -> None:
        self._check_whole()
        data = self._pending[0] if len(self._pending) == 1 else b''.join(self._pending)
        self._failed = True  # A partial write cannot be continued, so this holds until the write succeeds.
        if self._files:
            ends, self._ends = self._ends, array.array('q')
            table = layout.table_of(np.frombuffer(ends, np.int64), 3) if ends else b''
            # The checksums go before the table, so that every readable record has one.
            await offload_whole(self._write_files, [data, self._take_sums(), table])
            self.flushed = self.length
        elif data:
            await self._writers[0].write(data)
        self._failed = False
        self._pending.clear()
        self._pending_size = 0

    def _take_sums(self) -> bytes:
        """Return the checksums of the records appended since the last call."""
        if not self._sums:
            return b''
        sums, self._sums = self._sums, array.array('I')
        return np.frombuffer(sums, np.uintc).astype('<u4').tobytes()

    def _write_files(self, parts: Sequence[bytes]) -> None:
        data, table, *sums = self._files
        for file, part in zip((data, *(sums or (None,)), table), parts, strict=True):
            if file is not None:
                _write(file, part)

    def _close_files(self) -> None:
        data, table, *sums = self._files
        sizes = {data: self._offset, table: layout.LIMIT * self.length, **dict.fromkeys(sums, 4 * self.length)}
        for file, size in sizes.items():
            with translated(file.name):
                os.fsync(file.fileno())
                if (written := os.fstat(file.fileno()).st_size) != size:
                    raise CorruptBagError(f'{file.name}: expected {size} bytes after writing, got {written}')
                if not is_at(file.fileno(), file.name):
                    raise StoreError(
                        f'{file.name}: {size} bytes were written, but the file was removed or replaced before its end'
                    )
                file.close()
        with translated(f'{self.path}'):
            sync(os.path.dirname(self.path.key))  # so that the names of new files are durable

    async def _close(self) -> None:
        await self.path.store.ready()
        try:
            await self._flush()
            if self._tail is not None and self._tail.left:
                raise CorruptBagError(
                    f'{self.path}: {self._tail.left} bytes after its last record were not appended again: append what '
                    f"the previous writer appended, or pass resume='discard'"
                )
            if self._files:
                await offload_whole(self._close_files)
                return
            table = layout.table_of(np.frombuffer(self._ends, np.int64), self.version)
            if table:
                await self._writers[-1].write(table)
            await self._publish(len(table))
            if self.alone:
                await self.verify()
        except BaseException:
            await self._drop()
            raise

    async def _publish(self, table: int) -> None:
        """Publish the files. The first one decides between concurrent writers: the loser has published nothing."""
        sizes = [self._offset + table] if len(self._writers) == 1 else [self._offset, table]
        paths = [self.path, self._index_path][: len(sizes)]
        first, *rest = zip(paths, list(self._writers), sizes, strict=True)
        await self._publish_one(*first)
        # Only now, the checksums: they may replace those of a killed writer, but never those of another live writer.
        if self._sums is not None:
            sums, others = self._take_sums(), len(self._writers)
            try:
                await self._publish_sums(sums)
            except AlreadyExistsError:
                # They may be those of a copy: it has a claim, or has replaced the bag, too.
                store, folder = self.path.store, self.path.parent.key
                if not store.local and any([is_claim(entry.name) async for entry in store.scan(folder, '.writer.')]):
                    raise
                await self._verify(self.path, self._published[self.path])
                # They are removed, not replaced: a replacement whose writer is cancelled may be carried out much later.
                for writer in self._writers[others:]:  # none where opening one failed
                    await writer.abort()
                del self._writers[others:]
                await self._sums_path.store.delete([self._sums_path.key])
                await self._publish_sums(sums)
        for file in rest:
            await self._publish_one(*file)

    async def _publish_sums(self, sums: bytes) -> None:
        writer = await self._sums_path.store.open_writer(self._sums_path.key, new=not self.has_copies)
        self._writers.append(writer)
        await writer.write(sums)
        await self._publish_one(self._sums_path, writer, len(sums))

    async def _publish_one(self, path: Path, writer: ObjectWriter, size: int) -> None:
        async def publish() -> None:
            await writer.close()
            self._writers.remove(writer)
            self._note_published(path, size, writer)

        try:
            await finish_within(publish())
        except AlreadyExistsError:
            raise
        except BaseException:
            if path not in self._published:
                self._uncertain[path] = Published(-1, None, writer)
            raise

    def _note_published(self, path: Path, size: int, writer: ObjectWriter | None = None) -> None:
        """Note a file of this bag, which was written by a writer, or copied."""
        self._published[path] = Published(size, None if writer is None else writer.version, writer)

    @property
    def is_winner(self) -> bool:
        """True if this writer published the file that decides between concurrent writers."""
        return self.path in self._published

    @property
    def published(self) -> Collection[Path]:
        return self._published

    async def verify(self) -> None:
        """Compare the published files with the store's metadata; raise ``StoreError`` if a file is missing, has another
        size, or was replaced since the previous call.
        """
        await gather([self._verify(path, published) for path, published in self._published.items()])

    async def _verify(self, path: Path, published: Published) -> None:
        if (stat := await path.store.find(path.key)) is None:
            raise StoreError(f'{path}: {published.size} bytes were written, but there is no such file')
        version = stat.version if self.has_copies else published.version or stat.version
        if stat.is_dir or stat.size != published.size or stat.version != version:
            raise StoreError(
                f'{path}: expected {published.size} bytes of version {version} after writing, got {stat.size} of '
                f'version {stat.version}'
            )
        published.version = version

    async def remove_published(self, sole: bool) -> None:
        """Remove the files that this writer published, unless replaced since. The deciding file is removed last.

        With ``sole``, no other writer can have created the files whose publishing failed.
        """
        uncertain = self._uncertain.items() if sole or self.is_winner else ()
        for file in [*uncertain, *reversed(self._published.items())]:
            await remove(*file)
        self._published.clear()

    async def remove_table(self) -> None:
        """Remove the table that this writer published, unless replaced since."""
        if published := (self._published | self._uncertain).get(self._index_path):
            await remove(self._index_path, published)

    async def remove_opened(self) -> None:
        """Remove the files that were appended to, unless others have replaced them."""

        def call() -> None:
            for name, info in self._opened.items():
                with translated(name):
                    remove_own(name, functools.partial(os.path.samestat, info))

        await offload_whole(call)

    async def _abort(self) -> None:
        await self.path.store.ready()
        await self._drop()

    async def _drop(self) -> None:
        with contextlib.ExitStack() as locked:
            if self._files and self._failed:
                with translated(f'{self.path}'):
                    # Closing writes what is buffered, so the files are cut later: until then, a copy holds the lock.
                    locked.enter_context(os.fdopen(os.dup(self._files[0].fileno()), 'ab', 0))
            for file in self._files:
                with contextlib.suppress(OSError):  # A full disk refuses the rest of the buffer.
                    file.close()
            if self._failed:
                await self.truncate(self.flushed)
        await settle([writer.abort() for writer in self._writers])
        if self.alone:
            await self.remove_published(sole=False)

    async def truncate(self, records: int) -> None:
        """Discard the records after the first ``records`` of a closed local bag of version 3."""
        store = self.path.store
        if not isinstance(store, LocalStore) or not self._files:
            return
        size = records * layout.LIMIT
        end = int.from_bytes(await self._index_path.read_range(size - layout.LIMIT, size), 'little') if records else 0
        # The table goes first: readers ignore bytes that it does not cover.
        await store.truncate(self._index_path.key, size)
        await store.truncate(self.path.key, end)
        if len(self._files) == 3:
            await store.truncate(self._sums_path.key, 4 * records)

    def _check_whole(self) -> None:
        if self._failed:
            raise ClosedError(f'{self.path}: an earlier write failed: close the writer, or abort it')


class _Tail:
    """The bytes after a bag's last limit, which a resuming writer must append again."""

    def __init__(self, key: str, start: int, stop: int) -> None:
        self._key = key
        self._position = start
        self._stop = stop

    @property
    def left(self) -> int:
        return self._stop - self._position

    def check(self, record: bytes, index: int) -> None:
        """Compare a record with the tail, which is read."""
        size = min(len(record), self.left)
        with translated(self._key), open(self._key, 'rb') as file:
            file.seek(self._position)
            existing = file.read(size)
        if existing != record[:size]:
            raise CorruptBagError(
                f'{self._key}: record {index} differs from the {self.left} bytes that a previous writer left after the '
                f"last limit: append the same records, or pass resume='discard'"
            )

    def advance(self, record: bytes) -> bytes:
        """Skip a record that was compared; return the part of it that the tail does not have."""
        size = min(len(record), self.left)
        self._position += size
        return record[size:]


def _write(file: BinaryIO, data: bytes) -> None:
    with translated(file.name):
        if data:
            file.write(data)
        file.flush()


def _sums_of(name: str, limits: NDArray[np.int64]) -> list[int]:
    """Return the checksums of neighbouring records of a local file, which is read."""
    start, size = int(limits[0]), int(limits[-1] - limits[0])
    with translated(name), open(name, 'rb') as file:
        file.seek(start)
        data = file.read(size)
    if len(data) != size:
        raise CorruptBagError(f'{name}: expected {size} bytes from byte {start} on, got {len(data)}')
    ends = (limits - start).tolist()
    return [crc32c(data[left:right]) for left, right in itertools.pairwise(ends)]

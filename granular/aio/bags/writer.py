"""Write bags: streamed while they grow, published when they are closed."""

import array
import contextlib
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, BinaryIO, Final, Literal

import numpy as np
from numpy.typing import NDArray

from granular.aio.paths.path import Path
from granular.aio.runtime.lifecycle import AsyncResource
from granular.aio.runtime.lock import Lock
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import offload
from granular.aio.stores import ObjectWriter
from granular.aio.stores.errors import translated
from granular.aio.stores.local.store import LocalStore
from granular.aio.stores.local.writing import sync
from granular.config import MiB
from granular.errors import (
    AlreadyExistsError,
    ClosedError,
    CorruptBagError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    StoreError,
)
from granular.formats import layout
from granular.formats.checksums import SUFFIX, crc32c

_PENDING: Final = MiB  # bytes buffered at most before they are written, even if the caller does not flush


class BagWriter(AsyncResource):
    """Appends records to a new bag, or to a local one of version 3.

    A bag of version 1 or 2, and any bag in a bucket, appears when it is closed. A local bag of version 3 can be read
    while it grows, up to the last flush, and be opened again to append.

    Args:
      path: the ``.bag`` file, which must not exist, except for a local bag of version 3.
      version: 1, 2 or 3. A version 2 bag with an empty record is written as version 1, which can represent it.
      resume: how to treat bytes after the last limit of a version 3 bag, as a crash leaves them. ``'check'``: check
        that the records appended next equal those bytes; ``'discard'``: drop them.
      checksums: write a CRC32C of each record beside the bag, for readers with ``verify``. A bag that has checksums and
        is appended to gets them in any case.

    Example::

        async with granular.aio.BagWriter('./records.bag') as bag:
            index = await bag.append(b'first record')
    """

    def __init__(
        self,
        path: Path | str | os.PathLike[str] | Any,
        version: int = 2,
        resume: Literal['check', 'discard'] = 'check',
        checksums: bool = False,
    ) -> None:
        super().__init__()
        if version not in (1, 2, 3):
            raise InvalidArgumentError(f'{path}: bags have version 1, 2 or 3, not {version!r}')
        if resume not in ('check', 'discard'):
            raise InvalidArgumentError(f"{path}: resume is {resume!r}: want 'check' or 'discard'")
        self.path, self.version, self.resume = Path(path), version, resume
        self._index_path = self.path.with_suffix('.idx')
        self._sums_path = self.path.with_suffix(SUFFIX)
        self._sums = array.array('I') if checksums else None  # of all records, or for version 3 of those not flushed
        self._length = self._offset = 0
        self._ends = array.array('q')  # of all records, or for version 3 of those not flushed
        self._pending: list[bytes] = []
        self._pending_size = 0
        self._most: int | None = None
        self._writers: list[ObjectWriter] = []
        self._files: list[BinaryIO] = []
        self._published: dict[Path, _Published] = {}  # the files that closing published
        self._uncertain: list[Path] = []  # files whose publishing failed, but which may exist nevertheless
        self._turns = Lock()
        self.verifies = True
        """True if closing verifies the published files; otherwise the caller of ``aclose`` calls ``verify``."""
        self._tail: _Tail | None = None
        self._failed = False
        self.flushed = 0
        """The number of records that were flushed."""

    def __repr__(self) -> str:
        return f'{type(self).__name__}({f"{self.path}"!r})'

    async def _open(self) -> None:
        if self.version == 3 and isinstance(self.path.store, LocalStore):
            await self._open_local(self.path.store)
            return
        places = [self.path] if self.version < 3 else [self.path, self._index_path]
        for place in places:
            if await place.exists():
                raise AlreadyExistsError(f'{place}: exists already, and bags in a bucket cannot be appended to')
        self._writers = [await place.store.open_writer(place.key, new=True) for place in places]

    async def _open_local(self, store: LocalStore) -> None:
        try:
            index = await self._index_path.read_bytes()
        except NotFoundError:
            index = b''
        try:
            datasize = (await self.path.stat()).size
        except NotFoundError:
            datasize = 0
        self._length = len(index) // layout.LIMIT
        if self._most is not None:
            self._length = min(self._length, self._most)
        filled = layout.blank_limits(self._length, f'{self._index_path}')
        memoryview(filled[1:].data).cast('B')[:] = memoryview(index)[: self._length * layout.LIMIT]
        self._offset = int(layout.check_limits(filled, datasize, f'{self.path}')[-1])
        if datasize > self._offset and self.resume == 'check':
            self._tail = _Tail(self.path.key, self._offset, datasize)
        keep = self._offset if self._tail is None else datasize
        self.flushed = self._length
        kept = await self._resume_sums(filled)
        self._files = [
            await store.open_appender(self.path.key, keep),
            await store.open_appender(self._index_path.key, self._length * layout.LIMIT),
        ]
        if kept is not None:
            self._files.append(await store.open_appender(self._sums_path.key, 4 * kept))

    async def _resume_sums(self, limits: NDArray[np.int64]) -> int | None:
        """Compute the checksums that a continued bag lacks; return how many it has, or None if none are written."""
        try:
            there = (await self._sums_path.stat()).size // 4
        except NotFoundError:
            if self._sums is None:
                return None
            there = 0
        kept = min(there, self._length)
        self._sums = array.array('I')
        for i in range(kept, self._length):
            self._sums.append(crc32c(await self.path.read_range(int(limits[i]), int(limits[i + 1]))))
        return kept

    def keep(self, records: int) -> None:
        """Discard the records after the first ``records`` when the bag is opened."""
        self._most = records

    # --- properties

    @property
    def size(self) -> int:
        """Bytes of the appended records and of their table."""
        return self._offset + layout.LIMIT * (self._length + (self.version == 1))

    def __len__(self) -> int:
        return self._length

    # --- appending

    async def append(self, record: bytes | bytearray | memoryview, flush: bool = True) -> int:
        """Append a record and return its index.

        Args:
          record: its bytes.
          flush: write to the file now. To a bucket, bytes are uploaded in parts, each as soon as it is full.

        Raises:
          InvalidArgumentError: if the record is not bytes.
          OutOfRangeError: if the bag is full, at 2**32 - 1 records.
        """
        if self._state != 'open':
            await self._ensure_open()
        async with self._turns.turn():
            self.add(record)
            index = self._length - 1
            if flush or self._pending_size >= _PENDING:
                await self._flush()
            return index

    def add(self, record: bytes | bytearray | memoryview) -> None:
        """Append a record to the buffer, without writing it."""
        self._check_usable()
        if not isinstance(record, bytes | bytearray | memoryview):
            raise InvalidArgumentError(f'{self.path}: want bytes for a record, got {type(record).__name__}')
        if self._length >= layout.MAX_RECORDS:
            raise OutOfRangeError(f'{self.path}: the bag is full: it holds {layout.MAX_RECORDS} records')
        record = bytes(record)
        fresh = record if self._tail is None else self._tail.check(record, self._length)
        if not record and self.version == 2:
            self.version = 1
        self._length += 1
        self._offset += len(record)
        self._ends.append(self._offset)
        if self._sums is not None:
            self._sums.append(crc32c(record))
        if fresh:
            self._pending.append(fresh)
            self._pending_size += len(fresh)

    @property
    def crowded(self) -> bool:
        """True if the buffer is large enough to be flushed."""
        return self._pending_size >= _PENDING

    async def flush(self) -> None:
        """Write the appended records to the file, or to the part of the upload that is being filled."""
        if self._state != 'open':
            await self._ensure_open()
        async with self._turns.turn():
            await self._flush()

    async def _flush(self) -> None:
        self._check_usable()
        data = self._pending[0] if len(self._pending) == 1 else b''.join(self._pending)
        self._failed = True  # until the write succeeds: a partial write cannot be continued
        if self._files:
            ends, self._ends = self._ends, array.array('q')
            table = layout.table_of(np.frombuffer(ends, np.int64), 3) if ends else b''
            # The checksums go before the table, so that every readable record has one.
            await offload(self._write_files, [data, self._take_sums(), table])
            self.flushed = self._length
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
                with translated(file.name):
                    if part:
                        file.write(part)
                    file.flush()

    def _close_files(self) -> None:
        data, table, *sums = self._files
        sizes = {data: self._offset, table: layout.LIMIT * self._length, **dict.fromkeys(sums, 4 * self._length)}
        for file, size in sizes.items():
            with translated(file.name):
                os.fsync(file.fileno())
                if (found := os.fstat(file.fileno()).st_size) != size:
                    raise CorruptBagError(f'{file.name}: expected {size} bytes after writing, got {found}')
                file.close()
        with translated(f'{self.path}'):
            sync(os.path.dirname(self.path.key))  # so that the names of new files are durable

    async def _close(self) -> None:
        await self.path.store.ready()
        async with self._turns.turn():
            await self._finish()

    async def _finish(self) -> None:
        self._state = 'open'
        try:
            await self._flush()
            if self._tail is not None and self._tail.left:
                raise CorruptBagError(
                    f'{self.path}: {self._tail.left} bytes behind its last record were not appended again: go on where '
                    f"the writer before was, or pass resume='discard'"
                )
            if self._files:
                await offload(self._close_files)
                return
            table = layout.table_of(np.frombuffer(self._ends, np.int64), self.version)
            if not self._length and self.version != 1:
                table = b''
            if table:
                await self._writers[-1].write(table)
            await self._publish(len(table))
            if self.verifies:
                await self.verify()
        except BaseException:
            await self._drop()
            raise
        finally:
            self._state = 'closed'

    async def _publish(self, table: int) -> None:
        """Publish the files. The first one decides between concurrent writers: the loser has published nothing."""
        sizes = [self._offset + table] if len(self._writers) == 1 else [self._offset, table]
        places = [self.path, self._index_path][: len(sizes)]
        (first, *others) = zip(places, list(self._writers), sizes, strict=True)
        await self._publish_one(*first)
        # Only now, the checksums: they may replace those of a killed writer, but never those of another live writer.
        if self._sums is not None:
            sums = self._take_sums()
            self._published[self._sums_path] = _Published(len(sums))
            await self._sums_path.write_bytes(sums)
        for other in others:
            await self._publish_one(*other)

    async def _publish_one(self, place: Path, writer: ObjectWriter, size: int) -> None:
        try:
            await writer.close()
        except AlreadyExistsError:
            raise
        except BaseException:
            self._uncertain.append(place)
            raise
        self._writers.remove(writer)
        self._published[place] = _Published(size)

    @property
    def owned(self) -> bool:
        """True if this writer published the file that decides between concurrent writers."""
        return self.path in self._published

    async def verify(self) -> None:
        """Compare the published files with the store's metadata.

        Raises:
          StoreError: if a file is missing, has another size, or was replaced since the previous call.
        """
        await gather([self._verify(place, published) for place, published in self._published.items()])

    async def _verify(self, place: Path, published: '_Published') -> None:
        try:
            stat = await place.stat()
        except NotFoundError as error:
            raise StoreError(f'{place}: {published.size} bytes were written, but there is no such file') from error
        version = published.version or stat.version
        if stat.is_dir or stat.size != published.size or stat.version != version:
            raise StoreError(
                f'{place}: expected {published.size} bytes of version {version} after writing, got {stat.size} of '
                f'version {stat.version}'
            )
        published.version = version

    async def withdraw(self, sole: bool) -> None:
        """Remove the files that this writer published, unless replaced since. The deciding file is removed last.

        Args:
          sole: True if no other writer can have created the files whose publishing failed.
        """
        uncertain = [(place, _Published(-1)) for place in self._uncertain if sole or self.owned]
        for place, published in [*uncertain, *reversed(self._published.items())]:
            try:
                stat = await place.stat()
            except NotFoundError:
                continue
            if published.version in (None, stat.version):
                await self.path.store.delete([place.key])
        self._published.clear()

    async def _abort(self) -> None:
        await self.path.store.ready()
        async with self._turns.turn():
            await self._drop()

    async def _drop(self) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):  # on a full disk, the remaining buffer cannot be written
                file.close()
        if self._files and self._failed:
            await self.cut(self.flushed)
        await gather([writer.abort() for writer in self._writers])
        if self.verifies:
            await self.withdraw(sole=False)

    async def cut(self, records: int) -> None:
        """Discard the records after the first ``records`` of a closed local bag of version 3."""
        store = self.path.store
        if not isinstance(store, LocalStore) or not self._files:
            return
        at = records * layout.LIMIT
        end = int.from_bytes(await self._index_path.read_range(at - layout.LIMIT, at), 'little') if records else 0
        # The table goes first: readers ignore bytes that it does not cover.
        await store.truncate(self._index_path.key, at)
        await store.truncate(self.path.key, end)
        if len(self._files) == 3:
            await store.truncate(self._sums_path.key, 4 * records)

    def _check_usable(self) -> None:
        self._check_open()
        if self._failed:
            raise ClosedError(f'{self.path}: a write failed before: close it, or abort')


@dataclasses.dataclass(slots=True)
class _Published:
    """A published file.

    Attributes:
      size: the bytes written.
      version: the version that was verified; None before.
    """

    size: int
    version: str | None = None


class _Tail:
    """The bytes after a bag's last limit, which a resuming writer must append again."""

    def __init__(self, key: str, start: int, stop: int) -> None:
        self._key, self._at, self._stop = key, start, stop

    @property
    def left(self) -> int:
        return self._stop - self._at

    def check(self, record: bytes, index: int) -> bytes:
        """Compare a record with the tail; return the part of the record that the tail does not have."""
        size = min(len(record), self.left)
        with open(self._key, 'rb') as file:
            file.seek(self._at)
            there = file.read(size)
        if there != record[:size]:
            raise CorruptBagError(
                f'{self._key}: record {index} differs from the {self.left} bytes that a writer before left behind the '
                f"last limit: append the same records, or pass resume='discard'"
            )
        self._at += size
        return record[size:]

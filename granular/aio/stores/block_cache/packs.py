"""Folder of a block cache on the local disk, shared by all processes of one user on a machine.

::

    blocks-2/
      table        16 bytes for each block of each object, mapped by all processes: its location and its proof
      objects/...  one record for each version of an object: its size, and the position of its area of the table
      packs/...    blocks one after the other, appended to by one process at a time
      lock         held briefly when an object is registered, and when a pack is created or removed
      flights      byte locks, one for each block in flight

No file is trusted. The proof of a block is 64 bits: a CRC32C of each half of its bytes, seeded with the identity of the
object (store, endpoint, key, version, size) and the number of the block. A process compares it the first time that it
reads a slot of a pack for a block, unless it wrote the slot itself. So a table, a record or a pack that was deleted,
truncated, rolled back to an earlier copy, filled with zeros, or swapped for another one, for example by a power cut,
costs time and never yields the bytes of another block: no order of writes has to be enforced, and nothing is synced.

A block is written before the table refers to it, by one 8-byte memory write. A pack only changes at its end, and its
number is random, so that it is not given to another pack after it was removed: a process that has the pack open
continues to read it, and for all others its blocks are absent. Damage is logged, and the blocks are fetched from the
store again.
"""

import array
import contextlib
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np

from granular.aio.http.buffers import blank
from granular.aio.stores.local.locks import RangeLocks, lock
from granular.aio.stores.private import open_file, open_folder
from granular.config import MiB
from granular.errors import NotFoundError, StoreTimeoutError
from granular.formats.checksums import seal

SHIFT: Final = 16
BLOCK: Final = 1 << SHIFT
"""Bytes of a block: a request for fewer costs about as much."""
PACKS: Final = 128  # maximum number of packs; a small cache has fewer, of 1 MiB
SLOTS: Final = 24  # bits of a location that give the block's slot in its pack; the other bits are the pack's number
_SLOT: Final = (1 << SLOTS) - 1
_NUMBERS: Final = 1 << 40  # pack numbers are below this
_TABLE: Final = 1 << 34  # bytes of the mapping, for 64 TiB of objects; the file is sparse
_HEAD: Final = 4096  # bytes before the first area; the first word is the position of the next area, in words of 8 bytes
_AREA: Final = 2  # words at the beginning of an object's area: its identity, and the number of words of the area
_RECORD: Final = 1 << 16  # upper bound of the bytes of an object record
_TOUCH: Final = 30.0  # minimum seconds between two records of a pack's use
_PATIENCE: Final = 5.0  # seconds to wait for the lock, which is held for moments
_QUIET: Final = 30.0  # seconds in which further damage is only logged as DEBUG
_CANNOT: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # errors of file systems without reservations
_VERSION: Final = 'blocks-2'
_OLD: Final = 'blocks-1'

logger = logging.getLogger('granular')


class Pack:
    """An open pack, closed when its last reader releases it.

    Attributes:
      fd: descriptor to read from; also to append to, if the pack was claimed.
      next: the first free slot, if the pack was claimed.
      number: the number of the pack.
      touched: the time at which its use was last recorded, by the monotonic clock.
      proven: for each slot, the mark of the block that this process has verified or written there; 0 for none.
    """

    __slots__ = ('fd', 'next', 'number', 'proven', 'touched')

    def __init__(self, fd: int, number: int) -> None:
        self.fd, self.number, self.next, self.touched = fd, number, 0, 0.0
        self.proven = array.array('Q')

    def prove(self, slot: int, mark: int) -> None:
        """Record which block a slot holds."""
        if slot >= len(self.proven):
            self.proven.frombytes(bytes(8 * (max(slot + 1, 2 * len(self.proven)) - len(self.proven))))
        self.proven[slot] = mark

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


class Cached:
    """A registered version of an object.

    Attributes:
      size: its bytes.
      base: the position of its entries in the table, in words of 8 bytes.
      flight: the position of its first block among the locks of blocks in flight.
      seed: 63 bits of its identity; the sum of the seed and a block number is the mark of that block.
    """

    __slots__ = ('base', 'flight', 'seed', 'size')

    def __init__(self, size: int, base: int, digest: bytes) -> None:
        self.size, self.base = size, base
        self.flight = int.from_bytes(digest[8:13], 'big') << 22
        self.seed = _seed(digest)

    def length(self, block: int) -> int:
        """Return the size of a block in bytes."""
        return min(BLOCK, self.size - (block << SHIFT))

    def proof(self, block: int, left: bytes, right: bytes) -> int:
        """Return the proof of a block with the given halves."""
        number = block.to_bytes(8, 'little')
        return seal(seal(self.seed, number, number), left, right)


class Record(NamedTuple):
    """Object record: the SHA-256 of the object's identity, its size, table position, and address for display."""

    digest: bytes
    size: int
    base: int
    url: str


class Packs:
    """The blocks in a folder.

    Memory: 8 bytes for each block in the packs that this process has read, in addition to the system's page cache.

    Args:
      folder: created if it does not exist.
      limit: maximum bytes on the disk of all packs.

    Raises:
      AccessDeniedError: if the folder belongs to another user, or contains symbolic links.
    """

    def __init__(self, folder: str, limit: int) -> None:
        self.folder = os.path.join(folder, _VERSION)
        self._pack_size = max(max(limit // PACKS, min(limit // 8, MiB)) // BLOCK, 1) * BLOCK
        self._limit = limit
        self._fds: list[int] = []
        top = self._kept(open_folder(folder))
        self._top = self._kept(open_folder(_VERSION, top))
        self._records = self._kept(open_folder('objects', self._top))
        self._packs = self._kept(open_folder('packs', self._top))
        with contextlib.suppress(OSError):
            shutil.rmtree(_OLD, dir_fd=top)  # it would take its own limit in addition to this one's
        self._table = self._kept(open_file('table', os.O_RDWR | os.O_CREAT, self._top))
        if os.fstat(self._table).st_size < _TABLE:
            os.ftruncate(self._table, _TABLE)  # a sparse file
        _reserve(self._table, 0, _HEAD)
        self._map = mmap.mmap(self._table, _TABLE)
        self.words = memoryview(self._map).cast('Q')
        self._flights = RangeLocks(open_file('flights', os.O_RDWR | os.O_CREAT, self._top))
        os.close(open_file('lock', os.O_RDWR | os.O_CREAT, self._top))  # rejects a planted link now
        self._objects: dict[tuple[str, str, str], Cached] = {}
        self._open: dict[int, Pack | None] = {}
        self._mine: Pack | None = None
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._logged = -_QUIET

    def _kept(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        for fd in self._fds:
            close(fd)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclude other threads and processes from registering objects, and from creating or removing packs.

        Raises:
          StoreTimeoutError: if another process keeps the lock, such as one that was stopped.
        """
        until = time.monotonic() + _PATIENCE
        if not self._turn.acquire(timeout=_PATIENCE):
            raise self._impatient()
        try:
            held = open_file('lock', os.O_RDWR | os.O_CREAT, self._top)
            try:
                self._lock_out(held, until)
                try:
                    yield
                finally:
                    fcntl.flock(held, fcntl.LOCK_UN)  # a child that was forked meanwhile has the file open as well
            finally:
                os.close(held)
        finally:
            self._turn.release()

    def _lock_out(self, held: int, until: float) -> None:
        pause = 0.0005
        while True:
            try:
                return fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise self._impatient() from None
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def _impatient(self) -> StoreTimeoutError:
        return StoreTimeoutError(f'{self.folder}: another process has kept its lock for {_PATIENCE:g} s')

    def _damaged(self, name: str, error: object) -> None:
        """Log damage as a WARNING at most every 30 s, otherwise as DEBUG."""
        level, now = logging.DEBUG, time.monotonic()
        if now - self._logged > _QUIET:
            level, self._logged = logging.WARNING, now
        logger.log(level, '%s: %s: not used, and fetched again where it is needed: %s', self.folder, name, error)

    # --- objects

    def known(self, store: str, key: str, version: str, size: int) -> Cached | None:
        """Return a version of an object that any process has registered; None if there is none."""
        cached = self._objects.get((store, key, version))
        if cached is None or cached.size != size:
            cached = self._registered(store, key, version, size)
            if cached is not None:
                self._objects[store, key, version] = cached
        return cached

    def _registered(self, store: str, key: str, version: str, size: int) -> Cached | None:
        name = _record_name(store, key, version)
        try:
            record = self._record(name)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._damaged(name, error)
            return None
        if record.size != size or record.digest != _digest(store, key, version, size) or not self._owns(record):
            self._damaged(name, 'the object record is not that of the object, or of its area in the table')
            return None
        return Cached(record.size, record.base, record.digest)

    def _record(self, name: str) -> Record:
        """Return the content of an object record.

        Raises:
          ValueError: if the file has none.
        """
        fd = open_file(name, os.O_RDONLY, self._records)
        try:
            content = os.read(fd, _RECORD)
        finally:
            os.close(fd)
        try:
            values: Any = msgpack.unpackb(content)
            record = Record(*values)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ValueError(f'expected an object record: {error}') from error
        if not all(type(value) is kind for value, kind in zip(record, (bytes, int, int, str), strict=True)):
            raise ValueError('expected an object record: its values have other types')
        if not (0 <= record.size <= BLOCK * len(self.words) and len(record.digest) == hashlib.sha256().digest_size):
            raise ValueError(f'expected an object record: its size is {record.size}')
        if not _HEAD // 8 + _AREA <= record.base <= len(self.words) + _AREA - _words(record.size):
            raise ValueError(f'expected an object record: its area begins at {record.base}')
        return record

    def _owns(self, record: Record) -> bool:
        """Return whether an object's area begins with its identity: the table and records may be of different times."""
        start = record.base - _AREA
        return self.words[start] == _seed(record.digest) and self.words[start + 1] == _words(record.size)

    def register(self, store: str, key: str, version: str, size: int, url: str) -> Cached:
        """Register a version of an object, and allocate its area of the table."""
        digest, words = _digest(store, key, version, size), _words(size)
        if _HEAD // 8 + words > len(self.words):
            raise OSError(f'{url}: has {size} bytes, more than a block cache can describe')
        with self._alone():
            if (cached := self.known(store, key, version, size)) is not None:
                return cached
            start = self.words[0]
            if start % _AREA or not _HEAD // 8 <= start <= len(self.words) - words:
                start = _HEAD // 8  # a new, damaged or full table: objects that are overwritten are registered again
            _reserve(self._table, 8 * start, 8 * _AREA)
            self.words[0] = start + words
            self.words[start], self.words[start + 1] = _seed(digest), words
            draft = open_file('draft', os.O_WRONLY | os.O_CREAT | os.O_TRUNC, self._records)
            try:
                content = msgpack.packb(Record(digest, size, start + _AREA, url[: _RECORD // 8]))
                if os.write(draft, content) != len(content):
                    raise OSError(f'{self.folder}: an object record was not written')
            finally:
                os.close(draft)
            name = _record_name(store, key, version)
            os.rename('draft', name, src_dir_fd=self._records, dst_dir_fd=self._records)
            cached = self._objects[store, key, version] = Cached(size, start + _AREA, digest)
            return cached

    # --- reading

    def read(self, cached: Cached, start: int, stop: int) -> bytes | None:
        """Return a byte range if all of it is cached, else None."""
        if stop > cached.size:
            return None  # the store raises the error
        first, last = start >> SHIFT, (stop - 1) >> SHIFT
        if first == last:
            location = self.words[cached.base + 2 * first]
            pack = self._pack(location) if location else None
            if pack is None:
                return None
            slot, proven = location & _SLOT, pack.proven
            known = slot < len(proven) and proven[slot] == cached.seed + first
            if not known and not self._check(cached, first, pack, location):
                return None
            data = os.pread(pack.fd, stop - start, (slot << SHIFT) + (start & (BLOCK - 1)))
            return data if len(data) == stop - start else None
        out, view = blank(stop - start)
        return out if self._read_into(cached, start, stop, view) else None

    def _read_into(self, cached: Cached, start: int, stop: int, view: memoryview) -> bool:
        """Read a byte range, with one read for adjacent blocks of a pack. Return whether all of it is cached."""
        at, words = start, self.words
        while at < stop:
            block = at >> SHIFT
            location = words[cached.base + 2 * block]
            pack = self._pack(location) if location else None
            if pack is None:
                return False
            slot, proven, run = location & _SLOT, pack.proven, 0
            while True:
                place = slot + run
                known = place < len(proven) and proven[place] == cached.seed + block + run
                if not known and not self._check(cached, block + run, pack, location + run):
                    return False
                run += 1
                if (block + run) << SHIFT >= stop or words[cached.base + 2 * (block + run)] != location + run:
                    break
            end = min(stop, (block + run) << SHIFT)
            begin = (slot << SHIFT) + (at & (BLOCK - 1))
            if os.preadv(pack.fd, [view[at - start : end - start]], begin) != end - at:
                return False
            at = end
        return True

    def has(self, cached: Cached, block: int) -> bool:
        """Return whether a block is cached; its proof is compared when it is read."""
        location = self.words[cached.base + 2 * block]
        return bool(location) and self._pack(location) is not None

    def forget(self, cached: Cached, block: int) -> None:
        """Mark a block as absent."""
        entry = cached.base + 2 * block
        if self.words[entry]:  # writing to a page of the table without disk space would kill the process
            self.words[entry] = 0

    def _pack(self, location: int) -> Pack | None:
        number = location >> SLOTS
        try:
            pack = self._open[number]
        except KeyError:
            pack = self._opened(number)
        if pack is not None and (now := time.monotonic()) - pack.touched > _TOUCH:
            pack.touched = now
            with contextlib.suppress(OSError):  # it is only removed somewhat earlier
                os.utime(pack.fd)
        return pack

    def _opened(self, number: int) -> Pack | None:
        try:
            pack = Pack(open_file(_pack_name(number), os.O_RDONLY, self._packs), number)
        except FileNotFoundError:
            pack = None
        except OSError as error:  # such as too many open files, which may pass: not remembered
            self._damaged(_pack_name(number), error)
            return None
        with self._lock:
            while len(self._open) >= 4 * PACKS:
                del self._open[next(iter(self._open))]
            self._open[number] = pack
        return pack

    def _check(self, cached: Cached, block: int, pack: Pack, location: int) -> bool:
        """Compare a block's proof with the bytes at its location. Return whether they agree."""
        entry, slot = cached.base + 2 * block, location & _SLOT
        length, at = cached.length(block), slot << SHIFT
        half = length // 2
        left, right = os.pread(pack.fd, half, at), os.pread(pack.fd, length - half, at + half)
        if len(left) + len(right) == length and cached.proof(block, left, right) == self.words[entry + 1]:
            pack.prove(slot, cached.seed + block)
            return True
        self._damaged(_pack_name(pack.number), f'slot {slot} does not have block {block}')
        if self.words[entry] == location:
            self.words[entry] = 0
        return False

    # --- writing

    def write(self, cached: Cached, first: int, data: bytes) -> None:
        """Cache consecutive blocks, from the block ``first`` on."""
        view = memoryview(data)
        # A write to a mapped page without disk space kills the process.
        _reserve(self._table, 8 * (cached.base + 2 * first), 16 * -(-len(view) // BLOCK))
        while view:
            pack, slot, count = self._room(-(-len(view) // BLOCK))
            part, done = view[: count << SHIFT], 0
            while done < len(part):
                done += os.pwrite(pack.fd, part[done:], (slot << SHIFT) + done)
            for i in range(count):
                block = part[i << SHIFT : (i + 1) << SHIFT]
                half, entry = len(block) // 2, cached.base + 2 * (first + i)
                self.words[entry + 1] = cached.proof(first + i, bytes(block[:half]), bytes(block[half:]))
                self.words[entry] = pack.number << SLOTS | slot + i
                pack.prove(slot + i, cached.seed + first + i)
            first += count
            view = view[len(part) :]

    def _room(self, count: int) -> tuple[Pack, int, int]:
        """Reserve up to ``count`` slots: return their pack, the first slot and the number of slots."""
        most = self._pack_size >> SHIFT
        while True:
            with self._lock:
                pack = self._mine
                if pack is not None and pack.next < most and os.fstat(pack.fd).st_nlink:
                    slot = pack.next
                    pack.next = min(most, slot + count)
                    return pack, slot, pack.next - slot
            self._claim(pack)

    def _claim(self, full: Pack | None) -> None:
        """Continue a pack that no process writes to, or create one."""
        with self._alone():
            if self._mine is not full:
                return  # another thread did it
            packs = self._listed()
            free = (self._claimed(number) for _, number, size in reversed(packs) if size < self._pack_size)
            mine = next(filter(None, free), None)
            if mine is None:
                self._remove(packs, self._limit - self._pack_size)
                number = 1 + secrets.randbelow(_NUMBERS - 1)
                fd = open_file(_pack_name(number), os.O_RDWR | os.O_CREAT | os.O_EXCL, self._packs)
                mine = Pack(fd, number)
                lock(mine.fd)
            self._mine = self._open[mine.number] = mine

    def _claimed(self, number: int) -> Pack | None:
        try:
            pack = Pack(open_file(_pack_name(number), os.O_RDWR, self._packs), number)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._damaged(_pack_name(number), error)
            return None
        if not lock(pack.fd):
            return None
        pack.next = -(-os.fstat(pack.fd).st_size // BLOCK)
        return pack if pack.next < self._pack_size >> SHIFT else None

    def _listed(self) -> list[tuple[float, int, int]]:
        """Return the time of last use, the number and the size of each pack, least recently used first."""
        packs = []
        with os.scandir(os.path.join(self.folder, 'packs')) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError, ValueError):
                    info, number = entry.stat(follow_symlinks=False), int(entry.name, 16)
                    if stat.S_ISREG(info.st_mode) and 0 < number < _NUMBERS and entry.name == _pack_name(number):
                        packs.append((info.st_mtime, number, info.st_size))
        return sorted(packs)

    def _remove(self, packs: Sequence[tuple[float, int, int]], limit: int) -> int:
        """Remove the least recently used packs until the others, when full, have at most ``limit`` bytes.

        Returns:
          The bytes removed.
        """
        sizes = [max(size, self._pack_size) for _, _, size in packs]
        total, removed = sum(sizes), 0
        for (_, number, size), full in zip(packs, sizes, strict=True):
            if total <= limit:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_pack_name(number), dir_fd=self._packs)
            self._open.pop(number, None)
            total, removed = total - full, removed + size
        return removed

    # --- blocks in flight

    def claim(self, cached: Cached, first: int, count: int) -> bool:
        """Claim blocks for fetching. Return False if another process holds one of them."""
        return self._flights.lock(cached.flight + first, count)

    def release(self, cached: Cached, first: int, count: int) -> None:
        """Release claimed blocks."""
        self._flights.unlock(cached.flight + first, count)

    # --- inspection

    def objects(self) -> Iterator[tuple[str, int, int]]:
        """Yield the address and size of each version of an object, and how many of its bytes are cached."""
        alive = [number for _, number, _ in self._listed()]
        table = np.frombuffer(self._map, np.uint64)
        for name in sorted(os.listdir(os.path.join(self.folder, 'objects'))):
            try:
                record = self._record(name)
            except (OSError, ValueError):
                continue  # being written, or damaged
            if not self._owns(record) or not record.size:
                continue
            locations = table[record.base : record.base + _words(record.size) - _AREA : 2]
            there = np.isin(locations >> np.uint64(SLOTS), alive) & (locations > 0)
            missing = -record.size % BLOCK if there[-1] else 0
            yield record.url, record.size, int(there.sum()) * BLOCK - missing

    def size(self) -> int:
        """Return the total size of all packs in bytes."""
        return sum(size for _, _, size in self._listed())

    def trim(self, limit: int) -> int:
        """Remove the least recently used packs until at most ``limit`` bytes are left. Return the bytes removed."""
        with self._alone():
            packs, removed = self._listed(), 0
            while packs and sum(size for _, _, size in packs) > limit:
                removed += self._remove(packs[:1], 0)
                packs = packs[1:]
            return removed


def _digest(store: str, key: str, version: str, size: int) -> bytes:
    """Return the SHA-256 of an object's identity."""
    return hashlib.sha256(repr((store, key, version, size)).encode()).digest()


def _seed(digest: bytes) -> int:
    """Return 63 bits of an identity, so that a block number can be added; never 0."""
    return int.from_bytes(digest[:8], 'big') >> 1 | 1


def _record_name(store: str, key: str, version: str) -> str:
    return hashlib.sha256(repr((store, key, version)).encode()).hexdigest()


def _pack_name(number: int) -> str:
    return f'{number:010x}'


def _words(size: int) -> int:
    """Return the number of table words that an object of ``size`` bytes takes."""
    return _AREA + 2 * -(-size // BLOCK)


def _reserve(fd: int, start: int, length: int) -> None:
    """Reserve disk space for bytes of a file, where the file system can.

    Raises:
      OSError: if the disk is full.
    """
    try:
        os.posix_fallocate(fd, start, length)
    except AttributeError:
        return  # a system without posix_fallocate
    except OSError as error:
        if error.errno not in _CANNOT:
            raise


def existing(folder: str) -> Packs:
    """Open the block cache in a folder that has one.

    Raises:
      NotFoundError: if it has none.
    """
    if not os.path.exists(os.path.join(folder, _VERSION, 'table')):
        raise NotFoundError(f'{folder}: is no cache_dir of a block cache')
    return Packs(folder, 0)

"""The local folder of a block cache: which blocks of which objects lie where, shared by all processes of a machine.

::

    blocks-1/
      table            16 bytes for each block of each object, mapped by all: where it lies, its CRC32C and length
      objects/ab/...   of each version of an object: its size, and where its part of the table begins
      packs/...        blocks one behind the other, appended to by one process at a time
      lock             held for moments, when a pack begins or one is removed
      flights          of which bytes are locked that stand for blocks that somebody is fetching

A block is written before the table tells of it, in one store of 8 bytes. A pack is never changed but at its end, and
the number of one that was removed is never given to another: whoever still has it open reads what was there, and to all
others its blocks are absent. The first time that a process comes upon a block of another one, it checks its CRC32C.
Nothing is lost with the folder but time: what is wrong with it is logged, and the store is asked.
"""

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgpack
import numpy as np

from granular.aio.memory import blank
from granular.aio.stores.locks import RangeLocks, lock
from granular.checksums import crc32c
from granular.config import MiB
from granular.errors import NotFoundError

SHIFT: Final = 16
BLOCK: Final = 1 << SHIFT
"""Bytes of a block: a request for fewer costs about as much."""
PACKS: Final = 128  # that there may be; fewer, of 1 MiB, in a small cache
SLOTS: Final = 24  # bits of a location that say where in its pack a block lies; the others are the pack's number
_TABLE: Final = 1 << 34  # bytes that are mapped, for 64 TiB of objects; on the disk it has what was written
_HEAD: Final = 4096  # bytes before the first entry: the next pack's number, and the next object's first entry
_TOUCH: Final = 30.0  # seconds after which the use of a pack is noted again
_VERSION: Final = 'blocks-1'

logger = logging.getLogger('granular')


class Pack:
    """An open pack, closed when the last who reads it lets go.

    Attributes:
      fd: to read from; to append to as well, if it was claimed.
      touched: when its use was noted last, by the monotonic clock.
    """

    __slots__ = ('fd', 'next', 'number', 'touched')

    def __init__(self, fd: int, number: int, slots: int = 0) -> None:
        self.fd, self.number, self.next, self.touched = fd, number, slots, 0.0

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


class Cached:
    """One version of an object.

    Attributes:
      size: its bytes.
      base: where its entries begin in the table, in words of 8 bytes.
      flight: what its first block has among the locks of those that are being fetched.
      checked: of each block, whether this process knows it to be right.
    """

    __slots__ = ('base', 'checked', 'flight', 'size')

    def __init__(self, size: int, base: int, name: str) -> None:
        self.size, self.base = size, base
        self.flight = int(name[:10], 16) << 22
        self.checked = bytearray(-(-size // BLOCK))

    def length(self, block: int) -> int:
        """The bytes of a block."""
        return min(BLOCK, self.size - (block << SHIFT))


class Packs:
    """The blocks in a folder.

    Memory: 1 byte for each block of the objects that were read, beside what the system keeps of the files.

    Args:
      folder: where; made if it is not there.
      limit: bytes on the disk that all packs may have.
    """

    def __init__(self, folder: str, limit: int) -> None:
        self.folder = os.path.join(folder, _VERSION)
        self._pack_size = max(max(limit // PACKS, min(limit // 8, MiB)) // BLOCK, 1) * BLOCK
        self._limit = limit
        for name in ('objects', 'packs'):
            os.makedirs(os.path.join(self.folder, name), exist_ok=True)
        table = os.open(os.path.join(self.folder, 'table'), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(table).st_size < _TABLE:
                os.ftruncate(table, _TABLE)  # a hole
            self._map = mmap.mmap(table, _TABLE)
        finally:
            os.close(table)
        self.words = memoryview(self._map).cast('Q')
        self._flights = RangeLocks(os.path.join(self.folder, 'flights'))
        self._objects: dict[tuple[str, str, str], Cached] = {}
        self._open: dict[int, Pack | None] = {}
        self._mine: Pack | None = None
        self._lock = threading.Lock()
        self._turn = threading.Lock()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process begins or removes anything meanwhile."""
        with self._turn, open(os.path.join(self.folder, 'lock'), 'ab') as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # until it is closed
            yield

    # --- objects

    def _card(self, store: str, key: str, version: str) -> tuple[str, str]:
        name = hashlib.sha256(f'{store}\0{key}\0{version}'.encode()).hexdigest()[:40]
        return name, os.path.join(self.folder, 'objects', name[:2], name)

    def known(self, store: str, key: str, version: str) -> Cached | None:
        """A version of an object that was read before, by whatever process."""
        found = self._objects.get((store, key, version))
        if found is not None:
            return found
        name, path = self._card(store, key, version)
        try:
            with open(path, 'rb') as card:
                size, base, _ = msgpack.unpackb(card.read())
        except FileNotFoundError:
            return None
        except Exception as error:
            logger.warning('%s: is no card of a cached object: %s', path, error)
            return None
        if not (type(size) is type(base) is int and size >= 0 and _HEAD // 8 <= base <= len(self.words) - _words(size)):
            return None
        return self._objects.setdefault((store, key, version), Cached(size, base, name))

    def introduce(self, store: str, key: str, version: str, size: int, url: str) -> Cached:
        """Make room in the table for a version of an object."""
        name, path = self._card(store, key, version)
        with self._alone():
            if (found := self.known(store, key, version)) is not None:
                return found
            base = self.words[1] or _HEAD // 8
            if base + _words(size) > len(self.words):
                raise OSError(f'{self.folder}: its table is full: remove the folder')
            self.words[1] = base + _words(size)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            draft = f'{path}.{secrets.token_hex(4)}'
            with open(draft, 'wb') as card:
                card.write(msgpack.packb((size, base, url)))
            os.rename(draft, path)
        return self._objects.setdefault((store, key, version), Cached(size, base, name))

    # --- reading

    def read(self, cached: Cached, start: int, stop: int) -> bytes | None:
        """A byte range, if all of it is there."""
        if stop > cached.size:
            return None  # the store will say so
        first, last = start >> SHIFT, (stop - 1) >> SHIFT
        if first == last:
            location = self.words[cached.base + 2 * first]
            pack = self._pack(location) if location else None
            if pack is None or not (cached.checked[first] or self._check(cached, first, pack, location)):
                return None
            at = ((location & ((1 << SLOTS) - 1)) << SHIFT) + (start & (BLOCK - 1))
            data = os.pread(pack.fd, stop - start, at)
            return data if len(data) == stop - start else None
        out, view = blank(stop - start)
        return out if self._read_into(cached, start, stop, view) else None

    def _read_into(self, cached: Cached, start: int, stop: int, view: memoryview) -> bool:
        """Blocks that lie one behind the other in a pack are read at once."""
        at, words = start, self.words
        while at < stop:
            block = at >> SHIFT
            location = words[cached.base + 2 * block]
            pack = self._pack(location) if location else None
            if pack is None or not (cached.checked[block] or self._check(cached, block, pack, location)):
                return False
            run = 1
            while (block + run) << SHIFT < stop and words[cached.base + 2 * (block + run)] == location + run:
                if not (cached.checked[block + run] or self._check(cached, block + run, pack, location + run)):
                    return False
                run += 1
            end = min(stop, (block + run) << SHIFT)
            place = ((location & ((1 << SLOTS) - 1)) << SHIFT) + (at & (BLOCK - 1))
            if os.preadv(pack.fd, [view[at - start : end - start]], place) != end - at:
                return False
            at = end
        return True

    def has(self, cached: Cached, block: int) -> bool:
        """Whether a block is there."""
        location = self.words[cached.base + 2 * block]
        return bool(location) and self._pack(location) is not None

    def _pack(self, location: int) -> Pack | None:
        number = location >> SLOTS
        try:
            pack = self._open[number]
        except KeyError:
            pack = self._opened(number)
        if pack is not None and (now := time.monotonic()) - pack.touched > _TOUCH:
            pack.touched = now
            with contextlib.suppress(OSError):  # it is removed somewhat earlier then
                os.utime(pack.fd)
        return pack

    def _opened(self, number: int) -> Pack | None:
        try:
            pack = Pack(os.open(self._path(number), os.O_RDONLY | os.O_CLOEXEC), number)
        except FileNotFoundError:
            pack = None
        except OSError as error:  # as when too many files are open: not for ever
            logger.warning('%s: a pack is not read: %s', self.folder, error)
            return None
        with self._lock:
            while len(self._open) >= 4 * PACKS:
                del self._open[next(iter(self._open))]
            self._open[number] = pack
        return pack

    def _path(self, number: int) -> str:
        return os.path.join(self.folder, 'packs', f'{number:010x}')

    def _check(self, cached: Cached, block: int, pack: Pack, location: int) -> bool:
        meta = self.words[cached.base + 2 * block + 1]
        length = cached.length(block)
        data = os.pread(pack.fd, length, (location & ((1 << SLOTS) - 1)) << SHIFT)
        if meta >> 32 == length == len(data) and crc32c(data) == meta & 0xFFFFFFFF:
            cached.checked[block] = 1
            return True
        logger.warning('%s: block %d at byte %d is not what was written', self._path(pack.number), location, block)
        self.words[cached.base + 2 * block] = 0
        return False

    # --- writing

    def write(self, cached: Cached, first: int, data: bytes) -> None:
        """Keep blocks one behind the other, from ``first`` on."""
        view = memoryview(data)
        while view:
            pack, slot, count = self._room(-(-len(view) // BLOCK))
            part, done = view[: count << SHIFT], 0
            while done < len(part):
                done += os.pwrite(pack.fd, part[done:], (slot << SHIFT) + done)
            for i in range(count):
                block = bytes(part[i << SHIFT : (i + 1) << SHIFT])
                entry = cached.base + 2 * (first + i)
                self.words[entry + 1] = len(block) << 32 | crc32c(block)
                self.words[entry] = pack.number << SLOTS | slot + i
                cached.checked[first + i] = 1
            first += count
            view = view[len(part) :]

    def _room(self, count: int) -> tuple[Pack, int, int]:
        """A pack, the first free slot in it, and how many there are, up to ``count``."""
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
        """Go on with a pack that nobody writes to, or begin one."""
        with self._alone():
            if self._mine is not full:
                return  # another thread did
            packs = self._listed()
            free = (self._claimed(number) for _, number, size in reversed(packs) if size < self._pack_size)
            mine = next(filter(None, free), None)
            if mine is None:
                self._remove(packs, self._limit - self._pack_size)
                number = self.words[0] = self.words[0] + 1
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                mine = Pack(os.open(self._path(number), flags, 0o600), number)
                lock(mine.fd)
            self._mine = self._open[mine.number] = mine

    def _claimed(self, number: int) -> Pack | None:
        try:
            pack = Pack(os.open(self._path(number), os.O_RDWR | os.O_CLOEXEC), number)
        except FileNotFoundError:
            return None
        if not lock(pack.fd):
            return None
        pack.next = -(-os.fstat(pack.fd).st_size // BLOCK)
        return pack if pack.next < self._pack_size >> SHIFT else None

    def _listed(self) -> list[tuple[float, int, int]]:
        """When each pack was used last, its number and size, by that."""
        found = []
        with os.scandir(os.path.join(self.folder, 'packs')) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError, ValueError):
                    info = entry.stat()
                    found.append((info.st_mtime, int(entry.name, 16), info.st_size))
        return sorted(found)

    def _remove(self, packs: Sequence[tuple[float, int, int]], limit: int) -> int:
        """Remove those that were used least recently until the others have at most ``limit`` bytes when full."""
        sizes = [max(size, self._pack_size) for _, _, size in packs]
        total, removed = sum(sizes), 0
        for (_, number, size), full in zip(packs, sizes, strict=True):
            if total <= limit:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(number))
            self._open.pop(number, None)
            total, removed = total - full, removed + size
        return removed

    # --- who fetches what

    def take_off(self, cached: Cached, first: int, count: int) -> bool:
        """Say that this process fetches blocks; whether no other one does."""
        return self._flights.lock(cached.flight + first, count)

    def land(self, cached: Cached, first: int, count: int) -> None:
        """Say that it does so no more."""
        self._flights.unlock(cached.flight + first, count)

    # --- looking at it

    def objects(self) -> Iterator[tuple[str, int, int]]:
        """The address and size of each version of an object, and how many of its bytes are there."""
        alive = [number for _, number, _ in self._listed()]
        table = np.frombuffer(self._map, np.uint64)
        for folder, _, names in os.walk(os.path.join(self.folder, 'objects')):
            for name in names:
                with open(os.path.join(folder, name), 'rb') as card:
                    size, base, url = msgpack.unpackb(card.read())
                entries = table[base : base + _words(size)].reshape(-1, 2)
                there = np.isin(entries[:, 0] >> np.uint64(SLOTS), alive) & (entries[:, 0] > 0)
                yield url, size, int((entries[there, 1] >> np.uint64(32)).sum())

    def size(self) -> int:
        """Bytes of all packs."""
        return sum(size for _, _, size in self._listed())

    def trim(self, limit: int) -> int:
        """Remove what was used least recently until that many bytes are left; gives the bytes that were removed."""
        with self._alone():
            packs, removed = self._listed(), 0
            while packs and sum(size for _, _, size in packs) > limit:
                removed += self._remove(packs[:1], 0)
                packs = packs[1:]
            return removed


def _words(size: int) -> int:
    """What an object of so many bytes takes of the table."""
    return 2 * -(-size // BLOCK)


def existing(folder: str) -> Packs:
    """The blocks in a folder that has some.

    Raises:
      NotFoundError: if it has none.
    """
    if not os.path.exists(os.path.join(folder, _VERSION, 'table')):
        raise NotFoundError(f'{folder}: is no cache_dir of a block cache')
    return Packs(folder, 0)

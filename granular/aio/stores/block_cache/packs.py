"""Packs of a block cache: files of blocks one after the other, appended to by one process at a time."""

import array
import contextlib
import os
import secrets
import stat
import threading
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from granular.aio.runtime.descriptor import Descriptor
from granular.aio.stores.block_cache.folder import CacheFolder
from granular.aio.stores.block_cache.objects import BLOCK, SHIFT
from granular.aio.stores.local.locks import lock
from granular.aio.stores.owner_only import open_file
from granular.config import MiB

PACKS: Final = 128  # maximum number of packs; a small cache has fewer, of 1 MiB
_NUMBERS: Final = 1 << 40  # pack numbers are below this
_TOUCH: Final = 30.0  # minimum seconds between two records of a pack's use


class Pack(Descriptor):
    """An open pack, closed when its last reader releases it."""

    next: int  # the first free slot, if this process appends to the pack
    number: int
    touched: float  # the time at which its use was last recorded, by the monotonic clock

    __slots__ = ('next', 'number', 'touched', 'verified')

    def __init__(self, fd: int, number: int) -> None:
        super().__init__(fd)
        self.number = number
        self.next = 0
        self.touched = 0.0
        # For each slot, the mark of the block that this process has verified or written there; 0 for none.
        self.verified: array.array[int] = array.array('Q')

    @property
    def name(self) -> str:
        return _file_name(self.number)

    def set_verified(self, slot: int, mark: int) -> None:
        size = len(self.verified)  # once: other threads may lengthen it at any time
        if slot >= size:
            self.verified.frombytes(bytes(8 * max(slot + 1 - size, size)))
        self.verified[slot] = mark

    def write(self, slot: int, blocks: Sequence[memoryview]) -> None:
        """Write blocks to consecutive slots, with one system call for all up to a block that does not fill its slot."""
        first = 0
        for i, block in enumerate(blocks, 1):
            if len(block) < BLOCK or i == len(blocks):
                self._write_full(slot + first, blocks[first:i])
                first = i

    def _write_full(self, slot: int, blocks: Sequence[memoryview]) -> None:
        """Write blocks of which only the last may be shorter than its slot."""
        done, size = 0, sum(map(len, blocks))
        while done < size:
            i, offset = divmod(done, BLOCK)
            done += os.pwritev(self.fd, [blocks[i][offset:], *blocks[i + 1 :]], (slot << SHIFT) + done)


class PackFile(NamedTuple):
    """A pack in a listing: the time of its last use, its number, and its bytes."""

    used: float
    number: int
    size: int


class Packs:
    """The packs in the folder of a cache, of at most ``limit`` bytes on the disk."""

    def __init__(self, folder: CacheFolder, limit: int) -> None:
        self._folder = folder
        self._slots = max(max(limit // PACKS, min(limit // 8, MiB)) // BLOCK, 1)
        self._limit = limit
        self._open: dict[int, Pack | None] = {}
        self._appending: Pack | None = None
        self._lock = threading.RLock()  # the handler of a signal may read meanwhile

    def get(self, number: int) -> Pack | None:
        """Return a pack, and record its use; None if it was removed."""
        try:
            pack = self._open[number]
        except KeyError:
            pack = self._open_to_read(number)
        if pack is not None and (now := time.monotonic()) - pack.touched > _TOUCH:
            pack.touched = now
            with contextlib.suppress(OSError):  # it is only removed somewhat earlier
                os.utime(pack.fd)
            if not os.fstat(pack.fd).st_nlink:
                self._close_removed()
        return pack

    def _open_to_read(self, number: int) -> Pack | None:
        try:
            pack = Pack(open_file(_file_name(number), os.O_RDONLY, self._folder.packs.fd), number)
        except FileNotFoundError:
            pack = None
        except OSError as error:  # such as too many open files, which may pass: not cached
            self._folder.log_damage(_file_name(number), error)
            return None
        with self._lock:
            for oldest in list(self._open)[: max(0, len(self._open) + 1 - 4 * PACKS)]:
                self._open.pop(oldest, None)
            self._open[number] = pack
        self._close_removed()
        return pack

    def _close_removed(self) -> None:
        """Close the packs that other processes have removed, which take disk space until then."""
        for number, pack in list(self._open.items()):
            if pack is not None and not os.fstat(pack.fd).st_nlink:
                self._open.pop(number, None)

    # --- appending

    def reserve(self, count: int) -> tuple[Pack, int, int]:
        """Reserve up to ``count`` slots: return their pack, the first slot and the number of slots."""
        while True:
            with self._lock:
                pack = self._appending
                if pack is not None and pack.next < self._slots and os.fstat(pack.fd).st_nlink:
                    slot = pack.next
                    pack.next = min(self._slots, slot + count)
                    return pack, slot, pack.next - slot
            self._replace(pack)

    def _replace(self, full: Pack | None) -> None:
        """Continue a pack that no process appends to, or create one."""
        with self._folder.exclusive():
            if self._appending is not full:
                return  # another thread did it
            files = self.files()
            size = self._slots << SHIFT
            candidates = (self._open_to_append(file.number) for file in reversed(files) if file.size < size)
            pack = next(filter(None, candidates), None)
            if pack is None:
                self._remove(files, self._limit - size)
                pack = self._create()
            self._appending = self._open[pack.number] = pack
            self._close_removed()

    def _create(self) -> Pack:
        number = 1 + secrets.randbelow(_NUMBERS - 1)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        pack = Pack(open_file(_file_name(number), flags, self._folder.packs.fd), number)
        lock(pack.fd)
        return pack

    def _open_to_append(self, number: int) -> Pack | None:
        try:
            pack = Pack(open_file(_file_name(number), os.O_RDWR, self._folder.packs.fd), number)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._folder.log_damage(_file_name(number), error)
            return None
        if not lock(pack.fd):
            return None
        pack.next = -(-os.fstat(pack.fd).st_size // BLOCK)
        return pack if pack.next < self._slots else None

    # --- inspection and removal

    def files(self) -> list[PackFile]:
        """Return all packs, least recently used first."""
        with os.scandir(os.path.join(self._folder.path, 'packs')) as entries:
            return sorted(filter(None, map(_pack_file, entries)))

    def size(self) -> int:
        return sum(file.size for file in self.files())

    def _remove(self, files: Sequence[PackFile], limit: int) -> int:
        """Remove the least recently used packs until the others, when full, fit the limit; return the bytes removed."""
        sizes = [max(file.size, self._slots << SHIFT) for file in files]
        total, removed = sum(sizes), 0
        for file, full in zip(files, sizes, strict=True):
            if total <= limit:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_file_name(file.number), dir_fd=self._folder.packs.fd)
            self._open.pop(file.number, None)
            total, removed = total - full, removed + file.size
        return removed

    def trim(self, limit: int) -> int:
        """Remove the least recently used packs until at most ``limit`` bytes are left. Return the bytes removed."""
        with self._folder.exclusive():
            files, removed = self.files(), 0
            while files and sum(file.size for file in files) > limit:
                removed += self._remove(files[:1], 0)
                files = files[1:]
            return removed


def _file_name(number: int) -> str:
    return f'{number:010x}'


def _pack_file(entry: 'os.DirEntry[str]') -> PackFile | None:
    """Return the pack of a folder entry; None if it is something else, or was removed meanwhile."""
    try:
        info, number = entry.stat(follow_symlinks=False), int(entry.name, 16)
    except (FileNotFoundError, ValueError):
        return None
    valid = stat.S_ISREG(info.st_mode) and 0 < number < _NUMBERS and entry.name == _file_name(number)
    return PackFile(info.st_mtime, number, info.st_size) if valid else None

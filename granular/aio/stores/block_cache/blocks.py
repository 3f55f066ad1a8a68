"""Blocks of a block cache on the local disk, shared by all processes of one user on a machine.

::

    blocks-2/
      table        16 bytes for each block of each object, mapped by all processes: its location and its checksum
      objects/...  one record for each version of an object: its size, and the position of its area of the table
      packs/...    blocks one after the other, appended to by one process at a time
      lock         held briefly when an object is registered, and when a pack is created or removed
      flights      byte locks, one for each block in flight

No file is trusted. The checksum of a block is 64 bits: a CRC32C of each half of its bytes, seeded with the identity of
the object (store, endpoint, key, version, size) and the number of the block. A process compares it the first time that
it reads a slot of a pack for a block, unless it wrote the slot itself. So a table, a record or a pack that was deleted,
truncated, rolled back to an earlier copy, filled with zeros, or swapped for another one, for example by a power cut,
costs time and never yields the bytes of another block: no order of writes has to be enforced, and nothing is synced.

A block is written before the table refers to it, by one 8-byte memory write. A pack only changes at its end, and its
number is random, so that it is not given to another pack after it was removed: a process that has the pack open
continues to read it, and for all others its blocks are absent. Damage is logged, and the blocks are fetched from the
store again.
"""

import os
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from granular.aio.runtime.buffers import blank
from granular.aio.stores.block_cache.folder import VERSION, CacheFolder
from granular.aio.stores.block_cache.objects import AREA, BLOCK, SHIFT, CachedObject, Objects, area_words
from granular.aio.stores.block_cache.packs import Pack, Packs
from granular.errors import NotFoundError

SLOTS: Final = 24  # bits of a location that give the block's slot in its pack; the other bits are the pack's number
_SLOT: Final = (1 << SLOTS) - 1
_BUFFERS: Final = 8  # blocks for one system call: for larger writes, Linux looks for larger pages, which takes longer


class Blocks:
    """The blocks in a folder, of at most ``limit`` bytes. Memory: 8 bytes for each block in packs that were read."""

    def __init__(self, path: str, limit: int) -> None:
        self.folder: CacheFolder = CacheFolder(path)
        self.objects: Objects = Objects(self.folder)
        self.packs: Packs = Packs(self.folder, limit)
        self._words = self.folder.words

    # --- reading

    def read(self, cached: CachedObject, start: int, stop: int) -> bytes | None:
        """Return a byte range if all of it is cached, else None."""
        if stop > cached.size:
            return None  # the store raises the error
        first, last = start >> SHIFT, (stop - 1) >> SHIFT
        if first == last:
            location = self._words[cached.entries + 2 * first]
            pack = self.packs.get(location >> SLOTS) if location else None
            if pack is None:
                return None
            slot, verified, within = location & _SLOT, pack.verified, start & (BLOCK - 1)
            if slot >= len(verified) or verified[slot] != cached.seed + first:
                content = self._verify(cached, first, pack, location)
                return content[within : within + stop - start] if content is not None else None
            data = os.pread(pack.fd, stop - start, (slot << SHIFT) + within)
            return data if len(data) == stop - start else None
        locations = self._words[cached.entries + 2 * first : cached.entries + 2 * last + 1 : 2]
        if 0 in locations.tolist():
            return None  # before the other blocks are read in vain
        out, view = blank(stop - start, 'the block cache')
        return out if self.read_into(cached, start, stop, view) else None

    def read_into(self, cached: CachedObject, start: int, stop: int, view: memoryview) -> bool:
        """Read a byte range, with one read for adjacent blocks of a pack. Return whether all of it is cached."""
        at = start
        while at < stop:
            block = at >> SHIFT
            location = self._words[cached.entries + 2 * block]
            pack = self.packs.get(location >> SLOTS) if location else None
            if pack is None:
                return False
            count = self._adjacent(cached, block, pack, location, ((stop - 1) >> SHIFT) + 1 - block)
            end, within = min(stop, (block + max(count, 1)) << SHIFT), at & (BLOCK - 1)
            target = view[at - start : end - start]
            if count:
                if os.preadv(pack.fd, [target], ((location & _SLOT) << SHIFT) + within) != end - at:
                    return False
            elif (content := self._verify(cached, block, pack, location)) is not None:
                target[:] = memoryview(content)[within : within + end - at]
            else:
                return False
            at = end
        return True

    def _adjacent(self, cached: CachedObject, block: int, pack: Pack, location: int, limit: int) -> int:
        """Return how many verified blocks, at most ``limit``, follow each other in a pack."""
        slot, verified, words = location & _SLOT, pack.verified, self._words
        limit = min(limit, len(verified) - slot)
        for count in range(limit):
            entry = cached.entries + 2 * (block + count)
            if words[entry] != location + count or verified[slot + count] != cached.seed + block + count:
                return count
        return max(limit, 0)

    def _verify(self, cached: CachedObject, block: int, pack: Pack, location: int) -> bytes | None:
        """Return a block if the checksum of the bytes at its location is that of the block, else None."""
        entry, slot = cached.entries + 2 * block, location & _SLOT
        length, at = cached.length(block), slot << SHIFT
        content = os.pread(pack.fd, length, at)
        if len(content) == length and cached.checksum(block, content) == self._words[entry + 1]:
            pack.set_verified(slot, cached.seed + block)
            return content
        self.folder.log_damage(pack.name, f'slot {slot} does not have block {block}')
        if self._words[entry] == location:
            self._words[entry] = 0
        return None

    def has(self, cached: CachedObject, block: int) -> bool:
        """Return whether a block is cached; its checksum is compared when it is read."""
        location = self._words[cached.entries + 2 * block]
        return bool(location) and self.packs.get(location >> SLOTS) is not None

    # --- writing

    def write(self, runs: Iterable[tuple[CachedObject, int, bytes]]) -> None:
        """Cache runs of consecutive blocks, each given by its object, its first block and its bytes."""
        blocks: list[tuple[CachedObject, int, memoryview]] = []
        for cached, first, data in runs:
            view, count = memoryview(data), -(-len(data) // BLOCK)
            self.folder.reserve(cached.entries + 2 * first, 2 * count)
            blocks += [(cached, first + i, view[i << SHIFT : (i + 1) << SHIFT]) for i in range(count)]
        done = 0
        while done < len(blocks):
            pack, slot, count = self.packs.reserve(min(len(blocks) - done, _BUFFERS))
            part = blocks[done : done + count]
            pack.write(slot, [view for _, _, view in part])
            for i, (cached, block, view) in enumerate(part, slot):
                entry = cached.entries + 2 * block
                self._words[entry + 1] = cached.checksum(block, view)
                self._words[entry] = pack.number << SLOTS | i
                pack.set_verified(i, cached.seed + block)
            done += count

    def forget(self, cached: CachedObject, block: int) -> None:
        entry = cached.entries + 2 * block
        if self._words[entry]:  # writing to a page of the table without disk space would kill the process
            self._words[entry] = 0

    # --- inspection

    def usage(self) -> Iterator[tuple[str, int, int]]:
        """Yield the address and size of each version of an object, and how many of its bytes are cached."""
        numbers = [file.number for file in self.packs.files()]
        table = np.frombuffer(self.folder.table, np.uint64)
        for record in self.objects.records():
            locations = table[record.entries : record.entries + area_words(record.size) - AREA : 2]
            present = np.isin(locations >> np.uint64(SLOTS), numbers) & (locations > 0)
            excess = -record.size % BLOCK if present[-1] else 0  # the last block is shorter
            yield record.url, record.size, int(present.sum()) * BLOCK - excess


def open_existing(path: str) -> Blocks:
    if not os.path.exists(os.path.join(path, VERSION, 'table')):
        raise NotFoundError(f'{path}: is not the cache_dir of a block cache')
    return Blocks(path, 0)

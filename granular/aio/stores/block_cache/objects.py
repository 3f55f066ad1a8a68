"""Objects of a block cache: a record and an area of the table for each version of an object."""

import hashlib
import os
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgpack

from granular.aio.runtime.descriptor import Descriptor
from granular.aio.stores.block_cache.folder import HEAD, CacheFolder
from granular.aio.stores.owner_only import open_file
from granular.formats.checksums import seal

SHIFT: Final = 16
BLOCK: Final = 1 << SHIFT
"""Bytes of a block: a request for fewer costs about as much."""
AREA: Final = 2  # words at the beginning of an object's area: its identity, and the number of words of the area
_RECORD: Final = 1 << 16  # upper bound of the bytes of an object record


class CachedObject:
    entries: int  # the position of its entries in the table, in words of 8 bytes
    size: int

    __slots__ = ('entries', 'first_lock', 'seed', 'size')

    def __init__(self, size: int, entries: int, digest: bytes) -> None:
        self.size, self.entries = size, entries
        # The position of its first block among the locks of blocks in flight.
        self.first_lock: int = int.from_bytes(digest[8:13], 'big') << 22
        self.seed: int = _seed(digest)  # the sum of it and the number of a block is the mark of that block

    def length(self, block: int) -> int:
        return min(BLOCK, self.size - (block << SHIFT))

    def checksum(self, block: int, content: bytes | memoryview) -> int:
        """Return the checksum of a block with the given content, seeded with its identity."""
        number, half = block.to_bytes(8, 'little'), len(content) // 2
        return seal(seal(self.seed, number, number), bytes(content[:half]), bytes(content[half:]))


class ObjectRecord(NamedTuple):
    """Content of an object's file: the SHA-256 of its identity, its size, table position, and address for display."""

    digest: bytes
    size: int
    entries: int
    url: str


class Objects:
    def __init__(self, folder: CacheFolder) -> None:
        self._folder, self._words = folder, folder.words
        self._objects: dict[tuple[str, str, str], CachedObject] = {}

    def peek(self, store: str, key: str, version: str, size: int) -> CachedObject | None:
        """Return a version of an object that this process has found or registered before, without reading files."""
        cached = self._objects.get((store, key, version))
        return cached if cached is not None and cached.size == size else None

    def find(self, store: str, key: str, version: str, size: int) -> CachedObject | None:
        """Return a version of an object that any process has registered; None if there is none."""
        if (cached := self.peek(store, key, version, size)) is not None:
            return cached
        name = _file_name(store, key, version)
        try:
            record = self._read(name)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._folder.log_damage(name, error)
            return None
        if record.size != size or record.digest != _digest(store, key, version, size) or not self._owns_area(record):
            self._folder.log_damage(name, 'the object record does not match the object, or its area of the table')
            return None
        cached = self._objects[store, key, version] = CachedObject(record.size, record.entries, record.digest)
        return cached

    def _read(self, name: str) -> ObjectRecord:
        """Read an object record; raise ValueError if the file has none."""
        file = Descriptor(open_file(name, os.O_RDONLY, self._folder.objects.fd))
        content = os.read(file.fd, _RECORD)
        try:
            values: Any = msgpack.unpackb(content)
            record = ObjectRecord(*values)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ValueError(f'expected an object record: {error}') from error
        if not all(type(value) is kind for value, kind in zip(record, (bytes, int, int, str), strict=True)):
            raise ValueError('expected an object record: its values have other types')
        if not (0 <= record.size <= BLOCK * len(self._words) and len(record.digest) == hashlib.sha256().digest_size):
            raise ValueError(f'expected an object record: its size is {record.size}')
        if not HEAD // 8 + AREA <= record.entries <= len(self._words) + AREA - area_words(record.size):
            raise ValueError(f'expected an object record: its area begins at {record.entries}')
        return record

    def _owns_area(self, record: ObjectRecord) -> bool:
        """Return whether an object's area begins with its identity: the table and records may be of different times."""
        start = record.entries - AREA
        return self._words[start] == _seed(record.digest) and self._words[start + 1] == area_words(record.size)

    def register(self, store: str, key: str, version: str, size: int, url: str) -> CachedObject:
        digest, count = _digest(store, key, version, size), area_words(size)
        words = self._words
        if HEAD // 8 + count > len(words):
            raise OSError(f'{url}: has {size} bytes, more than a block cache can describe')
        with self._folder.exclusive():
            if (cached := self.find(store, key, version, size)) is not None:
                return cached
            start = words[0]
            if start % AREA or not HEAD // 8 <= start <= len(words) - count:
                start = HEAD // 8  # a new, damaged or full table: objects that are overwritten are registered again
            self._folder.reserve(start, AREA)
            words[0] = start + count
            words[start], words[start + 1] = _seed(digest), count
            record = ObjectRecord(digest, size, start + AREA, url[: _RECORD // 8])
            self._write(_file_name(store, key, version), record)
            cached = self._objects[store, key, version] = CachedObject(size, start + AREA, digest)
            return cached

    def _write(self, name: str, record: ObjectRecord) -> None:
        folder, content = self._folder.objects.fd, msgpack.packb(record)
        file = Descriptor(open_file('draft', os.O_WRONLY | os.O_CREAT | os.O_TRUNC, folder))
        if os.write(file.fd, content) != len(content):
            raise OSError(f'{self._folder.path}: an object record was not written')
        os.rename('draft', name, src_dir_fd=folder, dst_dir_fd=folder)

    def records(self) -> Iterator[ObjectRecord]:
        """Yield the records of all objects that are not empty and have an area of the table."""
        for name in sorted(os.listdir(os.path.join(self._folder.path, 'objects'))):
            try:
                record = self._read(name)
            except (OSError, ValueError):
                continue  # being written, or damaged
            if record.size and self._owns_area(record):
                yield record


def area_words(size: int) -> int:
    return AREA + 2 * -(-size // BLOCK)


def _digest(store: str, key: str, version: str, size: int) -> bytes:
    return hashlib.sha256(repr((store, key, version, size)).encode()).digest()


def _seed(digest: bytes) -> int:
    """Return 63 bits of an identity, so that a block number can be added; never 0."""
    return int.from_bytes(digest[:8], 'big') >> 1 | 1


def _file_name(store: str, key: str, version: str) -> str:
    return hashlib.sha256(repr((store, key, version)).encode()).hexdigest()

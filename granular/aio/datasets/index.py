"""Read the index file of a sharded dataset, which replaces opening its shards."""

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from granular._support.indexing import Ints
from granular._support.lru import LRU
from granular._support.text import logger
from granular.aio.bags.bag import IndexedBag
from granular.aio.bags.identity import FileIdentity
from granular.aio.bags.tables import PackedReferences, PackedTable, PackedTables
from granular.aio.http.reply import stands_in
from granular.aio.paths.path import Path
from granular.aio.runtime.forking import each_after_fork
from granular.aio.runtime.threads import offload
from granular.aio.stores.base import Request
from granular.aio.stores.fanout import past_caches, read_all, retry_if_corrupt
from granular.errors import CorruptDatasetError, ObjectChangedError, UnsupportedError
from granular.formats.bit_packing import PADDING, PAGE, WORD, Words, check_pages, count_pages, unpack, unpack_one
from granular.formats.checksums import crc32c
from granular.formats.dataset_index import (
    FOOTER,
    NAME,
    Directory,
    digest_of,
    parse_directory,
    parse_footer,
    records_of_pages,
)
from granular.formats.layout import shard_name

T = TypeVar('T')

_INLINE: Final = 1 << 17  # lookups on the event loop at a time: a few milliseconds
_PAGE_BITS: Final = PAGE.bit_length() - 1


def index_path(directory: Path) -> Path:
    return directory / shard_name(0) / NAME


class DatasetIndex(PackedTables):
    """An opened index, of the file at a path, and of the version ``pin``.

    Memory: the directory (some 100 bytes per bag), and up to ``IOConfig.index_memory`` bytes of pages: all of them,
    read when the index is opened, or else those that were used last.
    """

    def __init__(self, path: Path, pin: str | None, directory: Directory) -> None:
        self.path = path
        self.directory = directory
        self._pin = pin
        self.may_be_compared: bool = not stands_in(pin)  # False if its server gives files no versions
        self._words: Words | None = None  # all pages, at their positions in the file, if they were read
        counts = directory.counts()
        self._tables = counts.shape[1]
        pages = count_pages(counts.ravel())
        self._first_page = np.cumsum(pages) - pages
        self._records = records_of_pages(counts.ravel())  # of each page
        self._starts = directory.pages['offset'].astype(np.int64) // WORD
        self._sizes = directory.pages['words'].astype(np.int64)
        records = directory.rows['records'].astype(np.int64)
        # The number of datapoints of each shard.
        self.lengths: Ints = records.min(axis=1) if directory.kinds is None else records[:, 0]
        self.keys: list[str] = directory.bags  # of the bags of a shard, with 'refs' in the refs layout
        self.has_tables: bool = directory.kinds is None  # True if the limits are in files of their own
        self.file_names: list[str] = directory.files  # of a shard
        # Contents of files that have the spec of the index, or their sizes and versions.
        self.known_specs: set[object] = set()
        self.may_be_listed: bool = True  # False once the listing of a shard was denied, or had no versions
        self._bags = {key: i for i, key in enumerate(self.keys)}
        self._bound = path.store.config.index_memory // WORD
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.RLock()  # the handler of a signal may read meanwhile
        self._cached: LRU[int, Words] = LRU(self._bound // 2, len)  # pages in memory
        self._view: memoryview | None = None
        _indices.add(self)

    def after_fork(self) -> None:
        """Reset in a forked child, which lacks the thread that may have held the lock."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._forget()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        for name in ('_lock', '_cached', '_view'):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @classmethod
    async def open(cls, directory: Path, whole: bool = True) -> 'DatasetIndex | None':
        """Open the index of a sharded dataset; None if there is none, or none that can be used, which is logged.

        With ``whole``, all pages are read now, if they take at most ``IOConfig.index_memory`` bytes.
        """
        try:
            return await cls.read_file(index_path(directory), whole)
        except directory.store.absent:
            return None
        except (CorruptDatasetError, UnsupportedError) as error:
            logger.warning(
                'index of %s ignored, its shards are read by their own tables: %s: run `granular index` on it',
                f'{directory}',
                error,
            )
            return None

    @classmethod
    async def read_file(cls, path: Path, whole: bool) -> 'DatasetIndex':
        """Open an index file; as ``open``, but raise the error if it cannot be used."""
        return await retry_if_corrupt(not path.store.local, lambda: cls._read(path, whole))

    @classmethod
    async def _read(cls, path: Path, whole: bool) -> 'DatasetIndex':
        store, name = path.store, f'{path}'
        end = await store.read(path.key, -max(FOOTER, store.merge.max_request))  # all of most indices
        if end.version is None:
            raise UnsupportedError(f'{name}: the server sends no version of it')
        footer = parse_footer(end.data, end.size, name)
        data = end.data[max(0, footer.start - end.start) : -FOOTER]
        if missing := footer.size - len(data):
            head = bytearray(missing)
            stop = footer.start + missing
            await store.read_into(path.key, footer.start, stop, end.version, memoryview(head), missing)
            data = bytes(head) + data
        if crc32c(data) != footer.checksum:
            raise CorruptDatasetError(f'{name}: wrong checksum of the directory')
        directory = await offload(parse_directory, data, footer.start, name)
        versions = directory.versions
        if any(map(stands_in, versions.part(0, len(versions)))):
            raise CorruptDatasetError(f'{name}: it names versions that do not identify objects')
        if bool(((directory.file_sizes().ravel() > 0) & (versions.sizes() == 0)).any()):
            raise CorruptDatasetError(f'{name}: an object has no version')
        index = cls(path, end.version, directory)
        if whole and footer.start <= store.config.index_memory:
            await index._load(footer.start, end.data, end.start)
        return index

    async def _load(self, size: int, tail: bytes, tail_start: int) -> None:
        """Read all pages, which end at ``size``, with few large requests."""
        words = np.zeros(size // WORD + PADDING, np.uint64)
        target, missing = memoryview(words.data).cast('B')[:size], min(size, tail_start)
        target[missing:] = tail[missing - tail_start : size - tail_start] if size > tail_start else b''
        if missing:
            half = -(-missing // 2)
            await self.path.store.read_into(self.path.key, 0, missing, self._pin, target[:missing], half)
        await offload(self._check, words)
        self._words = words

    def _check(self, words: Words) -> None:
        view = memoryview(words.data).cast('B')
        rows = zip(self._starts.tolist(), self._sizes.tolist(), self.directory.pages['checksum'].tolist(), strict=True)
        for start, size, checksum in rows:
            self._check_sum(view[start * WORD : (start + size) * WORD].tobytes(), checksum)
        check_pages(words, self._starts, self._sizes, self._records, f'{self.path}')

    def _check_sum(self, page: bytes, checksum: int) -> None:
        if (actual := crc32c(page)) != checksum:
            raise CorruptDatasetError(
                f'{self.path}: a page of {len(page)} bytes has checksum {actual:08x}, not {checksum:08x}: run '
                f'`granular index` on the dataset'
            )

    # --- tables

    @property
    def in_memory(self) -> bool:
        return self._words is not None

    async def read(self, tables: Ints, positions: Ints) -> tuple[Ints, Ints]:
        pages = self._first_page[tables] + (positions >> _PAGE_BITS)
        records = positions & (PAGE - 1)
        if self._words is not None:
            return await self._unpack(self._words, self._starts[pages], records)
        unique, inverse = np.unique(pages, return_inverse=True)
        sizes = self._sizes[unique]
        waves = np.cumsum(sizes) // max(1, self._bound // 4)  # so that a call keeps within the bound, too
        if not len(unique) or waves[-1] == waves[0]:
            words, starts = await self._pages(unique)
            return await self._unpack(words, starts[inverse], records)
        lefts, rights = np.empty((2, len(positions)), np.int64)
        for wave in np.unique(waves).tolist():
            first, last = np.searchsorted(waves, [wave, wave + 1])
            chosen = np.flatnonzero((inverse >= first) & (inverse < last))
            words, starts = await self._pages(unique[first:last])
            results = await self._unpack(words, starts[inverse[chosen] - first], records[chosen])
            lefts[chosen], rights[chosen] = results
        return lefts, rights

    async def _unpack(self, words: Words, starts: Ints, records: Ints) -> tuple[Ints, Ints]:
        if len(records) > _INLINE:
            return await offload(unpack, words, starts, records)
        return unpack(words, starts, records)

    async def _pages(self, pages: Ints) -> tuple[Words, Ints]:
        """Return some pages one after the other, and their positions; those that are not in memory are read."""
        with self._lock:
            wanted = [] if past_caches.get() else pages.tolist()
            found = {page: words for page in wanted if (words := self._cached.get(page)) is not None}
        missing = np.array([page for page in pages.tolist() if page not in found], np.int64)
        if len(missing):
            starts = self._starts[missing] * WORD
            request = Request(self.path.key, starts, starts + self._sizes[missing] * WORD, self._pin)
            (parts,) = await read_all(self.path.store, [request])
            for page, part in zip(missing.tolist(), parts, strict=True):
                self._check_sum(part, int(self.directory.pages['checksum'][page]))
                found[page] = np.frombuffer(part, '<u8')
        words = np.concatenate([*(found[page] for page in pages.tolist()), np.zeros(PADDING, np.uint64)])
        starts = np.cumsum(self._sizes[pages]) - self._sizes[pages]
        if len(missing):
            position = np.searchsorted(pages, missing)
            check_pages(words, starts[position], self._sizes[missing], self._records[missing], f'{self.path}')
            with self._lock:
                for page in missing.tolist():
                    self._cached.put(page, found[page])
        return words, starts

    def read_one(self, table: int, position: int) -> tuple[int, int]:
        if self._view is None:
            words: Any = self._words
            self._view = memoryview(words.data).cast('B').cast('Q')
        page = int(self._starts[self._first_page[table] + position // PAGE])
        return unpack_one(self._view, page, position % PAGE)

    def digest(self, table: int) -> str:
        return digest_of(self._checksums(table))

    def _checksums(self, table: int, count: int = 1) -> list[int]:
        """Return the checksums of the pages of some tables, which lie one behind the other."""
        first, *following = self._first_page[table : table + count + 1 : count].tolist()
        checksums: list[int] = self.directory.pages['checksum'][first : following[0] if following else None].tolist()
        return checksums

    # --- shards

    def __len__(self) -> int:
        return len(self.lengths)

    def bag(self, shard: int, key: str) -> IndexedBag:
        """Return the bag of a key, or ``'refs'``, of a shard."""
        number = self._bags[key]
        records, version, size, datasize = self.directory.rows[shard, number].item()
        table = None
        if self.has_tables or number:
            table = PackedTable(self, self._table(shard, number))
        at = shard * len(self.file_names) + 1 + number * (1 + self.has_tables)
        (pin,) = self.directory.versions.part(at, at + 1)
        return IndexedBag(version, records, size, datasize, pin or None, table)

    def _table(self, shard: int, number: int) -> int:
        """Return the table of the limits of a bag."""
        return int(shard * self._tables + number - (not self.has_tables))

    def files(self, shard: int) -> list[FileIdentity]:
        """Return the identity of each file of a shard."""
        return next(self.files_of(shard, shard + 1))

    def files_of(self, first: int, last: int) -> Iterator[list[FileIdentity]]:
        """Yield the identities of the files of each of the shards from ``first`` to the one before ``last``."""
        count = len(self.file_names)
        sizes = self.directory.file_sizes(first, last).ravel().tolist()
        versions = self.directory.versions.part(first * count, last * count) if sizes else []
        files = map(FileIdentity, sizes, (version or None for version in versions))
        return (list(itertools.islice(files, count)) for _ in range(first, last))

    def bags_among(self, files: Sequence[T]) -> Sequence[T]:
        """Return those of what is given for each file of a shard that are of the records of its bags."""
        return files[1 :: 1 + self.has_tables]

    def tables_among(self, files: Sequence[T]) -> Sequence[T]:
        """Return those of what is given for each file of a shard that are of the tables of its bags."""
        return files[1 + self.has_tables :: 1 + self.has_tables]

    def pins_of_bags(self, versions: Sequence[str | None]) -> Sequence[str | None]:
        """Return the versions of the files of a shard of which only those of its bags are known."""
        pins: list[str | None] = [None] * len(self.file_names)
        pins[1 :: 1 + self.has_tables] = versions
        return pins

    def _references(self, shard: int) -> list[int]:
        kinds = self.directory.kinds
        if kinds is None:
            return []
        count = len(self.directory.spec)
        return [*kinds[shard].tolist(), *self._checksums(shard * self._tables + count, 2 * count)]

    def references(self, shard: int) -> PackedReferences | None:
        """Return the references of a shard; None in the columns layout."""
        kinds = self.directory.kinds
        if kinds is None:
            return None
        return PackedReferences(self, shard * self._tables + len(self.directory.spec), kinds[shard])

    def file_identities(self, shard: int) -> dict[str, FileIdentity]:
        """Return the identities of the bags of a shard, by file name."""
        bags = {key: self.bag(shard, key) for key in self.keys}
        digests = self.digests(shard) if self.has_tables else dict.fromkeys(self.keys, '')
        return {f'{key}.bag': FileIdentity(bag.size, bag.pin, digests[key]) for key, bag in bags.items()}

    def digests(self, shard: int) -> dict[str, str]:
        """Return digests of what divides each bag of a shard into datapoints: its limits, or the references."""
        return {
            key: digest_of(self._references(shard))
            if key == 'refs' and not self.has_tables
            else self.digest(self._table(shard, number))
            for number, key in enumerate(self.keys)
        }

    def sizes(self, keys: Sequence[str] | None = None) -> Ints:
        """Return the bytes of the bags of each shard, of some keys or of all bags."""
        chosen = list(self._bags.values()) if keys is None else [self._bags[key] for key in keys]
        sizes: Ints = self.directory.rows['size'][:, chosen].astype(np.int64).sum(axis=1)
        return sizes

    async def is_replaced(self) -> bool:
        """Return whether the index file was replaced or removed since it was opened."""
        if self._pin is None:
            return False
        try:
            await self.path.store.check_version(self.path.key, self._pin)
        except ObjectChangedError:
            return True
        except self.path.store.absent:
            return True
        return False


_indices: Final = each_after_fork(DatasetIndex.after_fork)

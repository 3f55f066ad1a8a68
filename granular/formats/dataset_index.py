"""The index file of a sharded dataset: its directory and its footer.

An index names the objects of all shards, with their versions, and has a table (:mod:`granular.formats.bit_packing`) of
the limits of each bag. In the refs layout it also has the references, unless datapoint i has record i. The file, whose
integers are little-endian:

- the magic, ``granular-index-2``
- the pages of the tables, in any order
- the directory
- a footer of 40 bytes: ``u64`` start and ``u64`` size of the directory, ``u32`` CRC32C of the directory, ``u32`` CRC32C
  of the footer up to here, and the magic

The directory, without padding:

- ``u32`` size, and JSON of that size: ``{"layout": ..., "spec": ..., "shards": n}``
- ``u4`` for each shard, the size of its ``spec.json``
- a row (``ROW``) for each bag, shard by shard: ``refs`` first, in the refs layout, and then the keys in sorted order
- in the refs layout, ``u8`` for each shard and key, the kind: 0 if datapoint i has record i, 1 if the records of the
  datapoints follow each other, 2 otherwise
- a row (``PAGE_ROW``) for each page, table by table. The tables of a shard are the limits of each key and, in the refs
  layout, two tables of references for each key: for kind 1 the limits of the datapoints in the records and nothing, for
  kind 2 the first records and the numbers of records (the last of each is there twice), for kind 0 nothing
- the version (ETag, generation) of each file, shard by shard, in UTF-8, separated by line feeds: of ``spec.json``, and
  of the ``.bag`` and ``.idx`` of each bag; nothing for an empty file without one
"""

import dataclasses
import hashlib
import json
import struct
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import Ints
from granular.errors import CorruptDatasetError
from granular.formats.bit_packing import HEAD, MAX_WORDS, PAGE, WORD, count_pages, pack
from granular.formats.checksums import crc32c
from granular.formats.layout import Layout, Spec, is_sequence, parse_spec

MAGIC: Final = b'granular-index-2'
NAME: Final = '.granular-index'
"""Name of the file, in the folder of the first shard: granular 0.21 and 0.24 take any other name beside the shards for
a shard."""

_FOOTER: Final = struct.Struct('<QQII16s')  # start and size of the directory, its checksum, that of the footer, magic
FOOTER: Final = _FOOTER.size
_HEADER: Final = struct.Struct('<I')  # size of the JSON at the start of the directory

ROW: Final = np.dtype([
    ('records', '<u4'), ('version', 'u1'), ('size', '<u8'), ('datasize', '<u8'),
])  # fmt: skip
"""One bag: records, version of the format, and bytes with and without the table."""
PAGE_ROW: Final = np.dtype([('offset', '<u8'), ('words', '<u4'), ('checksum', '<u4')])

SAME: Final = 0
"""Kind of the references of a key: datapoint i has record i."""
RUNS: Final = 1
"""Kind of the references of a key: the records of the datapoints follow each other; one table of their limits."""
ANY: Final = 2
"""Kind of the references of a key: any; one table of the first records, and one of the numbers of records."""

DIGEST: Final = 'limits '
"""Beginning of a digest, which no version of a file has."""


def digest_of(checksums: Iterable[int]) -> str:
    """Return a digest of a table, given the checksums of its pages; it begins with ``DIGEST``."""
    return DIGEST + hashlib.sha256(np.fromiter(checksums, '<u4').tobytes()).hexdigest()


def digest_of_limits(limits: Ints) -> str:
    """Return the digest of the table of a zero and these limits, which no index needs to have."""
    return digest_of(map(crc32c, pack(limits)))


class Footer(NamedTuple):
    """The location of the directory, which ends where the footer begins."""

    start: int
    size: int
    checksum: int


def dump_footer(directory: bytes, start: int) -> bytes:
    """Return the last bytes of an index file, given its directory and the position of the directory."""
    fields = (start, len(directory), crc32c(directory))
    return _FOOTER.pack(*fields, crc32c(struct.pack('<QQI', *fields)), MAGIC)


def parse_footer(tail: bytes, size: int, name: str) -> Footer:
    """Return the footer of an index file, from its last bytes and its size."""
    if len(tail) < FOOTER or tail[-len(MAGIC) :] != MAGIC:
        raise CorruptDatasetError(f'{name}: expected {MAGIC!r} at the end, got {tail[-len(MAGIC) :]!r}')
    start, length, checksum, own, _ = _FOOTER.unpack(tail[-FOOTER:])
    if own != crc32c(struct.pack('<QQI', start, length, checksum)):
        raise CorruptDatasetError(f'{name}: wrong checksum of the footer')
    if start + length + FOOTER != size or start < len(MAGIC) or start % WORD:
        raise CorruptDatasetError(f'{name}: a directory of {length} bytes at {start}, in a file of {size} bytes')
    return Footer(start, length, checksum)


class Versions:
    """The versions of many files, in one piece of memory."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        ends = np.flatnonzero(np.frombuffer(content, np.uint8) == ord('\n'))
        self._starts = np.concatenate([[0], ends + 1, [len(content) + 1]])

    @classmethod
    def of(cls, versions: Iterable[str]) -> Self:
        return cls('\n'.join(versions).encode())

    def __len__(self) -> int:
        return len(self._starts) - 1

    def sizes(self) -> Ints:
        """Return the bytes of each version."""
        sizes: Ints = np.diff(self._starts) - 1
        return sizes

    def part(self, first: int, last: int) -> list[str]:
        """Return the versions from ``first`` to the one before ``last``, at least one."""
        start, stop = self._starts[[first, last]].tolist()
        return self.content[start : stop - 1].decode().split('\n')


@dataclasses.dataclass(eq=False)
class Directory:
    """The content of an index file except for its pages."""

    spec: Spec  # of all shards, as the layout
    layout: Layout
    specs: NDArray[np.uint32]  # the bytes of the ``spec.json`` of each shard
    rows: NDArray[Any]  # the bags, dtype ``ROW``, shape (shards, bags)
    versions: Versions  # of each file, in the order of ``files`` and ``file_sizes``
    kinds: NDArray[np.uint8] | None  # of the references, shape (shards, keys); None in the columns layout
    pages: NDArray[Any]  # the pages of all tables, dtype ``PAGE_ROW``, in the order of ``counts``

    @property
    def bags(self) -> list[str]:
        return list(self.spec) if self.kinds is None else ['refs', *self.spec]

    @property
    def files(self) -> list[str]:
        """The names of the files of a shard: the spec, and each bag, in the columns layout with its table."""
        return [
            'spec.json',
            *(f'{key}.{end}' for key in self.bags for end in ('bag', 'idx')[: 1 + (self.kinds is None)]),
        ]

    def file_sizes(self, first: int = 0, last: int | None = None) -> Ints:
        """Return the bytes of each file of some shards, by default of all, shape (shards, files)."""
        rows, specs = self.rows[first:last], self.specs[first:last]
        sizes: Ints = np.empty((len(rows), len(self.files)), np.int64)
        sizes[:, 0] = specs
        if self.kinds is None:
            sizes[:, 1::2], sizes[:, 2::2] = rows['datasize'], rows['size'] - rows['datasize']
        else:
            sizes[:, 1:] = rows['size']
        return sizes

    def counts(self) -> Ints:
        """Return the number of records of each table, shape (shards, tables).

        The tables of a shard are the limits of each key, and in the refs layout two tables of references for each key.
        """
        return _counts(self.rows, self.kinds)


def _counts(rows: NDArray[Any], kinds: NDArray[np.uint8] | None) -> Ints:
    records = rows['records'].astype(np.int64)
    if kinds is None:
        return records
    references = np.repeat(kinds, 2, axis=1) >= np.tile([RUNS, ANY], kinds.shape[1])
    return np.concatenate([records[:, 1:], records[:, :1] * references], axis=1)


def dump_directory(directory: Directory) -> bytes:
    head = {'layout': directory.layout, 'spec': directory.spec, 'shards': len(directory.rows)}
    content = json.dumps(head).encode()
    kinds = b'' if directory.kinds is None else directory.kinds.tobytes()
    return b''.join([
        _HEADER.pack(len(content)), content, directory.specs.astype('<u4').tobytes(), directory.rows.tobytes(), kinds,
        directory.pages.tobytes(), directory.versions.content,
    ])  # fmt: skip


def parse_directory(data: bytes, start: int, name: str) -> Directory:
    """Return the directory of an index file, whose checksum was compared and whose pages end at ``start``."""
    try:
        return _parse(data, start, name)
    except (ValueError, TypeError, KeyError, RecursionError, struct.error) as error:
        if isinstance(error, CorruptDatasetError):
            raise
        raise CorruptDatasetError(f'{name}: its directory is not valid: {error!r:.200}') from error


def _parse(data: bytes, start: int, name: str) -> Directory:
    (size,) = _HEADER.unpack_from(data)
    at = _HEADER.size + size
    head = json.loads(data[_HEADER.size : at])
    spec, layout, shards = parse_spec(json.dumps(head['spec']).encode(), name), head['layout'], head['shards']
    if layout not in ('refs', 'columns') or type(shards) is not int or shards < 1:
        raise CorruptDatasetError(f'{name}: {shards!r:.20} shards in layout {layout!r:.20}')
    bags = len(spec) + (layout == 'refs')
    if shards * bags * ROW.itemsize > len(data):
        raise CorruptDatasetError(f'{name}: {shards} shards do not fit a directory of {len(data)} bytes')
    specs = np.frombuffer(data, '<u4', shards, at)
    at += specs.nbytes
    rows = np.frombuffer(data, ROW, shards * bags, at).reshape(shards, bags)
    at += rows.nbytes
    kinds = None
    if layout == 'refs':
        kinds = np.frombuffer(data, np.uint8, shards * len(spec), at).reshape(shards, len(spec))
        at += kinds.nbytes
        if (kinds > ANY).any():
            raise CorruptDatasetError(f'{name}: unknown kinds of references: {kinds.max()}')
        if (kinds == np.where([is_sequence(kind) for kind in spec.values()], SAME, RUNS)).any():
            raise CorruptDatasetError(f'{name}: kinds of references that do not fit the spec {spec!r:.200}')
    elif any(is_sequence(kind) for kind in spec.values()):
        raise CorruptDatasetError(f'{name}: sequences in layout {layout!r}')
    _check_rows(rows, layout, name)
    counts = _counts(rows, kinds)
    number = int(count_pages(counts).sum())
    if number * PAGE_ROW.itemsize > len(data) - at:
        raise CorruptDatasetError(f'{name}: {number} pages do not fit a directory of {len(data)} bytes')
    pages = np.frombuffer(data, PAGE_ROW, number, at)
    at += pages.nbytes
    _check_page_rows(pages, start, name)
    directory = Directory(spec, layout, specs, rows, Versions(data[at:]), kinds, pages)
    files = shards * len(directory.files)
    directory.versions.content.decode()
    if len(directory.versions) != files:
        raise CorruptDatasetError(f'{name}: expected {files} versions, got {len(directory.versions)}')
    return directory


def _check_rows(rows: NDArray[Any], layout: Layout, name: str) -> None:
    """Check that bags have the sizes that the format gives them."""
    records, datasize, version = (rows[field].astype(np.int64) for field in ('records', 'datasize', 'version'))
    table = rows['size'].astype(np.int64) - datasize
    versions = version == 3 if layout == 'columns' else (version == 1) | (version == 2)
    expected = WORD * (records + (version == 1))
    tables = (table >= expected) & (table < expected + WORD) if layout == 'columns' else table == expected
    bad = ~versions | ~tables | (datasize < 0) | (datasize >= 1 << 62)
    if bad.any():
        row = rows[bad][0]
        raise CorruptDatasetError(
            f'{name}: a bag of version {row["version"]} with {row["records"]} records, {row["datasize"]} bytes of '
            f'records and {row["size"]} in all, in layout {layout!r}'
        )


def _check_page_rows(pages: NDArray[Any], start: int, name: str) -> None:
    """Check that pages are between the magic and the directory."""
    offset, words = pages['offset'].astype(np.int64), pages['words'].astype(np.int64)
    bad = (offset < len(MAGIC)) | (offset % WORD != 0) | (words < HEAD) | (words > MAX_WORDS)
    bad |= offset > start - words * WORD
    if bad.any():
        raise CorruptDatasetError(f'{name}: {words[bad][0]} words at {offset[bad][0]} are not a page')


def records_of_pages(counts: Ints) -> Ints:
    pages = count_pages(counts)
    number = np.arange(int(pages.sum())) - np.repeat(np.cumsum(pages) - pages, pages)
    records: Ints = np.minimum(PAGE, np.repeat(counts, pages) - number * PAGE)
    return records

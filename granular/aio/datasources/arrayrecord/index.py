"""Parses the index of an ArrayRecord file from its last bytes, as in cpp/layout.proto of google/array_record.

The last 64 KiB are a chunk, the postscript, that contains the position of the footer. The footer is a chunk of protobuf
messages: one for the file, then one for each chunk of records.
"""

import dataclasses
from typing import Final

import numpy as np

from granular._support.indexing import Ints
from granular.aio.datasources.arrayrecord.riegeli import BLOCK, BLOCK_HEADER, named, parse_chunk, read_values
from granular.errors import CorruptError, UnsupportedError
from granular.formats.base import Buffer
from granular.formats.protobuf import VARINT, fields, varint, varints

_MAGIC: Final = 0x71930E704FDAE05E
_VERSION: Final = 1


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Index:
    """The index of a file: 8 bytes per chunk."""

    offsets: Ints  # where each chunk begins, and where the last one ends
    group: int  # records of each chunk but the last
    records: int
    size: int  # bytes of the file
    version: str | None  # its ETag or generation

    def count_of(self, chunk: int) -> int:
        return min(self.group, self.records - chunk * self.group)


def footer_offset(tail: bytes, size: int, name: str) -> int:
    """Return the position of the footer, from the last 64 KiB of the file or more."""
    if size < 2 * BLOCK or size % BLOCK:
        raise CorruptError(
            f'{name}: expected a multiple of {BLOCK} bytes, at least {2 * BLOCK}, for an ArrayRecord file, got {size}'
        )
    at = size - BLOCK
    label = f'{name}, postscript'
    first, _, _ = _messages(tail[-BLOCK:], at, BLOCK, label)
    numbers, _ = _fields(first, label)
    begin = numbers.get(1)
    if numbers.get(2) != _MAGIC or begin is None:
        raise CorruptError(f'{label}: is not the postscript of an ArrayRecord file')
    if begin >= at:
        raise CorruptError(f'{label}: expected the footer to begin before byte {at}, got byte {begin}')
    return begin


def parse_footer(footer: bytes, begin: int, size: int, version: str | None, name: str) -> Index:
    """Parse the index of a file from its footer: the bytes from ``begin`` to the postscript."""
    label = f'{name}, footer'
    # The entry of a chunk takes fewer bytes than the chunk, so that the file's size bounds the footer's.
    first, following, count = _messages(footer, begin, size, label)
    _, parts = _fields(first, label)
    head, _ = _fields(parts.get(1, b''), label)
    if head.get(1) != _VERSION:
        raise UnsupportedError(f'{label}: unsupported version {head.get(1)!r} of ArrayRecord: expected {_VERSION}')
    chunks, records = head.get(2, 0), head.get(3, 0)
    if chunks != count:
        raise CorruptError(f'{label}: declares {chunks} chunks, but lists {count}')
    entries = named(label, varints, following, 0, len(following))
    # Each entry is three pairs of tag and value: offset, bytes and number of records, in this order.
    if len(entries) != 6 * count or (entries.reshape(-1, 6)[:, ::2] != (8, 16, 24)).any():
        raise CorruptError(f'{label}: {len(entries)} numbers do not describe {count} chunks')
    table = entries.reshape(-1, 6)
    offsets, counts = np.append(table[:, 1], begin), table[:, 5]
    sizes = np.diff(offsets)
    # A chunk takes at least one byte per record, and begins neither in a block header nor right after one.
    inside = offsets[:-1] % BLOCK
    bad = (offsets[:-1] < 0) | (counts < 1) | (counts > sizes) | ((inside > 0) & (inside <= BLOCK_HEADER))
    if bad.any():
        i = int(np.argmax(bad))
        raise CorruptError(
            f'{label}: chunk {i} of {counts[i]} records is declared at bytes {offsets[i]} to {offsets[i + 1]} of {size}'
        )
    if int(counts.sum()) != records:
        raise CorruptError(f'{label}: declares {records} records, but its chunks have {counts.sum()}')
    group = int(counts[0]) if count else 1
    if (counts[:-1] != group).any() or (count and counts[-1] > group):
        i = int(np.argmax(counts != group))
        raise CorruptError(f'{label}: chunk {i} has {counts[i]} records, those before have {group}')
    return Index(offsets, group, int(counts.sum()), size, version)


def _fields(data: Buffer, name: str) -> tuple[dict[int, int], dict[int, Buffer]]:
    """Return the numbers and the other fields of a message, by number; the last value of a repeated field."""
    numbers: dict[int, int] = {}
    parts: dict[int, Buffer] = {}
    for field, wire, start, stop in named(name, lambda: list(fields(data, 0, len(data)))):
        if wire == VARINT:
            numbers[field], _ = varint(data, start, stop)
        else:
            parts[field] = data[start:stop]
    return numbers, parts


def _messages(raw: bytes, at: int, max_bytes: int, name: str) -> tuple[Buffer, Buffer, int]:
    """Return the first record of a chunk, the others concatenated, and the number of the others."""
    ends, values = read_values(parse_chunk(raw, at, name), None, name, max_bytes)
    if not len(ends):
        raise CorruptError(f'{name}: is empty')
    first = int(ends[0])
    return memoryview(values)[:first], memoryview(values)[first:], len(ends) - 1

"""Checksums of records: a CRC32C (RFC 3720, B.4) each, in a file beside their bag that older readers ignore."""

from collections.abc import Sequence

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from granular.errors import CorruptBagError, CorruptRecordError

SUFFIX = '.crc'
"""Suffix of the checksum file: ``image.crc`` beside ``image.bag``, 4 bytes per record, little-endian."""

Sums = NDArray[np.uint32]


def crc32c(data: bytes | NDArray[np.uint8], before: int = 0) -> int:
    """Return the CRC32C of ``data`` appended to bytes of which it is ``before``."""
    return int(google_crc32c.extend(before, data))


def seal(seed: int, left: bytes, right: bytes) -> int:
    """Return 64 bits that prove content and identity: the CRC32C of two halves, each continued from half of a seed."""
    return crc32c(left, seed >> 32) << 32 | crc32c(right, seed & 0xFFFFFFFF)


def load(data: bytes, records: int, name: str) -> Sums:
    """Return the content of a checksum file, which may be ahead of a bag that grows, but not behind."""
    if len(data) < 4 * records:
        raise CorruptBagError(f'{name}: expected {records} checksums, one per record of its bag, got {len(data) // 4}')
    return np.frombuffer(data, '<u4', records)


def checksums_of(records: Sequence[bytes]) -> Sums:
    """Return the CRC32C of each of some records."""
    return np.fromiter(map(google_crc32c.value, records), np.uint32, len(records))


def check(sums: Sums, positions: NDArray[np.int64], records: Sequence[bytes], name: str) -> None:
    """Check that records are as they were written; raise ``CorruptRecordError`` if one is not."""
    found, expected = checksums_of(records), sums[positions]
    if (different := np.flatnonzero(found != expected)).size:
        i = int(different[0])
        raise CorruptRecordError(
            f'{name}: record {positions[i]}: expected checksum {expected[i]:08x}, got {found[i]:08x}',
            path=name,
            index=int(positions[i]),
        )

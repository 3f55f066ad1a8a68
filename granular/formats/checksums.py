"""Checksums of records: a CRC32C (RFC 3720, B.4) each, in a file beside their bag that older readers ignore."""

from collections.abc import Sequence
from typing import Final

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from granular.errors import CorruptBagError, CorruptRecordError

SUFFIX = '.crc'
"""Suffix of the checksum file: ``image.crc`` beside ``image.bag``, 4 bytes per record, little-endian."""

Sums = NDArray[np.uint32]

_SMALL: Final = 24  # bytes up to which the checksums of many records are computed together
_POLYNOMIAL: Final = 0x82F63B78


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


def checksums_in(data: bytes, limits: NDArray[np.int64]) -> Sums:
    """Return the CRC32C of each of the records that begin and end at some offsets in ``data``."""
    sizes = np.diff(limits)
    if sizes.max(initial=0) <= _SMALL:
        return _checksums_of_small(np.frombuffer(data, np.uint8), limits[:-1], sizes)
    bounds = limits.tolist()
    parts = map(data.__getitem__, map(slice, bounds[:-1], bounds[1:]))
    return np.fromiter(map(google_crc32c.value, parts), np.uint32, len(sizes))


def _checksums_of_small(data: NDArray[np.uint8], starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> Sums:
    """Return the CRC32C of records byte by byte, which takes less time than a call for each."""
    sums = np.full(len(sizes), 0xFFFFFFFF, np.uint32)
    least, most = int(sizes.min(initial=_SMALL)), int(sizes.max(initial=0))
    for i in range(most):
        own = slice(None) if i < least else np.flatnonzero(sizes > i)
        before = sums[own]
        sums[own] = _TABLE[(before ^ data[starts[own] + i]) & 0xFF] ^ (before >> 8)
    return ~sums


def _table() -> Sums:
    """Return the CRC32C of each byte, without the inversion before and after."""
    out = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        out = np.where(out & 1, out >> 1 ^ _POLYNOMIAL, out >> 1).astype(np.uint32)
    return out


def check(sums: Sums, positions: NDArray[np.int64], records: Sequence[bytes], name: str) -> None:
    """Check that records are as they were written; raise ``CorruptRecordError`` if one is not."""
    compare(sums, positions, checksums_of(records), name)


def compare(sums: Sums, positions: NDArray[np.int64], found: Sums, name: str) -> None:
    """Compare the checksums of records with those that were written; raise ``CorruptRecordError`` if one differs."""
    expected = sums[positions]
    if (different := np.flatnonzero(found != expected)).size:
        i = int(different[0])
        raise CorruptRecordError(
            f'{name}: record {positions[i]}: expected checksum {expected[i]:08x}, got {found[i]:08x}',
            path=name,
            index=int(positions[i]),
        )


_TABLE: Final = _table()

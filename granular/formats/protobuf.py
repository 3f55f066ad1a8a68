"""Messages of protobuf (https://protobuf.dev/programming-guides/encoding): bytes to fields and numbers. No I/O.

All functions raise ``ValueError`` for bytes that are damaged.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from granular._support.indexing import Ints
from granular.formats.base import Buffer

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
_FEW: Final = 24  # up to this many bytes, numbers are parsed one by one
_LONGEST: Final = 10  # bytes of a varint of 64 bits
_LONGEST_TAG: Final = 5


def varint(data: Buffer, at: int, stop: int) -> tuple[int, int]:
    """Return the number at a position, of 64 bits, without a sign, and the position behind it."""
    value = shift = 0
    for position in range(at, min(stop, at + _LONGEST)):
        byte = data[position]
        value |= (byte & 127) << shift
        if byte < 128:
            if value >> 64:
                raise ValueError(f'the number at byte {at} has more than 64 bits')
            return value, position + 1
        shift += 7
    raise ValueError(f'no varint at byte {at} of {stop}')


def varints(data: Buffer, start: int, stop: int) -> Ints:
    """Return the numbers of a part that contains only varints; those from 2**63 on are negative."""
    if stop - start <= _FEW:
        values = []
        while start < stop:
            value, start = varint(data, start, stop)
            values.append(value)
        return np.array(values, np.uint64).astype(np.int64)
    raw = np.frombuffer(data, np.uint8, stop - start, start)
    last = np.flatnonzero(raw < 128)
    if len(last) == len(raw):
        return raw.astype(np.int64)
    lengths = np.diff(last, prepend=-1)
    longest = int(lengths.max(initial=0))
    if not len(last) or last[-1] + 1 != len(raw) or longest > _LONGEST:
        raise ValueError(f'{len(raw)} bytes at byte {start} are not a sequence of varints')
    if longest == _LONGEST and (raw[last[lengths == _LONGEST]] > 1).any():
        raise ValueError(f'a number at byte {start} has more than 64 bits')
    bits = raw[last].astype(np.uint64)
    for k in range(1, longest):
        bits = np.where(lengths > k, bits << np.uint64(7) | raw[last - k] & np.uint64(127), bits)
    return bits.view(np.int64)


def fields(data: Buffer, at: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the number, the wire type and the limits of the value, for each field of a message."""
    while at < stop:
        tag, start = varint(data, at, stop)
        number, wire = tag >> 3, tag & 7
        if start - at > _LONGEST_TAG or not 0 < number < 1 << 29:
            raise ValueError(f'field {number} at byte {at}')
        if wire == BYTES:
            length, start = varint(data, start, stop)
            at = start + length
        elif wire == VARINT:
            _, at = varint(data, start, stop)
        elif wire in (FIXED64, FIXED32):
            at = start + (8 if wire == FIXED64 else 4)
        else:
            raise ValueError(f'unknown wire type {wire} at byte {at} of {len(data)}')
        if at > stop:
            raise ValueError(f'field {number} ends at byte {at}, its message at byte {stop}')
        yield number, wire, start, at

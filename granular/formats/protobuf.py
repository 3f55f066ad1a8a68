"""Messages of protobuf (https://protobuf.dev/programming-guides/encoding): bytes to fields and numbers. No I/O."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from granular.formats.base import Buffer
from granular.indexing import Ints

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
_FEW: Final = 24  # up to this many bytes, numbers are parsed one by one
_LONGEST: Final = 10  # bytes of a varint of 64 bits
_LONGEST_TAG: Final = 5


class Message:
    """Parses parts of some bytes.

    Args:
      data: the bytes.
      name: what they should be, which errors begin with.
      error: the type of errors.
    """

    def __init__(self, data: Buffer, name: str, error: type[Exception]) -> None:
        self.data, self._name, self._error = data, name, error

    def varint(self, at: int, stop: int) -> tuple[int, int]:
        """Return the number at a position, of 64 bits, without a sign, and the position behind it."""
        data, value, shift = self.data, 0, 0
        for position in range(at, min(stop, at + _LONGEST)):
            byte = data[position]
            value |= (byte & 127) << shift
            if byte < 128:
                if value >> 64:
                    raise self.error(f'the number at byte {at} has more than 64 bits')
                return value, position + 1
            shift += 7
        raise self.error(f'no varint at byte {at} of {stop}')

    def varints(self, start: int, stop: int) -> Ints:
        """Return the numbers of a part that contains only varints; those from 2**63 on are negative."""
        if stop - start <= _FEW:
            values = []
            while start < stop:
                value, start = self.varint(start, stop)
                values.append(value)
            return np.array(values, np.uint64).astype(np.int64)
        raw = np.frombuffer(self.data, np.uint8, stop - start, start)
        last = np.flatnonzero(raw < 128)
        if len(last) == len(raw):
            return raw.astype(np.int64)
        lengths = np.diff(last, prepend=-1)
        longest = int(lengths.max(initial=0))
        if not len(last) or last[-1] + 1 != len(raw) or longest > _LONGEST:
            raise self.error(f'{len(raw)} bytes at byte {start} are not a sequence of varints')
        if longest == _LONGEST and (raw[last[lengths == _LONGEST]] > 1).any():
            raise self.error(f'a number at byte {start} has more than 64 bits')
        bits = raw[last].astype(np.uint64)
        for k in range(1, longest):
            bits = np.where(lengths > k, bits << np.uint64(7) | raw[last - k] & np.uint64(127), bits)
        return bits.view(np.int64)

    def fields(self, at: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the number, the wire type and the limits of the value, for each field of a message."""
        while at < stop:
            tag, start = self.varint(at, stop)
            number, wire = tag >> 3, tag & 7
            if start - at > _LONGEST_TAG or not 0 < number < 1 << 29:
                raise self.error(f'field {number} at byte {at}')
            if wire == BYTES:
                length, start = self.varint(start, stop)
                at = start + length
            elif wire == VARINT:
                _, at = self.varint(start, stop)
            elif wire in (FIXED64, FIXED32):
                at = start + (8 if wire == FIXED64 else 4)
            else:
                raise self.error(f'unknown wire type {wire} at byte {at} of {len(self.data)}')
            if at > stop:
                raise self.error(f'field {number} ends at byte {at}, its message at byte {stop}')
            yield number, wire, start, at

    def error(self, problem: str) -> Exception:
        """Return the error for bytes that are not what they should be."""
        return self._error(f'{self._name}: {problem}')

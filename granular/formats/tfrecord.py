"""TFRecord files and ``tf.train.Example`` messages: bytes to records and features, with pure functions.

A file is a sequence of records (https://www.tensorflow.org/tutorials/load_data/tfrecord): the length (8 bytes,
little-endian), its masked CRC32C (4 bytes), the data, and their masked CRC32C (4 bytes). An Example is a message of
protobuf (tensorflow/core/example/feature.proto) that maps names to lists of bytes, floats or integers.
"""

import struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from granular.errors import CorruptRecordError, DecodeError
from granular.formats.base import Buffer
from granular.formats.checksums import crc32c

HEADER: Final = 12
"""Bytes before the data of a record."""
OVERHEAD: Final = 16
"""Bytes of a record besides its data."""

_HEADER: Final = struct.Struct('<QI')
_MASK: Final = 0xA282EAD8
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3  # fields of a Feature
_FEW: Final = 24  # up to this many bytes, numbers are parsed one by one
_LONGEST: Final = 10  # bytes of a varint of 64 bits
_LONGEST_TAG: Final = 5

Value = NDArray[Any] | list[bytes] | None


def masked_crc32c(data: bytes) -> int:
    """Return the CRC32C of some bytes as TFRecord files have it: rotated, plus a constant."""
    checksum = crc32c(data)
    return ((checksum >> 15 | checksum << 17) + _MASK) & 0xFFFFFFFF


def parse_length(header: Buffer, at: int, index: int, name: str) -> int:
    """Return the length of a record from the 12 bytes that it begins with; its number and position are for errors.

    Raises:
      CorruptRecordError: if the checksum of the length is wrong.
    """
    length, expected = _HEADER.unpack_from(header)
    if (checksum := masked_crc32c(bytes(header[:8]))) != expected:
        raise CorruptRecordError(
            f'{name}: record {index} at byte {at}: expected checksum {expected:08x} of its length {length}, got '
            f'{checksum:08x}: the file is damaged, or is not a TFRecord file'
        )
    return int(length)


def check_data(data: bytes, footer: Buffer, index: int, name: str) -> bytes:
    """Check the data of a record against the 4 bytes behind them, and return them; raise ``CorruptRecordError`` if the
    checksum is wrong.
    """
    expected = int.from_bytes(footer, 'little')
    if (checksum := masked_crc32c(data)) != expected:
        raise CorruptRecordError(
            f'{name}: record {index} of {len(data)} bytes: expected checksum {expected:08x}, got {checksum:08x}'
        )
    return data


# --- Example


def decode_example(record: Buffer) -> dict[str, Any]:
    """Return the features of a serialized ``tf.train.Example``.

    ::

        records = granular.TFRecordDataSource('s3://bucket/train.tfrecord')
        dataset = granular.MapDataset.source(records).map(granular.formats.decode_example)

    Unknown fields of messages are ignored, as by protobuf. TensorFlow is not needed.

    Returns:
      For each feature, by name: int64 or float32 of shape (values,), writable; a list of bytes; or None for a feature
      without any of the three lists.

    Raises:
      DecodeError: if the bytes are not an Example.
    """
    data = bytes(record)
    features: dict[str, Any] = {}
    for number, wire, start, stop in _fields(data, 0, len(data)):
        if number == 1:
            _expect(wire, 'features')
            for entry_number, entry_wire, entry_start, entry_stop in _fields(data, start, stop):
                if entry_number == 1:
                    _expect(entry_wire, 'feature')
                    name, value = _entry(data, entry_start, entry_stop)
                    features[name] = value
    return features


def _entry(data: bytes, start: int, stop: int) -> tuple[str, Value]:
    name, values = '', _Values()
    for number, wire, first, last in _fields(data, start, stop):
        if number == 1:
            _expect(wire, 'name of a feature')
            try:
                name = data[first:last].decode()
            except UnicodeDecodeError as error:
                raise DecodeError(f'not an Example: name of a feature at byte {first}: {error}') from None
        elif number == 2:
            _expect(wire, 'value of a feature')
            for kind, list_wire, list_first, list_last in _fields(data, first, last):
                if kind in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST):
                    _expect(list_wire, 'list of values')
                    values.add(kind, data, list_first, list_last)
        else:
            raise DecodeError(
                f'not an Example: field {number} at byte {first} is neither the name nor value of a feature'
            )
    return name, values.value()


class _Values:
    """The values of a feature. Lists of one kind that follow each other are joined, and the last kind counts."""

    def __init__(self) -> None:
        self._kind = 0
        self._parts: list[Any] = []

    def add(self, kind: int, data: bytes, start: int, stop: int) -> None:
        """Add a list of values."""
        if kind != self._kind:
            self._kind, self._parts = kind, []
        parse = (_bytes_list, _float_list, _int64_list)[kind - 1]
        self._parts += parse(data, start, stop)

    def value(self) -> Value:
        """Return the values; None if there is no list."""
        if self._kind in (0, _BYTES_LIST):
            return self._parts if self._kind else None
        if self._kind == _FLOAT_LIST:
            return np.frombuffer(b''.join(self._parts), '<f4').astype(np.float32)
        return self._parts[0] if len(self._parts) == 1 else np.concatenate([np.zeros(0, np.int64), *self._parts])


def _bytes_list(data: bytes, start: int, stop: int) -> list[bytes]:
    values = []
    for number, wire, first, last in _fields(data, start, stop):
        if number == 1:
            _expect(wire, 'bytes')
            values.append(data[first:last])
    return values


def _float_list(data: bytes, start: int, stop: int) -> list[bytes]:
    parts = []
    for number, wire, first, last in _fields(data, start, stop):
        if number != 1:
            continue
        if wire not in (_BYTES, _FIXED32) or (last - first) % 4:
            raise DecodeError(f'not an Example: {last - first} bytes of wire type {wire} at byte {first} are no floats')
        parts.append(data[first:last])
    return parts


def _int64_list(data: bytes, start: int, stop: int) -> list[NDArray[np.int64]]:
    parts: list[NDArray[np.int64]] = []
    for number, wire, first, last in _fields(data, start, stop):
        if number != 1:
            continue
        if wire not in (_BYTES, _VARINT):
            raise DecodeError(f'not an Example: wire type {wire} at byte {first} is no integer')
        parts.append(_varints(data, first, last))
    return parts


def _varints(data: bytes, start: int, stop: int) -> NDArray[np.int64]:
    """Return the numbers of a part that contains only varints of 64 bits."""
    if stop - start <= _FEW:
        values = []
        while start < stop:
            value, start = _varint(data, start, stop)
            values.append(value)
        return np.array(values, np.uint64).astype(np.int64)
    raw = np.frombuffer(data, np.uint8, stop - start, start)
    last = np.flatnonzero(raw < 128)
    if len(last) == len(raw):
        return raw.astype(np.int64)
    lengths = np.diff(last, prepend=-1)
    longest = int(lengths.max(initial=0))
    if not len(last) or last[-1] + 1 != len(raw) or longest > _LONGEST:
        raise DecodeError(f'not an Example: {len(raw)} bytes at byte {start} are not a sequence of varints')
    if longest == _LONGEST and (raw[last[lengths == _LONGEST]] > 1).any():
        raise DecodeError(f'not an Example: a number at byte {start} has more than 64 bits')
    bits = raw[last].astype(np.uint64)
    for k in range(1, longest):
        bits = np.where(lengths > k, bits << np.uint64(7) | raw[last - k] & np.uint64(127), bits)
    return bits.view(np.int64)


def _varint(data: bytes, at: int, stop: int) -> tuple[int, int]:
    """Return the number at a position, of 64 bits, and the position behind it."""
    value = shift = 0
    for position in range(at, min(stop, at + _LONGEST)):
        byte = data[position]
        value |= (byte & 127) << shift
        if byte < 128:
            if value >> 64:
                raise DecodeError(f'not an Example: the number at byte {at} has more than 64 bits')
            return value, position + 1
        shift += 7
    raise DecodeError(f'not an Example: expected a number at byte {at} of {len(data)}')


def _fields(data: bytes, at: int, stop: int) -> Any:
    """Yield the number, the wire type and the limits of the value, for each field of a message."""
    while at < stop:
        tag, start = _varint(data, at, stop)
        number, wire = tag >> 3, tag & 7
        if start - at > _LONGEST_TAG or not 0 < number < 1 << 29:
            raise DecodeError(f'not an Example: field {number} at byte {at}')
        if wire == _BYTES:
            length, start = _varint(data, start, stop)
            at = start + length
        elif wire == _VARINT:
            _, at = _varint(data, start, stop)
        elif wire in (_FIXED64, _FIXED32):
            at = start + (8 if wire == _FIXED64 else 4)
        else:
            raise DecodeError(f'not an Example: unknown wire type {wire} at byte {at} of {len(data)}')
        if at > stop:
            raise DecodeError(f'not an Example: field {number} ends at byte {at}, its message at byte {stop}')
        yield number, wire, start, at


def _expect(wire: int, what: str) -> None:
    if wire != _BYTES:
        raise DecodeError(f'not an Example: expected wire type {_BYTES} for a {what}, got {wire}')

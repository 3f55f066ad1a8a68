"""TFRecord files and ``tf.train.Example`` messages: bytes to records and features, with pure functions.

A file is a sequence of records (https://www.tensorflow.org/tutorials/load_data/tfrecord): the length (8 bytes,
little-endian), its masked CRC32C (4 bytes), the data, and their masked CRC32C (4 bytes). An Example is a message of
protobuf (tensorflow/core/example/feature.proto) that maps names to lists of bytes, floats or integers.
"""

import struct
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from granular.errors import CorruptRecordError, DecodeError
from granular.formats.base import Buffer
from granular.formats.checksums import crc32c
from granular.formats.protobuf import BYTES, FIXED32, VARINT, fields, varints

HEADER: Final = 12
"""Bytes before the data of a record."""
OVERHEAD: Final = 16
"""Bytes of a record besides its data."""

_HEADER: Final = struct.Struct('<QI')
_MASK: Final = 0xA282EAD8
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3  # fields of a Feature

Value = NDArray[Any] | list[bytes] | None


def masked_crc32c(data: bytes) -> int:
    """Return the CRC32C of some bytes as TFRecord files have it: rotated, plus a constant."""
    checksum = crc32c(data)
    return ((checksum >> 15 | checksum << 17) + _MASK) & 0xFFFFFFFF


def parse_length(header: Buffer, at: int, index: int, name: str) -> int:
    """Return the length of a record, whose checksum must be right, from the 12 bytes that it begins with."""
    length, expected = _HEADER.unpack_from(header)
    if (checksum := masked_crc32c(bytes(header[:8]))) != expected:
        raise CorruptRecordError(
            f'{name}: record {index} at byte {at}: expected checksum {expected:08x} of its length {length}, got '
            f'{checksum:08x}: the file is damaged, or is not a TFRecord file'
        )
    return int(length)


def check_data(data: bytes, footer: Buffer, index: int, name: str) -> bytes:
    """Return the data of a record, whose checksum must be that in the 4 bytes behind them."""
    expected = int.from_bytes(footer, 'little')
    if (checksum := masked_crc32c(data)) != expected:
        raise CorruptRecordError(
            f'{name}: record {index} of {len(data)} bytes: expected checksum {expected:08x}, got {checksum:08x}'
        )
    return data


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
    try:
        return _features(bytes(record))
    except ValueError as error:
        raise DecodeError(f'not an Example: {error}') from None


def _features(data: bytes) -> dict[str, Any]:
    return dict(_entry(data, start, stop) for start, stop in _entries(data, 1, 'feature'))


def _entries(data: bytes, field: int, what: str) -> Iterator[tuple[int, int]]:
    """Yield where the entries are of the map that a message has in a field."""
    for number, wire, start, stop in fields(data, 0, len(data)):
        if number == field:
            _expect(f'{what}s', wire)
            for entry_number, entry_wire, entry_start, entry_stop in fields(data, start, stop):
                if entry_number == 1:
                    _expect(what, entry_wire)
                    yield entry_start, entry_stop


def decode_sequence_example(record: Buffer) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return the features and the sequences of a serialized ``tf.train.SequenceExample``, such as frames of a video.

    Returns:
      The features of the context, as ``decode_example`` returns them; and by name, for each sequence, the list of its
      features, each likewise. An Example has no sequences.

    Raises:
      DecodeError: if the bytes are not a SequenceExample.
    """
    data = bytes(record)
    try:
        return _features(data), _sequences(data)
    except ValueError as error:
        raise DecodeError(f'not an Example or SequenceExample: {error}') from None


def _sequences(data: bytes) -> dict[str, list[Any]]:
    sequences: dict[str, list[Any]] = {}
    for start, stop in _entries(data, 2, 'feature list'):
        name, values = _named(data, start, stop, 'feature list')
        sequences[name] = [step for first, last in values for step in _steps(data, first, last)]
    return sequences


def _steps(data: bytes, start: int, stop: int) -> list[Value]:
    steps = []
    for number, wire, first, last in fields(data, start, stop):
        if number == 1:
            _expect('feature', wire)
            steps.append(_value(data, [(first, last)]))
    return steps


def _entry(data: bytes, start: int, stop: int) -> tuple[str, Value]:
    name, values = _named(data, start, stop, 'feature')
    return name, _value(data, values)


def _named(data: bytes, start: int, stop: int, what: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the name in an entry of a map, and where its values are."""
    name, values = '', []
    for number, wire, first, last in fields(data, start, stop):
        if number == 1:
            _expect(f'name of a {what}', wire)
            name = data[first:last].decode()
        elif number == 2:
            _expect(f'value of a {what}', wire)
            values.append((first, last))
        else:
            raise ValueError(f'field {number} at byte {first} is neither the name nor value of a {what}')
    return name, values


def _value(data: bytes, limits: list[tuple[int, int]]) -> Value:
    """Return the value of a feature, given in one part or several."""
    kind, parts = 0, list[Any]()
    for start, stop in limits:
        # Lists of one kind that follow each other are joined, and the last kind counts.
        for list_kind, list_wire, list_first, list_last in fields(data, start, stop):
            if list_kind in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST):
                _expect('list of values', list_wire)
                kind, parts = list_kind, parts if list_kind == kind else []
                _add_values(data, kind, parts, list_first, list_last)
    if kind == _FLOAT_LIST:
        return np.frombuffer(b''.join(parts), '<f4').astype(np.float32)
    if kind == _INT64_LIST:
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int64), *parts])
    return parts if kind else None


def _add_values(data: bytes, kind: int, parts: list[Any], start: int, stop: int) -> None:
    """Add the values of a list: bytes, or parts of floats or of integers."""
    for number, wire, first, last in fields(data, start, stop):
        if number != 1:
            continue
        if kind == _INT64_LIST:
            _expect('value of integers', wire, VARINT)
            parts.append(varints(data, first, last))
            continue
        _expect('value', wire, FIXED32 if kind == _FLOAT_LIST else BYTES)
        if kind == _FLOAT_LIST and (last - first) % 4:
            raise ValueError(f'{last - first} bytes at byte {first} are no floats')
        parts.append(data[first:last])


def _expect(what: str, wire: int, other: int = BYTES) -> None:
    if wire not in (BYTES, other):
        raise ValueError(f'expected wire type {BYTES} for a {what}, got {wire}')

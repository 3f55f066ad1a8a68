"""Codecs of plain values: bytes, text, numbers, JSON."""

import functools
import json
import math
import struct
from typing import Any, Final

import numpy as np

from granular.errors import DecodeError, EncodeError
from granular.formats.base import Buffer, Codec

_DOUBLE: Final = struct.Struct('<d')
_NO_NUMBERS: Final = (bool, np.bool_, np.timedelta64)  # the last is an integer to numpy, without its unit


def encode_bytes(value: Buffer) -> bytes:
    """Encode bytes, unchanged."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise EncodeError(f'expected bytes, got {type(value).__name__}')
    return bytes(value)


def decode_bytes(buffer: Buffer) -> bytes:
    """Decode bytes, unchanged."""
    return bytes(buffer)


def encode_utf8(value: str) -> bytes:
    """Encode text as UTF-8."""
    if not isinstance(value, str):
        raise EncodeError(f'expected str, got {type(value).__name__}')
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise EncodeError(f'text with a lone surrogate at {error.start} cannot be encoded as UTF-8') from error


def decode_utf8(buffer: Buffer) -> str:
    """Decode text from UTF-8."""
    try:
        return str(buffer, 'utf-8')
    except UnicodeDecodeError as error:
        raise DecodeError(f'{len(buffer)} bytes are not UTF-8: {error.reason} at {error.start}') from error


def encode_int(value: Any, size: int | None = None, signed: bool = True) -> bytes:
    """Encode an integer, little-endian.

    Args:
      value: a Python or numpy integer.
      size: the number of bytes; None for the fewest that hold it with a sign, at most 16.
      signed: True for two's complement, False for no sign.

    Raises:
      EncodeError: if it is not an integer, or does not fit.
    """
    if isinstance(value, _NO_NUMBERS) or not isinstance(value, int | np.integer):
        raise EncodeError(f'expected an integer, got {_kind_of(value)}')
    number = int(value)
    # One bit for the sign, which the decoder expects; granular 0.21 refuses numbers whose top bit would be taken for
    # one.
    width = (number if number >= 0 else ~number).bit_length() // 8 + 1 if size is None else size
    if width > 16:
        raise EncodeError(f'expected an integer of 127 bits or fewer, got {number.bit_length()} bits')
    try:
        return number.to_bytes(width, 'little', signed=signed)
    except OverflowError:
        raise EncodeError(f'{number} does not fit in {width} {"signed" if signed else "unsigned"} bytes') from None


def decode_int(buffer: Buffer, size: int | None = None, signed: bool = True) -> int:
    """Decode an integer from ``size`` little-endian bytes, or from any number up to 16 if ``size`` is None."""
    if len(buffer) > 16 or (size is not None and len(buffer) != size):
        raise DecodeError(f'expected an integer of {size or "up to 16"} bytes, got {len(buffer)}')
    return int.from_bytes(buffer, 'little', signed=signed)


def encode_float(value: Any) -> bytes:
    """Encode a number as 8 bytes, an IEEE 754 double, little-endian.

    Args:
      value: a Python or numpy float or integer that a double represents exactly.

    Raises:
      EncodeError: if it is not a number, or not exactly a double.
    """
    if isinstance(value, _NO_NUMBERS) or not isinstance(value, float | int | np.floating | np.integer):
        raise EncodeError(f'expected a float, got {_kind_of(value)}')
    value = int(value) if isinstance(value, np.integer) else value  # numpy compares integers with floats as doubles
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if number != value and not math.isnan(number):
        raise EncodeError(f'{type(value).__name__} {value!r:.80} is not exactly a double')
    return _DOUBLE.pack(number)


def decode_float(buffer: Buffer) -> float:
    """Decode a float from 8 bytes."""
    if len(buffer) != _DOUBLE.size:
        raise DecodeError(f'expected a float of {_DOUBLE.size} bytes, got {len(buffer)}')
    number: float = _DOUBLE.unpack(buffer)[0]
    return number


def encode_bool(value: bool | np.bool_) -> bytes:
    """Encode a Python or numpy bool as one byte, 0 or 1."""
    if not isinstance(value, bool | np.bool_):
        raise EncodeError(f'expected a bool, got {_kind_of(value)}')
    return b'\x01' if value else b'\x00'


def decode_bool(buffer: Buffer) -> bool:
    """Decode a bool from one byte, 0 or 1."""
    if (byte := bytes(buffer)) not in (b'\x00', b'\x01'):
        raise DecodeError(f'expected a bool, one byte of 0 or 1, got {len(byte)} bytes from {byte[:8]!r} on')
    return byte == b'\x01'


def _kind_of(value: Any) -> str:
    """Return the type of a value that is no number; of an array or tensor of one number, how to get that."""
    remedy = ': its item() is a number' if getattr(value, 'shape', None) == () and hasattr(value, 'item') else ''
    return f'{type(value).__name__}{remedy}'


def encode_json(value: Any) -> bytes:
    """Encode None, bool, int, float, str, lists, and dicts with keys of type str as JSON in UTF-8, without spaces.

    Tuples are decoded as lists.

    Raises:
      EncodeError: for other values and keys, and for NaN and infinities, which JSON does not have.
    """
    try:
        _check_json_keys(value)
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(',', ':')).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise EncodeError(f'{type(value).__name__} cannot be encoded as JSON: {error}') from error


def decode_json(buffer: Buffer) -> Any:
    """Decode JSON in UTF-8; also ``NaN`` and ``Infinity``, which other programs may have written."""
    try:
        return json.loads(str(buffer, 'utf-8'))
    except (ValueError, RecursionError) as error:
        raise DecodeError(f'{len(buffer)} bytes are not JSON: {error}') from error


def _check_json_keys(value: Any) -> None:
    """Reject keys that are not str, which JSON would turn into others: 1 into '1'."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f'expected keys of type str, got {key!r:.80}')
            _check_json_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_json_keys(item)


CODECS: Final = {
    'bytes': Codec(encode_bytes, decode_bytes, 'bytes', light=True),
    'utf8': Codec(encode_utf8, decode_utf8, 'text', light=True),
    'int': Codec(encode_int, decode_int, 'number', light=True),
    'float': Codec(encode_float, decode_float, 'number', light=True),
    'bool': Codec(encode_bool, decode_bool, 'number', light=True),
    'json': Codec(encode_json, decode_json, 'json', light=True),
    **{
        kind: Codec(
            functools.partial(encode_int, size=8, signed=signed),
            functools.partial(decode_int, size=8, signed=signed),
            'number',
            light=True,
        )
        for kind, signed in (('i64', True), ('u64', False))
    },
}

"""Encoders and decoders by type (docs/format.md); those of granular 0.21 and 0.24 have the same bytes.

An encoder converts a value to bytes, a decoder bytes to a value. Users may supply others for any type; all of these are
plain functions or partials of them, so that readers and writers pickle. To choose a quality, for example::

    encoders = {**granular.encoders, 'jpg': functools.partial(granular.formats.encode_image, format='jpg', quality=95)}
"""

import functools
import json
import math
import re
import struct
from collections.abc import Callable
from typing import Any, Final

import msgpack
import numpy as np
from numpy.typing import NDArray

from granular._lazy import import_if_installed
from granular.errors import DecodeError, EncodeError
from granular.formats.audio import Audio, decode_audio, encode_audio
from granular.formats.media import (
    decode_image,
    decode_video,
    encode_image,
    encode_video,
    image_type,
    pack_image,
    unpack_image,
)

__all__ = [
    'Audio', 'decode_array', 'decode_audio', 'decode_bool', 'decode_bytes', 'decode_float', 'decode_image',
    'decode_int', 'decode_json', 'decode_msgpack', 'decode_tree', 'decode_utf8', 'decode_video', 'decoders',
    'encode_array', 'encode_audio', 'encode_bool', 'encode_bytes', 'encode_float', 'encode_image',
    'encode_image_file', 'encode_int', 'encode_json', 'encode_msgpack', 'encode_tree', 'encode_utf8',
    'encode_video', 'encoders', 'inline_safe', 'pack_image', 'unpack_image',
]  # fmt: skip

Encoder = Callable[[Any], bytes]
Decoder = Callable[[bytes], Any]
Buffer = bytes | bytearray | memoryview

_ARRAY_KINDS: Final = 'biufcmMSUV'
# The accepted values of `dtype.str`. numpy accepts far more: fields, sub-arrays, names, objects.
_DTYPE: Final = re.compile(rf'[<>|=]?[{_ARRAY_KINDS}][0-9]{{1,10}}(\[([1-9][0-9]{{0,9}})?[A-Za-z]{{1,7}}\])?')
# The accepted names of types of ml_dtypes, whose `dtype.str` is that of other types: bfloat16, float8_e4m3fn, int4.
_EXTENSION: Final = re.compile(r'(bfloat|float|u?int|b?complex)[0-9]{1,3}(_[a-z0-9]{1,20})?')
_DIMENSIONS: Final = 64
_LAST_CODE_POINT: Final = 0x10FFFF
_DOUBLE: Final = struct.Struct('<d')
_HEADERS: Final = 16  # array headers in msgpack, above which claimed lengths are verified before lists are allocated


# --- plain values -----------------------------------------------------------------------------------------------------


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


def encode_image_file(value: Buffer) -> bytes:
    """Encode the bytes of an image file (JPEG, PNG, WebP, GIF or BMP), unchanged."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise EncodeError(f'expected the bytes of an image file, got {type(value).__name__}')
    data = bytes(value)
    if not image_type(data):
        raise EncodeError(f'expected a JPEG, PNG, WebP, GIF or BMP file, got {len(data)} bytes from {data[:8]!r} on')
    return data


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
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise EncodeError(f'expected an integer, got {type(value).__name__}')
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
    if isinstance(value, bool | np.bool_) or not isinstance(value, float | int | np.floating | np.integer):
        raise EncodeError(f'expected a float, got {type(value).__name__}')
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
        raise EncodeError(f'expected a bool, got {type(value).__name__}')
    return b'\x01' if value else b'\x00'


def decode_bool(buffer: Buffer) -> bool:
    """Decode a bool from one byte, 0 or 1."""
    if (byte := bytes(buffer)) not in (b'\x00', b'\x01'):
        raise DecodeError(f'expected a bool, one byte of 0 or 1, got {len(byte)} bytes from {byte[:8]!r} on')
    return byte == b'\x01'


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


def encode_msgpack(value: Any) -> bytes:
    """Encode None, bool, int, float, str, bytes, lists and maps as msgpack. Tuples are decoded as lists."""
    try:
        packed: bytes = msgpack.packb(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise EncodeError(f'{type(value).__name__} cannot be encoded as msgpack: {error}') from error
    return packed


def decode_msgpack(buffer: Buffer) -> Any:
    """Decode msgpack; maps may have keys of any type. Values may be nested up to 1,024 levels."""
    try:
        return unpack(buffer)
    except UNPACKING as error:
        raise DecodeError(f'{len(buffer)} bytes are not msgpack: {error or type(error).__name__}') from error


def unpack(buffer: Buffer, **options: Any) -> Any:
    """Unpack msgpack with memory in proportion to its bytes.

    The header of an array states its length, and the list is allocated before its items are read: of a thousand nested
    headers, each would allocate a list as long as the record. Skipping through the data first allocates nothing, and
    fails where items are missing.
    """
    data = bytes(buffer)
    if data.count(0xDC) + data.count(0xDD) > _HEADERS:
        parser = msgpack.Unpacker(strict_map_key=False, max_buffer_size=len(data))
        parser.feed(data)
        parser.skip()
    return msgpack.unpackb(data, strict_map_key=False, **options)


UNPACKING: Final = (ValueError, TypeError, OverflowError, RecursionError, MemoryError, msgpack.UnpackException)


# --- arrays -----------------------------------------------------------------------------------------------------------


def encode_array(value: Any) -> bytes:
    """Encode an array or numpy scalar as msgpack of (dtype, shape, data), C-contiguous.

    The dtype is ``dtype.str``, or the name of a type of ml_dtypes, such as ``bfloat16``.

    Raises:
      EncodeError: for arrays of objects or with fields, which ``dtype.str`` does not describe, and with a mask.
    """
    if not isinstance(value, np.ndarray | np.generic):
        raise EncodeError(f'expected a numpy array, got {type(value).__name__}')
    packed: bytes = msgpack.packb(array_parts(value))
    return packed


def decode_array(buffer: Buffer) -> NDArray[Any]:
    """Decode an array, which is read-only."""
    try:
        dtype, shape, data = msgpack.unpackb(buffer, max_array_len=_DIMENSIONS, max_map_len=0, max_ext_len=0)
        return array_of(dtype, shape, data)
    except UNPACKING as error:
        raise DecodeError(f'{len(buffer)} bytes are not an array: {error or type(error).__name__}') from error


def array_head(dtype: np.dtype[Any], count: int) -> bytes:
    """Return the bytes before the data of an encoded array of one dimension."""
    size = count * dtype.itemsize
    tag, width = (b'\xc4', 1) if size < 1 << 8 else (b'\xc5', 2) if size < 1 << 16 else (b'\xc6', 4)
    head: bytes = b'\x93' + msgpack.packb(dtype_text(dtype)) + msgpack.packb([count])
    return head + tag + size.to_bytes(width, 'big')


def parse_array_head(start: Buffer) -> np.dtype[Any]:
    """Return the dtype of an encoded array of one dimension, from its first bytes.

    Raises:
      DecodeError: if these are not the first bytes of such an array.
    """
    unpacker = msgpack.Unpacker(max_array_len=_DIMENSIONS, max_map_len=0, max_ext_len=0)
    try:
        unpacker.feed(start)
        parts = unpacker.read_array_header()
        dtype, shape = _dtype(unpacker.unpack()), unpacker.unpack()
    except (*UNPACKING, msgpack.OutOfData) as error:
        raise DecodeError(f'{bytes(start)!r:.100} does not begin an array: {type(error).__name__}') from error
    if parts != 3 or not isinstance(shape, list) or len(shape) != 1 or not dtype.itemsize:
        raise DecodeError(f'expected an array of one dimension, got dtype {dtype} and shape {shape!r:.100}')
    return dtype


def array_counts(sizes: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[np.int64]:
    """Return how many values encoded arrays of one dimension have; -1 if no such array has this size.

    The bytes before the data grow with the number of values, so each size belongs to one number at most.

    Args:
      sizes: the bytes of the encoded arrays.
      dtype: their dtype.
    """
    counts = np.full(len(sizes), -1, np.int64)
    shortest = len(array_head(dtype, 0))
    for head in range(shortest, shortest + 12):
        candidates, left = np.divmod(sizes - head, dtype.itemsize)
        data = candidates * dtype.itemsize
        grown = np.searchsorted([1 << 7, 1 << 8, 1 << 16, 1 << 32], candidates, side='right')
        width = (
            np.array([0, 1, 2, 4, 8])[grown]
            + np.array([0, 1, 3])[np.searchsorted([1 << 8, 1 << 16], data, side='right')]
        )
        fits = (left == 0) & (candidates >= 0) & (shortest + width == head)
        counts[fits] = candidates[fits]
    return counts


def encode_tree(value: Any) -> bytes:
    """Encode nested lists, tuples and dicts of arrays and of msgpack values. Tuples are decoded as lists.

    Raises:
      EncodeError: for values that msgpack does not support, and for a list of four that begins with ``'_'``, which is
        how an array is encoded.
    """
    try:
        packed: bytes = msgpack.packb(_pack_tree(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise EncodeError(f'the tree contains a value that cannot be encoded: {error}') from error
    return packed


def decode_tree(buffer: Buffer) -> Any:
    """Decode a tree; its arrays are read-only."""
    try:
        return _unpack_tree(unpack(buffer))
    except UNPACKING as error:
        raise DecodeError(f'{len(buffer)} bytes are not a tree: {error or type(error).__name__}') from error


def array_parts(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return the parts of an array or numpy scalar: its dtype as text, shape and bytes.

    Raises:
      EncodeError: for arrays of objects or with fields, which ``dtype.str`` does not describe, and with a mask.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise EncodeError('expected an array without a mask: call its filled(), or encode the mask as another array')
    array = np.asarray(value)
    text = dtype_text(array.dtype)
    if text == array.dtype.name:  # a name without a byte order
        array = array.astype(array.dtype.newbyteorder('='), copy=False)
    # Bytes rather than a buffer: dates and times export none, and that of an array of zero size or dimensions is not
    # contiguous.
    return text, array.shape, array.tobytes()


def dtype_text(dtype: np.dtype[Any]) -> str:
    """Return the text by which an encoded array names its dtype: ``dtype.str``, or the name of a type of ml_dtypes.

    Raises:
      EncodeError: for a dtype that no text describes.
    """
    if dtype.type.__module__ == 'ml_dtypes':
        return dtype.name
    # The `dtype.str` of other types defined outside numpy is that of raw bytes, as which they would be read.
    foreign = dtype.kind == 'V' and dtype.type is not np.void
    if dtype.kind not in _ARRAY_KINDS or dtype.names is not None or foreign:
        raise EncodeError(f'expected an array of numbers or fixed-width text, got dtype {dtype}')
    return dtype.str


@functools.lru_cache(maxsize=256)
def _dtype(text: Any) -> np.dtype[Any]:
    if type(text) is not str:
        raise ValueError(f'its dtype is {text!r:.80}')
    if _EXTENSION.fullmatch(text):
        return _extension_dtype(text)
    if not _DTYPE.fullmatch(text):
        raise ValueError(f'its dtype is {text!r:.80}')
    return np.dtype(text)


def _extension_dtype(name: str) -> np.dtype[Any]:
    """Return a type of ml_dtypes by its name."""
    if (ml_dtypes := import_if_installed('ml_dtypes')) is None:
        raise ValueError(f'its dtype is {name!r}: install ml_dtypes to read it')
    kind = getattr(ml_dtypes, name, None)
    if not (isinstance(kind, type) and issubclass(kind, np.generic)):
        raise ValueError(f'its dtype is {name!r}, which ml_dtypes {ml_dtypes.__version__} does not have')
    return np.dtype(kind)


def array_of(dtype: Any, shape: Any, data: Any) -> NDArray[Any]:
    """Return an array over the bytes of its data, writable if they are.

    Raises:
      ValueError: if the arguments do not describe an array.
    """
    kind = _dtype(dtype)
    if (
        type(data) not in (bytes, memoryview)
        or type(shape) is not list
        or not all(type(n) is int and n >= 0 for n in shape)
    ):
        raise ValueError(f'its data is {type(data).__name__}')
    if math.prod(shape) * kind.itemsize != len(data):
        raise ValueError(f'shape {shape!r:.80} of {dtype!r} does not match {len(data)} bytes')
    if not data:
        # An array of a billion items of zero bytes must allocate nothing.
        return np.empty(shape, kind) if kind.itemsize else np.broadcast_to(np.zeros((), kind), shape)
    if kind.kind == 'U' and np.frombuffer(data, kind.str.replace('U', 'u')[:2] + '4').max() > _LAST_CODE_POINT:
        raise ValueError('its text contains characters that are not Unicode')
    return np.frombuffer(data, kind).reshape(shape)


def _pack_tree(value: Any) -> Any:
    if isinstance(value, list | tuple):
        if len(value) == 4 and isinstance(value[0], str) and value[0] == '_':
            raise EncodeError("a list of four that begins with '_' would be read as an array")
        return [_pack_tree(item) for item in value]
    if isinstance(value, dict):
        return {key: _pack_tree(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return ('_', *array_parts(value))
    return value


def _unpack_tree(value: Any) -> Any:
    if isinstance(value, list):
        if len(value) == 4 and isinstance(value[0], str) and value[0] == '_':
            return array_of(*value[1:])
        return [_unpack_tree(item) for item in value]
    if isinstance(value, dict):
        return {key: _unpack_tree(item) for key, item in value.items()}
    return value


# --- by type ----------------------------------------------------------------------------------------------------------

encoders: dict[str, Encoder] = {
    'bytes': encode_bytes,
    'utf8': encode_utf8,
    'msgpack': encode_msgpack,
    'int': encode_int,
    'float': encode_float,
    'bool': encode_bool,
    'json': encode_json,
    'i64': functools.partial(encode_int, size=8, signed=True),
    'u64': functools.partial(encode_int, size=8, signed=False),
    'array': encode_array,
    'tree': encode_tree,
    'jpg': functools.partial(encode_image, format='jpg'),
    'png': functools.partial(encode_image, format='png'),
    'wav': functools.partial(encode_audio, format='wav'),
    'flac': functools.partial(encode_audio, format='flac'),
    'mp4': functools.partial(encode_video, format='mp4', codec='h264'),
    'webm': functools.partial(encode_video, format='webm', codec='vp9'),
}

decoders: dict[str, Decoder] = {
    'bytes': decode_bytes,
    'utf8': decode_utf8,
    'msgpack': decode_msgpack,
    'int': decode_int,
    'float': decode_float,
    'bool': decode_bool,
    'json': decode_json,
    'i64': functools.partial(decode_int, size=8, signed=True),
    'u64': functools.partial(decode_int, size=8, signed=False),
    'array': decode_array,
    'tree': decode_tree,
    'jpg': decode_image,
    'png': decode_image,
    'wav': decode_audio,
    'flac': decode_audio,
    'mp4': decode_video,
    'webm': decode_video,
}

_LIGHT: Final[tuple[Callable[..., Any], ...]] = (
    *(encode_bytes, encode_image_file, encode_utf8, encode_int, encode_msgpack, encode_array, encode_tree),
    *(encode_float, encode_bool, encode_json, decode_float, decode_bool, decode_json),
    *(decode_bytes, decode_utf8, decode_int, decode_msgpack, decode_array, decode_tree),
)


def inline_safe(fn: Callable[..., Any]) -> bool:
    """Return whether a function is ours and cheap enough for an event loop: not for images, audio or videos."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return any(fn is light for light in _LIGHT)

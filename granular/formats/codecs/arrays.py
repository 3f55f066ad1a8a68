"""Codecs of msgpack values, of arrays, and of trees, which are msgpack values with arrays in them."""

import datetime
import decimal
import functools
import io
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgpack
import numpy as np
from numpy.typing import NDArray

from granular._support.lazy import import_if_installed
from granular.errors import DecodeError, EncodeError
from granular.formats.base import Buffer, Codec, as_array

_ARRAY_KINDS: Final = 'biufcmMSUV'
# The accepted values of `dtype.str`. numpy accepts far more: fields, sub-arrays, names, objects.
_DTYPE: Final = re.compile(rf'[<>|=]?[{_ARRAY_KINDS}][0-9]{{1,10}}(\[([1-9][0-9]{{0,9}})?[A-Za-z]{{1,7}}\])?')
# The accepted names of types of ml_dtypes, whose `dtype.str` is that of other types: bfloat16, float8_e4m3fn, int4.
_EXTENSION: Final = re.compile(r'(bfloat|float|u?int|b?complex)[0-9]{1,3}(_[a-z0-9]{1,20})?')
_DIMENSIONS: Final = 64
_MAX_BYTES: Final = (1 << 32) - 1
_LAST_CODE_POINT: Final = 0x10FFFF
# The values of a tree that are packed as their text, by the name that takes the place of a dtype.
_AS_TEXT: Final[Mapping[str, Callable[[str], Any]]] = {
    'decimal': decimal.Decimal, 'time': datetime.time.fromisoformat
}  # fmt: skip
_HEADERS: Final = 16  # array headers in msgpack, above which declared lengths are verified before lists are allocated


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
        raise DecodeError(f'{len(buffer)} bytes are not msgpack: {str(error) or type(error).__name__}') from error


def unpack(buffer: Buffer, **options: Any) -> Any:
    """Unpack msgpack with memory in proportion to its bytes. Tuples that are keys are decoded as tuples.

    The header of an array states its length, and the list is allocated before its items are read: of a thousand nested
    headers, each would allocate a list as long as the record. Skipping through the data first allocates nothing, and
    fails where items are missing.
    """
    data = bytes(buffer)
    if data.count(0xDC) + data.count(0xDD) > _HEADERS:
        parser = msgpack.Unpacker(strict_map_key=False, max_buffer_size=len(data))
        parser.feed(data)
        parser.skip()
    try:
        return msgpack.unpackb(data, strict_map_key=False, **options)
    except TypeError:  # a key is a list
        return msgpack.unpackb(data, strict_map_key=False, object_pairs_hook=_with_tuples, **options)


def _with_tuples(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    return {_as_key(key): value for key, value in pairs}


def _as_key(value: Any) -> Any:
    return tuple(map(_as_key, value)) if isinstance(value, list) else value


UNPACKING: Final = (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException)
"""Errors of damaged bytes. Their memory is in proportion to their number, so a ``MemoryError`` is no damage."""


def encode_array(value: Any) -> bytes:
    """Encode an array or numpy scalar as msgpack of (dtype, shape, data), C-contiguous.

    The dtype is ``dtype.str``, or the name of a type of ml_dtypes, such as ``bfloat16``.

    Raises:
      EncodeError: for arrays of objects or with fields, which ``dtype.str`` does not describe, with a mask, or of 4 GiB
        or more.
    """
    if not isinstance(value, np.ndarray | np.generic):
        raise EncodeError(f'expected a numpy array, got {type(value).__name__}: numpy.asarray(...) makes one')
    packed: bytes = msgpack.packb(array_parts(value))
    return packed


def decode_array(buffer: Buffer) -> Any:
    """Decode an array, which is read-only; one number, date or duration without dimensions is a numpy scalar."""
    try:
        dtype, shape, data = msgpack.unpackb(buffer, max_array_len=_DIMENSIONS, max_map_len=0, max_ext_len=0)
        return _scalar_or_array(array_of(dtype, shape, data))
    except UNPACKING as error:
        raise DecodeError(f'{len(buffer)} bytes are not an array: {str(error) or type(error).__name__}') from error


def decode_npy(buffer: Buffer) -> NDArray[Any]:
    """Decode a file of ``numpy.save``, without pickled objects."""
    try:
        return np.lib.format.read_array(io.BytesIO(buffer))
    except MemoryError:
        raise
    except Exception as error:  # numpy raises anything for a damaged header
        raise DecodeError(f'{len(buffer)} bytes are not a file of numpy.save: {error}') from error


def array_head(dtype: np.dtype[Any], count: int, shape: tuple[int, ...] = ()) -> bytes:
    """Return the bytes before the data of an encoded array of so many values of a shape."""
    size = count * math.prod(shape) * dtype.itemsize
    tag, width = (b'\xc4', 1) if size < 1 << 8 else (b'\xc5', 2) if size < 1 << 16 else (b'\xc6', 4)
    head: bytes = b'\x93' + msgpack.packb(dtype_text(dtype)) + msgpack.packb([count, *shape])
    return head + tag + size.to_bytes(width, 'big')


def parse_array_head(start: Buffer) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Return the dtype and shape of an encoded array, and the bytes these take; errors are those of ``UNPACKING``."""
    unpacker = msgpack.Unpacker(max_array_len=_DIMENSIONS, max_map_len=0, max_ext_len=0)
    unpacker.feed(start)
    parts = unpacker.read_array_header()
    dtype, shape = _dtype(unpacker.unpack()), unpacker.unpack()
    if parts != 3 or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f'it has {parts} parts and the shape {shape!r:.80}')
    return dtype, tuple(shape), unpacker.tell()


def array_counts(sizes: NDArray[np.int64], dtype: np.dtype[Any], shape: tuple[int, ...] = ()) -> NDArray[np.int64]:
    """Return how many values of a shape encoded arrays have, by their bytes; -1 if no such array has this size.

    The bytes before the data grow with the number of values, so each size belongs to one number at most.
    """
    counts = np.full(len(sizes), -1, np.int64)
    shortest, step = len(array_head(dtype, 0, shape)), math.prod(shape) * dtype.itemsize
    for head in range(shortest, shortest + 12):
        candidates, left = np.divmod(sizes - head, step)
        data = candidates * step
        grown = np.searchsorted([1 << 7, 1 << 8, 1 << 16, 1 << 32], candidates, side='right')
        width = (
            np.array([0, 1, 2, 4, 8])[grown]
            + np.array([0, 1, 3])[np.searchsorted([1 << 8, 1 << 16], data, side='right')]
        )
        fits = (left == 0) & (candidates >= 0) & (shortest + width == head)
        counts[fits] = candidates[fits]
    return counts


def encode_tree(value: Any) -> bytes:
    """Encode nested lists, tuples and dicts of arrays, decimals, times of day and msgpack values.

    Tuples are decoded as lists.

    Raises:
      EncodeError: for values that msgpack does not support, and for a list of four that begins with ``'_'``, which is
        how an array is encoded.
    """
    try:
        packed: bytes = msgpack.packb(_pack_tree(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise EncodeError(f'the tree contains a value that cannot be encoded: {error}') from error
    return packed


def decode_tree(buffer: Buffer) -> Any:
    """Decode a tree; its arrays are read-only."""
    try:
        return _unpack_tree(unpack(buffer))
    except UNPACKING as error:
        raise DecodeError(f'{len(buffer)} bytes are not a tree: {str(error) or type(error).__name__}') from error


def array_parts(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return the dtype as text, the shape and the bytes of an array or numpy scalar that can be encoded."""
    array = as_array(value)
    if array.nbytes > _MAX_BYTES:
        raise EncodeError(
            f'expected an array of at most {_MAX_BYTES} bytes, which msgpack can hold, got {array.nbytes}'
        )
    text = dtype_text(array.dtype)
    if text == array.dtype.name:  # a name without a byte order
        array = array.astype(array.dtype.newbyteorder('='), copy=False)
    # Bytes rather than a buffer: dates and times export none, and that of an array of zero size or dimensions is not
    # contiguous.
    return text, array.shape, array.tobytes()


def dtype_text(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype in an encoded array: ``dtype.str``, or that of a type of ml_dtypes."""
    if dtype.type.__module__ == 'ml_dtypes':
        return dtype.name
    # The `dtype.str` of other types defined outside numpy is that of raw bytes, as which they would be read.
    foreign = dtype.kind == 'V' and dtype.type is not np.void
    if dtype.kind not in _ARRAY_KINDS or dtype.names is not None or foreign:
        raise EncodeError(f'expected an array of numbers or fixed-width text, got dtype {dtype}')
    return dtype.str


@functools.lru_cache(maxsize=256)
def _dtype(text: Any) -> np.dtype[Any]:
    if type(text) is not str or not (_DTYPE.fullmatch(text) or _EXTENSION.fullmatch(text)):
        raise ValueError(f'its dtype is {text!r:.80}')
    if _DTYPE.fullmatch(text):
        return np.dtype(text)
    if (ml_dtypes := import_if_installed('ml_dtypes')) is None:
        raise ValueError(f'its dtype is {text!r}: install ml_dtypes to read it')
    kind = getattr(ml_dtypes, text, None)
    if not (isinstance(kind, type) and issubclass(kind, np.generic)):
        raise ValueError(f'its dtype is {text!r}, which ml_dtypes {ml_dtypes.__version__} does not have')
    return np.dtype(kind)


def array_of(dtype: Any, shape: Any, data: Any) -> NDArray[Any]:
    """Return an array over the bytes of its data, writable if they are; raise ``ValueError`` if they do not fit."""
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


def _scalar_or_array(array: NDArray[Any]) -> Any:
    """Return the scalar for an array without dimensions: it can be hashed, and has the same type in a batch."""
    is_scalar = array.ndim == 0 and array.dtype.kind in 'biufcmM' and array.dtype.isnative
    return array[()] if is_scalar else array


def _pack_tree(value: Any) -> Any:
    if isinstance(value, list | tuple):
        if len(value) == 4 and isinstance(value[0], str) and value[0] == '_':
            raise EncodeError("a list of four that begins with '_' would be read as an array")
        return [_pack_tree(item) for item in value]
    if isinstance(value, dict):
        return {key: _pack_tree(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return ('_', *array_parts(value))
    if isinstance(value, decimal.Decimal):
        return ('_', 'decimal', (), str(value))
    if isinstance(value, datetime.time):
        return ('_', 'time', (), value.isoformat())
    return value


def _unpack_tree(value: Any) -> Any:
    if isinstance(value, list):
        if len(value) == 4 and isinstance(value[0], str) and value[0] == '_':
            if isinstance(value[1], str) and isinstance(value[3], str) and value[1] in _AS_TEXT:
                return _of_text(value[1], value[3])
            return _scalar_or_array(array_of(*value[1:]))
        return [_unpack_tree(item) for item in value]
    if isinstance(value, dict):
        return {key: _unpack_tree(item) for key, item in value.items()}
    return value


def _of_text(name: str, text: str) -> Any:
    try:
        return _AS_TEXT[name](text)
    except decimal.InvalidOperation as error:
        raise ValueError(f'{text!r:.80} is no decimal') from error


CODECS: Final = {
    'msgpack': Codec(encode_msgpack, decode_msgpack, 'tree', light=True),
    'array': Codec(encode_array, decode_array, 'array', light=True),
    'tree': Codec(encode_tree, decode_tree, 'tree', light=True),
}

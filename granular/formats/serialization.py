"""Exact conversion of values to bytes and back, for caches and shared memory; no pickle, so that bytes run no code.

A value is None, a bool, an int of any size, a float, a complex, a str, bytes, a numpy array or scalar, a tensor of
torch, an image of PIL, or a list, tuple or dict of these. The first byte gives the format of the rest: bytes unchanged,
or a tree: the length of its head (4 bytes, little-endian), the head in msgpack, and the bytes of its arrays, each at a
multiple of 16. In the head, types that msgpack does not support are extensions: a tuple, an array (dtype, shape,
offset, size), a scalar, an integer of more than 64 bits, a complex number, a tensor (its dtype, and its memory as an
array), an image (the output of ``pack_image``).
"""

import struct
import sys
from typing import Any, Final

import msgpack
import numpy as np

from granular._support.lazy import import_extra
from granular.errors import DecodeError, EncodeError
from granular.formats.base import Buffer
from granular.formats.codecs.arrays import UNPACKING, array_of, array_parts, unpack
from granular.formats.codecs.images import pack_image, unpack_image

_BYTES: Final = b'b'
_TREE: Final = b't'
_ALIGN: Final = 16
_TUPLE, _ARRAY, _SCALAR, _INTEGER, _COMPLEX, _TENSOR, _IMAGE = range(1, 8)
_MAX_DEPTH: Final = 64


def encode(value: Any) -> bytes:
    """Return the bytes of a value.

    A ``bytearray`` is decoded as bytes, numpy's ``str_`` and ``bytes_`` as str and bytes, and an image that was read
    from a file as a ``PIL.Image.Image`` with the same pixels, palette and transparency. Raise ``EncodeError`` for any
    other type: other classes, sets, arrays of objects or with fields, tensors that are not dense ones in memory or that
    require gradients; and beyond 64 levels.
    """
    if type(value) is bytes:
        return _BYTES + value
    parts: list[bytes] = []
    at = 0

    def foreign(item: Any) -> Any:
        nonlocal at
        if type(item) is tuple:
            return msgpack.ExtType(_TUPLE, pack(list(item)))
        if isinstance(item, np.bytes_ | np.str_):
            return bytes(item) if isinstance(item, np.bytes_) else str.__str__(item)  # item() strips zeros
        if isinstance(item, np.ndarray | np.generic):
            if type(item) is not np.ndarray and not isinstance(item, np.generic):
                raise EncodeError(f'a {type(item).__name__} would come back as an ndarray')
            dtype, shape, data = array_parts(item)
            offset, size = at, -(-len(data) // _ALIGN) * _ALIGN
            parts.extend((data, bytes(size - len(data))))
            at += size
            code = _ARRAY if isinstance(item, np.ndarray) else _SCALAR
            return msgpack.ExtType(code, msgpack.packb((dtype, shape, offset, len(data))))
        if type(item) is int:
            return msgpack.ExtType(_INTEGER, item.to_bytes(item.bit_length() // 8 + 1, 'little', signed=True))
        if type(item) is complex:
            return msgpack.ExtType(_COMPLEX, struct.pack('<dd', item.real, item.imag))
        if (torch := sys.modules.get('torch')) is not None and isinstance(item, torch.Tensor):
            return msgpack.ExtType(_TENSOR, pack(_tensor_parts(item)))
        if (images := sys.modules.get('PIL.Image')) is not None and isinstance(item, images.Image):
            return msgpack.ExtType(_IMAGE, pack_image(item))
        raise EncodeError(f'{type(item).__name__} is neither a plain value nor an array')

    depth = 0

    def pack(item: Any) -> bytes:
        nonlocal depth
        depth += 1
        if depth > _MAX_DEPTH:
            raise EncodeError(f'it nests more than {_MAX_DEPTH} levels')
        packed: bytes = msgpack.packb(item, default=foreign, strict_types=True, unicode_errors='surrogatepass')
        depth -= 1
        return packed

    try:
        head = pack(value)
    except EncodeError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise EncodeError(f'{type(value).__name__}: {error}') from error
    front = _TREE + len(head).to_bytes(4, 'little') + head
    return b''.join((front, bytes(-len(front) % _ALIGN), *parts))


def decode(record: Buffer) -> Any:
    """Return the value of some bytes, in memory of its own: arrays are writable, and nothing refers to the record."""
    kind = bytes(record[:1])
    if kind == _BYTES:
        return bytes(record[1:])
    try:
        if kind != _TREE:
            raise ValueError('unknown magic')
        stop = 5 + int.from_bytes(record[1:5], 'little')
        if stop > len(record):
            raise ValueError('they are truncated')
        body = memoryview(bytearray(memoryview(record)[stop + -stop % _ALIGN :]))

        def foreign(code: int, data: bytes) -> Any:
            if code == _TUPLE:
                return tuple(read(data))
            if code in (_ARRAY, _SCALAR):
                dtype, shape, offset, size = msgpack.unpackb(data)
                if not 0 <= offset <= offset + size <= len(body):
                    raise ValueError(f'an array of {size} bytes at {offset}, of {len(body)}')
                array = array_of(dtype, shape, body[offset : offset + size])
                return array if code == _ARRAY else array[()]
            if code == _INTEGER:
                return int.from_bytes(data, 'little', signed=True)
            if code == _COMPLEX:
                return complex(*struct.unpack('<dd', data))
            if code == _TENSOR:
                return _tensor_of(*read(data))
            if code == _IMAGE:
                return unpack_image(data)
            raise ValueError(f'unknown extension code {code}')

        def read(data: Buffer) -> Any:
            return unpack(data, ext_hook=foreign, unicode_errors='surrogatepass')

        return read(record[5:stop])
    except (*UNPACKING, struct.error, AttributeError) as error:
        raise DecodeError(f'{len(record)} bytes are not a value: {str(error) or type(error).__name__}') from error


_BITS: Final = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}


def _tensor_parts(tensor: Any) -> list[Any]:
    torch = sys.modules['torch']
    kind = type(tensor).__name__
    if type(tensor) is not torch.Tensor:
        raise EncodeError(f'a {kind} would come back as a Tensor')
    if tensor.device.type != 'cpu' or tensor.layout != torch.strided or tensor.is_quantized or tensor.requires_grad:
        grad = ' that requires gradients' if tensor.requires_grad else ''
        raise EncodeError(
            f'expected a dense tensor in memory without gradients, got one{grad} of {tensor.dtype} on {tensor.device}, '
            f'{tensor.layout}'
        )
    bits = getattr(torch, np.dtype(_BITS[tensor.element_size()]).name)
    # Conjugated and negated views are lazy.
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    return [f'{tensor.dtype}'.removeprefix('torch.'), dense.view(bits).numpy()]


def _tensor_of(name: str, bits: Any) -> Any:
    torch = import_extra('torch', 'torch')
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != bits.dtype.itemsize:
        raise ValueError(f'{bits.dtype} is not the memory of a tensor of {name}')
    return torch.from_numpy(bits).view(dtype)

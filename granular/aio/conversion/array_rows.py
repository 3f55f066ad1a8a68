"""Records of the rows of an array, encoded together."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from granular import formats
from granular._support.indexing import Ints
from granular.aio.bags.records import Adjacent
from granular.aio.datasets.codec import Encoders

_INTEGERS: Final = ('int', 'i64', 'u64')
_SIGNED: Final = np.iinfo(np.int64).max


def has_records(values: Any, kind: str, encoders: Encoders) -> bool:
    """Return whether ``records_of`` has the records of the rows of an array: those of granular's encoder of a type."""
    if type(values) not in (np.ndarray, np.memmap) or not values.ndim or not len(values):
        return False
    if kind not in formats.encoders or (encoders or {}).get(kind, formats.encoders[kind]) != formats.encoders[kind]:
        return False
    dtype = values.dtype
    if kind == 'array':
        if dtype.type.__module__ == 'ml_dtypes':
            return False
        return dtype.kind in 'iufc' or (dtype.kind == 'b' and values.ndim > 1)
    if values.ndim > 1:
        return False
    if kind in _INTEGERS and dtype.kind in 'iu':
        return bool(values.min() >= 0 if kind == 'u64' else values.max() <= _SIGNED)
    return (kind == 'float' and dtype.kind == 'f' and dtype.itemsize <= 8) or (kind == 'bool' and dtype.kind == 'b')


def records_of(values: NDArray[Any], kind: str, indices: Ints) -> Adjacent:
    """Return the records of the rows at some indices."""
    rows = np.ascontiguousarray(values[indices])
    if kind == 'int':
        return _integers(rows.astype('<i8'))
    if kind == 'array':
        first = formats.encode_array(rows[0])
        size = rows[0].nbytes
        data = np.empty((len(rows), len(first)), np.uint8)
        data[:, : len(first) - size] = np.frombuffer(first[: len(first) - size], np.uint8)
        data[:, len(first) - size :] = np.frombuffer(rows.tobytes(), np.uint8).reshape(len(rows), size)
        return _of_one_size(data.tobytes(), len(rows))
    dtype = {'i64': '<i8', 'u64': '<u8', 'float': '<f8', 'bool': 'u1'}[kind]
    return _of_one_size(rows.astype(dtype).tobytes(), len(rows))


def _integers(numbers: Ints) -> Adjacent:
    """Return the fewest bytes that hold each number with its sign."""
    magnitudes = np.where(numbers >= 0, numbers, ~numbers)
    widths = 1 + np.searchsorted([1 << bits for bits in range(7, 63, 8)], magnitudes, side='right')
    data = numbers.view(np.uint8).reshape(-1, 8)[np.arange(8) < widths[:, None]]
    return Adjacent(data.tobytes(), np.append(0, np.cumsum(widths)))


def _of_one_size(data: bytes, count: int) -> Adjacent:
    return Adjacent(data, np.arange(count + 1) * (len(data) // count))

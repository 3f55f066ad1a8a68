"""What users index with, as arrays of places."""

import operator
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from granular.errors import InvalidArgumentError, OutOfRangeError

Ints = NDArray[np.int64]


def index_of(index: SupportsIndex, length: int, name: str) -> int:
    """One index, counted from the end if negative.

    Raises:
      OutOfRangeError: an ``IndexError``, so that ``list(reader)`` ends where the records do.
    """
    try:
        place = operator.index(index)
    except TypeError:
        raise InvalidArgumentError(f'{name}: {index!r:.100} is no index: want an integer') from None
    if not -length <= place < length:
        raise OutOfRangeError(f'{name}: index {place} is out of range: it has {length}')
    return place + length if place < 0 else place


def indices_of(indices: Any, length: int, name: str) -> Ints:
    """Many indices: a slice, a range, or anything that makes a 1-D array of integers; negative ones from the end."""
    if isinstance(indices, slice):
        return np.arange(*indices.indices(length), dtype=np.int64)
    array = np.asarray(indices)
    if array.ndim != 1 or (array.size and array.dtype.kind not in 'iu'):
        raise InvalidArgumentError(f'{name}: want a 1-D sequence of integers, got {array.dtype} of shape {array.shape}')
    # Before they become signed integers, as an unsigned one from 2**63 on would become a negative one.
    bad = (array < -length) | (array >= length)
    if bad.any():
        raise OutOfRangeError(f'{name}: index {array[bad][0]} is out of range: it has {length}')
    array = array.astype(np.int64, copy=False)
    return np.where(array < 0, array + length, array)

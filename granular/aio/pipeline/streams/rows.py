"""Rows of fixed lengths, filled with the values of sequences."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from granular._support.lazy import is_masked
from granular.aio.pipeline.streams.bins import aligned
from granular.aio.pipeline.streams.packing_options import Feature
from granular.errors import DatapointError

Array = NDArray[Any]
Int32s = NDArray[np.int32]

TEXT: Final = 'OSU'  # kinds of dtypes that are no numbers


def array_of(element: Any, feature: Feature, where: str) -> Array:
    """Return a feature of an element, of one dimension or more; raise ``DatapointError`` if it has no such array."""
    value = element
    try:
        for key in feature.path:
            value = value[key]
    except (KeyError, TypeError, IndexError):
        keys = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
        raise DatapointError(f'{where} has no {feature.name!r}, only {keys!s:.200}') from None
    if type(value) is not np.ndarray:
        if is_masked(type(value)):
            raise DatapointError(f'{where}: {feature.name!r}: expected an array without a mask: call its filled()')
        try:
            value = np.asarray(value)
        except ValueError as error:
            raise DatapointError(f'{where}: {feature.name!r} is not an array: {error}') from error
    array: Array = value if value.ndim else value.reshape(1)
    return array


def fill(
    feature: Feature,
    length: int,
    parts: Sequence[Array],
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    replaced: Sequence[bool],
    numbers: Int32s,
) -> tuple[Array, Int32s, Int32s, list[int]]:
    """Return a feature of a row: its values, segment ids and positions, and where the parts begin, with their end.

    Args:
      feature: the feature.
      length: the length of the row.
      parts: the values of the sequences.
      dtype: the dtype of the row.
      shape: the shape of a value.
      replaced: True for each part whose first value is replaced by the feature's ``bos``.
      numbers: the integers from 0 to the length.
    """
    values = np.zeros((length, *shape), dtype)
    if feature.padding:
        values[...] = feature.padding
    ids, positions = np.zeros(length, np.int32), np.zeros(length, np.int32)
    start, begins = 0, []
    for number, part in enumerate(parts, 1):
        if not (size := len(part)):
            continue
        stop = start + size
        values[start:stop] = part
        if feature.bos is not None and replaced[number - 1]:
            values[start] = feature.bos
        if not feature.meta:
            ids[start:stop] = number
            positions[start:stop] = numbers[:size]
        begins.append(start)
        start = stop if feature.alignment == 1 else aligned(stop, feature.alignment)
    begins.append(min(start, length))
    return values, ids, positions, begins


def shape_of(trailing: tuple[int, ...]) -> str:
    """Return the shape of arrays of any length, whose values have a shape."""
    return f'({", ".join(["n", *map(str, trailing)])})'


def check_value(value: Any, dtype: np.dtype[Any], name: str) -> None:
    """Raise ``DatapointError`` if a value is none of a dtype; None is always one."""
    if value is None:
        return
    try:
        with np.errstate(all='ignore'):
            held = np.full((), value, dtype)
        same = bool(held == value) or bool(np.isnan(held) and np.isnan(value))
    except (OverflowError, TypeError, ValueError):
        same = False
    if not same:
        raise DatapointError(f'pack: {name}: {value!r:.100} is not a value of dtype {dtype}')

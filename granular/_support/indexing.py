"""Checks of integer arguments, and arrays of positions: made of user-supplied indices, and grouped by their owners."""

import itertools
import operator
from collections.abc import Hashable, Sequence
from typing import Any, Final, SupportsIndex, TypeVar

import numpy as np
from numpy.typing import NDArray

from granular._support.lazy import is_masked
from granular.errors import InvalidArgumentError, OutOfRangeError

T = TypeVar('T')
Ints = NDArray[np.int64]
Seed = int | tuple[int, ...]
_BOOLEANS: Final = frozenset((bool, np.bool_))
_MANY: Final = 1 << 12  # owners from which on a cast is quicker than a sort of 64 bits
MOST: Final = 2**63 - 1  # of an index, and of a size that indices are divided by
MOST_WORKERS: Final = 4096  # processes: more would be a mistake that takes all of the machine


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return an argument as an ``int``; raise ``InvalidArgumentError``, which names it, unless it is an integer from
    ``least`` to ``most``, of Python or numpy, and no bool.
    """
    integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not integer or value < least or (most is not None and value > most):
        below = most is None or (most == MOST and not (integer and value > most))  # the largest one is no limit
        limits = f'>= {least}' if below else f'from {least} to {most}'
        raise InvalidArgumentError(f'{name}: expected an integer {limits}, got {value!r:.100}')
    return int(value)


def check_seed(seed: Any) -> Seed:
    """Return the seed of a random generator: an integer >= 0 of any size, or a sequence of such integers as a tuple."""
    if isinstance(seed, Sequence | np.ndarray) and not isinstance(seed, str | bytes) and len(seed):
        return tuple(check_integer('seed', part, 0) for part in seed)
    return check_integer('seed', seed, 0)


def check_field(field: Any) -> Any:
    """Return the name of a field of labels, which a list is not."""
    if not isinstance(field, Hashable):
        raise InvalidArgumentError(f'expected the name of a field, got {field!r:.100}')
    return field


def check_index(index: Any, name: str) -> int:
    """Return an index as an int; raise ``OutOfRangeError`` if it is larger than that of any source."""
    masked = is_masked(type(index)) and np.any(index.mask)
    try:
        position = operator.index(None if masked else index)  # type: ignore[arg-type]
    except TypeError:
        several = isinstance(index, Sequence | np.ndarray) and np.shape(index) != () and len(index) > 1
        many = ': fetch(...) reads several' if several else ''
        if isinstance(index, str):
            many = f': select([{index!r:.100}]) of a MapDataset chooses keys'
        raise InvalidArgumentError(f'{name}: expected an integer as index, got {index!r:.100}{many}') from None
    if (bits := position.bit_length()) > 63:
        shown = position if bits <= 256 else f'of {bits} bits'
        raise OutOfRangeError(f'{name}: index {shown} is out of range: expected at most 63 bits')
    return position


def index_of(index: SupportsIndex, length: int, name: str) -> int:
    """Return one index as a position, negative from the end; an ``OutOfRangeError`` ends ``list(reader)``."""
    position = check_index(index, name)
    if not -length <= position < length:
        raise _out_of_range(name, position, length)
    return position + length if position < 0 else position


def _out_of_range(name: str, index: int, length: int) -> OutOfRangeError:
    valid = f'expected {-length} to {length - 1}' if length else 'it is empty'
    return OutOfRangeError(f'{name}: index {index} is out of range: {valid}', index=index)


def indices_of(indices: Any, length: int, name: str) -> Ints:
    """Return a slice, range or sequence of integers, negative from the end, as positions; ``name`` is for errors."""
    if isinstance(indices, slice):
        chosen = range_of(indices, length, name)
        return np.arange(chosen.start, chosen.stop, chosen.step, dtype=np.int64)
    if isinstance(indices, range):
        indices = indices[: 2 * length + 1]  # more cannot be valid, and would take memory
    array = _array_of_integers(indices, name)
    if not array.size:
        return np.zeros(0, np.int64)
    # Check before the conversion to signed integers, which would make unsigned indices from 2**63 on negative.
    least = array.min()
    if least < -length or array.max() >= length:
        raise _out_of_range(name, int(array[(array < -length) | (array >= length)][0]), length)
    positions = array.astype(np.int64)
    if least < 0:
        positions[positions < 0] += length
    return positions


def range_of(part: slice, length: int, name: str) -> range:
    """Return the indices of a slice; raise ``InvalidArgumentError`` if its parts are not integers, or its step is 0."""
    try:
        return range(*part.indices(length))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f'{name}: expected a slice of integers with a step other than 0, got {part}'
        ) from error


def cut_to(indices: slice | range, length: int) -> slice | range:
    """Cut a range that begins among the records and reaches beyond their end, as granular 0.21 does."""
    if isinstance(indices, range) and indices.step > 0 and 0 <= indices.start <= length < indices.stop:
        return range(indices.start, length, indices.step)
    return indices


def integers_of(values: Any, name: str) -> Ints:
    """Return integers as a 1-D array; numpy alone would truncate fractions, and take a mask of booleans for 0 and 1."""
    array = _array_of_integers(values, name)
    if array.dtype == np.uint64 and array.max(initial=0) > np.iinfo(np.int64).max:
        raise OutOfRangeError(f'{name}: expected integers below 2**63, got {array.max()}')
    return array.astype(np.int64, copy=False)


def _array_of_integers(values: Any, name: str) -> NDArray[Any]:
    if is_masked(type(values)) and np.any(values.mask):
        raise InvalidArgumentError(f'{name}: expected integers without a mask: pass those of compressed()')
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        raise InvalidArgumentError(f'{name}: expected a 1-D sequence of integers, got {values!r:.100}') from None
    except MemoryError:
        raise InvalidArgumentError(f'{name}: expected indices that fit into memory, got {values!r:.100}') from None
    if isinstance(values, list | tuple) and array.dtype.kind == 'i' and _BOOLEANS.intersection(map(type, values)):
        raise InvalidArgumentError(f'{name}: expected a 1-D sequence of integers, got booleans in {values!r:.100}')
    if array.ndim != 1 or (array.size and array.dtype.kind not in 'iu'):
        got = f'{array.dtype} of shape {array.shape}' if array.ndim else f'{values!r:.100}'
        hint = f': pass [{got}]' if array.ndim == 0 and array.dtype.kind in 'iu' else ''
        hint = ': numpy.flatnonzero(...) makes indices of a mask' if array.dtype == bool and array.ndim else hint
        raise InvalidArgumentError(f'{name}: expected a 1-D sequence of integers, got {got}{hint}')
    return array


def sums_of(values: Ints, counts: Ints) -> Ints:
    """Return the sums of so many successive values each."""
    sums, ends = np.zeros(len(values) + 1, values.dtype), np.cumsum(counts)
    np.cumsum(values, out=sums[1:])
    out: Ints = sums[ends] - sums[ends - counts]
    return out


def owner_of(counts: Ints, position: int) -> int:
    """Return which of some owners has a position: each has so many, one owner behind the other."""
    return int(counts.cumsum().searchsorted(position, side='right'))


def cut_into(values: list[T], counts: Sequence[int]) -> list[list[T]]:
    """Return a list for each of some counts, of values that lie one behind the other."""
    if len(counts) == 1:
        return [values]
    ends = itertools.accumulate(counts)
    return [values[end - count : end] for end, count in zip(ends, counts, strict=True)]


def grouped(owners: Ints) -> list[tuple[int, Ints]]:
    """Return each owner with the positions that it has, in order."""
    if not len(owners):
        return []
    if (owners == owners[0]).all():
        return [(int(owners[0]), np.arange(len(owners)))]
    few = owners.astype(np.uint16) if len(owners) > _MANY and owners.max() < 1 << 16 else owners  # sorted by radix
    order = np.argsort(few, kind='stable')
    ranked = owners[order]
    edges = [0, *(np.flatnonzero(ranked[1:] != ranked[:-1]) + 1).tolist(), len(order)]
    return [(int(ranked[start]), order[start:stop]) for start, stop in itertools.pairwise(edges)]


def placed(groups: Sequence[tuple[int, Ints]], values: Sequence[Sequence[T]], count: int) -> list[T]:
    """Return the values of all groups in the order of the positions."""
    if len(groups) == 1 and len(values[0]) == count:
        return list(values[0])
    out: list[Any] = [None] * count
    for (_, positions), group_values in zip(groups, values, strict=True):
        for position, value in zip(positions.tolist(), group_values, strict=True):
            out[position] = value
    return out

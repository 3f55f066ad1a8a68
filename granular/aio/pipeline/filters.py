"""Filters: pure functions from labels and lengths to indices; the public module is :mod:`granular.filters`."""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import Ints, check_integer
from granular._support.lazy import is_masked
from granular.errors import InvalidArgumentError, OutOfRangeError

Labels = NDArray[Any]
Strategy = Literal['multiply', 'exact']

_CLOSE: Final = Fraction(1, 1 << 50)  # tolerance of a percentage, such as 0.29 or 1 - 0.9


def as_labels(values: Any, name: str = 'labels') -> Labels:
    """Return labels as an array: int64 or strings, one per datapoint; or objects, each the classes of one datapoint.

    A datapoint with several classes has a 1-D sequence of them, or an array of booleans in which class ``i`` is true.

    Args:
      values: a sequence of labels.
      name: the field, for errors.

    Raises:
      InvalidArgumentError: if the labels are neither.
    """
    try:
        array = np.asarray(values)
    except ValueError:  # the datapoints have different numbers of classes
        array = np.empty((len(values), 0), object)
    if not array.ndim:
        raise InvalidArgumentError(f'{name}: expected a sequence with the label of each datapoint, got {values!r:.60}')
    if array.ndim == 1 and (array.dtype != object or not array.size):
        return _checked(array, values, name)
    out = np.empty(len(values), object)
    for i, value in enumerate(values):
        classes = np.asarray(value)
        if classes.ndim != 1:
            raise InvalidArgumentError(
                f'{name}: expected an integer, a string or a 1-D sequence of them as label of datapoint {i}, got '
                f'{value!r:.60}'
            )
        if classes.dtype == bool:
            classes = np.flatnonzero(classes)
        out[i] = _checked(classes, value, name)
    return out


def by_class(labels: Any, valid_classes: Any = None, invalid_classes: Any = None, name: str = 'labels') -> Ints:
    """Return the indices of the datapoints with some classes, or without some classes, in order.

    ::

        indices = granular.filters.by_class([3, 5, 3, 7], valid_classes=[3])  # 0 and 2

    A datapoint with several classes is selected if any of them is valid, or if none of them is invalid.

    Args:
      labels: labels as accepted by :func:`as_labels`.
      valid_classes: the classes to select: a list, a range, a set or an array.
      invalid_classes: the classes to leave out. Exactly one of the two is given.
      name: the field, for errors.
    """
    valid, wanted = chosen_classes(valid_classes, invalid_classes)
    array = as_labels(labels, name)
    several = array.dtype == object
    kinds = {classes.dtype.kind for classes in (array if several else [array]) if classes.size}
    if wanted.size and kinds - {wanted.dtype.kind}:
        example = np.unique(next(classes for classes in (array if several else [array]) if classes.size))
        raise InvalidArgumentError(
            f'{name}: expected classes such as {example[:5].tolist()}, got {wanted[:5].tolist()}: integers never '
            f'match strings'
        )
    if several:
        matches = np.array([bool(np.isin(classes, wanted).any()) for classes in array], bool)
    else:
        matches = np.isin(array, wanted)
    return np.flatnonzero(matches if valid else ~matches)


def chosen_classes(valid_classes: Any = None, invalid_classes: Any = None) -> tuple[bool, Labels]:
    """Return whether the given classes are the valid ones, and the classes, sorted, without repeats."""
    if (valid_classes is None) == (invalid_classes is None):
        raise InvalidArgumentError('expected either valid_classes or invalid_classes, such as valid_classes=[0, 3]')
    classes = valid_classes if invalid_classes is None else invalid_classes
    try:
        # An iterator would be empty for the next reader of the argument.
        array = None if isinstance(classes, str | bytes | Iterator) else as_labels(list(classes), 'classes')
    except TypeError:  # not iterable
        array = None
    if array is None or array.dtype == object:
        name = 'valid_classes' if invalid_classes is None else 'invalid_classes'
        one = f': pass [{classes!r}]' if isinstance(classes, int | str | np.integer) else ''
        raise InvalidArgumentError(f'{name}: expected a 1-D sequence of classes, got {classes!r:.100}{one}')
    return invalid_classes is None, np.unique(array)


def oversampled(
    labels: Any, strategy: Strategy = 'multiply', unlabeled: int | str | None = -1, name: str = 'labels'
) -> Ints:
    """Return indices that repeat the datapoints of rare classes.

    ::

        indices = granular.filters.oversampled([0, 0, 0, 1], strategy='exact')  # 0, 1, 2, 3, 3, 3

    Args:
      labels: labels as accepted by :func:`as_labels`, one class per datapoint.
      strategy: ``'multiply'``, as KappaData defines it: all datapoints in order; then, class by class, the datapoints
        of each class that fits k times into the size of the largest class, k - 1 more times. ``'exact'``: class by
        class, the datapoints of each, repeated in order up to the size of the largest class.
      unlabeled: the label of datapoints without a class, which are not repeated and, with ``'exact'``, come last. None
        if there is no such label.
      name: the field, for errors.

    Raises:
      InvalidArgumentError: for datapoints with several classes, as their counts cannot be balanced.
    """
    if strategy not in ('multiply', 'exact'):
        raise InvalidArgumentError(f"strategy: expected 'multiply' or 'exact', got {strategy!r}")
    array = as_labels(labels, name)
    if array.dtype == object:
        raise InvalidArgumentError(f'{name}: expected one class per datapoint for oversampling, got several')
    labeled = np.ones(len(array), bool)
    if unlabeled is not None and isinstance(unlabeled, str) == (array.dtype.kind == 'U'):
        labeled = array != as_labels([unlabeled], 'unlabeled')
    order = np.argsort(array, kind='stable')
    order = order[labeled[order]]
    edges = np.flatnonzero(array[order][1:] != array[order][:-1]) + 1
    groups = [group for group in np.split(order, edges) if len(group)]
    largest = max(map(len, groups), default=0)
    if strategy == 'multiply':
        repeats = [np.tile(group, largest // len(group) - 1) for group in groups]
        return np.concatenate([np.arange(len(array)), *repeats])
    return np.concatenate([*(np.resize(group, largest) for group in groups), np.flatnonzero(~labeled)])


def percent_range(
    length: int,
    from_percent: float | None = None,
    to_percent: float | None = None,
    ceil_from: bool = False,
    ceil_to: bool = False,
) -> tuple[int, int]:
    """Return the start and stop of a part of a dataset. Adjacent parts share no datapoint and omit none.

    A bound within 1e-15 of a whole datapoint is that datapoint: 0.29 of 100 is 29, although ``0.29 * 100 < 29``.

    Args:
      length: number of datapoints.
      from_percent: start of the part, from 0 to 1; None for 0.
      to_percent: end of the part, from 0 to 1; None for 1. 0 is empty.
      ceil_from, ceil_to: True to round the start or the end up to a whole datapoint, in place of down.
    """
    bounds = [0 if from_percent is None else from_percent, 1 if to_percent is None else to_percent]
    if not all(isinstance(p, int | float | np.integer | np.floating | Fraction) and 0 <= p <= 1 for p in bounds):
        raise InvalidArgumentError(
            f'expected from_percent and to_percent from 0 to 1, got {from_percent!r} and {to_percent!r}'
        )
    if bounds[0] > bounds[1]:
        raise InvalidArgumentError(f'expected from_percent <= to_percent, got {from_percent} and {to_percent}')
    start, stop = (_edge(length, p, ceil) for p, ceil in zip(bounds, (ceil_from, ceil_to), strict=True))
    return start, max(start, stop)


def repetitions_of(length: int, repetitions: int | None = None, min_size: int | None = None) -> int:
    """Return how often to repeat a dataset: ``repetitions`` times, or until it has at least ``min_size`` datapoints."""
    if (repetitions is None) == (min_size is None):
        raise InvalidArgumentError('expected either repetitions or min_size')
    name, value = ('repetitions', repetitions) if min_size is None else ('min_size', min_size)
    value = check_integer(name, value, 1)
    if not length:
        raise InvalidArgumentError('an empty dataset cannot be repeated: it would stay empty')
    return value if min_size is None else -(-value // length)


def shuffled(length: int, seed: int) -> Ints:
    """Return all indices in the order of numpy's ``default_rng(seed).shuffle``, as in KappaData."""
    indices = np.arange(length)
    np.random.default_rng(check_integer('seed', seed, 0)).shuffle(indices)
    return indices


def _checked(array: Labels, values: Any, name: str) -> Labels:
    if is_masked(type(values)) and np.any(values.mask):
        raise InvalidArgumentError(f'{name}: expected the label of each datapoint, got some with a mask')
    if not array.size:
        return np.zeros(0, np.int64)
    if array.dtype.kind == 'U' and all(isinstance(value, str) for value in values):
        if any(str.endswith(value, '\0') for value in values):
            raise InvalidArgumentError(f'{name}: expected classes without zeros at their end, which numpy drops')
        return array
    if array.dtype.kind not in 'biu':
        kinds = sorted({type(value).__name__ for value in values})
        raise InvalidArgumentError(f'{name}: expected classes that are integers or strings, got {", ".join(kinds[:5])}')
    if array.dtype.kind == 'u' and array.max() > np.iinfo(np.int64).max:
        raise OutOfRangeError(f'{name}: expected classes up to 2**63 - 1, got {array.max()}')
    return array.astype(np.int64)


def _edge(length: int, percent: Any, ceil: bool) -> int:
    # A float of numpy that is none of Python means the decimal number that it prints as.
    decimal = isinstance(percent, np.floating) and not isinstance(percent, float)
    exact = Fraction(str(percent) if decimal else percent)
    if ceil:
        return max(0, math.ceil((exact - _CLOSE) * length))
    return min(length, math.floor((exact + _CLOSE) * length))

"""Masks: the keys that are read, and of sequences and videos the values."""

from typing import Any

from granular._support.indexing import Ints, cut_to, indices_of, integers_of
from granular.aio.datasets.codec import Field, is_video
from granular.errors import InvalidArgumentError


def check_selection(selection: Any, field: Field, name: str) -> None:
    """Raise ``InvalidArgumentError`` if a mask cannot select this part of a field."""
    if not field.many and not is_video(field):
        raise InvalidArgumentError(
            f'{name}: key {field.key!r} is neither a sequence nor a video: expected True in the mask, got {selection!r}'
        )
    if isinstance(selection, range | slice):
        limits = (selection.start, selection.stop, selection.step)
        if selection.step == 0 or not all(limit is None or hasattr(limit, '__index__') for limit in limits):
            raise InvalidArgumentError(
                f'{name}: key {field.key!r}: expected integers as limits, and no step of 0, got {selection!r:.100}'
            )
        if isinstance(selection, range) and not 0 <= selection.start <= selection.stop:
            raise InvalidArgumentError(
                f'{name}: key {field.key!r}: expected 0 <= start <= stop, got {selection!r}: a list has values in any '
                f'order'
            )
    else:
        integers_of(selection, f'{name}: key {field.key!r}: the mask')


def picked(count: int, selection: Any, key: str, index: int, name: str) -> Ints | range:
    """Return which of so many values of a sequence a mask selects: ranges and slices are cut to its length; raise
    ``OutOfRangeError`` for a range that begins beyond the end of the sequence, or an index that it does not have.
    """
    if selection is True:
        return range(count)
    return indices_of(cut_to(selection, count), count, f'{name}: datapoint {index}, key {key!r}: the mask')

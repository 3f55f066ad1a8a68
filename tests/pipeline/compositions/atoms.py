"""Values that name themselves: the atoms that an element of any composition consists of can be read off it.

An atom is a positive integer: the number of its stream, its index there, its position within its document or within
the datapoint that ``flat_map`` divided, and a mark that random and numbered maps change, which does not belong to its
name. Zero is padding.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

MARKS: Final = 1 << 8
_POSITIONS: Final = 1 << 24
_INDICES: Final = 1 << 14
_BESIDE: Final = ('_segment_ids', '_positions')  # what pack adds to each feature


def atom(stream: int, index: int, position: int = 0) -> int:
    """Return the atom of a position in a datapoint of a stream, counted from 0."""
    return (((stream + 1) * _INDICES + index) * _POSITIONS + position) * MARKS


def name_of(value: int) -> int:
    """Return an atom without its mark."""
    return value // MARKS


def stream_of(name: int) -> int:
    """Return the number of the stream of an atom."""
    return name // _POSITIONS // _INDICES - 1


def read(name: int) -> str:
    """Return an atom for a message: stream:index, and .position unless it is 0."""
    datapoint, position = divmod(name, _POSITIONS)
    return f'{stream_of(name)}:{datapoint % _INDICES}{f".{position}" if position else ""}'


def divided(value: int, parts: int) -> list[int]:
    """Divide an atom into others, for ``flat_map``: positions name what it was divided from."""
    name, mark = divmod(value, MARKS)
    datapoint, position = divmod(name, _POSITIONS)
    return [(datapoint * _POSITIONS + (position * 5 + part + 1) % _POSITIONS) * MARKS + mark for part in range(parts)]


def atoms(element: Any) -> list[int]:
    """Return the atoms of an element, without their marks, in its order."""
    return [name_of(value) for value in values(element)]


def values(element: Any) -> Iterator[int]:
    """Yield the atoms of an element, with their marks, in its order."""
    if isinstance(element, dict):
        # Of a document and of a packed row, the feature 'tokens' names everything; the others say it again.
        yield from values(element['tokens'])
    elif isinstance(element, list | tuple):
        for part in element:
            yield from values(part)
    elif isinstance(element, np.ndarray) and element.dtype != object:
        yield from (value for value in element.ravel().tolist() if value)
    elif isinstance(element, np.ndarray):
        yield from values(element.tolist())
    elif element:
        yield int(element)


def plain(element: Any) -> Any:
    """Return an element as JSON has it, with dtypes, to compare it with another one exactly."""
    if isinstance(element, dict):
        return {key: plain(value) for key, value in element.items()}
    if isinstance(element, list | tuple):
        return [type(element).__name__, *map(plain, element)]
    if isinstance(element, np.ndarray):
        return [element.dtype.str, plain(element.tolist()) if element.dtype == object else element.tolist()]
    return element.item() if isinstance(element, np.generic) else element


class Stream(Sequence[Any]):
    """The datapoints of a stream: atoms, or documents of atoms. As a data source, its name and length identify it."""

    def __init__(self, stream: int, length: int, documents: bool = False) -> None:
        self._stream, self._length, self._documents = stream, length, documents

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(index)
        if not self._documents:
            return atom(self._stream, index)
        size = 1 + (index * 5 + self._stream * 3) % 7
        return document([atom(self._stream, index, position) for position in range(size)])

    def __repr__(self) -> str:
        return f'Stream({self._stream}, {self._length}{", documents=True" if self._documents else ""})'


def document(values: Sequence[int]) -> dict[str, Any]:
    """Return a document of atoms, with a feature that ``pack`` may change and a label."""
    tokens = np.array(values, np.int64)
    return {'tokens': tokens, 'ids': tokens.copy(), 'label': len(tokens) % 3}

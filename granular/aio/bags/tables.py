"""Tables of numbers, such as limits of records, that many bags share: in memory, or in the index of their dataset."""

import abc
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import Ints
from granular.formats.dataset_index import ANY, RUNS, SAME


class Tables(abc.ABC):
    """Tables of numbers, read many at a time. Each has a number."""

    @abc.abstractmethod
    async def read(self, tables: Ints, positions: Ints) -> tuple[Ints, Ints]:
        """Return the numbers at some positions of some tables, and the numbers that follow them."""


class ArrayTables(Tables):
    """Tables in one array, one behind the other; the number of a table is its first position in the array."""

    def __init__(self, numbers: Ints) -> None:
        self._numbers = numbers

    @classmethod
    def join(cls, tables: Sequence[Ints]) -> tuple['ArrayTables', list[int]]:
        """Return tables, at least one, that are in arrays of their own, and the number of each.

        Those that are parts of one array, such as a file that is mapped into memory, are not copied.
        """
        base = tables[0].base
        if isinstance(base, np.ndarray) and base.dtype == np.int64 and all(table.base is base for table in tables):
            first = base.ctypes.data
            return cls(base), [(table.ctypes.data - first) // base.itemsize for table in tables]
        return cls.joined([cls(table) for table in tables])

    @classmethod
    def joined(cls, tables: Sequence['ArrayTables']) -> tuple['ArrayTables', list[int]]:
        """Return a copy of several tables, one behind the other, and the number by which those of each have moved."""
        ends = np.cumsum([len(own._numbers) for own in tables])
        return cls(np.concatenate([own._numbers for own in tables])), [0, *ends[:-1].tolist()]

    @property
    def nbytes(self) -> int:
        return self._numbers.nbytes

    def part(self, number: int, length: int) -> Ints:
        """Return a table with so many numbers."""
        return self._numbers[number : number + length]

    async def read(self, tables: Ints, positions: Ints) -> tuple[Ints, Ints]:
        at = tables + positions
        return self._numbers[at], self._numbers[at + 1]


class PackedTables(Tables):
    """Tables in the index of a dataset, in memory or not."""

    @abc.abstractmethod
    def read_one(self, table: int, position: int) -> tuple[int, int]:
        """Return the number at a position, and the next one, of tables that are in memory."""

    @abc.abstractmethod
    def digest(self, table: int) -> str: ...

    @property
    @abc.abstractmethod
    def in_memory(self) -> bool:
        """True if no number has to be fetched."""


class PackedTable:
    """One of the tables."""

    __slots__ = ('number', 'tables')

    def __init__(self, tables: PackedTables, number: int) -> None:
        self.tables, self.number = tables, number

    def pair(self, position: int) -> tuple[int, int]:
        """Return the number at a position, and the next one, of a table in memory."""
        return self.tables.read_one(self.number, position)

    @property
    def digest(self) -> str:
        return self.tables.digest(self.number)


class PackedReferences:
    """The references of one shard in an index: for each key, up to two of its tables, which lie one behind the other
    from ``first`` on. None if datapoint i has record i; the limits of the datapoints in the records; or the first
    records, and the numbers of records.
    """

    __slots__ = ('first', 'kinds', 'tables')

    def __init__(self, tables: PackedTables, first: int, kinds: NDArray[np.uint8]) -> None:
        self.tables = tables
        self.first = first
        self.kinds = kinds

    def at_one(self, index: int) -> list[tuple[int, int]]:
        """Return the first record and the number of records of each key of one datapoint, from memory."""
        out = []
        for key, kind in enumerate(self.kinds.tolist()):
            if kind == SAME:
                out.append((index, 1))
                continue
            number = self.first + 2 * key
            first, following = self.tables.read_one(number, index)
            count = self.tables.read_one(number + 1, index)[0] if kind == ANY else following - first
            out.append((first, count))
        return out


async def read_packed_references(
    tables: PackedTables, kinds: NDArray[np.uint8], first: Ints, sizes: Ints, indices: Ints
) -> tuple[Ints, Ints]:
    """Return the first record and the number of records, both of shape (datapoints, keys), of so many datapoints of
    each of some shards of one index, by one look-up: of the shards that have these ``PackedReferences``.
    """
    firsts, counts = indices[:, None].repeat(kinds.shape[1], axis=1), np.ones((len(indices), kinds.shape[1]), np.int64)
    if not kinds.any():
        return firsts, counts
    kinds, first = kinds.repeat(sizes, axis=0), first.repeat(sizes)
    point, key = np.nonzero(kinds >= RUNS)
    any_point, any_key = np.nonzero(kinds == ANY)
    lefts, rights = await tables.read(
        np.concatenate([first[point] + 2 * key, first[any_point] + 2 * any_key + 1]),
        np.concatenate([indices[point], indices[any_point]]),
    )
    firsts[point, key] = lefts[: len(point)]
    counts[point, key] = rights[: len(point)] - lefts[: len(point)]
    counts[any_point, any_key] = lefts[len(point) :]
    return firsts, counts

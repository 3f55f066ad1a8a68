"""Limits and references in the tables of a dataset's index, which bags and datasets share."""

import abc
from collections.abc import Iterator, Sequence

import numpy as np

from granular.formats.dataset_index import ANY, SAME
from granular.indexing import Ints


class PackedTables(abc.ABC):
    """Tables of numbers, read many at a time."""

    @abc.abstractmethod
    async def read(self, tables: Ints, positions: Ints) -> tuple[Ints, Ints]:
        """Return the numbers at some positions of some tables, and the numbers that follow them."""

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
    """One of the tables, with ``length`` positions."""

    __slots__ = ('length', 'number', 'tables')

    def __init__(self, tables: PackedTables, number: int, length: int) -> None:
        self.tables, self.number, self.length = tables, number, length

    def __getitem__(self, position: int) -> int:
        """Return the number at a position from 0 to ``length``, of a table in memory."""
        if position < self.length:
            return self.tables.read_one(self.number, position)[0]
        return self.tables.read_one(self.number, position - 1)[1] if position else 0

    @property
    def digest(self) -> str:
        return self.tables.digest(self.number)


async def read_tables(requests: Sequence[tuple[PackedTable, Ints]]) -> list[tuple[Ints, Ints]]:
    """Return, for each request, the numbers at its positions and the numbers that follow: one fan-out per index."""
    out: list[tuple[Ints, Ints]] = [(positions, positions) for _, positions in requests]
    for tables in {id(table.tables): table.tables for table, _ in requests}.values():
        chosen = [i for i, (table, _) in enumerate(requests) if table.tables is tables]
        counts = [len(requests[i][1]) for i in chosen]
        numbers = np.repeat([requests[i][0].number for i in chosen], counts)
        lefts, rights = await tables.read(numbers, np.concatenate([requests[i][1] for i in chosen]))
        ends = np.cumsum(counts).tolist()
        for i, end, count in zip(chosen, ends, counts, strict=True):
            out[i] = lefts[end - count : end], rights[end - count : end]
    return out


class PackedReferences:
    """The references of one shard in an index: for each key, its tables. None if datapoint i has record i; the limits
    of the datapoints in the records; or the first records, and the numbers of records.
    """

    def __init__(self, tables: Sequence[tuple[PackedTable, ...]]) -> None:
        self.tables = tables

    def fill(self, firsts: Ints, counts: Ints, results: Iterator[tuple[Ints, Ints]]) -> None:
        """Fill in the first record and the number of records of each key, both of shape (datapoints, keys), given an
        iterator over what the tables have for the datapoints; ``firsts`` has their indices, and ``counts`` ones.
        """
        for key, tables in enumerate(self.tables):
            if len(tables) != SAME:
                first, following = next(results)
                firsts[:, key] = first
                counts[:, key] = next(results)[0] if len(tables) == ANY else following - first

    def at_one(self, index: int) -> list[tuple[int, int]]:
        """Return the first record and the number of records of each key of one datapoint, from memory."""
        out = []
        for tables in self.tables:
            if len(tables) == SAME:
                out.append((index, 1))
                continue
            first, following = tables[0].tables.read_one(tables[0].number, index)
            count = tables[1].tables.read_one(tables[1].number, index)[0] if len(tables) == ANY else following - first
            out.append((first, count))
        return out

"""Datapoints of many datasets, which are given by numbers in arrays."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Self

import numpy as np

from granular._support.indexing import Ints, owner_of
from granular.aio.bags.records import Bags
from granular.aio.bags.tables import PackedReferences, read_packed_references
from granular.aio.datasets.columns import Columns
from granular.aio.datasets.references import Referenced, References

BAGS: Final = 0
"""References are read from their bags."""
MEMORY: Final = 1
"""References are in memory: ``References``. Any other source is the ``id`` of the index of ``PackedReferences``."""

_FIRST: Final = np.zeros(1, np.int64)


class Datasets:
    """Datasets that share a spec, a layout and a store, by number, with what a batch needs of each in arrays.

    Not every number has a dataset; ``first`` is any of them.
    """

    __slots__ = ('_columns', '_filled', '_kinds', '_tables', 'bags', 'first', 'references', 'sources')

    def __init__(self, first: Columns, count: int) -> None:
        self.first = first
        self._columns: list[Any] = [None] * count
        self._filled = np.zeros(count, np.bool_)
        # Key by key, those of one key in the order of the datasets, and the references behind those of all keys.
        self.bags = Bags(count * len(first.all_bags))
        self.references: list[References | PackedReferences | None] = [None] * count
        self.sources: Ints = np.full(count, BAGS)  # of the references
        self._tables: Ints = np.zeros(count, np.int64)  # the first one, and kinds, of ``PackedReferences``
        self._kinds = np.zeros((count, len(first.spec)), np.uint8)

    @classmethod
    def of(cls, datasets: Sequence[Columns]) -> Self:
        """Return datasets, each at its position."""
        out = cls(datasets[0], len(datasets))
        for number, columns in enumerate(datasets):
            out.put(number, columns)
        return out

    def missing(self, numbers: Ints) -> list[int]:
        """Return those of some numbers that have no dataset."""
        filled = self._filled[numbers]
        return [] if filled.all() else numbers[~filled].tolist()

    def put(self, number: int, columns: Columns) -> None:
        """Add an opened dataset; raise ``ClosedError`` if it is closed."""
        references = columns.references
        self._columns[number], self.references[number] = columns, references
        if isinstance(references, PackedReferences):
            self.sources[number] = id(references.tables)
            self._tables[number], self._kinds[number] = references.first, references.kinds
        elif references is not None:
            self.sources[number] = MEMORY
        bags = [columns.bags[key] for key in self.first.spec]
        for i, bag in enumerate(bags if columns.refs is None else [*bags, columns.refs]):
            self.bags.put(i * len(self._columns) + number, bag)
        self._filled[number] = True  # last, as another thread may read it then

    def columns(self, number: int) -> Columns:
        columns: Columns = self._columns[number]
        return columns

    def owners(self, key: int, numbers: Ints) -> Ints:
        """Return the numbers of the bags of a key, by its position in the spec; one behind the last for references."""
        return numbers + key * len(self._columns)

    async def read_packed(self, numbers: Ints, counts: Ints, indices: Ints) -> Referenced:
        """Return the references of datapoints of shards of one index."""
        packed: Any = self.references[numbers[0]]
        first, kinds = self._tables[numbers], self._kinds[numbers]
        return await read_packed_references(packed.tables, kinds, first, counts, indices)


def alone(columns: Columns) -> Datasets:
    """Return a dataset as ``Datasets``, with number 0."""
    datasets: Datasets | None = columns.alone
    if datasets is None:
        datasets = columns.alone = Datasets.of([columns])
    return datasets


class Divided(NamedTuple):
    """Positions by the datasets that have them, as ``Picks``."""

    numbers: Ints
    counts: Ints
    indices: Ints
    order: Ints | None  # the place of each among the positions; None if they are in that order


class Concatenation:
    """Datasets of so many datapoints, one behind the other."""

    def __init__(self, lengths: Ints) -> None:
        self._stops: Ints = np.cumsum(lengths)
        self.starts: Ints = self._stops - lengths
        self.length: int = int(self._stops[-1]) if len(lengths) else 0

    def find(self, positions: Any) -> Any:
        """Return the number of the dataset of a position, or of each of several."""
        return self._stops.searchsorted(positions, side='right')

    def divide(self, positions: Ints) -> Divided:
        """Return where positions are."""
        numbers, order = self.find(positions), None
        if (numbers[1:] < numbers[:-1]).any():
            order = numbers.argsort(kind='stable')
            numbers, positions = numbers[order], positions[order]
        bounds = np.concatenate((_FIRST, np.flatnonzero(numbers[1:] != numbers[:-1]) + 1, [len(numbers)]))
        first = bounds[:-1]
        return Divided(numbers[first], bounds[1:] - first, positions - self.starts[numbers], order)


class Picks(NamedTuple):
    """Datapoints of many datasets: so many of each, given by their indices, one dataset behind the other."""

    datasets: Datasets
    numbers: Ints  # of each dataset
    counts: Ints
    indices: Ints

    @classmethod
    def of(cls, columns: Columns, indices: Ints) -> Self:
        """Return datapoints of one dataset."""
        return cls(alone(columns), np.zeros(1, np.int64), np.array([len(indices)]), indices)

    @property
    def is_remote(self) -> bool:
        return self.datasets.first.is_remote

    def locate(self, position: int) -> tuple[Columns, int]:
        """Return the dataset of the datapoint at a position, and its index in it."""
        return self.columns(owner_of(self.counts, position)), int(self.indices[position])

    def columns(self, position: int) -> Columns:
        """Return the dataset at a position among those of ``numbers``."""
        return self.datasets.columns(int(self.numbers[position]))

    def record_owners(self, key: int) -> Ints:
        return self.datasets.owners(key, self.numbers)

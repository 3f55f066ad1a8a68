"""Readers of datasets whose datapoints are read together, as those of one."""

import abc
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import Ints, indices_of, owner_of
from granular._support.typing import Datapoint_co
from granular.aio.bags.identity import PinnedSource
from granular.aio.datasets.column_reads import Read, as_datapoints, read_columns, read_stored
from granular.aio.datasets.columns import Choice, Columns
from granular.aio.datasets.picks import Concatenation, Datasets, Picks
from granular.aio.pipeline.data_source import Joint
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import Calls
from granular.config import MiB

T = TypeVar('T')

_JOINED: Final = 64 * MiB  # limits that are copied, so that those of all readers are looked up at once


class Joinable(PinnedSource[Datapoint_co]):
    """A reader of one dataset or of several, whose datapoints can be read together with those of other readers."""

    _name: str  # of the reader, in errors

    @property
    @abc.abstractmethod
    def _datasets(self) -> Datasets:
        """The datasets, of which some may not be filled in yet; another object once one of them was replaced."""

    @abc.abstractmethod
    def _columns_of(self, number: int) -> Columns:
        """Return the columns of a dataset."""

    @abc.abstractmethod
    def _opened_columns(self) -> dict[int, Columns]:
        """Return the columns, by number, of the datasets that were opened by their own tables."""

    @abc.abstractmethod
    def _lengths(self) -> Ints:
        """Return the number of datapoints of each dataset."""

    @abc.abstractmethod
    def _unproven(self) -> NDArray[np.bool_]:
        """Return for each dataset whether it is still to be compared with the index that it was opened by."""

    @abc.abstractmethod
    async def _prove(self, positions: Ints) -> None:
        """Compare what datapoints are read from with the index that it was opened by, if that is still to be done."""


class JointReader(Joint):
    """Open readers with one spec, decoders and store.

    All datasets have a number, and are filled in once they are read: what they have does not change, as a read may
    be in progress. Readers with a dataset that was replaced need another object.
    """

    def __init__(self, readers: Sequence[Any]) -> None:
        own: Sequence[Joinable[Any]] = readers
        self._readers = own
        self._places = {id(reader): place for place, reader in enumerate(own)}
        self._seen = [reader._datasets for reader in own]
        lengths = [reader._lengths() for reader in own]
        counts = np.array(list(map(len, lengths)))
        self._concatenation = Concatenation(np.concatenate(lengths))
        self._owners = np.arange(len(own)).repeat(counts)  # the reader of each dataset
        self._firsts = np.cumsum(counts) - counts  # the number of the first dataset of each reader
        self._sizes = np.array(list(map(len, own)))
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._unproven = np.concatenate([reader._unproven() for reader in own])
        self._datasets = Datasets(own[0]._datasets.first, len(self._owners))
        for reader, first in zip(own, self._firsts.tolist(), strict=True):
            for number, columns in reader._opened_columns().items():
                self._datasets.put(first + number, columns)
        self._datasets.bags.join_tables(_JOINED)

    def fits(self, sources: Sequence[Any]) -> bool:
        places, seen = self._places, self._seen
        for source in sources:
            place = places.get(id(source))
            if place is None or source._datasets is not seen[place]:
                return False
        return True

    async def fetch(self, sources: Sequence[Any], counts: Sequence[int], indices: Ints, mask: Any) -> list[Any]:
        values, choices, order = await self._read_by(read_columns, sources, counts, indices, mask)
        return as_datapoints(values, choices, len(indices), order)

    async def fetch_undecoded(
        self, sources: Sequence[Any], counts: Sequence[int], indices: Ints, mask: Any
    ) -> Calls[list[Any]]:
        stored, choices, order = await self._read_by(read_stored, sources, counts, indices, mask)
        return stored.decoding().then(lambda values: as_datapoints(values, choices, len(indices), order))

    async def _read_by(
        self, read: Read[T], sources: Sequence[Any], counts: Sequence[int], indices: Ints, mask: Any
    ) -> tuple[T, Sequence[Choice], Ints | None]:
        """Return what a function reads of datapoints, their fields, and the position of each in what was requested,
        None if they are in that order.
        """
        owners = np.array([self._places[id(source)] for source in sources])
        sizes = np.array(counts)
        positions = self._positions(owners, sizes, indices)
        numbers, own, within, order = self._concatenation.divide(positions)
        if self._unproven[numbers].any():
            await self._prove(numbers[self._unproven[numbers]])
            if not self.fits(sources):
                own_readers = list({id(source): source for source in sources}.values())
                return await JointReader(own_readers)._read_by(read, sources, counts, indices, mask)
        for number in self._datasets.missing(numbers):
            owner = int(self._owners[number])
            self._datasets.put(number, self._readers[owner]._columns_of(number - int(self._firsts[owner])))
        choices = self._datasets.first.choose(mask)
        return await read(Picks(self._datasets, numbers, own, within), choices), choices, order

    def _positions(self, owners: Ints, counts: Ints, indices: Ints) -> Ints:
        """Return the positions of indices, so many of each of some readers, among the datapoints of all readers."""
        sizes = self._sizes[owners].repeat(counts)
        wrong = (indices >= sizes) | (indices < -sizes)
        if wrong.any():
            position = int(wrong.argmax())
            reader = self._readers[owners[owner_of(counts, position)]]
            indices_of(indices[position : position + 1], len(reader), f'{reader.directory}')  # raises the error
        positions: Ints = np.where(indices < 0, indices + sizes, indices) + self._starts[owners].repeat(counts)
        return positions

    async def _prove(self, numbers: Ints) -> None:
        await to_loop()
        owners = self._owners[numbers]
        firsts = self._concatenation.starts[numbers]
        await gather(
            [
                self._readers[owner]._prove(firsts[owners == owner] - self._starts[owner])
                for owner in sorted(set(owners.tolist()))
            ]
        )
        self._unproven[numbers] = False

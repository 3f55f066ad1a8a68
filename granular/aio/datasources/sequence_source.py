"""Base of data sources whose datapoints have no fields to choose: a slice of them is a list."""

import abc
from typing import Any, SupportsIndex, overload

import numpy as np

from granular._typing import Datapoint_co
from granular.aio.pipeline.data_source import OpenedDataSource
from granular.indexing import Ints, index_of, indices_of


class SequenceSource(OpenedDataSource[Datapoint_co]):
    """A data source that reads whole datapoints by their positions."""

    _name: str  # for errors

    @abc.abstractmethod
    async def _read_all(self, positions: Ints) -> list[Datapoint_co]:
        """Return the datapoints at positions, which exist."""

    async def _read_one(self, position: int) -> Datapoint_co:
        return (await self._read_all(np.array([position])))[0]

    @overload
    async def get(self, index: SupportsIndex) -> Datapoint_co: ...
    @overload
    async def get(self, index: slice | range) -> list[Datapoint_co]: ...
    async def get(self, index: SupportsIndex | slice | range) -> Datapoint_co | list[Datapoint_co]:
        """Return the datapoint at an index, negative from the end, or those of a slice.

        Raises:
          OutOfRangeError: an ``IndexError``.
        """
        await self._ensure_open()
        if isinstance(index, slice | range):
            return await self.fetch(index)
        return await self._read_one(index_of(index, len(self), self._name))

    async def fetch(self, indices: Any) -> list[Datapoint_co]:
        await self._ensure_open()
        return await self._read_all(indices_of(indices, len(self), self._name))

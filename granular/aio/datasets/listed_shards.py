"""The shards of a dataset that were listed, and opened each by its own tables."""

from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from granular.aio.bags.identity import FileIdentity
from granular.aio.bags.index_cache import FolderState
from granular.aio.datasets.columns import Mask
from granular.aio.datasets.dataset import Dataset, all_or_none
from granular.indexing import Ints

T = TypeVar('T')


class ListedShards(tuple[Dataset, ...]):
    """Shards by their position among those that are read, with the methods of ``IndexedShards``."""

    __slots__ = ()

    def copy(self) -> 'ListedShards':
        """Return independently closable shards that share what is cached."""
        return ListedShards(dataset.copy() for dataset in self)

    def close(self) -> None:
        """Close the shards."""
        for dataset in self:
            dataset.columns.close()

    def lengths(self) -> Ints:
        """Return the number of datapoints of each shard."""
        return np.array([dataset.columns.length for dataset in self], np.int64)

    def size(self, mask: Mask = None) -> int:
        """Return the bytes of the bags that a mask selects, tables included."""
        return sum(dataset.columns.size_of(mask) for dataset in self)

    def files(self) -> dict[str, FileIdentity]:
        """Return the identities of all bags, by shard and file name."""
        return {
            f'{dataset.directory.name}/{file}': identity
            for dataset in self
            for file, identity in dataset.files().items()
        }

    def states(self) -> dict[str, FolderState] | None:
        """Return the states of the shards by name; None unless all are complete."""
        return all_or_none({dataset.directory.name: dataset.state() for dataset in self})

    def warn_of_lengths(self) -> None:
        """Warn if the bags of a shard differ in length."""
        for dataset in self:
            dataset.warn_of_lengths()

    async def read(self, positions: Ints, reading: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine that reads shards."""
        return await reading

    async def replace(self, positions: Sequence[int]) -> bool:
        """Return False: the replacement of a shard is an error."""
        return False

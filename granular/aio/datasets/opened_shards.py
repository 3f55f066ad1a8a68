"""Base of the shards of a dataset that are read, by their position among those."""

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping

from granular._support.indexing import Ints
from granular.aio.bags.identity import FileIdentity
from granular.aio.datasets.dataset import Dataset
from granular.aio.datasets.picks import Datasets


class OpenedShards(abc.ABC):
    """Shards by their position among those that are read.

    ``own`` has those that were opened by their own tables. The others are made when they are first used.

    Args:
      create: returns the unopened dataset of a shard's name.
    """

    def __init__(self, create: Callable[[str], Dataset]) -> None:
        self._create = create
        self.own: dict[int, Dataset] = {}
        self._made: dict[int, Dataset] = {}
        self._datasets: Datasets | None = None  # the shards that were read

    def close(self) -> None:
        for dataset in (*self.own.values(), *self._made.values()):
            dataset.columns.close()
        self._datasets = None

    @abc.abstractmethod
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Dataset]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, position: int) -> Dataset:
        dataset = self.own.get(position) or self._made.get(position)
        if dataset is None:
            dataset = self._made[position] = self._make(position)
        return dataset

    @abc.abstractmethod
    def _make(self, position: int) -> Dataset:
        """Return a shard that was not opened by its own tables."""

    @abc.abstractmethod
    def _shard_name(self, position: int) -> str: ...

    @property
    def all_datasets(self) -> Datasets:
        """The shards by position, of which those are filled in that were read; another object once more were opened, or
        one was replaced.
        """
        if (datasets := self._datasets) is None:
            datasets = self._datasets = Datasets(self[0].columns, len(self))
        return datasets

    def datasets(self, positions: Ints) -> Datasets:
        """Return datasets that have the columns of some shards, at their positions."""
        datasets = self.all_datasets
        for i in datasets.missing(positions):
            datasets.put(i, self[i].columns)
        return datasets

    def files(self) -> dict[str, FileIdentity]:
        """Return the identities of all bags, by shard and file name."""
        out = {}
        for i in range(len(self)):
            name, files = self._shard_name(i), self.own[i].files() if i in self.own else self._identities(i)
            out.update({f'{name}/{file}': identity for file, identity in files.items()})
        return out

    def among(self, files: Mapping[str, FileIdentity], positions: Iterable[int]) -> dict[str, FileIdentity]:
        """Return those of some files, by shard and file name, that are of some shards."""
        names = {self._shard_name(i) for i in positions}
        return {file: identity for file, identity in files.items() if file.partition('/')[0] in names}

    @abc.abstractmethod
    def _identities(self, position: int) -> dict[str, FileIdentity]:
        """Return the identities of the bags of a shard that was not opened by its own tables, by file name."""

    def warn_of_lengths(self) -> None:
        for dataset in self.own.values():
            dataset.warn_of_lengths()

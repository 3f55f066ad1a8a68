"""The shards of a dataset that was opened by its index, each made when it is first used."""

import copy
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from granular._words import logger
from granular.aio.bags.identity import FileIdentity, check_files
from granular.aio.bags.index_cache import FolderState, Snapshot
from granular.aio.datasets.codec import Field
from granular.aio.datasets.columns import Datasets, Mask
from granular.aio.datasets.dataset import Dataset, all_or_none
from granular.aio.datasets.index import DatasetIndex
from granular.aio.paths.path import Path
from granular.aio.runtime.tasks import gather
from granular.errors import GranularError, ObjectChangedError
from granular.formats.layout import shard_name
from granular.indexing import Ints

T = TypeVar('T')

_REMEDY: Final = 'run `granular index` on it, or open it with index=False'


class IndexedShards:
    """Shards by their position among those that are read.

    A shard that was replaced or added since the index was built is read by its own tables: ``own`` has it by position.

    Args:
      numbers: the number of each shard.
      create: returns the unopened dataset of a shard's name.
    """

    def __init__(
        self,
        directory: Path,
        index: DatasetIndex,
        numbers: Ints,
        fields: Sequence[Field],
        create: Callable[[str], Dataset],
    ) -> None:
        self._directory, self._name = directory, f'{directory}'
        self.index, self._numbers, self._fields, self._create = index, numbers, fields, create
        self.own: dict[int, Dataset] = {}
        self._made: dict[int, Dataset] = {}
        self._datasets: Datasets | None = None  # the shards that were read
        # Shards that may have been replaced since the index was built: all of them, until they are compared. A later
        # replacement is an error, as without an index.
        self.unchecked: NDArray[np.bool_] = np.ones(len(numbers), np.bool_)
        self._warned = False

    def copy(self) -> 'IndexedShards':
        """Return independently closable shards that share the index."""
        shards = copy.copy(self)
        shards.own = {i: dataset.copy() for i, dataset in self.own.items()}
        shards._made = {i: dataset.copy() for i, dataset in self._made.items()}
        shards._datasets = None
        # A shard that one of them reads by its own tables from now on may be the indexed one in the other.
        shards.unchecked = self.unchecked.copy()
        return shards

    def close(self) -> None:
        for dataset in (*self.own.values(), *self._made.values()):
            dataset.columns.close()
        self._datasets = None

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Dataset]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, position: int) -> Dataset:
        dataset = self.own.get(position) or self._made.get(position)
        if dataset is None:
            dataset = self._create(self._shard_name(position))
            dataset.open_indexed(self.index, int(self._numbers[position]), self._fields)
            self._made[position] = dataset
        return dataset

    def datasets(self, positions: Ints) -> Datasets:
        """Return datasets that have the columns of some shards, at their positions."""
        if (datasets := self._datasets) is None:
            datasets = self._datasets = Datasets(self[0].columns, len(self))
        for i in datasets.missing(positions):
            datasets.put(i, self[i].columns)
        return datasets

    def _shard_name(self, position: int) -> str:
        return shard_name(int(self._numbers[position]))

    async def open_own(self, positions: Iterable[int], folders: Mapping[int, FolderState] | None = None) -> None:
        """Open shards by their own tables, or by their states."""
        for i in positions:
            self.own[i] = self._create(self._shard_name(i))
        states = {self._shard_name(i): state for i, state in (folders or {}).items()}
        await gather([dataset.open(Snapshot('', states) if states else None) for dataset in self.own.values()])
        for dataset in self.own.values():
            self._check_spec(dataset)

    async def open_like(self, expected: Mapping[str, FileIdentity]) -> None:
        """Open the shards by their own tables whose tables a reader told by versions, which the index does not have."""
        by_version = {file.rpartition('/')[0] for file, told in expected.items() if told.table and not told.has_digest}
        own = [i for i in range(len(self)) if i not in self.own and self._shard_name(i) in by_version]
        for i, dataset in zip(own, await gather([self._open(i) for i in own]), strict=True):
            self.own[i] = dataset

    async def read_extras(self) -> None:
        """Read what ``cache_keys`` and ``verify`` need in memory."""
        await gather([dataset.read_extras() for i, dataset in enumerate(self) if i not in self.own])

    async def check_unchanged(self) -> None:
        """Check that the shards which were opened by their own tables were not replaced meanwhile."""
        await gather([dataset.check_unchanged() for dataset in self.own.values()])

    def _check_spec(self, dataset: Dataset) -> None:
        expected = self.index.directory
        dataset.columns.check_spec(expected.spec, expected.layout, f'the index of {self._name}')

    # --- what was opened

    def lengths(self) -> Ints:
        return self._values(self.index.lengths, lambda dataset: dataset.columns.length)

    def size(self, mask: Mask = None) -> int:
        keys = None if mask is None else [choice.field.key for choice in self[0].columns.choose(mask)]
        return int(self._values(self.index.sizes(keys), lambda dataset: dataset.columns.size_of(mask)).sum())

    def _values(self, indexed: Ints, of: Callable[[Dataset], int]) -> Ints:
        values = indexed[np.minimum(self._numbers, len(indexed) - 1)]
        for i, dataset in self.own.items():
            values[i] = of(dataset)
        return values

    def files(self) -> dict[str, FileIdentity]:
        """Return the identities of all bags, by shard and file name."""
        out = {}
        for i, number in enumerate(self._numbers.tolist()):
            files = self.own[i].files() if i in self.own else self.index.file_identities(number)
            out.update({f'{shard_name(number)}/{file}': identity for file, identity in files.items()})
        return out

    def states(self) -> dict[int, FolderState] | None:
        """Return the states of the shards that were opened by their own tables; None unless all are complete."""
        return all_or_none({i: dataset.state() for i, dataset in self.own.items()})

    def warn_of_lengths(self) -> None:
        for dataset in self.own.values():
            dataset.warn_of_lengths()
        if self.index.directory.kinds is None:
            records = self.index.directory.rows['records']
            uneven = np.flatnonzero(records.min(axis=1) != records.max(axis=1))
            for i in np.flatnonzero(np.isin(self._numbers, uneven)).tolist():
                if i not in self.own:
                    self[i].warn_of_lengths()

    async def read(self, positions: Ints, reading: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine that reads shards, of which each is compared with the index once. Raise
        ``ObjectChangedError`` if one was replaced: call ``replace``, and read again.
        """
        if self.unchecked[positions].any():
            both: list[Any] = await gather([reading, self._check(positions.tolist())])
            values: T = both[0]
            return values
        return await reading

    # --- shards that were replaced

    def warn(self, reason: str) -> None:
        """Log once that the index does not match the shards."""
        if not self._warned:
            self._warned = True
            logger.warning(
                'the index of %s is outdated: %s: read by their own tables: run `granular index` on it',
                self._name,
                reason,
            )

    def outdated(self, error: GranularError) -> ObjectChangedError:
        """Return the error for a file of a shard that is not the one in the index, where it cannot be replaced."""
        return ObjectChangedError(f'{error}; or since the index of {self._name} was built: {_REMEDY}')

    async def find_replaced(self, positions: Iterable[int]) -> list[int]:
        """Return the shards that are not those in the index. Each is compared once."""
        unchecked = [i for i in positions if self.unchecked[i] and i not in self.own]
        replaced = await gather([self._differs(i) for i in unchecked])
        self.unchecked[unchecked] = replaced
        return [i for i, is_replaced in zip(unchecked, replaced, strict=True) if is_replaced]

    async def _check(self, positions: Iterable[int]) -> None:
        if replaced := await self.find_replaced(positions):
            raise ObjectChangedError(
                f'{self._name}: {len(replaced)} shards were replaced since its index was built, such as '
                f'{self._shard_name(replaced[0])}'
            )

    async def _differs(self, position: int) -> bool:
        return await self.index.is_shard_replaced(self._directory, int(self._numbers[position]))

    async def replace(self, positions: Sequence[int]) -> bool:
        """Open shards by their own tables if they are not those in the index, or if its pages can no longer be read.
        Return whether there were any. Raise ``ObjectChangedError`` if such a shard has another number of datapoints, or
        was replaced since it was compared, or if the index was replaced, too: other shards would be those of the former
        dataset.
        """
        indexed = [i for i in positions if i not in self.own]
        changed = await gather([self._is_replaced(i) for i in indexed])
        stale = [i for i, is_replaced in zip(indexed, changed, strict=True) if is_replaced and self.unchecked[i]]
        if not stale and (any(changed) or self.index.in_memory):
            return False
        is_replaced = await self.index.is_replaced()
        if not stale and not is_replaced:
            return False
        if stale and is_replaced:
            raise ObjectChangedError(
                f'{self._name}: was written anew since it was opened, or its index was: shard '
                f'{self._shard_name(stale[0])} is not the one that was opened: open a new reader'
            )
        stale = stale or indexed
        for i, dataset in zip(stale, await gather([self._open(i) for i in stale]), strict=True):
            self.own[i] = dataset
        self._datasets = None  # a read that has it continues with the shards that it began with
        if stale:
            name = self._shard_name(stale[0])
            self.warn(f'{len(stale)} of {len(positions)} shards that were read were replaced, such as {name}')
        return bool(stale)

    async def _is_replaced(self, position: int) -> bool:
        try:
            await check_files([file for bag in self[position].columns.all_bags.values() for file in bag.files])
        except ObjectChangedError:
            return True
        except self._directory.store.absent:
            return True
        return await self._differs(position)

    async def _open(self, position: int) -> Dataset:
        number, dataset = int(self._numbers[position]), self._create(self._shard_name(position))
        await dataset.open_unchanged()
        self._check_spec(dataset)
        expected, actual = int(self.index.lengths[number]), dataset.columns.length
        if actual != expected:
            raise ObjectChangedError(
                f'{dataset.name}: was replaced since the index of {self._name} was built: expected {expected} '
                f'datapoints, got {actual}: {_REMEDY}'
            )
        if not self.unchecked[position]:
            before = self.index.file_identities(number)
            # The limits were compared by the times of their files, as not every reader holds them.
            if any(not before[name]._replace(table='').is_same(file) for name, file in dataset.files().items()):
                raise ObjectChangedError(f'{dataset.name}: was replaced while it was being read: open a new reader')
        return dataset

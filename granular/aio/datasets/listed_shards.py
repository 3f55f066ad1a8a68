"""The shards of a dataset without an index: opened each by its own tables, at once or when it is first read."""

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from granular._support.indexing import Ints
from granular.aio.bags.identity import FileIdentity
from granular.aio.bags.index_cache import FolderState, Snapshot
from granular.aio.datasets.columns import Columns
from granular.aio.datasets.dataset import Dataset, all_or_none, join_tables
from granular.aio.datasets.listing import Listing
from granular.aio.datasets.opened_shards import OpenedShards
from granular.aio.pipeline.data_source import Mask
from granular.aio.runtime.lock import Lock
from granular.aio.runtime.tasks import for_each
from granular.errors import NotFoundError, ObjectChangedError

T = TypeVar('T')

# Shards that are opened at a time: requests enough for a distant store. The garbage collector would traverse the
# objects of more again and again, which took half of the time.
_TOGETHER: Final = 128


class SharedShards(NamedTuple):
    """The state that a reader of listed shards shares with its copies in worker processes."""

    numbers: list[int]  # of all shards
    listing: Listing
    states: Mapping[int, FolderState]  # of the shards that were opened, by position


class ListedShards(OpenedShards):
    """Shards without an index, with the methods of ``IndexedShards``.

    ``own`` has those that are open. With a listing, the others are opened when they are first read; each of their files
    must be the one in the listing. Until then, they have their lengths and sizes alone.

    Args:
      create: returns the unopened dataset of a shard's name.
      names: the names of the shards.
      snapshot: has the tables of all shards, if there is an index cache.
    """

    def __init__(
        self, create: Callable[[str], Dataset], names: Sequence[str] = (), snapshot: Snapshot | None = None
    ) -> None:
        super().__init__(create)
        self._names = names
        self._snapshot = snapshot
        self.listing: Listing | None = None
        self._joined: list[list[int]] = []  # the shards whose tables lie in one array, for each array
        self._opening = Lock()

    def copy(self) -> 'ListedShards':
        """Return independently closable shards that share the tables."""
        shards = ListedShards(self._create, self._names, self._snapshot)
        shards.listing, shards._joined = self.listing, [*self._joined]
        shards.own = {i: dataset.copy() for i, dataset in self.own.items()}
        return shards

    def __len__(self) -> int:
        return len(self._names)

    def _make(self, position: int) -> Dataset:
        name = self._names[position]
        dataset = self._create(name)
        dataset.expect(self.own[0].columns, self._listed.bags(name), self._listed.lengths[name])
        return dataset

    def _shard_name(self, position: int) -> str:
        return self._names[position]

    @property
    def _listed(self) -> Listing:
        if self.listing is None:
            raise ObjectChangedError(f'{self._names[0]}: was closed while it was being opened')
        return self.listing

    def missing(self, positions: Iterable[int]) -> list[int]:
        """Return those of some shards that are not open."""
        own = self.own
        return [] if len(own) == len(self._names) else [i for i in positions if i not in own]

    # --- opening

    async def open(
        self, positions: Iterable[int], states: Mapping[int, FolderState] | None = None
    ) -> dict[int, Dataset]:
        """Open shards together, by their states if these are given; return those that were not open."""
        snapshot = self._snapshot
        if states is not None:
            snapshot = Snapshot('', {self._names[i]: state for i, state in states.items()})
        async with self._opening.turn():
            datasets = {i: self._create(self._names[i]) for i in positions if i not in self.own}
            await for_each(datasets.values(), lambda dataset: self._open(dataset, snapshot), _TOGETHER)
            first = (self.own.get(0) or datasets[0]).columns
            for dataset in datasets.values():
                dataset.columns.check_spec(first.spec, first.layout, first.name)
            self._keep(datasets)
        return datasets

    async def _open(self, dataset: Dataset, snapshot: Snapshot | None) -> None:
        listing = self.listing
        if snapshot is not None or listing is None or dataset.directory.name not in listing.lengths:
            await dataset.open(snapshot)
            return
        try:
            await dataset.open()
        except NotFoundError as error:
            raise ObjectChangedError(
                f'{dataset.name}: was removed or replaced since it was listed, when the dataset was opened: open a '
                f'new reader: {error}'
            ) from error
        listing.check(dataset)

    def _keep(self, datasets: Mapping[int, Dataset]) -> None:
        """Add open shards, so that the limits of all lie in few arrays, each at least twice as long as the next one; in
        one array once all are open.
        """
        joined = [*datasets]
        are_all = len(self.own) + len(joined) == len(self)
        while self._joined and (are_all or len(self._joined[-1]) <= 2 * len(joined)):
            joined = [*self._joined.pop(), *joined]
        # Copies, as another thread may read the others.
        own = {i: datasets[i] if i in datasets else self.own[i].copy() for i in joined}
        join_tables(own.values())
        self._joined.append(joined)
        self.own.update(own)
        self._datasets = None

    # --- what was opened

    def lengths(self) -> Ints:
        return np.array(
            [
                self.own[i].columns.length if i in self.own else self._listed.lengths[name]
                for i, name in enumerate(self._names)
            ],
            np.int64,
        )

    def size(self, mask: Mask = None) -> int:
        return sum(dataset.columns.size_of(mask) for dataset in self)

    def _identities(self, position: int) -> dict[str, FileIdentity]:
        return self._listed.bags(self._names[position])

    def states(self) -> dict[str, FolderState] | None:
        """Return the states of all shards, by name; None unless all are open, and complete."""
        if self.missing(range(len(self))):
            return None
        return all_or_none({dataset.directory.name: dataset.state() for dataset in self})

    def shared(self, numbers: list[int]) -> SharedShards | Snapshot | None:
        """Return the state for copies in worker processes; None unless those of the open shards are complete."""
        if (snapshot := self.own[0].columns.snapshot) is not None:
            return snapshot
        if self.listing is None:
            states = self.states()
            return None if states is None else Snapshot('', states)
        own = all_or_none({i: dataset.state() for i, dataset in self.own.items()})
        return None if own is None else SharedShards(numbers, self.listing, own)

    async def check_unchanged(self) -> None:
        """Check that the shards that are open were not replaced meanwhile."""
        await for_each([*self.own.values()], Dataset.check_unchanged, _TOGETHER)

    async def read(self, positions: Ints, reading: Coroutine[Any, Any, T]) -> T:
        return await reading

    async def replace(self, positions: Sequence[int], columns: Sequence[Columns] = ()) -> bool:
        """Return False: the replacement of a shard is an error."""
        return False

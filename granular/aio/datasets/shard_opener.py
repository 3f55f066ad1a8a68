"""Open the shards of a dataset: by its index, by the state of another reader, or each by its own tables."""

from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import Ints
from granular._support.text import counted, logger
from granular.aio.bags.identity import FileIdentity
from granular.aio.bags.index_cache import FolderState, Snapshot
from granular.aio.datasets.appending import finished_shards
from granular.aio.datasets.columns import Columns, Datasets
from granular.aio.datasets.comparison import Pins, compare
from granular.aio.datasets.consistency import open_as_one
from granular.aio.datasets.dataset import Dataset, OpenOptions, all_or_none, join_tables
from granular.aio.datasets.index import DatasetIndex
from granular.aio.datasets.indexed_shards import IndexedShards
from granular.aio.datasets.masks import Mask
from granular.aio.datasets.shards import check_complete, filled, listed_shards, shards_in
from granular.aio.http.reply import changed
from granular.aio.paths.path import Path
from granular.aio.runtime.tasks import for_each, gather
from granular.errors import AccessDeniedError, CorruptDatasetError, NotFoundError
from granular.formats.layout import shard_name

T = TypeVar('T')

# Shards that are opened at a time: requests enough for a distant store. The garbage collector would traverse the
# objects of more again and again, which took half of the time.
_TOGETHER: Final = 128


class ListedShards(tuple[Dataset, ...]):
    """Shards that were opened each by its own tables, with the methods of ``IndexedShards``."""

    _datasets: Datasets | None = None

    def copy(self) -> 'ListedShards':
        return ListedShards(dataset.copy() for dataset in self)

    def close(self) -> None:
        for dataset in self:
            dataset.columns.close()
        self._datasets = None

    def datasets(self, positions: Ints) -> Datasets:
        if (datasets := self._datasets) is None:
            datasets = self._datasets = Datasets.of([dataset.columns for dataset in self])
        return datasets

    def lengths(self) -> Ints:
        return np.array([dataset.columns.length for dataset in self], np.int64)

    def size(self, mask: Mask = None) -> int:
        return sum(dataset.columns.size_of(mask) for dataset in self)

    def files(self) -> dict[str, FileIdentity]:
        return {
            f'{dataset.directory.name}/{file}': identity
            for dataset in self
            for file, identity in dataset.files().items()
        }

    def states(self) -> dict[str, FolderState] | None:
        return all_or_none({dataset.directory.name: dataset.state() for dataset in self})

    def warn_of_lengths(self) -> None:
        for dataset in self:
            dataset.warn_of_lengths()

    async def read(self, positions: Ints, reading: Coroutine[Any, Any, T]) -> T:
        return await reading

    async def replace(self, positions: Sequence[int], columns: Sequence[Columns] = ()) -> bool:
        """Return False: the replacement of a shard is an error."""
        return False


Shards = IndexedShards | ListedShards


class SharedIndex(NamedTuple):
    """The state that a reader with an index shares with its copies in worker processes."""

    tables: DatasetIndex
    numbers: list[int]  # of all shards
    states: Mapping[int, FolderState]  # of the shards that are read by their own tables, by position
    unchecked: NDArray[np.bool_]  # as in ``IndexedShards``, as the others
    pins: Mapping[int, Pins]
    moved: bool


class ShardOpener:
    """Opens the shards that a reader reads: a series, given by its first one and the distance between two of them."""

    def __init__(self, directory: Path, options: OpenOptions, series: tuple[int, int], use_index: bool) -> None:
        self._directory = directory
        self._name = f'{directory}'
        self._options = options
        self._series, self._use_index = series, use_index
        self._shared: SharedIndex | Snapshot | None = None
        self._expected_count: int | None = None
        self.numbers: list[int] = []  # of all shards
        self._count: int | None = None  # shards to open, if not all
        self._empty: set[int] = set()  # empty folders
        self._snapshot: Snapshot | None = None
        self._shards: Shards = ListedShards()

    async def open(self, shared: SharedIndex | Snapshot | None = None, count: int | None = None) -> Shards:
        """Open the shards: for the copy of a reader, with the state that it shares, and as many as there were then."""
        self._shared, self._expected_count = shared, count
        await self._directory.store.ready()
        await open_as_one(self._name, self._open_once, self._check_unchanged)
        if self._count is not None and self._expected_count is None:
            await self._warn_of_unread(self._count)
        shards, self._shards = self._shards, ListedShards()
        join_tables(shards.own.values() if isinstance(shards, IndexedShards) else shards)
        shards.warn_of_lengths()
        states = shards.states() if isinstance(shards, ListedShards) and self._snapshot is None else None
        if states is not None and (snapshot := await Snapshot.save(self._snapshot_name, states)) is not None:
            for dataset in shards:
                dataset.keep(snapshot)
        return shards

    def state_of(self, shards: Shards) -> SharedIndex | Snapshot | None:
        """Return the state of open shards for copies of the reader in worker processes; None unless it is complete."""
        if isinstance(shards, IndexedShards):
            own = shards.states()
            if own is None:
                return None
            return SharedIndex(shards.index, self.numbers, own, shards.unchecked, shards.pins, shards.moved)
        states = shards.states()
        return None if states is None else shards[0].columns.snapshot or Snapshot('', states)

    async def _warn_of_unread(self, count: int) -> None:
        """Log that only the first ``count`` shards are read, and why."""
        numbers = await shards_in(self._directory)
        if count in numbers or not numbers[count:]:
            reason = 'is not finished: it is being appended, or its writer was killed'
            remedy = 'open the writer again to continue, or remove its shard with `granular clean --remove`'
        else:
            later = len(numbers) - count
            reason = f'is missing, and {later} {"shard follows" if later == 1 else "shards follow"} it'
            remedy = 'a writer with shardstep has not finished, or wrote fewer shards than the others'
        name = shard_name(count)
        logger.warning('%s: shard %s %s: reading the %d shards before it; %s', self._name, name, reason, count, remedy)

    async def _open_once(self) -> None:
        self._count, self._empty = self._expected_count, set()
        try:
            await self._open_shards()
        except (NotFoundError, CorruptDatasetError):
            if self._count is not None or not self.numbers:
                raise
            self._count = await finished_shards(self._directory)
            self._empty = set(self.numbers).difference(await filled(self._directory, self.numbers))
            if self._count is None and not self._empty:
                raise
            await self._open_shards()

    async def _open_shards(self) -> None:
        self._shards, self.numbers = ListedShards(), []
        snapshot = self._shared if isinstance(self._shared, Snapshot) else None
        if self._shared is None and self._options.cache_index:
            snapshot = await Snapshot.load(self._snapshot_name)
        if self._use_index and snapshot is None and await self._open_by_index():
            return
        numbers = self.numbers = await self._list()
        names = [shard_name(i) for i in self._choose(numbers)] if numbers else []
        if snapshot is not None and snapshot.folders.keys() != set(names):
            # Mixed with newer shards it would not be one dataset.
            if self._shared is not None:
                raise changed(
                    self._name, f'of {counted(len(snapshot.folders), "shard")}', f'of {counted(len(names), "shard")}'
                )
            snapshot = None
            if self._use_index and await self._open_by_index():
                return
        if not numbers:
            if await (self._directory / 'spec.json').exists():
                raise NotFoundError(
                    f'{self._name}: is a dataset without shards: open it with DatasetReader, or with granular.open'
                )
            raise NotFoundError(f'{self._name}: has no shards: expected folders such as {shard_name(0)}')
        await self._open_by_tables(names, snapshot)

    async def _list(self) -> list[int]:
        """Return the shards to open: without those that are being appended, nor empty folders that failed to open."""
        try:
            return self._without_empty(await listed_shards(self._directory))
        except AccessDeniedError as error:
            raise AccessDeniedError(
                f'{error}: an index, which `granular index` makes, replaces the listing of the shards'
            ) from error

    def _without_empty(self, numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if number not in self._empty][: self._count]

    def _create(self, name: str) -> Dataset:
        return Dataset(self._directory / name, self._options, name)

    def _choose(self, numbers: list[int]) -> list[int]:
        """Return the shards to read, given all shards, of which none may be missing."""
        check_complete(self._name, numbers)
        start, step = self._series
        chosen = numbers[start::step]
        if not chosen:
            raise NotFoundError(
                f'{self._name}: has {counted(len(numbers), "shard")}, none from {start} on in steps of {step}'
            )
        return chosen

    # --- by their own tables

    async def _open_by_tables(self, names: list[str], snapshot: Snapshot | None) -> None:
        self._snapshot = snapshot
        shards = self._shards = ListedShards([self._create(name) for name in names])
        await for_each(shards, lambda dataset: dataset.open(snapshot), _TOGETHER)
        first = shards[0].columns
        for dataset in shards:
            dataset.columns.check_spec(first.spec, first.layout, first.name)

    @property
    def _snapshot_name(self) -> Path:
        """The path that names the snapshot: readers of different subsets of the shards have different snapshots."""
        start, step = self._series
        return self._directory if self._series == (0, 1) else self._directory / f'{start}::{step}'

    async def _check_unchanged(self) -> None:
        """Check that the listed shards still exist and that there are no others."""
        if isinstance(self._shards, IndexedShards):
            await self._shards.check_unchanged()
        elif self._snapshot is None and self.numbers:
            await gather([self._check_numbers(), for_each(self._shards, Dataset.check_unchanged, _TOGETHER)])

    async def _check_numbers(self) -> None:
        now = await self._list()
        if now != self.numbers:
            raise changed(self._name, f'of {counted(len(self.numbers), "shard")}', f'of {counted(len(now), "shard")}')

    # --- by the index

    async def _open_by_index(self) -> bool:
        """Open the shards by the index of the dataset. Return False if there is none that describes any of them."""
        shared = self._shared if isinstance(self._shared, SharedIndex) else None
        index = await DatasetIndex.open(self._directory, self._options.cache_index) if shared is None else shared.tables
        if index is None:
            return False
        if shared is None:
            numbers, stale, moved = await compare(index, self._directory)
            if not numbers or (stale is not None and len(stale) == len(index)):
                logger.warning(
                    'the index of %s is outdated: all of its shards were replaced: they are read by their own tables: '
                    'run `granular index` on it',
                    self._name,
                )
                return False
        else:
            numbers, stale, moved = shared.numbers, None, {}
        spec, layout = index.directory.spec, index.directory.layout
        fields = self._options.fields(spec, layout, self._name)
        existing, numbers = len(numbers), self._without_empty(numbers)
        self.numbers = numbers
        chosen = np.array(self._choose(numbers), np.int64)
        shards = IndexedShards(self._directory, index, chosen, fields, self._create)
        self._shards = shards
        has_extras = bool(set(self._options.cache_keys) - {'refs'}) or self._options.verify
        if shared is None:
            if stale is not None:
                shards.note_moved(moved)
            if has_extras or stale is None:
                described = np.flatnonzero((chosen < len(index)) & ~np.isin(chosen, stale if stale is not None else []))
                found = chosen[await shards.find_replaced(described.tolist() if has_extras else [])]
                stale = found if stale is None else np.union1d(stale, found)
            own = np.flatnonzero((chosen >= len(index)) | np.isin(chosen, stale)).tolist()
            if len(stale) or existing != len(index):
                shards.warn(f'{len(stale)} of its {len(index)} shards were replaced, and there are {existing} now')
            await shards.open_own(own)
        else:
            shards.unchecked[:], shards.moved = shared.unchecked, shared.moved
            shards.pins.update(shared.pins)
            await shards.open_own(shared.states, shared.states)
        if has_extras:
            await shards.read_extras()
        return True

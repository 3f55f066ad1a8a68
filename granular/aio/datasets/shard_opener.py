"""Open the shards of a dataset: by its index, by the state of another reader, or each by its own tables."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from granular._support.text import counted, logger
from granular.aio.bags.index_cache import FolderState, Snapshot, cache_file_of
from granular.aio.datasets.appending import finished_shards
from granular.aio.datasets.comparison import Pins, compare
from granular.aio.datasets.consistency import open_as_one
from granular.aio.datasets.dataset import Dataset, OpenOptions, join_tables
from granular.aio.datasets.index import DatasetIndex
from granular.aio.datasets.indexed_shards import IndexedShards
from granular.aio.datasets.listed_shards import ListedShards, SharedShards
from granular.aio.datasets.listing import Listing, are_opened_at_once
from granular.aio.datasets.shards import UNFINISHED, check_complete, claims_of, filled, shards_in, shards_of
from granular.aio.http.reply import changed
from granular.aio.paths.path import Path
from granular.aio.runtime.tasks import gather
from granular.errors import AccessDeniedError, CorruptDatasetError, NotFoundError
from granular.formats.layout import shard_name

Shards = IndexedShards | ListedShards


class SharedIndex(NamedTuple):
    """The state that a reader with an index shares with its copies in worker processes."""

    tables: DatasetIndex
    numbers: list[int]  # of all shards
    states: Mapping[int, FolderState]  # of the shards that are read by their own tables, by position
    unchecked: NDArray[np.bool_]  # as in ``IndexedShards``, as the others
    pins: Mapping[int, Pins]
    moved: bool


Shared = SharedIndex | SharedShards | Snapshot
"""The state that an open reader shares with its copies in worker processes."""


class ShardOpener:
    """Opens the shards that a reader reads: a series, given by its first one and the distance between two of them."""

    def __init__(self, directory: Path, options: OpenOptions, series: tuple[int, int], use_index: bool) -> None:
        self._directory = directory
        self._name = f'{directory}'
        self._options = options
        self._series, self._use_index = series, use_index
        self._shared: Shared | None = None
        self._expected_count: int | None = None
        self.numbers: list[int] = []  # of all shards
        self._count: int | None = None  # shards to open, if not all
        self._empty: set[int] = set()  # empty folders
        self._claims: list[str] = []  # of writers that have not finished
        self._snapshot: Snapshot | None = None
        self.none: Shards = ListedShards(self._create)  # of a reader that is not open
        self._shards: Shards = self.none

    async def open(self, shared: Shared | None = None, count: int | None = None) -> Shards:
        """Open the shards: for the copy of a reader, with the state that it shares, and as many as there were then."""
        self._shared, self._expected_count = shared, count
        await self._directory.store.ready()
        await open_as_one(self._name, self._open_once, self._check_unchanged)
        if self._expected_count is None:
            await self._warn_of_unread()
        shards, self._shards = self._shards, self.none
        if isinstance(shards, IndexedShards):
            join_tables(shards.own.values())
        shards.warn_of_lengths()
        states = None
        if isinstance(shards, ListedShards) and self._snapshot is None and shared is None:
            states = shards.states()
        if states is not None and (snapshot := await Snapshot.save(self._snapshot_name, states)) is not None:
            for dataset in shards:
                dataset.keep(snapshot)
        return shards

    def state_of(self, shards: Shards) -> Shared | None:
        """Return the state of open shards for copies of the reader in worker processes; None unless it is complete."""
        if isinstance(shards, IndexedShards):
            own = shards.states()
            if own is None:
                return None
            return SharedIndex(shards.index, self.numbers, own, shards.unchecked, shards.pins, shards.moved)
        return shards.shared(self.numbers)

    async def _warn_of_unread(self) -> None:
        """Log if only the first shards are read, or more of them may come, and why."""
        if (count := self._count) is None:
            if self._claims:
                names = ', '.join(self._claims)
                logger.warning('%s: %s (%s): reading the shards that are finished', self._name, UNFINISHED, names)
            return
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
        self._claims = []
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
        self._shards, self.numbers = self.none, []
        if isinstance(self._shared, SharedShards):
            await self._open_shared(self._shared)
            return
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
            entries = [entry async for entry in self._directory.store.scan(self._directory.key)]
            self._claims = claims_of(entries)
            return self._without_empty(shards_of(entries))
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
        shards = self._shards = ListedShards(self._create, names, snapshot)
        if not are_opened_at_once(names) and self._is_lazy(snapshot):
            first = (await shards.open([0]))[0]
            if snapshot is None:
                shards.listing = await Listing.of(self._directory, first, names)
            else:
                shards.listing = Listing.of_states(first, snapshot.folders)
        known = set() if shards.listing is None else shards.listing.lengths.keys()
        await shards.open([i for i, name in enumerate(names) if name not in known])

    def _is_lazy(self, snapshot: Snapshot | None) -> bool:
        """Return whether shards may be opened when they are first read: no data is kept in memory, and their tables are
        in an index cache, or are not to be.
        """
        options = self._options
        is_cached = options.cache_index and cache_file_of(self._directory) is not None
        return not (options.cache_keys or options.verify) and (snapshot is not None or not is_cached)

    async def _open_shared(self, shared: SharedShards) -> None:
        """Open the shards that another reader had opened, without a request, as that reader found them."""
        self.numbers = shared.numbers
        shards = self._shards = ListedShards(self._create, [shard_name(i) for i in self._choose(self.numbers)])
        shards.listing = shared.listing
        await shards.open(shared.states, shared.states)

    @property
    def _snapshot_name(self) -> Path:
        """The path that names the snapshot: readers of different subsets of the shards have different snapshots."""
        start, step = self._series
        return self._directory if self._series == (0, 1) else self._directory / f'{start}::{step}'

    async def _check_unchanged(self) -> None:
        """Check that the listed shards still exist and that there are no others."""
        if isinstance(self._shards, IndexedShards):
            await self._shards.check_unchanged()
        elif self._snapshot is None and self.numbers and not isinstance(self._shared, SharedShards):
            await gather([self._check_numbers(), self._shards.check_unchanged()])

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
        existing, numbers = len(numbers), self._without_empty(numbers)
        self.numbers = numbers
        chosen = np.array(self._choose(numbers), np.int64)
        self._shards = shards = IndexedShards(self._directory, index, chosen, self._create)
        has_extras = bool(set(self._options.cache_keys) - {'refs'}) or self._options.verify
        if shared is None:
            if stale is not None:
                shards.note_moved(moved)
            stale = np.zeros(0, np.int64) if stale is None else stale
            described = np.flatnonzero((chosen < len(index)) & ~np.isin(chosen, stale)).tolist()
            # One of them tells whether the dataset is a copy, or has another spec.
            found = chosen[await shards.find_replaced(described if has_extras else described[:1])]
            stale = np.union1d(stale, found)
            if not await shards.open_own(np.flatnonzero((chosen >= len(index)) | np.isin(chosen, stale)).tolist()):
                shards.close()
                shards.warn('its shards have another spec')
                return False
            if len(stale) or existing != len(index):
                shards.warn(f'{len(stale)} of its {len(index)} shards were replaced, and there are {existing} now')
        else:
            shards.unchecked[:], shards.moved = shared.unchecked, shared.moved
            shards.pins.update(shared.pins)
            await shards.open_own(shared.states, shared.states)
        shards.fields = self._options.fields(index.directory.spec, index.directory.layout, self._name)
        if has_extras:
            await shards.read_extras()
        return True

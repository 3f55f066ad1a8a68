"""Read sharded datasets: one folder per shard, each a dataset of its own."""

import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self, SupportsIndex, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from granular import formats
from granular._typing import Datapoint_co
from granular.aio.bags.identity import FileIdentity, Identity, reopened
from granular.aio.bags.index_cache import FolderState, Snapshot
from granular.aio.datasets.appending import finished_shards
from granular.aio.datasets.codec import Decoder, fields_of
from granular.aio.datasets.columns import Choice, Columns, Datapoint, Group, Mask, fetch_datapoints, read_columns
from granular.aio.datasets.dataset import Dataset, as_cache_keys, check_cache_keys
from granular.aio.datasets.index import DatasetIndex
from granular.aio.datasets.indexed_shards import IndexedShards
from granular.aio.datasets.proof import open_as_one
from granular.aio.datasets.reader import DatasetReader, columns_of
from granular.aio.datasets.shards import check_steps, shards_in
from granular.aio.http.reply import changed
from granular.aio.paths.path import Path
from granular.aio.runtime.readahead import pages
from granular.aio.runtime.sampling import Sampling
from granular.aio.runtime.sharing import sharing
from granular.aio.runtime.tasks import gather
from granular.errors import CorruptDatasetError, NotFoundError, ObjectChangedError
from granular.formats.layout import shard_name
from granular.indexing import Ints, index_of, indices_of

T = TypeVar('T')

logger = logging.getLogger('granular')


class ShardedDatasetReader(Sampling[Datapoint_co]):
    """Random access to the datapoints of all shards, or of every ``shardstep``-th shard from ``shardstart`` on.

    With an index (``build_index``), opening takes a handful of requests, and memory 2 to 3 bytes per record and key.
    Without one, opening lists the folder and then opens all shards at once; memory is that of ``DatasetReader``.

    Args:
      directory: the folder of the shards.
      decoders, cache_index, cache_keys, parallel, verify: as for ``DatasetReader``.
      shardstart: the first shard to read.
      shardstep: the distance between two shards that are read.
      index: use the index of the dataset, if there is one. Shards that were replaced or added since it was built are
        read by their own tables, which is logged.

    Example::

        async with granular.aio.ShardedDatasetReader('s3://bucket/train', granular.decoders) as reader:
            print(reader.shards, len(reader))
            datapoints = await reader.fetch([99, 0, 50])
    """

    def __init__(
        self,
        directory: Path | str | os.PathLike[str] | Any,
        decoders: Mapping[str, Decoder | Any] | None = formats.decoders,
        cache_index: bool = True,
        cache_keys: Sequence[str] = (),
        parallel: bool = False,
        shardstart: int = 0,
        shardstep: int = 1,
        verify: bool = False,
        index: bool = True,
    ) -> None:
        super().__init__()
        steps = check_steps(shardstart, shardstep)
        self.directory: Path = Path(directory)
        self._name = f'{self.directory}'
        self._args = (decoders, cache_index, as_cache_keys(cache_keys), parallel, verify)
        self._steps = steps
        self._use_index = index
        self._datasets: list[Dataset] | IndexedShards = []
        self._shared_index: SharedIndex | None = None  # pickled with the reader
        self._shared: Snapshot | None = None  # pickled with the reader
        self._snapshot: Snapshot | None = None
        self._numbers: list[int] = []
        self._expected_count: int | None = None  # pickled with the reader: shards that were appended since are ignored
        self._count: int | None = None  # shards to open, if not all
        self._expected: Identity | None = None
        self._starts = self._stops = np.zeros(0, np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        args = (self.directory, *self._args[:-1], *self._steps, self._args[-1], self._use_index)
        indexed = self._indexed if sharing.get() and self._state == 'open' else None
        if indexed is not None and (own := indexed.states()) is not None:
            shared = SharedIndex(indexed.index, self._numbers, own, indexed.unchecked)
            return _shared_by_index, (type(self), args, shared)
        if sharing.get() and self._state == 'open' and len(states := self._states()) == len(self._datasets):
            return _shared, (type(self), args, states, len(self._numbers))
        if self._state != 'open':
            return reopened, (type(self), args, {}, None)
        return _reopened, (type(self), args, Identity.of(self.directory.store, self._files()), len(self._numbers))

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self._name!r})'

    async def _open(self) -> None:
        await self.directory.store.ready()
        await open_as_one(self._name, self._open_once, self._prove)
        if self._count is not None and self._expected_count is None:
            await self._warn_of_unread(self._count)
        if (indexed := self._indexed) is not None:
            indexed.warn_of_lengths()
        else:
            for dataset in self._datasets:
                dataset.warn_of_lengths()
        if self._expected is not None:
            self._expected.check(Identity.of(self.directory.store, self._files()), self._name)
        if indexed is None and self._snapshot is None and len(states := self._states()) == len(self._datasets):
            await Snapshot.save(self._snapshot_name, states)
        if indexed is not None:
            lengths = indexed.lengths()
        else:
            lengths = np.array([dataset.columns.length for dataset in self._datasets], np.int64)
        self._stops = np.cumsum(lengths)
        self._starts = self._stops - lengths

    async def _warn_of_unread(self, count: int) -> None:
        """Log that only the first ``count`` shards are read, and why."""
        numbers = await shards_in(self.directory)
        if count in numbers or not numbers[count:]:
            reason = 'is not finished: it is being appended, or its writer was killed'
            remedy = 'open the writer again to continue, or remove its shard with `granular clean --remove`'
        else:
            later = len(numbers) - count
            reason = f'is missing, and {later} {"shard follows" if later == 1 else "shards follow"} it'
            remedy = 'a writer with shardstep has not finished, or wrote fewer shards than the others'
        name = shard_name(count)
        logger.warning('%s: shard %s %s: reading the %d shards before it; %s', self._name, name, reason, count, remedy)

    @property
    def _indexed(self) -> IndexedShards | None:
        """The shards, if they were opened by the index."""
        return self._datasets if isinstance(self._datasets, IndexedShards) else None

    async def _open_once(self) -> None:
        self._count = self._expected_count
        try:
            await self._open_shards()
        except (NotFoundError, CorruptDatasetError):
            if self._count is not None or not self._numbers:
                raise
            self._count = await finished_shards(self.directory)
            if self._count is None:
                raise
            await self._open_shards()

    async def _open_shards(self) -> None:
        self._datasets, self._numbers = [], []
        snapshot = self._shared or (await Snapshot.load(self._snapshot_name) if self._args[1] else None)
        if self._use_index and snapshot is None and await self._open_by_index():
            return
        numbers = self._numbers = await self._list()
        if not numbers:
            if await (self.directory / 'spec.json').exists():
                raise NotFoundError(
                    f'{self._name}: is a dataset without shards: open it with DatasetReader, or with granular.open'
                )
            raise NotFoundError(f'{self._name}: has no shards: expected folders such as {shard_name(0)}')
        chosen = self._choose(numbers)
        names = [shard_name(i) for i in chosen]
        self._snapshot = snapshot = self._check_snapshot(snapshot, names)
        self._datasets = [self._create(name) for name in names]
        try:
            await gather([dataset.open(snapshot) for dataset in self._datasets])
        except ObjectChangedError:
            if snapshot is not None:
                await snapshot.forget()
            raise
        first = self._datasets[0].columns
        for dataset in self._datasets:
            columns = dataset.columns
            if columns.spec != first.spec or columns.layout != first.layout:
                raise CorruptDatasetError(
                    f'{columns.name}: has spec {columns.spec} in layout {columns.layout!r}, but {first.name} has '
                    f'{first.spec} in {first.layout!r}'
                )

    async def _list(self) -> list[int]:
        """Return the numbers of the shards to open, as far as shards that are being appended are ignored."""
        return (await shards_in(self.directory))[: self._count]

    def _create(self, name: str) -> Dataset:
        decoders, cache_index, cache_keys, _, verify = self._args
        return Dataset(self.directory / name, decoders, cache_index, cache_keys, verify, name)

    def _choose(self, numbers: list[int]) -> list[int]:
        """Return the shards to read, given all shards.

        Raises:
          CorruptDatasetError: if shards are missing.
          NotFoundError: if there are none to read.
        """
        if numbers != list(range(len(numbers))):
            missing = next(i for i, number in enumerate(numbers) if i != number)
            raise CorruptDatasetError(
                f'{self._name}: shard {shard_name(missing)} is missing, of {numbers[-1] + 1}: its writer has not '
                f'finished, it was removed, or writers with shardstep wrote unequal numbers of shards'
            )
        start, step = self._steps
        chosen = numbers[start::step]
        if not chosen:
            raise NotFoundError(f'{self._name}: has {len(numbers)} shards, none from {start} on in steps of {step}')
        return chosen

    async def _open_by_index(self) -> bool:
        """Open the shards by the index of the dataset. Return False if there is none that describes any of them."""
        decoders, cache_index, cache_keys, _, verify = self._args
        shared = self._shared_index
        index = await DatasetIndex.open(self.directory, cache_index) if shared is None else shared.tables
        if index is None:
            return False
        if shared is None:
            numbers, stale = await index.compare(self.directory)
            if not numbers or (stale is not None and len(stale) == len(index)):
                logger.warning(
                    'the index of %s is outdated: all of its shards were replaced, or it was copied: they are read by '
                    'their own tables: run `granular index` on it',
                    self._name,
                )
                return False
        else:
            numbers, stale = shared.numbers, None
        spec, layout = index.directory.spec, index.directory.layout
        check_cache_keys(cache_keys, spec, self._name)
        fields = fields_of(spec, decoders, layout, self._name)
        existing, numbers = len(numbers), numbers[: self._count]
        self._numbers = numbers
        chosen = np.array(self._choose(numbers), np.int64)
        shards = IndexedShards(self.directory, index, chosen, fields, self._create)
        self._datasets = shards
        has_extras = bool(set(cache_keys) - {'refs'}) or verify
        if shared is None:
            if stale is not None:
                shards.unchecked[:] = False
            else:
                described = np.flatnonzero(chosen < len(index)).tolist()
                stale = chosen[await shards.find_replaced(described if has_extras else [])]
            own = np.flatnonzero((chosen >= len(index)) | np.isin(chosen, stale)).tolist()
            if len(stale) or existing != len(index):
                change = f'{len(stale)} of its {len(index)} shards were replaced, and there are {existing} now'
                shards.warn(change)
            await shards.open_own(own)
            if self.directory.store.local:
                shards.confirm()
        else:
            shards.unchecked[:] = shared.unchecked
            await shards.open_own(shared.states, shared.states)
        if has_extras:
            await shards.read_extras()
        return True

    def _check_snapshot(self, snapshot: Snapshot | None, names: list[str]) -> Snapshot | None:
        """Return the snapshot if it has exactly these shards: mixed with newer shards it would not be one dataset.

        Raises:
          ObjectChangedError: if the snapshot was pickled with the reader, and there are other shards now.
        """
        if snapshot is None or snapshot.folders.keys() == set(names):
            return snapshot
        if self._shared is not None:
            raise changed(self._name, f'of {len(snapshot.folders)} shards', f'of {len(names)} shards')
        return None

    @property
    def _snapshot_name(self) -> Path:
        """The path that names the snapshot: readers of different subsets of the shards have different snapshots."""
        start, step = self._steps
        return self.directory if self._steps == (0, 1) else self.directory / f'{start}::{step}'

    async def _prove(self) -> None:
        """Check that the listed shards still exist and that there are no others."""
        if (indexed := self._indexed) is not None:
            await indexed.prove()
        elif self._snapshot is None and self._numbers:
            await gather([self._check_numbers(), *(dataset.prove() for dataset in self._datasets)])

    async def _check_numbers(self) -> None:
        now = await self._list()
        if now != self._numbers:
            raise changed(self._name, f'of {len(self._numbers)} shards', f'of {len(now)} shards')

    def _files(self) -> dict[str, FileIdentity]:
        if (indexed := self._indexed) is not None:
            return indexed.files()
        return {
            f'{dataset.directory.name}/{file}': identity
            for dataset in self._datasets
            for file, identity in dataset.files().items()
        }

    def _states(self) -> dict[str, FolderState]:
        states = {dataset.directory.name: dataset.state() for dataset in self._datasets}
        return {name: state for name, state in states.items() if state is not None}

    async def _close(self) -> None:
        if (indexed := self._indexed) is not None:
            indexed.close()
            return
        for dataset in self._datasets:
            dataset.columns.close()

    # --- properties

    @property
    def spec(self) -> dict[str, str]:
        """The type of each key, sorted by key."""
        self._check_open()
        return dict(self._datasets[0].columns.spec)

    @property
    def layout(self) -> str:
        """``'refs'`` or ``'columns'``."""
        self._check_open()
        return self._datasets[0].columns.layout

    @property
    def size(self) -> int:
        """Bytes of all bags of the shards that are read, tables included."""
        self._check_open()
        if (indexed := self._indexed) is not None:
            return indexed.size()
        return sum(dataset.columns.size for dataset in self._datasets)

    def _size_of(self, mask: Mask) -> int | None:
        if self._state == 'open' and mask is not None and (indexed := self._indexed) is not None:
            return indexed.size([choice.field.key for choice in indexed[0].columns.choose(mask)])
        if self._state == 'open' and mask is None:
            return self.size
        return sum(dataset.columns.size_of(mask) for dataset in self._datasets) if self._state == 'open' else None

    @property
    def shards(self) -> int:
        """The number of shards that are read."""
        self._check_open()
        return len(self._datasets)

    @property
    def readers(self) -> list[DatasetReader]:
        """Readers of the shards."""
        self._check_open()
        return [DatasetReader._of(dataset, self._args) for dataset in self._datasets]

    def __len__(self) -> int:
        self._check_open()
        return int(self._stops[-1])

    def copy(self) -> Self:
        """Return an independently closable reader of the same shards that shares its caches."""
        self._check_open()
        reader = type(self).__new__(type(self))
        indexed = self._indexed
        datasets = [dataset.copy() for dataset in self._datasets] if indexed is None else indexed.copy()
        reader.__dict__.update(self.__dict__, _datasets=datasets)
        return reader

    # --- reading

    @overload
    async def get(self, index: SupportsIndex, mask: Mask) -> Datapoint: ...
    @overload
    async def get(self, index: SupportsIndex, mask: None = None) -> Datapoint_co: ...
    @overload
    async def get(self, index: slice | range, mask: Mask = None) -> dict[str, list[Any]]: ...
    async def get(self, index: SupportsIndex | slice | range, mask: Mask = None) -> Any:
        """Return a datapoint, or ``{key: [values]}`` for a slice; as ``DatasetReader.get``."""
        if self._state != 'open':
            await self._ensure_open()
        if isinstance(index, slice | range):
            choices = self._datasets[0].columns.choose(mask)
            positions, order = self._sort(indices_of(index, len(self), self._name))
            values = await self._read(positions, choices, read_columns) if len(positions) else [[] for _ in choices]
            return {c.field.key: _reorder(column, order) for c, column in zip(choices, values, strict=True)}
        columns, position = self._find(index)
        choices = columns.choices if mask is None else columns.choose(mask)
        if columns.immediate and (datapoint := columns.read_now(position, choices)) is not None:
            return datapoint
        positions = np.array([index_of(index, len(self), self._name)])
        return (await self._read(positions, choices, fetch_datapoints))[0]

    @overload
    async def fetch(self, indices: Any, mask: Mask) -> list[Datapoint]: ...
    @overload
    async def fetch(self, indices: Any, mask: None = None) -> list[Datapoint_co]: ...
    async def fetch(self, indices: Any, mask: Mask = None) -> list[Any]:
        """Return many datapoints, read in one fan-out over all keys and shards; as ``DatasetReader.fetch``."""
        if self._state != 'open':
            await self._ensure_open()
        positions, order = self._sort(indices_of(indices, len(self), self._name))
        choices = self._datasets[0].columns.choose(mask)
        return _reorder(await self._read(positions, choices, fetch_datapoints), order) if len(positions) else []

    async def available(self, index: SupportsIndex) -> dict[str, bool | range]:
        """Return what a mask can select from a datapoint; as ``DatasetReader.available``."""
        await self._ensure_open()
        columns, position = self._find(index)
        return await columns.available(position)

    async def __aiter__(self) -> AsyncIterator[Datapoint_co]:
        await self._ensure_open()
        local = self.directory.store.local
        async with contextlib.aclosing(pages(self.fetch, len(self), self.size, local)) as datapoints:
            async for datapoint in datapoints:
                yield datapoint

    def _find(self, index: SupportsIndex) -> tuple[Columns, int]:
        """Return the shard that holds an index, and the position in that shard."""
        position = index_of(index, len(self), self._name)
        shard = int(np.searchsorted(self._stops, position, side='right'))
        return self._datasets[shard].columns, position - int(self._starts[shard])

    def _sort(self, indices: Ints) -> tuple[Ints, Ints | None]:
        """Return indices sorted by shard, and their original order; None if they are in order already."""
        shards = np.searchsorted(self._stops, indices, side='right')
        if not (np.diff(shards) < 0).any():
            return indices, None
        order = np.argsort(shards, kind='stable')
        return indices[order], order

    async def _read(
        self,
        indices: Ints,
        choices: Sequence[Choice],
        read: Callable[[Sequence[Group], Sequence[Choice]], Coroutine[Any, Any, T]],
    ) -> T:
        """Read datapoints, given by indices that are sorted by shard."""
        shards = np.searchsorted(self._stops, indices, side='right')
        edges = np.append(0, np.flatnonzero(np.diff(shards)) + 1)
        numbers, positions = shards[edges], np.split(indices - self._starts[shards], edges[1:])
        while True:
            indexed = self._indexed
            groups = [
                (self._datasets[number].columns, group)
                for number, group in zip(numbers.tolist(), positions, strict=True)
            ]
            try:
                if indexed is not None and indexed.unchecked[numbers].any():
                    both: list[Coroutine[Any, Any, Any]] = [read(groups, choices), indexed.check(numbers.tolist())]
                    values: T = (await gather(both))[0]
                else:
                    values = await read(groups, choices)
            except (ObjectChangedError, NotFoundError):
                if indexed is None or not await indexed.replace(numbers.tolist()):
                    raise
                continue
            if indexed is not None:
                indexed.confirm(numbers)
            return values


AnyReader = DatasetReader[Any] | ShardedDatasetReader[Any]


def columns_of_shards(reader: AnyReader) -> list[Columns]:
    """Return the columns of each shard of an open reader; of a dataset without shards, its only ones.

    Raises:
      ClosedError: if it is closed, or not open yet.
    """
    if isinstance(reader, DatasetReader):
        return [columns_of(reader)]
    reader._check_open()
    return [dataset.columns for dataset in reader._datasets]


def indexed_shards_of(reader: AnyReader) -> IndexedShards | None:
    """Return the shards of a reader that opened them by their index; None for any other reader."""
    return reader._indexed if isinstance(reader, ShardedDatasetReader) else None


async def compare_shards(reader: AnyReader, positions: Iterable[int] | None = None) -> bool:
    """Open shards that are not those in the index by their own tables, before their columns are read directly.

    Args:
      reader: the reader.
      positions: the shards, by position among those that are read; by default all.

    Returns:
      Whether there were any.
    """
    if (indexed := indexed_shards_of(reader)) is None:
        return False
    replaced = await indexed.find_replaced(range(len(indexed)) if positions is None else positions)
    return bool(replaced) and await indexed.replace(replaced)


class SharedIndex(NamedTuple):
    """The state that a reader shares with its copies in worker processes.

    Attributes:
      tables: the index.
      numbers: all shards.
      states: the shards that are read by their own tables, by position.
      unchecked: the shards that may have been replaced since the index was built.
    """

    tables: DatasetIndex
    numbers: list[int]
    states: Mapping[int, FolderState]
    unchecked: NDArray[np.bool_]


def _shared_by_index(
    kind: type[ShardedDatasetReader], args: tuple[Any, ...], shared: SharedIndex
) -> ShardedDatasetReader:
    """Return a reader in a worker process that uses the index of the parent process."""
    reader = kind(*args)
    reader._shared_index = shared
    return reader


def _shared(
    kind: type[ShardedDatasetReader], args: tuple[Any, ...], folders: Mapping[str, FolderState], count: int
) -> ShardedDatasetReader:
    """Return a reader in a worker process that uses the index of the parent process."""
    reader = kind(*args)
    reader._shared, reader._expected_count = Snapshot('', folders), count
    return reader


def _reopened(
    kind: type[ShardedDatasetReader], args: tuple[Any, ...], identity: Identity, count: int
) -> ShardedDatasetReader:
    """Unpickle a reader that was open."""
    reader = reopened(kind, args, {}, identity)
    reader._expected_count = count
    return reader


def _reorder(values: list[Any], order: Ints | None) -> list[Any]:
    if order is None:
        return values
    out = [None] * len(values)
    for position, value in zip(order.tolist(), values, strict=True):
        out[position] = value
    return out

"""Read sharded datasets: one folder per shard, each a dataset of its own."""

import contextlib
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Self, SupportsIndex

import numpy as np

from granular.aio.bags.identity import FileIdentity, Identity, reopened
from granular.aio.bags.index_cache import FolderState, Snapshot
from granular.aio.datasets.codec import Decoder
from granular.aio.datasets.columns import Datapoint, Part, fetch_points, read_columns
from granular.aio.datasets.proof import open_as_one
from granular.aio.datasets.reader import DatasetReader, Mask
from granular.aio.http.reply import changed
from granular.aio.paths.path import Path
from granular.aio.runtime.lifecycle import AsyncResource
from granular.aio.runtime.readahead import pages
from granular.aio.runtime.sharing import sharing
from granular.aio.runtime.tasks import gather
from granular.aio.stores import Entry
from granular.errors import CorruptDatasetError, NotFoundError, ObjectChangedError
from granular.formats.layout import shard_name, shard_numbers
from granular.indexing import Ints, check_integer, index_of, indices_of


class ShardedDatasetReader(AsyncResource):
    """Random access to the datapoints of all shards, or of every ``shardstep``-th shard from ``shardstart`` on.

    Opening lists the folder and then opens all shards at once. Memory is that of ``DatasetReader``.

    Args:
      directory: the folder of the shards.
      decoders, cache_index, cache_keys, parallel, verify: as for ``DatasetReader``.
      shardstart: the first shard to read.
      shardstep: the distance between two shards that are read.

    Example::

        async with granular.aio.ShardedDatasetReader('s3://bucket/train', granular.decoders) as reader:
            print(reader.shards, len(reader))
            datapoints = await reader.fetch([99, 0, 50])
    """

    def __init__(
        self,
        directory: Path | str | os.PathLike[str] | Any,
        decoders: Mapping[str, Decoder | Any] | None,
        cache_index: bool = True,
        cache_keys: Sequence[str] = (),
        parallel: bool = False,
        shardstart: int = 0,
        shardstep: int = 1,
        verify: bool = False,
    ) -> None:
        super().__init__()
        check_steps(shardstart, shardstep)
        self.directory = Path(directory)
        self._name = f'{self.directory}'
        self._args = (decoders, cache_index, tuple(cache_keys), parallel, verify)
        self._steps = (shardstart, shardstep)
        self._readers: list[DatasetReader] = []
        self._given: Snapshot | None = None
        self._snapshot: Snapshot | None = None
        self._numbers: list[int] = []
        self.expected: Identity | None = None
        self._starts = self._stops = np.zeros(0, np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        args = (self.directory, *self._args[:-1], *self._steps, self._args[-1])
        if sharing.get() and self._state == 'open' and len(states := self._states_now()) == len(self._readers):
            return _shared, (type(self), args, states)
        identity = Identity.of(self.directory.store, self._files()) if self._state == 'open' else None
        return reopened, (type(self), args, {}, identity)

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self._name!r})'

    async def _open(self) -> None:
        await self.directory.store.ready()
        await open_as_one(self._name, self._open_once, self._prove)
        for reader in self._readers:
            reader.warn_of_lengths()
        if self.expected is not None:
            self.expected.check(Identity.of(self.directory.store, self._files()), self._name)
        if self._snapshot is None and len(states := self._states_now()) == len(self._readers):
            await Snapshot.save(self._kept_as, states)
        lengths = np.array([len(reader) for reader in self._readers], np.int64)
        self._stops = np.cumsum(lengths)
        self._starts = self._stops - lengths

    async def _open_once(self) -> None:
        self._readers, self._numbers = [], []
        numbers = self._numbers = await shards_in(self.directory)
        if not numbers:
            raise NotFoundError(f'{self._name}: holds no shards: want folders such as {shard_name(0)}')
        if numbers != list(range(len(numbers))):
            missing = next(i for i, number in enumerate(numbers) if i != number)
            raise CorruptDatasetError(
                f'{self._name}: shard {shard_name(missing)} is missing, of {numbers[-1] + 1}: its writer has '
                f'not finished, or it was removed'
            )
        start, step = self._steps
        chosen = numbers[start::step]
        if not chosen:
            raise NotFoundError(f'{self._name}: has {len(numbers)} shards, none from {start} on in steps of {step}')
        names = [shard_name(i) for i in chosen]
        self._snapshot = snapshot = await self._recall(names)
        self._readers = [DatasetReader.of_shard(self.directory / name, self._args, snapshot) for name in names]
        try:
            await gather([reader._ensure_open() for reader in self._readers])
        except ObjectChangedError:
            if snapshot is not None:
                await snapshot.forget()
            raise
        first = self._readers[0]
        for reader in self._readers:
            if reader.spec != first.spec or reader.layout != first.layout:
                raise CorruptDatasetError(
                    f'{reader.directory}: has spec {reader.spec} in layout {reader.layout!r}, but {first.directory} '
                    f'has {first.spec} in {first.layout!r}'
                )

    async def _recall(self, names: list[str]) -> Snapshot | None:
        """Return the snapshot if it has exactly these shards: mixed with newer shards it would not be one dataset.

        Raises:
          ObjectChangedError: if the snapshot was pickled with the reader, and there are other shards now.
        """
        snapshot = self._given or (await Snapshot.load(self._kept_as) if self._args[1] else None)
        if snapshot is None or snapshot.folders.keys() == set(names):
            return snapshot
        if self._given is not None:
            raise changed(self._name, f'of {len(snapshot.folders)} shards', f'of {len(names)} shards')
        return None

    @property
    def _kept_as(self) -> Path:
        """The path that names the snapshot: readers of different subsets of the shards have different snapshots."""
        start, step = self._steps
        return self.directory if self._steps == (0, 1) else self.directory / f'{start}::{step}'

    async def _prove(self) -> None:
        """Check that the listed shards still exist and that there are no others."""
        if self._snapshot is None and self._numbers:
            await gather([self._check_numbers(), *(reader.prove() for reader in self._readers)])

    async def _check_numbers(self) -> None:
        now = await shards_in(self.directory)
        if now != self._numbers:
            raise changed(self._name, f'of {len(self._numbers)} shards', f'of {len(now)} shards')

    def _files(self) -> dict[str, FileIdentity]:
        return {
            f'{reader.directory.name}/{file}': identity
            for reader in self._readers
            for file, identity in reader.files().items()
        }

    def _states_now(self) -> dict[str, FolderState]:
        known = {reader.directory.name: reader._state_now() for reader in self._readers}
        return {name: state for name, state in known.items() if state is not None}

    async def _close(self) -> None:
        for reader in self._readers:
            await reader.aclose()

    # --- properties

    @property
    def spec(self) -> dict[str, str]:
        """The type of each key, sorted by key."""
        self._check_open()
        return self._readers[0].spec

    @property
    def layout(self) -> str:
        """``'refs'`` or ``'columns'``."""
        self._check_open()
        return self._readers[0].layout

    @property
    def size(self) -> int:
        """Bytes of all bags of the shards that are read, tables included."""
        self._check_open()
        return sum(reader.size for reader in self._readers)

    @property
    def shards(self) -> int:
        """The number of shards that are read."""
        self._check_open()
        return len(self._readers)

    @property
    def readers(self) -> list[DatasetReader]:
        """The readers of the shards."""
        self._check_open()
        return list(self._readers)

    def __len__(self) -> int:
        self._check_open()
        return int(self._stops[-1])

    def copy(self) -> Self:
        """Return an independently closable reader of the same shards that shares its caches."""
        self._check_open()
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._readers = [reader.copy() for reader in self._readers]
        return twin

    # --- reading

    async def get(self, index: SupportsIndex | slice, mask: Mask = None) -> Any:
        """Return a datapoint, or ``{key: [values]}`` for a slice; as ``DatasetReader.get``."""
        if self._state != 'open':
            await self._ensure_open()
        if isinstance(index, slice | range):
            chosen = self._readers[0].choose(mask)
            parts, order = self._parts(indices_of(index, len(self), self._name))
            columns = await read_columns(parts, chosen) if parts else [[] for _ in chosen]
            return {c.field.key: _reorder(column, order) for c, column in zip(chosen, columns, strict=True)}
        reader, place = self._find(index)
        return await reader.get(place, mask)

    async def fetch(self, indices: Any, mask: Mask = None) -> list[Datapoint]:
        """Return many datapoints, read in one fan-out over all keys and shards; as ``DatasetReader.fetch``."""
        if self._state != 'open':
            await self._ensure_open()
        parts, order = self._parts(indices_of(indices, len(self), self._name))
        return _reorder(await fetch_points(parts, self._readers[0].choose(mask)), order) if parts else []

    async def available(self, index: SupportsIndex) -> dict[str, bool | range]:
        """Return what a mask can select from a datapoint; as ``DatasetReader.available``."""
        await self._ensure_open()
        reader, place = self._find(index)
        return await reader.available(place)

    async def __aiter__(self) -> AsyncIterator[Datapoint]:
        await self._ensure_open()
        local = self.directory.store.local
        async with contextlib.aclosing(pages(self.fetch, len(self), self.size, local)) as items:
            async for point in items:
                yield point

    def _find(self, index: SupportsIndex) -> tuple[DatasetReader, int]:
        """Return the reader of the shard that holds an index, and the position in that shard."""
        place = index_of(index, len(self), self._name)
        shard = int(np.searchsorted(self._stops, place, side='right'))
        return self._readers[shard], place - int(self._starts[shard])

    def _parts(self, places: Ints) -> tuple[list[Part], Ints | None]:
        """Group positions by shard.

        Returns:
          The positions of each shard, and their original order; None if they are in order already.
        """
        shards = np.searchsorted(self._stops, places, side='right')
        order = None
        if (np.diff(shards) < 0).any():
            order = np.argsort(shards, kind='stable')
            places, shards = places[order], shards[order]
        if not len(places):
            return [], order
        edges = np.flatnonzero(np.diff(shards)) + 1
        parts = [
            (self._readers[shard]._columns, group - self._starts[shard])
            for group, shard in zip(np.split(places, edges), shards[np.append(0, edges)].tolist(), strict=True)
        ]
        return parts, order


def _shared(
    kind: type[ShardedDatasetReader], args: tuple[Any, ...], folders: Mapping[str, FolderState]
) -> ShardedDatasetReader:
    """Return a reader in a worker process that uses the index of the parent process."""
    reader = kind(*args)
    reader._given = Snapshot('', folders)
    return reader


def _reorder(values: list[Any], order: Ints | None) -> list[Any]:
    if order is None:
        return values
    out = [None] * len(values)
    for place, value in zip(order.tolist(), values, strict=True):
        out[place] = value
    return out


async def shards_in(directory: Path) -> list[int]:
    """Return the sorted numbers of the shards in a folder. Other files and folders are ignored."""
    return shards_of([entry async for entry in directory.store.scan(directory.key)])


def shards_of(entries: Iterable[Entry]) -> list[int]:
    """Return the sorted numbers of the shards among the entries of a folder."""
    return shard_numbers([entry.key.rpartition('/')[2] for entry in entries if entry.is_dir])


def check_steps(start: int, step: int) -> None:
    """Check the arguments that select every ``step``-th shard from ``start`` on."""
    check_integer('shardstart', start, 0)
    check_integer('shardstep', step, 1)

"""Read sharded datasets: one folder per shard, each a dataset of its own."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Final, Self, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from granular import formats
from granular._support.indexing import Ints, index_of
from granular._support.typing import Datapoint_co
from granular.aio.bags.bag import read_digests
from granular.aio.bags.identity import Identity
from granular.aio.datasets.codec import Decoders
from granular.aio.datasets.column_reads import Read
from granular.aio.datasets.columns import Choice, Columns
from granular.aio.datasets.dataset import Dataset, OpenOptions
from granular.aio.datasets.indexed_shards import IndexedShards
from granular.aio.datasets.listed_shards import ListedShards
from granular.aio.datasets.picks import Concatenation, Datasets, Picks
from granular.aio.datasets.reader import DatapointReader, DatasetReader, T, columns_of, compare, reader_of
from granular.aio.datasets.shard_opener import ShardOpener, Shards, Shared
from granular.aio.datasets.shards import check_series
from granular.aio.paths.path import Path
from granular.aio.paths.pure import AnyPath
from granular.aio.pipeline.data_source import Mask
from granular.aio.runtime.lifecycle import check_open
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import offload
from granular.errors import NotFoundError, ObjectChangedError

_NONE: Final = Concatenation(np.zeros(0, np.int64))


class ShardedDatasetReader(DatapointReader[Datapoint_co]):
    """Random access to the datapoints of all shards, or of every ``shardstep``-th shard from ``shardstart`` on.

    With an index (``build_index``), opening takes a handful of requests, and memory 2 to 3 bytes per record and key.
    Without one, opening lists the folder. Of more than 32 shards, it then opens those whose number of datapoints no
    listing tells; the others are opened when they are first read, all that a batch needs together, and must be those
    that were listed. Memory of the shards that are open is that of ``DatasetReader``.

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
        directory: AnyPath,
        decoders: Decoders = formats.decoders,
        cache_index: bool = True,
        cache_keys: Sequence[str] = (),
        parallel: bool = False,
        shardstart: int = 0,
        shardstep: int = 1,
        verify: bool = False,
        index: bool = True,
    ) -> None:
        super().__init__()
        series = check_series(shardstart, shardstep)
        self.directory: Path = Path(directory)
        self._name, self._tables = f'{self.directory}', {}
        self._options = OpenOptions.of(decoders, cache_index, cache_keys, verify)
        self._choice = {'shardstart': series[0], 'shardstep': series[1], 'index': index}
        self._opener = ShardOpener(self.directory, self._options, series, index)
        self._shards: Shards = self._opener.none
        self._count: int | None = None  # the number of shards, pickled with the reader
        self._positions = _NONE

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self.directory,), {**self._options._asdict(), **self._choice}

    def _pickled(self) -> dict[str, Any]:
        pickled = super()._pickled()
        if self._state != 'open':
            return {**pickled, '_count': self._count}
        if self._expected is not None:
            # The copy compares the shards that this reader has not compared yet.
            unproven = np.flatnonzero(self._unproven()).tolist()
            if files := self._shards.among(self._expected.files, unproven):
                pickled['_expected'] = self._opened_files().updated(self._expected._replace(files=files))
        return {**pickled, '_count': len(self._opener.numbers)}

    def _index_state(self) -> Shared | None:
        return self._opener.state_of(self._shards)

    def _opened_files(self) -> Identity:
        return Identity.of([self.directory.store], self._shards.files())

    async def _open(self) -> None:
        self._shards = await self._opener.open(self._shared, self._count)
        if isinstance(self._shards, IndexedShards) and self._expected is not None:
            await self._shards.open_like(self._expected)
        await self._read_digests(self._shards.own.values())
        await offload(self._check_files)
        self._positions = Concatenation(self._shards.lengths())

    async def _read_digests(self, datasets: Iterable[Dataset]) -> None:
        bags = {file: bag for own in datasets for file, bag in own.bags_by_file(f'{own.directory.name}/').items()}
        await read_digests(bags, self._expected)

    async def _open_missing(self, positions: Sequence[int]) -> None:
        """Open shards that were listed alone so far, together."""
        shards = self._shards
        if not isinstance(shards, ListedShards):
            return
        opened = await shards.open(positions)
        if self._expected is not None:
            await self._read_digests(opened.values())
            files = {
                f'{own.directory.name}/{file}': told for own in opened.values() for file, told in own.files().items()
            }
            self._check_files(Identity.of([self.directory.store], files), partly=True)

    async def _close(self) -> None:
        self._shards.close()

    def _size(self, mask: Mask) -> int:
        return self._shards.size(mask)

    def _file_bytes(self, mask: Any) -> int | None:
        # A state fits every series of equal length, of which each host may have its own.
        return self.nbytes(mask) if self._choice['shardstep'] == 1 else None

    async def _prove(self, positions: Ints) -> None:
        await compare_shards(self, sorted(set(self._positions.find(positions).tolist())))

    async def _identify(self) -> None:
        await compare_shards(self)
        await gather([dataset.identify() for dataset in self._shards.own.values()])

    def identity(self) -> list[Any]:
        return [reader.identity() for reader in self.readers]

    def user_functions(self) -> tuple[Any, ...]:
        return tuple(choice.field.fn for choice in self._first.choices)

    @property
    def shards(self) -> int:
        """The number of shards that are read."""
        self._check_open()
        return len(self._shards)

    @property
    def readers(self) -> list[DatasetReader]:
        """Readers of the shards."""
        self._check_open()
        if isinstance(shards := self._shards, ListedShards):
            missing = np.array([i not in shards.own for i in range(len(shards))])
            return [
                reader_of(dataset, self._options, functools.partial(self._opened, i) if is_missing else None)
                for i, (dataset, is_missing) in enumerate(zip(shards, missing.tolist(), strict=True))
            ]
        return [
            reader_of(shards[i], self._options, functools.partial(shards.compared, i) if unchecked else None)
            for i, unchecked in enumerate(shards.unchecked.tolist())
        ]

    async def _opened(self, position: int) -> Dataset:
        """Return a shard once it is open."""
        await self._open_missing([position])
        return self._shards[position]

    def __len__(self) -> int:
        self._check_open()
        return self._positions.length

    def copy(self) -> Self:
        """Return an independently closable reader of the same shards that shares its caches."""
        return self._copied(_shards=self._shards.copy(), _tables={})

    @property
    def _first(self) -> Columns:
        return self._shards[0].columns

    def _all_columns(self) -> list[Columns]:
        return [dataset.columns for dataset in self._shards]

    async def _compared_columns(self) -> list[Columns]:
        await compare_shards(self)
        return self._all_columns()

    def _find(self, index: SupportsIndex) -> tuple[Columns, int]:
        position = index_of(index, len(self), self._name)
        shard = int(self._positions.find(position))
        return self._shards[shard].columns, position - int(self._positions.starts[shard])

    @property
    def _datasets(self) -> Datasets:
        return self._shards.all_datasets

    def _columns_of(self, number: int) -> Columns:
        return self._shards[number].columns

    def _opened_columns(self) -> dict[int, Columns]:
        shards = self._shards
        # Those of listed shards are joined anew with each that is opened: before all are, they come when they are read.
        own = {} if shards.missing(range(len(shards))) else shards.own
        return {number: dataset.columns for number, dataset in own.items()}

    def _lengths(self) -> Ints:
        return self._shards.lengths()

    def _unproven(self) -> NDArray[np.bool_]:
        shards = self._shards
        if isinstance(shards, IndexedShards):
            return shards.unchecked.copy()
        unproven = np.zeros(len(shards), np.bool_)
        unproven[shards.missing(range(len(shards)))] = True
        return unproven

    async def _read_by(self, read: Read[T], positions: Ints, choices: Sequence[Choice]) -> tuple[T, Ints | None]:
        numbers, counts, positions, order = self._positions.divide(positions)
        while True:
            if missing := self._shards.missing(numbers.tolist()):
                await self._open_missing(missing)
                self._check_open()
            picks = Picks(self._shards.datasets(numbers), numbers, counts, positions)
            try:
                return await self._shards.read(numbers, read(picks, choices)), order
            except (ObjectChangedError, NotFoundError):
                columns = [picks.columns(i) for i in range(len(numbers))]
                if not await self._shards.replace(numbers.tolist(), columns):
                    raise


AnyReader = DatasetReader[Any] | ShardedDatasetReader[Any]


def columns_of_shards(reader: AnyReader) -> list[Columns]:
    """Return the columns of each shard of an open reader; of a dataset without shards, its only ones."""
    if isinstance(reader, DatasetReader):
        return [columns_of(reader)]
    check_open(reader)
    return reader._all_columns()


def indexed_shards_of(reader: AnyReader) -> IndexedShards | None:
    """Return the shards of a reader that opened them by their index; None for any other reader."""
    shards = reader._shards if isinstance(reader, ShardedDatasetReader) else None
    return shards if isinstance(shards, IndexedShards) else None


async def open_listed(reader: AnyReader) -> None:
    """Open all shards that were listed alone so far, so that their columns are complete."""
    if isinstance(reader, ShardedDatasetReader):
        await reader._open_missing(reader._shards.missing(range(len(reader._shards))))


async def compare_shards(reader: AnyReader, positions: Iterable[int] | None = None) -> bool:
    """Open shards by their own tables that are not open yet, or not those in the index, before their columns are read
    directly; return whether there were any. The positions are those among the shards that are read; by default all.
    """
    if isinstance(reader, DatasetReader):
        return await compare(reader)
    used = list(range(len(reader._shards)) if positions is None else positions)
    if not isinstance(indexed := reader._shards, IndexedShards):
        missing = indexed.missing(used)
        await reader._open_missing(missing)
        return bool(missing)
    columns = indexed.columns(used)
    replaced = await indexed.find_replaced(used)
    if replaced:
        await indexed.replace(replaced)
    return columns != indexed.columns(used)

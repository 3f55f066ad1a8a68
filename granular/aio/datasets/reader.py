"""Read datasets of either layout. docs/format.md describes the files."""

import abc
import weakref
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Final, Self, SupportsIndex, TypeVar

import numpy as np
from numpy.typing import NDArray

from granular import formats
from granular._support.indexing import Ints, index_of, indices_of
from granular._support.typing import Datapoint_co
from granular.aio.bags.bag import read_digests
from granular.aio.bags.identity import FileIdentity, Identity
from granular.aio.bags.index_cache import Snapshot
from granular.aio.bags.reader import BagReader, reader_of_bag
from granular.aio.bags.records import FEW, Adjacent
from granular.aio.datasets.array_table import ArrayTable
from granular.aio.datasets.codec import Decoders, Field, raw
from granular.aio.datasets.column_reads import (
    Read,
    as_datapoints,
    available,
    read_buffers,
    read_columns,
    read_stored,
)
from granular.aio.datasets.columns import Choice, Columns, Datapoint
from granular.aio.datasets.consistency import open_as_one
from granular.aio.datasets.dataset import Dataset, OpenOptions, join_tables
from granular.aio.datasets.joint import Joinable, JointReader
from granular.aio.datasets.picks import Datasets, Picks, alone
from granular.aio.datasets.sizes import read_sizes
from granular.aio.paths.path import Path
from granular.aio.paths.pure import AnyPath
from granular.aio.pipeline.data_source import Mask, MaskedSource
from granular.aio.runtime.lifecycle import check_open, ensure_open
from granular.aio.runtime.threads import Calls, offload
from granular.aio.runtime.worker_pickling import pickling_for_worker
from granular.errors import NotFoundError, ObjectChangedError
from granular.metrics import timing

T = TypeVar('T')


class _Kin:
    """What readers have in common whose datapoints are fetched together: equal ones are one object."""

    __slots__ = ('__weakref__',)


# Comparing two stores would take as long as reading a small record.
_KINS: Final[weakref.WeakValueDictionary[Any, _Kin]] = weakref.WeakValueDictionary()


# Types of values of any kind, of which some may be None.
_ANY: Final = ('msgpack', 'json', 'tree')


class DatapointReader(MaskedSource[Sequence[Choice], Datapoint_co], Joinable[Datapoint_co]):
    """Base of the readers of a single dataset and of a sharded one."""

    directory: Path
    _tables: dict[str, ArrayTable]  # of keys that parts were read of
    _shared_with: _Kin | None = None  # once it is known
    _shared: Any = None  # the index, pickled with the reader for a worker process

    def _pickled(self) -> dict[str, Any]:
        if self._state != 'open':
            return {**super()._pickled(), '_shared': self._shared}
        shared = self._index_state() if pickling_for_worker.get() else None
        return super()._pickled() if shared is None else {'_shared': shared}

    @abc.abstractmethod
    def _index_state(self) -> Any:
        """Return the index of the open reader, for a copy in a worker process; None if there is none."""

    @property
    @abc.abstractmethod
    def _first(self) -> Columns:
        """The columns of the dataset, or of its first shard."""

    @abc.abstractmethod
    def _all_columns(self) -> list[Columns]:
        """Return the columns of the dataset, or of each shard."""

    async def _compared_columns(self) -> list[Columns]:
        """Return the columns, after shards were compared with their index, so that they can be read directly."""
        return self._all_columns()

    @abc.abstractmethod
    def _find(self, index: SupportsIndex) -> tuple[Columns, int]:
        """Return the dataset or shard that holds an index, and the position in it."""

    async def _read(self, positions: Ints, choices: Sequence[Choice]) -> tuple[list[list[Any]], Ints | None]:
        """Return the values of datapoints, at least one, by field; and the position of each datapoint in what was
        requested, None if they are in that order.
        """
        return await self._read_by(read_columns, positions, choices)

    @abc.abstractmethod
    async def _read_by(self, read: Read[T], positions: Ints, choices: Sequence[Choice]) -> tuple[T, Ints | None]:
        """Return what a function reads of datapoints, at least one; and positions as ``_read``."""

    @abc.abstractmethod
    def _size(self, mask: Mask) -> int:
        """Return the bytes of the bags that a mask selects, tables included."""

    @property
    def size(self) -> int:
        """Bytes of all bags that are read, tables included."""
        self._check_open()
        return self._size(None)

    def nbytes(self, mask: Mask = None) -> int | None:
        return self._size(mask) if self._state == 'open' else None

    @property
    def spec(self) -> dict[str, str]:
        """The type of each key, sorted by key."""
        self._check_open()
        return dict(self._first.spec)

    @property
    def layout(self) -> str:
        """``'refs'`` or ``'columns'``."""
        self._check_open()
        return self._first.layout

    def _chosen(self, mask: Mask) -> Sequence[Choice]:
        return self._first.choose(mask)

    def _read_now(self, index: SupportsIndex, mask: Mask) -> Any:
        columns, position = self._find(index)
        if not columns.immediate:
            return None
        return columns.read_now(position, columns.choices if mask is None else columns.choose(mask))

    async def _read_columns(self, positions: Ints, fields: Sequence[Choice]) -> dict[str, list[Any]]:
        if not len(positions):
            return {choice.field.key: [] for choice in fields}
        values, order = await self._read(positions, fields)
        return {c.field.key: _reorder(column, order) for c, column in zip(fields, values, strict=True)}

    async def _read_rows(self, positions: Ints, fields: Sequence[Choice]) -> list[Any]:
        if not len(positions):
            return []
        if len(positions) <= FEW and (datapoints := self._read_few(positions, fields)) is not None:
            return datapoints
        values, order = await self._read(positions, fields)
        return as_datapoints(values, fields, len(positions), order)

    async def _fetch_undecoded(self, indices: Any, mask: Any) -> Calls[list[Any]] | None:
        if self._state != 'open':
            await self._ensure_open()
        positions = indices_of(indices, len(self), self._name)
        choices = self._first.choose(mask)
        if not len(positions) or (len(positions) <= FEW and self._first.immediate):
            return None
        stored, order = await self._read_by(read_stored, positions, choices)
        return stored.decoding().then(lambda values: as_datapoints(values, choices, len(positions), order))

    def _kin(self) -> Any:
        if self._state == 'open' and self._shared_with is None:
            fields = tuple((field.key, field.kind, id(field.fn)) for field in fields_read(self))
            self._shared_with = _KINS.setdefault((self.directory.store, self.layout, fields), _Kin())
        return self._shared_with if self._state == 'open' else None

    def _joined(self, others: Sequence[Any]) -> JointReader:
        return JointReader([self, *others])

    def _read_few(self, positions: Ints, choices: Sequence[Choice]) -> list[Datapoint] | None:
        """Return datapoints, read one by one on this thread; None if they are not read or decoded without waiting, or
        have sequences, which are checked together.
        """
        fields = [choice.field for choice in choices]
        if timing.on or not self._first.immediate or not all(field.light and not field.many for field in fields):
            return None
        datapoints = []
        for columns, position in map(self._find, positions.tolist()):
            datapoint = columns.read_now(position, choices) if columns.immediate else None
            if datapoint is None:
                return None
            datapoints.append(datapoint)
        return datapoints

    async def available(self, index: SupportsIndex) -> dict[str, bool | range]:
        """Return, by key, what a mask can select from a datapoint: True, or for a sequence the range of its values."""
        await self._ensure_open()
        position = index_of(index, len(self), self._name)
        await self._prove(np.array([position]))
        columns, number = self._find(position)
        return await available(columns, number)

    async def sizes(self, key: str) -> Ints:
        """Return the size of a value in each datapoint, int64 of shape ``(len(reader),)``, without reading the values.

        Of arrays it is the length, which follows from the limits of the records and the dtype and shape of the first
        array, with which the last one is compared: all must have them. Of sequences (types such as ``utf8[]``) it is
        the number of values; of texts and raw bytes the bytes. Of other types, such as audio, a key of type ``int``
        beside it has them: ``audio_size`` that of ``audio``, which ``convert`` adds with ``sizes='audio'``.

        Raises:
          UnknownKeyError: a ``KeyError``, for a key that is not in the spec.
          InvalidArgumentError: for a type whose sizes are not known, or arrays of several dtypes or shapes.
        """
        await self._ensure_open()
        await self._prove(np.arange(len(self)))
        return await read_sizes(self, self._all_columns(), key)

    async def _array_parts(self, key: str, indices: Ints, begins: Ints, stops: Ints) -> list[NDArray[Any]] | None:
        await self._ensure_open()
        try:
            if (table := self._tables.get(key)) is None:
                shards = await self._compared_columns()
                (choice,) = shards[0].choose((key,))
                ours = choice.field.kind == 'array' and choice.field.fn is formats.decoders['array']
                if not ours or any(columns.bags[key].sums is not None for columns in shards):
                    return None
                table = self._tables[key] = await ArrayTable.read(shards, key)
            return await table.parts(indices, begins, stops)
        except (ObjectChangedError, NotFoundError):
            self._tables.pop(key, None)
            return None  # a shard may be read by its own tables

    async def _nullable_keys(self, mask: Collection[str] | None) -> frozenset[str]:
        await self._ensure_open()
        return frozenset(
            field.key
            for field in fields_read(self)
            if field.kind in _ANY and field.fn is formats.decoders[field.kind] and (mask is None or field.key in mask)
        )

    async def _reading(self) -> tuple[int, bool]:
        return self.size, self.directory.store.local


class DatasetReader(DatapointReader[Datapoint_co]):
    """Random access to the datapoints of a dataset in either layout.

    Opening takes three round trips: the spec with the references, the bags, and a check that the dataset was not
    replaced meanwhile. Tables longer than ``IOConfig.tail`` take more. Memory: 8 bytes per record of each bag with
    ``cache_index``, and the bags of ``cache_keys``.

    Args:
      directory: the dataset's folder: a string, an ``os.PathLike``, or a path object of another library.
      decoders: the decoder of each type, a function from a record's bytes to a value; by default those of granular,
        None for raw bytes.
      cache_index: keep the tables in memory, so that reading a value takes one request. Otherwise only the limits that
        a read needs are fetched.
      cache_keys: keys whose bags are kept in memory; ``'refs'`` keeps the references of the refs layout.
      parallel: accepted for code written for granular 0.21; reads are always concurrent.
      verify: check each record against its checksum; the dataset must have been written with checksums, as by default.
        Memory: 4 bytes per record.

    Example::

        async with granular.aio.DatasetReader('s3://bucket/digits', granular.decoders) as reader:
            datapoint = await reader.get(7)
            labels = await reader.fetch([3, 1, 41], mask=('label',))
    """

    _compared: Callable[[], Coroutine[Any, Any, Dataset]] | None = None  # returns it once compared with an index

    def __init__(
        self,
        directory: AnyPath,
        decoders: Decoders = formats.decoders,
        cache_index: bool = True,
        cache_keys: Sequence[str] = (),
        parallel: bool = False,
        verify: bool = False,
    ) -> None:
        super().__init__()
        self.directory: Path = Path(directory)
        self._options = OpenOptions.of(decoders, cache_index, cache_keys, verify)
        self._dataset = Dataset(self.directory, self._options)
        self._name, self._tables = self._dataset.name, {}

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self.directory,), self._options._asdict()

    def _index_state(self) -> Snapshot | None:
        return self._dataset.snapshot

    def _opened_files(self) -> Identity:
        files = self._dataset.files()
        if self._compared is not None:  # Until then, they are those in the index, of which a copy has other versions.
            files = {name: FileIdentity(file.size, None) for name, file in files.items()}
        return Identity.of([self.directory.store], files)

    async def _identify(self) -> None:
        await self._dataset.identify()

    def identity(self) -> tuple[Any, ...]:
        versions = {key: bag.identity().told for key, bag in self._dataset.columns.all_bags.items()}
        keys = [choice.field.key for choice in self._dataset.columns.choices]
        return self.directory.store.fingerprint, self._name, self.spec, versions, keys

    def user_functions(self) -> tuple[Any, ...]:
        return tuple(choice.field.fn for choice in self._dataset.columns.choices)

    async def _open(self) -> None:
        await self.directory.store.ready()
        await open_as_one(self._name, self._open_once, self._dataset.check_unchanged)
        join_tables([self._dataset])
        self._dataset.warn_of_lengths()
        await read_digests(self._dataset.bags_by_file(), self._expected)
        await offload(self._check_files)
        state = self._dataset.state() if self._dataset.columns.snapshot is None else None
        if state is not None and (snapshot := await Snapshot.save(self.directory, {'': state})) is not None:
            self._dataset.keep(snapshot)

    async def _open_once(self) -> None:
        snapshot = self._shared
        if snapshot is None and self._options.cache_index:
            snapshot = await Snapshot.load(self.directory)
        await self._dataset.open(snapshot)

    async def _close(self) -> None:
        self._dataset.columns.close()

    def _size(self, mask: Mask) -> int:
        return self._dataset.columns.size_of(mask)

    @property
    def bags(self) -> dict[str, BagReader]:
        """Readers of the bags by key, with ``'refs'`` in the refs layout."""
        self._check_open()
        _, cache_index, cache_keys, verify = self._options
        return {
            key: reader_of_bag(bag, cache_index, key in cache_keys, verify)
            for key, bag in self._dataset.columns.all_bags.items()
        }

    def __len__(self) -> int:
        self._check_open()
        return self._dataset.columns.length

    @property
    def _first(self) -> Columns:
        return self._dataset.columns

    def _all_columns(self) -> list[Columns]:
        return [self._dataset.columns]

    def _find(self, index: SupportsIndex) -> tuple[Columns, int]:
        columns = self._dataset.columns
        return columns, index_of(index, columns.length, self._name)

    async def _prove(self, positions: Ints) -> None:
        if self._compared is not None:
            self._dataset = (await self._compared()).copy()
            self._compared = None

    async def _read_by(self, read: Read[T], positions: Ints, choices: Sequence[Choice]) -> tuple[T, Ints | None]:
        await self._prove(positions)
        return await read(Picks.of(self._dataset.columns, positions), choices), None

    @property
    def _datasets(self) -> Datasets:
        return alone(self._dataset.columns)

    def _columns_of(self, number: int) -> Columns:
        return self._dataset.columns

    def _opened_columns(self) -> dict[int, Columns]:
        return {0: self._dataset.columns}

    def _lengths(self) -> Ints:
        return np.array([self._dataset.columns.length])

    def _unproven(self) -> NDArray[np.bool_]:
        return np.zeros(1, np.bool_)

    def _kin(self) -> Any:
        # Until it is compared, its bags may not be open: its first read is its own.
        return super()._kin() if self._compared is None else None

    def copy(self) -> Self:
        """Return an independently closable reader of the same dataset that shares its caches."""
        return self._copied(_dataset=self._dataset.copy(), _tables={})


def reader_of(
    dataset: Dataset, options: OpenOptions, compared: Callable[[], Coroutine[Any, Any, Dataset]] | None = None
) -> DatasetReader:
    """Return a reader of an open dataset; ``compared`` returns it, before its first read, once it was compared."""
    reader = DatasetReader(dataset.directory, **options._asdict())
    reader._dataset = dataset.copy()
    reader._state = 'open'
    reader._compared = compared
    return reader


def opened_files(reader: DatasetReader[Any]) -> Identity:
    return reader._opened_files()


def pinned(reader: DatasetReader[Any], files: Identity) -> DatasetReader[Any]:
    """Return a reader that is not open yet, which refuses other files."""
    reader._expected = files
    return reader


def columns_of(reader: DatasetReader[Any]) -> Columns:
    """Return the columns of an open reader; raise ``ClosedError`` if it is closed, or not open yet."""
    check_open(reader)
    return reader._dataset.columns


async def compare(reader: DatasetReader[Any]) -> bool:
    """Open or compare an open reader of a shard, if that is still to be done; return whether it was."""
    is_pending = reader._compared is not None
    await reader._prove(np.zeros(0, np.int64))
    return is_pending


def fields_read(reader: DatapointReader[Any]) -> list[Field]:
    """Return the fields of an open reader, with their decoders."""
    check_open(reader)
    return [choice.field for choice in reader._first.choices]


async def fetch_stored(reader: DatapointReader[Any], indices: Any) -> list[Datapoint]:
    """Return datapoints of an open reader with their records as they are stored, whatever its decoders are."""
    choices = [choice._replace(field=choice.field._replace(fn=raw, light=True)) for choice in reader._first.choices]
    return await reader._read_rows(indices_of(indices, len(reader), reader._name), choices)


async def fetch_buffers(
    reader: DatasetReader[Any], indices: range, mask: Mask = None
) -> dict[str, list[Any] | Adjacent]:
    """Return the values of consecutive datapoints as ``read_buffers`` does."""
    await ensure_open(reader)
    positions = indices_of(indices, len(reader), reader._name)
    await reader._prove(positions)
    columns = columns_of(reader)
    return await read_buffers(columns, positions, columns.choose(mask))


def _reorder(values: list[Any], order: Ints | None) -> list[Any]:
    if order is None:
        return values
    out = [None] * len(values)
    for position, value in zip(order.tolist(), values, strict=True):
        out[position] = value
    return out

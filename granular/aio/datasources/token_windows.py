"""Windows of fixed length over long arrays of tokens, read as parts of their records."""

import math
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from granular.aio.bags.records import Bags, read_limits, read_parts
from granular.aio.datasets.columns import Columns, Datasets, Picks, read_references, record_rows
from granular.aio.datasets.reader import DatasetReader
from granular.aio.datasets.sharded_reader import (
    AnyReader,
    ShardedDatasetReader,
    columns_of_shards,
    compare_shards,
    indexed_shards_of,
)
from granular.aio.datasources.indexed_files import SequenceSource
from granular.aio.pipeline.data_source import file_bytes
from granular.aio.runtime.lifecycle import check_open, ensure_open
from granular.aio.stores.fanout import once_more
from granular.errors import (
    CorruptDatasetError,
    InvalidArgumentError,
    NotFoundError,
    ObjectChangedError,
    UnknownKeyError,
    UnsupportedError,
)
from granular.formats.codecs.arrays import UNPACKING, array_counts, array_head, parse_array_head
from granular.indexing import MOST, Ints, check_integer, cut_into, grouped, placed

_HEAD = 64  # bytes; at least those before the data of an array

T = TypeVar('T')
Window = dict[str, NDArray[Any]]


class WrappedReader(Protocol):
    """A reader of the sync API."""

    @property
    def aio(self) -> AnyReader: ...


class TokenWindows(SequenceSource[Window]):
    """Random access to windows of fixed length over the arrays of a dataset, such as the tokens of long documents.

    ::

        async with granular.aio.DatasetReader('s3://bucket/books', granular.decoders) as reader:
            windows = granular.aio.TokenWindows(reader, 'tokens', 2048)
            window = await windows.get(7)  # {'tokens': array of shape (2048,)}
            batch = await windows.fetch([3, 1, 41])

    A window is ``length`` consecutive values of one datapoint; its first one is at a multiple of ``stride``. Values at
    the end of a datapoint that do not fill a window are in none. Windows are numbered in the order of the datapoints.

    Only the bytes of a window are read, in one fan-out for many windows, in which neighbours share a request. With the
    first window of a datapoint, the head of its array is read too, and compared with the dtype and length that follow
    from the size of its record.

    Opening takes one request for the head of the first array, and the references in the refs layout. Memory: 32 bytes
    per datapoint. The reader stays open when the windows are closed.

    Args:
      reader: a ``DatasetReader`` or ``ShardedDatasetReader``, without ``verify``: there are no checksums of parts.
      key: a key of type ``array``, whose arrays have one dimension and the same dtype.
      length: values of a window.
      stride: distance between the beginnings of two windows, ``length`` by default. ``TokenWindows(reader, key,
        length=2049, stride=2048)`` has inputs and targets that are shifted by one.

    Raises:
      UnknownKeyError: if the dataset has no such key.
      InvalidArgumentError: if an argument is invalid, the key is of another type, or an array has another dtype or more
        dimensions; it names the datapoint.
      CorruptDatasetError: if a record is no array.
      ObjectChangedError: if a shard was replaced, also since the index of the dataset was built.
    """

    def __init__(self, reader: AnyReader | WrappedReader, key: str, length: int, stride: int | None = None) -> None:
        super().__init__()
        reader = getattr(reader, 'aio', reader)
        if not isinstance(reader, DatasetReader | ShardedDatasetReader):
            raise InvalidArgumentError(
                f'TokenWindows: expected a DatasetReader or ShardedDatasetReader, got {type(reader).__name__}'
            )
        self._reader, self._key = reader, key
        self._length = check_integer('length', length, 1, MOST)
        self._stride = self._length if stride is None else check_integer('stride', stride, 1, MOST)
        self._shards: list[Columns] = []
        self._firsts: Ints = np.zeros(1, np.int64)  # the first datapoint of each shard, and the number of datapoints
        self._starts = self._counts = self._stops = np.zeros(0, np.int64)  # by datapoint; stops count windows
        self._checked = np.zeros(0, np.bool_)  # datapoints whose head was compared
        self._dtype = np.dtype(np.int64)
        self._remote = False
        self._name = repr(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._reader, self._key, self._length, self._stride)

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self._reader!r}, {self._key!r}, {self._length}, stride={self._stride})'

    def identity(self) -> tuple[Any, ...]:
        return self._key, self._length, self._stride, self._reader.identity()

    def _file_bytes(self, mask: Any) -> int | None:
        return file_bytes(self._reader, [self._key])

    async def _open(self) -> None:
        await ensure_open(self._reader)
        await compare_shards(self._reader)
        shards = columns_of_shards(self._reader)
        for columns in shards:
            if self._key not in columns.spec:
                raise UnknownKeyError(f'{columns.name}: has no key {self._key!r}, only {list(columns.spec)}')
            if columns.spec[self._key] != 'array':
                raise InvalidArgumentError(
                    f"{columns.name}: key {self._key!r}: expected the type 'array', got {columns.spec[self._key]!r}: "
                    f'write the values as arrays of one dimension'
                )
            if columns.bags[self._key].sums is not None:
                raise UnsupportedError(
                    f'{columns.name}: parts of records have no checksums: open the dataset without verify=True'
                )
        self._shards, self._remote = shards, any(columns.is_remote for columns in shards)
        await self._retry(self._read_table)

    async def _retry(self, read: Callable[[], Awaitable[T]]) -> T:
        """Read, once more if what arrives is corrupt. If a shard is not the one in the index, the error says so."""
        try:
            return await once_more(self._remote, read)
        except (ObjectChangedError, NotFoundError) as error:
            if (indexed := indexed_shards_of(self._reader)) is None:
                raise
            raise indexed.outdated(error) from error

    async def _read_table(self) -> None:
        """Compute where each array is, and how many values it has."""
        lengths = np.array([columns.length for columns in self._shards], np.int64)
        indices = np.concatenate([np.arange(length) for length in lengths.tolist()])
        picks = Picks(Datasets.of(self._shards), np.arange(len(lengths)), lengths, indices)
        (choice,) = self._shards[0].choose((self._key,))
        rows, _ = record_rows(picks, choice, await read_references(picks))
        starts, stops = await read_limits(rows)
        sizes = stops - starts
        self._firsts = np.cumsum([0, *(columns.length for columns in self._shards)])
        self._checked = np.zeros(len(starts), np.bool_)
        if len(starts):
            self._dtype, shape = await self._read_head(0, starts[0], sizes[0])
            if len(shape) != 1 or not self._dtype.itemsize:
                raise self._refused(0, f'dtype {self._dtype} and shape {shape}')
        counts = array_counts(sizes, self._dtype)
        if (counts < 0).any():
            bad = int(np.argmax(counts < 0))
            await self._check_array(bad, starts[bad], sizes[bad])
            raise CorruptDatasetError(
                f'{self._describe(bad)}: expected an array of dtype {self._dtype} and one dimension as in datapoint 0, '
                f'got {sizes[bad]} bytes, which no such array has'
            )
        self._counts, self._starts = counts, starts + sizes - counts * self._dtype.itemsize
        self._stops = np.cumsum(np.maximum(0, (counts - self._length) // self._stride + 1))

    def _describe(self, datapoint: int) -> str:
        shard = int(np.searchsorted(self._firsts, datapoint, side='right')) - 1
        return f'{self._shards[shard].name}: datapoint {datapoint - int(self._firsts[shard])}, key {self._key!r}'

    async def _read_head(self, datapoint: int, start: Any, size: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
        (head,) = await self._read(np.array([datapoint]), np.array([start]), np.array([start + min(_HEAD, size)]))
        try:
            return parse_array_head(head)[:2]
        except UNPACKING as error:
            problem = f'{head!r:.100} does not begin an array: {type(error).__name__}'
            raise CorruptDatasetError(f'{self._describe(datapoint)}: {problem}') from error

    async def _check_array(self, datapoint: int, start: Any, size: Any) -> None:
        """Raise ``InvalidArgumentError`` if a record is an array of another dtype, or of other dimensions."""
        dtype, shape = await self._read_head(datapoint, start, size)
        fills = 0 < size - math.prod(shape) * dtype.itemsize <= _HEAD
        if fills and (dtype != self._dtype or len(shape) != 1):
            raise self._refused(datapoint, f'dtype {dtype} and shape {shape}, and dtype {self._dtype} before')

    def _refused(self, datapoint: int, got: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f'{self._describe(datapoint)}: expected arrays of one dimension and one dtype, got {got}: write such '
            f'arrays, such as x[:, 0] of a recording x, or use a data source of your own'
        )

    async def _close(self) -> None:
        self._shards = []

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the windows."""
        self._check_open()
        return self._dtype

    def __len__(self) -> int:
        self._check_open()
        return int(self._stops[-1]) if len(self._stops) else 0

    async def _read_all(self, indices: Ints) -> list[Window]:
        if not len(indices):
            return []
        owners = np.searchsorted(self._stops, indices, side='right')
        previous = np.where(owners > 0, self._stops[owners - 1], 0)
        item = self._dtype.itemsize
        starts = self._starts[owners] + (indices - previous) * (self._stride * item)
        stops = starts + self._length * item
        unchecked = np.unique(owners[~self._checked[owners]])
        if len(unchecked):
            heads = np.array([len(array_head(self._dtype, count)) for count in self._counts[unchecked].tolist()])
            owners = np.append(owners, unchecked)
            starts = np.append(starts, self._starts[unchecked] - heads)
            stops = np.append(stops, self._starts[unchecked])

        async def read() -> list[bytes]:
            parts = await self._read(owners, starts, stops)
            for owner, head in zip(unchecked.tolist(), parts[len(indices) :], strict=True):
                await self._check_head(owner, head)
            return parts

        parts = await self._retry(read)
        self._checked[unchecked] = True
        return [{self._key: np.frombuffer(part, self._dtype)} for part in parts[: len(indices)]]

    async def _check_head(self, datapoint: int, head: bytes) -> None:
        count = int(self._counts[datapoint])
        if head != (expected := array_head(self._dtype, count)):
            size = len(expected) + count * self._dtype.itemsize
            await self._check_array(datapoint, self._starts[datapoint] - len(expected), size)
            raise CorruptDatasetError(
                f'{self._describe(datapoint)}: expected an array of dtype {self._dtype} and shape ({count},), got one '
                f'that begins with {head!r}'
            )

    async def _read(self, owners: Ints, starts: Ints, stops: Ints) -> list[bytes]:
        """Return byte ranges of the bags of some datapoints, in order."""
        check_open(self._reader)
        if not (shards := self._shards):
            self._check_open()  # another thread has closed them
        groups = grouped(np.searchsorted(self._firsts, owners, side='right') - 1)
        counts = [len(own) for _, own in groups]
        order = np.concatenate([own for _, own in groups])
        bags = Bags.of([shards[number].bags[self._key] for number, _ in groups])
        parts = await read_parts(bags, np.arange(len(groups)), np.array(counts), starts[order], stops[order])
        return placed(groups, cut_into(parts, counts), len(owners))

    async def _reading(self) -> tuple[int, bool]:
        return len(self) * self._length * self._dtype.itemsize, not self._remote

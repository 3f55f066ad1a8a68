"""Windows of fixed length over long arrays of tokens, read as parts of their records."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import MOST, Ints, check_integer
from granular.aio.datasets.array_table import ArrayTable
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
from granular.errors import (
    ClosedError,
    InvalidArgumentError,
    NotFoundError,
    ObjectChangedError,
    UnknownKeyError,
    UnsupportedError,
)

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
        self._table: ArrayTable | None = None
        self._stops: Ints = np.zeros(0, np.int64)  # the number of windows up to the end of each datapoint
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
        self._remote = any(columns.is_remote for columns in shards)
        table = await self._retry(lambda: ArrayTable.read(shards, self._key, flat=True))
        self._table, self._dtype = table, table.dtype
        self._stops = np.cumsum(np.maximum(0, (table.counts - self._length) // self._stride + 1))

    async def _retry(self, read: Callable[[], Awaitable[T]]) -> T:
        """Read. If a shard is not the one in the index, the error says so."""
        try:
            return await read()
        except (ObjectChangedError, NotFoundError) as error:
            if (indexed := indexed_shards_of(self._reader)) is None:
                raise
            raise indexed.outdated(error) from error

    async def _close(self) -> None:
        self._table = None

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
        begins = (indices - previous) * self._stride
        table = self._open_table()
        parts = await self._retry(lambda: table.parts(owners, begins, begins + self._length))
        return [{self._key: part} for part in parts]

    def _open_table(self) -> ArrayTable:
        check_open(self._reader)
        if (table := self._table) is None:
            self._check_open()  # another thread has closed them
            raise ClosedError(f'{self._name} is closed')
        return table

    async def _reading(self) -> tuple[int, bool]:
        return len(self) * self._length * self._dtype.itemsize, not self._remote

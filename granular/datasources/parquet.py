"""Parquet files, with I/O that blocks: the synchronous face of :mod:`granular.aio.datasources.parquet`."""

import os
from collections.abc import Iterator, Sequence
from typing import Any, Self, SupportsIndex

from granular.aio.datasources import parquet as core
from granular.aio.datasources.parquet import CACHE, Fields
from granular.aio.datasources.parquetstream import CYCLE, READ_AHEAD, parquet_stream
from granular.aio.pipeline.errors import OnError
from granular.aio.pipeline.streams import Stream
from granular.aio.pipeline.transforms import ReadOptions
from granular.aio.purepath import PurePath
from granular.bridge import iterate, run
from granular.face import Reader
from granular.mapdataset import IterDataset


class ParquetDataSource(Reader[core.ParquetDataSource]):
    """Random access to the rows of Parquet files, on a disk or in buckets, in the order given.

    ``source[i]``, ``source[-1]``, ``source[10:20]``, ``source.fetch([3, 1, 4], ('title',))``.

    A row is a dict of its columns. Numbers, booleans and times are numpy's scalars, strings, bytes and decimals
    Python's, a list a new numpy array, a struct a dict, as Google Grain gives them; a null is NaN among floats, NaT
    among times and None otherwise (:func:`granular.aio.datasources.arrowvalues.values_of`).

    Opening takes one request a file, of ``IOConfig.tail`` bytes, or two if its footer is longer. A batch is one fan-out
    of the byte ranges that its columns have in its row groups, of all files; what is decoded is kept, so that
    neighbours ask for nothing. A file is pinned to the ETag or generation that it was opened with.

    Parquet is read by the row group, however few rows are wanted: in random order over row groups that the cache does
    not hold, each row costs its row group. Choose few columns, small row groups, ``shuffle.Blocks``, or
    ``ParquetIterDataset`` with ``window_shuffle``.

    Memory: the footers, ``cache_bytes``, and while a batch is read the column chunks and decoded columns that it needs.

    Args:
      paths: a file, or a sequence of files.
      columns: their names, in the order wanted; all by default. What is not chosen is not read.
      cache_bytes: bytes of decoded columns that are kept, those used last; 0 for none.

    Raises:
      CorruptError: if a file is no Parquet file, or damaged.
      UnsupportedError: if it is encrypted, or has several columns of one name.
      CorruptDatasetError: if the files have other columns than the first.
      UnknownKeyError: if a column of ``columns`` is not there.
    """

    aio: core.ParquetDataSource

    def __init__(
        self,
        paths: PurePath | str | os.PathLike[str] | Sequence[Any],
        columns: Sequence[str] | None = None,
        cache_bytes: int = CACHE,
    ) -> None:
        self._open(core.ParquetDataSource(paths, columns, cache_bytes))

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that a row has."""
        return self.aio.columns

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return self.aio.size

    def __len__(self) -> int:
        return len(self.aio)

    def __getitem__(self, index: SupportsIndex | slice | tuple[SupportsIndex | slice, Fields]) -> Any:
        if isinstance(index, tuple):
            return run(self.aio.get(*index))
        return run(self.aio.get(index))

    def get(self, index: SupportsIndex | slice, mask: Fields = None) -> Any:
        """A row, or ``{column: [values]}`` for a slice; as ``source[index, mask]``.

        Args:
          index: an integer, negative from the end, or a slice.
          mask: the columns wanted.

        Raises:
          OutOfRangeError: an ``IndexError``, for an index beyond what is there.
          UnknownKeyError: a ``KeyError``, for a column that there is not.
        """
        return run(self.aio.get(index, mask))

    def fetch(self, indices: Any, mask: Fields = None) -> list[dict[str, Any]]:
        """Many rows in one fan-out over all files, row groups and columns.

        Args:
          indices: a 1-D sequence of integers, in any order, repeated or negative; or a slice or range.
          mask: as for ``get``.

        Returns:
          The rows, in the order asked.
        """
        return run(self.aio.fetch(indices, mask))

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        # By this name PyTorch's loaders ask for a batch.
        return self.fetch(indices)

    def _getitems(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        # By this name Grain's loaders ask for a batch.
        return self.fetch(indices)

    def copy(self) -> Self:
        """Another source of the same files, with a life and a cache of its own."""
        twin = type(self).__new__(type(self))
        twin.aio = self.aio.copy()
        return twin

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iterate(self.aio.__aiter__)


class ParquetIterDataset(IterDataset):
    """A stream of the rows of Parquet files, on a disk or in buckets, with ``for`` or ``async for``.

    Row groups come in order, each by range requests of the columns chosen; the next ones are read meanwhile. Of several
    files one row is taken of each in turn, ``cycle_length`` of them at a time, in the order of
    ``grain.experimental.ParquetIterDataset``. Rows are as those of ``ParquetDataSource``. Nothing is read before it is
    iterated; then all footers are.

    A state is ``{'row_group': r, 'index_within_row_group': i}`` of the next row; of several files ``{'files': {'0':
    that of the first, ...}, 'next_file': n}``, of those that are open.

    With ``mp_prefetch``, each worker reads the row groups of the rows that it makes: all of them, if there are several.

    Memory: the decoded row groups of ``cycle_length`` files, twice ``read_ahead``, and what ``read_options`` allow.

    Args:
      paths: a file, or a sequence of files.
      columns: their names, in the order wanted; all by default. What is not chosen is not read.
      cycle_length: how many files are read at a time.
      read_ahead: bytes of row groups that are read ahead, by what the footers say of them; at least one row group is.
      read_options: threads, and how many rows are made ahead.
      on_error: what becomes of a row that what stands before the first stage of several rows cannot make, as in
        ``MapDataset.to_iter_dataset``.
    """

    def __init__(
        self,
        paths: PurePath | str | os.PathLike[str] | Sequence[Any],
        columns: Sequence[str] | None = None,
        *,
        cycle_length: int = CYCLE,
        read_ahead: int = READ_AHEAD,
        read_options: ReadOptions | None = None,
        on_error: OnError = 'raise',
    ) -> None:
        super().__init__(parquet_stream(paths, columns, cycle_length, read_ahead, read_options, on_error))

    def _derive(self, stream: Stream) -> Any:
        return IterDataset(stream)

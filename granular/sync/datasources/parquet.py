"""Parquet files, with I/O that blocks: the synchronous face of :mod:`granular.aio.datasources.parquet.source`."""

import os
from collections.abc import Sequence
from typing import Any

from granular.aio.datasources.parquet import source as core
from granular.aio.datasources.parquet.source import CACHE
from granular.aio.datasources.parquet.stream import CYCLE, READ_AHEAD, parquet_stream
from granular.aio.execution.failures import OnError
from granular.aio.paths.pure import PurePath
from granular.aio.pipeline.streams.streams import Stream
from granular.aio.pipeline.transforms import ReadOptions
from granular.sync.base import Rows
from granular.sync.pipeline import IterDataset


class ParquetDataSource(Rows[core.ParquetDataSource]):
    """Random access to the rows of Parquet files, on a disk or in buckets, in the order given.

    ``source[i]``, ``source[-1]``, ``source[10:20]``, ``source.fetch([3, 1, 4], ('title',))``.

    A row is a dict of its columns. Numbers, booleans and times are numpy's scalars, strings, bytes and decimals
    Python's, a list a new numpy array, a struct a dict, as Google Grain gives them; a null is NaN among floats, NaT
    among times and None otherwise (:func:`granular.aio.datasources.parquet.arrow_values.values_of`).

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
      read_options: threads, and how many rows are made ahead; by default about 8 MiB of them, by the first row group.
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

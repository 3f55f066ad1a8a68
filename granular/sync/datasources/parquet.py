"""The sync API of :mod:`granular.aio.datasources.parquet`."""

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

    ::

        source = granular.ParquetDataSource('s3://bucket/train.parquet', columns=['title', 'label'])
        row = source[0]
        rows = source.fetch([3, 1, 4], ('title',))  # only this column is read

    A row is a dict of its columns. Numbers, booleans and times are numpy scalars; strings, bytes and decimals are
    Python objects; a list is a new numpy array and a struct a dict, as in Google Grain. A null is NaN in a float
    column, NaT in a time column and None otherwise (:func:`granular.aio.datasources.parquet.arrow_values.values_of`).

    Opening takes one request of ``IOConfig.tail`` bytes per file, or two if its footer is longer. For a batch, the byte
    ranges of its columns in its row groups are read from all files concurrently; decoded columns are cached, so that
    reads of neighbouring rows need no request. A file is pinned to the ETag or generation that it was opened with.

    Parquet is read by the row group, however few rows are needed: in random order over row groups that are not cached,
    each row costs its row group. Choose few columns, small row groups, ``shuffle.Blocks``, or ``ParquetIterDataset``
    with ``window_shuffle``.

    Memory: the footers, ``cache_bytes``, and during a read the column chunks and decoded columns that it needs.

    Args:
      paths: a file, or a sequence of files.
      columns: the names of the columns to read, in the order wanted; all by default.
      cache_bytes: limit on the bytes of decoded columns in the LRU cache; 0 for no cache.

    Raises:
      CorruptError: if a file is not a Parquet file, or is damaged.
      UnsupportedError: if it is encrypted, or has several columns of one name.
      CorruptDatasetError: if a file has other columns than the first.
      UnknownKeyError: if a column of ``columns`` does not exist.
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
        """The names of a row's columns."""
        return self.aio.columns


class ParquetIterDataset(IterDataset):
    """A stream of the rows of Parquet files, on a disk or in buckets, for ``for`` or ``async for``.

    ::

        stream = granular.ParquetIterDataset(['s3://bucket/a.parquet', 's3://bucket/b.parquet'], columns=['label'])
        for row in stream:
            print(row['label'])

    Row groups are read in order, each with range requests for the chosen columns, and the next ones are prefetched.
    Several files are interleaved row by row, ``cycle_length`` of them at a time, in the order of
    ``grain.experimental.ParquetIterDataset``. Rows are as in ``ParquetDataSource``. Nothing is read until the stream is
    iterated; then all footers are read.

    A state is ``{'row_group': r, 'index_within_row_group': i}`` of the next row; for several files ``{'files': {'0':
    state of the first, ...}, 'next_file': n}``, for the files that are open.

    With ``mp_prefetch``, each worker reads the row groups of the rows that it produces: all row groups, if there are
    several workers.

    Memory: the decoded row groups of ``cycle_length`` files, twice ``read_ahead``, and the rows that ``read_options``
    allow.

    Args:
      paths: a file, or a sequence of files.
      columns: the names of the columns to read, in the order wanted; all by default.
      cycle_length: number of files that are read at a time.
      read_ahead: bytes of row groups to prefetch, by the sizes in the footers; at least one row group is prefetched.
      read_options: the threads, and the number of rows to prepare ahead; by default about 8 MiB of rows, by the first
        row group.
      on_error: how to handle a row for which a stage before the first multi-row stage fails, as in
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

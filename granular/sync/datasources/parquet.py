"""The sync API of :mod:`granular.aio.datasources.parquet`."""

import os
from collections.abc import Sequence
from typing import Any

from granular.aio.datasources.parquet import source as core
from granular.aio.datasources.parquet.source import CACHE
from granular.aio.paths.pure import PurePath
from granular.sync.base import Rows


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

"""Reads Parquet files at random: the column chunks of row groups by range requests, decoded by pyarrow."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, Self

from granular._support.indexing import Ints, check_integer
from granular._support.lazy import import_extra
from granular._support.typing import Datapoint_co
from granular.aio.datasources.arguments import Paths, names_in
from granular.aio.datasources.discovery.discover import Files
from granular.aio.datasources.indexed_files import MaskedFiles, bytes_from, files_of
from granular.aio.datasources.parquet.file import Footer, footer_length, parse_footer
from granular.aio.datasources.parquet.row_groups import RowGroups, Values
from granular.aio.paths.path import Path
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import offload
from granular.config import MiB
from granular.errors import CorruptDatasetError, InvalidArgumentError
from granular.formats.arrow_values import has_null

CACHE: Final = 512 * MiB


class ParquetDataSource(MaskedFiles[Footer, Datapoint_co]):
    """Random access to the rows of Parquet files, on a disk or in buckets, in the order given.

    ::

        async with granular.aio.ParquetDataSource('s3://bucket/train.parquet', columns=['title', 'label']) as source:
            row = await source.get(0)
            rows = await source.fetch([3, 1, 4], ('title',))  # only this column is read

    A row is a dict of its columns. Numbers, booleans, dates, timestamps and durations are numpy scalars; strings,
    bytes, decimals and times of day are Python objects; a list is a new numpy array, or a list of such objects, and a
    struct a dict. A null is NaN in a float column, NaT in a date or time column and None otherwise; a list of integers
    with a null is float64 with NaN.

    Opening takes one request of ``IOConfig.tail`` bytes per file, or two if its footer is longer. A file is pinned to
    the ETag or generation that it was opened with. A batch reads its columns of its row groups from all files
    concurrently; decoded columns are cached. However few rows are needed, the row group is read: in random order,
    choose few columns, small row groups, ``shuffle.Blocks``, or ``ParquetIterDataset`` with ``window_shuffle``.

    Memory: the footers, ``cache_bytes``, and during a read the column chunks and decoded columns that it needs.

    Args:
      paths: a file, a folder, a pattern, or a sequence of files.
      columns: the names of the columns to read, in the order wanted; all by default.
      cache_bytes: limit on the bytes of decoded columns in the LRU cache; 0 for no cache.
      hive: False to ignore the columns in the names of folders, such as ``day=3``, below a folder or pattern.
      split: the split to read, such as ``'train'``, of a folder or pattern that has files of several.

    Raises:
      CorruptError: if a file is not a Parquet file, or is damaged.
      UnsupportedError: if it is encrypted, as a whole or in part, or has several columns of one name.
      CorruptDatasetError: if a file has other columns than the first.
      InvalidArgumentError: if the name of a folder has a column that the files have, too.
      UnknownKeyError: if a column of ``columns`` does not exist.
    """

    _named = 'columns'
    _format = 'parquet'

    def __init__(
        self,
        paths: Paths | Files,
        columns: Sequence[str] | None = None,
        cache_bytes: int = CACHE,
        *,
        hive: bool = True,
        split: str | None = None,
    ) -> None:
        import_extra('pyarrow', 'parquet')
        super().__init__(paths, split=split)
        names = tuple(columns) if isinstance(columns, Iterable) and not isinstance(columns, str) else None
        if columns is not None and (names is None or not all(type(name) is str for name in names)):
            raise InvalidArgumentError(f'columns: expected a sequence of names, got {columns!r:.100}')
        self._requested = None if names is None else tuple(dict.fromkeys(names))
        self._columns: tuple[str, ...] = ()
        self._hive = hive
        self._partitions: dict[str, list[Any]] = {}  # the columns in the names of folders, with a value for each file
        self._cache_bytes = check_integer('cache_bytes', cache_bytes, 0)
        self._groups = RowGroups([], self._cache_bytes)

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self._files, self._requested, self._cache_bytes), {'hive': self._hive}

    async def _read_file_indices(self) -> list[Footer]:
        for path in self.paths:
            await path.store.ready()
        return await gather([_read_footer(path) for path in self.paths])

    async def _open(self) -> None:
        await super()._open()
        first = self._file_indices[0]
        for footer in self._file_indices:
            if set(footer.names) != set(first.names):
                raise CorruptDatasetError(
                    f'{footer.path}: expected the columns of {first.path}, {sorted(first.names)}, got '
                    f'{sorted(footer.names)}: pass a pattern or a list of files of the same columns'
                )
        self._partitions = self._files.partitions() if self._hive else {}
        if clash := sorted(self._partitions.keys() & set(first.names)):
            raise InvalidArgumentError(
                f'{self._name}: has the columns {clash} in the names of its folders and in its files: pass hive=False '
                f'for those of the files'
            )
        available = (*first.names, *self._partitions)
        self._columns = available if self._requested is None else self._requested
        names_in(self._columns, available, self._named, self._name)
        self._groups = RowGroups(self._file_indices, self._cache_bytes)

    async def _close(self) -> None:
        await super()._close()
        await self._groups.release()

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of a row's columns."""
        self._check_open()
        return self._columns

    async def _nullable_keys(self, mask: Collection[str] | None) -> frozenset[str]:
        await self._ensure_open()
        return await offload(_columns_with_none, self, mask)

    def identity(self) -> tuple[Any, ...]:
        return *super().identity(), self._columns

    async def _reading(self) -> tuple[int, bool]:
        return self.size, False  # decoding takes place in threads

    def copy(self) -> Self:
        """Return an independently closable source of the same files, with a cache of its own."""
        return self._copied(_groups=self._groups.copy())

    @property
    def _available(self) -> tuple[str, ...]:
        return self._columns

    async def _read_rows(self, positions: Ints, names: tuple[str, ...]) -> list[dict[str, Any]]:
        stored = tuple(name for name in names if name not in self._partitions)
        rows = await self._groups.read(positions, stored, _rows)
        if len(stored) == len(names):
            return rows
        values = self._partition_values(positions, names)
        return [{name: row[name] if name in row else values[name][i] for name in names} for i, row in enumerate(rows)]

    async def _read_columns(self, positions: Ints, names: tuple[str, ...]) -> dict[str, list[Any]]:
        stored = tuple(name for name in names if name not in self._partitions)
        columns = await self._groups.read(positions, stored, lambda _, values: values)
        columns.update(self._partition_values(positions, names))
        return {name: columns[name] for name in names}

    def _partition_values(self, positions: Ints, names: tuple[str, ...]) -> dict[str, list[Any]]:
        owners = self._locate(positions)[0].tolist()
        return {name: [self._partitions[name][i] for i in owners] for name in names if name in self._partitions}


def part_of(source: ParquetDataSource[Any], part: slice) -> ParquetDataSource[Any]:
    """Return a source of some of the files of a source; raise ``InvalidArgumentError`` if there is none."""
    files = files_of(source).of_part(part)
    return ParquetDataSource(files, source._requested, source._cache_bytes, hive=source._hive)


def is_found(source: ParquetDataSource[Any]) -> bool:
    """Return whether the files of a source are known."""
    return files_of(source).is_final


def stored_columns(source: ParquetDataSource[Any]) -> tuple[str, ...]:
    """Return the names of the columns of an open source that are in its files."""
    return tuple(name for name in source._columns if name not in source._partitions)


def partitions_of_files(source: ParquetDataSource[Any]) -> dict[str, list[Any]]:
    """Return the columns in the names of the folders of an open source, with a value for each file."""
    return source._partitions


def arrow_types(source: ParquetDataSource[Any]) -> dict[str, list[Any]]:
    """Return the types in Arrow of the columns of the files of an open source, one for each that differs."""
    types: dict[str, list[Any]] = {name: [] for name in stored_columns(source)}
    for footer in source._groups.footers:
        schema = footer.metadata.schema.to_arrow_schema()
        for name, found in types.items():
            if (kind := schema.field(name).type) not in found:
                found.append(kind)
    return types


async def columns_with_nulls(source: ParquetDataSource[Any]) -> set[str]:
    """Return the names of the columns of an open source that have nulls: by the counts in the footers, or by the values
    where a column has no count, or its lists or structs may hold the nulls that were counted.
    """
    return {name for name in stored_columns(source) if await source._groups.has_nulls(name)}


def _columns_with_none(source: ParquetDataSource[Any], mask: Collection[str] | None) -> frozenset[str]:
    types = arrow_types(source)
    names = [name for name in types if (mask is None or name in mask) and not all(map(has_null, types[name]))]
    return frozenset(filter(source._groups.may_have_nulls, names))


def may_have_nulls(source: ParquetDataSource[Any]) -> list[bool]:
    """Return for each column of the files of an open source whether it may have nulls, also in lists and structs."""
    return [source._groups.may_have_nulls(name) for name in stored_columns(source)]


def row_groups_of(source: ParquetDataSource[Any]) -> RowGroups:
    return source._groups


def _rows(count: int, values: Values) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, column in values.items():
        for row, value in zip(rows, column, strict=True):
            row[name] = value
    return rows


async def _read_footer(path: Path) -> Footer:
    reply = await path.store.read(path.key, -path.store.config.tail)
    length = footer_length(path, reply.size, reply.data)
    footer = await bytes_from(path, reply, reply.size - length)
    return await offload(parse_footer, path, reply.size, reply.version, footer)

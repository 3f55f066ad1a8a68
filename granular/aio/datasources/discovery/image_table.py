"""Tables beside images, of the names of their files and of what belongs to them, as in Hugging Face's ImageFolder."""

import collections
import dataclasses
import io
import posixpath
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

from granular._support.lazy import import_extra
from granular.aio.paths.path import Path
from granular.aio.paths.pure import relative_name
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import offload
from granular.aio.stores import Entry
from granular.errors import CorruptError, InvalidArgumentError, NotFoundError

TABLES: Final = ('metadata.csv', 'metadata.jsonl', 'metadata.parquet')
"""The names of tables beside images."""

_IMAGE: Final = 'image'
_ONE: Final = 'file_name'
_SEVERAL: Final = 'file_names'
_REMEDY: Final = 'rename it, or move it out of the folder, if it is not of the images'

Files = Entry | list[Entry] | None


@dataclasses.dataclass(frozen=True)
class ImageTable:
    """The records of images that are listed in tables.

    Attributes:
      names: the names of the tables.
      files: the files of each record, by its fields of images.
      others: a table in Arrow of its other fields.
    """

    names: tuple[str, ...]
    files: Mapping[str, Sequence[Files]]
    others: Any

    def __len__(self) -> int:
        return len(next(iter(self.files.values())))

    def entries(self) -> list[Entry]:
        """Return the files of all records, sorted, without repeats."""
        found = {one.key: one for column in self.files.values() for files in column for one in _listed(files)}
        return [found[key] for key in sorted(found)]

    def among(self, keys: Set[str]) -> 'ImageTable':
        """Return the records whose files are all among those of some keys."""
        rows = zip(*self.files.values(), strict=True)
        kept = [i for i, row in enumerate(rows) if all(one.key in keys for files in row for one in _listed(files))]
        files = {field: [column[i] for i in kept] for field, column in self.files.items()}
        return ImageTable(self.names, files, self.others.take(kept))


def _listed(files: Files) -> list[Entry]:
    return files if isinstance(files, list) else [] if files is None else [files]


def tables_among(entries: Sequence[Entry], images: Sequence[Entry]) -> list[Entry]:
    """Return the files that are named as tables of images, and have images in their folder or below it."""
    folders: set[str] = set()
    for folder in {_folder(image) for image in images}:
        while folder not in folders:
            folders.add(folder)
            folder = folder.rstrip('/').rpartition('/')[0] + '/' if folder.strip('/') else ''
    tables = (entry for entry in entries if entry.name in TABLES and _folder(entry) in folders)
    return sorted(tables, key=lambda entry: entry.key)


def _folder(entry: Entry) -> str:
    return entry.key[: -len(entry.name)]


async def read_tables(base: Path, tables: Sequence[Entry], files: Mapping[str, Entry], name: str) -> ImageTable:
    """Read the tables of images.

    Args:
      base: the folder that is opened.
      tables: the files of the tables.
      files: the files in the folder, by their keys.
      name: of the folder, for errors.

    Raises:
      CorruptError: if a table cannot be read.
      InvalidArgumentError: if tables have no names of files, or other columns than the first.
      NotFoundError: if a file is not in the folder of its table.
    """
    pa = import_extra('pyarrow', 'parquet')
    if len(kinds := {entry.name for entry in tables}) > 1:
        raise InvalidArgumentError(
            f'{name}: has tables of images of several formats, {sorted(kinds)}: keep those of one'
        )
    replies = await gather([base.store.read(entry.key) for entry in tables])
    paths = [Path.of(base.store, entry.key) for entry in tables]
    read = [offload(_parse, path, reply.data) for path, reply in zip(paths, replies, strict=True)]
    parsed = await gather(read)
    for path, table in zip(paths, parsed, strict=True):
        if sorted(table.schema.names) != sorted(parsed[0].schema.names):
            raise InvalidArgumentError(
                f'{path}: expected the columns of {paths[0]}, {parsed[0].schema.names}, got {table.schema.names}: '
                f'{_REMEDY}'
            )
    columns = parsed[0].schema.names
    fields = {column: _field_of(column) for column in columns}
    named = collections.Counter(fields[column] or column for column in columns)
    if twice := [field for field, count in named.items() if count > 1]:
        raise InvalidArgumentError(f'{paths[0]}: several of its columns would be the field {twice[0]!r}: rename them')
    if not any(fields.values()):
        raise InvalidArgumentError(
            f'{paths[0]}: has no column {_ONE!r}, with the names of images, only {list(fields)}: {_REMEDY}'
        )
    try:
        whole = pa.concat_tables(parsed, promote_options='permissive')
    except pa.ArrowException as error:
        raise InvalidArgumentError(f'{name}: {[*kinds]} have columns of other types: {error}') from error
    found = {
        field: [
            _found(value, entry, files, path)
            for entry, path, table in zip(tables, paths, parsed, strict=True)
            for value in table.column(column).to_pylist()
        ]
        for column, field in fields.items() if field
    }  # fmt: skip
    names = tuple(relative_name(base, entry.key) for entry in tables)
    return ImageTable(names, found, whole.select([column for column, field in fields.items() if not field]))


def _field_of(column: str) -> str:
    """Return the field of the images that a column names; empty if it names none."""
    if column in (_ONE, _SEVERAL):
        return _IMAGE if column == _ONE else f'{_IMAGE}s'
    return next((column.removesuffix(f'_{end}') for end in (_ONE, _SEVERAL) if column.endswith(f'_{end}')), '')


def _found(value: Any, table: Entry, files: Mapping[str, Entry], path: Path) -> Files:
    """Return the files of a value; raise an error if one is not in the folder of the table."""
    if value is None:
        return None
    if isinstance(value, list):
        found = [_found(one, table, files, path) for one in value]
        return [one for one in found if isinstance(one, Entry)]
    if not isinstance(value, str):
        raise InvalidArgumentError(f'{path}: expected the names of files, got {value!r:.100}')
    # Names that lead out of the folder are those of no listed file.
    name = posixpath.normpath(value.replace('\\', '/'))
    if (entry := files.get(f'{_folder(table)}{name}')) is None or name.startswith(('/', '../')):
        raise NotFoundError(f'{path}: names the file {value!r}, which is not in its folder: remove the row')
    return entry


def _parse(path: Path, data: bytes) -> Any:
    pa = import_extra('pyarrow', 'parquet')
    try:
        if path.suffix == '.parquet':
            return import_extra('pyarrow.parquet', 'parquet').read_table(io.BytesIO(data))
        if path.suffix == '.jsonl':
            json = import_extra('pyarrow.json', 'parquet')
            options = json.ReadOptions(block_size=len(data) + 1)  # lines may be long
            return json.read_json(io.BytesIO(data), read_options=options)
        return _parse_csv(data)
    except pa.ArrowException as error:
        raise CorruptError(f'{path}: is not a table of images: {error}: {_REMEDY}') from error


def _parse_csv(data: bytes) -> Any:
    """Return the table of a CSV file: numbers, booleans and text; dates are text, as in pandas."""
    pa, csv = import_extra('pyarrow', 'parquet'), import_extra('pyarrow.csv', 'parquet')
    form = csv.ParseOptions(newlines_in_values=True)
    options = csv.ReadOptions(block_size=len(data) + 1)  # types are those of all rows
    table = csv.read_csv(io.BytesIO(data), options, form)
    kinds = pa.types
    texts = [field.name for field in table.schema if kinds.is_temporal(field.type) or kinds.is_null(field.type)]
    if not texts:
        return table
    return csv.read_csv(
        io.BytesIO(data), options, form, csv.ConvertOptions(column_types=dict.fromkeys(texts, pa.string()))
    )

"""Folders of images, one folder per class or with a table of them, as data sources."""

import abc
from collections.abc import Mapping
from typing import Any

import numpy as np

from granular.aio.conversion.infer import FileRecord
from granular.aio.conversion.schema import Column, column_of, has_nulls
from granular.aio.datasources.discovery.discover import Discovery
from granular.aio.datasources.discovery.image_table import Files, ImageTable
from granular.aio.paths.path import Path
from granular.aio.paths.pure import relative_name
from granular.aio.runtime.tasks import gather
from granular.aio.stores import Entry
from granular.errors import InvalidArgumentError
from granular.formats.arrow_values import values_of


class Images(abc.ABC):
    """Records with the files of images in a folder, and other values.

    Attributes:
      fields: the fields that are images.
      columns: what is known of the types of the others.
    """

    fields: tuple[str, ...]
    columns: Mapping[str, Column]

    def __init__(self, base: Path) -> None:
        self._base = base

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def _row(self, index: int) -> tuple[Mapping[str, Files], Mapping[str, Any]]:
        """Return the files of the images of a record, and its other values."""

    async def fetch(self, indices: Any) -> list[FileRecord]:
        rows = [self._row(index) for index in np.asarray(indices).tolist()]
        images = await gather([self._read(one) for files, _ in rows for one in files.values()])
        read, records = iter(images), []
        for files, values in rows:
            record = FileRecord({field: next(read) for field in files})
            record.update(values)
            first = next((one for one in files.values() if one), None)
            entry = first[0] if isinstance(first, list) else first
            record.path = f'{self._base}' if entry is None else self._base.store.url(entry.key)
            record.file = '' if entry is None else relative_name(self._base, entry.key)
            records.append(record)
        return records

    async def _read(self, files: Files) -> Any:
        if isinstance(files, list):
            return await gather([self._read(entry) for entry in files])
        return None if files is None else (await self._base.store.read(files.key)).data


class ImageFolder(Images):
    """Images in one folder per class: ``image`` (the file's bytes), ``label`` (the class number), ``class`` (its name).

    Classes are the folders with images at any depth, sorted by name; the images of a class are sorted by path. The
    names of all files are held in memory.
    """

    fields, columns = ('image',), {}

    def __init__(self, found: Discovery) -> None:
        super().__init__(found.base)
        names = [relative_name(found.base, entry.key).removeprefix(found.classes) for entry in found.entries]
        if not any('/' in name for name in names):
            raise InvalidArgumentError(
                f'{found.name}: {names[0]} and all other images are in no folder of a class: move them into one, as '
                f'in {found.base.name}/NAME/{names[0]}, or list them in a metadata.csv with the column file_name'
            )
        images = [(name.partition('/')[0], entry) for name, entry in zip(names, found.entries, strict=True)]
        images.sort(key=lambda pair: (pair[0], pair[1].key))
        self.classes: list[str] = sorted({name for name, _ in images})
        self._labels = {name: label for label, name in enumerate(self.classes)}
        self._rows: list[tuple[str, Entry]] = images

    def __len__(self) -> int:
        return len(self._rows)

    def _row(self, index: int) -> tuple[Mapping[str, Files], Mapping[str, Any]]:
        name, entry = self._rows[index]
        return {'image': entry}, {'label': self._labels[name], 'class': name}


class TableOfImages(Images):
    """Images that a table lists, in its order, with the values of its other columns, as in Hugging Face's ImageFolder.

    The whole table is held in memory.
    """

    def __init__(self, base: Path, table: ImageTable) -> None:
        super().__init__(base)
        self._table, others = table, table.others
        self._values = {name: values_of(others.column(name)) for name in others.column_names}
        self.fields = tuple(table.files)
        self.columns = {
            name: column_of([column.type], column.null_count > 0, has_nulls(column))
            for name, column in zip(others.column_names, others.columns, strict=True)
        }

    def __len__(self) -> int:
        return len(self._table)

    def _row(self, index: int) -> tuple[Mapping[str, Files], Mapping[str, Any]]:
        files = {field: column[index] for field, column in self._table.files.items()}
        return files, {name: values[index] for name, values in self._values.items()}


def images_of(found: Discovery) -> Images:
    """Return the records of the images that were found."""
    return ImageFolder(found) if found.table is None else TableOfImages(found.base, found.table)

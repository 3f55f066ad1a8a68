"""Folders of images, one folder per class, as a data source."""

from typing import Any

import numpy as np

from granular.aio.conversion.infer import FileRecord
from granular.aio.datasources.discovery.discover import Discovery
from granular.aio.paths.pure import relative_name
from granular.aio.runtime.tasks import gather
from granular.aio.stores import Entry
from granular.errors import InvalidArgumentError


class ImageFolder:
    """Images in one folder per class: ``image`` (the file's bytes), ``label`` (the class number), ``class`` (its name).

    Classes are the folders with images at any depth, sorted by name; the images of a class are sorted by path. The
    names of all files are held in memory.
    """

    def __init__(self, found: Discovery) -> None:
        self._base = found.base
        names = [relative_name(found.base, entry.key).removeprefix(found.classes) for entry in found.entries]
        if not any('/' in name for name in names):
            raise InvalidArgumentError(
                f'{found.name}: {names[0]} and all other images are in no folder of a class: move them into one, as '
                f'in {found.base.name}/NAME/{names[0]}'
            )
        images = [(name.partition('/')[0], entry) for name, entry in zip(names, found.entries, strict=True)]
        images.sort(key=lambda pair: (pair[0], pair[1].key))
        self.classes: list[str] = sorted({name for name, _ in images})
        self._labels = {name: label for label, name in enumerate(self.classes)}
        self._rows = images
        self.size: int = sum(entry.size for _, entry in images)

    def __len__(self) -> int:
        return len(self._rows)

    def files(self) -> list[tuple[str, int]]:
        return [(entry.key, entry.size) for _, entry in self._rows]

    async def fetch(self, indices: Any) -> list[FileRecord]:
        rows = [self._rows[index] for index in np.asarray(indices).tolist()]
        replies = await gather([self._base.store.read(entry.key) for _, entry in rows])
        return [self._record(reply.data, name, entry) for (name, entry), reply in zip(rows, replies, strict=True)]

    def _record(self, data: bytes, name: str, entry: Entry) -> FileRecord:
        record = FileRecord(image=data, label=self._labels[name])
        record['class'], record.path = name, self._base.store.url(entry.key)
        record.file = relative_name(self._base, entry.key)
        return record

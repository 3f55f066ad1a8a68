"""Folders of images, one folder per class, as a data source."""

import collections
import contextlib
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np

from granular._words import counted, logger
from granular.aio.conversion.infer import FileRecord
from granular.aio.paths.path import Path
from granular.aio.runtime.tasks import gather
from granular.aio.stores import Entry
from granular.errors import InvalidArgumentError, NotFoundError

IMAGE_SUFFIXES: Final = ('jpg', 'jpeg', 'png', 'webp', 'gif', 'bmp', 'tif', 'tiff', 'ppm', 'pgm')
_ENDINGS: Final = tuple(f'.{suffix}' for suffix in IMAGE_SUFFIXES)
_SPLITS: Final = {'train', 'training', 'val', 'valid', 'validation', 'dev', 'eval', 'test'}


class ImageFolder:
    """Images in one folder per class: ``image`` (the file's bytes), ``label`` (the class number), ``class`` (its name).

    Classes are the folders in ``folder`` with images at any depth, sorted by name; the images of a class are sorted by
    path. Images beside these folders are left out, which is logged. The names of all files are held in memory.
    """

    def __init__(self, folder: Path, entries: Sequence[Entry]) -> None:
        base = self._base = len(folder.key.rstrip('/')) + 1 if folder.key not in ('', '.') else 0
        images = [(entry.key[base:].partition('/')[0], entry) for entry in entries if '/' in entry.key[base:]]
        images.sort(key=lambda pair: (pair[0], pair[1].key))
        if images and (others := [entry.name for entry in entries if '/' not in entry.key[base:]]):
            logger.warning(
                '%s: left out %s in no folder of a class, such as %s: move them into one, as in %s/NAME',
                folder, counted(len(others), 'image'), min(others), folder.name,
            )  # fmt: skip
        self._folder = folder
        self.classes: list[str] = sorted({name for name, _ in images})
        if images and _SPLITS.issuperset(self.classes):
            logger.warning(
                '%s: takes %s as classes, the names of which are those of splits: convert each folder by itself',
                folder, self.classes,
            )  # fmt: skip
        self._labels = {name: label for label, name in enumerate(self.classes)}
        self._rows = [(name, entry.key) for name, entry in images]
        self._sizes = [entry.size for _, entry in images]
        self.size: int = sum(self._sizes)

    @classmethod
    async def listed(cls, folder: Path) -> 'ImageFolder':
        """List a folder and return its images; raise ``NotFoundError`` if there are none."""
        entries, others = [], collections.Counter[str]()
        async with contextlib.aclosing(folder.store.scan_tree(folder.key)) as tree:
            async for entry in tree:
                name = entry.name
                if entry.is_dir or name.startswith('.'):
                    continue
                if name.lower().endswith(_ENDINGS):
                    entries.append(entry)
                else:
                    others[PurePosixPath(name).suffix or 'without a suffix'] += 1
        images = cls(folder, entries)
        if entries and others:
            shown = ', '.join(f'{count} {suffix}' for suffix, count in others.most_common(5))
            logger.warning(
                '%s: left out %s whose names do not end as those of images do: %s',
                folder, counted(others.total(), 'file'), shown,
            )  # fmt: skip
        if entries and not len(images):
            raise InvalidArgumentError(
                f'{folder}: {entries[0].name} and all other images are in no folder of a class: move them into one, as '
                f'in {folder.name}/NAME/{entries[0].name}'
            )
        if not entries:
            raise NotFoundError(f'{folder}: has no images in folders by class ({", ".join(_ENDINGS)})')
        return images

    def __len__(self) -> int:
        return len(self._rows)

    def files(self) -> list[tuple[str, int]]:
        return [(key, size) for (_, key), size in zip(self._rows, self._sizes, strict=True)]

    async def fetch(self, indices: Any) -> list[FileRecord]:
        rows = [self._rows[index] for index in np.asarray(indices).tolist()]
        replies = await gather([self._folder.store.read(key) for _, key in rows])
        return [self._record(reply.data, *row) for row, reply in zip(rows, replies, strict=True)]

    def _record(self, data: bytes, name: str, key: str) -> FileRecord:
        record = FileRecord(image=data, label=self._labels[name])
        record['class'], record.path, record.file = name, self._folder.store.url(key), key[self._base :]
        return record

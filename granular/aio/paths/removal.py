"""Marks in folders of a bucket, which has no locks: of a running ``granular clean``, or of a writer that failed.

The cleaner writes its mark, looks for ``spec.json``, and only if there is none removes the bags, and then the mark. A
writer, or a copy, publishes ``spec.json``, and then lists the folder. So the cleaner sees the dataset, or the writer
sees that its bags are being removed, or are gone.

A writer that failed marks the folder likewise while it removes what it has published. A copy may have found that to
equal its own files; for another writer, it is of no use.
"""

import contextlib
import re
import secrets
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from typing import Final

from granular.aio.paths.pure import PurePath
from granular.aio.stores import Entry

_NAME: Final = re.compile(r'\.removal\.[0-9a-f]{16}(\.writer)?')


def is_mark(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


@contextlib.asynccontextmanager
async def marked(folder: PurePath, by_writer: bool = False) -> AsyncIterator[None]:
    """Mark a folder for the block. After an error the mark stays: a request to remove files may still be under way."""
    path = folder / f'.removal.{secrets.token_hex(8)}{".writer" * by_writer}'
    await path.store.write(path.key, b'granular')
    yield
    await path.store.delete([path.key])


async def find_removal(
    folder: PurePath, names: Iterable[str], entries: Sequence[Entry], by_writers: bool = False
) -> str:
    """Return why files of a folder may be removed now, or are already, for an error message; '' if that is not so.

    The entries of the folder were listed after ``spec.json`` was published. With ``by_writers``, the files may be those
    of a writer that failed.
    """
    if reason := explain((entry.name for entry in entries), by_writers):
        return reason
    gone = await first_missing((folder / name for name in sorted(names)), {entry.key for entry in entries})
    return '' if gone is None else f'{gone.name} was removed during the write'


async def first_missing(files: Iterable[PurePath], listed: Collection[str]) -> PurePath | None:
    """Return the first file that is neither among the keys of a listing nor found: some stores list new files late."""
    for file in files:
        if file.key not in listed and await file.store.find(file.key) is None:
            return file
    return None


def explain(names: Iterable[str], by_writers: bool = False) -> str:
    """Return what a mark among the names in a folder means, for an error message; '' if there is none."""
    for mark in filter(is_mark, names):
        if by_writers or not mark.endswith('.writer'):
            remover = 'a writer that failed' if mark.endswith('.writer') else '`granular clean`'
            return f'{remover} is removing its files, or was killed: if it is not running, remove {mark}'
    return ''

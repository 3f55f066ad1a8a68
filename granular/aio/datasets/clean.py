"""Finding and removing what writers left that were killed."""

import dataclasses
import os
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, Literal

from granular.aio.datasets.claims import is_claim
from granular.aio.paths.path import Path
from granular.aio.runtime.threads import offload
from granular.aio.stores import Entry, Store, Upload
from granular.aio.stores.local.locks import FolderLock, held
from granular.aio.stores.local.store import LocalStore
from granular.aio.stores.local.writing import drafted
from granular.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from granular.formats.layout import SUFFIXES, shard_number

_BAG: Final = re.compile(r'[a-z_][A-Za-z0-9_.-]*')
_INDEX_DRAFT: Final = re.compile(r'[0-9a-f]{40}\.index\.[0-9a-f]{8}\.tmp')


@dataclasses.dataclass(frozen=True, slots=True)
class Leftover:
    """Something that a writer left which did not come to its end.

    Attributes:
      place: the file or folder, or the object that an upload was to become.
      kind: ``'upload'`` in parts that was not finished, ``'draft'`` of a file, file of a ``'bag'`` in a dataset without
        a ``spec.json``, empty ``'folder'`` of a shard, or ``'claim'`` of a writer of shards in a bucket.
      size: its bytes.
      age: seconds since something was last written in its folder.
    """

    place: str
    kind: Literal['upload', 'draft', 'bag', 'folder', 'claim']
    size: int
    age: float


async def clean(
    place: Path | str | Any, remove: bool = False, older: float = 3600.0, bags: bool = False
) -> list[Leftover]:
    """What killed writers left below a folder: uploads in parts, drafts, claims, datasets and shards without a spec.

    A dataset that has its ``spec.json`` is never touched, nor what a living writer of this machine holds, nor what
    cannot be told from bags that were written on their own: those lie in a folder without a ``refs.bag``, and not
    beside a finished shard. Uploads to GCS cannot be listed; they expire by themselves after a week. What a writer in
    the columns layout could go on with is removed like the rest.

    Args:
      place: the folder. Nothing outside is touched, and no link is followed.
      remove: remove what was found.
      older: only folders in which nothing was written for so many seconds, by the store's clock. In a bucket, this is
        all that spares those who write right now. A writer of shards renews its claim every ten minutes, which spares
        all of its shards.
      bags: also bags in any folder without a ``spec.json``, even if they may have been written on their own.

    Returns:
      What was found, sorted by place.

    Raises:
      NotFoundError: if there is no such folder on a disk.
      StoreError: if the store fails.
    """
    root = Path(place)
    if older < 0:
        raise InvalidArgumentError(f'older is {older}: want seconds, 0 or more')
    store = root.store
    await store.ready()
    if await root.is_file():
        raise InvalidArgumentError(f'{root}: is a file: want the folder that it lies in')
    now = await store.now(root.key)  # by the clock that the times of change are of
    folders = await _folders(store, root.key)
    async for upload in store.uploads(root.key):
        folder = folders.setdefault(upload.key.rpartition('/')[0], _Folder())
        folder.uploads.append(upload)
    finished = {_shards_of(key) for key, folder in folders.items() if folder.finished and key != root.key} - {None}
    found: list[Leftover] = []
    claims = [(key, claim) for key, folder in folders.items() for claim in folder.claims]
    claimed = {key for key, claim in claims if _since(claim.modified, now) < older}
    for key, folder in folders.items():
        if key != root.key and _shards_of(key) in claimed:
            continue  # a living writer's, however long it takes to fill a shard
        beside = key != root.key and _shards_of(key) in finished
        found += await _Cleaning(store, key, folder, beside, bags).run(now, older, remove)
    return sorted(found, key=lambda leftover: leftover.place)


@dataclasses.dataclass(slots=True)
class _Folder:
    """What lies in a folder, by name, and what is being uploaded to it."""

    files: dict[str, Entry] = dataclasses.field(default_factory=dict)
    uploads: list[Upload] = dataclasses.field(default_factory=list)
    itself: Entry | None = None
    crowded: bool = False  # whether there are other things in it

    @property
    def finished(self) -> bool:
        return 'spec.json' in self.files

    @property
    def claims(self) -> list[Entry]:
        return [entry for name, entry in self.files.items() if is_claim(name)]


async def _folders(store: Store, root: str) -> dict[str, _Folder]:
    """The folders below a key that hold something of ours, those on top first."""
    folders: dict[str, _Folder] = {root: _Folder()}
    entries = _local_tree(store, root) if store.local else store.scan_tree(root)
    try:
        async for entry in entries:
            parent, _, name = entry.key.rpartition('/')
            if store.local:
                parent = parent or ('/' if entry.key.startswith('/') else '.')
            folder = folders.setdefault(parent, _Folder())
            if entry.is_dir:
                folder.crowded = True
                folders.setdefault(entry.key, _Folder()).itself = entry
            elif _ours(name):
                folder.files[name] = entry
            else:
                folder.crowded = True
    except NotFoundError:
        if store.local:
            raise
    return folders


def _ours(name: str) -> bool:
    stem, end = os.path.splitext(name)
    named = end in SUFFIXES and _BAG.fullmatch(stem) is not None
    return named or name == 'spec.json' or _is_draft(name) or is_claim(name)


def _is_draft(name: str) -> bool:
    return bool(drafted(name)) or _INDEX_DRAFT.fullmatch(name) is not None


async def _local_tree(store: Store, root: str) -> AsyncIterator[Entry]:
    """As ``scan_tree``, but links are files."""
    folders = [root]
    while folders:
        async for entry in store.scan(folders.pop()):
            link = await offload(os.path.islink, entry.key)
            yield dataclasses.replace(entry, is_dir=False, size=0) if link else entry
            if entry.is_dir and not link:
                folders.append(entry.key)


def _since(when: float | None, now: float) -> float:
    """Seconds since something was written; 0 if the store does not say when."""
    return 0.0 if when is None else max(0.0, now - when)


def _shards_of(key: str) -> str | None:
    """The folder of the shards, of a folder that is named like one of them."""
    parent, _, name = key.rpartition('/')
    return None if shard_number(name) is None else parent


class _Cleaning:
    """One folder.

    Args:
      beside: whether it is a shard beside one that is finished.
      bags: whether its bags are to be removed though they may have been written on their own.
    """

    def __init__(self, store: Store, key: str, folder: _Folder, beside: bool, bags: bool) -> None:
        self._store, self._key, self._folder = store, key, folder
        self._drafts = [entry for name, entry in folder.files.items() if _is_draft(name) and store.local]
        told = beside or bags or 'refs.bag' in folder.files or self._draft_of('refs.bag') or self._draft_of('spec.json')
        self._unfinished = [
            entry for name, entry in folder.files.items() if name.endswith(SUFFIXES) and not folder.finished
        ]
        self._bags = self._unfinished if told else []
        self._claims = folder.claims
        self._empty = beside and not folder.files and not folder.crowded and store.local

    def _draft_of(self, name: str) -> bool:
        return any(drafted(file) == name for file in self._folder.files)

    def _age(self, now: float) -> float:
        """Seconds since something was written; 0 if that cannot be known."""
        times = [entry.modified for entry in [*self._drafts, *self._unfinished, *self._claims]]
        times += [upload.modified for upload in self._folder.uploads]
        if self._empty and self._folder.itself is not None:
            times.append(self._folder.itself.modified)
        return min((_since(when, now) for when in times), default=0.0)

    async def run(self, now: float, older: float, remove: bool) -> list[Leftover]:
        """What there is to be removed, and removes it."""
        age = self._age(now)
        if not (self._drafts or self._bags or self._folder.uploads or self._empty or self._claims) or age < older:
            return []
        lock: FolderLock | None = None
        if isinstance(self._store, LocalStore):
            try:
                lock = await self._store.lock_folder(self._key)
            except AlreadyExistsError:
                return []  # a living writer's
        try:
            files = [*((entry, 'draft') for entry in await self._unheld(self._drafts))]
            if len(files) == len(self._drafts):
                files += [(entry, 'bag') for entry in await self._unheld(self._bags)]
            files += [(entry, 'claim') for entry in self._claims]
            return await self._remove(files, age, remove)
        finally:
            if lock is not None:
                lock.release()

    async def _unheld(self, entries: Sequence[Entry]) -> list[Entry]:
        """Those that no living writer has open."""
        if not self._store.local:
            return list(entries)
        return [entry for entry in entries if not await offload(held, entry.key)]

    async def _remove(self, files: Sequence[tuple[Entry, Any]], age: float, remove: bool) -> list[Leftover]:
        store, url = self._store, self._store.url
        found = [Leftover(url(entry.key), kind, entry.size, age) for entry, kind in files]
        found += [Leftover(url(upload.key), 'upload', upload.size, age) for upload in self._folder.uploads]
        if self._empty:
            found.append(Leftover(url(self._key), 'folder', 0, age))
        if not remove:
            return found
        if self._bags and await (Path.of(store, self._key) / 'spec.json').exists():
            return []  # its writer has finished it meanwhile
        for upload in self._folder.uploads:
            await store.abort_upload(upload)
        if files:
            await store.delete([entry.key for entry, _ in files])
        if store.has_folders and (self._empty or (self._bags and not self._folder.crowded)):
            await store.delete_empty(self._key)
        return found

"""Find and remove what killed writers left."""

import contextlib
import dataclasses
import numbers
import os
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from granular._support.other_names import answering
from granular.aio.datasets.appending import NAME as MARKER
from granular.aio.datasets.parts_folder import is_parts
from granular.aio.paths.claims import is_claim
from granular.aio.paths.path import Path
from granular.aio.paths.pure import AnyPath
from granular.aio.paths.removal import is_mark, marked
from granular.aio.runtime.threads import offload
from granular.aio.stores import Entry, Store, Upload
from granular.aio.stores.local.locks import is_locked
from granular.aio.stores.local.store import LocalStore
from granular.aio.stores.local.writing import final_name
from granular.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from granular.formats.layout import SUFFIXES, shard_name, shard_number

CONVERSION: Final = '.granular-conversion'
"""The file in the first shard that records a conversion."""

_CLEANED: Final = 3600.0  # seconds after which no cleaner removes files any longer
_BAG: Final = re.compile(r'[a-z_][A-Za-z0-9_.-]*')
_INDEX_DRAFT: Final = re.compile(r'[0-9a-f]{40}\.index\.[0-9a-f]{8}\.tmp')


@dataclasses.dataclass(frozen=True, slots=True)
class Leftover:
    """A file, folder or upload that an unfinished writer left.

    Attributes:
      path: the file or folder, or the object that an upload was to become.
      kind: ``'upload'``: an unfinished multipart upload; ``'draft'``: a temporary file, or the record of
        an append that has ended, or of a conversion that has finished no shard; ``'bag'``: a file of a bag in a dataset
        without a ``spec.json``; ``'folder'``: an empty folder of a shard; ``'claim'``: the claim of a writer of shards
        in a bucket; ``'part'``: a file of an unfinished write by Ray, in its folder ``.parts.<token>`` or in the shards
        beside it.
      size: its size in bytes.
      age: seconds since the last write in its folder.
    """

    path: str
    kind: Literal['upload', 'draft', 'bag', 'folder', 'claim', 'part']
    size: int
    age: float


@answering()
async def clean(path: AnyPath, remove: bool = False, older: float = 3600.0, bags: bool = False) -> list[Leftover]:
    """Find what killed writers left in a folder: uploads, temporary files, claims, unfinished datasets and shards.

    A dataset with a ``spec.json`` is never touched, nor are files that a live writer of this machine holds, nor bags
    that may have been written on their own: those in a folder without a ``refs.bag`` that is not beside a finished
    shard. A write by Ray is a dataset once shard 0 has a ``spec.json``: until then, its other shards are leftovers,
    like the parts in its folder ``.parts.<token>``. Uploads to GCS cannot be listed; they expire after a week. Files in
    the columns layout that a writer could continue are removed like the rest.

    Args:
      path: the folder. Nothing outside is touched, and links are not followed.
      remove: remove the leftovers.
      older: only consider folders without writes for this many seconds, by the store's clock. In a bucket, a live
        writer that loses its bags fails; nothing else protects it. A writer of shards, or a conversion, renews its
        claim every five minutes, which protects all of its shards.
      bags: include the bags in any folder without a ``spec.json``, even if they may have been written on their own.

    Returns:
      The leftovers, sorted by path.

    Raises:
      NotFoundError: if the folder does not exist on a disk.
      StoreError: if the store fails.

    Example::

        for leftover in await granular.aio.clean('s3://bucket/digits', remove=True):
            print(leftover.kind, leftover.path, leftover.size)
    """
    root = Path(path)
    if not isinstance(older, numbers.Real) or not older >= 0:  # NaN would make every file old enough
        raise InvalidArgumentError(f'older: expected seconds >= 0, got {older!r:.100}')
    store = root.store
    await store.ready()
    if await root.is_file():
        raise InvalidArgumentError(f'{root}: is a file, expected the folder that contains it')
    now = await store.now(root.key)  # The clock of the store sets the modification times.
    folders = await _folders(store, root.key)
    async for upload in store.uploads(root.key):
        folder = folders.setdefault(upload.key.rpartition('/')[0], _Folder())
        folder.uploads.append(upload)
    sharded = {_shards_of(key) for key, folder in folders.items() if folder.is_of_dataset and key != root.key} - {None}
    leftovers: list[Leftover] = []
    claims = [(key, claim) for key, folder in folders.items() for claim in folder.claims]
    if not store.local and (parent := _shards_of(root.key)) is not None:  # a claim is beside the shards
        claims += [(parent, entry) async for entry in store.scan(parent) if is_claim(entry.name)]
    claimed = {key for key, claim in claims if _seconds_since(claim.modified, now) < older}
    in_parts = set[str]()
    cleaner = _Cleaner(store, root.key, now, older, remove, bags)
    for directory, writing in _writes_of_parts(folders, root.key).items():
        in_parts |= writing.keys()
        if directory not in claimed:
            leftovers += await cleaner.clean_parts(directory, writing)
    remaining: dict[str, dict[str, bool]] = {}  # whether each shard that remains is finished, by dataset and name
    # Records of conversions after the shards beside them.
    for key, folder in sorted(folders.items(), key=lambda item: CONVERSION in item[1].files):
        if key in in_parts or _shards_of(key) in claimed:  # a claim protects a live writer, however slow it is
            continue
        directory = None if key == root.key else _shards_of(key)
        has_siblings = bool(remaining.get(directory)) if directory is not None else _shards_of(key) is not None
        removed, is_empty = await cleaner.clean_folder(key, folder, directory in sharded, has_siblings)
        leftovers += removed
        if directory is not None and not (removed and is_empty):
            remaining.setdefault(directory, {})[key.rpartition('/')[2]] = folder.finished
    for directory, shards in remaining.items():
        first = folders.get(_first_shard(directory))
        entry = None if first is None else first.files.get(MARKER)
        if entry is not None and all(shards.get(shard_name(i)) for i in range(len(shards))):
            leftovers += await cleaner.clean_marker(entry)
    return sorted(leftovers, key=lambda leftover: leftover.path)


@dataclasses.dataclass(slots=True)
class _Folder:
    """The files of a folder by name, and the uploads to it."""

    files: dict[str, Entry] = dataclasses.field(default_factory=dict)
    uploads: list[Upload] = dataclasses.field(default_factory=list)
    itself: Entry | None = None
    has_others: bool = False  # True if it contains files of other programs, or folders

    @property
    def finished(self) -> bool:
        return 'spec.json' in self.files

    @property
    def is_of_dataset(self) -> bool:
        """True if its bags belong to a dataset, finished or not: others may have been written on their own."""
        names = self.files.keys() | {final_name(name) for name in self.files}
        return not names.isdisjoint(('spec.json', 'refs.bag', CONVERSION))

    @property
    def claims(self) -> list[Entry]:
        return [entry for name, entry in self.files.items() if is_claim(name)]


async def _folders(store: Store, root: str) -> dict[str, _Folder]:
    """Return the folders under a key that hold files of writers, parents first."""
    folders: dict[str, _Folder] = {root: _Folder()}
    entries = _local_tree(store, root) if store.local else store.scan_tree(root)
    try:
        async for entry in entries:
            parent, _, name = entry.key.rpartition('/')
            if store.local:
                parent = parent or ('/' if entry.key.startswith('/') else '.')
            folder = folders.setdefault(parent, _Folder())
            if entry.is_dir:
                folder.has_others = True
                folders.setdefault(entry.key, _Folder()).itself = entry
            elif _is_written(name):
                folder.files[name] = entry
            else:
                folder.has_others = True
    except NotFoundError:
        if store.local:
            raise
    return folders


def _is_written(name: str) -> bool:
    stem, suffix = os.path.splitext(name)
    is_bag = suffix in SUFFIXES and _BAG.fullmatch(stem) is not None
    return is_bag or name in ('spec.json', MARKER, CONVERSION) or _is_temporary(name) or is_claim(name) or is_mark(name)


def _is_temporary(name: str) -> bool:
    return bool(final_name(name)) or _INDEX_DRAFT.fullmatch(name) is not None


async def _local_tree(store: Store, root: str) -> AsyncIterator[Entry]:
    """Yield the tree as ``scan_tree``, with links as files."""
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            async for entry in store.scan(folder):
                link = await offload(os.path.islink, entry.key)
                yield dataclasses.replace(entry, is_dir=False, size=0) if link else entry
                if entry.is_dir and not link:
                    folders.append(entry.key)
        except NotFoundError:
            if folder == root:
                raise  # any other one was removed meanwhile


def _seconds_since(time: float | None, now: float) -> float:
    """Return the seconds since a write; 0 if its time is unknown."""
    return 0.0 if time is None else max(0.0, now - time)


def _shards_of(key: str) -> str | None:
    """Return the parent of a folder that is named like a shard; None for other folders."""
    parent, _, name = key.rpartition('/')
    return None if shard_number(name) is None else parent


def _first_shard(directory: str) -> str:
    return f'{directory}/{shard_name(0)}' if directory else shard_name(0)


def _writes_of_parts(folders: Mapping[str, _Folder], root: str) -> dict[str, dict[str, _Folder]]:
    """Return the folders that belong to unfinished writes of parts, by the folder of the dataset; parts come last."""
    writes: dict[str, dict[str, _Folder]] = {}
    for key, folder in folders.items():
        names = key.split('/')
        depth = next((i for i, name in enumerate(names) if is_parts(name)), None)
        if depth is not None and len(directory := '/'.join(names[:depth])) >= len(root.strip('.')):
            writes.setdefault(directory, {})[key] = folder
    for directory, parts in writes.items():
        shards = {key: folder for key, folder in folders.items() if _shards_of(key) == directory}
        first = shards.get(_first_shard(directory))
        if first is None or not first.finished:
            writes[directory] = {**shards, **parts}
    return writes


@contextlib.asynccontextmanager
async def _reserved(store: Store, folder: str, unfinished: str | None) -> AsyncIterator[bool]:
    """Lock a folder on a disk for the block; in a bucket, mark the folder of a dataset whose bags are to be removed.

    Yields False if a live writer holds it, it was removed meanwhile, or the dataset was finished.
    """
    dataset = None if unfinished is None else Path.of(store, unfinished)
    async with contextlib.AsyncExitStack() as stack:
        if isinstance(store, LocalStore):
            try:
                stack.enter_context(await store.lock_dataset(folder))
            except (AlreadyExistsError, NotFoundError):
                yield False
                return
        elif dataset is not None:
            await stack.enter_async_context(marked(dataset))
        yield dataset is None or not await (dataset / 'spec.json').exists()


@dataclasses.dataclass(frozen=True, slots=True)
class _Cleaner:
    """Returns the leftovers of writers in a store, and removes them if ``remove`` is true."""

    store: Store
    root: str
    now: float
    older: float
    remove: bool
    bags: bool

    def _age(self, entries: Iterable[Entry | Upload]) -> float:
        """Return the seconds since the last write of some files; 0 if unknown."""
        return min((_seconds_since(entry.modified, self.now) for entry in entries), default=0.0)

    def _leftovers(self, files: Iterable[tuple[Entry, Any]], uploads: Iterable[Upload], age: float) -> list[Leftover]:
        url = self.store.url
        return [
            *(Leftover(url(entry.key), kind, entry.size, age) for entry, kind in files),
            *(Leftover(url(upload.key), 'upload', upload.size, age) for upload in uploads),
        ]

    async def clean_parts(self, directory: str, folders: Mapping[str, _Folder]) -> list[Leftover]:
        store = self.store
        files = [entry for folder in folders.values() for entry in folder.files.values()]
        uploads = [upload for folder in folders.values() for upload in folder.uploads]
        age = self._age([*files, *uploads, *(folder.itself for folder in folders.values() if folder.itself)])
        if age < self.older:
            return []
        has_shards = any(_shards_of(key) == directory for key in folders)
        first = _first_shard(directory) if has_shards and self.remove else None
        async with _reserved(store, directory or self.root, first) as reserved:
            if not reserved:
                return []
            if self.remove:
                for upload in uploads:
                    await store.abort_upload(upload)
                for folder in folders.values():  # the parts last, as they mark the shards as unfinished
                    await store.delete([entry.key for entry in folder.files.values()])
                for key in sorted(folders, key=len, reverse=True) if store.has_folders else ():
                    await store.delete_empty(key)
        return self._leftovers(((entry, 'part') for entry in files), uploads, age)

    async def clean_marker(self, entry: Entry) -> list[Leftover]:
        """Clean the record of a writer that appended to a dataset of which all shards are finished."""
        if (age := self._age([entry])) < self.older:
            return []
        if self.remove:
            await self.store.delete([entry.key])
        return self._leftovers([(entry, 'draft')], (), age)

    async def clean_folder(
        self, key: str, folder: _Folder, is_shard: bool, has_siblings: bool
    ) -> tuple[list[Leftover], bool]:
        """Clean a folder, and return whether nothing would remain of it.

        Args:
          is_shard: True if it is named like a shard, and another shard, or itself, is of a dataset.
          has_siblings: True if other shards remain beside it, finished or of a live writer, or may be outside, so that
            the record of a conversion remains.
        """
        store, claims, uploads = self.store, folder.claims, folder.uploads
        record = '' if has_siblings or folder.finished else CONVERSION
        temporary = [
            entry
            for name, entry in folder.files.items()
            if (_is_temporary(name) and store.local) or name == record or self._is_dead_mark(entry)
        ]
        unfinished = [entry for name, entry in folder.files.items() if name.endswith(SUFFIXES) and not folder.finished]
        bags = unfinished if is_shard or folder.is_of_dataset or self.bags else []
        itself = folder.itself if is_shard and not folder.files and not folder.has_others and store.local else None
        remaining = len(folder.files) - len(temporary) - len(bags) - len(claims)
        is_empty = not remaining and not folder.has_others and (is_shard or bool(bags))
        age = self._age([*temporary, *unfinished, *claims, *uploads, *([itself] if itself else [])])
        if not (temporary or bags or uploads or itself or claims) or age < self.older:
            return [], is_empty
        async with _reserved(store, key, key if bags and self.remove else None) as reserved:
            if not reserved:
                return [], is_empty
            files: list[tuple[Entry, str]] = [(entry, 'draft') for entry in await self._without_writer(temporary)]
            if len(files) == len(temporary):
                files += [(entry, 'bag') for entry in await self._without_writer(bags)]
            files += [(entry, 'claim') for entry in claims]
            if self.remove:
                for upload in uploads:
                    await store.abort_upload(upload)
                entries = [entry for entry, _ in files]
                if isinstance(store, LocalStore):  # unless a live writer has opened or replaced them meanwhile
                    deleted = {entry.key for entry in await store.delete_unlocked(entries)}
                    files = [(entry, kind) for entry, kind in files if entry.key in deleted]
                else:
                    await store.delete([entry.key for entry in entries])
                if store.has_folders and is_empty:
                    await store.delete_empty(key)
        return self._leftovers([*files, *([(itself, 'folder')] if itself else [])], uploads, age), is_empty

    def _is_dead_mark(self, entry: Entry) -> bool:
        return is_mark(entry.name) and _seconds_since(entry.modified, self.now) > max(self.older, _CLEANED)

    async def _without_writer(self, entries: Sequence[Entry]) -> list[Entry]:
        return [entry for entry in entries if not (self.store.local and await offload(is_locked, entry.key))]

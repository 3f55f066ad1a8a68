"""Copy files and folders, with checksums verified; an interrupted copy resumes."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from typing import Final

from granular._support.text import logger
from granular.aio.http.digests import Digests, proven
from granular.aio.paths.claims import is_claim
from granular.aio.paths.file import File, Progress
from granular.aio.paths.guard import FolderGuard, Right
from granular.aio.paths.pure import PurePath, relative_name
from granular.aio.paths.removal import find_removal, is_mark
from granular.aio.runtime.progress import ProgressReport
from granular.aio.runtime.tasks import for_each
from granular.aio.runtime.threads import offload
from granular.aio.stores import ContentInfo, Entry, ObjectWriter
from granular.aio.stores.local.store import LocalStore
from granular.aio.stores.local.writing import final_name, remove_leftovers
from granular.config import MiB
from granular.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    ObjectChangedError,
    StoreError,
)
from granular.formats.dataset_index import NAME as INDEX
from granular.formats.layout import SUFFIXES, shard_number

_CHUNK: Final = 8 * MiB
_PARALLEL: Final = 16  # files copied concurrently
_HELD: Final = 64  # datasets that are locked, or claimed, at a time


async def copy(source: PurePath, target: PurePath, progress: Progress | None) -> None:
    """Copy a file, or a folder with everything in it. See ``Path.copy``."""
    stat = await source.store.stat(source.key)
    same = in_one_store(source, target)
    if stat.is_dir:
        if same and await is_within(target, source):
            raise InvalidArgumentError(f'{source}: cannot be copied into itself, to {target}')
        await FolderCopy(source, target, progress).copy()
        return
    if same and source.key == target.key:
        raise InvalidArgumentError(f'{source}: cannot be copied onto itself')
    existing = await target.store.find(target.key)
    target_size = None if existing is None or existing.is_dir else existing.size
    if target.store.local and final_name(source.name) != target.name:
        with contextlib.suppress(NotFoundError):  # its folder does not exist yet
            await offload(remove_leftovers, target.key)
    await _copy(source, target, stat.size, target_size, ProgressReport(progress))


class FolderCopy:
    def __init__(self, source: PurePath, target: PurePath, progress: Progress | None) -> None:
        self._source = source
        self._target = target
        self._report = ProgressReport(progress)
        self._target_sizes: dict[str, int] = {}  # the sizes of the target's files
        self._leftovers: dict[str, set[str]] = {}  # by file, its temporary files that killed copies left on a disk
        self._specs: list[Entry] = []
        self._listed: dict[str, dict[str, Entry]] = {}  # by folder, the files of a possible dataset as listed
        self._created: set[str] = set()
        self._compared: set[str] = set()  # the folders of the target whose shards were compared with the source's
        self._lock = asyncio.Lock()
        self._held = contextlib.AsyncExitStack()  # what keeps other writers out of the datasets of the target
        self._guards: dict[str, FolderGuard] = {}  # by dataset

    async def copy(self) -> None:
        source, target = self._source, self._target
        await target.store.mkdir(target.key, parents=True, exist_ok=True)
        await self._list(target, '')
        async with contextlib.aclosing(source.store.scan_tree(source.key)) as entries:
            following: Entry | None = await anext(entries, None)
            while following is not None:
                following = await self._copy_some(following, entries)

    async def _copy_some(self, first: Entry, rest: AsyncIterator[Entry]) -> Entry | None:
        """Copy entries, and complete the datasets among them; return the first one of those that are left."""
        following: Entry | None = None

        async def some() -> AsyncIterator[Entry]:
            nonlocal following
            following = first
            while following is not None and not self._is_beyond(following):
                if _is_of_dataset(following.name):
                    await self._exclude(self.target_of(following).parent)
                yield following
                following = await anext(rest, None)

        async with self._held:
            await for_each(some(), self.copy_entry, _PARALLEL)
            copied = {relative_name(self._source, entry.key) for entry in self._specs}
            for parent in self._compared:
                self._refuse_other_shards(parent, copied)  # of shards that were finished since they were listed
            await self._check_held()
            await for_each(self._specs, self._copy_spec, _PARALLEL)
            await self._check_removal()
        for held in (self._specs, self._listed, self._compared, self._guards):
            held.clear()
        return following

    def _is_beyond(self, entry: Entry) -> bool:
        """Return whether an entry is of another dataset than those that are held, which are enough."""
        if len(self._guards) < _HELD or not _is_of_dataset(entry.name):
            return False
        folder = self.target_of(entry).parent
        return not any(folder.is_relative_to(PurePath.of(folder.store, key)) for key in self._guards)

    async def _check_held(self) -> None:
        """Check that no other writer has taken over a dataset in a bucket, or removed files of it."""
        store = self._target.store
        files = [entry for entries in self._listed.values() for entry in entries.values()]
        keys = {self.target_of(entry).key for entry in files if entry.name != 'spec.json'}
        for key, guard in self._guards.items():
            if guard.has_claim:
                present = {entry.key async for entry in store.scan_tree(key)}
                head = f'{key}/' if key else ''
                missing = sorted(name for name in keys - present if name.startswith(head))
                if not await guard.check_owner() or any([await store.find(name) is None for name in missing]):
                    raise ObjectChangedError(f'{store.url(key)}: another writer has removed files while it was copied')
                if rest := _read_along({name for name in keys if name.startswith(head)}) & present - keys:
                    raise self._mixing_error(relative_name(self._target, min(rest)))

    async def _check_removal(self) -> None:
        """Withdraw a dataset in a bucket if a writer that failed, or `granular clean`, may not have seen its spec, and
        removes files of it, or if another writer has put files beside it.
        """
        store = self._target.store
        for key in () if store.local else self._guards:
            present: dict[str, list[Entry]] = {}
            async for entry in store.scan_tree(key):
                present.setdefault(entry.key.rpartition('/')[0], []).append(entry)
            dataset = PurePath.of(store, key)
            for entry in self._specs:
                if (spec := self.target_of(entry)).is_relative_to(dataset):
                    names = [other.name for other in self._listed[self._folder_of(entry).key].values()]
                    folder = spec.parent
                    entries = present.get(folder.key, [])
                    reason = await find_removal(folder, names, entries, by_writers=True)
                    if rest := _read_along(names) & {other.name for other in entries} - {*names}:
                        reason = reason or f'another writer has put {min(rest)} beside it'
                    if reason:
                        await store.delete([spec.key])
                        raise ObjectChangedError(f'{folder}: {reason}: copy it again', path=f'{folder}')

    async def _list(self, folder: PurePath, prefix: str) -> None:
        """Note the files of the target in a folder, whose names have a prefix, in place of those noted before."""
        sizes: dict[str, int] = {}
        with contextlib.suppress(NotFoundError):  # a bucket has no empty folders
            async for entry in folder.store.scan_tree(folder.key):
                if entry.is_dir:
                    continue
                name = relative_name(self._target, entry.key)
                sizes[name] = entry.size
                if folder.store.local and (final := final_name(entry.name)):
                    self._leftovers.setdefault(name.removesuffix(entry.name) + final, set()).add(entry.key)
        for name in [name for name in self._target_sizes if name.startswith(prefix)]:
            del self._target_sizes[name]
        self._target_sizes.update(sizes)

    async def _exclude(self, folder: PurePath) -> None:
        """Keep other writers and copies out of the dataset of a folder, as its writers do, until this copy ends."""
        is_shard = folder.key != self._target.key and shard_number(folder.name) is not None
        dataset = folder.parent if is_shard else folder
        prefix = '' if dataset.key == self._target.key else f'{relative_name(self._target, dataset.key)}/'
        if dataset.key not in self._guards:
            self._guards[dataset.key] = await self._hold(dataset)
            async with self._lock:
                await self._list(dataset, prefix)  # once more, as another writer may have ended since
            await self._refuse_other_kind(prefix, is_shard)

    async def _hold(self, dataset: PurePath) -> FolderGuard:
        if dataset.store.local:
            await self.make_folder(dataset)
        guard = FolderGuard(dataset, Right.COPY)
        if not self.is_held(dataset):
            await guard.enter()
            await self._held.enter_async_context(guard.leaving())
        return guard

    def is_held(self, dataset: PurePath) -> bool:
        """Return whether the caller keeps other writers out of a dataset."""
        return False

    async def _refuse_other_kind(self, prefix: str, has_shards: bool) -> None:
        """Raise an error if the target has a dataset without shards where the source has shards, or the reverse."""
        names = [name.removeprefix(prefix) for name in self._target_sizes if name.startswith(prefix)]
        others = {'spec.json'}.intersection(names) if has_shards else {name.rpartition('/')[0] for name in names}
        for name in sorted(others):
            if has_shards or (shard_number(name) is not None and await self._has(f'{prefix}spec.json')):
                if not await self._has(f'{prefix}{name}'):
                    raise self._mixing_error(f'{prefix}{name}')
                return

    async def _has(self, name: str) -> bool:
        return await self._source.store.find(_join(self._source, name).key) is not None

    async def copy_entry(self, entry: Entry) -> None:
        """Create a folder, or copy a file. ``spec.json`` files are deferred to the end."""
        if entry.is_dir:
            if self._invalid_name(entry) is None:  # otherwise the files in it are rejected, with their full names
                await self.make_folder(self.target_of(entry))
                if entry.size:
                    await self._copy_mark(entry)
            return
        name = entry.name
        if is_claim(name) or is_mark(name):
            return
        if _is_of_dataset(name):
            self._listed.setdefault(self._folder_of(entry).key, {})[entry.key] = entry
        if name == 'spec.json':
            self._specs.append(entry)
        else:
            await self.copy_file(entry)

    def _folder_of(self, entry: Entry) -> PurePath:
        return PurePath.of(self._source.store, entry.key).parent

    async def _copy_mark(self, entry: Entry) -> None:
        """Copy an object that has bytes and a name that ends in a slash; on a disk, no folder has bytes."""
        target = self.target_of(entry)
        source = PurePath.of(self._source.store, f'{entry.key}/')
        if target.store.has_folders:
            logger.warning('%s: not copied: its name is that of a folder, and it holds %d bytes', source, entry.size)
        else:
            await _copy(source, PurePath.of(target.store, f'{target.key}/'), entry.size, None, self._report)

    async def _copy_spec(self, entry: Entry) -> None:
        """Complete the copy of a dataset, unless the dataset was replaced or appended to meanwhile."""
        folder = self._folder_of(entry)
        listed = self._listed[folder.key]
        current = {other.key: other async for other in folder.store.scan(folder.key)}
        if different := [key for key, other in listed.items() if current.get(key) != other]:
            raise ObjectChangedError(
                f'{folder}: {len(different)} of {len(listed)} files changed while they were copied, such as '
                f'{PurePath.of(folder.store, different[0]).name}: copy it again',
                path=f'{folder}',
            )
        await self.copy_file(entry)

    async def copy_file(self, entry: Entry) -> None:
        target = self.target_of(entry)
        name = relative_name(self._target, target.key)
        if isinstance(store := self._target.store, LocalStore):
            await self.make_folder(target.parent)
            for key in self._leftovers.pop(name, ()):
                if not await self._has(relative_name(self._target, key)):
                    await store.delete_unlocked([Entry(key, False)])
        source = PurePath.of(self._source.store, entry.key)
        # Some stores list no sizes.
        size = entry.size or (await source.store.stat(source.key)).size
        target_size = self._target_sizes.get(name)
        await _copy(source, target, size, target_size, self._report, lambda: self._invalidate(name))

    async def _invalidate(self, name: str) -> None:
        """Delete the target's ``spec.json`` before a file of its dataset is replaced, as it is incomplete then.

        Files of another dataset that would be read along with those that are copied are an error.
        """
        folder = name.rpartition('/')[0]
        spec = f'{folder}/spec.json'.lstrip('/')
        async with self._lock:
            await self._compare_layouts(name)
            if spec == name:
                return
            if not self._target_sizes.keys().isdisjoint((spec, name)):  # without a spec, it is of a copy that failed
                await self._compare_shards(folder)
            if spec in self._target_sizes:
                del self._target_sizes[spec]
                await self._target.store.delete([_join(self._target, spec).key])

    async def _compare_layouts(self, name: str) -> None:
        """Before a file of a dataset is replaced, check that no file of another layout would remain beside it."""
        for other in _read_along([name]) & self._target_sizes.keys():
            if not await self._has(other):
                raise self._mixing_error(other)

    async def _compare_shards(self, shard: str) -> None:
        """Before a shard of the target is replaced, check that no other shard of its dataset would remain.

        Those that the source has not finished would remain, as they may not be copied.
        """
        parent, _, number = shard.rpartition('/')
        if shard_number(number) is None or parent in self._compared:
            return
        source = _join(self._source, parent) if parent else self._source
        entries = source.store.scan_tree(source.key)
        specs = {relative_name(self._source, entry.key) async for entry in entries if entry.name == 'spec.json'}
        self._refuse_other_shards(parent, specs)
        self._compared.add(parent)

    def _refuse_other_shards(self, parent: str, specs: Collection[str]) -> None:
        """Raise an error if a folder of the target has a finished shard that is not one of the source's."""
        for name in self._target_sizes.keys() - specs:
            folder, _, file = name.rpartition('/')
            above, _, last = folder.rpartition('/')
            if file == 'spec.json' and above == parent and shard_number(last) is not None:
                raise self._mixing_error(folder)

    def _mixing_error(self, name: str) -> AlreadyExistsError:
        return AlreadyExistsError(
            f'{self._target}: holds another dataset, whose {name} would be mixed with the copy of {self._source}, '
            f'which has none: remove it first',
            path=f'{self._target}',
        )

    def target_of(self, entry: Entry) -> PurePath:
        """Return the target path of an entry, which is always inside the target; other names are refused."""
        if (name := self._invalid_name(entry)) is not None:
            raise InvalidArgumentError(
                f'{self._source}: holds {name!r}, a name that is not copied to {self._target}: it may lead out of it'
            )
        return _join(self._target, relative_name(self._source, entry.key))

    def _invalid_name(self, entry: Entry) -> str | None:
        """Return the name of an entry if it cannot be copied."""
        name = relative_name(self._source, entry.key)
        parts = set(name.split('/'))
        invalid = parts & {'.', '..'} or '\0' in name or name.encode(errors='ignore').decode() != name
        return name if invalid or (self._target.store.has_folders and '' in parts) else None

    async def make_folder(self, folder: PurePath) -> None:
        """Create a folder of the target, and check that it is not a link to a folder outside."""
        if folder.key in self._created:
            return
        await folder.store.mkdir(folder.key, parents=True, exist_ok=True)
        if folder.store.local and not await is_within(folder, self._target):
            real = await offload(os.path.realpath, folder.key)
            raise InvalidArgumentError(f'{folder}: is {real}, which lies outside of {self._target}')
        self._created.add(folder.key)


def _read_along(names: Iterable[str]) -> set[str]:
    """Return the names of the files that are read along with files of bags, if they exist."""
    bags = {name.rpartition('.')[0] for name in names if name.endswith(SUFFIXES)}
    references = {f'{bag.rpartition("/")[0]}/refs.bag'.lstrip('/') for bag in bags}
    return {bag + suffix for bag in bags for suffix in SUFFIXES} | references


def _is_of_dataset(name: str) -> bool:
    return name in ('spec.json', INDEX) or name.endswith(SUFFIXES)


def in_one_store(one: PurePath, other: PurePath) -> bool:
    """Return whether two paths lead to the same files: other settings make another store of these."""
    return one.store == other.store or one.store.fingerprint == other.store.fingerprint


async def is_within(inner: PurePath, outer: PurePath) -> bool:
    """Return whether a path is, or is in, another one of the same store, by whatever name on a disk."""
    if not inner.store.local:
        return inner.is_relative_to(outer)
    left, right = await offload(lambda: [os.path.realpath(path.key) for path in (inner, outer)])
    return os.path.commonpath([left, right]) == right


def _join(folder: PurePath, name: str) -> PurePath:
    path, query = folder.store.split_query(folder.key)
    head = '' if path in ('', '.') else path.rstrip('/') + '/'
    return PurePath.of(folder.store, head + folder.store.keyed(name) + query)


async def _copy(
    source: PurePath,
    target: PurePath,
    size: int,
    target_size: int | None,
    report: ProgressReport,
    before: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Copy a file, unless the target has it already; ``before`` is awaited before the target is replaced."""
    if target_size == size and await _are_equal(source, target):
        await report.add(size)
        return
    if before is not None:
        await before()
    if source.store == target.store and await source.store.copy_within(source.key, target.key):
        if not source.store.local:
            await _check_copy_within(source, target)
        await report.add(size)
        return
    await _stream(source, target, report)


async def _are_equal(source: PurePath, target: PurePath) -> bool:
    """Return whether two files have equal checksums; False if no checksum is available for both."""
    original, copy = await source.store.content_info(source.key), await target.store.content_info(target.key)
    if original.size != copy.size:
        return False
    for kind in ('md5', 'crc32c', 'parts'):
        if kind in original.digests or kind in copy.digests or (source.store.local and target.store.local):
            part_size = (source if target.store.local else target).store.config.part_size
            left = await _digest(source, original, kind, part_size)
            right = await _digest(target, copy, kind, part_size)
            if left is not None and right is not None:
                return left == right
    return False


async def _digest(path: PurePath, info: ContentInfo, kind: str, part_size: int) -> str | None:
    """Return a checksum of a file: the store's, or a computed one if the file is on a disk."""
    if kind in info.digests or not path.store.local:
        return info.digests.get(kind)
    return await _computed(path, info.size, kind, part_size)


async def _computed(path: PurePath, size: int, kind: str, part_size: int) -> str:
    digests = Digests({kind}, part_size)
    version: str | None = None
    for start in range(0, size, _CHUNK):
        reply = await path.store.read(path.key, start, min(start + _CHUNK, size), version)
        version = reply.version
        await offload(digests.add, reply.data)
    return digests.found(kind)


async def _check_copy_within(source: PurePath, target: PurePath) -> None:
    """Compare a file with its copy by the store; a copy that differs, an error, may be that of another writer."""
    original, copy = await source.store.content_info(source.key), await target.store.content_info(target.key)
    differ = [kind for kind in proven(original.digests, copy.digests) if original.digests[kind] != copy.digests[kind]]
    if original.size != copy.size or differ:
        raise StoreError(
            f'{target}: expected a copy of {source}, {original.size} bytes {original.digests}, got {copy.size} bytes '
            f'{copy.digests}: another program may have written it since',
            path=f'{target}',
        )


async def _stream(source: PurePath, target: PurePath, report: ProgressReport) -> None:
    """Copy a file through this process."""
    info = await source.store.content_info(source.key)
    kind = target.store.digest_kind(info.size)
    digests = Digests({'crc32c', kind, *proven(info.digests)} - {''}, target.store.config.part_size)
    writer = await target.store.open_writer(target.key)
    async with File(target, 0, writer) as file:
        await _transfer(source, info, file, digests, report)
    if not target.store.local:  # the disk accepted the bytes
        await _check_written(target, writer, info.size, kind, digests)


async def _transfer(source: PurePath, info: ContentInfo, file: File, digests: Digests, report: ProgressReport) -> None:
    """Write the content of a file to another one, and check that it is what the source has."""
    version = info.version
    before = None if version is not None else await source.store.stat(source.key)
    for start in range(0, info.size, _CHUNK):
        reply = await source.store.read(source.key, start, min(start + _CHUNK, info.size), version)
        version = reply.version
        if reply.size != info.size:
            raise _changed(source, info.size, reply.size)
        await offload(digests.add, reply.data)
        await file.write(reply.data)
        await report.add(len(reply.data))
    # Files without versions can change while they are read.
    if before is not None and ((after := await source.store.stat(source.key)) != before or after.size != info.size):
        raise _changed(source, info.size, after.size)
    digests.compare(info.digests, info.size, f'{source}')


def _changed(source: PurePath, before: int, after: int) -> ObjectChangedError:
    return ObjectChangedError(
        f'{source}: changed while it was copied, or its server states wrong sizes, from {before} bytes to {after}: '
        f'copy it again',
        path=f'{source}',
    )


async def _check_written(target: PurePath, writer: ObjectWriter, size: int, kind: str, digests: Digests) -> None:
    """Compare a file with what was written; delete one that differs, unless another writer has replaced it."""
    info = await target.store.content_info(target.key)
    # A store without checksums has nothing to compare.
    if info.size == size and (not kind or info.digests.get(kind, digests.found(kind)) == digests.found(kind)):
        return
    # A server's ETag need not be the expected checksum: only the content read back decides.
    crc = await _computed(target, info.size, 'crc32c', _CHUNK)
    if info.size != size or crc != digests.found('crc32c'):
        if writer.version is not None and writer.version == info.version:
            await target.store.delete([target.key])
        raise StoreError(
            f'{target}: expected {size} bytes of crc32c {digests.found("crc32c")}, the store has {info.size} of {crc}',
            path=f'{target}',
        )

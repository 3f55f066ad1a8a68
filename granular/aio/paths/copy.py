"""Copy files and folders, with checksums verified; an interrupted copy resumes."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from granular.aio.http.digests import Digests, proven
from granular.aio.paths.file import File
from granular.aio.paths.pure import PurePath
from granular.aio.runtime.tasks import for_each
from granular.aio.runtime.threads import offload
from granular.aio.runtime.user_functions import call_user
from granular.aio.stores import ContentInfo, Entry
from granular.config import MiB
from granular.errors import (
    AlreadyExistsError,
    BadReplyError,
    InvalidArgumentError,
    NotFoundError,
    ObjectChangedError,
    StoreError,
)
from granular.formats.checksums import SUFFIX
from granular.formats.layout import SUFFIXES, shard_number

_CHUNK: Final = 8 * MiB
_FILES: Final = 16

Progress = Callable[[int], object]


async def copy(source: PurePath, target: PurePath, progress: Progress | None) -> None:
    """Copy a file, or a folder with everything in it. See ``Path.copy``."""
    stat = await source.store.stat(source.key)
    if stat.is_dir:
        if target.is_relative_to(source):
            raise InvalidArgumentError(f'{source}: cannot be copied into itself, to {target}')
        await FolderCopy(source, target, progress).copy()
        return
    if source == target:
        raise InvalidArgumentError(f'{source}: cannot be copied onto itself')
    try:
        size = (await target.store.stat(target.key)).size
    except NotFoundError:
        size = -1
    await _copy(source, target, stat.size, size, progress)


class FolderCopy:
    """The copy of a folder."""

    def __init__(self, source: PurePath, target: PurePath, progress: Progress | None) -> None:
        self._source, self._target, self._progress = source, target, progress
        self._there: dict[str, int] = {}  # the sizes of the target's files
        self._specs: list[Entry] = []
        self._seen: dict[str, dict[str, Entry]] = {}  # by folder, the files of a possible dataset as listed
        self._made: set[str] = set()
        self._compared: set[str] = set()  # the folders of the target whose shards were compared with the source's
        self._lock = asyncio.Lock()

    async def copy(self) -> None:
        source, target = self._source, self._target
        await target.store.mkdir(target.key, parents=True, exist_ok=True)
        try:
            async for entry in target.store.scan_tree(target.key):
                if not entry.is_dir:
                    self._there[below(target, entry.key)] = entry.size
        except NotFoundError:
            pass  # a bucket has no empty folders
        await for_each(source.store.scan_tree(source.key), self.take, _FILES)
        await for_each(self._described(), self._spec, _FILES)

    async def _described(self) -> AsyncIterator[Entry]:
        for entry in self._specs:
            yield entry

    async def take(self, entry: Entry) -> None:
        """Create a folder, or copy a file. ``spec.json`` files are deferred to the end."""
        if entry.is_dir:
            if self._bad(entry) is None:  # otherwise the files in it are rejected, with their full names
                await self.make(self.place(entry))
            return
        folder, _, name = entry.key.rpartition('/')
        if name == 'spec.json' or name.endswith(SUFFIXES):
            self._seen.setdefault(folder, {})[entry.key] = entry
        if name == 'spec.json':
            self._specs.append(entry)
        else:
            await self.file(entry)

    async def _spec(self, entry: Entry) -> None:
        """Complete the copy of a dataset, unless the dataset was replaced or appended to meanwhile."""
        folder = PurePath.of(self._source.store, entry.key).parent
        listed = self._seen.pop(entry.key.rpartition('/')[0])
        now = {other.key: other async for other in folder.store.scan(folder.key)}
        if differ := [key for key, other in listed.items() if now.get(key) != other]:
            raise ObjectChangedError(
                f'{folder}: {len(differ)} of {len(listed)} files changed while they were copied, such as '
                f'{differ[0].rpartition("/")[2]}: copy it again'
            )
        await self.file(entry)

    async def file(self, entry: Entry) -> None:
        """Copy a file."""
        place = self.place(entry)
        name = below(self._target, place.key)
        if self._target.store.local:
            await self.make(place.parent)
        source = PurePath.of(self._source.store, entry.key)
        size = self._there.get(name, -1)
        # Some stores list no sizes.
        length = entry.size or (await source.store.stat(source.key)).size
        await _copy(source, place, length, size, self._progress, lambda: self._withdraw(name))

    async def _withdraw(self, name: str) -> None:
        """Delete the target's ``spec.json`` before a file of its dataset is replaced, as it is incomplete then.

        Raises:
          AlreadyExistsError: if files of another dataset would be read along with those that are copied.
        """
        folder = name.rpartition('/')[0]
        spec = f'{folder}/spec.json'.lstrip('/')
        async with self._lock:
            if name.endswith(SUFFIXES):
                sums = f'{name.rpartition(".")[0]}{SUFFIX}'
                for other in {f'{folder}/refs.bag'.lstrip('/'), sums} & self._there.keys():
                    if not await _exists(_joined(self._source, other)):
                        raise self._mixed(other)
            if spec != name and spec in self._there:
                await self._compare_shards(folder)
                del self._there[spec]
                await self._target.store.delete([_joined(self._target, spec).key])

    async def _compare_shards(self, shard: str) -> None:
        """Before a shard of the target is replaced, check that no other shard of its dataset would remain."""
        parent, _, number = shard.rpartition('/')
        if shard_number(number) is None or parent in self._compared:
            return
        source = _joined(self._source, parent) if parent else self._source
        shards = {entry.key.rpartition('/')[2] async for entry in source.store.scan(source.key)}
        for name in self._there:
            folder, _, file = name.rpartition('/')
            above, _, last = folder.rpartition('/')
            if file == 'spec.json' and above == parent and shard_number(last) is not None and last not in shards:
                raise self._mixed(folder)
        self._compared.add(parent)

    def _mixed(self, name: str) -> AlreadyExistsError:
        return AlreadyExistsError(
            f'{self._target}: holds another dataset, whose {name} would be mixed with the copy of {self._source}, '
            f'which has none: remove it first'
        )

    def place(self, entry: Entry) -> PurePath:
        """Return the target path of an entry, which is always inside the target.

        Raises:
          InvalidArgumentError: if the name leads out of the folder, or cannot be stored on a disk.
        """
        if (bad := self._bad(entry)) is not None:
            raise InvalidArgumentError(
                f'{self._source}: holds {bad!r}, a name that is not copied to {self._target}: it may lead out of it'
            )
        return _joined(self._target, below(self._source, entry.key))

    def _bad(self, entry: Entry) -> str | None:
        """Return the name of an entry if it cannot be copied."""
        name = below(self._source, entry.key)
        parts = set(name.split('/'))
        bad = parts & {'.', '..'} or '\0' in name or not _encodes(name)
        return name if bad or (self._target.store.has_folders and '' in parts) else None

    async def make(self, folder: PurePath) -> None:
        """Create a folder of the target, and check that it is not a link to a folder outside."""
        if folder.key in self._made:
            return
        await folder.store.mkdir(folder.key, parents=True, exist_ok=True)
        if folder.store.local:
            root, place = await offload(_real, self._target.key, folder.key)
            if os.path.commonpath([root, place]) != root:
                raise InvalidArgumentError(f'{folder}: is {place}, which lies outside of {self._target}')
        self._made.add(folder.key)


def _real(*paths: str) -> list[str]:
    return [os.path.realpath(path) for path in paths]


def _encodes(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def below(folder: PurePath, key: str) -> str:
    """Return the name of a key relative to a folder."""
    if folder.key in ('', '.'):
        return key
    head = folder.key.rstrip('/') + '/'
    if not key.startswith(head):
        raise StoreError(f'{folder}: its listing has {key!r}, which does not lie there')
    return key[len(head) :]


def _joined(folder: PurePath, name: str) -> PurePath:
    head = '' if folder.key in ('', '.') else folder.key.rstrip('/') + '/'
    return PurePath.of(folder.store, head + name)


async def _exists(path: PurePath) -> bool:
    try:
        await path.store.stat(path.key)
    except NotFoundError:
        return False
    return True


async def _nothing() -> None:
    """Do nothing before a file is replaced."""


async def _copy(
    source: PurePath,
    target: PurePath,
    size: int,
    there: int,
    progress: Progress | None,
    before: Callable[[], Awaitable[None]] = _nothing,
) -> None:
    """Copy a file, unless the target has it already.

    Args:
      source: the file.
      target: the file to write.
      size: the bytes of the source.
      there: the bytes of the target; -1 if it does not exist.
      progress: as for ``Path.copy``.
      before: awaited before the target is replaced.
    """
    if there == size and await _same(source, target):
        if progress:
            call_user(progress, size)
        return
    await before()
    if source.store == target.store and await source.store.copy_within(source.key, target.key):
        if not source.store.local:
            await _check_within(source, target)
        if progress:
            call_user(progress, size)
        return
    await _stream(source, target, progress)


async def _same(source: PurePath, target: PurePath) -> bool:
    """Return whether two files have equal checksums; False if no checksum is available for both."""
    here, there = await source.store.content_info(source.key), await target.store.content_info(target.key)
    if here.size != there.size:
        return False
    for kind in ('md5', 'crc32c', 'parts'):
        if kind in here.digests or kind in there.digests or (source.store.local and target.store.local):
            part_size = (source if target.store.local else target).store.config.part_size
            left = await _digest(source, here, kind, part_size)
            right = await _digest(target, there, kind, part_size)
            if left is not None and right is not None:
                return left == right
    return False


async def _digest(path: PurePath, kept: ContentInfo, kind: str, part_size: int) -> str | None:
    """Return a checksum of a file: the store's, or a computed one if the file is on a disk."""
    if kind in kept.digests or not path.store.local:
        return kept.digests.get(kind)
    return (await _digests(path, kept.size, kind, part_size)).found(kind)


async def _digests(path: PurePath, size: int, kind: str, part_size: int) -> Digests:
    """Read a file and return its checksums."""
    digests = Digests({kind}, part_size)
    version: str | None = None
    for start in range(0, size, _CHUNK):
        reply = await path.store.read(path.key, start, min(start + _CHUNK, size), version)
        version = reply.version
        await offload(digests.add, reply.data)
    return digests


async def _check_within(source: PurePath, target: PurePath) -> None:
    here, there = await source.store.content_info(source.key), await target.store.content_info(target.key)
    differ = [kind for kind in proven(here.digests, there.digests) if here.digests[kind] != there.digests[kind]]
    if here.size != there.size or differ:
        await target.store.delete([target.key])
        raise StoreError(
            f'{target}: has {there.size} bytes {there.digests} after it was copied from {source}, of {here.size} '
            f'bytes {here.digests}'
        )


async def _stream(source: PurePath, target: PurePath, progress: Progress | None) -> None:
    here = await source.store.content_info(source.key)
    before = None if here.version is not None else await source.store.stat(source.key)
    kind = target.store.digest_kind(here.size)
    digests = Digests({'crc32c', kind, *proven(here.digests)} - {''}, target.store.config.part_size)
    async with File(target, 0, await target.store.open_writer(target.key)) as file:
        version = here.version
        for start in range(0, here.size, _CHUNK):
            reply = await source.store.read(source.key, start, min(start + _CHUNK, here.size), version)
            version = reply.version
            await offload(digests.add, reply.data)
            await file.write(reply.data)
            if progress:
                call_user(progress, len(reply.data))
        # Files without versions can change while they are read.
        if before is not None and ((after := await source.store.stat(source.key)) != before or after.size != here.size):
            raise ObjectChangedError(
                f'{source}: changed while it was copied, from {here.size} bytes to {after.size}: copy it again'
            )
        for name in proven(here.digests):
            if digests.found(name) != here.digests[name]:
                raise BadReplyError(
                    f'{source}: {here.size} bytes came with {name} {digests.found(name)}, the store says '
                    f'{here.digests[name]}'
                )
    there = await target.store.content_info(target.key)
    if there.size == here.size and kind and there.digests.get(kind, digests.found(kind)) == digests.found(kind):
        return
    if there.size == here.size and (target.store.local or not kind):
        return  # the disk accepted the bytes; a store without checksums has nothing to compare
    # A server's ETag need not be the expected checksum: only the content read back decides.
    back = (await _digests(target, there.size, 'crc32c', _CHUNK)).found('crc32c')
    if there.size != here.size or back != digests.found('crc32c'):
        await target.store.delete([target.key])
        raise StoreError(
            f'{target}: has {there.size} bytes of crc32c {back} after {here.size} of {digests.found("crc32c")} were '
            f'written'
        )

"""Copies on the local disk: each is made once, by one of the processes that request it, and archives are unpacked."""

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import time
from collections.abc import AsyncIterator
from typing import Any, Final, cast

from granular._support.other_names import answering
from granular._support.text import counted, logger
from granular.aio.conversion.archives import KINDS, split_name, unpack
from granular.aio.datasets.shards import described, filled, listed_shards, missing_shard
from granular.aio.paths.copy import FolderCopy, is_within
from granular.aio.paths.file import Progress
from granular.aio.paths.path import Path
from granular.aio.paths.pure import PurePath, relative_name
from granular.aio.runtime.pools import Threads
from granular.aio.runtime.threads import offload
from granular.aio.stores import Entry
from granular.aio.stores.errors import translated
from granular.aio.stores.local.locks import FolderLock
from granular.aio.stores.local.store import LocalStore
from granular.aio.stores.local.writing import final_name, remove_leftovers, sync_all
from granular.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    BucketNotFoundError,
    InvalidArgumentError,
    NotFoundError,
    ObjectChangedError,
    StoreError,
)
from granular.formats.base import parse_json
from granular.formats.layout import shard_name

MARKER: Final = '.granular-copy.json'
"""The file in a copied folder that names the source and tells whether the copy is complete."""

_SHARD: Final = shard_name(0)
"""The folder that holds the file once the copy of a sharded dataset is complete: granular 0.21 and 0.24 take every name
beside the shards for a shard."""

_ARCHIVES: Final = 4  # archives unpacked at a time
_POLL: Final = 1.0  # seconds at most between two checks whether another process has finished


@dataclasses.dataclass(frozen=True, slots=True)
class LocalCopy:
    """The result of ``copy_to_local``.

    Attributes:
      path: the file or folder on the disk.
      was_copied: True if this call copied it; False if it existed already.
      was_deleted: True if this call removed an incomplete copy.
      was_unpacked: True if this call unpacked an archive.
      files: the number of files and links written.
      bytes: the bytes written.
      seconds: the duration, including waiting for another process.
      source_format: ``'file'``, ``'folder'``, or the archive's format, such as ``'zip'``; empty if nothing was copied.
    """

    path: str
    was_copied: bool = False
    was_deleted: bool = False
    was_unpacked: bool = False
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    source_format: str = ''


@answering()
async def copy_to_local(
    src: Path | str | Any,
    dst: Path | str | Any,
    relative_path: str | os.PathLike[str] | None = None,
    *,
    unpack: bool = True,
    progress: Progress | None = None,
) -> LocalCopy:
    """Make a copy on the local disk, unless there is a complete one; an incomplete copy is removed and made again.

    A complete copy is used without a request, whatever the source has become since: remove it to copy anew. Readers
    with a ``cache_dir`` notice what was replaced.

    Archives (.zip, .tar, .tar.gz, .tgz, .tar.bz2, .tar.xz, .tar.zst) are unpacked while they are downloaded:
    ``train.zip`` becomes the folder ``train``, whether it is the source or in the source folder. If the whole archive
    is in one folder of its name, that folder is left out. If several processes call this at once, one copies and the
    others wait; if it dies, the next one copies.

    A folder has a ``.granular-copy.json`` before its first file is written; it names the source and finally marks the
    copy as complete, from within the first shard of a sharded dataset. A folder with files but without this marker was
    made by other means, and is used as it is, without a request; so is an existing file, because files appear whole,
    unless the source is found to be no file.

    Args:
      src: the file, folder or archive. If it does not exist, an archive of that name is used.
      dst: the path of the copy; for an archive, its suffix is removed.
      relative_path: a path that is appended to both.
      unpack: unpack archives; otherwise they are copied as they are.
      progress: called with the bytes of the source copied since the last call, on a thread of the library.

    Returns:
      The path of the copy, and the work that this call did.

    Raises:
      NotFoundError: if there is nothing to copy.
      AlreadyExistsError: if ``dst`` is a copy of another source, or of archives with another ``unpack``; a file where
        a folder is to be copied; or a folder where a file is.
      InvalidArgumentError: if ``dst`` is not on a disk, or if a name in the source leads out of it.
      CorruptDatasetError: if ``dst`` holds shards, but not the first one; or if a shard of the source is missing or
        unfinished.
      ObjectChangedError: if the source was written meanwhile.
      CorruptArchiveError: if an archive is truncated or damaged.
      StoreError: if the disk is full; the copy is then incomplete.

    Example::

        copy = await granular.aio.copy_to_local('s3://bucket/train.zip', './train')
        async with granular.aio.DatasetReader(copy.path, granular.decoders) as reader:
            print(copy.was_copied, len(reader))
    """
    began = time.perf_counter()
    source, target = _paths(src, dst, relative_path)
    if unpack and (stem := split_name(target.name)[0]) != target.name and split_name(source.name)[1]:
        target = target.with_name(stem)
    if (done := await _done(source, target, unpack)) is None:
        path, form = await _find(source, unpack)
        if source.store.local and await is_within(target, path):
            raise InvalidArgumentError(f'{source}: cannot be copied into itself, to {target}')
        if form == 'file':
            done = await _copy_file(source, target, progress)
        else:
            done = await _copy_folder(source, path, target, form, unpack, progress)
    return dataclasses.replace(done, seconds=time.perf_counter() - began)


def _paths(src: Any, dst: Any, relative: str | os.PathLike[str] | None) -> tuple[Path, Path]:
    source, target = Path(src), Path(dst)
    if not isinstance(target.store, LocalStore):
        raise InvalidArgumentError(f'{target}: is not on a local disk: use Path.copy')
    if relative is not None:
        tail = os.fspath(relative).strip() if isinstance(relative, str | os.PathLike) else relative
        if not isinstance(tail, str) or not tail or tail.startswith('/') or '..' in tail.split('/'):
            raise InvalidArgumentError(f'relative_path: expected a path in {source} and {target}, got {tail!r:.100}')
        source, target = source / tail, target / tail
    return source, target


async def _find(source: Path, unpack: bool) -> tuple[Path, str]:
    """Return the path of the source, and its format: ``'file'``, ``'folder'``, or that of an archive to unpack."""
    try:
        stat = await source.stat()
    except NotFoundError as error:
        if not unpack or isinstance(error, BucketNotFoundError):
            raise
        for ending, kind in KINDS.items():
            if source.name and await (archive := source.with_name(source.name + ending)).is_file():
                return archive, kind
        raise NotFoundError(
            f'{source}: no such file or folder, nor an archive of this name ({", ".join(KINDS)})'
        ) from error
    if stat.is_dir:
        return source, 'folder'
    kind = split_name(source.name)[1] if unpack else ''
    return source, kind or 'file'


async def _done(source: Path, target: Path, unpack: bool) -> LocalCopy | None:
    if (stat := await target.store.find(target.key)) is None:
        return None
    if not stat.is_dir:
        return await _used(source, target, unpack)
    state = await _state(target)
    if state is None:
        if not await offload(_is_used, target.key):
            return None
        if (shards := await listed_shards(target)) and shards[0]:
            rest = ', and with it the record of the copy: remove the folder, and copy again'
            raise missing_shard(f'{target}', 0, rest)
        logger.info('%s: was not created by copy_to_local: used as it is', target)
        return await _used(source, target, unpack) if source.store.local else LocalCopy(f'{target}')
    remedy = 'remove it, or copy to another path'
    own = source.store.server
    requested, copied = _origin(_address(source), own), _origin(state['source'], state.get('server', own))
    if requested != copied:
        raise AlreadyExistsError(f'{target}: is a copy of {copied}, not of {requested}: {remedy}')
    if state['state'] != 'complete':
        return None
    if (unpacked := state.get('unpacked', unpack)) != unpack:
        raise AlreadyExistsError(f'{target}: was copied with unpack={unpacked}, not {unpack}: {remedy}')
    return LocalCopy(f'{target}')


async def _used(source: Path, target: Path, unpack: bool) -> LocalCopy:
    """Return the result for a target that is used as it is, unless one of the two is a file, the other a folder."""
    try:
        form = (await _find(source, unpack))[1]
    except (NotFoundError, AccessDeniedError, StoreError):  # a copy is there for when its source is not
        return LocalCopy(f'{target}')
    is_folder = await target.is_dir()
    if is_folder and form == 'file':
        raise AlreadyExistsError(
            f'{target}: is a folder, and {source} is a file: pass the path of the copy, such as {target / source.name}'
        )
    if not is_folder and form != 'file':
        kind = 'folder' if form == 'folder' else f'{form} archive to unpack'
        raise AlreadyExistsError(f'{target}: is a file, and {source} is a {kind}: remove the file, or copy elsewhere')
    return LocalCopy(f'{target}')


def _address(source: Path) -> str:
    return os.path.abspath(source.key) if source.store.local else f'{source}'


def _origin(address: str, server: str) -> str:
    return f'{address} at {server}' if server else address


async def _state(target: Path) -> dict[str, Any] | None:
    """Return the content of a folder's marker; None if it has none."""
    marker = target / MARKER
    if not await marker.exists():
        marker = target / _SHARD / MARKER
    try:
        content = parse_json(await marker.read_bytes())
        return {**content, 'source': str(content['source']), 'state': str(content['state'])}
    except NotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise AlreadyExistsError(f'{marker}: was not written by copy_to_local: remove {target}') from error


async def _copy_file(source: Path, target: Path, progress: Progress | None) -> LocalCopy:
    lock_folder = target.with_name(f'.{target.name}.copying')
    async with _locked(lock_folder, temporary=True):
        if await target.exists():
            return await _used(source, target, False)
        deleted = await offload(remove_leftovers, target.key)
        await source.copy(target, progress=progress)
    return LocalCopy(f'{target}', True, deleted, False, 1, (await target.stat()).size, 0.0, 'file')


@contextlib.asynccontextmanager
async def _locked(folder: Path, temporary: bool = False) -> AsyncIterator[None]:
    """Create a local folder, temporary or not, and hold its lock, once another process that holds it has ended."""
    store, wait, lock = cast(LocalStore, folder.store), 0.02, None
    try:
        while lock is None:
            await folder.mkdir(parents=True, exist_ok=True)
            try:
                lock = await store.lock_folder(folder.key)
            except NotFoundError:
                continue  # removed by the previous holder
            except AlreadyExistsError:
                if wait == 0.02:
                    logger.info('%s: waiting for another process that is copying it', folder)
                await asyncio.sleep(wait)
                wait = min(2 * wait, _POLL)
        yield
    finally:
        if temporary:
            with contextlib.suppress(OSError, AlreadyExistsError):  # of another process, or removed by it
                lock = lock or FolderLock(folder.key)
                os.rmdir(folder.key)  # without awaiting, as the caller may be cancelled
        if lock is not None:
            lock.release()


async def _copy_folder(
    address: Path, source: Path, target: Path, form: str, unpack: bool, progress: Progress | None
) -> LocalCopy:
    async with _locked(target):
        if (done := await _done(address, target, unpack)) is not None:  # by the previous holder of the lock
            return done
        deleted = await _state(target) is not None
        await offload(_clear, target.key)
        await _mark(target, address, 'copying', {})
        pool = Threads(_ARCHIVES, 'granular-unpack')
        try:
            copying = _Copying(source, target, unpack, pool, progress)
            if form == 'folder':
                await copying.copy()
                await _check_shards(source, target)
            else:
                await copying.unpack(source, form, target, MARKER)
        finally:
            await offload(pool.shutdown)
        if copying.unpacked:
            with translated(f'{target}'):
                await offload(sync_all, target.key)  # unpacked files are synced together: there may be millions
        counts: dict[str, Any] = {'files': copying.files, 'bytes': copying.bytes}
        await _mark(target, address, 'complete', counts | ({'unpacked': unpack} if copying.archives else {}))
    return LocalCopy(f'{target}', True, deleted, copying.unpacked, copying.files, copying.bytes, 0.0, form)


async def _check_shards(source: Path, target: Path) -> None:
    """Check that a copied sharded dataset has all its shards, and that the source has not got others meanwhile."""
    copied = await listed_shards(target)
    finished = await described(target, copied)
    if not finished:
        return
    if lacking := set(range(copied[-1] + 1)).difference(finished):
        rest = f' or unfinished, of {copied[-1] + 1}: copy it when its writers have ended'
        raise missing_shard(f'{source}', min(lacking), rest)
    listed = set(await listed_shards(source))
    added = await filled(source, sorted(listed.difference(copied)))
    if added or not listed.issuperset(copied):
        current = len(listed.intersection(copied)) + len(added)
        raise ObjectChangedError(
            f'{source}: had {counted(len(copied), "shard")} when it was copied, and has {current} now: copy it again',
            path=f'{source}',
        )


async def _mark(target: Path, source: Path, state: str, more: dict[str, Any]) -> None:
    text = json.dumps({'source': _address(source), 'server': source.store.server, 'state': state, **more})
    if state == 'complete' and await (target / _SHARD).is_dir():
        await (target / _SHARD / MARKER).write_text(f'{text}\n')
        await (target / MARKER).unlink()
    else:
        await (target / MARKER).write_text(f'{text}\n')


def _is_used(folder: str) -> bool:
    """Return whether a folder holds anything but temporary files of the marker."""
    with translated(folder):
        return any(final_name(name) != MARKER for name in os.listdir(folder))


def _clear(folder: str) -> None:
    """Remove everything but the marker, which stays until it is replaced."""
    with translated(folder):
        for entry in os.scandir(folder):
            if entry.name == MARKER:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)


class _Copying(FolderCopy):
    """The copy of a folder with its archives unpacked."""

    def __init__(self, source: Path, target: Path, unpack: bool, pool: Threads, progress: Progress | None) -> None:
        super().__init__(source, target, progress)
        self._top = source
        self._bottom = target
        self._progress = progress
        self._unpacks, self._pool = unpack, pool
        self._owners: dict[str, str] = {}  # the archive of each folder that one is unpacked to
        self._folders: set[str] = set()
        self.files = self.bytes = 0
        self.archives = self.unpacked = False

    async def copy_entry(self, entry: Entry) -> None:
        name = relative_name(self._top, entry.key)
        if name in (MARKER, f'{_SHARD}/{MARKER}'):
            return  # the source is itself a copy
        stem, kind = (name, '') if entry.is_dir else split_name(name)
        self.archives |= bool(kind)
        if not kind or not self._unpacks:
            await super().copy_entry(entry)
            return
        target = self.target_of(entry)
        folder = target.with_name(stem.rpartition('/')[2])
        await super().make_folder(folder.parent)
        self._claim(folder, name)
        await folder.store.mkdir(folder.key, parents=False, exist_ok=False)
        await self.unpack(Path.of(self._top.store, entry.key), kind, folder)

    async def copy_file(self, entry: Entry) -> None:
        await super().copy_file(entry)
        self.files += 1
        self.bytes += entry.size

    async def make_folder(self, folder: PurePath) -> None:
        self._folders.add(folder.key)
        for ancestor in (folder, *folder.parents):
            if (archive := self._owners.get(ancestor.key)) is not None:
                raise self._duplicate(ancestor, archive)
            if ancestor == self._bottom:
                break
        await super().make_folder(folder)

    async def unpack(self, source: Path, kind: str, folder: PurePath, keep: str = '') -> None:
        done = await unpack(source, kind, folder.key, self._pool, self._progress, keep)
        self.files += done.files
        self.bytes += done.bytes
        self.unpacked = True

    def is_held(self, dataset: PurePath) -> bool:
        return dataset.key == self._bottom.key  # which is locked for the whole copy

    def _claim(self, folder: PurePath, archive: str) -> None:
        if folder.key in self._owners:
            raise self._duplicate(folder, f'{self._owners[folder.key]} and {archive}')
        if any(f'{made}/'.startswith(f'{folder.key}/') for made in self._folders):
            raise self._duplicate(folder, archive)
        self._owners[folder.key] = archive

    def _duplicate(self, folder: PurePath, archive: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f'{self._top}: several entries would become {folder}, among them {archive}: '
            f'rename one, or pass unpack=False'
        )

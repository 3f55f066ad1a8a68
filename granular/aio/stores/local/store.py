"""The store for the local disk."""

import contextlib
import errno
import functools
import operator
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, BinaryIO, Final, TypeVar

from granular.aio.http.reply import Reply, changed
from granular.aio.runtime.immediate import is_immediate
from granular.aio.runtime.threads import Timer, map_threads_now, offload, offload_whole
from granular.aio.stores.base import Entry, ObjectWriter, Request, Spans, Stat, Store, Target
from granular.aio.stores.errors import translated
from granular.aio.stores.local.files import (
    IN_PLACE,
    OpenFile,
    are_unchanged,
    files,
    open_at_once,
    version_of,
)
from granular.aio.stores.local.locks import FolderLock, being_written, lock, remove_unlocked
from granular.errors import AlreadyExistsError
from granular.formats.layout import shard_number
from granular.metrics import local_files

T = TypeVar('T')

_CHECKED: Final = 16  # reads after which the time is looked at; later on, after twice as many each time


def _count(requests: int, nbytes: int) -> None:
    local_files.ok += requests
    local_files.bytes += nbytes


class LocalStore(Store):
    """The local disk. Keys are paths of the operating system."""

    local = True
    conditional = True
    versions_repeat = False

    def address(self, key: str) -> str:
        # A leading tilde would mean a user's home folder when the address is resolved again.
        return f'./{key}' if key.startswith('~') else key

    async def now(self, key: str) -> float:
        return await offload(_clock, key)

    # --- reading

    def keep_open(self, key: str) -> Mapping[str, Any]:
        return files.keep(key)

    async def read(self, key: str, start: int = 0, stop: int | None = None, version: str | None = None) -> Reply:
        if not is_immediate() and (stop is None or stop - start > IN_PLACE):
            return await offload(self.read_now, key, start, stop, version)
        return self.read_now(key, start, stop, version)

    def read_now(self, key: str, start: int = 0, stop: int | None = None, version: str | None = None) -> Reply:
        """Read on the calling thread."""
        with translated(key):
            file = files.get(key, version)
            # Up to a given end, also what was appended since the file was opened.
            first, end = self.check_range(key, start, stop, file.size) if stop is None or start < 0 else (start, stop)
            data = file.read_exactly(key, first, end)
            file.check(key)
        _count(1, len(data))
        return Reply(data, first, file.size, file.version)

    async def read_into(
        self, key: str, start: int, stop: int, version: str | None, target: memoryview, largest: int = 0
    ) -> None:
        def call() -> None:
            with translated(key):
                file = files.get(key, version)
                file.fill(key, start, target[: stop - start])
                file.check(key)
            _count(1, stop - start)

        await offload(call)

    async def read_many(self, requests: Sequence[Request]) -> list[bytes]:
        return await self.read_spans(Spans.of(requests))

    async def read_spans(self, spans: Spans, fresh: bool = False) -> list[bytes]:
        if not is_immediate() and sum(spans.stops) - sum(spans.starts) > IN_PLACE:
            return await offload(self.read_spans_now, spans)
        return self.read_spans_now(spans)

    def read_spans_now(self, spans: Spans) -> list[bytes]:
        """Read byte ranges on the calling thread; in others as well, from the first slow ones on."""
        objects, owners, starts, stops = spans
        count, timer = len(owners), Timer()
        replies = _read_kept([objects[owner] for owner in owners], starts, stops, timer)
        size = _CHECKED
        while len(replies) < count and not timer.is_slow:
            first = len(replies)
            last = min(first + min(size, open_at_once()), count) - 1
            part = slice(first, last + 1)
            chosen = [objects[owner] for owner in owners[part]]
            own, opened = _read_together(chosen, starts[part], stops[part])
            replies += own
            if last + 1 < count and owners[last + 1] == owners[last] and chosen[-1].version is None:
                # The file that was begun may be replaced: it stays open, and its version is the one to read.
                objects, file = [*objects], opened[-1]
                objects[owners[last]] = Target(chosen[-1].key, file.version, {file.version: file})
            size *= 2
        if rest := count - len(replies):
            replies += _read_in_threads(Spans(objects, owners[-rest:], starts[-rest:], stops[-rest:]))
        _count(len(replies), sum(stops) - sum(starts))
        return replies

    async def check_version(self, key: str, version: str) -> None:
        # Check the path, because a replaced file may still be open.
        with translated(key):
            current = version_of(os.stat(key))
        if version != current:
            raise changed(key, version, current)

    async def stat(self, key: str) -> Stat:
        def call() -> Stat:
            with translated(key):
                info = os.stat(key)
            is_dir = stat.S_ISDIR(info.st_mode)
            return Stat(0 if is_dir else info.st_size, info.st_mtime, version_of(info), is_dir)

        return await offload(call)

    async def scan(self, key: str, prefix: str = '') -> AsyncGenerator[Entry, None]:
        def call() -> list[Entry]:
            with translated(key), os.scandir(key) as items:
                entries = [_entry(item, '' if key == '.' else key) for item in items]
            return sorted((entry for entry in entries if entry is not None), key=lambda entry: entry.key)

        for entry in await offload(call):
            yield entry

    # --- writing

    async def open_writer(self, key: str, new: bool = False) -> ObjectWriter:
        from granular.aio.stores.local.writing import LocalWriter

        return await offload_whole(LocalWriter, key, new, undo=operator.methodcaller('discard'))

    async def open_appender(self, key: str, opened: dict[str, os.stat_result]) -> BinaryIO:
        """Open a file for appending, locked until it is closed.

        Which file it is is noted in ``opened``, also if the call is cancelled.
        """

        def call() -> BinaryIO:
            file = open(key, 'ab')  # noqa: SIM115
            being_written.add(file)
            if lock(file.fileno()) is False:
                file.close()
                raise AlreadyExistsError(f'{key}: another writer is writing it', path=key)
            opened[key] = os.fstat(file.fileno())
            return file

        return await _run(key, call, undo=operator.methodcaller('close'))

    async def truncate(self, key: str, size: int) -> None:
        """Cut off all but the first ``size`` bytes of a file."""
        await _run(key, lambda: os.truncate(key, size))

    async def lock_folder(self, key: str, shared: bool = False) -> FolderLock:
        return await _run(key, lambda: FolderLock(key, shared), undo=FolderLock.release)

    async def lock_dataset(self, key: str) -> contextlib.ExitStack:
        """Lock the folder of a dataset until the stack is closed; of a shard, also keep out copies of its dataset."""
        with contextlib.ExitStack() as locks:
            if shard_number(os.path.basename(key)) is not None:
                locks.callback((await self.lock_folder(os.path.dirname(key) or '.', shared=True)).release)
            locks.callback((await self.lock_folder(key)).release)
            return locks.pop_all()

    async def mkdir(self, key: str, parents: bool, exist_ok: bool) -> None:
        from granular.aio.stores.local.writing import sync

        def call() -> None:
            for folder in _make_folders(key, parents, exist_ok):
                sync(os.path.dirname(folder))  # a dataset only survives a power cut if the folders on its path do

        await _run(key, call)

    async def touch(self, key: str) -> None:
        await _run(key, lambda: os.utime(key))

    async def rename(self, key: str, target: str) -> None:
        await _run(key, lambda: os.replace(key, target))

    async def delete(self, keys: Sequence[str]) -> None:
        def call() -> None:
            for key in keys:
                files.forget(key)
                with translated(key), contextlib.suppress(FileNotFoundError):
                    os.unlink(key)

        await offload_whole(call)

    async def delete_unlocked(self, entries: Sequence[Entry]) -> list[Entry]:
        """Delete files, unless a process has locked them, or they were written anew. Return those that were deleted."""

        def call(entry: Entry) -> bool:
            files.forget(entry.key)
            with translated(entry.key):
                return remove_unlocked(entry.key, entry.modified)

        return [entry for entry in entries if await offload_whole(call, entry)]

    async def delete_empty(self, key: str) -> bool:
        def call() -> bool:
            try:
                os.rmdir(key)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    raise
                return False
            return True

        return await _run(key, call)

    async def delete_tree(self, key: str) -> None:
        def call() -> None:
            files.forget_folder(key)
            shutil.rmtree(key)

        await _run(key, call)

    async def copy_within(self, source: str, target: str) -> bool:
        from granular.aio.stores.local.writing import copy_file

        stopped = threading.Event()
        await offload_whole(copy_file, source, target, stopped, stop=stopped.set)
        return True


async def _run(key: str, call: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
    """Run a call that changes files, with errors that name the path."""

    def translating() -> T:
        with translated(key):
            return call()

    return await offload_whole(translating, undo=undo)


def _clock(folder: str) -> float:
    """Return the modification time of a file created in a folder now: network file servers have their own clocks."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:  # a folder without write permission
        return time.time()


def _make_folders(key: str, parents: bool, exist_ok: bool) -> list[str]:
    """Create a folder, and those above it if ``parents``. Return the created folders."""
    missing = _missing(key) if parents else [key]
    try:
        (os.makedirs if parents else os.mkdir)(key)
    except FileExistsError:
        if exist_ok and os.path.isdir(key):
            return []
        if os.path.lexists(key):
            raise
        return _make_folders(key, parents, exist_ok)  # removed meanwhile
    return missing


def _missing(folder: str) -> list[str]:
    """Return the folders that have to be created, innermost first."""
    missing = []
    while folder and not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    return missing


def _entry(item: 'os.DirEntry[str]', folder: str) -> Entry | None:
    try:
        info = item.stat()
    except OSError as error:
        if not item.is_symlink():
            if isinstance(error, FileNotFoundError):
                return None  # removed since, as temporary files are
            raise
        info = item.stat(follow_symlinks=False)
    size = info.st_size if stat.S_ISREG(info.st_mode) else 0
    is_dir = stat.S_ISDIR(info.st_mode) and not (item.is_symlink() and _leads_above(info, folder))
    version = None if is_dir else version_of(info)
    return Entry(os.path.join(folder, item.name), is_dir, size, info.st_mtime, version)


def _leads_above(info: os.stat_result, folder: str) -> bool:
    """Return whether a link in a folder leads to that folder or to one above it, so that a tree would never end."""
    folder = os.path.abspath(folder)
    while not os.path.samestat(info, os.stat(folder)):
        if folder == '/':
            return False
        folder = os.path.dirname(folder)
    return True


def _read_kept(objects: Sequence[Target], starts: Sequence[int], stops: Sequence[int], timer: Timer) -> list[bytes]:
    """Read a byte range of each object, from files that are kept open: of the first ones if the disk is slow, and of
    none unless all are open and have the bytes.
    """
    try:
        opened: list[OpenFile] = [kept[version] for _, version, kept in objects]  # type: ignore[index]
    except (KeyError, TypeError):
        return []
    sizes = list(map(operator.sub, stops, starts))
    if max(sizes, default=0) > IN_PLACE:
        return []
    fds, replies, size = [file.fd for file in opened], list[bytes](), _CHECKED
    try:
        while (done := len(replies)) < len(fds) and not timer.is_slow:
            part = slice(done, done + size)
            replies += map(os.pread, fds[part], sizes[part], starts[part])
            size *= 2
        if list(map(len, replies)) == sizes[:done] and are_unchanged(dict.fromkeys(opened[:done])):
            return replies
    except OSError:
        pass
    return []


def _read_together(
    objects: Sequence[Target], starts: Sequence[int], stops: Sequence[int]
) -> tuple[list[bytes], list[OpenFile]]:
    """Read a byte range of each object, of which successive ones may be the same. Return their files, too."""
    opened, sizes = _open_all(objects), list(map(operator.sub, stops, starts))
    try:
        replies = list(map(os.pread, [file.fd for file in opened], sizes, starts)) if max(sizes) <= IN_PLACE else []
        if list(map(len, replies)) == sizes and are_unchanged(dict.fromkeys(opened)):
            return replies, opened
    except OSError:
        pass  # of a file that is read once more below
    replies = []
    for (key, _, _), file, start, stop in zip(objects, opened, starts, stops, strict=True):
        with translated(key):
            replies.append(file.read_exactly(key, start, stop))
            file.check(key)
    return replies, opened


def _open_all(objects: Sequence[Target]) -> list[OpenFile]:
    opened: list[OpenFile] = []
    last: Target | None = None
    for target in objects:
        key, version, kept = target
        if target is not last:
            with translated(key):
                file = (kept and version and kept.get(version)) or files.get(key, version)
            last = target
        opened.append(file)
    return opened


def _read_in_threads(spans: Spans) -> list[bytes]:
    """Read byte ranges of files on a slow disk, which is faster with many reads at a time."""
    replies: list[bytes] = []
    requests, together = spans.requests(), open_at_once()
    for first in range(0, len(requests), together):
        opened: list[tuple[OpenFile, str]] = []
        reads: list[tuple[OpenFile, str, int, int]] = []
        for key, starts, stops, version in requests[first : first + together]:
            with translated(key):
                file = files.get(key, version)
            opened.append((file, key))
            reads += [(file, key, start, stop) for start, stop in zip(starts, stops, strict=True)]
        replies += map_threads_now(functools.partial(_read_one, reads), len(reads))
        for file, key in opened:
            with translated(key):
                file.check(key)
    return replies


def _read_one(reads: Sequence[tuple[OpenFile, str, int, int]], number: int) -> bytes:
    file, key, start, stop = reads[number]
    with translated(key):
        return file.read_exactly(key, start, stop)

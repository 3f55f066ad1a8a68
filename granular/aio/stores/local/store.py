"""The local disk: the store."""

import contextlib
import errno
import functools
import os
import shutil
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, BinaryIO

from granular.aio.http.reply import Reply, changed, counters
from granular.aio.runtime.loops import running_loop
from granular.aio.runtime.threads import READS, SLOW, Timer, offload, share
from granular.aio.stores.base import Entry, ObjectWriter, Request, Stat, Store
from granular.aio.stores.errors import translated
from granular.aio.stores.local.files import IN_PLACE, MAX_READ, File, files, version_of
from granular.aio.stores.local.locks import FolderLock, lock
from granular.config import IOConfig
from granular.errors import AlreadyExistsError

# Linux reads at most 2 GiB - 4 KiB in one call.


class LocalStore(Store):
    """The local disk. Keys are paths as the operating system takes them."""

    local = True
    conditional = True
    versions_repeat = False

    def __init__(self, root: str = '', config: IOConfig | None = None, options: Mapping[str, Any] = {}) -> None:
        super().__init__(root, config or IOConfig(), options)

    def address(self, key: str) -> str:
        # A name that begins with a tilde is no user's home folder when the address is read again.
        return f'./{key}' if key.startswith('~') else key

    async def now(self, key: str) -> float:
        return await offload(_clock, key)

    # --- reading

    async def read(self, key: str, start: int = 0, stop: int | None = None, version: str | None = None) -> Reply:
        if running_loop() is not None and (stop is None or stop - start > IN_PLACE):
            return await offload(self.read_now, key, start, stop, version)
        return self.read_now(key, start, stop, version)

    def read_now(self, key: str, start: int = 0, stop: int | None = None, version: str | None = None) -> Reply:
        """Read on this thread."""
        with translated(key):
            file = files.get(key, version)
            first = max(0, file.size + start) if start < 0 else start
            data = file.exactly(key, first, max(first, file.size) if stop is None else stop)
            file.check(key)
        counters.requests += 1
        counters.bytes += len(data)
        return Reply(data, first, file.size, file.version, holder=file)

    async def read_into(self, key: str, start: int, stop: int, version: str | None, target: memoryview) -> None:
        def call() -> None:
            with translated(key):
                file = files.get(key, version)
                file.fill(key, start, target[: stop - start])
                file.check(key)
            counters.requests += 1
            counters.bytes += stop - start

        await offload(call)

    async def read_many(self, requests: Sequence[Request]) -> list[bytes]:
        if running_loop() is not None:
            size = sum(sum(request.stops) - sum(request.starts) for request in requests)
            if size > IN_PLACE:
                return await offload(self.read_many_now, requests)
        return self.read_many_now(requests)

    def read_many_now(self, requests: Sequence[Request]) -> list[bytes]:
        """Several byte ranges, on this thread."""
        pread = os.pread
        replies: list[bytes] = []
        for key, starts, stops, version in requests:
            with translated(key):
                file = files.get(key, version)
                fd = file.fd
                done = 0
                while done < len(starts):
                    timer = Timer()
                    for start, stop in zip(starts[done : done + READS], stops[done : done + READS], strict=True):
                        data = pread(fd, stop - start, start) if stop - start <= MAX_READ else b''
                        replies.append(data if len(data) == stop - start else file.exactly(key, start, stop))
                    done += READS
                    if timer.wall > SLOW and timer.waited:  # for a disk, which likes to be asked for many at a time
                        replies += share(
                            functools.partial(_nth, file, key, starts, stops, done), max(0, len(starts) - done)
                        )
                        break
                file.check(key)
            counters.bytes += sum(stops) - sum(starts)
        counters.requests += len(replies)
        return replies

    async def check_version(self, key: str, version: str) -> None:
        # By its path, as a file that was replaced may be open still.
        with translated(key):
            now = version_of(os.stat(key))
        if now != version:
            raise changed(key, version, now)

    async def stat(self, key: str) -> Stat:
        def call() -> Stat:
            with translated(key):
                info = os.stat(key)
            is_dir = os.path.isdir(key)
            return Stat(0 if is_dir else info.st_size, info.st_mtime, version_of(info), is_dir)

        return await offload(call)

    async def scan(self, key: str, prefix: str = '') -> AsyncIterator[Entry]:
        def call() -> list[Entry]:
            with translated(key), os.scandir(key) as found:
                entries = [_entry(item, '' if key == '.' else key) for item in found]
            return sorted((entry for entry in entries if entry is not None), key=lambda entry: entry.key)

        for entry in await offload(call):
            yield entry

    # --- writing

    async def open_writer(self, key: str, new: bool = False) -> ObjectWriter:
        from granular.aio.stores.local.writing import LocalWriter

        return await offload(LocalWriter, key, new)

    async def open_appender(self, key: str, size: int) -> BinaryIO:
        """A file open for appending behind its first ``size`` bytes; what lies there is cut off."""

        def call() -> BinaryIO:
            with translated(key):
                file = open(key, 'ab')  # noqa: SIM115
                if lock(file.fileno()) is False:
                    file.close()
                    raise AlreadyExistsError(f'{key}: another writer is writing it')
                if file.tell() != size:
                    file.truncate(size)
            return file

        return await offload(call)

    async def truncate(self, key: str, size: int) -> None:
        """Cut off what lies behind the first bytes of a file."""

        def call() -> None:
            with translated(key):
                os.truncate(key, size)

        await offload(call)

    async def lock_folder(self, key: str) -> FolderLock:
        """The right to write in a folder.

        Raises:
          AlreadyExistsError: if another writer has it.
        """

        def call() -> FolderLock:
            with translated(key):
                return FolderLock(key)

        return await offload(call)

    async def mkdir(self, key: str, parents: bool, exist_ok: bool) -> None:
        from granular.aio.stores.local.writing import sync

        def call() -> None:
            with translated(key):
                new = _missing(key) if parents else [key]
                if parents:
                    os.makedirs(key, exist_ok=exist_ok)
                else:
                    try:
                        os.mkdir(key)
                    except FileExistsError:
                        if not exist_ok or not os.path.isdir(key):
                            raise
                        return
                for folder in new:  # a dataset outlives a power cut only if the names that lead to it do
                    sync(os.path.dirname(folder))

        await offload(call)

    async def delete(self, keys: Sequence[str]) -> None:
        def call() -> None:
            for key in keys:
                files.forget(key)
                with translated(key), contextlib.suppress(FileNotFoundError):
                    os.unlink(key)

        await offload(call)

    async def delete_empty(self, key: str) -> bool:
        def call() -> bool:
            with translated(key):
                try:
                    os.rmdir(key)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                        raise
                    return False
            return True

        return await offload(call)

    async def delete_tree(self, key: str) -> None:
        def call() -> None:
            files.forget(key)
            with translated(key):
                shutil.rmtree(key)

        await offload(call)

    async def copy_within(self, source: str, target: str) -> bool:
        from granular.aio.stores.local.writing import copy

        await offload(copy, source, target)
        return True


def _clock(folder: str) -> float:
    """The time that a file has which is made in a folder now. Servers of network file systems have their own clocks."""
    try:
        try:
            fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except (OSError, AttributeError):  # file systems without files that have no name
            with tempfile.TemporaryFile(dir=folder) as file:
                return os.fstat(file.fileno()).st_mtime
    except OSError:  # a folder that may not be written
        return time.time()
    try:
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)


def _missing(folder: str) -> list[str]:
    """The folders that have to be made, from the innermost one on."""
    missing = []
    while folder and not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    return missing


def _entry(item: 'os.DirEntry[str]', folder: str) -> Entry | None:
    try:
        info = item.stat()
    except FileNotFoundError:
        if not item.is_symlink():
            return None  # removed since, as drafts are
        info = item.stat(follow_symlinks=False)
    size = info.st_size if stat.S_ISREG(info.st_mode) else 0
    return Entry(os.path.join(folder, item.name), stat.S_ISDIR(info.st_mode), size, info.st_mtime)


def _nth(file: File, key: str, starts: list[int], stops: list[int], first: int, i: int) -> bytes:
    return file.exactly(key, starts[first + i], stops[first + i])

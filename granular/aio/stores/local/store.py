"""Files on a local disk, read without waiting by ``os.pread``."""

import contextlib
import errno
import functools
import os
import shutil
import stat
import tempfile
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, BinaryIO

from granular.aio.http.buffers import blank
from granular.aio.http.reply import Reply, changed, counters
from granular.aio.runtime.loops import running_loop
from granular.aio.runtime.threads import READS, SLOW, Timer, offload, share
from granular.aio.stores.base import Entry, ObjectWriter, Request, Stat, Store
from granular.aio.stores.errors import translated
from granular.aio.stores.local.locks import FolderLock, lock
from granular.config import IOConfig, KiB
from granular.errors import AlreadyExistsError, OutOfRangeError

# Up to here a read under an event loop is done in place: it takes less time than a thread takes to begin.
IN_PLACE = 256 * KiB
# Linux reads at most 2 GiB - 4 KiB in one call.
_MAX_READ = 1 << 30
# Bytes at the end of a file that tell whether it was appended to, or written anew.
_END = 4 * KiB


class File:
    """An open file, closed when the last who reads it lets go."""

    __slots__ = ('_end', '_seen_size', '_seen_time', 'fd', 'size', 'version')

    def __init__(self, path: str) -> None:
        self.fd = -1
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        info = os.fstat(self.fd)
        self.size = info.st_size
        self.version = version_of(info)
        self._seen_time, self._seen_size = info.st_mtime_ns, info.st_size
        self._end = self._sum_of_end() if stat.S_ISREG(info.st_mode) else 0

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # The default stays when modules are cleared at exit.
        if self.fd >= 0:
            close(self.fd)

    def exactly(self, key: str, start: int, stop: int) -> bytes:
        """The bytes from start to stop, all of them."""
        if stop - start <= IN_PLACE:
            data = os.pread(self.fd, stop - start, start)
            if len(data) == stop - start:
                return data
        space = blank(stop - start)
        self.fill(key, start, space.view)
        owner: bytes = space.owner
        return owner

    def fill(self, key: str, start: int, target: memoryview) -> None:
        """Read the bytes from start on into memory, until it is full."""
        done = 0
        while done < len(target):
            got = os.preadv(self.fd, [target[done : done + _MAX_READ]], start + done)
            if not got:
                self.check(key)
                size = os.fstat(self.fd).st_size
                stop = start + len(target)
                raise OutOfRangeError(f'{key}: bytes {start} to {stop} were asked for, but it has {size}')
            done += got

    def check(self, key: str) -> None:
        """That what was read before this call is of the version that was opened: nothing was written in place since.

        A file that grew is of the same version, as its writer appends, if the end that it had is as it was.

        Raises:
          ObjectChangedError: if it was written in place.
        """
        info = os.fstat(self.fd)
        if info.st_mtime_ns != self._seen_time or info.st_size != self._seen_size:
            if info.st_size <= self.size or self._sum_of_end() != self._end:
                raise changed(key, self.version, version_of(info))
            self._seen_time, self._seen_size = info.st_mtime_ns, info.st_size

    def _sum_of_end(self) -> int:
        start = max(0, self.size - _END)
        return zlib.crc32(os.pread(self.fd, self.size - start, start))


def version_of(info: os.stat_result) -> str:
    """What tells one version of a file from the next."""
    return f'{info.st_ino:x}-{info.st_size:x}-{info.st_mtime_ns:x}'


class Files:
    """The files that were read last, kept open: at most ``limit`` of them, however many shards there are.

    They are kept by path and version, so that a reader of a file that was replaced since goes on with what it opened.
    """

    def __init__(self, limit: int = 512) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self.opened: dict[tuple[str, str], File] = {}

    def current(self, path: str) -> File:
        """The file as it is now."""
        return self.opened.get((path, version_of(os.stat(path)))) or self._keep(path, File(path))

    def pinned(self, path: str, version: str) -> File:
        """The file of that version.

        Raises:
          ObjectChangedError: if it was replaced, and what it was before is not open any more.
        """
        file = self.opened.get((path, version))
        if file is None:
            file = self._keep(path, File(path))
            if file.version != version:
                raise changed(path, version, file.version)
        return file

    def _keep(self, path: str, file: File) -> File:
        with self._lock:
            while len(self.opened) >= self._limit:
                del self.opened[next(iter(self.opened))]
            self.opened[path, file.version] = file
        return file

    def get(self, path: str, version: str | None) -> File:
        """The file of that version, or as it is now if any version will do."""
        return self.current(path) if version is None else self.pinned(path, version)

    def forget(self, path: str) -> None:
        """Let go of a file, or of all in a folder, as before they are deleted."""
        with self._lock:
            for key in [key for key in self.opened if f'{key[0]}/'.startswith(f'{path}/')]:
                del self.opened[key]


files = Files()
os.register_at_fork(after_in_child=lambda: files.__dict__.update(_lock=threading.Lock()))


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
                        data = pread(fd, stop - start, start) if stop - start <= _MAX_READ else b''
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

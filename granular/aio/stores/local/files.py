"""Reads from local files, which are kept open and identified by their version."""

import os
import stat
import threading
import zlib
from collections.abc import Callable

from granular.aio.http.buffers import blank
from granular.aio.http.reply import changed
from granular.aio.runtime.forking import after_fork
from granular.config import KiB
from granular.errors import OutOfRangeError, StoreError

# Linux reads at most 2 GiB - 4 KiB in one call.
MAX_READ = 1 << 30
# Under an event loop, reads up to this size run inline: they take less time than a thread takes to start.
IN_PLACE = 256 * KiB
# Bytes at the end of a file that show if the file was appended to or rewritten.
_END = 4 * KiB


class OpenFile:
    """A local file open for reading, closed when its last reader releases it."""

    __slots__ = ('_end', '_seen', 'fd', 'size', 'version')

    def __init__(self, path: str) -> None:
        self.fd: int = -1
        # Opening a pipe would wait for its writer, perhaps forever.
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        info = os.fstat(self.fd)
        if not stat.S_ISREG(info.st_mode) and not stat.S_ISDIR(info.st_mode):
            raise StoreError(f'{path}: expected a file, got a pipe or a device')
        self.size: int = info.st_size
        self.version: str = version_of(info)
        self._seen = info
        self._end = self._checksum_of_end() if stat.S_ISREG(info.st_mode) else 0

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # The default argument is still available when modules are cleared at exit.
        if self.fd >= 0:
            close(self.fd)

    def read_exactly(self, key: str, start: int, stop: int) -> bytes:
        """Read all bytes from ``start`` to ``stop``."""
        if stop - start <= IN_PLACE:
            data = os.pread(self.fd, stop - start, start)
            if len(data) == stop - start:
                return data
        space = blank(stop - start, key)
        self.fill(key, start, space.view)
        owner: bytes = space.owner
        return owner

    def fill(self, key: str, start: int, target: memoryview) -> None:
        """Read from ``start`` on until ``target`` is full.

        Raises:
          OutOfRangeError: if the file ends before that.
          ObjectChangedError: if the file was overwritten in place.
        """
        done = 0
        while done < len(target):
            count = os.preadv(self.fd, [target[done : done + MAX_READ]], start + done)
            if not count:
                self.check(key)
                size = os.fstat(self.fd).st_size
                stop = start + len(target)
                raise OutOfRangeError(f'{key}: bytes {start} to {stop} were requested, but it has {size}')
            done += count

    def check(self, key: str) -> None:
        """Check that all bytes read before this call are of the version that was opened.

        A file that grew, or got other links, rights or owners, still has that version if its former end is unchanged,
        because its writer appends.

        Raises:
          ObjectChangedError: if the file was overwritten in place.
        """
        info, seen = os.fstat(self.fd), self._seen
        if info.st_ctime_ns != seen.st_ctime_ns or info.st_mtime_ns != seen.st_mtime_ns or info.st_size != seen.st_size:
            kept = info.st_size > self.size or (
                _content_of(info) == _content_of(seen) and _rights_of(info) != _rights_of(seen)
            )
            if not kept or self._checksum_of_end() != self._end:
                raise changed(key, self.version, version_of(info))
            self._seen = info

    def _checksum_of_end(self) -> int:
        start = max(0, self.size - _END)
        return zlib.crc32(os.pread(self.fd, self.size - start, start))


def version_of(info: os.stat_result) -> str:
    """Return the version of a file, made of its inode, size, modification time, and the time of its last change.

    Programs set the modification time, as when they copy a file over another one; the other time is the system's.
    """
    return f'{info.st_ino:x}-{info.st_size:x}-{info.st_mtime_ns:x}-{info.st_ctime_ns:x}'


def is_version(pin: str | None, version: str | None) -> bool:
    """Return whether a version is the one that was noted, also by granular 1.0.0a1: without its last part."""
    return pin == version or (version is not None and pin == version.rpartition('-')[0])


def _content_of(info: os.stat_result) -> tuple[int, ...]:
    return info.st_size, info.st_mtime_ns


def _rights_of(info: os.stat_result) -> tuple[int, ...]:
    return info.st_nlink, info.st_mode, info.st_uid, info.st_gid


class OpenFiles:
    """Recently opened files, kept open for the next read: at most ``limit`` of them, however many shards there are.

    The keys are path and version, so that a reader of a file that was replaced continues with the file it opened.
    """

    def __init__(self, limit: int = 512) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self.opened: dict[tuple[str, str], OpenFile] = {}

    def current(self, path: str) -> OpenFile:
        """Return the file as it is now."""
        return self.opened.get((path, version_of(os.stat(path)))) or self._add(path, OpenFile(path))

    def pinned(self, path: str, version: str) -> OpenFile:
        """Return the file of the given version.

        Raises:
          ObjectChangedError: if it was replaced, and the earlier file is no longer open.
        """
        file = self.opened.get((path, version))
        if file is None:
            file = self._add(path, OpenFile(path))
            if not is_version(version, file.version):
                raise changed(path, version, file.version)
            self.opened[path, version] = file
        return file

    def _add(self, path: str, file: OpenFile) -> OpenFile:
        with self._lock:
            while len(self.opened) >= self._limit:
                del self.opened[next(iter(self.opened))]
            self.opened[path, file.version] = file
        return file

    def get(self, path: str, version: str | None) -> OpenFile:
        """Return the file of the given version, or the current one if that is None."""
        return self.current(path) if version is None else self.pinned(path, version)

    def forget(self, path: str) -> None:
        """Release a file, or all files in a folder, before they are deleted."""
        with self._lock:
            for key in [key for key in self.opened if f'{key[0]}/'.startswith(f'{path}/')]:
                del self.opened[key]


files = OpenFiles()
after_fork(lambda: files.__dict__.update(_lock=threading.Lock()))

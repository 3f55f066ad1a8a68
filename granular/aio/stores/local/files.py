"""Reads from local files, which are kept open and identified by their version."""

import errno
import fcntl
import operator
import os
import resource
import stat
import threading
import weakref
import zlib
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from granular._support.lru import LRU
from granular.aio.http.reply import changed
from granular.aio.runtime.buffers import blank
from granular.aio.runtime.descriptor import Descriptor
from granular.aio.runtime.forking import after_fork
from granular.config import KiB
from granular.errors import OutOfRangeError, StoreError

# Linux reads at most 2 GiB - 4 KiB in one call.
MAX_READ = 1 << 30
# Under an event loop, reads up to this size run inline: they take less time than a thread takes to start.
IN_PLACE = 256 * KiB
# Bytes at the end of a file that show if the file was appended to or rewritten.
_END = 4 * KiB
# Files that are kept open at most.
_MOST = 8192
# Files that are open for one read at most.
_AT_ONCE = 64


_state_of: Final = operator.attrgetter('st_ctime_ns', 'st_mtime_ns', 'st_size')


class Facts(NamedTuple):
    """Size, version and identity of an opened file."""

    size: int
    version: str
    seen: os.stat_result
    state: tuple[int, ...]
    end: int  # checksum


class OpenFile(Descriptor):
    """A local file open for reading, closed when its last reader releases it."""

    __slots__ = ('_end', '_seen', '_state', 'size', 'version')
    size: int
    version: str

    def __init__(self, path: str, least: int = 0, before: Facts | None = None) -> None:
        # Opening a pipe would wait for its writer, perhaps forever.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        super().__init__(_at_least(path, flags, least) if least else path, flags)
        info = os.fstat(self.fd)
        if before is not None and os.path.samestat(info, before.seen) and _state_of(info) == before.state:
            self.size = before.size
            self.version = before.version
            self._seen = before.seen
            self._state = before.state
            self._end = before.end
            return
        if not stat.S_ISREG(info.st_mode) and not stat.S_ISDIR(info.st_mode):
            raise StoreError(f'{path}: expected a file, got a pipe or a device', path=path)
        self.size = info.st_size
        self.version = version_of(info)
        self._see(info)
        self._end = self._checksum_of_end() if stat.S_ISREG(info.st_mode) else 0

    def facts(self) -> Facts:
        return Facts(self.size, self.version, self._seen, self._state, self._end)

    def read_exactly(self, key: str, start: int, stop: int) -> bytes:
        if stop - start <= IN_PLACE:
            data = os.pread(self.fd, stop - start, start)
            if len(data) == stop - start:
                return data
        space = blank(stop - start, key)
        self.fill(key, start, space.view)
        owner: bytes = space.owner
        return owner

    def fill(self, key: str, start: int, target: memoryview) -> None:
        done = 0
        while done < len(target):
            count = os.preadv(self.fd, [target[done : done + MAX_READ]], start + done)
            if not count:
                self.check(key)
                size = os.fstat(self.fd).st_size
                stop = start + len(target)
                raise OutOfRangeError(f'{key}: bytes {start} to {stop} were requested, but it has {size}', path=key)
            done += count

    def check(self, key: str) -> None:
        """Check that all bytes read before this call are of the version that was opened.

        A file that grew, or got other links, rights or owners, still has that version if its former end is unchanged,
        because its writer appends; one that was overwritten in place has not.
        """
        info = os.fstat(self.fd)
        if _state_of(info) != self._state:
            seen = self._seen
            kept = info.st_size > self.size or (
                _content_of(info) == _content_of(seen) and _rights_of(info) != _rights_of(seen)
            )
            if not kept or self._checksum_of_end() != self._end:
                raise changed(key, self.version, version_of(info))
            self._see(info)

    def _see(self, info: os.stat_result) -> None:
        self._seen, self._state = info, _state_of(info)

    def _checksum_of_end(self) -> int:
        start = max(0, self.size - _END)
        return zlib.crc32(os.pread(self.fd, self.size - start, start))


def are_unchanged(opened: Collection[OpenFile]) -> bool:
    """Return whether nothing about files has changed since they were opened, or checked; otherwise check each."""
    states = map(_state_of, map(os.fstat, [file.fd for file in opened]))
    return list(states) == [file._state for file in opened]


def version_of(info: os.stat_result) -> str:
    """Return the version of a file, made of its inode, size, modification time, and the time of its last change.

    Programs set the modification time, as when they copy a file over another one; the other time is the system's.
    """
    return f'{info.st_ino:x}-{info.st_size:x}-{info.st_mtime_ns:x}-{info.st_ctime_ns:x}'


def _content_of(info: os.stat_result) -> tuple[int, ...]:
    return info.st_size, info.st_mtime_ns


def _rights_of(info: os.stat_result) -> tuple[int, ...]:
    return info.st_nlink, info.st_mode, info.st_uid, info.st_gid


class KeptFile(dict[str, OpenFile]):
    """A file that readers keep open for their next reads, closed when the last of them drops this.

    It is kept by version: a reader of a file that was replaced continues with the file it opened.
    """

    __slots__ = ('__weakref__', 'closed')

    def __init__(self) -> None:
        super().__init__()
        self.closed: dict[str, Facts] = {}  # those that were closed to leave descriptors to others, by version


class OpenFiles:
    """The files that readers keep open, as many as the limit on descriptors allows, however many shards there are.

    Other files are opened for each read, which takes as long as reading some ten records. So where more files are read
    than the soft limit allows, it is raised, once, as systems mean programs to do: it is 1,024 by default only for
    programs that call select(), which fails for higher descriptors. For these, files have descriptors above the former
    limit from then on.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the handler of a signal may read meanwhile
        # References without callbacks: an interrupt in a callback would be ignored.
        self._kept: dict[str, weakref.ref[KeptFile]] = {}
        self._most = 1024  # references, after which those that are dead are removed
        # By path and version, in the order in which they were opened.
        self._opened: LRU[tuple[str, str], weakref.ref[KeptFile]] = LRU(_MOST, evicted=_close)
        self._least: int | None = None  # the first descriptor for files, once the limit was raised

    def keep(self, path: str) -> KeptFile:
        """Keep a file open from its next read on, as long as the returned object exists."""
        with self._lock:
            kept = self._find(path)
            if kept is None:
                kept = KeptFile()
                self._kept[path] = weakref.ref(kept)
                if len(self._kept) > self._most:
                    self._kept = {path: known for path, known in list(self._kept.items()) if known() is not None}
                    self._most = max(1024, 2 * len(self._kept))
            return kept

    def _find(self, path: str) -> KeptFile | None:
        reference = self._kept.get(path)
        return None if reference is None else reference()

    def get(self, path: str, version: str | None) -> OpenFile:
        """Return the file of a version, which may have been replaced while it is open; by default the current one."""
        reference = self._kept.get(path)
        kept = None if reference is None else reference()
        known = version or version_of(os.stat(path))
        if kept is None or (file := kept.get(known)) is None:
            file = self._open(path, None if kept is None else kept.closed.get(known))
            if version is not None and version != file.version:
                raise changed(path, version, file.version)
            if kept is not None:
                self._add(path, version or file.version, file, kept)
        return file

    def _open(self, path: str, before: Facts | None) -> OpenFile:
        try:
            return OpenFile(path, self._least or 0, before)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        with self._lock:
            self._opened.trim(0)
        return OpenFile(path, 0, before)

    def _add(self, path: str, version: str, file: OpenFile, kept: KeptFile) -> None:
        with self._lock:
            most = _limit()
            if self._least is None and len(self._opened) >= most:
                self._least, most = _raise_limit(), _limit()
            kept[version] = file
            kept.closed.pop(version, None)
            self._opened.limit = most
            self._opened.put((path, version), weakref.ref(kept))

    def forget(self, path: str) -> None:
        """Close a file before it is deleted."""
        with self._lock:
            self._close_all((path, version) for version in list(self._find(path) or ()))

    def forget_folder(self, path: str) -> None:
        """Close all files in a folder before they are deleted."""
        with self._lock:
            self._close_all(key for key, _ in self._opened.items() if key[0].startswith(f'{path}/'))

    def _close_all(self, keys: Iterable[tuple[str, str]]) -> None:
        for key in keys:
            if (reference := self._opened.pop(key)) is not None:
                _close(key, reference)


def _close(key: tuple[str, str], reference: weakref.ref[KeptFile]) -> None:
    """Close a file that is kept by path and version, if its readers exist."""
    _, version = key
    if (kept := reference()) is not None and (file := kept.pop(version, None)) is not None:
        kept.closed[version] = file.facts()


def _at_least(path: str, flags: int, least: int) -> str | int:
    """Return the descriptor of an opened file, which is not below some number; the path if that is not possible."""
    opened = Descriptor(path, flags)
    try:
        return fcntl.fcntl(opened.fd, fcntl.F_DUPFD_CLOEXEC, least)
    except OSError:  # the limit was lowered since
        return path


def _limit() -> int:
    """Return how many files are kept open: half of the descriptors that the process may have, or 8,192."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST if allowed == resource.RLIM_INFINITY else max(1, min(_MOST, allowed // 2))


def _raise_limit() -> int:
    """Raise the soft limit on descriptors as far as files need it and the hard one allows. Return the former one; 0 if
    it was not raised.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * _MOST if hard == resource.RLIM_INFINITY else min(hard, 2 * _MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return 0
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS allows less than its hard limit
        return 0
    return soft


def open_at_once() -> int:
    """Return how many files one read may have open at a time, beside those that are kept open."""
    return max(1, min(_AT_ONCE, _limit() // 4))


files = OpenFiles()
after_fork(lambda: files.__dict__.update(_lock=threading.RLock()))

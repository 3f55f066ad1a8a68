"""A table of records in shared memory: each is written once, and read without a lock and without a server process.

The memory is a sparse file: a page of header fields, a row of counters for each process, 8 bytes for each index, and
space for the records, one after the other. A writer holds a lock that the system releases when its process ends. It
writes a record after the last one, moves the end, and then publishes the record's position with a single store of 8
bytes. Whenever the writer is killed, a record exists completely or not at all, and at most its space is lost.
"""

import contextlib
import errno
import functools
import mmap
import os
import secrets
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from granular._support.indexing import MOST
from granular.aio.caches.segments import Segment, attach, create, path_of, sweep
from granular.aio.runtime.forking import each_after_fork
from granular.aio.stores.local.locks import RangeLocks
from granular.errors import (
    AlreadyExistsError,
    ClosedError,
    CorruptError,
    GranularError,
    InvalidArgumentError,
    NotFoundError,
    StoreError,
    UnsupportedError,
)

_MAGIC: Final = int.from_bytes(b'grcache1', 'little')
# The header fields, 8 bytes each: magic, an unguessable token, the source's fingerprint, the number of indices, the
# capacity in bytes, the position of the next record, and the numbers of records and of processes so far.
_WORDS: Final = 16
_TOKEN, _PRINT, _COUNT, _ROOM, _END, _RECORDS, _PROCESSES = 1, 3, 5, 6, 7, 8, 9
_ROWS, _ROW = 1000, 4  # further processes share rows
_COUNTERS: Final = ('hits', 'misses', 'not_kept')
_FRONT: Final = _WORDS + _ROWS * _ROW
_PAGE: Final = mmap.ALLOCATIONGRANULARITY
_HEAD: Final = struct.Struct('<QQ')  # precedes each record: its length and its index
WAIT: Final = 1.0  # seconds that a writer waits for another one, whose process may be stopped
_PAUSE: Final = 30.0  # seconds after that in which no writer waits
_POLL: Final = 0.001
_CLOSED: Final = 'the cache was closed during the call'


class Address(NamedTuple):
    """The location of a table: the path of its file, or of a process's open file, and the token in its header."""

    path: str
    token: bytes


class Table:
    """Records by index, of a limited total size: up to ``room``, and 8 bytes for each of ``count`` indices."""

    def __init__(self, segment: Segment, name: str) -> None:
        self._fd = segment.fd
        self._holder = segment.holder
        self._name = name
        self._closing = weakref.finalize(self, os.close, self._fd)
        try:
            head = struct.unpack(f'={_WORDS}Q', os.pread(self._fd, 8 * _WORDS, 0).ljust(8 * _WORDS, b'\0'))
            self.count, self.room = head[_COUNT], head[_ROOM]
            if head[0] != _MAGIC or os.fstat(self._fd).st_size != _sizes(self.count, self.room)[1]:
                raise CorruptError(f'{name}: is not a cache')
            self.token = struct.pack('=2Q', *head[_TOKEN : _TOKEN + 2])
            self.fingerprint = struct.pack('=2Q', *head[_PRINT : _PRINT + 2])
            self._start = _sizes(self.count, self.room)[0]
            self._front = mmap.mmap(self._fd, self._start)
            self._words: Any = memoryview(self._front).cast('Q')
            self._data = mmap.mmap(self._fd, max(self.room, 1), access=mmap.ACCESS_READ, offset=self._start)
        except BaseException as error:
            self._release()
            if isinstance(error, OSError) and not isinstance(error, GranularError):
                raise StoreError(f'{name}: cannot be mapped into memory: {error}') from error
            raise
        self._writing = _WritersLock(self._fd)
        self._counting = threading.RLock()  # the handler of a signal may read meanwhile
        self._pid, self._row = -1, 0
        _tables.add(self)

    @classmethod
    def anonymous(cls, count: int, room: int) -> 'Table':
        """Create a table that is freed when its last user closes it."""
        _check_system()
        fd = -1
        try:
            fd = os.memfd_create('granular-cache', os.MFD_CLOEXEC)
            _fill(count, room, bytes(16), fd)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise StoreError(f'no memory for a cache of {count} indices: {error}') from error
        return cls(Segment(fd, None), 'a cache')

    @classmethod
    def named(cls, count: int, room: int, fingerprint: bytes, name: str) -> 'Table':
        """Open the table of a name, which must be of this source. The first process to ask for it creates it."""
        _check_system()
        path, fill = path_of('cache', name), functools.partial(_fill, count, room, fingerprint)
        sweep()  # a cache whose processes were all killed may be of another source
        while True:
            try:
                table = cls(attach(path, hold=True), path)
                break
            except NotFoundError:
                with contextlib.suppress(AlreadyExistsError):  # another process created it first
                    return cls(create(path, fill, shared=True), path)
            except CorruptError:  # it is gone by now, unless a process of another release holds it
                return cls(create(path, fill, shared=True), path)
        if (table.count, table.room) != (count, room):
            other = f'{table.count} elements and max_bytes={table.room}, not {count} and {room}: choose another name'
        elif table.fingerprint != fingerprint:
            other = 'another source: choose another name, or pass the same fingerprint= if the values are the same'
        else:
            return table
        table.close()
        raise InvalidArgumentError(f'the cache named {name!r} is of {other}')

    @classmethod
    def at(cls, address: Address) -> 'Table':
        """Open the table of another process."""
        message = 'a cache ended with the process that created it: keep that alive, or give the cache a name'
        try:
            table = cls(attach(address.path), 'a cache')
        except (NotFoundError, CorruptError):
            raise NotFoundError(message) from None
        if table.token != address.token:
            table.close()
            raise NotFoundError(message)
        return table

    @property
    def address(self) -> Address:
        """The address by which other processes attach, as long as this one keeps the table open."""
        path = f'/proc/{os.getpid()}/fd/{self._fd}' if self._holder is None else self._holder.paths[-1]
        return Address(path, self.token)

    def find(self, index: int) -> range | None:
        """Return the position of a record, or None."""
        try:
            slot = self._words[_FRONT + index]
            if not slot:
                return None
            length, owner = _HEAD.unpack_from(self._data, slot - 1)
        except ValueError:
            raise ClosedError(_CLOSED) from None
        except (struct.error, OverflowError):  # a damaged position, beyond the memory
            return None
        start = slot - 1 + _HEAD.size
        return range(start, start + length) if owner == index and start + length <= self.room else None

    def read(self, position: range) -> bytes:
        try:
            return self._data[position.start : position.stop]
        except ValueError:
            raise ClosedError(_CLOSED) from None

    def put(self, records: Sequence[tuple[int, bytes]]) -> None:
        """Store records that are not stored yet, while there is space and the table is open; blocks."""
        stored, words = 0, self._words
        with self._writing.held(WAIT) as acquired:
            for index, record in records if acquired else ():
                if words[_FRONT + index] or self._append(index, record):
                    stored += 1
        self.add(2, len(records) - stored)

    def _append(self, index: int, record: bytes) -> bool:
        words, at = self._words, self._words[_END]
        size = _HEAD.size + len(record)
        if at + size > self.room:
            return False
        try:
            if os.pwritev(self._fd, [_HEAD.pack(len(record), index), record], self._start + at) != size:
                return False
        except OSError:  # the system is out of memory
            return False
        words[_END] = at + -(-size // 8) * 8
        words[_RECORDS] += 1
        words[_FRONT + index] = at + 1
        return True

    def add(self, counter: int, number: int) -> None:
        """Count hits (0), misses (1) or values that were not stored (2)."""
        if not number:
            return
        with self._counting, contextlib.suppress(ValueError):  # it was closed, as by the handler of a signal
            if self._pid != os.getpid():  # choose the row of counters of this process
                with self._writing.held(WAIT) as acquired:
                    self._row = self._words[_PROCESSES]
                    self._words[_PROCESSES] += acquired
                self._pid = os.getpid()
            self._words[_WORDS + self._row % _ROWS * _ROW + counter] += number

    def stats(self) -> dict[str, int]:
        words = self._words
        rows = range(min(words[_PROCESSES] + 1, _ROWS))
        counts = {name: sum(words[_WORDS + row * _ROW + i] for row in rows) for i, name in enumerate(_COUNTERS)}
        return {**counts, 'entries': words[_RECORDS], 'bytes': min(words[_END], self.room), 'max_bytes': self.room}

    def after_fork(self) -> None:
        """Reset the locks in a child process: threads of the parent may have held them."""
        self._counting = threading.RLock()
        self._writing.after_fork()

    def close(self) -> None:
        """Close the table and release its name, once a thread that stores records has ended; blocks."""
        self._writing.end()
        with self._counting:
            self._words.release()
            self._front.close()
            self._data.close()
        self._release()

    def _release(self) -> None:
        if self._holder is not None:
            self._holder.release()
        self._closing()


def _check_system() -> None:
    if not hasattr(os, 'memfd_create'):
        raise UnsupportedError('a SharedMemoryCache needs the anonymous files of Linux')


def _fill(count: int, room: int, fingerprint: bytes, fd: int) -> None:
    words = [0] * _WORDS
    words[0], words[_COUNT], words[_ROOM] = _MAGIC, count, room
    words[_TOKEN : _TOKEN + 2] = struct.unpack('=2Q', secrets.token_bytes(16))
    words[_PRINT : _PRINT + 2] = struct.unpack('=2Q', fingerprint)
    front, total = _sizes(count, room)
    if total > MOST:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    os.ftruncate(fd, total)
    os.posix_fallocate(fd, 0, front)  # memory written through a mapping must be allocated
    os.pwrite(fd, struct.pack(f'={_WORDS}Q', *words), 0)


def _sizes(count: int, room: int) -> tuple[int, int]:
    """Return the bytes of the header and the indices, and the total."""
    front = -(-8 * (_FRONT + count) // _PAGE) * _PAGE
    return front, front + max(room, 1)


class _WritersLock:
    """The writers' lock, which the system releases when the process ends."""

    def __init__(self, fd: int) -> None:
        self._file = fd
        self._locks: RangeLocks | None = None  # on a separate open file, because forked processes share the others
        self._threads = threading.RLock()  # the handler of a signal may come here again
        self._taken = False
        self._paused = 0.0  # time until which callers do not wait, by the monotonic clock
        self._ended = False  # by now, the descriptor may be that of another file

    @contextlib.contextmanager
    def held(self, seconds: float) -> Iterator[bool]:
        """Hold the lock for the block. Yields whether it was acquired in time."""
        until = time.monotonic() + seconds
        with self._threads:
            if self._locks is None and not self._ended:
                with contextlib.suppress(OSError):  # as many files are open as may be: values are counted as not kept
                    self._locks = RangeLocks(f'/proc/self/fd/{self._file}')
            locks = self._locks
            if locks is None or self._taken:
                yield False
                return
            self._taken = True
            try:
                while not (acquired := locks.lock(0, 1)) and self._paused <= time.monotonic() < until:
                    time.sleep(_POLL)
                if acquired:
                    self._paused = 0.0
                elif (now := time.monotonic()) >= self._paused:
                    self._paused = now + _PAUSE
                yield acquired
            finally:
                self._taken = False
                locks.unlock(0, 1)

    def end(self) -> None:
        """Wait until no thread holds the lock, and grant it no more."""
        with self._threads:
            self._ended, self._locks = True, None

    def after_fork(self) -> None:
        """Reset the lock in a child process: the parent may hold it."""
        self._threads = threading.RLock()
        self._locks = None
        self._taken = False


_tables: Final = each_after_fork(Table.after_fork)

"""Folder of a block cache on the local disk: its files, the table that all processes map, and the lock between them."""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator
from typing import Final

from granular._support.text import logger
from granular.aio.runtime.descriptor import Descriptor
from granular.aio.stores.local.locks import RangeLocks
from granular.aio.stores.owner_only import open_file, open_folder
from granular.errors import StoreTimeoutError

VERSION: Final = 'blocks-2'
HEAD: Final = 4096  # bytes before the first area; the first word is the position of the next area, in words of 8 bytes
_TABLE: Final = 1 << 34  # bytes of the mapping, for 64 TiB of objects; the file is sparse
LOCK_TIMEOUT: Final = 5.0  # seconds to wait for the lock, which is held for moments
_LOG_INTERVAL: Final = 30.0  # seconds in which further damage is only logged as DEBUG
_UNSUPPORTED: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # errors of file systems without reservations


class CacheFolder:
    """The open files of a block cache in a folder, which is created if it does not exist; raise ``AccessDeniedError``
    if the folder belongs to another user, or contains symbolic links.

    Attributes:
      path: the folder of this version of the format.
      objects, packs: descriptors of the folders of object records and of packs.
      table, words: the mapped table, and its words.
      block_locks: one byte lock for each block in flight.
    """

    def __init__(self, path: str) -> None:
        self.path: str = os.path.join(path, VERSION)
        outer = Descriptor(open_folder(path))
        self._top = Descriptor(open_folder(VERSION, outer.fd))
        self.objects: Descriptor = Descriptor(open_folder('objects', self._top.fd))
        self.packs: Descriptor = Descriptor(open_folder('packs', self._top.fd))
        self._reserved: set[int] = set()  # the pages of the table that have disk space
        self._table = Descriptor(open_file('table', os.O_RDWR | os.O_CREAT, self._top.fd))
        if os.fstat(self._table.fd).st_size < _TABLE:
            os.ftruncate(self._table.fd, _TABLE)  # a sparse file
        self.reserve(0, HEAD // 8)
        self.table: mmap.mmap = mmap.mmap(self._table.fd, _TABLE)
        self.words: memoryview[int] = memoryview(self.table).cast('Q')
        self.block_locks: RangeLocks = RangeLocks(open_file('flights', os.O_RDWR | os.O_CREAT, self._top.fd))
        os.close(open_file('lock', os.O_RDWR | os.O_CREAT, self._top.fd))  # rejects a planted link now
        self._thread_lock = threading.RLock()  # the handler of a signal may come here again
        self._last_warning = -_LOG_INTERVAL

    def reserve(self, start: int, count: int) -> None:
        """Reserve disk space for the pages of some words of the table, once, where the file system can.

        Writing to a mapped page without disk space would kill the process: a full disk raises OSError here.
        """
        first, last = 8 * start // mmap.PAGESIZE, (8 * (start + count) - 1) // mmap.PAGESIZE
        pages = [page for page in range(first, last + 1) if page not in self._reserved]
        if not pages:
            return
        try:
            os.posix_fallocate(self._table.fd, pages[0] * mmap.PAGESIZE, (last + 1 - pages[0]) * mmap.PAGESIZE)
        except AttributeError:
            pass  # a system without posix_fallocate
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        self._reserved.update(pages)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Exclude other threads and processes from registering objects, and from creating or removing packs."""
        deadline = time.monotonic() + LOCK_TIMEOUT
        with self._thread_lock, contextlib.ExitStack() as stack:
            fd = open_file('lock', os.O_RDWR | os.O_CREAT, self._top.fd)
            stack.callback(os.close, fd)
            self._acquire(fd, deadline)
            # Closing is not enough: a child that was forked meanwhile has the file open as well.
            stack.callback(fcntl.flock, fd, fcntl.LOCK_UN)
            yield

    def _acquire(self, fd: int, deadline: float) -> None:
        pause = 0.0005
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StoreTimeoutError(
                        f'{self.path}: locked by another process for more than {LOCK_TIMEOUT:g} s'
                    ) from None
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def log_damage(self, name: str, error: object) -> None:
        """Log damage of a file as a WARNING at most every 30 s, otherwise as DEBUG."""
        level, now = logging.DEBUG, time.monotonic()
        if now - self._last_warning > _LOG_INTERVAL:
            level, self._last_warning = logging.WARNING, now
        logger.log(level, '%s: %s is ignored, its blocks are fetched again when needed: %s', self.path, name, error)

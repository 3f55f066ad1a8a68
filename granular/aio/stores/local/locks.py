"""Locks on local files and folders, which the system takes back when a process ends, however it ends."""

import errno
import fcntl
import logging
import os
import struct
import weakref
from collections.abc import Callable
from typing import Final

from granular.errors import AlreadyExistsError

# What file systems answer that have no such locks, or none on folders, as NFS.
_UNKNOWN: Final = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)

logger = logging.getLogger('granular')


def lock(fd: int, shared: bool = False) -> bool | None:
    """Lock an open file or folder until it is closed: whether it is ours; None where there are no locks.

    Args:
      fd: it.
      shared: others may have it as well, if they share it.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNKNOWN:
            return None
        raise
    return True


class RangeLocks:
    """Locks on bytes of a file, each held by one process at a time; those of a process that ends are free.

    They belong to the open file, as ``F_OFD_SETLK`` of fcntl(2) has it, so that another descriptor of the process does
    not drop them, and are to be opened anew after a fork. Where there are none, every one is had.

    Args:
      file: its path, or a descriptor of it, which is closed with the locks.
    """

    def __init__(self, file: str | int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fd = file if isinstance(file, int) else os.open(file, flags, 0o600)

    def lock(self, start: int, count: int) -> bool:
        """Lock bytes, whether or not there are so many in the file: whether nobody else has one of them."""
        return self._set(fcntl.F_WRLCK, start, count)

    def unlock(self, start: int, count: int) -> None:
        """Let others have them."""
        self._set(fcntl.F_UNLCK, start, count)

    def _set(self, kind: int, start: int, count: int) -> bool:
        if not hasattr(fcntl, 'F_OFD_SETLK'):
            return True
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, struct.pack('hhqqi4x', kind, os.SEEK_SET, start, count, 0))
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            logger.debug('no locks on bytes of files: %s', error)
        return True

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._fd)


class FolderLock:
    """The right to write in a folder, as long as it is held. A second one of the same folder is refused.

    Attributes:
      sure: whether nobody else can have it; not so where the file system has no such locks.

    Raises:
      AlreadyExistsError: if another writer holds it.
    """

    def __init__(self, folder: str) -> None:
        self._fd = -1
        self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        found = lock(self._fd)
        # Whoever held it before may have removed the folder and made room for another.
        if found is False or not is_at(self._fd, folder):
            self.release()
            raise AlreadyExistsError(f'{folder}: another writer is writing it')
        self.sure = found is not None
        _held.add(self)

    def release(self, close: Callable[[int], None] = os.close) -> None:
        """Let others have it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close(fd)

    def __del__(self) -> None:
        self.release()


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _after_fork() -> None:
    # A child has the parent's open files: without this, it would hold the folder for as long as it lives.
    for held in list(_held):
        held.release()


os.register_at_fork(after_in_child=_after_fork)


def is_at(fd: int, path: str) -> bool:
    """Whether an open file is the one of that path."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def held(path: str) -> bool:
    """Whether somebody has a lock on a file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return lock(fd) is False
    finally:
        os.close(fd)

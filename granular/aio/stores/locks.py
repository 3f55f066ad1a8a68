"""Locks on local files and folders, which the system takes back when a process ends, however it ends."""

import errno
import fcntl
import os
import weakref
from collections.abc import Callable
from typing import Final

from granular.errors import AlreadyExistsError

# What file systems answer that have no such locks, or none on folders, as NFS.
_UNKNOWN: Final = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)


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

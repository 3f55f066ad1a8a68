"""Locks on local files and folders, released by the operating system when a process ends."""

import errno
import fcntl
import os
import struct
from typing import BinaryIO, Final

from granular._support.text import logger
from granular.aio.runtime.descriptor import Descriptor
from granular.aio.runtime.forking import each_after_fork, inherited
from granular.errors import AlreadyExistsError

# Errors of file systems that have no such locks, or none on folders, such as NFS.
_UNSUPPORTED: Final = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)


def lock(fd: int, shared: bool = False) -> bool | None:
    """Lock an open file or folder until it is closed; ``shared`` allows other shared locks.

    Returns:
      True if the lock was acquired, False if it is held elsewhere, None if the file system has no locks.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


class RangeLocks:
    """Locks on byte ranges of a file, each held by one process at a time and released when that process ends.

    The locks belong to the open file (``F_OFD_SETLK`` in fcntl(2)), so that closing another descriptor of the file does
    not release them; after a fork, the file must be opened again. On systems without such locks, every lock is granted.
    The file is given by its path, or by a descriptor, which is closed with the locks.
    """

    def __init__(self, file: str | int) -> None:
        self._file = Descriptor(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def lock(self, start: int, count: int) -> bool:
        """Lock bytes, which need not exist in the file. Return False if another process holds one of them."""
        return self._set(fcntl.F_WRLCK, start, count)

    def unlock(self, start: int, count: int) -> None:
        self._set(fcntl.F_UNLCK, start, count)

    def _set(self, kind: int, start: int, count: int) -> bool:
        if not hasattr(fcntl, 'F_OFD_SETLK'):
            return True
        try:
            fcntl.fcntl(self._file.fd, fcntl.F_OFD_SETLK, struct.pack('hhqqi4x', kind, os.SEEK_SET, start, count, 0))
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            logger.debug('continuing without locks on bytes of files: %s', error)
        return True


class FolderLock:
    """Exclusive right to write in a folder, as long as it is held; raise ``AlreadyExistsError`` if another one has it.

    Args:
      shared: share it with others that do: writers of shards share the right to their parent.

    Attributes:
      sure: True if no other writer can hold it; False if the file system has no such locks.
    """

    def __init__(self, folder: str, shared: bool = False) -> None:
        self._folder: Descriptor | None = Descriptor(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        acquired = lock(self._folder.fd, shared)
        # The previous holder may have removed the folder, and another one may have been created since.
        if acquired is False or not is_at(self._folder.fd, folder):
            self.release()
            raise AlreadyExistsError(f'{folder}: another writer is writing it', path=folder)
        self.sure: bool = acquired is not None
        _held.add(self)

    def release(self) -> None:
        self._folder = None


# A child inherits the open files: without this, it would hold the lock for as long as it lives.
_held: Final = each_after_fork(FolderLock.release)


def _leave(file: BinaryIO) -> None:
    """In a forked child, leave a file to the parent: a copy of what is buffered must not be written by both."""
    if not file.closed:
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, file.fileno(), inheritable=False)
        os.close(null)
        inherited.append(file)  # closing it would wait for a thread of the parent that is writing


being_written: Final = each_after_fork(_leave)
"""Files that are written through a buffer."""


def is_at(fd: int, path: str) -> bool:
    """Return whether an open file is the one at that path."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def is_locked(path: str) -> bool:
    try:
        file = Descriptor(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    return lock(file.fd) is False


def remove_unlocked(path: str, modified: float | None = None) -> bool:
    """Remove a file, unless it is locked, or was modified at another time than given. Return whether it was removed.

    The lock is held meanwhile: a writer that locks the file later finds that it is no longer at its path.
    """
    try:
        file = Descriptor(path, os.O_RDONLY | os.O_CLOEXEC)
        if lock(file.fd) is False or not is_at(file.fd, path):
            return False
        if modified is not None and os.fstat(file.fd).st_mtime != modified:
            return False
        os.unlink(path)
    except FileNotFoundError:  # also if its writer could not lock it, and removed it meanwhile
        return False
    return True

"""Cache files and folders that only the user of this process may read or change."""

import contextlib
import errno
import os
import stat
from typing import Final

from granular.aio.runtime.descriptor import Descriptor
from granular.errors import AccessDeniedError

_OTHERS: Final = 0o077  # permission bits of the group and of all other users
_INDEX_CACHE: Final = '.index'
_BLOCK_CACHES: Final = ('blocks-1', 'blocks-2')


def open_folder(path: str, dir_fd: int | None = None) -> int:
    """Create or open a folder of a cache, and return its descriptor.

    A new folder has mode 0700. An existing folder of this user that others may enter is restricted to this user, unless
    it also holds other things than a cache: then the modes of the cache's own files and folders protect them. A path
    relative to the folder ``dir_fd`` must not be a symbolic link. Raise ``AccessDeniedError`` if it is one, or if the
    folder, or a symbolic link that leads to it, belongs to another user.
    """
    if dir_fd is None:
        os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700, dir_fd=dir_fd)
    inner = dir_fd is not None
    link = os.lstat(path) if not inner else os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
    if stat.S_ISLNK(link.st_mode):
        if inner:
            raise AccessDeniedError(f'{path}: is a symbolic link inside a cache folder: remove it')
        _check_owner(link, path, inner)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if inner else 0), dir_fd=dir_fd)
    try:
        info = os.fstat(fd)
        _check_owner(info, path, inner)
        if info.st_mode & _OTHERS and info.st_uid == os.geteuid() and (inner or _is_cache(fd)):
            os.fchmod(fd, stat.S_IMODE(info.st_mode) & ~_OTHERS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_file(path: str, flags: int, dir_fd: int) -> int:
    """Open a cache file with mode 0600, which must be a regular file of this user with one link."""
    try:
        # O_NONBLOCK, because opening a FIFO would wait for its other end.
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(path, flags, 0o600, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise AccessDeniedError(f'{path}: is a symbolic link inside a cache folder: remove it') from error
        raise
    try:
        info = os.fstat(fd)
        _check_owner(info, path, True)
        if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
            raise AccessDeniedError(f'{path}: expected a regular file with one link: remove it')
        if info.st_mode & _OTHERS:
            os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_owner(info: os.stat_result, path: str, inner: bool) -> None:
    """Reject files of other users; only the outermost folder of a cache may belong to root, such as /tmp."""
    if info.st_uid != os.geteuid() and (inner or info.st_uid):
        raise AccessDeniedError(
            f'{path}: belongs to user {info.st_uid}, not to user {os.geteuid()} of this process: a cache is not '
            f'shared between users: choose another folder'
        )


def _is_cache(fd: int) -> bool:
    """Return whether a folder holds only caches, so that changing its mode affects nothing else."""
    # Use a separate descriptor, because a listing moves the position that duplicated descriptors share.
    listed = Descriptor(os.open('.', os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd))
    with os.scandir(listed.fd) as entries:
        return all(entry.name in _BLOCK_CACHES or _INDEX_CACHE in entry.name for entry in entries)

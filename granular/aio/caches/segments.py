"""Named shared memory: files in the system's memory file system, and the processes that hold them.

A file belongs to the processes that hold a lock on it, and the system drops the locks of a process however it ends. A
file without a lock was therefore left by a killed process: the next process that opens a cache or creates such a file
removes it.
"""

import contextlib
import errno
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Final, NamedTuple

from granular.aio.runtime.forking import each_after_fork
from granular.aio.stores.errors import translated
from granular.aio.stores.local.locks import is_at, lock
from granular.errors import AccessDeniedError, AlreadyExistsError, InvalidArgumentError, NotFoundError, StoreError

FOLDER: Final = '/dev/shm' if os.path.isdir('/dev/shm') else tempfile.gettempdir()
_NAME: Final = re.compile(r'[A-Za-z0-9_.-]{1,160}')
_TRIES: Final = 200
_RETRY: Final = 0.005  # seconds


class Segment(NamedTuple):
    """A file of shared memory, and what keeps its name; None for a process that only reads."""

    fd: int
    holder: 'Holder | None'


class Holder:
    """Keeps a file's name. The name is removed when its last holder is released or collected, or its process ends."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd, self.paths = fd, [path]
        # multiprocessing's Finalize, because its processes exit without running atexit hooks but do call these.
        self._finalizer = Finalize(self, _release, (fd, self.paths), exitpriority=0)
        _holders.add(self)

    def unlink(self) -> None:
        """Remove the name now, unless another process holds it; open readers continue to read."""
        if self._finalizer.still_active():
            _unlink(self._fd, self.paths)

    def release(self) -> None:
        self._finalizer()

    def after_fork(self) -> None:
        """In a child process, leave the name to the parent."""
        if self._finalizer.still_active():
            self._finalizer.cancel()
            os.close(self._fd)


_holders: Final = each_after_fork(Holder.after_fork)


def _release(fd: int, paths: list[str]) -> None:
    _unlink(fd, paths)
    os.close(fd)


def _unlink(fd: int, paths: list[str]) -> None:
    if lock(fd):
        for path in paths:
            if is_at(fd, path):
                os.unlink(path)


def path_of(kind: str, name: str) -> str:
    """Return the path of the shared memory of a name, which is checked."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidArgumentError(f'name: expected 1 to 160 of the characters A-Z a-z 0-9 _ . -, got {name!r:.100}')
    return os.path.join(FOLDER, f'granular-{os.getuid()}-{kind}-{name}')


def create(path: str, fill: Callable[[int], None], shared: bool = False) -> Segment:
    """Create a file that gets its name once it is filled, by a function that is given its descriptor.

    Other processes may hold it, too, if it is shared. Raise ``AlreadyExistsError`` if the path exists and a process
    holds it, ``StoreError`` if there is not enough space.
    """
    with translated(path):
        return _create(path, fill, shared)


def _create(path: str, fill: Callable[[int], None], shared: bool) -> Segment:
    sweep()
    for _ in range(_TRIES):
        temporary = os.path.join(FOLDER, f'granular-{os.getuid()}-draft-{secrets.token_hex(8)}')
        lock_fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if lock(lock_fd, shared) and is_at(lock_fd, temporary):
            break
        os.close(lock_fd)  # another process swept it as a leftover before it was locked
    else:
        raise StoreError(f'{FOLDER}: failed to create and lock a file')
    holder, fd = Holder(lock_fd, temporary), -1
    try:
        # Not the locked descriptor: a mapping keeps its file open, also in a forked child.
        fd = os.open(temporary, os.O_RDWR | os.O_CLOEXEC)
        fill(fd)
        os.link(temporary, path)
        holder.paths.append(path)
        os.unlink(temporary)
    except BaseException as error:
        holder.release()
        if fd >= 0:
            os.close(fd)
        if isinstance(error, FileExistsError):
            raise AlreadyExistsError(f'{path}: is in use: choose another name, or attach to it') from error
        raise
    return Segment(fd, holder)


def attach(path: str, hold: bool = False) -> Segment:
    """Open a file, which must exist and belong to this user, and share the hold on its name if ``hold``."""
    follow = 0 if path.startswith('/proc/') else os.O_NOFOLLOW  # the open files of a process are links there
    for _ in range(_TRIES):
        try:
            fd = os.open(path, os.O_RDWR | follow | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFoundError(f'{path}: shared memory not found: its owner has ended, or never created it') from None
        except OSError as error:
            denied = error.errno in (errno.EACCES, errno.EPERM, errno.ELOOP)
            raise (AccessDeniedError if denied else StoreError)(f'{path}: opening failed: {error}') from error
        if os.fstat(fd).st_uid != os.getuid():
            os.close(fd)
            raise AccessDeniedError(f'{path}: belongs to another user')
        if not hold:
            return Segment(fd, None)
        try:
            lock_fd = os.open(f'/proc/self/fd/{fd}', os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            os.close(fd)
            raise StoreError(f'{path}: opening failed: {error}') from error
        if lock(lock_fd, shared=True) and is_at(lock_fd, path):
            return Segment(fd, Holder(lock_fd, path))
        os.close(lock_fd)  # another process is checking for leftovers, or was the last holder
        os.close(fd)
        time.sleep(_RETRY)
    raise AlreadyExistsError(f'{path}: is in use by a process that does not share it')


def sweep() -> None:
    """Remove the files that killed processes of this user left."""
    prefix = f'granular-{os.getuid()}-'
    with translated(FOLDER):
        names = os.listdir(FOLDER)
    for name in names:
        if not name.startswith(prefix):
            continue
        path = os.path.join(FOLDER, name)
        with contextlib.suppress(OSError):  # it was removed meanwhile, or is not accessible
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                _unlink(fd, [path])
            finally:
                os.close(fd)

"""Shared memory with a name: files in the folder that the system keeps in memory, and who holds them.

A file belongs to whoever has it locked, and the system drops the locks of a process however it ends. So a file that
nobody has locked was left by a process that was killed: the next one to make such a file removes it.
"""

import contextlib
import os
import re
import secrets
import tempfile
import time
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Final, NamedTuple

from granular.aio.stores.local.locks import is_at, lock
from granular.errors import AccessDeniedError, AlreadyExistsError, InvalidArgumentError, NotFoundError, StoreError

FOLDER: Final = '/dev/shm' if os.path.isdir('/dev/shm') else tempfile.gettempdir()
_NAME: Final = re.compile(r'[A-Za-z0-9_.-]{1,160}')
_TRIES: Final = 200
_RETRY: Final = 0.005  # seconds


class Segment(NamedTuple):
    """A file of shared memory.

    Attributes:
      fd: what it is read and written through.
      holder: what keeps its name; None for who only reads it.
    """

    fd: int
    holder: 'Holder | None'


class Holder:
    """Keeps a name: removed with the last holder, when that is released or collected, or its process ends."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd, self.paths = fd, [path]
        # Of multiprocessing, as its processes end without the hooks of others, and call these.
        self._finalizer = Finalize(self, _release, (fd, self.paths), exitpriority=0)
        _holders.add(self)

    def unlink(self) -> None:
        """Remove the name now, if nobody else holds it; who has it open reads on."""
        if self._finalizer.still_active():
            _unlink(self._fd, self.paths)

    def release(self) -> None:
        """Let go of it."""
        self._finalizer()

    def after_fork(self) -> None:
        """In a child: it is the parent's."""
        if self._finalizer.still_active():
            self._finalizer.cancel()
            os.close(self._fd)


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def _after_fork() -> None:
    for holder in list(_holders):
        holder.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _release(fd: int, paths: list[str]) -> None:
    _unlink(fd, paths)
    os.close(fd)


def _unlink(fd: int, paths: list[str]) -> None:
    if lock(fd):
        for path in paths:
            if is_at(fd, path):
                os.unlink(path)


def path_of(kind: str, name: str) -> str:
    """Where memory of a name lies.

    Raises:
      InvalidArgumentError: for what is no name.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidArgumentError(f'name is {name!r:.100}: want 1 to 160 of the characters A-Z a-z 0-9 _ . -')
    return os.path.join(FOLDER, f'granular-{os.getuid()}-{kind}-{name}')


def create(path: str, fill: Callable[[int], None], shared: bool = False) -> Segment:
    """A new file, which has its name once it is filled.

    Args:
      path: where.
      fill: writes into it.
      shared: whether others may hold it as well.

    Raises:
      AlreadyExistsError: if there is one that somebody holds.
      StoreError: if there is no room.
    """
    sweep()
    for _ in range(_TRIES):
        draft = os.path.join(FOLDER, f'granular-{os.getuid()}-draft-{secrets.token_hex(8)}')
        held = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if lock(held, shared) and is_at(held, draft):
            break
        os.close(held)  # it was taken for one that was left, before it was locked
    else:
        raise StoreError(f'{FOLDER}: no file could be made and locked there')
    holder, fd = Holder(held, draft), -1
    try:
        # Apart from what is locked, as a mapping keeps its file open, in a forked child as well.
        fd = os.open(draft, os.O_RDWR | os.O_CLOEXEC)
        fill(fd)
        os.link(draft, path)
        holder.paths.append(path)
        os.unlink(draft)
    except BaseException as error:
        holder.release()
        if fd >= 0:
            os.close(fd)
        if isinstance(error, FileExistsError):
            raise AlreadyExistsError(f'{path}: is in use: choose another name, or attach to it') from error
        if isinstance(error, OSError):
            raise StoreError(f'{path}: not written: {error}') from error
        raise
    return Segment(fd, holder)


def attach(path: str, hold: bool = False) -> Segment:
    """The file of a name.

    Args:
      path: where.
      hold: whether to keep its name, with those who do.

    Raises:
      NotFoundError: if there is none.
      AccessDeniedError: if it is of another user.
    """
    follow = 0 if path.startswith('/proc/') else os.O_NOFOLLOW  # as open files of processes are links
    for _ in range(_TRIES):
        try:
            fd = os.open(path, os.O_RDWR | follow | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NotFoundError(f'{path}: there is no such memory: its owner has ended, or never made it') from None
        except OSError as error:
            raise AccessDeniedError(f'{path}: not opened: {error}') from error
        if os.fstat(fd).st_uid != os.getuid():
            os.close(fd)
            raise AccessDeniedError(f'{path}: is of another user')
        if not hold:
            return Segment(fd, None)
        held = os.open(f'/proc/self/fd/{fd}', os.O_RDONLY | os.O_CLOEXEC)
        if lock(held, shared=True) and is_at(held, path):
            return Segment(fd, Holder(held, path))
        os.close(held)  # somebody looks whether it was left, or was the last to hold it
        os.close(fd)
        time.sleep(_RETRY)
    raise AlreadyExistsError(f'{path}: is in use by somebody who does not share it')


def sweep() -> None:
    """Remove what processes of this user left that were killed."""
    mine = f'granular-{os.getuid()}-'
    for name in os.listdir(FOLDER):
        if not name.startswith(mine):
            continue
        path = os.path.join(FOLDER, name)
        with contextlib.suppress(OSError):  # it is gone, or none of ours
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                _unlink(fd, [path])
            finally:
                os.close(fd)

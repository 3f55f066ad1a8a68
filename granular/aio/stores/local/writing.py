"""Files that appear complete: written under a temporary name in the same folder, and renamed."""

import contextlib
import ctypes
import errno
import os
import re
import secrets
import threading
import weakref
from collections.abc import Callable
from typing import BinaryIO, Final

from granular.aio.http.reply import changed
from granular.aio.runtime.descriptor import Descriptor
from granular.aio.runtime.pools import expect_exit
from granular.aio.runtime.threads import offload_whole
from granular.aio.stores.base import ObjectWriter
from granular.aio.stores.errors import translated
from granular.aio.stores.local.files import IN_PLACE, OpenFile, version_of
from granular.aio.stores.local.locks import being_written, is_at, lock, remove_unlocked
from granular.config import MiB
from granular.errors import ClosedError, StoreError

_TRIES: Final = 100
_CHUNK: Final = 8 * MiB  # bytes copied at a time
# Errors of file systems without hard links, such as exFAT, and those of buckets that are mounted.
_NO_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
_TEMPORARY: Final = re.compile(r'\.(.+)\.[0-9a-f]{8}\.part', re.DOTALL)


def temporary_path(key: str) -> str:
    """Return a path for a temporary file in the same folder, which is to replace the file atomically."""
    folder, name = os.path.split(key)
    end = f'.{secrets.token_hex(4)}.part'
    # A name may have 255 bytes on the file systems of Linux.
    return os.path.join(folder, f'.{os.fsdecode(os.fsencode(name)[: 254 - len(end)])}{end}')


def create_temporary(key: str) -> tuple[BinaryIO, str]:
    """Create a temporary file that is to replace a file, locked until it is closed, and return it with its path.

    A file without a lock is taken for the leftover of a killed writer, and removed.
    """
    for _ in range(_TRIES):
        path = temporary_path(key)
        file = open(path, 'xb', buffering=MiB)  # noqa: SIM115
        being_written.add(file)
        try:
            if lock(file.fileno()) is not False and is_at(file.fileno(), path):
                return file, path
        except BaseException:
            _discard(file, path, os.getpid())
            raise
        _discard(file, path, os.getpid())  # another process looked at it before it was locked, and may have removed it
    raise StoreError(f'{key}: failed to create and lock a temporary file, {_TRIES} times', path=key)


def final_name(name: str) -> str:
    """Return the name of the file that a temporary file is to become; empty if it is not a temporary file."""
    match = _TEMPORARY.fullmatch(name)
    return '' if match is None else match[1]


def remove_leftovers(path: str) -> bool:
    """Remove the temporary files of a file that killed processes left behind. Return whether there were any."""
    folder, name = os.path.split(path)
    with translated(path):
        names = [entry for entry in os.listdir(folder or '.') if final_name(entry) == name]
        removed = [remove_unlocked(os.path.join(folder, entry)) for entry in names]
    return any(removed)


class LocalWriter(ObjectWriter):
    """A file written under a temporary name and renamed when it is complete, so that it appears like an object."""

    def __init__(self, key: str, new: bool) -> None:
        self._key, self._new = key, new
        self._published: os.stat_result | None = None  # what was published, or was about to be
        with translated(key):
            self._file, self._temporary_path = create_temporary(key)
        # A writer that is never closed leaves no temporary file behind.
        self.discard = weakref.finalize(self, _discard, self._file, self._temporary_path, os.getpid())
        expect_exit()

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        if len(data) > IN_PLACE:
            await offload_whole(self._write, data)
        else:
            self._write(data)

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        self._check_open()
        with translated(self._key):
            self._file.write(data)

    def _check_open(self) -> None:
        if self._file.closed:
            raise ClosedError(
                f'{self._key}: the file was discarded: it was aborted, or the interpreter is shutting down'
            )

    async def close(self) -> None:
        await offload_whole(self._publish, undo=self._undo)

    def _publish(self) -> None:
        self._check_open()
        try:
            with translated(self._key):
                self._file.flush()
                os.fsync(self._file.fileno())  # after a power cut, the name must not lead to an empty file
                self._published = os.fstat(self._file.fileno())
                if self._new:
                    _rename_new(self._temporary_path, self._key)
                else:
                    os.replace(self._temporary_path, self._key)
                self._file.close()
                sync(os.path.dirname(self._key))
        except BaseException as error:
            try:
                self.discard()
            except OSError as failure:  # such as a file system that became read-only after an error of its disk
                error.add_note(f'removing {self._temporary_path} failed, too: {failure.strerror}')
            raise
        self.discard.detach()

    def _undo(self, _: None) -> None:
        """Remove a new file that was published although its writer was cancelled meanwhile."""
        if self._new:
            self._withdraw()

    async def withdraw(self) -> bool:
        return await offload_whole(self._withdraw)

    def _withdraw(self) -> bool:
        with translated(self._key):
            return remove_own(self._key, self._is_own)

    def _is_own(self, info: os.stat_result) -> bool:
        own = self._published
        # A new file may get the number of one that was removed.
        return own is not None and os.path.samestat(info, own) and info.st_mtime_ns == own.st_mtime_ns

    async def abort(self) -> None:
        await offload_whole(self._abort)

    def _abort(self) -> None:
        with translated(self._key):
            self.discard()


def _discard(file: BinaryIO, temporary: str, creator: int) -> None:
    if os.getpid() != creator:  # a forked child, which has copies of all objects
        return
    with contextlib.suppress(OSError):  # on a full disk, closing cannot write what is still buffered
        file.close()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)


def _rename_new(path: str, name: str) -> None:
    """Rename a file, but do not replace the file of another writer."""
    try:
        os.link(path, name)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if _rename_to_free(path, name):
            return
        open(name, 'xb').close()  # this claims the name
        try:
            os.replace(path, name)
        except BaseException:
            os.unlink(name)
            raise
    else:
        os.unlink(path)


def _rename_to_free(path: str, name: str) -> bool:
    """Rename a file unless the name exists, in one step; return False where system or file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # not Linux
        return False
    here, no_replace = -100, 1  # AT_FDCWD, RENAME_NOREPLACE
    if not rename(here, os.fsencode(path), here, os.fsencode(name), no_replace):
        return True
    if (number := ctypes.get_errno()) in (*_NO_LINKS, errno.EINVAL):
        return False
    raise OSError(number, os.strerror(number), path, None, name)


def remove_own(path: str, is_own: Callable[[os.stat_result], bool]) -> bool:
    """Remove a file if it is one's own, and return whether it is no longer there."""
    with contextlib.suppress(FileNotFoundError):
        if not is_own(os.stat(path)):
            return False
        os.unlink(path)
    return True


def sync(path: str) -> None:
    """Flush a file, or the names in a folder, to the disk, so that they survive a power cut."""
    opened = Descriptor(path or '.', os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened.fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems without support for it
            raise


def copy_file(source: str, target: str, stopped: threading.Event) -> None:
    """Copy a file, which must not be written to meanwhile, unless the copy is stopped before its end."""
    with translated(source):
        before = OpenFile(source)
    with translated(target):
        file, temporary = create_temporary(target)
    try:
        done = 0
        while count := _copy_piece(source, before.fd, target, file.fileno(), done):
            if stopped.is_set():
                return
            done += count
        with translated(target):
            os.fsync(file.fileno())
        with translated(source):
            after = version_of(os.stat(source))
        if after != before.version or os.fstat(file.fileno()).st_size != before.size:
            raise changed(source, before.version, after)
        with translated(target):
            os.replace(temporary, target)
            sync(os.path.dirname(target))
    finally:
        _discard(file, temporary, os.getpid())


def _copy_piece(source: str, read: int, target: str, written: int, start: int) -> int:
    """Copy the next bytes of a file to another one, given their descriptors; return how many."""
    with contextlib.suppress(AttributeError, OSError):  # a failure is that of what follows, which names the file
        if count := os.copy_file_range(read, written, _CHUNK, start, start):  # takes half the time, or less
            return count
    with translated(source):
        chunk = os.pread(read, _CHUNK, start)
    with translated(target):
        return os.pwrite(written, chunk, start)


def sync_all(folder: str) -> None:
    """Flush all that was written to the file system of a folder to the disk, in one call."""
    try:
        syncfs = ctypes.CDLL(None, use_errno=True).syncfs
    except AttributeError:  # not Linux
        os.sync()
        return
    opened = Descriptor(folder, os.O_RDONLY | os.O_CLOEXEC)
    if syncfs(opened.fd) and (number := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
        raise OSError(number, os.strerror(number), folder)

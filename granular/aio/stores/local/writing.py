"""Files that appear complete: written under a temporary name in the same folder, and renamed."""

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import weakref
from typing import BinaryIO, Final

from granular.aio.http.reply import changed
from granular.aio.runtime.threads import offload
from granular.aio.stores.base import ObjectWriter
from granular.aio.stores.errors import translated
from granular.aio.stores.local.files import IN_PLACE, File, version_of
from granular.aio.stores.local.locks import held, lock
from granular.config import MiB

_DRAFT: Final = re.compile(r'\.(.+)\.[0-9a-f]{8}\.part', re.DOTALL)


def draft_of(key: str) -> str:
    """Return the name of a temporary file in the same folder, which is to replace the file atomically."""
    folder, name = os.path.split(key)
    return os.path.join(folder, f'.{name}.{secrets.token_hex(4)}.part')


def drafted(name: str) -> str:
    """Return the name of the file that a temporary file is to become; empty if it is not a temporary file."""
    match = _DRAFT.fullmatch(name)
    return '' if match is None else match[1]


def drop_drafts(path: str) -> bool:
    """Remove the temporary files of a file that killed processes left behind. Return whether there were any."""
    folder, name = os.path.split(path)
    with translated(path):
        found = [os.path.join(folder, draft) for draft in os.listdir(folder or '.') if drafted(draft) == name]
        dead = [draft for draft in found if not held(draft)]
        for draft in dead:
            os.unlink(draft)
    return bool(dead)


class LocalWriter(ObjectWriter):
    """A file written under a temporary name and renamed when it is complete, so that it appears like an object."""

    def __init__(self, key: str, new: bool) -> None:
        self._key, self._draft, self._new = key, draft_of(key), new
        with translated(key):
            self._file = open(self._draft, 'xb', buffering=MiB)  # noqa: SIM115
            lock(self._file.fileno())  # so that the file is not taken for the leftover of a crash
        # A writer that is never closed leaves no temporary file behind.
        self._discard = weakref.finalize(self, _discard, self._file, self._draft, os.getpid())

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        if len(data) > IN_PLACE:
            await offload(self._write, data)
        else:
            self._write(data)

    def _write(self, data: bytes | bytearray | memoryview) -> None:
        with translated(self._key):
            self._file.write(data)

    async def close(self) -> None:
        await offload(self._publish)

    def _publish(self) -> None:
        try:
            with translated(self._key):
                self._file.flush()
                os.fsync(self._file.fileno())  # after a power cut, the name must not lead to an empty file
                if self._new:
                    os.link(self._draft, self._key)  # unlike a rename, this does not replace the file of another writer
                    os.unlink(self._draft)
                else:
                    os.replace(self._draft, self._key)
                self._file.close()
                sync(os.path.dirname(self._key))
        except BaseException:
            self._discard()
            raise
        self._discard.detach()

    async def abort(self) -> None:
        await offload(self._discard)


def _discard(file: BinaryIO, draft: str, maker: int) -> None:
    with contextlib.suppress(OSError):  # on a full disk, closing cannot write what is still buffered
        file.close()
    if os.getpid() == maker:  # not a forked child, which has copies of all objects
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)


def sync(path: str) -> None:
    """Flush a file, or the names in a folder, to the disk, so that they survive a power cut."""
    fd = os.open(path or '.', os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems without support for it
            raise
    finally:
        os.close(fd)


def copy(source: str, target: str) -> None:
    """Copy a file.

    Raises:
      ObjectChangedError: if the source is written to during the copy.
    """
    with translated(source):
        before = File(source)
    draft = draft_of(target)
    try:
        with translated(target):
            shutil.copyfile(source, draft)
            sync(draft)
        with translated(source):
            after = version_of(os.stat(source))
        if after != before.version or os.path.getsize(draft) != before.size:
            raise changed(source, before.version, after)
        with translated(target):
            os.replace(draft, target)
            sync(os.path.dirname(target))
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)


def sync_all(folder: str) -> None:
    """Flush all that was written to the file system of a folder to the disk, in one call."""
    try:
        syncfs = ctypes.CDLL(None, use_errno=True).syncfs
    except AttributeError:  # not Linux
        os.sync()
        return
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if syncfs(fd) and (number := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise OSError(number, os.strerror(number), folder)
    finally:
        os.close(fd)

"""Write the members of zip and tar archives into one folder."""

import bz2
import contextlib
import functools
import gzip
import io
import lzma
import os
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable
from typing import Any, Final, Self

from granular._support.lazy import import_extra
from granular._support.text import logger
from granular.aio.stores.errors import translated
from granular.config import KiB, MiB
from granular.errors import CorruptArchiveError, InvalidArgumentError, StoreError, UnsupportedError

_CHUNK: Final = MiB
_ZSTD_STEP: Final = 4 * KiB  # bytes that are decompressed at a time, to 128 MiB at most
_CHECK_INTERVAL: Final = 64 * MiB  # bytes written between two checks of the disk's free space
_HEADER: Final = MiB  # limit for the bytes of a name or an extended header, whose declared size is arbitrary
_TARGET: Final = 4096  # limit for the bytes of a link's target
_MAX_LINKS: Final = 40  # limit for the links followed to resolve one, as in Linux


class UnpackFolder:
    """The folder to unpack into, and the checks that keep an archive inside it.

    Links are created at the end, so that no file is written through one. Their names are held in memory. A single root
    folder with one of the names ``roots`` is left out, and the archive must not replace the file ``keep``.
    """

    def __init__(self, archive: str, folder: str, roots: set[str], keep: str) -> None:
        self.archive = archive
        self._folder = folder
        self._roots = roots
        self._keep = keep
        self._folders: set[tuple[str, ...]] = {()}
        self._links: dict[tuple[str, ...], str] = {}
        self._since = 0
        self.member = ''  # that is being unpacked, for errors
        self.files = self.bytes = 0

    def refused(self, why: str) -> InvalidArgumentError:
        return InvalidArgumentError(f'{self.archive}: member {self.member!r} is not unpacked: {why}')

    def corrupt(self, why: str) -> CorruptArchiveError:
        return CorruptArchiveError(f'{self.archive}: member {self.member!r}: {why}')

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the components of a member's name, unless it leads out of the folder or cannot be a file name."""
        if name.startswith('/'):
            raise self.refused(f'{name!r} is absolute')
        parts = tuple(part for part in name.split('/') if part not in ('', '.'))
        if '..' in parts:
            raise self.refused(f'{name!r} may lead out of {self._folder}')
        try:
            name.encode()
        except UnicodeEncodeError:
            raise self.refused('its name is not Unicode') from None
        if '\0' in name:
            raise self.refused('its name has a zero byte')
        return parts

    def path(self, parts: tuple[str, ...]) -> str:
        return os.path.join(self._folder, *parts)

    def make(self, parts: tuple[str, ...]) -> None:
        if parts in self._folders:
            return
        self.make(parts[:-1])
        path = self.path(parts)
        with translated(path):
            try:
                os.mkdir(path)
            except FileExistsError:
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    raise self.refused(f'{"/".join(parts)!r} is a file as well as a folder') from None
        self._folders.add(parts)

    def folder(self, name: str) -> None:
        self.make(self.parts(name))

    def file(self, name: str, size: int, read: Callable[[int], bytes], executable: bool) -> None:
        """Write a file of ``size`` bytes. It replaces an earlier file of the same name."""
        parts = self.parts(name)
        if not parts:
            raise self.refused('a file needs a name')
        if parts == (self._keep,):
            return
        self.make(parts[:-1])
        self.room(size)
        path = self.path(parts)
        with translated(path):
            fd = self._create(path, 0o777 if executable else 0o666)
        with open(fd, 'wb', buffering=0) as file:
            left = size
            while left:
                data = read(min(left, _CHUNK))
                if not data:
                    raise self.corrupt(f'ends after {size - left} of {size} bytes')
                left -= len(data)
                with translated(path):
                    _write(file, data)
        self.files += 1
        self.bytes += size

    def _create(self, path: str, mode: int) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(path, flags, mode)
        except FileExistsError:
            self._remove(path)
        return os.open(path, flags, mode)

    def _remove(self, path: str) -> None:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            raise self.refused('it is a file as well as a folder') from None
        os.unlink(path)

    def room(self, size: int) -> None:
        """Check the disk's free space before ``size`` more bytes are written; the check runs once per 64 MiB."""
        self._since += size
        if self._since < _CHECK_INTERVAL:
            return
        self._since = 0
        with translated(self._folder):
            free = shutil.disk_usage(self._folder).free
        if size > free:
            raise StoreError(
                f'{self._folder}: the disk is full: {self.archive} has {self.member!r} of {size} bytes, and {free} '
                f'are free'
            )

    def hard_link(self, name: str, target: str) -> None:
        """Create another name for a file that was unpacked before."""
        parts, old = self.parts(name), self.path(self.parts(target))
        if not parts:
            raise self.refused('a link needs a name')
        if parts == (self._keep,):
            return
        self.make(parts[:-1])
        with translated(self.path(parts)):
            if not os.path.lexists(old) or not stat.S_ISREG(os.lstat(old).st_mode):
                raise self.refused(f'it is a link to {target!r}, which is not an earlier file')
            with contextlib.suppress(FileNotFoundError):
                if not os.path.samefile(old, self.path(parts)):
                    self._remove(self.path(parts))
            with contextlib.suppress(FileExistsError):
                os.link(old, self.path(parts), follow_symlinks=False)
        self.files += 1

    def link(self, name: str, target: str) -> None:
        """Record a symbolic link, to be created at the end."""
        parts = self.parts(name)
        if not parts or not target or len(target) > _TARGET or '\0' in target:
            raise self.refused(f'it is a link to {target!r:.80}')
        self.make(parts[:-1])
        self._links[parts] = target

    def finish(self) -> None:
        """Leave out a single root folder, and create the links."""
        with translated(self._folder):
            self._leave_out_root()
        for parts, target in self._links.items():
            self.member = '/'.join(parts)
            if self._leads_out(parts, target):
                raise self.refused(f'it is a link to {target!r}, which leads out of {self._folder}')
        for parts, target in self._links.items():
            self.member = '/'.join(parts)
            with translated(self.path(parts)):
                if os.path.lexists(self.path(parts)):
                    raise self.refused('it is a link as well as a file or folder')
                os.symlink(target, self.path(parts))
            self.files += 1

    def _leave_out_root(self) -> None:
        tops = {name for name in os.listdir(self._folder) if name != self._keep} | {parts[0] for parts in self._links}
        if len(tops) != 1 or (root := tops.pop()) not in self._roots or (root,) not in self._folders:
            return
        # Renamed first, because an entry in it may have the same name.
        names, other = os.listdir(self.path((root,))), '.unpacked'
        while other in (*names, root, self._keep):
            other += '_'
        aside = self.path((other,))
        os.rename(self.path((root,)), aside)
        for name in names:
            if name != self._keep:
                os.rename(os.path.join(aside, name), self.path((name,)))
        shutil.rmtree(aside)
        self._links = {parts[1:]: target for parts, target in self._links.items()}

    def _leads_out(self, parts: tuple[str, ...], target: str) -> bool:
        """Resolve a link through other links; return whether it leads out of the folder or through too many links."""
        resolved, links = list(parts[:-1]), 0
        if target.startswith('/'):
            return True
        remaining = target.split('/')[::-1]
        while remaining:
            part = remaining.pop()
            if part in ('', '.'):
                continue
            if part == '..':
                if not resolved:
                    return True
                resolved.pop()
                continue
            resolved.append(part)
            if (further := self._links.get(tuple(resolved))) is not None:
                links += 1
                if links > _MAX_LINKS or further.startswith('/'):
                    return True
                resolved.pop()
                remaining += further.split('/')[::-1]
        return False


# --- zip ------------------------------------------------------------------------------------------------------------


def unzip(file: io.RawIOBase, target: UnpackFolder) -> None:
    """Unpack a zip. Its directory is held in memory."""
    with zipfile.ZipFile(io.BufferedReader(file, _CHUNK)) as opened:
        members = sorted(opened.infolist(), key=lambda info: info.header_offset)
        target.room(sum(info.file_size for info in members))
        for info in members:
            target.member = info.orig_filename
            _unzip_member(opened, info, target)


def _unzip_member(opened: zipfile.ZipFile, info: zipfile.ZipInfo, target: UnpackFolder) -> None:
    mode = info.external_attr >> 16 if info.create_system == 3 else 0
    if '\0' in info.orig_filename:
        raise target.refused('its name has a zero byte')
    if info.flag_bits & 1:
        raise UnsupportedError(f'{target.member!r} of {target.archive} is encrypted')
    if info.is_dir():
        target.folder(info.filename)
    elif stat.S_ISLNK(mode):
        if info.file_size > _TARGET:
            raise target.refused(f'it is a link of {info.file_size} bytes')
        target.link(info.filename, opened.read(info).decode())
    elif stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        raise target.refused('it is not a file, a folder or a link')
    else:
        try:
            content = opened.open(info)
        except NotImplementedError as error:
            raise UnsupportedError(f'{target.member!r} of {target.archive}: {error}') from error
        with content:
            target.file(info.filename, info.file_size, content.read, bool(mode & 0o100))
            if content.read(1):
                raise target.corrupt(f'is longer than its declared {info.file_size} bytes')


# --- tar ------------------------------------------------------------------------------------------------------------


class _Member(tarfile.TarInfo):
    """A member whose header is intact, and of which the declared size is checked before it is read into memory."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tar)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError(f'{error}') from error  # it would be taken for the end of the archive
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            tar.has_end = True  # type: ignore[attr-defined]
            raise

    def _proc_member(self, tar: tarfile.TarFile) -> Any:
        if not self.isreg() and self.type in (*tarfile.GNU_TYPES, *_EXTENDED) and self.size > _HEADER:
            raise tarfile.ReadError(f'a header of {self.size} bytes')
        return super()._proc_member(tar)  # type: ignore[misc]


_EXTENDED: Final = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)


def untar(file: io.RawIOBase, kind: str, target: UnpackFolder) -> None:
    """Unpack a tar, which is read to its last byte."""
    stream = _decompressed(io.BufferedReader(file, _CHUNK), kind)
    with tarfile.open(fileobj=stream, mode='r|', tarinfo=_Member) as opened:
        for member in opened:
            opened.members = []  # type: ignore[attr-defined]  # which it would keep all of
            target.member = member.name
            _untar_member(opened, member, target)
        if not hasattr(opened, 'has_end'):
            logger.warning('%s: has no end marker: it may have been truncated after %r', target.archive, target.member)
    target.member = ''
    while stream.read(_CHUNK):  # after the end, because the checksum covers the whole file
        pass
    while file.read(_CHUNK):
        pass


def _untar_member(opened: tarfile.TarFile, member: tarfile.TarInfo, target: UnpackFolder) -> None:
    if member.isdir():
        target.folder(member.name)
    elif member.issym():
        target.link(member.name, member.linkname)
    elif member.islnk():
        target.hard_link(member.name, member.linkname)
    elif member.isfile():
        content = opened.extractfile(member)
        if content is None:
            raise target.corrupt('has no content')
        target.file(member.name, member.size, content.read, bool(member.mode & 0o100))
    else:
        raise target.refused('it is not a file, a folder or a link')


def _decompressed(file: io.BufferedReader, kind: str) -> Any:
    match kind:
        case 'tar.gz':
            return gzip.GzipFile(fileobj=file)
        case 'tar.bz2':
            return bz2.BZ2File(file)
        case 'tar.xz':
            return lzma.LZMAFile(file)
        case 'tar.zst':
            return _ZstdFile(file)
    return file


class _ZstdFile(io.RawIOBase):
    """Decompresses frames of zstd. The reader of zstandard takes a frame that is cut off for a whole one."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        self._left = b''
        self._output = memoryview(b'')
        decompressor = import_extra('zstandard', 'arrayrecord').ZstdDecompressor()
        self._begin: Callable[[], Any] = functools.partial(decompressor.decompressobj, write_size=4 * _ZSTD_STEP)
        self._frame = self._begin()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            data = self._left or self._file.read(_ZSTD_STEP)
            if self._frame.eof:
                if not data:
                    return 0
                self._frame = self._begin()
            if not data:
                raise EOFError('its last frame of zstd is truncated')
            self._output = memoryview(self._frame.decompress(data))
            self._left = self._frame.unused_data
        size = min(len(buffer), len(self._output))
        buffer[:size], self._output = self._output[:size], self._output[size:]
        return size


def _write(file: Any, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]

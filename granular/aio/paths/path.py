"""Paths of files and folders on a disk, in a bucket or on a server, and their I/O."""

import itertools
import os
import re
from collections.abc import AsyncIterator, Iterable
from typing import Final, Self

from numpy.typing import ArrayLike

from granular._support.indexing import check_integer
from granular.aio.paths.file import File, Progress, bytes_of
from granular.aio.paths.pure import PurePath, check_str, glob_regex
from granular.aio.runtime.lifecycle import opening
from granular.aio.stores import Entry, Stat, Store, check_text, ranges
from granular.aio.stores.base import Request
from granular.aio.stores.fanout import read_all
from granular.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    BucketNotFoundError,
    DecodeError,
    InvalidArgumentError,
    NotFoundError,
    StoreError,
    UnsupportedError,
)
from granular.metrics import counters

_BRACES: Final = re.compile(r'\{(?:(\d{1,9})\.\.(\d{1,9})|([^{},/]+|[^{},/]*(?:,[^{},/]*)+))\}')
_MAX_FILES: Final = 1_000_000  # that braces stand for
_LOOKED_AT: Final = 1000  # names in a folder, of which an error shows a few


class Path(PurePath):
    """A path on a disk, in ``s3://``, ``gs://``, ``az://``, ``hf://`` or ``http(s)://`` (both read only), or in fsspec.

    Object stores have no folders: there, a folder exists while at least one key begins with its name.

    Example::

        path = granular.aio.Path('s3://bucket/data')
        await (path / 'note.txt').write_text('hello')
        names = [child.name async for child in path.iterdir()]
    """

    __slots__ = ()

    # --- status

    async def stat(self) -> Stat:
        """Return the size, modification time and version.

        Raises:
          NotFoundError: if there is neither a file nor a folder.
        """
        return await self._store.stat(self._key)

    async def exists(self) -> bool:
        """Return whether there is a file or a folder."""
        return await self._store.find(self._key) is not None

    async def is_file(self) -> bool:
        """Return whether there is a file."""
        stat = await self._store.find(self._key)
        return stat is not None and not stat.is_dir

    async def is_dir(self) -> bool:
        """Return whether there is a folder."""
        stat = await self._store.find(self._key)
        return stat is not None and stat.is_dir

    # --- reading

    async def read_bytes(self) -> bytes:
        """Return the whole content."""
        return (await self._store.read(self._key)).data

    async def read_text(self, encoding: str = 'utf-8') -> str:
        """Return the whole content as text; raise ``DecodeError`` if it is none in this encoding."""
        content = await self.read_bytes()
        try:
            return content.decode(encoding)
        except (LookupError, TypeError, ValueError) as error:
            raise DecodeError(f'{self}: expected text with the encoding {encoding!r:.100}: {error}') from error

    async def read_range(self, start: int, end: int | None = None) -> bytes:
        """Return the bytes from ``start`` up to but not including ``end``, or up to the end of the file.

        Raises:
          OutOfRangeError: if the file ends before the range does; without an ``end``, if it has no byte at a ``start``
            above 0.
        """
        start = check_integer(f'{self}: start', start, 0)
        end = None if end is None else check_integer(f'{self}: end', end, start)
        if start == end:
            return b''
        if end is not None:
            return (await self.read_ranges([start], [end]))[0]
        counters.ranges += 1
        return (await self._store.read(self._key, start, end)).data

    async def read_ranges(self, starts: ArrayLike, ends: ArrayLike, *, version: str | None = None) -> list[bytes]:
        """Return many byte ranges, read at once: neighbours share a request, large ranges are split into several.

        Args:
          starts, ends: the ranges ``[start, end)``, 1-D integers in any order; they may overlap, repeat and be empty.
          version: the ETag or generation that the file must have; None for any.

        Returns:
          The bytes of each range, in the order of the arguments.

        Raises:
          OutOfRangeError: if the file ends before the end of a range.
          ObjectChangedError: if the file has another version.
        """
        if version is not None and not isinstance(version, str):
            raise InvalidArgumentError(f'version: expected the text of Stat.version, or None, got {version!r:.100}')
        return (await read_all(self._store, [Request(self._key, *ranges.check(starts, ends), version)]))[0]

    # --- writing

    async def write_bytes(self, data: bytes | bytearray | memoryview) -> int:
        """Write a whole file and return its size in bytes. An existing file is replaced once all bytes are written."""
        content = bytes_of(data, self)
        await self._store.write(self._key, content)
        return len(content)

    async def write_text(self, text: str, encoding: str = 'utf-8') -> int:
        """Write a whole file of text and return its size in bytes."""
        return await self.write_bytes(check_str(text, self).encode(encoding))

    @opening
    async def open(self, mode: str = 'rb') -> 'File':
        """Open a file, with mode ``'rb'`` to read at any position or ``'wb'`` to write a new file from its beginning.

        A written file appears when it is closed, and not at all if its ``async with`` block ends with an error.
        """
        if mode == 'rb':
            stat = await self.stat()
            if stat.is_dir:
                raise StoreError(f'{self}: is a folder, not a file', path=f'{self}')
            return await File.open(self, stat.size)
        if mode == 'wb':
            return File(self, 0, await self._store.open_writer(self._key))
        raise InvalidArgumentError(f"{self}: expected mode 'rb' or 'wb', got {mode!r}")

    async def touch(self, exist_ok: bool = True) -> None:
        """Create an empty file, unless the file exists. Then a disk sets the time of its last change to now.

        Raises:
          AlreadyExistsError: if the file exists and ``exist_ok`` is false.
        """
        if exist_ok and await self.exists():
            await self._store.touch(self._key)
            return
        try:
            await self._store.write(self._key, b'', new=True)
        except AlreadyExistsError:
            if not exist_ok:
                raise

    async def rename(self, target: 'PurePath | str | os.PathLike[str]') -> Self:
        """Rename a file or folder on a disk, and return its new path. A file that has the new name is replaced.

        Raises:
          UnsupportedError: for any other store, in which a file would have to be copied and removed.
        """
        new = type(self)(target)
        if not new.store.local:
            raise UnsupportedError(
                f'{self}: cannot be renamed to {new}: copy it with Path.copy, and remove it with unlink or rmtree',
                path=f'{self}',
            )
        await self._store.rename(self._key, new.key)
        return type(self).of(self._store, new.key)

    replace = rename

    async def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Create a folder, or the bucket for a bucket's root. In a bucket, folders need no creation: keys imply them.

        Raises:
          AlreadyExistsError: if the path exists and ``exist_ok`` is false, or if it is a file, outside of buckets.
        """
        await self._store.mkdir(self._key, parents, exist_ok)

    async def unlink(self, missing_ok: bool = False) -> None:
        """Delete a file.

        Raises:
          NotFoundError: if it does not exist and ``missing_ok`` is false.
        """
        if not missing_ok and (await self.stat()).is_dir:
            raise StoreError(f'{self}: is a folder: use rmtree', path=f'{self}')
        await self._store.delete([self._key])

    async def rmtree(self) -> None:
        """Delete a folder and everything in it.

        Raises:
          NotFoundError: if it does not exist.
          UnsupportedError: for the root of a bucket or disk.
        """
        if self._key in ('', '.', '/'):
            raise UnsupportedError(f'{self}: the root of a store cannot be deleted', path=f'{self}')
        await self._store.delete_tree(self._key)

    async def copy(self, target: 'Path | str', *, progress: Progress | None = None) -> 'Path':
        """Copy a file, or a folder with everything in it. Within one store, the store copies it if it can.

        Each file appears complete or not at all, and is compared with the checksums of both stores. A file that the
        target has already, by size and checksum, is not copied again, so an interrupted copy resumes. For a file on a
        disk the checksum is computed; if a store has none, the file is copied again. ``spec.json`` files are copied
        last, and deleted first if other files of their dataset are replaced, so that a partial copy is never a valid
        dataset. The index of a sharded dataset is not copied to a disk, where files have other versions. Nothing is
        written outside of the target.

        Args:
          target: the file or folder to write.
          progress: called in a thread, with the bytes that were copied or skipped since the last call.

        Returns:
          The target.

        Raises:
          AlreadyExistsError: if the target holds another dataset that would be mixed with the copy, or another writer
            or copy is writing one there.
          InvalidArgumentError: if a name in the folder leads out of it, such as one with ``..``.
          BadReplyError: if the bytes received do not match the store's checksum.
          ObjectChangedError: if a file, or a dataset, changed while it was copied.
          StoreError: if the size or checksum of the written file differs from that of the source.
        """
        from granular.aio.paths.copy import copy

        target = target if isinstance(target, Path) else Path(target)
        await copy(self, target, progress)
        return target

    # --- listing

    async def iterdir(self) -> AsyncIterator[Self]:
        """Yield the files and folders in this folder, page by page.

        Raises:
          NotFoundError: if there is no such folder.
        """
        async for entry in self._store.scan(self._key):
            yield type(self).of(self._store, entry.key)

    async def glob(self, pattern: str) -> AsyncIterator[Self]:
        """Yield the paths in this folder that match a pattern: ``*``, ``?``, ``[ab]``, and ``**`` for any depth.

        They are listed page by page.
        """
        parts = [part for part in check_str(pattern, self).split('/') if part]
        if not parts or pattern.startswith('/'):
            raise InvalidArgumentError(f'{self}: expected a relative pattern, got {pattern!r}')
        if not self._store.local:
            check_text(pattern)
        async for entry in _expand(self._store, self._key, parts):
            yield type(self).of(self._store, entry.key)

    async def rglob(self, pattern: str) -> AsyncIterator[Self]:
        """Yield the paths in this folder that match a pattern, at any depth."""
        async for path in self.glob(f'**/{pattern}'):
            yield path

    async def walk(self) -> AsyncIterator[tuple[Self, list[str], list[str]]]:
        """Yield each folder with the names of its folders and files, top-down, as ``pathlib`` does."""
        folders: list[str] = []
        files: list[str] = []
        async for entry in self._store.scan(self._key):
            (folders if entry.is_dir else files).append(entry.name)
        yield self, folders, files
        for name in folders:
            async for level in self._folder(name).walk():
                yield level

    def _folder(self, name: str) -> Self:
        """Return a folder in this one. In a bucket its name may be empty."""
        if name:
            return self / name
        if not self._key:
            raise UnsupportedError(
                f'{self}: holds names that begin with a slash, whose folder has no path: use rglob', path=f'{self}'
            )
        return type(self).of(self._store, f'{self._key}/')


async def has_optional(path: Path) -> bool:
    """Return whether an optional file exists; False if the store denies access to it, as it may to missing files."""
    try:
        return await path.exists()
    except AccessDeniedError:
        if AccessDeniedError not in path.store.absent:
            raise
        return False


async def is_pattern(path: Path) -> bool:
    """Return whether a component of a path has a wildcard or braces, and no file or folder has this name."""
    return _has_pattern(_without_query(path)) and not await path.exists()


async def matches_of(pattern: Path) -> tuple[Path, list[Entry]]:
    """Return the folder above the first wildcard of a path, and the files and folders in it that match, sorted.

    Folders that exist under their names are no patterns. ``{000..002}`` stands for three numbers, and ``{a,b}`` for two
    alternatives.

    Raises:
      NotFoundError: if there is none, or none for a number or an alternative; it names others in the folder.
    """
    folder, names = pattern.parent, pattern.name
    while _has_pattern(_without_query(folder)) and not await folder.exists():
        folder, names = folder.parent, f'{folder.name}/{names}'
    entries: dict[str, Entry] = {}
    for name in expand_braces(names):
        parts = [part for part in name.split('/') if part]
        matches = [entry async for entry in _expand(folder.store, folder.key, parts)]
        if not matches:
            missing = '' if name == names else f' {name}'
            beside = await _beside(folder, names.partition('/')[0])
            raise NotFoundError(f'{pattern}:{missing} matches no files{beside}')
        entries.update((entry.key, entry) for entry in matches)
    return folder, [entries[key] for key in sorted(entries)]


def expand_braces(pattern: str) -> list[str]:
    """Return the names that the braces of a pattern stand for, the innermost ones first; itself if it has none."""
    names = [pattern]
    while any(map(_BRACES.search, names)):
        parts = list(itertools.islice(itertools.chain.from_iterable(map(_alternatives, names)), _MAX_FILES + 1))
        if not 0 < len(parts) <= _MAX_FILES:
            raise InvalidArgumentError(
                f'{pattern}: expected at most {_MAX_FILES} ascending numbers or alternatives, got '
                f'{"more" if parts else "none"}'
            )
        names = list(dict.fromkeys(parts))
    return names


def _alternatives(name: str) -> Iterable[str]:
    """Return the names that the first braces without others in them stand for; the name itself if it has none."""
    if (match := _BRACES.search(name)) is None:
        return (name,)
    first, last, alternatives = match.groups()
    parts: Iterable[str] = alternatives.split(',') if alternatives else ()
    if first:
        parts = (f'{number:0{len(first)}}' for number in range(int(first), int(last) + 1))
    return (f'{name[: match.start()]}{part}{name[match.end() :]}' for part in parts)


async def _beside(folder: Path, pattern: str) -> str:
    """Return the names of a few others in a folder that is listed, best those that begin as a pattern does."""
    try:
        return await _listed_beside(folder, pattern)
    except (AccessDeniedError, UnsupportedError):
        return ''


async def _listed_beside(folder: Path, pattern: str) -> str:
    for prefix in (re.split(r'[*?[{]', pattern, maxsplit=1)[0], ''):
        names: list[str] = []
        async for entry in _existing(folder.store.scan(folder.key, prefix)):
            if entry.name.startswith(prefix):  # which some stores only take for a hint
                names.append(entry.name)
            if len(names) == _LOOKED_AT:
                break
        if names:
            more = ', ...' if len(names) > 3 else ''
            return f', beside {", ".join(map(repr, sorted(names)[:3]))}{more}'
    return ': the folder has none'


def _without_query(path: PurePath) -> str:
    return path.store.split_query(path.key)[0]


def _has_pattern(text: str) -> bool:
    return _has_wildcard(text) or _BRACES.search(text) is not None


def _has_wildcard(name: str) -> bool:
    return any(char in name for char in '*?[')


async def _expand(store: Store, key: str, parts: list[str]) -> AsyncIterator[Entry]:
    """Yield the files and folders under a key that match the components of a pattern."""
    head, rest = parts[0], parts[1:]
    if head == '**':
        regex = _tree_regex(parts)
        folder = store.named(key)
        start = 0 if folder in ('', '.') else len(folder.rstrip('/')) + 1
        async for entry in _existing(store.scan_tree(key)):
            if regex.fullmatch(store.named(entry.key), start):
                yield entry
    elif _has_wildcard(head):
        regex = glob_regex(head)
        async for entry in _existing(store.scan(key, re.split(r'[*?[]', head, maxsplit=1)[0])):
            if not regex.fullmatch(entry.name):
                continue
            if not rest:
                yield entry
            elif entry.is_dir:
                async for match in _expand(store, entry.key, rest):
                    yield match
    else:
        child = Path.of(store, key) / head
        if not rest and (stat := await store.find(child.key)) is not None:
            yield Entry(child.key, stat.is_dir, stat.size, stat.modified)
        elif rest:
            async for match in _expand(store, child.key, rest):
                yield match


async def _existing(entries: AsyncIterator[Entry]) -> AsyncIterator[Entry]:
    """Yield the entries of a folder; none if it does not exist. A missing bucket is an error."""
    try:
        async for entry in entries:
            yield entry
    except BucketNotFoundError:
        raise
    except NotFoundError:
        return


def _tree_regex(parts: list[str]) -> re.Pattern[str]:
    # Names in buckets may be empty.
    text = ''.join('(?:[^/]*/)*' if part == '**' else f'{glob_regex(part).pattern}/' for part in parts)
    return re.compile(f'{text}[^/]+' if parts[-1] == '**' else text.removesuffix('/'), re.DOTALL)

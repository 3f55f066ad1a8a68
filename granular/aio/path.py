"""A place on a disk, in a bucket or on a server, and what can be done there."""

import re
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self

from numpy.typing import ArrayLike

from granular.aio import ranges
from granular.aio.fanout import Job, read_all
from granular.aio.purepath import PurePath, glob_regex
from granular.aio.reply import Reply, counters
from granular.aio.stores import ObjectWriter, Stat, Store
from granular.aio.turns import Turns
from granular.errors import (
    ClosedError,
    InvalidArgumentError,
    NotFoundError,
    ObjectChangedError,
    OutOfRangeError,
    StoreError,
    UnsupportedError,
)

Progress = Callable[[int], object]


class Path(PurePath):
    """A place on a local disk, in ``s3://`` or ``gs://``, on ``http(s)://`` (read only), or in any fsspec scheme.

    Object stores have no folders: there, one exists while a key begins with it.
    """

    __slots__ = ()

    # --- asking

    async def stat(self) -> Stat:
        """Size, time of change and version.

        Raises:
          NotFoundError: if there is neither a file nor a folder.
        """
        return await self._store.stat(self._key)

    async def exists(self) -> bool:
        """Whether there is a file or a folder."""
        try:
            await self.stat()
        except NotFoundError:
            return False
        return True

    async def is_file(self) -> bool:
        """Whether there is a file."""
        try:
            return not (await self.stat()).is_dir
        except NotFoundError:
            return False

    async def is_dir(self) -> bool:
        """Whether there is a folder."""
        try:
            return (await self.stat()).is_dir
        except NotFoundError:
            return False

    # --- reading

    async def read_bytes(self) -> bytes:
        """The whole content."""
        return (await self._store.read(self._key)).data

    async def read_text(self, encoding: str = 'utf-8') -> str:
        """The whole content as text."""
        return (await self.read_bytes()).decode(encoding)

    async def read_range(self, start: int, end: int | None = None) -> bytes:
        """The bytes from ``start`` to before ``end``, or to the last.

        Raises:
          OutOfRangeError: if the file ends before.
        """
        if start < 0 or (end is not None and end < start):
            raise InvalidArgumentError(f'{self}: range [{start}, {end}): want 0 <= start <= end')
        if start == end:
            return b''
        if end is not None:
            return (await self.read_ranges([start], [end]))[0]
        counters.ranges += 1
        return (await self._store.read(self._key, start, end)).data

    async def read_ranges(self, starts: ArrayLike, ends: ArrayLike, *, version: str | None = None) -> list[bytes]:
        """Many byte ranges at once, in any order: neighbours share a request, large ones become several.

        Args:
          starts, ends: the ranges ``[start, end)``, 1-D integers; they may overlap, repeat and be empty.
          version: the ETag or generation that the file must have; None for any.

        Returns:
          The bytes of each range, in the order asked.

        Raises:
          OutOfRangeError: if the file ends before one of them.
          ObjectChangedError: if it is of another version.
        """
        return (await read_all(self._store, [Job(self._key, *ranges.check(starts, ends), version)]))[0]

    # --- writing

    async def write_bytes(self, data: bytes | bytearray | memoryview) -> int:
        """Write a whole file, replacing what is there at the end; returns the bytes written."""
        async with await self.open('wb') as file:
            await file.write(data)
        return len(data)

    async def write_text(self, text: str, encoding: str = 'utf-8') -> int:
        """Write a whole file of text; returns the bytes written."""
        return await self.write_bytes(text.encode(encoding))

    async def open(self, mode: str = 'rb') -> 'File':
        """An asynchronous file, ``'rb'`` to read at any place or ``'wb'`` to write a new one from its beginning.

        What is written appears when the file is closed, and not at all if its block ends with an error.
        """
        if mode == 'rb':
            stat = await self.stat()
            if stat.is_dir:
                raise StoreError(f'{self}: is a folder, not a file')
            return await File.opened(self, stat.size)
        if mode == 'wb':
            return File(self, 0, await self._store.open_writer(self._key))
        raise InvalidArgumentError(f"{self}: mode is {mode!r}: want 'rb' or 'wb'")

    async def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Make a folder; on a bucket's root the bucket. Below it there is nothing to make: keys bring their folders.

        Raises:
          AlreadyExistsError: if there is something and not ``exist_ok``.
        """
        await self._store.mkdir(self._key, parents, exist_ok)

    async def unlink(self, missing_ok: bool = False) -> None:
        """Delete a file.

        Raises:
          NotFoundError: if there is none and not ``missing_ok``.
        """
        if not missing_ok and (await self.stat()).is_dir:
            raise StoreError(f'{self}: is a folder: use rmtree')
        await self._store.delete([self._key])

    async def rmtree(self) -> None:
        """Delete a folder and all below it.

        Raises:
          NotFoundError: if there is none.
          UnsupportedError: for the root of a bucket or disk.
        """
        if self._key in ('', '.', '/'):
            raise UnsupportedError(f'{self}: the root of a store is not deleted')
        await self._store.delete_tree(self._key)

    async def copy(self, target: 'Path | str', *, progress: Progress | None = None) -> 'Path':
        """Copy a file, or a folder with all below it; within one store its bytes stay there.

        Each file appears whole, and is compared with the checksums that its stores have. A file that is there already,
        by its size and checksum, is not copied again, so that a copy that was interrupted goes on; of a file on a disk
        the checksum is computed, and where a store has none the file is copied again. ``spec.json`` files come last,
        and go first where something else is replaced, so that half a copy of a dataset does not look complete. Nothing
        is written outside of the target.

        Args:
          target: the file or folder to write.
          progress: called with the bytes of each piece that was copied or is there already.

        Returns:
          The target.

        Raises:
          AlreadyExistsError: if the target holds another dataset, of which files or shards would be read along.
          InvalidArgumentError: if a name below the folder leads out of it, such as one with ``..``.
          BadReplyError: if what came has another checksum than the store says.
          ObjectChangedError: if a file, or a dataset, was replaced or written to while it was copied.
          StoreError: if what was written has another size or checksum than what was read.
        """
        from granular.aio.copying import copy

        target = target if isinstance(target, Path) else Path(target)
        await copy(self, target, progress)
        return target

    # --- listing

    async def iterdir(self) -> AsyncIterator[Self]:
        """What lies in a folder, page by page.

        Raises:
          NotFoundError: if there is no such folder.
        """
        async for entry in self._store.scan(self._key):
            yield type(self).of(self._store, entry.key)

    async def glob(self, pattern: str) -> AsyncIterator[Self]:
        """What matches a pattern below this folder, page by page: ``*``, ``?``, ``[ab]``, and ``**`` for any depth."""
        parts = [part for part in pattern.split('/') if part]
        if not parts or pattern.startswith('/'):
            raise InvalidArgumentError(f'{self}: {pattern!r} is no pattern below it')
        async for key in _expand(self._store, self._key, parts):
            yield type(self).of(self._store, key)

    async def rglob(self, pattern: str) -> AsyncIterator[Self]:
        """As ``glob``, at any depth."""
        async for path in self.glob(f'**/{pattern}'):
            yield path

    async def walk(self) -> AsyncIterator[tuple[Self, list[str], list[str]]]:
        """Each folder with the names of the folders and of the files in it, from the top, as ``pathlib`` does."""
        folders: list[str] = []
        files: list[str] = []
        async for entry in self._store.scan(self._key):
            (folders if entry.is_dir else files).append(entry.key.rpartition('/')[2])
        yield self, folders, files
        for name in folders:
            async for found in (self / name).walk():
                yield found


async def _expand(store: Store, key: str, parts: list[str]) -> AsyncIterator[str]:
    """The keys below a key that match a pattern's components."""
    head, rest = parts[0], parts[1:]
    place = Path.of(store, key)
    if '**' in parts and head == '**':
        regex = _tree_regex(parts)
        try:
            async for entry in store.scan_tree(key):
                if regex.fullmatch(str(Path.of(store, entry.key).relative_to(place))):
                    yield entry.key
        except NotFoundError:
            return
    elif not any(char in head for char in '*?['):
        child = place / head
        if rest:
            async for found in _expand(store, child.key, rest):
                yield found
        elif await child.exists():
            yield child.key
    else:
        regex = glob_regex(head)
        try:
            async for entry in store.scan(key, re.split(r'[*?[]', head, maxsplit=1)[0]):
                if not regex.fullmatch(entry.key.rpartition('/')[2]):
                    continue
                if not rest:
                    yield entry.key
                elif entry.is_dir:
                    async for found in _expand(store, entry.key, rest):
                        yield found
        except NotFoundError:
            return


def _tree_regex(parts: list[str]) -> re.Pattern[str]:
    text = ''.join('(?:[^/]+/)*' if part == '**' else f'{glob_regex(part).pattern}/' for part in parts)
    return re.compile(f'{text}[^/]+' if parts[-1] == '**' else text.removesuffix('/'), re.DOTALL)


class File:
    """An open file: reads at any place, or writes from the beginning. ``async with`` closes it.

    Several writes at a time take turns, in call order. One that fails or is cancelled may have handed on a part of its
    bytes, so that the file is not published any more.
    """

    def __init__(self, path: Path, size: int, writer: ObjectWriter | None) -> None:
        self._path, self._size, self._writer = path, size, writer
        self._at = 0
        self._closed = self._failed = False
        self._pinned: Reply | None = None  # the first reply: those after it are of its version
        self._turns = Turns()

    @classmethod
    async def opened(cls, path: Path, size: int) -> Self:
        """A file to read, of that many bytes."""
        file = cls(path, size, None)
        if path.store.local and size:
            # It is kept open, and read as it is now whatever lies at its path later on.
            reply = file._pinned = await path.store.read(path.key, 0, 0)
            file._size = reply.size
        return file

    async def read(self, size: int = -1) -> bytes:
        """The next bytes, at most ``size`` of them; ``b''`` at the end."""
        self._check(writing=False)
        stop = self._size if size < 0 else min(self._at + size, self._size)
        if stop <= self._at:
            return b''
        pinned = self._pinned
        try:
            reply = await self._path.store.read(self._path.key, self._at, stop, pinned and pinned.version)
        except OutOfRangeError as error:
            # It had as many bytes when it was opened.
            raise ObjectChangedError(f'{self._path}: it was replaced while it was being read: {error}') from error
        if reply.size != (self._size if pinned is None else pinned.size):
            raise ObjectChangedError(
                f'{self._path}: it was replaced while it was being read: {self._size} bytes became {reply.size}'
            )
        self._pinned, self._at = pinned or reply._replace(data=b''), stop
        return reply.data

    async def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append bytes; returns their number."""
        async with self._turns:
            writer = self._check(writing=True)
            if self._failed:
                raise ClosedError(f'{self._path}: a write failed before: write the file anew')
            self._failed = True  # until all of it is handed on
            await writer.write(data)
            self._failed = False
            self._at += len(data)
            return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a place: from the beginning (0), from here (1) or from the end (2)."""
        self._check(writing=False)
        at = offset + (0, self._at, self._size)[whence]
        if at < 0:
            raise InvalidArgumentError(f'{self._path}: cannot seek to {at}')
        self._at = at
        return at

    def tell(self) -> int:
        """The place of the next read or write."""
        return self._at

    @property
    def size(self) -> int:
        """The file's bytes."""
        return self._size if self._writer is None else self._at

    async def aclose(self) -> None:
        """Close the file; what was written appears now.

        Raises:
          ClosedError: if a write failed before; then nothing appears.
        """
        async with self._turns:
            if self._closed:
                return
            self._closed, self._pinned = True, None
            if self._writer is not None:
                try:
                    if self._failed:
                        raise ClosedError(f'{self._path}: a write failed before, so it is not published')
                    await self._writer.close()
                except BaseException:
                    await self._writer.abort()
                    raise

    async def abort(self) -> None:
        """Close the file and drop what was written."""
        if not self._closed:
            self._closed, self._pinned = True, None
            if self._writer is not None:
                await self._writer.abort()

    def _check(self, writing: bool) -> Any:
        if self._closed:
            raise ClosedError(f'{self._path}: the file is closed')
        if writing != (self._writer is not None):
            raise UnsupportedError(f'{self._path}: is open for {"reading" if writing else "writing"} only')
        return self._writer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.aclose()
        else:
            await self.abort()

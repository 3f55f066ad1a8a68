"""Places, with I/O that blocks: the synchronous face of :mod:`granular.aio.path`."""

import atexit
import io
import os
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import BinaryIO, Self, cast

from numpy.typing import ArrayLike

from granular.aio import path as core
from granular.aio.path import Progress
from granular.aio.purepath import PurePath
from granular.aio.stores import Stat
from granular.bridge import run
from granular.config import MiB
from granular.iterating import Iteration


class Path(PurePath):
    """A place on a local disk, in ``s3://`` or ``gs://``, on ``http(s)://`` (read only), or in any fsspec scheme.

    Object stores have no folders: there, one exists while a key begins with it. ``granular.aio.Path`` has the same
    names, and its I/O is awaited.
    """

    __slots__ = ()

    @property
    def aio(self) -> core.Path:
        """The same place, asynchronous."""
        return core.Path.of(self._store, self._key)

    # --- asking

    def stat(self) -> Stat:
        """Size, time of change and version.

        Raises:
          NotFoundError: if there is neither a file nor a folder.
        """
        return run(self.aio.stat())

    def exists(self) -> bool:
        """Whether there is a file or a folder."""
        return run(self.aio.exists())

    def is_file(self) -> bool:
        """Whether there is a file."""
        return run(self.aio.is_file())

    def is_dir(self) -> bool:
        """Whether there is a folder."""
        return run(self.aio.is_dir())

    # --- reading

    def read_bytes(self) -> bytes:
        """The whole content."""
        return run(self.aio.read_bytes())

    def read_text(self, encoding: str = 'utf-8') -> str:
        """The whole content as text."""
        return run(self.aio.read_text(encoding))

    def read_range(self, start: int, end: int | None = None) -> bytes:
        """The bytes from ``start`` to before ``end``, or to the last.

        Raises:
          OutOfRangeError: if the file ends before.
        """
        return run(self.aio.read_range(start, end))

    def read_ranges(self, starts: ArrayLike, ends: ArrayLike, *, version: str | None = None) -> list[bytes]:
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
        return run(self.aio.read_ranges(starts, ends, version=version))

    # --- writing

    def write_bytes(self, data: bytes | bytearray | memoryview) -> int:
        """Write a whole file, replacing what is there at the end; returns the bytes written."""
        return run(self.aio.write_bytes(data))

    def write_text(self, text: str, encoding: str = 'utf-8') -> int:
        """Write a whole file of text; returns the bytes written."""
        return run(self.aio.write_text(text, encoding))

    def open(self, mode: str = 'rb') -> BinaryIO:
        """A buffered binary file, ``'rb'`` to read at any place or ``'wb'`` to write a new one from its beginning.

        What is written appears when the file is closed, and not at all if its block ends with an error.
        """
        file = run(self.aio.open(mode))
        return cast(BinaryIO, _Reader(_RawReader(file), MiB) if mode == 'rb' else _Writer(_RawWriter(file), MiB))

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Make a folder; on a bucket's root the bucket. Below it there is nothing to make: keys bring their folders.

        Raises:
          AlreadyExistsError: if there is something and not ``exist_ok``.
        """
        run(self.aio.mkdir(parents, exist_ok))

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete a file.

        Raises:
          NotFoundError: if there is none and not ``missing_ok``.
        """
        run(self.aio.unlink(missing_ok))

    def rmtree(self) -> None:
        """Delete a folder and all below it.

        Raises:
          NotFoundError: if there is none.
          UnsupportedError: for the root of a bucket or disk.
        """
        run(self.aio.rmtree())

    def copy(self, target: 'Path | core.Path | str', *, progress: Progress | None = None) -> 'Path':
        """Copy a file, or a folder with all below it; within one store its bytes stay there.

        Each file appears whole, and is compared with the checksums that its stores have. A file that is there already,
        by its size and checksum, is not copied again, so that a copy that was interrupted goes on; of a file on a disk
        the checksum is computed, and where a store has none the file is copied again. ``spec.json`` files come last,
        and go first where something else is replaced, so that half a copy of a dataset does not look complete. Nothing
        is written outside of the target.

        Args:
          target: the file or folder to write.
          progress: called with the bytes of each piece that was copied or is there already, on the
            library's thread.

        Returns:
          The target.

        Raises:
          AlreadyExistsError: if the target holds another dataset, of which files or shards would be read along.
          InvalidArgumentError: if a name below the folder leads out of it, such as one with ``..``.
          BadReplyError: if what came has another checksum than the store says.
          ObjectChangedError: if a file, or a dataset, was replaced or written to while it was copied.
          StoreError: if what was written has another size or checksum than what was read.
        """
        done = run(self.aio.copy(core.Path(target), progress=progress))
        return Path.of(done.store, done.key)

    # --- listing

    def iterdir(self) -> Iterator[Self]:
        """What lies in a folder, page by page.

        Raises:
          NotFoundError: if there is no such folder.
        """
        return Iteration(self.aio.iterdir, self._own)

    def glob(self, pattern: str) -> Iterator[Self]:
        """What matches a pattern below this folder, page by page: ``*``, ``?``, ``[ab]``, and ``**`` for any depth."""
        return Iteration(lambda: self.aio.glob(pattern), self._own)

    def rglob(self, pattern: str) -> Iterator[Self]:
        """As ``glob``, at any depth."""
        return Iteration(lambda: self.aio.rglob(pattern), self._own)

    def walk(self) -> Iterator[tuple[Self, list[str], list[str]]]:
        """Each folder with the names of the folders and of the files in it, from the top, as ``pathlib`` does."""
        return Iteration(self.aio.walk, lambda entry: (self._own(entry[0]), *entry[1:]))

    def _own(self, path: core.Path) -> Self:
        return type(self).of(path.store, path.key)


class _RawReader(io.RawIOBase):
    def __init__(self, file: core.File) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]
        data = run(self._file.read(len(view)))
        view[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        return run(self._file.read())

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        try:
            if not self.closed:
                run(self._file.aclose())
        finally:
            super().close()


class _Reader(io.BufferedReader):
    """A buffered reader."""


class _RawWriter(io.RawIOBase):
    def __init__(self, file: core.File) -> None:
        self.file = file
        self.dropped = False
        _writers.add(self)

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        if self.dropped:
            return memoryview(data).nbytes  # type: ignore[arg-type]
        return run(self.file.write(bytes(memoryview(data))))  # type: ignore[arg-type]

    def tell(self) -> int:
        return self.file.tell()

    def close(self) -> None:
        try:
            if not self.closed and not self.dropped:
                run(self.file.aclose())
        finally:  # closed, whatever interrupts it, so that nothing is flushed when it is collected
            super().close()


class _Writer(io.BufferedWriter):
    """A buffered writer that drops what was written if its block ends with an error."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raw = self.raw
        if kind is not None and isinstance(raw, _RawWriter):
            raw.dropped = True  # what is still buffered is flushed to nowhere
            run(raw.file.abort())
        super().__exit__(kind, error, trace)


_writers: weakref.WeakSet[_RawWriter] = weakref.WeakSet()


def _drop_writers() -> None:
    """As the interpreter ends: what was not closed was not finished, and does not appear."""
    for raw in list(_writers):
        if not raw.closed and not raw.dropped:
            raw.dropped = True
            run(raw.file.abort())


def _disown_writers() -> None:
    """In a forked child: files that are open are the parent's to close."""
    for raw in list(_writers):
        raw.dropped = True


atexit.register(_drop_writers)
os.register_at_fork(after_in_child=_disown_writers)

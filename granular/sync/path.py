"""The sync API of :mod:`granular.aio.paths.path`."""

import atexit
import io
from collections.abc import Iterator
from types import TracebackType
from typing import BinaryIO, Final, Self, cast

from granular.aio.paths import path as core
from granular.aio.paths.file import File
from granular.aio.paths.path import Progress
from granular.aio.paths.pure import PurePath
from granular.aio.runtime.bridge import run
from granular.aio.runtime.forking import each_after_fork
from granular.config import MiB
from granular.sync.base import blocking
from granular.sync.iteration import Iteration


class Path(PurePath):
    """A path on a local disk, in ``s3://`` or ``gs://``, on ``http(s)://`` (read only), or in any fsspec scheme.

    ::

        root = granular.Path('s3://bucket/data')
        for path in root.glob('**/*.json'):
            print(path.name, path.stat().size)
        (root / 'notes.txt').write_text('hello')

    Object stores have no folders: a folder exists there while a key begins with its name. ``granular.aio.Path`` has the
    same methods, as coroutines.
    """

    __slots__ = ()

    @property
    def aio(self) -> core.Path:
        """The same path in the async API."""
        return core.Path.of(self._store, self._key)

    # --- status

    stat = blocking(core.Path.stat)
    exists = blocking(core.Path.exists)
    is_file = blocking(core.Path.is_file)
    is_dir = blocking(core.Path.is_dir)

    # --- reading

    read_bytes = blocking(core.Path.read_bytes)
    read_text = blocking(core.Path.read_text)
    read_range = blocking(core.Path.read_range)
    read_ranges = blocking(core.Path.read_ranges)

    # --- writing

    write_bytes = blocking(core.Path.write_bytes)
    write_text = blocking(core.Path.write_text)

    def open(self, mode: str = 'rb') -> BinaryIO:
        """Open a buffered binary file, ``'rb'`` to read at any position or ``'wb'`` to write a new file sequentially.

        A written file appears when it is closed, and not at all if its ``with`` block ends with an error.
        """
        file = run(self.aio.open(mode))
        return cast(BinaryIO, _Reader(_RawReader(file), MiB) if mode == 'rb' else _Writer(_RawWriter(file), MiB))

    mkdir = blocking(core.Path.mkdir)
    unlink = blocking(core.Path.unlink)
    rmtree = blocking(core.Path.rmtree)

    def copy(self, target: 'Path | core.Path | str', *, progress: Progress | None = None) -> 'Path':
        """Copy a file, or a folder with everything in it; within one store, bytes are copied by the server.

        Each file appears complete or not at all, and is compared with the checksums that its stores provide. An
        interrupted copy resumes: a file that exists with the same size and checksum is skipped. For a file on a disk
        the checksum is computed; a file in a store without checksums is copied again. ``spec.json`` files are copied
        last, and deleted first where other data is replaced, so that a partial copy of a dataset does not look
        complete. Nothing is written outside of the target.

        Args:
          target: the file or folder to write.
          progress: called with the number of bytes of each piece that was copied or skipped, on the library's thread.

        Returns:
          The target.

        Raises:
          AlreadyExistsError: if the target holds another dataset that would be mixed with the copy.
          InvalidArgumentError: if a name in the folder escapes it, such as one with ``..``.
          BadReplyError: if received bytes do not have the checksum that the store reports.
          ObjectChangedError: if a file, or a dataset, was replaced or written to while it was copied.
          StoreError: if the written file has another size or checksum than the source.
        """
        done = run(self.aio.copy(core.Path(target), progress=progress))
        return Path.of(done.store, done.key)

    # --- listing

    def iterdir(self) -> Iterator[Self]:
        """Yield the entries of a folder, page by page.

        Raises:
          NotFoundError: if the folder does not exist.
        """
        return Iteration(self.aio.iterdir, self._own)

    def glob(self, pattern: str) -> Iterator[Self]:
        """Yield the paths in this folder that match a pattern of ``*``, ``?``, ``[ab]``, and ``**`` for any depth.

        They are listed page by page.
        """
        return Iteration(lambda: self.aio.glob(pattern), self._own)

    def rglob(self, pattern: str) -> Iterator[Self]:
        """Like ``glob``, at any depth."""
        return Iteration(lambda: self.aio.rglob(pattern), self._own)

    def walk(self) -> Iterator[tuple[Self, list[str], list[str]]]:
        """Yield each folder with the names of the folders and of the files in it, top-down, like ``pathlib``."""
        return Iteration(self.aio.walk, lambda entry: (self._own(entry[0]), *entry[1:]))

    def _own(self, path: core.Path) -> Self:
        return type(self).of(path.store, path.key)


class _RawReader(io.RawIOBase):
    def __init__(self, file: File) -> None:
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
    def __init__(self, file: File) -> None:
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
        finally:  # Close even if interrupted, so that garbage collection does not flush.
            super().close()


class _Writer(io.BufferedWriter):
    """A buffered writer that discards the written data if its ``with`` block ends with an error."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raw = self.raw
        if kind is not None and isinstance(raw, _RawWriter):
            raw.dropped = True  # makes write() discard the data that is still buffered
            run(raw.file.abort())
        super().__exit__(kind, error, trace)


def _disown(raw: _RawWriter) -> None:
    """In a forked child, leave an open file to the parent process."""
    raw.dropped = True


_writers: Final = each_after_fork(_disown)


def _drop_writers() -> None:
    """At interpreter exit, discard files that were not closed, so that they do not appear."""
    for raw in list(_writers):
        if not raw.closed and not raw.dropped:
            raw.dropped = True
            run(raw.file.abort())


atexit.register(_drop_writers)

"""The sync API of :mod:`granular.aio.paths.path`."""

import contextlib
import functools
import io
import os
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any, BinaryIO, Concatenate, Final, ParamSpec, Self, TypeVar, cast

from granular._support.lazy import at_exit
from granular._support.text import logger
from granular.aio.paths import path as core
from granular.aio.paths.file import File, Progress
from granular.aio.paths.pure import PurePath
from granular.aio.runtime.forking import each_after_fork
from granular.aio.runtime.portal import run, run_close
from granular.config import MiB
from granular.errors import ClosedError
from granular.sync.base import blocking, documented_by
from granular.sync.iteration import Iteration, listing

P = ParamSpec('P')
S = TypeVar('S', bound='Path')


def _listing(
    method: Callable[Concatenate[core.Path, P], AsyncIterator[core.Path]],
) -> Callable[Concatenate[S, P], Iterator[S]]:
    """Make a blocking method, with its docstring and signature, of an async generator of paths."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[S]:
        return Iteration(listing(lambda: method(self.aio, *args, **kwargs)), self._own)

    return call


class Path(PurePath):
    """A path on a disk, in ``s3://``, ``gs://``, ``az://``, ``hf://`` or ``http(s)://`` (both read only), or in fsspec.

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

    stat = blocking(core.Path.stat, immediate=True)
    exists = blocking(core.Path.exists, immediate=True)
    is_file = blocking(core.Path.is_file, immediate=True)
    is_dir = blocking(core.Path.is_dir, immediate=True)

    read_bytes = blocking(core.Path.read_bytes, immediate=True)
    read_text = blocking(core.Path.read_text, immediate=True)
    read_range = blocking(core.Path.read_range, immediate=True)
    read_ranges = blocking(core.Path.read_ranges, immediate=True)

    write_bytes = blocking(core.Path.write_bytes)
    write_text = blocking(core.Path.write_text)

    def open(self, mode: str = 'rb') -> BinaryIO:
        """Open a buffered binary file, ``'rb'`` to read at any position or ``'wb'`` to write a new file sequentially.

        A written file appears when it is closed, and not at all if its ``with`` block ends with an error, or if it is
        never closed.
        """
        file = run(self.aio.open(mode).coroutine, immediate=mode == 'rb')
        raw = _RawReader(file) if mode == 'rb' else _RawWriter(file, f'{self}')
        return cast(BinaryIO, io.BufferedReader(raw, MiB) if mode == 'rb' else _BufferedWriter(raw, MiB))

    touch = blocking(core.Path.touch)

    @documented_by(core.Path.rename)
    def rename(self, target: PurePath | str | os.PathLike[str]) -> Self:
        return self._own(run(self.aio.rename(target)))

    replace = rename
    mkdir = blocking(core.Path.mkdir)
    unlink = blocking(core.Path.unlink)
    rmtree = blocking(core.Path.rmtree)

    @documented_by(core.Path.copy)
    def copy(self, target: 'Path | core.Path | str', *, progress: Progress | None = None) -> 'Path':
        path = run(self.aio.copy(core.Path(target), progress=progress))
        return Path.of(path.store, path.key)

    iterdir = _listing(core.Path.iterdir)
    glob = _listing(core.Path.glob)
    rglob = _listing(core.Path.rglob)

    @documented_by(core.Path.walk)
    def walk(self) -> Iterator[tuple[Self, list[str], list[str]]]:
        return Iteration(listing(self.aio.walk), lambda level: (self._own(level[0]), *level[1:]))

    def _own(self, path: core.Path) -> Self:
        return type(self).of(path.store, path.key)


class _RawReader(io.RawIOBase):
    def __init__(self, file: File) -> None:
        self._file = file
        self._position = 0  # of the next byte that was not returned

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        self._file.seek(self._position)
        data = run(self._file.read(len(view)), immediate=True)
        count = len(data)
        view[:count] = data
        self._position += count
        return count

    def readall(self) -> bytes:
        self._file.seek(self._position)
        data = run(self._file.read(), immediate=True)
        end = self._position + len(data)
        self._position = end
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        position = self._file.seek(offset + self._position if whence == 1 else offset, 0 if whence == 1 else whence)
        self._position = position
        return position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        try:
            if not self.closed:
                run_close(self._file.aclose())
        finally:
            super().close()


class _RawWriter(io.RawIOBase):
    dropped = True  # until the constructor ends

    def __init__(self, file: File, name: str) -> None:
        self.file, self._name = file, name
        self._interrupted = False  # True if an interrupt cut a write
        _writers.add(self)
        self.dropped = False

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.dropped:
            return memoryview(data).nbytes
        try:
            return run(self.file.write(data))
        except KeyboardInterrupt:
            self._interrupted = True
            raise

    def tell(self) -> int:
        return self.file.tell()

    def close(self) -> None:
        try:
            if not self.closed and not self.dropped:
                run(self.file.aclose())
        except ClosedError:
            if self._interrupted:
                raise KeyboardInterrupt from None
            raise
        finally:  # in any case, so that garbage collection does not flush
            super().close()
            _writers.discard(self)

    def discard(self) -> None:
        """Discard the file, also the data that is still buffered, unless it is closed."""
        if not self.closed and not self.dropped:
            self.dropped = True
            run_close(self.file.abort())

    def __del__(self) -> None:
        # Not published: the function that dropped it may have failed after a part of the data.
        if not self.closed and not self.dropped:
            self.discard()
            message = f'{self._name} was never closed, and is discarded: use `with`, or call its close'
            logger.error(message)
            warnings.warn(message, ResourceWarning, source=self, stacklevel=2)


class _BufferedWriter(io.BufferedWriter):
    """A buffered writer that discards the written data if its ``with`` block ends with an error."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raw = self.raw
        if kind is not None and isinstance(raw, _RawWriter):
            raw.discard()
        super().__exit__(kind, error, trace)

    def __del__(self) -> None:
        if isinstance(raw := self.raw, _RawWriter):
            raw.__del__()


def _disown(raw: _RawWriter) -> None:
    """In a forked child, leave an open file to the parent process."""
    raw.dropped = True


_writers: Final = each_after_fork(_disown)


def _drop_writers() -> None:
    """At interpreter exit, discard files that were not closed, so that they do not appear."""
    with contextlib.ExitStack() as stack:  # all of them, even if some cannot be removed
        for raw in list(_writers):
            stack.callback(raw.discard)


at_exit(_drop_writers)

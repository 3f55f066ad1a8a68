"""Indexes files whose format has no index: their headers are read once, and the result is cached on the local disk."""

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Final, Generic, TypeVar

import numpy as np

from granular._support.indexing import Ints
from granular.aio.bags.identity import FileIdentity
from granular.aio.bags.index_cache import cache_file_of, load_tables, remove_file, save_tables
from granular.aio.http.reply import Reply
from granular.aio.paths.path import Path
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.tasks import for_each
from granular.aio.runtime.threads import offload
from granular.config import MiB
from granular.errors import InvalidArgumentError, ObjectChangedError, OutOfRangeError

SCAN: Final = 16 * MiB  # bytes that are read at a time of a file with many headers
_PEEK: Final = 4096
_SPARSE: Final = 4 * MiB  # average bytes between headers above which what is between them is skipped
_SCANS: Final = 8  # number of files that are indexed concurrently


@dataclasses.dataclass(frozen=True, eq=False)
class FileIndex(abc.ABC):
    """The index of a file. One that is made by a scanner refuses fields that contradict each other by any exception."""

    size: int  # bytes of the file
    version: str | None  # its ETag or generation

    @property
    @abc.abstractmethod
    def length(self) -> int: ...

    @property
    def identity(self) -> FileIdentity:
        return FileIdentity(self.size, self.version)


Index = TypeVar('Index', bound=FileIndex)


class HeaderScanner(abc.ABC, Generic[Index]):
    """Parses headers from parts of a file that it requests. No I/O."""

    kind: str  # the format, for errors

    def __init__(self, name: str) -> None:
        self._name = name  # for errors
        self.at = 0  # position of the next header
        self.count = 0  # headers parsed so far
        self.done = False  # True if there are no more headers

    def reach(self) -> int:
        """Return the number of bytes to read from ``at``: many headers at once, or one if they are far apart."""
        return _PEEK if self.count and self.at // self.count > _SPARSE else SCAN

    @abc.abstractmethod
    def feed(self, start: int, data: bytes, size: int) -> None:
        """Parse the headers in a part of the file, which has ``size`` bytes, that begins at ``at``."""

    @abc.abstractmethod
    def index(self, size: int, version: str | None) -> Index: ...


async def index_files(paths: Sequence[Path], kind: type[Index], scanner: type[HeaderScanner[Index]]) -> list[Index]:
    """Return the indices of files, eight files at a time."""
    await to_loop()
    indices: dict[int, Index] = {}

    async def index(number: int) -> None:
        indices[number] = await _index_of(paths[number], kind, scanner)

    await for_each(range(len(paths)), index, _SCANS)
    return [indices[number] for number in range(len(paths))]


async def forget_indices(paths: Iterable[Path]) -> None:
    """Remove the cached indices of files, because one of them was replaced."""
    for path in paths:
        if (file := cache_file_of(path)) is not None:
            await offload(remove_file, file)


async def read_measured(path: Path, start: int, stop: int, version: str | None = None) -> Reply:
    """Read bytes that a file had when its size was requested; raise ``ObjectChangedError`` if it is shorter by now."""
    try:
        return await path.store.read(path.key, start, stop, version)
    except OutOfRangeError as error:
        raise ObjectChangedError(f'{error}: it was replaced during the read: open it again', path=f'{path}') from error


async def _index_of(path: Path, kind: type[Index], scanner: type[HeaderScanner[Index]]) -> Index:
    """Return the index of a file: the cached one if the file is unchanged, or a new one."""
    fields = dataclasses.fields(kind)

    def parse(rows: Any, numbers: Ints) -> Index:
        head, counts = rows
        if sum(counts) != len(numbers):
            raise ValueError('expected tables of the lengths in the head')
        values, tables = iter(head), iter(np.split(numbers, np.cumsum(counts)[:-1]))
        arguments: list[Any] = [next(tables if field.type == Ints else values) for field in fields]
        return kind(*arguments)

    file = cache_file_of(path)
    if file is not None and (cached := await offload(load_tables, file, f'{path}', parse)) is not None:
        stat = await path.stat()
        before, now = FileIdentity(cached.size, cached.version), FileIdentity(stat.size, stat.version)
        if before.is_proof and now.is_proof and before.is_same(now):
            return cached
    index = await _scan(path, scanner(f'{path}'))
    if file is not None and FileIdentity(index.size, index.version).is_proof:
        head = [getattr(index, field.name) for field in fields if field.type != Ints]
        tables = [getattr(index, field.name) for field in fields if field.type == Ints]
        await offload(save_tables, file, f'{path}', (head, [len(table) for table in tables]), tables)
    return index


async def _scan(path: Path, scanner: HeaderScanner[Index]) -> Index:
    stat = await path.stat()
    if stat.is_dir:
        raise InvalidArgumentError(f'{path}: expected {scanner.kind} files, got a folder')
    size, version = stat.size, None
    if not size:
        scanner.feed(0, b'', 0)
    while not scanner.done:
        at = scanner.at
        reply = await read_measured(path, at, min(size, at + scanner.reach()), version)
        size, version = reply.size, reply.version
        await offload(scanner.feed, at, reply.data, size)
        del reply  # free the bytes before the next read
    return scanner.index(size, version)

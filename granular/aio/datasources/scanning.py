"""Indexes files whose format has no index: their headers are read once, and the result is cached on the local disk."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol, TypeVar

from granular.aio.bags.index_cache import cache_file_of, load_tables, remove_file, save_tables
from granular.aio.datasources.header_scanner import HeaderScanner
from granular.aio.paths.path import Path
from granular.aio.reply import changed
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.tasks import for_each
from granular.aio.runtime.threads import offload
from granular.errors import InvalidArgumentError
from granular.indexing import Ints

logger = logging.getLogger('granular')

_SCANS: Final = 8  # number of files that are indexed concurrently


class FileIndex(Protocol):
    """The index of a file, of a size and a version, and the number of its datapoints (``length``)."""

    @property
    def length(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def version(self) -> str | None: ...


Index = TypeVar('Index', bound=FileIndex)
Pack = Callable[[Index], tuple[Any, Sequence[Ints]]]
Unpack = Callable[[Any, Ints], Index]


async def index_files(
    paths: Sequence[Path], kind: str, scanner: Callable[[str], HeaderScanner], pack: Pack[Index], unpack: Unpack[Index]
) -> list[Index]:
    """Return the indices of files, eight files at a time.

    Args:
      paths: the files.
      kind: their format, for errors.
      scanner: creates the scanner of a file from its name in errors.
      pack: converts an index into a head, for msgpack, and tables of numbers.
      unpack: converts a head and the concatenated tables back, or raises any exception.
    """
    await ensure_event_loop()
    indices: dict[int, Index] = {}

    async def index(number: int) -> None:
        indices[number] = await _index_of(paths[number], kind, scanner, pack, unpack)

    await for_each(range(len(paths)), index, _SCANS)
    return [indices[number] for number in range(len(paths))]


async def forget_indices(paths: Iterable[Path]) -> None:
    """Remove the cached indices of files, because one of them was replaced."""
    for path in paths:
        if (file := cache_file_of(path)) is not None:
            await offload(remove_file, file)


async def _index_of(
    path: Path, kind: str, scanner: Callable[[str], HeaderScanner], pack: Pack[Index], unpack: Unpack[Index]
) -> Index:
    """Return the index of a file: the cached one if the file is unchanged, or a new one."""
    file = cache_file_of(path)
    if file is not None and (cached := await offload(load_tables, file, f'{path}', unpack)) is not None:
        stat = await path.stat()
        if cached.version is not None and (stat.size, stat.version) == (cached.size, cached.version):
            return cached
    index: Index = await _scan(path, kind, scanner(f'{path}'))
    if file is not None and index.version is not None:
        try:
            await offload(save_tables, file, f'{path}', *pack(index))
        except OSError as error:
            logger.warning('the index of %s was not cached, and will be read again: %s', f'{path}', error)
    return index


async def _scan(path: Path, kind: str, scanner: HeaderScanner) -> Any:
    stat = await path.stat()
    if stat.is_dir:
        raise InvalidArgumentError(f'{path}: expected {kind} files, got a folder')
    size, version = stat.size, None
    if not size:
        scanner.feed(0, b'', 0)
    while not scanner.done:
        at = scanner.at
        reply = await path.store.read(path.key, at, min(size, at + scanner.window()), version)
        if version is not None and reply.version != version:
            raise changed(f'{path}', version, reply.version)
        size, version = reply.size, reply.version
        await offload(scanner.feed, at, reply.data, size)
        del reply  # free the bytes before the next read
    return scanner.index(size, version)

"""Indexes files whose format has no index: their headers are read once, and the result is cached on the local disk."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from granular.aio.bags.index_cache import cache_file_of, load_tables, remove_file, save_tables
from granular.aio.datasources.header_scanner import HeaderScanner, Index
from granular.aio.paths.path import Path
from granular.aio.reply import changed
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.tasks import for_each
from granular.aio.runtime.threads import offload
from granular.errors import InvalidArgumentError
from granular.indexing import Ints

logger = logging.getLogger('granular')

_SCANS: Final = 8  # number of files that are indexed concurrently


async def index_files(paths: Sequence[Path], scanner: type[HeaderScanner[Index]]) -> list[Index]:
    """Return the indices of files, eight files at a time."""
    await ensure_event_loop()
    indices: dict[int, Index] = {}

    async def index(number: int) -> None:
        indices[number] = await _index_of(paths[number], scanner)

    await for_each(range(len(paths)), index, _SCANS)
    return [indices[number] for number in range(len(paths))]


async def forget_indices(paths: Iterable[Path]) -> None:
    """Remove the cached indices of files, because one of them was replaced."""
    for path in paths:
        if (file := cache_file_of(path)) is not None:
            await offload(remove_file, file)


async def _index_of(path: Path, scanner: type[HeaderScanner[Index]]) -> Index:
    """Return the index of a file: the cached one if the file is unchanged, or a new one."""

    def parse(rows: Any, numbers: Ints) -> Index:
        head, counts = rows
        if sum(counts) != len(numbers):
            raise ValueError('expected tables of the lengths in the head')
        return scanner.from_tables(head, np.split(numbers, np.cumsum(counts)[:-1]))

    file = cache_file_of(path)
    if file is not None and (cached := await offload(load_tables, file, f'{path}', parse)) is not None:
        stat = await path.stat()
        if cached.version is not None and (stat.size, stat.version) == (cached.size, cached.version):
            return cached
    index = await _scan(path, scanner(f'{path}'))
    if file is not None and index.version is not None:
        try:
            head, tables = scanner.to_tables(index)
            await offload(save_tables, file, f'{path}', (head, [len(table) for table in tables]), tables)
        except OSError as error:
            logger.warning('the index of %s was not cached, and will be read again: %s', f'{path}', error)
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
        reply = await path.store.read(path.key, at, min(size, at + scanner.reach()), version)
        if version is not None and reply.version != version:
            raise changed(f'{path}', version, reply.version)
        size, version = reply.size, reply.version
        await offload(scanner.feed, at, reply.data, size)
        del reply  # free the bytes before the next read
    return scanner.index(size, version)

"""Compare the index of a dataset with the files of its shards.

A file is the one in the index if it has its version, or its size and time. A copy has neither, or only the version, as
S3 makes it of the bytes. So the shard of a file that has another version or time, but the same size, is compared by its
content when it is first read: its spec, and what divides the bytes of its bags into datapoints. Its records are then
read in the versions that were found.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from granular._support.indexing import Ints
from granular.aio.bags.identity import FileIdentity
from granular.aio.datasets.index import DatasetIndex
from granular.aio.datasets.shards import listed_shards
from granular.aio.http.messages import http_date
from granular.aio.http.reply import changed
from granular.aio.paths.path import Path
from granular.aio.paths.pure import relative_name
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import offload
from granular.aio.stores.base import Request, Stat
from granular.aio.stores.fanout import read_all
from granular.aio.stores.local.files import version_of
from granular.errors import AccessDeniedError, CorruptError, NotFoundError, ObjectChangedError, UnsupportedError
from granular.formats.layout import LIMIT, check_limits, parse_spec, shard_name, shard_numbers

LISTED: Final = 2000  # objects of a dataset in a bucket up to which opening lists all of them, 1,000 per request

Pins = Sequence[str | None]
"""The versions of the bags of a shard, in the order of the index; None for an empty file without."""


class Compared(NamedTuple):
    """The result of ``compare``.

    Attributes:
      numbers: all shards that exist.
      replaced: those with a file of another size than in the index; None if the files were not compared.
      moved: those with files of the same sizes, but of other versions or times, which may be copies; each with the
        versions of its bags, None if the listing does not report them.
    """

    numbers: list[int]
    replaced: Ints | None
    moved: Mapping[int, Pins | None]


_Files = tuple[FileIdentity, ...]
"""A bag, and its table if that is a file of its own."""

_Look = Callable[[int, str], _Files]
"""Returns the files of a shard and the key of a bag; raises ``FileNotFoundError`` if one of them is missing."""


async def compare(index: DatasetIndex, directory: Path) -> Compared:
    """Compare the index with the files of the dataset, as far as few requests can.

    On a disk, all files are compared. In a bucket with up to 2,000 objects, all of them are listed. Otherwise, or if
    they may not be listed, only shards that were added are noticed; those that were replaced are when they are first
    read.
    """
    store = directory.store
    if store.local:
        numbers = await listed_shards(directory)
        return Compared(numbers, *await offload(_compare_files, index, directory.key, len(numbers)))
    objects = len(index) * (1 + len(index.keys) * (1 + index.has_tables))
    if not store.has_folders and objects <= LISTED:
        with contextlib.suppress(AccessDeniedError):
            return await _compare_listing(index, directory)
    try:
        await store.read((directory / shard_name(len(index)) / 'spec.json').key)
    except store.absent:
        return Compared(list(range(len(index))), None, {})
    return Compared(await listed_shards(directory), None, {})


def _compare_files(index: DatasetIndex, key: str, count: int) -> tuple[Ints, Mapping[int, Pins | None]]:
    root, has_tables = os.path.join(key, ''), index.has_tables

    def look(shard: int, bag: str) -> _Files:
        stem = f'{root}{shard_name(shard)}/{bag}'
        file = _file_on_disk(f'{stem}.bag')
        if not has_tables:
            return (file,)
        info = os.stat(f'{stem}.idx')
        return file, FileIdentity(info.st_size // LIMIT * LIMIT, None, '', info.st_ctime_ns)

    return _sort(index, min(len(index), count), look)


def _file_on_disk(name: str) -> FileIdentity:
    info = os.stat(name)
    return FileIdentity(info.st_size, version_of(info), '', info.st_ctime_ns)


async def _compare_listing(index: DatasetIndex, directory: Path) -> Compared:
    files, names = dict[str, FileIdentity](), set()
    async for entry in directory.store.scan_tree(directory.key):
        if not entry.is_dir:
            name = relative_name(directory, entry.key)
            files[name] = FileIdentity.of(entry)
            names.add(name.partition('/')[0])

    def look(shard: int, bag: str) -> _Files:
        return _files_of(index, files, f'{shard_name(shard)}/{bag}')

    return Compared(shard_numbers(names), *_sort(index, len(index), look))


def _files_of(index: DatasetIndex, files: Mapping[str, FileIdentity], stem: str) -> _Files:
    """Return a bag and its table among listed files; raise ``FileNotFoundError`` if one of them is missing."""
    found = [files.get(f'{stem}.{ending}') for ending in ('bag', 'idx')[: 1 + index.has_tables]]
    if None in found:
        raise FileNotFoundError
    return tuple(file for file in found if file is not None)


def _sort(index: DatasetIndex, count: int, look: _Look) -> tuple[Ints, Mapping[int, Pins | None]]:
    """Return which of the first shards were replaced, and which were moved."""
    replaced: list[int] = []
    moved: dict[int, Pins | None] = {}
    keys = index.keys
    for shard, own in enumerate(index.files_of(0, count)):
        try:
            found = [look(shard, bag) for bag in keys]
        except OSError:
            replaced.append(shard)
            continue
        if own == found and all(file.modified > 0 for files in own for file in files):
            continue
        if _differ(own, found):
            replaced.append(shard)
        elif not _are_unchanged(own, found):
            versions = [files[0].version for files in found]
            known = all(version for version, files in zip(versions, own, strict=True) if files[0].size)
            moved[shard] = versions if known else None
    return np.array(replaced, np.int64), moved


def _differ(own: Sequence[_Files], found: Sequence[_Files]) -> bool:
    """Return whether a bag, or its table, has another size than in the index."""
    return [[file.size for file in files] for files in own] != [[file.size for file in files] for files in found]


def _are_unchanged(own: Sequence[_Files], found: Sequence[_Files]) -> bool:
    return all(one.is_unchanged(now) for files in zip(own, found, strict=True) for one, now in zip(*files, strict=True))


async def is_shard_unchanged(index: DatasetIndex, directory: Path, shard: int) -> bool:
    """Return whether a shard is the one in the index, by one request for its first bag.

    Writers replace all files of a shard, but the versions of the bags that are read do not always tell: S3 gives the
    same bytes the same version, whatever the references and limits that divide them, and empty records are never
    requested. So this compares the time of the last change, too.
    """
    file = directory / shard_name(shard) / f'{index.keys[0]}.bag'
    if file.store.local:
        try:
            found = await offload(_file_on_disk, file.key)
        except OSError:
            return False
    elif (stat := await file.store.find(file.key)) is None:
        return False
    else:
        found = FileIdentity.of(stat)
    return index.files(shard)[0][0].is_same(found)


async def find_moved(index: DatasetIndex, directory: Path, shard: int, seen: Pins | None = None) -> Pins | None:
    """Return the versions of the bags of a shard that is a copy of the one in the index, or the same; None if it is
    another one, or if that cannot be told.

    Raise ``ObjectChangedError`` if the bags do not have the versions that were ``seen`` when the dataset was opened.
    """
    folder = directory / shard_name(shard)
    files, own = await _find_files(index, folder), index.files(shard)
    try:
        found = [_files_of(index, files, key) for key in index.keys]
    except FileNotFoundError:
        return None
    if _differ(own, found):
        return None
    if 'spec.json' not in files or any(file.size and not file.is_proof for bag in found for file in bag):
        return None
    pins = [bag[0].version for bag in found]
    for key, before, now in zip(index.keys, seen or pins, pins, strict=True):
        if before is not None and before != now:
            raise changed(f'{folder / key}.bag', before, now)
    if not directory.store.local and _are_unchanged(own, found):
        return [bag[0].version for bag in own]
    known = [not index.has_tables and pin == bag[0].version for pin, bag in zip(pins, own, strict=True)]
    unproven = [number for number, is_known in enumerate(known) if not is_known]
    try:
        same = await gather(
            [
                _has_same_spec(index, folder, files['spec.json'], is_proven=not unproven),
                _has_same_tables(index, folder, shard, {number: found[number] for number in unproven}),
            ]
        )
    except (CorruptError, NotFoundError, ObjectChangedError):
        return None
    return pins if all(same) else None


async def _find_files(index: DatasetIndex, folder: Path) -> dict[str, FileIdentity]:
    """Return the files of a shard, as one listing has them, or else as each of them is."""
    store, files = folder.store, dict[str, FileIdentity]()
    with contextlib.suppress(AccessDeniedError, UnsupportedError, NotFoundError):
        async for entry in store.scan(folder.key):
            if not entry.is_dir:
                files[entry.name] = FileIdentity.of(entry)
        # The listing of a web server tells names alone: sizes of zero, and no versions.
        if files and all(file.version for file in files.values()):
            return files
    names = ['spec.json', *(f'{key}.{end}' for key in index.keys for end in ('bag', 'idx')[: 1 + index.has_tables])]
    with contextlib.suppress(AccessDeniedError):
        stats = await gather([store.find((folder / name).key) for name in names])
        return {name: FileIdentity.of(stat) for name, stat in zip(names, stats, strict=True) if stat is not None}
    return {}


async def _has_same_spec(index: DatasetIndex, folder: Path, file: FileIdentity, is_proven: bool) -> bool:
    """Return whether a shard has the spec of the index, and was not replaced since its files were listed."""
    path, store = folder / 'spec.json', folder.store
    if is_proven and store.versions_repeat and not store.local and (file.size, file.version) in index.known_specs:
        return True
    reply = await store.read(path.key, version=file.version)
    written = http_date(reply.modified)
    now = Stat(reply.size, None if written is None else written.timestamp(), reply.version)
    if not store.local and not file.is_same(FileIdentity.of(now)):
        return False  # S3 gives the same spec, written again, the same version
    if reply.data not in index.known_specs and parse_spec(reply.data, f'{path}') != index.directory.spec:
        return False
    index.known_specs.update((reply.data, (file.size, file.version)))
    return True


async def _has_same_tables(index: DatasetIndex, folder: Path, shard: int, bags: Mapping[int, _Files]) -> bool:
    """Return whether bags, by number, are divided into datapoints as the index has it."""
    states = {number: index.bag(shard, index.keys[number]) for number in bags}
    requests: dict[int, Request] = {}
    for number, files in bags.items():
        path, state, file, start = folder / f'{index.keys[number]}.bag', states[number], files[-1], 0
        if index.has_tables:
            path = path.with_suffix('.idx')
        elif number:  # of references, the records as well
            start = state.datasize
        if file.size > start:
            requests[number] = Request(path.key, [start], [file.size], file.version)
    data = dict.fromkeys(bags, b'')
    data.update(zip(requests, itertools.chain(*await read_all(folder.store, [*requests.values()])), strict=True))
    if 0 in bags and not index.has_tables:
        refs, state = data.pop(0), states.pop(0)
        limits = check_limits(
            _limits_of(refs[state.datasize :], state.records), state.datasize, f'{folder / "refs.bag"}'
        )
        records = [refs[start:stop] for start, stop in itertools.pairwise(limits.tolist())]
        if not await index.has_references(shard, records):
            return False
    return await index.has_limits(
        shard, {number: _limits_of(table, states[number].records) for number, table in data.items()}
    )


def _limits_of(table: bytes, records: int) -> Ints:
    """Return a zero and the limits of so many records, at the end of a table."""
    return np.concatenate([np.zeros(1, np.int64), np.frombuffer(table, '<i8')[len(table) // LIMIT - records :]])

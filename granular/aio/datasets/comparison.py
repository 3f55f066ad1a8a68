"""Compare the index of a dataset with the files of its shards.

A shard is the one in the index if each of its files has the version that the index has. A copy has other versions,
except where S3 makes them of the bytes. So a shard with files of other versions, but of the same sizes, is compared by
its content when it is first read: its spec, and what divides the bytes of its bags into datapoints. Its records are
then read in the versions that were found.
"""

import contextlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from granular._support.indexing import Ints
from granular.aio.bags.bag import IndexedBag
from granular.aio.bags.identity import FileIdentity
from granular.aio.datasets.index import DatasetIndex
from granular.aio.datasets.references import References
from granular.aio.datasets.shards import listed_shards
from granular.aio.http.reply import changed
from granular.aio.paths.path import Path
from granular.aio.paths.pure import relative_name
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import offload
from granular.aio.stores.base import Request
from granular.aio.stores.fanout import read_all
from granular.aio.stores.local.files import version_of
from granular.errors import AccessDeniedError, CorruptError, NotFoundError, ObjectChangedError
from granular.formats.dataset_index import digest_of_limits
from granular.formats.layout import LIMIT, check_limits, parse_spec, shard_name, shard_numbers

LISTED: Final = 2000  # objects of a dataset in a bucket up to which opening lists all of them, 1,000 per request

Pins = Sequence[str | None]
"""The versions of the files of a shard, in the order of the index; None if unknown, as of an empty file without."""


class Compared(NamedTuple):
    """The result of ``compare``.

    Attributes:
      numbers: all shards that exist.
      replaced: those with a bag or table of another size than in the index; None if the files were not compared.
      moved: those with files of the same sizes, but of other versions, which may be copies; each with its versions,
        None if the listing does not report them.
    """

    numbers: list[int]
    replaced: Ints | None
    moved: Mapping[int, Pins | None]


_Files = Sequence[FileIdentity | None]
"""The files of a shard, in the order of the index; None for one that is missing."""


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
    objects = len(index) * (1 + len(index.keys) * (2 + index.has_tables))  # with the checksums of each bag
    if not store.has_folders and objects <= LISTED:
        with contextlib.suppress(AccessDeniedError):
            return await _compare_listing(index, directory)
    try:
        await store.read((directory / shard_name(len(index)) / 'spec.json').key)
    except store.absent:
        return Compared(list(range(len(index))), None, {})
    return Compared(await listed_shards(directory), None, {})


def _compare_files(index: DatasetIndex, key: str, count: int) -> tuple[Ints, Mapping[int, Pins | None]]:
    root = os.path.join(key, '')
    return _sort(index, min(len(index), count), lambda shard: _files_on_disk(index, f'{root}{shard_name(shard)}'))


def _files_on_disk(index: DatasetIndex, folder: str) -> _Files:
    files: list[FileIdentity | None] = []
    for name in index.file_names:
        try:
            info = os.stat(f'{folder}/{name}')
        except OSError:
            files.append(None)
        else:
            files.append(FileIdentity(info.st_size, version_of(info)))
    return files


async def _compare_listing(index: DatasetIndex, directory: Path) -> Compared:
    files, names = dict[str, FileIdentity](), set()
    async for entry in directory.store.scan_tree(directory.key):
        if not entry.is_dir:
            name = relative_name(directory, entry.key)
            files[name] = FileIdentity.of(entry)
            names.add(name.partition('/')[0])

    def look(shard: int) -> _Files:
        folder = shard_name(shard)
        return [files.get(f'{folder}/{name}') for name in index.file_names]

    return Compared(shard_numbers(names), *_sort(index, len(index), look))


def _sort(index: DatasetIndex, count: int, look: Callable[[int], _Files]) -> tuple[Ints, Mapping[int, Pins | None]]:
    """Return which of the first shards were replaced, and which were moved."""
    replaced: list[int] = []
    moved: dict[int, Pins | None] = {}
    for shard, own in enumerate(index.files_of(0, count)):
        found = look(shard)
        if own == found or _are_same(own, found):
            continue
        if (files := _alike(own, found)) is None:
            replaced.append(shard)
        else:
            moved[shard] = _pins_of(files) if all(file.version or not file.size for file in files) else None
    return np.array(replaced, np.int64), moved


def _are_same(own: Sequence[FileIdentity], found: _Files) -> bool:
    """Return whether files are those in the index. An empty one may have no version."""
    return all(
        now is not None and one.size == now.size and (one.version == now.version or not one.size)
        for one, now in zip(own, found, strict=True)
    )


def _pins_of(files: Sequence[FileIdentity]) -> Pins:
    return [file.version for file in files]


def _alike(own: Sequence[FileIdentity], found: _Files) -> Sequence[FileIdentity] | None:
    """Return the files that were found, if all exist, and the bags and tables have the sizes that the index has."""
    files = [file for file in found if file is not None]
    is_alike = len(files) == len(own) and [file.size for file in files[1:]] == [file.size for file in own[1:]]
    return files if is_alike else None


async def find_indexed(index: DatasetIndex, directory: Path, shard: int, seen: Pins | None = None) -> Pins | None:
    """Return the versions of a shard that is the one in the index, or a copy of it; None if it is another one, or if
    that cannot be told.

    Raise ``ObjectChangedError`` if its files do not have the versions that were ``seen`` when the dataset was opened.
    """
    if not index.may_be_compared:
        return None
    folder, own = directory / shard_name(shard), index.files(shard)
    if (files := _alike(own, await _find_files(index, folder))) is None:
        return None
    pins = _pins_of(files)
    for name, before, now in zip(index.file_names, seen or pins, pins, strict=True):
        if before is not None and before != now:
            raise changed(f'{folder / name}', before, now)
    if _are_same(own, files):
        return _pins_of(own)
    if any(file.size and not file.is_proof for file in files[1:]):
        return None
    tables = zip(index.tables_among(own), index.tables_among(files), strict=True)
    unproven = {number: now for number, (one, now) in enumerate(tables) if not _are_same([one], [now])}
    try:
        same = await gather(
            [_has_same_spec(index, folder, own[0], files[0]), _has_same_tables(index, folder, shard, unproven)]
        )
    except (CorruptError, NotFoundError, ObjectChangedError):
        return None
    return pins if all(same) else None


async def has_versions(index: DatasetIndex, directory: Path, shard: int, pins: Pins) -> bool:
    """Return whether the files of a shard have these versions."""
    found = await _find_files(index, directory / shard_name(shard))
    return all(file is not None and pin in (None, file.version) for pin, file in zip(pins, found, strict=True))


async def _find_files(index: DatasetIndex, folder: Path) -> _Files:
    """Return the files of a shard, as one listing has them, or else as each of them is."""
    store, names = folder.store, index.file_names
    if store.local:
        return await offload(_files_on_disk, index, folder.key)
    if index.may_be_listed and not store.has_folders:
        try:
            entries = {entry.name: FileIdentity.of(entry) async for entry in store.scan(folder.key)}
            files = [entries.get(name) for name in names]
            if all(file is None or file.version or not file.size for file in files):
                return files
        except NotFoundError:
            return [None] * len(names)
        except AccessDeniedError:
            pass
        index.may_be_listed = False
    try:
        stats = await gather([store.find((folder / name).key) for name in names])
    except AccessDeniedError:
        return [None] * len(names)
    return [None if stat is None else FileIdentity.of(stat) for stat in stats]


async def _has_same_spec(index: DatasetIndex, folder: Path, own: FileIdentity, file: FileIdentity) -> bool:
    """Return whether a shard has the spec of the index."""
    path, store = folder / 'spec.json', folder.store
    # In a bucket whose versions repeat, equal ones are of the same bytes.
    known = file if store.versions_repeat and not store.has_folders else None
    if _are_same([own], [file]) or known in index.known_specs:
        return True
    data = (await store.read(path.key, version=file.version)).data
    if data not in index.known_specs and parse_spec(data, f'{path}') != index.directory.spec:
        return False
    index.known_specs.add(data)
    if known is not None:
        index.known_specs.add(known)
    return True


async def _has_same_tables(index: DatasetIndex, folder: Path, shard: int, tables: Mapping[int, FileIdentity]) -> bool:
    """Return whether bags, by number, whose tables are in some files, are divided into datapoints as the index has
    it.
    """
    states = {number: index.bag(shard, index.keys[number]) for number in tables}
    requests: dict[int, Request] = {}
    for number, file in tables.items():
        path, state, start = folder / f'{index.keys[number]}.bag', states[number], 0
        if index.has_tables:
            path = path.with_suffix('.idx')
        elif number:  # of references, the records as well
            start = state.datasize
        if file.size > start:
            requests[number] = Request(path.key, [start], [file.size], file.version)
    data = dict.fromkeys(tables, b'')
    data.update(zip(requests, itertools.chain(*await read_all(folder.store, [*requests.values()])), strict=True))
    return await offload(_have_digests, index, folder, index.digests(shard), states, data)


def _have_digests(
    index: DatasetIndex,
    folder: Path,
    digests: Mapping[str, str],
    states: Mapping[int, IndexedBag],
    data: Mapping[int, bytes],
) -> bool:
    """Return whether tables, by the number of the bag, have the digests that the index has, without its pages."""
    for number, content in data.items():
        key, state = index.keys[number], states[number]
        name, start = f'{folder / key}.bag', state.datasize if key == 'refs' and not index.has_tables else 0
        # The table of version 1 begins with a zero, and a limit may be incomplete.
        table = np.frombuffer(content[start : len(content) - (len(content) - start) % LIMIT], '<i8')
        limits = check_limits(np.append(0, table[len(table) - state.records :]), state.datasize, name)
        if key == 'refs' and not index.has_tables:
            records = [content[start:stop] for start, stop in itertools.pairwise(limits.tolist())]
            digest = References.unpack(records, index.directory.spec, name).digest(index.directory.spec)
        else:
            digest = digest_of_limits(limits)
        if digest != digests[key]:
            return False
    return True

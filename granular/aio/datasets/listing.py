"""The shards of a dataset as one listing of its files tells them: the sizes and versions, and with them the lengths."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from granular.aio.bags.identity import FileIdentity
from granular.aio.bags.index_cache import FolderState
from granular.aio.datasets.dataset import Dataset
from granular.aio.paths.path import Path
from granular.aio.paths.pure import relative_name
from granular.aio.runtime.tasks import for_each
from granular.aio.runtime.threads import offload
from granular.aio.stores.local.files import version_of
from granular.errors import AccessDeniedError, GranularError, ObjectChangedError
from granular.formats.layout import LIMIT, table_start

AT_ONCE: Final = 32
"""Shards up to which all are opened at once, as the first batch reads most of them."""

_TOGETHER: Final = 128  # tables that are looked at together
_TAIL: Final = 4096  # bytes at the end of a bag of references, which are all limits of most

Files = dict[str, FileIdentity]
"""The files of a shard, by name."""


def are_opened_at_once(names: Sequence[str]) -> bool:
    """Return whether a dataset has so few shards that all are opened at once."""
    return len(names) <= AT_ONCE


class Listing(NamedTuple):
    """Listed shards.

    Attributes:
      files: the files of each shard, by its name.
      lengths: the number of datapoints of the shards that need not be opened at once, by name.
    """

    files: dict[str, Files]
    lengths: dict[str, int]

    @classmethod
    async def of(cls, directory: Path, first: Dataset, names: Sequence[str]) -> 'Listing | None':
        """List shards, of which the first is open; None if a listing does not tell their versions, or is denied."""
        columns = first.columns
        ends = ('bag', 'idx') if columns.refs is None else ('bag',)
        used = ['spec.json', *(f'{key}.{end}' for key in columns.all_bags for end in ends)]
        try:
            found = await _list(directory, names)
        except AccessDeniedError:
            return None
        if found is None or not _has_versions(found[names[0]], first):
            return None
        files = {shard: {name: own[name] for name in used if name in own} for shard, own in found.items()}
        listing = cls(files, {})
        size = files[names[0]]['spec.json'].size
        others = 'refs.bag' not in used
        plain = [
            name
            for name in names[1:]
            if len(files[name]) == len(used)
            and all(file.is_proof or not file.size for file in files[name].values())
            and files[name]['spec.json'].size == size
            and not (others and 'refs.bag' in found[name])
        ]
        if columns.refs is not None:
            await for_each(plain, lambda name: listing._count(directory / name / 'refs.bag'), _TOGETHER)
            return listing
        for name in plain:
            sizes = {files[name][f'{key}.idx'].size for key in columns.spec}
            if len(sizes) == 1 and not (size := sizes.pop()) % LIMIT:
                listing.lengths[name] = size // LIMIT
        return listing

    @classmethod
    def of_states(cls, first: Dataset, folders: Mapping[str, FolderState]) -> 'Listing':
        """Return the shards of an index cache, of which the first is open."""
        listing, spec = cls({}, {}), folders[first.directory.name].spec.data
        for shard, folder in folders.items():
            files = listing.files[shard] = {}
            for key, bag in folder.bags.items():
                for (_, file), ending in zip(bag.files(first.directory / f'{key}.bag'), ('bag', 'idx'), strict=False):
                    files[f'{key}.{ending}'] = file
            tables = [folder.bags['refs']] if first.columns.refs is not None else [*folder.bags.values()]
            lengths = {len(bag.limits) - 1 for bag in tables}
            if shard != first.directory.name and folder.spec.data == spec and len(lengths) == 1:
                listing.lengths[shard] = lengths.pop()
        return listing

    async def _count(self, path: Path) -> None:
        """Note the number of references of a shard, by its table, unless it cannot be told."""
        name, store = path.parent.name, path.store
        size, version = self.files[name][path.name][:2]
        if not size:
            self.lengths[name] = 0
            return
        try:
            end = await store.read(path.key, -min(size, _TAIL), version=version)
            start = table_start(end.data, end.size, f'{path}')
            at = start - end.start
            if at < 0:
                end, at = await store.read(path.key, start, start + LIMIT, version), 0
            first = end.data[at : at + LIMIT]
        except GranularError:
            return  # opening the shard raises the error
        if end.size == size:
            # The table of version 1 begins with a zero.
            self.lengths[name] = (size - start) // LIMIT - (not any(first))

    def bags(self, shard: str) -> dict[str, FileIdentity]:
        """Return the identities of the bags of a shard, by file name."""
        files, out = self.files[shard], {}
        for name, file in files.items():
            if name.endswith('.bag'):
                table = files.get(f'{name.removesuffix(".bag")}.idx')
                out[name] = FileIdentity(file.size + (0 if table is None else table.size), file.version)
        return out

    def check(self, dataset: Dataset) -> None:
        """Raise ``ObjectChangedError`` unless a shard that was just opened is the listed one."""
        name = dataset.directory.name
        for path, now in dataset.opened_files():
            before = self.files[name].get(path.name)
            if before is None or not before.is_same(now):
                raise ObjectChangedError(
                    f'{path}: was replaced since it was listed, when the dataset was opened: it has {now.size} bytes '
                    f'and version {now.version}, and had {"none" if before is None else before.size} and '
                    f'{None if before is None else before.version}: open a new reader',
                    path=f'{path}',
                )
        if dataset.columns.length != self.lengths[name]:
            raise ObjectChangedError(
                f'{dataset.name}: expected {self.lengths[name]} datapoints, by the sizes of its files when the dataset '
                f'was opened, got {dataset.columns.length}: open a new reader'
            )


async def _list(directory: Path, names: Sequence[str]) -> dict[str, dict[str, FileIdentity]] | None:
    """Return the files of shards, by the names of the shard and of the file; None if the store has no such listing."""
    if directory.store.local:
        return await offload(_scan, directory.key, names)
    if directory.store.has_folders:
        return None
    files: dict[str, dict[str, FileIdentity]] = {name: {} for name in names}
    async for entry in directory.store.scan_tree(directory.key):
        shard, _, name = relative_name(directory, entry.key).rpartition('/')
        if shard in files and not entry.is_dir:
            files[shard][name] = FileIdentity.of(entry)
    return files


def _scan(folder: str, names: Sequence[str]) -> dict[str, dict[str, FileIdentity]]:
    files: dict[str, dict[str, FileIdentity]] = {}
    for shard in names:
        own = files[shard] = {}
        with contextlib.suppress(OSError), os.scandir(os.path.join(folder, shard)) as entries:  # opening it raises it
            for entry in entries:
                info = entry.stat()
                own[entry.name] = FileIdentity(info.st_size, version_of(info))
    return files


def _has_versions(files: Files, first: Dataset) -> bool:
    """Return whether a listing has the versions that reads of the files of a shard tell."""
    for path, identity in first.opened_files():
        file = files.get(path.name)
        if file is None or not file.is_same(identity) or not (file.is_proof or not file.size):
            return False
    return True

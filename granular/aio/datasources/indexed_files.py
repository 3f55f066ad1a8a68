"""Bases of data sources: over files that are indexed once, when the source is opened, and with or without fields."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, Generic, Self, SupportsIndex, overload

import numpy as np

from granular._support.indexing import Ints, grouped, index_of, indices_of, placed
from granular._support.typing import Datapoint_co
from granular.aio.bags.identity import Identity, PinnedSource
from granular.aio.datasources.arguments import Paths, names_in
from granular.aio.datasources.discovery.discover import Files
from granular.aio.datasources.scanning import Index, forget_indices
from granular.aio.http.reply import Reply
from granular.aio.paths.path import Path
from granular.aio.pipeline.data_source import Mask, MaskedSource, OpenedDataSource
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.worker_pickling import pickling_for_worker
from granular.aio.stores import Request, Store
from granular.aio.stores.fanout import read_all
from granular.errors import GranularError, ObjectChangedError


class SequenceSource(OpenedDataSource[Datapoint_co]):
    """A data source whose datapoints have no fields to choose: a slice of them is a list."""

    _name: str  # for errors

    @abc.abstractmethod
    async def _read_all(self, positions: Ints) -> list[Datapoint_co]:
        """Return the datapoints at positions, which exist."""

    async def _read_one(self, position: int) -> Datapoint_co:
        return (await self._read_all(np.array([position])))[0]

    @overload
    async def get(self, index: SupportsIndex) -> Datapoint_co: ...
    @overload
    async def get(self, index: slice | range) -> list[Datapoint_co]: ...
    async def get(self, index: SupportsIndex | slice | range) -> Datapoint_co | list[Datapoint_co]:
        """Return the datapoint at an index, negative from the end, or those of a slice.

        Raises:
          OutOfRangeError: an ``IndexError``.
        """
        await self._ensure_open()
        if isinstance(index, slice | range):
            return await self.fetch(index)
        return await self._read_one(index_of(index, len(self), self._name))

    async def fetch(self, indices: Any) -> list[Datapoint_co]:
        await self._ensure_open()
        return await self._read_all(indices_of(indices, len(self), self._name))


class IndexedFiles(PinnedSource[Datapoint_co], Generic[Index, Datapoint_co]):
    """A data source over files, its ``paths``, each with an index that is read once and shared with workers.

    Those of a folder or a pattern are found when it is opened.
    """

    _format: str  # a key of ``FORMATS``

    def __init__(self, paths: Paths | Files, *, split: str | None = None) -> None:
        super().__init__()
        self._take(Files.of(paths, split))
        self._name = self._files.name
        self._file_indices: list[Index] = []
        self._kept: list[object] = []  # what keeps the files open
        self._stops = np.zeros(0, np.int64)  # cumulative number of datapoints up to the end of each file

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self._files,), {}

    def _take(self, files: Files) -> None:
        self._files, self.paths = files, files.paths

    @property
    def _data_paths(self) -> Sequence[Path]:
        """The files that have the datapoints; by default, they have the index as well."""
        return self.paths

    def _pickled(self) -> dict[str, Any]:
        return super()._pickled() | ({'_file_indices': self._file_indices} if pickling_for_worker.get() else {})

    @abc.abstractmethod
    async def _read_file_indices(self) -> list[Index]: ...

    async def _open(self) -> None:
        given = self._files
        self._take(await given.resolved(self._format))
        self._kept = [path.store.keep_open(path.key) for path in self._data_paths]
        if not self._file_indices:
            try:
                indices = await self._read_file_indices()
            except GranularError:
                if self._files.found is not None or (files := await given.in_folder(self._format)) is None:
                    raise
                self._take(files)
                indices = await self._read_file_indices()
            self._check_files(self._identity_of(indices))
            self._file_indices = indices
        self._stops = np.cumsum([index.length for index in self._file_indices], dtype=np.int64)

    def _opened_files(self) -> Identity:
        return self._identity_of(self._file_indices)

    def _identity_of(self, indices: Sequence[Index]) -> Identity:
        opened = zip(self._data_paths, indices, strict=True)
        return Identity.of([path.store for path in self.paths], {str(path): index.identity for path, index in opened})

    async def _close(self) -> None:
        self._kept = []

    @property
    def size(self) -> int:
        """Bytes of all files."""
        self._check_open()
        return sum(index.size for index in self._file_indices)

    def nbytes(self, mask: Any = None) -> int | None:
        return self.size if self._state == 'open' else None

    def identity(self) -> tuple[Any, ...]:
        """Return the files in order, each by store, address, bytes and version."""
        return tuple(
            (path.store.fingerprint, str(path), *index.identity.told)
            for path, index in zip(self._data_paths, self._file_indices, strict=True)
        )

    def __len__(self) -> int:
        self._check_open()
        return int(self._stops[-1])

    def copy(self) -> Self:
        """Return an independently closable source of the same files that shares their index."""
        return self._copied()

    def _locate(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the number of the file of each datapoint, and the datapoint's number in that file."""
        owners = np.searchsorted(self._stops, positions, side='right')
        return owners, positions - np.where(owners > 0, self._stops[owners - 1], 0)

    async def _read_items(
        self, owners: Ints, items: Ints, limits: Callable[[Index, Ints], tuple[Ints, Ints]]
    ) -> list[bytes]:
        """Read items by their files and numbers, concurrently; remove the cached index of a file that was replaced."""
        groups = grouped(owners)
        reads = []
        for owner, own in groups:
            path, index = self._data_paths[owner], self._file_indices[owner]
            reads.append((path.store, Request(path.key, *limits(index, items[own]), index.version)))
        try:
            data = await read_files(reads)
        except ObjectChangedError:
            await forget_indices(self.paths[owner] for owner, _ in groups)
            raise
        return placed(groups, data, len(owners))

    async def _reading(self) -> tuple[int, bool]:
        return self.size, all(path.store.local for path in self.paths)


async def read_files(reads: Sequence[tuple[Store, Request]]) -> list[list[bytes]]:
    """Read byte ranges of files concurrently, those of a store in one fan-out; return a list per request, in order."""
    stores: dict[Store, list[int]] = {}
    for i, (store, _) in enumerate(reads):
        stores.setdefault(store, []).append(i)
    data = await gather([read_all(store, [reads[i][1] for i in numbers]) for store, numbers in stores.items()])
    out: list[list[bytes]] = [[] for _ in reads]
    for numbers, store_data in zip(stores.values(), data, strict=True):
        for i, pieces in zip(numbers, store_data, strict=True):
            out[i] = pieces
    return out


async def bytes_from(path: Path, tail: Reply, start: int) -> bytes:
    """Return the bytes of a file from a position to its end, of which the last ones were read."""
    if start >= tail.start:
        return tail.data[start - tail.start :]
    (rest,) = await path.read_ranges([start], [tail.start], version=tail.version)
    return rest + tail.data


class MaskedFiles(
    MaskedSource[tuple[str, ...], Datapoint_co], IndexedFiles[Index, Datapoint_co], Generic[Index, Datapoint_co]
):
    """Files whose datapoints are dicts, of which a mask selects fields."""

    _named = 'fields'  # for errors

    @property
    @abc.abstractmethod
    def _available(self) -> tuple[str, ...]: ...

    def _chosen(self, mask: Mask) -> tuple[str, ...]:
        """Return the fields that a mask selects."""
        available = self._available
        return available if mask is None else names_in(mask, available, self._named, self._name)


def fields_of(files: MaskedFiles[Any, Any]) -> tuple[str, ...]:
    return files._available


def files_of(source: IndexedFiles[Any, Any]) -> Files:
    return source._files

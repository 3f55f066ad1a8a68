"""Reads tar files in the WebDataset format at random: indexed once, then read by range requests."""

import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, Self, SupportsIndex, overload

import numpy as np

from granular._typing import Datapoint_co
from granular.aio.bags.index_cache import cache_file_of, load_tables, save_tables
from granular.aio.datasets import codec
from granular.aio.datasets.codec import Field
from granular.aio.datasources.arguments import Mask, Paths, as_paths, name_of, names_in
from granular.aio.datasources.webdataset.index import Index, Scanner, pack, unpack
from granular.aio.http.reply import changed
from granular.aio.paths.path import Path
from granular.aio.pipeline.nodes import elements
from granular.aio.runtime.readahead import pages
from granular.aio.runtime.sampling import Sampling
from granular.aio.runtime.sharing import sharing
from granular.aio.runtime.tasks import for_each, gather
from granular.aio.runtime.threads import offload
from granular.aio.stores import Store
from granular.aio.stores.fanout import Job, read_all
from granular.errors import InvalidArgumentError, ObjectChangedError, UnknownKeyError
from granular.formats.plain import decode_bytes, inline_safe
from granular.indexing import Ints, index_of, indices_of

Decoders = Mapping[str, Callable[[bytes], Any] | Any] | None

logger: Final = logging.getLogger('granular')

KEY: Final = '__key__'
_SCANS: Final = 8  # number of files that are indexed concurrently


class WebDatasetDataSource(Sampling[Datapoint_co]):
    """Random access to the datapoints of WebDataset tar files, on a disk or in buckets, in the order given.

    ::

        async with granular.aio.WebDatasetDataSource('s3://bucket/train-000.tar', granular.decoders) as source:
            image = (await source.get(0))['jpg']
            datapoints = await source.fetch([3, 1, 4], ('cls',))  # only these members are read

    A datapoint is a dict: ``'__key__'`` and an entry for each of its members. The field is the part of the member's
    name after the first dot, in lower case; the value is the member's bytes, decoded if there is a decoder. Consecutive
    members with the same name before that dot form a datapoint. As in WebDataset, other members are skipped: folders,
    links, hidden files, and names without a dot or within double underscores.

    Opening reads the headers once, of eight files at a time: with reads of 16 MiB that include the bodies, or with
    small reads from header to header where members are larger than 4 MiB on average. With ``IOConfig.index_cache`` the
    index of a file in a bucket is cached on the local disk, bound to the file's ETag or generation, and validated with
    one request. After that a batch reads only the byte ranges of the members wanted, from all files concurrently.

    Memory: 24 bytes per member, and 16 bytes plus the key per datapoint.

    Args:
      paths: a file, or a sequence of files, not compressed.
      decoders: by field, or by the part after its last dot, the function that decodes a member's bytes, such as
        ``granular.decoders``; fields without a decoder (by default all) are bytes.

    Raises:
      CorruptError: if a file is not a tar file, or is truncated.
      UnsupportedError: if it is compressed, or has sparse members.
    """

    def __init__(self, paths: Paths, decoders: Decoders = None) -> None:
        super().__init__()
        self.paths: tuple[Path, ...] = as_paths(paths)
        if decoders is not None and not isinstance(decoders, Mapping):
            raise InvalidArgumentError(f'decoders: expected a mapping from fields to functions, got {decoders!r:.100}')
        self._decoders = decoders
        self._name = name_of(self.paths)
        self._indices: list[Index] = []
        self._stops = np.zeros(0, np.int64)
        self._fields: dict[str, Field] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        args = (self.paths, self._decoders)
        if sharing.get() and self._indices:
            return _shared, (type(self), args, self._indices)
        return type(self), args

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self._name!r})'

    # --- opening

    async def _open(self) -> None:
        if not self._indices:
            for path in self.paths:
                await path.store.ready()
            indices: dict[int, Index] = {}

            async def index(number: int) -> None:
                indices[number] = await _index_of(self.paths[number])

            await for_each(_numbers(len(self.paths)), index, _SCANS)
            self._indices = [indices[number] for number in range(len(self.paths))]
        self._stops = np.cumsum([len(index.stops) for index in self._indices], dtype=np.int64)
        names = dict.fromkeys(name for index in self._indices for name in index.fields)
        self._fields = {name: _field(name, self._decoders, self._name) for name in names}

    async def _close(self) -> None:
        pass

    # --- properties

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the datapoints, ``'__key__'`` first; a datapoint may lack some."""
        self._check_open()
        return KEY, *self._fields

    @property
    def size(self) -> int:
        """Bytes of all files."""
        self._check_open()
        return sum(index.size for index in self._indices)

    def _size_of(self, mask: Any) -> int | None:
        return self.size if self._state == 'open' else None

    @property
    def _identity(self) -> tuple[Any, ...]:
        """The files in order, each by store, address, bytes and version, and the decoders of fields."""
        files = [
            (p.store.fingerprint, f'{p}', i.size, i.version) for p, i in zip(self.paths, self._indices, strict=True)
        ]
        return *files, {name: elements.identity_of(field.fn) for name, field in self._fields.items()}

    def __len__(self) -> int:
        self._check_open()
        return int(self._stops[-1])

    def copy(self) -> Self:
        """Return an independently closable source of the same files that shares their index."""
        self._check_open()
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        return copy

    # --- reading

    @overload
    async def get(self, index: SupportsIndex, mask: Mask) -> dict[str, Any]: ...
    @overload
    async def get(self, index: SupportsIndex, mask: None = None) -> Datapoint_co: ...
    @overload
    async def get(self, index: slice | range, mask: Mask = None) -> dict[str, list[Any]]: ...
    async def get(self, index: SupportsIndex | slice | range, mask: Mask = None) -> Any:
        """Return a datapoint, or ``{field: [values]}`` for a slice; every datapoint of a slice must have all fields.

        Args:
          index: an integer, negative from the end, or a slice.
          mask: the fields to read; a datapoint that lacks one is returned without it.

        Raises:
          OutOfRangeError: an ``IndexError``, for an index past the end.
          UnknownKeyError: a ``KeyError``, for a field that no datapoint has, or that one of a slice lacks.
        """
        await self._ensure_open()
        if not isinstance(index, slice | range):
            return (await self.fetch([index_of(index, len(self), self._name)], mask))[0]
        positions = indices_of(index, len(self), self._name)
        datapoints = await self.fetch(positions, mask)
        columns: dict[str, list[Any]] = {name: [] for name in self._choose(mask)}
        for position, datapoint in zip(positions.tolist(), datapoints, strict=True):
            for name, column in columns.items():
                if name not in datapoint:
                    raise UnknownKeyError(
                        f'{self._name}: datapoint {position} has no {name!r}: choose fields by a mask'
                    )
                column.append(datapoint[name])
        return columns

    @overload
    async def fetch(self, indices: Any, mask: Mask) -> list[dict[str, Any]]: ...
    @overload
    async def fetch(self, indices: Any, mask: None = None) -> list[Datapoint_co]: ...
    async def fetch(self, indices: Any, mask: Mask = None) -> list[Any]:
        """Return many datapoints, read from all files concurrently.

        Args:
          indices: a 1-D sequence of integers, in any order, repeated or negative; or a slice or range.
          mask: as for ``get``.

        Returns:
          The datapoints, in the order requested.
        """
        await self._ensure_open()
        positions = indices_of(indices, len(self), self._name)
        selected = self._choose(mask)
        owners = np.searchsorted(self._stops, positions, side='right')
        datapoints: list[dict[str, Any]] = [{} for _ in positions]
        targets: dict[str, list[int]] = {name: [] for name in selected if name != KEY}  # of the values of each field
        ranges: dict[int, list[tuple[int, int, int]]] = {}  # for each file: start, stop, target
        names: dict[int, list[str]] = {}
        for i, (position, owner) in enumerate(zip(positions.tolist(), owners.tolist(), strict=True)):
            index = self._indices[owner]
            number = position - (int(self._stops[owner - 1]) if owner else 0)
            if KEY in selected:
                datapoints[i][KEY] = index.key(number)
            first, last = (int(index.stops[number - 1]) if number else 0), int(index.stops[number])
            for member in range(first, last):
                name = index.fields[index.field[member]]
                if name in targets:
                    start = int(index.starts[member])
                    ranges.setdefault(owner, []).append((start, start + int(index.sizes[member]), i))
                    names.setdefault(owner, []).append(name)
        records: dict[str, list[bytes]] = {name: [] for name in targets}
        for owner, file_records in (await self._read(ranges)).items():
            for name, (_, _, i), record in zip(names[owner], ranges[owner], file_records, strict=True):
                targets[name].append(i)
                records[name].append(record)
        values = await codec.decode_records(
            [self._fields[name] for name in targets], list(records.values()), self._name
        )
        for (name, field_targets), column in zip(targets.items(), values, strict=True):
            for i, value in zip(field_targets, column, strict=True):
                datapoints[i][name] = value
        return datapoints

    async def _read(self, ranges: Mapping[int, Sequence[tuple[int, int, int]]]) -> dict[int, list[bytes]]:
        """Read members of the files concurrently."""
        stores: dict[Store, list[int]] = {}
        for owner in ranges:
            stores.setdefault(self.paths[owner].store, []).append(owner)
        records: dict[int, list[bytes]] = {}

        async def read(store: Store, owners: list[int]) -> None:
            jobs = []
            for owner in owners:
                limits = np.array(ranges[owner], np.int64)
                jobs.append(Job(self.paths[owner].key, limits[:, 0], limits[:, 1], self._indices[owner].version))
            records.update(zip(owners, await read_all(store, jobs), strict=True))

        try:
            await gather([read(store, owners) for store, owners in stores.items()])
        except ObjectChangedError:
            for owner in ranges:
                if (file := cache_file_of(self.paths[owner])) is not None:
                    await offload(_forget, file)
            raise
        return records

    async def __aiter__(self) -> AsyncIterator[Datapoint_co]:
        await self._ensure_open()
        local = all(path.store.local for path in self.paths)
        async with contextlib.aclosing(pages(self.fetch, len(self), self.size, local)) as items:
            async for datapoint in items:
                yield datapoint

    def _choose(self, mask: Mask) -> tuple[str, ...]:
        """Return the fields that a mask selects.

        Raises:
          UnknownKeyError: for a field that no datapoint has.
        """
        if mask is None:
            return KEY, *self._fields
        return names_in(mask, [KEY, *self._fields], 'fields', self._name)


async def _numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


def _field(name: str, decoders: Decoders, source: str) -> Field:
    table = decoders or {}
    fn = table.get(name, table.get(name.rpartition('.')[2], codec.raw))
    if fn is None or fn is decode_bytes:
        fn = codec.raw
    if not callable(fn):
        raise InvalidArgumentError(f'{source}: expected a function to decode field {name!r}, got {fn!r:.100}')
    return Field(name, name, False, fn, fn is codec.raw or inline_safe(fn))


async def _index_of(path: Path) -> Index:
    """Return the index of a file: the cached one if the file is unchanged, or a new one."""
    file = cache_file_of(path)
    if file is not None and (cached := await offload(_recall, file, f'{path}')) is not None:
        stat = await path.stat()
        if cached.version is not None and (stat.size, stat.version) == (cached.size, cached.version):
            return cached
    index = await _scan(path)
    if file is not None and index.version is not None:
        try:
            await offload(save_tables, file, f'{path}', *_packed(index))
        except OSError as error:
            logger.warning('the index of %s was not cached, and will be read again: %s', f'{path}', error)
    return index


async def _scan(path: Path) -> Index:
    store, scanner = path.store, Scanner(f'{path}')
    stat = await path.stat()
    if stat.is_dir:
        raise InvalidArgumentError(f'{path}: expected tar files, got a folder')
    size, version = stat.size, None
    if not size:
        scanner.feed(0, b'', 0)
    while not scanner.done:
        at = scanner.at
        reply = await store.read(path.key, at, min(size, at + scanner.window()), version)
        if version is not None and reply.version != version:
            raise changed(f'{path}', version, reply.version)
        size, version = reply.size, reply.version
        await offload(scanner.feed, at, reply.data, size)
        del reply  # free the bytes before the next read
    return scanner.index(size, version)


def _packed(index: Index) -> tuple[Any, list[Ints]]:
    head, tables = pack(index)
    return (head, [len(table) for table in tables]), tables


def _recall(file: str, name: str) -> Index | None:
    def parse(rows: Any, numbers: Ints) -> Index:
        head, counts = rows
        if sum(counts) != len(numbers):
            raise ValueError('expected tables of the lengths in the head')
        return unpack(head, np.split(numbers, np.cumsum(counts)[:-1]))

    return load_tables(file, name, parse)


def _forget(file: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(file)


def _shared(kind: type[WebDatasetDataSource], args: tuple[Any, ...], indices: list[Index]) -> WebDatasetDataSource:
    """Unpickle a source in a worker process, with the indices that its parent has read."""
    source = kind(*args)
    source._indices = indices
    return source

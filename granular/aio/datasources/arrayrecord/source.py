"""Reads ArrayRecord files, the record format of Grain and TensorFlow Datasets, by byte ranges."""

import dataclasses
import hashlib
import operator
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np

from granular._support.indexing import Ints, grouped
from granular.aio.bags.identity import FileIdentity, Identity, PinnedSource
from granular.aio.datasources.arrayrecord.index import Index, footer_offset, parse_footer
from granular.aio.datasources.arrayrecord.riegeli import BLOCK, check_hashes, read_records
from granular.aio.datasources.discovery.discover import Files, no_split
from granular.aio.datasources.indexed_files import SequenceSource, bytes_from, read_files
from granular.aio.paths.path import Path
from granular.aio.paths.pure import AnyPath
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import map_threads, offload
from granular.aio.runtime.worker_pickling import pickling_for_worker
from granular.aio.stores import Request, Store
from granular.config import MiB
from granular.errors import GranularError, InvalidArgumentError, OutOfRangeError
from granular.metrics import DECODE, counters, timed

_SLICED: Final = re.compile(r'(.*)\[(\d{1,18}):(\d{1,18})\]', re.DOTALL)
_PAGE: Final = 4 * MiB


@runtime_checkable
class FileInstruction(Protocol):
    """A range of a file's records, as in TensorFlow Datasets.

    Attributes:
      filename: the file.
      skip: records to skip at the beginning.
      take: records to read; -1 for all the following ones.
      examples_in_shard: records of the file.
    """

    filename: Any
    skip: int
    take: int
    examples_in_shard: int


FileSpec = AnyPath | FileInstruction


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Records ``start`` up to, not including, ``stop`` of a file."""

    path: Path
    start: int
    stop: int
    whole: bool = False  # True if the whole file was requested; ``stop`` is then -1 until it is known


class ChunkRead(NamedTuple):
    path: Path
    file: Index
    chunk: int
    inner: list[int]  # the records wanted from it
    targets: list[int]  # their positions in the batch


class ArrayRecordDataSource(SequenceSource[bytes], PinnedSource[bytes]):
    """Random access to the records of ArrayRecord files, on a disk or in buckets, in the order given.

    ::

        async with granular.aio.ArrayRecordDataSource('s3://bucket/train.array_record') as source:
            record = await source.get(0)
            last_ten = await source.get(slice(-10, None))
            records = await source.fetch([3, 1, 4])

    All chunks that a batch needs are read from all files concurrently, and each is decompressed once, in threads.
    Opening takes one request of 128 KiB per file, or two if it has thousands of chunks. A file given as
    ``FileInstruction`` or ``path[a:b]`` is opened at its first read.

    Files may have any ``group_size``, and may be uncompressed or compressed with brotli or zstd. In random order, each
    record costs reading and decompressing its whole group. Memory: 8 bytes per chunk, about 250 while its file is
    opened; and during a read the chunks of the batch, of which as many are decompressed at a time as there are threads.

    All sizes, counts and offsets are checked, and a file is pinned to the ETag or generation that it was opened with.
    The hashes in the files (HighwayHash) are checked, as by the format's own reader, which takes about 10 ns a byte for
    batches, and 0.4 us a byte for a single chunk. With ``verify=False``, a record that was damaged on the disk is
    returned as it is, unless it is compressed and does not decompress to its size.

    Args:
      paths: a file, a folder, a pattern, or a sequence of files: addresses or paths, optionally followed by a range
        of records (``'s3://bucket/train.array_record[100:200]'``), or objects as ``FileInstruction`` of TensorFlow
        Datasets.
      verify: False to leave the hashes of the index and of the chunks unchecked.
      split: the split to read, such as ``'train'``, of a folder or pattern that has files of several.

    Raises:
      CorruptError: if a file is not an ArrayRecord file, or is damaged.
      UnsupportedError: if its chunks are transposed, or compressed with snappy.
      OutOfRangeError: if a file has fewer records than requested.
    """

    def __init__(
        self, paths: FileSpec | Sequence[FileSpec] | Files, verify: bool = True, *, split: str | None = None
    ) -> None:
        super().__init__()
        self._verify = verify
        if isinstance(paths, Files):
            self._parts = [Part(path, 0, -1, whole=True) for path in paths.paths]
        else:
            specs = paths if isinstance(paths, Sequence) and not isinstance(paths, str) else [paths]
            if not specs:
                raise InvalidArgumentError('ArrayRecordDataSource: expected one file or more, got none')
            self._parts = [_parse_spec(spec) for spec in specs]
            if specs is not paths and self._parts[0].whole:
                paths = Files.of(self._parts[0].path, split)
        # The files of a folder or a pattern; None if files were given, or parts of them.
        self._files = paths if isinstance(paths, Files) else None
        if split is not None and self._files is None:
            raise no_split(f'{len(self._parts)} files or parts of files')
        self._file_indices: dict[Path, Index] = {}
        self._kept: list[object] = []  # what keeps the files open
        self._stops: Ints = np.zeros(0, np.int64)
        self._name = self._describe()

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        is_found = self._files is not None and (self._files.found is not None or not self._stops.size)
        return (self._files if is_found else self._parts, self._verify), {}

    def _pickled(self) -> dict[str, Any]:
        return super()._pickled() | ({'_file_indices': self._file_indices} if pickling_for_worker.get() else {})

    def __repr__(self) -> str:
        return self._name

    def _describe(self) -> str:
        # Pipeline states are compared by this text, so it is the same in every process, open or not.
        digest, parts = hashlib.sha256(), self._parts
        if self._files is not None and self._files.found is not None:
            parts = [Part(self._files.found.path, 0, -1, whole=True)]
            digest.update(self._files.found.split.encode())
        for part in parts:
            digest.update(os.fsencode(f'{part.path}[{part.start}:{-1 if part.whole else part.stop}]\n'))
        first, count = f'{parts[0].path}', len(parts)
        return f'{type(self).__name__}(files={count}, hash={digest.hexdigest()[:16]}, first={first!r})'

    async def _open(self) -> None:
        given = self._files
        if given is not None:
            self._take(await given.resolved('arrayrecord'))
        self._kept = [path.store.keep_open(path.key) for path in {part.path for part in self._parts}]
        try:
            files = await self._read_file_indices({part.path for part in self._parts if part.stop < 0})
        except GranularError:
            if given is None or given.found is not None or (found := await given.in_folder('arrayrecord')) is None:
                raise
            self._take(found)
            files = await self._read_file_indices({part.path for part in self._parts})
        self._parts = [
            dataclasses.replace(part, stop=files[part.path].records) if part.stop < 0 else part for part in self._parts
        ]
        self._stops = np.cumsum([part.stop - part.start for part in self._parts])

    def _take(self, files: Files) -> None:
        """Take the files of a folder or a pattern, once they are found."""
        if files.found is not None:
            self._files, self._parts = files, [Part(path, 0, -1, whole=True) for path in files.paths]

    async def _read_file_indices(self, paths: set[Path]) -> dict[Path, Index]:
        """Return the indices of files, including these; missing ones are read."""
        files = self._file_indices
        missing = sorted(paths - files.keys())
        if not missing:
            return files
        for store in {path.store for path in missing}:
            await store.ready()
        footers = await gather([_read_footer(path) for path in missing])
        if self._verify:  # of all files at once, which takes as long as that of one
            await offload(check_hashes, [part for footer in footers for part in footer.hashed])
        new = dict(zip(missing, await gather([offload(footer.parse) for footer in footers]), strict=True))
        for part in self._parts:
            path = part.path
            if path in new and part.stop > new[path].records:
                raise OutOfRangeError(f'{path}: expected records up to {part.stop}, got {new[path].records}')
        self._check_files(self._identity_of(new), partly=True)  # those that were opened then
        files.update(new)
        return files

    def _identity_of(self, files: Mapping[Path, Index]) -> Identity:
        stores = [part.path.store for part in self._parts]
        return Identity.of(
            stores, {str(path): FileIdentity(index.size, index.version) for path, index in files.items()}
        )

    def _opened_files(self) -> Identity:
        """Return the files that were opened, here or by the source that this one was pickled from."""
        opened = self._identity_of(self._file_indices)
        return opened if self._expected is None else self._expected.updated(opened)

    async def _identify(self) -> None:
        await self._read_file_indices({part.path for part in self._parts})

    async def _close(self) -> None:
        self._file_indices, self._kept = {}, []

    def identity(self) -> tuple[Any, ...]:
        """Return the parts in order, each by store, address, records, and version of its file, if that was opened."""
        versions = {path: FileIdentity(index.size, index.version).told for path, index in self._file_indices.items()}
        return tuple(
            (part.path.store.fingerprint, str(part.path), part.start, part.stop, versions.get(part.path))
            for part in self._parts
        )

    def _file_bytes(self, mask: Any) -> int | None:
        if self._state != 'open' or not all(part.whole for part in self._parts):  # other files are opened later
            return None
        return sum(file.size for file in self._opened_files().files.values())

    def __len__(self) -> int:
        self._check_open()
        return int(self._stops[-1])

    async def _read_one(self, position: int) -> bytes:
        """Read one record, without the planning overhead of ``_read_all``."""
        i = int(np.searchsorted(self._stops, position, side='right'))
        part = self._parts[i]
        path = part.path
        file = self._file_indices.get(path) or (await self._read_file_indices({path}))[path]
        chunk, inner = divmod(position - int(self._stops[i]) + part.stop, file.group)
        start, stop = int(file.offsets[chunk]), int(file.offsets[chunk + 1])
        counters.ranges += 1
        raw = (await path.store.read_many([Request(path.key, [start], [stop], file.version)]))[0]
        read = ChunkRead(path, file, chunk, [inner], [])
        if self._verify:
            await offload(_check, [read], [raw])
        return (await offload(_decode, read, raw))[0]

    async def _read_all(self, wanted: Ints) -> list[bytes]:
        groups = grouped(np.searchsorted(self._stops, wanted, side='right'))
        files = await self._read_file_indices({self._parts[i].path for i, _ in groups})
        requests: list[tuple[Store, Request]] = []
        reads: list[ChunkRead] = []
        for i, targets in groups:
            part = self._parts[i]
            positions = wanted[targets] - int(self._stops[i]) + part.stop
            request, part_reads = _plan(part.path, files[part.path], positions, targets)
            requests.append((part.path.store, request))
            reads += part_reads
        raw = [data for file_data in await read_files(requests) for data in file_data]
        if self._verify:
            await offload(_check, reads, raw)

        out: list[bytes] = [b''] * len(wanted)
        decode = timed(f'{DECODE}arrayrecord', lambda k: _decode(reads[k], raw[k]))
        for read, records in zip(reads, await map_threads(decode, len(reads)), strict=True):
            for target, record in zip(read.targets, records, strict=True):
                out[target] = record
        return out

    async def _reading(self) -> tuple[int, bool]:
        length = int(self._stops[-1])
        if not length:
            return 0, True
        path = self._parts[0].path
        file = (await self._read_file_indices({path}))[path]
        size = length * file.size // max(1, file.records)
        # A page contains at least one group: a smaller page would read its group again and again.
        return min(size, _PAGE * length // file.group), path.store.local


def files_of_parts(source: ArrayRecordDataSource) -> Files | None:
    """Return the files of a source; None if parts of files were given."""
    return source._files


def _plan(path: Path, file: Index, positions: Ints, targets: Ints) -> tuple[Request, list[ChunkRead]]:
    """Plan the reads of the records at some positions in a file, for these targets in the batch."""
    order = np.argsort(positions, kind='stable')
    chunks, inner = np.divmod(positions[order], file.group)
    numbers, firsts = np.unique(chunks, return_index=True)
    job = Request(path.key, file.offsets[numbers], file.offsets[numbers + 1], file.version)
    cuts = [*firsts.tolist(), len(chunks)]
    within, slots = inner.tolist(), targets[order].tolist()
    return job, [
        ChunkRead(path, file, number, within[a:b], slots[a:b])
        for number, a, b in zip(numbers.tolist(), cuts, cuts[1:], strict=False)
    ]


def _decode(read: ChunkRead, raw: bytes) -> list[bytes]:
    at, count = int(read.file.offsets[read.chunk]), read.file.count_of(read.chunk)
    return read_records(raw, at, count, read.inner, f'{read.path}, chunk {read.chunk}')


def _check(reads: Sequence[ChunkRead], raw: Sequence[bytes]) -> None:
    check_hashes(
        [
            (data, int(read.file.offsets[read.chunk]), f'{read.path}, chunk {read.chunk}')
            for read, data in zip(reads, raw, strict=True)
        ]
    )


def _parse_spec(spec: Any) -> Part:
    if isinstance(spec, Part):
        return spec
    if isinstance(spec, FileInstruction):
        path = Path(spec.filename)
        try:
            skip, take, count = map(operator.index, (spec.skip, spec.take, spec.examples_in_shard))
        except TypeError as error:
            raise InvalidArgumentError(f'{path}: skip, take and examples_in_shard: {error}') from None
        take = count - skip if take == -1 else take
        if skip < 0 or take < 0 or skip + take > count:
            raise InvalidArgumentError(f'{path}: cannot skip {skip} of {count} records and take {take}')
        return Part(path, skip, skip + take)
    path = Path(spec)
    if match := _SLICED.fullmatch(path.key):
        path, start, stop = Path.of(path.store, match[1]), int(match[2]), int(match[3])
        if stop < start:
            raise InvalidArgumentError(f'{path}: expected start <= stop, got records {start} to {stop}')
        return Part(path, start, stop)
    return Part(path, 0, -1, whole=True)


class _Footer(NamedTuple):
    """The end of a file: its footer, and the postscript behind it."""

    name: str
    footer: bytes
    begin: int
    postscript: bytes
    size: int
    version: str | None

    @property
    def hashed(self) -> list[tuple[bytes, int, str]]:
        return [
            (self.postscript, self.size - BLOCK, f'{self.name}, postscript'),
            (self.footer, self.begin, f'{self.name}, footer'),
        ]

    def parse(self) -> Index:
        return parse_footer(self.footer, self.begin, self.size, self.version, self.name)


async def _read_footer(path: Path) -> _Footer:
    name = f'{path}'
    tail = await path.store.read(path.key, -(BLOCK + path.store.config.tail))
    begin, end = footer_offset(tail.data, tail.size, name), tail.size - BLOCK
    footer = (await bytes_from(path, tail, begin))[: end - begin]
    return _Footer(name, footer, begin, tail.data[-BLOCK:], tail.size, tail.version)

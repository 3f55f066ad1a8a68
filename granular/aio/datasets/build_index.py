"""Write the index file of a sharded dataset. :mod:`granular.formats.dataset_index` describes the bytes."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from granular._support.other_names import answering
from granular.aio.bags.identity import FileIdentity
from granular.aio.datasets.columns import Columns
from granular.aio.datasets.dataset import Dataset, OpenOptions
from granular.aio.datasets.index import index_path
from granular.aio.datasets.references import References
from granular.aio.datasets.shards import check_complete, shards_in
from granular.aio.paths.file import Progress
from granular.aio.paths.path import Path
from granular.aio.paths.pure import AnyPath
from granular.aio.runtime.progress import ProgressReport
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import offload
from granular.aio.stores.base import ObjectWriter
from granular.errors import CorruptDatasetError, InvalidArgumentError, NotFoundError, UnsupportedError
from granular.formats.bit_packing import WORD, pack
from granular.formats.checksums import crc32c
from granular.formats.dataset_index import MAGIC, PAGE_ROW, ROW, Directory, Versions, dump_directory, dump_footer
from granular.formats.layout import shard_name

_TOGETHER: Final = 32  # shards that are opened at a time


@dataclasses.dataclass(frozen=True, slots=True)
class IndexSummary:
    """The result of ``build_index``.

    Attributes:
      path: the index file.
      shards: the shards that it describes.
      datapoints: the datapoints of all shards.
      records: the records whose limits it has.
      bytes: its size.
    """

    path: str
    shards: int
    datapoints: int
    records: int
    bytes: int


@answering()
async def build_index(directory: AnyPath, progress: Progress | None = None) -> IndexSummary:
    """Write the index of a sharded dataset: one file that names all of its objects and has the limits of all records.

    A reader with an index opens any number of shards with a handful of requests; without one, each shard takes five or
    more. The index is the file ``000000/.granular-index``, where granular 0.21 and 0.24 ignore it. Build it again after
    shards were added or replaced: until then, such shards are read by their own tables. Those of a copy of the dataset
    are compared with the index before they are first read, until it is built for the copy.

    Memory: the tables of 32 shards, and some 100 bytes for each bag.

    Args:
      directory: the folder of the shards.
      progress: called in a thread, with the number of shards done since the last call.

    Raises:
      NotFoundError: if there are no shards.
      CorruptDatasetError: if a shard is missing, or differs from the first one in spec or layout.
      UnsupportedError: if the store does not identify the versions of objects, as some file systems of fsspec.

    Example::

        summary = await granular.aio.build_index('s3://bucket/train')
        print(summary.shards, summary.datapoints, summary.bytes)
    """
    root = Path(directory)
    store = root.store
    await store.ready()
    numbers = await shards_in(root)
    if not numbers:
        if await (root / 'spec.json').exists():
            raise InvalidArgumentError(f'{root}: is a dataset without shards, which opens without an index')
        raise NotFoundError(f'{root}: has no shards: expected folders such as {shard_name(0)}')
    check_complete(f'{root}', numbers)
    path = index_path(root)
    file = await store.open_writer(path.key)
    report = ProgressReport(progress)
    try:
        builder = _Builder(root, file)
        for start in range(0, len(numbers), _TOGETHER):
            some = numbers[start : start + _TOGETHER]
            await builder.add(some)
            await report.add(len(some))
        size = await builder.finish()
        await file.close()
    except BaseException:
        await file.abort()
        raise
    return IndexSummary(f'{path}', len(numbers), builder.datapoints, builder.records, size)


class _Shard(NamedTuple):
    spec: int  # bytes of the file
    rows: list[tuple[int, int, int, int]]
    versions: list[str]
    kinds: list[int]


class _Builder:
    """An index file that is being written: pages first, the directory at the end."""

    def __init__(self, root: Path, file: ObjectWriter) -> None:
        self._root = root
        self._file = file
        self._first: Columns | None = None
        self._shards: list[_Shard] = []
        self._pages: list[np.ndarray[Any, Any]] = []
        self._position = 0
        self.datapoints = self.records = 0

    async def add(self, numbers: Sequence[int]) -> None:
        for shard, tables in await gather([self._read(number) for number in numbers]):
            self._shards.append(shard)
            await self._write_pages(tables)

    async def _read(self, number: int) -> tuple[_Shard, list[list[bytes]]]:
        """Return a shard, and the pages of each of its tables."""
        folder = self._root / shard_name(number)
        dataset = Dataset(folder, OpenOptions(), shard_name(number))
        await dataset.open_unchanged()
        columns = dataset.columns
        first = self._first = self._first or columns
        columns.check_spec(first.spec, first.layout, first.name)
        self.datapoints += columns.length
        references = None if columns.refs is None else await References.load(columns.refs, columns.spec)
        rows = [(bag.length, bag.version, bag.size, bag.datasize) for bag in columns.all_bags.values()]
        files = dataset.opened_files()
        versions = [_version_of(*file) for file in files]
        kinds, tables = await offload(functools.partial(_pack, columns, references))
        self.records += sum(bag.length for bag in columns.bags.values())
        dataset.columns.close()
        return _Shard(files[0][1].size, rows, versions, kinds), tables

    async def _write_pages(self, tables: list[list[bytes]]) -> None:
        """Append the pages of a shard: the first pages of all tables, then the second ones, and so on."""
        rows = [np.zeros(len(pages), PAGE_ROW) for pages in tables]
        if not self._position:
            await self._write(MAGIC)
        for number in range(max(map(len, tables), default=0)):
            for row, pages in zip(rows, tables, strict=True):
                if number < len(pages):
                    page = pages[number]
                    row[number] = self._position, len(page) // WORD, crc32c(page)
                    await self._write(page)
        self._pages += rows

    async def _write(self, data: bytes) -> None:
        await self._file.write(data)
        self._position += len(data)

    async def finish(self) -> int:
        """Append the directory; return the size of the file."""
        first = self._first
        if first is None:
            raise CorruptDatasetError(f'{self._root}: has no shards')
        kinds = None if first.refs is None else np.array([shard.kinds for shard in self._shards], np.uint8)
        rows = np.array([shard.rows for shard in self._shards], ROW)
        specs = np.array([shard.spec for shard in self._shards], np.uint32)
        versions = Versions.of(version for shard in self._shards for version in shard.versions)
        directory = Directory(first.spec, first.layout, specs, rows, versions, kinds, np.concatenate(self._pages))
        content = await offload(dump_directory, directory)
        start = self._position
        await self._write(content)
        await self._write(dump_footer(content, start))
        return self._position


def _version_of(path: Path, file: FileIdentity) -> str:
    if file.size and not file.is_proof:  # an empty file has no version
        raise UnsupportedError(f'{path}: its store gives it no version, by which an index identifies it')
    return file.version or ''


def _pack(columns: Columns, references: References | None) -> tuple[list[int], list[list[bytes]]]:
    """Return the kinds of the references of a shard, and the pages of its tables."""
    tables = [pack(bag.all_limits()) for bag in columns.bags.values()]
    kinds, more = ([], []) if references is None else references.pack(columns.spec)
    return kinds, tables + more

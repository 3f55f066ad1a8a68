"""Sources of a conversion: records from an address or an object, with random access or in order."""

import asyncio
import contextlib
import dataclasses
import hashlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from granular import formats
from granular._support.indexing import Ints
from granular._support.lazy import import_extra
from granular._support.other_names import Unindexed
from granular.aio.conversion.examples import ExampleValues
from granular.aio.conversion.file_values import JSONText, NumpyFile
from granular.aio.conversion.hugging_face import Features, HuggingFaceRows
from granular.aio.conversion.image_folder import images_of
from granular.aio.conversion.infer import common_type, type_of_value
from granular.aio.conversion.lerobot import StoredEpisodes
from granular.aio.conversion.schema import Column, column_of
from granular.aio.conversion.stored import StoredRecords, is_stored, stored_records
from granular.aio.datasets.reader import DatapointReader
from granular.aio.datasources.detect import class_of, has_shards, refuse_packed, remedy_of
from granular.aio.datasources.detect import open as open_dataset
from granular.aio.datasources.discovery.discover import Discovery, Files, in_folder, no_split, of_pattern
from granular.aio.datasources.discovery.names import ENDINGS, FORMATS, IMAGE_ENDINGS, IMAGE_SUFFIXES, kind_of
from granular.aio.datasources.lerobot import INFO, LeRobotDataSource
from granular.aio.datasources.megatron.source import index_beside
from granular.aio.datasources.parquet.source import (
    ParquetDataSource,
    arrow_types,
    columns_with_nulls,
    may_have_nulls,
    partitions_of_files,
)
from granular.aio.datasources.tfrecord.source import TFRecordDataSource
from granular.aio.datasources.tfrecord.stream import TFRecordIterDataset
from granular.aio.datasources.webdataset.members import type_of_members
from granular.aio.datasources.webdataset.source import KEY, fields_with_gaps
from granular.aio.paths.copy import in_one_store, is_within
from granular.aio.paths.path import Path, has_optional, is_pattern
from granular.aio.paths.pure import PurePath
from granular.aio.pipeline.execution.prefetch import END
from granular.aio.pipeline.nodes import adapters
from granular.aio.pipeline.nodes.elements import Map
from granular.aio.pipeline.nodes.indices import LONGEST
from granular.aio.pipeline.nodes.source import Source, nbytes
from granular.aio.runtime.lifecycle import AsyncResource, ensure_open
from granular.aio.runtime.tasks import gather, outcome, start_task
from granular.aio.runtime.threads import offload
from granular.aio.runtime.user_functions import await_user
from granular.config import MiB
from granular.errors import InvalidArgumentError, NotFoundError, UnsupportedError

CONVERTED: Final = (*FORMATS, 'images', 'huggingface', 'lerobot', 'granular')

_ENDINGS: Final = (*ENDINGS, '.arrow')
_CHUNK: Final = 4 * MiB
_SAMPLE: Final = 64 * MiB  # limit for the bytes of the sample
_EXAMPLES: Final = 64  # records that determine which features have a single value


@dataclasses.dataclass(eq=False)
class RecordSource:
    name: str  # its address, or the type of the object
    format: str  # ``'source'`` and ``'iterable'`` for objects
    source: Source | None = None  # the records, if they have random access
    items: Any = None  # the records, if they can only be read in order
    size: int | None = None  # the bytes of its files, if known; detects that the source has changed
    files: str | None = None  # a digest of the names and sizes of its files, in order, if known; detects the same
    opened: AsyncResource | None = None  # the reader to close with it
    # Those that it owns, as a dataset or images at any depth, so that nothing is written into them.
    folders: Sequence[Path] = ()
    stored: DatapointReader[Any] | None = None  # the reader of a dataset, whose records are copied as they are
    values: Source | None = None  # its values, if they are what the records are unless these fit
    images: Sequence[str] = ()  # fields that are images by the names of their files
    columns: Mapping[str, Column] = dataclasses.field(default_factory=dict)  # what the schema tells of fields
    sampled: Sequence[int] = ()  # the indices of the sampled records
    _sampled: list[Any] = dataclasses.field(default_factory=list)  # sampled records, that ``stream`` yields again
    _pull: Callable[[int], Coroutine[Any, Any, list[Any]]] | None = None

    def __len__(self) -> int:
        return 0 if self.source is None else len(self.source)

    async def aclose(self) -> None:
        if self.opened is not None:
            await self.opened.aclose()

    async def sample(self, count: int) -> list[Any]:
        """Return some records, about 64 MiB at most: spread over a source with random access, else the first ones."""
        if self.source is not None:
            indices = _spread(count, len(self))
            out: list[Any] = []
            for chunk in np.array_split(indices, -(-len(indices) // 16) or 1):
                out += await self.source.fetch(chunk) if len(chunk) and nbytes(out) < _SAMPLE else []
            self.sampled = indices.tolist()[: len(out)]
            return out
        async with contextlib.aclosing(self.stream(count)) as stream:
            self._sampled = await anext(stream, [])
        self.sampled = range(len(self._sampled))
        return self._sampled

    async def stream(self, chunk: int) -> AsyncGenerator[list[Any], None]:
        """Yield lists of at most ``chunk`` records of a source without random access, sampled records included."""
        sampled, self._sampled = self._sampled, []
        for start in range(0, len(sampled), chunk):
            yield sampled[start : start + chunk]
        if self._pull is None:
            self._pull = await _pull_from(self.items)
        while records := await self._pull(chunk):
            yield records


def _spread(count: int, length: int) -> Ints:
    """Return at most so many indices, spread over a length."""
    return np.unique(np.linspace(0, length - 1, min(count, length)).astype(np.int64))


class ReadAhead:
    """A stream of records that is read ahead, with lists of any requested length."""

    def __init__(self, stream: AsyncGenerator[list[Any], None]) -> None:
        self._stream = stream
        self._records: list[Any] = []
        self._reading: asyncio.Task[list[Any]] | None = None

    async def _read(self) -> list[Any]:
        return await anext(self._stream, [])

    async def more(self) -> bool:
        if not self._records:
            self._records = await outcome(self._reading or self._read())
            self._reading = start_task(self._read()) if self._records else None
        return bool(self._records)

    async def take(self, count: int) -> list[Any]:
        """Return the next records, at most ``count``; none at the end, or if ``count`` is less than 1."""
        if count < 1 or not await self.more():
            return []
        out, self._records = self._records[:count], self._records[count:]
        return out

    async def aclose(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await self._stream.aclose()


async def _pull_from(items: Any) -> Callable[[int], Coroutine[Any, Any, list[Any]]]:
    """Return a function that returns the next items: at most ``count``, or about 4 MiB; none at the end."""
    if hasattr(items, '__aiter__'):
        async_iterator = aiter(items)
        return lambda count: await_user(_take_async(async_iterator, count))
    iterator = await offload(iter, items)
    return lambda count: offload(_take, iterator, count)


async def _take_async(iterator: AsyncIterator[Any], count: int) -> list[Any]:
    out: list[Any] = []
    size = 0
    while len(out) < count and size < _CHUNK and (item := await anext(iterator, END)) is not END:
        out.append(item)
        size += nbytes(item)
    return out


def _take(iterator: Iterator[Any], count: int) -> list[Any]:
    out: list[Any] = []
    size = 0
    while len(out) < count and size < _CHUNK and (item := next(iterator, END)) is not END:
        out.append(item)
        size += nbytes(item)
    return out


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """Options for the files of a source: their format and split, and the columns in the names of folders."""

    format: str | None = None
    split: str | None = None
    hive: bool = True
    warns: bool = True  # of files that are left out
    values: bool = False  # True to read values, not stored records, of a pipeline that only chooses datapoints


async def open_source(source: Any, reading: Reading, target: Path | None = None) -> RecordSource:
    """Open the source that the user passed, by address or as an object; refuse a target within its folder."""
    if reading.format is not None and reading.format not in CONVERTED:
        raise InvalidArgumentError(f'format: expected one of {", ".join(CONVERTED)}, got {reading.format!r}')
    opened = await _open(source, reading)
    for folder in opened.folders:
        if target is not None and in_one_store(target, folder) and await is_within(target, folder):
            await opened.aclose()
            raise InvalidArgumentError(f'{folder}: cannot be converted into itself, to {target}')
    return opened


async def _open(source: Any, reading: Reading) -> RecordSource:
    if isinstance(source, str | os.PathLike | PurePath):
        return await _open_address(Path(source), reading)
    if reading.split is not None:
        raise no_split(f'a {type(source).__name__}')
    if isinstance(source, list | tuple) and source and all(isinstance(path, str | os.PathLike) for path in source):
        paths = [Path(path) for path in source]
        return await _open_list(paths, f'{paths[0]} and {len(paths) - 1} more', reading)
    return await _open_object(source, reading)


async def _open_object(source: Any, reading: Reading) -> RecordSource:
    kind = type(source)
    name = kind.__qualname__
    if kind.__module__.partition('.')[0] == 'datasets':
        return _hugging_face(source, name)
    if isinstance(source, dict | bytes):
        raise InvalidArgumentError(f'{kind.__name__} cannot be converted: expected records, such as a list of dicts')
    is_source = isinstance(source, Source) or isinstance(getattr(source, 'node', None), Source)
    is_indexed = hasattr(source, '__len__') and hasattr(source, '__getitem__') and not isinstance(source, Unindexed)
    if is_source or is_indexed or hasattr(source, 'fetch'):
        await ensure_open(source)
        if is_stored(reader := getattr(source, 'aio', source)):
            return _of_dataset(reader)
        if isinstance(reader, LeRobotDataSource):
            return await _of_episodes(reader)
        node = adapters.convert(source)
        if node.endless or len(node) > LONGEST:
            raise InvalidArgumentError(f'{name}: is endless: limit it, with a length or a slice')
        if node.sparse:
            return RecordSource(name, 'iterable', items=_filtered(node))
        if not reading.values and (chosen := await stored_records(node)) is not None:
            records, readers = chosen
            folders = [reader.directory for reader in readers]
            return RecordSource(name, 'source', records, folders=folders, stored=readers[0], values=node)
        return RecordSource(name, 'source', node)
    if isinstance(source, Iterable) or hasattr(source, '__aiter__'):
        return RecordSource(name, 'iterable', items=source)
    raise InvalidArgumentError(f'{name} cannot be converted: expected an address, a source or an iterable')


async def _filtered(node: Source) -> AsyncIterator[Any]:
    for start in range(0, len(node), 64):
        for record in await node.fetch(np.arange(start, min(start + 64, len(node)))):
            if record is not None:
                yield record


def _hugging_face(dataset: Any, name: str) -> RecordSource:
    datasets = import_extra('datasets', 'huggingface')
    if isinstance(dataset, dict):
        raise InvalidArgumentError(f'{name}: has splits {sorted(dataset)}: choose one of them')
    features = Features(dataset, name)
    if isinstance(dataset, datasets.IterableDataset):
        return RecordSource(name, 'huggingface', items=features.stream())
    source = adapters.convert(HuggingFaceRows(features))
    return RecordSource(name, 'huggingface', source, columns=features.columns)


def _of_dataset(reader: DatapointReader[Any], opened: AsyncResource | None = None) -> RecordSource:
    node, folder = adapters.convert(StoredRecords(reader)), reader.directory
    return RecordSource(f'{folder}', 'granular', node, size=reader.size, opened=opened, folders=[folder], stored=reader)


async def _of_episodes(source: LeRobotDataSource[Any], opened: AsyncResource | None = None) -> RecordSource:
    episodes, folder = StoredEpisodes(source), source.folder
    files = sorted([(entry.key, entry.size) async for entry in folder.store.scan_tree(folder.key) if not entry.is_dir])
    found = RecordSource(f'{folder}', 'lerobot', adapters.convert(episodes), opened=opened, folders=[folder])
    found.columns, found.files = episodes.columns, _digest_of(files)
    found.size = sum(size or 0 for _, size in files)
    return found


async def _open_address(path: Path, reading: Reading) -> RecordSource:
    await path.store.ready()
    if await is_pattern(path):
        found = await of_pattern(path, reading.format or '', reading.split)
        if not found.entries and any(map(kind_of, found.left_out)):
            raise found.nothing()
        if not found.entries or found.format == 'images':
            raise _unknown([*found.paths, *(found.base / name for name in found.left_out)])
        return await _open_found(found, reading)
    stat = await path.store.find(path.key)
    is_file = stat is not None and not stat.is_dir
    if (is_file or stat is None) and not kind_of(path.name) and (index := await index_beside(path)) is not None:
        path, is_file = index, True
    if is_file or not (await path.stat()).is_dir:
        if reading.split is not None:
            raise no_split(f'{path}')
        return await _open_list([path], f'{path}', reading)
    return await _open_folder(path, reading)


async def _open_folder(folder: Path, reading: Reading) -> RecordSource:
    entries = [entry async for entry in folder.store.scan(folder.key)]
    kind, names = reading.format, {entry.name for entry in entries}
    if kind in (None, 'huggingface') and 'dataset_dict.json' in names:
        raise NotFoundError(f'{folder}: {await remedy_of(folder, list(names))}')
    if kind == 'huggingface' or (kind is None and 'state.json' in names):
        return await _open_saved(folder)
    if kind == 'granular' or (kind is None and ('spec.json' in names or await has_shards(folder, entries))):
        if reading.split is not None:
            raise no_split(f'the dataset {folder}')
        reader = await open_dataset(folder, None)
        return _of_dataset(reader, reader)
    if kind == 'lerobot' or (kind is None and 'meta' in names and await has_optional(folder / INFO)):
        if reading.split is not None:
            raise no_split(f'the dataset {folder}')
        source = LeRobotDataSource[Any](folder)
        await ensure_open(source)
        return await _of_episodes(source, source)
    is_data = any(_kind_of(entry.name) for entry in entries)
    if kind is None and not is_data and (remedy := await remedy_of(folder, sorted(names))):
        raise NotFoundError(f'{folder}: {remedy}')
    found = await in_folder(folder, kind or '', reading.split)
    if found.entries:
        return await _open_found(found, reading)
    if kind or any(map(kind_of, found.left_out)):
        raise found.nothing()
    folders = sorted(entry.name for entry in entries if entry.is_dir)
    hint = f'convert one of the folders {folders!r:.200}, or ' if folders else ''
    raise NotFoundError(
        f'{folder}: has no images in folders by class ({", ".join(IMAGE_ENDINGS)}), nor files of '
        f'{", ".join(_ENDINGS)}: unknown format: {hint}read other files in a generator of dicts, as in '
        f'granular.convert(records(), ...)'
    )


async def _open_found(found: Discovery, reading: Reading) -> RecordSource:
    if reading.warns:
        found.warn()
    size = sum(entry.size for entry in found.entries)
    if found.format == 'images':
        images = await offload(images_of, found)
        node, folders = adapters.convert(images), [found.path]
        opened = RecordSource(found.name, 'images', node, size=size, folders=folders, images=images.fields)
        opened.columns = images.columns
        opened.files = await offload(lambda: _digest_of((entry.key, entry.size) for entry in found.entries))
        return opened
    opened = await _open_format(Files.from_discovery(found), found.format, reading)
    opened.size = size
    opened.files = _digest_of((f'{path}', entry.size) for path, entry in zip(found.paths, found.entries, strict=True))
    return opened


async def _open_list(paths: Sequence[Path], name: str, reading: Reading) -> RecordSource:
    sizes = [stat.size for stat in await gather([path.stat() for path in paths])]
    kind = reading.format or _format_of(paths)
    opened = await _open_format(dataclasses.replace(Files.of(list(paths)), name=name), kind, reading)
    opened.size = sum(sizes)
    opened.files = _digest_of(zip(map(str, paths), sizes, strict=True))
    return opened


def _kind_of(name: str) -> str:
    return kind if (kind := kind_of(name)) != 'images' else ''


def _format_of(paths: Sequence[Path]) -> str:
    kinds = {_kind_of(path.name) for path in paths}
    if len(kinds) > 1 and '' not in kinds:
        raise InvalidArgumentError(
            f'{paths[0]} and {len(paths) - 1} more: expected files of one format, got {", ".join(sorted(kinds))}'
        )
    if len(kinds) != 1 or '' in kinds:
        raise _unknown(paths)
    return kinds.pop()


def _unknown(paths: Sequence[Path]) -> InvalidArgumentError:
    refuse_packed(paths)
    return InvalidArgumentError(
        f'{next(path for path in paths if not _kind_of(path.name))}: unknown format: expected a name that ends in '
        f'{", ".join(_ENDINGS)}, or a folder; or pass format; or read it in a generator of dicts, as in '
        f'granular.convert(records(), ...)'
    )


def _digest_of(files: Iterable[tuple[str, int]]) -> str:
    """Return a digest of the names and sizes of files, in their order."""
    return hashlib.sha256(repr(list(files)).encode()).hexdigest()[:16]


async def _open_format(files: Files, format: str, reading: Reading) -> RecordSource:
    if format == 'huggingface':
        module = import_extra('datasets', 'huggingface')
        local = [_local(path) for path in files.paths]
        read = await offload(lambda: [module.Dataset.from_file(file) for file in local])
        return _hugging_face(module.concatenate_datasets(read), files.name)
    if format not in FORMATS:
        raise InvalidArgumentError(f'{files.name}: expected a folder for format {format!r}')
    if format == 'tfrecord':
        return await _open_examples(files)
    options: dict[str, Any] = {}
    if format == 'webdataset':
        options['decoders'] = _MEMBERS
    elif format == 'parquet':
        options['hive'] = reading.hive
    opened: Any = class_of(format)(files, **options)
    await ensure_open(opened)
    images = IMAGE_SUFFIXES if format == 'webdataset' else ()
    source = RecordSource(files.name, format, adapters.convert(opened), opened=opened, images=images)
    if format == 'parquet':
        source.columns = await _columns_of_parquet(opened)
    elif format == 'webdataset':
        gaps = fields_with_gaps(opened)
        names = [name for name in opened.fields if name != KEY]
        source.columns = {name: Column(type_of_members(name), name in gaps) for name in names}
    return source


async def _columns_of_parquet(source: ParquetDataSource[Any]) -> dict[str, Column]:
    missing = await columns_with_nulls(source)
    columns = {
        name: column_of(types, name in missing, has_nulls)
        for (name, types), has_nulls in zip(arrow_types(source).items(), may_have_nulls(source), strict=True)
    }
    for name, values in partitions_of_files(source).items():
        columns[name] = Column(common_type(set(map(type_of_value, values))), nullable=False)
    return columns


async def _open_examples(files: Files) -> RecordSource:
    """Open TFRecord files of Examples. Compressed ones are read in order."""
    opened, name = TFRecordDataSource(files), files.name
    try:
        await ensure_open(opened)
    except UnsupportedError:
        stream = TFRecordIterDataset(files)
        values = await offload(ExampleValues, [record async for record in stream.limit(_EXAMPLES)])
        return RecordSource(name, 'tfrecord', items=stream.map(values))
    values = await offload(ExampleValues, await opened.fetch(_spread(_EXAMPLES, len(opened))))
    return RecordSource(name, 'tfrecord', Map(adapters.convert(opened), values), opened=opened)


def _json(data: bytes) -> JSONText:
    return JSONText(formats.decode_utf8(data))


# What decodes members of tar files: as for a reader, but files stay what they are.
_MEMBERS: Final[Mapping[str, Any]] = {
    **{kind: formats.decoders[kind] for kind in ('utf8', 'int', 'msgpack')}, 'json': _json, 'npy': NumpyFile,
}  # fmt: skip


async def _open_saved(folder: Path) -> RecordSource:
    module = import_extra('datasets', 'huggingface')
    dataset = await offload(module.load_from_disk, _local(folder))
    return _hugging_face(dataset, f'{folder}')


def _local(path: Path) -> str:
    if not path.store.local:
        raise UnsupportedError(f'{path}: Hugging Face datasets are read from a local disk: use copy_to_local first')
    return path.key

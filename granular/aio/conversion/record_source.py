"""Sources of a conversion: records from an address or an object, with random access or in order."""

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import pathlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, get_args

import numpy as np

from granular import formats
from granular._lazy import import_extra
from granular._other_names import Unindexed
from granular._words import logger
from granular.aio.conversion.image_folder import IMAGE_SUFFIXES, ImageFolder
from granular.aio.conversion.infer import JSONText, NumpyFile
from granular.aio.conversion.stored import StoredRecords, is_stored
from granular.aio.datasets.reader import DatapointReader
from granular.aio.datasets.shards import shards_of
from granular.aio.datasources.arguments import refuse_gaps
from granular.aio.datasources.detect import CLASSES, ENDINGS, format_of, refuse_packed, remedy_of
from granular.aio.datasources.detect import open as open_dataset
from granular.aio.datasources.tfrecord.source import TFRecordDataSource
from granular.aio.datasources.tfrecord.stream import TFRecordIterDataset
from granular.aio.execution.prefetch import END
from granular.aio.paths.copy import in_one_store, is_within
from granular.aio.paths.path import Path, is_pattern, matches_of
from granular.aio.paths.pure import PurePath
from granular.aio.pipeline.nodes import adapters
from granular.aio.pipeline.nodes.elements import Map
from granular.aio.pipeline.nodes.source import Source, nbytes
from granular.aio.runtime.lifecycle import AsyncResource, ensure_open
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.tasks import gather, outcome, start_task
from granular.aio.runtime.threads import offload
from granular.aio.runtime.user_functions import await_user
from granular.config import MiB
from granular.errors import DatapointError, InvalidArgumentError, NotFoundError, UnsupportedError
from granular.indexing import Ints

Format = Literal['parquet', 'arrayrecord', 'tfrecord', 'webdataset', 'images', 'huggingface', 'granular']
FORMATS: Final[tuple[str, ...]] = get_args(Format)

_LONGEST: Final = 1 << 48  # what is longer is made of parts or batches of a source that repeats without end
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
    folder: Path | None = None  # that it owns, as a dataset or images at any depth, so that nothing is written into it
    stored: DatapointReader[Any] | None = None  # the reader of a dataset, whose records are copied as they are
    images: Sequence[str] = ()  # fields that are images by the names of their files
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


async def open_source(source: Any, format: Format | None, target: Path | None = None) -> RecordSource:
    """Open the source that the user passed, by address or as an object; refuse a target within its folder."""
    await ensure_event_loop()
    if format is not None and format not in FORMATS:
        raise InvalidArgumentError(f'format: expected one of {", ".join(FORMATS)}, got {format!r}')
    opened = await _open(source, format)
    folder = opened.folder
    if folder is not None and target is not None and in_one_store(target, folder) and await is_within(target, folder):
        await opened.aclose()
        raise InvalidArgumentError(f'{folder}: cannot be converted into itself, to {target}')
    return opened


async def _open(source: Any, format: Format | None) -> RecordSource:
    if isinstance(source, str | os.PathLike | PurePath):
        return await _open_address(Path(source), format)
    if isinstance(source, list | tuple) and source and all(isinstance(path, str | os.PathLike) for path in source):
        paths = [Path(path) for path in source]
        return await _open_files(paths, format or _format_of(paths), f'{paths[0]} and {len(paths) - 1} more')
    return await _open_object(source)


async def _open_object(source: Any) -> RecordSource:
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
        node = adapters.convert(source)
        if node.endless or len(node) > _LONGEST:
            raise InvalidArgumentError(f'{name}: is endless: limit it, with a length or a slice')
        if node.sparse:
            return RecordSource(name, 'iterable', items=_filtered(node))
        return RecordSource(name, 'source', node)
    if isinstance(source, Iterable) or hasattr(source, '__aiter__'):
        return RecordSource(name, 'iterable', items=source)
    raise InvalidArgumentError(f'{name} cannot be converted: expected an address, a source or an iterable')


async def _filtered(node: Source) -> AsyncIterator[Any]:
    for start in range(0, len(node), 64):
        for record in await node.fetch(np.arange(start, min(start + 64, len(node)))):
            if record is not None:
                yield record


class _HuggingFace:
    """A map-style Hugging Face dataset that returns the files of its images and sounds undecoded."""

    def __init__(self, dataset: Any, files: Sequence[str]) -> None:
        self._dataset, self._files = dataset, files

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [_with_files(row, self._files) for row in self._dataset.__getitems__(indices)]


def _hugging_face(dataset: Any, name: str) -> RecordSource:
    datasets = import_extra('datasets', 'huggingface')
    if isinstance(dataset, dict):
        raise InvalidArgumentError(f'{name}: has splits {sorted(dataset)}: choose one of them')
    features = dataset.features or {}
    files = []
    for field, feature in features.items():
        if isinstance(feature, datasets.Image | datasets.Audio):
            dataset = dataset.cast_column(field, type(feature)(decode=False))
            files.append(field)
        elif isinstance(feature, datasets.ClassLabel):
            shown = f'{", ".join(feature.names):.1000}'
            logger.warning('%s: %r becomes the numbers of its classes, without their names: %s', name, field, shown)
    if isinstance(dataset, datasets.IterableDataset):
        return RecordSource(name, 'huggingface', items=(_with_files(row, files) for row in dataset))
    return RecordSource(name, 'huggingface', adapters.convert(_HuggingFace(dataset, files)))


def _with_files(row: dict[str, Any], files: Sequence[str]) -> dict[str, Any]:
    for field in files:
        if (value := row[field]) is not None:
            row[field] = pathlib.Path(value['path']).read_bytes() if value['bytes'] is None else value['bytes']
    return row


def _of_dataset(reader: DatapointReader[Any], opened: AsyncResource | None = None) -> RecordSource:
    node = adapters.convert(StoredRecords(reader))
    return RecordSource(
        f'{reader.directory}', 'granular', node, size=reader.size, opened=opened, folder=reader.directory, stored=reader
    )


async def _open_address(path: Path, format: Format | None) -> RecordSource:
    if await is_pattern(path):
        paths = await matches_of(path)
        refuse_gaps(paths, f'{path}', path.name)
        return await _open_files(paths, format or _format_of(paths), f'{path}')
    if not (await path.stat()).is_dir:
        return await _open_files([path], format or _format_of([path]), f'{path}')
    return await _open_folder(path, format)


async def _open_folder(folder: Path, format: Format | None) -> RecordSource:
    entries = [entry async for entry in folder.store.scan(folder.key)]
    names = {entry.name for entry in entries}
    if format in (None, 'huggingface') and 'dataset_dict.json' in names:
        raise NotFoundError(f'{folder}: {await remedy_of(folder, list(names))}')
    if format == 'huggingface' or (format is None and 'state.json' in names):
        return await _open_saved(folder)
    if format == 'granular' or (format is None and ('spec.json' in names or shards_of(entries))):
        reader = await open_dataset(folder, None)
        return _of_dataset(reader, reader)
    files: dict[str, list[Path]] = {kind: [] for kind in FORMATS}
    for entry in entries:
        if not entry.is_dir and (kind := _kind_of(entry.key)):
            files[kind].append(Path.of(folder.store, entry.key))
    kinds = [format] if format else [kind for kind, paths in files.items() if paths]
    if len(kinds) > 1:
        raise InvalidArgumentError(f'{folder}: has files of {", ".join(map(str, kinds))}: pass format')
    if kinds and kinds[0] != 'images':
        if not files[kinds[0]]:
            raise NotFoundError(f'{folder}: has no files of {kinds[0]}')
        refuse_gaps(files[kinds[0]], f'{folder}')
        return await _open_files(sorted(files[kinds[0]]), kinds[0], f'{folder}')
    try:
        images = await ImageFolder.listed(folder)
    except NotFoundError as error:
        if format:
            raise
        if remedy := await remedy_of(folder, sorted(names)):
            raise NotFoundError(f'{folder}: {remedy}') from None
        folders = sorted(entry.name for entry in entries if entry.is_dir)
        hint = f'convert one of the folders {folders!r:.200}, or ' if folders else ''
        raise NotFoundError(
            f'{error}, nor files of {", ".join(_ENDINGS)}: unknown format: {hint}read other files in a generator of '
            f'dicts, as in granular.convert(records(), ...)'
        ) from None
    node = adapters.convert(images)
    opened = RecordSource(f'{folder}', 'images', node, size=images.size, folder=folder, images=('image',))
    opened.files = await offload(lambda: _digest_of(images.files()))
    return opened


def _kind_of(name: str) -> str:
    return format_of(name) or ('huggingface' if name.endswith('.arrow') else '')


def _format_of(paths: Sequence[Path]) -> str:
    kinds = {_kind_of(path.name) for path in paths}
    if len(kinds) > 1 and '' not in kinds:
        raise InvalidArgumentError(
            f'{paths[0]} and {len(paths) - 1} more: expected files of one format, got {", ".join(sorted(kinds))}'
        )
    refuse_packed(paths)
    if len(kinds) != 1 or '' in kinds:
        raise InvalidArgumentError(
            f'{next(path for path in paths if not _kind_of(path.name))}: unknown format: expected a name that ends in '
            f'{", ".join(_ENDINGS)}, or a folder; or pass format; or read it in a generator of dicts, as in '
            f'granular.convert(records(), ...)'
        )
    return kinds.pop()


async def _open_files(paths: Sequence[Path], format: str, name: str) -> RecordSource:
    sizes = [stat.size for stat in await gather([path.stat() for path in paths])]
    opened = await _open_format(paths, format, name)
    opened.size = sum(sizes)
    opened.files = _digest_of(zip(map(str, paths), sizes, strict=True))
    return opened


def _digest_of(files: Iterable[tuple[str, int]]) -> str:
    """Return a digest of the names and sizes of files, in their order."""
    return hashlib.sha256(repr(list(files)).encode()).hexdigest()[:16]


async def _open_format(paths: Sequence[Path], format: str, name: str) -> RecordSource:
    if format == 'huggingface':
        module = import_extra('datasets', 'huggingface')
        files = [_local(path) for path in paths]
        read = await offload(lambda: [module.Dataset.from_file(file) for file in files])
        return RecordSource(name, format, _hugging_face(module.concatenate_datasets(read), name).source)
    if format not in CLASSES:
        raise InvalidArgumentError(f'{name}: expected a folder for format {format!r}')
    if format == 'tfrecord':
        return await _open_examples(paths, name)
    options: dict[str, Any] = {'decoders': _TEXTS} if format == 'webdataset' else {}
    opened: Any = CLASSES[format](paths, **options)
    await ensure_open(opened)
    images = IMAGE_SUFFIXES if format == 'webdataset' else ()
    return RecordSource(name, format, adapters.convert(opened), opened=opened, images=images)


async def _open_examples(paths: Sequence[Path], name: str) -> RecordSource:
    """Open TFRecord files of Examples. Compressed ones are read in order."""
    opened = TFRecordDataSource(paths)
    try:
        await ensure_open(opened)
    except UnsupportedError:
        stream = TFRecordIterDataset(paths)
        values = await offload(ExampleValues, [record async for record in stream.limit(_EXAMPLES)])
        return RecordSource(name, 'tfrecord', items=stream.map(values))
    values = await offload(ExampleValues, await opened.fetch(_spread(_EXAMPLES, len(opened))))
    return RecordSource(name, 'tfrecord', Map(adapters.convert(opened), values), opened=opened)


class ExampleValues:
    """Returns the features of a ``tf.train.Example``: without a list if they have one value in all sampled records."""

    def __init__(self, sample: Sequence[bytes]) -> None:
        counts: dict[str, set[int]] = {}
        for record in sample:
            for feature, value in formats.decode_example(record).items():
                counts.setdefault(feature, set()).add(0 if value is None else len(value))
        self._single = {feature for feature, numbers in counts.items() if numbers == {1}}

    def __call__(self, record: bytes) -> dict[str, Any]:
        return {feature: self._value(feature, value) for feature, value in formats.decode_example(record).items()}

    def _value(self, feature: str, value: Any) -> Any:
        if feature not in self._single:
            return value
        if value is None or len(value) != 1:
            raise DatapointError(
                f'feature {feature!r}: expected one value, as in all sampled records, got '
                f'{0 if value is None else len(value)}: convert a MapDataset with a map of your own'
            )
        return value[0].item() if isinstance(value, np.ndarray) else value[0]


def _class(data: bytes) -> int | str:
    text = formats.decode_utf8(data).strip()
    return int(text) if re.fullmatch(r'-?[0-9]{1,38}', text) else text


def _json(data: bytes) -> JSONText:
    return JSONText(formats.decode_utf8(data))


# The decoders of files in WebDataset tars that are not bytes, by suffix.
_TEXTS: Final = {
    'cls': _class, 'cls2': _class, 'index': _class, 'txt': formats.decode_utf8, 'text': formats.decode_utf8,
    'json': _json, 'npy': NumpyFile,
}  # fmt: skip


async def _open_saved(folder: Path) -> RecordSource:
    module = import_extra('datasets', 'huggingface')
    dataset = await offload(module.load_from_disk, _local(folder))
    return RecordSource(f'{folder}', 'huggingface', _hugging_face(dataset, f'{folder}').source)


def _local(path: Path) -> str:
    if not path.store.local:
        raise UnsupportedError(f'{path}: Hugging Face datasets are read from a local disk: use copy_to_local first')
    return path.key

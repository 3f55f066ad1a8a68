"""Find out the format of files, and open their reader."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from granular import formats
from granular._other_names import answering
from granular._words import counted
from granular.aio.bags.reader import BagReader
from granular.aio.datasets.index import index_path
from granular.aio.datasets.reader import DatasetReader
from granular.aio.datasets.sharded_reader import ShardedDatasetReader
from granular.aio.datasets.shards import describe_unfinished, shards_of
from granular.aio.datasources.arguments import Paths, refuse_gaps
from granular.aio.datasources.arrayrecord.source import ArrayRecordDataSource
from granular.aio.datasources.parquet.source import ParquetDataSource
from granular.aio.datasources.tfrecord.source import TFRecordDataSource
from granular.aio.datasources.webdataset.source import WebDatasetDataSource
from granular.aio.paths.path import Path, is_pattern, matches_of
from granular.aio.runtime.lifecycle import ensure_open
from granular.aio.runtime.tasks import gather
from granular.errors import InvalidArgumentError, NotFoundError
from granular.formats.base import Decoder

Opened = DatasetReader | ShardedDatasetReader | Any
"""A reader of a dataset; Any stands for those of other files, so that programs use a dataset without a cast."""

FORMATS: Final[Mapping[str, tuple[Any, ...]]] = {
    'parquet': (ParquetDataSource, '.parquet', '.pq'),
    'arrayrecord': (ArrayRecordDataSource, '.arrayrecord', '.array_record'),
    'webdataset': (WebDatasetDataSource, '.tar'),
    'tfrecord': (TFRecordDataSource, '.tfrecord', '.tfrecords', '.tfrecord.gz', '.tfrecord.zz'),
}
"""The formats of files: the reader of each, and the ends of the names of its files."""

CLASSES: Final = {name: reader for name, (reader, *_) in FORMATS.items()}
ENDINGS: Final[Mapping[str, str]] = {ending: name for name, (_, *endings) in FORMATS.items() for ending in endings}

_PACKED: Final = ('.tar.gz', '.tgz', '.tar.zst', '.tar.xz', '.tar.bz2')
_UNPACK: Final = (
    'a compressed tar file has no random access: decompress it to .tar (gunzip), or unpack it with `granular '
    'copy-to-local`'
)
_SHARDED: Final = re.compile(r'-\d+-of-\d+$')  # after the suffix, as in file names of tfds and Beam


def format_of(name: str) -> str:
    """Return the format of a file by the end of its name, a key of ``CLASSES``; empty if it is unknown."""
    base = _SHARDED.sub('', name)
    return next((ENDINGS[ending] for ending in ENDINGS if base.endswith(ending)), '')


@answering()
async def open(  # noqa: A001
    path: Paths, decoders: Mapping[str, Decoder | None] | None = formats.decoders, *, fs: Any = None, **options: Any
) -> Opened:
    """Find out what is at a path, and return its reader, opened.

    ::

        async with await granular.aio.open('s3://bucket/train') as reader:
            datapoints = await reader.fetch([3, 1, 41])

    ======================================================  =======================
    a folder with a ``spec.json``                           `DatasetReader`
    a folder with shards                                    `ShardedDatasetReader`
    ``*.bag``                                               `BagReader`
    ``*.array_record``, ``*.arrayrecord``                   `ArrayRecordDataSource`
    ``*.parquet``, ``*.pq``                                 `ParquetDataSource`
    ``*.tar``                                               `WebDatasetDataSource`
    ``*.tfrecord``, ``*.tfrecords``                         `TFRecordDataSource`
    ======================================================  =======================

    The last four are also opened from a folder that has files of one of these formats, from a pattern such as
    ``s3://bucket/train-*.tar``, ``train-{000..127}.tar`` or ``{a,b}.tar``, and from a sequence of files; several files
    are sorted by name, unless they are given as a sequence. What exists under a name such as ``x[1].tar`` is opened;
    only otherwise is the name a pattern. Of names such as ``train.tfrecord-00000-of-00010`` in a folder or pattern, all
    ten must exist.

    Args:
      path: a file, a folder, a pattern or a sequence of files.
      decoders: the decoder of each type, or for tar files of each suffix; None for raw bytes. Records of bags,
        ArrayRecord and TFRecord files are always bytes, rows of Parquet files always values.
      fs: the file system of fsspec that the path belongs to, as for :class:`granular.Path`.
      options: further arguments of the reader, such as ``cache_keys``, ``verify`` or ``columns``.

    Raises:
      NotFoundError: if there is nothing at the path, or nothing that has a reader, or files of several are missing.
      InvalidArgumentError: if there are files of several formats, or the reader does not take an option.
    """
    if isinstance(path, list | tuple):
        files = [Path(file, fs=fs) for file in path]
        return await _open_files(files, counted(len(files), 'file'), decoders, options)
    folder = Path(path, fs=fs)
    await folder.store.ready()
    if await is_pattern(folder):
        files = await matches_of(folder)
        refuse_gaps(files, f'{folder}', folder.name)
        return await _open_files(files, f'{folder}', decoders, options)
    if not format_of(folder.name) and folder.suffix != '.bag':
        # A server that lists no folders can still have a dataset.
        # A listing of ten thousand shards takes ten requests, which an index saves.
        has_spec, has_index = await gather([(folder / 'spec.json').exists(), index_path(folder).exists()])
        if has_spec:
            return await _open(DatasetReader, folder, decoders, options)
        if has_index:
            return await _open(ShardedDatasetReader, folder, decoders, options)
    elif not (await folder.stat()).is_dir:
        if folder.suffix == '.bag':
            return await _open(BagReader, folder, decoders, options)
        return await _open_files([folder], f'{folder}', decoders, options)
    return await _open_folder(folder, decoders, options)


async def _open_folder(folder: Path, decoders: Any, options: dict[str, Any]) -> Opened:
    try:
        entries = [entry async for entry in folder.store.scan(folder.key)]
    except NotFoundError:
        if await folder.is_file():
            raise _unknown(folder) from None
        raise
    if any(entry.name == 'spec.json' for entry in entries):
        return await _open(DatasetReader, folder, decoders, options)
    if shards_of(entries):
        return await _open(ShardedDatasetReader, folder, decoders, options)
    files = sorted(Path.of(folder.store, entry.key) for entry in entries if not entry.is_dir and format_of(entry.key))
    if not files:
        if not entries and await folder.is_file():  # a bucket lists no folder behind the name of an object
            raise _unknown(folder)
        names = sorted(entry.name for entry in entries)
        if remedy := await remedy_of(folder, names):
            raise NotFoundError(f'{folder}: {remedy}')
        raise NotFoundError(
            f'{folder}: expected a dataset (a folder with a spec.json, or with shards such as 000000), or files whose '
            f'names end in .bag, {", ".join(ENDINGS)}; got {_describe_folder(folder, names)}'
        )
    refuse_gaps(files, f'{folder}')
    return await _open_files(files, f'{folder}', decoders, options)


async def remedy_of(folder: Path, names: Sequence[str]) -> str:
    """Return what a folder of another library, or of an unfinished writer, is, and the remedy; empty if unknown."""
    if 'dataset_dict.json' in names:
        splits = sorted(set(names) - {'dataset_dict.json'})
        return f'is of datasets.save_to_disk, of {splits}: convert one with `granular convert {folder}/NAME TARGET`'
    if 'state.json' in names:
        return f'is of datasets.save_to_disk: convert it with `granular convert {folder} TARGET`'
    content = await (folder / 'index.json').read_bytes() if 'index.json' in names else b''
    for mark, library in ((b'"shards"', 'streaming'), (b'"chunks"', 'litdata')):
        if mark in content:
            arguments = f'{str(folder)!r}'
            if library == 'streaming':
                arguments = f'local={arguments}' if folder.store.local else f'remote={arguments}, local={folder.name!r}'
            dataset = f'{library}.StreamingDataset({arguments})'
            return f'is of {library}.StreamingDataset: convert it with granular.convert({dataset}, TARGET)'
    return _UNPACK if any(name.endswith(_PACKED) for name in names) else describe_unfinished(names)


def refuse_packed(files: Sequence[Path]) -> None:
    """Raise NotFoundError if some files are compressed tar files."""
    if packed := [file for file in files if file.name.endswith(_PACKED)]:
        raise NotFoundError(f'{packed[0]}: {_UNPACK}')


def _describe_folder(folder: Path, names: Sequence[str]) -> str:
    if not names:
        return 'an empty folder'
    more = f' and {len(names) - 3:,} more' if len(names) > 3 else ''
    images = ', or convert images in folders by class with `granular convert`' if folder.key else ''
    return f'a folder of {", ".join(names[:3])}{more}: open one of them{images}'


def _unknown(file: Path) -> NotFoundError:
    refuse_packed([file])
    return NotFoundError(
        f'{file}: unknown format: expected a folder, or a name that ends in .bag, {", ".join(ENDINGS)}'
    )


async def _open_files(files: Sequence[Path], name: str, decoders: Any, options: dict[str, Any]) -> Opened:
    kinds = {format_of(file.name) for file in files}
    refuse_packed(files)
    if len(kinds) != 1 or '' in kinds:
        suffixes = ', '.join(sorted({file.suffix or 'no suffix' for file in files})) or 'none'
        raise InvalidArgumentError(
            f'{name}: expected files of one format, of {", ".join(ENDINGS)}, got {suffixes}: pass a pattern or a list '
            f'of such files; `granular convert` makes a dataset of images'
        )
    return await _open(CLASSES[kinds.pop()], files, decoders, options)


async def _open(cls: Any, path: Any, decoders: Any, options: dict[str, Any]) -> Opened:
    accepted = [name for name in inspect.signature(cls).parameters if name not in ('directory', 'source', 'paths')]
    if 'decoders' in accepted or (decoders is not None and decoders is not formats.decoders):
        options = {'decoders': decoders, **options}
    if unknown := sorted(options.keys() - accepted):
        name = path[0] if isinstance(path, list) else path
        raise InvalidArgumentError(
            f'{cls.__name__} of {name}: unknown options {unknown}: expected some of {accepted}; options of the store, '
            f'such as config or endpoint_url, belong to granular.Path(...)'
        )
    reader: Opened = cls(path, **options)
    await ensure_open(reader)
    return reader

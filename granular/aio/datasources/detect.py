"""Find out the format of files, and open their reader."""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from granular import formats
from granular._support.other_names import answering
from granular._support.plugins import plugin
from granular._support.text import counted
from granular.aio.bags.reader import BagReader
from granular.aio.datasets.index import index_path
from granular.aio.datasets.reader import DatasetReader
from granular.aio.datasets.sharded_reader import ShardedDatasetReader
from granular.aio.datasets.shards import describe_unfinished, shards_of
from granular.aio.datasources.arguments import Paths
from granular.aio.datasources.arrayrecord.source import ArrayRecordDataSource, files_of_parts
from granular.aio.datasources.discovery.discover import Discovery, Files, in_folder, no_split, of_pattern
from granular.aio.datasources.discovery.names import ENDINGS, FORMATS, format_of, kind_of, pair_of
from granular.aio.datasources.indexed_files import IndexedFiles, files_of
from granular.aio.datasources.lerobot import INFO, LeRobotDataSource
from granular.aio.datasources.megatron.source import index_beside
from granular.aio.paths.path import Path, has_optional, is_pattern
from granular.aio.runtime.lifecycle import ensure_open, opening
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import offload
from granular.aio.stores import Entry
from granular.aio.stores.local.writing import final_name
from granular.errors import AccessDeniedError, InvalidArgumentError, NotFoundError
from granular.formats.base import Decoder
from granular.formats.layout import shard_name

Opened = DatasetReader | ShardedDatasetReader | Any
"""A reader of a dataset; Any stands for those of other files, so that programs use a dataset without a cast."""

_STORE: Final = 'options of the store, such as config, key or endpoint_url, belong to granular.Path(...)'
_ELSEWHERE: Final = {
    **dict.fromkeys(('fields', 'keys', 'columns'), 'nothing, and call MapDataset.source(reader).select(keys)'),
    **{name: f'granular.Path(url, config=granular.IOConfig({name}=...))' for name in ('cache_dir', 'index_cache')},
}
_PACKED: Final = ('.tar.gz', '.tgz', '.tar.zst', '.tar.xz', '.tar.bz2')
_LOOKED_AT: Final = 1000  # files of a folder with the name of a shard
_UNPACK: Final = (
    'a compressed tar file has no random access: decompress it to .tar (gunzip), or unpack it with `granular '
    'copy-to-local`'
)


@opening
@answering()
async def open(  # noqa: A001
    path: Paths,
    decoders: Mapping[str, Decoder | None] | None = formats.decoders,
    *,
    format: str | None = None,
    split: str | None = None,
    fs: Any = None,
    **options: Any,
) -> Opened:
    """Find out what is at a path, and return its reader, opened.

    ::

        async with granular.aio.open('s3://bucket/train') as reader:
            datapoints = await reader.fetch([3, 1, 41])

    ======================================================  =======================
    a folder with a ``spec.json``                           `DatasetReader`
    a folder with shards                                    `ShardedDatasetReader`
    a folder with a ``meta/info.json``                      `LeRobotDataSource`
    ``*.bag``                                               `BagReader`
    ``*.array_record``, ``*.arrayrecord``                   `ArrayRecordDataSource`
    ``*.parquet``, ``*.pq``                                 `ParquetDataSource`
    ``*.tar``                                               `WebDatasetDataSource`
    ``*.tfrecord``, ``*.tfrecords``                         `TFRecordDataSource`
    ``*.idx`` beside ``*.bin``                              `MegatronDataSource`
    ======================================================  =======================

    Other packages can add formats by the suffix of names (``granular.sources``, an entry point).
    The last five are also opened from a folder that has files of one of these formats, at any depth, from a pattern
    such as ``s3://bucket/train-*.tar``, ``train-{000..127}.tar`` or ``{a,b}.tar``, and from a sequence of files;
    several files are sorted by name, unless they are given as a sequence. What exists under a name such as ``x[1].tar``
    is opened; only otherwise is the name a pattern. Of names such as ``train.tfrecord-00000-of-00010`` in a folder or
    pattern, all ten must exist. A warning names files that are left out, as `Data sources` describes.

    Args:
      path: a file, a folder, a pattern or a sequence of files.
      decoders: the decoder of each type, or for tar files of each suffix; None for raw bytes. Records of bags,
        ArrayRecord and TFRecord files are always bytes, rows of Parquet files always values.
      format: ``'parquet'``, ``'arrayrecord'``, ``'webdataset'``, ``'tfrecord'`` or ``'megatron'``, if names do not
        tell, or if there are files of several.
      split: the split to read, such as ``'train'``, of a folder or pattern that has files of several.
      fs: the file system of fsspec that the path belongs to, as for :class:`granular.Path`.
      options: further arguments of the reader, such as ``cache_keys``, ``verify`` or ``columns``.

    Raises:
      NotFoundError: if there is nothing at the path, or nothing that has a reader, or files of several are missing.
      InvalidArgumentError: if there are files of several formats, splits or generations, or the reader does not take an
        option.
    """
    several = isinstance(path, list | tuple)
    files = [Path(file, fs=fs) for file in (path if isinstance(path, list | tuple) else (path,))]
    if (opener := _of_others(None if several else files[0], format)) is not None:
        return await offload(functools.partial(opener, path, **options))
    if format is not None and format not in FORMATS:
        raise InvalidArgumentError(f'format: expected one of {", ".join(FORMATS)}, got {format!r:.100}')
    _refuse_options(path, options)
    if several:
        _refuse_split(split, counted(len(files), 'file'))
        return await _open_files(files, counted(len(files), 'file'), format, decoders, options)
    (folder,) = files
    await folder.store.ready()
    if await is_pattern(folder):
        found = await of_pattern(folder, format or '', split)
        refuse_packed([] if found.entries else [found.base / name for name in found.left_out])
        if not found.entries and any(map(kind_of, found.left_out)):
            raise found.nothing()
        if found.format not in FORMATS:
            raise _not_one_format(found.name, [*found.paths, *(found.base / name for name in found.left_out)])
        return await _open_found(found, decoders, options)
    if not format_of(folder.name) and folder.suffix != '.bag' and format is None:
        # A server that lists no folders can still have a dataset.
        # A listing of ten thousand shards takes ten requests, which an index saves.
        has_spec, has_index = await gather([has_optional(folder / 'spec.json'), has_optional(index_path(folder))])
        if has_spec or has_index:
            _refuse_split(split, f'{folder}')
            return await _open(DatasetReader if has_spec else ShardedDatasetReader, folder, decoders, options)
    elif format == 'megatron' and (index := await index_beside(folder)) is not None:
        _refuse_split(split, f'{folder}')
        return await _open_files([index], f'{index}', format, decoders, options)
    elif not (await folder.stat()).is_dir:
        _refuse_split(split, f'{folder}')
        if folder.suffix == '.bag' and format is None:
            return await _open(BagReader, folder, decoders, options)
        return await _open_files([folder], f'{folder}', format, decoders, options)
    return await _open_folder(folder, format, split, decoders, options)


def class_of(format: str) -> Any:
    """Return the data source of a format."""
    module, _, name = FORMATS[format].source.rpartition('.')
    return getattr(importlib.import_module(module), name)


def _of_others(file: Path | None, format: str | None) -> Any:
    """Return the function of another package that opens files of a format, or with the suffix of a name."""
    if format is not None:
        return None if format in FORMATS else plugin('granular.sources', format)
    suffix = '' if file is None or format_of(file.name) else file.suffix.removeprefix('.')
    return None if suffix in ('', 'bag') else plugin('granular.sources', suffix)


def _refuse_options(path: Paths, options: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgumentError`` for options that no reader has, before anything is asked for."""
    if not options:
        return
    readers = (DatasetReader, ShardedDatasetReader, BagReader, LeRobotDataSource, *map(class_of, FORMATS))
    known = {name for reader in readers for name in _options(reader)}
    if unknown := sorted(options.keys() - known):
        name = counted(len(path), 'file') if isinstance(path, list | tuple) else f'{Path(path)}'
        raise _unknown_options(name, unknown, sorted(known))


def _unknown_options(reader: str, options: Iterable[str], known: Sequence[str]) -> InvalidArgumentError:
    """Return the error for options that a reader does not have, with what to pass instead."""
    import difflib  # here, as importing it takes longer than opening a dataset

    answers = {name: _ELSEWHERE.get(name) or ' or '.join(difflib.get_close_matches(name, known, 2)) for name in options}
    close = '; '.join(f'for {name}, pass {ours}' for name, ours in answers.items() if ours)
    return InvalidArgumentError(
        f'{reader}: unknown options {list(options)}: {close or f"expected some of {known}"}; {_STORE}'
    )


def _options(cls: Any) -> list[str]:
    return [
        name for name in inspect.signature(cls).parameters if name not in ('directory', 'folder', 'source', 'paths')
    ]


def _refuse_split(split: str | None, name: str) -> None:
    if split is not None:
        raise no_split(name)


async def _open_folder(
    folder: Path, format: str | None, split: str | None, decoders: Any, options: dict[str, Any]
) -> Opened:
    try:
        entries = [entry async for entry in folder.store.scan(folder.key)]
    except NotFoundError:
        if (opened := await _open_beside(folder, format, split, decoders, options)) is not None:
            return opened
        if await folder.is_file():
            raise _unknown(folder) from None
        raise
    except AccessDeniedError as error:
        raise AccessDeniedError(
            f'{folder}: may not be listed, and has no spec.json and no index that may be read: {error}'
        ) from error
    if format is None:
        is_dataset = any(entry.name == 'spec.json' for entry in entries)
        if is_dataset or await has_shards(folder, entries):
            _refuse_split(split, f'{folder}')
            return await _open(DatasetReader if is_dataset else ShardedDatasetReader, folder, decoders, options)
        if any(entry.name == 'meta' for entry in entries) and await has_optional(folder / INFO):
            _refuse_split(split, f'{folder}')
            return await _open(LeRobotDataSource, folder, decoders, options)
    if not entries:
        if (opened := await _open_beside(folder, format, split, decoders, options)) is not None:
            return opened
        if await folder.is_file():  # a bucket lists no folder behind the name of an object
            raise _unknown(folder)
        raise _nothing(folder, [])
    names = sorted(entry.name for entry in entries)
    if not any(format_of(entry.name) for entry in entries) and (remedy := await remedy_of(folder, names)):
        raise NotFoundError(f'{folder}: {remedy}')
    found = await in_folder(folder, format or '', split)
    if not found.entries and (found.format or any(map(kind_of, found.left_out))):
        raise found.nothing()
    if found.format not in FORMATS:
        raise _nothing(folder, names)
    return await _open_found(found, decoders, options)


async def _open_beside(
    path: Path, format: str | None, split: str | None, decoders: Any, options: dict[str, Any]
) -> Opened | None:
    """Open a dataset of Megatron by its data, or by what its two names begin with; None if there is none."""
    if format is not None or (index := await index_beside(path)) is None:
        return None
    _refuse_split(split, f'{path}')
    return await _open_files([index], f'{index}', format, decoders, options)


def _nothing(folder: Path, names: Sequence[str]) -> NotFoundError:
    return NotFoundError(
        f'{folder}: expected a dataset (a folder with a spec.json, or with shards such as 000000), or files whose '
        f'names end in .bag, {", ".join(ENDINGS)}; got {_describe_folder(folder, names)}'
    )


def discovery_of(reader: Any) -> Discovery | None:
    """Return what was found in the folder or pattern of an open reader; None if its files were given."""
    files = files_of(reader) if isinstance(reader, IndexedFiles) else None
    if isinstance(reader, ArrayRecordDataSource):
        files = files_of_parts(reader)
    return None if files is None else files.found


async def has_shards(folder: Path, entries: Sequence[Entry]) -> bool:
    """Return whether a folder has shards of a dataset, or of one that is being written, by its entries.

    Folders with the names of shards that hold other files, such as images, are no shards.
    """
    if not (numbers := shards_of(entries)):
        return False
    first, is_foreign, seen = folder / shard_name(numbers[0]), False, 0
    async with contextlib.aclosing(first.store.scan_tree(first.key)) as tree:
        async for entry in tree:
            if entry.name == 'spec.json' or (final_name(entry.name) or entry.name).endswith('.bag'):
                return True
            is_foreign, seen = is_foreign or bool(kind_of(entry.name)), seen + 1
            if seen == _LOOKED_AT:
                break
    return not is_foreign


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
    index, data = pair_of(file.name)
    remedy = f'; as data of Megatron, it needs {index} beside it: copy both files' if data == file.name else ''
    return NotFoundError(
        f'{file}: unknown format: expected a folder, or a name that ends in .bag, {", ".join(ENDINGS)}{remedy}'
    )


async def _open_found(found: Discovery, decoders: Any, options: dict[str, Any]) -> Opened:
    opened = await _open(class_of(found.format), Files.from_discovery(found), decoders, options)
    found.warn()
    return opened


async def _open_files(
    files: Sequence[Path], name: str, format: str | None, decoders: Any, options: dict[str, Any]
) -> Opened:
    kinds = {format or format_of(file.name) for file in files}
    refuse_packed([] if format else files)
    if len(kinds) != 1 or '' in kinds:
        raise _not_one_format(name, files)
    return await _open(class_of(kinds.pop()), files, decoders, options)


def _not_one_format(name: str, files: Sequence[Path]) -> InvalidArgumentError:
    suffixes = ', '.join(sorted({file.suffix or 'no suffix' for file in files})) or 'none'
    return InvalidArgumentError(
        f'{name}: expected files of one format, of {", ".join(ENDINGS)}, got {suffixes}: pass a pattern or a list '
        f'of such files, or format; MapDataset.concatenate joins datasets, and `granular convert` makes a dataset of '
        f'images'
    )


async def _open(cls: Any, path: Any, decoders: Any, options: dict[str, Any]) -> Opened:
    accepted = _options(cls)
    if 'decoders' in accepted or (decoders is not None and decoders is not formats.decoders):
        options = {'decoders': decoders, **options}
    if unknown := sorted(options.keys() - accepted):
        name = path.name if isinstance(path, Files) else path[0] if isinstance(path, list) else path
        raise _unknown_options(f'{cls.__name__} of {name}', unknown, accepted)
    reader: Opened = cls(path, **options)
    await ensure_open(reader)
    return reader

"""Describes datasets as plain data, for the command line."""

from typing import Any, TypedDict

import numpy as np

from granular.aio.datasets.index import index_path
from granular.aio.datasources.detect import format_of
from granular.errors import InvalidArgumentError, NotFoundError
from granular.sync.bags import BagReader
from granular.sync.datasets import DatasetReader, ShardedDatasetReader
from granular.sync.path import Path

_MAX_VALUES = 8  # number of array values to show
_DEPTH = 64  # limit on the nesting of lists and maps


class Key(TypedDict):
    """One key of a dataset."""

    type: str
    records: int
    bytes: int


class Description(TypedDict, total=False):
    """A dataset, a sharded dataset, or a bag."""

    url: str
    kind: str
    layout: str
    versions: list[int]
    shards: int
    datapoints: int
    bytes: int
    index: bool
    spec: dict[str, str]
    keys: dict[str, Key]


def refuse_other_formats(path: Path) -> None:
    """Raise an error for a file of another format.

    Raises:
      InvalidArgumentError: if it is one.
    """
    if (kind := format_of(path.name)) and path.is_file():
        raise InvalidArgumentError(
            f'{path}: is a file of the format {kind}, expected a dataset: `granular view` shows such files, '
            f'`granular convert` makes a dataset of them, and granular.open reads them'
        )


def describe(path: Path) -> Description:
    """Describe the dataset or bag at a path. Reads only the ends of tables, never records.

    Raises:
      NotFoundError: if it is neither a dataset, a folder of shards, nor a bag.
      InvalidArgumentError: if it is a file of another format.
    """
    if path.suffix == '.bag':
        with BagReader(path, cache_index=False) as bag:
            return {
                'url': f'{path}', 'kind': 'bag', 'versions': [bag.version], 'datapoints': len(bag), 'bytes': bag.size,
            }  # fmt: skip
    try:
        with DatasetReader(path, None, cache_index=False) as reader:
            return {'url': f'{path}', 'kind': 'dataset', **_describe([reader.aio])}
    except NotFoundError as error:
        try:
            with ShardedDatasetReader(path, None, cache_index=False) as sharded:
                shards = sharded.aio.readers
                return {
                    'url': f'{path}', 'kind': 'sharded dataset', 'shards': len(shards), **_describe(shards),
                    'index': Path(index_path(path.aio)).exists(),
                }  # fmt: skip
        except NotFoundError:
            refuse_other_formats(path)
            raise error from None


def _describe(readers: list[Any]) -> Description:
    spec, bags = readers[0].spec, [reader.bags for reader in readers]
    keys = {
        key: Key(
            type=spec.get(key, 'references'),
            records=sum(len(reader_bags[key]) for reader_bags in bags),
            bytes=sum(reader_bags[key].size for reader_bags in bags),
        )
        for key in bags[0]
    }
    return {
        'layout': readers[0].layout,
        'versions': sorted({bag.version for reader_bags in bags for bag in reader_bags.values()}),
        'datapoints': sum(len(reader) for reader in readers),
        'bytes': sum(reader.size for reader in readers),
        'spec': spec,
        'keys': keys,
    }


def printable(text: str) -> str:
    """Escape the unprintable characters of untrusted text, such as terminal control sequences."""
    return ''.join(char if char.isprintable() else char.encode('unicode_escape').decode() for char in text)


def readable(value: Any, kind: str, depth: int = 0) -> Any:
    """Convert a value into readable JSON: arrays and bytes are shown by their size and first values."""
    if depth > _DEPTH:
        return '...'
    if isinstance(value, np.ndarray):
        head = [item.item() for item in value.ravel()[:_MAX_VALUES]]
        return {'type': kind, 'dtype': str(value.dtype), 'shape': list(value.shape), 'head': [_plain(x) for x in head]}
    if isinstance(value, bytes):
        return {'type': kind, 'bytes': len(value)}
    if isinstance(value, dict):
        return {str(key): readable(item, kind, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [readable(item, kind, depth + 1) for item in value]
    return _plain(value)


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)

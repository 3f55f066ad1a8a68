"""Describes datasets as plain data, for the command line."""

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

import granular
from granular import shuffle
from granular.aio.conversion.run import PLAN
from granular.aio.datasets.codec import Decoders
from granular.aio.datasets.index import index_path
from granular.aio.datasources.detect import discovery_of
from granular.aio.datasources.discovery.discover import Discovery, in_folder
from granular.aio.datasources.discovery.names import format_of
from granular.aio.pipeline.planning import paddings
from granular.aio.runtime.portal import run
from granular.errors import CorruptDatasetError, InvalidArgumentError, NotFoundError
from granular.formats.layout import shard_number
from granular.sync.datasets import ShardedDatasetReader
from granular.sync.path import Path
from granular.view.sources import source_of

_CONVERTED: Final = ('images', 'huggingface')  # formats of files that are only converted
# The price of 1,000 requests that read, in dollars, of S3 Standard in us-east-1 and of GCS Standard in one region:
# https://aws.amazon.com/s3/pricing, https://cloud.google.com/storage/pricing
_PRICES: Final = {'s3': 0.0004, 'gs': 0.0004}
_FACTS: Final = ('kind', 'layout', 'versions', 'shards', 'bytes')
_MAX_VALUES: Final = 8  # number of array values to show
_BARS: Final = 16  # of a histogram of sizes, each as much wider than the one before
_DEPTH: Final = 64  # limit on the nesting of lists and maps


def refuse_other_formats(path: Path) -> None:
    if (kind := format_of(path.name)) and path.is_file():
        raise InvalidArgumentError(
            f'{path}: is a file of the format {kind}, expected a dataset: `granular view` shows such files, '
            f'`granular convert` makes a dataset of them, and granular.open reads them'
        )


def open_any(path: Path, decoders: Decoders, **options: Any) -> Any:
    """Open a path as ``granular.open`` does, but read only the ends of tables; an unfinished conversion is an error."""
    try:
        try:
            return granular.open(path, decoders, cache_index=False, **options)
        except InvalidArgumentError:  # files of other formats have no such option
            return granular.open(path, decoders, **options)
    except (NotFoundError, CorruptDatasetError):
        _refuse_unfinished(path)
        raise


def _refuse_unfinished(path: Path) -> None:
    plan = path / PLAN
    if plan.exists() and not (plan.parent / 'spec.json').exists():
        finished = sum((shard / 'spec.json').exists() for shard in path.iterdir() if shard_number(shard.name))
        raise NotFoundError(
            f'{path}: is an unfinished conversion, with {finished} finished shards: the same `granular convert` '
            f'resumes it; to discard it, remove the folder'
        )


def describe_sizes(path: Path, key: str, format: str | None = None, split: str | None = None) -> dict[str, Any]:
    """Describe the sizes of the values of a key, and the padding of plans of them; the values are not read."""
    with granular.open(path, format=format, split=split) as reader:
        if not hasattr(reader, 'sizes'):
            raise InvalidArgumentError(f'{path}: --sizes: expected a dataset, or files of Megatron: convert it')
        sizes = reader.sizes(key)
    present = sizes[sizes > 0]
    if not len(present):
        return {'key': key, 'elements': len(sizes), 'empty': len(sizes), 'histogram': [], 'padding': {}}
    edges = np.unique(np.geomspace(present.min(), present.max() + 1, _BARS + 1).round().astype(np.int64))
    bars = zip(edges[:-1].tolist(), edges[1:].tolist(), np.histogram(present, edges)[0].tolist(), strict=True)
    return {
        'key': key, 'elements': len(sizes), 'empty': len(sizes) - len(present), 'sum': int(sizes.sum()),
        'least': int(present.min()), 'median': float(np.median(present)), 'largest': int(present.max()),
        'histogram': [{'from': low, 'below': high, 'elements': count} for low, high, count in bars],
        'padding': {plan: round(part, 4) for plan, part in paddings(sizes).items()},
    }  # fmt: skip


def describe(path: Path, format: str | None = None, split: str | None = None) -> dict[str, Any]:
    """Describe a path, without facts that its format lacks: of a dataset, only the ends of tables are read.

    Of a folder or a pattern of other files, the description has those that are taken, and those that are left out.
    """
    try:
        if format in _CONVERTED:
            raise NotFoundError(f'{path}: files of {format} have no reader: convert them')
        opened = open_any(path, None, format=format, split=split)
    except NotFoundError:
        if not path.is_dir() or (found := run(in_folder(path.aio, format or '', split))).format not in _CONVERTED:
            raise
        count = len(found.entries if found.table is None else found.table)
        size = sum(entry.size for entry in found.entries)
        facts: dict[str, Any] = {'datapoints': count} if found.format == 'images' else {}
        return {'url': f'{path}', 'kind': found.format, 'bytes': size, 'keys': {}, **_files(found), **facts}
    with opened as reader:
        facts = run(source_of(reader.aio)).describe()
        description = {name: facts[name] for name in _FACTS if facts.get(name) is not None}
        keys = {row.pop('key'): row for row in facts['keys']}
        description.update(url=f'{path}', datapoints=len(reader), keys=keys)
        if hasattr(reader, 'spec'):
            description['spec'] = reader.spec
        if isinstance(reader, ShardedDatasetReader):
            description['index'] = Path(index_path(path.aio)).exists()
        if facts.get('layout') and not path.store.local:
            description['epoch'] = _epoch(path, description)
        if (discovery := discovery_of(reader.aio)) is not None:
            description.update(_files(discovery))
        return description


def _epoch(path: Path, description: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return for orders what an epoch takes, at most: requests, and dollars where they have a price."""
    length, index = description['datapoints'], description.get('index')
    sizes = [row['bytes'] for key, row in description['keys'].items() if not (index and key == 'refs')]
    order = shuffle.Blocks().sized(sum(sizes) / max(1, length))
    blocks = math.ceil(length / order.block)
    most = path.store.merge.max_request
    requests = {
        'shuffle.Index()': length * len(sizes),
        f'shuffle.Blocks({order.block}, {order.window})': sum(max(blocks, math.ceil(size / most)) for size in sizes),
    }
    price = _PRICES.get(path.store.root.partition('://')[0])
    dollars = {order: None if price is None else count / 1000 * price for order, count in requests.items()}
    return [{'order': order, 'requests': count, 'dollars': dollars[order]} for order, count in requests.items()]


def _files(found: Discovery) -> dict[str, Any]:
    tables = {} if found.table is None else {'tables': list(found.table.names)}
    return {'files': {'taken': found.relatives, 'left_out': dict(found.left_out), **tables}}


def printable(text: str) -> str:
    """Escape the unprintable characters of untrusted text, such as terminal control sequences."""
    return ''.join(char if char.isprintable() else char.encode('unicode_escape').decode() for char in text)


def readable(value: Any, kind: str, depth: int = 0) -> Any:
    """Convert a value into readable JSON: arrays and bytes are shown by their size and first values."""
    if depth > _DEPTH:
        return '...'
    if isinstance(value, np.ndarray):
        head = [_plain(item) for item in value.ravel()[:_MAX_VALUES]]
        return {'type': kind, 'dtype': str(value.dtype), 'shape': list(value.shape), 'head': head}
    if isinstance(value, bytes):
        return {'type': kind, 'bytes': len(value)}
    if isinstance(value, dict):
        return {str(key): readable(item, kind, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [readable(item, kind, depth + 1) for item in value]
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic) and value.dtype.kind in 'biuf':
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):  # which JSON does not have
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)

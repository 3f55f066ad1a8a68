"""The demo: writes scikit-learn's handwritten digits to a bucket of an embedded server and streams them into a loop."""

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import granular
from granular import testing
from granular._support.lazy import import_extra
from granular.errors import GranularError, InvalidArgumentError

if TYPE_CHECKING:
    from rich.console import Console

SPEC: Final = {'image': 'png', 'index': 'int', 'label': 'int', 'strokes': 'int[]', 'text': 'utf8'}
NAMES: Final = ('zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine')
BATCH: Final = 64
SHARD: Final = 500
EPOCHS: Final = 2


def run(store: str, keep: bool, out: 'Console', err: 'Console') -> None:
    """Write the digits, stream two epochs with a stop in the middle, check them, and print the figures."""
    with contextlib.ExitStack() as stack:
        bucket = stack.enter_context(_store(store, keep))
        path = bucket / 'digits'
        out.print(f'writing {path}', highlight=False, soft_wrap=True)
        _write(path, err)
        with granular.ShardedDatasetReader(path, granular.decoders, cache_keys=('refs',)) as reader:
            out.print(f'reading {len(reader):,} datapoints of {reader.shards} shards, {EPOCHS} epochs', highlight=False)
            order, figures = _stream(reader, out, err)
            _check(order, len(reader))
        _report(figures, out)
        if keep:
            _keep(path, store, out)


# --- steps


def preprocess(datapoint: dict[str, Any], seed: list[int]) -> dict[str, Any]:
    """Convert a datapoint as a training loop would: a float image, the label, the index and the strokes."""
    return {
        'image': datapoint['image'].astype(np.float32) / 255,
        'label': datapoint['label'],
        'index': datapoint['index'],
        'strokes': np.array(datapoint['strokes'], np.int32),
    }


def _write(path: granular.Path, err: 'Console') -> None:
    digits = _digits()
    with granular.ShardedDatasetWriter(path, SPEC, granular.encoders, shardlen=SHARD) as writer:
        for i, (image, label) in enumerate(_progress(zip(*digits, strict=True), len(digits[1]), 'write', err)):
            writer.append(
                {
                    'image': image,
                    'index': i,
                    'label': int(label),
                    'strokes': [int(column) for column in image.sum(axis=0)],
                    'text': f'a handwritten {NAMES[int(label)]}',
                },
                flush=False,
            )


def _stream(reader: granular.ShardedDatasetReader, out: 'Console', err: 'Console') -> tuple[list[int], dict[str, str]]:
    """Return the indices in the order in which they came, and figures to report."""
    source = granular.sources.Transform(granular.sources.Epochs(reader, shuffle=True, seed=0), preprocess)
    total = EPOCHS * len(reader)
    batches = -(-total // BATCH)
    order: list[int] = []
    before, began = granular.io_stats(), time.perf_counter()
    loader = granular.Loader(source, batch=BATCH)
    try:
        for i in _progress(range(batches), batches, 'read', err):
            if i == batches // 2:
                state = loader.state_dict()
                loader.close()
                out.print(f'stopped and restored at step {state["step"]}', highlight=False)
                loader = granular.Loader(source, batch=BATCH)
                loader.load_state_dict(state)
            order.extend(next(loader)['index'].tolist())
        seconds, after = time.perf_counter() - began, granular.io_stats()
    finally:
        loader.close()
    nbytes, requests, ranges = (after[name] - before[name] for name in ('bytes', 'requests', 'ranges'))
    return order[:total], {
        'datapoints/s': f'{len(order) / seconds:,.0f}',
        'MB/s': f'{nbytes / seconds / 1e6:,.2f}',
        'requests': f'{requests:,}',
        'saved by coalescing': f'{ranges - requests:,} of {ranges:,}',
    }


def _check(order: list[int], length: int) -> None:
    epochs = [order[i * length : (i + 1) * length] for i in range(EPOCHS)]
    for i, epoch in enumerate(epochs):
        if Counter(epoch) != Counter(range(length)):
            raise GranularError(f'epoch {i}: expected {length} datapoints, got {len(set(epoch))} different ones')
    if epochs[0] == epochs[1]:
        raise GranularError('both epochs have the same order')


def _report(figures: dict[str, str], out: 'Console') -> None:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_row('both epochs held', 'every datapoint once, in different orders')
    for row in figures.items():
        table.add_row(*row)
    out.print(table, highlight=False)


def _keep(path: granular.Path, store: str, out: 'Console') -> None:
    if store != 'local':
        # The bucket disappears with its server: keep a copy on the disk.
        path = path.copy(granular.Path(tempfile.mkdtemp(prefix='granular-demo-')) / 'digits')
    out.print(f'kept {path}; look at it with', highlight=False, soft_wrap=True)
    for command in (f'granular info {path}', f'granular cat {path} 0'):
        out.print(f'  {command}', highlight=False, soft_wrap=True)


# --- helpers


def _digits() -> tuple[Any, Any]:
    digits = import_extra('sklearn.datasets', 'demo', 'the demo needs scikit-learn').load_digits()
    return (digits.images * 255 / 16).astype(np.uint8), digits.target


def _progress(items: Any, total: int, doing: str, err: 'Console') -> Iterator[Any]:
    from rich.progress import track

    if not err.is_terminal:
        return iter(items)
    return iter(track(items, f'{doing:>5}', total, console=err, transient=True))


@contextlib.contextmanager
def _store(store: str, keep: bool) -> Iterator[granular.Path]:
    """Provide an empty bucket, or a folder."""
    servers = {'s3': ('s3://demo', testing.s3_server), 'gcs': ('gs://demo', testing.gcs_server)}
    if store in servers:
        address, server = servers[store]
        with server() as options:
            bucket = granular.Path(address, **options)
            bucket.mkdir()
            yield bucket
    elif store == 'local':
        if keep:
            yield granular.Path(tempfile.mkdtemp(prefix='granular-demo-'))
        else:
            with tempfile.TemporaryDirectory(prefix='granular-demo-') as folder:
                yield granular.Path(folder)
    else:
        raise InvalidArgumentError(f"store: expected 's3', 'gcs' or 'local', got {store!r}")

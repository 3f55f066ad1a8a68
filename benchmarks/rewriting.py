"""Changes of a dataset of small photos: processor time of a record, and the bytes that an added key moves."""

import functools
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

import granular
from benchmarks.bars import Bar, Result
from benchmarks.data import Data
from benchmarks.nginx import Server
from tests.support.servers import SeaweedServer

PHOTOS: Final = 100_000
SHARDLEN: Final = 5_000
DIMENSIONS: Final = 64
BOUNDS: Final = {'subset': 10.0, 'relabel': 10.0, 'add a key': 10.0}


def rewriting(data: Data, server: Server) -> Result:
    """Measure a subset, new labels and a new key on a disk, beside ``convert``; and the key in a bucket."""
    count = data.count(PHOTOS)
    embeddings = np.random.default_rng(1).random((count, DIMENSIONS), np.float32)
    changes: Mapping[str, Mapping[str, Any]] = {
        'subset': {'keep': np.flatnonzero(np.arange(count) % 1000)},
        'relabel': {'values': {'label': np.arange(count) % 7}},
        'add a key': {'values': {'embedding': embeddings}},
    }
    source = granular.Path(data.once('photos', functools.partial(write, count=count)))
    target = granular.Path(data.folder / 'rewritten')
    calls: dict[str, Callable[[], object]] = {
        name: functools.partial(granular.rewrite, source, target, **change) for name, change in changes.items()
    }
    calls['convert'] = functools.partial(granular.convert, source, target, decoders=None, shardlen=SHARDLEN)
    cost(functools.partial(granular.rewrite, source, target, keep=[0]), target)  # what only the first call takes
    costs = dict.fromkeys(calls, float('inf'))
    for _ in range(data.runs()):
        for name, call in calls.items():
            costs[name] = min(costs[name], cost(call, target) / count)
    behind = f'us; convert takes {costs["convert"]:.1f}'
    bars = [Bar(f'CPU of a record, {name}', costs[name], bound, behind, True) for name, bound in BOUNDS.items()]
    with SeaweedServer() as bucket:
        place = bucket.new_bucket()
        write(place / 'source', count)
        before = granular.io_stats()['bytes']
        done = granular.rewrite(place / 'source', place / 'result', values={'embedding': embeddings})
        received = granular.io_stats()['bytes'] - before
        added = sum(path.stat().size for path in (place / 'result').glob('*/embedding.*'))
        moved = received + done.bytes - done.copied
        note = f'{moved:,} B / {added:,} B; {done.copied:,} B were copied by the server'
        bars.append(Bar('bytes moved for a key / of the key', moved / added, 1.3, note, True))
    return bars, []


def write(folder: pathlib.Path | granular.Path, count: int) -> None:
    """Write photos of 2 to 6 kB, with a label."""
    rng = np.random.default_rng(0)
    block, sizes = rng.bytes(1 << 24), rng.integers(2000, 6000, count).tolist()
    spec = {'image': 'jpg', 'label': 'int'}
    with granular.ShardedDatasetWriter(folder, spec, None, shardlen=SHARDLEN) as writer:
        for i, size in enumerate(sizes):
            at = i * 997 % (1 << 23)
            writer.append({'image': block[at : at + size], 'label': bytes([i % 100])}, flush=False)


def cost(call: Callable[[], object], target: granular.Path) -> float:
    """Return the processor time of a call that writes a folder, in microseconds."""
    shutil.rmtree(str(target), ignore_errors=True)
    began = time.process_time()
    call()
    return (time.process_time() - began) * 1e6

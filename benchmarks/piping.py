"""What pipelines do in a benchmark, in a process of its own: ``python -m benchmarks.piping WHAT JOB``, in JSON."""

import json
import pathlib
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

import granular
from benchmarks.clients import open_reader, sizes

Job = Mapping[str, Any]


def rate(items: Iterable[Any], count: int, each: int, warm: int = 1) -> float:
    """Datapoints a second of an iterator, behind its first items."""
    iterator = iter(items)
    for _ in range(warm):
        next(iterator)
    began = time.perf_counter()
    for _ in range(count):
        next(iterator)
    return count * each / (time.perf_counter() - began)


def plain(point: Mapping[str, Any]) -> dict[str, int]:
    """A datapoint without its bytes, so that reading is measured and not the copying of batches."""
    return sizes(point, None)


def stream(job: Job) -> dict[str, float]:
    """Datapoints a second of a shuffled and batched MapDataset."""
    dataset = granular.MapDataset.source(open_reader(job)).shuffle(seed=1).repeat().map(plain).batch(64)
    return {'rate': rate(dataset.to_iter_dataset(), job['batches'], 64, 20)}


def loader(job: Job) -> dict[str, float]:
    """Datapoints and requests a second of a Loader, shuffled in one order or the other."""
    order = granular.shuffle.Blocks() if job['blocks'] else True
    source = granular.sources.Epochs(open_reader(job), shuffle=order, seed=0)
    with granular.Loader(granular.sources.Transform(source, sizes), job['batch']) as items:
        for _ in range(job.get('warm', 20)):
            next(items)
        before, began = granular.io_stats()['requests'], time.perf_counter()
        for _ in range(job['batches']):
            next(items)
        seconds = time.perf_counter() - began
        requests = granular.io_stats()['requests'] - before
    points = job['batches'] * job['batch']
    return {'rate': points / seconds, 'requests': requests / points}


def same(point: Any) -> Any:
    """The identity."""
    return point


def epochs(job: Job) -> dict[str, list[float]]:
    """Datapoints a second and requests of each epoch of a shuffled Loader."""
    source = granular.sources.Epochs(open_reader(job), seed=0)
    found: dict[str, list[float]] = {'rates': [], 'requests': []}
    with granular.Loader(granular.sources.Transform(source, sizes), 64) as items:
        for _ in range(job['epochs']):
            before, began = granular.io_stats()['requests'], time.perf_counter()
            for _ in range(job['batches']):
                next(items)
            found['rates'].append(job['batches'] * 64 / (time.perf_counter() - began))
            found['requests'].append(granular.io_stats()['requests'] - before)
    return found


def overhead(job: Job) -> dict[str, float]:
    """Elements a second of a pipeline over a list."""
    dataset = granular.MapDataset.source(list(range(job['count']))).map(same).batch(64)
    best = max(rate(dataset.to_iter_dataset(), job['count'] // 64 - 100, 64, 90) for _ in range(3))
    return {'rate': best}


def slow(point: int, seed: Any) -> dict[str, int]:
    """A millisecond of Python."""
    until = time.thread_time() + 0.001
    while time.thread_time() < until:
        pass
    return {'x': point}


def workers(job: Job) -> dict[str, float]:
    """Datapoints a second of a transformation in Python, in so many processes."""
    source = granular.sources.Transform(granular.sources.Epochs(range(100_000), seed=0), slow)
    with granular.Loader(source, 64, workers=job['workers'], mp='spawn') as items:
        return {'rate': rate(items, job['batches'], 64, 16)}


def lookups(job: Job) -> dict[str, float]:
    """Lookups a second in a shuffled billion."""
    steps = np.random.default_rng(0).integers(0, 10**9, 4_000_000)
    order, best = granular.shuffle.Index(), 0.0
    for _ in range(3):
        began = time.perf_counter()
        order.lookup(steps, 10**9, 1, 0)
        best = max(best, len(steps) / (time.perf_counter() - began))
    return {'rate': best}


if __name__ == '__main__':
    print(json.dumps(globals()[sys.argv[1]](json.loads(pathlib.Path(sys.argv[2]).read_text()))))

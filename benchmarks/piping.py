"""The part of pipelines in a benchmark, in its own process."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

import granular
from benchmarks.clients import open_reader, sizes
from benchmarks.rivals.timing import best, rate

Job = Mapping[str, Any]


def plain(datapoint: Mapping[str, Any]) -> dict[str, int]:
    """Drop the bytes of a datapoint, so that the copying of batches is not measured."""
    return sizes(datapoint, None)


def stream(job: Job) -> dict[str, float]:
    """Measure the datapoints per second of a shuffled and batched MapDataset."""
    dataset = granular.MapDataset.source(open_reader(job)).shuffle(seed=1).repeat().map(plain).batch(64)
    return {'rate': rate(dataset.to_iter_dataset(), job['batches'], 64, 20)}


def loader(job: Job) -> dict[str, float]:
    """Measure the datapoints per second of a Loader, and the requests per datapoint, for an order."""
    order = granular.shuffle.Blocks() if job['blocks'] else True
    source = granular.sources.Epochs(open_reader(job), shuffle=order, seed=0)
    with granular.Loader(granular.sources.Transform(source, sizes), job['batch']) as items:
        for _ in range(job.get('warm', 20)):
            next(items)
        before = granular.io_stats()['requests']
        datapoints = rate(items, job['batches'], job['batch'], 0)
        requests = granular.io_stats()['requests'] - before
    return {'rate': datapoints, 'requests': requests / (job['batches'] * job['batch'])}


def same(datapoint: Any) -> Any:
    """Return the datapoint unchanged."""
    return datapoint


def epochs(job: Job) -> dict[str, list[float]]:
    """Measure the datapoints per second and the requests of each epoch of a shuffled Loader."""
    source = granular.sources.Epochs(open_reader(job), seed=0)
    result: dict[str, list[float]] = {'rates': [], 'requests': []}
    with granular.Loader(granular.sources.Transform(source, sizes), 64) as items:
        for _ in range(job['epochs']):
            before = granular.io_stats()['requests']
            result['rates'].append(rate(items, job['batches'], 64, 0))
            result['requests'].append(granular.io_stats()['requests'] - before)
    return result


def overhead(job: Job) -> dict[str, float]:
    """Measure the elements per second of a pipeline over a list."""
    dataset = granular.MapDataset.source(list(range(job['count']))).map(same).batch(64)
    return {'rate': max(rate(dataset.to_iter_dataset(), job['count'] // 64 - 100, 64, 90) for _ in range(3))}


def slow(datapoint: int, seed: Any) -> dict[str, int]:
    """Compute in Python for a millisecond."""
    until = time.thread_time() + 0.001
    while time.thread_time() < until:
        pass
    return {'x': datapoint}


def workers(job: Job) -> dict[str, float]:
    """Measure the datapoints per second of a transformation in Python, in worker processes."""
    source = granular.sources.Transform(granular.sources.Epochs(range(100_000), seed=0), slow)
    with granular.Loader(source, 64, workers=job['workers'], mp='spawn') as items:
        return {'rate': rate(items, job['batches'], 64, 16)}


def lookups(job: Job) -> dict[str, float]:
    """Measure the lookups per second in a shuffled billion."""
    steps = np.random.default_rng(0).integers(0, 10**9, 4_000_000)
    return {'rate': len(steps) / best(lambda: granular.shuffle.Index().lookup(steps, 10**9, 1, 0), 3)}


def labels(job: Job) -> dict[str, float]:
    """Count the bytes and seconds of opening a reader, and of loading the label of every datapoint."""
    before = granular.io_stats()
    reader = open_reader(job)
    opened, between = time.perf_counter(), granular.io_stats()
    count = len(granular.kappadata.ModeWrapper(reader, 'label')[:])
    done, after = time.perf_counter(), granular.io_stats()
    return {
        'count': count,
        'opening': between['bytes'] - before['bytes'],
        'bytes': after['bytes'] - between['bytes'],
        'requests': after['requests'] - between['requests'],
        'seconds': done - opened,
    }

"""The part of training steps in a benchmark, in its own process."""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

import granular
from benchmarks.clients import crop, open_reader, sizes
from granular.grain import MultiprocessingOptions

Job = Mapping[str, Any]
BATCH = 64


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return the median and the 99th percentile in milliseconds."""
    return {'p50': float(np.quantile(seconds, 0.5)) * 1e3, 'p99': float(np.quantile(seconds, 0.99)) * 1e3}


class Crop(granular.grain.transforms.Map):
    """Crops a datapoint to a fixed size."""

    def map(self, element: Any) -> Any:
        return crop(element, None)


def iterator(job: Job) -> Iterator[Any]:
    """Return an endless iterator over batches of 64 records of 50 kB, cut from ranges of 100 kB."""
    reader = open_reader(job)
    mp, options = job.get('mp', False), MultiprocessingOptions(1, start_method='spawn')
    dataset = granular.MapDataset.source(reader).shuffle(seed=1).repeat().map(Crop())
    match job['consumer']:
        case 'Loader':
            source = granular.sources.Transform(granular.sources.Epochs(reader, seed=0), crop)
            return granular.Loader(source, BATCH, workers=1 if mp else 32, mp='spawn' if mp else None)
        case 'stream':
            stream = dataset.batch(BATCH).to_iter_dataset(granular.ReadOptions(prefetch_buffer_size=8))
        case 'stream.batch':
            stream = dataset.to_iter_dataset().batch(BATCH)
        case 'torch':
            from granular.integrations.torch import IterableDataset

            return iter(IterableDataset(dataset.batch(BATCH).to_iter_dataset()))
        case 'DataLoader':
            sampler = granular.grain.samplers.IndexSampler(len(reader), shuffle=True, seed=0)
            operations = [Crop(), granular.grain.transforms.Batch(BATCH)]
            return iter(granular.grain.DataLoader(data_source=reader, sampler=sampler, operations=operations,
                        worker_count=int(mp)))  # fmt: skip
    return iter(stream.mp_prefetch(options) if mp else stream)


def warm(job: Job) -> Any:
    """Return the iterator after ten batches."""
    items = iterator(job)
    for _ in range(10):
        next(items)
    return items


def ready(job: Job) -> dict[str, float]:
    """Measure `next` of a batch that is ready, 50 ms after the last one."""
    items, seconds = warm(job), []
    for _ in range(job['steps']):
        time.sleep(0.05)
        started = time.perf_counter()
        batch = next(items)
        seconds.append(time.perf_counter() - started)
        del batch  # freeing its memory is no part of it
    return quantiles(seconds)


def spin(count: int) -> float:
    """Compute in Python. Return the seconds it took."""
    started = time.perf_counter()
    for _ in range(count):
        pass
    return time.perf_counter() - started


def step(job: Job) -> dict[str, float]:
    """Measure steps of 20 ms of Python beside an iterator, over the same work without it."""
    count = int(0.02 * 200_000 / min(spin(200_000) for _ in range(20)))
    items, steps = warm(job), []
    for _ in range(job['steps']):
        started = time.perf_counter()
        next(items)
        spin(count)
        steps.append(time.perf_counter() - started)
    items.close()
    alone = [spin(count) for _ in range(job['steps'])]
    return {'ratio': float(np.median(steps) / np.median(alone)), **quantiles(steps)}


def thread(job: Job) -> dict[str, float]:
    """Measure how late a thread that sleeps 1 ms at a time wakes up, beside a Loader at full speed and without."""
    late: list[float] = []
    ended = threading.Event()

    def sleep() -> None:
        while not ended.is_set():
            started = time.perf_counter()
            time.sleep(0.001)
            late.append(time.perf_counter() - started - 0.001)

    items = warm(job)
    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    count, until = 0, time.perf_counter() + job['seconds']
    while time.perf_counter() < until:
        next(items)
        count += BATCH
    beside = quantiles(late)
    items.close()
    late.clear()
    time.sleep(1)
    ended.set()
    sleeper.join()
    alone = quantiles(late)
    return {**beside, 'p50_alone': alone['p50'], 'p99_alone': alone['p99'], 'rate': count / job['seconds']}


def coroutine(job: Job) -> dict[str, float]:
    """Measure how late a coroutine that sleeps 1 ms at a time wakes up, beside a Loader and eight fetches."""
    late: list[float] = []

    async def sleep() -> None:
        while True:
            started = time.perf_counter()
            await asyncio.sleep(0.001)
            late.append(time.perf_counter() - started - 0.001)

    async def main() -> dict[str, float]:
        path = granular.aio.Path(job['url'], config=granular.IOConfig(concurrency=job.get('inflight', 0)))
        counts = itertools.count()
        async with granular.aio.DatasetReader(path, granular.decoders) as reader:
            order = np.random.default_rng(0).integers(0, len(reader), (1000, BATCH))

            async def fetch() -> None:
                while True:
                    await reader.fetch(order[next(counts) % 1000], mask=['data'])

            async def load() -> None:
                source = granular.aio.sources.Transform(granular.aio.sources.Epochs(reader), crop)
                async for _ in granular.aio.Loader(source, BATCH):
                    next(counts)

            work: Callable[[], Any] = {'fetch': fetch, 'Loader': load}[job['consumer']]
            tasks = [asyncio.create_task(work()) for _ in range(8 if job['consumer'] == 'fetch' else 1)]
            await asyncio.sleep(1)
            before, sleeper = next(counts), asyncio.create_task(sleep())
            await asyncio.sleep(job['seconds'])
            rate = (next(counts) - before) * BATCH / job['seconds']
            for task in [sleeper, *tasks]:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        return {**quantiles(late), 'rate': rate}

    return asyncio.run(main())


def first(job: Job) -> dict[str, float]:
    """Load the first batch of a sharded dataset."""
    with granular.ShardedDatasetReader(job['url'], granular.decoders, shardstep=job['step']) as reader:
        source = granular.sources.Transform(granular.sources.Epochs(reader), sizes)
        return {'size': float(next(granular.Loader(source, BATCH))['size'].sum())}

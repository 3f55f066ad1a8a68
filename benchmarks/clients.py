"""The part of granular in a benchmark, in its own process."""

import time

_began = time.perf_counter()

import asyncio  # noqa: E402
import concurrent.futures  # noqa: E402
import functools  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Iterator, Mapping  # noqa: E402
from typing import Any  # noqa: E402

import granular  # noqa: E402

_imported = time.perf_counter() - _began

import numpy as np  # noqa: E402

from benchmarks.rivals.timing import best, memory, peak, rate  # noqa: E402

Job = Mapping[str, Any]


def sizes(datapoint: Mapping[str, Any], seed: Any) -> dict[str, int]:
    """Drop the bytes of a datapoint, so that the copying of batches is not measured."""
    return {'size': len(datapoint['data']), 'label': datapoint['label']}


def crop(datapoint: Mapping[str, Any], seed: Any) -> dict[str, Any]:
    """Crop a datapoint to a fixed size."""
    return {'data': np.frombuffer(datapoint['data'], np.uint8, 50_000), 'label': datapoint['label']}


def array(datapoint: Mapping[str, Any], seed: Any) -> dict[str, Any]:
    """Convert a datapoint to numbers."""
    return {'data': np.frombuffer(datapoint['data'], np.uint8), 'label': datapoint['label']}


def open_reader(job: Job) -> granular.DatasetReader:
    """Open the dataset of a job, with its small keys in memory."""
    knobs = {'concurrency': job.get('inflight', 256), **job.get('knobs', {})}
    path = granular.Path(job['url'], config=granular.IOConfig(**knobs))
    return granular.DatasetReader(path, granular.decoders, cache_keys=tuple(job.get('cache_keys', ('label', 'text'))))


def batches(job: Job, fn: Any) -> Iterator[Any]:
    """Iterate over the batches of a loader, after the first one."""
    source = granular.sources.Epochs(open_reader(job), shuffle=job.get('shuffle', True), seed=0)
    source = granular.sources.Transform(source, fn)
    loader = granular.Loader(source, job.get('batch', 64), prefetch=job.get('prefetch', 8))
    next(loader)
    return loader


def loader(job: Job) -> dict[str, float]:
    """Measure the datapoints per second of the Loader."""
    items = batches(job, array if job.get('arrays') else sizes)
    return {'rate': rate(items, job['batches'], job.get('batch', 64), 0)}


async def fetch_all(reader: granular.aio.DatasetReader, order: Any, ahead: int) -> None:
    """Fetch datapoints, 64 together, with several fetches in flight."""
    todo = iter(range(0, len(order), 64))

    async def work() -> None:
        for at in todo:
            await reader.fetch(order[at : at + 64], mask=['data'])

    await asyncio.gather(*(work() for _ in range(ahead)))


def fetch(job: Job) -> dict[str, float]:
    """Measure the datapoints per second of an async program with several fetches of 64 in flight."""

    async def main() -> float:
        config = granular.IOConfig(concurrency=job['inflight'], max_gap=job.get('max_gap', -1))
        path = granular.aio.Path(job['url'], config=config)
        async with granular.aio.DatasetReader(path, granular.decoders) as reader:
            order = np.random.default_rng(0).integers(0, len(reader), job['count'])
            started = time.perf_counter()
            await fetch_all(reader, order, job.get('ahead', 8))
            return len(order) / (time.perf_counter() - started)

    return {'rate': run(main())}


def requests(job: Job) -> dict[str, float]:
    """Measure the processor time of a request in microseconds, and the share of it that collects garbage."""
    import gc

    collecting = [0.0, 0.0]  # the seconds so far, and the start of the current collection

    def collected(phase: str, info: Any) -> None:
        if phase == 'start':
            collecting[1] = time.thread_time()
        else:
            collecting[0] += time.thread_time() - collecting[1]

    async def main() -> dict[str, float]:
        path = granular.aio.Path(job['url'], config=granular.IOConfig(concurrency=job['inflight'], max_gap=0))
        async with granular.aio.DatasetReader(path, granular.decoders) as reader:
            order = np.random.default_rng(0).integers(0, len(reader), job['count'])
            await fetch_all(reader, order[: 64 * 32], 4)
            gc.callbacks.append(collected)
            before, used, started = granular.io_stats()['requests'], time.thread_time(), time.perf_counter()
            await fetch_all(reader, order, 4)
            seconds, used = time.perf_counter() - started, time.thread_time() - used
            count = granular.io_stats()['requests'] - before
        return {'cpu': used / count * 1e6, 'rate': count / seconds, 'collecting': collecting[0] / used}

    return run(main())


def run(coro: Any) -> Any:
    """Run a coroutine on the kind of event loop that granular uses."""
    import uvloop

    return uvloop.run(coro)


def ranges(job: Job) -> dict[str, float]:
    """Measure the ranges per second of one call for many ranges of a file, the best of several."""

    async def main() -> float:
        config = granular.IOConfig(**job['config'])
        path = granular.aio.Path(job['url'], config=config)
        starts = np.array(job['starts'])
        least = 1e9
        for _ in range(job['times']):
            started = time.perf_counter()
            await path.read_ranges(starts, starts + job['size'])
            least = min(least, time.perf_counter() - started)
        return len(starts) / least

    return {'rate': run(main())}


def tail(job: Job) -> dict[str, float]:
    """Measure the percentiles 50, 99 and 99.9 of the duration of reads, and the share of hedged requests."""

    async def main() -> list[float]:
        config = granular.IOConfig(concurrency=64, hedge=job['hedge'])
        path = granular.aio.Path(job['url'], config=config)
        todo, times = iter(job['starts']), []

        async def work() -> None:
            for start in todo:
                started = time.perf_counter()
                await path.read_range(start, start + 100_000)
                times.append(time.perf_counter() - started)

        await asyncio.gather(*(work() for _ in range(64)))
        return times

    times = sorted(run(main()))
    result = {str(share): times[int(len(times) * share / 100)] for share in (50, 99, 99.9)}
    return result | {'hedges': granular.io_stats()['hedges'] / len(times)}


def iterate(job: Job) -> dict[str, float]:
    """Measure the datapoints per second of ``for datapoint in reader``."""
    with open_reader(job) as reader:
        started = time.perf_counter()
        count = sum(1 for _ in reader)
        return {'rate': count / (time.perf_counter() - started)}


def large(job: Job) -> dict[str, float]:
    """Measure the bytes per second of concurrent large records, and the growth of memory per byte in flight."""

    async def main() -> tuple[float, float]:
        async with granular.aio.DatasetReader(granular.aio.Path(job['url']), granular.decoders) as reader:
            rng = np.random.default_rng(0)
            todo = iter(np.concatenate([rng.permutation(len(reader)) for _ in range(job['epochs'])]).tolist())

            async def work() -> int:
                got = 0
                for at in todo:
                    got += len((await reader.get(at, ['data']))['data'])
                return got

            idle = peak()
            started = time.perf_counter()
            got = sum(await asyncio.gather(*(work() for _ in range(job['inflight']))))
            return got / (time.perf_counter() - started), peak() - idle

    rate, grown = run(main())
    return {'bytes': rate, 'grown': grown, 'inflight': job['inflight'] * 16e6}


def opening(job: Job) -> dict[str, float]:
    """Measure the seconds to open a sharded dataset, the first and the best, and the requests."""
    config = granular.IOConfig(index_cache=job.get('cache', ''))
    path, step = granular.Path(job['url'], config=config), job.get('step', 1)
    times = []
    for _ in range(job.get('times', 1)):
        before = granular.io_stats()['requests']
        started = time.perf_counter()
        with granular.ShardedDatasetReader(path, granular.decoders, shardstep=step) as reader:
            times.append(time.perf_counter() - started)
            requests, count = granular.io_stats()['requests'] - before, len(reader)
    return {'seconds': times[0], 'best': min(times), 'requests': requests, 'count': count}


def scattered(job: Job) -> dict[str, float]:
    """Measure the CPU of random datapoints of many shards on a disk, in microseconds: 64 at a time, and one by one."""
    picks = np.random.default_rng(2).integers(0, job['count'], 6400).tolist()

    def cost(read: Callable[[], object]) -> float:
        times = []
        for _ in range(6):
            started = time.process_time()
            read()
            times.append(time.process_time() - started)
        return min(times) / len(picks) * 1e6

    with granular.ShardedDatasetReader(job['folder'], granular.decoders) as reader:
        fetched = cost(lambda: [reader.fetch(picks[at : at + 64]) for at in range(0, len(picks), 64)])
        return {'fetched': fetched, 'single': cost(lambda: [reader[i] for i in picks])}


def batch(job: Job) -> dict[str, float]:
    """Measure the seconds and requests of one fetch of datapoints, and the requests for adjacent ones, per key."""

    def requests(fn: Any) -> float:
        before = granular.io_stats()['requests']
        fn()
        return granular.io_stats()['requests'] - before

    path = granular.Path(job['url'], config=granular.IOConfig(max_gap=0, concurrency=256))
    with granular.DatasetReader(path, granular.decoders) as reader:
        request_count = requests(lambda: reader.fetch(job['picks']))
        seconds = best(lambda: reader.fetch(job['picks']), 6)
    with granular.DatasetReader(job['url'], granular.decoders) as reader:
        near = requests(lambda: reader.fetch(range(1000, 1256))) / len(reader.spec)
    return {'seconds': seconds, 'requests': request_count, 'near': near}


def index(job: Job) -> dict[str, float]:
    """Measure the growth of memory by opening a bag, per byte of its index."""
    granular.Path(job['url']).with_suffix('.idx').read_range(0, 8)
    idle = peak()
    started = time.perf_counter()
    with granular.BagReader(job['url']) as bag:
        seconds = time.perf_counter() - started
        return {'grown': (peak() - idle) / (8 * len(bag)), 'seconds': seconds, 'count': len(bag)}


def epochs(job: Job) -> dict[str, float]:
    """Measure the growth of memory over several epochs."""
    idle = memory()
    items = batches({**job, 'cache_keys': ()}, crop)
    highest = 0.0
    started = time.perf_counter()
    for i in range(job['batches']):
        next(items)
        if i % 8 == 0:
            highest = max(highest, memory())
    return {'grown': highest - idle, 'rate': job['batches'] * 64 / (time.perf_counter() - started)}


def first(job: Job) -> dict[str, float]:
    """Measure the seconds from before the import to the first batch, and those of the import."""
    batches(job, sizes)
    return {'seconds': time.perf_counter() - _began, 'imported': _imported}


def local(job: Job) -> dict[str, float]:
    """Measure the datapoints per second from the local disk: single, in batches, of one key, and in a pipeline."""
    reader = granular.DatasetReader(job['url'], granular.decoders)
    order = job['order']
    many = [np.array(order[i : i + 256]) for i in range(0, len(order), 256)]
    reads: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
        'get': (reader.__getitem__, order),
        'fetch': (reader.fetch, many),
        'key': (lambda picks: reader.fetch(picks, ['data']), many),
    }

    def read_all(fn: Callable[[Any], Any], items: list[Any]) -> None:
        for item in items:
            fn(item)

    result = {name: len(order) / best(functools.partial(read_all, *what), 3) for name, what in reads.items()}
    result['pipeline'] = max(loader({**job, 'arrays': True, 'batch': 256, 'cache_keys': ()})['rate'] for _ in range(3))
    return result


def images(job: Job) -> dict[str, float]:
    """Measure the images per second of one thread, of two, and of the loader, and the longest block of the loop.

    Without simplejpeg, if the job has ``pillow``.
    """
    if job['pillow']:
        sys.modules['simplejpeg'] = None  # type: ignore[assignment]
    with granular.DatasetReader(job['url'], None) as raw:
        records = [raw[i]['image'] for i in range(min(400, len(raw)))]
    decode = granular.decoders['jpg']

    def threads(count: int) -> float:
        def work(k: int) -> None:
            for record in records[k::count]:
                decode(record)

        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            list(pool.map(work, range(count)))
            started = time.perf_counter()
            list(pool.map(work, range(count)))
            return len(records) / (time.perf_counter() - started)

    async def main() -> tuple[list[list[float]], float]:
        reader = await granular.aio.DatasetReader.open(job['url'], granular.decoders)
        loader = granular.aio.Loader(granular.aio.sources.Epochs(reader, seed=0), 32)
        for _ in range(50):
            await anext(loader)
        gap, runs = 0.0, []

        async def beat() -> None:
            nonlocal gap
            while True:
                before = time.perf_counter()
                await asyncio.sleep(0.001)
                gap = max(gap, time.perf_counter() - before - 0.001)

        for _ in range(3):
            task = asyncio.create_task(beat())
            started = time.perf_counter()
            for _ in range(job['batches']):
                await anext(loader)
            rate = job['batches'] * 32 / (time.perf_counter() - started)
            task.cancel()
            await asyncio.sleep(0.2)  # until prefetched batches have arrived
            runs.append([rate, threads(1), threads(2)])
        await loader.aclose()
        return runs, gap

    runs, gap = run(main())
    rate, single, double = (sorted(column)[1] for column in zip(*runs, strict=True))
    return {'rate': rate, 'single': single, 'double': double, 'gap': gap}

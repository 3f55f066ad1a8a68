"""What granular does in a benchmark, in a process of its own: ``python -m benchmarks.clients WHAT JOB``, in JSON."""

import time

_began = time.perf_counter()

import asyncio  # noqa: E402
import concurrent.futures  # noqa: E402
import json  # noqa: E402
import pathlib  # noqa: E402
import resource  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator, Mapping  # noqa: E402
from typing import Any  # noqa: E402

import granular  # noqa: E402

_imported = time.perf_counter() - _began

import numpy as np  # noqa: E402

Job = Mapping[str, Any]


def sizes(point: Mapping[str, Any], seed: Any) -> dict[str, int]:
    """A datapoint without its bytes, so that the loader is measured and not the copying of its batches."""
    return {'size': len(point['data']), 'label': point['label']}


def crop(point: Mapping[str, Any], seed: Any) -> dict[str, Any]:
    """A datapoint of a fixed size."""
    return {'data': np.frombuffer(point['data'], np.uint8, 50_000), 'label': point['label']}


def array(point: Mapping[str, Any], seed: Any) -> dict[str, Any]:
    """A datapoint as numbers."""
    return {'data': np.frombuffer(point['data'], np.uint8), 'label': point['label']}


def open_reader(job: Job) -> granular.DatasetReader:
    """The dataset of a job, with what is small in memory."""
    knobs = {'concurrency': job.get('inflight', 256), **job.get('knobs', {})}
    place = granular.Path(job['url'], config=granular.IOConfig(**knobs))
    return granular.DatasetReader(place, granular.decoders, cache_keys=tuple(job.get('cache_keys', ('label', 'text'))))


def batches(job: Job, fn: Any) -> Iterator[Any]:
    """A loader's batches, the first of which is taken already."""
    source = granular.sources.Epochs(open_reader(job), shuffle=job.get('shuffle', True), seed=0)
    loader = granular.Loader(granular.sources.Transform(source, fn), job.get('batch', 64))
    next(loader)
    return loader


def loader(job: Job) -> dict[str, float]:
    """Datapoints a second of the Loader."""
    items = batches(job, array if job.get('arrays') else sizes)
    began = time.perf_counter()
    for _ in range(job['batches']):
        next(items)
    return {'rate': job['batches'] * job.get('batch', 64) / (time.perf_counter() - began)}


def fetch(job: Job) -> dict[str, float]:
    """Datapoints a second of an asynchronous program that keeps some fetches of 64 going."""

    async def main() -> float:
        config = granular.IOConfig(concurrency=job['inflight'], max_gap=job.get('max_gap', -1))
        place = granular.aio.Path(job['url'], config=config)
        async with granular.aio.DatasetReader(place, granular.decoders) as reader:
            order = np.random.default_rng(0).integers(0, len(reader), job['count'])
            todo = iter(range(0, len(order), 64))

            async def work() -> None:
                for at in todo:
                    await reader.fetch(order[at : at + 64], mask=['data'])

            began = time.perf_counter()
            await asyncio.gather(*(work() for _ in range(job.get('ahead', 8))))
            return len(order) / (time.perf_counter() - began)

    return {'rate': run(main())}


def run(coro: Any) -> Any:
    """On the kind of loop that granular uses."""
    import uvloop

    return uvloop.run(coro)


def ranges(job: Job) -> dict[str, float]:
    """Ranges a second of one file, all asked for in one call, the best of some."""

    async def main() -> float:
        config = granular.IOConfig(**job['config'])
        place = granular.aio.Path(job['url'], config=config)
        starts = np.array(job['starts'])
        best = 1e9
        for _ in range(job['times']):
            began = time.perf_counter()
            await place.read_ranges(starts, starts + job['size'])
            best = min(best, time.perf_counter() - began)
        return len(starts) / best

    return {'rate': run(main())}


def tail(job: Job) -> dict[str, float]:
    """Seconds that 50, 99 and 99.9 of 100 reads take, and the share that was asked for twice."""

    async def main() -> list[float]:
        config = granular.IOConfig(concurrency=64, hedge=job['hedge'])
        place = granular.aio.Path(job['url'], config=config)
        todo, times = iter(job['starts']), []

        async def work() -> None:
            for start in todo:
                began = time.perf_counter()
                await place.read_range(start, start + 100_000)
                times.append(time.perf_counter() - began)

        await asyncio.gather(*(work() for _ in range(64)))
        return times

    times = sorted(run(main()))
    found = {str(share): times[int(len(times) * share / 100)] for share in (50, 99, 99.9)}
    return found | {'hedges': granular.io_stats()['hedges'] / len(times)}


def iterate(job: Job) -> dict[str, float]:
    """Datapoints a second of ``for datapoint in reader``."""
    with open_reader(job) as reader:
        began = time.perf_counter()
        count = sum(1 for _ in reader)
        return {'rate': count / (time.perf_counter() - began)}


def large(job: Job) -> dict[str, float]:
    """Bytes a second of large records, some at a time, and how far memory grew for each byte in flight."""

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
            began = time.perf_counter()
            got = sum(await asyncio.gather(*(work() for _ in range(job['inflight']))))
            return got / (time.perf_counter() - began), peak() - idle

    rate, grown = run(main())
    return {'bytes': rate, 'grown': grown, 'inflight': job['inflight'] * 16e6}


def peak() -> float:
    """The most bytes of memory that the process ever had. The figure of getrusage begins with that of the parent."""
    lines = pathlib.Path('/proc/self/status').read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith('VmHWM'))


def opening(job: Job) -> dict[str, float]:
    """Seconds to open a sharded dataset, the first time and at best, and the requests made."""
    config = granular.IOConfig(index_cache=job.get('cache', ''))
    place, step = granular.Path(job['url'], config=config), job.get('step', 1)
    times = []
    for _ in range(job.get('times', 1)):
        before = granular.io_stats()['requests']
        began = time.perf_counter()
        with granular.ShardedDatasetReader(place, granular.decoders, shardstep=step) as reader:
            times.append(time.perf_counter() - began)
            requests, count = granular.io_stats()['requests'] - before, len(reader)
    return {'seconds': times[0], 'best': min(times), 'requests': requests, 'count': count}


def batch(job: Job) -> dict[str, float]:
    """Seconds to fetch some datapoints at once, the requests made, and those for neighbours, for each key."""

    def requests(fn: Any) -> float:
        before = granular.io_stats()['requests']
        fn()
        return granular.io_stats()['requests'] - before

    place = granular.Path(job['url'], config=granular.IOConfig(max_gap=0, concurrency=256))
    with granular.DatasetReader(place, granular.decoders) as reader:
        asked = requests(lambda: reader.fetch(job['picks']))
        best = 1e9
        for _ in range(6):
            began = time.perf_counter()
            reader.fetch(job['picks'])
            best = min(best, time.perf_counter() - began)
    with granular.DatasetReader(job['url'], granular.decoders) as reader:
        near = requests(lambda: reader.fetch(range(1000, 1256))) / len(reader.spec)
    return {'seconds': best, 'requests': asked, 'near': near}


def index(job: Job) -> dict[str, float]:
    """How far memory grows to open a bag, for each byte of its index."""
    granular.Path(job['url']).with_suffix('.idx').read_range(0, 8)
    idle = peak()
    began = time.perf_counter()
    with granular.BagReader(job['url']) as bag:
        seconds = time.perf_counter() - began
        return {'grown': (peak() - idle) / (8 * len(bag)), 'seconds': seconds, 'count': len(bag)}


def epochs(job: Job) -> dict[str, float]:
    """How far memory grows over some epochs."""
    idle = now()
    items = batches({**job, 'cache_keys': ()}, crop)
    most = 0.0
    began = time.perf_counter()
    for i in range(job['batches']):
        next(items)
        if i % 8 == 0:
            most = max(most, now())
    return {'grown': most - idle, 'rate': job['batches'] * 64 / (time.perf_counter() - began)}


def now() -> float:
    """The bytes of memory that the process has."""
    return float(pathlib.Path('/proc/self/statm').read_text().split()[1]) * resource.getpagesize()


def first(job: Job) -> dict[str, float]:
    """Seconds from before the import to the first batch, and those of the import."""
    batches(job, sizes)
    return {'seconds': time.perf_counter() - _began, 'imported': _imported}


def local(job: Job) -> dict[str, float]:
    """Datapoints a second from the local disk: one by one, in batches, of one key, and as a pipeline."""
    reader = granular.DatasetReader(job['url'], granular.decoders)
    order = job['order']
    many = [np.array(order[i : i + 256]) for i in range(0, len(order), 256)]
    one = {'get': (reader.__getitem__, order), 'fetch': (reader.fetch, many)}
    one['key'] = (lambda picks: reader.fetch(picks, ['data']), many)
    found = {}
    for name, (fn, items) in one.items():
        best = 1e9
        for _ in range(3):
            began = time.perf_counter()
            for item in items:
                fn(item)
            best = min(best, time.perf_counter() - began)
        found[name] = len(order) / best
    found['pipeline'] = max(loader({**job, 'arrays': True, 'batch': 256, 'cache_keys': ()})['rate'] for _ in range(3))
    return found


def images(job: Job) -> dict[str, float]:
    """Images a second of one thread, of two, and of the loader, and the longest time that the loop did not turn."""
    with granular.DatasetReader(job['url'], None) as raw:
        records = [raw[i]['image'] for i in range(min(400, len(raw)))]
    decode = granular.decoders['jpg']

    def threads(count: int) -> float:
        def work(k: int) -> None:
            for record in records[k::count]:
                decode(record)

        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            list(pool.map(work, range(count)))
            began = time.perf_counter()
            list(pool.map(work, range(count)))
            return len(records) / (time.perf_counter() - began)

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
            began = time.perf_counter()
            for _ in range(job['batches']):
                await anext(loader)
            rate = job['batches'] * 32 / (time.perf_counter() - began)
            task.cancel()
            await asyncio.sleep(0.2)  # until what was fetched ahead is there
            runs.append([rate, threads(1), threads(2)])
        await loader.aclose()
        return runs, gap

    runs, gap = run(main())
    rate, single, double = (sorted(column)[1] for column in zip(*runs, strict=True))
    return {'rate': rate, 'single': single, 'double': double, 'gap': gap}


if __name__ == '__main__':
    print(json.dumps(globals()[sys.argv[1]](json.loads(pathlib.Path(sys.argv[2]).read_text()))))

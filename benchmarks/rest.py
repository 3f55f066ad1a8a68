"""The local disk, opening, memory, the first batch, images, and two processes."""

import concurrent.futures
import shutil
import statistics

import numpy as np

import granular
from benchmarks.bars import Bar, Result, Table, medians, ratio
from benchmarks.data import SPEC, Data
from benchmarks.nginx import Server
from benchmarks.remote import ours, rival, table
from granular.aio.bags.reader import bag_of


def local(data: Data, server: Server) -> Result:
    """Compare reads from the local disk with granular 0.24.2 and Grain."""
    rate = _local(data, 4000, 20_480)
    more = _local(data, 100_000, 5120)
    folder = data.folder / f'grain{data.count(100_000)}'
    if not folder.exists():
        rival(data, 'grain', 'grain', 'write', core=None, folder=str(folder), count=data.count(100_000), size=4000)
    grain = medians([rival(data, 'grain', 'grain', 'read', core=None, folder=str(folder)) for _ in range(data.runs(3))])
    bulk, pipe = grain['bulk'], grain['pipeline']
    old, new = (rate[f'{who} reader[i], 4 kB, 3 keys'] for who in ('granular 0.24.2', 'granular'))
    many, key, pipeline = (rate[f'granular {what}'] for what in _FETCHES)
    kilo, kilo_old = (more[f'{who} reader[i], 100 kB, 3 keys'] for who in ('granular', 'granular 0.24.2'))
    rate |= more | {'Grain ArrayRecord __getitems__ of 256, 4 kB': bulk, 'Grain pipeline, 4 kB': pipe}
    return [
        ratio('local reader[i], 4 kB / granular 0.24.2', new, old, 1),
        ratio('local reader[i], 100 kB / granular 0.24.2', kilo, kilo_old, 1),
        ratio('local fetch of 256, 4 kB, 3 keys / granular 0.24.2', many, old, 3),
        ratio('local fetch of 256, 4 kB, 1 key / Grain __getitems__', key, bulk, 2),
        ratio('local Loader, 4 kB / Grain pipeline', pipeline, pipe, 5),
    ], [table('local', 'The local disk, in the page cache', 'datapoints/s', rate)]


TRIP = 0.025  # seconds
_FETCHES = ('fetch of 256, 4 kB, 3 keys', 'fetch of 256, 4 kB, 1 key', 'Loader, 4 kB')


def _local(data: Data, size: int, draws: int) -> dict[str, float]:
    place, kb = data.local(size), f'{size // 1000} kB'
    order = np.random.default_rng(0).integers(0, data.count(400_000_000 // size), draws).tolist()
    got = medians(
        [
            {
                **ours(data, 'local', core=None, url=str(place), order=order, batches=draws // 256),
                **rival(data, 'granular', 'granular024', 'reads', core=None, folder=str(place), order=order),
            }
            for _ in range(data.runs(3))
        ]
    )
    return {
        f'granular reader[i], {kb}, 3 keys': got['get'],
        f'granular fetch of 256, {kb}, 3 keys': got['fetch'],
        f'granular fetch of 256, {kb}, 1 key': got['key'],
        f'granular Loader, {kb}': got['pipeline'],
        f'granular 0.24.2 reader[i], {kb}, 3 keys': got['rate'],
    }


def batch(data: Data, server: Server) -> Result:
    """Count the requests and round trips of one batch and of 100 shards on the 25 ms server."""
    place = data.small()
    picks = np.random.default_rng(1).permutation(data.count(200_000))[:256]
    ranges = []
    for key in SPEC:
        with granular.BagReader(place / f'{key}.bag') as bag:
            starts, stops = bag_of(bag.aio).limits(np.sort(picks)) or ((), ())
            ranges += [(f'{place.name}/{key}.bag', int(a), int(b)) for a, b in zip(starts, stops, strict=True)]
    job = {'url': server.delayed, 'ranges': ranges, 'inflight': 256, 'times': 6}
    bare = len(ranges) / rival(data, 'aiohttp', 'aiohttp', **job)['rate']
    mine = ours(data, 'batch', url=f'{server.delayed}/{place.name}', picks=picks.tolist())
    seconds, behind = mine['seconds'], f'ms; 1.3 times a bare aiohttp loop, {bare * 1e3:.0f} ms, and a round trip'
    bars = [
        Bar('fetch of 256 random datapoints, 3 keys', seconds * 1e3, (1.3 * bare + TRIP) * 1e3, behind, at_most=True),
        Bar('requests for them', mine['requests'], 256 * 3, 'one for each value', at_most=True),
        Bar('requests for each key of 256 neighbours of 4 kB', mine['near'], 2, at_most=True),
    ]
    for layout in ('refs', 'columns'):
        url = f'{server.delayed}/{data.shards(layout).name}'
        found = ours(data, 'opening', url=url, step=1 if data.quick else 10, times=5)
        behind = f'round trips; {found["best"] * 1e3:.0f} ms, the first time {found["seconds"] * 1e3:.0f} ms'
        bars.append(Bar(f'open 100 shards, {layout} layout', found['best'] / TRIP, 12, behind, at_most=True))
    return bars, []


def opening(data: Data, server: Server) -> Result:
    """Measure the opening of 1,000 shards of 3 keys, and of a large index."""
    bars, rows = [], []
    for layout in ('refs', 'columns'):
        place = data.shards(layout)
        cache = data.folder / 'index-cache'
        shutil.rmtree(cache, ignore_errors=True)
        runs = [ours(data, 'opening', url=f'{server.delayed}/{place.name}') for _ in range(3)]
        cold = medians(runs)['seconds']
        kept = [ours(data, 'opening', url=f'{server.delayed}/{place.name}', cache=str(cache)) for _ in range(4)][1:]
        warm = medians(kept)['seconds']
        behind = f's for {runs[0]["requests"]} requests and {runs[0]["count"]} datapoints'
        again = f's, {kept[0]["requests"]} requests and a listing'
        bars += [
            Bar(f'open {data.count(1000):,} shards, {layout} layout, 25 ms server', cold, 1.5, behind, at_most=True),
            Bar('the same from the index cache', warm, 0.5, again, at_most=True),
        ]
        rows += [(f'{layout} layout', cold, 's'), (f'{layout} layout, index cache', warm, 's')]
    spread = ours(data, 'scattered', folder=str(data.shards('refs')), count=data.count(1000) * 20)
    behind = f'{spread["fetched"]:.0f} us / {spread["single"]:.0f} us, 3 keys'
    name = 'CPU of a datapoint, 64 of 64 shards on a disk at a time / one by one'
    bars += [Bar(name, spread['fetched'] / spread['single'], 2, behind, at_most=True), large_index(data, server)]
    return bars, [Table('opening', f'Opening {data.count(1000):,} shards of 3 keys, 25 ms server', 'seconds', rows)]


def large_index(data: Data, server: Server) -> Bar:
    """Measure the memory of an index of 100 million records."""
    count = data.count(100_000_000)
    place = data.folder / f'index{count}'
    place.mkdir(exist_ok=True)
    with (place / 'large.idx').open('wb') as file:
        for at in range(0, count, 10_000_000):
            (np.arange(at + 1, min(at + 10_000_000, count) + 1, dtype='<i8') * 1000).tofile(file)
    with (place / 'large.bag').open('wb') as file:
        file.truncate(count * 1000)
    run = ours(data, 'index', url=f'{server.instant}/{place.name}/large.bag')
    shutil.rmtree(place)
    behind = f'times its {count * 8 / 1e6:,.0f} MB, {run["count"]:,.0f} records in {run["seconds"]:.1f} s'
    return Bar('peak memory to open a large index', run['grown'], 1.2, behind, at_most=True)


def memory(data: Data, server: Server) -> Result:
    """Compare the memory of one epoch and of ten."""
    place = data.medium()
    count = data.count(10_000) // 64
    url = f'{server.instant}/{place.name}'
    one = ours(data, 'epochs', url=url, batches=count)
    ten = ours(data, 'epochs', url=url, batches=10 * count)
    behind = f'prefetch 8, batch 64, {one["rate"]:,.0f}/s'
    return [
        Bar('memory of an epoch of 1 GB, in MB', one['grown'] / 1e6, 200, behind, at_most=True),
        Bar('memory of ten such epochs, in MB', ten['grown'] / 1e6, 200, f'{ten["rate"]:,.0f}/s', at_most=True),
    ], []


def first(data: Data, server: Server) -> Result:
    """Measure the time to the first batch."""
    place = data.medium()
    found = medians([ours(data, 'first', url=f'{server.delayed}/{place.name}') for _ in range(5)])
    return [
        Bar('from before the import to the first batch, 25 ms server', found['seconds'], 1, 's', at_most=True),
        Bar('the import', found['imported'], 0.25, 's', at_most=True),
    ], []


def images(data: Data, server: Server) -> Result:
    """Measure image decoding on both cores, by both decoders, and how long it blocks the event loop."""
    place = data.images()
    job = {'url': str(place), 'batches': 50 if data.quick else 200}
    fast, pillow = (ours(data, 'images', core=None, pillow=slow, **job) for slow in (False, True))
    both = [run['rate'] / run['double'] for run in (fast, pillow)]
    threads, note = 'simplejpeg {:.2f}, Pillow {:.2f}'.format(*both), f'; two bare threads {fast["double"]:,.0f}/s'
    return [
        ratio('jpg decoded by the Loader / by one thread', fast['rate'], fast['single'], 1.8, note),
        Bar('jpg decoded by the Loader / two bare threads with the same decoder', min(both), 0.9, threads),
        ratio('jpg, the faster decoder / Pillow, one core', fast['single'], pillow['single'], 1.5, ', quality 95'),
        Bar('longest pause of the event loop meanwhile', fast['gap'] * 1e3, 20, 'ms', at_most=True),
    ], []


def processes(data: Data, server: Server) -> Result:
    """Measure two loaders in two processes, on the local disk."""
    place = data.local(4000)
    job = {'url': str(place), 'batches': 400, 'batch': 256, 'cache_keys': ()}
    ratios, behind = [], ''
    for _ in range(3):
        one = ours(data, 'loader', core=None, **job)['rate']
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            apart = [Data(data.folder / f'process{i}', data.quick) for i in range(2)]
            both = [pool.submit(ours, there, 'loader', None, **job) for there in apart]
            two = sum(run.result()['rate'] for run in both)
        ratios.append(two / one)
        behind = f'{two:,.0f}/s / {one:,.0f}/s, local disk, 4 kB'
    return [Bar('two Loader processes / one', statistics.median(ratios), 1.6, behind)], []

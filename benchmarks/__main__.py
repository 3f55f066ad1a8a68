"""Run the benchmarks and print each bar with the figures behind it. ``--quick`` takes less data."""

import argparse
import asyncio
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import aiohttp
import numpy as np

import granular
from benchmarks.server import serving

DELAY = 0.025
ORACLE = pathlib.Path(__file__).parent.parent / '.oracles' / '0.24.2' / 'bin' / 'python'
SPEC = {'data': 'bytes', 'label': 'int', 'text': 'utf8'}


class Bar(NamedTuple):
    """A figure that must reach, or stay below, a bound."""

    name: str
    value: float
    bound: float
    at_most: bool
    behind: str

    @property
    def met(self) -> bool:
        """Whether it does."""
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    def __str__(self) -> str:
        sign = '<=' if self.at_most else '>='
        verdict = 'ok  ' if self.met else 'MISS'
        return f'{verdict}  {self.name:<48} {self.value:>8.2f} {sign} {self.bound:<6.4g} {self.behind}'


def best(fn: Callable[[], Any], repeats: int) -> float:
    """The least seconds of several runs."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        fn()
        times.append(time.perf_counter() - began)
    return min(times)


def write(place: pathlib.Path, count: int, size: int, layout: str = 'columns') -> None:
    """A dataset of three keys."""
    rng = np.random.default_rng(0)
    with granular.DatasetWriter(place, SPEC, granular.encoders, layout=layout) as writer:  # type: ignore[arg-type]
        for i in range(count):
            writer.append({'data': rng.bytes(size), 'label': i % 1000, 'text': f'text number {i}'}, flush=False)


# --- opening


def opening(folder: pathlib.Path) -> list[Bar]:
    """100 shards of 3 keys, on a server that delays each reply by 25 ms: in round trips."""
    bars = []
    for layout in ('refs', 'columns'):
        place = folder / f'shards-{layout}'
        spec = {'data': 'bytes', 'label': 'int', 'text': 'utf8'}
        with granular.ShardedDatasetWriter(place, spec, granular.encoders, shardlen=20, layout=layout) as writer:  # type: ignore[arg-type]
            for i in range(2000):
                writer.append({'data': b'x' * 100, 'label': i, 'text': str(i)}, flush=False)
        with serving(folder, DELAY) as address:

            def run(address: str = address, place: pathlib.Path = place) -> None:
                granular.ShardedDatasetReader(f'{address}/{place.name}', granular.decoders).close()

            first = best(run, 1)
            before = granular.io_stats()['requests']
            seconds = best(run, 5)
            requests = (granular.io_stats()['requests'] - before) // 5
        behind = f'round trips; {seconds * 1e3:.0f} ms, {requests} requests, the first time {first * 1e3:.0f} ms'
        bars.append(Bar(f'open 100 shards of 3 keys, {layout} layout', seconds / DELAY, 12, True, behind))
    return bars


# --- fetching


async def bare(url: str, ranges: list[tuple[str, int, int]]) -> float:
    """A bare aiohttp loop over ranges, all at once; the best of several runs."""
    connector = aiohttp.TCPConnector(limit=256)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:

        async def one(name: str, start: int, stop: int) -> int:
            headers = {'Range': f'bytes={start}-{stop - 1}'}
            async with session.get(f'{url}/{name}', headers=headers) as response:
                return len(await response.read())

        times = []
        for _ in range(6):
            began = time.perf_counter()
            await asyncio.gather(*(one(*row) for row in ranges))
            times.append(time.perf_counter() - began)
    return min(times[1:])


def run_bare(url: str, ranges: list[tuple[str, int, int]]) -> float:
    """On the kind of loop that granular uses."""
    try:
        import uvloop as loops
    except ImportError:
        loops = asyncio  # type: ignore[assignment]
    return float(loops.run(bare(url, ranges)))


def fetching(folder: pathlib.Path, count: int) -> list[Bar]:
    """256 datapoints of 3 keys on that server, index and references cached."""
    write(folder / 'fetch', count, 4000, 'refs')
    picks = np.random.default_rng(1).permutation(count)[:256]
    with serving(folder, DELAY) as address:
        place = granular.Path(f'{address}/fetch', config=granular.IOConfig(max_gap=0))
        with granular.DatasetReader(place, granular.decoders, cache_keys=('refs',)) as reader:
            bags = {key: reader.aio.bags[key] for key in SPEC}
            limits = {key: bag.limits(np.sort(picks)) for key, bag in bags.items()}
            ranges = [
                (f'fetch/{key}.bag', int(start), int(stop))
                for key, found in limits.items()
                for start, stop in zip(*found, strict=True)  # type: ignore[misc]
            ]
            reader.fetch(picks)
            before = granular.io_stats()['requests']
            seconds = best(lambda: reader.fetch(picks), 5)
            requests = (granular.io_stats()['requests'] - before) / 5
        loop = run_bare(address, ranges)
        place = granular.Path(f'{address}/fetch')
        with granular.DatasetReader(place, granular.decoders, cache_keys=('refs',)) as reader:
            before = granular.io_stats()['requests']
            reader.fetch(range(1000, 1256))
            neighbours = (granular.io_stats()['requests'] - before) / len(SPEC)
    behind = f'ms against {loop * 1e3:.0f} ms of a bare aiohttp loop and {DELAY * 1e3:.0f} ms'
    most = 1.3 * loop + DELAY
    return [
        Bar('fetch of 256 random datapoints, 3 keys', seconds * 1e3, most * 1e3, True, behind),
        Bar('requests for them', requests, 256 * 3, True, 'at most one per value'),
        Bar('requests per key for 256 neighbours of 4 kB', neighbours, 2, True, ''),
    ]


# --- a local disk

LOCAL = """
import json, sys, time
import granular, numpy as np
place, ours = sys.argv[1], sys.argv[2] == 'ours'
decoders = granular.decoders
reader = granular.DatasetReader(place, decoders)
order = np.random.default_rng(0).integers(0, len(reader), int(sys.argv[3])).tolist()
def run(fn, items):
    best = 1e9
    for _ in range(3):
        began = time.perf_counter()
        for item in items:
            fn(item)
        best = min(best, time.perf_counter() - began)
    return len(order) / best
found = {'get': run(reader.__getitem__, order)}
if ours:
    batches = [order[i : i + 256] for i in range(0, len(order), 256)]
    found['fetch'] = run(reader.fetch, batches)
print(json.dumps(found))
"""


def local(folder: pathlib.Path, count: int) -> list[Bar]:
    """``reader[i]`` and ``fetch`` on a local disk beside granular 0.24.2, index cached, 3 keys."""
    bars = []
    for size, records, draws in ((4000, count, 20_000), (100_000, count // 10, 5000)):
        place = folder / f'local-{size}'
        write(place, records, size)
        rates: dict[str, list[dict[str, float]]] = {'ours': [], 'theirs': []}
        for _ in range(3):  # in turns, as the machine is not always equally fast
            for who, python in (('theirs', str(ORACLE)), ('ours', sys.executable)):
                command = [python, '-c', LOCAL, str(place), who, str(draws)]
                # Its own folder, as both are called granular.
                where = '/' if who == 'theirs' else None
                done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=where)
                rates[who].append(json.loads(done.stdout))
        get = statistics.median(row['get'] for row in rates['ours'])
        fetch = statistics.median(row['fetch'] for row in rates['ours'])
        theirs = statistics.median(row['get'] for row in rates['theirs'])
        behind = f'times granular 0.24.2: {get:,.0f}/s against {theirs:,.0f}/s'
        bars.append(Bar(f'local reader[i], {size // 1000} kB', get / theirs, 1, False, behind))
        if size == 4000:
            behind = f'times granular 0.24.2: {fetch:,.0f}/s against {theirs:,.0f}/s'
            bars.append(Bar('local fetch of 256, 4 kB', fetch / theirs, 2, False, behind))
    return bars


def main() -> None:
    """Print every bar; the exit status says whether all are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--quick', action='store_true', help='less data')
    count = 5000 if parser.parse_args().quick else 30_000
    bars = []
    with tempfile.TemporaryDirectory(prefix='granular-bench-') as folder:
        for bench in (opening, lambda f: fetching(f, count), lambda f: local(f, count)):
            for bar in bench(pathlib.Path(folder)):
                print(bar, flush=True)
                bars.append(bar)
    sys.exit(not all(bar.met for bar in bars))


if __name__ == '__main__':
    main()

"""Training steps: batches that are ready, the interpreter and the loop beside a loader, the import, the first batch."""

import resource
import subprocess
import sys
import time
from statistics import median

from benchmarks.bars import CORE, ROOT, Bar, Result, child, medians
from benchmarks.data import Data
from benchmarks.nginx import Server
from benchmarks.remote import ours, rival

# One after the other for the first batch of ten shards: the listing, the spec, the ends and the tables of bags, the
# references and the records, each with a new connection or after one.
TRIPS = 9
# Bare imports, and round trips on one connection.
BARE = """
import asyncio, os, ssl, sys, urllib.parse
import numpy, uvloop
async def main(url, trips):
    at = urllib.parse.urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    for _ in range(int(trips)):
        writer.write(f'HEAD {at.path} HTTP/1.1\\r\\nHost: {at.netloc}\\r\\n\\r\\n'.encode())
        await reader.readuntil(b'\\r\\n\\r\\n')
    os._exit(0)
uvloop.run(main(*sys.argv[1:]))
"""


def training(data: Data, server: Server) -> Result:
    """Measure what a training loop notices of a loader: on both cores, and in the remark on one."""
    url, steps, seconds = f'{server.delayed}/{data.medium().name}', data.count(200), data.count(100) / 10

    def run(what: str, consumer: str, mp: bool = False) -> tuple[dict[str, float], dict[str, float]]:
        job = {'url': url, 'consumer': consumer, 'mp': mp, 'inflight': 0, 'steps': steps, 'seconds': seconds}
        runs = [ours(data, what, None, 'stepping', **job) for _ in range(data.runs())]
        return medians(runs), ours(data, what, CORE, 'stepping', **job)

    bars = []
    for mp, bound, consumers in (
        (False, 0.1, ('Loader', 'stream', 'DataLoader', 'torch')),
        (True, 0.3, ('Loader', 'stream')),
    ):
        for consumer in consumers:
            got, one = run('ready', consumer, mp)
            name = f'next() of a ready batch, {consumer}{", a worker process" if mp else ""}'
            bars.append(Bar(f'{name}, median', got['p50'], bound, f'ms; pinned {one["p50"]:.2f} ms', at_most=True))
            if not mp:
                bars.append(Bar(f'{name}, p99', got['p99'], 1, f'ms; pinned {one["p99"]:.2f} ms', at_most=True))
            if consumer == 'Loader' and not mp:
                grain = rival(data, 'grain', 'grain', 'ready', core=None, steps=steps)['p50']
                ratio = got['p50'] / grain
                bars.append(Bar(f'{name} / Grain ThreadPrefetchIterDataset', ratio, 2, f'{grain:.2f} ms', at_most=True))
    got, one = run('thread', 'Loader')
    more, pinned = (figures['p99'] - figures['p99_alone'] for figures in (got, one))
    behind = f'ms; pinned {pinned:.1f} ms; {got["rate"]:,.0f}/s'
    bars.append(Bar('a thread beside a Loader wakes up later, p99', more, 2, behind, at_most=True))
    for consumer in ('Loader', 'fetch'):
        got, one = run('coroutine', consumer)
        behind = f'ms; pinned {one["p99"]:.1f} ms; {got["rate"]:,.0f}/s'
        bars.append(Bar(f'a coroutine beside aio {consumer} is late, p99', got['p99'], 10, behind, at_most=True))
    for mp, bound in (False, 1.35), (True, 1.05):
        got, one = run('step', 'Loader', mp)
        name = f'step of 20 ms of Python, {"a worker process" if mp else "threads"} / the work alone'
        bars.append(Bar(name, got['ratio'], bound, f'pinned {one["ratio"]:.2f}', at_most=True))
    return [*bars, imports(), first(data, server)], []


def imports() -> Bar:
    """Compare the processor time of ``import granular`` with that of ``import numpy``."""

    def cost(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, '-c', code], check=True, cwd=ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    runs = [
        (cost('import granular'), cost('import granular; granular.Loader'), cost('import numpy')) for _ in range(20)
    ]
    own, used, numpy = (median(times) for times in zip(*runs, strict=True))
    behind = f'processor time; {used / numpy:.2f} with granular.Loader'
    return Bar('import granular / import numpy', own / numpy, 2.5, behind, at_most=True)


def first(data: Data, server: Server) -> Bar:
    """Compare the first batch of a sharded dataset, from the start of Python, with bare imports and round trips."""
    url, step = f'{server.delayed}/{data.shards("refs").name}', data.count(100)
    spent, bare = [], []
    for _ in range(data.runs()):
        started = time.perf_counter()
        ours(data, 'first', None, 'stepping', url=url, step=step)
        spent.append(time.perf_counter() - started)
        started = time.perf_counter()
        child([sys.executable, '-c', BARE, f'{url}/', str(TRIPS)], None)
        bare.append(time.perf_counter() - started)
    behind = f'{median(spent):.2f} s / {median(bare):.2f} s, with {TRIPS} round trips'
    name = 'first batch of a sharded dataset, from the start of Python / bare imports and round trips'
    return Bar(name, median(spent) / median(bare), 2, behind, at_most=True)

"""Reads from a bucket: granular, wrk, a plain aiohttp loop, obstore, s3fs, gcsfs, tensorstore, s3torchconnector and
other loaders.
"""

import functools
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import numpy as np

from benchmarks.bars import CORE, ROOT, Bar, Curves, Result, Table, child, medians, ratio
from benchmarks.data import Data, ranges_of, wrk_script
from benchmarks.nginx import Server

RIVALS = ROOT / '.rivals'
SCRIPTS = pathlib.Path(__file__).parent / 'rivals'
INFLIGHT = 256

Who = TypeVar('Who', bound=Hashable)


def ours(
    data: Data, what: str, core: int | None = CORE, module: str = 'clients', certificate: str = '', **job: object
) -> dict[str, float]:
    """Run a function of a benchmark of granular, by default one of ``benchmarks.clients``."""
    command = [sys.executable, '-m', 'benchmarks.part', module, what, data.job('ours', **job)]
    return child(command, core, cwd=ROOT, env={**os.environ, 'SSL_CERT_FILE': certificate} if certificate else None)


def rival(data: Data, name: str, script: str, *args: str, core: int | None = CORE, **job: object) -> dict[str, float]:
    """Run a rival, in its own environment: a PYTHONPATH would let it import this granular in place of its own."""
    python = str(RIVALS / name / 'bin' / 'python')
    return child([python, '-E', str(SCRIPTS / f'run_{script}.py'), *args, data.job(name, **job)], core, cwd='/')


def wrk(url: str, script: str, inflight: int, seconds: int) -> tuple[float, float]:
    """Measure the requests and bytes per second of wrk."""
    command = ['taskset', '-c', str(CORE), 'wrk', '-t1', f'-c{inflight}', f'-d{seconds}', '-s', script, url]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rate = re.search(r'Requests/sec:\s*([\d.]+)', said)
    moved = re.search(r'Transfer/sec:\s*([\d.]+)(\w+)', said)
    if rate is None or moved is None or 'Non-2xx' in said:
        raise RuntimeError(said)
    unit = {'B': 1, 'KB': 2**10, 'MB': 2**20, 'GB': 2**30}[moved[2]]
    return float(rate[1]), float(moved[1]) * unit


def medium(data: Data, server: Server) -> Result:
    """100 kB records, shuffled, one by one, on both servers."""
    fast, fast_table = _medium(data, server.instant, 'instant')
    slow, slow_table = _medium(data, server.delayed, '25 ms')
    return [*slow, *fast], [fast_table, slow_table]


def _medium(data: Data, url: str, which: str) -> tuple[list[Bar], Table]:
    place, count, bucket = data.medium(), data.count(40_000), which == '25 ms'
    ranges = ranges_of(place, count)
    script = wrk_script(data.folder / 'medium.lua', f'{place.name}/data.bag', ranges)
    job = {'url': url, 'path': f'{place.name}/data.bag', 'ranges': ranges, 'inflight': INFLIGHT}
    few = {**job, 'ranges': ranges[: count // 8]}
    mine = {'url': f'{url}/{place.name}', 'batches': count // 64, 'count': count, 'inflight': INFLIGHT}
    rate = in_turns(
        data.runs(3),
        {
            'wrk -t1 -c256': lambda: wrk(url, script, INFLIGHT, 2 if data.quick else 4)[0],
            'granular Loader': lambda: ours(data, 'loader', **mine)['rate'],
            'granular fetch': lambda: ours(data, 'fetch', **mine)['rate'],
            'obstore': lambda: rival(data, 'obstore', 'obstore', **job)['rate'],
            'tensorstore': lambda: rival(data, 'tensorstore', 'tensorstore', **job)['rate'],
            'bare aiohttp loop': lambda: rival(data, 'aiohttp', 'aiohttp', **job)['rate'],
            'gcsfs cat_ranges': lambda: rival(data, 'gcsfs', 'fsspec', **few, scheme='gs')['rate'],
            's3fs cat_ranges': lambda: rival(data, 's3fs', 'fsspec', **few, scheme='s3')['rate'],
            's3torchconnector': lambda: rival(data, 's3torchconnector', 's3torchconnector', **job)['rate'],
        },
    )
    if bucket:
        rate |= loaders(data, url, place)
    bounds = {'bare aiohttp loop': 0.8, 'obstore': 1.0, 'wrk -t1 -c256': 0.85}
    if bucket:
        bounds = {
            'granular 0.24.2 Loader, 32 workers': 15,
            'webdataset, 4 workers': 1.5,
            'mosaicml-streaming': 4,
            's3fs cat_ranges': 6,
            's3torchconnector': 2,
            'obstore': 1.0,
            'wrk -t1 -c256': 0.95,
        }
    bars = [
        ratio(f'Loader, 100 kB, {which} server / {name}', rate['granular Loader'], rate[name], bound)
        for name, bound in bounds.items()
    ]
    note = '; loaders of other libraries have both cores' if bucket else ''
    title = f'100 kB records, shuffled, {which} server{note}'
    return bars, table(f'medium-{which.split(maxsplit=1)[0]}', title, 'records/s', rate)


def many(data: Data, server: Server) -> Result:
    """100 kB records, shuffled, one by one, with 512 requests in flight on the 50 ms server."""
    place, count = data.medium(), data.count(40_000)
    script = wrk_script(data.folder / 'many.lua', f'{place.name}/data.bag', ranges_of(place, count))
    mine = {'url': f'{server.middle}/{place.name}', 'batches': count // 64, 'inflight': 512, 'prefetch': 16}
    rate = in_turns(
        data.runs(3),
        {
            'wrk -t1 -c512': lambda: wrk(server.middle, script, 512, 2 if data.quick else 4)[0],
            'granular Loader': lambda: ours(data, 'loader', **mine)['rate'],
        },
    )
    got, top = rate['granular Loader'], rate['wrk -t1 -c512']
    return [ratio('Loader, 100 kB, 50 ms server / wrk -t1 -c512', got, top, 0.9)], []


def in_turns(times: int, who: Mapping[Who, Callable[[], float]]) -> dict[Who, float]:
    """Return the median of several alternating runs of each, as the speed of the machine varies."""
    return medians([{name: fn() for name, fn in who.items()} for _ in range(times)])


def table(name: str, title: str, unit: str, figures: Mapping[str, float]) -> Table:
    """Make a table of figures, the largest first."""
    return Table(name, title, unit, [(who, value, '') for who, value in sorted(figures.items(), key=lambda x: -x[1])])


def loaders(data: Data, url: str, place: pathlib.Path) -> dict[str, float]:
    """Compare with other loaders, each with its own format and recommended settings, on both cores."""
    count = data.count(10_000)
    found = {}
    labels = {'webdataset': 'webdataset, 4 workers', 'streaming': 'mosaicml-streaming', 'litdata': 'litdata'}
    for name, label in labels.items():
        folder = data.folder / f'{name}{count}'
        job = {'folder': str(folder), 'count': count, 'url': url, 'path': folder.name}
        if not folder.exists():
            rival(data, name, name, 'write', core=None, **job)
        many = count // 64 * (4 if name == 'webdataset' else 1) - 8
        found[label] = rival(data, name, name, 'read', core=None, **job, batches=many)['rate']
    # Its 32 workers prepare as many batches before the first one is asked for, also in a quick run.
    job = {'url': url, 'path': place.name, 'warmup': 40, 'batches': 60}
    old = rival(data, 'granular', 'granular024', 'loader', core=None, **job)['rate']
    return {**found, 'granular 0.24.2 Loader, 32 workers': old}


def small(data: Data, server: Server) -> Result:
    """4 kB records: shuffled one by one, and in order."""
    place, count = data.small(), data.count(120_000)
    job = {'path': f'{place.name}/data.bag', 'ranges': ranges_of(place, count), 'inflight': INFLIGHT}
    url, later = f'{server.instant}/{place.name}', f'{server.delayed}/{place.name}'
    mine = {'url': url, 'count': count, 'inflight': INFLIGHT, 'max_gap': 0}
    script = wrk_script(data.folder / 'small.lua', job['path'], job['ranges'])
    rate = in_turns(
        data.runs(3),
        {
            'wrk -t1 -c64, shuffled': lambda: wrk(server.instant, script, 64, 2 if data.quick else 4)[0],
            'granular fetch, shuffled': lambda: ours(data, 'fetch', **mine)['rate'],
            'granular fetch, shuffled, 64 in flight': lambda: ours(data, 'fetch', **{**mine, 'inflight': 64})['rate'],
            'granular Loader, shuffled': lambda: ours(data, 'loader', url=url, batches=count // 64)['rate'],
            'bare aiohttp loop, shuffled': lambda: rival(data, 'aiohttp', 'aiohttp', url=server.instant, **job)['rate'],
            'obstore, shuffled': lambda: rival(data, 'obstore', 'obstore', url=server.instant, **job)['rate'],
            'granular, in order': lambda: ours(data, 'iterate', url=url)['rate'],
            'granular, in order, 25 ms server': lambda: ours(data, 'iterate', url=later)['rate'],
        },
    )
    bare, got = rate['bare aiohttp loop, shuffled'], rate['granular Loader, shuffled']
    fetch, top = rate['granular fetch, shuffled, 64 in flight'], rate['wrk -t1 -c64, shuffled']
    bars = [
        ratio('fetch, 4 kB shuffled, instant server / wrk -t1 -c64', fetch, top, 0.75),
        ratio('Loader, 4 kB shuffled, instant server / bare aiohttp loop', got, bare, 0.8),
        Bar('4 kB in order, thousands a second', rate['granular, in order'] / 1e3, 150, 'iteration, decoded'),
    ]
    return bars, [table('small', '4 kB records, instant server', 'records/s', rate)]


def large(data: Data, server: Server) -> Result:
    """16 MB records, in parallel parts, beside wrk with ranges of 1 MiB."""
    place = data.large()
    starts = [at for at, _ in ranges_of(place, 200)]
    mebi = [(at, at + (1 << 20)) for at in starts]
    script = wrk_script(data.folder / 'large.lua', f'{place.name}/data.bag', mebi)
    mine = {'url': f'{server.instant}/{place.name}', 'inflight': 8, 'epochs': 10 if data.quick else 2}
    runs = [{'wrk': wrk(server.instant, script, 64, 4)[1], **ours(data, 'large', **mine)} for _ in range(data.runs(3))]
    top, got = (medians(runs)[name] / 1e6 for name in ('wrk', 'bytes'))
    grown = max(run['grown'] / run['inflight'] for run in runs)
    bars = [
        Bar('16 MB records / wrk at 1 MiB ranges', got / top, 0.9, f'{got:,.0f} MB/s / {top:,.0f} MB/s'),
        Bar('peak memory for a byte in flight, 16 MB records', grown, 3, '8 records in flight', at_most=True),
    ]
    figures = {'granular': got, 'wrk at 1 MiB ranges': top}
    return bars, [table('large', '16 MB records, instant server', 'MB/s', figures)]


def tls(data: Data, server: Server) -> Result:
    """100 kB records over TLS."""
    place, count = data.medium(), data.count(20_000)
    job = {'path': f'{place.name}/data.bag', 'ranges': ranges_of(place, count), 'inflight': 64, 'url': server.tls}
    mine = {'url': f'{server.tls}/{place.name}', 'count': count, 'inflight': 64}

    trusted = {'certificate': server.certificate}
    rate = in_turns(
        data.runs(3),
        {
            'granular fetch': lambda: ours(data, 'fetch', **mine, **trusted)['rate'],
            'bare aiohttp loop': lambda: rival(data, 'aiohttp', 'aiohttp', **job, **trusted)['rate'],
            'obstore': lambda: rival(data, 'obstore', 'obstore', **job, **trusted)['rate'],
        },
    )
    bars = [
        ratio(f'100 kB over TLS / {name}', rate['granular fetch'], rate[name], bound)
        for name, bound in (('bare aiohttp loop', 0.8), ('obstore', 1.15))
    ]
    return bars, [table('tls', '100 kB records over TLS, instant server', 'records/s', rate)]


def tail(data: Data, server: Server) -> Result:
    """Measure the duration of reads when one reply in a hundred takes 2 s, with hedging and without."""
    place = data.medium()
    size = data.count(10_000) * 90_000
    starts = np.random.default_rng(0).integers(0, size, 4000 if data.quick else 20_000).tolist()
    lines = {}
    for name, share in (('without hedging', 0.0), ('hedging, 3 %', 0.03)):
        found = ours(data, 'tail', url=f'{server.uneven}/{place.name}/data.bag', hedge=share, starts=starts)
        lines[f'{name} ({found["hedges"]:.1%} sent twice)'] = [found[key] * 1e3 for key in ('50', '99', '99.9')]
    slow, fast = (line[2] for line in lines.values())
    bar = Bar('p99.9 of reads without hedging / with it', slow / fast, 3, f'{slow:.0f} ms / {fast:.0f} ms')
    points = ['p50', 'p99', 'p99.9']
    return [bar], [Curves('tail', 'Reads of 100 kB where 1 % of replies take 2 s', 'ms', 'percentile', points, lines)]


def faults(data: Data, server: Server) -> Result:
    """Measure the throughput when one reply in a hundred is a 500, a 503, or a closed connection."""
    place, count = data.medium(), data.count(40_000)

    def rate(there: str, depth: int) -> float:
        return ours(data, 'fetch', url=f'{there}/{place.name}', count=count, inflight=INFLIGHT, ahead=depth)['rate']

    who = {
        (kind, depth): functools.partial(rate, there, depth)
        for depth in (8, 16, 32)
        for kind, there in (('1 % faults', server.faulty), ('no faults', server.delayed))
    }
    rates = in_turns(data.runs(3), who)
    lines = {name: [rates[kind, depth] for kind, depth in who if kind == name] for name, _ in who}
    kept, whole = rates['1 % faults', 16], rates['no faults', 16]
    name, note = 'throughput at 1 % faults / without faults, 25 ms server', ', with 16 batches of 64 in flight'
    bar = ratio(name, kept, whole, 0.9, note)
    return [bar], [Curves('faults', 'Datapoints of 100 kB', 'a second', 'batches in flight', ['8', '16', '32'], lines)]

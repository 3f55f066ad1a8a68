"""Caches: the second epoch from the local disk, and a cache of worker processes compared with KappaData."""

import functools
import tempfile
from collections.abc import Mapping
from typing import Any

import granular
from benchmarks.bars import Bar, Result, Table, ratio
from benchmarks.data import Data
from benchmarks.nginx import Server
from benchmarks.remote import in_turns, ours, rival, table
from benchmarks.rivals import reading

_ours = functools.partial(ours, module='piping')
WORKERS = 4


def blockcache(data: Data, server: Server) -> Result:
    """Measure two epochs with the block cache over the 25 ms server, and two more in another process."""
    bars, rows = [], []
    for name, place in (('100 kB', data.medium()), ('4 kB', data.small())):
        batches = data.count(10_000 if name == '100 kB' else 200_000) // 64
        job = {'url': f'{server.delayed}/{place.name}', 'batches': batches, 'epochs': 2}
        with tempfile.TemporaryDirectory(prefix='granular-bench-', dir=data.folder) as folder:
            knobs = {'cache_dir': folder, 'cache_bytes': 4 << 30, 'index_cache': folder}
            # As in any run, the first batches of the second epoch are prefetched during the first.
            first = _ours(data, 'epochs', **job, knobs=knobs)
            again = _ours(data, 'epochs', **job, knobs=knobs)
        pair = in_turns(
            data.runs(),
            {
                'plain': lambda job=job: _ours(data, 'epochs', **{**job, 'epochs': 1})['rates'][0],
                'cold': lambda job=job: _first_epoch(data, job),
            },
        )
        plain, cold, warm, restarted = pair['plain'], pair['cold'], first['rates'][1], again['rates'][0]
        rows += [
            (f'{name}, without a cache', plain, ''),
            (f'{name}, first epoch', cold, f'{first["requests"][0]:,.0f} requests'),
            (f'{name}, second epoch', warm, f'{first["requests"][1]:,.0f} requests'),
            (f'{name}, first epoch of another process', restarted, f'{again["requests"][0]:,.0f} requests'),
        ]
        if name == '100 kB':
            behind = 'for one byte of the one bag that is not in memory'
            bars += [
                ratio('first epoch with the block cache / without, 100 kB', cold, plain, 0.5),
                ratio('second epoch / first, block cache, 25 ms server', warm, cold, 5),
                ratio('the same in another process', restarted, cold, 5),
                Bar('requests of the second epoch', first['requests'][1], 0, at_most=True),
                Bar('requests of the other process', again['requests'][0], 1, behind, at_most=True),
            ]
    return bars, [Table('blockcache', 'Loader with the block cache, 25 ms server', 'records/s', rows)]


def _first_epoch(data: Data, job: Mapping[str, Any]) -> float:
    """Measure the records per second of a first epoch, with an empty block cache."""
    with tempfile.TemporaryDirectory(prefix='granular-bench-', dir=data.folder) as folder:
        knobs = {'cache_dir': folder, 'cache_bytes': 4 << 30, 'index_cache': folder}
        rates: list[float] = _ours(data, 'epochs', **{**job, 'epochs': 1}, knobs=knobs)['rates']
        return rates[0]


def shared(data: Data, server: Server) -> Result:
    """Read 2,000 cached values of 10 kB one by one in 4 worker processes."""
    job = {'count': 2000, 'size': 10_000, 'workers': WORKERS}
    rate = in_turns(
        data.runs(3),
        {
            'granular SharedMemoryCache': lambda: ours(data, 'cached', None, 'caching', **job, rounds=20)['rate'],
            'KappaData SharedDictDataset': lambda: rival(
                data, 'kappadata', 'kappadata', core=None, **job, rounds=data.runs(4)
            )['rate'],
        },
    )
    got, theirs = rate.values()
    note = f'; {WORKERS * 1e6 / got:.1f} us a read, {WORKERS * 1e6 / theirs:.0f} us'
    return [ratio(f'SharedMemoryCache / SharedDictDataset, {WORKERS} workers', got, theirs, 5, note)], [
        table('caching', f'10 kB from a cache that {WORKERS} worker processes share', 'reads/s', rate)
    ]


def cached(job: Mapping[str, Any]) -> dict[str, float]:
    """Measure the reads per second from the cache of granular, in its own process."""
    values = reading.values(job['count'], job['size'])
    with granular.SharedMemoryCache(values) as cache:
        if cache.fetch(range(len(values))) != values:
            raise RuntimeError('what is cached is something else')
        return {'rate': reading.rate(cache.__getitem__, len(values), job['workers'], job['rounds'])}

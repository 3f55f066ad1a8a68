"""Caches: the second epoch from the local disk."""

import functools
import tempfile

from benchmarks.bars import Bar, Result, Table
from benchmarks.data import Data
from benchmarks.nginx import Server
from benchmarks.remote import ours

_ours = functools.partial(ours, module='piping')


def blockcache(data: Data, server: Server) -> Result:
    """Two epochs with the block cache over the 25 ms server, and two more of another process."""
    bars, rows = [], []
    for name, place in (('100 kB', data.medium()), ('4 kB', data.small())):
        batches = data.count(10_000 if name == '100 kB' else 200_000) // 64
        job = {'url': f'{server.delayed}/{place.name}', 'batches': batches, 'epochs': 2}
        with tempfile.TemporaryDirectory(prefix='granular-bench-', dir=data.folder) as folder:
            knobs = {'cache_dir': folder, 'cache_bytes': 4 << 30, 'index_cache': folder}
            # The last batches of the first epoch are read ahead already while it is counted, as in any run.
            plain = _ours(data, 'epochs', **{**job, 'epochs': 1})
            first = _ours(data, 'epochs', **job, knobs=knobs)
            again = _ours(data, 'epochs', **job, knobs=knobs)
        cold, warm, restarted = *first['rates'], again['rates'][0]
        rows += [
            (f'{name}, without a cache', plain['rates'][0], ''),
            (f'{name}, first epoch', cold, f'{first["requests"][0]:,.0f} requests'),
            (f'{name}, second epoch', warm, f'{first["requests"][1]:,.0f} requests'),
            (f'{name}, first epoch of another process', restarted, f'{again["requests"][0]:,.0f} requests'),
        ]
        if name == '100 kB':
            behind = f'{warm:,.0f}/s / {cold:,.0f}/s'
            bars += [
                Bar('second epoch / first, block cache, 25 ms server', warm / cold, 5, behind),
                Bar('the same in another process', restarted / cold, 5, f'{restarted:,.0f}/s / {cold:,.0f}/s'),
                Bar('requests of both', first['requests'][1] + again['requests'][0], 0, '', at_most=True),
            ]
    return bars, [Table('blockcache', 'Loader with the block cache, 25 ms server', 'records/s', rows)]

"""Caches that worker processes share: ours beside KappaData's."""

import json
import pathlib
import sys

from benchmarks.bars import Bar, Result
from benchmarks.data import Data
from benchmarks.nginx import Server
from benchmarks.remote import in_turns, ours, rival, table

WORKERS = 4


def caching(data: Data, server: Server) -> Result:
    """2,000 values of 10 kB that are cached already, read one by one by 4 worker processes."""
    job = {'count': 2000, 'size': 10_000, 'workers': WORKERS}
    rate = in_turns(
        1 if data.quick else 3,
        {
            'granular SharedMemoryCache': lambda: ours(data, 'cached', None, 'caching', **job, rounds=20)['rate'],
            'KappaData SharedDictDataset': lambda: rival(
                data, 'kappadata', 'kappadata', core=None, **job, rounds=1 if data.quick else 4
            )['rate'],
        },
    )
    got, theirs = rate.values()
    behind = f'{got:,.0f}/s / {theirs:,.0f}/s; {WORKERS * 1e6 / got:.1f} us a read, {WORKERS * 1e6 / theirs:.0f} us'
    return [Bar(f'SharedMemoryCache / SharedDictDataset, {WORKERS} workers', got / theirs, 5, behind)], [
        table('caching', f'10 kB from a cache that {WORKERS} worker processes share', 'reads/s', rate)
    ]


def main() -> None:
    """What granular does of it, in a process of its own: ``python -m benchmarks.caching cached JOB``."""
    import granular
    from benchmarks.rivals import reading

    job = json.loads(pathlib.Path(sys.argv[2]).read_text())
    values = reading.values(job['count'], job['size'])
    with granular.SharedMemoryCache(values) as cache:
        if cache.fetch(range(len(values))) != values:
            raise RuntimeError('what is cached is something else')
        print(json.dumps({'rate': reading.rate(cache.__getitem__, len(values), job['workers'], job['rounds'])}))


if __name__ == '__main__':
    main()

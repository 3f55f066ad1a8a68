"""Processor time of a request, beside the floor: a bare protocol that sends ranged GETs and checks nothing."""

import statistics

from benchmarks.bars import Bar, Result, Table
from benchmarks.data import Data, ranges_of
from benchmarks.nginx import Server
from benchmarks.remote import ours

INFLIGHT = 64


def requests(data: Data, server: Server) -> Result:
    """Measure the processor time of a request of 4 kB, of 100 kB, and of 100 kB over TLS."""
    bars, rows = [], []
    for name, path, count, bound in (
        ('4 kB', data.small(), data.count(120_000), 1.3),
        ('100 kB', data.medium(), data.count(40_000), 1.3),
        ('100 kB over TLS', data.medium(), data.count(20_000), 1.1),
    ):
        url = server.tls if 'TLS' in name else server.instant
        certificate = server.certificate if 'TLS' in name else ''
        job = {'inflight': INFLIGHT, 'certificate': certificate}
        bare = {'url': url, 'path': f'{path.name}/data.bag', 'ranges': ranges_of(path, count), **job}
        own = {'url': f'{url}/{path.name}', 'count': count, **job}
        pairs = [
            (ours(data, 'floor', module='floor', **bare), ours(data, 'requests', **own)) for _ in range(data.runs())
        ]
        ratios = [own['cpu'] / bare['cpu'] for bare, own in pairs]
        cost, least = (statistics.median(run[i]['cpu'] for run in pairs) for i in (1, 0))
        spread = f'{min(ratios):.2f} to {max(ratios):.2f}'
        figures = f'{cost:.1f} us / {least:.1f} us; {spread}'
        bars.append(Bar(f'client CPU of a request / floor, {name}', statistics.median(ratios), bound, figures, True))
        rows += [(f'granular fetch, {name}', cost, f'{pairs[0][1]["rate"]:,.0f}/s'), (f'floor, {name}', least, '')]
        if name == '100 kB':
            share = statistics.median(own['collecting'] for _, own in pairs)
            bars.append(Bar("time of the garbage collector / of the loop's thread", share, 0.03, name, True))
    return bars, [Table('requests', 'Processor time of a request, 64 in flight', 'us', rows)]

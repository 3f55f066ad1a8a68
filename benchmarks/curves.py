"""Settings of IOConfig: the curves from which their defaults were chosen."""

import numpy as np

from benchmarks.bars import Bar, Curves, Result
from benchmarks.data import Data
from benchmarks.nginx import Server
from benchmarks.remote import ours

KIB, MIB = 1 << 10, 1 << 20


def inflight(data: Data, server: Server) -> Result:
    """Vary the requests in flight, for several latencies and record sizes."""
    points = (16, 64, 256, 512, 1024, 2048, 0)
    lines = {}
    for size, place in ((4, data.small()), (100, data.medium())):
        for name, url, trip in (
            ('instant', server.instant, 0.0005), ('25 ms', server.delayed, 0.025), ('100 ms', server.far, 0.1),
        ):  # fmt: skip
            line = []
            for count in points:
                # For some seconds, and longer where the concurrency adapts.
                seconds, rate = (3, min(count / trip, 10_000)) if count else (8, 8000)
                many = max(64 * 48, data.count(int(seconds * rate)))
                job = {'url': f'{url}/{place.name}', 'inflight': count, 'count': many, 'max_gap': 0, 'ahead': 48}
                line.append(ours(data, 'fetch', **job)['rate'])
            lines[f'{size} kB, {name}'] = line
    labels = [str(count) if count else 'adaptive' for count in points]
    bars = [
        Bar(f'{name}: adaptive / best of the fixed', line[-1] / max(line[:-1]), 0.95, f'{line[-1]:,.0f}/s')
        for name, line in lines.items()
        if name.startswith('100 kB')
    ]
    return bars, [Curves('inflight', 'Requests in flight', 'records/s', 'IOConfig.concurrency', labels, lines)]


def gap(data: Data, server: Server) -> Result:
    """Vary the gap between adjacent ranges that are merged into one request."""
    place = data.large()
    points = (4, 16, 32, 64, 128, 256)
    lines: dict[str, list[float]] = {}
    for name, url in (('instant', server.instant), ('25 ms', server.delayed)):
        for how in ('together', 'apart'):
            for kib in points:
                starts = (np.arange(512) * (4000 + kib * KIB)).tolist()
                config = {'max_gap': kib * KIB if how == 'together' else 0}
                job = {'url': f'{url}/{place.name}/data.bag', 'starts': starts, 'size': 4000, 'times': 8}
                lines.setdefault(f'{name}, {how}', []).append(ours(data, 'ranges', config=config, **job)['rate'])
    labels = [f'{kib} KiB' for kib in points]
    return [], [Curves('gap', '4 kB ranges with a gap', 'ranges/s', 'gap between them', labels, lines)]


def request(data: Data, server: Server) -> Result:
    """Vary the largest request, for one range of 16 MB and for eight."""
    place = data.large()
    points = (1, 2, 4, 8, 16)
    lines: dict[str, list[float]] = {}
    for name, url in (('instant', server.instant), ('25 ms', server.delayed), ('100 ms', server.far)):
        for count in (1, 8):
            for mib in points:
                job = {'url': f'{url}/{place.name}/data.bag', 'starts': [i * 32_000_000 for i in range(count)]}
                job |= {'size': 16_000_000, 'times': 12, 'config': {'max_request': mib * MIB}}
                rate = ours(data, 'ranges', **job)['rate']
                lines.setdefault(f'{name}, {count} at a time', []).append(rate * 16)
    labels = [f'{mib} MiB' for mib in points]
    return [], [
        Curves('request', 'The largest request, for ranges of 16 MB', 'MB/s', 'IOConfig.max_request', labels, lines)
    ]

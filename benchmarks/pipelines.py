"""Pipelines: streams compared with the Loader, blocks, overhead compared with Grain, processes, PyTorch's loader."""

import functools

from benchmarks.bars import Bar, Result
from benchmarks.data import Data
from benchmarks.nginx import Server
from benchmarks.remote import in_turns, ours, rival

_ours = functools.partial(ours, module='piping')


def streams(data: Data, server: Server) -> Result:
    """Compare a shuffled and batched MapDataset with the Loader alone, over the 25 ms server."""
    batches = data.count(1000)
    job = {'url': f'{server.delayed}/{data.medium().name}', 'batches': batches}
    rate = in_turns(
        1 if data.quick else 3,
        {'stream': lambda: _ours(data, 'stream', **job)['rate'], 'loader': lambda: ours(data, 'loader', **job)['rate']},
    )
    got, bare = rate['stream'], rate['loader']
    return [Bar('MapDataset stream / Loader, 25 ms server', got / bare, 0.9, f'{got:,.0f}/s / {bare:,.0f}/s')], []


def blocks(data: Data, server: Server) -> Result:
    """Compare 4 kB records shuffled in blocks and fully shuffled, in batches of 256 and 64, over the 25 ms server."""
    url = f'{server.delayed}/{data.small().name}'
    bars = []
    for batch, bound in ((256, 10), (64, 8)):
        full, some = data.count(400) * 256 // batch, data.count(1600) * 256 // batch - 20
        whole = _ours(data, 'loader', url=url, batch=batch, batches=full, blocks=False)
        result = _ours(data, 'loader', url=url, batch=batch, batches=some, blocks=True)
        figures = f'{result["rate"]:,.0f}/s / {whole["rate"]:,.0f}/s'
        saved = f'{result["requests"]:.4f} requests a record, fully shuffled {whole["requests"]:.2f}'
        size = '' if batch == 256 else f', batches of {batch}'
        bars += [
            Bar(f'records / requests of shuffle.Blocks, 4 kB{size}', 1 / result['requests'], 20, saved),
            Bar(
                f'shuffle.Blocks / full shuffle, 4 kB, 25 ms server{size}',
                result['rate'] / whole['rate'],
                bound,
                figures,
            ),
        ]
    return bars, []


def labels(data: Data, server: Server) -> Result:
    """Count the bytes of all replies while ModeWrapper loads the labels of 100 kB records, after opening."""
    place = data.medium()
    result = _ours(data, 'labels', url=f'{server.delayed}/{place.name}', cache_keys=[])
    bag, whole = ((place / f'{key}.bag').stat().st_size for key in ('label', 'data'))
    behind = (
        f'{result["bytes"]:,.0f} B / {bag:,} B for {result["count"]:,.0f} labels in {result["requests"]:.0f} requests, '
        f'{result["seconds"] * 1e3:.0f} ms; opening took {result["opening"]:,.0f} B; the records are {whole:,} B'
    )
    ratio = result['bytes'] / bag
    return [Bar('bytes of ModeWrapper(reader, "label") / label bag', ratio, 1, behind, at_most=True)], []


def overhead(data: Data, server: Server) -> Result:
    """Compare the overhead of a pipeline with Grain: a list, the identity, batches of 64."""
    count = data.count(640_000)
    rate = in_turns(
        1 if data.quick else 3,
        {
            'ours': lambda: _ours(data, 'overhead', core=None, count=count)['rate'],
            'grain': lambda: rival(data, 'grain', 'grain', 'overhead', core=None, count=count)['rate'],
        },
    )
    got, grain_rate = rate['ours'], rate['grain']
    looked = _ours(data, 'lookups', core=None)['rate']
    return [
        Bar('elements of a pipeline without I/O / Grain', got / grain_rate, 3, f'{got:,.0f}/s / {grain_rate:,.0f}/s'),
        Bar('lookups in a shuffled billion, millions a second', looked / 1e6, 5),
    ], []


def workers(data: Data, server: Server) -> Result:
    """Compare 4 worker processes with 1, for a transformation that computes in Python for a millisecond."""
    batches = 40 if data.quick else 120
    rate = in_turns(
        1 if data.quick else 3,
        {
            count: lambda count=count: _ours(data, 'workers', core=None, workers=count, batches=batches)['rate']
            for count in (4, 1)
        },
    )
    behind = f'{rate[4]:,.0f}/s / {rate[1]:,.0f}/s'
    return [Bar('4 worker processes / 1, 1 ms of Python each', rate[4] / rate[1], 1.7, behind)], []


def torch(data: Data, server: Server) -> Result:
    """Compare PyTorch's DataLoader over a reader that it asks for batches, and for single datapoints."""
    url = f'{server.delayed}/{data.medium().name}'

    def run(workers: int, together: bool) -> float:
        batches = data.count(400) // 4 if together else 4
        job = {'url': url, 'workers': workers, 'together': together, 'batches': batches}
        return ours(data, 'loader', core=None, module='torching', **job)['rate']

    who = {
        (workers, together): functools.partial(run, workers, together)
        for workers in (0, 2)
        for together in (True, False)
    }
    rate = in_turns(1 if data.quick else 3, who)
    return [
        Bar(
            f'torch DataLoader, {workers} workers: __getitems__ / without, 25 ms server',
            rate[workers, True] / rate[workers, False],
            10,
            f'{rate[workers, True]:,.0f}/s / {rate[workers, False]:,.0f}/s',
        )
        for workers in (0, 2)
    ], []

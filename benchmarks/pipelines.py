"""Pipelines: streams compared with the Loader, blocks, overhead compared with Grain, processes, PyTorch's loader."""

import functools

from benchmarks.bars import Bar, Result, ratio
from benchmarks.data import Data
from benchmarks.nginx import Server
from benchmarks.remote import in_turns, ours, rival

_ours = functools.partial(ours, module='piping')


def streams(data: Data, server: Server) -> Result:
    """Compare a shuffled and batched MapDataset with the Loader alone, over the 25 ms server."""
    batches = data.count(1000)
    job = {'url': f'{server.delayed}/{data.medium().name}', 'batches': batches}
    rate = in_turns(
        data.runs(3),
        {'stream': lambda: _ours(data, 'stream', **job)['rate'], 'loader': lambda: ours(data, 'loader', **job)['rate']},
    )
    return [ratio('MapDataset stream / Loader, 25 ms server', rate['stream'], rate['loader'], 0.9)], []


def blocks(data: Data, server: Server) -> Result:
    """Compare 4 kB records shuffled in blocks and fully shuffled, in batches of 256 and 64, over the 25 ms server."""
    url = f'{server.delayed}/{data.small().name}'
    bars = []
    for batch, bound in ((256, 10), (64, 8)):
        full, some = data.count(400) * 256 // batch, data.count(1600) * 256 // batch - 20
        whole = _ours(data, 'loader', url=url, batch=batch, batches=full, blocks=False)
        result = _ours(data, 'loader', url=url, batch=batch, batches=some, blocks=True)
        saved = f'{result["requests"]:.4f} requests a record, fully shuffled {whole["requests"]:.2f}'
        size = '' if batch == 256 else f', batches of {batch}'
        bars += [
            Bar(f'records / requests of shuffle.Blocks, 4 kB{size}', 1 / result['requests'], 20, saved),
            ratio(f'shuffle.Blocks / full shuffle, 4 kB, 25 ms server{size}', result['rate'], whole['rate'], bound),
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
    share = result['bytes'] / bag
    return [Bar('bytes of ModeWrapper(reader, "label") / label bag', share, 1, behind, at_most=True)], []


def overhead(data: Data, server: Server) -> Result:
    """Compare the overhead of a pipeline with Grain: a list, the identity, batches of 64."""
    count = data.count(640_000)
    rate = in_turns(
        data.runs(3),
        {
            'ours': lambda: _ours(data, 'overhead', core=None, count=count)['rate'],
            'grain': lambda: rival(data, 'grain', 'grain', 'overhead', core=None, count=count)['rate'],
        },
    )
    looked = _ours(data, 'lookups', core=None)['rate']
    return [
        ratio('elements of a pipeline without I/O / Grain', rate['ours'], rate['grain'], 3),
        Bar('lookups in a shuffled billion, millions a second', looked / 1e6, 5),
    ], []


def workers(data: Data, server: Server) -> Result:
    """Compare 4 worker processes with 1, for a transformation that computes in Python for a millisecond."""
    batches = 40 if data.quick else 120
    rate = in_turns(
        data.runs(3),
        {
            count: lambda count=count: _ours(data, 'workers', core=None, workers=count, batches=batches)['rate']
            for count in (4, 1)
        },
    )
    return [ratio('4 worker processes / 1, 1 ms of Python each', rate[4], rate[1], 1.7)], []


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
    rate = in_turns(data.runs(3), who)
    return [
        ratio(
            f'torch DataLoader, {workers} workers: __getitems__ / without, 25 ms server',
            rate[workers, True],
            rate[workers, False],
            10,
        )
        for workers in (0, 2)
    ], []

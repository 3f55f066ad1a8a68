"""Pipelines: streams beside the Loader, blocks, overhead beside Grain's, worker processes, and PyTorch's loader."""

import functools

from benchmarks.bars import Bar, Result
from benchmarks.data import Data
from benchmarks.nginx import Server
from benchmarks.remote import in_turns, ours, rival

_ours = functools.partial(ours, module='piping')


def streams(data: Data, server: Server) -> Result:
    """A shuffled and batched MapDataset beside the bare Loader, over the 25 ms server."""
    batches = data.count(1000)
    job = {'url': f'{server.delayed}/{data.medium().name}', 'batches': batches}
    rate = in_turns(
        1 if data.quick else 3,
        {'stream': lambda: _ours(data, 'stream', **job)['rate'], 'loader': lambda: ours(data, 'loader', **job)['rate']},
    )
    got, bare = rate['stream'], rate['loader']
    return [Bar('MapDataset stream / Loader, 25 ms server', got / bare, 0.8, f'{got:,.0f}/s / {bare:,.0f}/s')], []


def blocks(data: Data, server: Server) -> Result:
    """4 kB records in blocks and fully shuffled, over the 25 ms server."""
    url = f'{server.delayed}/{data.small().name}'
    full, some = data.count(400), data.count(1600) - 20
    whole = _ours(data, 'loader', url=url, batch=256, batches=full, blocks=False)
    found = _ours(data, 'loader', url=url, batch=256, batches=some, blocks=True)
    figures = f'{found["rate"]:,.0f}/s / {whole["rate"]:,.0f}/s'
    saved = f'{found["requests"]:.4f} requests a record, fully shuffled {whole["requests"]:.2f}'
    return [
        Bar('records / requests of shuffle.Blocks, 4 kB', 1 / found['requests'], 20, saved),
        Bar('shuffle.Blocks / full shuffle, 4 kB, 25 ms server', found['rate'] / whole['rate'], 10, figures),
    ], []


def labels(data: Data, server: Server) -> Result:
    """The labels of 100 kB records, by ModeWrapper: the bytes of all replies after opening, whatever was sent for."""
    place = data.medium()
    found = _ours(data, 'labels', url=f'{server.delayed}/{place.name}', cache_keys=[])
    bag, whole = ((place / f'{key}.bag').stat().st_size for key in ('label', 'data'))
    behind = (
        f'{found["bytes"]:,.0f} B / {bag:,} B for {found["count"]:,.0f} labels in {found["requests"]:.0f} requests, '
        f'{found["seconds"] * 1e3:.0f} ms; opening took {found["opening"]:,.0f} B; the records are {whole:,} B'
    )
    return [Bar('bytes of ModeWrapper(reader, "label") / label bag', found['bytes'] / bag, 1, behind, at_most=True)], []


def overhead(data: Data, server: Server) -> Result:
    """What a pipeline costs by itself: a list, the identity, batches of 64; beside Grain."""
    count = data.count(640_000)
    rate = in_turns(
        1 if data.quick else 3,
        {
            'ours': lambda: _ours(data, 'overhead', core=None, count=count)['rate'],
            'grain': lambda: rival(data, 'grain', 'grain', 'overhead', core=None, count=count)['rate'],
        },
    )
    got, theirs = rate['ours'], rate['grain']
    looked = _ours(data, 'lookups', core=None)['rate']
    return [
        Bar('elements of a pipeline without I/O / Grain', got / theirs, 3, f'{got:,.0f}/s / {theirs:,.0f}/s'),
        Bar('lookups in a shuffled billion, millions a second', looked / 1e6, 5),
    ], []


def workers(data: Data, server: Server) -> Result:
    """A transformation that computes in Python for a millisecond, in 4 worker processes and in 1."""
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
    """PyTorch's DataLoader over a reader that it asks for batches, and over one that it asks for datapoints."""
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

"""Datasets of one shard and of many: on the local disk the processor time of a record, beside a floor program; in a
bucket the records per second.
"""

import collections
import functools
import itertools
import os
import pathlib
import resource
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final
from unittest import mock

import numpy as np

import granular
from benchmarks.bars import Bar, Result, ratio
from benchmarks.data import SPEC, Data, set_times_apart
from benchmarks.nginx import Server
from benchmarks.remote import INFLIGHT, in_turns, ours, table
from granular.aio.bags.reader import bag_of
from granular.aio.stores.base import ObjectWriter
from granular.aio.stores.http import HTTPStore

RECORDS: Final = 20_000
SHARDS: Final = (1, 100, 1000)
REMOTE: Final = (1, 1000, 10_000)  # shards in the bucket
BATCH: Final = 64
OTHERS: Final = ('loader', 'stream', 'iteration')

INDEX: Final = '000000/.granular-index'

Job = Mapping[str, Any]


def sharding(data: Data, server: Server) -> Result:
    """Compare 1,000 shards with one, and one with the floor: a table of all shards, an fstat and a pread per key."""
    costs: dict[tuple[str, ...], Callable[[], float]] = {}
    for layout in ('refs', 'columns'):
        for shards in SHARDS:
            for indexed in (True, False):
                place = f'{written(data, layout, shards, indexed)}'
                cases = {'fetch': 0, **(dict.fromkeys(OTHERS, 0) if shards != 100 else {})}
                if shards == SHARDS[-1]:
                    cases['limited'] = 1024
                for case, files in cases.items():
                    what = 'fetch' if files else case
                    costs[case, layout, f'{shards}', 'index' if indexed else ''] = functools.partial(
                        _cost, data, what, place, files
                    )
            costs['floor', layout, f'{shards}', ''] = functools.partial(_cost, data, 'floor', place, 0)
    found = in_turns(data.runs(), costs)
    bars = []
    for layout in ('refs', 'columns'):
        for indexed in ('index', ''):
            name = f'{layout}, {"index" if indexed else "no index"}'
            for shards, bound in (('1', 1.0), ('1000', 1.7)):
                mine, floor = found['fetch', layout, shards, indexed], found['floor', layout, shards, '']
                behind = f'{mine:.1f} us / {floor:.1f} us'
                bars.append(
                    Bar(f'fetch(64) / floor, {shards} shards, {name}', mine / floor, bound, behind, at_most=True)
                )
            for case in ('fetch', *OTHERS):
                one, many = (found[case, layout, shards, indexed] for shards in ('1', '1000'))
                behind = f'{many:.1f} us / {one:.1f} us'
                bars.append(Bar(f'{case}, 1,000 shards / 1, {name}', many / one, 1.5, behind, at_most=True))
            limited, free = (found[case, layout, '1000', indexed] for case in ('limited', 'fetch'))
            behind = f'{limited:.1f} us / {free:.1f} us'
            bars.append(Bar(f'fetch, ulimit -n 1024 / unlimited, {name}', limited / free, 1.3, behind, at_most=True))
    rates = in_turns(data.runs(), {shards: functools.partial(_rate, data, server, shards) for shards in REMOTE})
    for few, many in itertools.pairwise(REMOTE):
        name = f'Loader, 4 kB, 25 ms server, {many:,} shards / {few:,}'
        bars.append(ratio(name, rates[many], rates[few], 0.95))
    title = 'Processor time of a datapoint of 3 keys, 4 kB, in the page cache'
    rows = {
        ', '.join(filter(None, (case, layout, f'{shards} shards', how))): cost
        for (case, layout, shards, how), cost in found.items()
    }
    remote = {f'{shards:,} shards': rate for shards, rate in rates.items()}
    return bars, [
        table('sharding', title, 'us', rows),
        table('sharding-remote', 'Datapoints of one key, 4 kB, shuffled, 25 ms server', 'records/s', remote),
    ]


def _cost(data: Data, what: str, folder: str, files: int) -> float:
    return ours(data, 'cost', module='sharding', case=what, folder=folder, files=files)['us']


def _rate(data: Data, server: Server, shards: int) -> float:
    place = _write_values(data, shards)
    if not (place / INDEX).exists():
        _index_as_served(place, f'{server.instant}/{place.name}')
    return ours(data, 'remote', module='sharding', url=f'{server.delayed}/{place.name}', shards=shards)['rate']


def _write_values(data: Data, shards: int) -> pathlib.Path:
    """Write 20,000 values of 4 kB, each of which is one request; small ones of one shard would share theirs."""

    def write(target: pathlib.Path) -> None:
        rng = np.random.default_rng(0)
        with granular.ShardedDatasetWriter(
            target, {'data': 'bytes'}, granular.encoders, shardlen=RECORDS // shards, layout='columns'
        ) as writer:
            for _ in range(RECORDS):
                writer.append({'data': rng.bytes(4000)}, flush=False)
        set_times_apart(target)

    return data.once(f'sharding-values-{shards}', write)


def _index_as_served(folder: pathlib.Path, url: str) -> None:
    """Write the index of a folder with the versions that its server tells, as for a dataset written to a bucket."""
    local = granular.Path(folder).aio

    async def open_writer(self: HTTPStore, key: str, new: bool = False) -> ObjectWriter:
        return await local.store.open_writer(f'{local / INDEX}', new)

    with mock.patch.object(HTTPStore, 'open_writer', open_writer):
        granular.build_index(url)


def written(data: Data, layout: Any, shards: int, indexed: bool) -> pathlib.Path:
    """Write 20,000 datapoints into so many shards."""

    def write(target: pathlib.Path) -> None:
        rng = np.random.default_rng(0)
        with granular.ShardedDatasetWriter(
            target, SPEC, granular.encoders, shardlen=RECORDS // shards, layout=layout
        ) as writer:
            for i in range(RECORDS):
                writer.append({'data': rng.bytes(4000), 'label': i, 'text': f'text {i}'}, flush=False)
        if indexed:
            granular.build_index(target)

    return data.once(f'sharding-{layout}-{shards}{"-index" if indexed else ""}', write)


# --- in a process of its own


def cost(job: Job) -> dict[str, float]:
    """Measure the processor time of a datapoint in microseconds."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (job['files'] or most, most))
    picks = np.random.default_rng(2).permutation(RECORDS)[: RECORDS // BATCH * BATCH]
    if job['case'] == 'floor':
        return {'us': _best(floor(job['folder'], picks.reshape(-1, BATCH)), len(picks))}
    decoders = None if job['case'] == 'fetch' else {**granular.decoders, 'bytes': len, 'utf8': len}
    with granular.ShardedDatasetReader(job['folder'], decoders) as reader:
        return {'us': _best(*_READS[job['case']](reader, picks))}


def remote(job: Job) -> dict[str, float]:
    """Measure the datapoints per second of the Loader from a server, once each shard and connection was used."""
    path = granular.Path(job['url'], config=granular.IOConfig(concurrency=INFLIGHT))
    with (
        granular.ShardedDatasetReader(path, {'bytes': len}) as reader,
        granular.Loader(granular.sources.Epochs(reader, shuffle=True, seed=0), BATCH) as loader,
    ):
        reader.fetch(range(0, RECORDS, RECORDS // job['shards']))  # each shard is compared with the index once
        _drop(next(loader) for _ in range(4 * INFLIGHT // BATCH))
        started, batches = time.perf_counter(), RECORDS // BATCH
        _drop(next(loader) for _ in range(batches))
        return {'rate': batches * BATCH / (time.perf_counter() - started)}


def _best(read: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(6):
        started = time.process_time()
        read()
        times.append(time.process_time() - started)
    return min(times[1:]) / count * 1e6


def _drop(reads: Iterable[object]) -> None:
    collections.deque(reads, 0)


def _fetch(reader: Any, picks: Any) -> tuple[Callable[[], object], int]:
    batches = picks.reshape(-1, BATCH)
    return lambda: _drop(reader.fetch(batch) for batch in batches), len(picks)


def _key(reader: Any, picks: Any) -> tuple[Callable[[], object], int]:
    batches = picks.reshape(-1, BATCH)
    return lambda: _drop(reader.fetch(batch, ('data',)) for batch in batches), len(picks)


def _few(reader: Any, picks: Any) -> tuple[Callable[[], object], int]:
    """Measure fetches of two datapoints: their fixed cost."""
    batches = picks.reshape(-1, 2)
    return lambda: _drop(reader.fetch(batch) for batch in batches), len(batches)


def _single(reader: Any, picks: Any) -> tuple[Callable[[], object], int]:
    return lambda: _drop(reader[i] for i in picks.tolist()), len(picks)


def _single_key(reader: Any, picks: Any) -> tuple[Callable[[], object], int]:
    return lambda: _drop(reader[i, ('data',)] for i in picks.tolist()), len(picks)


def _bag(reader: Any, picks: Any) -> tuple[Callable[[], object], int]:
    bag = granular.BagReader(pathlib.Path(f'{reader.aio.directory}') / '000000' / 'data.bag')
    order = (picks % len(bag)).tolist()
    return lambda: _drop(bag[i] for i in order), len(order)


def _loader(reader: Any, picks: Any) -> tuple[Callable[[], object], int]:
    loader = granular.Loader(granular.sources.Epochs(reader, shuffle=True, seed=0), BATCH)
    count = 300
    return lambda: _drop(next(loader) for _ in range(count)), count * BATCH


def _stream(reader: Any, picks: Any) -> tuple[Callable[[], object], int]:
    stream = iter(granular.MapDataset.source(reader).shuffle(seed=0).repeat().to_iter_dataset())
    return lambda: _drop(next(stream) for _ in range(RECORDS)), RECORDS


def _iteration(reader: Any, picks: Any) -> tuple[Callable[[], object], int]:
    return lambda: _drop(0 for _ in reader), len(reader)


_READS: Final[Mapping[str, Callable[[Any, Any], tuple[Callable[[], object], int]]]] = {
    'fetch': _fetch, 'key': _key, 'few': _few, 'single': _single, 'single_key': _single_key, 'bag': _bag,
    'loader': _loader, 'stream': _stream, 'iteration': _iteration,
}  # fmt: skip


def floor(folder: str, batches: Any) -> Callable[[], None]:
    """Return a read of batches by a table of the limits of all shards, with an fstat and a pread for each key."""
    shards = sorted(pathlib.Path(folder).iterdir())
    shards = [shard for shard in shards if shard.is_dir()]
    starts, stops, files = [], [], []
    for key in SPEC:
        own_starts, own_stops, own_files = [], [], []
        for shard in shards:
            with granular.BagReader(shard / f'{key}.bag') as bag:
                limits = bag_of(bag.aio).all_limits()
            own_starts.append(limits[:-1])
            own_stops.append(limits[1:])
            own_files.append(os.open(shard / f'{key}.bag', os.O_RDONLY))
        starts.append(np.concatenate(own_starts))
        stops.append(np.concatenate(own_stops))
        files.append(own_files)
    ends = np.cumsum([RECORDS // len(shards)] * len(shards))

    def read() -> None:
        for batch in batches:
            owners = np.searchsorted(ends, batch, side='right').tolist()
            columns = []
            for first, last, own in zip(starts, stops, files, strict=True):
                column = []
                for owner, start, stop in zip(owners, first[batch].tolist(), last[batch].tolist(), strict=True):
                    fd = own[owner]
                    os.fstat(fd)
                    column.append(os.pread(fd, stop - start, start))
                columns.append(column)
            [dict(zip(SPEC, row, strict=True)) for row in zip(*columns, strict=True)]

    return read

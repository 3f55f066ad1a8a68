"""Opening a dataset in a new process, all imports included: one shard and 1,000, with an index and without."""

import functools
import json
import sys
from collections.abc import Callable
from typing import Any, Final

import granular
from benchmarks.bars import ROOT, Bar, Result, child
from benchmarks.data import Data
from benchmarks.nginx import Server
from benchmarks.remote import in_turns, table
from benchmarks.sharding import written
from tests.support.servers import SeaweedServer

SHARDS: Final = (1, 1000)

_OPEN: Final = """
import json, resource, sys
import granular
path = granular.Path(sys.argv[1], **json.loads(sys.argv[2]))
with granular.ShardedDatasetReader(path, index=bool(sys.argv[3])) as reader:
    reader[0]
    used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({'ms': (used.ru_utime + used.ru_stime) * 1e3}))
"""


def shard_opening(data: Data, server: Server) -> Result:
    """Compare 1,000 shards with one, on the disk, and on SeaweedFS by an index."""
    layout = 'columns'
    costs: dict[tuple[str, ...], Callable[[], float]] = {}
    with SeaweedServer() as seaweed:
        bucket = seaweed.new_bucket()
        for shards in SHARDS:
            for index in ('index', ''):
                place = f'{written(data, layout, shards, bool(index))}'
                costs['disk', f'{shards}', index] = functools.partial(_cost, place, {}, index)
            remote = bucket / f'{shards}'
            granular.Path(f'{written(data, layout, shards, False)}').copy(remote)
            granular.build_index(remote)
            costs['S3', f'{shards}', 'index'] = functools.partial(_cost, f'{remote}', remote.aio.store.options, 'index')
        found = in_turns(data.runs(), costs)
    bars = []
    for place, index, more in (('disk', 'index', 50), ('disk', '', 250), ('S3', 'index', 50)):
        one, many = (found[place, f'{shards}', index] for shards in SHARDS)
        behind = f'{many:.0f} ms and {one:.0f} ms of CPU'
        name = f'ms to open 1,000 shards more than 1, {place}, {index or "no index"}'
        bars.append(Bar(name, many - one, more, behind, at_most=True))
    for shards, most in (('1', 500), ('1000', 550)):
        bars.append(
            Bar(f'ms of CPU to open {shards} shards, S3, index', found['S3', shards, 'index'], most, at_most=True)
        )
    rows = {f'{place}, {shards} shards, {index or "no index"}': cost for (place, shards, index), cost in found.items()}
    return bars, [
        table('opening', 'Processor time of a new process that opens a dataset and reads one value', 'ms', rows)
    ]


def _cost(place: str, options: dict[str, Any], index: str) -> float:
    command = [sys.executable, '-c', _OPEN, place, json.dumps(options), index]
    return float(child(command, cwd=ROOT)['ms'])

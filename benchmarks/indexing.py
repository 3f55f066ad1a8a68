"""The index of a sharded dataset: 10,000 shards and 50 million datapoints, and a billion datapoints, both made sparse.

The limits are those of records of 50 to 150 kB, drawn once for 64 shards; the bags are sparse files of the right sizes.
"""

import json
import os
import pathlib
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import granular
from benchmarks.bars import Bar, Result, Table
from benchmarks.data import Data
from benchmarks.nginx import Server
from benchmarks.remote import ours
from benchmarks.rivals.timing import memory
from granular.aio.datasets.sharded_reader import indexed_shards_of
from granular.aio.runtime.portal import run
from granular.aio.stores.remote import RemoteStore
from granular.formats.bit_packing import WORD, pack
from granular.formats.checksums import crc32c
from granular.formats.dataset_index import (
    MAGIC,
    NAME,
    PAGE_ROW,
    ROW,
    Directory,
    Versions,
    dump_directory,
    dump_footer,
)
from granular.formats.layout import LIMIT, shard_name

_DRAWN = 64  # distinct tables
_MODIFIED = 1_700_000_000
_BATCH = 256


def write(target: pathlib.Path, shards: int, length: int, keys: Sequence[str]) -> None:
    """Write a sharded dataset in the columns layout: sparse bags and tables, and an index for nginx's versions."""
    rng = np.random.default_rng(0)
    tables = []
    for _ in range(min(_DRAWN, shards * len(keys))):
        limits = np.append(0, np.cumsum(rng.integers(50_000, 150_001, length)))
        pages = pack(limits)
        tables.append((int(limits[-1]), pages, [crc32c(page) for page in pages]))
    spec = dict.fromkeys(keys, 'bytes')
    content = json.dumps(spec).encode()
    rows, versions, page_rows = np.zeros((shards, len(keys)), ROW), [], []
    (target / shard_name(0)).mkdir(parents=True, exist_ok=True)
    with (target / shard_name(0) / NAME).open('wb') as file:
        position = file.write(MAGIC)
        for shard in range(shards):
            folder = target / shard_name(shard)
            folder.mkdir(parents=True, exist_ok=True)
            chosen = [tables[(shard * len(keys) + i) % len(tables)] for i in range(len(keys))]
            files = {'spec.json': len(content)}
            for i, (key, (size, _, _)) in enumerate(zip(keys, chosen, strict=True)):
                files |= {f'{key}.bag': size, f'{key}.idx': length * LIMIT}
                rows[shard, i] = length, 3, size + length * LIMIT, size
            for name, size in files.items():
                with (folder / name).open('wb') as file_of_shard:
                    file_of_shard.write(content if name == 'spec.json' else b'')
                    file_of_shard.truncate(size)
                os.utime(folder / name, (_MODIFIED, _MODIFIED))
                versions.append(f'"{_MODIFIED:x}-{size:x}"')
            found = [np.zeros(len(pages), PAGE_ROW) for _, pages, _ in chosen]
            for number in range(len(chosen[0][1])):
                for i, (_, pages, sums) in enumerate(chosen):
                    found[i][number] = position, len(pages[number]) // WORD, sums[number]
                    position += file.write(pages[number])
            page_rows += found
        specs, pages = np.full(shards, len(content), np.uint32), np.concatenate(page_rows)
        described = dump_directory(Directory(spec, 'columns', specs, rows, Versions.of(versions), None, pages))
        file.write(described + dump_footer(described, position))


def index(data: Data, server: Server) -> Result:
    """Measure opening and reading by the index of a sharded dataset."""
    shards, many = data.count(10_000), data.count(20_000)
    place = data.once('indexed', lambda target: write(target, shards, 5000, ('a', 'b', 'c')))
    huge = data.once('billion', lambda target: write(target, many, 50_000, ('image',)))
    records = shards * 5000 * 3
    size = (place / shard_name(0) / NAME).stat().st_size
    runs = [ours(data, 'opened', module='indexing', url=f'{server.delayed}/{place.name}') for _ in range(3)]
    best = {name: min(run[name] for run in runs) for name in runs[0]}
    rate = max(run['lookups'] for run in runs)
    paged = ours(data, 'batches', module='indexing', url=f'{server.delayed}/{huge.name}', memory=64 << 20)
    whole = ours(data, 'batches', module='indexing', url=f'{server.delayed}/{huge.name}', memory=1 << 40)
    name = f'{shards:,} shards, {shards * 5000:,} datapoints of 3 keys'
    bars = [
        Bar(f'requests to open {name}', best['requests'], 5, f'an index of {size:,} bytes', at_most=True),
        Bar('seconds of CPU to open it', best['cpu'], 1, f's, the transfer included; {best["seconds"]:.2f} s in all, '
            f'{best["transfer"]:.2f} s to fetch the file alone', at_most=True),
        Bar('bytes of memory per record and key', best['grown'] / records, 3, f'once all shards '
            f'are used; {best["opened"] / records:.2f} when it is open', at_most=True),
        Bar('million lookups per second', rate / 1e6, 20, 'a start and a stop each, random, of CPU time'),
        Bar('round trips of 256 random datapoints of a billion, page by page', paged['trips'] - whole['trips'], 2,
            f'more than in memory; {paged["seconds"] * 1e3:.0f} and {whole["seconds"] * 1e3:.0f} ms, '
            f'{paged["requests"]:.0f} and {whole["requests"]:.0f} requests', at_most=True),
        Bar('memory of an index of a billion, page by page', paged['grown'] / 1e6, 200,
            f'MB after {paged["batches"]:.0f} batches with index_memory of 64 MB, '
            f'{whole["grown"] / 1e6:,.0f} MB in memory', at_most=True),
    ]  # fmt: skip
    rows = [
        (f'open {name}, CPU', best['cpu'], 's'),
        ('the same, all', best['seconds'], 's'),
        ('its index file, one request', best['transfer'], 's'),
        ('256 random datapoints, index in memory', whole['seconds'], f's, {whole["requests"]:.0f} requests'),
        ('256 random datapoints, page by page', paged['seconds'], f's, {paged["requests"]:.0f} requests'),
    ]
    return bars, [Table('index', 'The index of a sharded dataset, 25 ms server', 'seconds', rows)]


# --- in a process of its own


def _open(job: Mapping[str, Any]) -> granular.ShardedDatasetReader:
    config = granular.IOConfig(index_memory=job.get('memory', 1 << 30))
    return granular.ShardedDatasetReader(granular.Path(job['url'], config=config), None)


def opened(job: Mapping[str, Any]) -> dict[str, float]:
    """Measure the opening of a dataset, its memory, and lookups."""
    granular.Path(job['url'] + '/000000').exists()  # imports, and a connection
    started = time.perf_counter()
    with urllib.request.urlopen(f'{job["url"]}/{shard_name(0)}/{NAME}') as reply:
        while reply.read(1 << 20):
            pass
    transfer = time.perf_counter() - started
    before, idle = granular.io_stats()['requests'], memory()
    started, busy = time.perf_counter(), time.process_time()
    with _open(job) as reader:
        seconds, busy = time.perf_counter() - started, time.process_time() - busy
        requests, grown = granular.io_stats()['requests'] - before, memory() - idle
        tables: Any = indexed_shards_of(reader.aio)
        for _ in tables:  # all shards are used, but no records are in flight
            pass
        after = memory() - idle
        lookups = _lookups(tables.index, np.random.default_rng(0), 1_000_000)
    return {
        'seconds': seconds, 'cpu': busy, 'requests': requests, 'transfer': transfer, 'opened': grown, 'grown': after,
        'lookups': lookups,
    }  # fmt: skip


def _lookups(tables: Any, rng: np.random.Generator, count: int) -> float:
    """Return the lookups per second of CPU time, of random records of random bags."""
    counts = tables.directory.counts().ravel()
    numbers = rng.integers(0, len(counts), count)
    positions = rng.integers(0, counts.min(), count)
    best = 1e9
    for _ in range(10):
        started = time.process_time()
        run(tables.read(numbers, positions))
        best = min(best, time.process_time() - started)
    return count / best


def batches(job: Mapping[str, Any]) -> dict[str, float]:
    """Measure batches of random datapoints: seconds, requests, and fan-outs that follow each other."""
    fan_outs = [0]
    original = RemoteStore.read_many

    async def counted(self: Any, requests: Any) -> list[bytes]:
        fan_outs[0] += 1
        return await original(self, requests)

    idle = memory()
    with _open(job) as reader:
        rng, times = np.random.default_rng(0), []
        reader.fetch(rng.integers(0, len(reader), _BATCH))
        RemoteStore.read_many = counted  # type: ignore[method-assign]
        before, count = granular.io_stats()['requests'], 10
        for _ in range(count):
            started = time.perf_counter()
            reader.fetch(rng.integers(0, len(reader), _BATCH))
            times.append(time.perf_counter() - started)
        requests = granular.io_stats()['requests'] - before
        grown = memory() - idle
    return {
        'seconds': sorted(times)[count // 2], 'requests': requests / count, 'trips': fan_outs[0] / count,
        'grown': grown, 'batches': count,
    }  # fmt: skip

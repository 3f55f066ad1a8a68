"""ArrayRecord files: compared with the reader of the package on a disk, and by range requests to the 25 ms server."""

import functools
import pathlib
from statistics import median
from typing import Any

import numpy as np

import granular
from benchmarks.bars import Bar, Result, ratio
from benchmarks.data import Data
from benchmarks.nginx import Server
from benchmarks.remote import table
from benchmarks.rivals.timing import best

BATCH, BATCHES = 64, 40
OPTIONS = ('group_size:1', 'group_size:1,uncompressed', 'group_size:1,brotli', 'group_size:100')


def arrayrecord(data: Data, server: Server) -> Result:
    """Compare batches of 64 random records of 1 to 8 kB."""
    rng = np.random.default_rng(0)
    rates: dict[str, float] = {}
    bars = []
    for options in OPTIONS:
        path = _written(data, options)
        theirs, ours = _theirs(path), granular.ArrayRecordDataSource(path)
        batches = [rng.integers(0, len(ours), BATCH).tolist() for _ in range(BATCHES)]
        runs: dict[str, list[float]] = {'granular': [], 'array_record': []}
        for _ in range(3 if data.quick else 9):
            for who, fetch in (('granular', ours.fetch), ('array_record', theirs.__getitems__)):
                runs[who].append(BATCH * BATCHES / best(functools.partial(_read, fetch, batches), 1))
        mine, other = (rates.setdefault(f'{who}, {options}', median(found)) for who, found in runs.items())
        # Most of the time is decompression, by the same libraries.
        bars.append(ratio(f'local, {options} / array_record', mine, other, 0.8))
    path = _written(data, OPTIONS[0])
    ours = granular.ArrayRecordDataSource(f'{server.delayed}/{path.parent.name}/{path.name}')
    _read(ours.fetch, batches[:2])
    seconds = best(lambda: _read(ours.fetch, batches[:10]), 3) / 10
    bars.append(Bar('fetch of 64 random records, 25 ms server', seconds * 1e3, 60, 'ms', at_most=True))
    return bars, [table('arrayrecord', 'Batches of 64 records of ArrayRecord files on a disk', 'records/s', rates)]


def _read(fetch: Any, batches: list[list[int]]) -> None:
    for indices in batches:
        fetch(indices)


def _written(data: Data, options: str) -> pathlib.Path:
    def write(place: pathlib.Path) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter

        place.mkdir(exist_ok=True)
        rng = np.random.default_rng(0)
        writer = ArrayRecordWriter(str(place / 'data.array_record'), options)
        for i in range(data.count(50_000)):
            writer.write((b'record %d ' % i) * int(rng.integers(100, 800)))
        writer.close()

    return data.once(f'arrayrecord-{options.replace(":", "").replace(",", "-")}', write) / 'data.array_record'


def _theirs(path: pathlib.Path) -> Any:
    from array_record.python.array_record_data_source import ArrayRecordDataSource

    return ArrayRecordDataSource(str(path))

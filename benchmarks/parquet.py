"""Parquet files: narrow rows from the local disk, compared with Grain."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.bars import Result, ratio
from benchmarks.data import Data
from benchmarks.nginx import Server
from benchmarks.remote import in_turns, ours, rival, table
from benchmarks.rivals.timing import rate
from granular.grain.experimental import ParquetIterDataset

ROWS, GROUP = 1_000_000, 20_000


def parquet(data: Data, server: Server) -> Result:
    """Iterate over the rows of a file of four narrow columns, in order."""
    job = {'path': str(_written(data)), 'warm': GROUP, 'count': data.count(ROWS) - 2 * GROUP}
    rates = in_turns(
        data.runs(),
        {
            'granular ParquetIterDataset': lambda: ours(data, 'rows', None, 'parquet', **job)['rate'],
            'Grain ParquetIterDataset': lambda: rival(data, 'grain', 'grain', 'parquet', core=None, **job)['rate'],
        },
    )
    got, theirs = rates.values()
    bar = ratio('Parquet, narrow rows, local / Grain', got, theirs, 1)
    return [bar], [table('parquet', 'Rows of four narrow columns of a Parquet file on a disk', 'rows/s', rates)]


def _written(data: Data) -> pathlib.Path:
    def write(place: pathlib.Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet

        rng, count = np.random.default_rng(0), data.count(ROWS)
        columns = {
            'id': np.arange(count),
            'label': rng.integers(0, 1000, count).astype(np.int32),
            'weight': rng.random(count).astype(np.float32),
            'text': [f'text number {i}' for i in range(count)],
        }
        place.mkdir(exist_ok=True)
        pa.parquet.write_table(pa.table(columns), place / 'rows.parquet', row_group_size=GROUP)

    return data.once('parquet', write) / 'rows.parquet'


def rows(job: Mapping[str, Any]) -> dict[str, float]:
    """Measure the rows per second, in its own process."""
    with iter(ParquetIterDataset(job['path'])) as items:
        return {'rate': rate(items, job['count'], 1, job['warm'])}

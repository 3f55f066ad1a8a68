"""Lance: ``take`` of random blobs from a local dataset. ``write`` makes it."""

import itertools
import sys
import time

import lance
import numpy as np
import pyarrow as pa
from measuring import job, records, tell


def write():
    schema = pa.schema([('data', pa.large_binary())])
    values = records(job['count'])
    batches = (
        pa.record_batch({'data': pa.array(itertools.islice(values, 100), pa.large_binary())})
        for _ in range(job['count'] // 100)
    )
    lance.write_dataset(batches, job['folder'], schema)
    tell()


def read():
    dataset = lance.dataset(job['folder'])
    rng = np.random.default_rng(1)
    length, batch = dataset.count_rows(), job['batch']

    def take():
        column = dataset.take(rng.choice(length, batch, replace=False), columns=['data'])['data']
        return [value.as_py() for value in column]

    for _ in range(5):
        take()
    used = time.process_time()
    for _ in range(job['batches']):
        values = take()
    used = time.process_time() - used
    if len(values) != batch or not all(len(value) >= 50_000 for value in values):
        raise RuntimeError(f'expected {batch} records of 50 to 150 kB, got {[len(value) for value in values]}')
    tell(cpu=used / (job['batches'] * batch) * 1e6)


if __name__ == '__main__':
    write() if sys.argv[1] == 'write' else read()

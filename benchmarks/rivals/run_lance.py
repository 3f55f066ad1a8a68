"""Lance: ``take`` of random blobs from a local dataset. ``write`` makes it of the records of a folder."""

import json
import pathlib
import sys
import time

import lance
import numpy as np
import pyarrow as pa

job = json.loads(pathlib.Path(sys.argv[2]).read_text())


def write():
    rng = np.random.default_rng(0)
    block = rng.bytes(64 << 20)

    def tables():
        for _ in range(job['count'] // 100):
            starts = rng.integers(0, len(block) - 150_000, 100)
            values = [
                block[at : at + int(size)] for at, size in zip(starts, rng.integers(50_000, 150_001, 100), strict=True)
            ]
            yield pa.record_batch({'data': pa.array(values, pa.large_binary())})

    schema = pa.schema([('data', pa.large_binary())])
    lance.write_dataset(tables(), job['folder'], schema)


def read():
    dataset = lance.dataset(job['folder'])
    rng = np.random.default_rng(1)
    length, batch = dataset.count_rows(), job['batch']

    def take():
        column = dataset.take(rng.choice(length, batch, replace=False), columns=['data'])['data']
        return [value.as_py() for value in column]

    for _ in range(5):
        take()
    began, used = time.perf_counter(), time.process_time()
    for _ in range(job['batches']):
        values = take()
    seconds, used = time.perf_counter() - began, time.process_time() - used
    if len(values) != batch or not all(len(value) >= 50_000 for value in values):
        raise RuntimeError(f'expected {batch} records of 50 to 150 kB, got {[len(value) for value in values]}')
    count = job['batches'] * batch
    print(json.dumps({'cpu': used / count * 1e6, 'rate': count / seconds}))


if __name__ == '__main__':
    write() if sys.argv[1] == 'write' else read()

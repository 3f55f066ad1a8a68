"""Grain on the local disk: ArrayRecord's bulk read, a pipeline's iteration, and the rows of a Parquet file."""

import json
import os
import pathlib
import sys
import time

import numpy as np

job = json.loads(pathlib.Path(sys.argv[2]).read_text())


def write():
    from array_record.python.array_record_module import ArrayRecordWriter

    os.makedirs(job['folder'], exist_ok=True)
    writer = ArrayRecordWriter(f'{job["folder"]}/data.array_record', 'group_size:1,uncompressed')
    block = np.random.default_rng(0).bytes(16 << 20)
    for i in range(job['count']):
        at = i * 4001 % (len(block) - job['size'])
        writer.write(block[at : at + job['size']])
    writer.close()


def read():
    import grain

    source = grain.sources.ArrayRecordDataSource(f'{job["folder"]}/data.array_record')
    order = np.random.default_rng(0).integers(0, len(source), 40_000).tolist()
    batches = [order[i : i + 256] for i in range(0, len(order), 256)]
    result = {}
    for name, items, fn in (('bulk', batches, source.__getitems__), ('one', order, source.__getitem__)):
        best = 1e9
        for _ in range(3):
            started = time.perf_counter()
            for item in items:
                fn(item)
            best = min(best, time.perf_counter() - started)
        result[name] = len(order) / best
    data = grain.MapDataset.source(source).shuffle(seed=0).repeat()
    data = data.map(lambda record: np.frombuffer(record, np.uint8)).batch(256).to_iter_dataset()
    items = iter(data)
    next(items)
    best = 1e9
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(80):
            next(items)
        best = min(best, time.perf_counter() - started)
    result['pipeline'] = 80 * 256 / best
    print(json.dumps(result), flush=True)
    os._exit(0)


def overhead():
    import grain

    dataset = grain.MapDataset.source(list(range(job['count']))).map(lambda x: x).batch(64)
    best = 0.0
    for _ in range(3):
        items = iter(dataset.to_iter_dataset())
        for _ in range(90):
            next(items)
        count = job['count'] // 64 - 100
        started = time.perf_counter()
        for _ in range(count):
            next(items)
        best = max(best, count * 64 / (time.perf_counter() - started))
    print(json.dumps({'rate': best}), flush=True)
    os._exit(0)


def parquet():
    import grain

    items = iter(grain.experimental.ParquetIterDataset(job['path']))
    for _ in range(job['warm']):
        next(items)
    started = time.perf_counter()
    for _ in range(job['count']):
        next(items)
    print(json.dumps({'rate': job['count'] / (time.perf_counter() - started)}), flush=True)
    os._exit(0)


def ready():
    import grain

    dataset = grain.MapDataset.source(list(range(1000))).map(lambda x: np.zeros(50_000, np.uint8)).batch(64).repeat()
    items = iter(grain.experimental.ThreadPrefetchIterDataset(dataset.to_iter_dataset(), prefetch_buffer_size=8))
    for _ in range(10):
        next(items)
    seconds = []
    for _ in range(job['steps']):
        time.sleep(0.05)
        started = time.perf_counter()
        batch = next(items)
        seconds.append(time.perf_counter() - started)
        del batch
    print(json.dumps({'p50': float(np.median(seconds)) * 1e3}), flush=True)
    os._exit(0)


if __name__ == '__main__':
    {'write': write, 'read': read, 'overhead': overhead, 'parquet': parquet, 'ready': ready}[sys.argv[1]]()

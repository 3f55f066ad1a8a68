"""Grain: ArrayRecord's bulk read, a pipeline's iteration and Parquet rows on the local disk, and a training loop."""

import os
import sys
import time

import numpy as np
from measuring import job, tell
from timing import rate


def write():
    from array_record.python.array_record_module import ArrayRecordWriter

    os.makedirs(job['folder'], exist_ok=True)
    writer = ArrayRecordWriter(f'{job["folder"]}/data.array_record', 'group_size:1,uncompressed')
    block = np.random.default_rng(0).bytes(16 << 20)
    for i in range(job['count']):
        at = i * 4001 % (len(block) - job['size'])
        writer.write(block[at : at + job['size']])
    writer.close()
    tell()


def read():
    import grain

    source = grain.sources.ArrayRecordDataSource(f'{job["folder"]}/data.array_record')
    order = np.random.default_rng(0).integers(0, len(source), 40_000).tolist()
    batches = [order[i : i + 256] for i in range(0, len(order), 256)]
    bulk = max(rate(map(source.__getitems__, batches), len(batches), len(order) / len(batches)) for _ in range(3))
    data = grain.MapDataset.source(source).shuffle(seed=0).repeat()
    data = data.map(lambda record: np.frombuffer(record, np.uint8)).batch(256).to_iter_dataset()
    items = iter(data)
    next(items)
    tell(bulk=bulk, pipeline=max(rate(items, 80, 256) for _ in range(3)))


def overhead():
    import grain

    dataset = grain.MapDataset.source(list(range(job['count']))).map(lambda x: x).batch(64)
    tell(rate=max(rate(iter(dataset.to_iter_dataset()), job['count'] // 64 - 100, 64, 90) for _ in range(3)))


def parquet():
    import grain

    items = iter(grain.experimental.ParquetIterDataset(job['path']))
    tell(rate=rate(items, job['count'], 1, job['warm']))


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
    tell(p50=float(np.median(seconds)) * 1e3)


def train():
    import grain
    from ranges import Records
    from steps import has_gpu, torch_step
    from timing import train

    records = Records(f'{job["url"]}/{job["key"]}.bag', job['ranges'], job['key'])
    options = grain.ReadOptions(num_threads=job['inflight'], prefetch_buffer_size=8 * job['batch'])
    dataset = grain.MapDataset.source(records).repeat().to_iter_dataset(options).batch(job['batch'])
    if has_gpu():
        dataset = dataset.map(transfer)
    batches = iter(grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=8))
    step = torch_step(job['key'], sleeps=False)
    tell(**train(({job['key']: batch} for batch in batches), step, job['steps']))


def transfer(batch):
    import torch

    return torch.from_numpy(batch).pin_memory().to('cuda', non_blocking=True)


PARTS = {'write': write, 'read': read, 'overhead': overhead, 'parquet': parquet, 'ready': ready, 'train': train}

if __name__ == '__main__':
    PARTS[sys.argv[1]]()

"""mosaicml-streaming: MDS shards from S3, with nginx as the bucket, a cold local cache, and torch's loader."""

import json
import os
import pathlib
import shutil
import sys
import tempfile
import time

import numpy as np

job = json.loads(pathlib.Path(sys.argv[2]).read_text())


def write():
    from streaming import MDSWriter

    rng = np.random.default_rng(0)
    block = rng.bytes(64 << 20)
    columns = {'data': 'bytes', 'label': 'int'}
    with MDSWriter(out=job['folder'], columns=columns, size_limit=1 << 26, progress_bar=False) as writer:
        for i in range(job['count']):
            size = int(rng.integers(50_000, 150_001))
            at = int(rng.integers(0, len(block) - size))
            writer.write({'data': block[at : at + size], 'label': i % 1000})


def read():
    os.environ['S3_ENDPOINT_URL'] = job['url']
    os.environ['AWS_ACCESS_KEY_ID'] = os.environ['AWS_SECRET_ACCESS_KEY'] = 'x'
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    clean_stale_shared_memory()
    local = tempfile.mkdtemp(prefix='granular-mds-')
    try:
        data = StreamingDataset(
            remote=f's3://{job["path"]}',
            local=local,
            shuffle=True,
            batch_size=64,
            num_canonical_nodes=1,
            predownload=2048,
        )
        loader = DataLoader(data, batch_size=64, num_workers=2, collate_fn=collate)
        items = iter(loader)
        started = time.perf_counter()
        count = sum(next(items)[1].shape[0] for _ in range(job['batches']))
        seconds = time.perf_counter() - started
        print(json.dumps({'rate': count / seconds}), flush=True)
    finally:
        shutil.rmtree(local, ignore_errors=True)
    os._exit(0)


def collate(items):
    return [len(item['data']) for item in items], np.array([item['label'] for item in items])


if __name__ == '__main__':
    write() if sys.argv[1] == 'write' else read()

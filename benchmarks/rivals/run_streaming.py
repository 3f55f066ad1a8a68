"""mosaicml-streaming: MDS shards from S3, with nginx as the bucket, a cold local cache, and torch's loader."""

import os
import shutil
import sys
import tempfile
import time

import numpy as np
from measuring import job, records, tell


def write():
    from streaming import MDSWriter

    columns = {'data': 'bytes', 'label': 'int'}
    with MDSWriter(out=job['folder'], columns=columns, size_limit=1 << 26, progress_bar=False) as writer:
        for i, record in enumerate(records(job['count'])):
            writer.write({'data': record, 'label': i % 1000})
    tell()


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
    finally:
        shutil.rmtree(local, ignore_errors=True)
    tell(rate=count / seconds)


def collate(items):
    return [len(item['data']) for item in items], np.array([item['label'] for item in items])


if __name__ == '__main__':
    write() if sys.argv[1] == 'write' else read()

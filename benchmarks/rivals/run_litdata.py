"""litdata: optimized chunks from S3, with nginx as the bucket, a cold local cache, and its StreamingDataLoader."""

import os
import shutil
import sys
import tempfile
import time

import numpy as np
from measuring import job, records, tell


def write():
    from litdata.streaming.writer import BinaryWriter

    os.makedirs(job['folder'], exist_ok=True)
    writer = BinaryWriter(job['folder'], chunk_bytes='64MB')
    for i, record in enumerate(records(job['count'])):
        writer[i] = {'data': record, 'label': i % 1000}
    writer.done()
    writer.merge()
    tell()


def collate(items):
    return [len(item['data']) for item in items], np.array([item['label'] for item in items])


def read():
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    # Its HTTP client rejects servers without TLS, and has no option for them.
    downloader._OBSTORE_CLIENT_OPTIONS['allow_http'] = True
    local = tempfile.mkdtemp(prefix='granular-lit-')
    options = {'endpoint_url': job['url'], 'aws_access_key_id': 'x', 'aws_secret_access_key': 'x'}
    try:
        data = StreamingDataset(
            f's3://{job["path"]}', cache_dir=local, shuffle=True, storage_options=options, max_pre_download=4
        )
        loader = StreamingDataLoader(data, batch_size=64, num_workers=2, collate_fn=collate)
        items = iter(loader)
        started = time.perf_counter()
        count = sum(next(items)[1].shape[0] for _ in range(job['batches']))
        seconds = time.perf_counter() - started
    finally:
        shutil.rmtree(local, ignore_errors=True)
    tell(rate=count / seconds)


if __name__ == '__main__':
    write() if sys.argv[1] == 'write' else read()

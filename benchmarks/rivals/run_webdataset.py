"""webdataset: tar shards through curl pipes, 4 workers, its own shuffle. ``write`` makes the shards."""

import os
import sys

import numpy as np
import webdataset as wds
from measuring import job, records, tell
from timing import rate


def write():
    os.makedirs(job['folder'], exist_ok=True)
    with wds.ShardWriter(f'{job["folder"]}/%05d.tar', maxcount=500, verbose=0) as writer:
        for i, record in enumerate(records(job['count'])):
            writer.write({'__key__': f'{i:08d}', 'data.bin': record, 'label.cls': i % 1000})
    tell()


def read():
    names = [f'pipe:curl -s {job["url"]}/{job["path"]}/{i:05d}.tar' for i in range(job['count'] // 500)]
    data = wds.WebDataset(names, shardshuffle=100, nodesplitter=None, resampled=True).shuffle(1000)
    data = data.map(lambda item: (np.frombuffer(item['data.bin'], np.uint8).size, int(item['label.cls'])))
    loader = wds.WebLoader(data.batched(64), batch_size=None, num_workers=4)
    tell(rate=rate(iter(loader), job['batches'], 64, 4))


if __name__ == '__main__':
    write() if sys.argv[1] == 'write' else read()

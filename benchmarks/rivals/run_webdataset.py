"""webdataset: tar shards through curl pipes, 4 workers, its own shuffle. ``write`` makes the shards."""

import json
import os
import pathlib
import sys
import time

import numpy as np
import webdataset as wds

job = json.loads(pathlib.Path(sys.argv[2]).read_text())


def write():
    os.makedirs(job['folder'], exist_ok=True)
    rng = np.random.default_rng(0)
    block = rng.bytes(64 << 20)
    with wds.ShardWriter(f'{job["folder"]}/%05d.tar', maxcount=500, verbose=0) as writer:
        for i in range(job['count']):
            size = int(rng.integers(50_000, 150_001))
            at = int(rng.integers(0, len(block) - size))
            writer.write({'__key__': f'{i:08d}', 'data.bin': block[at : at + size], 'label.cls': i % 1000})


def read():
    names = [f'pipe:curl -s {job["url"]}/{job["path"]}/{i:05d}.tar' for i in range(job['count'] // 500)]
    data = wds.WebDataset(names, shardshuffle=100, nodesplitter=None, resampled=True).shuffle(1000)
    data = data.map(lambda item: (np.frombuffer(item['data.bin'], np.uint8).size, int(item['label.cls'])))
    loader = wds.WebLoader(data.batched(64), batch_size=None, num_workers=4)
    items = iter(loader)
    for _ in range(4):
        next(items)
    started = time.perf_counter()
    for _ in range(job['batches']):
        next(items)
    seconds = time.perf_counter() - started
    print(json.dumps({'rate': job['batches'] * 64 / seconds}), flush=True)
    os._exit(0)


if __name__ == '__main__':
    write() if sys.argv[1] == 'write' else read()

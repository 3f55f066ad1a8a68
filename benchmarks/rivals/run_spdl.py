"""SPDL: batches of JPEG files of one size from the local disk, and a training loop."""

import itertools
import pathlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import spdl.io
from measuring import job, tell
from spdl.pipeline import PipelineBuilder


def decode(source):
    return spdl.io.decode_packets(spdl.io.demux_image(source))


def stack(frames):
    return spdl.io.to_numpy(spdl.io.convert_frames(frames))


def read():
    paths = [f'{path}' for path in sorted(pathlib.Path(job['folder']).glob('*.jpg'))]
    builder = PipelineBuilder().add_source(itertools.cycle(paths)).pipe(decode, concurrency=2)
    pipeline = builder.aggregate(job['batch']).pipe(stack).add_sink(8).build(num_threads=2)
    with pipeline.auto_stop():
        batches = iter(pipeline)
        for _ in range(10):
            shape = next(batches).shape
        used = time.process_time()
        for _ in range(job['batches']):
            next(batches)
        used = time.process_time() - used
    if shape[0] != job['batch'] or shape[-1] != 3:
        raise RuntimeError(f'expected RGB images, got {shape}')
    tell(cpu=used / (job['batches'] * job['batch']) * 1e6)


def train():
    from ranges import Records
    from steps import has_gpu, torch_step
    from timing import train

    is_image = job['key'] == 'image'
    records = Records(f'{job["url"]}/{job["key"]}.bag', job['ranges'], job['key'])
    builder = PipelineBuilder().add_source(itertools.cycle(range(len(records))))
    builder = builder.pipe(records.read if is_image else records.__getitem__, concurrency=job['inflight'])
    if is_image:
        builder = builder.pipe(decode, concurrency=2)
    builder = builder.aggregate(job['batch']).pipe(stack if is_image else np.stack)
    if has_gpu():
        builder = builder.pipe(transfer, executor=ThreadPoolExecutor(1))
    pipeline = builder.add_sink(8).build(num_threads=job['inflight'] + 3)
    step = torch_step(job['key'], sleeps=False)
    with pipeline.auto_stop():
        tell(**train(({job['key']: batch} for batch in pipeline), step, job['steps']))


def transfer(batch):
    import torch

    return spdl.io.transfer_tensor_h2d(torch.from_numpy(batch))


if __name__ == '__main__':
    {'read': read, 'train': train}[sys.argv[1]]()

"""SPDL: batches of JPEG files of one size, read and decoded by a pipeline with two threads."""

import pathlib
import time

import spdl.io
from measuring import job, tell
from spdl.pipeline import PipelineBuilder

paths = [f'{path}' for path in sorted(pathlib.Path(job['folder']).glob('*.jpg'))]


def endless():
    while True:
        yield from paths


def decode(path):
    return spdl.io.decode_packets(spdl.io.demux_image(path))


def stack(frames):
    return spdl.io.to_numpy(spdl.io.convert_frames(frames))


builder = PipelineBuilder().add_source(endless()).pipe(decode, concurrency=2).aggregate(job['batch']).pipe(stack)
pipeline = builder.add_sink(8).build(num_threads=2)
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

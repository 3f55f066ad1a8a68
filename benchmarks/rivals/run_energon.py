"""Megatron-Energon: batches of JPEG images of one size from tar files on the local disk, without worker processes."""

import json
import pathlib
import subprocess
import sys
import time

import webdataset
from measuring import job, tell
from megatron.energon import DefaultTaskEncoder, SampleDecoder, WorkerConfig, get_loader, get_train_dataset

SHARDS = 4


class Decoding(DefaultTaskEncoder):
    decoder = SampleDecoder(image_decode='torchrgb8')


def write():
    files, folder = sorted(pathlib.Path(job['files']).glob('*.jpg')), pathlib.Path(job['folder'])
    folder.mkdir()
    with webdataset.ShardWriter(f'{folder}/%06d.tar', maxcount=-(-len(files) // SHARDS), verbose=0) as writer:
        for file in files:
            writer.write({'__key__': file.stem, 'jpg': file.read_bytes()})
    prepare = pathlib.Path(sys.executable).with_name('energon'), 'prepare', folder, '--non-interactive', '--no-progress'
    fields = '--sample-type', 'ImageSample', '--field-map', json.dumps({'image': 'jpg'})
    subprocess.run([*prepare, *fields, '--split-ratio', '1,0,0'], check=True, stdout=subprocess.DEVNULL)
    tell(shards=SHARDS)


def read():
    batch = job['batch']
    stream = get_train_dataset(
        job['folder'],
        batch_size=batch,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        worker_config=WorkerConfig.default_worker_config(num_workers=0),
        task_encoder=Decoding(),
    )
    batches = iter(get_loader(stream))
    for _ in range(10):
        shape = next(batches).image.shape
    if tuple(shape) != (batch, 3, 375, 500):
        raise RuntimeError(f'expected RGB images, got {tuple(shape)}')
    used = time.process_time()
    for _ in range(job['batches']):
        next(batches)
    tell(cpu=(time.process_time() - used) / (job['batches'] * batch) * 1e6)


if __name__ == '__main__':
    {'write': write, 'read': read}[sys.argv[1]]()

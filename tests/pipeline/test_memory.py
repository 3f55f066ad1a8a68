"""``memory`` limits what a stream or a Loader decodes and reads ahead, also where functions make it smaller."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import io, os, sys, threading, time
import numpy as np
import PIL.Image
import granular

folder, height, width, count, memory, name = sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6]
PIL.Image.fromarray(np.full((height, width, 3), 90, np.uint8)).save(file := io.BytesIO(), 'JPEG')
with granular.DatasetWriter(folder, {'image': 'jpg'}) as writer:
    for _ in range(count):
        writer.append({'image': file.getvalue()})


def crop(datapoint):
    return {'image': datapoint['image'][:224, :224].copy()}


def memory_in_use():
    with open('/proc/self/statm') as file:
        return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')


def watch():
    while not done.is_set():
        most[0] = max(most[0], memory_in_use() - before)
        time.sleep(0.001)


dataset, options = granular.MapDataset.source(granular.open(folder)), granular.ReadOptions(memory=memory)
stream = {
    'plain': lambda: dataset.to_iter_dataset(options),
    'crop': lambda: dataset.map(crop).to_iter_dataset(options).batch(4),
    'crop of the stream': lambda: dataset.to_iter_dataset(options).map(crop).batch(4),
    'batch of the stream': lambda: dataset.to_iter_dataset(options).batch(2),
    'batch': lambda: dataset.batch(2).to_iter_dataset(options),
    'crop, batch': lambda: dataset.map(crop).batch(4).to_iter_dataset(options),
    'Loader': lambda: granular.Loader(dataset, 2, memory=memory),
    'Loader that recycles': lambda: granular.Loader(dataset, 2, recycle_after=1, memory=memory),
    'crop, Loader': lambda: granular.Loader(dataset.map(crop), 4, memory=memory),
}[name]()
before, most, done = memory_in_use(), [0], threading.Event()
thread = threading.Thread(target=watch)
thread.start()
for batch in stream:
    pass
done.set()
thread.join()
print(most[0])
"""

MANY = 1500, 2000, 120, 64 << 20
LARGE = 6000, 8000, 8, 512 << 20


@pytest.mark.parametrize(
    ('pictures', 'name', 'batch'),
    [
        (MANY, 'plain', 1), (MANY, 'crop', 0), (MANY, 'crop of the stream', 0), (MANY, 'batch of the stream', 2),
        (MANY, 'batch', 2), (MANY, 'crop, batch', 4), (MANY, 'Loader', 2),
        (MANY, 'Loader that recycles', 2), (MANY, 'crop, Loader', 0),
        (LARGE, 'plain', 1), (LARGE, 'crop', 0), (LARGE, 'batch', 2), (LARGE, 'Loader', 2), (LARGE, 'crop, Loader', 0),
    ],
)  # fmt: skip
def test_decoded_pictures_stay_within_the_memory(tmp_path, pictures, name, batch):
    """One picture that is being decoded takes twice its size."""
    height, width, count, memory = pictures
    arguments = [str(value) for value in (tmp_path / 'photos', height, width, count, memory, name)]
    run = [sys.executable, '-c', PROGRAM, *arguments]
    env = {
        **os.environ,
        'GRANULAR_KEEP_FREED': '0',
        'MALLOC_MMAP_THRESHOLD_': f'{1 << 20}',
    }  # what is freed is returned
    done = subprocess.run(run, env=env, capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) <= 1.3 * memory + 2 * max(1, batch) * height * width * 3, int(done.stdout) >> 20

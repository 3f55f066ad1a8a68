"""Functions of the user that read through granular while they occupy the threads that would decode for them."""

import asyncio
import threading
import time

import numpy as np
import pytest

import granular
from granular import MapDataset, aio
from granular.grain import MultiprocessingOptions

COUNT = 40  # more than a pool has threads


@pytest.fixture
def images(fakegcs):
    """A dataset in a bucket, whose images are decoded in threads."""
    path = fakegcs.place() / 'images'
    with granular.DatasetWriter(path, {'image': 'png'}) as writer:
        for i in range(COUNT):
            writer.append({'image': np.full((8, 8, 3), i, np.uint8)})
    return path


def occupying(read):
    """Return a function over indices that begins to read once its pool is full of such functions."""

    def function(i):
        time.sleep(0.1)
        return read(i)

    return function


def blocking(path):
    reader = granular.open(path)
    return lambda i: int(reader.fetch([i])[0]['image'].max())


def on_its_own_loop(path):
    async def read(i):
        async with await aio.open(path) as reader:
            return int((await reader.get(i))['image'].max())

    return lambda i: asyncio.run(read(i))


def within_another(path):
    return MapDataset.range(COUNT).map(occupying(blocking(path))).__getitem__


def by_a_loader(path):
    dataset = MapDataset.source(granular.open(path))

    def read(i):
        with granular.Loader(dataset.slice(slice(i, i + 1)), 1) as loader:
            return int(next(loader)['image'].max())

    return read


def in_a_thread(path):
    read = blocking(path)

    def start(i):
        found = []
        thread = threading.Thread(target=lambda: found.append(read(i)))
        thread.start()
        thread.join()
        return found[0]

    return start


READS = [in_a_thread, blocking, on_its_own_loop, within_another, by_a_loader]


@pytest.mark.parametrize('read', READS)
async def test_functions_that_read_do_not_wait_for_their_own_threads(images, read):
    dataset = aio.MapDataset.range(COUNT).map(occupying(read(images)))
    async with asyncio.timeout(40):
        fetched = await asyncio.gather(*(dataset.fetch([i]) for i in range(COUNT)))
    assert [value for values in fetched for value in values] == list(range(COUNT))


@pytest.mark.parametrize('read', READS)
def test_functions_of_worker_processes_that_read_do_not_wait_for_their_own_threads(images, read):
    dataset = MapDataset.range(COUNT).map(occupying(read(images))).to_iter_dataset()
    with iter(dataset.mp_prefetch(MultiprocessingOptions(1, start_method='fork'))) as iterator:
        assert list(iterator) == list(range(COUNT))


async def test_function_that_runs_a_loop_is_called_by_blocking_calls_under_a_running_loop(images):
    task = asyncio.current_task()
    dataset = MapDataset.range(COUNT).map(on_its_own_loop(images))
    assert dataset[3] == 3
    assert dataset.fetch([5, 4]) == [5, 4]
    with iter(dataset.to_iter_dataset()) as iterator:
        assert next(iterator) == 0
    assert asyncio.current_task() is task

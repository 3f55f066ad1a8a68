"""Caches and readers dropped without close: what they have opened is closed with them."""

import asyncio
import gc
import os
import time
import uuid
import weakref

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import granular
from granular import aio

NUMBERS = list(range(64))
MAKE = {
    'bag': lambda api, folder: api.BagReader(folder / 'shards' / '000001' / 'n.bag'),
    'dataset': lambda api, folder: api.DatasetReader(folder / 'shards' / '000001'),
    'shards': lambda api, folder: api.ShardedDatasetReader(folder / 'shards'),
    'parquet': lambda api, folder: api.ParquetDataSource(folder / 'rows.parquet'),
    'redis': lambda api, folder: api.RedisCache(NUMBERS, fingerprint=uuid.uuid4().hex),
    'redis over a reader': lambda api, folder: api.RedisCache(
        api.ShardedDatasetReader(folder / 'shards'), namespace=uuid.uuid4().hex
    ),
    'shared memory': lambda api, folder: api.SharedMemoryCache(NUMBERS),
    'named shared memory': lambda api, folder: api.SharedMemoryCache(NUMBERS, name=uuid.uuid4().hex),
}


@pytest.fixture
def folder(tmp_path, redis_server, monkeypatch):
    root = granular.Path(tmp_path)  # stores keep their connections for the next reader
    monkeypatch.setenv('GRANULAR_REDIS_URL', redis_server.url)
    with granular.ShardedDatasetWriter(root / 'shards', {'n': 'int'}, shardlen=8) as writer:
        for n in range(16):
            writer.append({'n': n})
    with (root / 'rows.parquet').open('wb') as file:
        pyarrow.parquet.write_table(pyarrow.table({'n': np.arange(16)}), file)
    return root


def descriptors():
    gc.collect()
    return len(os.listdir('/proc/self/fd'))


def number(datapoint, seed):
    return {'x': 1}


def use(name, folder):
    """Read from a resource, alone and by a Loader, and drop both. Returns what remains of it."""
    resource = MAKE[name](granular, folder)
    assert len(resource.fetch([1, 3, 5])) == 3
    loader = granular.Loader(granular.sources.Transform(granular.sources.Epochs(resource), number), 4)
    next(loader)
    return weakref.ref(resource)


async def use_async(name, folder):
    resource = MAKE[name](aio, folder.aio)
    assert len(await resource.fetch([1, 3, 5])) == 3
    loader = aio.Loader(aio.sources.Transform(aio.sources.Epochs(resource), number), 4)
    await anext(loader)
    return weakref.ref(resource)


@pytest.mark.parametrize('name', MAKE)
def test_dropped_resources_close_what_they_opened(name, folder):
    use(name, folder)
    most, references = descriptors(), [use(name, folder) for _ in range(10)]
    until = time.monotonic() + 60  # the loop closes connections soon
    while (count := descriptors()) > most or any(reference() for reference in references):
        assert time.monotonic() < until, (count, most)
        time.sleep(0.01)


@pytest.mark.parametrize('name', MAKE)
async def test_dropped_asynchronous_resources_close_what_they_opened(name, folder):
    await use_async(name, folder)
    most, references = descriptors(), [await use_async(name, folder) for _ in range(10)]
    until = time.monotonic() + 60
    while (count := descriptors()) > most or any(reference() for reference in references):
        assert time.monotonic() < until, (count, most)
        await asyncio.sleep(0.01)
    await aio.aclose()

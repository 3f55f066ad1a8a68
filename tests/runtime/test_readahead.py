"""Iteration over readers: pages are read ahead, in order and in bounded memory."""

import asyncio

import pytest

import granular
from granular import aio
from granular.config import MiB


@pytest.fixture
def data(http, request):
    """A dataset on a web server, of a number of datapoints of a size: its address and its folder."""
    count, size = request.param
    path = http.place() / 'data'
    folder = http.folder / str(path).split('/', 3)[3]
    with granular.DatasetWriter(folder, {'x': 'bytes'}, granular.encoders) as writer:
        for i in range(count):
            writer.append({'x': bytes([i % 256]) * size}, flush=False)
    return path, folder


def of(count, size):
    return pytest.mark.parametrize('data', [(count, size)], indirect=True)


@of(300, 100_000)
async def test_pages_are_read_ahead_in_order(data):
    reader = await aio.DatasetReader.open(data[0], granular.decoders)
    seen = 0
    async for datapoint in reader:
        assert datapoint['x'] == bytes([seen % 256]) * 100_000
        seen += 1
    assert seen == 300


@of(300, 100_000)
async def test_early_exit_leaves_no_task(data):
    before = asyncio.all_tasks()
    reader = await aio.DatasetReader.open(data[0], granular.decoders)
    items = aiter(reader)
    await anext(items)
    assert asyncio.all_tasks() - before
    await items.aclose()
    assert not asyncio.all_tasks() - before


@pytest.mark.parametrize('data', [(100, MiB), (10, 6 * MiB)], indirect=True)
async def test_read_ahead_memory_is_bounded(data):
    reader = await aio.DatasetReader.open(data[0], granular.decoders)
    before = granular.io_stats()['bytes']
    used = 0
    async for datapoint in reader:
        assert granular.io_stats()['bytes'] - before - used < 40 * MiB
        used += len(datapoint['x'])


@of(3000, 1000)
def test_sync_api(data):
    with granular.DatasetReader(data[0], granular.decoders) as reader:
        assert [datapoint['x'][0] for datapoint in reader] == [i % 256 for i in range(3000)]
        for datapoint in reader:
            assert datapoint['x'][0] == 0
            break
    with granular.BagReader(data[0] / 'x.bag') as bag:
        assert [record[0] for record in bag] == [i % 256 for i in range(3000)]


@of(30, MiB)
async def test_error_in_a_page_is_raised_in_order(data):
    reader = await aio.DatasetReader.open(data[0], granular.decoders)
    (data[1] / 'x.bag').write_bytes(b'')
    with pytest.raises(granular.errors.GranularError):
        async for _ in reader:
            pass
    assert len(asyncio.all_tasks()) == 1

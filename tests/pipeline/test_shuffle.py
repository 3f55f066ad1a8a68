"""Shuffled orders: permutations, equality with Grain, and blocks that are read together."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import granular
from granular import aio, shuffle
from granular.errors import InvalidArgumentError

LENGTHS = (1, 2, 3, 10, 1000, 4097, 65536, 65538, 100_003, (1 << 20) + 2, 1_000_000_000)


def test_order_equals_that_of_grain(grain):
    cases = [(length, seed) for length in LENGTHS for seed in (0, 10, 2**32 - 1)]
    script = """
cases = json.loads(sys.argv[1])
def order(length, seed):
    ds = grain.MapDataset.range(length).shuffle(seed=seed)
    return [int(ds[i]) for i in range(0, 2 * length, max(1, length // 50))]
print(json.dumps([order(*case) for case in cases]))
"""
    for (length, seed), expected in zip(cases, grain.run(script, json.dumps(cases)), strict=True):
        dataset = granular.MapDataset.range(length).shuffle(seed=seed)
        assert dataset.fetch(range(0, 2 * length, max(1, length // 50))) == expected, (length, seed)


@pytest.mark.parametrize('length', [65537, (1 << 18) + 1])
def test_order_is_a_permutation_where_that_of_grain_repeats(length):
    positions = shuffle.permute(np.arange(length), length, 3)
    assert len(np.unique(positions)) == length


@given(st.integers(1, 5000), st.integers(0, 2**32 - 1), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_index_is_a_permutation(length, seed, epoch):
    positions = shuffle.Index().lookup(np.arange(length), length, seed, epoch)
    assert sorted(positions.tolist()) == list(range(length))


@given(
    st.integers(1, 3000), st.integers(1, 70), st.integers(1, 9), st.integers(0, 2**32 - 1), st.data()
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_blocks_are_a_permutation_with_random_access(length, block, window, seed, data):
    order = shuffle.Blocks(block, window)
    positions = order.lookup(np.arange(length), length, seed, 1)
    assert sorted(positions.tolist()) == list(range(length))
    some = np.array(data.draw(st.lists(st.integers(0, length - 1), max_size=20)), np.int64)
    assert order.lookup(some, length, seed, 1).tolist() == positions[some].tolist()
    # As many positions as a window has lie in one window, or in two after the window with the short block.
    for first in range(0, length, max(1, block * window)):
        assert len(np.unique(positions[first : first + block * window] // block)) <= 2 * window


def test_epochs_and_seeds_differ():
    for order in (shuffle.Index(), shuffle.Blocks(16, 8), shuffle.Permutation()):
        orders = [order.lookup(np.arange(1000), 1000, seed, epoch).tolist() for seed in (1, 50) for epoch in (0, 1)]
        assert len({tuple(positions) for positions in orders}) == 4


def test_neighbours_are_far_apart():
    positions = shuffle.Index().lookup(np.arange(100_000), 100_000, 0, 0)
    assert 0.3 < np.abs(np.diff(positions)).mean() / 100_000 < 0.36  # a third is expected of random positions


def test_invalid_block_sizes_are_rejected():
    for block, window in ((0, 4), (4, 0), (1.5, 4)):
        with pytest.raises(InvalidArgumentError, match='expected an integer >= 1'):
            shuffle.Blocks(block, window)


@pytest.fixture
def shards(moto):
    path = moto.place()
    with granular.ShardedDatasetWriter(path, {'i': 'int', 'x': 'bytes'}, granular.encoders, shardlen=700) as writer:
        for i in range(2000):
            writer.append({'i': i, 'x': i.to_bytes(2, 'big') * 500})
    return path


async def test_block_is_one_request(shards):
    async with aio.ShardedDatasetReader(shards, granular.decoders, cache_keys=('i', 'refs')) as reader:
        source = aio.sources.Epochs(reader, shuffle=shuffle.Blocks(block=50, window=4), seed=1)
        before = granular.io_stats()['requests']
        datapoints = []
        for step in range(0, 4000, 40):
            datapoints += await source.fetch(np.arange(step, step + 40))
        requests = granular.io_stats()['requests'] - before
    for epoch in (datapoints[:2000], datapoints[2000:]):
        assert sorted(datapoint['i'] for datapoint in epoch) == list(range(2000))
        assert all(datapoint['x'] == datapoint['i'].to_bytes(2, 'big') * 500 for datapoint in epoch)
    # An epoch has 40 blocks, of which some span two shards.
    assert requests <= 2 * 44


async def test_concurrent_batches_read_each_block_once(shards):
    async with aio.ShardedDatasetReader(shards, granular.decoders, cache_keys=('i', 'refs')) as reader:
        dataset = aio.MapDataset.source(reader).shuffle(seed=1, order=shuffle.Blocks(block=50, window=4))
        before = granular.io_stats()['requests']
        async with aio.Loader(dataset.select(['i']), 40) as loader:
            indices = [i async for batch in loader for i in batch['i'].tolist()]
        assert granular.io_stats()['requests'] == before  # this key is cached
        async with aio.Loader(dataset.map(lambda datapoint: {'i': datapoint['i']}), 40) as loader:
            assert [i async for batch in loader for i in batch['i'].tolist()] == indices
            loader.load({'step': 400, 'seed': 1})
            assert (await anext(loader))['i'].tolist() == indices[400:440]
        assert sorted(indices) == list(range(2000))


async def test_small_block_buffer_reads_blocks_again(shards, caplog):
    from granular.aio.pipeline.nodes.base import Wrapped
    from granular.aio.pipeline.nodes.blocks import BlockBuffer

    async with aio.ShardedDatasetReader(shards, granular.decoders) as reader:
        buffer = BlockBuffer(Wrapped(reader), 50, memory=100_000)
        order = shuffle.Blocks(50, 4).lookup(np.arange(2000), 2000, 1, 0)
        parts = [order[window + at : window + at + 40] for at in range(0, 200, 40) for window in range(0, 2000, 200)]
        for part in parts:
            assert [datapoint['i'] for datapoint in await buffer.fetch(part)] == part.tolist()
    assert 'contain more than 100000 bytes' in caplog.text

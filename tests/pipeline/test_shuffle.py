"""Shuffled orders: permutations, equality with Grain, and blocks that are read together."""

import asyncio
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import granular
from granular import aio, shuffle
from granular.errors import InvalidArgumentError, StateError
from tests.support.tables import examples

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
@settings(max_examples=examples(60))
def test_index_is_a_permutation(length, seed, epoch):
    positions = shuffle.Index().lookup(np.arange(length), length, seed, epoch)
    assert sorted(positions.tolist()) == list(range(length))


settings_of_blocks = {
    'length': st.integers(1, 3000),
    'block': st.integers(1, 70),
    'window': st.integers(1, 90),
    'seed': st.integers(0, 2**32 - 1),
    'epoch': st.integers(0, 5),
}


def reference_order(length, block, window, seed, epoch):
    """Return the order of Blocks for an epoch, computed in the straightforward way, and the blocks of its windows."""
    count = math.ceil(length / block)
    windows = math.ceil(count / window)
    strata = math.ceil(count / windows)
    keys = np.random.PCG64([seed, epoch]).random_raw(24 * strata).tolist()
    columns = []
    gap = windows - (strata * windows - count)
    for stratum in range(strata):
        first, stop = stratum * count // strata, (stratum + 1) * count // strata
        column = []
        for place in range(stop - first):
            for key in keys[stratum::strata]:
                partner = (key - place) % (stop - first)
                mixed = (max(place, partner) + key) * 0x9E3779B97F4A7C15 % 2**64
                mixed = (mixed ^ mixed >> 32) * 0x9E3779B97F4A7C15 % 2**64
                place = partner if mixed >> 63 else place
            column.append(first + place)
        if len(column) < windows:  # a shorter stratum is left out of one of the last windows, each of another one
            column.insert(gap, None)
            gap += 1
        columns.append(column)
    order, drawn = [], [[block for block in row if block is not None] for row in zip(*columns, strict=True)]
    for number, blocks in enumerate(drawn):
        datapoints = [i for b in blocks for i in range(b * block, min(length, (b + 1) * block))]
        rng = np.random.default_rng(seed=[seed, epoch, number])
        order += [datapoints[i] for i in rng.permutation(len(datapoints)).tolist()]
    return order, drawn


@given(**settings_of_blocks)
@settings(max_examples=30)
def test_blocks_equal_the_reference_and_draw_one_block_of_each_stratum(length, block, window, seed, epoch):
    positions = shuffle.Blocks(block, window).lookup(np.arange(length), length, seed, epoch)
    order, drawn = reference_order(length, block, window, seed, epoch)
    assert sorted(order) == list(range(length))
    assert positions.tolist() == order
    sizes = {len(blocks) for blocks in drawn}
    assert max(sizes) <= window and max(sizes) - min(sizes) <= 1


@given(**settings_of_blocks, hosts=st.integers(1, 7), batch=st.integers(1, 50), data=st.data())
@settings(max_examples=20)
def test_blocks_scattered_lookups_and_hosts_equal_iteration(
    length, block, window, seed, epoch, hosts, batch, data
):  # fmt: skip
    order = shuffle.Blocks(block, window)
    positions = order.lookup(np.arange(length), length, seed, epoch)
    some = np.array(data.draw(st.lists(st.integers(0, length - 1), max_size=20)), np.int64)
    assert order.lookup(some, length, seed, epoch).tolist() == positions[some].tolist()
    dataset = granular.MapDataset.range(length).shuffle(seed, order)
    read = [dataset.fetch(range(epoch * length + host, (epoch + 1) * length, hosts)) for host in range(hosts)]
    merged = np.empty(length, np.int64)
    for host, indices in enumerate(read):
        merged[host::hosts] = indices
    assert merged.tolist() == positions.tolist()


@pytest.mark.parametrize('order', [shuffle.Index(), shuffle.Blocks(), shuffle.Permutation()], ids=repr)
def test_indices_are_those_of_positions_of_a_small_type(order):
    positions = np.arange(100, dtype=np.int8)
    assert order.lookup(positions, 100_000, 0, 0).tolist() == order.lookup(np.arange(100), 100_000, 0, 0).tolist()


@pytest.mark.parametrize('length', [10**9, 10**9 + 37, 2**40 + 1, 2**63 - 1])
@pytest.mark.parametrize('block', [3, 64])
def test_blocks_of_a_huge_dataset_are_looked_up_alone(length, block):
    order = shuffle.Blocks(block, 16)
    steps = np.arange(length - 3000, length)
    indices = order.lookup(steps, length, 1, 0)
    assert len(np.unique(indices)) == 3000 and indices.min() >= 0 and indices.max() < length
    assert order.lookup(steps[::-700], length, 1, 0).tolist() == indices[::-700].tolist()


@pytest.mark.parametrize(
    ('length', 'block', 'window'), [(10_007, 7, 24), (100_000, 64, 512), (5000, 1, 300), (50, 64, 9)]
)
def test_blocks_are_prefetched_in_groups_each_once_and_before_their_window(length, block, window):
    order, count = shuffle.Blocks(block, window), -(-length // block)
    announced, last = {}, None
    for step in range(0, 2 * length, 10):
        group = order.group_ahead(step + 9, length)  # at a batch of 10
        for number in range(order.group_ahead(step, length) if last is None else last + 1, group + 1):
            for key in order.group(number, length, 3).tolist():
                assert key not in announced
                announced[key] = step
        last = group
    for epoch in (0, 1):
        indices = order.lookup(np.arange(length), length, 3, epoch)
        for step, number in enumerate((indices // block).tolist(), epoch * length):
            if step >= block * window:  # positions after the short block are up to a block behind
                assert announced[number + epoch * count] < step + block


def labels(order, batch, count=100):
    """Return the mean number of different labels in a batch, of a dataset sorted by label."""
    labels = order[: len(order) // batch * batch].reshape(-1, batch) * count // len(order)
    return np.mean([len(np.unique(row)) for row in labels])


def test_blocks_mix_a_sorted_dataset_like_a_permutation():
    length = 200_000
    uniform = np.random.default_rng(0).permutation(length)
    for order, share in ((shuffle.Blocks(64, 512), 0.99), (shuffle.Blocks(), 0.97)):
        indices = order.lookup(np.arange(length), length, 1, 0)
        for batch in (64, 256):
            assert labels(indices, batch) / labels(uniform, batch) >= share, (order, batch)
        distances, expected = (
            np.percentile(np.abs(np.diff(x)), (1, 5, 25, 50, 75, 95, 99)) for x in (indices, uniform)
        )
        assert np.abs(distances / expected - 1).max() <= 0.05, (order, distances, expected)


@pytest.mark.parametrize('windows', [1, 2, 3, 5, 8])
def test_blocks_of_a_stratum_come_in_every_order_about_as_often(windows):
    window, epochs = 500, 20
    drawn = np.stack(
        [
            np.stack([np.sort(order) % windows for order in orders.reshape(windows, window)])
            for epoch in range(epochs)
            for orders in [shuffle.Blocks(1, window).lookup(np.arange(windows * window), windows * window, 7, epoch)]
        ]
    )  # [epoch, window, stratum]
    orders = drawn.transpose(0, 2, 1).reshape(-1, windows)
    for i in range(windows):
        shares = np.bincount(orders[:, i], minlength=windows) / len(orders)
        assert np.abs(shares - 1 / windows).max() < 0.03
        for k in range(i):  # and each pair
            pairs = np.bincount(orders[:, i] * windows + orders[:, k], minlength=windows**2)
            expected = len(orders) / (windows * (windows - 1))
            assert np.abs(pairs[pairs > 0] - expected).max() < 5.5 * math.sqrt(expected)
            assert (pairs > 0).sum() == windows * (windows - 1)


@pytest.mark.parametrize(
    ('given', 'nbytes', 'expected'),
    [
        ((), None, (64, 256)),
        ((), 0, (64, 512)),
        ((), 10, (64, 512)),
        ((), 4100, (64, 512)),
        ((), 10_000, (32, 512)),
        ((), 100_000, (4, 512)),
        ((), 1e6, (1, 256)),
        ((), 1e10, (1, 1)),
        ((64,), 100_000, (64, 32)),
        ((None, 128), 100_000, (16, 128)),
        ((50, 7), 100_000, (50, 7)),
    ],
)
def test_default_block_and_window_follow_the_size_of_datapoints(given, nbytes, expected):
    order = shuffle.Blocks(*given).sized(nbytes)
    assert (order.block, order.window) == expected
    if None in (*given, None)[:2] and nbytes and nbytes < 1e10:
        assert order.block * order.window * nbytes <= 256 << 20


def test_default_settings_follow_the_fields_that_are_read_and_are_part_of_states(tmp_path):
    with granular.DatasetWriter(tmp_path, {'small': 'int', 'large': 'bytes'}, granular.encoders) as writer:
        for i in range(300):
            writer.append({'small': i, 'large': bytes(20_000)})
    with granular.DatasetReader(tmp_path, granular.decoders) as reader:
        dataset = granular.MapDataset.source(reader)
        whole, small = dataset.shuffle(1, shuffle.Blocks()), dataset.select(['small']).shuffle(1, shuffle.Blocks())
        assert 'Blocks(block=16, window=512, stratified)' in str(whole)
        assert 'Blocks(block=64, window=512, stratified)' in str(small)
        assert 'Blocks(block=16, window=512, stratified)' in str(whole.select(['small']))
        with granular.Loader(small, 10) as loader:
            next(loader)
            state = json.loads(json.dumps(loader.save()))
        assert (state['step'], state['seed']) == (10, 1)
        with granular.Loader(whole.select(['small']), 10) as loader:
            with pytest.raises(StateError, match=r'block=64, window=512.*block=16, window=512.* in this one'):
                loader.load(state)


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
def shards(fakegcs):
    path = fakegcs.place()
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
            loader.load({**loader.save(), 'step': 400})
            assert (await anext(loader))['i'].tolist() == indices[400:440]
        assert sorted(indices) == list(range(2000))


async def test_small_block_buffer_reads_blocks_again(shards, caplog):
    from granular.aio.pipeline.nodes.blocks import BlockBuffer
    from granular.aio.pipeline.nodes.indices import Wrapped

    async with aio.ShardedDatasetReader(shards, granular.decoders) as reader:
        buffer = BlockBuffer(Wrapped(reader), 50, memory=100_000)
        order = shuffle.Blocks(50, 4).lookup(np.arange(2000), 2000, 1, 0)
        parts = [order[window + at : window + at + 40] for at in range(0, 200, 40) for window in range(0, 2000, 200)]
        for part in parts:
            assert [datapoint['i'] for datapoint in await buffer.fetch(part)] == part.tolist()
    assert 'contain more than 100000 bytes' in caplog.text


class Counted:
    """Elements of 1000 bytes, each fetch of which is noted."""

    def __init__(self):
        self.fetched = []

    def __len__(self):
        return 40

    async def fetch(self, indices):
        await asyncio.sleep(0)
        self.fetched.append(list(indices))
        return [np.full(1000, index, np.uint8) for index in indices]


async def test_blocks_are_read_again_only_beyond_the_memory(caplog):
    from granular.aio.pipeline.nodes.blocks import BlockBuffer
    from granular.aio.pipeline.nodes.indices import Wrapped

    def blocks(*numbers):
        return [list(range(4 * number, 4 * number + 4)) for number in numbers]

    async def take(*indices):
        source.fetched.clear()
        assert [element[0] for element in await buffer.fetch(indices)] == [*indices]
        return source.fetched

    source = Counted()
    buffer = BlockBuffer(Wrapped(source), 4, memory=12_500)  # three blocks
    for number in range(10):  # what is taken leaves the memory
        for position in range(4):
            assert await take(4 * number + position) == ([] if position else blocks(number))
    assert await take(0, 0) == [blocks(0)[0], [0]]
    assert await take(1, 2) == []
    assert await take(3) == []
    assert not caplog.text
    for number in range(4):
        assert await take(4 * number) == blocks(number)
    assert 'contain more than 12500 bytes' in caplog.text
    assert await take(5, 9, 13) == []  # only the first block was dropped
    assert await take(1) == blocks(0)
    buffer = BlockBuffer(Wrapped(source), 4, memory=1)
    taken = await asyncio.gather(*(buffer.fetch([index]) for index in range(40)))
    assert [int(elements[0][0]) for elements in taken] == list(range(40))


def test_permutation_has_earlier_epochs():
    dataset = granular.MapDataset.range(10).shuffle(seed=0, order=granular.shuffle.Permutation())
    assert sorted(dataset.fetch(range(-10, 0))) == list(range(10))

"""Streams of which a part is divided among hosts, and another part is not: a pipeline accepts each of its states."""

import itertools

import numpy as np
import pytest

from granular import IterDataset, MapDataset, ShardOptions
from tests.support.states import plain
from tests.support.tables import pairwise

LENGTH = 7
HOSTS = 3


def number(x):
    """Return the one or two numbers of an element."""
    return x if not isinstance(x, tuple) else sum(x)


def parts_of(sharded_first):
    sharded = MapDataset.range(LENGTH).to_iter_dataset(shard_options=ShardOptions(1, HOSTS))
    parts = [sharded, MapDataset.range(100, 104).to_iter_dataset(), MapDataset.range(200, 203).to_iter_dataset()]
    return parts if sharded_first else parts[::-1]


COMBINATIONS = {
    'interleave': lambda parts: IterDataset.interleave(parts, 2),
    'interleave, one at a time': lambda parts: IterDataset.interleave(parts, 1),
    'interleave, made': lambda parts: IterDataset.interleave(MapDataset.range(3).map(parts.__getitem__), 2),
    'interleave, filtered': lambda parts: IterDataset.interleave(
        MapDataset.range(6).map(lambda i: parts[i // 2] if i % 2 else None), 1
    ),
    'interleave of rows': lambda parts: IterDataset.interleave(
        [part.map(row).pack({'t': 4}, shard_options=ShardOptions(0, 2)).map(total) for part in parts], 2
    ),
    'interleave of an interleave': lambda parts: IterDataset.interleave(
        [IterDataset.interleave(parts[:2], 1), parts[2]], 2
    ),
    'mix': lambda parts: IterDataset.mix(parts, [1, 2, 1]),
    'mix by name': lambda parts: IterDataset.mix(dict(zip('abc', parts, strict=True))),
    'zip': lambda parts: IterDataset.zip(parts, strict=False),
}  # fmt: skip


def row(x):
    return {'t': np.full(1 + number(x) % 3, number(x))}


def total(x):
    return int(x['t'].sum())


STAGES = {
    'nothing': lambda d: d,
    'map_with_index': lambda d: d.map_with_index(lambda i, x: (i, number(x))),
    'filter': lambda d: d.filter(lambda x: number(x) % 2),
    'flat_map': lambda d: d.flat_map(lambda x: [number(x)] * 2),
    'rebatch': lambda d: d.batch(2).rebatch(3),
    'window_shuffle': lambda d: d.window_shuffle(3, seed=1),
    'cache': lambda d: d.cache().repeat(2),
    'repeat': lambda d: d.repeat(2),
    'pack': lambda d: d.map(row).pack({'t': 4}, num_packing_bins=2),
    'prefetch': lambda d: d.prefetch(2),
    'several': lambda d: d.filter(lambda x: number(x) % 3).window_shuffle(3, seed=1).batch(2).prefetch(1),
}


@pytest.mark.parametrize(
    ('combination', 'stage', 'sharded_first'), pairwise(itertools.product(COMBINATIONS, STAGES, [True, False]))
)
def test_pipeline_continues_exactly_from_each_state(combination, stage, sharded_first):
    dataset = STAGES[stage](COMBINATIONS[combination](parts_of(sharded_first)))
    with iter(dataset) as iterator:
        states, expected = [iterator.get_state()], []
        for element in iterator:
            expected.append(plain(element))
            states.append(iterator.get_state())
        states[-1] = iterator.get_state()
    for at, state in enumerate(states):
        with iter(dataset) as iterator:
            iterator.set_state(state)
            again = plain(list(itertools.islice(iterator, 2)))
            state = iterator.get_state()  # of an iterator that was restored
        with iter(dataset) as iterator:
            iterator.set_state(state)
            assert again + plain(list(iterator)) == expected[at:], at

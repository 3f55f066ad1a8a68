"""Mixes whose elements hosts share: each gets its share of every dataset, and each element reaches one host."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import granular
from granular import IterDataset, MapDataset, ShardOptions, sources
from tests.support.seams import stream_of

FIRST = 1 << 20  # of the numbers of each dataset: dataset i has those from i * FIRST on


def datasets(count, length=None, first=0):
    """Return datasets that are told apart by their numbers, endless if they have no length."""
    parts = []
    for i in range(first, first + count):
        part = MapDataset.range(i * FIRST, i * FIRST + (length or 1000)).shuffle(seed=i)
        parts.append(part if length else part.repeat())
    return parts


def mix(*weights, length=None, first=0):
    return MapDataset.mix(datasets(len(weights), length, first), weights)


def part_of_host(dataset, *parts, **options):
    """Return the stream of a part of a part of ..."""
    stream = stream_of(dataset.to_iter_dataset(**options))
    for part in parts:
        stream = stream.sharded(ShardOptions(*part))
    return IterDataset(stream)


def kinds(elements):
    return np.asarray(elements) // FIRST


WEIGHTS = [(1, 1), (3, 1), (9, 1), (0.7, 0.3), (0.95, 0.05), (1, 1, 1), (5, 3, 2), (7, 2, 1), (0.31, 0.27, 0.22, 0.2)]


@pytest.mark.parametrize('ranks', [2, 3, 4, 6, 8, 10, 12])
@pytest.mark.parametrize('weights', WEIGHTS, ids=str)
def test_every_batch_of_every_rank_has_the_weights_and_so_has_each_step(weights, ranks):
    shares = np.array(weights) / sum(weights)
    size, batches = int(np.ceil(5 / min(shares))), 6
    steps = []
    for rank in range(ranks):
        stream = part_of_host(mix(*weights), (rank, ranks)).batch(size)
        elements = [kinds(batch) for batch in itertools.islice(stream, batches)]
        for batch in elements:
            found = np.bincount(batch, minlength=len(weights)) / size
            assert (np.abs(found / shares - 1) < 0.5).all(), (rank, found)
        steps.append(np.concatenate(elements))
    counts = np.stack([(np.stack(steps) == i).sum(axis=0) for i in range(len(weights))])
    assert (np.abs(counts - ranks * shares[:, None]) < 2).all()


@pytest.mark.parametrize(('ranks', 'workers'), [(1, 4), (2, 2), (3, 4), (4, 2)])
@pytest.mark.parametrize('weights', WEIGHTS[::2], ids=str)
def test_every_worker_has_the_weights_and_a_rank_the_same_elements_for_any_number_of_workers(weights, ranks, workers):
    shares = np.array(weights) / sum(weights)
    size = int(np.ceil(5 / min(shares)))
    for rank in range(ranks):
        alone = part_of_host(mix(*weights), (rank, ranks))
        of_workers = []
        for worker in range(workers):
            elements = list(itertools.islice(part_of_host(mix(*weights), (rank, ranks), (worker, workers)), 3 * size))
            of_workers += elements
            for batch in kinds(elements).reshape(3, size):
                assert (np.abs(np.bincount(batch, minlength=len(weights)) / size / shares - 1) <= 0.6).all()
        assert sorted(of_workers) == sorted(itertools.islice(alone, 3 * size * workers))


PAIRS = [(i % 2, i // 2) for i in range(60)]
PIPELINES = {
    'mix': lambda: mix(1, 1, length=60),
    'mix of three': lambda: mix(5, 3, 2, length=40),
    'long period': lambda: mix(0.61803, 0.2345, 0.1437, length=60),
    'part': lambda: mix(1, 1, length=60)[3:90],
    'each third': lambda: mix(2, 1, length=60)[::3],
    'backwards': lambda: mix(2, 1, length=60)[::-1],
    'subset': lambda: mix(2, 1, length=60).subset([5, 3, 60, 7, 7, 8, 9, 11, 13, 0]),
    'repeat': lambda: mix(3, 2, length=20)[:17].repeat(3),
    'repeat without reseed': lambda: mix(3, 2, length=20).repeat(3, reseed_each_epoch=False),
    'functions': lambda: mix(1, 1, length=60).random_map(lambda x, rng: x, seed=0).filter(lambda x: x % 5),
    'flat_map': lambda: mix(1, 1, length=30).flat_map(lambda x: [x] * (1 + x % 3), max_fan_out=3),
    'nested': lambda: MapDataset.mix([mix(1, 1, length=40), mix(2, 1, length=40, first=2)], [2, 1]),
    'nested in parts': lambda: MapDataset.mix([mix(1, 1, length=40)[:33], *datasets(1, 40, 2)], [1, 1]),
    'concatenate': lambda: MapDataset.concatenate([mix(1, 1, length=20), *datasets(1, 15, 2)]),
    'zip': lambda: MapDataset.zip([mix(1, 1, length=20), mix(1, 3, length=40, first=2)[:40]]),
    'select_from_datasets': lambda: MapDataset.select_from_datasets(datasets(2, 30), PAIRS),
    'Interleave': lambda: MapDataset(sources.Interleave(datasets(3, 21)).aio),
    'source': lambda: MapDataset.source(mix(1, 1, length=30)).map(lambda x: x),
    'shuffled': lambda: mix(1, 1, length=30).shuffle(seed=1),
    'empty part': lambda: mix(1, 1, length=30)[:0],
    'kept': lambda: MapDataset(mix(2, 1, length=30)[3:].node.keep_selections(warn=False)),
}  # fmt: skip


def plain(elements):
    return sorted(json.dumps(element) for element in elements)


@pytest.mark.parametrize('name', PIPELINES)
def test_each_element_reaches_one_worker_of_one_rank(name):
    dataset = PIPELINES[name]()
    whole = list(dataset.to_iter_dataset())
    assert whole == [x for x in dataset.fetch(np.arange(len(dataset))) if x is not None]  # in the order of Grain
    for ranks, workers in ((1, 1), (2, 1), (1, 2), (4, 1), (3, 2), (2, 4), (7, 3)):
        parts = [
            list(part_of_host(dataset, (rank, ranks), (worker, workers)))
            for rank, worker in itertools.product(range(ranks), range(workers))
        ]
        assert plain(itertools.chain(*parts)) == plain(whole)
        if name not in ('functions', 'flat_map'):
            assert {len(part) for part in parts} <= {len(whole) // len(parts), -(-len(whole) // len(parts))}
            for rank, worker in itertools.product(range(ranks), range(workers)):
                stream = stream_of(part_of_host(dataset, (rank, ranks), (worker, workers)))
                assert stream.length() == len(parts[rank * workers + worker])


@given(
    name=st.sampled_from([name for name in PIPELINES if name not in ('functions', 'flat_map')]),
    counts=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=4),
    steps=st.lists(st.integers(0, 9), min_size=4, max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_states_move_between_numbers_of_ranks_and_workers(name, counts, steps):
    dataset = PIPELINES[name]()
    rest, state = plain(dataset.to_iter_dataset()), None
    for (ranks, workers), count in zip(counts, steps, strict=False):
        taken, states, elements = [], [], []
        for rank, worker in itertools.product(range(ranks), range(workers)):
            with iter(part_of_host(dataset, (rank, ranks), (worker, workers))) as iterator:
                if state is not None:
                    iterator.set_state(state)
                before = list(itertools.islice(iterator, count))
                states.append(json.loads(json.dumps(iterator.get_state())))
                after = list(iterator)
                iterator.set_state(states[-1])
                assert list(iterator) == after
            taken.append(before)
            elements += before + after
        assert plain(elements) == rest
        if any(len(before) < count for before in taken):
            return  # the end
        rest, state = plain(elements), states[-1]
        for element in plain(itertools.chain(*taken)):
            rest.remove(element)


def test_workers_of_a_torch_loader_get_both_datasets_of_a_mix():
    from torch.utils.data import DataLoader

    from granular.integrations.torch import IterableDataset

    loader = DataLoader(IterableDataset(mix(1, 1)[:400]), batch_size=20, num_workers=2)
    assert [int((batch < FIRST).sum()) for batch in loader] == [10] * 20


def test_ranks_get_all_datasets_of_a_selection_map():
    dataset = MapDataset.select_from_datasets(datasets(2, 4000), [(i % 2, i // 2) for i in range(8000)])
    for ranks in (2, 4, 6):
        for rank in range(ranks):
            elements = kinds(list(part_of_host(dataset, (rank, ranks)))[:1200]).reshape(-1, 100)
            assert (np.abs(elements.mean(axis=1) - 0.5) < 0.25).all()


def test_shards_of_a_sequential_sampler_get_both_datasets_of_a_mix():
    dataset = mix(1, 1, length=203)
    for shards in (2, 4):
        seen = []
        for shard in range(shards):
            loader = granular.grain.DataLoader(
                data_source=dataset,
                sampler=granular.grain.samplers.SequentialSampler(len(dataset), ShardOptions(shard, shards), seed=0),
            )
            elements = list(loader)
            seen += elements
            assert [int(count) for count in np.bincount(kinds(elements[:100]))] == [50, 50]
        assert sorted(seen) == sorted(dataset.fetch(np.arange(406)))


def test_worker_processes_get_the_same_elements():
    dataset = mix(1, 1, length=200)
    for rank in range(2):
        stream = part_of_host(dataset, (rank, 2))
        assert list(stream.mp_prefetch(1)) == list(stream)


def test_the_replacement_of_a_failed_element_has_its_index():
    def fail(x):
        if x % 7 == 3:
            raise ValueError(x)
        return x

    dataset = mix(1, 1, length=100)
    found = []
    for rank in range(2):
        stream = part_of_host(dataset.map(fail), (rank, 2), on_error=lambda index, error: -index)
        found += [-x for x in stream if x < 0]
    assert sorted(found) == [i for i, x in enumerate(dataset.fetch(np.arange(len(dataset)))) if x % 7 == 3]


def test_even_turns_stay_as_they_are():
    for weights, ranks in (((1, 1), 3), ((2, 1), 2), ((1, 1, 1), 4)):
        dataset = mix(*weights, length=60)
        for rank in range(ranks):
            assert list(part_of_host(dataset, (rank, ranks))) == list(dataset[rank::ranks])

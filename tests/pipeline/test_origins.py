"""The datapoints that elements are made of are those that are read, as they name themselves."""

import itertools
import random

import numpy as np
import pytest

import granular
from granular import IterDataset, MapDataset, aio
from granular.errors import InvalidArgumentError, OutOfRangeError, StateError
from tests.pipeline.random_datasets import names_of, random_dataset, random_stream, source


def named(origins):
    return list(zip(origins.source.tolist(), origins.index.tolist(), strict=True))


@pytest.mark.parametrize('seed', range(30))
def test_datapoints_of_random_datasets_and_streams(seed):
    rng = random.Random(seed)
    dataset, _ = random_dataset(rng)
    steps = [rng.randrange(3 * len(dataset)) for _ in range(20)]
    found = dataset.indices(steps)
    assert named(found) == [name for element in dataset.fetch(steps) for name in names_of(element)]
    assert sorted(set(found.step.tolist())) == sorted(set(steps))
    stream, _ = random_stream(rng)
    with iter(stream) as iterator:
        taken = list(itertools.islice(iterator, 30))
        following = iterator.get_next_index()
        assert following == len(taken)
        later = list(itertools.islice(iterator, 5))
        assert named(iterator.indices(range(following))) == [name for one in taken for name in names_of(one)]
        end = following + len(later)
        assert named(iterator.indices(range(following, end))) == [name for one in later for name in names_of(one)]


def test_a_stream_of_a_mix_by_name_on_several_hosts_names_its_sources():
    for host in range(3):
        shard = granular.ShardOptions(host, 3)
        parts = {
            name: source(number, 50).shuffle(number).repeat().to_iter_dataset(shard_options=shard)
            for number, name in enumerate(('web', 'books'))
        }
        stream = IterDataset.mix(parts, {'web': 2, 'books': 1}).window_shuffle(4, 1).batch(3, batch_fn=list).limit(15)
        with iter(stream) as iterator:
            found = iterator.indices(range(15))
            assert named(found) == [name for element in iterator for name in names_of(element)]
        assert found.sources == ('web', 'books')
        assert found.row.tolist() == [0, 1, 2] * 15


def documents(length=300):
    sizes = np.random.default_rng(0).integers(1, 40, length)
    data = [{'tokens': 1000 * i + np.arange(size) + 1} for i, size in enumerate(sizes.tolist())]
    return MapDataset.source(data), sizes


PACKS = {
    'best_fit': {},
    'cut': {'longer': 'cut'},
    'divide': {'longer': 'divide'},
    'drop': {'longer': 'drop'},
    'concat_then_split': {'strategy': 'concat_then_split', 'extra': 1},
}


@pytest.mark.parametrize('functions', [False, True], ids=['read directly', 'behind a map'])
@pytest.mark.parametrize('options', PACKS.values(), ids=list(PACKS))
def test_rows_have_the_parts_of_documents_that_their_origins_say(options, functions):
    dataset, sizes = documents()
    dataset = dataset.shuffle(3)
    if functions:
        dataset = dataset.map(lambda x: x)
    length = 25 if options else 64
    rows = dataset.pack({'tokens': length}, sizes=sizes, **options)
    steps = [0, len(rows) - 1, 3, len(rows) + 2, 2 * len(rows) + 5]
    found = rows.indices(steps)
    for step, row in zip(steps, rows.fetch(steps), strict=True):
        own = [
            1000 * index + 1 + value
            for at, index, begin, stop in zip(found.step, found.index, found.begin, found.stop, strict=True)
            if at == step
            for value in range(begin, stop)
        ]
        assert row['tokens'][row['tokens_segment_ids'] > 0].tolist() == own


def test_padded_batches_have_the_elements_that_their_origins_say():
    dataset, sizes = documents()
    batches = dataset.shuffle(3).batch_by_size('tokens', 200, sizes=sizes, align=4)
    steps = range(2 * len(batches))
    found = batches.indices(steps)
    for step, batch in zip(steps, batches.fetch(steps), strict=True):
        rows = [row[:size].tolist() for row, size in zip(batch['tokens'], batch['tokens_sizes'], strict=True) if size]
        own = found.step == step
        assert [row[0] // 1000 for row in rows] == found.index[own].tolist()
        assert [len(row) for row in rows] == found.stop[own].tolist()
        assert found.row[own].tolist() == list(range(len(rows)))


def test_batches_of_a_loader_are_numbered_over_epochs():
    dataset = MapDataset.concatenate([MapDataset.range(17), MapDataset.range(100, 109)]).shuffle(3).map(as_id)
    with granular.Loader(dataset, 3, num_shards=2, shard_id=1) as loader:
        batches = [batch['id'].tolist() for _ in range(3) for batch in loader]
        found = loader.indices(range(len(batches)))
        assert (found.index + 100 * found.source).reshape(-1, 3).tolist() == batches
        assert loader.get_next_index() == len(batches) == 12
        loader.set_next_index(7)  # in the second epoch
        assert loader.get_next_index() == 7
        assert next(loader)['id'].tolist() == batches[7]
        with pytest.raises(OutOfRangeError, match='batches count from 0, got -1'):
            loader.indices([3, -1])
    with granular.Loader(dataset, 3) as other:
        other.load({'step': 3})
        state = other.save()
    with granular.Loader(dataset, 1, num_shards=2) as loader:
        loader.load(state)
        with pytest.raises(StateError, match='resumed at step 3 of an epoch'):
            loader.get_next_index()


def as_id(i):
    return {'id': i}


def test_what_is_known_only_when_it_is_read_is_refused_by_name():
    numbers = MapDataset.range(20)
    for dataset, name in (
        (numbers.filter(bool), 'filter'),
        (numbers.flat_map(lambda x: [x], max_fan_out=2), 'flat_map'),
        (numbers.filter(bool).shuffle(1), 'filter'),
    ):
        with pytest.raises(InvalidArgumentError, match=rf'indices: {name}\('):
            dataset.indices(3)
    for stream, name in (
        (numbers.to_iter_dataset().filter(bool), 'filter'),
        (numbers.to_iter_dataset().flat_map(lambda x: [x]), 'flat_map'),
        (numbers.map(lambda x: {'x': [x]}).to_iter_dataset().pack({'x': 4}), 'pack'),
    ):
        with iter(stream) as iterator, pytest.raises(InvalidArgumentError, match=name):
            iterator.indices(3)
    for dataset in (
        MapDataset.mix([numbers, numbers.exclude([1])]),
        MapDataset.concatenate([MapDataset.range(3), numbers.exclude([1]).shuffle(1)]).repeat(2),
    ):
        message = r'^exclude\(1 indices, CRC32C \w+\): elements that remain'
        with iter(dataset.to_iter_dataset()) as iterator, pytest.raises(InvalidArgumentError, match=message):
            iterator.indices(3)
    with iter(numbers.to_iter_dataset()) as iterator, pytest.raises(OutOfRangeError, match='step 20 is out of range'):
        iterator.indices(range(21))


def test_excluded_datapoints_are_not_read_and_have_no_entry():
    read = []

    def numbers(i):
        read.append(i)
        return i

    dataset = MapDataset.source([0] * 20).map_with_index(lambda i, _: numbers(i)).exclude([3, -1, 3]).shuffle(1)
    steps = range(40)
    remaining = [element for element in dataset.fetch(steps) if element is not None]
    assert sorted(remaining) == sorted(i for i in range(40) if i % 20 not in (3, 19))
    assert {i % 20 for i in read}.isdisjoint({3, 19})
    found = dataset.indices(steps)
    assert found.index.tolist() == [i % 20 for i in remaining]
    assert list(dataset) == [i for i in remaining if i < 20]


def test_columns_and_text():
    found = MapDataset.mix([MapDataset.range(40), MapDataset.range(10)], [3, 1]).indices(range(12))
    assert found.columns()['source'].tolist() == [found.sources[i] for i in found.source]
    assert found.counts() == {'0': 9, '1': 3}
    assert str(found).splitlines()[0].split() == ['step', 'row', 'source', 'index', 'begin', 'stop']
    assert str(found).endswith('and 2 datapoints more')


async def test_the_async_api_has_the_same():
    dataset = aio.MapDataset.range(20).shuffle(1)
    expected = granular.MapDataset.range(20).shuffle(1).indices(range(5)).index.tolist()
    assert (await dataset.indices(range(5))).index.tolist() == expected
    async with aiter(dataset.to_iter_dataset()) as iterator:
        assert (await iterator.indices(range(5))).index.tolist() == expected
    async with aio.Loader(dataset.map(as_id), 5) as loader:
        assert (await loader.indices(0)).index.tolist() == expected

"""Mixes and concatenations of many readers: one read of a batch, with the results of each reader alone."""

import asyncio
import pickle
import threading

import numpy as np
import pytest

import granular
from granular import MapDataset, aio
from granular.errors import ClosedError, DecodeError, ObjectChangedError, OutOfRangeError
from tests.support.seams import CORES

COUNT = 12  # datapoints of a dataset


def write(folder, number, spec=None, shards=0, count=COUNT):
    options = {'shardlen': -(-count // shards)} if shards else {}
    writer = granular.ShardedDatasetWriter if shards else granular.DatasetWriter
    spec = spec or {'id': 'int', 'x': 'array', 'list': 'utf8[]'}
    with writer(folder / f'{number}', spec, **options) as out:
        for i in range(count):
            values = {'id': 100 * number + i, 'x': np.full(3, i, np.uint16), 'list': ['a'] * (i % 3), 'text': f'{i}'}
            out.append({key: values[key] for key in spec})
    return folder / f'{number}'


def opened(folder, count, **options):
    return [granular.open(write(folder, number, **options)) for number in range(count)]


def ids(datapoints):
    return [datapoint['id'] for datapoint in datapoints]


COMBINE = {
    'mix': MapDataset.mix,
    'weights': lambda sets: MapDataset.mix(sets, [1 + i for i in range(len(sets))]),
    'concatenate': lambda sets: MapDataset.concatenate(sets).shuffle(seed=1),
    'select': lambda sets: MapDataset.select_from_datasets(sets, [(i * 7 % 6, i % COUNT) for i in range(60)]),
    'nested': lambda sets: MapDataset.mix([MapDataset.mix(sets[:3]), MapDataset.concatenate(sets[3:])]),
}


@pytest.mark.parametrize('combine', COMBINE)
@pytest.mark.parametrize('shards', [0, 1, 4], ids=lambda shards: f'shards {shards}')
@pytest.mark.parametrize('root', ['local', 'fakegcs'], indirect=True)
def test_a_batch_has_the_datapoints_of_each_reader(root, shards, combine):
    readers = opened(root, 6, shards=shards)
    if shards == 4:
        granular.build_index(root / '2')
        readers[2] = granular.open(root / '2')
    sets = [MapDataset.source(reader).shuffle(seed=seed) for seed, reader in enumerate(readers)]
    mixed = COMBINE[combine](sets)
    alone = COMBINE[combine]([MapDataset.source([*reader]).shuffle(seed=i) for i, reader in enumerate(readers)])
    found, expected = mixed.batch(len(mixed), batch_fn=list)[0], [*alone]
    assert ids(found) == ids(expected)
    for one, other in zip(found, expected, strict=True):
        assert (list(one), one['x'].tolist(), one['list']) == (list(other), other['x'].tolist(), other['list'])
    assert list(map(sorted, mixed.select(['id', 'x']).batch(5, batch_fn=list)[0])) == [['id', 'x']] * 5
    numbers = mixed.select(['id', 'x'])
    stream = np.concatenate([batch['id'] for batch in numbers.to_iter_dataset().batch(7)])
    assert stream.tolist() == ids(expected)
    with granular.Loader(numbers, 4) as loader:
        assert next(loader)['id'].tolist() == ids(expected[:4])


def test_sources_that_are_not_alike_are_read_apart(tmp_path, seaweed):
    other = {'id': 'int', 'x': 'array'}
    readers = [
        *opened(tmp_path, 2), granular.open(write(tmp_path, 2, other)), granular.open(write(seaweed.place(), 3)),
        granular.open(write(tmp_path, 4), {**granular.decoders, 'int': lambda data: -len(data)}),
        granular.open(write(tmp_path, 5, other, shards=2)),
        [{'id': 600 + i} for i in range(COUNT)],
    ]  # fmt: skip
    found = [*MapDataset.mix([MapDataset.source(reader) for reader in readers])]
    assert ids(found) == [datapoint['id'] for row in zip(*readers, strict=True) for datapoint in row]
    assert [len(one) for one in found[:7]] == [3, 3, 2, 3, 3, 2, 1]


def test_a_reader_is_read_twice_in_a_batch(tmp_path):
    (reader,) = opened(tmp_path, 1)
    dataset = MapDataset.mix([MapDataset.source(reader), MapDataset.source(reader)])
    assert ids(dataset.batch(6, batch_fn=list)[0]) == [0, 0, 1, 1, 2, 2]
    both = granular.sources.Interleave([reader, reader])
    with granular.Loader(granular.sources.Transform(both, lambda one, seed: {'id': one['id']}), 4) as loader:
        assert next(loader)['id'].tolist() == [0, 0, 1, 1]


def test_an_index_beyond_a_reader_is_an_error(tmp_path):
    readers = opened(tmp_path, 2)
    mix = aio.sources.Mix([reader.aio for reader in readers], [1, 1], seed=0)
    with pytest.raises(OutOfRangeError, match=rf'{tmp_path}/[01].*12'):
        asyncio.run(mix.fetch(np.arange(30)))


def test_an_error_concerns_the_datapoint_of_its_reader_alone(tmp_path):
    spec = {'id': 'int', 'text': 'utf8'}
    opened(tmp_path, 4, spec=spec)
    bag = tmp_path / '2' / 'text.bag'
    bag.write_bytes(b'\xff' + bag.read_bytes()[1:])
    mixed = MapDataset.mix([MapDataset.source(granular.open(tmp_path / f'{i}', verify=False)) for i in range(4)])
    with pytest.raises(DecodeError, match=r"2: datapoint 0, key 'text'"):
        mixed.batch(8)[0]
    found = ids(mixed.to_iter_dataset(on_error='skip'))
    assert found == [100 * (i % 4) + i // 4 for i in range(4 * COUNT) if i != 2]


@pytest.mark.parametrize('root', ['local', 'fakegcs'], indirect=True)
def test_replaced_datasets_are_errors_and_replaced_shards_of_an_index_are_read_again(root):
    readers = opened(root, 3, shards=3)
    granular.build_index(root / '1')
    (root / '1' / '000001').rmtree()
    with granular.DatasetWriter(root / '1' / '000001', readers[1].spec) as writer:
        for i in range(4, 8):
            writer.append({'id': 900 + i, 'x': np.zeros(3, np.uint16), 'list': []})
    readers[1] = granular.open(root / '1')
    mixed = MapDataset.mix([MapDataset.source(reader) for reader in readers])
    found = ids(mixed.batch(len(mixed), batch_fn=list)[0])
    assert found[1::3] == [100, 101, 102, 103, 904, 905, 906, 907, 108, 109, 110, 111]
    if not root.aio.store.local:
        for file in (root / '2' / '000000').iterdir():
            data = file.read_bytes()
            file.unlink()
            file.write_bytes(data)
        with pytest.raises(ObjectChangedError, match='2/000000'):
            mixed.batch(6, batch_fn=list)[0]


def replace_shard(shard, spec, count):
    shard.rmtree()
    with granular.DatasetWriter(shard, spec) as writer:
        for i in range(count):
            writer.append({'id': 900 + i, 'x': np.zeros(3, np.uint16), 'list': []})


def outcome(read):
    try:
        return read()
    except ObjectChangedError:
        return ObjectChangedError


@pytest.mark.parametrize('root', ['local', 'fakegcs'], indirect=True)
@pytest.mark.parametrize('indexed', [False, True])
def test_shards_that_are_replaced_between_batches_are_read_as_by_their_reader(root, indexed):
    for number in range(3):
        write(root, number, shards=3)
    if indexed:
        granular.build_index(root / '1')
    readers = [granular.open(root / f'{number}') for number in range(3)]
    alone = granular.open(root / '1')
    mixed = MapDataset.mix([MapDataset.source(reader) for reader in readers])
    before = ids(mixed.batch(12, batch_fn=list)[0])
    assert before == [100 * (i % 3) + i // 3 for i in range(12)]
    assert ids(alone.fetch(range(4))) == [100, 101, 102, 103]
    replace_shard(root / '1' / '000001', readers[1].spec, 4)
    expected = outcome(lambda: ids(alone.fetch(range(12))))
    found = outcome(lambda: ids(mixed.batch(36, batch_fn=list)[0])[1::3])
    assert found == expected
    assert found in (ObjectChangedError, [100, 101, 102, 103, 900, 901, 902, 903, 108, 109, 110, 111])
    assert outcome(lambda: ids(mixed.batch(36, batch_fn=list)[0])[1::3]) == expected
    assert ids(mixed.batch(12, batch_fn=list)[0]) == before


def test_shards_that_are_opened_when_they_are_first_read_are_read_in_a_mix(tmp_path):
    readers = [granular.open(write(tmp_path, number, shards=40, count=80)) for number in range(3)]
    mixed = MapDataset.mix([MapDataset.source(reader) for reader in readers]).shuffle(seed=2)
    expected = [100 * (i % 3) + i // 3 for i in MapDataset.range(240).shuffle(seed=2)]
    for _ in range(2):
        assert [one for batch in mixed.batch(9, batch_fn=list) for one in ids(batch)] == expected


def test_a_mix_is_read_again_after_a_reader_was_closed(tmp_path):
    readers = opened(tmp_path, 4, shards=2)
    mixed = MapDataset.mix([MapDataset.source(reader) for reader in readers])
    expected = ids(mixed.batch(12, batch_fn=list)[0])
    others = MapDataset.mix([MapDataset.source(reader) for reader in readers[:3]])
    assert ids(others.batch(6, batch_fn=list)[0]) == [0, 100, 200, 1, 101, 201]
    copy = readers[3].copy()
    readers[3].close()
    with pytest.raises(ClosedError, match='3'):
        mixed.batch(12, batch_fn=list)[0]
    assert ids(others.batch(6, batch_fn=list)[1]) == [2, 102, 202, 3, 103, 203]
    again = MapDataset.mix([MapDataset.source(reader) for reader in [*readers[:3], copy]])
    assert ids(again.batch(12, batch_fn=list)[0]) == expected


@pytest.mark.parametrize('shards', [0, 3])
def test_a_mix_that_was_read_is_pickled_and_read_in_forked_processes(tmp_path, shards):
    readers = opened(tmp_path, 5, shards=shards)
    mixed = MapDataset.mix([MapDataset.source(reader).shuffle(seed=1) for reader in readers], [1, 2, 3, 1, 1])
    expected = [ids(mixed.batch(5, batch_fn=list)[i]) for i in range(3)]
    again = pickle.loads(pickle.dumps(mixed))
    assert [ids(again.batch(5, batch_fn=list)[i]) for i in range(3)] == expected
    with granular.Loader(mixed.select(['id']), 5, mp='fork', workers=2) as loader:
        assert [next(loader)['id'].tolist() for _ in range(3)] == expected


@pytest.mark.parametrize('weights', [[1, 1, 1], [5, 0, 3, 9], [100, 233, 6001], [1, 300_000]])
def test_turns_follow_the_weights_at_any_index(weights):
    sets = [MapDataset.range(1000 * i, 1000 * i + 1000) for i in range(len(weights))]
    mixed = MapDataset.mix(sets, weights).repeat()
    total = sum(weights)
    # Of the first k elements, the first source has k - k * (total - weight) // total.
    for k in (1, 7, 1000, 10**9):
        first = [k - k * (total - weights[0]) // total for k in (k, k + 1)]
        assert (mixed[k] < 1000) == (first[1] > first[0])


def test_threads_do_not_grow_with_the_number_of_readers(tmp_path):
    path, before = write(tmp_path, 0), threading.active_count()
    readers = [granular.open(path) for _ in range(3 * (CORES + 8))]
    with granular.Loader(MapDataset.mix(list(map(MapDataset.source, readers))).select(['id', 'x']), 64) as loader:
        for _ in range(5):
            next(loader)
        assert threading.active_count() - before <= CORES + 8

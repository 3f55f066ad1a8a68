"""Mixes and concatenations of many readers: one read of a batch, with the results of each reader alone."""

import asyncio
import threading

import numpy as np
import pytest

import granular
from granular import MapDataset, aio
from granular.aio.runtime.pools import CORES
from granular.errors import DecodeError, ObjectChangedError, OutOfRangeError

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


def test_threads_do_not_grow_with_the_number_of_readers(tmp_path):
    path, before = write(tmp_path, 0), threading.active_count()
    readers = [granular.open(path) for _ in range(3 * (CORES + 8))]
    with granular.Loader(MapDataset.mix(list(map(MapDataset.source, readers))).select(['id', 'x']), 64) as loader:
        for _ in range(5):
            next(loader)
        assert threading.active_count() - before <= CORES + 8

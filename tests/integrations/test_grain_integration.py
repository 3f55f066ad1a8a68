"""The real Grain over our readers: the same batches, each one fan-out; and in its worker processes."""

import os

import absl.flags
import grain
import numpy as np
import pytest

import granular
from granular.errors import InvalidArgumentError, OutOfRangeError
from granular.integrations.grain import batch


def written(place):
    with granular.DatasetWriter(place, {'data': 'array', 'label': 'int'}, granular.encoders) as writer:
        for i in range(96):
            writer.append({'data': np.full(100, i, np.float32), 'label': i}, flush=False)
    return place


@pytest.fixture(scope='module')
def place(moto):
    config = granular.IOConfig(hedge=0)  # no request is made twice for being slow
    return granular.Path(str(written(moto.place())), **moto.options, config=config)


@pytest.fixture
def reader(place):
    """In a bucket."""
    with granular.DatasetReader(place, granular.decoders, cache_keys=('refs',)) as reader:
        yield reader


@pytest.fixture
def local(tmp_path):
    """On the disk, for what reads records one by one."""
    with granular.DatasetReader(written(tmp_path), granular.decoders) as reader:
        yield reader


def requests(fn):
    before = granular.io_stats()['requests']
    result = fn()
    return granular.io_stats()['requests'] - before, result


def same(mine, theirs):
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert one.keys() == other.keys()
        assert all((one[key] == other[key]).all() and one[key].dtype == other[key].dtype for key in one)


def test_a_batch_is_one_fan_out(reader):
    elements = grain.MapDataset.source(reader).map(relabelled)
    for count, make in ((96, grain.MapDataset.batch), (3, batch)):
        dataset = elements.pipe(make, 32)
        spent, found = requests(lambda dataset=dataset: [dataset[i] for i in range(3)])
        # Two keys of 32 neighbours: two requests a batch, or two for each datapoint.
        assert (len(dataset), spent) == (3, 2 * count)
        assert [b['label'].tolist() for b in found] == (np.arange(96).reshape(3, 32) + 1000).tolist()


def relabelled(point):
    return {**point, 'label': point['label'] + 1000}


@pytest.mark.parametrize('drop_remainder', [False, True])
def test_the_batches_are_those_of_grain(local, drop_remainder):
    elements = grain.MapDataset.source(local).shuffle(seed=3).repeat(2)[5:150]
    mine = elements.pipe(batch, 32, drop_remainder=drop_remainder)
    theirs = elements.batch(32, drop_remainder=drop_remainder)
    assert len(mine) == len(theirs) == (4 if drop_remainder else 5)
    same([mine[i] for i in range(-2, 9)], [theirs[i] for i in range(-2, 9)])
    same(list(mine[1::2]), list(theirs[1::2]))
    iterator = iter(mine.to_iter_dataset())
    next(iterator)
    state = iterator.get_state()
    rest = list(iterator)
    again = iter(mine.to_iter_dataset())
    again.set_state(state)
    same(list(again), rest)
    lists = elements.pipe(batch, 50, batch_fn=lambda points: [point['label'] for point in points])
    assert lists[2] == elements.batch(50, batch_fn=lambda points: [point['label'] for point in points])[2]


def test_the_data_loader(reader, local):
    """Grain's DataLoader reads records one by one; of batches of ours, each record is one fan-out."""
    batches = granular.MapDataset.source(reader).shuffle(seed=1).batch(32)
    sampler = grain.samplers.IndexSampler(len(batches), grain.sharding.NoSharding(), num_epochs=1)
    loader = grain.DataLoader(data_source=batches, sampler=sampler, read_options=grain.ReadOptions(num_threads=1))
    spent, found = requests(lambda: list(loader))
    assert spent < 40  # of 192, if each were asked for by itself
    same(found, list(batches))
    iterator = iter(loader)
    next(iterator)
    state = iterator.get_state()
    again = iter(
        grain.DataLoader(data_source=granular.MapDataset.source(reader).shuffle(seed=1).batch(32), sampler=sampler)
    )
    again.set_state(state)  # which holds the printed source
    same(list(again), found[1:])
    records = grain.samplers.IndexSampler(96, grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=0)
    loader = grain.DataLoader(data_source=local, sampler=records)
    assert sorted(int(point['label']) for point in loader) == list(range(96))
    assert isinstance(local, grain.sources.RandomAccessDataSource)


def counted(points):
    return {
        'label': np.array([point['label'] for point in points]),
        'requests': granular.io_stats()['requests'],
        'pid': os.getpid(),
    }


def test_in_worker_processes(place, monkeypatch):
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', 'test')  # a reader pickles without its credentials
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', 'test')
    if not absl.flags.FLAGS.is_parsed():
        absl.flags.FLAGS(['test'])  # as `absl.app.run` does in programs that use Grain's processes
    with granular.DatasetReader(place, granular.decoders, cache_keys=('refs',)) as reader:
        dataset = grain.MapDataset.source(reader).pipe(batch, 16, batch_fn=counted)
        stream = dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
        found = list(stream.mp_prefetch(grain.MultiprocessingOptions(num_workers=1)))
    assert [point['label'].tolist() for point in found] == np.arange(96).reshape(6, 16).tolist()
    assert {point['pid'] for point in found} != {os.getpid()}
    assert set(np.diff([point['requests'] for point in found])) == {2}


def test_what_cannot_be(local):
    dataset = grain.MapDataset.source(local)
    with pytest.raises(InvalidArgumentError, match='batch_size: expected'):
        dataset.pipe(batch, 0)
    with pytest.raises(InvalidArgumentError, match=r'is no grain\.MapDataset'):
        dataset.to_iter_dataset().pipe(batch, 4)
    with pytest.raises(OutOfRangeError, match='no batches of 97 in 96 elements'):
        dataset.pipe(batch, 97, drop_remainder=True)[0]
    with pytest.raises(InvalidArgumentError, match='element 1 was filtered out'):
        dataset.filter(lambda point: point['label'] != 1).pipe(batch, 4)[0]

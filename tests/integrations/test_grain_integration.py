"""Grain over our readers: equal batches, one fan-out each, also in worker processes of Grain."""

import os

import numpy as np
import pytest

import granular
from granular.errors import InvalidArgumentError, OutOfRangeError
from tests.support.requests import requests


def written(path):
    with granular.DatasetWriter(path, {'data': 'array', 'label': 'int'}, granular.encoders) as writer:
        for i in range(96):
            writer.append({'data': np.full(100, i, np.float32), 'label': i}, flush=False)
    return path


@pytest.fixture(scope='module')
def path(fakegcs):
    config = granular.IOConfig(hedge=0)  # so that each request is counted once
    return granular.Path(str(written(fakegcs.place())), **fakegcs.options, config=config)


@pytest.fixture
def reader(path):
    """A reader of the dataset in the bucket."""
    with granular.DatasetReader(path, granular.decoders, cache_keys=('refs',)) as reader:
        yield reader


@pytest.fixture
def local(tmp_path):
    """A reader of a dataset on the disk, for tests that read record by record."""
    with granular.DatasetReader(written(tmp_path), granular.decoders) as reader:
        yield reader


def same(actual, expected):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.keys() == other.keys()
        assert all((one[key] == other[key]).all() and one[key].dtype == other[key].dtype for key in one)


def test_batch_is_one_fan_out(reader):
    import grain

    from granular.integrations.grain import batch

    elements = grain.MapDataset.source(reader).map(relabelled)
    for count, make in ((96, grain.MapDataset.batch), (3, batch)):
        dataset = elements.pipe(make, 32)
        results, request_count, _ = requests(lambda dataset=dataset: [dataset[i] for i in range(3)])
        # Two keys of 32 adjacent records: two requests per batch, or two per datapoint.
        assert (len(dataset), request_count) == (3, 2 * count)
        assert [b['label'].tolist() for b in results] == (np.arange(96).reshape(3, 32) + 1000).tolist()


def relabelled(datapoint):
    return {**datapoint, 'label': datapoint['label'] + 1000}


@pytest.mark.parametrize('drop_remainder', [False, True])
def test_batches_equal_those_of_grain(local, drop_remainder):
    import grain

    from granular.integrations.grain import batch

    elements = grain.MapDataset.source(local).shuffle(seed=3).repeat(2)[5:150]
    actual = elements.pipe(batch, 32, drop_remainder=drop_remainder)
    expected = elements.batch(32, drop_remainder=drop_remainder)
    assert len(actual) == len(expected) == (4 if drop_remainder else 5)
    same([actual[i] for i in range(-2, 9)], [expected[i] for i in range(-2, 9)])
    same(list(actual[1::2]), list(expected[1::2]))
    iterator = iter(actual.to_iter_dataset())
    next(iterator)
    state = iterator.get_state()
    rest = list(iterator)
    again = iter(actual.to_iter_dataset())
    again.set_state(state)
    same(list(again), rest)
    assert elements.pipe(batch, 50, batch_fn=labels)[2] == elements.batch(50, batch_fn=labels)[2]


def labels(datapoints):
    return [datapoint['label'] for datapoint in datapoints]


def test_data_loader_of_grain_reads_batches(reader, local):
    """Grain's DataLoader reads record by record; if its records are our batches, each is one fan-out."""
    import grain

    batches = granular.MapDataset.source(reader).shuffle(seed=1).batch(32)
    sampler = grain.samplers.IndexSampler(len(batches), grain.sharding.NoSharding(), num_epochs=1)
    loader = grain.DataLoader(data_source=batches, sampler=sampler, read_options=grain.ReadOptions(num_threads=1))
    results, request_count, _ = requests(lambda: list(loader))
    assert request_count < 40  # instead of 192 for single datapoints
    same(results, list(batches))
    iterator = iter(loader)
    next(iterator)
    state = iterator.get_state()
    again = iter(
        grain.DataLoader(data_source=granular.MapDataset.source(reader).shuffle(seed=1).batch(32), sampler=sampler)
    )
    again.set_state(state)  # which contains the repr of the source
    same(list(again), results[1:])
    records = grain.samplers.IndexSampler(96, grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=0)
    loader = grain.DataLoader(data_source=local, sampler=records)
    assert sorted(int(datapoint['label']) for datapoint in loader) == list(range(96))
    assert isinstance(local, grain.sources.RandomAccessDataSource)


def counted(datapoints):
    return {
        'label': np.array([datapoint['label'] for datapoint in datapoints]),
        'requests': granular.io_stats()['requests'],
        'pid': os.getpid(),
    }


def test_batches_in_worker_processes_of_grain(path):
    import absl.flags
    import grain

    from granular.integrations.grain import batch

    if not absl.flags.FLAGS.is_parsed():
        absl.flags.FLAGS(['test'])  # as `absl.app.run` does
    with granular.DatasetReader(path, granular.decoders, cache_keys=('refs',)) as reader:
        dataset = grain.MapDataset.source(reader).pipe(batch, 16, batch_fn=counted)
        stream = dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
        results = list(stream.mp_prefetch(grain.MultiprocessingOptions(num_workers=1)))
    assert [datapoint['label'].tolist() for datapoint in results] == np.arange(96).reshape(6, 16).tolist()
    assert {datapoint['pid'] for datapoint in results} != {os.getpid()}
    assert set(np.diff([datapoint['requests'] for datapoint in results])) == {2}


def test_invalid_arguments_are_rejected(local):
    import grain

    from granular.integrations.grain import batch

    dataset = grain.MapDataset.source(local)
    with pytest.raises(InvalidArgumentError, match='batch_size: expected'):
        dataset.pipe(batch, 0)
    with pytest.raises(InvalidArgumentError, match=r'expected a grain\.MapDataset'):
        dataset.to_iter_dataset().pipe(batch, 4)
    with pytest.raises(OutOfRangeError, match='index 0: 96 elements make no batch of 97'):
        dataset.pipe(batch, 97, drop_remainder=True)[0]
    with pytest.raises(InvalidArgumentError, match='element 1 was filtered out'):
        dataset.filter(lambda datapoint: datapoint['label'] != 1).pipe(batch, 4)[0]

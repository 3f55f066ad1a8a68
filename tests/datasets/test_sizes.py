"""Sizes of values, told by the tables of a dataset."""

import numpy as np
import pytest

import granular
from granular import aio
from granular.errors import InvalidArgumentError, UnknownKeyError

COUNTS = [3, 0, 200, 70_000, 1]
SPEC = {'tokens': 'array', 'video': 'array', 'text': 'utf8', 'raw': 'bytes', 'label': 'int', 'words': 'utf8[]'}


def datapoints():
    return [
        {
            'tokens': np.arange(count, dtype=np.int32),
            'video': np.zeros((count % 50, 4, 2), np.uint8),
            'text': 'é' * count,
            'raw': bytes(count),
            'label': count,
            'words': ['a'] * (count % 7),
        }
        for count in COUNTS
    ]


EXPECTED = {
    'tokens': COUNTS,
    'video': [count % 50 for count in COUNTS],
    'text': [2 * count for count in COUNTS],
    'raw': COUNTS,
    'words': [count % 7 for count in COUNTS],
}


@pytest.fixture(params=['refs', 'columns', 'sharded', 'indexed'])
def reader(request, tmp_path):
    spec = dict(SPEC)
    if request.param == 'columns':
        del spec['words']
    if request.param in ('refs', 'columns'):
        writer = granular.DatasetWriter(tmp_path / 'ds', spec, granular.encoders)
    else:
        writer = granular.ShardedDatasetWriter(tmp_path / 'ds', spec, granular.encoders, shardlen=2)
    with writer:
        for datapoint in datapoints():
            writer.append({key: datapoint[key] for key in spec})
    if request.param == 'indexed':
        granular.build_index(tmp_path / 'ds')
    kind = granular.DatasetReader if request.param in ('refs', 'columns') else granular.ShardedDatasetReader
    with kind(tmp_path / 'ds', granular.decoders) as opened:
        yield opened


def test_sizes(reader):
    for key, expected in EXPECTED.items():
        if key in reader.spec:
            sizes = reader.sizes(key)
            assert sizes.dtype == np.int64
            assert sizes.tolist() == expected, key


def test_unknown_sizes(reader):
    with pytest.raises(
        InvalidArgumentError, match="key 'label', of type 'int', are not known: write them as a key 'label_size'"
    ):
        reader.sizes('label')
    with pytest.raises(UnknownKeyError, match='nothing'):
        reader.sizes('nothing')


async def test_async(tmp_path):
    with granular.DatasetWriter(tmp_path / 'ds', {'tokens': 'array'}, granular.encoders) as writer:
        for datapoint in datapoints():
            writer.append({'tokens': datapoint['tokens']})
    async with aio.DatasetReader(tmp_path / 'ds', None) as reader:
        assert (await reader.sizes('tokens')).tolist() == COUNTS


@pytest.mark.parametrize(
    ('others', 'message'),
    [
        (
            [np.zeros(3, np.float32), np.zeros(5, np.int8)],
            'datapoint 1.*expected arrays of one dtype, and of one shape',
        ),
        ([np.zeros(3, np.float32), np.zeros((3, 2), np.int16)], 'datapoint 1.*got dtype int16 and shape'),
        ([np.ones(4, np.int32)] * 2 + [np.ones(4, np.int64)], 'datapoint 2.*got dtype int64'),
        ([np.ones((3, 2)), np.ones((2, 3))], r'datapoint 1.*got dtype float64 and shape \(2, 3\)'),
        ([np.array(5)], r'datapoint 0.*got dtype int64 and shape \(\)'),
    ],
)
def test_arrays_of_several_kinds_are_refused(tmp_path, others, message):
    with granular.DatasetWriter(tmp_path / 'ds', {'tokens': 'array'}, granular.encoders) as writer:
        for array in others:
            writer.append({'tokens': array})
    with granular.DatasetReader(tmp_path / 'ds') as reader, pytest.raises(InvalidArgumentError, match=message):
        reader.sizes('tokens')


def test_an_empty_dataset(tmp_path):
    with granular.DatasetWriter(tmp_path / 'ds', {'tokens': 'array'}, granular.encoders):
        pass
    with granular.DatasetReader(tmp_path / 'ds') as reader:
        assert reader.sizes('tokens').tolist() == []


def test_a_key_of_sizes(tmp_path):
    with granular.ShardedDatasetWriter(
        tmp_path / 'ds', {'notes': 'msgpack', 'notes_size': 'int'}, granular.encoders, shardlen=2
    ) as writer:
        for count in COUNTS:
            writer.append({'notes': [1] * min(count, 300), 'notes_size': min(count, 300)})
    expected = [min(count, 300) for count in COUNTS]
    for decoders in (granular.decoders, {**granular.decoders, 'int': None}):
        with granular.open(tmp_path / 'ds', decoders) as reader:
            assert reader.sizes('notes').tolist() == expected
    with granular.open(tmp_path / 'ds') as reader:
        batches = granular.MapDataset.source(reader).batch_by_size('notes', 1000, buckets=2)
        assert (
            sorted(size for batch in batches for size in batch['notes_sizes'].tolist() if size) == sorted(expected)[1:]
        )


@pytest.mark.parametrize(('key', 'requests'), [('text', 1), ('tokens', 3)])
def test_sizes_of_shards_in_a_bucket_are_those_of_the_index(fakegcs, key, requests):
    path = fakegcs.new_bucket() / 'ds'
    with granular.ShardedDatasetWriter(
        path, {'text': 'utf8', 'tokens': 'array', 'a_size': 'int', 'a': 'msgpack'}, granular.encoders, shardlen=2
    ) as writer:
        for count in COUNTS * 3:
            size = min(count, 300)
            writer.append({'text': 'a' * count, 'tokens': np.zeros(size, np.int32), 'a': [0] * size, 'a_size': size})
    granular.build_index(path)
    with granular.open(path) as reader:
        before = granular.io_stats()['requests']
        sizes = reader.sizes(key)
        assert granular.io_stats()['requests'] - before <= requests
    assert sizes.tolist() == [count if key == 'text' else min(count, 300) for count in COUNTS * 3]

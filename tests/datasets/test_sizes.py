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
    with pytest.raises(InvalidArgumentError, match="key 'label', of type 'int', are not known: write them as a key"):
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

"""The examples of the README of granular 0.21.1, with its typing errors corrected, on disks and in buckets."""

import pathlib

import msgpack
import numpy as np
import pytest

import granular

PLACES = {
    'str': lambda folder: str(folder / 'dataset'),
    'pathlib': lambda folder: folder / 'dataset',
    'Path': lambda folder: granular.Path(folder / 'dataset'),
    's3': lambda folder: f's3://my-bucket/{folder.name}/dataset',
    'gs': lambda folder: f'gs://my-bucket/{folder.name}/dataset',
    's3 Path': lambda folder: granular.Path(f's3://my-bucket/{folder.name}/dataset'),
}


@pytest.fixture(params=PLACES)
def directory(request, tmp_path):
    if request.param.startswith(('s3', 'gs')):
        request.getfixturevalue('user_buckets')
    return PLACES[request.param](tmp_path)


def preproc(datapoint, seed):
    return {'image': datapoint['abc'], 'label': datapoint['foo']}


def test_quickstart_example(directory):
    spec = {'foo': 'int', 'bar': 'utf8[]', 'baz': 'msgpack', 'abc': 'jpg', 'xyz': 'array'}
    with granular.DatasetWriter(directory, spec, granular.encoders) as writer:
        for i in range(10):
            writer.append(
                {
                    'foo': i,
                    'bar': ['hello'] * i,
                    'baz': {'a': 1},
                    'abc': np.zeros((60, 80, 3), np.uint8),
                    'xyz': np.arange(0, 1 + i, dtype=np.float32),
                }
            )
    files = {path.name for path in granular.Path(directory).glob('*') if path.suffix != '.crc'}
    assert files == {'spec.json', 'refs.bag', 'foo.bag', 'bar.bag', 'baz.bag', 'abc.bag', 'xyz.bag'}

    with granular.DatasetReader(directory, granular.decoders) as reader:
        assert reader.spec == spec
        assert reader.size > 1000
        assert len(reader) == 10
        datapoint = reader[2]
        assert datapoint['foo'] == 2
        assert datapoint['bar'] == ['hello', 'hello']
        assert datapoint['abc'].shape == (60, 80, 3)

        source = granular.sources.Epochs(reader, shuffle=True, seed=0)
        source = granular.sources.Transform(source, preproc)
        loader = granular.Loader(source, batch=8, workers=64)
        assert loader.spec == {'image': (np.uint8, (60, 80, 3)), 'label': (np.int64, ())}
        dataset = iter(loader)
        for _ in range(20):
            batch = next(dataset)
            assert batch['image'].shape == (8, 60, 80, 3)
        state = loader.save()
        assert (state['step'], state['seed']) == (160, 0)
        expected = next(dataset)['label']
        loader.load(state)
        assert (next(dataset)['label'] == expected).all()
        loader.close()


def test_formats_caching_and_masking_examples(directory):
    encoders = {'bytes': lambda x: x, 'utf8': lambda x: x.encode('utf-8'), 'msgpack': msgpack.packb}
    decoders = {'bytes': lambda x: x, 'utf8': lambda x: x.decode('utf-8'), 'msgpack': msgpack.unpackb}
    with granular.DatasetWriter(directory, {'foo': 'msgpack', 'bar': 'utf8', 'baz': 'bytes'}, encoders) as writer:
        for i in range(5):
            writer.append({'foo': {'i': i}, 'bar': f'{i}', 'baz': b'x' * i})
    reader = granular.DatasetReader(directory, decoders, cache_index=True, cache_keys=('refs', 'foo'))
    datapoint = reader[3, {'foo': True, 'baz': True}]
    assert datapoint == {'foo': {'i': 3}, 'baz': b'xxx'}
    reader.close()


def test_sequences_example(directory):
    spec = {'title': 'utf8', 'frames': 'jpg[]', 'captions': 'utf8[]', 'times': 'int[]'}
    with granular.DatasetWriter(directory, spec, granular.encoders) as writer:
        frames = [np.zeros((4, 4, 3), np.uint8)] * 54
        writer.append({'title': 'x', 'frames': frames, 'captions': list('abcdefg'), 'times': range(7)})
    with granular.DatasetReader(directory, granular.decoders) as reader:
        available = reader.available(0)
        assert available == {'title': True, 'frames': range(54), 'captions': range(7), 'times': range(7)}
        mask = {'title': True, 'frames': range(32, 42), 'captions': range(7), 'times': True}
        assert len(reader[0, mask]['frames']) == 10


def test_sharding_example(directory):
    spec = {'foo': 'int'}
    for worker_id in range(2):
        writer = granular.ShardedDatasetWriter(
            directory, spec, granular.encoders, shardlen=10, shardstart=worker_id, shardstep=2
        )
        for i in range(20):
            writer.append({'foo': i})
        writer.close()
    reader = granular.ShardedDatasetReader(directory, granular.decoders)
    assert (len(reader), reader.shards) == (40, 4)
    reader.close()
    reader = granular.ShardedDatasetReader(directory, granular.decoders, shardstart=1, shardstep=2)
    assert [sample['foo'] for sample in reader] == list(range(20))
    reader.close()


def test_bag_at_a_path_of_elements(tmp_path):
    import elements

    for version in (1, 2):
        path = elements.Path(tmp_path) / f'{version}.bag'
        with granular.BagWriter(path, version) as writer:
            writer.append(b'abc')
        with granular.BagReader(path) as reader:
            assert list(reader) == [b'abc']
            assert reader.version == version


def test_dataset_at_a_path_of_elements(tmp_path):
    import elements

    directory = elements.Path(tmp_path) / 'dataset'
    with granular.DatasetWriter(directory, {'foo': 'int'}, granular.encoders) as writer:
        for i in range(5):
            writer.append({'foo': i})
    with granular.DatasetReader(directory, granular.decoders) as reader:
        assert [sample['foo'] for sample in reader] == list(range(5))
    assert pathlib.Path(str(directory), 'spec.json').exists()

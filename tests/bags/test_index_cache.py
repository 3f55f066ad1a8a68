"""The index cache: datasets in buckets are reopened without requests."""

import logging
import os
import pathlib

import pytest

import granular
from granular.errors import ObjectChangedError
from tests.support.requests import requests

SPEC = {'x': 'int', 'text': 'utf8'}


@pytest.fixture
def cached(bucket, tmp_path):
    """A folder in a bucket, with an index cache."""
    config = granular.IOConfig(index_cache=str(tmp_path / 'cache'))
    return granular.Path(str(bucket), config=config, **bucket.aio.store.options) / 'dataset'


def write(path, count=10, layout='refs', first=0):
    with granular.DatasetWriter(path, SPEC, granular.encoders, layout=layout) as writer:
        for i in range(first, first + count):
            writer.append({'x': i, 'text': f'text {i}'})


def read(path, **options):
    with granular.DatasetReader(path, granular.decoders, **options) as reader:
        return reader.layout, reader.size, reader.spec, list(reader)


@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_second_opening_makes_no_request(cached, layout):
    write(cached, layout=layout)
    first = read(cached)
    with granular.DatasetReader(cached, granular.decoders) as reader:
        assert requests(lambda: granular.DatasetReader(cached, granular.decoders).close())[1] == 0
        assert len(reader) == 10
    assert read(cached) == first
    assert first[0] == layout
    assert read(cached, cache_keys=('x', 'refs') if layout == 'refs' else ('x',)) == first


@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_new_shards_are_listed(cached, layout):
    def write(count):
        with granular.ShardedDatasetWriter(cached, SPEC, granular.encoders, shardlen=4, layout=layout) as writer:
            for i in range(len(writer), count):
                writer.append({'x': i, 'text': f'text {i}'})

    def read(**options):
        with granular.ShardedDatasetReader(cached, granular.decoders, **options) as reader:
            return [datapoint['x'] for datapoint in reader]

    write(12)
    assert read(shardstart=1, shardstep=2) == [4, 5, 6, 7]
    assert read() == list(range(12))
    opened, count, _ = requests(lambda: granular.ShardedDatasetReader(cached, granular.decoders))
    opened.close()
    assert count == 1  # the listing
    with granular.ShardedDatasetWriter(
        cached, SPEC, granular.encoders, shardlen=4, layout=layout, shardstart=3, shardstep=1
    ) as writer:
        for i in range(12, 16):
            writer.append({'x': i, 'text': f'text {i}'})
    assert read() == list(range(16))
    assert read() == list(range(16))


def test_replaced_dataset_is_an_error_once(cached):
    write(cached)
    read(cached)
    cached.rmtree()
    write(cached, first=100)
    with pytest.raises(ObjectChangedError, match='replaced'):
        read(cached)
    assert [datapoint['x'] for datapoint in read(cached)[3]] == list(range(100, 110))


@pytest.mark.parametrize(
    'harm', [lambda data: b'', lambda data: data[:40], lambda data: data[:-9], lambda data: data[8:]]
)
def test_damaged_index_file_is_ignored(cached, tmp_path, caplog, harm):
    write(cached)
    first = read(cached)
    (file,) = (tmp_path / 'cache').iterdir()
    file.write_bytes(harm(file.read_bytes()))
    with caplog.at_level(logging.WARNING, 'granular'):
        assert read(cached) == first
    assert 'ignored' in caplog.text
    caplog.clear()
    assert read(cached) == first
    assert not caplog.text


def test_unwritable_folder_logs_a_warning(bucket, tmp_path, caplog):
    (tmp_path / 'file').write_bytes(b'')
    config = granular.IOConfig(index_cache=str(tmp_path / 'file'))
    path = granular.Path(str(bucket), config=config, **bucket.aio.store.options) / 'dataset'
    write(path)
    with caplog.at_level(logging.WARNING, 'granular'):
        assert len(read(path)[3]) == 10
    assert 'not cached' in caplog.text


def test_no_cache_without_cached_index(cached, tmp_path):
    write(cached)
    assert len(read(cached, cache_index=False)[3]) == 10
    assert not (tmp_path / 'cache').exists()


def test_local_datasets_are_not_cached(tmp_path):
    path = granular.Path(tmp_path / 'data', config=granular.IOConfig(index_cache=str(tmp_path / 'cache')))
    write(path)
    read(path)
    assert not (tmp_path / 'cache').exists()


def test_no_temporary_files_remain(cached, tmp_path):
    write(cached)
    read(cached)
    assert [pathlib.Path(name).suffix for name in os.listdir(tmp_path / 'cache')] == ['.index']

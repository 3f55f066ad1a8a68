"""The index cache: datasets in buckets are reopened without requests."""

import asyncio
import itertools
import logging
import os
import pathlib
import pickle

import pytest

import granular
from granular.errors import NotFoundError, ObjectChangedError
from tests.support.requests import requests
from tests.support.seams import pickled_for_worker
from tests.support.tables import pairwise

SPEC = {'x': 'int', 'text': 'utf8'}


@pytest.fixture
def cached(bucket, tmp_path, monkeypatch):
    """A folder in a bucket, with an index cache, and credentials in the environment."""
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', bucket.aio.store.options.get('key', ''))
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', bucket.aio.store.options.get('secret', ''))
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


# Datasets that may follow each other at one path: their spec, texts, layout, and the arguments of a sharded writer.
DATASETS = {
    'refs': (SPEC, 'abcdef', 'refs', None),
    'columns': (SPEC, 'abcdef', 'columns', None),
    'other limits in the same bytes': (SPEC, ['a', 'bc', 'd', '', 'ef', ''], 'columns', None),
    'another type': ({'x': 'int', 'text': 'bytes'}, [b'a', b'b', b'c', b'd', b'e', b'f'], 'columns', None),
    'shards, refs': (SPEC, 'abcdef', 'refs', {'shardlen': 3}),
    'shards, columns': (SPEC, 'abcdef', 'columns', {'shardlen': 3}),
    'more shards': (SPEC, 'abcdef', 'refs', {'shardlen': 2}),
    'indexed, refs': (SPEC, 'ghijkl', 'refs', {'shardlen': 3, 'index': True}),
    'indexed, columns': (SPEC, 'ghijkl', 'columns', {'shardlen': 3, 'index': True}),
}


def rows_of(columns):
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def after(reads, reader):
    for read in reads:
        read()
    return list(reader)


READS = {
    'fetch': lambda reader: reader.fetch(range(len(reader))),
    'get': lambda reader: [reader[i] for i in range(len(reader))],
    'slice': lambda reader: rows_of(reader[:]),
    'available': lambda reader: after([lambda: reader.available(0)], reader),
    'one field': lambda reader: after([lambda: reader.fetch([0], mask=['x'])], reader),
    'a copy': lambda reader: list(reader.copy()),
    'in another process': lambda reader: list(pickle.loads(pickled_for_worker(reader))),
}
OPTIONS = ({}, {'cache_keys': ('x',)}, {'verify': True}, {'cache_index': False})


def put(path, name):
    """Replace the dataset at a path, and return its datapoints."""
    spec, texts, layout, sharded = DATASETS[name]
    if path.exists():
        path.rmtree()
    writer = granular.DatasetWriter if sharded is None else granular.ShardedDatasetWriter
    datapoints = [dict(zip(spec, values, strict=True)) for values in enumerate(texts)]
    with writer(path, spec, granular.encoders, layout=layout, **(sharded or {})) as opened:
        for datapoint in datapoints:
            opened.append(datapoint)
    return datapoints


@pytest.mark.parametrize(
    ('bucket', 'before', 'after', 'read', 'options'),
    pairwise(itertools.product(['fakegcs', 'seaweed'], DATASETS, DATASETS, READS, OPTIONS)),
    ids=str,
    indirect=['bucket'],
)
def test_replaced_dataset_is_at_most_one_error(cached, before, after, read, options):
    expected = put(cached, before)
    for _ in range(2):  # the second time, from the cache
        with granular.open(cached, **options) as reader:
            assert READS[read](reader) == expected
    expected, outcomes = put(cached, after), []
    for _ in range(3):
        try:
            with granular.open(cached, **options) as reader:
                outcomes.append(READS[read](reader) == expected)
        except ObjectChangedError:
            outcomes.append('ObjectChangedError')
    assert outcomes in ([True] * 3, ['ObjectChangedError', True, True])


@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_concurrent_first_reads_share_one_check(cached, layout):
    write(cached, layout=layout)
    read(cached)

    async def count(*reads):
        counts = []
        async with granular.aio.DatasetReader(cached.aio, granular.decoders) as reader:
            for indices in reads:
                before = granular.io_stats()['requests']
                datapoints = await asyncio.gather(*map(reader.get, indices))
                assert [datapoint['x'] for datapoint in datapoints] == list(indices)
                counts.append(granular.io_stats()['requests'] - before)
        return counts

    first, second = asyncio.run(count([0], [1]))
    assert asyncio.run(count(range(10), range(10))) == [first + 9 * second, 10 * second]


def test_dataset_replaced_while_it_is_read_is_reopened(cached):
    put(cached, 'shards, refs')
    with granular.open(cached) as reader:
        assert len(reader.fetch(range(6))) == 6
        expected = put(cached, 'shards, columns')
        with pytest.raises((ObjectChangedError, NotFoundError)):
            reader.fetch(range(6))
    with granular.open(cached) as reader:
        assert list(reader) == expected


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

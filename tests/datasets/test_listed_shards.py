"""Sharded datasets without an index: shards that a listing tells are opened when they are first read."""

import asyncio
import pickle
import shutil

import numpy as np
import pytest

import granular
from granular import aio
from granular.errors import CorruptDatasetError, NotFoundError, ObjectChangedError
from granular.formats.layout import shard_name
from tests.support.requests import requests, steady
from tests.support.seams import identity_of, pickled_for_worker

SPECS = {'refs': {'a': 'int', 'b': 'utf8[]'}, 'columns': {'a': 'int', 'c': 'bytes'}}
SHARDS = 40
"""More than are opened at once."""


def point(i, layout):
    return {key: {'a': i, 'b': [str(i)] * (i % 3), 'c': b'x' * (i % 5)}[key] for key in SPECS[layout]}


def write(folder, layout, shards=SHARDS, **options):
    """Write two datapoints a shard."""
    options.setdefault('checksums', False)
    with granular.ShardedDatasetWriter(
        folder, SPECS[layout], granular.encoders, shardlen=2, layout=layout, **options
    ) as writer:
        for i in range(2 * shards):
            writer.append(point(i, layout), flush=False)


def rewrite(shard, layout, numbers):
    """Replace a shard by another one."""
    shard.rmtree()
    with granular.DatasetWriter(shard, SPECS[layout], granular.encoders, layout=layout) as writer:
        for i in numbers:
            writer.append(point(i, layout), flush=False)


def opened(folder, **options):
    return granular.ShardedDatasetReader(folder, granular.decoders, **options)


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    """Datasets on a disk that are not changed, by their layout."""
    folder = tmp_path_factory.mktemp('listed')
    for layout in SPECS:
        write(folder / layout, layout)
    return folder


@pytest.fixture(params=list(SPECS))
def dataset(request, written):
    """A dataset on a disk that is not changed, with its layout and datapoints."""
    return written / request.param, request.param, [point(i, request.param) for i in range(2 * SHARDS)]


@pytest.fixture
def columns(written, tmp_path):
    """A dataset in the columns layout, to be changed."""
    return granular.Path(shutil.copytree(written / 'columns', tmp_path / 'ds'))


@pytest.mark.parametrize(('layout', 'most'), [('refs', 3 * SHARDS), ('columns', SHARDS // 2)])
def test_shards_are_opened_when_they_are_first_read(moto, layout, most):
    folder = steady(moto) / 'ds'
    write(folder, layout)
    expected = [point(i, layout) for i in range(2 * SHARDS)]
    reader, opening, _ = requests(lambda: opened(folder))
    with reader:
        assert opening < most
        assert (len(reader), reader.shards) == (2 * SHARDS, SHARDS)
        datapoints, first, _ = requests(lambda: reader.fetch([5, 77, 6, 76]))
        assert datapoints == [expected[i] for i in (5, 77, 6, 76)]
        again = requests(lambda: reader.fetch([77, 5]))[1]
        assert again < first
        with reader.copy() as copy:
            assert list(copy) == expected
        assert list(reader) == expected
        assert requests(lambda: reader.fetch([77, 5]))[1] == again


def test_datasets_on_a_disk_read_the_same_whatever_is_open(dataset):
    folder, layout, expected = dataset
    picks = np.random.default_rng(0).integers(0, 2 * SHARDS, 120)
    with opened(folder) as reader, opened(folder, cache_keys=('a',)) as other:
        assert (len(reader), reader.size, reader.spec) == (len(other), other.size, other.spec)
        assert reader.available(61) == other.available(61)
        assert [reader[i] for i in picks[:20]] == [expected[i] for i in picks[:20]]
        for some in np.split(picks, 10):
            assert reader.fetch(some) == [expected[i] for i in some]
        assert reader[-3:] == other[-3:]
        assert list(reader) == expected
        assert reader.sizes(list(SPECS[layout])[1]).tolist() == other.sizes(list(SPECS[layout])[1]).tolist()
    with opened(folder, shardstart=1, shardstep=1) as reader:
        assert list(reader) == expected[2:]


def test_readers_of_the_shards_open_them(dataset):
    folder, _, expected = dataset

    async def main():
        async with aio.ShardedDatasetReader(folder, granular.decoders) as reader:
            shards = reader.readers
            assert [len(shard) for shard in shards] == [2] * SHARDS
            assert await shards[20].get(1) == expected[41]
            assert await shards[21].fetch([0]) == [expected[42]]
            assert await reader.readers[22].bags['a'].get(0)
            identity = await identity_of(reader)
            async with aio.ShardedDatasetReader(folder, granular.decoders, cache_keys=('a',)) as other:
                assert await identity_of(other) == identity

    asyncio.run(main())


def test_readers_of_the_shards_are_read_together(dataset):
    folder, _, expected = dataset

    async def main():
        async with aio.ShardedDatasetReader(folder, granular.decoders) as reader:
            joined = aio.MapDataset.concatenate([aio.MapDataset.source(shard) for shard in reader.readers[20:25]])
            for indices in ([9, 1, 4], range(10)):
                assert await joined.fetch(indices) == [expected[40 + i] for i in indices]

    asyncio.run(main())


def test_readers_of_the_shards_have_windows(written):
    async def main():
        async with aio.ShardedDatasetReader(written / 'refs', granular.decoders) as reader:
            windows = await aio.Windows.open(reader.readers[20], {'b': [0], 'a': True}, border='drop')
            assert await windows.fetch([0, 2]) == [{'a': 40, 'b': ['40']}, {'a': 41, 'b': ['41']}]

    asyncio.run(main())


def test_batches_that_are_fetched_together_open_each_shard_once(moto):
    folder = steady(moto) / 'ds'
    write(folder, 'columns')

    async def main():
        async with aio.ShardedDatasetReader(folder.aio, granular.decoders) as reader:
            return await asyncio.gather(*(reader.fetch(range(2 * SHARDS)) for _ in range(4)))

    def one():
        with opened(folder) as reader:
            return reader.fetch(range(2 * SHARDS))

    expected, once, _ = requests(one)
    batches, together, _ = requests(lambda: asyncio.run(main()))
    assert batches == [expected] * 4
    assert together < 2 * once


@pytest.mark.parametrize('numbers', [[60, 61], [60, 61, 62], []])
def test_shards_that_are_replaced_before_they_are_read(dataset, tmp_path, numbers):
    """By a shard of equal length, by a longer one, or by none."""
    source, layout, _ = dataset
    folder = granular.Path(shutil.copytree(source, tmp_path / 'ds'))
    shard = folder / shard_name(30)
    with opened(folder) as reader:
        worker, plain = pickled_for_worker(reader), pickle.dumps(reader)
        if numbers:
            rewrite(shard, layout, numbers)
        else:
            shard.rmtree()
        with pytest.raises(ObjectChangedError, match='000030.*since it was listed.*open a new reader'):
            reader.fetch([0, 61])
        assert reader.fetch([0, 59]) == [point(0, layout), point(59, layout)]  # the others are read
    with pickle.loads(worker) as reader, pytest.raises(ObjectChangedError, match='000030'):
        list(reader)
    with pytest.raises((ObjectChangedError, CorruptDatasetError), match='000030'), pickle.loads(plain) as reader:
        list(reader)


def test_pickled_readers_read_the_shards_that_were_listed(moto, monkeypatch):
    for name, option in (('AWS_ACCESS_KEY_ID', 'key'), ('AWS_SECRET_ACCESS_KEY', 'secret')):
        monkeypatch.setenv(name, moto.place().aio.store.options[option])  # which are not pickled
    folder = steady(moto) / 'ds'
    write(folder, 'columns')
    expected = [point(i, 'columns') for i in range(2 * SHARDS)]
    with opened(folder) as reader:
        reader.fetch([5, 77])
        contents = pickle.dumps(reader), pickled_for_worker(reader)
    copies, loading = [], []
    for content in contents:
        copy, count, _ = requests(lambda content=content: pickle.loads(content))
        loading.append(count)
        with copy:
            copies.append(list(copy))
    assert copies == [expected, expected]
    assert loading[0] > 0 == loading[1]  # a worker process lists nothing


@pytest.mark.parametrize('layout', list(SPECS))
def test_shards_in_an_index_cache_are_opened_when_they_are_first_read(moto, tmp_path, layout):
    folder = steady(moto, index_cache=str(tmp_path)) / 'ds'
    write(folder, layout)
    expected = [point(i, layout) for i in range(2 * SHARDS)]
    opened(folder).close()  # which reads all tables
    reader, opening, _ = requests(lambda: opened(folder))
    with reader:
        assert (opening, len(reader), reader.shards) == (1, 2 * SHARDS, SHARDS)  # the listing of the folder
        assert reader.fetch([5, 77]) == [expected[5], expected[77]]
        with reader.copy() as copy:
            assert list(copy) == list(reader) == expected
    with opened(folder) as reader:
        rewrite(folder / shard_name(30), layout, [60, 62])
        with pytest.raises(ObjectChangedError, match='000030'):
            reader.fetch([0, 60, 61])
    with opened(folder) as reader:
        assert reader.fetch([0, 61], ('a',)) == [{'a': 0}, {'a': 62}]


@pytest.mark.parametrize('damage', ['spec.json', 'a.bag', 'spec'])
def test_shards_that_a_listing_shows_to_be_damaged_fail_at_opening(columns, damage):
    shard = columns / shard_name(35)
    if damage == 'spec':
        (shard / 'spec.json').write_text('{"a": "int", "c": "utf8"}')
    else:
        (shard / damage).unlink()
    with pytest.raises((CorruptDatasetError, NotFoundError), match=f'{shard_name(35)}.*{damage}'):
        opened(columns)


def test_another_spec_of_the_same_size_fails_at_the_first_read(columns):
    (columns / shard_name(35) / 'spec.json').write_text('{"a": "int", "c": "array"}')
    with opened(columns) as reader, pytest.raises(CorruptDatasetError, match='000035: has spec'):
        reader.fetch([0, 70])


def test_columns_of_other_lengths_are_warned_of_at_opening(columns):
    for ending in ('bag', 'idx'):
        (columns / shard_name(35) / f'a.{ending}').unlink()
    with granular.BagWriter(columns / shard_name(35) / 'a.bag', version=3) as bag:
        bag.append(granular.encoders['int'](70))
    with pytest.warns(RuntimeWarning, match='000035: columns differ in length'), opened(columns) as reader:
        assert len(reader) == 2 * SHARDS - 1
        assert [datapoint['a'] for datapoint in reader] == [i for i in range(2 * SHARDS) if i != 71]


@pytest.mark.parametrize('version', [1, 2])
def test_references_of_any_version_and_number_are_counted(written, tmp_path, version):
    """In one shard: of version 1, and more than the end of the bag shows."""
    folder = granular.Path(shutil.copytree(written / 'refs', tmp_path / 'ds'))
    shard, count = folder / shard_name(35), 1000 if version == 2 else 3
    shard.rmtree()
    with granular.DatasetWriter(shard, SPECS['refs'], granular.encoders, checksums=False) as writer:
        for i in range(count):
            writer.append({'a': i, 'b': []}, flush=False)
    with granular.BagReader(shard / 'refs.bag') as bag:
        records = list(bag)
    (shard / 'refs.bag').unlink()
    with granular.BagWriter(shard / 'refs.bag', version=version) as bag:
        for record in records:
            bag.append(record, flush=False)
    with opened(folder) as reader:
        assert len(reader) == 2 * (SHARDS - 1) + count
        assert reader.fetch([70 + count - 1, 70 + count], ('a',)) == [{'a': count - 1}, {'a': 72}]


def test_pickles_of_unpickled_readers_refuse_what_was_divided_anew_since(tmp_path):
    """Their first reader compared the tables of shards, which the second one has only listed."""
    for name, values in (('old', [b'xy', b'z']), ('new', [b'x', b'yz'])):
        with granular.DatasetWriter(tmp_path / name, {'c': 'bytes'}, granular.encoders, layout='columns') as writer:
            for value in values:
                writer.append({'c': value})
    for number in range(SHARDS):
        shutil.copytree(tmp_path / 'old', tmp_path / 'ds' / shard_name(number))
    with granular.ShardedDatasetReader(tmp_path / 'ds', granular.decoders) as reader:
        assert reader.fetch([78, 79]) == [{'c': b'xy'}, {'c': b'z'}]
        content = pickle.dumps(reader)
    shutil.copyfile(tmp_path / 'new' / 'c.idx', tmp_path / 'ds' / shard_name(SHARDS - 1) / 'c.idx')
    with pickle.loads(content) as reader:
        for again in (pickle.dumps(reader), pickled_for_worker(reader)):
            with pickle.loads(again) as copy, pytest.raises(ObjectChangedError, match='since the reader was pickled'):
                copy.fetch([78, 79])

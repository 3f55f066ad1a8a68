"""The index file of a sharded dataset: opening, reading, noticing replaced shards, verification."""

import asyncio
import json
import os
import pickle
import re
import shutil
import signal
import sys
import threading

import numpy as np
import pytest

import granular
from granular import aio
from granular.aio.bags.bag import Bag
from granular.aio.datasets.sharded_reader import columns_of_shards, indexed_shards_of
from granular.errors import (
    CorruptDatasetError,
    InvalidArgumentError,
    NotFoundError,
    ObjectChangedError,
    UnsupportedError,
)
from granular.formats.dataset_index import NAME
from tests.support.faults import FaultServer, md5_etag
from tests.support.oracles import Oracle
from tests.support.seams import identity_of, pickled_for_worker
from tests.support.servers import HTTPServer

REFS = {'a': 'int', 'b': 'utf8[]', 'c': 'bytes'}
COLUMNS = {'a': 'int', 'c': 'bytes'}
SPECS = {'refs': REFS, 'columns': COLUMNS}


def point(i, layout, text='x'):
    datapoint = {'a': i, 'b': [str(i)] * (i % 3), 'c': f'{text}{i}'.encode() * (i % 50)}
    return {key: datapoint[key] for key in SPECS[layout]}


def write(folder, numbers, layout='refs', text='x', **options):
    with granular.ShardedDatasetWriter(folder, SPECS[layout], granular.encoders, layout=layout, **options) as writer:
        assert writer.found >= 0  # so that it does not warn of appending
        for i in numbers:
            writer.append(point(i, layout, text))


def rewrite(shard, numbers, layout='refs', text='x'):
    """Replace a shard by another one."""
    for path in list(shard.iterdir()):
        if path.name != NAME:
            path.unlink()
    with granular.DatasetWriter(shard, SPECS[layout], granular.encoders, layout=layout) as writer:
        assert writer.found >= 0  # so that it does not warn of appending
        for i in numbers:
            writer.append(point(i, layout, text))


def read(folder, **options):
    with granular.ShardedDatasetReader(folder, granular.decoders, **options) as reader:
        return list(reader)


def is_indexed(reader):
    return indexed_shards_of(reader.aio) is not None


def versions_of(reader):
    return [bag.identity() for columns in columns_of_shards(reader.aio) for bag in columns.all_bags.values()]


def count_requests(call):
    before = granular.io_stats()['requests']
    result = call()
    return result, granular.io_stats()['requests'] - before


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == 'granular']


# --- reading


@pytest.mark.parametrize('layout', ['refs', 'columns'])
@pytest.mark.parametrize('memory', [1 << 30, 1])
def test_datasets_read_the_same_with_an_index(tmp_path, layout, memory, caplog):
    """With all pages in memory, and with one page at a time."""
    folder = granular.Path(tmp_path / 'ds', config=granular.IOConfig(index_memory=memory))
    write(folder, range(10_000), layout, shardlen=4500)
    expected = [point(i, layout) for i in range(10_000)]
    with granular.ShardedDatasetReader(folder, granular.decoders) as plain:
        versions = versions_of(plain)
        summary = granular.build_index(folder)
        with granular.ShardedDatasetReader(folder, granular.decoders) as reader:
            assert is_indexed(reader) and not is_indexed(plain)
            assert (len(reader), reader.shards, reader.size) == (10_000, 3, plain.size)
            assert (reader.spec, reader.layout) == (plain.spec, plain.layout)
            assert versions_of(reader) == versions
            assert list(reader) == expected
            picks = np.random.default_rng(0).integers(-10_000, 10_000, 500)
            assert reader.fetch(picks) == [expected[i] for i in picks]
            assert [reader[i] for i in picks[:20]] == [expected[i] for i in picks[:20]]
            assert reader[4499:9002:4501, 'a'] == {'a': [4499, 9000]}
            assert reader.available(4501) == plain.available(4501)
            assert reader.aio.readers[1].bags.keys() == plain.aio.readers[1].bags.keys()
            if layout == 'refs':
                assert reader[5, {'b': range(1, 2)}] == {'b': ['5']}
    assert (summary.shards, summary.datapoints) == (3, 10_000)
    assert summary.bytes == os.path.getsize(tmp_path / 'ds' / '000000' / NAME)
    options = {'cache_keys': ('a', 'refs') if layout == 'refs' else ('a',)}
    assert read(folder, **options) == read(folder, cache_index=False) == expected
    assert read(folder, shardstart=1, shardstep=2) == expected[4500:9000]
    assert warnings_of(caplog) == []


@pytest.mark.parametrize('memory', [1 << 30, 1])
def test_mixes_of_datasets_with_an_index_each(tmp_path, memory):
    folders = [granular.Path(tmp_path / name, config=granular.IOConfig(index_memory=memory)) for name in 'xy']
    for folder, numbers in zip(folders, (range(30), range(30, 75)), strict=True):
        write(folder, numbers, shardlen=10, index=True)
    readers = [granular.ShardedDatasetReader(folder, granular.decoders) for folder in folders]
    mix = granular.MapDataset.concatenate([granular.MapDataset.source(reader) for reader in readers])
    for indices in ([1, 31], [74, 29, 30], range(75)):
        assert mix.fetch(list(indices)) == [point(i, 'refs') for i in indices]
    for reader in readers:
        reader.close()


@pytest.mark.parametrize('references', ['shared', 'reversed'])
def test_references_in_any_order_are_read(tmp_path, references):
    """Datasets of other programs may refer to records in any order."""
    write(tmp_path / 'ds', range(6), shardlen=3)
    shard = tmp_path / 'ds' / '000000'
    rows = {'shared': [[0, [0, 1], 2]] * 3, 'reversed': [[2, [1, 2], 0], [1, [0, 1], 1], [0, [], 2]]}[references]
    os.unlink(shard / 'refs.bag')
    with granular.BagWriter(shard / 'refs.bag') as bag:
        for row in rows:
            bag.append(granular.formats.encoders['msgpack'](row))
    expected = read(tmp_path / 'ds')
    granular.build_index(tmp_path / 'ds')
    assert read(tmp_path / 'ds') == expected
    with granular.ShardedDatasetReader(tmp_path / 'ds', granular.decoders) as reader:
        assert [reader[i] for i in range(6)] == expected


def test_index_is_built_in_every_store(root):
    if 'memory' in str(root):
        with pytest.raises(UnsupportedError, match='version'):
            write(root / 'ds', range(30), shardlen=10, index=True)
        assert not (root / 'ds' / '000000' / NAME).exists()
        return
    write(root / 'ds', range(30), shardlen=10, index=True, checksums=True)
    reader, opening = count_requests(lambda: granular.ShardedDatasetReader(root / 'ds', granular.decoders))
    with reader:
        assert is_indexed(reader)
        assert reader.fetch([29, 0, 10]) == [point(i, 'refs') for i in (29, 0, 10)]
    assert root.store.local or opening <= 2  # the index and a listing
    assert read(root / 'ds', verify=True) == [point(i, 'refs') for i in range(30)]
    with granular.open(root / 'ds') as reader:
        assert is_indexed(reader)
    assert granular.clean(root / 'ds', older=0) == []
    assert granular.verify(root / 'ds').problems == []


@pytest.mark.parametrize('bucket', ['seaweed', 'fakegcs'], indirect=True)
def test_large_datasets_open_with_three_requests(bucket, monkeypatch):
    monkeypatch.setattr('granular.aio.datasets.comparison.LISTED', 0)
    write(bucket / 'ds', range(12), shardlen=2, index=True)
    config = granular.IOConfig(index_memory=1)
    for folder in (bucket / 'ds', granular.Path(str(bucket / 'ds'), config=config, **bucket.aio.store.options)):
        reader, opening = count_requests(lambda folder=folder: granular.ShardedDatasetReader(folder, granular.decoders))
        with reader:
            assert opening <= 3  # the index, and whether there is one shard more
            assert reader.fetch(range(12)) == [point(i, 'refs') for i in range(12)]


def test_child_that_is_forked_while_pages_are_kept_reads(tmp_path):
    write(tmp_path / 'ds', range(30), shardlen=10, index=True)
    folder = granular.Path(tmp_path / 'ds', config=granular.IOConfig(index_memory=1))
    with granular.ShardedDatasetReader(folder, granular.decoders) as reader:
        keeping, forked = threading.Event(), threading.Event()

        def read():
            sys.setprofile(pause)
            reader.fetch(range(30))

        def pause(frame, event, arg):
            # Within the block of the lock, in which another thread may fork.
            if event == 'call' and frame.f_code.co_qualname == 'LRU.put':
                sys.setprofile(None)
                keeping.set()
                forked.wait()

        thread = threading.Thread(target=read)
        thread.start()
        keeping.wait()
        if not (child := os.fork()):
            signal.alarm(20)
            os._exit(reader.fetch([0, 29]) != [point(0, 'refs'), point(29, 'refs')])
        forked.set()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_index_is_passed_to_worker_processes(tmp_path):
    write(tmp_path / 'ds', range(30), shardlen=10, index=True)
    rewrite(granular.Path(tmp_path / 'ds' / '000001'), range(100, 110))
    with granular.ShardedDatasetReader(tmp_path / 'ds', granular.decoders) as reader:
        expected = list(reader)
        with pickle.loads(pickle.dumps(reader)) as twin:
            assert list(twin) == expected
        pickled = pickled_for_worker(reader)
        os.unlink(tmp_path / 'ds' / '000000' / NAME)
        with pickle.loads(pickled) as twin, twin.copy() as copy:
            assert is_indexed(twin)
            assert list(twin) == list(copy) == expected


def test_shard_that_failed_to_open_is_opened_again(tmp_path, monkeypatch):
    """Such as for an interrupt, or for lack of file descriptors."""
    write(tmp_path / 'ds', range(30), shardlen=10, index=True)
    opened = Bag.open_indexed

    def fail_once(bag, *arguments):
        monkeypatch.setattr(Bag, 'open_indexed', opened)
        raise KeyboardInterrupt

    with granular.ShardedDatasetReader(tmp_path / 'ds', granular.decoders) as reader:
        monkeypatch.setattr(Bag, 'open_indexed', fail_once)
        with pytest.raises(KeyboardInterrupt):
            list(reader)
        assert list(reader) == [point(i, 'refs') for i in range(30)]


def test_closed_readers_refuse_reads(tmp_path):
    write(tmp_path / 'ds', range(30), shardlen=10, index=True)
    reader = granular.ShardedDatasetReader(tmp_path / 'ds', granular.decoders)
    shards = reader.aio.readers
    reader.close()
    with pytest.raises(granular.errors.ClosedError):
        reader.fetch([1])
    assert [len(shard) for shard in shards] == [10, 10, 10]


# --- shards that were replaced or added


def test_replaced_and_added_shards_are_read_by_their_own_tables(root, caplog):
    if 'memory' in str(root):
        return
    write(root / 'ds', range(30), shardlen=10, index=True)
    rewrite(root / 'ds' / '000001', range(100, 107))
    write(root / 'ds', range(30, 40), shardlen=10)
    expected = [point(i, 'refs') for i in (*range(10), *range(100, 107), *range(20, 40))]
    with granular.ShardedDatasetReader(root / 'ds', granular.decoders) as reader:
        assert is_indexed(reader)
        assert (len(reader), reader.shards) == (37, 4)
        assert list(reader) == expected
    (message,) = warnings_of(caplog)
    assert 'run `granular index`' in message and '1 of its 3 shards' in message
    assert read(root / 'ds', index=False) == expected
    granular.build_index(root / 'ds')
    caplog.clear()
    assert read(root / 'ds') == expected
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(
    ('bucket', 'layout'), [('seaweed', 'refs'), ('fakegcs', 'columns'), ('azurite', 'columns')], indirect=['bucket']
)
def test_replaced_shards_are_noticed_at_the_first_read(bucket, layout, monkeypatch, caplog):
    """Of many shards, no listing of all objects is made."""
    monkeypatch.setattr('granular.aio.datasets.comparison.LISTED', 0)
    folder = bucket / 'ds'
    write(folder, range(40), layout, shardlen=10, index=True)
    rewrite(folder / '000001', range(10, 20), layout, text='other')
    write(folder, range(40, 50), layout, shardlen=10)
    expected = [point(i, layout, 'other' if 10 <= i < 20 else 'x') for i in range(50)]
    with granular.ShardedDatasetReader(folder, granular.decoders) as reader:
        assert len(reader) == 50
        assert reader[0] == expected[0]
        assert reader[11] == expected[11]
        assert reader.fetch(range(50)) == expected
        assert reader[5:15:5, 'c'] == {'c': [expected[5]['c'], expected[10]['c']]}
        rewrite(folder / '000002', range(20, 30), layout, text='late')
        with pytest.raises(ObjectChangedError):
            reader.fetch(range(20, 30))
    assert len(messages := warnings_of(caplog)) == 1 and 'run `granular index`' in messages[0]


@pytest.mark.parametrize('bucket', ['fakegcs'], indirect=True)
def test_copies_of_a_reader_notice_replaced_shards_independently(bucket, monkeypatch):
    monkeypatch.setattr('granular.aio.datasets.comparison.LISTED', 0)
    folder = bucket / 'ds'
    write(folder, range(20), shardlen=10, index=True)
    rewrite(folder / '000001', range(10, 20), text='other')
    with granular.ShardedDatasetReader(folder, granular.decoders) as reader, reader.copy() as copy:
        assert reader[11] == copy[11] == point(11, 'refs', 'other')


@pytest.mark.parametrize('bucket', ['fakegcs'], indirect=True)
def test_shard_of_another_length_is_an_error_at_the_first_read(bucket, monkeypatch):
    monkeypatch.setattr('granular.aio.datasets.comparison.LISTED', 0)
    folder = bucket / 'ds'
    write(folder, range(40), shardlen=10, index=True)
    rewrite(folder / '000001', range(10, 15))
    with granular.ShardedDatasetReader(folder, granular.decoders) as reader:
        assert reader.fetch([0, 39]) == [point(0, 'refs'), point(39, 'refs')]
        with pytest.raises(ObjectChangedError, match=r'expected 10 datapoints, got 5.*granular index.*index=False'):
            reader.fetch([0, 12])
    assert len(read(folder, index=False)) == 35


@pytest.mark.parametrize('bucket', ['seaweed'], indirect=True)
def test_index_that_is_replaced_while_it_is_read_page_by_page(bucket, monkeypatch, caplog):
    monkeypatch.setattr('granular.aio.datasets.comparison.LISTED', 0)
    write(bucket / 'ds', range(40), shardlen=10, index=True)
    config = granular.IOConfig(index_memory=1)
    folder = granular.Path(str(bucket / 'ds'), config=config, **bucket.aio.store.options)
    with granular.ShardedDatasetReader(folder, granular.decoders) as reader:
        assert reader[0] == point(0, 'refs')
        write(bucket / 'ds', range(40, 50), shardlen=10, index=True)
        assert reader.fetch(range(40)) == [point(i, 'refs') for i in range(40)]
    (message,) = warnings_of(caplog)
    assert 'replaced or removed itself: 4 shards' in message and 'open a new reader' in message


@pytest.mark.parametrize('bucket', ['fakegcs'], indirect=True)
@pytest.mark.parametrize('listed', [True, False])
@pytest.mark.parametrize('blocks', [True, False])
@pytest.mark.parametrize('change', ['dataset', 'dataset without an index', 'shard'])
def test_dataset_that_is_replaced_while_it_is_open_is_not_mixed(bucket, listed, blocks, change, monkeypatch, tmp_path):
    if not listed:
        monkeypatch.setattr('granular.aio.datasets.comparison.LISTED', 0)
    write(bucket / 'ds', range(40), shardlen=10, index=True)
    config = granular.IOConfig(cache_dir=str(tmp_path) if blocks else '')
    folder = granular.Path(str(bucket / 'ds'), config=config, **bucket.aio.store.options)
    with granular.ShardedDatasetReader(folder, granular.decoders) as reader:
        copy = pickle.loads(pickle.dumps(reader))
        assert reader[0] == point(0, 'refs')
        if change == 'shard':
            rewrite(bucket / 'ds' / '000000', range(10), text='other')
            wrong, right = range(10), range(10, 40)
        else:
            (bucket / 'ds').rmtree()
            write(bucket / 'ds', range(40), shardlen=10, index=change == 'dataset', text='other')
            wrong, right = range(10, 40), ()
        for one in (reader, copy) if listed or change != 'shard' else (reader,):
            with pytest.raises(ObjectChangedError):
                one.fetch(wrong)
        assert reader.fetch(right) == [point(i, 'refs') for i in right]
        copy.close()


OLD = [{'b': ['x', 'y'], 'c': b'xy'}, {'b': ['z'], 'c': b'z'}]
NEW = [{'b': ['x'], 'c': b'x'}, {'b': ['y', 'z'], 'c': b'yz'}]
"""The same bytes, divided differently, in files of the same sizes."""


def write_points(folder, points, layout):
    spec = {'b': 'utf8[]', 'c': 'bytes'} if layout == 'refs' else {'c': 'bytes'}
    for path in list(folder.iterdir()) if folder.exists() else []:
        if path.name != NAME:
            path.unlink()
    with granular.DatasetWriter(folder, spec, granular.encoders, layout=layout) as writer:
        for datapoint in points:
            writer.append({key: datapoint[key] for key in spec})


@pytest.mark.parametrize(('layout', 'key'), [('refs', 'b'), ('columns', 'c')])
@pytest.mark.parametrize('bucket', ['seaweed'], indirect=True)
def test_same_bytes_that_are_divided_differently_are_noticed(bucket, layout, key, monkeypatch):
    """S3 gives the same version to the same bytes, whatever the limits and references that divide them."""
    monkeypatch.setattr('granular.aio.datasets.comparison.LISTED', 0)
    for number in range(3):
        write_points(bucket / 'ds' / f'{number:06}', OLD, layout)
    granular.build_index(bucket / 'ds')
    write_points(bucket / 'ds' / '000001', NEW, layout)
    expected = [datapoint[key] for datapoint in (*OLD, *NEW, *OLD)]
    for options in ({}, {'cache_keys': (key,)}, {'cache_index': False}):
        with granular.ShardedDatasetReader(bucket / 'ds', granular.decoders, **options) as reader:
            assert is_indexed(reader)
            assert reader[2] == {name: NEW[0][name] for name in reader.spec}
            assert [datapoint[key] for datapoint in reader.fetch(range(6), (key,))] == expected


@pytest.mark.parametrize('bucket', ['fakegcs'], indirect=True)
def test_empty_values_of_replaced_shards_are_noticed(bucket, monkeypatch):
    """An empty record is never requested."""
    monkeypatch.setattr('granular.aio.datasets.comparison.LISTED', 0)
    folder = bucket / 'ds'
    write(folder, [50, 50, 0, 0], shardlen=2, index=True)
    rewrite(folder / '000001', [50, 51, 52])
    with granular.ShardedDatasetReader(folder, granular.decoders) as reader:
        with pytest.raises(ObjectChangedError, match=r'expected 2 datapoints, got 3.*granular index'):
            reader.fetch([2], ('b', 'c'))
    with granular.ShardedDatasetReader(folder, granular.decoders, cache_keys=('c',)) as reader:
        assert [datapoint['a'] for datapoint in reader] == [50, 50, 50, 51, 52]


@pytest.mark.parametrize(
    ('layout', 'old', 'new', 'files'),
    [
        ('columns', OLD, NEW, ['c.idx']),
        ('columns', OLD, [{'c': b'ab'}, {'c': b'c'}], ['c.bag']),
        ('refs', [{'b': [], 'c': b''}, {'b': [], 'c': b'z'}], [{'b': [], 'c': b'z'}, {'b': [], 'c': b''}], ['c.bag']),
    ],
)
@pytest.mark.parametrize('place', ['disk', 'listed', 'unlisted', 'web server'])
@pytest.mark.parametrize('bucket', ['seaweed'], indirect=True)
def test_changes_of_single_files_are_noticed(tmp_path, bucket, layout, old, new, files, place, monkeypatch):
    """As by programs that copy only the files whose bytes have changed: of the same sizes, or at the same time."""
    monkeypatch.setattr('granular.aio.datasets.comparison.LISTED', 2000 if place == 'listed' else 0)
    folder = granular.Path(tmp_path / 'ds') if place == 'disk' else bucket / 'ds'
    for number in range(3):
        write_points(folder / f'{number:06}', old, layout)
    write_points(granular.Path(tmp_path / 'new'), new, layout)
    granular.build_index(folder)
    expected = [datapoint['c'] for datapoint in (*old, *new, *old)]

    def check(folder):
        for options in ({}, {'cache_keys': ('c',)}, {'cache_index': False}):
            with granular.ShardedDatasetReader(folder, granular.decoders, **options) as reader:
                assert is_indexed(reader)
                assert reader[2, ('c',)] == {'c': expected[2]}
                assert [datapoint['c'] for datapoint in reader] == expected

    for file in files:
        (folder / '000001' / file).write_bytes((tmp_path / 'new' / file).read_bytes())
    if place != 'web server':
        check(folder)
        return
    content = {str(path.relative_to(bucket)): path.read_bytes() for path in folder.rglob('*') if path.is_file()}
    with FaultServer(files=content) as server:  # with the versions that the bucket has
        server.etag_of = md5_etag
        check(f'{server.endpoint}/b/ds')


def test_an_index_on_a_server_without_etags_tells_only_which_shards_there_are(tmp_path, caplog):
    folder = granular.Path(tmp_path / 'ds')
    write(folder, range(20), shardlen=5, index=True)
    content = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob('*') if path.is_file()}
    with granular.ShardedDatasetReader(folder, granular.decoders) as reader, FaultServer(files=content) as server:
        expected = reader.fetch(range(20))
        server.etag, server.modified = None, {'': 'Fri, 21 Nov 2025 20:00:00 GMT'}
        with granular.ShardedDatasetReader(f'{server.endpoint}/b', granular.decoders) as remote:
            assert remote.fetch(range(20)) == expected
    assert 'its server gives files no ETag' in caplog.text
    assert 'outdated' not in caplog.text


@pytest.mark.parametrize(('file', 'new'), [('c.bag', [{'c': b'ab'}, {'c': b'c'}]), ('c.idx', NEW)])
@pytest.mark.parametrize('bucket', ['seaweed'], indirect=True)
def test_pickled_readers_refuse_what_was_replaced_before_their_first_read(tmp_path, bucket, file, new, monkeypatch):
    monkeypatch.setattr('granular.aio.datasets.comparison.LISTED', 0)
    for name, option in (('AWS_ACCESS_KEY_ID', 'key'), ('AWS_SECRET_ACCESS_KEY', 'secret')):
        monkeypatch.setenv(name, bucket.aio.store.options[option])  # which are not pickled
    for number in range(3):
        write_points(bucket / 'ds' / f'{number:06}', OLD, 'columns')
    write_points(granular.Path(tmp_path / 'new'), new, 'columns')
    with granular.ShardedDatasetReader(bucket / 'ds', granular.decoders) as reader:
        content = pickle.dumps(reader)
    granular.build_index(bucket / 'ds')
    (bucket / 'ds' / '000002' / file).write_bytes((tmp_path / 'new' / file).read_bytes())
    with pickle.loads(content) as reader:
        assert is_indexed(reader)
        for again in (pickle.dumps(reader), pickled_for_worker(reader)):
            with pickle.loads(again) as copy, pytest.raises(ObjectChangedError, match='since the reader was pickled'):
                copy.fetch([4, 5])
        assert reader.fetch(range(4)) == [{'c': point['c']} for point in (*OLD, *OLD)]
        for _ in range(2):
            with pytest.raises(ObjectChangedError, match='since the reader was pickled'):
                reader.fetch([4, 5])


@pytest.mark.parametrize('bucket', ['seaweed', 'azurite'], indirect=True)
def test_each_shard_is_compared_once(bucket, monkeypatch):
    monkeypatch.setattr('granular.aio.datasets.comparison.LISTED', 0)
    write(bucket / 'ds', range(40), shardlen=10, index=True)
    with granular.ShardedDatasetReader(bucket / 'ds', granular.decoders) as reader:
        for requests in (2, 1):
            datapoint, count = count_requests(lambda reader=reader: reader.fetch([15], ('a',)))
            assert (datapoint, count) == ([{'a': 15}], requests)


@pytest.mark.parametrize('bucket', ['seaweed', 'fakegcs'], indirect=True)
def test_columns_of_empty_values_have_an_index(bucket):
    """An empty object of S3 has no version."""
    write(bucket / 'ds', [0, 0, 50, 50], 'columns', shardlen=2, index=True)
    with granular.ShardedDatasetReader(bucket / 'ds', granular.decoders) as reader:
        assert is_indexed(reader)
        assert list(reader) == [point(i, 'columns') for i in (0, 0, 50, 50)]


@pytest.mark.parametrize('bucket', ['fakegcs'], indirect=True)
def test_windows_over_replaced_shards(bucket, monkeypatch, caplog):
    monkeypatch.setattr('granular.aio.datasets.comparison.LISTED', 0)
    folder = bucket / 'ds'

    def write_tokens(number, start):
        for path in list((folder / f'{number:06}').iterdir()) if start else []:
            if path.name != NAME:
                path.unlink()
        with granular.DatasetWriter(folder / f'{number:06}', {'t': 'array'}, granular.encoders) as writer:
            writer.append({'t': np.arange(start, start + 4)})

    for number in range(3):
        write_tokens(number, 0)
    granular.build_index(folder)
    write_tokens(1, 100)
    with granular.ShardedDatasetReader(folder, granular.decoders) as reader:
        with granular.Windows(reader, {'t': 2}, 2, 'drop') as windows:
            assert [window['t'].tolist() for window in windows] == [
                [0, 1],
                [2, 3],
                [100, 101],
                [102, 103],
                [0, 1],
                [2, 3],
            ]
    assert warnings_of(caplog) == []  # as the arrays are of the same size


def test_appended_column_is_noticed(tmp_path, caplog):
    write(tmp_path / 'ds', range(15), 'columns', shardlen=10, index=True)
    write(tmp_path / 'ds', range(15, 18), 'columns', shardlen=10)
    assert read(tmp_path / 'ds') == [point(i, 'columns') for i in range(18)]
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize('listed', [True, False])
@pytest.mark.parametrize('layout', SPECS)
@pytest.mark.parametrize('root', ['local', 'seaweed'], indirect=True)
def test_spec_that_was_edited_is_the_one_that_is_read(root, layout, listed, monkeypatch, caplog):
    monkeypatch.setattr('granular.aio.datasets.comparison.LISTED', 2000 if listed else 0)
    folder = root / 'ds'
    write(folder, range(40), layout, shardlen=10, index=True)
    text = (folder / '000000' / 'spec.json').read_text()
    (folder / '000003' / 'spec.json').write_text(text.replace('bytes', 'array'))
    with pytest.raises((ObjectChangedError, CorruptDatasetError), match=r'000003: has spec .*array'):
        read(folder)
    for number in range(4):
        (folder / f'{number:06}' / 'spec.json').write_text(text.replace('"int"', '"jpg"'))
    caplog.clear()
    decoders = {**granular.decoders, 'jpg': bytes}
    with granular.ShardedDatasetReader(folder, decoders, cache_keys=('c',)) as reader:
        assert not is_indexed(reader) and reader.spec['a'] == 'jpg'
        assert reader[39]['a'] == b'\x27'
    (message,) = warnings_of(caplog)
    assert 'another spec' in message and 'run `granular index`' in message


def test_missing_shards_are_errors(tmp_path):
    write(tmp_path / 'ds', range(40), shardlen=10, index=True)
    shutil.rmtree(tmp_path / 'ds' / '000003')
    assert len(read(tmp_path / 'ds')) == 30
    shutil.rmtree(tmp_path / 'ds' / '000001')
    for call in (read, granular.build_index):
        with pytest.raises(CorruptDatasetError, match='000001 is missing'):
            call(tmp_path / 'ds')


# --- copies


def copies_of(folder, bucket):
    """Return copies of a dataset: on the disk, in a bucket, and one of that in another folder of the bucket."""
    granular.Path(folder).copy(granular.Path(f'{folder}-copy'))
    shutil.copytree(folder, f'{folder}-tree')
    granular.Path(folder).copy(bucket / 'copy')
    granular.build_index(bucket / 'copy')
    (bucket / 'copy').copy(bucket / 'synced')
    granular.Path(folder).copy(bucket / 'uploaded')
    return [granular.Path(f'{folder}-copy'), granular.Path(f'{folder}-tree'), bucket / 'synced', bucket / 'uploaded']


@pytest.mark.parametrize('listed', [True, False])
@pytest.mark.parametrize('layout', ['refs', 'columns'])
@pytest.mark.parametrize('bucket', ['seaweed', 'fakegcs'], indirect=True)
def test_copied_datasets_are_read_by_their_index(tmp_path, bucket, layout, listed, monkeypatch, caplog):
    if not listed:
        monkeypatch.setattr('granular.aio.datasets.comparison.LISTED', 0)
    for name, option in (('AWS_ACCESS_KEY_ID', 'key'), ('AWS_SECRET_ACCESS_KEY', 'secret')):
        monkeypatch.setenv(name, bucket.aio.store.options.get(option, ''))  # which are not pickled
    write(tmp_path / 'ds', range(30), layout, shardlen=10, index=True)
    expected = [point(i, layout) for i in range(30)]
    for copy in copies_of(tmp_path / 'ds', bucket):
        for options in ({}, {'cache_keys': ('c',)}, {'cache_index': False}):
            with granular.ShardedDatasetReader(copy, granular.decoders, **options) as reader:
                assert is_indexed(reader)
                assert reader[25] == expected[25]
                with pickle.loads(pickle.dumps(reader)) as twin, reader.copy() as other:
                    assert is_indexed(twin)
                    assert list(twin) == list(reader) == list(other) == expected
                assert [reader[i] for i in range(30)] == expected
                assert indexed_shards_of(reader.aio).own == {}
                assert [len(shard) for shard in reader.aio.readers] == [10, 10, 10]
        with granular.ShardedDatasetReader(copy, granular.decoders, index=False) as reader:
            assert list(reader) == expected
    assert warnings_of(caplog) == []


@pytest.mark.parametrize('listed', [True, False])
@pytest.mark.parametrize('layout', ['refs', 'columns'])
@pytest.mark.parametrize('root', ['local', 'fakegcs'], indirect=True)
def test_readers_of_a_copy_are_pickled_before_it_has_an_index_of_its_own(root, layout, listed, monkeypatch):
    monkeypatch.setattr('granular.aio.datasets.comparison.LISTED', 2000 if listed else 0)
    write(root / 'ds', range(30), layout, shardlen=10, index=True)
    (root / 'ds').copy(root / 'copy')
    with granular.ShardedDatasetReader(root / 'copy', granular.decoders) as reader:
        contents = pickle.dumps(reader), pickled_for_worker(reader)
        granular.build_index(root / 'copy')
        for content in contents:
            with pickle.loads(content) as twin:
                assert list(twin) == [point(i, layout) for i in range(30)]
        assert list(reader) == [point(i, layout) for i in range(30)]


@pytest.mark.parametrize('bucket', ['fakegcs'], indirect=True)
async def test_readers_of_shards_of_a_copy_are_pickled_before_their_first_read(bucket, monkeypatch):
    monkeypatch.setattr('granular.aio.datasets.comparison.LISTED', 0)
    write(bucket / 'ds', range(30), shardlen=10, index=True)
    (bucket / 'ds').copy(bucket / 'copy')
    async with aio.ShardedDatasetReader((bucket / 'copy').aio, granular.decoders) as reader:
        for number, own in enumerate(reader.readers):
            async with pickle.loads(pickle.dumps(own)) as twin:
                assert await twin.get(5) == point(10 * number + 5, 'refs')


@pytest.mark.parametrize('bucket', ['fakegcs'], indirect=True)
@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_all_objects_of_small_datasets_are_listed(bucket, layout, monkeypatch):
    write(bucket / 'ds', range(30), layout, shardlen=10, index=True)
    objects = sum(path.is_file() for path in (bucket / 'ds').rglob('*')) - 1  # without the index
    for most, is_listed in ((objects, True), (objects - 1, False)):
        monkeypatch.setattr('granular.aio.datasets.comparison.LISTED', most)
        with granular.ShardedDatasetReader(bucket / 'ds', granular.decoders) as reader:
            assert indexed_shards_of(reader.aio).unchecked.any() != is_listed


@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_copy_on_a_web_server_is_read_by_its_index(http, layout, caplog):
    """The page of a folder tells the names of its files, but neither sizes nor versions."""
    place = http.place()
    write(http.folder / place.key / 'ds', range(30), layout, shardlen=10, index=True)
    with granular.ShardedDatasetReader(place / 'ds', granular.decoders) as reader:
        assert is_indexed(reader)
        assert list(reader) == [point(i, layout) for i in range(30)]
        assert indexed_shards_of(reader.aio).own == {}
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(
    ('bucket', 'layout', 'most'),
    [('seaweed', 'refs', 1), ('seaweed', 'columns', 1), ('fakegcs', 'refs', 6), ('fakegcs', 'columns', 4)],
    indirect=['bucket'],
)
def test_shards_of_a_copy_are_compared_with_few_requests(bucket, layout, most, monkeypatch):
    """The versions of S3 say that the bytes are the same, by one listing; those of GCS do not."""
    monkeypatch.setattr('granular.aio.datasets.comparison.LISTED', 0)
    write(bucket / 'ds', range(80), layout, shardlen=10, index=True)
    (bucket / 'ds').copy(bucket / 'copy')
    with granular.ShardedDatasetReader(bucket / 'copy', granular.decoders) as reader:
        assert reader[0]['a'] == 0
        _, once = count_requests(lambda: reader.fetch([10], ('a',)))
        _, again = count_requests(lambda: reader.fetch([11], ('a',)))
    assert (once - again, again) == (most, 1)


@pytest.mark.parametrize('place', ['disk', 'listed', 'unlisted'])
@pytest.mark.parametrize(('layout', 'key'), [('refs', 'b'), ('columns', 'c')])
@pytest.mark.parametrize('bucket', ['seaweed'], indirect=True)
def test_shards_of_a_copy_with_the_same_sizes_and_other_limits(
    tmp_path, bucket, layout, key, place, monkeypatch, caplog
):
    """No way to read a shard uses limits or references of the index that are not those of the shard."""
    if place == 'unlisted':
        monkeypatch.setattr('granular.aio.datasets.comparison.LISTED', 0)
    origin = granular.Path(tmp_path / 'ds')
    for number in range(4):
        write_points(origin / f'{number:06}', OLD, layout)
    granular.build_index(origin)
    copy = (granular.Path(tmp_path) if place == 'disk' else bucket) / 'copy'
    origin.copy(copy)
    write_points(copy / '000001', NEW, layout)
    other = [{'b': ['q', 'r'], 'c': b'qr'}, {'b': ['s'], 'c': b's'}]  # with the same limits
    write_points(copy / '000002', other, layout)
    expected = [*OLD, *NEW, *other, *OLD]
    expected = [{name: point[name] for name in ('b', 'c') if layout == 'refs' or name == 'c'} for point in expected]
    reads = {
        'one': lambda reader: [reader[i] for i in range(8)],
        'batch': lambda reader: reader.fetch(range(8)),
        'few': lambda reader: [point for i in range(8) for point in reader.fetch([i])],
        'stream': list,
        'copy': lambda reader: list(reader.copy()),
        'sequence': lambda reader: [
            {**expected[i], key: reader[i, {key: found if found is True else range(len(found))}][key]}
            for i in range(8)
            for found in [reader.available(i)[key]]
        ],
        'pipeline': lambda reader: list(granular.MapDataset.source(reader)),
    }
    for name, call in reads.items():
        with granular.ShardedDatasetReader(copy, granular.decoders) as reader:
            assert is_indexed(reader)
            assert call(reader) == expected, name
            assert list(indexed_shards_of(reader.aio).own) == ([] if name == 'copy' else [1]), name
    with granular.ShardedDatasetReader(copy, granular.decoders) as reader:
        shards, again = reader.aio.readers, reader.aio.readers
        with pytest.raises(ObjectChangedError):
            asyncio.run(shards[1].bags[key].fetch([0, 1]))
        assert [asyncio.run(shard.get(i)) for shard in shards for i in range(2)] == expected
        assert [point for shard in again for point in asyncio.run(shard.fetch(range(2)))] == expected
        assert reader.fetch(range(8)) == expected
    assert all('run `granular index`' in message for message in warnings_of(caplog))


# --- identities


@pytest.mark.parametrize('layout', ['refs', 'columns'])
@pytest.mark.parametrize('root', ['local', 'seaweed'], indirect=True)
def test_identity_does_not_depend_on_how_a_dataset_was_opened(root, layout, tmp_path, monkeypatch):
    for name, option in (('AWS_ACCESS_KEY_ID', 'key'), ('AWS_SECRET_ACCESS_KEY', 'secret')):
        monkeypatch.setenv(name, root.aio.store.options.get(option, ''))  # which are not pickled
    write(root / 'ds', range(30), layout, shardlen=10)
    config = granular.IOConfig(index_cache=str(tmp_path / 'cache'))
    cached = granular.Path.of(root.aio.store.with_config(config), (root / 'ds').aio.key)
    pickled, identities = [], []

    def note(folder, **options):
        with granular.ShardedDatasetReader(folder, granular.decoders, **options) as reader:
            reader.fetch(range(0, 30, 7))
            pickled.append((folder, pickle.dumps(reader)))
            identities.append(asyncio.run(identity_of(reader.aio)))

    ways = [{}, {'cache_index': False}, {'cache_keys': ('a',)}]
    for folder in (root / 'ds', cached, cached):
        for options in ways:
            note(folder, **options)
    granular.build_index(root / 'ds')
    for options in (*ways, {'index': False}):
        note(root / 'ds', **options)
    assert all(identity == identities[0] for identity in identities)
    write(root / 'ds', range(30, 40), layout, shardlen=10)
    for options in ways:
        note(root / 'ds', **options)
    assert all(identity[:3] == identities[0] for identity in identities)
    for number, (_, content) in enumerate(pickled):
        with pickle.loads(content) as reader:
            count = 40 if number >= len(pickled) - len(ways) else 30
            assert list(reader) == [point(i, layout) for i in range(count)]
    rewrite(root / 'ds' / '000001', range(10, 20), layout, text='y')
    for folder, content in pickled:
        if folder is not cached:  # which compares the versions of files when it reads them
            with pytest.raises(ObjectChangedError):
                list(pickle.loads(content))


# --- damage


@pytest.mark.parametrize('damage', ['truncated', 'flipped', 'empty', 'other magic'])
def test_damaged_index_is_ignored(tmp_path, damage, caplog):
    write(tmp_path / 'ds', range(30), shardlen=10, index=True)
    file = tmp_path / 'ds' / '000000' / NAME
    content = bytearray(file.read_bytes())
    match damage:
        case 'truncated':
            content = content[:-100]
        case 'flipped':
            content[40] ^= 1
        case 'empty':
            content = bytearray()
        case 'other magic':
            content[-1] += 1
    file.write_bytes(content)
    assert read(tmp_path / 'ds') == [point(i, 'refs') for i in range(30)]
    (message,) = warnings_of(caplog)
    assert 'ignored' in message and 'run `granular index`' in message
    (problem,) = granular.verify(tmp_path / 'ds').problems
    assert problem.path.endswith(NAME)


def test_damaged_page_is_an_error_when_it_is_read(tmp_path):
    folder = granular.Path(tmp_path / 'ds', config=granular.IOConfig(index_memory=1))
    write(folder, range(30), shardlen=10, index=True)
    file = tmp_path / 'ds' / '000000' / NAME
    content = bytearray(file.read_bytes())
    content[40] ^= 1
    file.write_bytes(content)
    with granular.ShardedDatasetReader(folder, granular.decoders) as reader:
        with pytest.raises(CorruptDatasetError, match=r'checksum.*granular index'):
            reader.fetch(range(30))


@pytest.mark.parametrize('layout', SPECS)
@pytest.mark.parametrize('gone', [False, True])
@pytest.mark.parametrize('copied', [False, True])
def test_pages_of_an_index_that_was_made_anew_leave_unchanged_shards_readable(tmp_path, layout, copied, gone):
    folder = granular.Path(tmp_path / 'ds', config=granular.IOConfig(index_memory=1))
    write(folder, range(30), layout, shardlen=10, index=True)
    if copied:
        (tmp_path / 'ds').rename(tmp_path / 'origin')
        shutil.copytree(tmp_path / 'origin', tmp_path / 'ds')
    expected = [point(i, layout) for i in range(30)]
    with granular.ShardedDatasetReader(folder, granular.decoders) as reader, reader.copy() as other:
        assert list(reader) == expected
        assert other.fetch([10]) == expected[10:11]
        if gone:
            (tmp_path / 'ds' / '000000' / NAME).unlink()
        else:
            granular.build_index(folder)
        assert reader.fetch(range(30)) == list(reader) == list(other) == expected


@pytest.mark.parametrize('layout', SPECS)
def test_pickled_readers_of_an_index_that_lacks_shards_read_all(tmp_path, layout):
    write(tmp_path / 'ds', range(20), layout, shardlen=10, index=True)
    write(tmp_path / 'ds', range(20, 30), layout, shardlen=10)
    with HTTPServer(tmp_path) as server:
        with granular.ShardedDatasetReader(f'{server.endpoint}/ds', granular.decoders) as reader:
            assert reader[29] == point(29, layout)
            with pickle.loads(pickle.dumps(reader)) as copied:
                assert list(copied) == [point(i, layout) for i in range(30)]


def test_verify_compares_the_index_with_the_shards(tmp_path):
    write(tmp_path / 'ds', range(30), shardlen=10, index=True)
    assert granular.verify(tmp_path / 'ds').problems == []
    rewrite(granular.Path(tmp_path / 'ds' / '000001'), range(10, 20), text='other')
    write(tmp_path / 'ds', range(30, 33), shardlen=10)
    problems = granular.verify(tmp_path / 'ds').problems
    assert ['3 shards' in problems[0].message, '000001' in problems[1].message] == [True, True]
    assert all('granular index' in problem.message for problem in problems)
    assert re.search(r'had \d+ bytes when it was indexed, and has \d+ now', problems[1].message)


@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_verify_finds_no_problem_in_a_copy(tmp_path, layout):
    write(tmp_path / 'ds', range(30), layout, shardlen=10, index=True)
    granular.Path(tmp_path / 'ds').copy(granular.Path(tmp_path / 'copy'))
    assert granular.verify(tmp_path / 'copy').problems == []


# --- writers, arguments, the command line


def test_invalid_arguments_are_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match='build_index'):
        granular.ShardedDatasetWriter(tmp_path / 'ds', REFS, granular.encoders, 10, 1, 2, index=True)
    with pytest.raises(NotFoundError):
        granular.build_index(tmp_path)
    with granular.DatasetWriter(tmp_path / 'one', REFS, granular.encoders) as writer:
        writer.append(point(1, 'refs'))
    with pytest.raises(InvalidArgumentError, match='without shards'):
        granular.build_index(tmp_path / 'one')


def test_failed_build_leaves_the_earlier_index(tmp_path):
    write(tmp_path / 'ds', range(30), shardlen=10, index=True)
    before = (tmp_path / 'ds' / '000000' / NAME).read_bytes()
    shutil.rmtree(tmp_path / 'ds' / '000002')
    with granular.DatasetWriter(tmp_path / 'ds' / '000002', {'z': 'int'}, granular.encoders) as writer:
        writer.append({'z': 1})
    with pytest.raises(CorruptDatasetError, match='000002'):
        granular.build_index(tmp_path / 'ds')
    assert (tmp_path / 'ds' / '000000' / NAME).read_bytes() == before
    assert [path.name for path in (tmp_path / 'ds' / '000000').iterdir() if path.name.endswith('.part')] == []


def test_shard_that_is_removed_during_a_build_is_an_error(tmp_path, monkeypatch):
    write(tmp_path / 'ds', range(30), shardlen=10)

    async def listed_before(root):
        shutil.rmtree(tmp_path / 'ds' / '000001')
        return [0, 1, 2]

    monkeypatch.setattr('granular.aio.datasets.build_index.shards_in', listed_before)
    with pytest.raises(NotFoundError, match='000001.*no such file or folder'):
        granular.build_index(tmp_path / 'ds')
    assert not (tmp_path / 'ds' / '000000' / NAME).exists()


def test_leftover_of_a_killed_build_is_cleaned(tmp_path):
    write(tmp_path / 'ds', range(30), shardlen=10, index=True)
    leftover = tmp_path / 'ds' / '000000' / f'.{NAME}.01234567.part'
    leftover.write_bytes(b'x')
    (found,) = granular.clean(tmp_path / 'ds', remove=True, older=0)
    assert (found.path, found.kind) == (str(leftover), 'draft')
    assert (tmp_path / 'ds' / '000000' / NAME).exists()


def test_shard_with_an_index_is_rewritten(tmp_path):
    write(tmp_path / 'ds', range(30), shardlen=30, index=True)
    (tmp_path / 'ds' / '000000' / 'spec.json').unlink()
    write(tmp_path / 'ds', range(5), shardlen=30, resume='discard')
    assert len(read(tmp_path / 'ds')) == 5


def test_empty_shards_have_an_index(tmp_path):
    for layout, spec in SPECS.items():
        for number in range(2):
            granular.DatasetWriter(tmp_path / layout / f'{number:06}', spec, granular.encoders, layout=layout).close()
        granular.build_index(tmp_path / layout)
        assert read(tmp_path / layout) == []


def test_command_line_builds_an_index(tmp_path, capsys, monkeypatch):
    from granular import cli

    write(tmp_path / 'ds', range(30), shardlen=10)
    monkeypatch.setattr('sys.argv', ['granular', 'index', str(tmp_path / 'ds'), '--json'])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)['datapoints'] == 30
    assert read(tmp_path / 'ds') == [point(i, 'refs') for i in range(30)]


async def test_progress_counts_shards_off_the_event_loop(tmp_path):
    calls, threads = [], set()

    def progress(count):
        calls.append(count)
        threads.add(threading.get_ident())

    def total():
        count = sum(calls)
        calls.clear()
        return count

    await asyncio.to_thread(write, tmp_path / 'ds', range(50), shardlen=1)
    await aio.build_index(tmp_path / 'ds', progress)
    assert total() == 50
    report = await aio.verify(tmp_path / 'ds', progress)
    assert total() == report.bytes > 0
    await aio.convert(list(range(30)), tmp_path / 'converted', shardlen=10, progress=progress)
    assert total() == 30
    assert threading.get_ident() not in threads


@pytest.mark.parametrize('version', ['0.21.1', '0.24.2'])
def test_published_releases_ignore_the_index(tmp_path, version):
    layout = 'refs' if version == '0.21.1' else 'columns'
    write(tmp_path / 'ds', range(30), layout, shardlen=10, index=True)
    with Oracle.granular(version) as oracle:
        found = oracle.run(
            'r = granular.ShardedDatasetReader(sys.argv[1], granular.decoders)\n'
            'print(json.dumps([len(r), r.shards, [int(r[i]["a"]) for i in range(len(r))]]))',
            str(tmp_path / 'ds'),
        )
    assert found == [30, 3, list(range(30))]

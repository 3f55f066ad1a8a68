"""The contract of data sources over files: each format of ``tests/support/files.py`` keeps it in every store."""

import asyncio
import email.utils
import os
import pickle
import types
import uuid

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import granular
from granular import aio
from granular.errors import (
    ClosedError,
    GranularError,
    InvalidArgumentError,
    NotFoundError,
    ObjectChangedError,
    OutOfRangeError,
)
from tests.datasources.conftest import STORES
from tests.support.faults import FaultServer
from tests.support.files import DECLARED, FORMATS, format_of, record_in
from tests.support.requests import requests, steady
from tests.support.servers import KEY, SECRET
from tests.support.tables import cover, examples

SIZES = (40, 0, 1, 79)  # records of each file
RECORDS = [bytes([i % 256, i // 256]) * (i * 37 % 300) for i in range(sum(SIZES))]

each_format = pytest.mark.parametrize('suffix', FORMATS)


def source_of(suffix, paths, api=granular):
    return FORMATS[suffix].opener(api)(paths)


def stream_of(suffix, paths):
    return FORMATS[suffix].stream(paths)


def openers(suffix):
    """The functions that open files of a format: of the source, and of the stream if there is one."""
    yield lambda paths: source_of(suffix, paths).close()
    if FORMATS[suffix].stream:
        yield lambda paths: list(stream_of(suffix, paths))


def records_in(datapoints):
    if isinstance(datapoints, dict):  # the datapoints of a slice, by key
        key = 'tokens' if 'tokens' in datapoints else 'n'
        return [record_in({key: value}) for value in datapoints[key]]
    return [record_in(datapoint) for datapoint in datapoints]


def write(path, suffix, records=RECORDS):
    FORMATS[suffix].write(path, records)
    return path


def files_of(path, suffix):
    """Return the files of a source of one path: the path, and for some formats another one."""
    return [path.with_name(name) for name in FORMATS[suffix].files(path.name, [])]


def write_all(folder, suffix):
    """Write the records to files of these sizes, and return the files."""
    stops = np.cumsum(SIZES).tolist()
    return [
        write(folder / f'{i}.{suffix}', suffix, RECORDS[stop - size : stop])
        for i, (size, stop) in enumerate(zip(SIZES, stops, strict=True))
    ]


@pytest.fixture(scope='module')
def several(tmp_path_factory):
    """The files of each format, on the disk."""
    folder = granular.Path(tmp_path_factory.mktemp('several'))
    return {suffix: write_all(folder, suffix) for suffix in FORMATS}


def test_every_format_that_is_opened_is_tested():
    assert set(map(format_of, FORMATS)) == DECLARED


# --- reading


@pytest.mark.parametrize(('stored', 'suffix'), cover([['local'], STORES], [list(FORMATS)]), indirect=['stored'])
def test_records_are_read_by_any_index(stored, suffix):
    folder = stored(lambda folder: write_all(folder, suffix))
    paths = [folder / f'{i}.{suffix}' for i in range(len(SIZES))]
    order = np.random.default_rng(0).permutation(len(RECORDS))
    with source_of(suffix, paths) as source:
        assert len(source) == len(RECORDS)
        assert [record_in(source[i]) for i in (0, 40, -1)] == [RECORDS[i] for i in (0, 40, -1)]
        for part in (slice(38, 43), slice(-3, None), slice(100, 10, -7), slice(5, 5)):
            assert records_in(source[part]) == records_in(source.get(part)) == RECORDS[part]
            assert records_in(source.fetch(part)) == RECORDS[part]
        assert records_in(source.fetch(order)) == [RECORDS[i] for i in order]
        assert records_in(source.fetch(range(30, 50))) == RECORDS[30:50]
        for fetch in (source.fetch, source.__getitems__, source._getitems):
            assert records_in(fetch([119, 0, 41, 41, -2])) == [RECORDS[i] for i in (119, 0, 41, 41, 118)]
        assert source.fetch([]) == source.fetch(np.zeros(0, np.int64)) == []
        assert records_in(source) == RECORDS
        assert records_in(source.take(2)) == RECORDS[:2]
        for ask in (lambda: source[120], lambda: source[-121], lambda: source.fetch([3, 120])):
            with pytest.raises(OutOfRangeError, match=rf'0\.{suffix}.*120'):
                ask()
    with granular.open(paths[0]) as source:
        assert type(source) is getattr(granular, FORMATS[suffix].source, type(source))
        assert records_in(source) == RECORDS[:40]


@each_format
@settings(max_examples=examples(40))
@given(indices=st.lists(st.integers(-len(RECORDS), len(RECORDS) - 1), max_size=40))
def test_any_indices_are_fetched(several, suffix, indices):
    with source_of(suffix, several[suffix]) as source:
        assert records_in(source.fetch(indices)) == [RECORDS[i] for i in indices]


@each_format
def test_batch_takes_few_requests(fakegcs, suffix):
    folder = steady(fakegcs)
    paths = write_all(folder, suffix)
    source, count, _ = requests(lambda: source_of(suffix, paths))
    assert count <= 3 * len(paths)
    order = np.random.default_rng(0).permutation(len(RECORDS))
    result, count, _ = requests(lambda: source.fetch(order))
    assert records_in(result) == [RECORDS[i] for i in order]
    assert count <= 4  # one for each file with records, and for the second row group of Parquet


@each_format
def test_files_of_several_stores_are_one_source(several, bucket, suffix):
    paths = several[suffix]
    copied = [file.copy(bucket / file.name) for file in files_of(paths[3], suffix)]
    with source_of(suffix, [*paths[:3], copied[0]]) as source:
        assert records_in(source.fetch([119, 0, 40])) == [RECORDS[i] for i in (119, 0, 40)]


@each_format
def test_files_without_records(root, suffix):
    paths = [write(root / f'{i}.{suffix}', suffix, records) for i, records in enumerate([[], [], [b'one']])]
    with source_of(suffix, paths[:2]) as source:
        assert len(source) == 0
        assert list(source) == source.fetch([]) == source.take(1) == []
        with pytest.raises(OutOfRangeError):
            source[0]
    with source_of(suffix, paths) as source:
        assert records_in(source) == records_in([source[-1]]) == [b'one']
    if FORMATS[suffix].stream:
        assert list(stream_of(suffix, paths[:2])) == []
        assert records_in(stream_of(suffix, paths)) == [b'one']


@each_format
async def test_async_api(several, suffix):
    async with source_of(suffix, several[suffix], aio) as source:
        assert len(source) == len(RECORDS)
        assert record_in(await source.get(-1)) == RECORDS[-1]
        assert records_in(await source.get(slice(3, 9))) == RECORDS[3:9]
        assert records_in([datapoint async for datapoint in source]) == RECORDS
        batches = await asyncio.gather(*(source.fetch([i, 119 - i]) for i in range(20)))
        assert [records_in(batch) for batch in batches] == [[RECORDS[i], RECORDS[119 - i]] for i in range(20)]
        assert record_in(await pickle.loads(pickle.dumps(source)).get(7)) == RECORDS[7]
    with pytest.raises(ClosedError):
        await source.get(0)
    opener = FORMATS[suffix].opener(aio)
    source = await getattr(opener, 'open', opener)(several[suffix][0])
    assert records_in(await source.fetch([0, 39])) == [RECORDS[0], RECORDS[39]]
    if FORMATS[suffix].stream:
        stream = stream_of(suffix, several[suffix][:1])
        assert records_in([datapoint async for datapoint in stream]) == RECORDS[:40]


# --- files that are replaced, missing or damaged


@pytest.mark.parametrize('suffix', ['tfrecord', 'tar'])  # others are indexed by a footer
def test_index_is_cached(bucket, suffix, tmp_path, caplog):
    config = granular.IOConfig(hedge=0, index_cache=str(tmp_path / 'cache'))
    path = granular.Path(f'{bucket / "x"}', config=config, **bucket.aio.store.options)
    first = list(source_of(suffix, write(path, suffix, RECORDS[:50])))
    source, count, size = requests(lambda: source_of(suffix, path))
    assert size < 2000 and count <= 1
    assert list(source) == first and records_in(first) == RECORDS[:50]
    write(path, suffix, RECORDS[:60])
    assert len(source_of(suffix, path)) == 60
    (index_file,) = (tmp_path / 'cache').iterdir()
    index_file.write_bytes(index_file.read_bytes()[:-8])
    assert records_in(source_of(suffix, path)) == RECORDS[:60]
    assert 'ignored' in caplog.text


@pytest.mark.parametrize('suffix', ['tfrecord', 'tar'])
def test_index_of_a_file_with_a_weak_etag_is_not_cached(tmp_path, suffix):
    config = granular.IOConfig(hedge=0, index_cache=str(tmp_path / 'cache'))
    with FaultServer(files={}) as server:
        server.etag = 'W/"one"'
        for lengths in ([1000, 3000], [3000, 1000]):  # in files of the same size
            records = [bytes([length // 1000]) * length for length in lengths]
            written = write(granular.Path(tmp_path / f'x.{suffix}'), suffix, records)
            server.files['x'] = written.read_bytes()
            source = source_of(suffix, granular.Path(f'{server.endpoint}/bucket/x', config=config))
            assert records_in(source) == records


@each_format
def test_replaced_file_is_an_error(root, suffix):
    path = write(root / f'x.{suffix}', suffix)
    source = source_of(suffix, path)
    if root.aio.store.local:
        for file in files_of(path, suffix):
            granular.aio.stores.local.files.files.forget(file.aio.key)  # open files remain readable
    write(path, suffix, RECORDS[::-1])
    for read in (lambda: source[3], lambda: source.fetch([3, 100]), lambda: list(source)):
        with pytest.raises(ObjectChangedError, match=rf'{files_of(path, suffix)[-1].name}.*replaced'):
            read()
    assert record_in(source_of(suffix, path)[0]) == RECORDS[-1]


@pytest.mark.parametrize('suffix', ['tfrecord', 'tar'])  # others are opened by one read of their ends
def test_file_that_shrinks_while_it_is_opened_was_replaced(tmp_path, suffix, monkeypatch):
    path = write(granular.Path(tmp_path / f'x.{suffix}'), suffix)
    store = type(path.aio.store)
    stat = store.stat

    async def stat_and_shrink(self, key):
        found = await stat(self, key)
        os.truncate(tmp_path / path.name, 5)
        return found

    for opener in openers(suffix):
        write(path, suffix)
        with monkeypatch.context() as patch:
            patch.setattr(store, 'stat', stat_and_shrink)
            with pytest.raises(ObjectChangedError, match='has 5: it was replaced during the read'):
                opener(path)


@each_format
def test_missing_and_invalid_files_are_errors(root, several, suffix):
    (root / 'folder').mkdir(parents=True)
    (root / 'folder' / 'x').write_bytes(b'')
    for opener in openers(suffix):
        with pytest.raises(NotFoundError, match='none'):
            opener(root / 'none')
        with pytest.raises(NotFoundError, match='none'):
            opener([*several[suffix], root / 'none'])
        with pytest.raises(GranularError, match='folder'):
            opener(root / 'folder')
        for wrong in ([], None, 3, set(several[suffix])):
            with pytest.raises(InvalidArgumentError):
                opener(wrong)


@each_format
@settings(max_examples=examples(100))
@given(data=st.data())
def test_damaged_files_give_records_or_errors(several, tmp_path, suffix, data):
    path = granular.Path(tmp_path / 'damaged')
    for file, target in zip(files_of(several[suffix][3], suffix), files_of(path, suffix), strict=True):
        content = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(0, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        target.write_bytes(bytes(content[: data.draw(st.just(len(content)) | st.integers(0, len(content)))]))
    for read in (
        lambda: list(source_of(suffix, path)),
        *(lambda opener=opener: opener(path) for opener in openers(suffix)),
    ):
        try:
            read()
        except GranularError as error:
            assert 'damaged' in str(error)
            assert not isinstance(error, OutOfRangeError)


# --- copies, processes and pipelines


@each_format
def test_closed_source_is_an_error(several, suffix):
    with source_of(suffix, several[suffix]) as source:
        copy = pickle.loads(pickle.dumps(source))
    assert source.closed
    source.close()
    for read in (lambda: source[0], lambda: source.fetch([0]), lambda: len(source), lambda: list(source)):
        with pytest.raises(ClosedError):
            read()
    with copy:
        assert record_in(copy[1]) == RECORDS[1]


@each_format
def test_source_pickles_without_credentials(seaweed, suffix, monkeypatch):
    paths = write_all(seaweed.place(), suffix)
    source = source_of(suffix, paths)
    data = pickle.dumps(source)
    assert SECRET.encode() not in data
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', KEY)
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', SECRET)
    again = pickle.loads(data)
    assert records_in(again.fetch([17, 119])) == [RECORDS[17], RECORDS[119]]
    assert repr(again) == repr(source) == repr(source.aio) == repr(source_of(suffix, paths))
    assert repr(source) != repr(source_of(suffix, paths[0]))


@each_format
def test_source_feeds_pipelines(several, suffix):
    source = source_of(suffix, several[suffix])
    indices = granular.MapDataset.source(range(len(RECORDS))).shuffle(seed=1).batch(32)
    expected = [[len(RECORDS[i]) for i in batch] for batch in indices]
    chain = granular.MapDataset.source(source).shuffle(seed=1).map(size_of).batch(32)
    assert [batch.tolist() for batch in chain] == expected
    with iter(chain.to_iter_dataset()) as iterator:
        next(iterator)
        state = iterator.get_state()
    again = granular.MapDataset.source(pickle.loads(pickle.dumps(source))).shuffle(seed=1).map(size_of).batch(32)
    with iter(again.to_iter_dataset()) as iterator:
        iterator.set_state(state)
        assert [batch.tolist() for batch in iterator] == expected[1:]
    epochs = granular.sources.Transform(granular.sources.Epochs(source, seed=3), sizes_of)
    with granular.Loader(epochs, 40) as loader:
        assert sorted(int(size) for _ in range(3) for size in next(loader)['size']) == sorted(map(len, RECORDS))


def size_of(datapoint):
    return len(record_in(datapoint))


def sizes_of(datapoint, seed):
    return {'size': np.int64(size_of(datapoint))}


@each_format
def test_source_and_stream_work_in_worker_processes(several, suffix):
    streams = [granular.MapDataset.source(source_of(suffix, several[suffix])).to_iter_dataset()]
    if FORMATS[suffix].stream:
        streams.append(stream_of(suffix, several[suffix]))
    for stream in streams:
        with iter(stream.map(size_of).mp_prefetch(1)) as iterator:
            assert sorted(iterator) == sorted(map(len, RECORDS))


# --- files that are replaced by others of the same size

VERSIONS = [[b'%d record %d' % (version, i) for i in range(9)] for version in (1, 2)]
OPENED = [(suffix, False) for suffix in FORMATS] + [
    ('array_record', True)
]  # True for records of a file that opens late


def open_part(path, suffix, late):
    part = types.SimpleNamespace(filename=path, skip=0, take=9, examples_in_shard=9)
    return source_of(suffix, [part] if late else path)


def read(source, indices):
    """Read records of a source or a cache of either API, and close it."""

    async def fetch():
        async with source:
            return await source.fetch(indices)

    if hasattr(source, '__aenter__'):
        return asyncio.run(fetch())
    with source:
        return source.fetch(indices)


@pytest.mark.parametrize('root', ['local', 'fakegcs'], indirect=True)
@pytest.mark.parametrize(('suffix', 'late'), OPENED)
def test_pickled_source_opens_its_files_or_fails(root, suffix, late):
    path = write(root / f'x.{suffix}', suffix, VERSIONS[0])
    with open_part(path, suffix, late) as source, granular.SharedMemoryCache(source, max_bytes=1 << 20) as cache:
        assert record_in(cache[0]) == VERSIONS[0][0]
        unopened = pickle.loads(pickle.dumps(source.aio))  # opened by its first read
        with pickle.loads(pickle.dumps(source)) as unread:
            len(unread)
            copies = [pickle.dumps(each) for each in (source, cache, unopened, unread)]
        for data in copies:
            assert records_in(read(pickle.loads(data), range(5))) == VERSIONS[0][:5]
        for file in files_of(path, suffix):
            file.unlink()
        write(path, suffix, VERSIONS[1])
        for data in copies:
            with pytest.raises(ObjectChangedError, match='was replaced since the reader was pickled'):
                read(pickle.loads(data), range(9))
        again = pickle.loads(copies[2])
        for _ in range(2):  # another try does not read the other file either
            with pytest.raises(ObjectChangedError, match='was replaced since the reader was pickled'):
                asyncio.run(again.fetch(range(9)))


@pytest.mark.parametrize('root', ['local', 'fakegcs'], indirect=True)
@pytest.mark.parametrize(('suffix', 'late'), OPENED)
def test_caches_of_a_source_do_not_return_records_of_replaced_files(root, suffix, late, redis_server):
    space, path = f'test-{uuid.uuid4().hex[:8]}', root / f'x.{suffix}'
    name = {'max_bytes': 1 << 20, 'name': space}
    for records in VERSIONS:
        for file in files_of(path, suffix):
            file.unlink(missing_ok=True)
        write(path, suffix, records)
        with open_part(path, suffix, late) as source:
            stages = granular.MapDataset.source(source).slice(slice(0, 5))
            with granular.SharedMemoryCache(source, max_bytes=1 << 20) as inner:
                for cached in (source, stages, inner):
                    with granular.RedisCache(cached, redis_server.url, namespace=space) as cache:
                        assert records_in(cache.fetch(range(5))) == records[:5]
            if records == VERSIONS[0]:
                kept = granular.SharedMemoryCache(source, **name)
            else:
                with pytest.raises(InvalidArgumentError, match='another source'):
                    granular.SharedMemoryCache(source, **name)
    kept.close()


@pytest.mark.parametrize('modified', [None, email.utils.formatdate(0, usegmt=True)])
@pytest.mark.parametrize(('suffix', 'late'), OPENED)
def test_files_without_versions_are_cached_beyond_processes_by_a_fingerprint_only(
    modified, suffix, late, tmp_path, redis_server
):
    space = f'test-{uuid.uuid4().hex[:8]}'
    with FaultServer(files=FORMATS[suffix].files(f'x.{suffix}', VERSIONS[0])) as server:
        server.etag, server.modified = None, {'': modified}
        with open_part(granular.Path(f'{server.endpoint}/b/x.{suffix}'), suffix, late) as source:
            with pytest.raises(InvalidArgumentError, match='gives files no versions.*: pass fingerprint='):
                granular.RedisCache(source, redis_server.url, namespace=space)[0]
            with granular.RedisCache(source, redis_server.url, namespace=space, fingerprint='v1') as cache:
                assert record_in(cache[0]) == VERSIONS[0][0]
            with granular.SharedMemoryCache(source, max_bytes=1 << 20, name=space) as cache:
                assert record_in(cache[0]) == VERSIONS[0][0]

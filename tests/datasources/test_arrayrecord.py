"""ArrayRecord files, on a disk and in buckets, give the records that the package gives."""

import dataclasses
import pathlib
import pickle

import numpy as np
import pytest
from array_record.python.array_record_data_source import ArrayRecordDataSource as ReferenceDataSource
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import granular
from granular import aio
from granular.errors import (
    ClosedError,
    InvalidArgumentError,
    NotFoundError,
    ObjectChangedError,
    OutOfRangeError,
)
from tests.support.servers import KEY, SECRET
from tests.support.tables import examples

OPTIONS = (
    '',
    'group_size:1,uncompressed',
    'group_size:1,brotli:1',
    'group_size:1,pad_to_block_boundary:true',
    'group_size:7,zstd:9',
    'group_size:64,uncompressed',
    'group_size:100',
    'group_size:100,brotli',
    'group_size:65536',
)
quick = settings(max_examples=examples(50), suppress_health_check=list(HealthCheck))


@dataclasses.dataclass
class FileInstruction:
    """A path as that of TensorFlow Datasets."""

    filename: str
    skip: int
    take: int
    examples_in_shard: int


def make(count, seed=0):
    """Create records of many sizes: empty, interrupted by 64 KiB blocks, and compressible."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 300, count)
    sizes[:: max(1, count // 3)] = 150_000
    return [b'' if i % 11 == 5 else rng.bytes(n) if i % 2 else b'%d,' % i * (n // 3) for i, n in enumerate(sizes)]


def write(path, records, options='group_size:1'):
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return path


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Three files: 250 records, not compressed; 130 in groups of 20 by zstd; 70 in groups of 9 by brotli."""
    folder = tmp_path_factory.mktemp('arrayrecord')
    write(folder / 'a.array_record', make(250, 1), 'group_size:1,uncompressed')
    write(folder / 'b.array_record', make(130, 2), 'group_size:20')
    write(folder / 'c.array_record', make(70, 3), 'group_size:9,brotli')
    return folder


def names(folder):
    return [f'{folder}/{name}.array_record' for name in 'abc']


ALL = make(250, 1) + make(130, 2) + make(70, 3)


# --- reading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('options', OPTIONS)
def test_records_equal_those_of_the_package(tmp_path, options):
    records = make(250)
    path = write(tmp_path / 'x.array_record', records, options)
    reference = ReferenceDataSource(str(path))
    with granular.ArrayRecordDataSource(path) as actual:
        assert len(actual) == len(reference) == 250
        order = np.random.default_rng(1).permutation(250)
        assert actual.fetch(order) == reference.__getitems__(order.tolist()) == [records[i] for i in order]
        assert actual[3] == reference[3] == records[3]
        assert actual[-1] == records[-1]
        assert actual[10:200:7] == records[10:200:7]
        assert list(actual) == records


@given(
    sizes=st.lists(st.integers(0, 300) | st.integers(65_300, 65_600) | st.just(131_000), max_size=20),
    group=st.integers(1, 9),
    compression=st.sampled_from(['uncompressed', 'zstd', 'brotli:1']),
)
@settings(quick, max_examples=examples(60))
def test_records_across_block_boundaries(tmp_path_factory, sizes, group, compression):
    rng = np.random.default_rng(0)
    records = [rng.bytes(size) for size in sizes]
    path = tmp_path_factory.getbasetemp() / 'blocks.array_record'
    write(path, records, f'group_size:{group},{compression}')
    assert granular.ArrayRecordDataSource(path).fetch(range(len(sizes))) == records


@pytest.mark.parametrize('count', [0, 1])
def test_small_files_are_read(tmp_path, count):
    path = write(tmp_path / 'x', [b'one'] * count)
    source = granular.ArrayRecordDataSource(str(path))
    assert len(source) == len(ReferenceDataSource(str(path))) == count
    assert list(source) == source.fetch(range(count)) == [b'one'] * count
    assert source.fetch([]) == []


def test_many_chunks_are_read(tmp_path):
    # The footer is longer than the first request.
    path = write(tmp_path / 'x', [b'%d' % i for i in range(30000)], 'group_size:1,uncompressed')
    source = granular.ArrayRecordDataSource(path)
    assert source.fetch([29999, 0, 12345]) == [b'29999', b'0', b'12345']


def test_parts_of_files_are_read(folder):
    a, b, c = names(folder)
    paths = [
        FileInstruction(b, 5, 60, 130),
        f'{a}[240:250]',
        pathlib.Path(c),
        f'{b}[0:0]',
        FileInstruction(a, 0, 3, 250),
    ]
    reference, actual = ReferenceDataSource(paths), granular.ArrayRecordDataSource(paths)
    assert len(actual) == len(reference) == 60 + 10 + 70 + 3
    assert actual.fetch(range(len(actual))) == reference.__getitems__(range(len(reference)))
    assert actual[64] == reference[64]
    rest = granular.ArrayRecordDataSource([FileInstruction(b, 100, -1, 130)])
    assert rest.fetch(range(30)) == make(130, 2)[100:]
    assert granular.ArrayRecordDataSource(granular.Path(f'{c}[2:4]')).fetch([0, 1]) == make(70, 3)[2:4]


def test_files_are_opened_lazily(tmp_path):
    source = granular.ArrayRecordDataSource([f'{tmp_path}/no[2:5]', FileInstruction(f'{tmp_path}/none', 0, 4, 4)])
    assert len(source) == 7
    with pytest.raises(NotFoundError):
        source.fetch([0])
    write(tmp_path / 'no', [b'0', b'1', b'2'])
    with pytest.raises(OutOfRangeError, match=r'no: expected records up to 5, got 3'):
        source[0]


@given(indices=st.lists(st.integers(-450, 449), max_size=90), data=st.data())
@quick
def test_any_indices_are_fetched(folder, indices, data):
    source = granular.ArrayRecordDataSource(names(folder))
    assert (
        source.fetch(indices) == source.__getitems__(indices) == source._getitems(indices) == [ALL[i] for i in indices]
    )
    start, stop = sorted(data.draw(st.tuples(st.integers(0, 449), st.integers(0, 449))))
    assert source[start:stop] == ALL[start:stop]
    if indices:
        assert source[indices[0]] == source.get(indices[0]) == ALL[indices[0]]


def test_invalid_arguments_are_errors(folder):
    a = names(folder)[0]
    source = granular.ArrayRecordDataSource(a)
    for ask in (lambda: source[250], lambda: source[-251], lambda: source.fetch([3, 250])):
        with pytest.raises(OutOfRangeError, match='250'):
            ask()
    wrong = [FileInstruction(a, *numbers) for numbers in ((240, 20, 250), (-1, 2, 250), ('x', 2, 3))]
    for paths in ([], f'{a}[5:2]', None, *wrong):
        with pytest.raises(InvalidArgumentError):
            granular.ArrayRecordDataSource(paths)
    with pytest.raises(NotFoundError):
        granular.ArrayRecordDataSource(f'{a}.none')
    source.close()
    with pytest.raises(ClosedError):
        source[0]


async def test_async_api(folder):
    async with aio.ArrayRecordDataSource(names(folder)) as source:
        assert len(source) == 450
        assert await source.get(-1) == ALL[-1]
        assert await source.get(slice(3, 9)) == ALL[3:9]
        assert await source.fetch([400, 1]) == [ALL[400], ALL[1]]
        assert [record async for record in source] == ALL
    with pytest.raises(ClosedError):
        await source.get(0)
    source = await aio.ArrayRecordDataSource.open(names(folder)[0])
    assert await source.get(0) == ALL[0]


# --- buckets --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=['seaweed', 'fakegcs'])
def copied(request, folder):
    """The three files in a bucket."""
    data_root = request.getfixturevalue(request.param).place()
    paths = [data_root / pathlib.Path(name).name for name in names(folder)]
    for path, name in zip(paths, names(folder), strict=True):
        path.write_bytes(pathlib.Path(name).read_bytes())
    return paths


def test_files_in_buckets_are_read_with_few_requests(copied, monkeypatch):
    source = granular.ArrayRecordDataSource(copied)
    assert list(source) == ALL
    order = np.random.default_rng(0).permutation(450)
    assert source.fetch(order) == [ALL[i] for i in order]
    before = granular.io_stats()['requests']
    assert source.fetch([300, 1, 301, 2, 440]) == [ALL[i] for i in (300, 1, 301, 2, 440)]
    assert granular.io_stats()['requests'] - before <= 4  # one per file, and distant ranges
    data = pickle.dumps(source)
    assert SECRET.encode() not in data
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', KEY)
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', SECRET)
    again = pickle.loads(data)
    assert repr(again) == repr(source)
    assert again[17] == ALL[17]


def test_replaced_file_is_an_error(copied):
    source = granular.ArrayRecordDataSource(copied[0])
    data = copied[0].read_bytes()
    copied[0].write_bytes(data[:200] + b'?' + data[201:])
    with pytest.raises(ObjectChangedError):
        source[0]


def test_files_of_several_stores(copied, folder):
    source = granular.ArrayRecordDataSource([names(folder)[0], *copied[1:]])
    assert source.fetch([449, 0, 300]) == [ALL[449], ALL[0], ALL[300]]


# --- in pipelines ---------------------------------------------------------------------------------------------------


def test_source_pickles(folder):
    source = granular.ArrayRecordDataSource(names(folder))
    before = granular.io_stats()['requests']
    data = pickle.dumps(source)
    again = pickle.loads(data)
    assert len(again) == 450
    assert granular.io_stats()['requests'] == before  # files are opened by the first read
    assert len(data) < 2000
    assert again.fetch([449, 3]) == [ALL[449], ALL[3]]
    assert repr(again) == repr(source) == repr(granular.ArrayRecordDataSource(names(folder)))
    assert repr(source) == repr(aio.ArrayRecordDataSource(names(folder)))
    assert repr(source) != repr(granular.ArrayRecordDataSource(names(folder)[::-1]))
    assert repr(source) != repr(granular.ArrayRecordDataSource([*names(folder)[:2], names(folder)[2] + '[0:70]']))


def test_source_feeds_pipelines(folder):
    source = granular.ArrayRecordDataSource(names(folder))
    chain = granular.MapDataset.source(source).seed(1).shuffle().map(len).batch(32)
    order = granular.MapDataset.source(range(450)).seed(1).shuffle().batch(32)
    assert [batch.tolist() for batch in chain] == [[len(ALL[i]) for i in batch] for batch in order]
    iterator = iter(chain.to_iter_dataset())
    next(iterator)
    state = iterator.get_state()
    then = next(iterator).tolist()
    iterator.close()
    again = granular.MapDataset.source(pickle.loads(pickle.dumps(source))).seed(1).shuffle().map(len).batch(32)
    iterator = iter(again.to_iter_dataset())
    iterator.set_state(state)
    assert next(iterator).tolist() == then
    iterator.close()

    epochs = granular.sources.Transform(granular.sources.Epochs(source, seed=3), length)
    with granular.Loader(epochs, 50) as loader:
        seen = [int(n) for _ in range(9) for n in next(loader)['length']]
    assert sorted(seen) == sorted(map(len, ALL))


def length(record, seed):
    return {'length': np.int64(len(record))}


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_source_feeds_grain(folder):
    import grain

    source = granular.ArrayRecordDataSource(names(folder))
    actual = grain.MapDataset.source(source).shuffle(seed=4).map(len).batch(16)
    reference = grain.MapDataset.source(ReferenceDataSource(names(folder))).shuffle(seed=4).map(len).batch(16)
    assert [batch.tolist() for batch in actual] == [batch.tolist() for batch in reference]
    loader = grain.DataLoader(data_source=source, sampler=grain.samplers.SequentialSampler(450))
    assert list(loader) == ALL

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
from granular.errors import (
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
)
from tests.support.requests import requests
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


def test_invalid_parts_are_errors(folder):
    a = names(folder)[0]
    wrong = [FileInstruction(a, *numbers) for numbers in ((240, 20, 250), (-1, 2, 250), ('x', 2, 3))]
    for paths in (f'{a}[5:2]', *wrong):
        with pytest.raises(InvalidArgumentError):
            granular.ArrayRecordDataSource(paths)


# --- in pipelines ---------------------------------------------------------------------------------------------------


def test_unpickled_source_opens_files_at_the_first_read(folder):
    source = granular.ArrayRecordDataSource(names(folder))
    data = pickle.dumps(source)
    assert len(data) < 2000
    again, count, _ = requests(lambda: pickle.loads(data))
    assert (len(again), count) == (450, 0)
    assert again.fetch([449, 3]) == [ALL[449], ALL[3]]
    assert repr(source) != repr(granular.ArrayRecordDataSource(names(folder)[::-1]))
    assert repr(source) != repr(granular.ArrayRecordDataSource([*names(folder)[:2], names(folder)[2] + '[0:70]']))


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_source_feeds_grain(folder):
    import grain

    source = granular.ArrayRecordDataSource(names(folder))
    actual = grain.MapDataset.source(source).shuffle(seed=4).map(len).batch(16)
    reference = grain.MapDataset.source(ReferenceDataSource(names(folder))).shuffle(seed=4).map(len).batch(16)
    assert [batch.tolist() for batch in actual] == [batch.tolist() for batch in reference]
    loader = grain.DataLoader(data_source=source, sampler=grain.samplers.SequentialSampler(450))
    assert list(loader) == ALL

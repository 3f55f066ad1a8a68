"""TokenWindows: the windows of numpy's slices, and requests for their bytes alone."""

import asyncio
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import granular
from granular import MapDataset, ShardOptions, TokenWindows, aio
from granular.errors import (
    ClosedError,
    CorruptDatasetError,
    InvalidArgumentError,
    ObjectChangedError,
    OutOfRangeError,
    UnknownKeyError,
    UnsupportedError,
)
from tests.support.tables import examples

NUMBERS = itertools.count()
LENGTHS = (300, 0, 7, 20_000, 8, 70_000)


def arrays(lengths, dtype=np.int32):
    starts = np.cumsum([0, *lengths])
    return [
        np.arange(start, start + length).astype(dtype) for start, length in zip(starts.tolist(), lengths, strict=False)
    ]


def write(path, tokens, shardlen=0, layout='refs', **options):
    spec = {'tokens': 'array', 'name': 'utf8', 'parts': 'array[]'}
    if layout == 'columns':
        del spec['parts']
    kind = granular.ShardedDatasetWriter if shardlen else granular.DatasetWriter
    args = {'shardlen': shardlen} if shardlen else {}
    with kind(path, spec, granular.encoders, **args, layout=layout, **options) as writer:
        for i, array in enumerate(tokens):
            datapoint = {'tokens': array, 'name': f'document {i}', 'parts': [array]}
            writer.append({key: datapoint[key] for key in spec})


def expected_windows(tokens, length, stride):
    return [array[start : start + length] for array in tokens for start in range(0, len(array) - length + 1, stride)]


@pytest.mark.parametrize(
    ('layout', 'shardlen', 'options'),
    [('refs', 2, {}), ('columns', 0, {'cache_index': False}), ('refs', 0, {'cache_keys': ['tokens', 'refs']})],
    ids=str,
)
def test_windows_are_slices(root, layout, shardlen, options):
    tokens = arrays(LENGTHS, np.uint16)
    write(root / 'ds', tokens, shardlen, layout)
    kind = granular.ShardedDatasetReader if shardlen else granular.DatasetReader
    with kind(root / 'ds', granular.decoders, **options) as reader:
        for length, stride in ((8, None), (100, 30), (1, 5000), (70_000, 1)):
            with TokenWindows(reader, 'tokens', length, stride=stride) as windows:
                expected = expected_windows(tokens, length, stride or length)
                assert len(windows) == len(expected)
                indices = np.random.default_rng(0).integers(-len(expected), len(expected), 50)
                for index, window in zip(indices, windows.fetch(indices), strict=True):
                    assert window.keys() == {'tokens'}
                    assert window['tokens'].dtype == windows.dtype == np.uint16
                    assert (window['tokens'] == expected[index]).all()
                assert (windows[-1]['tokens'] == expected[-1]).all()
                assert len(windows[1:3]) == min(2, max(0, len(expected) - 1))
                assert windows.fetch([]) == []
        assert reader[0]['name'] == 'document 0'  # the reader is still open


@given(
    st.lists(st.one_of(st.integers(0, 40), st.integers(60, 70), st.integers(120, 300)), max_size=8),
    st.integers(1, 30), st.integers(1, 40), st.sampled_from(['u1', '<i2', '>i4', '<f8']),
)  # fmt: skip
@settings(max_examples=examples(40))
def test_all_lengths_and_strides(lengths, length, stride, dtype):
    tokens = arrays(lengths, dtype)
    path = f'memory://windows-{next(NUMBERS)}'
    write(path, tokens)
    with granular.DatasetReader(path, granular.decoders) as reader:
        windows = TokenWindows(reader, 'tokens', length, stride)
        assert [window['tokens'].tolist() for window in windows] == [
            array.tolist() for array in expected_windows(tokens, length, stride)
        ]


def test_a_fetch_requests_the_bytes_of_its_windows_alone(bucket):
    write(bucket / 'ds', arrays((400_000, 400_000)))
    # Requests that are slow, as on a busy machine, are not sent twice.
    calm = granular.Path(f'{bucket}/ds', config=granular.IOConfig(hedge=0), **bucket.store.options)
    with granular.DatasetReader(calm, granular.decoders) as reader:
        windows = TokenWindows(reader, 'tokens', 2048)
        assert len(windows) == 2 * 195

        def cost(indices):
            before = granular.io_stats()
            windows.fetch(indices)
            after = granular.io_stats()
            return after['requests'] - before['requests'], after['bytes'] - before['bytes']

        size = 4 * 2048
        cost([0, 200])  # reads the heads of both arrays
        assert cost([100]) == (1, size)
        assert cost([100, 300]) == (2, 2 * size)
        assert cost([101, 103, 102, 100, 101]) == (1, 4 * size)


def test_order_is_the_same_for_any_number_of_workers_and_hosts(tmp_path):
    write(tmp_path / 'ds', arrays(LENGTHS), 2)
    with granular.ShardedDatasetReader(tmp_path / 'ds', granular.decoders) as reader:
        windows = TokenWindows(reader, 'tokens', 1000)
        dataset = MapDataset.source(windows).shuffle(seed=1)
        expected = [int(window['tokens'][0]) for window in dataset]
        assert sorted(expected) == sorted(int(array[0]) for array in expected_windows(arrays(LENGTHS), 1000, 1000))
        for count in (1, 3):
            hosts = [dataset.to_iter_dataset(shard_options=ShardOptions(i, count)) for i in range(count)]
            for i, host in enumerate(hosts):
                assert [int(window['tokens'][0]) for window in host] == expected[i::count]
        with iter(dataset.to_iter_dataset().mp_prefetch(1)) as iterator:
            assert [int(window['tokens'][0]) for window in iterator] == expected
        with granular.Loader(windows, 8) as loader:
            batch = next(loader)
            assert batch['tokens'].shape == (8, 1000)
        restored = pickle.loads(pickle.dumps(windows))
        assert restored[3]['tokens'].tolist() == windows[3]['tokens'].tolist()
        assert repr(restored) == repr(windows)


@pytest.mark.parametrize('bucket', ['fakegcs'], indirect=True)
def test_shard_that_was_replaced_behind_an_index_is_an_error_with_its_remedy(bucket, monkeypatch):
    monkeypatch.setattr('granular.aio.datasets.comparison.LISTED', 0)  # replaced shards are noticed when they are read
    folder = bucket / 'ds'
    write(folder, arrays((500, 500, 500, 500)), 2, index=True)
    other = bucket / 'other'
    write(other, arrays((300, 700)), 2)
    for file in (other / '000000').iterdir():
        file.copy(folder / '000001' / file.name)
    with granular.ShardedDatasetReader(folder, granular.decoders) as reader:
        windows = TokenWindows(reader, 'tokens', 100)
        assert windows[9]['tokens'][0] == 900
        with pytest.raises(ObjectChangedError, match=r'000001/.*index of .*/ds was built: run `granular index` on it'):
            windows[10]
        with pytest.raises(ObjectChangedError, match='or open it with index=False'):
            windows.fetch([0, 15])
        assert windows[0]['tokens'][0] == 0
    granular.build_index(folder)
    with granular.ShardedDatasetReader(folder, granular.decoders) as reader:
        assert [window['tokens'][0] for window in TokenWindows(reader, 'tokens', 100)[10:14]] == [0, 100, 200, 300]


async def test_async_api(tmp_path):
    write(tmp_path / 'ds', arrays(LENGTHS))
    async with aio.DatasetReader(tmp_path / 'ds', granular.decoders) as reader:
        async with aio.TokenWindows(reader, 'tokens', 1000) as windows:
            fetched = await asyncio.gather(*(windows.fetch([i, 5]) for i in range(20)))
            assert [int(pair[0]['tokens'][0]) for pair in fetched] == list(range(307, 20_307, 1000))
            assert len([window async for window in windows]) == len(windows) == 90
            with pytest.raises(OutOfRangeError, match='index 90 is out of range: expected -90 to 89'):
                await windows.get(90)
        with pytest.raises(ClosedError):
            await windows.get(0)


def test_errors_name_what_is_wrong(tmp_path):
    write(tmp_path / 'ds', arrays((50, 60)), checksums=True)
    with granular.DatasetReader(tmp_path / 'ds', granular.decoders) as reader:
        for args, error, message in (
            (('text', 8), UnknownKeyError, "has no key 'text', only \\['name', 'parts', 'tokens'\\]"),
            (('name', 8), InvalidArgumentError, "key 'name': expected the type 'array', got 'utf8'"),
            (('parts', 8), InvalidArgumentError, "key 'parts': expected the type 'array', got 'array\\[\\]'"),
            (('tokens', 0), InvalidArgumentError, 'length: expected an integer >= 1, got 0'),
            (('tokens', 8, 0), InvalidArgumentError, 'stride: expected an integer >= 1, got 0'),
        ):
            with pytest.raises(error, match=message):
                TokenWindows(reader, *args)
        windows = TokenWindows(reader, 'tokens', 8)
        assert len(TokenWindows(reader, 'tokens', 61)) == 0
    with pytest.raises(ClosedError):
        windows[0]
    with pytest.raises(InvalidArgumentError, match='expected a DatasetReader or ShardedDatasetReader, got list'):
        TokenWindows([1, 2], 'tokens', 8)
    with granular.DatasetReader(tmp_path / 'ds', granular.decoders, verify=True) as reader:
        with pytest.raises(UnsupportedError, match='parts of records have no checksums'):
            TokenWindows(reader, 'tokens', 8)


encode_array = granular.encoders['array']


@pytest.mark.parametrize(
    ('number', 'other', 'error', 'message'),
    [
        (1, np.zeros(51, np.int16), InvalidArgumentError, r'got dtype int16 and shape \(51,\), and dtype int32 before'),
        (1, np.zeros(100, np.int16), InvalidArgumentError, r'got dtype int16 and shape \(100,\), and dtype int32'),
        (1, np.zeros((50, 1), np.int32), InvalidArgumentError, r'got dtype int32 and shape \(50, 1\)'),
        (1, np.float32(1), InvalidArgumentError, r'got dtype float32 and shape \(\), and dtype int32'),
        (0, np.zeros((2, 2)), InvalidArgumentError, r'got dtype float64 and shape \(2, 2\): write such arrays'),
        (0, np.float32(1), InvalidArgumentError, r'got dtype float32 and shape \(\): write such arrays'),
        (0, b'x' * 51, CorruptDatasetError, 'does not begin an array'),
        (1, b'x' * 51, CorruptDatasetError, 'does not begin an array'),
        (1, b'x' * len(encode_array(np.zeros(50, np.int32))), CorruptDatasetError, 'does not begin an array'),
        (1, encode_array(np.zeros(50, np.int32))[:-3], CorruptDatasetError, 'bytes, which no such array has'),
        (1, encode_array(np.zeros((50, 2), np.int32))[:-103], CorruptDatasetError, 'bytes, which no such array has'),
    ],
)
def test_arrays_of_other_kinds_are_refused(tmp_path, number, other, error, message):
    encoders = {'array': lambda value: value if isinstance(value, bytes) else encode_array(value)}
    with granular.DatasetWriter(tmp_path / 'ds', {'tokens': 'array'}, encoders) as writer:
        for i in range(2):
            writer.append({'tokens': other if i == number else np.zeros(50, np.int32)})
    with granular.DatasetReader(tmp_path / 'ds', granular.decoders) as reader:
        with pytest.raises(error, match=rf"datapoint {number}, key 'tokens': .*{message}"):
            TokenWindows(reader, 'tokens', 8).fetch([-1])

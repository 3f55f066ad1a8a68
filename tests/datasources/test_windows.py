"""Windows: those of numpy's slices and PyAV's frames, and requests for the bytes of these alone."""

import asyncio
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import granular
from granular import MapDataset, ShardOptions, Windows, aio
from granular.errors import (
    ClosedError,
    CorruptDatasetError,
    DatapointError,
    InvalidArgumentError,
    ObjectChangedError,
    OutOfRangeError,
    StateError,
    UnknownKeyError,
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
    kind = granular.ShardedDatasetWriter if shardlen else granular.DatasetWriter
    args = {'shardlen': shardlen} if shardlen else {}
    with kind(path, {'tokens': 'array', 'name': 'utf8'}, granular.encoders, **args, layout=layout, **options) as writer:
        for i, array in enumerate(tokens):
            writer.append({'tokens': array, 'name': f'document {i}'})


def expected_windows(tokens, length, stride):
    return [array[start : start + length] for array in tokens for start in range(0, len(array) - length + 1, stride)]


def dropped(reader, length, stride=None):
    return Windows(reader, {'tokens': length}, stride or length, border='drop')


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
            with dropped(reader, length, stride) as windows:
                expected = expected_windows(tokens, length, stride or length)
                assert len(windows) == len(expected)
                indices = np.random.default_rng(0).integers(-len(expected), len(expected), 50)
                for index, window in zip(indices, windows.fetch(indices), strict=True):
                    assert window.keys() == {'tokens'}
                    assert window['tokens'].dtype == np.uint16
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
        windows = dropped(reader, length, stride)
        assert [window['tokens'].tolist() for window in windows] == [
            array.tolist() for array in expected_windows(tokens, length, stride)
        ]


def test_a_fetch_requests_the_bytes_of_its_windows_alone(bucket):
    write(bucket / 'ds', arrays((400_000, 400_000)))
    # Requests that are slow, as on a busy machine, are not sent twice.
    calm = granular.Path(f'{bucket}/ds', config=granular.IOConfig(hedge=0), **bucket.store.options)
    with granular.DatasetReader(calm, granular.decoders) as reader:
        windows = dropped(reader, 2048)
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
        windows = dropped(reader, 1000)
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
def test_shard_that_is_replaced_behind_an_index_is_an_error_with_its_remedy(bucket, monkeypatch):
    monkeypatch.setattr('granular.aio.datasets.comparison.LISTED', 0)  # replaced shards are noticed when they are read
    folder = bucket / 'ds'
    write(folder, arrays((500, 500, 500, 500)), 2, index=True)
    other = bucket / 'other'
    write(other, arrays((300, 700)), 2)
    with granular.ShardedDatasetReader(folder, granular.decoders) as reader:
        windows = dropped(reader, 100)
        assert windows[9]['tokens'][0] == 900
        for file in (other / '000000').iterdir():
            file.copy(folder / '000001' / file.name)
        with pytest.raises(ObjectChangedError, match=r'000001/.*index of .*/ds was built: run `granular index` on it'):
            windows[10]
        with pytest.raises(ObjectChangedError, match='or open it with index=False'):
            windows.fetch([0, 15])
        assert windows[0]['tokens'][0] == 0
    for builds in (False, True):
        if builds:
            granular.build_index(folder)
        with granular.ShardedDatasetReader(folder, granular.decoders) as reader:
            assert [window['tokens'][0] for window in dropped(reader, 100)[10:14]] == [0, 100, 200, 300]


async def test_async_api(tmp_path):
    write(tmp_path / 'ds', arrays(LENGTHS))
    async with aio.DatasetReader(tmp_path / 'ds', granular.decoders) as reader:
        async with aio.Windows(reader, {'tokens': 1000}, 1000, 'drop') as windows:
            fetched = await asyncio.gather(*(windows.fetch([i, 5]) for i in range(20)))
            assert [int(pair[0]['tokens'][0]) for pair in fetched] == list(range(307, 20_307, 1000))
            assert len([window async for window in windows]) == len(windows) == 90
            with pytest.raises(OutOfRangeError, match='index 90 is out of range: expected -90 to 89'):
                await windows.get(90)
        with pytest.raises(ClosedError):
            await windows.get(0)


encode_array = granular.encoders['array']


@pytest.mark.parametrize(
    ('number', 'other', 'error', 'message'),
    [
        (1, np.zeros(51, np.int16), InvalidArgumentError, r'got dtype int16 and shape \(51,\), and dtype int32 before'),
        (1, np.zeros(100, np.int16), InvalidArgumentError, r'got dtype int16 and shape \(100,\), and dtype int32'),
        (1, np.zeros((50, 1), np.int32), InvalidArgumentError, r'got dtype int32 and shape \(50, 1\)'),
        (1, np.float32(1), InvalidArgumentError, r'got dtype float32 and shape \(\), and dtype int32'),
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
            dropped(reader, 8).fetch([-1])


# --- episodes: several keys, cameras, borders

STEPS = (12, 1, 0, 7, 30)
ALL = range(len(STEPS))
SPEC = {'action': 'array', 'camera': 'png[]', 'done': 'bool[]', 'said': 'utf8[]', 'state': 'array', 'task': 'utf8'}
OFFSETS = {'state': (-2, 1), 'action': 4, 'camera': [-3, 0, 2], 'said': 2, 'done': [0], 'task': True}


def episodes():
    rng = np.random.default_rng(0)
    return [
        {
            'state': rng.normal(size=(steps, 7)).astype(np.float32),
            'action': rng.normal(size=(steps, 2, 3)),
            'camera': list(rng.integers(0, 255, (steps, 6, 8, 3), dtype=np.uint8)),
            'said': [f'{number}.{step}' for step in range(steps)],
            'done': [step == steps - 1 for step in range(steps)],
            'task': f'task {number}',
        }
        for number, steps in enumerate(STEPS)
    ]


def write_episodes(path, shardlen=2, **options):
    with granular.ShardedDatasetWriter(path, SPEC, shardlen=shardlen, **options) as writer:
        for episode in episodes():
            writer.append(episode)


def slices(stride, border, chosen=ALL):
    """Return all windows, sliced by numpy."""
    out = []
    for episode in map(episodes().__getitem__, chosen):
        steps = len(episode['said'])
        for step in range(0, steps, stride) if border == 'pad' else range(3, steps - 3, stride):
            window = {'task': episode['task']}
            for key, offsets in OFFSETS.items():
                if offsets is True:
                    continue
                offsets = {'state': [-2, -1, 0], 'action': [0, 1, 2, 3], 'said': [0, 1]}.get(key, offsets)
                at = [min(max(step + offset, 0), steps - 1) for offset in offsets]
                values = [episode[key][i] for i in at]
                window[key] = values if key == 'said' else np.stack(values)
                if border == 'pad':
                    window[f'{key}_is_pad'] = np.array([not 0 <= step + offset < steps for offset in offsets])
            out.append(window)
    return out


def equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert type(ours[key]) is type(value), key
        assert np.array_equal(ours[key], value), key
        assert getattr(ours[key], 'dtype', None) == getattr(value, 'dtype', None), key


@pytest.mark.parametrize(
    ('stride', 'border', 'options'),
    [(1, 'pad', {}), (3, 'drop', {}), (3, 'pad', {'verify': True}), (1, 'drop', {'cache_index': False})],
)
def test_windows_over_episodes_are_slices(tmp_path, stride, border, options):
    write_episodes(tmp_path / 'ds')
    expected = slices(stride, border)
    with granular.open(tmp_path / 'ds', **options) as reader, Windows(reader, OFFSETS, stride, border) as windows:
        order = np.random.default_rng(0).permutation(len(expected))
        assert len(windows) == len(expected)
        for index, window in zip(order, windows.fetch(order), strict=True):
            equal(window, expected[index])
        equal(windows[-1], expected[-1])


def test_episodes_of_any_source_and_chosen_ones():
    source = episodes()
    for chosen in (ALL, [4, 0, 3]):
        windows = Windows(source, OFFSETS, 2, episodes=chosen)
        expected = slices(2, 'pad', chosen)
        assert len(windows) == len(expected)
        for ours, theirs in zip(windows, expected, strict=True):
            equal(ours, theirs)


@pytest.mark.parametrize(
    'offsets',
    [
        ({'state': 1}, {'state': 2}),
        ({'state': range(100)}, {'state': [*range(99), 50]}),
        ({'state': np.arange(2000)}, {'state': np.append(np.arange(1999), 50)}),
    ],
)
def test_a_state_is_of_the_same_windows_over_the_same_episodes(offsets):
    """Of windows whose description is long, too."""
    source, (own, other) = episodes(), offsets
    windows = [Windows(source, own, episodes=chosen) for chosen in ([0, 3], [3, 0])]
    first, *others = (
        iter(MapDataset.source(each).to_iter_dataset()) for each in (*windows, Windows(source, other, episodes=[0, 3]))
    )
    next(first)
    for second in others:
        with pytest.raises(StateError, match='Windows'):
            second.set_state(first.get_state())


def test_windows_keep_the_offsets_that_they_were_given():
    offsets = [0, -1]
    windows = Windows(episodes(), {'state': offsets}, lengths=STEPS)
    offsets.append(-2)
    equal(pickle.loads(pickle.dumps(windows))[3], windows[3])


def test_windows_over_a_dataset_of_episodes():
    dataset = MapDataset.source(episodes()).slice(slice(3, None))
    for ours, theirs in zip(Windows(dataset, OFFSETS, lengths=STEPS[3:]), slices(1, 'pad', ALL[3:]), strict=True):
        equal(ours, theirs)
    with pytest.raises(InvalidArgumentError, match='the number of steps of an episode is not known'):
        Windows(dataset.map(dict), OFFSETS)


def test_windows_do_not_share_memory(tmp_path):
    write_episodes(tmp_path / 'ds')
    with granular.open(tmp_path / 'ds') as reader:
        first, second = Windows(reader, OFFSETS).fetch([4, 4])
        first['state'][:] = 0
        first['camera'][:] = 0
        equal(second, slices(1, 'pad')[4])


def test_a_batch_is_one_fan_out_and_reads_what_windows_share_once(bucket):
    write_episodes(bucket / 'ds', shardlen=10)
    calm = granular.Path(f'{bucket}/ds', config=granular.IOConfig(hedge=0), **bucket.store.options)
    with granular.open(calm) as reader, Windows(reader, OFFSETS) as windows:
        windows.fetch(range(len(windows)))  # reads the heads of arrays

        def cost(indices):
            before = granular.io_stats()
            windows.fetch(indices)
            after = granular.io_stats()
            return after['requests'] - before['requests'], after['bytes'] - before['bytes']

        keys = len(OFFSETS)
        assert cost([30])[0] == keys
        assert cost(range(20, 50))[0] == keys
        assert cost([30] * 8) == cost([30])


def test_the_order_of_windows_is_that_of_any_dataset(tmp_path):
    write_episodes(tmp_path / 'ds')
    with granular.open(tmp_path / 'ds') as reader:
        windows = Windows(reader, {key: OFFSETS[key] for key in ('state', 'camera')})
        dataset = MapDataset.source(windows).shuffle(seed=1).batch(4)
        expected = [batch['state'].tolist() for batch in dataset]
        with iter(dataset.to_iter_dataset().mp_prefetch(1)) as iterator:
            assert next(iterator)['state'].tolist() == expected[0]
            state = iterator.get_state()
            assert [batch['state'].tolist() for batch in iterator] == expected[1:]
            iterator.set_state(state)
            assert next(iterator)['state'].tolist() == expected[1]
        with granular.Loader(MapDataset.source(windows).shuffle(seed=1), 4) as loader:
            assert next(loader)['state'].tolist() == expected[0]
            assert next(loader)['camera_is_pad'].shape == (4, 3)


@pytest.mark.parametrize(
    ('windows', 'options', 'error', 'message'),
    [
        ({'text': 8}, {}, UnknownKeyError, r"the mask has \['text'\]"),
        ({'state': 0}, {}, InvalidArgumentError, "windows: 'state': expected an integer from 1 to .*, got 0"),
        ({'state': (1, 1)}, {}, InvalidArgumentError, "windows: 'state': expected 1 to 67108864 offsets"),
        ({'state': 1 << 30}, {}, InvalidArgumentError, "windows: 'state': expected 1 to 67108864 offsets"),
        ({'state': (0, 1 << 30)}, {}, InvalidArgumentError, "windows: 'state': expected 1 to 67108864 offsets"),
        ({'state': range(1 << 30)}, {}, InvalidArgumentError, "windows: 'state': expected 1 to 67108864 offsets"),
        ({'state': [1 << 40]}, {}, InvalidArgumentError, "windows: 'state': expected .* offsets from -1073741824 to"),
        ({'state': (0, 1, 2)}, {}, InvalidArgumentError, r'expected a pair \(start, stop\)'),
        ({'state': False}, {}, InvalidArgumentError, "windows: 'state': expected an integer"),
        ({'state': [0.5]}, {}, InvalidArgumentError, "windows: 'state': seconds need fps="),
        ({'state': (-0.5, 0.5)}, {'fps': 10}, InvalidArgumentError, r'expected steps, got .*: seconds need a list'),
        ({'state': 1.6}, {'fps': 10}, InvalidArgumentError, 'expected a number of steps, got 1.6: seconds need a list'),
        ({'state': [0.25]}, {'fps': 10}, InvalidArgumentError, '0.25 seconds are 2.5 steps at 10 in a second'),
        ({'state': 1}, {'fps': 0}, InvalidArgumentError, 'fps: expected a number > 0'),
        ({'state': 1}, {'stride': 0}, InvalidArgumentError, 'stride: expected an integer >= 1, got 0'),
        ({'state': 1}, {'border': 'wrap'}, InvalidArgumentError, "expected 'pad' or 'drop', got 'wrap'"),
        ({'state': 1}, {'episodes': [9]}, OutOfRangeError, 'episodes: index 9 is out of range'),
        ({'state': 1}, {'lengths': [12, 1, 0, 7, 31]}, InvalidArgumentError, 'episode 4 has 31 steps of .*, and 30'),
        ({'task': True}, {}, InvalidArgumentError, 'expected the offsets of a key'),
        ({'task': 1}, {}, InvalidArgumentError, 'the number of steps of an episode is not known.*pass lengths='),
        ({}, {}, InvalidArgumentError, 'expected a mapping from keys to offsets'),
        (['state'], {}, InvalidArgumentError, 'expected a mapping from keys to offsets'),
    ],
)
def test_invalid_windows_are_refused(tmp_path, windows, options, error, message):
    write_episodes(tmp_path / 'ds')
    with granular.open(tmp_path / 'ds') as reader, pytest.raises(error, match=message):
        Windows(reader, windows, **options)


def test_values_that_have_no_steps_are_refused(tmp_path):
    write_episodes(tmp_path / 'ds')
    with granular.open(tmp_path / 'ds') as reader:
        with pytest.raises(DatapointError, match=r"000000: datapoint 0, key 'task': expected 12 values.* pass True"):
            Windows(reader, {'task': 1, 'state': 1})[0]
        windows = Windows(reader, {'state': 1})
    with pytest.raises(ClosedError):
        windows[0]
    with pytest.raises(InvalidArgumentError, match="episode 1 has 2 steps of 'x', and 1 of 'y'"):
        Windows([{'x': [1], 'y': [1]}, {'x': [1, 2], 'y': [1]}], {'x': 1, 'y': 1})
    with pytest.raises(
        DatapointError, match=r"window 0, key 'x': expected values of one shape, got \[\(1,\), \(2,\)\]"
    ):
        Windows([{'x': [np.zeros(1), np.zeros(2)]}], {'x': 2})[0]

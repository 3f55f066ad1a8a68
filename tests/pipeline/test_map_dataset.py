"""MapDataset: operations and order of Google Grain, and one fan-out for any chain."""

import asyncio
import collections
import functools
import json
import pickle

import numpy as np
import pytest

import granular
from granular import MapDataset, aio, shuffle
from granular.errors import DatapointError, InvalidArgumentError, OutOfRangeError, UnknownKeyError
from granular.grain import MultiprocessingOptions
from tests.support.states import plain

# Each expression is evaluated here and with Grain; `M` is the MapDataset of that package.
SAME = [
    'M.range(11).shuffle(seed=10).map(lambda x: x + 1).batch(2)',
    'M.range(3, 40, 4)',
    'M.source([5, 6, 7]).repeat(3).shuffle(seed=3)',
    'M.range(7).shuffle(seed=1).repeat(2)',
    'M.range(7).shuffle(seed=1).repeat(2, reseed_each_epoch=False)',
    'M.range(20)[3:17:2].shuffle(seed=4)',
    'M.range(20)[::-3]',
    'M.range(20).slice(slice(2, None, 5)).map_with_index(lambda i, x: 100 * i + x)',
    'M.range(9).filter(lambda x: x % 3 == 0)',
    'M.range(9).filter(lambda x: x % 3 == 0).map(lambda x: x * 2)',
    'M.range(10).batch(4)',
    'M.range(10).batch(4, drop_remainder=True)',
    'M.range(10).batch(3, batch_fn=sum)',
    'M.mix([M.range(5), M.range(7, 10)])',
    'M.mix([M.range(50), M.range(70, 100)], weights=[0.3, 0.7])',
    'M.mix([M.range(50), M.range(70, 100)], weights=[2**64, 2**65])',
    'M.mix([M.range(9).repeat(), M.range(10, 12).repeat(), M.range(20, 50)], weights=[1, 2, 3])',
    'M.concatenate([M.range(3), M.range(3, 8)])',
    'M.concatenate([M.range(3).shuffle(seed=1), M.range(3, 8).shuffle(seed=2)]).shuffle(seed=5)',
    'M.range(8).seed(7).shuffle()',
    'M.range(8).seed(7).map(lambda x: x).shuffle().random_map(lambda x, r: x + int(r.integers(1000)))',
    'M.range(8).random_map(lambda x, r: x + int(r.integers(1000)), seed=3).repeat(2)',
    'M.mix([M.range(8).seed(1).shuffle(), M.range(8).seed(2).map(lambda x: -x).shuffle()]).shuffle()',
    'M.range(30).shuffle(seed=4)[5:25].batch(3).shuffle(seed=1).repeat(2)',
    'M.source([{"a": i, "b": (i, [i * 2])} for i in range(7)]).batch(3)',
    'M.range(8).seed(2**40).shuffle()',
    'M.range(8).seed(2**140).shuffle().random_map(lambda x, r: x + int(r.integers(1000)))',
    'M.range(8).seed([1, 2**33]).shuffle()',
    'M.range(8).random_map(lambda x, r: x + int(r.integers(1000)), seed=2**40)',
    'M.range(8).random_map(lambda x, r: x + int(r.integers(1000)), seed=(1, 2))',
]

# Each operation as a function of Grain's experimental classes `X`, and as a method here.
EXPERIMENTAL = [
    ('X.WindowShuffleMapDataset(M.range(12), window_size=4, seed=1)', lambda M: M.range(12).window_shuffle(4, seed=1)),
    (
        'X.WindowShuffleMapDataset(M.range(12).shuffle(seed=2), window_size=3, seed=2**32 - 9)',
        lambda M: M.range(12).shuffle(seed=2).window_shuffle(3, seed=2**32 - 9),
    ),
    ('X.FlatMapMapDataset(M.range(6), Split())', lambda M: M.range(6).flat_map(Split())),
    (
        'X.FlatMapMapDataset(M.range(6).filter(lambda x: x % 3), Split()).shuffle(seed=4)',
        lambda M: M.range(6).filter(lambda x: x % 3).flat_map(Split()).shuffle(seed=4),
    ),
    ('X.ZipMapDataset([M.range(3), M.range(3, 6)])', lambda M: M.zip([M.range(3), M.range(3, 6)])),
]


class Split(granular.grain.experimental.FlatMapTransform):
    max_fan_out = 3

    def flat_map(self, x):
        return [x] * (x % 4)


def test_elements_equal_those_of_grain(grain):
    script = """
M = grain.MapDataset
out = []
for text in json.loads(sys.argv[1]):
    ds = eval(text)
    n = min(len(ds), 1000)
    at = [ds[i] for i in list(range(2 * n if len(ds) == n else n))]
    out.append([len(ds), plain(at), plain(list(ds)) if n < 1000 else None])
print(json.dumps(out))
"""
    for text, (length, items, listed) in zip(SAME, grain.run(script, json.dumps(SAME)), strict=True):
        dataset = eval(text, {'M': MapDataset})
        assert len(dataset) == length, text
        assert plain(dataset.fetch(range(len(items)))) == items, text
        assert plain([dataset[i] for i in range(len(items))]) == items, text
        if listed is not None:
            assert plain(list(dataset)) == listed, text


def test_order_is_pinned():
    dataset = MapDataset.source(list(range(11))).shuffle(seed=10).map(lambda x: x + 1).batch(2)
    assert plain(list(dataset)) == [[6, 11], [2, 10], [3, 5], [1, 4], [8, 9], [7]]
    assert dataset[len(dataset) + 2].tolist() == [7, 3]


def test_negative_and_later_epochs():
    dataset = MapDataset.range(5).shuffle(seed=3)
    epochs = [[dataset[i] for i in range(5 * epoch, 5 * epoch + 5)] for epoch in (-2, -1, 0, 1)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert MapDataset.range(5)[-1] == 4
    assert MapDataset.concatenate([MapDataset.range(3), MapDataset.range(3, 5)])[-1] == 4


@pytest.fixture
def path(fakegcs):
    path = fakegcs.place()
    spec = {'id': 'int', 'text': 'utf8', 'data': 'bytes'}
    with granular.DatasetWriter(path, spec, granular.encoders) as writer:
        for i in range(300):
            writer.append({'id': i, 'text': f'number {i}', 'data': bytes([i % 256]) * 1000})
    return path


def test_chain_is_one_fetch_of_the_reader(path, fetches):
    with granular.DatasetReader(path, granular.decoders) as reader:
        dataset = MapDataset.source(reader).shuffle(seed=1)[:200].repeat(2).map(lambda p: p['id'])
        batched = dataset.map(lambda i: i + 1).batch(16)
        batches = batched.fetch([0, 3])
        assert fetches == [32]
        assert [batch.tolist() for batch in batches] == [
            (np.array(dataset.fetch(range(a, a + 16))) + 1).tolist() for a in (0, 48)
        ]
        fetches.clear()
        both = MapDataset.zip([dataset, dataset.map(lambda i: -i)])
        assert all(a == -b for a, b in both.fetch(range(5)))
        assert fetches == [5, 5]


def test_unselected_keys_are_not_read(path):
    with granular.DatasetReader(path, granular.decoders) as reader:
        dataset = MapDataset.source(reader).shuffle(seed=1)
        before = granular.io_stats()['bytes']
        assert set(dataset.select(['id'])[3]) == {'id'}
        small = granular.io_stats()['bytes'] - before
        assert set(dataset[3]) == {'id', 'text', 'data'}
        assert granular.io_stats()['bytes'] - before - small > 900 > small
        assert dataset.select('text').repeat(2)[3]['text'] == dataset[3]['text']
        mapped = dataset.map(lambda datapoint: {**datapoint, 'more': 1})
        assert mapped.select(['more', 'id'])[3] == {'more': 1, 'id': dataset[3]['id']}
        with pytest.raises(UnknownKeyError, match="unknown field 'nothing'"):
            mapped.select(['nothing'])[0]


def test_batches_of_many_structures():
    Point = collections.namedtuple('Point', 'x y')
    batch = MapDataset.source([Point(i, np.ones((2, 3)) * i) for i in range(4)]).batch(4)[0]
    assert isinstance(batch, Point)
    assert batch.y.shape == (4, 2, 3)
    zeros = MapDataset.source([b'a\0\0', b'b']).batch(2)[0]
    assert zeros.tolist() == [b'a\0\0', b'b']
    with pytest.raises(DatapointError, match=r"'x': datapoint 1 of a batch has shape \(3,\), the first \(2,\)"):
        MapDataset.source([{'x': np.ones(2)}, {'x': np.ones(3)}]).batch(2)[0]
    with pytest.raises(DatapointError, match=r"datapoint 1 of a batch is a dict of \['y'\]"):
        MapDataset.source([{'x': 1}, {'y': 1}]).batch(2)[0]


@pytest.mark.parametrize(
    'leaves',
    [(1, 'x'), ('x', 1.5), (True, 'x'), (1, b'x'), ('x', b'x'), (np.arange(2), np.array(['a', 'b'])),
     (np.datetime64('2020-01-01'), 1), (b'x', 1), (np.timedelta64(1, 's'), 5), (5, np.timedelta64(1, 's')),
     (1.5, 10**400), (1, {'y': 1}), (np.array(1), {'y': 1})],
)  # fmt: skip
def test_leaves_of_other_kinds_are_not_stacked(leaves):
    with pytest.raises(DatapointError, match=r"'x': datapoint 1 of a batch has dtype .*, the first "):
        MapDataset.source([{'x': leaf} for leaf in leaves]).batch(2)[0]
    same = MapDataset.source([{'x': np.str_('a')}, {'x': 'bc'}]).batch(2)[0]
    assert same['x'].tolist() == ['a', 'bc']


@pytest.mark.parametrize(
    ('leaves', 'message'),
    [((np.datetime64('3000', 'Y'), np.datetime64('2020', 'ns')), r'datapoint 0 .* does not fit into datetime64\[ns\]'),
     ((np.zeros(1, [('a', 'i4')]), np.zeros(1, [('b', 'i4')])), 'no dtype in common'),
     ((b'x', np.array(b'x')), 'some values of a batch are text')],
)  # fmt: skip
def test_leaves_that_would_be_changed_are_not_stacked(leaves, message):
    with pytest.raises(DatapointError, match=f"'x': .*{message}"):
        MapDataset.source([{'x': leaf} for leaf in leaves]).batch(2)[0]


def test_dates_of_several_units_are_stacked():
    dates = [np.datetime64('2020', 'Y'), np.datetime64('NaT', 's'), np.datetime64('2021-02-03', 'D')]
    batch = MapDataset.source(dates).batch(3)[0]
    assert batch.astype('M8[D]').astype(str).tolist() == ['2020-01-01', 'NaT', '2021-02-03']


class Double(granular.grain.transforms.Map):
    def map(self, element):
        return element * 2


class Odd(granular.grain.transforms.Filter):
    def filter(self, element):
        return element % 2 == 1


class Noise(granular.grain.transforms.RandomMap):
    def random_map(self, element, rng):
        return element + rng.integers(10, 20)


class Number(granular.grain.transforms.MapWithIndex):
    def map_with_index(self, index, element):
        return index, element


def test_transformations_as_objects():
    dataset = MapDataset.range(6).seed(1).apply([Double(), Noise(), granular.grain.transforms.Batch(2), Number()])
    index, batch = dataset[1]
    assert index == 1
    assert batch.shape == (2,)
    assert dataset[1][1].tolist() == batch.tolist()
    assert list(MapDataset.range(6).apply(Odd())) == [1, 3, 5]
    assert MapDataset.range(6).pipe(lambda ds, n: ds[:n], 2)[1] == 1
    stream = MapDataset.range(3).to_iter_dataset().apply(granular.grain.transforms.Batch(2))
    assert plain(list(stream)) == [[0, 1], [2]]


def test_subset_by_indices():
    dataset = MapDataset.range(10, 20).slice([3, -1, 0])
    assert list(dataset) == [13, 19, 10]
    assert dataset[4] == 19
    with pytest.raises(OutOfRangeError, match='index 10 is out of range: expected -10 to 9'):
        MapDataset.range(10).slice([10])


def test_select_from_datasets():
    chosen = [(0, 2), (1, 0), (0, 0)]
    dataset = MapDataset.select_from_datasets([MapDataset.range(3), MapDataset.range(5, 7)], chosen)
    assert list(dataset) == [2, 5, 0]


def test_repr_lists_the_stages():
    def decode(x):
        return x

    left = MapDataset.range(100).shuffle(seed=1)
    dataset = MapDataset.mix([left, MapDataset.source([1, 2]).repeat()]).map(decode).batch(8)
    lines = [line.rsplit(maxsplit=1) for line in str(dataset).split('\n')]
    assert [(stage.strip(), length) for stage, length in lines] == [
        ('range(0, 100)', '100'),
        ('shuffle(seed=1, Index())', '100'),
        ('list of 2', '2'),
        ('repeat(None)', '∞'),
        ('mix of 2, weights 1:1', '200'),
        ('map(test_repr_lists_the_stages.decode)', '200'),
        ('batch(8)', '25'),
    ]
    assert str(dataset).startswith('  range')
    assert 'batch(8)' in repr(dataset)


@pytest.mark.parametrize(
    'make',
    [lambda d: d.shuffle(), lambda d: d.shuffle(seed=-1), lambda d: d.shuffle(seed=2**32), lambda d: d.random_map(max),
     lambda d: d.batch(0), lambda d: d.filter(bool).batch(2), lambda d: d.repeat(0), lambda d: d.repeat().repeat(2),
     lambda d: d.map(3), lambda d: d.apply(3), lambda d: MapDataset.mix([d, d], [1, -1]),
     lambda d: MapDataset.mix([d, d[:0]]), lambda d: MapDataset.zip([d, d[:3]]), lambda d: MapDataset.concatenate([]),
     lambda d: MapDataset.concatenate([d, d.repeat()]), lambda d: d.shuffle(seed=1, order='blocks'),
     lambda d: d.shuffle(seed=1, order=shuffle.Blocks)],
)  # fmt: skip
def test_invalid_arguments_are_rejected(make):
    with pytest.raises(InvalidArgumentError):
        make(MapDataset.range(5))


def test_dataset_pickles(tmp_path):
    with granular.DatasetWriter(tmp_path / 'ds', {'id': 'int', 'x': 'int'}, granular.encoders) as writer:
        for i in range(300):
            writer.append({'id': i, 'x': i})
    with granular.DatasetReader(tmp_path / 'ds', granular.decoders) as reader:
        dataset = (
            MapDataset.source(reader).shuffle(seed=1, order=granular.shuffle.Blocks(10, 4)).select(['id']).batch(4)
        )
        twin = pickle.loads(pickle.dumps(dataset))
        assert twin[2]['id'].tolist() == dataset[2]['id'].tolist()


async def test_async_api():
    dataset = aio.MapDataset.range(10).shuffle(seed=1).batch(3)
    assert plain(await dataset.get(1)) == plain(MapDataset.range(10).shuffle(seed=1).batch(3)[1])
    assert plain(await dataset.fetch([1, 2])) == plain([await dataset.get(1), await dataset.get(2)])
    assert len([batch async for batch in dataset]) == 4


def test_loader_reads_a_mapdataset():
    dataset = MapDataset.range(100).shuffle(seed=1).map(lambda i: {'i': i})
    with granular.Loader(dataset, 10) as loader:
        assert [i for batch in loader for i in batch['i'].tolist()] == [p['i'] for p in dataset]
    with granular.Loader(granular.sources.Epochs(dataset, shuffle=False), 10) as loader:
        assert next(loader)['i'].tolist() == [p['i'] for p in dataset.fetch(range(10))]


def test_experimental_elements_equal_those_of_grain(grain):
    script = """
M, X = grain.MapDataset, grain.experimental
class Split(X.FlatMapTransform):
    max_fan_out = 3
    def flat_map(self, x): return [x] * (x % 4)
out = []
for text in json.loads(sys.argv[1]):
    dataset = eval(text)
    out.append([len(dataset), [dataset[i] for i in range(2 * len(dataset))]])
print(json.dumps(out))
"""
    expected = grain.run(script, json.dumps([text for text, _ in EXPERIMENTAL]))
    for (text, make), (length, elements) in zip(EXPERIMENTAL, expected, strict=True):
        dataset = make(MapDataset)
        assert len(dataset) == length, text
        assert plain(dataset.fetch(range(2 * length))) == elements, text
        assert plain([dataset[i] for i in range(2 * length)]) == elements, text


def test_every_window_is_a_permutation():
    dataset = MapDataset.range(10).seed(3).window_shuffle(4)
    for epoch in (dataset.fetch(range(10)), dataset.fetch(range(10, 20))):
        assert [sorted(epoch[at : at + 4]) for at in (0, 4, 8)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert dataset.fetch(range(10)) != dataset.fetch(range(10, 20))


def test_function_may_change_elements_of_a_flat_map_that_are_chosen_twice():
    def add(array):
        array += 1
        return array

    dataset = MapDataset.range(3).flat_map(lambda x: [np.full(1, x), np.full(1, 10 * x)], max_fan_out=2)
    dataset = dataset.subset([0, 3, 3, 3, 2, 2]).map(add)
    expected = [1, 11, 11, 11, 2, 2]
    assert [int(dataset[i][0]) for i in range(6)] == expected
    assert [int(array[0]) for array in dataset.fetch(range(6))] == expected
    assert [int(array[0]) for array in dataset.to_iter_dataset()] == expected


def test_flat_map_of_failing_and_long_elements():
    def split(x):
        if x == 2:
            raise ValueError('two')
        return [x] * x

    dataset = MapDataset.range(5).flat_map(split, max_fan_out=4)
    with iter(dataset.to_iter_dataset(on_error='skip')) as iterator:
        assert list(iterator) == [1, 3, 3, 3, 4, 4, 4, 4]
        assert iterator.stats()['errors'] == 1
    assert list(dataset.to_iter_dataset(on_error=lambda index, error: -index)) == [1, -2, 3, 3, 3, 4, 4, 4, 4]
    with pytest.raises(DatapointError, match='at most 3 elements for the datapoint at index 4, got 4'):
        MapDataset.range(5).flat_map(split, max_fan_out=3)[12]
    with pytest.raises(InvalidArgumentError, match='requires max_fan_out'):
        MapDataset.range(5).flat_map(split)
    assert len(MapDataset.range(5).repeat().flat_map(split, max_fan_out=4)) == len(MapDataset.range(5).repeat())


@pytest.mark.parametrize(
    'elements',
    [
        lambda dataset: dataset[1::2],
        lambda dataset: dataset.to_iter_dataset(shard_options=granular.ShardOptions(1, 2)),
        lambda dataset: dataset[7:].to_iter_dataset(),
        lambda dataset: dataset[1::2].to_iter_dataset().mp_prefetch(MultiprocessingOptions(1, start_method='fork')),
    ],
)
def test_flat_map_fails_for_each_element_of_a_datapoint_that_fails(elements):
    def split(x):
        if x == 3:
            raise ValueError('three')
        return [x, x]

    with pytest.raises(ValueError, match='three'):
        list(elements(MapDataset.range(6).flat_map(split, max_fan_out=2)))


def test_parents():
    source = MapDataset.range(5)
    dataset = source.shuffle(seed=1, order=granular.shuffle.Blocks(2, 2)).map(str)
    (shuffled,) = dataset.parents
    assert (list(shuffled), list(shuffled.parents[0])) == ([int(x) for x in dataset], list(source))
    assert source.parents == []
    assert [list(parent) for parent in MapDataset.zip([source, dataset]).parents] == [list(source), list(dataset)]


def test_none_leaves_of_a_batch_stay_none():
    batch = MapDataset.source([{'a': None, 'b': (1, None)}, {'a': None, 'b': (2, None)}]).batch(2)[0]
    assert batch['a'] is None
    assert (batch['b'][0].tolist(), batch['b'][1]) == ([1, 2], None)


@pytest.mark.parametrize(
    ('element', 'message'),
    [(3, "index 1: expected a dict with 'y', got int"), ((1, 2), "expected a dict with 'y', got tuple"),
     ({'x': 1, 2: 3}, r"unknown field 'y': there are \['x', 2\]")],
)  # fmt: skip
def test_elements_without_a_selected_field_are_named(element, message):
    dataset = MapDataset.source([{'y': 1}, element])
    for read in (lambda: dataset.select('y').fetch([0, 1]), lambda: dataset.filter_classes('y', [1])):
        with pytest.raises((DatapointError, UnknownKeyError), match=message):
            read()


@pytest.mark.parametrize(
    'elements',
    [['a', 'b\0', 'c'], [b'a', b'b\0', b'c'], [np.str_('b\0'), 'c\0', 'd'], [None, 'b\0', 'c'], [None, b'b\0', b'c']],
)
def test_texts_of_batches_keep_trailing_zeros(elements):
    stream = MapDataset.source([{'x': element} for element in elements]).to_iter_dataset()
    for batches in (stream.batch(3), stream.batch(2).rebatch(3), stream.batch(2).rebatch(1).batch(3)):
        (batch,) = batches
        assert batch['x'].ravel().tolist() == elements


def test_padding_of_batches():
    pad = functools.partial(granular.grain.experimental.batch_and_pad, batch_size=3)
    batches = MapDataset.source([{'x': np.full(2, i, np.uint8), 'n': None} for i in range(4)]).batch(3, batch_fn=pad)
    assert batches[1]['x'].tolist() == [[3, 3], [0, 0], [0, 0]]
    assert batches[1]['x'].dtype == np.uint8
    assert batches[1]['n'] is None
    with pytest.raises(DatapointError, match="'x': the padding -1 does not fit into uint8"):
        MapDataset.source([{'x': np.uint8(1)}]).batch(3, batch_fn=functools.partial(pad, pad_value=-1))[0]
    for array in (np.array(['a']), np.array([b'a'])):
        with pytest.raises(DatapointError, match=r"the padding '\\x00' does not fit into"):
            granular.grain.experimental.batch_and_pad([array], batch_size=3, pad_value='\0')
    with pytest.raises(DatapointError, match='4 elements into a batch of 3'):
        granular.grain.experimental.batch_and_pad([1, 2, 3, 4], batch_size=3)


@pytest.mark.parametrize(
    ('elements', 'pad_value', 'padded'),
    [(['a', 'bc'], '<pad>', ['a', 'bc', '<pad>']), (['a', 'bc'], 0, ['a', 'bc', '0']),
     (['a', 'b\0'], 0, ['a', 'b\0', '0']), (['a', 'b'], '\0', np.array(['a', 'b', '\0'], object)),
     ([np.str_('a'), np.str_('b\0')], 'c\0', np.array(['a', 'b\0', 'c\0'], object)),
     ([b'a', b'b'], b'b\0', np.array([b'a', b'b', b'b\0'], object)),
     ([b'a', b'b\0'], '<pad>', [b'a', b'b\0', b'<pad>']), ([np.array(['a'])] * 2, '<pad>', [['a'], ['a'], ['<pad>']]),
     ([np.array([b'a'])] * 2, b'<pad>', [[b'a'], [b'a'], [b'<pad>']]), ([1.5, 2], np.nan, [1.5, 2, np.nan]),
     ([True, False], 1, [True, False, True]), ([np.float32(1), np.float32(2)], np.float64(0.5), [1, 2, 0.5])],
)  # fmt: skip
def test_padding_is_the_value_that_was_passed(elements, pad_value, padded):
    batch = granular.grain.experimental.batch_and_pad(elements, batch_size=3, pad_value=pad_value)
    np.testing.assert_array_equal(batch, np.array(padded, batch.dtype.kind))
    whole = granular.grain.experimental.batch_and_pad(elements, batch_size=2, pad_value=pad_value)
    assert whole.dtype == MapDataset.source(elements).batch(2)[0].dtype


@pytest.mark.parametrize(
    ('element', 'pad_value'),
    [(1, np.nan), (True, np.nan), (np.uint8(1), -1), (np.float16(1), 1e6), (1.5, 1j), (1.5, 'x'), (1, None),
     (1.5, 10**400), (np.ones(2), [1, 2])],
)  # fmt: skip
def test_padding_that_would_be_another_value_is_refused(element, pad_value):
    with pytest.raises(DatapointError, match='does not fit into'):
        granular.grain.experimental.batch_and_pad([element], batch_size=2, pad_value=pad_value)


def test_mix_takes_weights_that_are_far_apart_and_streams_of_an_iterator():
    dataset = MapDataset.mix([MapDataset.range(3), MapDataset.range(10, 13)], [1e300, 1])
    assert dataset.fetch([]) == [] and dataset.fetch([0, 1]) == [0, 1]
    mixed = granular.IterDataset.mix(MapDataset.range(start, start + 2) for start in (0, 10))
    assert list(mixed) == [0, 10, 1, 11]


def test_selection_map_is_checked():
    dataset = MapDataset.select_from_datasets([MapDataset.range(3)], [(0, 2), (1, 0), (-1, 0)])
    for index, chosen in ((1, 1), (2, -1)):
        with pytest.raises(OutOfRangeError, match=f'chooses dataset {chosen} at index {index}: there are 1'):
            dataset[index]


@pytest.mark.parametrize('indices', [[1.0], [True, False], ['1'], [[1, 2]], 3, 'ab', None, [2**63]], ids=str)
def test_indices_that_are_not_integers_are_refused(indices):
    dataset = MapDataset.range(3)
    for use in (dataset.fetch, dataset.slice, dataset.subset, lambda some: asyncio.run(dataset.aio.fetch(some))):
        with pytest.raises(
            (InvalidArgumentError, OutOfRangeError), match='(sequence of|expected) integers|out of range'
        ):
            use(indices)
    assert dataset.fetch([]) == list(dataset.slice([])) == []


@pytest.mark.parametrize(
    'make',
    [
        lambda empty: empty,
        lambda empty: empty.shuffle(seed=0),
        lambda empty: empty.shuffle(seed=0, order=shuffle.Blocks()),
        lambda empty: empty.window_shuffle(3, seed=0),
        lambda empty: empty.repeat(2),
        lambda empty: empty.map(abs),
        lambda empty: MapDataset.concatenate([empty, empty]),
        lambda empty: MapDataset.zip([empty, empty]),
        lambda empty: empty.filter(bool),
        lambda empty: empty.flat_map(str, max_fan_out=2),
        lambda empty: empty.batch(2),
    ],
)
def test_datasets_without_elements_have_no_index(make):
    for empty in (MapDataset.range(0), MapDataset.range(5)[2:2], MapDataset.range(5).slice([])):
        dataset = make(empty)
        assert list(dataset) == dataset.fetch([]) == []
        with pytest.raises(OutOfRangeError, match=r'index 0 is out of range: .* has no elements'):
            dataset[0]
    with pytest.raises(OutOfRangeError, match='index 3 is out of range: batch.* has no elements'):
        MapDataset.range(1).batch(2, drop_remainder=True)[3]


def test_objects_that_are_not_datasets_are_refused():
    dataset = MapDataset.range(3)
    selection = [(0, 1)]
    for combine in (
        MapDataset.mix, MapDataset.zip, MapDataset.concatenate,
        lambda datasets: MapDataset.select_from_datasets(datasets, selection),
    ):  # fmt: skip
        with pytest.raises(InvalidArgumentError, match=r'dataset 1: expected a MapDataset, got \[1, 2\]: pass '):
            combine([dataset, [1, 2]])


@pytest.mark.parametrize('choice', [(0, 1, 2), (0, 1.5), (0,), 1, None], ids=str)
def test_selection_map_must_return_pairs_of_integers(choice):
    dataset = MapDataset.select_from_datasets([MapDataset.range(3)], [(0, 2), choice])
    with pytest.raises(InvalidArgumentError, match=r'expected pairs of integers, \(dataset, index\), got'):
        dataset.fetch([0, 1])


def test_batches_keep_masks():
    values = [np.array([1, 2]), np.ma.masked_array([3, 4], [True, False])]
    dataset = MapDataset.source(values)
    batch = dataset.batch(2)[0]
    assert batch.data.tolist() == [[1, 2], [3, 4]] and batch.mask.tolist() == [[False, False], [True, False]]
    pad = functools.partial(granular.grain.experimental.batch_and_pad, batch_size=3)
    (padded,) = dataset.to_iter_dataset().batch(2, batch_fn=pad)
    assert padded.mask.tolist() == [[False, False], [True, False], [False, False]]
    (joined,) = dataset.to_iter_dataset().batch(1).rebatch(2)
    assert joined.data.tolist() == batch.data.tolist() and joined.mask.tolist() == batch.mask.tolist()


@pytest.mark.parametrize('values', [[1, 2, 3], [1.5, 2.5, 3.5], [True, False, True]])
@pytest.mark.parametrize('mask', [[False, True, False], [True, False, False], [False, False, False]])
def test_batches_keep_the_masks_of_single_values(values, mask):
    masked = np.ma.masked_array(values, mask)
    (batch,) = MapDataset.source(masked).batch(3)
    assert batch.dtype == masked.dtype
    assert np.ma.getmaskarray(batch).tolist() == mask and batch.tolist() == masked.tolist()


def test_function_cannot_change_an_array_that_is_the_source():
    def double(row):
        row *= 2
        return row

    array = np.ones((4, 3))
    dataset = MapDataset.source(array).map(double)
    with pytest.raises(ValueError, match='read-only'):
        dataset[0]
    assert (array == 1).all()
    array[1] = 5  # its owner may
    assert MapDataset.source(array)[1].tolist() == [5, 5, 5]

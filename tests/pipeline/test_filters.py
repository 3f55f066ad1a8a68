"""Filters: selection and repetition of samples, as pure functions and as methods of MapDataset."""

import collections
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import granular
from granular import MapDataset, aio, filters
from granular.errors import InvalidArgumentError, UnknownKeyError

LABELS = [0, 1, 1, 1, 2, 2, 1, 0, 1, 1, 1]


# --- percent


@pytest.mark.parametrize(
    ('length', 'start', 'stop', 'expected'),
    [(100, None, 0.29, (0, 29)), (100, 0, 0, (0, 0)), (100, None, None, (0, 100)), (100, 0.29, 0.57, (29, 57)),
     (10, 1 - 0.9, 0.1 + 0.2, (1, 3)), (3, 1 / 3, 2 / 3, (1, 2)), (11, 0.25, 0.75, (2, 8)), (0, 0.1, 0.9, (0, 0)),
     (100, np.float32(0.29), np.float64(0.58), (29, 58)), (10**12, 0.29, 1, (29 * 10**10, 10**12)),
     (7, Fraction(1, 7), 1, (1, 7)), (4, np.longdouble(0.25), 1, (1, 4))],
)  # fmt: skip
def test_percent_boundaries(length, start, stop, expected):
    assert filters.percent_range(length, start, stop) == expected


@given(st.integers(0, 10**9), st.lists(st.floats(0, 1), max_size=6))
def test_adjacent_percent_ranges_partition_the_indices(length, edges):
    bounds = [0, *sorted(edges), 1]
    ranges = [filters.percent_range(length, a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == length
    assert all(left[1] == right[0] for left, right in zip(ranges, ranges[1:], strict=False))


@given(st.integers(1, 10**9), st.data())
def test_percent_of_samples(length, data):
    count = data.draw(st.integers(0, length))
    assert filters.percent_range(length, None, count / length)[1] == count
    hundredths = data.draw(st.integers(0, 100))
    assert filters.percent_range(length, None, float(f'{hundredths / 100:.2f}'))[1] == hundredths * length // 100


@pytest.mark.parametrize('bounds', [(-0.1, 1), (0, 1.1), (0.6, 0.5), (float('nan'), 1), ('0.5', 1)])
def test_invalid_percentages_are_rejected(bounds):
    with pytest.raises(InvalidArgumentError):
        filters.percent_range(10, *bounds)


# --- classes


def test_classes_are_selected():
    expected = [0, 4, 5, 7]
    for valid in ([0, 2], (2, 0, 0), {0, 2}, range(0, 3, 2), np.array([2, 0], np.uint8), [0, 2, 77, -5]):
        assert filters.by_class(LABELS, valid).tolist() == expected
    assert filters.by_class(np.array(LABELS), invalid_classes=[1, 7]).tolist() == expected
    assert filters.by_class(LABELS, []).tolist() == []
    assert filters.by_class(LABELS, invalid_classes=range(0)).tolist() == list(range(11))
    assert filters.by_class([-1, 3, -2], [-1, -2]).tolist() == [0, 2]
    assert filters.by_class(['cat', 'dog', 'cow'], invalid_classes=np.array(['dog'])).tolist() == [0, 2]
    assert filters.by_class([], [1]).tolist() == []


def test_samples_with_several_classes():
    for labels in (
        [[0, 3], [1], [], [3, 2]],
        [np.array([0, 3]), np.array([1]), np.zeros(0), (3, 2)],
        np.array([[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]], bool),
    ):
        assert filters.by_class(labels, [3]).tolist() == [0, 3]
        assert filters.by_class(labels, invalid_classes=[0, 1]).tolist() == [2, 3]
    assert filters.by_class([['cat'], ['dog', 'cat']], ['dog']).tolist() == [1]


@pytest.mark.parametrize(
    ('labels', 'valid', 'invalid', 'match'),
    [([0], None, None, 'either'), ([0], [0], [1], 'either'), ([0], 3, None, 'sequence of classes, got 3'),
     ([0], 'cat', None, "got 'cat'"), ([0], iter([0]), None, 'sequence of classes, got <list_iterator'),
     ([0], [[1]], None, 'sequence of classes'), ([0], [[1], [1, 2]], None, '1-D'),
     ([0], np.array(3), None, '1-D'), ([0], ['a', 1], None, 'int, str'), ([0], [0.5], None, 'float'),
     ([0.5], [0], None, 'got float'), ([None], [0], None, 'datapoint 0, got None'), (['a'], [0], None, 'strings'),
     ([0], ['0'], None, 'strings'), (['a', 0], [0], None, 'int, str'), ([[[0]]], [0], None, '1-D'),
     ([[0], 1], [0], None, 'datapoint 1, got 1'), (['a\0', 'a'], ['a'], None, 'labels: .* without zeros'),
     ([['a\0', 'b']], ['a'], None, 'without zeros'), ([np.str_('a\0')], ['a'], None, 'without zeros'),
     (['a'], ['a\0'], None, 'classes: .* without zeros')],
)  # fmt: skip
def test_invalid_classes_are_rejected(labels, valid, invalid, match):
    with pytest.raises(InvalidArgumentError, match=match):
        filters.by_class(labels, valid, invalid)


# --- oversampling: the lists are those of OversamplingWrapper(ds, mode=...).indices in kappadata 1.4.15


def test_oversampling_equals_that_of_kappadata():
    multiplied = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 7, 0, 7, 4, 5, 4, 5]
    assert filters.oversampled(LABELS).tolist() == multiplied
    exact = [0, 7, 0, 7, 0, 7, 0, 1, 2, 3, 6, 8, 9, 10, 4, 5, 4, 5, 4, 5, 4]
    assert filters.oversampled(LABELS, 'exact').tolist() == exact
    assert filters.oversampled([0, -1, 1, 1, 1, -1]).tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    # In kappadata 'exact' drops samples without a label, and never ends if a class has no samples.
    assert filters.oversampled([0, -1, 1, 1, 1, -1], 'exact').tolist() == [0, 0, 0, 2, 3, 4, 1, 5]


def test_oversampling_of_other_labels():
    assert filters.oversampled([1, -1, 1], 'exact', unlabeled=None).tolist() == [1, 1, 0, 2]
    assert filters.oversampled(['b', 'a', 'b'], 'exact').tolist() == [1, 1, 0, 2]
    assert filters.oversampled(['b', '', 'b', 'a'], 'exact', unlabeled='').tolist() == [3, 3, 0, 2, 1]
    assert filters.oversampled([5, 900, 900]).tolist() == [0, 1, 2, 0]
    for strategy in ('multiply', 'exact'):
        assert filters.oversampled([], strategy).tolist() == []
        assert filters.oversampled([-1, -1], strategy).tolist() == [0, 1]
    with pytest.raises(InvalidArgumentError, match='got several'):
        filters.oversampled([[0, 1], [1]])
    with pytest.raises(InvalidArgumentError, match="strategy: expected .* got 'double'"):
        filters.oversampled([0], 'double')
    with pytest.raises(InvalidArgumentError, match='unlabeled: .* without zeros'):
        filters.oversampled(['a'], unlabeled='a\0')


@given(st.lists(st.integers(-2, 6), max_size=60))
def test_oversampling_balances_the_counts(labels):
    before = collections.Counter(labels)
    largest = max((count for label, count in before.items() if label != -1), default=0)
    for strategy in ('multiply', 'exact'):
        indices = filters.oversampled(labels, strategy)
        after = collections.Counter(labels[i] for i in indices.tolist())
        assert set(indices.tolist()) == set(range(len(labels)))
        for label, count in before.items():
            expected = count if label == -1 else largest if strategy == 'exact' else largest // count * count
            assert after[label] == expected


# --- repeated and shuffled


def test_repetition_counts():
    assert filters.repetitions_of(11, min_size=25) == 3
    assert filters.repetitions_of(11, min_size=22) == 2
    assert filters.repetitions_of(11, min_size=np.int64(1)) == 1
    assert filters.repetitions_of(11, repetitions=4) == 4
    for options in ({}, {'repetitions': 1, 'min_size': 1}, {'repetitions': 0}, {'min_size': 1.5}, {'min_size': True}):
        with pytest.raises(InvalidArgumentError):
            filters.repetitions_of(11, **options)
    with pytest.raises(InvalidArgumentError, match='empty'):
        filters.repetitions_of(0, repetitions=2)


def test_shuffled_order_equals_that_of_kappadata():
    assert filters.shuffled(11, 5).tolist() == [10, 7, 1, 3, 2, 4, 6, 0, 9, 5, 8]  # ShuffleWrapper(ds, seed=5).indices
    with pytest.raises(InvalidArgumentError, match='seed'):
        filters.shuffled(11, -1)


# --- as methods of MapDataset


@pytest.fixture
def counted(monkeypatch):
    """Record the masks of each fetch of a reader."""
    masks = []
    fetch = aio.DatasetReader.fetch

    async def fetching(self, indices, mask=None):
        masks.append((len(indices), None if mask is None else list(mask)))
        return await fetch(self, indices, mask)

    monkeypatch.setattr(aio.DatasetReader, 'fetch', fetching)
    return masks


@pytest.fixture
def path(tmp_path):
    with granular.DatasetWriter(tmp_path / 'ds', {'x': 'bytes', 'label': 'int'}, granular.encoders) as writer:
        for i, label in enumerate(LABELS):
            writer.append({'x': bytes([i]) * 1000, 'label': label})
    return tmp_path / 'ds'


def test_labels_are_read_by_field_once_and_in_bulk(path, counted):
    with granular.DatasetReader(path, granular.decoders) as reader:
        dataset = MapDataset.source(reader)
        for none in (dataset.filter_classes(valid_classes=[99]), dataset.subset([])):
            assert (len(none), list(none), list(none.to_iter_dataset().batch(2))) == (0, [], [])
        train = dataset.filter_classes(valid_classes=[0, 2])
        assert counted == [(11, ['label'])]
        rest = dataset.filter_classes('label', invalid_classes=range(0, 3, 2))
        balanced = train.oversample(strategy='exact')
        assert counted == [(11, ['label'])]
        assert [datapoint['x'][0] for datapoint in train] == [0, 4, 5, 7]
        assert [datapoint['label'] for datapoint in rest] == [1] * 7
        assert [datapoint['x'][0] for datapoint in balanced] == [0, 7, 4, 5]
        assert [datapoint['x'][0] for datapoint in dataset.oversample().percent(0.5)] == [9, 10, 0, 7, 0, 7, 4, 5, 4, 5]
        assert all(mask is None for _, mask in counted[1:])
        counted.clear()
        dataset.percent(0.5).filter_classes(valid_classes=[1])
        assert counted == [(6, ['label'])]
        with pytest.raises(UnknownKeyError, match="'class'"):
            dataset.filter_classes('class', valid_classes=[1])


def test_filtered_dataset_prints_and_pickles(path):
    with granular.DatasetReader(path, granular.decoders) as reader:
        dataset = MapDataset.source(reader).filter_classes(valid_classes=[2, 0, 2]).oversample().shuffle(seed=1)
        stages = [line.rsplit(maxsplit=1) for line in str(dataset).splitlines()[1:]]
        assert [(stage.strip(), length) for stage, length in stages] == [
            ("filter_classes('label', valid_classes=[0, 2])", '4'),
            ("oversample('label', 'multiply')", '4'),
            ('shuffle(seed=1, Index())', '4'),
        ]
        twin = pickle.loads(pickle.dumps(dataset))
        assert list(twin.select('label')) == list(dataset.select('label'))
        state = iter(dataset.to_iter_dataset()).get_state()
        with iter(twin.to_iter_dataset()) as iterator:
            iterator.set_state(state)
            assert next(iterator)['label'] == dataset[0]['label']


def test_selection_is_the_same_in_every_epoch():
    datapoints = [{'label': label, 'i': i} for i, label in enumerate(LABELS)]
    dataset = MapDataset.source(datapoints)
    ones = dataset.shuffle(seed=3).filter_classes(valid_classes=[0])
    assert {datapoint['label'] for datapoint in ones.fetch(range(-4, 8))} == {0}
    some = dataset.shuffle(seed=3).filter_classes(invalid_classes=[2])[1:].filter_classes(valid_classes=[0])
    assert {datapoint['label'] for datapoint in some.fetch(range(3 * len(some)))} == {0}
    noisy = dataset.random_map(lambda datapoint, rng: {**datapoint, 'r': rng.random()}, seed=1)
    twos = noisy.filter_classes(valid_classes=[2])
    assert {datapoint['label'] for datapoint in twos.fetch(range(6))} == {2}
    assert len({datapoint['r'] for datapoint in twos.fetch(range(6))}) == 6
    both = MapDataset.mix([dataset, dataset]).filter_classes(valid_classes=[0])
    assert {datapoint['label'] for datapoint in both.fetch(range(3 * len(both)))} == {0}


def test_large_label_sets_of_a_dataset():
    dataset = MapDataset.source([{'label': label} for label in ([0, 3], [1], [], [3, 2])])
    chosen = dataset.filter_classes(valid_classes=[3, 1])
    assert [datapoint['label'] for datapoint in chosen.filter_classes(invalid_classes=range(1, 2))] == [[0, 3], [3, 2]]
    assert 'invalid_classes=range(0, 900)' in repr(dataset.filter_classes(invalid_classes=np.arange(900)))
    names = [f'class {i:02}' for i in range(12)]
    named = MapDataset.source([{'label': name} for name in names]).filter_classes(valid_classes=names)
    assert repr(names) in repr(named)
    with pytest.raises(InvalidArgumentError, match='got several'):
        chosen.oversample()


def test_parts_and_repeats_of_a_dataset():
    dataset = MapDataset.range(10)
    assert list(dataset.subset([3, -1, 3])) == [3, 9, 3]
    assert list(dataset.subset(np.array([1]))) == [1]
    assert list(dataset.percent(to_percent=0)) == []
    assert list(dataset.percent(0.29, 0.5)) == [2, 3, 4]
    assert len(dataset.repeat(min_size=21)) == 30
    with pytest.raises(InvalidArgumentError, match='either'):
        dataset.repeat(2, min_size=3)
    tuples = MapDataset.source([('a', 1), ('b', 0)])
    assert list(tuples.filter_classes(1, valid_classes=[0])) == [('b', 0)]


@pytest.mark.parametrize(
    ('make', 'match'),
    [(lambda d: d.filter_classes(), 'either'), (lambda d: d.repeat().filter_classes(valid_classes=[1]), 'infinitely'),
     (lambda d: d.repeat().percent(0.5), 'infinitely'), (lambda d: d.filter(bool).oversample(), 'removed'),
     (lambda d: d.map(lambda p: {'label': 0.5}).oversample(), 'label: expected classes')],
)  # fmt: skip
def test_invalid_selections_are_rejected(make, match):
    with pytest.raises(InvalidArgumentError, match=match):
        make(MapDataset.source([{'label': 1}] * 3))


async def test_async_api(path):
    async with aio.DatasetReader(path, granular.decoders) as reader:
        dataset = await aio.MapDataset.source(reader).filter_classes(invalid_classes=[1])
        assert len(dataset) == 4
        assert [datapoint['x'][0] async for datapoint in await dataset.oversample(strategy='exact')] == [0, 7, 4, 5]


@pytest.mark.parametrize('blocking', [False, True])
@pytest.mark.parametrize(
    'arranged',
    [
        lambda one: one.select(['image', 'label']),
        lambda one: one.select(['image', 'label']).select(['label', 'image']).shuffle(seed=0)[:6],
        lambda one: MapDataset.concatenate([one, one.select(['image', 'label'])]),
        lambda one: MapDataset.mix([one, one], [0.3, 0.7]),
        lambda one: MapDataset.select_from_datasets([one, one], [(1, 0), (0, 1)]),
    ],
)
def test_labels_are_read_alone_behind_select_and_combinations(tmp_path, arranged, blocking):
    class Blocking:
        def __init__(self, reader):
            self.reader = reader

        def __len__(self):
            return len(self.reader)

        def fetch(self, indices, mask=None):
            return self.reader.fetch(indices, mask)

    def fail(record):
        raise AssertionError('an image was read')

    with granular.DatasetWriter(tmp_path / 'x', {'image': 'png', 'label': 'int'}) as writer:
        for i in range(8):
            writer.append({'image': np.zeros((2, 2, 3), np.uint8), 'label': i % 2})
    with granular.DatasetReader(tmp_path / 'x', {**granular.decoders, 'png': fail}) as reader:
        dataset = arranged(MapDataset.source(Blocking(reader) if blocking else reader))
        chosen = dataset.filter_classes(valid_classes=[1]).oversample()
        assert {datapoint['label'] for datapoint in chosen.select(['label'])} == {1}
        with pytest.raises(UnknownKeyError, match=r"unknown fields \['image'\]: an earlier select has \['label'\]"):
            dataset.select(['label']).select(['image'])


def test_labels_with_a_mask_are_refused():
    masked = np.ma.masked_array([1, 2], [False, True])
    absent = np.ma.masked_array([False, False], [False, True])
    for labels in (masked, [masked, [1]], [masked, [1, 3]], np.ma.stack([masked, masked]), [absent, [True, False]]):
        with pytest.raises(InvalidArgumentError, match='with a mask'):
            filters.by_class(labels, valid_classes=[2])


def test_texts_that_numpy_would_cut_are_refused():
    for labels, valid in ((['a\0', 'b'], ['a']), ([['a\0'], ['b', 'c']], ['a']), (['a', 'b'], ['a\0'])):
        with pytest.raises(InvalidArgumentError, match='without zeros at their end'):
            filters.by_class(labels, valid)

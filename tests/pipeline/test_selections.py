"""Selections behind stages that choose other elements in each epoch, and streams of later epochs."""

import collections
import logging

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

import granular
from granular import MapDataset, sources
from granular.grain.experimental import ParquetIterDataset
from tests.support.seams import stream_of

LENGTH = 24
BASES = {
    'shuffle': lambda d: d.shuffle(seed=3),
    'Blocks': lambda d: d.shuffle(seed=3, order=granular.shuffle.Blocks(2, 3)),
    'Permutation': lambda d: d.shuffle(seed=3, order=granular.shuffle.Permutation()),
    'window_shuffle': lambda d: d.window_shuffle(7, seed=3),
    'twice': lambda d: d.shuffle(seed=3).window_shuffle(5, seed=1),
    'batch': lambda d: d.shuffle(seed=3).batch(2, drop_remainder=True),
    'concatenate': lambda d: MapDataset.concatenate([d, d.map(lambda x: x + 100).shuffle(seed=1)]),
    'mix': lambda d: MapDataset.mix([d, d.map(lambda x: x + 100)[:7]], [0.7, 0.3]),
    'zip': lambda d: MapDataset.zip([d, d.shuffle(seed=1)]),
    'flat_map': lambda d: d.shuffle(seed=3).flat_map(lambda x: [x, x + 1000], max_fan_out=2),
    'filter': lambda d: d.shuffle(seed=3).filter(lambda x: x % 3),
    'one epoch': lambda d: d.shuffle(seed=3).repeat(1),
    'Interleave': lambda d: MapDataset(sources.Interleave([d.shuffle(seed=3), d[:5]]).aio),
    'Mix': lambda d: MapDataset(sources.Mix([d, d.map(lambda x: -x)], [1, 1]).aio),
}
SELECTIONS = {
    '[3:]': lambda d: d[3:],
    '[:5]': lambda d: d[:5],
    '[1::2]': lambda d: d[1::2],
    'subset': lambda d: d.subset([4, 0, 4, 2]),
    'percent': lambda d: d.percent(from_percent=0.5),
    'two': lambda d: d[1:].map(lambda x: x)[:-1],
}
AFTER = {
    'nothing': lambda d: d,
    'map': lambda d: d.map(lambda x: x),
    'shuffle': lambda d: d.shuffle(seed=8),
    'shuffle, window_shuffle': lambda d: d.shuffle(seed=8).window_shuffle(3, seed=1),
}


def plain(element):
    return tuple(map(plain, element)) if isinstance(element, tuple | list | np.ndarray) else element


def epoch_of(dataset, epoch):
    length = len(dataset)
    return [plain(element) for element in dataset.fetch(np.arange(epoch * length, (epoch + 1) * length))]


def kept(dataset, **options):
    return MapDataset(dataset.node.keep_selections(**options))


@pytest.mark.parametrize('after', AFTER)
@pytest.mark.parametrize('selection', SELECTIONS)
@pytest.mark.parametrize('base', BASES)
def test_a_selection_has_the_same_elements_in_each_epoch(base, selection, after, caplog):
    dataset = AFTER[after](SELECTIONS[selection](BASES[base](MapDataset.range(LENGTH))))
    result = kept(dataset)
    assert str(result) == str(dataset)
    assert ['slice before shuffle' in message for message in caplog.messages] == [True] * len(caplog.messages)
    assert len(caplog.messages) == 1
    first = epoch_of(dataset, 0)
    assert epoch_of(result, 0) == first
    for epoch in (1, 2, 7):
        elements = epoch_of(result, epoch)
        assert collections.Counter(elements) == collections.Counter(first)
        assert 'shuffle' in after or elements == first
    assert kept(result).node is result.node
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    'dataset',
    [
        MapDataset.range(LENGTH),
        MapDataset.range(LENGTH)[3:].shuffle(seed=0),
        MapDataset.range(LENGTH).shuffle(seed=0),
        MapDataset.range(LENGTH).shuffle(seed=0)[::-1],
        MapDataset.range(LENGTH).shuffle(seed=0).subset(list(range(LENGTH))),
        MapDataset.range(LENGTH).shuffle(seed=0).repeat()[5:100],
        MapDataset.range(LENGTH).shuffle(seed=0).repeat(3)[5:40],
        MapDataset.range(LENGTH).shuffle(seed=0).repeat(2, reseed_each_epoch=False)[5:40],
        MapDataset.source(MapDataset.range(LENGTH).shuffle(seed=0))[3:],
        MapDataset.mix([MapDataset.range(6), MapDataset.range(12)], [1, 2])[3:],
        MapDataset.range(LENGTH).shuffle(seed=0, order=granular.shuffle.Sequential())[3:],
        MapDataset.source([{'label': i % 3} for i in range(9)]).shuffle(seed=0).filter_classes(valid_classes=[1]),
    ],
    ids=str,
)
def test_other_datasets_stay_as_they_are(dataset, caplog):
    assert dataset.node.keep_selections() is dataset.node
    stream = stream_of(dataset.map(lambda x: x).to_iter_dataset().batch(2))
    assert stream.keep_selections() is stream
    assert caplog.messages == []


def test_random_functions_differ_from_epoch_to_epoch_within_a_kept_selection():
    def draw(x, rng):
        return x, int(rng.integers(1 << 40))

    for dataset in (
        MapDataset.range(LENGTH).shuffle(seed=0).random_map(draw, seed=1)[3:],
        MapDataset.range(LENGTH).random_map(draw, seed=1).shuffle(seed=0)[3:],
    ):
        first, second = (dict(epoch_of(kept(dataset), epoch)) for epoch in (0, 1))
        assert first.keys() == second.keys()
        assert not set(first.values()) & set(second.values())


@given(length=st.integers(1, 70), start=st.integers(0, 69), seed=st.integers(0, 9), epoch=st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_splits_behind_a_shuffle_never_share_elements(length, start, seed, epoch):
    dataset = MapDataset.range(length).shuffle(seed=seed, order=granular.shuffle.Blocks(3, 2))
    parts = [kept(dataset[start:], warn=False), kept(dataset[:start], warn=False)]
    assert sorted(element for part in parts if len(part) for element in epoch_of(part, epoch)) == list(range(length))


def test_streams_keep_selections_of_what_they_read(caplog):
    def files(number):
        return MapDataset.range(10 * number, 10 * number + 10).shuffle(seed=0)[:4].to_iter_dataset()

    dataset = MapDataset.range(LENGTH).shuffle(seed=0)[3:]
    nested = MapDataset.range(6).shuffle(seed=0)[:3].map(files)
    for make in (
        lambda: dataset.to_iter_dataset().filter(lambda x: x % 2).batch(2),
        lambda: granular.IterDataset.mix([dataset, dataset.map(abs)]).window_shuffle(4, seed=0),
        lambda: granular.IterDataset.interleave(nested, cycle_length=2),
    ):
        caplog.clear()
        stream = stream_of(make()).keep_selections()
        assert 0 < len(caplog.messages) <= 2
        epochs = [
            np.concatenate([np.atleast_1d(element) for element in granular.IterDataset(stream.at_epoch(epoch))])
            for epoch in range(3)
        ]
        assert [sorted(epoch.tolist()) for epoch in epochs[1:]] == [sorted(epochs[0].tolist())] * 2


def test_repeat_over_a_selection_behind_a_shuffle_warns(caplog):
    dataset = MapDataset.range(LENGTH).shuffle(seed=0)
    for quiet in (dataset.repeat, dataset[3:].repeat(1).map, dataset[::-1].repeat):
        quiet() if quiet.__name__ == 'repeat' else quiet(abs)
    dataset[3:].repeat(3, reseed_each_epoch=False)
    MapDataset.range(LENGTH)[3:].shuffle(seed=0).repeat()
    assert caplog.messages == []
    repeated = dataset[3:].map(abs).repeat(2)
    (message,) = caplog.messages
    assert message.startswith('repeat: [3:24:1] is a selection behind shuffle(seed=0, Index())')
    assert caplog.records[0].levelno == logging.WARNING
    second = epoch_of(dataset[3:], 1)
    assert [repeated[i] for i in range(21, 42)] == second  # the order of Grain


# --- streams of later epochs


def draw(x, rng):
    return x, int(rng.integers(1 << 40))


def documents(x):
    return {'tokens': np.full(1 + x % 5, x)}


RANDOM = {
    'window_shuffle': lambda s: s.window_shuffle(8, seed=1),
    'window_shuffle behind filter': lambda s: s.filter(lambda x: x != 3).window_shuffle(8, seed=1),
    'random_map': lambda s: s.random_map(draw, seed=1),
    'random_map, seed of several integers': lambda s: s.random_map(draw, seed=[1, 2]),
    'random_map behind filter': lambda s: s.filter(lambda x: x != 3).random_map(draw, seed=1),
    'shuffle_bins': lambda s: s.map(documents).pack({'tokens': 8}, num_packing_bins=6, shuffle_bins=True, seed=1),
    'mix': lambda s: granular.IterDataset.mix([s.window_shuffle(8, seed=1), s.window_shuffle(8, seed=2)]),
    'later stages': lambda s: s.window_shuffle(8, seed=1).batch(3).prefetch(2),
    'seed': lambda s: s.seed(1).random_map(draw),
}


def shown(stream):
    return [str(element) for element in granular.IterDataset(stream)]


@pytest.mark.parametrize('stage', RANDOM)
def test_random_stages_of_a_stream_differ_from_epoch_to_epoch(stage):
    stream = stream_of(RANDOM[stage](MapDataset.range(40).to_iter_dataset()))
    assert stream.at_epoch(0) is stream
    epochs = [shown(stream.at_epoch(epoch)) for epoch in (0, 1, 2)]
    assert epochs[0] == shown(stream)
    assert len(set(map(tuple, epochs))) == 3
    assert shown(stream.at_epoch(2)) == epochs[2]
    if 'random_map' not in stage and 'later' not in stage and stage != 'seed':
        assert [sorted(epoch) for epoch in epochs[1:]] == [sorted(epochs[0])] * 2


@pytest.mark.parametrize('stage', RANDOM)
def test_states_fit_their_epoch_alone(stage):
    stream = stream_of(RANDOM[stage](MapDataset.range(40).to_iter_dataset()))
    later = granular.IterDataset(stream.at_epoch(2))
    elements = shown(stream.at_epoch(2))
    with iter(later) as iterator:
        for _ in range(5):
            next(iterator)
        state = iterator.get_state()
    with iter(later) as iterator:
        iterator.set_state(state)
        assert list(map(str, iterator)) == elements[5:]
    for epoch in (0, 1):
        with iter(granular.IterDataset(stream.at_epoch(epoch))) as iterator, pytest.raises(granular.errors.StateError):
            iterator.set_state(state)


def test_streams_of_files_have_epochs(tmp_path):
    paths = [tmp_path / f'{i}.parquet' for i in range(3)]
    for i, path in enumerate(paths):
        parquet.write_table(pyarrow.table({'x': [100 * i + j for j in range(20)]}), path, row_group_size=6)
    stream = ParquetIterDataset([str(path) for path in paths])
    assert stream_of(stream).at_epoch(3) is stream_of(stream)
    rows = [row['x'] for row in stream]
    for random in (
        lambda s: s.window_shuffle(10, seed=0),
        lambda s: s.random_map(lambda x, rng: {'x': x['x'], 'r': rng.random()}, seed=0),
    ):
        epochs = [list(granular.IterDataset(stream_of(random(stream)).at_epoch(epoch))) for epoch in range(3)]
        assert epochs[0] == list(random(stream))
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
        assert [sorted(row['x'] for row in epoch) for epoch in epochs] == [sorted(rows)] * 3


def test_files_of_an_interleave_have_another_order_in_each_epoch():
    def file(number):
        return MapDataset.range(10 * number, 10 * number + 3).shuffle(seed=0)

    stream = stream_of(granular.IterDataset.interleave(MapDataset.range(6).shuffle(seed=0).map(file), cycle_length=1))
    epochs = [list(granular.IterDataset(stream.at_epoch(epoch))) for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(epochs[0])] * 3
    files = [[x // 10 for x in epoch[::3]] for epoch in epochs]
    shuffled = MapDataset.range(6).shuffle(seed=0)
    assert files == [[shuffled[6 * epoch + i] for i in range(6)] for epoch in range(3)]

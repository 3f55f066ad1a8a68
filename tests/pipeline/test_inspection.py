"""The element spec of a pipeline, the times of its stages, and the log of its elements."""

import logging

import numpy as np
import pytest

import granular
from granular import IterDataset, MapDataset
from granular.errors import InvalidArgumentError
from granular.grain import DatasetIterator
from granular.grain.experimental import DatasetOptions, ShapeDtypeStruct, get_element_spec


def struct(shape, dtype):
    return ShapeDtypeStruct(shape, np.dtype(dtype))


class Scale(granular.grain.transforms.Map):
    def map(self, element):
        raise AssertionError('computed')

    def output_spec(self, spec):
        return {**spec, 'x': struct(spec['x'].shape, 'float32')}


def test_spec_follows_from_the_stages():
    images = [{'x': np.zeros((2, 3), np.uint8), 'n': (i, 0.5)} for i in range(10)]
    dataset = MapDataset.source(images)
    element = {'x': struct((2, 3), 'uint8'), 'n': (struct((), 'int64'), struct((), 'float64'))}
    assert get_element_spec(dataset) == element
    assert get_element_spec(dataset.shuffle(seed=1).repeat()[3:]) == element
    assert get_element_spec(dataset.filter(Scale().map)) == element
    batch = {'x': struct((None, 2, 3), 'uint8'), 'n': (struct((None,), 'int64'), struct((None,), 'float64'))}
    stream = dataset.to_iter_dataset()
    for pipeline in (
        dataset.batch(4),
        stream.batch(4),
        stream.filter(Scale().map).batch(4).prefetch(2).limit(3).repeat(2),
        stream.batch(2).window_shuffle(2, seed=1).seed(3).batch(2).map(Half()),
    ):
        assert get_element_spec(pipeline) == batch
    scaled = {**element, 'x': struct((2, 3), 'float32')}
    assert get_element_spec(dataset.map(Scale())) == scaled
    assert get_element_spec(stream.map(Scale())) == scaled
    batched = get_element_spec(dataset.map(Scale()).batch(5))
    assert batched['x'] == struct((None, 2, 3), 'float32')
    assert get_element_spec(stream.batch(5, drop_remainder=True).map(Scale()))['x'] == struct((5, 2, 3), 'float32')


class Rounded(granular.grain.transforms.Map):
    def map(self, element):
        return np.int64(element)

    def output_spec(self, spec):
        return granular.grain.experimental.ShapeDtypeStruct((), np.int64)


def test_classes_of_numbers_are_dtypes():
    assert (
        struct((2,), np.int64)
        == granular.grain.experimental.ShapeDtypeStruct((2,), np.int64)
        == granular.grain.experimental.ShapeDtypeStruct((2,), 'i8')
    )
    dataset = MapDataset.range(3).map(Rounded())
    assert get_element_spec(dataset) == struct((), 'int64')
    assert get_element_spec(dataset.batch(2)) == struct((None,), 'int64')
    assert get_element_spec(MapDataset.source([np.int64, np.ndarray])) == struct((), object)


class Half(granular.grain.transforms.Map):
    def map(self, element):
        return element

    def output_spec(self, spec):
        return {
            'x': struct((None, *spec['x'].shape[2:]), 'uint8'),
            'n': (struct((None,), 'int64'), struct((None,), 'float64')),
        }


BATCHED = (
    'd.batch(5)', 'd.batch(4)', 'd.batch(5, drop_remainder=True)', 'd.batch(50)', 'd.to_iter_dataset().batch(5)',
    'd.to_iter_dataset().batch(4)', 'd.to_iter_dataset().batch(5, drop_remainder=True)', 'd.batch(2).batch(3)',
    'd.batch(2, drop_remainder=True).batch(3)', 'd.repeat(2).batch(5)', 'd.repeat().batch(5)', 'd.batch(5).repeat()',
    'd.batch(5)[:1]', 'd.filter(lambda x: True).to_iter_dataset().batch(5)', 'd.shuffle(seed=1).batch(5)',
)  # fmt: skip


@pytest.mark.parametrize('text', BATCHED)
def test_spec_of_batches_is_that_of_grain(text):
    import grain.experimental

    expected = grain.experimental.get_element_spec(eval(text, {'d': grain.MapDataset.range(12)}))
    spec = get_element_spec(eval(text, {'d': MapDataset.range(12)}))
    assert (spec.shape, spec.dtype) == (expected.shape, expected.dtype)


def test_spec_is_that_of_the_first_element_where_it_does_not_follow():
    calls = []
    dataset = MapDataset.range(10).map(lambda x: calls.append(x) or {'t': 'ab', 'a': np.zeros(x + 1, np.int8)})
    assert get_element_spec(dataset) == {'t': struct((), object), 'a': struct((1,), 'int8')}
    assert calls == [0]
    assert get_element_spec(MapDataset.source(['a', 'bc']).batch(2)) == struct((None,), '<U2')
    assert get_element_spec(MapDataset.source([np.str_('a'), np.str_('bc')]).batch(2)) == struct((None,), '<U2')
    packed = dataset.map(lambda point: {'a': point['a']}).to_iter_dataset().pack({'a': 16})
    assert get_element_spec(packed)['a_segment_ids'] == struct((16,), 'int32')
    assert get_element_spec(MapDataset.source([None, np.int16(3)])) == struct((), 'int16')
    loader = granular.grain.DataLoader(
        data_source=[np.zeros(3)] * 5,
        sampler=granular.grain.samplers.SequentialSampler(5),
        operations=[granular.grain.transforms.Batch(2)],
    )
    assert get_element_spec(loader) == struct((None, 3), 'float64')
    for empty in (
        MapDataset.range(0),
        MapDataset.range(3).filter(lambda x: False).map(str).to_iter_dataset().rebatch(2),
    ):
        with pytest.raises(InvalidArgumentError, match='has no elements'):
            get_element_spec(empty)
    with pytest.raises(InvalidArgumentError, match='expected a MapDataset, an IterDataset or a DataLoader, got 3'):
        get_element_spec(3)


async def test_spec_in_the_async_api():
    assert await granular.aio.get_element_spec(granular.aio.MapDataset.range(5).batch(2)) == struct((None,), 'int64')


def slow(x):
    for _ in range(20_000):
        pass
    return x


def test_summary_shows_elements_and_times_of_each_stage():
    stream = (
        MapDataset.range(40).map(slow).to_iter_dataset().filter(lambda x: x % 2).batch(5).flat_map(list).prefetch(2)
    )
    timed = stream.with_options(DatasetOptions(stage_timing=True))
    assert str(timed) == str(stream)
    expected = list(stream)
    with iter(timed) as iterator:
        assert list(iterator) == expected
        rows = iterator.execution_summary()
        state = iterator.get_state()
    assert [(row.stage.split('(')[0], row.elements) for row in rows] == [
        ('range', 40), ('map', 40), ('filter', 40), ('to_iter_dataset', 20), ('batch', 4), ('flat_map', 20),
        ('prefetch', 20), ('consumer', 20),
    ]  # fmt: skip
    assert max(rows[:3], key=lambda row: row.seconds).stage == 'map(slow)'
    assert all(row.seconds >= 0 and row.wait_seconds >= 0 for row in rows)
    with iter(stream) as iterator:
        iterator.set_state(state)
        with pytest.raises(InvalidArgumentError, match='not timed: call with_options'):
            iterator.execution_summary()


def test_options_of_earlier_stages_trace_later_ones():
    timed = MapDataset.range(9).to_iter_dataset().with_options(DatasetOptions(stage_timing=True)).map(str)
    for stream, expected in (
        (timed, ['range(0, 9)', 'map(str)', 'to_iter_dataset()', 'consumer']),
        (timed.batch(2), ['range(0, 9)', 'map(str)', 'to_iter_dataset()', 'batch(2)', 'consumer']),
        (IterDataset.zip([timed, timed.batch(1)]), None),
        (IterDataset.interleave([timed, timed.batch(1)], 2).limit(7), None),
    ):
        plain = [str(element) for element in stream]
        with iter(stream) as iterator:
            assert [str(element) for element in iterator] == plain
            rows = iterator.execution_summary()
            assert expected is None or [row.stage for row in rows] == expected
            state = iterator.get_state()
            iterator.set_state(state)
            assert list(iterator) == []
    random = timed.random_map(lambda x, rng: x + str(rng.integers(99)), seed=3)
    untimed = (
        MapDataset.range(9).to_iter_dataset().map(str).random_map(lambda x, rng: x + str(rng.integers(99)), seed=3)
    )
    assert list(random) == list(untimed)


@pytest.mark.parametrize('batched', [False, True])
def test_later_options_replace_those_of_all_stages(batched):
    stream = MapDataset.range(9).to_iter_dataset()
    stream = (stream.batch(2) if batched else stream).with_options(DatasetOptions(stage_timing=True))
    with iter(stream.limit(3).with_options(DatasetOptions())) as iterator:
        next(iterator)
        with pytest.raises(InvalidArgumentError, match='not timed: call with_options'):
            iterator.execution_summary()


def test_debug_mode_logs_what_each_stage_yields(caplog):
    caplog.set_level(logging.INFO, 'granular')
    dataset = MapDataset.range(5).shuffle(seed=1).map(lambda x: {'x': np.full(3, x)}).filter(lambda e: e['x'][0] != 2)
    stream = dataset.to_iter_dataset().batch(2)
    expected = list(stream)
    with iter(stream.mp_prefetch(2).with_options(DatasetOptions(debug=True))) as iterator:
        for batch, same in zip(iterator, expected, strict=True):
            assert batch['x'].tolist() == same['x'].tolist()
        assert iterator.get_next_index is not None
    messages = [record.getMessage() for record in caplog.records]
    assert 'range(0, 5): step 0: 0' in messages
    assert sum(message.startswith('map(') and message.endswith("{'x': int64[3]}") for message in messages) == 5
    assert sum(message.startswith('filter(') for message in messages) == 4
    assert sum(message.startswith('to_iter_dataset(): element ') for message in messages) == 4
    assert "batch(2): element 1: {'x': int64[2, 3]}" in messages
    with pytest.raises(InvalidArgumentError, match='debug'):
        DatasetOptions(debug=2)


class Pairs(MapDataset):
    """Two datasets, with a length of its own."""

    def __init__(self, first, second, length):
        super().__init__([first, second])
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self._parents[0][index], self._parents[1][index]


class Negated(IterDataset):
    def __iter__(self):
        return NegatedIterator(iter(self._parent))


class NegatedIterator(DatasetIterator):
    def __next__(self):
        return -next(self._parent)

    def get_state(self):
        return self._parent.get_state()

    def set_state(self, state):
        self._parent.set_state(state)


def first(pair):
    return pair[0]


def test_debug_mode_logs_the_stages_that_subclasses_read(caplog):
    caplog.set_level(logging.INFO, 'granular')
    mix = MapDataset.mix([MapDataset.range(9).shuffle(seed=1), MapDataset.range(100, 109)])
    pairs = Pairs(
        Pairs(mix, MapDataset.range(50, 60).batch(2, batch_fn=list), 4).map(first), MapDataset.range(3).map(float), 3
    )
    stream = Negated(Negated(pairs.map(first).to_iter_dataset()).batch(2)).flat_map(list)
    debug = stream.with_options(DatasetOptions(debug=True))
    expected = [element.item() for element in stream]
    assert not caplog.records
    with iter(stream) as plain, iter(debug) as logged:
        for at, element in enumerate(logged):
            assert element == expected[at]
            assert next(plain) == element
            assert logged.get_state() == plain.get_state()
        rows = logged.execution_summary()
    messages = [record.getMessage() for record in caplog.records]
    for message in (
        'shuffle(seed=1, Index()): step 0: 5',
        'range(100, 109): step 0: 100',
        'mix of 2, weights 1:1: step 1: 100',
        'batch(2, batch_fn=list): step 0: [50, 51]',
        'Pairs: step 0: (5, [50, 51])',
        'map(float): step 0: 0.0',
        'Pairs: step 0: (5, 0.0)',
        'to_iter_dataset(): element 1: 100',
        'Negated: element 1: -100',
        'batch(2): element 1: int64[1]',
        'Negated: element 0: int64[2]',
    ):
        assert messages.count(message) == 1, message
    # Stages within a subclass of MapDataset are timed as a part of it, those before one of IterDataset by themselves.
    assert [(row.stage, row.elements) for row in rows if row.stage != 'range(0, 9)'][-7:] == [
        ('map(first)', 3), ('to_iter_dataset()', 3), ('Negated', 3), ('batch(2)', 2), ('Negated', 2),
        ('flat_map(list)', 3), ('consumer', 3),
    ]  # fmt: skip
    assert messages.count('map(first): step 2: 7') == 2


def test_debug_mode_logs_streams_that_are_made(caplog):
    caplog.set_level(logging.INFO, 'granular')
    made = MapDataset.range(2).map(lambda number: MapDataset.range(number + 1).map(str).to_iter_dataset().batch(1))
    stream = IterDataset.interleave(made, 2).with_options(DatasetOptions(debug=True))
    assert [batch.tolist() for batch in stream] == [['0'], ['0'], ['1']]
    messages = [record.getMessage() for record in caplog.records]
    assert messages.count("map(str): step 1: '1'") == messages.count('range(0, 2): step 1: 1') == 1
    assert messages.count('batch(1): element 1: <U1[1]') == 1
    assert messages.count('interleave of 2, 2 at a time: element 2: <U1[1]') == 1


def test_iterators_show_their_last_stage_and_progress():
    with iter(granular.MapDataset.range(5).to_iter_dataset().map(str)) as iterator:
        next(iterator)
        assert repr(iterator) == '<DatasetIterator of map(str): 1 element>'


def test_progress_of_each_epoch_of_a_loader_shows_all_of_its_batches(capsys):
    with granular.Loader(granular.MapDataset.range(8).map(lambda x: {'x': x}), 4) as loader:
        for _ in range(2):
            assert len(list(granular.progress(loader))) == 2
            assert '2/2' in capsys.readouterr().err


def test_types_in_elements_are_objects():
    dataset = granular.MapDataset.range(3).map(lambda x: {'type': np.int64, 'other': np.ndarray, 'x': np.float32(x)})
    for stream in (dataset, dataset.to_iter_dataset()):
        spec = granular.grain.experimental.get_element_spec(stream)
        assert spec['type'] == spec['other'] == granular.grain.experimental.ShapeDtypeStruct((), np.dtype(object))
        assert spec['x'] == granular.grain.experimental.ShapeDtypeStruct((), np.dtype(np.float32))

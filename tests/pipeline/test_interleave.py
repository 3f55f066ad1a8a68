"""Interleaved streams that are opened while others are read: elements of Grain, exact states, and nothing left."""

import gc
import itertools
import json
import threading
import weakref
from collections import deque

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

import granular
from granular import IterDataset, MapDataset, ReadOptions, ShardOptions
from granular.errors import InvalidArgumentError, StateError
from granular.grain import MultiprocessingOptions
from granular.grain.experimental import DatasetOptions, ParquetIterDataset
from tests.support.states import check_each_state, plain

# The same expressions here, where `I` is `IterDataset.interleave`, and with Grain.
SAME = {
    'streams': 'I([part(i) for i in range(5)], cycle_length=2)',
    'mapdatasets': 'I([M.range(10 * i, 10 * i + i) for i in range(5)], cycle_length=3)',
    'empty ones': 'I([M.range(n).to_iter_dataset() for n in (0, 3, 0, 0, 2, 0)], cycle_length=2)',
    'more than there are': 'I([part(i) for i in range(3)], cycle_length=8)',
    'one at a time': 'I([part(i) for i in range(4)], cycle_length=1)',
    'one': 'I([part(3)], cycle_length=1)',
    'lazy': 'I(M.source(range(7)).map(part), cycle_length=3)',
    'lazy, shuffled': 'I(M.source(range(7)).shuffle(seed=2).map(part), cycle_length=4)',
    'lazy, mapdatasets': 'I(M.source(range(6)).map(lambda n: M.range(n).map(lambda x: (n, x))), cycle_length=2)',
    'lazy, buffers': 'I(M.range(9).map(part), cycle_length=3, num_make_iter_threads=2, make_iter_buffer_size=4, '
    'iter_buffer_size=3)',
    'lazy, batched': 'I(M.range(6).map(lambda n: M.range(3 * n).to_iter_dataset().batch(2)), cycle_length=2)',
    'then more': 'I(M.range(6).map(part), cycle_length=2).filter(lambda x: x % 3).batch(3)',
    'twice': 'I([I(M.range(3).map(part), cycle_length=2), I(M.range(4).map(part), cycle_length=3)], cycle_length=2)',
    'random': 'I(M.range(4).map(part), cycle_length=2).seed(5).random_map(lambda x, r: x + int(r.integers(99)))',
}  # fmt: skip

GRAIN = """
M, X = grain.MapDataset, grain.experimental
def I(*args, **options): return X.InterleaveIterDataset(*args, **options)
def part(n): return M.range(100 * n, 100 * n + n).to_iter_dataset()
print(json.dumps({name: plain(list(eval(text))) for name, text in json.loads(sys.argv[1]).items()}))
"""


def part(n):
    return MapDataset.range(100 * n, 100 * n + n).to_iter_dataset()


def make(name):
    return eval(SAME[name], {'I': IterDataset.interleave, 'M': MapDataset, 'part': part})


def test_elements_equal_those_of_grain(grain):
    for name, expected in grain.run(GRAIN, json.dumps(SAME)).items():
        assert plain(list(make(name))) == expected, name


@pytest.mark.parametrize('name', SAME)
def test_state_is_exact_between_any_two_elements(name):
    with iter(make(name)) as iterator:
        expected, states = check_each_state(iterator, 3)
    for at in range(0, len(states), 4):
        with iter(make(name)) as iterator:
            iterator.set_state(states[at])
            assert [plain(element) for element in iterator] == expected[at:], at
    with iter(make(name).repeat(2)) as iterator:
        assert [plain(element) for element in iterator] == 2 * expected


HOLDING = {
    'cache': lambda d: d.cache(),
    'window_shuffle': lambda d: d.window_shuffle(4, seed=0),
    'flat_map': lambda d: d.flat_map(lambda x: [x, x]),
    'rebatch': lambda d: d.batch(3).rebatch(2),
}


@pytest.mark.parametrize('stage', HOLDING)
def test_states_fit_streams_that_began_earlier_or_later(stage):
    parts = [MapDataset.range(length).to_iter_dataset() for length in (2, 3, 1)]
    for before in (IterDataset.interleave(parts, 3).repeat(2), IterDataset.interleave(parts, 3).repeat(2).prefetch(1)):
        stream = HOLDING[stage](before)
        elements = [plain(element) for element in stream]
        for at, begins in itertools.product(range(len(elements) + 1), (False, True)):
            with iter(stream) as first, iter(stream) as second, iter(stream) as third:
                deque(itertools.islice(first, at), 0)
                if begins:
                    first.start_prefetch()
                second.set_state(first.get_state())
                second.start_prefetch()
                third.set_state(second.get_state())
                for iterator in (second, third):
                    assert [plain(element) for element in iterator] == elements[at:]


def test_datasets_are_made_shortly_before_their_turn():
    made, lock = [], threading.Lock()

    def open_file(n):
        with lock:
            made.append(n)
        return MapDataset.range(100 * n, 100 * n + 3).to_iter_dataset()

    stream = IterDataset.interleave(MapDataset.range(1000).map(open_file), cycle_length=2, make_iter_buffer_size=3)
    assert made == []
    with iter(stream) as iterator:
        assert made == []
        assert [next(iterator) for _ in range(6)] == [0, 100, 1, 101, 2, 102]
        assert next(iterator) == 200
        assert sorted(made) == list(range(len(made)))
        assert len(made) <= 2 + 2 + 3
        state = iterator.get_state()
        assert set(state['state']['parents']) <= {'1', '2'}
        assert iterator.stats()['read'] == 7
    made.clear()
    with iter(stream) as iterator:
        iterator.set_state(state)
        assert [next(iterator) for _ in range(3)] == [300, 201, 301]
        assert 0 not in made
    for thread in threading.enumerate():  # those that are about to end
        if 'interleave' in thread.name:
            thread.join(30)
            assert not thread.is_alive()


def test_errors_name_the_dataset_and_do_not_shift_the_state():
    broken = {2}

    def open_file(n):
        if n in broken:
            raise OSError(f'file {n} is away')
        return part(n + 1)

    expected = list(IterDataset.interleave([part(n + 1) for n in range(4)], 2))
    with iter(IterDataset.interleave(MapDataset.range(4).map(open_file), 2)) as iterator:
        elements = []
        with pytest.raises(OSError, match='file 2 is away') as caught:
            while True:
                elements.append(next(iterator))
        assert caught.value.__notes__[0].startswith('while transforming the datapoint at index 2, in map(')
        state = iterator.get_state()
        with pytest.raises(OSError, match='file 2 is away'):
            next(iterator)
        assert iterator.get_state() == state
        broken.clear()
        assert elements + list(iterator) == expected
    with pytest.raises(InvalidArgumentError, match='dataset 1: expected a stream or MapDataset, got 1'):
        list(IterDataset.interleave(MapDataset.range(4).map(lambda n: n if n else part(2)), 2))
    with pytest.raises(InvalidArgumentError, match='expected one dataset or more'):
        IterDataset.interleave(MapDataset.range(0), 2)
    for name in ('cycle_length', 'num_make_iter_threads', 'make_iter_buffer_size', 'iter_buffer_size'):
        with pytest.raises(InvalidArgumentError, match=f'{name}: expected an integer'):
            IterDataset.interleave([part(1)], **{'cycle_length': 1, name: -1})
    with iter(make('streams')) as iterator, iter(make('twice')) as other:
        with pytest.raises(StateError, match='expected 2 streams, got 4'):
            iterator.set_state({'version': 5, 'state': {'open': [0, 1, 2, 3], 'turn': 0, 'begun': 4, 'parents': {}}})
        with pytest.raises(StateError, match='another pipeline'):
            other.set_state(iterator.get_state())


def test_datasets_that_a_filter_drops_are_skipped():
    files = MapDataset.range(6).filter(lambda n: n % 2).map(part)
    assert list(IterDataset.interleave(files, 1)) == [100, 300, 301, 302, 500, 501, 502, 503, 504]


def test_state_within_a_dataset_that_is_dropped_now_is_refused():
    gone = []
    stream = IterDataset.interleave(MapDataset.range(6).map(lambda n: None if n in gone else part(n)), 2)
    with iter(stream) as iterator:
        assert list(itertools.islice(iterator, 4)) == [100, 200, 201, 300]
        state, rest = iterator.get_state(), list(iterator)  # within the streams 2 and 3
    gone[:] = [1]  # of which it needs nothing more
    with iter(stream) as iterator:
        iterator.set_state(state)
        assert list(iterator) == rest
    gone[:] = [2]
    with iter(stream) as iterator:
        with pytest.raises(StateError, match='stream 2: the state is within its elements, and its dataset is None now'):
            iterator.set_state(state)
        assert list(itertools.islice(iterator, 2)) == [100, 300]


def test_options_and_shards_reach_datasets_that_are_made():
    stream = IterDataset.interleave(MapDataset.range(3, 6).map(part), 2)
    from granular.integrations.torch import IterableDataset  # a slow import, needed only here

    shards = [IterableDataset(stream, shard_options=ShardOptions(i, 2)) for i in range(2)]
    assert sorted([*shards[0], *shards[1]]) == sorted(stream)
    files = MapDataset.range(2).map(lambda n: MapDataset.range(2000).to_iter_dataset().filter(lambda x: x % 9 == n))
    strict = DatasetOptions(filter_raise_threshold_ratio=0.5)
    with pytest.raises(granular.errors.DatapointError, match='filter_raise_threshold_ratio'):
        list(IterDataset.interleave(files, 1).with_options(strict))
    in_workers = IterDataset.interleave(MapDataset.range(1, 3).map(part), 2)
    in_workers = in_workers.mp_prefetch(MultiprocessingOptions(1, start_method='fork'))
    assert list(in_workers) == [100, 200, 201]


class Recorded(granular.grain.transforms.Map):
    def map(self, element):
        return element, [int(word) for word in Recorded.place]


def record(number, count):
    Recorded.place = number, count


def test_worker_init_fn_is_called_in_each_worker():
    dataset = MapDataset.range(6).map(Recorded()).batch(1, batch_fn=list).to_iter_dataset()
    elements = [element for (element,) in dataset.mp_prefetch(MultiprocessingOptions(2, start_method='fork'), record)]
    assert [element for element, _ in elements] == list(range(6))
    assert {tuple(place) for _, place in elements} == {(0, 2), (1, 2)}
    options = MultiprocessingOptions(1, start_method='forkserver', worker_init_fn=fail)
    with pytest.raises(ZeroDivisionError):
        list(dataset.mp_prefetch(options))
    with pytest.raises(InvalidArgumentError, match='worker_init_fn: expected a function'):
        dataset.mp_prefetch(2, worker_init_fn=3)


def fail(number, count):
    raise ZeroDivisionError


SLICED = {
    'plain': 'd.to_iter_dataset()',
    'shuffle': 'd.shuffle(seed=3).to_iter_dataset()',
    'shuffle, map, batch': 'd.shuffle(seed=3).map(lambda x: x + 1).to_iter_dataset().batch(3)',
    'random': 'd.random_map(lambda x, r: (x, int(r.integers(99))), seed=4).to_iter_dataset().filter(lambda x: x[0] % 3)',  # noqa: E501
    'source': 'type(d).source(list(range(50, 61))).shuffle(seed=1).to_iter_dataset()',
    'number': 'd.map_with_index(lambda i, x: (i, x)).to_iter_dataset().map(str)',
}

GRAIN_SLICED = """
import copy
from grain._src.python.dataset.transformations import prefetch
out = {}
for name, text in json.loads(sys.argv[1]).items():
    d = grain.MapDataset.range(23)
    parts = []
    for i in range(3):
        parts.append(copy.deepcopy(eval(text)))
        prefetch._set_slice_iter_dataset(parts[-1], slice(i, None, 3), True)
    out[name] = plain(list(grain.experimental.InterleaveIterDataset(parts, cycle_length=3)))
print(json.dumps(out))
"""


def test_sequential_slices_equal_those_of_grain(grain):
    for name, expected in grain.run(GRAIN_SLICED, json.dumps(SLICED)).items():
        parts = []
        for i in range(3):
            parts.append(eval(SLICED[name], {'d': MapDataset.range(23)}))
            parts[-1].set_slice(slice(i, None, 3), True)
        assert plain(list(IterDataset.interleave(parts, 3))) == expected, name
    dataset = MapDataset.range(23).shuffle(seed=3).to_iter_dataset()
    stream = dataset.mp_prefetch(MultiprocessingOptions(2, start_method='fork'), record, sequential_slice=True)
    elements = list(stream)
    assert sorted(elements) == list(range(23))
    assert set(elements[:22:2]) <= set(range(12))


def test_set_slice_selects_elements_in_place():
    stream = MapDataset.range(20).shuffle(seed=1).to_iter_dataset()
    batches = stream.batch(2)
    expected = list(stream)
    stream.set_slice(slice(1, None, 4))
    assert list(stream) == expected[1::4]
    assert len(list(batches)) == 10
    files = IterDataset.interleave(MapDataset.range(5).map(part), 2)
    files.set_slice(slice(3, None))
    assert sorted(files) == [300, 301, 302, 400, 401, 402, 403]
    for dataset in (
        MapDataset.range(9)[2:].to_iter_dataset(),
        MapDataset.concatenate([MapDataset.range(3), MapDataset.range(4)]).to_iter_dataset(),
        MapDataset.range(9).shuffle(seed=1, order=granular.shuffle.Blocks(2, 2)).to_iter_dataset(),
    ):
        with pytest.raises(InvalidArgumentError, match='cannot be divided into contiguous parts'):
            dataset.set_slice(slice(0, None, 2), sequential_slice=True)
    with pytest.raises(InvalidArgumentError, match='expected a slice'):
        stream.set_slice(3)
    with pytest.raises(InvalidArgumentError, match=r'expected slice\(i, None, n\)'):
        stream.set_slice(slice(0, 5), True)


def test_streams_that_fail_to_begin_are_not_kept():
    made = []

    def part(_):
        numbers = np.arange(8)
        made.append(weakref.ref(numbers))
        return IterDataset.interleave(MapDataset.source(numbers).map(lambda number: 1 // int(number)), 1)

    with iter(IterDataset.interleave(MapDataset.range(3).map(part), 1)) as iterator:
        for _ in range(8):
            with pytest.raises(ZeroDivisionError):
                next(iterator)
        gc.collect()
        assert sum(numbers() is not None for numbers in made) <= 4


@pytest.mark.parametrize('later', [lambda d: d, lambda d: d.repeat(3), lambda d: IterDataset.interleave([d, d], 1)])
def test_mixes_that_ended_within_a_window_are_not_read_again_with_other_weights(later):
    def make(weight):
        web, books = MapDataset.range(100, 130), MapDataset.range(200, 230)
        mix = IterDataset.mix({'web': web, 'books': books}, {'web': weight, 'books': 1}).limit(6)
        return later(IterDataset.interleave([part(5), mix, part(6)], 1)).window_shuffle(15, seed=0)

    with iter(make(1)) as iterator:
        assert len(list(itertools.islice(iterator, 5))) == 5
        state, rest = iterator.get_state(), list(iterator)
    with iter(make(1)) as iterator:
        iterator.set_state(state)
        assert list(iterator) == rest
    with iter(make(2)) as iterator, pytest.raises(StateError, match='continue with the weights'):
        iterator.set_state(state)


def test_read_ahead_changes_while_running():
    computed = []

    def count(x):
        computed.append(x)
        return x

    dataset = MapDataset.range(700).to_iter_dataset(ReadOptions(prefetch_buffer_size=0))
    for make in (
        lambda: dataset.map(count),
        lambda: dataset.batch(1).map(lambda b: count(int(b[0]))).prefetch(0),
        lambda: dataset.batch(1).map(lambda b: count(int(b[0]))).prefetch(40),
    ):
        computed.clear()
        with iter(make()) as iterator:
            iterator.set_prefetch_buffer_size(0)
            assert list(itertools.islice(iterator, 50)) == list(range(50))
            assert len(computed) <= 51
            for size in (100, 3, 0, 20, 0, 1):
                iterator.set_prefetch_buffer_size(size)
                start = iterator.get_next_index()
                assert list(itertools.islice(iterator, 100)) == list(range(start, start + 100))
                assert len(computed) <= start + 100 + 201
                state = iterator.get_state()
                iterator.set_state(state)
            assert list(iterator) == list(range(650, 700))
            with pytest.raises(InvalidArgumentError, match='buffer_size: expected an integer >= 0'):
                iterator.set_prefetch_buffer_size(-1)
    parts = [MapDataset.range(1000 * i, 1000 * i + 300).map(count) for i in range(3)]
    for taken in (0, 10):
        computed.clear()
        with iter(IterDataset.interleave(parts, 1)) as iterator:
            assert len(list(itertools.islice(iterator, taken))) == taken
            iterator.set_prefetch_buffer_size(0)  # also of streams that begin later
            assert len(list(itertools.islice(iterator, 320 - taken))) == 320 - taken
            assert sum(x >= 1000 for x in computed) <= 30
    with iter(dataset.prefetch(2)) as first, iter(dataset.prefetch(0)) as second:
        next(first)
        second.set_state(first.get_state())
        assert next(second) == 1


def test_failures_of_streams_that_ended_are_the_last_thousand():
    def part(number):
        return MapDataset.range(300).map(lambda x: [][x]).to_iter_dataset(on_error='skip')

    parts = [MapDataset.range(10).to_iter_dataset(), *map(part, range(4))]
    with iter(IterDataset.interleave(parts, cycle_length=1).repeat(2)) as iterator:
        assert list(iterator) == [*range(10), *range(10)]
        assert (iterator.stats()['errors'], len(iterator.errors)) == (2400, 1000)


def test_states_that_are_refused_leave_no_streams_behind():
    made = []

    def part(number):
        numbers = np.arange(8)
        made.append(weakref.ref(numbers))
        return MapDataset.source(numbers).to_iter_dataset().batch(2)

    with iter(IterDataset.interleave(MapDataset.range(3).map(part), cycle_length=1)) as iterator:
        assert [next(iterator).tolist() for _ in range(5)] == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1]]
        state = iterator.get_state()
        wrong = {**state['state'], 'open': [0], 'parents': {'0': 'x'}}
        for _ in range(8):
            with pytest.raises(StateError, match='stream 0'):
                iterator.set_state({**state, 'state': wrong})
        gc.collect()
        assert sum(numbers() is not None for numbers in made) <= 4
        assert [next(iterator).tolist() for _ in range(4)] == [[2, 3], [4, 5], [6, 7], [0, 1]]


SOURCES_OF_FILES = {
    'list': lambda path: MapDataset.source(json.loads(path.read_text())),
    'data source': lambda path: MapDataset.source(granular.ParquetDataSource(str(path))).map(lambda row: row['x']),
    'stream of rows': lambda path: ParquetIterDataset(str(path)).map(lambda row: row['x']),
    'batches': lambda path: MapDataset.source(json.loads(path.read_text())).to_iter_dataset().batch(2),
}


def write_file(kind, path, numbers):
    if kind in ('list', 'batches'):
        path.write_text(json.dumps(numbers))
    else:
        parquet.write_table(pyarrow.table({'x': numbers}), path)


@pytest.mark.parametrize('kind', SOURCES_OF_FILES)
def test_a_file_that_was_written_anew_is_refused(kind, tmp_path):
    paths = [tmp_path / str(i) for i in range(4)]
    for i, path in enumerate(paths):
        write_file(kind, path, list(range(100 * i, 100 * i + 10)))

    def stream():
        files = MapDataset.source(paths).map(SOURCES_OF_FILES[kind])
        return IterDataset.interleave(files, cycle_length=2)

    with iter(stream()) as iterator:
        for _ in range(6):
            next(iterator)
        state = json.loads(json.dumps(iterator.get_state()))
        rest = plain(list(iterator))
    with iter(stream()) as iterator:
        iterator.set_state(state)
        assert plain(list(iterator)) == rest
    write_file(kind, paths[3], list(range(7)))  # which was not opened yet
    with iter(stream()) as iterator:
        iterator.set_state(state)
        assert plain(list(iterator)) != rest
    write_file(kind, paths[1], list(range(30)))
    with iter(stream()) as iterator, pytest.raises(StateError, match='stream 1: '):
        iterator.set_state(state)


def test_a_stream_of_an_interleave_that_was_made_otherwise_is_refused():
    def stream(stage):
        files = MapDataset.range(4).map(lambda n: stage(MapDataset.range(100 * n, 100 * n + 10)))
        return IterDataset.interleave(files, 2)

    with iter(stream(lambda d: d.shuffle(seed=0))) as iterator:
        for _ in range(5):
            next(iterator)
        state = iterator.get_state()
    for other in (lambda d: d, lambda d: d.shuffle(seed=1), lambda d: d.shuffle(seed=0)[1:]):
        with iter(stream(other)) as iterator:
            with pytest.raises(StateError, match=r'2 at a time, stream \d: the state belongs to another'):
                iterator.set_state(state)


def test_a_stream_of_an_interleave_continues_with_another_batch_size():
    def stream(size):
        files = MapDataset.range(4).map(lambda n: MapDataset.range(12).to_iter_dataset().batch(size))
        return IterDataset.interleave(files, 2)

    with iter(stream(2)) as iterator:
        for _ in range(4):
            next(iterator)
        state = iterator.get_state()
    with iter(stream(4)) as iterator:
        iterator.set_state(state)
        assert plain(next(iterator)) == [4, 5, 6, 7]

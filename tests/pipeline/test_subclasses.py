"""Subclasses of MapDataset, IterDataset and DatasetIterator: classes of programs for Grain, over ours."""

import json
import threading

import pytest

import granular
from granular import IterDataset, MapDataset, ShardOptions
from granular.errors import InvalidArgumentError, StateError
from granular.grain import DatasetIterator, MultiprocessingOptions
from tests.support.declared import declared_in
from tests.support.states import check_each_state

# The classes of this text are made here and with Grain; `B` is the package.
CLASSES = """
class Pairs(B.MapDataset):
    def __init__(self, parent, gap):
        super().__init__(parent)
        self._gap = gap

    def __len__(self):
        return len(self._parent) - self._gap

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        return self._parent[index] * 100 + self._parent[index + self._gap]


class Sum(B.MapDataset):
    def __len__(self):
        return len(self._parents[0])

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        return sum(parent[index] for parent in self._parents)


class SumsIterator(B.DatasetIterator):
    def __init__(self, parent):
        super().__init__(parent)
        self._sum = 0

    def __next__(self):
        self._sum += next(self._parent)
        return self._sum

    def get_state(self):
        return {'parent': self._parent.get_state(), 'sum': self._sum}

    def set_state(self, state):
        self._parent.set_state(state['parent'])
        self._sum = state['sum']


class Sums(B.IterDataset):
    def __iter__(self):
        return SumsIterator(self._parent.__iter__())
"""

SAME = [
    'list(Pairs(B.MapDataset.range(9), 2))',
    'list(Pairs(B.MapDataset.range(9).seed(3).shuffle(), 2).shuffle().map(lambda x: x + 1).batch(2))',
    'list(Pairs(Pairs(B.MapDataset.range(9), 2), 1)[1:5].repeat(2))',
    'list(Sum([B.MapDataset.range(5), B.MapDataset.range(5).shuffle(seed=2)]).to_iter_dataset().batch(2))',
    'list(Sums(B.MapDataset.range(9).to_iter_dataset()))',
    'list(Sums(Sums(B.MapDataset.range(9).shuffle(seed=1).to_iter_dataset()).map(lambda x: x + 1)).batch(2))',
    'list(B.IterDataset.mix([Sums(B.MapDataset.range(9).to_iter_dataset()), B.MapDataset.range(5).to_iter_dataset()]))',
]

classes = {'B': granular.grain}
exec(CLASSES, classes)
Sums = classes['Sums']


def test_elements_equal_those_of_grain(grain):
    script = f"""
B = grain
{CLASSES}
print(json.dumps([[plain(x) for x in eval(text)] for text in json.loads(sys.argv[1])]))
"""
    for text, expected in zip(SAME, grain.run(script, json.dumps(SAME)), strict=True):
        assert [x.tolist() if hasattr(x, 'tolist') else x for x in eval(text, classes)] == expected, text


def test_dataset_without_parents_has_an_end():
    class Squares(MapDataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return self.slice(index) if isinstance(index, slice) else {'x': index**2}

    with granular.Loader(Squares(), 2) as loader:
        assert [batch['x'].tolist() for batch in loader] == [[0, 1], [4, 9]]


def test_states_are_exact():
    stream = Sums(MapDataset.range(7).to_iter_dataset()).map(lambda x: -x).filter(lambda x: x % 2)
    with iter(stream) as iterator:
        states, expected = [iterator.get_state()], []
        for element in iterator:
            expected.append(element)
            states.append(json.loads(json.dumps(iterator.get_state())))
        for at, state in enumerate(states):
            iterator.set_state(state)
            assert list(iterator) == expected[at:]
    with iter(Sums(MapDataset.range(7).to_iter_dataset())) as iterator:
        next(iterator)
        assert iterator.state_dict() == iterator.get_state()
        assert iterator.stats()['elements'] == 1
        assert iterator.errors == []


@pytest.mark.parametrize('later', [lambda d: d.map(abs), lambda d: d.prefetch(3), lambda d: d.window_shuffle(3, 0)])
def test_states_are_exact_if_an_iterator_changes_its_own_in_place(later):
    class OneIterator(DatasetIterator):
        def __init__(self, parent):
            super().__init__(parent)
            self.set_state({'parent': parent.get_state()})

        def __next__(self):
            element = next(self._parent)
            self._state['parent'] = self._parent.get_state()
            return element

        def get_state(self):
            return self._state

        def set_state(self, state):
            self._state = state
            self._parent.set_state(state['parent'])

    class One(IterDataset):
        def __iter__(self):
            return OneIterator(iter(self._parent))

    with iter(later(One(MapDataset.range(8).to_iter_dataset()))) as iterator:
        check_each_state(iterator)


def test_state_is_loaded_once_an_element_that_is_computed_ahead_is_there():
    within, go_on, done = threading.Event(), threading.Event(), threading.Event()

    class CountsIterator(DatasetIterator):
        def __init__(self, parent):
            super().__init__(parent)
            self._count = 0

        def __next__(self):
            element, count = next(self._parent), self._count + 1
            if element == 3 and not done.is_set():
                within.set()
                go_on.wait(30)
            self._count = count
            if go_on.is_set():
                done.set()
            return element, count

        def get_state(self):
            return {'parent': self._parent.get_state(), 'count': self._count}

        def set_state(self, state):
            self._parent.set_state(state['parent'])
            self._count = state['count']

    class Counts(IterDataset):
        def __iter__(self):
            return CountsIterator(iter(self._parent))

    with iter(Counts(MapDataset.range(6).to_iter_dataset()).prefetch(3)) as iterator:
        state = iterator.get_state()
        assert next(iterator) == (0, 1)
        assert within.wait(30)
        timer = threading.Timer(0.1, go_on.set)
        timer.start()
        iterator.set_state(state)
        assert done.wait(30)
        assert list(iterator) == [(i, i + 1) for i in range(6)]
        timer.join()


def test_state_beside_a_thread_that_takes_an_element():
    class SlowIterator(type(iter(Sums(MapDataset.range(1).to_iter_dataset())))):
        beside = None

        def get_state(self):
            beside, self.beside = self.beside, None
            if beside is not None:
                thread = threading.Thread(target=beside)
                thread.start()
                thread.join()
                raise RuntimeError('dictionary changed size during iteration')
            return super().get_state()

    class Slow(IterDataset):
        def __iter__(self):
            made.append(SlowIterator(iter(self._parent)))
            return made[-1]

    made, taken = [], []
    with iter(Slow(MapDataset.range(9).to_iter_dataset()).map(abs)) as iterator:
        assert [next(iterator), next(iterator)] == [0, 1]
        made[0].beside = lambda: taken.append(next(iterator))
        state = iterator.get_state()
        rest = list(iterator)
        assert taken == [3]
        iterator.set_state(state)
        assert list(iterator) == rest


def test_a_declared_change_is_made_within_an_iterator():
    def make(function):
        return iter(Sums(Sums(MapDataset.range(9).map(function).to_iter_dataset()).map(abs)).batch(2))

    with make(abs) as iterator:
        next(iterator)
        state, following = iterator.get_state(), next(iterator).tolist()
    with make(int) as iterator:
        with pytest.raises(StateError, match='another pipeline') as caught:
            iterator.set_state(state)
        iterator.set_state(state, declared_in(caught.value))
        assert next(iterator).tolist() == following
        with pytest.raises(StateError, match='another pipeline'):
            iterator.set_state(state)


def test_stats_of_an_iterator_of_several_are_their_sum():
    class PairIterator(type(iter(Sums(MapDataset.range(1).to_iter_dataset())))):
        def __next__(self):
            return tuple(map(next, self._parents))

    parts = [iter(MapDataset.source([b'x' * size] * 9).to_iter_dataset()) for size in (100, 5000)]
    with PairIterator(parts) as iterator:
        next(iterator)
        stats = [part.stats() for part in parts]
        assert iterator.stats().keys() == stats[0].keys()
        assert iterator.stats()['bytes'] == stats[0]['bytes'] + stats[1]['bytes'] > 5000
        assert iterator.stats()['elements'] == 2


def test_set_slice_restricts_what_an_iterator_reads():
    numbers = MapDataset.range(10).to_iter_dataset()
    for sequential, expected in ((False, [1, 4, 9, 16, 25]), (True, [5, 11, 18, 26, 35])):
        stream = Sums(numbers)
        stream.set_slice(slice(1, None, 2), sequential)
        assert list(stream) == list(stream.map(abs)) == expected
    assert list(numbers) == list(range(10))


async def test_async_iteration():
    stream = Sums(MapDataset.range(4).to_iter_dataset()).batch(2)
    async with aiter(stream) as iterator:
        assert [batch.tolist() async for batch in iterator] == [[0, 1], [3, 6]]


def test_failed_close_of_an_iterator_closes_the_others():
    class Failing(DatasetIterator):
        def __init__(self, parent, error):
            super().__init__(parent)
            self._error, self.closed = error, False

        def __next__(self):
            return next(self._parent)

        def get_state(self):
            return self._parent.get_state()

        def set_state(self, state):
            self._parent.set_state(state)

        def close(self):
            self.closed = True
            super().close()
            raise self._error

    class Stream(IterDataset):
        def __iter__(self):
            iterators.append(Failing(iter(self._parent), errors.pop(0)))
            return iterators[-1]

    class Both(Failing):
        def __init__(self, parents):
            DatasetIterator.__init__(self, parents)

        close = DatasetIterator.close

    source = MapDataset.range(9).to_iter_dataset()
    for make in (lambda first, second: iter(IterDataset.mix([first, second])), lambda *both: Both(map(iter, both))):
        iterators, errors = [], [OSError('first'), OSError('second')]
        iterator = make(Stream(source), Stream(source))
        assert next(iterator) == 0
        with pytest.raises(OSError, match='first'):
            iterator.close()
        assert [stream.closed for stream in iterators] == [True, True]


@pytest.mark.filterwarnings('ignore:.*multi-threaded.*:DeprecationWarning')
def test_parents_run_in_workers():
    stream = Sums(MapDataset.range(5).to_iter_dataset()).map(lambda x: x + 1)
    with iter(stream.mp_prefetch(MultiprocessingOptions(1, start_method='fork'))) as iterator:
        assert list(iterator) == [1, 2, 4, 7, 11]


def test_what_cannot_work_is_refused():
    class NoState(IterDataset):
        def __iter__(self):
            return iter([1])

    class Incomplete(DatasetIterator):
        def __next__(self):
            return 1

    class NoLength(MapDataset):
        def __getitem__(self, index):
            return index

    from granular.integrations.torch import IterableDataset  # a slow import, needed only here

    stream = MapDataset.range(3).to_iter_dataset()
    for make, message in (
        (lambda: MapDataset([1, 2]), 'use MapDataset.source'),
        (lambda: IterDataset(stream), 'use MapDataset.to_iter_dataset'),
        (lambda: list(NoState(stream).batch(2)), 'an iterator of NoState has no method get_state'),
        (lambda: Incomplete(iter(stream)), 'Incomplete does not override get_state'),
        (NoLength, 'NoLength has no parents: define __len__'),
        (
            lambda: list(IterableDataset(Sums(stream), shard_options=ShardOptions(0, 2))),
            'Sums cannot be divided into 2 shards',
        ),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            make()


class Listed(granular.MapDataset):
    """Elements of its own, at indices below its length only."""

    def __init__(self):
        super().__init__()
        self.listed = [10, 11, 12, 13, 14]

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return self.listed[index]


class Doubled(granular.MapDataset):
    """Each element of the parent twice, in the order of each epoch."""

    def __len__(self):
        return 2 * len(self._parent)

    def __getitem__(self, index):
        return self._parent[index // 2]


def test_later_epochs_of_a_subclass_are_its_own_or_those_of_the_first():
    from granular.integrations.torch import Batches, IterableDataset

    for dataset in (Listed(), Listed().shuffle(seed=1), Doubled(granular.MapDataset.range(6).shuffle(seed=3))):
        length = len(dataset)
        expected = [dataset.fetch(range(epoch * length, (epoch + 1) * length)) for epoch in range(3)]
        assert all(sorted(epoch) == sorted(expected[0]) for epoch in expected)
        assert (expected[0] == expected[1]) == (type(dataset) is Listed)
        stream, iterable = Batches(dataset.to_iter_dataset()), IterableDataset(dataset)
        with granular.Loader(dataset.map(lambda x: {'x': x}), length) as loader, stream:
            for epoch in range(3):
                stream.set_epoch(epoch)
                iterable.set_epoch(epoch)
                assert next(iter(loader))['x'].tolist() == list(stream) == list(iterable) == expected[epoch]

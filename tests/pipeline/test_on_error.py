"""``on_error`` stands where ``to_iter_dataset`` does: all later operations get what it leaves, merged or not."""

import gc
import itertools
import weakref

import numpy as np
import pytest

import granular
from granular import MapDataset
from granular.errors import StateError
from granular.grain import MultiprocessingOptions
from tests.pipeline.test_iter_dataset import STREAMS
from tests.support.states import check_each_state, plain

LENGTH = 23
SHUFFLED = list(MapDataset.range(LENGTH).shuffle(seed=1))


def fail(x):
    if x % 5 == 2:
        raise ValueError(f'{x} is bad')
    return x


POLICIES = {'skip': lambda x: None, 'replace': lambda x: -1, 'either': lambda x: x + 100 if x % 2 else None}


def stream_of(policy, prefetch, *, workers=0):
    on_error = policy if policy == 'skip' else lambda index, error: POLICIES[policy](SHUFFLED[index])
    dataset = MapDataset.source(SHUFFLED).map(fail).to_iter_dataset(granular.ReadOptions(2, 8), on_error=on_error)
    dataset = dataset.prefetch(2) if prefetch else dataset
    return dataset.mp_prefetch(MultiprocessingOptions(workers, start_method='fork'))


def left_by(policy):
    elements = [POLICIES[policy](x) if x % 5 == 2 else x for x in SHUFFLED]
    return [x for x in elements if x is not None]


@pytest.mark.parametrize('name', STREAMS)
def test_all_operations_get_what_on_error_leaves(name):
    for policy in POLICIES:
        expected = plain(list(STREAMS[name](MapDataset.source(left_by(policy)).to_iter_dataset())))
        for prefetch in (False, True):
            with iter(STREAMS[name](stream_of(policy, prefetch))) as iterator:
                elements = check_each_state(iterator, 2)[0] if policy == 'either' else plain(list(iterator))
            assert elements == expected, (policy, prefetch)


def test_replacements_of_worker_processes_pass_through_later_operations():
    for policy in POLICIES:
        stream = stream_of(policy, False, workers=2).map(lambda x: x * 2).filter(lambda x: x % 3)
        assert list(stream) == [2 * x for x in left_by(policy) if 2 * x % 3]


def none_for(value):
    return lambda x: None if x == value else x


@pytest.mark.parametrize('value', [-1, SHUFFLED[0]])
def test_none_of_a_later_map_is_an_element(value):
    for prefetch in (False, True):
        later = stream_of('replace', prefetch).map(none_for(value))
        assert list(later.map(lambda x: (x,)).filter(lambda _: True)) == [
            None if x == value else (x,) for x in left_by('replace')
        ]


def bad(x, *_):
    if x in (SHUFFLED[9], 100 + SHUFFLED[9]):
        raise LookupError('a later operation')
    return x


LATER = {
    'map': lambda d: d.map(bad),
    'map, map': lambda d: d.map(lambda x: x).map(bad),
    'filter': lambda d: d.filter(lambda x: bad(x) is not None),
    'flat_map': lambda d: d.flat_map(lambda x: [bad(x)]),
    'random_map': lambda d: d.random_map(bad, seed=1),
    'map_with_index': lambda d: d.map_with_index(lambda i, x: bad(x)),
    'batch_fn': lambda d: d.batch(1, batch_fn=lambda batch: bad(batch[0])),
}


@pytest.mark.parametrize('name', LATER)
@pytest.mark.parametrize('replaces', [True, False], ids=['replacement', 'other element'])
def test_on_error_does_not_apply_to_later_operations(name, replaces):
    """Element 9 is, or is not, a replacement: its error is raised, and the iterator stays before it."""

    def fail_for_some(x):
        if x == SHUFFLED[9 if replaces else 3]:
            raise ValueError('an earlier operation')
        return x

    for prefetch in (False, True):
        dataset = MapDataset.source(SHUFFLED).map(fail_for_some)
        stream = dataset.to_iter_dataset(on_error=lambda index, error: 100 + SHUFFLED[index])
        with iter(LATER[name](stream.prefetch(2) if prefetch else stream)) as iterator:
            elements = [next(iterator) for _ in range(9)]
            state = iterator.get_state()
            for _ in range(2):
                with pytest.raises(LookupError, match='a later operation') as caught:
                    next(iterator)
                assert caught.value.__notes__
                assert iterator.get_state() == state
            assert elements == [x if replaces or x != SHUFFLED[3] else 100 + x for x in SHUFFLED[:9]]
    stream = MapDataset.source(SHUFFLED).to_iter_dataset(on_error='skip')
    with pytest.raises(LookupError, match='a later operation'):
        list(LATER[name](stream))


class Doubled(MapDataset):
    def __getitem__(self, index):
        return self._parent[index] * 2


OTHER = MapDataset.source(range(LENGTH)).map(fail)
OTHERS = {
    'dataset': lambda: OTHER,
    'subclass': lambda: Doubled(OTHER),
    'source': lambda: granular.sources.Transform(OTHER, lambda x, seed: x),
    'cache': lambda: granular.SharedMemoryCache(OTHER),
    'fields': lambda: granular.kappadata.ModeWrapper(OTHER.map(lambda x: {'x': x}), 'x'),
}


@pytest.mark.parametrize('name', OTHERS)
@pytest.mark.parametrize('read', [lambda other, i: other[i], lambda other, i: other.fetch([i, 0])[0]])
def test_functions_that_read_other_data_get_its_errors(name, read):
    other = OTHERS[name]()
    with iter(MapDataset.range(LENGTH).map(lambda i: (i, read(other, i))).to_iter_dataset(on_error='skip')) as iterator:
        assert [i for i, _ in iterator] == [i for i in range(LENGTH) if i % 5 != 2]
        assert iterator.errors == [(i, f'ValueError: {i} is bad') for i in range(2, LENGTH, 5)]


DATAPOINTS = MapDataset.range(2, 5).map(fail).map(lambda x: {'x': x})
INSPECT = {
    'spec': lambda: granular.grain.experimental.get_element_spec(DATAPOINTS),
    'classes': lambda: DATAPOINTS.filter_classes('x', [2]),
    'loader': lambda: granular.Loader(DATAPOINTS, 1).spec,
}


@pytest.mark.parametrize('name', INSPECT)
def test_functions_that_inspect_other_data_get_its_errors(name):
    with iter(MapDataset.range(3).map(lambda i: INSPECT[name]()).to_iter_dataset(on_error='skip')) as iterator:
        assert list(iterator) == []
        assert iterator.errors == [(i, 'ValueError: 2 is bad') for i in range(3)]


def fails_once(raises, at):
    def call(x):
        if x == at:
            raise raises(f'{x} failed')
        return {'x': x}

    return call


class Computed:
    def __init__(self, fn):
        self.fn = fn

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return self.fn(index)


CONSUMERS = {
    'stream': lambda dataset: iter(dataset.to_iter_dataset(on_error='skip')),
    'Loader': lambda dataset: granular.Loader(dataset, 1, on_error='skip'),
}


@pytest.mark.parametrize('at', [0, 3])
@pytest.mark.parametrize('consumer', CONSUMERS)
@pytest.mark.parametrize('source', [False, True])
def test_functions_for_which_the_store_or_the_memory_fails_are_not_skipped(consumer, at, source):
    for raises in (granular.errors.StoreTimeoutError, granular.errors.ClosedError, MemoryError):
        fn = fails_once(raises, at)
        dataset = Computed(fn) if source else MapDataset.range(5).map(fn)
        with CONSUMERS[consumer](MapDataset.source(dataset)) as iterator, pytest.raises(raises, match=f'{at} failed'):
            list(iterator)


@pytest.mark.parametrize('at', [0, 3])
@pytest.mark.parametrize('consumer', CONSUMERS)
@pytest.mark.parametrize('raises', [FileNotFoundError, OSError])
def test_files_that_are_missing_or_cut_are_skipped(consumer, at, raises):
    with CONSUMERS[consumer](MapDataset.range(5).map(fails_once(raises, at))) as iterator:
        assert [x for element in iterator for x in np.ravel(element['x'])] == [x for x in range(5) if x != at]


def test_a_tuple_fails_with_any_of_its_parts():
    pairs = MapDataset.zip([MapDataset.range(LENGTH), OTHER])
    with iter(pairs.to_iter_dataset(on_error=lambda index, error: (index, None))) as iterator:
        assert list(iterator) == [(i, None if i % 5 == 2 else i) for i in range(LENGTH)]
        assert [i for i, _ in iterator.errors] == list(range(2, LENGTH, 5))


def test_consumers_of_the_same_blocks_apply_their_own_on_error():
    shuffled = OTHER.shuffle(seed=1, order=granular.shuffle.Blocks(block=4, window=2))
    order = list(MapDataset.range(LENGTH).shuffle(seed=1, order=granular.shuffle.Blocks(block=4, window=2)))
    for count in range(LENGTH - 5):
        with iter(shuffled.to_iter_dataset(granular.ReadOptions(2, 0), on_error='skip')) as iterator:
            for _ in range(count):
                next(iterator)
            for index, expected in enumerate(order):
                if expected % 5 != 2:
                    assert shuffled[index] == expected
                    continue
                with pytest.raises(ValueError, match=f'{expected} is bad'):
                    shuffled[index]


@pytest.mark.parametrize('size', [1, 100_000])
def test_batch_of_unequal_shapes_is_skipped_whatever_its_size(size):
    dataset = MapDataset.source([np.zeros(size), np.zeros(2 * size), np.ones(3), np.ones(3)]).batch(2)
    with iter(dataset.to_iter_dataset(on_error='skip')) as batches:
        assert [batch.shape for batch in batches] == [(2, 3)]
        assert [index for index, _ in batches.errors] == [0]


def test_state_that_is_refused_on_other_hosts_names_on_error():
    def stream(host, hosts):
        shard = granular.ShardOptions(host, hosts)
        return iter(MapDataset.range(LENGTH).map(fail).to_iter_dataset(shard_options=shard, on_error='skip'))

    with stream(0, 2) as iterator:
        next(iterator)
        state = iterator.get_state()
    for host, hosts in ((1, 2), (0, 3)):
        with (
            stream(host, hosts) as iterator,
            pytest.raises(StateError, match='on_error leaves out elements that fail: '),
        ):
            iterator.set_state(state)


@pytest.mark.parametrize('place', ['on_error', 'a later map'])
@pytest.mark.parametrize('prefetch', [False, True])
def test_elements_are_counted_once_they_are_left_out_or_replaced(caplog, place, prefetch):
    """An element whose replacement fails is tried again by each ``next``, and counted once that succeeds."""
    attempts = dict.fromkeys(['on_error', 'a later map'], 0)

    def try_twice(at, value):
        attempts[at] += 1
        if place == at and attempts[at] in (2, 3):
            raise LookupError(at)
        return value

    def later(x):
        return try_twice('a later map', x) if x == -1 else x

    dataset = MapDataset.range(LENGTH).map(fail)
    stream = dataset.to_iter_dataset(on_error=lambda index, error: try_twice('on_error', -1)).map(later)
    elements = []
    with iter(stream.prefetch(2) if prefetch else stream) as iterator:
        while len(elements) < LENGTH:
            try:
                elements.append(next(iterator))
            except LookupError:
                assert [index for index, _ in iterator.errors] == [2]
        assert elements == [-1 if x % 5 == 2 else x for x in range(LENGTH)]
        assert [index for index, _ in iterator.errors] == [2, 7, 12, 17, 22]
        assert iterator.stats()['errors'] == 5
    assert [line.split(':')[0] for line in caplog.messages if 'skipped' in line] == [
        'on_error skipped or replaced 5 datapoints'
    ]


@pytest.mark.parametrize('on_error', ['skip', lambda index, error: None, lambda index, error: {'x': 0}])
@pytest.mark.parametrize('consumer', ['stream', 'loader'])
def test_errors_that_were_skipped_or_replaced_wait_for_no_garbage_collection(consumer, on_error):
    held = []  # by the frames of errors

    def even(x):
        array = np.full(9, x)
        if x % 2:
            held.append(weakref.ref(array))
            raise ValueError(f'{x} is bad')
        return {'x': x}

    numbers = MapDataset.range(40).map(even)
    gc.disable()
    try:
        if consumer == 'stream':
            assert len(list(numbers.to_iter_dataset(on_error=on_error))) >= 20
        else:
            with granular.Loader(numbers, 4, prefetch=0, on_error=on_error) as loader:
                assert len(list(itertools.islice(loader, 10))) == 10
        assert len(held) >= 20
        assert not any(array() is not None for array in held)
    finally:
        gc.enable()


def numbered(index, element):
    return index, element


def noisy(element, rng):
    return element, int(rng.integers(1 << 30))


NUMBERING = {
    'random_map': lambda stream: stream.random_map(noisy, seed=1),
    'map_with_index': lambda stream: stream.map_with_index(numbered),
    'both': lambda stream: stream.map_with_index(numbered).map(plain).random_map(noisy, seed=1),
    'batches': lambda stream: stream.random_map(noisy, seed=1).batch(2, batch_fn=list),
}


@pytest.mark.parametrize('name', NUMBERING)
def test_a_state_continues_exactly_with_another_on_error_unless_elements_were_left_out(name):
    bad = 17

    def check(x):
        if x == bad:
            raise ValueError('bad image')
        return x

    def make(on_error, prefetch=False):
        stream = MapDataset.range(LENGTH).map(check).to_iter_dataset(on_error=on_error)
        return NUMBERING[name](stream.prefetch(2) if prefetch else stream)

    size = 2 if name == 'batches' else 1
    with iter(make('skip')) as iterator:
        expected, states = [], [iterator.get_state()]
        for element in iterator:
            expected.append(plain(element))
            states.append(iterator.get_state())
    with iter(make('raise')) as iterator:
        given = []
        with pytest.raises(ValueError, match='bad image'):
            given += (plain(element) for element in iterator)
        state = iterator.get_state()
    assert len(given) == bad // size
    for prefetch in (False, True):
        with iter(make('skip', prefetch)) as iterator:
            iterator.set_state(state)
            rest = [plain(element) for element in iterator]
            at = (bad - 1) // size if size > 1 else bad
            assert rest == expected[at:]
    with iter(make('raise')) as iterator:
        for at, state in enumerate(states):
            if at * size <= bad:
                iterator.set_state(state)
                if (at + 1) * size <= bad:
                    assert plain(next(iterator)) == expected[at]
            elif name in ('random_map', 'batches'):
                with pytest.raises(StateError, match='with the on_error, and with each prefetch, that saved'):
                    iterator.set_state(state)
            else:  # map_with_index counts elements behind a function that may return None
                iterator.set_state(state)
                assert [plain(element) for element in iterator] == expected[at:]
    with iter(make('skip', True)) as iterator:  # the remedy
        iterator.set_state(states[bad // size + 1])
        assert [plain(element) for element in iterator] == expected[bad // size + 1 :]


def test_a_state_of_several_hosts_with_another_on_error_is_refused_by_its_name_where_elements_have_other_numbers():
    def make(on_error):
        shard = granular.ShardOptions(0, 2)
        stream = MapDataset.range(LENGTH).to_iter_dataset(on_error=on_error, shard_options=shard)
        return stream.random_map(noisy, seed=1)

    for saved, other in (('raise', 'skip'), ('skip', 'raise')):
        with iter(make(saved)) as iterator:
            next(iterator)
            state, expected = iterator.get_state(), plain(list(iterator))
        with iter(make(other)) as iterator, pytest.raises(StateError, match='on_error, and with each prefetch'):
            iterator.set_state(state)
        with iter(make(saved)) as iterator:
            iterator.set_state(state)
            assert plain(list(iterator)) == expected


def tagged(index, batch):
    return index, batch


def without_empty(batches):
    return [batch for batch in batches if batch]


# Pipelines of batches, given a dataset and what combines the datapoints of a batch.
BATCHED = {
    'batch': lambda d, combine: d.batch(4, batch_fn=combine),
    'batch, map': lambda d, combine: d.batch(4, batch_fn=combine).map_with_index(tagged),
    'shuffle, batch, shuffle, repeat': lambda d, combine: (
        d.shuffle(seed=1).batch(3, batch_fn=combine).shuffle(seed=2).repeat(2).map_with_index(tagged)
    ),
    'batches of batches': lambda d, combine: d.batch(2, batch_fn=combine).batch(3, batch_fn=without_empty),
    'batch, slice': lambda d, combine: d.batch(5, drop_remainder=True, batch_fn=combine)[1:],
    'mix': lambda d, combine: MapDataset.mix(
        [d.batch(3, batch_fn=combine), d.shuffle(seed=3).batch(3, batch_fn=combine).map(tuple)]
    ),
    'zip': lambda d, combine: MapDataset.zip([d.batch(4, batch_fn=combine), d.batch(4, batch_fn=combine)]),
    'concatenate': lambda d, combine: MapDataset.concatenate(
        [d.batch(7, batch_fn=combine), d.batch(4, batch_fn=combine)]
    ),
}
FOLLOWING = {
    'none': lambda stream: stream,
    'map': lambda stream: stream.map(str),
    'map_with_index': lambda stream: stream.map_with_index(tagged),
    'filter': lambda stream: stream.filter(lambda batch: len(str(batch)) % 2),
}


@pytest.mark.parametrize('later', FOLLOWING)
@pytest.mark.parametrize('name', BATCHED)
def test_on_error_concerns_the_element_of_a_batch(name, later):
    for policy, replace in POLICIES.items():

        def combine(elements, replace=replace):
            elements = [replace(x) if x % 5 == 2 else x for x in elements]
            return [x for x in elements if x is not None]

        on_error = (
            policy if policy == 'skip' else lambda index, error, replace=replace: replace(int(str(error).split()[0]))
        )
        expected = plain(list(FOLLOWING[later](BATCHED[name](MapDataset.range(LENGTH), combine).to_iter_dataset())))
        dataset = BATCHED[name](MapDataset.range(LENGTH).map(fail), list)
        for workers in (0, 2) if policy == 'either' else (0,):
            options = MultiprocessingOptions(workers, start_method='fork')
            stream = FOLLOWING[later](dataset.to_iter_dataset(granular.ReadOptions(2, 8), on_error=on_error))
            with iter(stream.mp_prefetch(options)) as iterator:
                if workers:
                    assert plain(list(iterator)) == expected, policy
                else:
                    assert check_each_state(iterator, 2)[0] == expected, policy


def test_a_batch_of_which_all_elements_failed_is_left_out():
    def fail_some(x):
        if 4 <= x < 8 or x == 9:
            raise ValueError('bad')
        return x

    stream = MapDataset.range(12).map(fail_some).batch(4).to_iter_dataset(on_error='skip')
    with iter(stream) as iterator:
        assert [batch.tolist() for batch in iterator] == [[0, 1, 2, 3], [8, 10, 11]]
        assert iterator.stats()['errors'] == 5
        assert [index for index, _ in iterator.errors] == [4, 5, 6, 7, 9]


def test_errors_of_a_replacement_and_of_the_program_are_raised_and_leave_the_state():
    calls = []

    def replace(index, error):
        calls.append(index)
        if len(calls) < 3:
            raise RuntimeError('no replacement')
        return -1

    with iter(MapDataset.range(12).map(fail).batch(4).to_iter_dataset(on_error=replace)) as iterator:
        state = iterator.get_state()
        for _ in range(2):
            with pytest.raises(RuntimeError, match='no replacement'):
                next(iterator)
            assert iterator.get_state() == state
        assert [batch.tolist() for batch in iterator] == [[0, 1, -1, 3], [4, 5, 6, -1], [8, 9, 10, 11]]
        assert iterator.stats()['errors'] == 2


@pytest.mark.parametrize('later', ['none', 'map'])
def test_a_batch_with_bad_elements_is_read_again_once(later):
    class Source:
        def __init__(self):
            self.read = []

        def __len__(self):
            return 64

        def __getitem__(self, index):
            self.read.append(index)
            return fail(index)

    source = Source()
    stream = FOLLOWING[later](MapDataset.source(source).batch(16, batch_fn=list).to_iter_dataset(on_error='skip'))
    batches = list(stream)
    assert len(batches) == 4
    assert all(source.read.count(index) == 2 for index in range(64))


def test_pictures_beside_a_damaged_one_are_not_lost(tmp_path):
    with granular.DatasetWriter(tmp_path / 'photos', {'image': 'jpg', 'label': 'int'}) as writer:
        for i in range(40):
            photo = granular.encoders['jpg'](np.random.default_rng(i).integers(0, 256, (20, 20, 3), np.uint8))
            writer.append({'image': photo[: len(photo) // 2] if i in (17, 18, 33) else photo, 'label': i})
    with granular.open(tmp_path / 'photos') as reader:
        batches = MapDataset.source(reader).batch(10)
        with iter(batches.to_iter_dataset(on_error='skip')) as iterator:
            labels = [batch['label'].tolist() for batch in iterator]
            assert sorted(itertools.chain(*labels)) == [i for i in range(40) if i not in (17, 18, 33)]
            assert [index for index, _ in iterator.errors] == [17, 18, 33]
        replacement = {'image': np.zeros((20, 20, 3), np.uint8), 'label': -1}
        with iter(batches.to_iter_dataset(on_error=lambda index, error: replacement)) as iterator:
            assert {batch['image'].shape for batch in iterator} == {(10, 20, 20, 3)}

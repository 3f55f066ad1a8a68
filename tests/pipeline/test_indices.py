"""The numbers of a stream's elements: those of Grain, and the elements that follow them."""

import functools
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import granular
from granular import IterDataset, MapDataset, ReadOptions, ShardOptions
from granular.errors import InvalidArgumentError, OutOfRangeError, StateError
from granular.grain import DatasetIterator
from tests.support.states import plain

# Our expressions, and those of Grain where there is one. `d` is a MapDataset of 23 elements.
STREAMS = {
    'read': ('d.to_iter_dataset()',) * 2,
    'map': ('d.to_iter_dataset().map(lambda x: x + 1)',) * 2,
    'number': ('d.to_iter_dataset().map_with_index(lambda i, x: (i, x))',) * 2,
    'random': ('d.to_iter_dataset().random_map(lambda x, r: (x, int(r.integers(99))), seed=1)',) * 2,
    'batch': ('d.to_iter_dataset().batch(5)',) * 2,
    'batch, drop': ('d.to_iter_dataset().batch(5, drop_remainder=True).map(lambda b: b * 2)',) * 2,
    'batch, number': ('d.to_iter_dataset().batch(4).map_with_index(lambda i, b: (i, b))',) * 2,
    'batches': ('d.batch(4, drop_remainder=True).to_iter_dataset().seed(3).batch(2)',) * 2,
    'batch, random': ('d.to_iter_dataset().batch(4).random_map(lambda b, r: b + r.integers(99), seed=2)',) * 2,
    'limit': ('d.to_iter_dataset().limit(9)', 'X.LimitIterDataset(d.to_iter_dataset(), 9)'),
    'limit, batch': ('d.to_iter_dataset().limit(9).batch(2)', 'X.LimitIterDataset(d.to_iter_dataset(), 9).batch(2)'),
    'prefetch': (
        'd.to_iter_dataset().batch(3).prefetch(2)',
        'X.ThreadPrefetchIterDataset(d.to_iter_dataset().batch(3), prefetch_buffer_size=2)',
    ),
    'repeat': ('d.to_iter_dataset().repeat(3)', None),
    'repeat, empty': ('d[:0].to_iter_dataset().repeat(3)', None),
    'repeat, one': ('d.to_iter_dataset().batch(100).repeat(3)', None),
    'repeat, batch': ('d.to_iter_dataset().batch(4, drop_remainder=True).repeat(2).limit(9).batch(2)', None),
    'shard': ('d.to_iter_dataset(shard_options=ShardOptions(1, 3)).batch(2)', None),
    'shard, drop': ('d.to_iter_dataset(shard_options=ShardOptions(1, 3, True)).batch(2)', None),
    'zip': ('IterDataset.zip([d.to_iter_dataset().batch(2), d[:14].to_iter_dataset()], strict=False)', None),
    'zip, repeat': ('IterDataset.zip([d, d.map(str)]).map_with_index(lambda i, e: (i, *e)).batch(3).repeat(2)', None),
    'zip, endless': ('IterDataset.zip([d, d.repeat()], strict=False).prefetch(2)', None),
    'mix': ('IterDataset.mix([d, d.map(lambda x: -x)]).batch(3)', None),
    'mix, weights': ('IterDataset.mix([d.to_iter_dataset().batch(2), d.repeat(), d[:9]], weights=[1, 2.5, 1.2])', None),
    'mix, names': ('IterDataset.mix({"a": d, "b": d.to_iter_dataset().limit(7)}, {"b": 1, "a": 3}).repeat(2)', None),
    'mix, one': ('IterDataset.mix([d]).limit(30)', None),
    'mix, empty': ('IterDataset.mix([d, d[:0]])', None),
    'windows': ('d.to_iter_dataset().window_shuffle(5, seed=3)', None),
    'windows, all': ('d.to_iter_dataset().batch(2).window_shuffle(100, seed=3).prefetch(1)', None),
    'windows, exact': ('d[:20].to_iter_dataset().window_shuffle(5, seed=3).window_shuffle(1, seed=1).batch(3)', None),
    'windows of a mix': (
        'IterDataset.zip([IterDataset.mix([d, d.map(lambda x: -x)]).window_shuffle(7, seed=1), '
        'd.repeat().to_iter_dataset().window_shuffle(4, seed=2)], strict=False)',
        None,
    ),
    'none': ('d.filter(lambda x: x % 2).to_iter_dataset(allow_nones=True)',) * 2,
}  # fmt: skip

GRAIN = """
X = grain.experimental
out = {}
for name, (_, text) in json.loads(sys.argv[1]).items():
    if text is None:
        continue
    it = iter(eval(text, {**globals(), 'd': grain.MapDataset.range(23).shuffle(seed=1)}))
    numbers = [X.get_next_index(it)]
    for _ in it:
        numbers.append(X.get_next_index(it))
    rest = []
    for number in numbers[:-1]:
        X.set_next_index(it, number)
        rest.append(plain(list(it)))
    out[name] = numbers, rest
print(json.dumps(out))
"""


def make(name, **names):
    return eval(STREAMS[name][0], {'d': MapDataset.range(23).shuffle(seed=1), **vars(granular), **names})


def test_numbers_equal_those_of_grain(grain):
    for name, (numbers, rest) in grain.run(GRAIN, json.dumps(STREAMS)).items():
        with iter(make(name)) as iterator:
            assert [iterator.get_next_index(), *(iterator.get_next_index() for _ in iterator)] == numbers, name
            for number, expected in zip(numbers, rest, strict=False):
                iterator.set_next_index(number)
                assert plain(list(iterator)) == expected, name


@pytest.mark.parametrize('name', STREAMS)
def test_each_element_has_its_number(name):
    expected = plain(list(make(name)))
    with iter(make(name)) as iterator:
        assert iterator.get_next_index() == 0
        for at in [*range(len(expected), -1, -1), *range(len(expected))]:
            iterator.set_next_index(np.int64(at))
            assert iterator.get_next_index() == at
            assert plain(list(itertools.islice(iterator, 2))) == expected[at : at + 2]
            assert iterator.get_next_index() == min(at + 2, len(expected))
        for beyond in (len(expected) + 1, -1):
            with pytest.raises((OutOfRangeError, InvalidArgumentError), match='index'):
                iterator.set_next_index(beyond)


def test_elements_before_a_number_are_not_computed():
    calls = []
    with iter(MapDataset.range(10_000).map(lambda x: calls.append(x) or x).to_iter_dataset().batch(10)) as iterator:
        iterator.set_next_index(900)
        assert next(iterator).tolist() == list(range(9000, 9010))
        assert min(calls) == 9000
    with iter(MapDataset.range(7).repeat().to_iter_dataset()) as iterator:
        iterator.set_next_index(2**40)
        assert next(iterator) == 2**40 % 7
        assert iterator.get_next_index() == 2**40 + 1


@settings(max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0.01, 5)), min_size=1, max_size=5), st.data())
def test_a_mix_of_any_lengths_and_weights_continues_at_any_number(parts, data):
    streams = [MapDataset.range(1000 * i, 1000 * i + length) for i, (length, _) in enumerate(parts)]
    stream = IterDataset.mix(streams, [weight for _, weight in parts])
    expected = list(stream)
    with iter(stream) as iterator:
        at = data.draw(st.integers(0, len(expected)))
        iterator.set_next_index(at)
        assert iterator.get_next_index() == at
        assert list(iterator) == expected[at:]
        with pytest.raises(OutOfRangeError, match=f'the stream has {len(expected)} element'):
            iterator.set_next_index(len(expected) + 1)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=1, max_size=5), st.data(),
)  # fmt: skip
@settings(max_examples=60)
def test_a_mix_leaves_out_what_has_the_weight_0(parts, data):
    parts = [(max(length, int(weight > 0)), weight) for length, weight in parts]  # what is read is not empty
    if not any(weight for _, weight in parts):
        return
    datasets = [MapDataset.range(1000 * i, 1000 * i + length) for i, (length, _) in enumerate(parts)]
    weights = [weight for _, weight in parts]
    read = [dataset for dataset, weight in zip(datasets, weights, strict=True) if weight]
    expected = MapDataset.mix(read, [weight for weight in weights if weight])
    mix = MapDataset.mix(datasets, weights)
    assert list(mix) == list(expected)
    stream = IterDataset.mix({str(i): dataset for i, dataset in enumerate(datasets)}, dict(enumerated(weights)))
    elements = list(IterDataset.mix(read, [weight for weight in weights if weight]))
    assert list(stream) == elements == list(IterDataset.mix(datasets, weights))
    with iter(stream) as iterator:
        at = data.draw(st.integers(0, len(elements)))
        iterator.set_next_index(at)
        assert iterator.get_next_index() == at
        assert list(iterator) == elements[at:]


def enumerated(values):
    return [(str(i), value) for i, value in enumerate(values)]


def test_mixes_with_weights_beyond_64_bits_are_exact():
    datasets = [MapDataset.range(10).repeat(), MapDataset.range(10, 20).repeat()]
    for weights in ([1e-17, 1], [1, 1e-17], [1, 1e300]):
        mix, stream = MapDataset.mix(datasets, weights), IterDataset.mix(datasets, weights)
        for at in (0, 3, 10**12):
            with iter(stream) as iterator:
                iterator.set_next_index(at)
                assert list(itertools.islice(iterator, 4)) == list(mix[at : at + 4])


def test_streams_of_a_mix_compute_only_elements_from_a_number_on():
    calls = []
    endless = MapDataset.range(10**6).repeat().to_iter_dataset().map(lambda x: calls.append(x) or x)
    with iter(IterDataset.mix([endless, endless], [1, 3]).window_shuffle(4, seed=1)) as iterator:
        iterator.set_next_index(4 * 10**15)
        next(iterator)
        assert iterator.get_next_index() == 4 * 10**15 + 1
    assert len(calls) < 10_000  # those that are read ahead


def test_numbers_of_states_from_other_shards_and_mixes_are_refused():
    def stream(count, weights, size=3):
        parts = {name: MapDataset.range(40).to_iter_dataset(shard_options=ShardOptions(0, count)) for name in 'ab'}
        return IterDataset.mix(parts, dict(zip('ab', weights, strict=True))), parts['a'].window_shuffle(size, seed=1)

    def state_of(stream, at):
        with iter(stream) as iterator:
            iterator.set_next_index(at)
            return json.loads(json.dumps(iterator.get_state()))

    (mix, windows), (other_mix, _), (halves, half_windows) = (
        stream(1, (1, 3)),
        stream(1, (1, 1)),
        stream(2, (1, 3)),
    )
    numbers, half = (MapDataset.range(40).to_iter_dataset(shard_options=ShardOptions(0, count)) for count in (1, 2))
    for saved, other, message in (
        (state_of(half.limit(9), 4), numbers.limit(9), r'limit\(9\): .* element 8 with another .*, after 4 elements'),
        (
            state_of(half.batch(2).map_with_index(max), 4),
            numbers.batch(2).map_with_index(max),
            r'map_with_index\(max\): .* element 8 with another .*, after 4 elements',
        ),
        (state_of(mix, 4), other_mix, r'mix of .* element 4 with other .*expected elements \[2, 2\].* got \[1, 3\]'),
        (state_of(mix, 6), halves, 'expected a multiple of 2|got'),
        (state_of(windows, 9), half_windows, 'expected a multiple of 2'),
        (state_of(windows, 6), half_windows, r'window_shuffle.* window 2 at element 3: expected element 6'),
    ):
        with iter(other) as iterator:
            iterator.set_state(saved)
            with pytest.raises(StateError, match=message) as caught:
                iterator.get_next_index()
            remedy = 'leave out the next' if other in (other_mix, halves) else ': set_next_index continues at a number'
            assert type(caught.value) is StateError
            assert remedy in str(caught.value)
            if other in (other_mix, halves):
                with pytest.raises(StateError, match=message):
                    iterator.set_next_index(1)
            else:
                iterator.set_next_index(1)
                assert iterator.get_next_index() == 1
    with pytest.raises(
        StateError, match=r'window_shuffle\(3, seed=1\): the state was saved on 1 host, .* has 2, and it'
    ):
        iter(half_windows).set_state(state_of(windows, 10))


async def test_numbers_in_the_async_api():
    async with aiter(MapDataset.range(9).to_iter_dataset().batch(2)) as iterator:
        await iterator.set_next_index(3)
        assert (await anext(iterator)).tolist() == [6, 7]
        assert iterator.get_next_index() == 4


def test_stages_without_numbers_are_named():
    stream = MapDataset.range(9).to_iter_dataset()
    no_numbers = {
        'filter': stream.filter(lambda x: x % 2).batch(2),
        r'filter\(': MapDataset.range(9).filter(lambda x: x % 2).to_iter_dataset(),
        'flat_map': stream.flat_map(lambda x: [x, x]),
        'rebatch': stream.batch(2).rebatch(3),
        'pack': stream.map(lambda x: {'x': np.arange(x + 1)}).pack({'x': 9}).limit(3),
        'filter.*lambda': IterDataset.mix([stream, stream.filter(lambda x: x)]).repeat(2),
        'flat_map.*lambda': IterDataset.zip([stream.flat_map(lambda x: [x]), stream]).limit(3),
        'interleave': IterDataset.interleave([stream, stream], 2).window_shuffle(2, seed=1),
        'on_error': MapDataset.range(9).to_iter_dataset(on_error='skip').batch(2),
    }

    def behind(x):
        return x.sum()

    no_numbers['pack.*have no index: pack of the MapDataset plans rows that'] = no_numbers['pack']
    no_numbers[r'filter\(.*behind'] = stream.batch(2).filter(behind).prefetch(1)
    for stage, dataset in no_numbers.items():
        with iter(dataset) as iterator:
            with pytest.raises(InvalidArgumentError, match=stage if 'plans' in stage else rf'{stage}.*have no index'):
                iterator.get_next_index()
            with pytest.raises(InvalidArgumentError, match='no index'):
                iterator.set_next_index(0)
    with iter(MapDataset.range(9).to_iter_dataset(shard_options=ShardOptions(0, 2))) as iterator:
        iterator.set_state({'version': 5, 'state': 3})
        with pytest.raises(StateError, match='element 3 of the whole with 2 shards: expected a multiple of 2'):
            iterator.get_next_index()


@pytest.mark.parametrize('end', [lambda s: s, lambda s: s.map(lambda b: b + 0).prefetch(2)])
def test_hosts_resume_with_another_number_and_batch_size(end):
    """The promise of Grain's ElasticIterator: a global batch is divided among any number of hosts."""
    dataset = MapDataset.range(96).shuffle(seed=1)

    def run(hosts, global_batch, state, rounds):
        states, rows = [], []
        for host in range(hosts):
            stream = dataset.to_iter_dataset(shard_options=ShardOptions(host, hosts)).batch(global_batch // hosts)
            with iter(end(stream)) as iterator:
                if state is not None:
                    iterator.set_state(state)
                rows += [row for batch in itertools.islice(iterator, rounds) for row in batch.tolist()]
                states.append(json.loads(json.dumps(iterator.get_state())))
        assert all(state == states[0] for state in states)
        return rows, states[0]

    seen, state = [], None
    for hosts, global_batch, rounds in [(4, 8, 3), (3, 12, 2), (1, 16, 1), (2, 6, 1), (8, 8, 100)]:
        rows, state = run(hosts, global_batch, state, rounds)
        seen += rows
        assert sorted(seen) == sorted(list(dataset)[: len(seen)])
    assert len(seen) == 96
    with iter(dataset.to_iter_dataset().batch(5)) as iterator:
        iterator.set_state({'version': 5, 'state': 12})
        with pytest.raises(StateError, match=r'batch\(5\): batches have no index .*element 12 .*a multiple of 5'):
            iterator.get_next_index()


def test_batch_sizes_that_states_depend_on_are_compared():
    stream = MapDataset.range(20).to_iter_dataset()
    for size_matters in (
        lambda s, n: s.batch(n).limit(3),
        lambda s, n: s.batch(n).map_with_index(lambda i, b: (i, b)),
        lambda s, n: s.batch(n).flat_map(list),
        lambda s, n: s.batch(n).rebatch(3).batch(1),
    ):
        state = iter(size_matters(stream, 4)).get_state()
        with pytest.raises(StateError, match=r"stage 3 was 'batch\(4\)', and is 'batch\(5\)'"):
            iter(size_matters(stream, 5)).set_state(state)
    state = iter(stream.batch(4)).get_state()
    with pytest.raises(StateError, match=r"'batch\(4\)', and is 'batch\(5, drop_remainder=True\)'"):
        iter(stream.batch(5, drop_remainder=True)).set_state(state)
    state = iter(MapDataset.range(20).batch(4).to_iter_dataset()).get_state()
    with pytest.raises(StateError, match=r"'batch\(4\)', and is 'batch\(5\)'"):
        iter(MapDataset.range(20).batch(5).to_iter_dataset()).set_state(state)


def test_states_of_programs_are_checked():
    check = granular.testing.assert_equal_output_after_checkpoint
    check(MapDataset.range(9).shuffle(seed=1))
    check(MapDataset.range(12).to_iter_dataset(ReadOptions(2, 3)).filter(lambda x: x % 3).batch(2).repeat(2))
    check(granular.grain.DataLoader(data_source=list(range(7)), sampler=granular.grain.samplers.SequentialSampler(7)))

    class Counter(granular.IterDataset):
        def __init__(self, state):
            super().__init__()
            self.state = state

        def __iter__(self):
            return CounterIterator(self.state)

    class CounterIterator(DatasetIterator):
        def __init__(self, state):
            super().__init__()
            self._count, self._state = 0, state

        def __next__(self):
            if self._count == 3:
                raise StopIteration
            self._count += 1
            return np.full(2, self._count)

        def get_state(self):
            return self._state(self._count)

        def set_state(self, state):
            self._count = state['at']

    check(Counter(lambda at: {'at': at}))
    with pytest.raises(AssertionError, match='the elements from the state before element 1 on'):
        check(Counter(lambda at: {'at': 0}))
    with pytest.raises(AssertionError, match='the state before element 0, once it is restored'):
        check(Counter(lambda at: {'at': at + 1}))
    with pytest.raises(AssertionError, match='the state before element 2 is not plain JSON'):
        check(Counter(lambda at: {'at': at if at < 2 else np.int64(at)}))
    with pytest.raises(AssertionError, match='expected one element or more, got none'):
        check(MapDataset.range(0))
    with iter(Counter(functools.partial(dict, at=0))) as iterator:
        with pytest.raises(InvalidArgumentError, match='CounterIterator does not override get_next_index'):
            iterator.get_next_index()


def test_masked_indices_are_refused_and_steps_are_no_slice():
    dataset, masked = MapDataset.range(10), np.ma.masked_array([1, 5], [False, True])
    assert dataset.fetch(np.ma.masked_array([1, 5])) == [1, 5]
    with pytest.raises(InvalidArgumentError, match='without a mask'):
        dataset.fetch(masked)
    with pytest.raises(InvalidArgumentError, match='expected integers, got slice'):
        granular.sources.Epochs(dataset).fetch(slice(0, 3))


def test_elements_after_other_weights_have_no_numbers():
    """A number would count as if the mix had begun with these weights: elements would come twice."""

    def mixed(web, books):
        streams = {
            'web': MapDataset.range(100).to_iter_dataset(),
            'books': MapDataset.range(100, 200).to_iter_dataset(),
        }
        return iter(granular.IterDataset.mix(streams, {'web': web, 'books': books}).batch(10))

    with mixed(8, 2) as before:
        taken = [int(i) for _ in range(4) for i in next(before)]
        state = before.state_dict()
        before.set_next_index(1)
        assert next(before).tolist() == taken[10:20]
    with mixed(5, 5) as after:
        after.load_state_dict(state)
        for call in (after.get_next_index, lambda: after.set_next_index(6), lambda: after.indices(3)):
            with pytest.raises(StateError, match='other streams, weights or shards'):
                call()
        assert not {*next(after).tolist()} & {*taken}

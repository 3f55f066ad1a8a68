"""IterDataset: elements and order of Grain, and states that are exact between any two elements."""

import asyncio
import concurrent.futures
import copy
import functools
import itertools
import json
import pickle
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import granular
from granular import MapDataset, ReadOptions, ShardOptions, aio
from granular.errors import ClosedError, DatapointError, InvalidArgumentError, StateError, UnsupportedError
from granular.grain import DatasetIterator, MultiprocessingOptions
from granular.grain.experimental import DatasetOptions, batch_and_pad
from tests.support.states import check_each_state, plain
from tests.support.tables import examples

STREAMS = {
    'map': lambda d: d.map(lambda x: x * 2),
    'filter': lambda d: d.filter(lambda x: x % 3),
    'batch': lambda d: d.batch(4),
    'filter, batch': lambda d: d.filter(lambda x: x % 3).batch(4),
    'number': lambda d: d.map_with_index(lambda i, x: (i, x)),
    'filter, number': lambda d: d.filter(lambda x: x % 3).map_with_index(lambda i, x: (i, x)),
    'random': lambda d: d.random_map(lambda x, r: (x, int(r.integers(100))), seed=3),
    'filter, random': lambda d: d.filter(lambda x: x % 2).random_map(lambda x, r: (x, int(r.integers(100))), seed=3),
    'flat': lambda d: d.flat_map(lambda x: [x] * (x % 4)),
    'window': lambda d: d.window_shuffle(7, seed=5),
    'window, filter, batch': lambda d: d.window_shuffle(7, seed=5).filter(lambda x: x % 2).batch(3),
    'prefetch': lambda d: d.filter(lambda x: x % 3).prefetch(3).batch(2),
    'mix': lambda d: type(d).mix([d, d.map(lambda x: -x)], [1, 2]),
    'interleave': lambda d: type(d).interleave([d.map(lambda x, k=k: (k, x)) for k in range(3)], 2),
    'mix by name': lambda d: type(d).mix({'b': d, 'a': d.map(lambda x: -x)}, {'a': 2, 'b': 1}),
    'repeat': lambda d: d.map(lambda x: x + 1).repeat(2),
    'filter, repeat': lambda d: d.filter(lambda x: x % 3).repeat(2),
    'repeat, limit': lambda d: d.repeat().limit(50),
    'limit': lambda d: d.filter(lambda x: x % 3).limit(7).batch(2),
    'zip': lambda d: type(d).zip([d, d.map(lambda x: -x)]),
    'zip, not strict': lambda d: type(d).zip([d, d.limit(9), d], strict=False),
    'cache': lambda d: d.cache(),
    'cache, repeat': lambda d: d.filter(lambda x: x % 3).cache().repeat(3),
    'rebatch': lambda d: d.batch(4).rebatch(3),
    'rebatch, larger': lambda d: d.map(lambda x: {'x': x, 'y': [np.full(2, x)]}).batch(4).rebatch(10),
    'rebatch, drop': lambda d: d.batch(4).rebatch(5, drop_remainder=True),
    'pad': lambda d: d.batch(5, batch_fn=functools.partial(batch_and_pad, batch_size=5, pad_value=-1)),
    'prefetch none': lambda d: d.filter(lambda x: x % 3).prefetch(0),
    'random, long seed': lambda d: d.random_map(lambda x, r: (x, int(r.integers(100))), seed=2**40 + 1),
    'random, seeds': lambda d: d.seed((3, 2**33)).random_map(lambda x, r: (x, int(r.integers(100)))),
    'pack': lambda d: d.map(lambda x: {'t': np.arange(x % 5 + 1)}).pack({'t': 8}, num_packing_bins=3),
}  # fmt: skip


def stream(name, length=37, **options):
    read = ReadOptions(prefetch_buffer_size=options.pop('buffer', 16))
    return STREAMS[name](MapDataset.range(length).shuffle(seed=1).to_iter_dataset(read, **options))


@pytest.mark.parametrize('name', STREAMS)
def test_state_is_exact_between_any_two_elements(name):
    with iter(stream(name, 25)) as iterator:  # the time grows with its square
        expected, states = check_each_state(iterator)
    with iter(stream(name, 25, buffer=0)) as iterator:
        iterator.set_state(states[len(states) // 2])
        assert [plain(element) for element in iterator] == expected[len(states) // 2 :]


@pytest.mark.parametrize('name', STREAMS)
def test_closed_iterator_keeps_its_state(name):
    with iter(stream(name)) as iterator:
        assert len(list(itertools.islice(iterator, 3))) == 3
        state = iterator.get_state()
    assert iterator.get_state() == state


GRAIN = {
    'map': 'd.map(lambda x: x * 2)',
    'filter, batch': 'd.filter(lambda x: x % 3).batch(4)',
    'number': 'd.map_with_index(lambda i, x: (i, x))',
    'filter, number': 'd.filter(lambda x: x % 3).map_with_index(lambda i, x: (i, x))',
    'random': 'd.random_map(lambda x, r: (x, int(r.integers(100))), seed=3)',
    'filter, random': 'd.filter(lambda x: x % 2).random_map(lambda x, r: (x, int(r.integers(100))), seed=3)',
    'flat': 'grain.experimental.FlatMapIterDataset(d, Flat())',
    'window': 'grain.experimental.WindowShuffleIterDataset(d, window_size=7, seed=5)',
    'mix': 'grain.IterDataset.mix([d, d.map(lambda x: -x)], [1, 2])',
    'interleave': 'X.InterleaveIterDataset([d.map(lambda x, k=k: (k, x)) for k in range(3)], cycle_length=2)',
    'repeat': 'X.RepeatIterDataset(d.map(lambda x: x + 1), 2)',
    'filter, repeat': 'X.RepeatIterDataset(d.filter(lambda x: x % 3), 2)',
    'repeat, limit': 'X.LimitIterDataset(X.RepeatIterDataset(d), 50)',
    'limit': 'X.LimitIterDataset(d.filter(lambda x: x % 3), 7).batch(2)',
    'zip': 'X.ZipIterDataset([d, d.map(lambda x: -x)])',
    'zip, not strict': 'X.ZipIterDataset([d, X.LimitIterDataset(d, 9), d], strict=False)',
    'cache': 'X.CacheIterDataset(d)',
    'cache, repeat': 'X.RepeatIterDataset(X.CacheIterDataset(d.filter(lambda x: x % 3)), 3)',
    'rebatch': 'X.RebatchIterDataset(d.batch(4), 3)',
    'rebatch, larger': 'X.RebatchIterDataset(d.map(lambda x: {"x": x, "y": [np.full(2, x)]}).batch(4), 10)',
    'rebatch, drop': 'X.RebatchIterDataset(d.batch(4), 5, drop_remainder=True)',
    'pad': 'd.batch(5, batch_fn=functools.partial(X.batch_and_pad, batch_size=5, pad_value=-1))',
    'prefetch none': 'X.ThreadPrefetchIterDataset(d.filter(lambda x: x % 3), prefetch_buffer_size=0)',
    'random, long seed': 'd.random_map(lambda x, r: (x, int(r.integers(100))), seed=2**40 + 1)',
    'random, seeds': 'd.seed((3, 2**33)).random_map(lambda x, r: (x, int(r.integers(100))))',
    'mix by name': 'grain.IterDataset.mix({"b": d, "a": d.map(lambda x: -x)}, {"b": 1, "a": 2})',
    'pack': 'X.FirstFitPackIterDataset(d.map(lambda x: {"t": np.arange(x % 5 + 1)}), length_struct={"t": 8}, '
    'num_packing_bins=3, shuffle_bins=False)',
}  # fmt: skip


def test_elements_equal_those_of_grain(grain):
    script = """
import functools
X = grain.experimental
class Flat(grain.experimental.FlatMapTransform):
    max_fan_out = 4
    def flat_map(self, x): return [x] * (x % 4)
out = {}
for name, text in json.loads(sys.argv[1]).items():
    d = grain.MapDataset.range(37).shuffle(seed=1).to_iter_dataset()
    out[name] = plain(list(eval(text)))
print(json.dumps(out))
"""
    for name, expected_elements in grain.run(script, json.dumps(GRAIN)).items():
        assert plain(list(stream(name))) == expected_elements, name


def test_error_does_not_shift_the_state():
    broken = {5}

    def fail(x):
        if x in broken:
            raise KeyError(f'element {x}')
        return x

    for chain in (
        lambda d: d.map(fail).batch(4),
        lambda d: d.filter(lambda x: x != 3).batch(1).map(lambda b: fail(int(b[0]))).batch(4),
        lambda d: d.map(fail).window_shuffle(4, seed=1),
        lambda d: d.flat_map(lambda x: [fail(x)] * 2),
    ):
        broken.add(5)
        with iter(chain(MapDataset.range(20).to_iter_dataset())) as iterator:
            elements = []
            with pytest.raises(KeyError, match='element 5'):
                while True:
                    elements.append(plain(next(iterator)))
            state = iterator.get_state()
            with pytest.raises(KeyError, match='element 5'):
                next(iterator)
            assert iterator.get_state() == state
            broken.clear()
            rest = [plain(element) for element in iterator]
            with pytest.raises(StopIteration):
                next(iterator)
        assert elements + rest == [plain(element) for element in chain(MapDataset.range(20).to_iter_dataset())]


def test_data_errors_are_skipped_replaced_and_counted():
    def fail(x):
        if x % 5 == 2:
            raise ValueError(f'{x} is bad')
        return x

    dataset = MapDataset.range(20).map(fail)
    with iter(dataset.to_iter_dataset(on_error='skip').batch(4)) as iterator:
        assert plain(list(iterator)) == [[0, 1, 3, 4], [5, 6, 8, 9], [10, 11, 13, 14], [15, 16, 18, 19]]
        assert iterator.stats()['errors'] == 4
        assert iterator.errors[1] == (7, 'ValueError: 7 is bad')
    replaced = dataset.to_iter_dataset(on_error=lambda index, error: -index if index < 10 else None)
    assert list(replaced) == [0, 1, -2, 3, 4, 5, 6, -7, 8, 9, 10, 11, 13, 14, 15, 16, 18, 19]
    with pytest.raises(ValueError, match='2 is bad') as caught:
        list(dataset.to_iter_dataset())
    assert caught.value.__notes__ == [
        'while transforming the datapoint at index 2, in map(test_data_errors_are_skipped_replaced_and_counted.fail)'
    ]
    with pytest.raises(InvalidArgumentError, match='on_error'):
        dataset.to_iter_dataset(on_error='ignore')
    with granular.Loader(dataset.map(lambda x: {'x': x}), 5, on_error='skip') as loader:
        assert plain([batch['x'] for batch in loader])[:2] == [[0, 1, 3, 4], [5, 6, 8, 9]]
        assert loader.stats()['errors'] == 4
        assert loader.stats()['datapoints'] == 16
        assert loader.errors[0] == (2, 'ValueError: 2 is bad')
    with granular.Loader(dataset.map(lambda x: {'x': x}), 5, on_error=lambda step, error: {'x': -step}) as loader:
        assert next(loader)['x'].tolist() == [0, 1, -2, 3, 4]


def test_undecodable_record_is_skipped(tmp_path):
    with granular.DatasetWriter(
        tmp_path / 'ds', {'x': 'utf8', 'i': 'int'}, {**granular.encoders, 'utf8': bytes}
    ) as writer:
        for i in range(20):
            writer.append({'x': b'\xff' if i in (3, 11) else b'text', 'i': i})
    with granular.DatasetReader(tmp_path / 'ds', granular.decoders) as reader:
        dataset = MapDataset.source(reader).shuffle(seed=1).map(lambda datapoint: datapoint['i'])
        with iter(dataset.to_iter_dataset(on_error='skip')) as iterator:
            assert sorted(iterator) == [i for i in range(20) if i not in (3, 11)]
            assert iterator.stats()['errors'] == 2
        with pytest.raises(granular.errors.DecodeError):
            list(dataset)


def test_store_errors_are_raised(tmp_path):
    with granular.DatasetWriter(tmp_path / 'ds', {'i': 'int'}, granular.encoders) as writer:
        writer.append({'i': 1})
    reader = granular.DatasetReader(tmp_path / 'ds', granular.decoders)
    reader.close()
    with pytest.raises(ClosedError):
        list(MapDataset.source([0]).map(lambda i: i).to_iter_dataset().flat_map(lambda i: reader.fetch([i])))
    with pytest.raises(ClosedError):
        next(iter(MapDataset.range(3).to_iter_dataset(on_error='skip').prefetch(2).map(lambda i: reader[i])))


def test_state_of_another_pipeline_names_the_difference():
    state = iter(stream('filter, batch')).get_state()
    assert state['pipeline'][1] == 'shuffle(seed=1, Index())'
    other = MapDataset.range(37).shuffle(seed=2).to_iter_dataset().filter(lambda x: x % 3).batch(4)
    with pytest.raises(StateError, match=r"stage 2 was 'shuffle\(seed=1, Index\(\)\)', and is 'shuffle\(seed=2"):
        iter(other).set_state(state)
    with pytest.raises(StateError, match='expected what state_dict'):
        iter(other).set_state({'step': 3})
    with pytest.raises(StateError, match='position of an element'):
        iter(MapDataset.range(3).to_iter_dataset()).set_state({'version': 5, 'state': 'x'})


@given(st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6)), max_size=4), st.integers(1, 7), st.integers(0, 50))
@settings(max_examples=examples(40))
def test_states_resume_on_any_number_of_hosts_again_and_again(stays, last, length):
    """All hosts have the same state after the same number of elements, and each element comes once."""
    dataset = MapDataset.range(length).shuffle(seed=1)
    state, seen = 0, []
    for count, rounds in [*stays, (last, length + 1)]:
        states = set()
        for i in range(count):
            with iter(dataset.to_iter_dataset(shard_options=ShardOptions(i, count))) as iterator:
                iterator.set_state({'version': 5, 'state': state})
                seen += itertools.islice(iterator, rounds)
                states.add(json.dumps(iterator.get_state()['state']))
        assert len(states) == 1
        state = json.loads(states.pop())
        position = state if count == 1 else state['at']
        assert sorted(seen) == sorted(list(dataset)[:position])
    assert position == length


def test_hosts_that_resume_have_shards_of_equal_length():
    def parts(count, state):
        for i in range(count):
            with iter(MapDataset.range(17).to_iter_dataset(shard_options=ShardOptions(i, count, True))) as iterator:
                iterator.set_state({'version': 5, 'state': state})
                yield list(iterator)
                assert iterator.get_state()['state'] == {'at': 17, 'hosts': count}

    assert list(parts(3, 5)) == [[5, 8, 11, 14], [6, 9, 12, 15], [7, 10, 13, 16]]
    assert list(parts(2, 6)) == [[6, 8, 10, 12, 14], [7, 9, 11, 13, 15]]
    assert list(parts(5, 16)) == [[], [], [], [], []]


def test_shards_of_equal_length():
    parts = [list(MapDataset.range(11).to_iter_dataset(shard_options=ShardOptions(i, 3, True))) for i in range(3)]
    assert parts == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_none_elements_can_be_kept():
    dataset = MapDataset.range(5).filter(lambda x: x % 2)
    assert list(dataset.to_iter_dataset(allow_nones=True)) == [None, 1, None, 3, None]
    assert list(dataset.to_iter_dataset()) == [1, 3]
    assert list(dataset.to_iter_dataset(allow_nones=True).map(lambda x: x + 1)) == [None, 2, None, 4, None]


def test_read_ahead_is_bounded_by_memory():
    fetched = []

    def make(i):
        fetched.append(i)
        return np.zeros(1_000_000, np.uint8)

    dataset = MapDataset.range(1000).map(make)
    with iter(dataset.to_iter_dataset(ReadOptions(prefetch_buffer_size=80, memory=30_000_000))) as iterator:
        for taken in range(100):
            next(iterator)
            assert len(fetched) <= taken + 1 + 30


@pytest.mark.parametrize('stored', [False, True])
def test_read_ahead_of_large_elements_is_bounded_from_the_first_one_on(tmp_path, stored):
    taken, ahead = 0, []

    def make(element):
        ahead.append(len(ahead) + 1 - taken)
        return np.zeros(2_000_000, np.uint8)

    dataset = MapDataset.range(60)
    if stored:
        with granular.DatasetWriter(tmp_path / 'data', {'x': 'bytes'}, granular.encoders) as writer:
            for _ in range(60):
                writer.append({'x': bytes(2_000_000)}, flush=False)
        dataset = MapDataset.source(granular.DatasetReader(tmp_path / 'data', granular.decoders))
    for stream, size in (dataset.map(make), 1), (dataset.map(make).batch(3), 3):
        taken = 0
        ahead.clear()
        with iter(stream.to_iter_dataset(ReadOptions(memory=8_000_000))) as iterator:
            for _ in iterator:
                taken += size
        assert taken == len(ahead) == 60
        assert max(ahead) <= size + max(4 * size, 4)  # and the element that the consumer waits for


@pytest.mark.parametrize('num_threads', [0, 1, 2, 16])
def test_first_element_does_not_wait_for_a_chunk(num_threads):
    release, first = threading.Event(), 0

    def wait(x):
        assert x == first or release.wait(30)
        return x

    dataset = MapDataset.range(1000).map(wait)
    with iter(dataset.to_iter_dataset(ReadOptions(num_threads=num_threads))) as iterator:
        assert next(iterator) == 0
        release.set()
        assert list(iterator) == list(range(1, 1000))
        release.clear()
        first = 500
        iterator.set_state({'version': 5, 'state': 500})
        assert next(iterator) == 500
        release.set()


def test_chunks_grow():
    sizes = []

    class Source:
        def __len__(self):
            return 1000

        def fetch(self, indices):
            sizes.append(len(indices))
            return indices

    assert list(MapDataset.source(Source()).to_iter_dataset()) == list(range(1000))
    assert sizes[:9] == [1, 1, 2, 4, 8, 16, 32, 62, 62]
    assert max(sizes) == 62
    sizes.clear()
    assert list(MapDataset.source(Source()).to_iter_dataset(ReadOptions(prefetch_buffer_size=0))) == list(range(1000))
    assert sizes == [1] * 1000


def test_prefetch_can_start_early():
    fetched = []
    with iter(MapDataset.range(100).map(fetched.append).to_iter_dataset()) as iterator:
        iterator.start_prefetch()
        for _ in range(200):
            if fetched:
                break
            time.sleep(0.01)
        assert fetched


async def test_async_api():
    dataset = MapDataset.range(20).shuffle(seed=1)
    async with aiter(dataset.to_iter_dataset().batch(3)) as iterator:
        first = [plain(await anext(iterator)) for _ in range(3)]
        state = iterator.get_state()
        rest = [plain(element) async for element in iterator]
        await iterator.set_state(state)
        assert [plain(element) async for element in iterator] == rest
        assert iterator.stats()['elements'] == 3 + 2 * len(rest)
    assert first + rest == plain(list(dataset.batch(3)))
    with pytest.raises(ClosedError):
        await anext(iterator)
    stream = aio.MapDataset.range(20).shuffle(seed=1).to_iter_dataset().prefetch(4)
    iterator = aiter(stream)
    task = asyncio.create_task(anext(iterator))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [element async for element in iterator] == list(dataset)
    await iterator.aclose()


def test_threads_share_an_iterator():
    with iter(MapDataset.range(5000).to_iter_dataset()) as iterator:
        barrier = threading.Barrier(4, timeout=60)

        def take(_):
            barrier.wait()
            return list(iterator)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            parts = list(pool.map(take, range(4)))
        assert sorted(itertools.chain(*parts)) == list(range(5000))
        assert all(part == sorted(part) for part in parts)
        stats = iterator.stats()
        assert stats['elements'] == stats['read'] == 5000


def test_elements_are_counted_when_they_are_taken():
    with iter(MapDataset.range(300).to_iter_dataset()) as iterator:
        for count in (1, 10, 70):
            while iterator.stats()['elements'] < count:
                next(iterator)
            stats = iterator.stats()
            assert stats['elements'] == stats['read'] == iterator.get_state()['state'] == count
        iterator.set_state({'version': 5, 'state': 10})
        assert list(itertools.islice(iterator, 3)) == [10, 11, 12]
        assert iterator.stats()['elements'] == 73
        iterator.close()
        with pytest.raises(ClosedError):
            next(iterator)


def test_packing_names_elements_that_are_too_long():
    dataset = MapDataset.source([{'t': np.arange(9)}]).to_iter_dataset()
    with pytest.raises(DatapointError, match="a sequence of 9 in 't' is longer than a row of 8"):
        list(dataset.pack({'t': 8}))
    with pytest.raises(DatapointError, match="has no 'u'"):
        list(dataset.pack({'u': 8}))


def test_mix_by_name_resumes_with_other_streams():
    streams = {name: MapDataset.range(at, at + 20).to_iter_dataset() for name, at in [('a', 0), ('b', 100), ('c', 200)]}
    mix = granular.IterDataset.mix
    with iter(mix({'a': streams['a'], 'b': streams['b']}, {'b': 2, 'a': 1})) as iterator:
        assert [next(iterator) for _ in range(6)] == [0, 100, 101, 1, 102, 103]
        state = json.loads(json.dumps(iterator.get_state()))
    with iter(mix({'c': streams['c'], 'b': streams['b']})) as iterator:
        with pytest.raises(StateError, match=r"the state has the streams \['a', 'b'\]: if this is meant"):
            iterator.set_state(state)
        iterator.set_state(state, changes=[granular.changes.Added('c'), granular.changes.Removed('a')])
        assert [next(iterator) for _ in range(4)] == [200, 104, 201, 105]
    with iter(mix({'b': streams['b'].map(str), 'a': streams['a']})) as iterator:
        with pytest.raises(StateError, match='stage 3 was .*nothing.*map'):
            iterator.set_state(state)
    assert 'mix of {c: 1, b: 1}' in str(mix({'c': streams['c'], 'b': streams['b']}))


def test_streams_combine_mapdatasets():
    few, many = MapDataset.range(3), MapDataset.range(10, 15)
    assert list(granular.IterDataset.mix([few, many])) == [0, 10, 1, 11, 2, 12]
    assert list(granular.IterDataset.interleave([few, many], 2)) == [0, 10, 1, 11, 2, 12, 13, 14]
    assert list(granular.IterDataset.zip([few, few.to_iter_dataset()])) == [(0, 0), (1, 1), (2, 2)]
    with pytest.raises(DatapointError, match='zip: stream 0 ended after 3 elements, and stream 1 did not'):
        list(granular.IterDataset.zip([few, many]))


def test_cache_computes_each_element_once():
    calls = []

    def fail_once(x):
        calls.append(x)
        if calls.count(x) == 1 and x == 3:
            raise KeyError('three')
        return x

    stream = MapDataset.range(6).to_iter_dataset().flat_map(lambda x: [x]).map(fail_once).cache().repeat(3)
    with iter(stream) as iterator:
        elements = [next(iterator) for _ in range(3)]
        with pytest.raises(KeyError, match='three'):
            next(iterator)
        assert elements + list(iterator) == 3 * list(range(6))
        assert calls == [0, 1, 2, 3, 3, 4, 5]


def test_functions_cannot_change_what_a_cache_returns_in_later_epochs():
    def count(element):
        element['n'] += 1
        return element['n'], int(element['x'][0])

    def double(element):
        (element if type(element) is tuple else element['parts'])[0][:] *= 2

    arrays = [np.full(2, i) for i in range(3)]
    stream = MapDataset.source([{'n': i, 'x': array, 'parts': (array, 0)} for i, array in enumerate(arrays)])
    cached = stream.to_iter_dataset().cache()
    assert list(cached.map(count).repeat(2)) == 2 * [(i + 1, i) for i in range(3)]
    for elements in (cached, cached.map(lambda element: element['parts'])):
        with pytest.raises(ValueError, match='read-only'):
            list(elements.map(double))
    arrays[1][:] = 5  # its owner may


@pytest.mark.parametrize('taken', [0, 3])
def test_cache_refuses_the_state_of_another_host(taken):
    hosts = [MapDataset.range(9).to_iter_dataset(shard_options=ShardOptions(host, 2)) for host in range(2)]
    one, other = (iter(stream.filter(lambda x: x != 4).cache().repeat()) for stream in hosts)
    assert list(itertools.islice(one, taken)) == [0, 2, 6][:taken]
    assert [next(other), next(other)] == [1, 3]
    with pytest.raises(StateError, match='the state is of host 1 of 2, this is host 0'):
        one.set_state(other.get_state())


def test_stages_before_one_that_holds_elements_refuse_the_state_of_another_host():
    hosts = [MapDataset.range(20).to_iter_dataset(shard_options=ShardOptions(host, 2)) for host in range(2)]
    one, other = (iter(stream.batch(2).limit(9).rebatch(3)) for stream in hosts)
    assert [next(one).tolist(), next(other).tolist()] == [[0, 2, 4], [1, 3, 5]]
    with pytest.raises(StateError, match='the state is of host 1 of 2, this is host 0'):
        one.set_state(other.get_state())


def test_streams_without_elements_end():
    empty = MapDataset.range(5).to_iter_dataset().filter(lambda x: x > 9)
    for stream in (empty.repeat(), empty.repeat(2), empty.cache(), empty.limit(3), empty.batch(2).rebatch(3)):
        assert list(stream) == []


@pytest.mark.parametrize(
    'make',
    [lambda d: d.limit(0), lambda d: d.repeat(0), lambda d: d.rebatch(0), lambda d: d.prefetch(-1),
     lambda d: d.mp_prefetch(-1), lambda d: d.mp_prefetch(1.5), lambda d: type(d).zip([]), lambda d: type(d).zip([3]),
     lambda d: d.seed(-1), lambda d: d.seed('12'), lambda d: d.seed([]), lambda d: type(d).mix([d], {'a': 1}),
     lambda d: type(d).mix({'a': d}, {'b': 1}), lambda d: type(d).mix([d, d], [1e-310, 1]),
     lambda d: type(d).mix([d, d], [[1, 2], [3, 4]]), lambda d: type(d).mix([d, d], np.ones((2, 2))),
     lambda d: type(d).mix({0: d, 1: d}), lambda d: MultiprocessingOptions(1, 0),
     lambda d: MultiprocessingOptions(1, start_method='thread')],
)  # fmt: skip
def test_invalid_arguments_are_rejected(make):
    with pytest.raises(InvalidArgumentError):
        make(MapDataset.range(5).to_iter_dataset())


@pytest.mark.parametrize(
    ('element', 'message'),
    [(3, 'a batch of arrays, got a'), ({'x': np.ones(2), 'y': np.ones(3)}, r'one length in a batch, got \[2, 3\]')],
)
def test_rebatch_rejects_other_elements(element, message):
    with pytest.raises(DatapointError, match=message):
        list(MapDataset.source([element]).to_iter_dataset().rebatch(2))


def test_rebatch_rejects_rows_of_other_shapes():
    batches = MapDataset.source([np.zeros((2, 3)), np.zeros((2, 4))]).to_iter_dataset()
    with pytest.raises(DatapointError, match=r'expected rows of one shape, got \[\(3,\), \(4,\)\]'):
        list(batches.rebatch(3))


@pytest.mark.parametrize('other', [np.array(['a']), np.array(['2020-01-01'], 'datetime64[D]')])
def test_rebatch_turns_no_numbers_into_text_or_dates(other):
    with pytest.raises(
        DatapointError, match=r"'x': datapoint 1 of a batch has dtype .*, the first int64: make them equal"
    ):
        list(MapDataset.source([{'x': np.array([1])}, {'x': other}]).to_iter_dataset().rebatch(2))


def test_numpy_integers_are_integers():
    two = np.int64(2)
    dataset = MapDataset.range(two, np.int32(9)).shuffle(seed=two).repeat(two)
    options = granular.ReadOptions(two, np.int32(20), np.int64(1 << 20))
    stream = dataset.to_iter_dataset(options, shard_options=ShardOptions(np.int64(1), two)).window_shuffle(two, two)
    stream = stream.batch(two).prefetch(two).limit(two).mp_prefetch(np.int64(0))
    with iter(stream) as iterator:
        assert next(iterator).shape == (2,)
        json.dumps(iterator.get_state())
    assert MapDataset.range(5).batch(two)[0].tolist() == [0, 1]


def test_annotations_with_element_types():
    for kind in (MapDataset, aio.MapDataset, granular.IterDataset, DatasetIterator):
        assert kind[int].__origin__ is kind


FILTERS = {
    'of the MapDataset': lambda d, f: d.filter(f).to_iter_dataset(),
    'of the stream': lambda d, f: d.to_iter_dataset().filter(f),
    'after a batch': lambda d, f: d.to_iter_dataset().batch(1).filter(lambda batch: f(batch[0])).map(lambda b: b[0]),
}


@pytest.mark.parametrize('name', FILTERS)
def test_filters_that_drop_almost_everything_warn_or_raise(name, caplog):
    def few(x):
        return x % 20 == 0

    stream = FILTERS[name](MapDataset.range(3000), few)
    expected = list(range(0, 3000, 20))
    assert list(stream) == expected
    assert [record.getMessage() for record in caplog.records] == [
        f'{caplog.records[0].args[0]}: filter_warn_threshold_ratio is 0.9'
    ]
    assert 'few' in caplog.text or name == 'after a batch'
    assert 'dropped 950 of 1000 consecutive elements' in caplog.text
    caplog.clear()
    options = DatasetOptions
    for quiet in (options(filter_warn_threshold_ratio=None), options(filter_warn_threshold_ratio=0.96)):
        assert list(stream.with_options(quiet)) == expected
    assert not caplog.records
    with iter(stream.with_options(options(filter_raise_threshold_ratio=0.95))) as iterator:
        elements = []
        with pytest.raises(DatapointError, match='dropped 950 of 1000 .*filter_raise_threshold_ratio is 0.95'):
            while True:
                elements.append(next(iterator))
        assert elements == expected[:50]
    for ratio in (-0.1, 1.1, '0.5'):
        with pytest.raises(InvalidArgumentError, match='filter_warn_threshold_ratio: expected a number from 0 to 1'):
            options(filter_warn_threshold_ratio=ratio)


@pytest.mark.parametrize('copying', [pickle.dumps, copy.deepcopy])
@pytest.mark.parametrize('make', [
    lambda: iter(MapDataset.range(9).to_iter_dataset()),
    lambda: iter(loaded(str)),
    lambda: granular.Loader(MapDataset.source([{'x': 1}]), 1),
])  # fmt: skip
def test_started_iterators_name_the_remedy_where_they_are_pickled(make, copying):
    with make() as iterator:
        next(iterator)
        with pytest.raises(UnsupportedError, match='save its state, and restore that in a new one'):
            copying(iterator)


def nothing(x):
    pass


def loaded(fn, workers=0):
    sampler = granular.grain.samplers.IndexSampler(50, num_epochs=1)
    return granular.grain.DataLoader(data_source=range(50), sampler=sampler, operations=[fn], worker_count=workers)


EMPTY = {
    'map': lambda n: MapDataset.range(n).map(nothing),
    'map of a batched stream': lambda n: MapDataset.range(n).map(nothing).to_iter_dataset().batch(4),
    'map behind a filter': lambda n: MapDataset.range(2 * n).filter(lambda x: x % 2).map(nothing),
    'map in a worker': lambda n: MapDataset.range(n).map(nothing).to_iter_dataset().mp_prefetch(1),
    'random_map': lambda n: MapDataset.range(n).random_map(lambda x, rng: nothing(x), seed=1),
    'source': lambda n: MapDataset.source([None] * n),
    'DataLoader': lambda n: loaded(nothing),
    'DataLoader with a worker': lambda n: loaded(nothing, 1),
    **{f'filter {name}': lambda n, make=FILTERS[name]: make(MapDataset.range(n), lambda x: False) for name in FILTERS},
}


@pytest.mark.parametrize('name', EMPTY)
def test_end_of_a_stream_that_dropped_every_element_is_a_warning(name, caplog):
    assert list(EMPTY[name](50)) == []
    [message] = [record.getMessage() for record in caplog.records]
    number = 100 if name == 'map behind a filter' else 50
    assert f'dropped all {number} elements: a function returned None, or a filter False' in message
    if name in ('map', 'DataLoader'):
        assert 'nothing' in message


@pytest.mark.parametrize('name', ['batch', 'rebatch'])
def test_stream_too_short_for_a_batch_is_a_warning(name, caplog):
    def stream(size, count=5):
        short = MapDataset.range(count).to_iter_dataset()
        return getattr(short.batch(2) if name == 'rebatch' else short, name)(size, drop_remainder=True)

    assert list(stream(6)) == []
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith(f'{name}(6, drop_remainder=True): no batch of 5 ')
    caplog.clear()
    with iter(stream(3)) as iterator, iter(stream(3)) as resumed:
        next(iterator)
        resumed.set_state(iterator.get_state())
        assert (list(iterator), list(resumed)) == ([], [])
    assert list(stream(3, 0)) == []
    assert list(MapDataset.range(0).batch(3, drop_remainder=True)) == []
    assert not caplog.records
    assert list(MapDataset.range(5).batch(6, drop_remainder=True)) == []
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith('batch(6, drop_remainder=True): no batch of 5 elements')


def test_functions_that_return_none_for_ever_are_a_warning(caplog):
    endless = MapDataset.range(50).map(nothing).repeat().to_iter_dataset()
    with iter(endless.with_options(DatasetOptions(filter_raise_threshold_ratio=1))) as iterator:
        with pytest.raises(DatapointError, match=r'map\(nothing\) dropped 1000 of 1000 consecutive elements'):
            next(iterator)


@pytest.mark.parametrize('make', [lambda d: d.map(lambda x: x or None), lambda d: d.filter(lambda x: x)])
def test_elements_that_are_dropped_after_others_are_no_warning(make, caplog):
    stream = make(MapDataset.source([1] + [0] * 200)).to_iter_dataset()
    with iter(stream) as iterator:
        assert next(iterator) == 1
        state = iterator.get_state()
        assert list(iterator) == []
        iterator.set_state(state)
        assert list(iterator) == []
    assert not caplog.records


@pytest.mark.parametrize('seed', [None, 'a', 1.5, -1, 2**32])
def test_seeds_of_shuffled_windows_are_checked(seed):
    with pytest.raises(InvalidArgumentError, match='seed: expected an integer'):
        MapDataset.range(3).to_iter_dataset().window_shuffle(2, seed=seed)


def test_options_are_checked():
    with pytest.raises(InvalidArgumentError, match='options: expected DatasetOptions, got 3'):
        MapDataset.range(3).to_iter_dataset().with_options(3)


class Awaiting:
    """A source whose reads wait, as those of a bucket do."""

    def __len__(self):
        return 60

    async def fetch(self, indices):
        await asyncio.sleep(0.001)
        return [int(index) for index in indices]


@pytest.mark.parametrize('num_threads', [1, 2, 3])
@pytest.mark.parametrize(
    'make',
    [
        lambda source, f, options: source.map(f).to_iter_dataset(options),
        lambda source, f, options: source.to_iter_dataset(options).map(f),
        lambda source, f, options: source.map(f).batch(7).to_iter_dataset(options),
    ],
)
@pytest.mark.parametrize('source', [MapDataset.range(60), MapDataset.source(Awaiting())], ids=['memory', 'awaited'])
def test_no_more_functions_run_at_a_time_than_there_are_threads(source, make, num_threads):
    running, most, lock = 0, 0, threading.Lock()

    def slow(x):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.002)
        with lock:
            running -= 1
        return x

    list(make(source, slow, granular.ReadOptions(num_threads=num_threads)))
    assert 0 < most <= num_threads

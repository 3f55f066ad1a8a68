"""Loader: batches, order, shards, states, errors, read-ahead and closing."""

import asyncio
import gc
import json
import multiprocessing
import signal
import threading
import time
import weakref

import numpy as np
import pytest

import granular
from granular import aio, sources
from granular.errors import ClosedError, DatapointError, InvalidArgumentError, StateError


class Numbers:
    """A source of numbers that can fail or wait."""

    def __init__(self, length=100, fail=None, wait=0.0):
        self.length, self.failing, self.wait = length, fail, wait
        self.fetched, self.running = [], []

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        self.fetched.append(i)
        self.running.append(i)
        time.sleep(self.wait)
        self.running.remove(i)
        if i == self.failing:
            raise LookupError('this one')
        return {'x': i, 'y': np.full((2, 3), i, np.float32)}


def steps(loader, count):
    return [next(loader)['x'].tolist() for _ in range(count)]


def test_batches_are_arrays():
    with granular.Loader(sources.Epochs(Numbers(10), shuffle=False), batch=4) as loader:
        assert loader.spec == {'x': (np.dtype(np.int64), ()), 'y': (np.dtype(np.float32), (2, 3))}
        iterator = iter(loader)
        batch = next(iterator)
        assert batch['y'].shape == (4, 2, 3)
        assert batch['y'].dtype == np.float32
        assert batch['y'][2, 0, 0] == 2
        assert steps(iterator, 3) == [[4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5]]


@pytest.mark.parametrize(('prefetch', 'workers'), [(0, 1), (1, 2), (8, 32)])
def test_order_does_not_depend_on_concurrency(prefetch, workers):
    source = sources.Epochs(Numbers(50), seed=5)
    expected = [[source(i)['x'] for i in range(k * 8, k * 8 + 8)] for k in range(20)]
    with granular.Loader(source, 8, prefetch, workers) as loader:
        assert steps(loader, 20) == expected


@pytest.mark.parametrize(('length', 'shards'), [(500, 1), (0, 1), (1199, 2)])
def test_loader_without_a_batch_is_an_error(length, shards):
    with granular.Loader(Numbers(length), 600, num_shards=shards) as loader:
        message = rf'expected {600 * shards} datapoints or more for a batch of 600.*got {length}'
        for use in (next, list, len):
            with pytest.raises(InvalidArgumentError, match=message):
                use(loader)


def test_length_is_the_number_of_batches():
    with granular.Loader(Numbers(10), 2, shard_id=1, num_shards=2) as loader:
        assert len(loader) == len(list(loader)) == 2
        assert len(loader) == 2
    with granular.Loader(sources.Epochs(Numbers(10)), 2) as endless:
        assert endless
        with pytest.raises(TypeError, match='its source is endless'):
            len(endless)


def test_finite_source_ends_and_begins_again():
    epoch = [[0, 1, 2, 3], [4, 5, 6, 7]]
    with granular.Loader(Numbers(10), batch=4) as loader:
        for _ in range(3):
            assert [batch['x'].tolist() for batch in loader] == epoch
            assert next(loader, None) is None
        for step, rest in ((4, epoch[1:]), (8, epoch)):  # after its last batch, the next epoch begins
            loader.load({'step': step})
            assert [batch['x'].tolist() for batch in loader] == rest  # finishes its epoch first
            assert [batch['x'].tolist() for batch in loader] == epoch
        assert loader.save()['step'] == loader.epoch * 10 > 0
        for _ in loader:
            break
        assert [batch['x'].tolist() for batch in loader] == epoch  # a loop that is left is not continued


async def test_finite_source_begins_again_in_the_async_api():
    async with granular.aio.Loader(Numbers(10), batch=4) as loader:
        for _ in range(2):
            assert [batch['x'].tolist() async for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_shards_share_every_global_batch():
    source = sources.Epochs(Numbers(24), seed=1)
    parts = []
    for shard in range(3):
        with granular.Loader(source, 4, shard_id=shard, num_shards=3) as loader:
            parts.append(steps(loader, 4))
            assert loader.consumed == loader.save()['step'] == 48
    with granular.Loader(source, 12) as loader:
        unsharded = steps(loader, 4)
    assert [sum((part[k] for part in parts), []) for k in range(4)] == unsharded


def test_states_resume_exactly():
    source = sources.Epochs(Numbers(30), seed=2)
    with granular.Loader(source, 4) as loader:
        lines = [{'stage': 'source', 'source': 'Numbers', 'elements': 30}, 'Epochs(seed=2, Permutation())']
        assert loader.fingerprint() == ['Numbers of 30', lines[1], 'Loader(batch=4)']
        same = {'version': 5, 'seed': 2, 'pipeline': lines, 'round': 4}
        described = {'stages': {'source': 'Numbers', 'length': 30, 'elements': 30}}
        assert loader.save() == {'step': 0, **same, **described}
        steps(loader, 3)
        state = json.loads(json.dumps(loader.save()))
        assert state == loader.state_dict() == {'step': 12, **same, **described}
        expected = steps(loader, 5)
        loader.load(state)
        assert steps(loader, 5) == expected
        loader.load({'step': 0})
        steps(loader, 3)
        assert steps(loader, 5) == expected
    with granular.Loader(source, 4, prefetch=1) as loader:
        loader.load_state_dict(state)
        assert steps(loader, 5) == expected


@pytest.mark.parametrize('state', [{}, {'step': -1}, {'step': 'x'}, {'step': 4, 'seed': 1}])
def test_foreign_states_are_rejected(state):
    with granular.Loader(sources.Epochs(Numbers()), 4) as loader:
        with pytest.raises(StateError):
            loader.load(state)
        assert steps(loader, 1)


def test_a_state_of_another_batch_size():
    source = sources.Epochs(Numbers(30), seed=2)
    with granular.Loader(source, 4) as loader:
        steps(loader, 3)
        state = loader.save()
    with granular.Loader(source, 8) as loader:
        with pytest.raises(StateError, match=r'its step 12 is not a multiple of this loader.s 8 datapoints per batch'):
            loader.load(state)
        assert loader.save()['step'] == 0
    with granular.Loader(source, 4, num_shards=2) as loader:
        loader.load(state)  # the number of shards may differ
        assert loader.save() == {**state, 'round': 8}


def test_error_is_raised_unchanged_at_its_batch():
    with granular.Loader(sources.Truncate(Numbers(20, fail=9), 20), 4) as loader:
        assert steps(loader, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        for _ in range(2):
            with pytest.raises(LookupError, match='this one') as caught:
                next(loader)
            assert caught.value.__notes__ == [
                'while loading the datapoint at index 9',
                'in the batch of the steps 8 to 11 of the Loader',
            ]
            assert loader.save()['step'] == 8
        loader.load({'step': 12})
        assert steps(loader, 1) == [[12, 13, 14, 15]]


def test_errors_name_the_step_of_the_loader_and_the_index_in_the_stage(caplog):
    def check(datapoint):
        if datapoint['x'] == 7:
            raise ValueError('bad')
        return datapoint

    dataset = granular.MapDataset.source(Numbers(20)).map(check)[5:]
    with granular.Loader(dataset, 4, on_error='skip') as loader:
        assert steps(loader, 1) == [[5, 6, 8]]
        assert loader.errors == [(2, 'ValueError: bad (at index 7 of the stage)')]
    assert 'the datapoint at step 2 failed: ValueError: bad (at index 7 of the stage)' in caplog.text


@pytest.mark.parametrize(
    ('odd', 'match'),
    [
        ({'x': 1.5}, 'float64'),
        ({'x': np.arange(2)}, r'shape \(2,\)'),
        ({'x': np.int32(1)}, 'int32'),
        ({'y': 1}, 'keys'),
        ({'x': 1, 'y': 2}, 'keys'),
        ({'x': 1, 2: 2}, 'keys'),
        (7, 'dict'),
        ({'x': object()}, 'an array of numbers'),
        ({'x': (np.zeros(2), np.zeros((3, 2)))}, "key 'x': .* got tuple with parts of different shapes"),
        ({'x': np.ma.masked_array(1, True)}, 'without a mask'),
    ],
)
def test_datapoint_of_different_shape_is_an_error(odd, match):
    with granular.Loader(lambda step: odd if step == 5 else {'x': step}, 4) as loader:
        steps(loader, 1)
        with pytest.raises(DatapointError, match=match) as caught:
            next(loader)
        assert 'step 5' in str(caught.value)


@pytest.mark.parametrize('value', [None, object(), {'y': 1}, [1, None]])
def test_first_datapoint_that_is_no_number_or_array_is_an_error(value):
    with granular.Loader(lambda step: {'x': value}, 4) as loader:
        with pytest.raises(DatapointError, match="step 0, key 'x': expected a number"):
            next(loader)


@pytest.mark.parametrize('odd_from', [4, 5])
@pytest.mark.parametrize(
    ('first', 'odd'),
    [
        (1.5, 2), (1, True), (True, 1), ('a', b'a'), ('a', 1), ('a', ['a', 'b']), (['a', 'b'], ['a']),
        (['a', 'b'], [['a', 'b']]), (b'a', 'a'), (np.array(['a']), np.array(['ab'])),
    ],
)  # fmt: skip
def test_values_are_never_cast_to_those_of_the_first_datapoint(first, odd, odd_from):
    with granular.Loader(lambda step: {'x': odd if step >= odd_from else first}, 4) as loader:
        next(loader)
        with pytest.raises(DatapointError, match=f'step {odd_from}'):
            next(loader)


@pytest.mark.parametrize('left', range(1, 20))
@pytest.mark.parametrize('hosts', [1, 2])
def test_endless_source_ends_before_steps_of_more_than_63_bits(left, hosts):
    asked = []

    def datapoint(step):
        asked.append(step)
        return {'x': step}

    first = (2**63 - left) // 4 * 4
    for host in range(hosts):
        with granular.Loader(datapoint, 4, shard_id=host, num_shards=hosts) as loader:
            loader.load({**loader.save(), 'step': first})
            steps = [value for batch in loader for value in batch['x'].tolist()]
        rounds = (2**63 - 1 - first) // (4 * hosts)
        assert steps == [first + 4 * (hosts * i + host) + j for i in range(rounds) for j in range(4)]
    assert {type(step) for step in asked} <= {int}


def test_memory_is_recycled():
    with granular.Loader(sources.Epochs(Numbers(40), shuffle=False), 4, prefetch=2, recycle_after=2) as loader:
        retained = [next(loader) for _ in range(12)]
        owners = {id(batch['y']) for batch in retained}
        assert len(owners) < 9
        assert [batch['x'].tolist() for batch in retained[-2:]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with granular.Loader(sources.Epochs(Numbers(40), shuffle=False), 4, prefetch=2) as loader:
        retained = [next(loader) for _ in range(12)]
        assert [batch['x'].tolist() for batch in retained[:2]] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize('count', [1, 2, 3])
def test_recycled_memory_is_that_of_a_batch_after_which_as_many_were_returned(count):
    with granular.Loader(Numbers(48), 4, prefetch=0, recycle_after=count) as loader:
        retained = list(loader)
    assert [batch['x'][0] for batch in retained[-count - 1 :]] == list(range(48 - 4 * (count + 1), 48, 4))
    memory = {id(batch['x'].base if batch['x'].base is not None else batch['x']) for batch in retained}
    assert len(memory) <= count + 2  # those, and one of a batch that is loaded


@pytest.mark.parametrize('options', [{}, {'mp': 'fork', 'workers': 1}], ids=['threads', 'fork'])
@pytest.mark.parametrize('text', ['ab', b'ab', np.str_('ab'), np.bytes_(b'ab')])
def test_texts_and_bytes_keep_zeros_at_their_end(text, options):
    zero = '\0' if isinstance(text, str) else b'\0'
    values = [text * i + zero * (i % 3) for i in range(8)]
    with granular.Loader([{'x': value} for value in values], 4, recycle_after=1, **options) as loader:
        assert [value for batch in loader for value in batch['x'].tolist()] == values
    lists = [[value, text * 2] for value in values]
    with granular.Loader([{'x': value} for value in lists], 4, recycle_after=1, **options) as loader:
        assert [value for batch in loader for value in batch['x'].tolist()] == lists


@pytest.mark.parametrize(
    ('value', 'dtype'),
    [
        ([1, 2.5], np.float64),
        ([2**53, 0.5], np.float64),
        ([True, 7], np.int64),
        ([1, 2**64 - 1], np.uint64),
        ([[1], (2,)], np.int64),
        ([[], []], np.float64),
    ],
)
def test_list_becomes_an_array_of_the_same_values(value, dtype):
    with granular.Loader([{'x': value}, {'x': value}], 2) as loader:
        batch = next(loader)['x']
    assert batch.dtype == dtype
    assert (batch == np.array([value, value], object)).all()


@pytest.mark.parametrize(
    'value',
    [
        [1, 'cat'],
        [True, 'x'],
        [b'a', 'x'],
        [2**53 + 1, 0.5],
        [2**63, -1],
        [np.int64(2**53 + 1), np.float32(1)],
        [1, b''],
    ],
)
def test_list_whose_values_numpy_would_change_is_an_error(value):
    with (
        granular.Loader([{'x': value}, {'x': value}], 2) as loader,
        pytest.raises(
            DatapointError, match=r"step 0, key 'x': numpy would change values of this list of \w+( and \w+)?:"
        ),
    ):
        next(loader)


@pytest.mark.parametrize('change', [lambda batch: batch.pop('x'), lambda batch: batch.update(y=batch['y'] / 2)])
def test_recycled_batches_are_whole_and_as_they_were_loaded(change):
    """A batch that misses datapoints is too small for others, and a consumer may change the dict that it got."""
    source = Numbers(60, fail=9)
    with granular.Loader(source, 4, prefetch=2, recycle_after=1, on_error='skip') as loader:
        found = []
        for batch in loader:
            assert batch['y'].dtype == np.float32
            found += batch['y'][:, 0, 0].tolist()
            assert batch['x'].tolist() == found[-len(batch['x']) :]
            change(batch)
    assert found == [i for i in range(60) if i != 9]


def test_recycling_keeps_no_batch_of_worker_processes():
    with granular.Loader(Numbers(80), 4, prefetch=1, workers=1, recycle_after=1, mp='fork') as loader:
        batches = [weakref.ref(batch['y']) for batch in loader]
    assert sum(batch() is not None for batch in batches) <= 1


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_batches_are_freed_without_the_garbage_collector(no_collector):
    """Otherwise, memory would not be bounded by what is read ahead."""
    large = {'x': np.zeros((512, 512))}  # assembled in threads
    batches = []
    async with aio.Loader(sources.Epochs(lambda i: large, length=100), 4, prefetch=2) as loader:
        for _ in range(8):
            batches.append(weakref.ref((await anext(loader))['x']))
    deadline = time.monotonic() + 60
    while any(batch() is not None for batch in batches) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)  # a thread may still hold the last call
    assert [batch() is None for batch in batches] == [True] * 8


def test_prefetch_is_bounded():
    numbers = Numbers(1000)
    with granular.Loader(numbers, 10, prefetch=3) as loader:
        next(loader)
        while loader.stats()['ready'] < 3:
            time.sleep(0.001)
        assert max(numbers.fetched) < 50
        stats = loader.stats()
        assert stats['batches'] == 1
        assert stats['datapoints'] == 10
        assert stats['bytes'] == 10 * (8 + 24)
        assert stats['ready'] + stats['in_flight'] <= 4
        time.sleep(0.2)  # a step of the consumer
        next(loader)
        while loader.stats()['ready'] < 3:  # the next one starts a little later, and by itself
            time.sleep(0.001)


def test_closing_stops_all_work():
    numbers = Numbers(wait=0.01)
    loader = granular.Loader(sources.Epochs(numbers), 32)
    next(loader)
    loader.close()
    begun = len(numbers.fetched)
    while numbers.running:
        time.sleep(0.001)
    assert len(numbers.fetched) <= begun + 1  # a thread may have been about to begin a call
    loader.close()
    with pytest.raises(ClosedError):
        next(loader)
    loader = granular.Loader(numbers, 32)
    loader.close()
    with pytest.raises(ClosedError):
        loader.spec  # noqa: B018


def test_closing_in_a_signal_handler_waits_for_the_processes():
    loader = granular.Loader(Numbers(), 4, workers=2, mp='fork')
    next(loader)
    left, closed = [], threading.Event()

    def close(*_):
        loader.close()
        left.extend(multiprocessing.active_children())
        closed.set()

    before = signal.signal(signal.SIGALRM, close)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)  # while this thread waits
        assert closed.wait(30)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert left == []


@pytest.mark.parametrize(
    'options',
    [{'batch': 0}, {'batch': 2.0}, {'batch': 2, 'prefetch': -1}, {'batch': 2, 'workers': 0},
     {'batch': 2, 'shard_id': 1}, {'batch': 2, 'num_shards': 0}, {'batch': 2, 'shard_id': 0.5, 'num_shards': 2},
     {'batch': 2, 'mp': True}, {'batch': 2, 'recycle_after': -1}, {'batch': 2, 'recycle_after': 1.5},
     {'batch': 2, 'mp': 'process'}],
)  # fmt: skip
def test_invalid_arguments_are_rejected(options):
    with pytest.raises(InvalidArgumentError):
        granular.Loader(Numbers(), **options)


def test_batches_from_a_bucket(bucket):
    with granular.ShardedDatasetWriter(bucket, {'i': 'int', 'a': 'array'}, granular.encoders, shardlen=20) as writer:
        for i in range(50):
            writer.append({'i': i, 'a': np.full(100, i)})
    with granular.ShardedDatasetReader(bucket, granular.decoders, cache_keys=('refs', 'i')) as reader:
        with granular.Loader(sources.Epochs(reader, seed=1), 10) as loader:
            batches = [next(loader) for _ in range(10)]
    for batch in batches:
        assert (batch['a'] == batch['i'][:, None]).all()
    epochs = np.concatenate([batch['i'] for batch in batches]).reshape(2, 50)
    assert (np.sort(epochs) == np.arange(50)).all()
    assert (epochs[0] != epochs[1]).any()


async def test_async_api():
    source = sources.Epochs(Numbers(30), seed=2)
    with granular.Loader(source, 4) as loader:
        expected = steps(loader, 6)
    async with aio.Loader(source, 4) as loader:
        assert (await loader.spec())['x'] == (np.dtype(np.int64), ())
        received = []
        async for batch in loader:
            received.append(batch['x'].tolist())
            if len(received) == 6:
                break
        assert received == expected
        loader.load({'step': 4})
        assert (await anext(loader))['x'].tolist() == expected[1]


async def test_cancelled_consumer_loses_no_batch():
    async with aio.Loader(Numbers(wait=0.05), 4, workers=1) as loader:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(loader), 0.02)
        assert (await anext(loader))['x'].tolist() == [0, 1, 2, 3]


async def test_state_can_be_loaded_during_a_pending_next():
    numbers = Numbers(wait=0.02)
    async with aio.Loader(numbers, 4, workers=1) as loader:
        waiting = asyncio.create_task(anext(loader))
        while not numbers.fetched:
            await asyncio.sleep(0)
        loader.load({'step': 40})
        assert (await waiting)['x'].tolist() == [40, 41, 42, 43]


async def test_state_that_is_loaded_before_the_first_batch_is_there_tells_where_shards_end():
    numbers = Numbers(12, wait=0.02)
    async with aio.Loader(numbers, 2, workers=1, num_shards=2) as loader:
        waiting = asyncio.create_task(anext(loader))
        while not numbers.fetched:
            await asyncio.sleep(0)
        loader.load({'step': 2})
        assert (await waiting)['x'].tolist() == [2, 3]
        assert (await anext(loader))['x'].tolist() == [6, 7]  # the other shard has no batch after [8, 9]
        assert await anext(loader, None) is None


async def test_exhausted_loader_leaves_no_task():
    loader = aio.Loader(Numbers(wait=0.01), 4)
    await anext(loader)
    await loader.aclose()
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


def broken(datapoint):
    if datapoint['x'] == 19:
        raise TypeError('the last one')
    if datapoint['x'] % 5 == 2:
        raise ValueError(f's3://data: {datapoint["x"]} is bad')
    return datapoint


SKIPPING = {
    'Loader': lambda dataset: granular.Loader(dataset, 5, on_error='skip'),
    'Loader in processes': lambda dataset: granular.Loader(dataset, 5, workers=1, mp='fork', on_error='skip'),
    'stream': lambda dataset: iter(dataset.to_iter_dataset(on_error='skip')),
}


@pytest.mark.parametrize('end', ['read to its end', 'closed'])
@pytest.mark.parametrize('kind', SKIPPING)
def test_failed_datapoints_are_summarised_by_reason(kind, end, caplog):
    def summary():
        return [text for text in (record.getMessage() for record in caplog.records) if text.startswith('on_error')]

    length = 20 if end == 'read to its end' else 40
    dataset = granular.MapDataset.range(length).map(lambda x: {'x': x}).map(broken)
    expected = ['on_error skipped 4 datapoints: ValueError: s3://data: … is bad']  # and one that was logged already
    with SKIPPING[kind](dataset) as batches:
        if end == 'read to its end':
            assert list(batches)
            assert summary() == expected
        else:
            for _ in range(4 if kind != 'stream' else 16):
                next(batches)
            assert summary() == []
    assert summary() == expected


@pytest.mark.parametrize('kind', SKIPPING)
def test_log_of_a_skipped_datapoint_does_not_advise_to_skip_it(kind, tmp_path, caplog):
    with granular.DatasetWriter(tmp_path / 'data', {'x': 'utf8'}, None) as writer:
        for i in range(10):
            writer.append({'x': b'\xff' if i == 3 else b'good'})
    dataset = granular.MapDataset.source(granular.open(tmp_path / 'data'))
    with SKIPPING[kind](dataset) as batches:
        assert list(batches)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(' ')[0] for line in lines if 'not decoded' in line] == ['the']
    assert not [line for line in lines if 'pipeline' in line]


def test_summary_tells_a_bounded_number_of_reasons_apart(caplog):
    def fail(x):
        raise ValueError('bad' * (x % 120))

    with iter(granular.MapDataset.range(240).map(fail).to_iter_dataset(on_error=lambda step, error: step)) as stream:
        assert len(list(stream)) == 240
    summary = [record.getMessage() for record in caplog.records if record.getMessage().startswith('on_error')]
    assert summary[0] == 'on_error skipped or replaced 40 datapoints: other reasons'
    assert len(summary) == 101


def test_spec_is_that_of_the_first_datapoint_that_is_not_skipped():
    dataset = granular.MapDataset.range(6).map(lambda x: {'x': x} if x else x)
    for source in (dataset, granular.MapDataset.range(6).map(lambda x: {'x': x}).filter(lambda element: element['x'])):
        with granular.Loader(source, 2, on_error='skip') as loader:
            assert [batch['x'].tolist() for batch in loader] == [[1], [2, 3], [4, 5]]


def test_error_of_datapoints_that_all_fail_is_that_of_one_of_them():
    class Failing:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            raise ValueError(f'bad {index}') if index < 4 else IndexError(index)

    with granular.Loader(Failing(), 2, on_error='skip') as loader, pytest.raises(ValueError, match='bad'):
        next(loader)


def test_datapoints_of_stats_are_those_of_the_batches():
    def split(x):
        return [{'x': x}] * (2 if x != 1 else 1 // 0)

    numbers = granular.MapDataset.range(4)
    for source, on_error in (
        (numbers.flat_map(split, max_fan_out=2), 'skip'),
        (numbers.map(lambda x: {'x': 1 // x}), lambda step, error: {'x': 0}),
    ):
        with granular.Loader(source, 4, on_error=on_error) as loader:
            rows = sum(len(batch['x']) for batch in loader)
            assert loader.stats()['datapoints'] == rows

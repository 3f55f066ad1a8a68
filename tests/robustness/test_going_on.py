"""Iterators continue with the next element after errors, cancellations and forks."""

import asyncio
import gc
import itertools
import json
import threading

import numpy as np
import pytest

import granular
from granular import MapDataset, ReadOptions, aio
from granular.grain import MultiprocessingOptions
from granular.integrations.batches import Batches
from tests.support.programs import run_in_child
from tests.support.states import plain
from tests.support.tables import pairwise


class Failing:
    """A function that fails at selected calls."""

    def __init__(self, fn):
        self.fn, self.failures = fn, 0

    def __call__(self, x):
        if self.failures:
            self.failures -= 1
            raise KeyError('broken')
        return self.fn(x)


CHAINS = {
    'flat_map': (lambda x: [x] * 3, lambda d, f: d.flat_map(f)),
    'window_shuffle': (lambda x: x, lambda d, f: d.filter(lambda x: x != 3).batch(1).map(f).window_shuffle(4, seed=1)),
    'pack': (lambda x: {'t': x}, lambda d, f: d.batch(2).map(f).pack({'t': 4}, num_packing_bins=2)),
    'prefetch': (lambda x: [x] * 3, lambda d, f: d.flat_map(f).prefetch(2)),
    'mix': (lambda x: [x] * 3, lambda d, f: type(d).mix([d.flat_map(f), d])),
}  # fmt: skip


@pytest.mark.parametrize('name', CHAINS)
def test_failure_after_a_restored_state_skips_no_element(name):
    fn, chain = CHAINS[name]
    function = Failing(fn)
    dataset = chain(MapDataset.range(20).to_iter_dataset(ReadOptions(prefetch_buffer_size=0)), function)
    with iter(dataset) as iterator:
        states, whole = [iterator.get_state()], []
        for element in iterator:
            whole.append(plain(element))
            states.append(json.loads(json.dumps(iterator.get_state())))
    with iter(dataset) as iterator:
        for at in (1, 2, 4):
            result = []
            function.failures = 4  # the first of them where what came before the state is made again
            iterator.set_state(states[at])
            for _ in range(100):
                try:
                    result.append(plain(next(iterator)))
                except KeyError:
                    assert iterator.get_state() == states[at + len(result)]
                except StopIteration:
                    break
            assert function.failures == 0
            assert result == whole[at:]


HOLDERS = {
    'cache': lambda stream: stream.cache(),
    'cache of flat_map': lambda stream: stream.flat_map(lambda x: [x, x]).cache(),
    'window_shuffle': lambda stream: stream.window_shuffle(4, seed=1),
    'two caches': lambda stream: stream.cache().repeat(2).flat_map(lambda x: [x, x]).cache(),
}


@pytest.mark.parametrize('name', HOLDERS)
def test_stream_that_could_not_be_opened_in_set_state_repeats_no_element(name):
    broken = False

    def opened(i):
        if broken:
            raise OSError('no connection')
        return MapDataset.range(10 * i, 10 * i + 3).to_iter_dataset()

    dataset = HOLDERS[name](granular.IterDataset.interleave(MapDataset.range(3).map(opened), cycle_length=1))
    whole, states = [], []
    with iter(dataset) as iterator:
        for element in iterator:
            whole.append(element)
            states.append(json.loads(json.dumps(iterator.get_state())))
    with iter(dataset) as iterator:
        elements = list(itertools.islice(iterator, 8))
        broken = True
        with pytest.raises(OSError, match='no connection'):
            iterator.set_state(states[2])
        broken = False
        assert elements + list(iterator) == whole


AHEAD = {
    'prefetch': lambda stream: stream.prefetch(2).flat_map(lambda x: [x, x]).prefetch(2),
    'interleave': lambda stream: granular.IterDataset.interleave([stream.prefetch(2).flat_map(lambda x: [x, x])], 1),
}


@pytest.mark.parametrize('name', AHEAD)
async def test_cancelled_close_ends_the_tasks_of_all_stages(name):
    iterator = aiter(AHEAD[name](MapDataset.range(20).to_iter_dataset()))
    await anext(iterator)
    closing = asyncio.create_task(iterator.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert asyncio.all_tasks() == {asyncio.current_task()}


def fails_twice(i, seed=None):
    if i in (41, 44):
        raise KeyError('broken')
    return {'i': i}


def as_point(i, seed):
    return {'i': i}


def ordered(fn, order):
    return granular.sources.Epochs(granular.sources.Transform(range(200), fn), shuffle=ORDERS[order], seed=3)


ORDERS = {
    'sequential': False, 'permutation': True,
    'Blocks(8)': granular.shuffle.Blocks(8), 'Blocks(4, 2)': granular.shuffle.Blocks(4, 2),
}  # fmt: skip


@pytest.mark.filterwarnings('ignore:.*multi-threaded.*:DeprecationWarning')
@pytest.mark.parametrize(
    ('order', 'method', 'prefetch'), pairwise(itertools.product(ORDERS, [None, 'fork', 'spawn'], [0, 4]))
)
def test_batch_fails_only_for_its_own_records(order, method, prefetch):
    with granular.Loader(ordered(as_point, order), 10) as loader:
        expected, failing = [next(loader)['i'].tolist() for _ in range(30)], 0
    source = ordered(fails_twice, order)
    with granular.Loader(source, 10, prefetch=prefetch, workers=2, mp=method) as loader:
        for number, indices in enumerate(expected):
            if not {41, 44} & set(indices):
                assert next(loader)['i'].tolist() == indices
                continue
            failing += 1
            for _ in range(3):
                with pytest.raises(KeyError, match='broken'):
                    next(loader)
                assert loader.save()['step'] == 10 * number
            loader.load({**loader.save(), 'step': 10 * (number + 1)})
    assert failing


def test_invalid_state_leaves_the_iterator_unchanged():
    ranges = [MapDataset.range(20).to_iter_dataset() for _ in range(2)]
    with iter(granular.IterDataset.mix([ranges[0].flat_map(lambda x: [x, x]), ranges[1]])) as iterator:
        result = [next(iterator) for _ in range(5)]
        state = iterator.get_state()
        with pytest.raises(granular.errors.StateError):
            iterator.set_state({'version': 5, 'state': {'parents': [{'parent': 9, 'place': 0}, 'none'], 'count': 0}})
        assert iterator.get_state() == state
        result += [next(iterator) for _ in range(3)]
    assert result == [0, 0, 0, 1, 1, 2, 1, 3]


@pytest.mark.parametrize('change', [lambda d: d, lambda d: d.prefetch(1)])
def test_next_after_a_cancellation_continues_the_started_work(change):
    calls, begun, release = [], threading.Event(), threading.Event()

    def function(x):
        calls.append(x)
        begun.set()
        release.wait(30)
        return x

    async def main():
        dataset = change(aio.MapDataset.range(3).map(function).to_iter_dataset(ReadOptions(prefetch_buffer_size=1)))
        iterator = aiter(dataset)
        for _ in range(3):
            waiting = asyncio.ensure_future(anext(iterator))
            await asyncio.to_thread(begun.wait, 30)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        release.set()
        result = [element async for element in iterator]
        await iterator.aclose()
        return result

    assert asyncio.run(main()) == [0, 1, 2]
    assert sorted(calls) == [0, 1, 2]


def test_forked_child_does_not_stop_the_workers_of_its_parent():
    dataset = MapDataset.range(600).map(np.sqrt).to_iter_dataset()
    with iter(dataset.mp_prefetch(MultiprocessingOptions(2, start_method='fork'))) as iterator:
        result = [next(iterator) for _ in range(70)]

        def leave():
            nonlocal iterator
            with pytest.raises(granular.GranularError, match='forked'):
                next(iterator)
            iterator.close()
            iterator = None
            gc.collect()
            return True

        assert run_in_child(leave) == 0
        result += list(iterator)
    assert result == [np.sqrt(i) for i in range(600)]


def test_forked_child_does_not_take_elements_that_are_ready():
    with iter(MapDataset.range(600).to_iter_dataset()) as iterator:
        result = [next(iterator) for _ in range(5)]

        def take():
            with pytest.raises(granular.GranularError, match='forked'):
                next(iterator)
            return True

        assert run_in_child(take) == 0
        assert [*result, *iterator] == list(range(600))


CONSUMED = {
    'stream': lambda dataset: iter(dataset.to_iter_dataset(ReadOptions(prefetch_buffer_size=0))),
    'Loader': lambda dataset: granular.Loader(dataset, 1, prefetch=0),
    'Batches': lambda dataset: Unconverted(granular.Loader(dataset, 1, prefetch=0), 0),
}


class Unconverted(Batches):
    def _convert(self, batch):
        return batch


@pytest.mark.parametrize('name', CONSUMED)
def test_forked_child_does_not_wait_for_a_consumer_in_another_thread_of_its_parent(name):
    begun, release = threading.Event(), threading.Event()

    def slow(x):
        begun.set()
        release.wait(30)
        return {'x': x}

    with CONSUMED[name](MapDataset.range(3).map(slow)) as iterator:
        thread = threading.Thread(target=lambda: [next(iterator) for _ in range(3)])
        thread.start()
        begun.wait(30)

        def take():
            with pytest.raises(granular.GranularError, match='forked'):
                next(iterator)
            return True

        try:
            assert run_in_child(take) == 0
        finally:
            release.set()
            thread.join()
        assert next(iterator, None) is None

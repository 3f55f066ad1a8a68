"""PyTorch loaders over readers and streams: requests per batch, shards, states and tensors."""

import concurrent.futures
import contextlib
import copy
import gc
import itertools
import json
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
import typing
import weakref

import numpy as np
import pytest

import granular
from granular import MapDataset, ShardOptions
from granular.errors import (
    ClosedError,
    DatapointError,
    GranularError,
    InvalidArgumentError,
    MissingExtraError,
    OutOfRangeError,
    StateError,
    UnsupportedError,
)
from granular.integrations import batches as core
from tests.support.tables import each_value

pytestmark = [
    pytest.mark.filterwarnings('ignore:.*multi-threaded.*:DeprecationWarning'),
    pytest.mark.filterwarnings('ignore:.*set_vital.*:UserWarning'),  # of torchdata
    pytest.mark.filterwarnings('ignore:.*worker processes in total.*:UserWarning'),  # than there are cores
    pytest.mark.filterwarnings('ignore:.*not writable.*:UserWarning'),  # torch copies decoded arrays anyway
]


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    deadline = time.monotonic() + 60
    while multiprocessing.active_children() and time.monotonic() < deadline:
        gc.collect()  # iterators of torch end their workers when they are collected
        time.sleep(0.01)
    assert not multiprocessing.active_children()


@pytest.fixture(autouse=True)
def forked():
    """Let torch fork its workers, unless a test says otherwise: since Python 3.14 each would import torch again."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method('fork', force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.fixture(scope='module')
def path(fakegcs):
    """128 datapoints in a bucket."""
    path = fakegcs.place()
    with granular.DatasetWriter(path, {'data': 'array', 'label': 'int'}, granular.encoders) as writer:
        for i in range(128):
            writer.append({'data': np.full(100, i, np.float32), 'label': i}, flush=False)
    config = granular.IOConfig(hedge=0)  # so that each request is counted once
    return granular.Path(str(path), **fakegcs.options, config=config)


class Pair(typing.NamedTuple):
    one: object
    other: object


def counted(datapoint):
    """Add the number of requests that this process has made, and its id."""
    return {**datapoint, 'requests': granular.io_stats()['requests'], 'pid': os.getpid()}


@pytest.mark.parametrize(('workers', 'method'), [(0, None), (2, 'fork'), (1, 'spawn')])
def test_batch_is_one_fan_out(path, workers, method):
    from torch.utils.data import DataLoader

    with granular.DatasetReader(path, granular.decoders, cache_keys=('refs',)) as reader:
        assert reader[3]['label'] == 3  # starts the loop and a connection before the workers are forked
        dataset = MapDataset.source(reader).map(counted)
        loader = DataLoader(dataset, batch_size=16, num_workers=workers, multiprocessing_context=method)
        batches = list(loader)
        assert reader[5]['label'] == 5
    assert [batch['label'].tolist() for batch in batches] == np.arange(128).reshape(8, 16).tolist()
    assert all((batch['data'][:, 7] == batch['label']).all() for batch in batches)
    pids = {pid for batch in batches for pid in batch['pid'].tolist()}
    assert len(pids) == max(1, workers) and (os.getpid() in pids) == (workers == 0)
    for pid in pids:
        # Two keys with adjacent records: two requests per batch. Single datapoints would need 32.
        totals = [int(batch['requests'][-1]) for batch in batches if batch['pid'][0] == pid]
        assert set(np.diff(totals)) == {2}


def test_readers_and_sources_are_datasets(path):
    from torch.utils.data import DataLoader

    with granular.DatasetReader(path, granular.decoders, cache_keys=('refs',)) as reader:
        for dataset in (reader, granular.sources.Epochs(reader, shuffle=False), MapDataset.source(reader)):
            assert len(dataset) == 128
            before = granular.io_stats()['requests']
            batch = next(iter(DataLoader(dataset, batch_size=64)))
            assert batch['label'].tolist() == list(range(64))
            assert granular.io_stats()['requests'] - before == 2
            assert [datapoint['label'] for datapoint in dataset._getitems([5, 3])] == [5, 3]


def stream(count=53):
    return MapDataset.range(count).shuffle(seed=1).map(abs).to_iter_dataset().filter(odd_or_large)


def odd_or_large(i):
    return i % 2 == 1 or i > 10


@pytest.mark.parametrize(('ranks', 'workers'), each_value(itertools.product([1, 2, 3], [0, 2, 3])))
def test_ranks_and_workers_share_each_element_once(ranks, workers):
    from torch.utils.data import DataLoader

    from granular.integrations.torch import IterableDataset

    expected = sorted(stream())
    elements = []
    for rank in range(ranks):
        dataset = IterableDataset(stream(), ShardOptions(rank, ranks))
        loader = DataLoader(dataset, batch_size=4, num_workers=workers)
        elements_of_rank = [i for batch in loader for i in batch.tolist()]
        assert sorted(elements_of_rank) == sorted(dataset)  # for any number of workers
        elements += elements_of_rank
    assert sorted(elements) == expected
    own = MapDataset.range(10).to_iter_dataset(shard_options=ShardOptions(ranks - 1, ranks))
    loader = DataLoader(IterableDataset(own), batch_size=None, num_workers=workers)
    assert sorted(loader) == list(own)


def test_order_of_batches_does_not_depend_on_worker_count():
    from torch.utils.data import DataLoader

    from granular.integrations.torch import IterableDataset

    dataset = MapDataset.range(50).shuffle(seed=2).batch(8)
    batches = [
        [batch.tolist() for batch in DataLoader(IterableDataset(dataset), batch_size=None, num_workers=workers)]
        for workers in (0, 2, 3)
    ]
    assert batches[0] == batches[1] == batches[2] == [batch.tolist() for batch in dataset]
    # Ranks that must take equally many steps drop the remainder.
    counts = []
    for rank in range(3):
        part = IterableDataset(MapDataset.range(50), ShardOptions(rank, 3, drop_remainder=True))
        counts.append(len(list(DataLoader(part, batch_size=None, num_workers=2))))
    assert len(set(counts)) == 1 and counts[0] >= 50 // 6 * 2


@pytest.mark.parametrize('workers', [0, 2])
def test_state_in_the_middle_of_an_epoch(workers):
    from torchdata.stateful_dataloader import StatefulDataLoader

    from granular.integrations.torch import IterableDataset

    def loader(epoch=0):
        dataset = IterableDataset(stream().window_shuffle(7, seed=3))
        dataset.set_epoch(epoch)
        return StatefulDataLoader(dataset, batch_size=4, num_workers=workers)

    uninterrupted = [batch.tolist() for batch in loader(2)]
    assert uninterrupted != [batch.tolist() for batch in loader()]
    for position in (1, 5):
        first = loader(2)
        items = iter(first)
        before = [next(items).tolist() for _ in range(position)]
        state = pickle.loads(pickle.dumps(first.state_dict()))
        del items
        second = loader()
        second.load_state_dict(state)
        assert before + [batch.tolist() for batch in second] == uninterrupted


def test_epochs_equal_those_of_the_dataset():
    from granular.integrations.torch import IterableDataset

    base = MapDataset.range(20).shuffle(seed=4)
    dataset = IterableDataset(base)
    for epoch in (0, 1, 5):
        dataset.set_epoch(epoch)
        assert list(dataset) == [base[20 * epoch + i] for i in range(20)]
    mixed = MapDataset.mix([base, base.map(abs)]).to_iter_dataset().batch(3)
    dataset = IterableDataset(mixed)
    first = [batch.tolist() for batch in dataset]
    dataset.set_epoch(1)
    assert first == [batch.tolist() for batch in mixed] != [batch.tolist() for batch in dataset]
    with pytest.raises(InvalidArgumentError, match='epoch 1: the dataset is repeated infinitely'):
        IterableDataset(base.repeat()).set_epoch(1)


def ranked(rank, file, queue):
    import torch.distributed
    from torch.utils.data import DataLoader

    from granular.integrations.torch import IterableDataset

    store = torch.distributed.FileStore(file, 2)
    torch.distributed.init_process_group('gloo', store=store, rank=rank, world_size=2)
    try:
        dataset = IterableDataset(MapDataset.range(31).shuffle(seed=1))
        sent = pickle.loads(pickle.dumps(dataset))  # as for a spawned worker
        elements = [i for batch in DataLoader(dataset, batch_size=4, num_workers=2) for i in batch.tolist()]
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()
    queue.put((elements, list(sent)))


def test_process_group_determines_the_shard(tmp_path):
    context = multiprocessing.get_context('fork')
    queue = context.Queue()
    ranks = [context.Process(target=ranked, args=(rank, str(tmp_path / 'store'), queue)) for rank in range(2)]
    for process in ranks:
        process.start()
    elements = [queue.get(timeout=250) for _ in ranks]
    for process in ranks:
        process.join()
        assert process.exitcode == 0
    queue.close()
    for part in zip(*elements, strict=True):
        assert sorted(part[0] + part[1]) == list(range(31))


def test_tensors_share_the_memory_of_a_batch():
    import torch

    from granular.integrations.torch import has_accelerator, to_torch

    batch = {'x': np.arange(6, dtype=np.float32).reshape(2, 3), 'n': (np.zeros(2, np.int64), [1.5]), 'text': ['a', 'b']}
    elements = to_torch(batch, pin_memory=True)
    assert elements['x'].dtype == torch.float32 and elements['text'] == ['a', 'b'] and elements['n'][1] == [1.5]
    assert elements['x'].data_ptr() == batch['x'].ctypes.data
    batch['x'].flags.writeable = False
    to_torch(batch)['x'] += 1
    assert batch['x'][0, 0] == 0  # no tensor is read-only
    # Memory is pinned for an accelerator only.
    assert elements['x'].is_pinned() == has_accelerator()
    moved = to_torch(batch, 'meta')
    assert moved['x'].device.type == moved['n'][0].device.type == 'meta'


def test_values_that_are_no_tensors_are_returned_unchanged_or_named():
    from granular.integrations.torch import to_torch

    others = {
        'time': np.array(['2020-01-01'], 'M8[ns]'), 'span': np.timedelta64(1, 's'), 'raw': np.zeros(2, 'V4'),
        'fields': np.zeros(2, [('a', 'i4')]), 'text': np.array(['a']), 'bytes': np.bytes_(b'a'),
        'objects': np.array([{}]), 'masked': np.ma.array([1, 2], mask=[0, 1]), 'none': None,
    }  # fmt: skip
    kept = to_torch(others)
    assert kept.keys() == others.keys() and all(kept[name] is value for name, value in others.items())
    assert to_torch((Pair('a', [b'b']), {})) == (Pair('a', [b'b']), {})
    for value in (np.arange(3)[::-1], np.arange(3, dtype='>i4'), np.longdouble(1)):
        with pytest.raises(DatapointError, match=r"batch\['x'\]\[1\]: .* cannot be a tensor: .*: convert it in a map"):
            to_torch({'x': (0, value)})


@pytest.mark.parametrize('device', [None, 'cpu'])
def test_batches_and_their_states(device):
    import torch
    from torch.utils.data import DataLoader

    from granular.integrations.torch import Batches

    source = granular.sources.Epochs([{'i': i, 'x': np.full(3, i)} for i in range(40)], seed=1)
    with granular.Loader(source, 8) as loader:
        expected = [next(loader)['i'].tolist() for _ in range(8)]
    with Batches(granular.Loader(source, 8), device) as batches:
        elements = [next(batches)['i'].tolist() for _ in range(3)]
        state = json.loads(json.dumps(batches.state_dict()))
        assert state['step'] == 24  # without prefetched batches
        elements += [next(batches)['i'].tolist() for _ in range(2)]
        assert isinstance(next(batches)['x'], torch.Tensor)
        batches.load_state_dict(state)
        assert elements[:3] + [next(batches)['i'].tolist() for _ in range(5)] == expected
        assert elements == expected[:5]
    with pytest.raises(ClosedError):
        list(batches)  # not nothing, on which a program would train without a word
    plain = Batches(DataLoader([1, 2, 3]), device)
    assert [batch.tolist() for batch in plain] == [[1], [2], [3]]
    with pytest.raises(InvalidArgumentError, match='has no state'):
        plain.state_dict()


@pytest.mark.parametrize('kind', ['stream', 'Loader'])
def test_batches_jump_by_a_state_of_what_they_are_made_of(kind):
    from granular.integrations.torch import Batches

    dataset = MapDataset.range(12).map(lambda x: {'x': x})
    source = dataset.to_iter_dataset().batch(2) if kind == 'stream' else granular.Loader(dataset, 2)
    with Batches(source) as batches:
        for name in ('get_next_index', 'set_next_index', 'indices'):
            assert not hasattr(batches, name)
            message = (
                rf"'Batches' .* '{name}': call it of the Loader or of iter\(stream\), and pass its state_dict\(\) to"
            )
            with pytest.raises(AttributeError, match=message):
                getattr(batches, name)
        iterator = iter(source)
        iterator.set_next_index(4)
        batches.load_state_dict(iterator.state_dict())
        assert next(batches)['x'].tolist() == [8, 9]


def test_batches_know_what_their_stream_skipped():
    from granular.integrations.torch import Batches

    def odd(x):
        if x % 2 == 0:
            raise ValueError(f'{x} is even')
        return x

    stream = MapDataset.range(10).map(odd).to_iter_dataset(on_error='skip').batch(2)
    with Batches(stream) as batches:
        assert [batch.tolist() for batch in batches] == [[1, 3], [5, 7], [9]]
        assert [index for index, _ in batches.errors] == [0, 2, 4, 6, 8]
        assert batches.stats()['errors'] == 5
    plain = Batches([{'x': 1}])
    for name, ask in (('stats', plain.stats), ('errors', lambda: plain.errors)):
        with pytest.raises(InvalidArgumentError, match=f'list_iterator has no {name}: expected a Loader or'):
            ask()


def test_error_is_raised_at_the_position_of_its_batch():
    from granular.integrations.torch import Batches

    def fragile(i):
        if i == 9:
            raise ValueError('nine')
        return {'i': i}

    with Batches(iter(MapDataset.range(16).map(fragile).batch(4)), 'cpu') as batches:
        assert [next(batches)['i'].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        state = batches.state_dict()
        for _ in range(2):  # the position does not advance
            with pytest.raises(ValueError, match='nine'):
                next(batches)
            assert batches.state_dict() == state


@pytest.mark.parametrize('buffer', [0, 2])
def test_failed_conversion_is_raised_at_the_position_of_its_batch(buffer):
    class Fragile(core.Batches):
        def _convert(self, batch):
            if 9 in batch['i']:
                raise ValueError('nine')
            return batch['i'].tolist()

    source = granular.sources.Epochs([{'i': i} for i in range(16)], shuffle=False)
    with Fragile(granular.Loader(source, 4), buffer) as batches:
        assert [next(batches) for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        state = batches.state_dict()
        for _ in range(2):
            with pytest.raises(ValueError, match='nine'):
                next(batches)
            assert batches.state_dict() == state
        batches.load_state_dict({**state, 'step': 12})
        assert next(batches) == [12, 13, 14, 15]


@pytest.mark.parametrize('place', ['source', 'conversion'])
@pytest.mark.parametrize('buffer', [0, 1])
def test_batches_that_failed_are_freed_without_the_garbage_collector(buffer, place):
    def source():
        yield 1
        if place == 'source':
            raise ValueError('two')
        yield 2

    class Fragile(core.Batches):
        def _convert(self, batch):
            if batch == 2:
                raise ValueError('two')
            return batch

    batches = Fragile(source(), buffer)
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            list(batches)
        freed = weakref.ref(batches)
        del batches
        deadline = time.monotonic() + 60  # for the thread of the conversions
        while freed() is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        assert freed() is None
    finally:
        gc.enable()


@pytest.fixture
def interruptible():
    """Ctrl-C as in a program of its own: one that is started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize('buffer', [0, 2])
def test_state_that_is_loaded_after_an_interrupt_is_continued(buffer, interruptible):
    interrupts = [True]

    class Interrupted(core.Batches):
        def _convert(self, batch):
            if batch['i'][0] == 8 and interrupts and interrupts.pop():
                signal.raise_signal(signal.SIGINT)
            return batch['i'].tolist()

    source = granular.sources.Epochs([{'i': i} for i in range(16)], shuffle=False)
    with Interrupted(granular.Loader(source, 4), buffer) as batches:
        beginning = batches.state_dict()
        with pytest.raises(KeyboardInterrupt):
            for _ in range(3):
                next(batches)
        batches.load_state_dict(beginning)
        assert [next(batches) for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


class Copied(core.Batches):
    """Copies batches, and notes in which thread."""

    def __init__(self, *args):
        super().__init__(*args)
        self.threads = queue.SimpleQueue()

    def _convert(self, batch):
        time.sleep(0.002)
        self.threads.put(threading.current_thread())
        return batch['i'].tolist()


def numbers(count):
    return granular.sources.Epochs([{'i': i} for i in range(count)], shuffle=False)


@pytest.mark.parametrize('buffer', [1, 3])
def test_batches_are_converted_in_a_thread_while_the_consumer_works(buffer):
    with Copied(granular.Loader(numbers(64), 4, recycle_after=buffer), buffer) as batches:
        assert next(batches) == [0, 1, 2, 3]
        converted = [batches.threads.get(timeout=60) for _ in range(1 + buffer)]  # without another call
        assert len({*converted}) == 1 and threading.current_thread() not in converted
        # Memory that the Loader uses again was converted before.
        assert [next(batches) for _ in range(40)] == [[4 * (i % 16) + j for j in range(4)] for i in range(1, 41)]
    converted[0].join(60)
    assert not converted[0].is_alive()


def test_state_that_is_refused_loses_no_batch():
    with Copied(granular.Loader(numbers(16), 4), 2) as batches:
        assert next(batches) == [0, 1, 2, 3]
        with pytest.raises(StateError):
            batches.load_state_dict({'step': 'six'})
        assert [next(batches) for _ in range(3)] == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


@pytest.mark.parametrize('buffer', [0, 1, 3])
def test_threads_that_share_batches_get_each_once(buffer):
    expected = [[i] for i in range(100)]
    with Copied([{'i': np.full(1, i)} for i in range(100)], buffer) as batches:
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            parts = [*pool.map(lambda one: list(iter(lambda: next(one, None), None)), [batches] * 3)]
    assert sorted(itertools.chain(*parts)) == expected
    assert all(part == sorted(part) for part in parts)


def test_batches_that_their_own_function_uses_are_refused():
    def use(i):
        time.sleep(0.02)
        return next(batches) if i == 6 else {'i': i}

    batches = Copied(iter(MapDataset.range(16).map(use).to_iter_dataset().batch(4)), 1)
    with pytest.raises(GranularError, match='use another iterator there'):
        list(batches)
    batches.close()


def test_batches_that_are_closed_by_garbage_of_their_own_thread_are_a_closed_error():
    class Owner:
        def __init__(self, batches):
            self.batches, self.itself = batches, self

        def __del__(self):
            self.batches.close()

    class Collecting(core.Batches):
        def _convert(self, batch):
            gc.collect()
            return batch['i'].tolist()

    batches = Collecting(granular.Loader(numbers(16), 4), 1)
    owner = Owner(batches)
    assert next(batches) == [0, 1, 2, 3]
    gc.collect()
    del owner  # in a cycle, so that it is collected in the next conversion
    with pytest.raises(ClosedError):
        list(batches)


def test_batches_that_another_thread_closes_are_a_closed_error():
    for i in range(30):
        batches = Copied([{'i': np.zeros(1)}] * 1000, 1 + i % 2)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            consumer = pool.submit(list, batches)
            time.sleep(0.003 + 0.0002 * i)
            batches.close()
            with pytest.raises(ClosedError):
                consumer.result()


def ask(batches, answers):
    try:
        answers.put(str(next(batches)))
    except GranularError as error:
        answers.put(str(error))


def test_started_batches_are_neither_copied_nor_used_in_a_forked_process():
    batches = Copied([{'i': np.arange(2)}] * 4, 1)
    assert next(batches) == [0, 1]
    for use in (copy.copy, pickle.dumps):
        with pytest.raises(UnsupportedError, match='started batches are neither pickled nor copied'):
            use(batches)
    context = multiprocessing.get_context('fork')
    answers = context.SimpleQueue()
    child = context.Process(target=ask, args=(batches, answers))
    child.start()
    assert 'in the process that this one was forked from' in answers.get()
    child.join()
    answers.close()
    assert next(batches) == [0, 1]
    batches.close()


@pytest.mark.parametrize('buffer', [0, 1])
def test_batches_that_were_not_started_are_used_in_a_forked_process(buffer):
    batches = Copied(granular.Loader(numbers(8), 4), buffer)
    context = multiprocessing.get_context('fork')
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: [ask(batches, answers) for _ in range(2)])
    child.start()
    assert [answers.get() for _ in range(2)] == ['[0, 1, 2, 3]', '[4, 5, 6, 7]']
    child.join()
    answers.close()
    assert list(itertools.islice(batches, 2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    batches.close()


def odd_fails(datapoint):
    if datapoint['i'] % 8 == 3:
        raise ValueError(f'bad {datapoint["i"]}')
    return datapoint


@contextlib.contextmanager
def logged(path):
    """Write the log to a file, also that of forked workers, until they and what is garbage have ended."""
    log = logging.FileHandler(path)
    logging.getLogger('granular').addHandler(log)
    try:
        yield
        gc.collect()
        for child in multiprocessing.active_children():
            child.join()
    finally:
        logging.getLogger('granular').removeHandler(log)
        log.close()


ROADS = {
    'map-style': lambda torch, dataset: (torch.Dataset(dataset), {'batch_size': 4}),
    'map-style, replaced': lambda torch, dataset: (
        torch.Dataset(dataset, on_error=lambda index, _: {'i': -index}),
        {'batch_size': 4},
    ),
    'iterable': lambda torch, dataset: (
        torch.IterableDataset(dataset.to_iter_dataset(on_error='skip').batch(4)),
        {'batch_size': None},
    ),
    'iterable, batched by torch': lambda torch, dataset: (
        torch.IterableDataset(dataset, on_error='skip'),
        {'batch_size': 4},
    ),
}


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('road', ROADS)
def test_failing_datapoints_are_skipped_with_one_summary_for_each_process(road, workers, tmp_path, caplog):
    from torch.utils.data import DataLoader

    import granular.integrations.torch

    with logged(tmp_path / 'log'):
        dataset = MapDataset.source([{'i': i} for i in range(32)]).map(odd_fails)
        source, options = ROADS[road](granular.integrations.torch, dataset)
        loader = DataLoader(source, num_workers=workers, **options)
        numbers = [number for batch in loader for number in batch['i'].tolist()]
        good = [i for i in range(32) if i % 8 != 3]
        assert sorted(numbers) == sorted(good + [-i for i in range(3, 32, 8)] if 'replaced' in road else good)
        del loader, source
    lines = (tmp_path / 'log').read_text().splitlines()
    first = [line for line in lines if 'failed: ValueError: bad' in line]
    summaries = [line for line in lines if line.startswith('on_error skipped')]
    assert len(lines) == len(first) + len(summaries)
    assert len(first) == len(summaries) <= max(1, workers)
    assert sum(int(line.split('datapoints')[0].split()[-1]) for line in summaries) == 4


def test_sources_that_a_dataloader_cannot_read_are_answered_with_the_adapter():
    from torch.utils.data import DataLoader

    from granular.integrations.torch import Batches, Dataset

    dataset = MapDataset.range(8).map(lambda i: {'i': i})
    with granular.Loader(dataset, 2) as loader:
        with pytest.raises(InvalidArgumentError, match=r'^Loader: batches have no indices.*torch.Batches, or its'):
            next(iter(DataLoader(loader)))
        assert granular.convert(loader, 'memory://loader').datapoints == 4  # an iterable, as before
        assert [batch['i'].tolist() for batch in Batches(loader)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    odd = dataset.filter(lambda one: one['i'] % 2)
    with pytest.raises(TypeError, match='NoneType'):
        next(iter(DataLoader(odd, batch_size=4)))
    assert [batch['i'].tolist() for batch in DataLoader(Dataset(odd), batch_size=4)] == [[1, 3], [5, 7]]


def test_failures_before_a_fork_are_not_those_of_the_workers(tmp_path):
    from torch.utils.data import DataLoader

    from granular.integrations.torch import Dataset

    dataset = Dataset(MapDataset.source([{'i': i} for i in range(8)]).map(odd_fails))
    dataset.__getitems__([0, 3])
    with logged(tmp_path / 'log'):
        assert [batch['i'].tolist() for batch in DataLoader(dataset, batch_size=8, num_workers=1)] == [
            [0, 1, 2, 4, 5, 6, 7]
        ]
    (failed,) = (tmp_path / 'log').read_text().splitlines()
    assert 'the datapoint at index 3 failed: ValueError: bad 3' in failed
    assert dataset.errors.count == 1


def test_index_that_a_dataset_does_not_have_is_no_datapoint_that_fails():
    from granular.integrations.torch import Dataset

    for source in ([5, 6, 7], MapDataset.source([5, 6, 7])):
        dataset = Dataset(source)
        with pytest.raises(OutOfRangeError, match='Dataset: index 3 is out of range: expected -3 to 2'):
            dataset.__getitems__([0, 3])
        assert (list(dataset), dataset[-1], dataset.errors.count) == ([5, 6, 7], 7, 0)


def test_batch_of_which_no_datapoint_is_left_is_an_error():
    from granular.integrations.torch import Dataset

    dataset = Dataset(MapDataset.source([{'i': 3}, {'i': 4}]).map(odd_fails))
    assert (len(dataset), dataset[1]) == (2, {'i': 4})
    with pytest.raises(DatapointError, match='all datapoints of the batch, 2, failed, .* pass a stream'):
        dataset.__getitems__([0, 0])
    assert dataset.errors.count == 2

    def fail_again(index, error):
        raise LookupError(index)

    again = Dataset(MapDataset.source([{'i': 3}, {'i': 4}]).map(odd_fails), fail_again)
    for _ in range(2):
        with pytest.raises(LookupError):
            again.__getitems__([0, 1])
    assert again.errors.count == 0
    filtered = Dataset(MapDataset.range(4).filter(lambda x: x % 2))
    assert filtered.__getitems__([0, 1, 2]) == [1]
    for read in (lambda: list(filtered), lambda: filtered.__getitems__([0, 2])):  # an IndexError would end a loop
        with pytest.raises(DatapointError, match=r'of the batch, \d, were filtered out, .* pass a stream'):
            read()
    assert pickle.loads(pickle.dumps(dataset))[1] == {'i': 4}
    with pytest.raises(InvalidArgumentError, match="on_error: expected 'raise'"):
        Dataset([1], on_error='ignore')


def test_invalid_arguments_are_rejected():
    import torch
    from torch.utils.data import DataLoader

    from granular.integrations.torch import Batches, IterableDataset, to_torch

    class Refused(torch.utils.data.IterableDataset):
        """Yields the error for a stream with its own processes, as torch takes 5 s to end a worker that raises."""

        def __iter__(self):
            try:
                iter(IterableDataset(MapDataset.range(9).to_iter_dataset().mp_prefetch(2)))
            except InvalidArgumentError as error:
                yield str(error)

    with pytest.raises(InvalidArgumentError, match='recycle_after=1 batches, .* pass recycle_after=2 or more'):
        Batches(granular.Loader(numbers(8), 4, recycle_after=True), 'cpu', 2)
    with Batches(granular.Loader(numbers(400), 4, recycle_after=2), 'cpu', 2) as batches:
        assert [next(batches)['i'].tolist() for _ in range(100)] == np.arange(400).reshape(100, 4).tolist()
    with pytest.raises(InvalidArgumentError, match='expected a MapDataset or an IterDataset, got list'):
        IterableDataset([1])
    with pytest.raises(InvalidArgumentError, match='has a shard already'):
        iter(IterableDataset(MapDataset.range(3).to_iter_dataset(shard_options=ShardOptions(0, 2)), ShardOptions(0, 2)))
    with pytest.raises(InvalidArgumentError, match='a stream has them already'):
        IterableDataset(stream(), read_options=granular.ReadOptions())
    with pytest.raises(InvalidArgumentError, match='a stream has them already'):
        IterableDataset(stream(), on_error='skip')
    (message,) = DataLoader(Refused(), batch_size=None, num_workers=1)
    assert 'leave out the one or the other' in message
    with pytest.raises(InvalidArgumentError, match='epoch: expected an integer >= 0, got -1'):
        IterableDataset(stream()).set_epoch(-1)
    with pytest.raises(StateError, match="expected 'epoch' from 0"):
        IterableDataset(stream()).load_state_dict({'x': 1})
    with pytest.raises(InvalidArgumentError, match='buffer: expected an integer >= 0, got -1'):
        Batches([1], 'cpu', buffer=-1)
    for value in (['cpu'], 'a', -1, 10**30):
        for convert in (Batches, to_torch):
            with pytest.raises(InvalidArgumentError, match=r"device=.*: pass 'cuda' or 'cpu': "):
                convert([{'x': np.zeros(2)}], device=value)
    with pytest.raises(InvalidArgumentError, match='^Batches: expected a Loader or a stream, got 5$'):
        Batches(5)
    with pytest.raises(InvalidArgumentError, match="device='gpu': pass 'cuda' or 'cpu': Expected one of cpu, cuda"):
        Batches([1], 'gpu')
    if not torch.cuda.is_available():
        with pytest.raises(InvalidArgumentError, match="device='cuda', but torch finds no GPU here: pass device='cpu'"):
            Batches([1], 'cuda')


@pytest.mark.parametrize('name', ['torch', 'jax', 'grain', 'orbax'])
def test_missing_frameworks_are_named(monkeypatch, name):
    monkeypatch.setitem(sys.modules, {'orbax': 'orbax.checkpoint'}.get(name, name), None)
    monkeypatch.delitem(sys.modules, f'granular.integrations.{name}', raising=False)
    with pytest.raises(MissingExtraError, match=rf"pip install .*\[{name}\]'"):
        __import__(f'granular.integrations.{name}')

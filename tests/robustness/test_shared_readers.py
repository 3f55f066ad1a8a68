"""Readers shared by event loops, iterators shared by threads, and loops closed without shutdown."""

import asyncio
import collections
import json
import multiprocessing
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import granular
from granular import aio
from granular.errors import ClosedError, GranularError
from granular.grain import DatasetIterator
from granular.grain.experimental import ParquetIterDataset
from tests.support.seams import on_loop
from tests.support.states import plain
from tests.support.streams import STREAMS
from tests.support.tables import cover

COUNT = 640


STORES = ('bucket', 'local')


@pytest.fixture(scope='module', params=STORES)
def path(request, tmp_path_factory):
    server = None if request.param == 'local' else request.getfixturevalue('fakegcs')
    path = granular.Path(tmp_path_factory.mktemp('data')) if server is None else server.place()
    with granular.DatasetWriter(path / 'data', {'x': 'array'}, granular.encoders) as writer:
        for i in range(COUNT):
            writer.append({'x': np.full(10, i)})
    with granular.ShardedDatasetWriter(path / 'shards', {'x': 'array'}, granular.encoders, shardlen=160) as writer:
        for i in range(COUNT):
            writer.append({'x': np.full(10, i)})
    rows = pa.BufferOutputStream()
    pq.write_table(pa.table({'x': list(range(COUNT))}), rows, row_group_size=40)
    (path / 'rows.parquet').write_bytes(rows.getvalue().to_pybytes())
    return path


def in_threads(work, count):
    """Call a function in concurrent threads, and raise the first exception of any."""
    barrier, errors = threading.Barrier(count), []

    def call(i):
        barrier.wait()
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 150
    for thread in threads:
        thread.join(max(0, until - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), 'a thread hangs'
    if errors:
        raise errors[0]


# --- one reader, many loops


def value_of(point):
    if isinstance(point, bytes):
        return int(granular.decoders['array'](point)[0])
    x = point['x']
    return int(x if np.ndim(x) == 0 else x[0])


READERS = {
    'dataset': lambda path: aio.DatasetReader(path.aio / 'data', granular.decoders),
    'dataset without tables': lambda path: aio.DatasetReader(path.aio / 'data', granular.decoders, False),
    'shards': lambda path: aio.ShardedDatasetReader(path.aio / 'shards', granular.decoders),
    'bag': lambda path: aio.BagReader(path.aio / 'data' / 'x.bag'),
    'parquet': lambda path: aio.ParquetDataSource(path.aio / 'rows.parquet'),
    'blocks': lambda path: aio.sources.Epochs(
        aio.DatasetReader(path.aio / 'data', granular.decoders), COUNT, granular.shuffle.Blocks(16, 4)
    ),
}


@pytest.mark.parametrize(('kind', 'path'), cover([list(READERS)], [STORES]), indirect=['path'])
def test_reader_serves_many_loops_concurrently(kind, path):
    reader = READERS[kind](path)
    expected = [value_of(p) for p in asyncio.run(READERS[kind](path).fetch(range(COUNT)))]
    assert sorted(expected) == list(range(COUNT))

    async def main(i):
        order = np.random.default_rng(i).permutation(COUNT)
        parts = await asyncio.gather(*(reader.fetch(part) for part in np.array_split(order, 8)))
        assert [value_of(point) for part in parts for point in part] == [expected[i] for i in order]
        assert value_of(await reader.get(i)) == expected[i]
        if kind != 'blocks':
            assert [value_of(point) async for point in reader] == expected

    in_threads(lambda i: asyncio.run(main(i)), 12)
    asyncio.run(main(12))


@pytest.mark.parametrize('kind', ['loader', 'stream'])
def test_async_iterator_belongs_to_one_loop(kind, path):
    async def main():
        reader = await aio.DatasetReader.open(path.aio / 'data', granular.decoders)
        items = aio.Loader(reader, 8) if kind == 'loader' else aiter(aio.MapDataset.source(reader))
        first = await anext(items)
        with pytest.raises(GranularError, match='another event loop'):
            await asyncio.to_thread(lambda: asyncio.run(items.__anext__()))
        return first, await anext(items)

    first, second = asyncio.run(main())
    assert (value_of(first) if kind == 'stream' else int(first['x'][0, 0])) == 0
    assert (value_of(second) if kind == 'stream' else int(second['x'][0, 0])) == (1 if kind == 'stream' else 8)


async def test_loader_on_a_loop_of_the_program_is_refused_where_that_loop_does_not_run(path):
    with granular.DatasetReader(path / 'data', granular.decoders) as reader:
        loader = granular.Loader(reader, 8)
        firsts = [int((await anext(loader.aio))['x'][0, 0])]
        for call in (asyncio.to_thread(next, loader), asyncio.sleep(0)):
            with pytest.raises(GranularError, match='another event loop'):
                await call
                next(loader)
            firsts.append(int((await anext(loader.aio))['x'][0, 0]))
        assert firsts == [0, 8, 16]
        await loader.aio.aclose()


class Blocked:
    """A source that never gives an element."""

    def __init__(self):
        self.begun = asyncio.Event()

    def __len__(self):
        return 9

    async def fetch(self, indices):
        self.begun.set()
        await asyncio.Event().wait()


async def test_iterator_that_another_loop_closes_before_its_first_element_ends():
    asyncio.get_running_loop().set_debug(True)  # refuses calls of other threads
    source = Blocked()
    items = aiter(aio.MapDataset.source(source).to_iter_dataset().prefetch(2))
    waiting = asyncio.ensure_future(anext(items))
    await source.begun.wait()
    await asyncio.to_thread(lambda: asyncio.run(items.aclose()))
    with pytest.raises(ClosedError):
        await asyncio.wait_for(waiting, 60)


class Pickled:
    """A source that takes long to pickle."""

    def __init__(self):
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {'x': index}

    def __reduce__(self):
        self.begun.set()
        assert self.go_on.wait(60)
        return Pickled, ()


async def test_loader_that_another_thread_closes_while_its_processes_start_ends_them():
    source, before = Pickled(), {*multiprocessing.active_children()}
    loader = granular.Loader(source, 4, workers=2, mp='spawn')
    waiting = asyncio.ensure_future(anext(loader.aio))
    await asyncio.to_thread(source.begun.wait, 60)
    await asyncio.to_thread(loader.close)
    source.go_on.set()
    with pytest.raises(ClosedError):
        await asyncio.wait_for(waiting, 60)
    await loader.aio.aclose()
    assert {*multiprocessing.active_children()} <= before


def test_reader_opens_after_a_cancelled_opening(path):
    reader = aio.DatasetReader(path.aio / 'data', granular.decoders)

    async def given_up():
        task = asyncio.ensure_future(reader.get(0))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(given_up())
    assert value_of(asyncio.run(reader.get(3))) == 3


async def test_reader_closed_while_it_opens_stays_closed(fakegcs):
    path = fakegcs.place().aio
    async with aio.DatasetWriter(path / 'data', {'x': 'int'}) as writer:
        await writer.append({'x': 1})
    reader = aio.DatasetReader(path / 'data')
    opening = asyncio.create_task(reader.fetch([0]))
    await asyncio.sleep(0)  # it waits for a reply now
    await reader.aclose()
    for read in (opening, reader.fetch([0])):
        with pytest.raises(ClosedError):
            await read
    assert reader.closed


# --- one iterator, many threads


def identity(x):
    return x


def take_in_threads(items):
    """Return the elements that several threads take from one iterator."""
    result = collections.defaultdict(list)

    def work(i):
        for item in iter(items.__next__, None):  # `iter` of a Loader in each thread would begin an epoch in each
            result[i].append(item)

    in_threads(work, 4)
    for got in result.values():
        assert got == sorted(got, key=values_of)  # each thread has its items in order
    return [item for got in result.values() for item in got]


def values_of(item):
    return np.ravel(item['x']).tolist() if isinstance(item, dict) else item


SHARED = {
    'loader': lambda path: granular.Loader(granular.DatasetReader(path / 'data', granular.decoders), 2),
    'loader with workers': lambda path: granular.Loader(
        granular.MapDataset.source(range(COUNT)).map(lambda i: {'x': i}), 2, mp='fork', workers=2
    ),
    'dataset': lambda path: iter(granular.MapDataset.source(range(COUNT)).map(identity)),
    'stream': lambda path: iter(
        granular.MapDataset.source(granular.DatasetReader(path / 'data', granular.decoders)).to_iter_dataset()
    ),
    'batches': lambda path: iter(
        granular.MapDataset.source(granular.DatasetReader(path / 'data', granular.decoders)).to_iter_dataset().batch(4)
    ),
    'prefetch': lambda path: iter(
        granular.MapDataset.source(range(COUNT)).to_iter_dataset().batch(4).map(lambda x: {'x': x}).prefetch(2)
    ),
    'data loader': lambda path: iter(
        granular.grain.DataLoader(
            data_source=range(COUNT),
            sampler=granular.grain.samplers.SequentialSampler(COUNT),
            operations=[lambda i: {'x': i}],
        )
    ),
    'parquet': lambda path: iter(ParquetIterDataset(path / 'rows.parquet')),
    'reader': lambda path: iter(granular.DatasetReader(path / 'data', granular.decoders)),
}


@pytest.mark.parametrize(('kind', 'path'), cover([list(SHARED)], [STORES]), indirect=['path'])
def test_threads_sharing_an_iterator_get_each_element_once(kind, path):
    items = SHARED[kind](path)
    result = [value for item in take_in_threads(items) for value in np.ravel(values_of(item)).tolist()]
    width = 10 if kind in ('loader', 'stream', 'batches', 'reader') else 1
    assert sorted(result) == [i for i in range(COUNT) for _ in range(width)]
    items.close()


@pytest.mark.parametrize('kind', ['loader', 'stream'])
def test_threads_that_are_switched_everywhere_get_each_element_once(kind):
    source = granular.MapDataset.source(range(COUNT)).map(lambda i: {'x': i})
    stream = source.to_iter_dataset(granular.ReadOptions(prefetch_buffer_size=1)).window_shuffle(1, 0)
    make = {'loader': lambda: granular.Loader(source, 1, prefetch=3), 'stream': lambda: iter(stream)}[kind]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            with make() as items:
                assert sorted(np.ravel(values_of(item))[0] for item in take_in_threads(items)) == list(range(COUNT))
    finally:
        sys.setswitchinterval(interval)


def test_threads_sharing_a_listing_get_each_path_once(path):
    result, paths = [], (path / 'shards').rglob('*')
    in_threads(lambda i: result.extend(paths), 4)
    assert sorted(map(str, result)) == sorted(map(str, (path / 'shards').rglob('*')))
    assert len(result) > 8


@pytest.mark.parametrize('kind', ['stream', 'batches', 'loader'])
def test_tasks_sharing_an_iterator_get_elements_in_order(kind, path):
    async def main():
        reader = await aio.DatasetReader.open(path.aio / 'data', granular.decoders)
        stream = aio.MapDataset.source(reader).to_iter_dataset()
        items = {
            'stream': lambda: aiter(stream),
            'batches': lambda: aiter(stream.batch(2).prefetch(2)),
            'loader': lambda: aio.Loader(reader, 2),
        }[kind]()
        result = await asyncio.gather(*(anext(items) for _ in range(100)))
        await items.aclose()
        return [int(item['x'].flat[0]) for item in result]

    assert asyncio.run(main()) == list(range(0, 100 if kind == 'stream' else 200, 1 if kind == 'stream' else 2))


@pytest.mark.parametrize(
    ('kind', 'path'), cover([['stream', 'prefetch', 'parquet', 'batches', 'loader']], [STORES]), indirect=['path']
)
def test_states_saved_during_iteration_are_consistent(kind, path):
    items = SHARED[kind](path)
    lock, handed, states = threading.Lock(), [0], []
    save = items.save if kind == 'loader' else items.get_state

    def work(i):
        if i:
            for _ in items:
                with lock:
                    handed[0] += 1
            return
        while handed[0] < 50:
            least = handed[0]
            states.append((least, save()))

    in_threads(work, 3)
    items.close()
    for least, state in states[:: max(1, len(states) // 10)]:
        again = SHARED[kind](path)
        (again.load if kind == 'loader' else again.set_state)(state)
        item = next(again, None)  # none if the others took all that was left while the state was saved
        first = COUNT if item is None else int(np.ravel(values_of(item))[0])
        size = {'loader': 2, 'batches': 4, 'prefetch': 4}.get(kind, 1)
        assert first % size == 0 and first >= size * least
        again.close()


def test_close_wakes_a_next_waiting_in_another_thread():
    begun, go = threading.Event(), threading.Event()

    def wait(x):
        begun.set()
        go.wait(30)
        return x

    for prefetched in (False, True):
        stream = granular.MapDataset.source(range(8)).map(wait).to_iter_dataset().batch(2)
        items = iter(stream.prefetch(2) if prefetched else stream)
        caught = []

        def work(items=items, caught=caught):
            try:
                next(items)
            except GranularError as error:
                caught.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        assert begun.wait(30)
        items.close()
        thread.join(30)
        assert not thread.is_alive() and 'closed' in str(caught[0])
        begun.clear()
    go.set()


class Numbers(granular.IterDataset):
    """A stream of the user's own, whose iterator has no more elements once it is closed."""

    def __iter__(self):
        return NumbersIterator()


class NumbersIterator(DatasetIterator):
    def __init__(self):
        super().__init__()
        self._next, self._stop = 0, 12

    def __next__(self):
        self._next += 1
        if self._next > self._stop:
            raise StopIteration
        return self._next

    def get_state(self):
        return {'next': self._next}

    def set_state(self, state):
        self._next = state['next']

    def close(self):
        self._stop = 0


CLOSED: dict = {
    **{
        name: make
        for name, make in STREAMS.items()
        if not any(part in name for part in ('oader', 'atches', 'processes'))
    },
    'subclass': Numbers,
    'mix of a subclass': lambda: granular.IterDataset.mix([Numbers(), Numbers()]),
}


@pytest.mark.parametrize('name', CLOSED)
def test_close_during_next_ends_in_an_error_and_changes_no_element(name):
    def drops_third(x):
        seen.append(x)
        if len(seen) == 3:
            closing = threading.Thread(target=items.close)
            closing.start()
            closing.join(30)
        return len(seen) != 3

    seen, taken = [], []
    elements = [plain(element) for element in CLOSED[name]()]
    items = iter(CLOSED[name]().map(plain).filter(drops_third).batch(2, batch_fn=list))
    with pytest.raises(GranularError, match='closed'):
        for pair in items:
            taken += pair
    assert taken == elements[: len(taken)]


# --- loops closed without shutdown

LOOPS = """
import asyncio, gc, json, os, sys, weakref
import granular
from granular import aio
place = aio.Path(sys.argv[1], **json.loads(sys.argv[2]))
if sys.argv[3] == 'uvloop':
    import uvloop
    new_loop = uvloop.new_event_loop
else:
    new_loop = asyncio.new_event_loop
reader = aio.DatasetReader(place / 'data', granular.decoders)

async def work(i):
    found = await reader.fetch([i, i + 1])
    assert found[0]['x'][0] == i
    if i % 10 == 0:  # left in the middle
        items = aiter(aio.MapDataset.source(reader).to_iter_dataset(granular.ReadOptions(2, 16)).batch(2).prefetch(2))
        await anext(items)
        pages = aiter(reader)
        await anext(pages)
        return items, pages

def once(i):
    loop = new_loop()
    keep = loop.run_until_complete(work(i))
    loop.close()
    return weakref.ref(loop)

once(0)
gc.collect()
before = len(os.listdir('/proc/self/fd'))
loops = [once(i) for i in range(40)]
gc.collect()
assert sum(loop() is not None for loop in loops) <= 1, sum(loop() is not None for loop in loops)
assert len(os.listdir('/proc/self/fd')) <= before + 2, (before, len(os.listdir('/proc/self/fd')))

async def nested():  # closed while another one runs
    loop = new_loop()
    await asyncio.to_thread(loop.run_until_complete, work(20))
    loop.close()
    assert (await reader.fetch([7]))[0]['x'][0] == 7
asyncio.run(nested())
print('done')
"""


@pytest.mark.parametrize(('kind', 'path'), cover([['asyncio', 'uvloop']], [STORES]), indirect=['path'])
def test_closed_loops_are_collected_with_their_sockets(kind, path):
    options = dict(path.aio.store.options)
    command = [sys.executable, '-X', 'dev', '-W', 'error', '-c', textwrap.dedent(LOOPS), f'{path}']
    command += [json.dumps(options), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    lines = [line for line in done.stderr.splitlines() if not line.startswith('Executing <')]
    assert (done.returncode, done.stdout, lines) == (0, 'done\n', []), done.stderr


def test_closed_loop_does_not_close_readers(path):
    reader = granular.DatasetReader(path / 'data', granular.decoders)
    loop = asyncio.new_event_loop()
    assert value_of(loop.run_until_complete(reader.aio.get(3))) == 3
    loop.close()
    assert value_of(reader[4]) == 4
    assert value_of(on_loop(reader.aio.get(5))) == 5

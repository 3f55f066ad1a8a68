"""Iterators dropped in the middle: their tasks, threads, processes and memory end with them, without warnings."""

import gc
import io
import json
import textwrap
import time
import weakref

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import granular
from tests.support.tables import cover

HEAD = """
import asyncio, gc, json, logging, multiprocessing, os, pickle, resource, socket, sys, threading, time, weakref
import numpy as np
import granular
from granular import aio
from tests.support.seams import on_loop, pool_of_a_thread

gc.freeze()  # collections look at objects of the program only, and not at those of the imports
place = granular.Path(sys.argv[1], **json.loads(sys.argv[2]))
small = granular.ReadOptions(2, 16)


def sampler():
    return granular.grain.samplers.IndexSampler(64, seed=0, shuffle=True, num_epochs=50)


def copied(iterator):
    return pickle.loads(pickle.dumps(iterator))


def streams(api, reader):
    # Both APIs have the same names.
    source = api.MapDataset.source(reader).repeat(50)
    forked = granular.grain.MultiprocessingOptions(1, start_method='fork')  # the Loader has two
    yield 'loader', lambda: api.Loader(api.sources.Epochs(reader), 2)
    yield 'loader with workers', lambda: api.Loader(api.sources.Epochs(reader), 2, workers=2, mp='fork')
    yield 'dataset', lambda: source.map(len)
    yield 'blocks', lambda: api.MapDataset.source(api.sources.Epochs(reader)).slice(slice(0, 6400))
    yield 'stream', lambda: source.to_iter_dataset(small).batch(2)
    yield 'prefetch', lambda: source.to_iter_dataset(small).batch(2).prefetch(3)
    yield 'mixture', lambda: api.IterDataset.mix([source.to_iter_dataset(small).prefetch(2)] * 2).prefetch(2)
    yield 'workers', lambda: source.to_iter_dataset().mp_prefetch(forked)
    if sys.argv[3:] == ['spawn']:  # which takes a second
        yield 'spawned workers', lambda: source.to_iter_dataset().mp_prefetch(1).batch(2).prefetch(2)
    yield 'data loader', lambda: granular.grain.DataLoader(data_source=reader, sampler=sampler())
    yield 'data loader with workers', lambda: granular.grain.DataLoader(
        data_source=reader, sampler=sampler(), worker_count=1, start_method='fork'
    )
    begin = iter if api is granular else aiter
    yield 'copied stream', lambda: copied(begin(api.MapDataset.range(6400).to_iter_dataset(small).prefetch(2)))
    yield 'copied loader', lambda: copied(api.Loader(api.sources.Epochs(reader), 2))
    rows = api.Path(f'{place}/rows.parquet', **json.loads(sys.argv[2]))
    yield 'parquet', lambda: granular.grain.experimental.ParquetIterDataset(rows)


def places(api):
    path = api.Path(f'{place}', **json.loads(sys.argv[2]))
    yield 'bag', lambda: api.BagReader(path / 'data' / 'x.bag')
    yield 'parquet source', lambda: api.ParquetDataSource(path / 'rows.parquet')
    yield 'iterdir', lambda: (path / 'files').iterdir()
    yield 'glob', lambda: path.glob('**')
    yield 'rglob', lambda: path.rglob('*')
    yield 'walk', lambda: path.walk()


def inet(fd):
    if not os.readlink(f'/proc/self/fd/{fd}').startswith('socket:'):
        return False
    with socket.socket(fileno=os.dup(fd)) as line:
        return line.family != socket.AF_UNIX


def left(tasks):
    # Threads that all share are kept for the next call.
    shared = ('MainThread', 'granular_', 'granular-loop', 'asyncio_')
    names = [thread.name for thread in threading.enumerate() if not thread.name.startswith(shared)]
    return [*tasks, *names, *multiprocessing.active_children()]


def descriptors():
    # Connections to the store are kept for the next request.
    fds = [int(fd) for fd in os.listdir('/proc/self/fd')]
    return len([fd for fd in fds if os.path.exists(f'/proc/self/fd/{fd}') and not inet(fd)])


async def own_tasks():
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


def is_quiet(most=1 << 20):
    until = time.monotonic() + 60
    while (rest := left(on_loop(own_tasks()))) or descriptors() > most:
        assert time.monotonic() < until, (rest, descriptors(), most)
        gc.collect()
        time.sleep(0.03)  # a collection takes as long as a third of that


async def is_quiet_here(most=1 << 20):
    until = time.monotonic() + 60
    while (rest := left(await own_tasks())) or descriptors() > most:
        assert time.monotonic() < until, (rest, descriptors(), most)
        gc.collect()
        await asyncio.sleep(0.03)


def drop_all():
    reader = granular.DatasetReader(place / 'data', granular.decoders)
    for name, make in [*streams(granular, reader), ('reader', lambda: reader), *places(granular)]:
        most = 1 << 20
        for _ in range(2):
            next(iter(make()))
            is_quiet(most)
            most = descriptors()
        yield name


def drop_files():
    path = place / 'files' / '1'
    next(path.open())  # a local file stays open for those who read it again
    before = descriptors()
    for _ in range(20):
        assert next(path.open()) == b'some\\n'
        assert on_loop(path.aio.open()).tell() == 0
    is_quiet(before)
"""

SYNC = """
assert len(list(drop_all())) > 15
drop_files()
"""

NOTEBOOK = """
async def cells():  # a running loop in the main thread
    for _ in drop_all():
        await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1
    drop_files()
asyncio.run(cells())
"""

OWN_LOOP = """
# In a cycle, which the collector may find on any thread, also on that of the library's loop.
class Held:
    pass

async def collect():
    gc.collect()

reader = granular.DatasetReader(place / 'data', granular.decoders)
gc.disable()
for name, make in [*streams(granular, reader), ('reader', lambda: reader), *places(granular)]:
    held = Held()
    held.me, held.items = held, iter(make())
    next(held.items)
    held = weakref.ref(held)
    on_loop(collect())
    assert held() is None, name
"""

FINALIZER = """
# Closed by a finalizer, which the collector calls on the library's loop, or in a thread with the lock of all pools.
import faulthandler
from concurrent.futures import ThreadPoolExecutor

faulthandler.dump_traceback_later(250, exit=True)

class Held:
    def __del__(self):
        self.items.close()

async def collect():
    gc.collect()

def collect_in_submit(pool=None):
    def collect_at(frame, event, arg):
        if event == 'call' and frame.f_code.co_name == '_adjust_thread_count':
            sys.setprofile(None)
            gc.collect()

    with pool or pool_of_a_thread() as pool:
        sys.setprofile(collect_at)
        pool.submit(len, ())

def collect_in_submit_of_the_program():  # for which the loop waits, and this thread for the loop, for five seconds
    collect_in_submit(ThreadPoolExecutor(1))

reader = granular.DatasetReader(place / 'data', granular.decoders)
gc.disable()
ways = [lambda: on_loop(collect()), collect_in_submit, collect_in_submit_of_the_program]
for name, make in [*streams(granular, reader), ('reader', lambda: reader)]:
    for collect_there in ways:
        held = Held()
        held.me, held.items = held, iter(make())
        next(held.items)
        held = weakref.ref(held)
        collect_there()
        assert held() is None, name
        is_quiet()
    del ways[2:]  # it takes five seconds
"""

ASYNC = """
async def main():
    reader = await aio.DatasetReader.open(f'{place}/data' if not json.loads(sys.argv[2]) else
                                          aio.Path(f'{place}/data', **json.loads(sys.argv[2])), granular.decoders)
    for name, make in [*streams(aio, reader), ('reader', lambda: reader), *places(aio)]:
        most = 1 << 20
        for _ in range(2):
            async for _ in make():
                break
            await is_quiet_here(most)
            most = descriptors()
    keep = []
    for name, make in [*streams(aio, reader), ('reader', lambda: reader), *places(aio)]:
        keep.append(aiter(make()))
        await anext(keep[-1])
    return keep  # which outlive their loop

if sys.argv[3] == 'uvloop':
    import uvloop
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        keep = runner.run(main())
else:
    keep = asyncio.run(main())
del keep
gc.collect()
assert not multiprocessing.active_children()
"""

EXIT = """
reader = granular.DatasetReader(place / 'data', granular.decoders)
keep = []
for name, make in [*streams(granular, reader), ('reader', lambda: reader), *places(granular)]:
    keep.append(iter(make()))
    next(keep[-1])
keep.append((place / 'files' / '1').open())
keep[-1].readline()
writers = [(place / 'files' / f'unfinished-{os.getpid()}-{i}').open('wb') for i in range(2)]
for writer in writers:
    writer.write(b'half')
"""

SLOW = """
def wait(x):
    time.sleep(0.05)
    return x
stream = granular.MapDataset.source(range(10**6)).map(wait).to_iter_dataset(granular.ReadOptions(4, 64)).prefetch(4)
keep.append(iter(stream))
next(keep[-1])
"""

NOTEBOOK_EXIT = """
async def cell():
    global keep, reader, writer, writers
""" + textwrap.indent(EXIT, '    ') + """
asyncio.run(cell())
"""  # fmt: skip

FORKED = """
reader = granular.DatasetReader(place / 'data', granular.decoders)
keep = [iter(make()) for name, make in streams(granular, reader) if 'workers' not in name]
for items in keep:
    next(items)
pid = os.fork()
if not pid:
    for items in keep:
        try:
            print('taken by both processes:', next(items))
        except granular.GranularError as error:
            assert 'forked' in str(error), error
    del items, keep  # in a child they have nothing to close
    gc.collect()
    next(iter(reader))
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
for items in keep:
    next(items)
"""

STORES = ('bucket', 'local')
MEMORY = """
def make(i):
    return np.full(1 << 20, i % 100, np.uint8)

def rss():
    with open('/proc/self/statm') as file:
        return int(file.read().split()[1]) * resource.getpagesize()

stream = granular.MapDataset.source(range(10**6)).map(make).to_iter_dataset(granular.ReadOptions(2, 8)).prefetch(8)
def drop(count):
    for _ in range(count):
        items = iter(stream)
        for _ in range(3):
            next(items)

drop(20)  # from then on, memory that is freed is used again
before = rss()
drop(60)
until = time.monotonic() + 60
while rss() - before > 100 << 20 and time.monotonic() < until:
    time.sleep(0.05)
assert rss() - before <= 100 << 20, (rss() - before) >> 20
"""


@pytest.fixture(scope='module', params=STORES)
def data(request, tmp_path_factory):
    server = None if request.param == 'local' else request.getfixturevalue('fakegcs')
    root = granular.Path(tmp_path_factory.mktemp('data')) if server is None else server.place()
    with granular.DatasetWriter(root / 'data', {'x': 'array'}, granular.encoders) as writer:
        for i in range(64):
            writer.append({'x': np.full(2000, i)})
    rows = io.BytesIO()
    pq.write_table(pa.table({'id': list(range(400)), 'text': ['x' * 400] * 400}), rows, row_group_size=20)
    (root / 'rows.parquet').write_bytes(rows.getvalue())
    if server is None:
        (root / 'files').mkdir()
    for i in range(20):
        (root / 'files' / f'{i}').write_bytes(b'some\nlines\n')
    return root, {} if server is None else server.options


@pytest.fixture
def run_program(interpreter):
    """Run a program that must end, and print no warning."""

    def run(code, data, *args):
        root, options = data
        text = HEAD + textwrap.dedent(code) + "\nprint('done', flush=True)\n"
        done = interpreter.run(text, f'{root}', json.dumps(options), *args)
        assert (done.returncode, done.stdout, done.stderr) == (0, 'done\n', ''), done.stderr

    return run


DROPPING = {'script': (SYNC, 'spawn'), 'notebook': (NOTEBOOK,), 'collector': (OWN_LOOP,), 'finalizer': (FINALIZER,)}
EXITING = {'slow': (EXIT + SLOW,), 'script': (EXIT, 'spawn'), 'notebook': (NOTEBOOK_EXIT,)}


@pytest.mark.parametrize(('program', 'data'), cover([list(DROPPING)], [STORES]), indirect=['data'])
def test_dropped_iterators_leave_nothing(run_program, program, data):
    code, *args = DROPPING[program]
    run_program(code, data, *args)


@pytest.mark.parametrize(('kind', 'data'), cover([['uvloop', 'asyncio']], [STORES]), indirect=['data'])
def test_dropped_async_iterators_leave_nothing(run_program, kind, data):
    run_program(ASYNC, data, kind)


@pytest.mark.parametrize(('program', 'data'), cover([list(EXITING)], [STORES]), indirect=['data'])
def test_interpreter_exits_with_unfinished_iterators(run_program, program, data):
    code, *args = EXITING[program]
    run_program(code, data, *args)  # which would take hours if it waited for the rest of the slow stream
    assert not [path for path in (data[0] / 'files').iterdir() if not path.name.isdigit()]


@pytest.mark.parametrize('data', ['bucket'], indirect=True)
def test_forked_child_drops_the_iterators_of_its_parent(run_program, data):
    run_program(FORKED, data)


def test_dropped_prefetching_streams_free_their_memory(run_program, tmp_path):
    run_program(MEMORY, (tmp_path, {}))


HOLDING = {
    'map': lambda stream: stream,
    'prefetch': lambda stream: stream.prefetch(3),
    'window_shuffle': lambda stream: stream.window_shuffle(32, 0),
    'cache': lambda stream: stream.cache(),
    'flat_map': lambda stream: stream.flat_map(lambda array: [array] * 3),
    'rebatch': lambda stream: stream.rebatch(2),
    'pack': lambda stream: stream.map(lambda array: {'x': array}).pack({'x': 64}, num_packing_bins=4),
    'mix': lambda stream: granular.IterDataset.mix({'a': stream, 'b': stream}).window_shuffle(8, 0).prefetch(2),
}


@pytest.mark.parametrize('stage', HOLDING)
def test_closed_iterator_keeps_its_state_and_no_element_that_it_read(stage):
    made = []

    def make(x):
        array = np.full(9, x)
        made.append(weakref.ref(array))
        return array

    iterator = iter(HOLDING[stage](granular.MapDataset.range(200).map(make).to_iter_dataset()))
    for _ in range(3):  # in the middle of what the stage holds, from a state on in which it holds some
        for _ in range(7):
            next(iterator)
        iterator.set_state(iterator.get_state())
    next(iterator)
    state, elements = iterator.get_state(), iterator.stats()['elements']
    iterator.close()
    until = time.monotonic() + 60
    while any(array() is not None for array in made) and time.monotonic() < until:  # a thread may still compute some
        time.sleep(0.01)
        gc.collect()
    assert not any(array() is not None for array in made)
    assert (iterator.get_state(), iterator.stats()['elements']) == (state, elements)

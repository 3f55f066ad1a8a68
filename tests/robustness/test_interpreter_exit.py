"""A process ends at any moment without hanging, warnings or leftovers."""

import itertools
import json
import signal
import textwrap

import numpy as np
import pytest

import granular
from tests.support.interpreters import Interpreter
from tests.support.programs import INTERRUPTIBLE
from tests.support.tables import pairwise

HEAD = """
import asyncio, gc, json, os, signal, sys, tempfile, threading
import numpy as np
import granular
from granular import aio
place = granular.Path(sys.argv[1], **json.loads(sys.argv[2]))
data = place / 'data'
print('ready', flush=True)
"""


@pytest.fixture(scope='module')
def dataset(fakegcs):
    """A folder with a dataset in a bucket, and the options that open it."""
    path = fakegcs.place()
    with granular.DatasetWriter(path / 'data', {'x': 'array'}, granular.encoders) as writer:
        for i in range(64):
            writer.append({'x': np.full(2000, i)})
    return path, fakegcs.options


@pytest.fixture
def ends(interpreter, dataset):
    """Check that a program ends well, and prints the message at most."""

    def check(code, message=''):
        path, options = dataset
        done = interpreter.run(HEAD + textwrap.dedent(code), str(path), json.dumps(options))
        assert (done.returncode, done.stdout) == (0, 'ready\n'), done.stderr
        assert message in done.stderr if message else not done.stderr, done.stderr

    return check


def test_exit_with_work_in_flight_is_clean(ends):
    ends(
        """
        reader = granular.DatasetReader(data, granular.decoders)
        loader = granular.Loader(granular.sources.Epochs(reader), 8)
        next(loader)
        batches = granular.Loader(granular.sources.Epochs(reader), 2, prefetch=30)
        next(batches)
        items = iter(reader)
        next(items)
        writer = granular.DatasetWriter(place / f'unfinished-{os.getpid()}', {'x': 'array'}, granular.encoders)
        writer.append({'x': np.zeros(10)})
        thread = threading.Thread(target=lambda: [reader.fetch(range(64)) for _ in range(10**6)], daemon=True)
        thread.start()
        """,
        'was never closed: 1 of its 1 datapoints are lost',
    )


def test_exit_with_an_iterator_of_the_users_in_flight_is_clean(ends):
    ends(
        """
        class Same(granular.grain.DatasetIterator):
            def __next__(self):
                return next(self._parent)
            def get_state(self):
                return self._parent.get_state()
            def set_state(self, state):
                self._parent.set_state(state)
        class Sames(granular.IterDataset):
            def __iter__(self):
                return Same(iter(self._parent))
        reader = granular.DatasetReader(data, granular.decoders)
        iterator = iter(Sames(granular.MapDataset.source(reader).repeat().to_iter_dataset()).prefetch(2))
        next(iterator)
        """
    )


@pytest.mark.parametrize('name', ['loader', 'stream', 'processes', 'reader', 'items'])
def test_finalizer_of_a_user_that_closes_at_exit_is_clean(name, ends):
    ends(
        f"""
        class Trainer:
            def __init__(self, data):
                self.data = data
                next(iter(data))
            def __del__(self):
                self.data.close()
        reader = granular.DatasetReader(data, granular.decoders)
        stream = granular.MapDataset.source(reader).to_iter_dataset()
        trainer = Trainer({{
            'loader': lambda: granular.Loader(granular.sources.Epochs(reader), 8),
            'stream': lambda: iter(stream),
            'processes': lambda: iter(stream.mp_prefetch(1)),
            'reader': lambda: reader,
            'items': lambda: iter(reader),
        }}[{name!r}]())
        """
    )


def test_loop_may_end_with_pending_reads(ends):
    ends(
        """
        async def main(keep):
            reader = await aio.DatasetReader.open(data, granular.decoders)
            loader = aio.Loader(aio.sources.Epochs(reader), 8)
            await anext(loader)
            keep += [asyncio.create_task(reader.fetch(range(64))) for _ in range(20)]
            keep.append(loader)
            items = aiter(reader)
            await anext(items)
            keep.append(items)
            await asyncio.sleep(0)
        for _ in range(3):
            keep = []
            asyncio.run(main(keep))
            assert all(task.done() for task in keep[:20])
            del keep
            gc.collect()
        """
    )


def test_fork_while_a_loader_runs_is_safe(ends):
    ends(
        """
        reader = granular.DatasetReader(data, granular.decoders)
        loader = granular.Loader(granular.sources.Epochs(reader), 8)
        first = next(loader)
        for _ in range(3):
            pid = os.fork()
            if not pid:
                own = granular.Loader(granular.sources.Epochs(reader), 8)
                ok = np.array_equal(next(own)['x'], first['x'])
                os._exit(0 if ok and reader[3]['x'][0] == 3 else 3)
            next(loader)
            assert os.waitpid(pid, 0)[1] == 0
        assert loader.save()['step'] == 32
        loader.close()
        reader.close()
        """
    )


def test_spawned_processes_read(ends, tmp_path):
    (tmp_path / 'worker.py').write_text(
        textwrap.dedent(
            """
            import granular
            def first(reader, queue):
                with granular.Loader(granular.sources.Epochs(reader), 8) as loader:
                    queue.put(float(next(loader)['x'].sum()))
            """
        )
    )
    ends(
        f"""
        import multiprocessing
        sys.path.insert(0, {str(tmp_path)!r})
        os.environ['PYTHONPATH'] = os.pathsep.join(sys.path)
        import worker
        context = multiprocessing.get_context('spawn')
        queue = context.Queue()
        with granular.DatasetReader(data, granular.decoders) as reader:
            expected = float(next(granular.Loader(granular.sources.Epochs(reader), 8))['x'].sum())
            process = context.Process(target=worker.first, args=(reader, queue))
            process.start()
            assert queue.get(timeout=250) == expected
            process.join(60)
            assert process.exitcode == 0
        queue.close()
        queue.join_thread()
        """
    )


def test_threads_with_and_without_loops_read_concurrently(ends):
    ends(
        """
        reader = granular.DatasetReader(data, granular.decoders)
        found = []
        async def main():
            async with aio.DatasetReader(data, granular.decoders) as own:
                # Nested: a blocking call under a running loop, as in a notebook.
                loader = granular.Loader(granular.sources.Epochs(reader), 8)
                next(loader)
                loader.close()
                assert reader[5]['x'][0] == 5
                found.append((await own.get(3))['x'][0])
        def work(i):
            if i % 2:
                asyncio.run(main())
            else:
                found.append(reader.fetch([3])[0]['x'][0])
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [3] * 8, found
        before = len(os.listdir('/proc/self/fd'))
        for _ in range(20):
            work(1)
        assert len(os.listdir('/proc/self/fd')) < before + 10  # some connections of the shared loop are kept
        """
    )


def test_loop_closed_without_shutdown_leaves_no_warning(ends):
    # A socket cannot be closed before its loop lets go of it; but nothing hangs, and the next loop works.
    ends(
        """
        import warnings
        warnings.simplefilter('ignore', ResourceWarning)
        for _ in range(3):
            loop = asyncio.new_event_loop()
            assert loop.run_until_complete((data / 'spec.json').aio.read_bytes())
            loop.close()
            del loop
            gc.collect()
        assert (data / 'spec.json').read_bytes()
        """
    )


def test_read_while_the_interpreter_exits_ends_as_any_other_and_daemon_threads_end_silently(interpreter):
    program = """
        import atexit, os, threading
        os.environ['GRANULAR_ATTEMPTS'] = '1'
        import granular

        exiting = threading.Event()
        path = granular.Path('https://127.0.0.1:9/file')
        thread = threading.Thread(target=lambda: [exiting.wait(), path.read_bytes()], daemon=True)
        thread.start()

        @atexit.register
        def read():
            exiting.set()
            try:
                path.read_bytes()
            except granular.errors.StoreError as error:
                print('cannot be read')
        """
    done = interpreter.run(textwrap.dedent(program))
    assert (done.returncode, done.stdout) == (0, 'cannot be read\n')
    assert 'Traceback' not in done.stderr


@pytest.mark.parametrize('kind', ['DatasetWriter', 'ShardedDatasetWriter'])
def test_writer_that_a_handler_at_exit_closes_publishes(kind, interpreter, tmp_path):
    program = """
        import atexit, sys
        import granular

        folder, kind = sys.argv[1:]
        options = {'shardlen': 3} if kind == 'ShardedDatasetWriter' else {}
        writer = getattr(granular, kind)(folder, {'n': 'int'}, **options)
        for n in range(3):
            writer.append({'n': n})

        @atexit.register
        def finish():
            with granular.Loader(granular.MapDataset.range(9).map(lambda n: {'n': n}), 3) as loader:
                try:
                    next(loader)  # which would go on
                except granular.errors.ClosedError as error:
                    print(error)
            for n in range(3, 8):
                writer.append({'n': n})
            writer.close()
            with granular.open(folder) as reader:
                print([datapoint['n'] for datapoint in reader])
            path = granular.Path(folder + '.txt')
            path.write_text('text')
            print(path.read_text())
        """
    done = interpreter.run(textwrap.dedent(program), f'{tmp_path / "out"}', kind)
    expected = 'the interpreter is shutting down\n[0, 1, 2, 3, 4, 5, 6, 7]\ntext\n'
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, '')


WORK = f"""{INTERRUPTIBLE}
import asyncio, os, sys, threading, time
import granular
from granular import aio

folder, work, method, api, end = sys.argv[1:]
lib = granular if api == 'sync' else aio
count = 0 if method == 'threads' else 1
numbers = lib.MapDataset.range(1000).repeat()
workers = granular.grain.MultiprocessingOptions(count, start_method=method if count else 'spawn')

def as_point(i, seed):
    return {{'i': i}}

async def fetches():
    while True:
        yield await numbers.fetch(range(64))

async def writes():
    async with aio.DatasetWriter(folder + '/data', {{'x': 'bytes'}}, granular.encoders) as writer:
        while True:
            yield await writer.append({{'x': bytes(1000)}}, flush=True)

def blocking_fetches():
    while True:
        yield numbers.fetch(range(64))

def blocking_writes():
    with granular.DatasetWriter(folder + '/data', {{'x': 'bytes'}}, granular.encoders) as writer:
        while True:
            yield writer.append({{'x': bytes(1000)}}, flush=True)

if work == 'loads':
    source = lib.sources.Transform(lib.sources.Epochs(range(1000)), as_point)
    items = lib.Loader(source, 4, workers=2, mp=method if count else None)
elif work == 'streams':
    items = numbers.map(str).to_iter_dataset().batch(2, batch_fn=list).prefetch(2).mp_prefetch(workers)
elif api == 'sync':
    items = {{'fetches': blocking_fetches, 'writes': blocking_writes}}[work]()
else:
    items = {{'fetches': fetches, 'writes': writes}}[work]()
began, go_on = threading.Event(), threading.Event()

def iterate():
    for _ in items:
        began.set()

async def iterate_under_a_loop():
    async for _ in items:
        began.set()

runs = {{'asyncio.run': asyncio.run, 'loop': lambda main: asyncio.new_event_loop().run_until_complete(main)}}
target = iterate if api == 'sync' else lambda: runs[api](iterate_under_a_loop())
threading.Thread(target=target, daemon=True).start()
began.wait()
print('ready', flush=True)
if end == 'exception':
    raise LookupError('mine')
if end == 'sys.exit':
    sys.exit(7)
if end == 'os._exit':
    threading.Thread(target=os._exit, args=(9,)).start()
    go_on.wait()
if end in ('SIGINT', 'SIGTERM'):
    os.kill(os.getpid(), getattr(signal, end))
    go_on.wait()
"""


@pytest.fixture(scope='module')
def plain_interpreter():
    """An interpreter without development mode, in which asyncio logs slow callbacks of worker processes."""
    with Interpreter('aiohttp', 'numpy', options=['-W', 'ignore::DeprecationWarning']) as interpreter:
        yield interpreter


CODES = {
    'normal': 0,
    'exception': 1,
    'sys.exit': 7,
    'os._exit': 9,
    'SIGINT': -signal.SIGINT,
    'SIGTERM': -signal.SIGTERM,
}
OWN_ERRORS = {'exception': 'LookupError: mine\n', 'SIGINT': 'KeyboardInterrupt\n'}


@pytest.mark.parametrize(
    ('work', 'method', 'api', 'end'),
    pairwise(
        row
        for row in itertools.product(
            ['loads', 'streams', 'fetches', 'writes'],
            ['threads', 'fork', 'spawn'],
            ['sync', 'asyncio.run', 'loop'],
            CODES,
        )
        if row[0] in ('loads', 'streams') or row[1] == 'threads'
    ),
)
def test_exit_while_a_daemon_thread_iterates_is_silent(work, method, api, end, tmp_path, plain_interpreter):
    with plain_interpreter.start(WORK, str(tmp_path), work, method, api, end) as process:
        output, errors = process.communicate()
    if end in OWN_ERRORS:
        assert errors.count('Traceback') == 1, errors
        traceback, message, errors = errors.partition(OWN_ERRORS[end])
        assert message, traceback
    others = [line for line in errors.splitlines() if not (work == 'writes' and 'was never closed' in line)]
    assert (process.returncode, output, others) == (CODES[end], 'ready\n', [])


def test_exit_while_a_daemon_thread_waits_for_an_item_with_a_progress_bar_is_silent(interpreter):
    done = interpreter.run("""
import threading, granular

def items():
    waiting.set()
    never.wait()
    yield

waiting, never = threading.Event(), threading.Event()
threading.Thread(target=list, args=(granular.progress(items()),), daemon=True).start()
waiting.wait()
""")
    assert done.returncode == 0
    assert 'Error' not in done.stderr


INTERRUPTED_MAP = """
import itertools, os, signal, sys, time
import granular

class Slow:
    def __len__(self):
        return 5
    def __getitem__(self, index):
        return index

def wait(value):
    time.sleep(0.006)
    return value

def interrupt_at(step):
    points = itertools.count()
    def look(frame, event, argument):
        if event == 'c_return' and frame.f_code.co_qualname == 'Condition.__enter__' and next(points) == step:
            sys.setprofile(None)
            raise KeyboardInterrupt
    sys.setprofile(look)
    try:
        granular.MapDataset.source(Slow()).map(wait).fetch(range(5))
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(1)
    finally:
        sys.setprofile(None)

for step in itertools.count():
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        break
    until = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            sys.exit(f'hangs after an interrupt at point {step}')
        time.sleep(0.01)
    if not ended[1]:
        sys.exit(0)
interrupt_at(step)
"""


def test_program_ends_that_was_interrupted_where_it_took_a_lock_of_its_threads(interpreter):
    """Each child is interrupted once, where ``threading.Condition`` has its lock and has not returned."""
    done = interpreter.run(INTERRUPTED_MAP)
    assert (done.returncode, done.stderr) == (0, '')

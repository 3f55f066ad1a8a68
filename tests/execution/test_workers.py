"""Worker processes: batches and their order, errors and crashes, and processes that remain."""

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

import granular
from granular import MapDataset, sources
from granular.errors import FunctionError, GranularError, InvalidArgumentError, WorkerError
from granular.grain import MultiprocessingOptions
from tests import ROOT
from tests.support.programs import INTERRUPTIBLE, program
from tests.support.seams import split_for_worker
from tests.support.tables import each_value, pairwise

METHODS = ('spawn', 'forkserver', 'fork')
UNNAMED = signal.SIGRTMIN + 1  # a signal that has no name in Python


def datapoint(i, seed=None):
    return {'i': i, 'x': np.full((20, 30), i, np.int32), 'pid': os.getpid()}


def transform(i, seed):
    return {'i': i, 'x': np.full((20, 30), seed[1], np.float32)}


def at(bad, what, i, seed=None):
    if i == bad:
        what()
    return {'i': i}


def value_at(bad, what, i):
    return what() if i == bad else i


def stops_at(bad, i, seed):
    if i == bad and multiprocessing.parent_process() is not None:  # a Loader computes the first datapoint itself
        os.kill(os.getpid(), signal.SIGSTOP)
    return {'i': i}


def raise_error():
    raise KeyError('mine')


class OddError(Exception):
    def __init__(self, one, two):
        super().__init__(f'{one} and {two}')


def raise_odd():
    raise OddError(1, 2)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_unnamed():
    os.kill(os.getpid(), UNNAMED)


def end():
    sys.exit(3)


def vanish():
    os._exit(1)


_held: list[int] = []  # both ends of a pipe: children of workers run until the test closes it


@pytest.fixture
def held():
    _held.extend(os.pipe())
    yield
    while _held:
        os.close(_held.pop())


def orphan():
    # A child of the worker holds the worker's end of the pipe, and outlives the worker.
    if not os.fork():
        reading, writing = _held
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    die()


def cut():
    # The worker dies in the middle of its reply, while its child lives.
    def send_half(pipe, data, *_):
        os.write(pipe.fileno(), data[: len(data) // 2])
        orphan()

    multiprocessing.connection.Connection._send = send_half
    return 'x' * 1000


class Unpicklable:
    """A value whose pickling raises any error."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


class Unloadable:
    """A value that pickles, and ends the process that unpickles it."""

    def __reduce__(self):
        return sys.exit, (3,)


class UnpicklableError(Exception):
    def __reduce__(self):
        raise SystemExit(4)


class UnloadableError(Exception):
    def __reduce__(self):
        return sys.exit, (3,)


class UnsayableError(Exception):
    def __str__(self):
        raise LookupError

    def __reduce__(self):
        raise LookupError


def raising(kind):
    raise kind(1)


def giving(value):
    return value


DEATHS = {
    'SystemExit': (end, FunctionError, 'raised SystemExit: 3'),
    'os._exit': (vanish, WorkerError, r'ended with exit code 1 before it computed item \d+: its traceback is'),
    'SIGKILL': (die, WorkerError, 'was killed by SIGKILL .*: usually for lack of memory: use fewer workers'),
    'a signal without a name': (die_unnamed, WorkerError, rf'was killed by signal {UNNAMED} before it computed'),
    'SIGKILL, with a child': (orphan, WorkerError, 'was killed by SIGKILL'),
    'SIGKILL in a reply, with a child': (cut, WorkerError, 'was killed by SIGKILL'),
    'an error that does not pickle': (functools.partial(raising, UnpicklableError), WorkerError, 'UnpicklableError: 1'),
    'an error that does not load': (functools.partial(raising, UnloadableError), WorkerError, 'UnloadableError: 1'),
    'an error without a message': (functools.partial(raising, UnsayableError), WorkerError, 'UnsayableError'),
    'a value that does not pickle': (
        functools.partial(giving, Unpicklable(TypeError('mine'))), WorkerError, 'does not pickle: TypeError: mine',
    ),
    'a value that ends who pickles it': (
        functools.partial(giving, Unpicklable(SystemExit(4))), WorkerError, 'does not pickle: SystemExit: 4',
    ),
    'a value that does not load': (
        functools.partial(giving, Unloadable()), WorkerError, 'does not unpickle in this process: SystemExit: 3',
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    deadline = time.monotonic() + 60
    while (
        left := [child for child in psutil.Process().children() if 'granular-worker' in ' '.join(_line(child))]
    ) and (time.monotonic() < deadline):
        time.sleep(0.05)
    assert not left
    assert not mapped()
    assert not multiprocessing.active_children()


def mapped():
    """Return the named shared memory that this process has open or mapped."""
    with open('/proc/self/maps') as maps:
        targets = [line.strip() for line in maps]
    for name in os.listdir('/proc/self/fd'):
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(f'/proc/self/fd/{name}'))
    return [path for path in targets if '/dev/shm/granular' in path]


def _line(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.filterwarnings('ignore:.*multi-threaded.*:DeprecationWarning')
@pytest.mark.parametrize('method', METHODS)
def test_batches_equal_those_of_threads(method):
    source = granular.sources.Transform(granular.sources.Epochs(range(100), seed=3), transform)
    with granular.Loader(source, 8) as threads, granular.Loader(source, 8, workers=2, mp=method) as processes:
        for _ in range(30):
            from_threads, from_processes = next(threads), next(processes)
            assert from_threads.keys() == from_processes.keys()
            for key, array in from_threads.items():
                assert array.dtype == from_processes[key].dtype
                np.testing.assert_array_equal(array, from_processes[key])
        from_processes['x'][0] = 5  # a copy for the consumer
        state = processes.save()
        after = next(processes)['i'].tolist()
        threads.load(state)
        processes.load(state)
        assert next(threads)['i'].tolist() == next(processes)['i'].tolist() == after
    with granular.Loader(granular.sources.Transform(range(64), datapoint), 8, workers=2, mp=method) as loader:
        assert len({pid for batch in loader for pid in batch['pid'].tolist()} - {os.getpid()}) == 2


class Unnamed:
    """A function that has no name in the thread that reads the replies of a worker."""

    def __call__(self, i, seed):
        return {'i': i}

    def __getattr__(self, name):
        reads_replies = threading.current_thread().name.startswith('granular-worker')
        raise LookupError('no name') if name == '__qualname__' and reads_replies else AttributeError(name)


@pytest.mark.filterwarnings('ignore:.*multi-threaded.*:DeprecationWarning')
def test_loader_starts_no_more_processes_than_batches_in_flight():
    with granular.Loader(sources.Transform(range(64), datapoint), 4, prefetch=1, mp='fork') as loader:
        pids = {pid for batch in loader for pid in batch['pid'].tolist()} - {os.getpid()}
        assert len(pids) == 2


def test_error_while_times_of_workers_are_counted_reaches_the_consumer():
    granular.metrics.time_stages()
    try:
        with granular.Loader(sources.Transform(range(10), Unnamed()), 2, workers=1, mp='fork') as loader:
            with pytest.raises(LookupError, match='no name'):
                list(loader)
    finally:
        granular.metrics.time_stages(False)


@pytest.mark.filterwarnings('ignore:.*multi-threaded.*:DeprecationWarning')
def test_worker_errors_reach_the_consumer():
    def loader(what, **options):
        source = granular.sources.Transform(range(100), functools.partial(at, 41, what))
        return granular.Loader(source, 10, workers=2, mp='fork', **options)

    with loader(raise_error) as batches:
        assert [next(batches)['i'][0] for _ in range(4)] == [0, 10, 20, 30]
        with pytest.raises(KeyError, match='mine') as caught:
            next(batches)
        assert caught.value.__notes__ == [
            'while transforming the datapoint at index 41, in Transform(at, seed=0)',
            'in the batch of the steps 40 to 49 of the Loader',
        ]
        assert 'in raise_error' in str(caught.value.__cause__)
        assert batches.save()['step'] == 40
        batches.load({'step': 50, 'seed': 0})
        assert next(batches)['i'][0] == 50
    with loader(raise_odd) as batches, pytest.raises(WorkerError, match='OddError: 1 and 2'):
        list(batches)
    with loader(raise_error, on_error='skip') as batches:
        assert [len(batch['i']) for batch in batches] == [10, 10, 10, 10, 9, 10, 10, 10, 10, 10]
        assert batches.errors == [(41, "KeyError: 'mine'")]
    with loader(die) as batches:
        with pytest.raises(WorkerError, match='was killed by SIGKILL'):
            list(batches)


@pytest.mark.filterwarnings('ignore:.*multi-threaded.*:DeprecationWarning')
@pytest.mark.parametrize(('death', 'count'), each_value(itertools.product(DEATHS, [1, 2])))
def test_stream_continues_after_a_worker_failure(death, count, held):
    what, kind, message = DEATHS[death]
    options = MultiprocessingOptions(count, 2, 'fork')
    dataset = MapDataset.range(200).map(functools.partial(value_at, 150, what)).to_iter_dataset().mp_prefetch(options)
    children = set(psutil.Process().children(recursive=True))
    with iter(dataset) as iterator:
        for _ in range(2):
            with pytest.raises(kind, match=message):
                list(iterator)
            assert iterator.get_state()['state'] <= 150
        iterator.set_state({'version': 5, 'state': 151})
        assert list(iterator) == list(range(151, 200))
        workers = [child for child in psutil.Process().children(recursive=True) if child not in children]
    assert not psutil.wait_procs(workers, timeout=60)[1]
    with iter(MapDataset.range(200).map(double).to_iter_dataset().mp_prefetch(options)) as iterator:
        assert list(iterator) == list(range(0, 400, 2))


@pytest.mark.filterwarnings('ignore:.*multi-threaded.*:DeprecationWarning')
@pytest.mark.parametrize('death', ['SystemExit', 'os._exit', 'SIGKILL'])
def test_loader_continues_after_a_worker_failure(death):
    what, kind, message = DEATHS[death]
    source = granular.sources.Transform(range(100), functools.partial(at, 41, what))
    with granular.Loader(source, 10, workers=1, mp='fork') as loader:
        for _ in range(2):
            with pytest.raises(kind, match=message):
                list(loader)
            assert loader.save()['step'] <= 40
        loader.load({'step': 50, 'seed': 0})
        assert [batch['i'][0] for batch in loader] == [50, 60, 70, 80, 90]


@pytest.mark.filterwarnings('ignore:.*multi-threaded.*:DeprecationWarning')
async def test_closing_while_a_worker_is_replaced_ends_its_processes():
    class Context(multiprocessing.context.ForkContext):
        started, replacing, go_on = 0, threading.Event(), threading.Event()

        def Process(self, *args, **options):
            self.started += 1
            if self.started == 2:
                self.replacing.set()
                assert self.go_on.wait(30)
            return super().Process(*args, **options)

    context = Context()
    source = granular.aio.sources.Transform(range(100), functools.partial(at, 41, die))
    loader = granular.aio.Loader(source, 10, workers=1, mp=context)
    with pytest.raises(WorkerError, match='was killed by SIGKILL'):
        [batch async for batch in loader]
    after = asyncio.ensure_future(anext(loader))
    await asyncio.to_thread(context.replacing.wait, 30)
    closing = asyncio.ensure_future(loader.aclose())
    for _ in range(10):
        await asyncio.sleep(0)
    context.go_on.set()
    await closing
    with contextlib.suppress(GranularError):
        await after
    assert context.started == 2


def stopped_child():
    """Wait until a child of this process is stopped, and return it."""
    while True:
        for child in psutil.Process().children():
            if child.status() == psutil.STATUS_STOPPED:
                return child
        time.sleep(0.01)


def test_stopped_worker_with_a_full_pipe_does_not_block_the_loop():
    ahead = 600  # requests; the pipe takes some 300
    source = sources.Transform(sources.Epochs(range(10_000), shuffle=False), functools.partial(stops_at, 0))
    with (
        granular.Loader(source, 1, prefetch=ahead, workers=1, mp='fork') as loader,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(next, loader)
        child = stopped_child()
        try:
            while loader.stats()['in_flight'] < ahead:
                time.sleep(0.01)
            assert not granular.Path('memory://nowhere').exists()  # answered on the same loop
        finally:
            child.send_signal(signal.SIGCONT)
        assert first.result()['i'].tolist() == [0]
        assert [next(loader)['i'].item() for _ in range(ahead)] == list(range(1, ahead + 1))


def drawn(i):
    import random

    import torch

    return {'random': random.random(), 'numpy': np.random.rand(), 'torch': torch.rand(()).item()}


def test_workers_draw_different_numbers_from_global_generators():
    """Forked ones: a new interpreter has random states of its own."""
    import torch

    assert torch.initial_seed() is not None  # it is imported, as by programs whose functions use it
    batches = []
    for workers in (2, 1):  # a loader for each epoch, whose workers have copies of the same states
        with granular.Loader(MapDataset.range(16).map(drawn), 1, prefetch=3, workers=workers, mp='fork') as loader:
            batches += loader
    for name in ('random', 'numpy', 'torch'):
        assert len({batch[name].item() for batch in batches}) == 32, name


PRINTING = """
import multiprocessing
import granular

def shown(i):
    if multiprocessing.parent_process() is not None:  # a Loader computes the first datapoint itself
        print(f'loading {i}')
    return {'i': i}

loader = granular.Loader(granular.MapDataset.range(4).map(shown), 2, workers=1, mp='fork')
assert len(list(loader)) == 2
"""


def test_what_functions_print_in_a_worker_is_not_lost():
    environment = {name: value for name, value in os.environ.items() if name != 'PYTHONUNBUFFERED'}
    environment['PYTHONPATH'] = str(ROOT)
    with program([sys.executable, '-c', PRINTING], env=environment) as process:  # its output is a pipe
        output, errors = process.communicate(timeout=60)
    assert (sorted(output.splitlines()), errors) == ([f'loading {i}' for i in range(4)], '')


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGUSR1])
def test_handlers_of_signals_run_in_the_parent_alone(number, tmp_path):
    # As one that saves the state of the loader, which in a worker is that of its start.
    before = signal.signal(number, lambda *_: (tmp_path / f'{os.getpid()}').touch())
    try:
        source = sources.Transform(sources.Epochs(range(100), shuffle=False), functools.partial(at, -1, raise_error))
        with granular.Loader(source, 1, prefetch=0, workers=1, mp='fork') as loader:
            assert next(loader)['i'].tolist() == [0]
            for process in [*multiprocessing.active_children(), multiprocessing.process.current_process()]:
                os.kill(process.pid, number)
            assert next(loader)['i'].tolist() == [1]
    finally:
        signal.signal(number, before)
    assert [path.name for path in tmp_path.iterdir()] == [f'{os.getpid()}']


@pytest.mark.filterwarnings('ignore:.*multi-threaded.*:DeprecationWarning')
@pytest.mark.parametrize(('count', 'threads'), each_value(itertools.product([1, 2, 3], [1, 4])))
def test_forked_workers_start_their_own_threads(count, threads):
    # The forking process has used its own pool, whose threads do not exist in the worker.
    source = granular.sources.Transform(range(64), datapoint)
    with granular.Loader(source, 8, workers=threads) as loader:
        assert len(list(loader)) == 8
    with granular.Loader(source, 8, workers=count, mp='fork') as loader:
        assert [batch['i'].tolist() for batch in loader] == np.arange(64).reshape(8, 8).tolist()


def test_unpicklable_source_is_reported_at_once():
    lock = threading.Lock()
    source = granular.sources.Transform(range(9), lambda i, seed: {'i': int(lock.locked())})
    with granular.Loader(source, 3, workers=1, mp='spawn') as loader:
        with pytest.raises(InvalidArgumentError, match=r'that pickle, Transform\(.* does not: .*lock'):
            next(loader)


def test_functions_and_classes_of_a_notebook_reach_workers(interpreter):
    script = """
import dataclasses, os, sys, granular

@dataclasses.dataclass
class Point:
    x: int
    pid: int

class Shift(granular.grain.transforms.Map):
    def map(self, point):
        return Point(point.x + offset, os.getpid())

def make(x):
    return Point(x, 0)

offset = 10
assert not hasattr(sys.modules['__main__'], '__file__')
operations = [make, Shift(), lambda point: Point(2 * point.x, point.pid)]
sampler = granular.grain.samplers.IndexSampler(5, num_epochs=1)
loader = granular.grain.DataLoader(data_source=range(5), sampler=sampler, operations=operations, worker_count=1)
points = list(loader)
assert all(type(point) is Point and point.pid != os.getpid() for point in points), points
print([point.x for point in points])
"""
    done = interpreter.run(script)
    assert done.stdout == '[20, 22, 24, 26, 28]\n', done.stderr


RAISING = """
import sys
import granular

class MyError(Exception):
    pass

class Hard(BaseException):
    pass

def local_class():
    class LocalError(Exception):
        pass
    return LocalError

KINDS = MyError, Hard, local_class()

def at_the_top(i):
    raise MyError(i)

LAMBDA = lambda i: at_the_top(i)
RAISED = [(kind, cause) for kind in KINDS for cause in (None, *KINDS)]

def local():
    def fn(i, seed=None):
        if not i:
            return {'x': i}
        if i > len(RAISED):
            return (at_the_top if i % 2 else LAMBDA)(i)
        kind, cause = RAISED[i - 1]
        raise kind(i) from cause and cause('cause')
    return fn

def loaders(method):
    source = granular.sources.Transform(range(len(RAISED) + 3), local())
    with granular.Loader(source, 1, workers=1, mp=method) as loader:
        for step in range(1, len(source)):
            loader.load({'step': step})
            yield from outcome(loader)

def streams(method):
    dataset = granular.MapDataset.range(len(RAISED) + 3).map(local())
    workers = granular.grain.MultiprocessingOptions(int(method is not None), start_method=method or 'spawn')
    with iter(dataset.to_iter_dataset().mp_prefetch(workers)) as iterator:
        for step in range(1, len(dataset)):
            iterator.set_state({'version': 5, 'state': step})
            yield from outcome(iterator)

def outcome(items):
    try:
        next(items)
    except BaseException as error:
        cause = type(error.__cause__)
        # The parent of a fork does not know its local class, which is another object there.
        yield [kind if kind in KINDS[:2] else kind.__name__ for kind in (type(error), cause)], error.args

if __name__ == '__main__':
    for api in loaders, streams:
        for expected, found in zip(api(None), api(sys.argv[1]), strict=True):
            if expected[0][1] == 'NoneType':
                expected[0][1] = 'RemoteError'
            if expected != found:
                print(api.__name__, expected, found)
    print('done')
"""


@pytest.mark.parametrize(('method', 'home'), pairwise(itertools.product(METHODS, ['script', 'notebook'])))
def test_errors_of_the_main_module_arrive_as_without_workers(method, home, tmp_path, interpreter):
    if home == 'notebook':
        done = interpreter.run(RAISING, method)
    else:
        (tmp_path / 'script.py').write_text(RAISING)
        command = [sys.executable, '-W', 'ignore', tmp_path / 'script.py', method]
        environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ('done\n', '')


def nested(x):
    numbers = granular.MapDataset.range(4).map(double)
    with iter(numbers.to_iter_dataset().mp_prefetch(MultiprocessingOptions(1, start_method='fork'))) as iterator:
        return list(iterator)


@pytest.mark.filterwarnings('ignore:.*multi-threaded.*:DeprecationWarning')
@pytest.mark.parametrize('method', METHODS)
def test_workers_in_workers_name_the_remedy(method):
    stream = granular.MapDataset.range(4).map(nested).to_iter_dataset()
    with iter(stream.mp_prefetch(MultiprocessingOptions(1, start_method=method))) as iterator:
        with pytest.raises(WorkerError, match='granular-worker-0 is a daemonic process, .* without mp_prefetch or mp='):
            next(iterator)


GUARDED = """
import sys
import granular

if __name__ == '__main__':
    def double(i, seed=None):
        return {'x': i}

    class Numbers:
        def __len__(self):
            return 9
        def __getitem__(self, i):
            return {'x': i}

    numbers, method = range(9), sys.argv[1]
    workers = granular.grain.MultiprocessingOptions(1, start_method=method)
    sampler = granular.grain.samplers.IndexSampler(9, num_epochs=1)
    loaders = {
        'double': granular.Loader(granular.MapDataset.range(9).map(double), 1, workers=1, mp=method, on_error='skip'),
        'Numbers': granular.MapDataset.source(Numbers()).to_iter_dataset(on_error='skip').mp_prefetch(workers),
        'double ': granular.grain.DataLoader(
            data_source=numbers, sampler=sampler, operations=[double], worker_count=1, start_method=method
        ),
    }
    for name, loader in loaders.items():
        try:
            list(loader)
        except granular.errors.WorkerError as error:
            assert f"AttributeError: Can't get attribute {name.strip()!r}" in str(error), error
            assert "`if __name__ == '__main__':`" in str(error), error
            print('told')
"""


@pytest.mark.parametrize('method', ['spawn', 'forkserver'])
def test_functions_under_the_guard_of_the_main_module_are_named(method, tmp_path):
    (tmp_path / 'script.py').write_text(GUARDED)
    command = [sys.executable, '-W', 'ignore', tmp_path / 'script.py', method]
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ('told\n' * 3, '')


def double(x):
    return x * 2


def odd(x):
    return x % 3 != 0


def random(x, rng):
    return x, int(rng.integers(1000))


@pytest.mark.filterwarnings('ignore:.*multi-threaded.*:DeprecationWarning')
def test_stream_and_states_do_not_depend_on_worker_count():
    def stream(count):
        options = MultiprocessingOptions(count, 2, 'fork')
        dataset = MapDataset.range(300).shuffle(seed=1).map(double).to_iter_dataset()
        mixed = granular.IterDataset.mix([dataset.filter(odd), dataset.random_map(random, seed=1)], [1, 2])
        return mixed.batch(5, batch_fn=list).mp_prefetch(options)

    with iter(stream(0)) as iterator:
        expected = list(iterator)
    for count in (1, 3):
        with iter(stream(count)) as iterator:
            first = [next(iterator) for _ in range(7)]
            state = iterator.get_state()
            assert first + list(iterator) == expected
        with iter(stream(0)) as iterator:
            iterator.set_state(state)
            assert first + list(iterator) == expected


def test_workers_share_the_index_of_a_reader(seaweed, monkeypatch):
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', seaweed.options['key'])
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', seaweed.options['secret'])
    monkeypatch.setenv('AWS_ENDPOINT_URL_S3', seaweed.endpoint)
    path = seaweed.place()
    with granular.ShardedDatasetWriter(path, {'i': 'int'}, granular.encoders, shardlen=100) as writer:
        for i in range(400):
            writer.append({'i': i})
    with granular.ShardedDatasetReader(str(path), granular.decoders) as reader:
        source = granular.sources.Epochs(reader, seed=1)
        with granular.Loader(source, 16) as threads, granular.Loader(source, 16, workers=2, mp='spawn') as processes:
            for _ in range(12):
                assert next(threads)['i'].tolist() == next(processes)['i'].tolist()
        head, parts = split_for_worker(reader.aio)
        assert b'secret' not in head
        assert sum(part.nbytes for part in parts) >= 400 * 8


SCRIPT = """
import granular
from tests.execution.test_workers import transform
def main():
    source = granular.sources.Transform(granular.sources.Epochs(range(100)), transform)
    loader = granular.Loader(source, 8, workers=2, mp='{method}')
    next(loader)
    print('ready', flush=True)
    while {endless}:
        next(loader)
if __name__ == '__main__':
    main()
"""


class Stop(BaseException):
    """What the handler of a signal raises."""


@pytest.mark.filterwarnings('ignore:.*never awaited')  # of coroutines that an interrupt found before their start
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_batches_behind_an_interrupted_one_come_once():
    """A program that catches an interrupt, and leaves out the batch that it did not get, reads all others."""

    def stop(*args):
        raise Stop

    previous = signal.signal(signal.SIGALRM, stop)
    interrupts, wrong, numbers = 0, [], MapDataset.range(100_000).map(lambda i: {'i': i})
    try:
        with granular.Loader(numbers, 1, workers=2, mp='fork', prefetch=4) as loader:
            next(loader)
            while interrupts < 150:
                try:
                    # Again after a second: what is raised where Python collects garbage is lost.
                    signal.setitimer(signal.ITIMER_REAL, 0.0005 + interrupts % 7 * 0.0003, 1)
                    while True:
                        next(loader)
                except Stop:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    interrupts += 1
                position = loader.get_next_index() + 1
                loader.set_next_index(position)
                found = [int(next(loader)['i'][0]) for _ in range(6)]
                if found != list(range(position, position + 6)):
                    wrong.append((position, found))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert wrong == []


@pytest.mark.parametrize(
    ('method', 'how'), [('spawn', 'exit'), ('fork', 'exit'), ('spawn', 'interrupted'), ('fork', 'killed')]
)
def test_no_worker_outlives_the_program(tmp_path, method, how):
    script = tmp_path / 'script.py'
    script.write_text(INTERRUPTIBLE + SCRIPT.format(method=method, endless=how != 'exit'))
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'PYTHONWARNINGS': 'error::ResourceWarning'}
    with program([sys.executable, script], env=environment) as process:
        assert process.stdout.readline() == 'ready\n'
        children = psutil.Process(process.pid).children(recursive=True) if how != 'exit' else []
        if how != 'exit':
            process.send_signal(signal.SIGINT if how == 'interrupted' else signal.SIGKILL)
        _, errors = process.communicate(timeout=250)
        ended, alive = psutil.wait_procs(children, timeout=60)
        assert not alive
    if how == 'exit':
        assert errors == ''
        assert process.returncode == 0
    elif how == 'interrupted':
        assert errors.strip().endswith('KeyboardInterrupt')
        assert 'Exception ignored' not in errors
        assert errors.count('Traceback') == 1


ORPHANS = """
import os, sys, time
import granular

def numbered(i):
    return {'i': i, 'pid': os.getpid()}

if __name__ == '__main__':
    dataset = granular.MapDataset.range(99).map(numbered)
    with granular.Loader(dataset, 1, workers=2, mp=sys.argv[1]) as loader:
        pids = {int(next(loader)['pid'][0]) for _ in range(9)}
        child = os.fork()
        if child:
            print(child, *pids, flush=True)
        time.sleep(250)
"""


@pytest.mark.parametrize('method', ['fork', 'spawn'])
def test_workers_of_a_killed_process_end_although_its_children_live(method, tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(ORPHANS)
    with program([sys.executable, script, method]) as process:
        child, *workers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        process.kill()
        _, alive = psutil.wait_procs(workers, 30)
        assert workers
        assert alive == []
        child.kill()


# A terminal sends Ctrl-C to all processes of a program.
CTRL_C = """
import os, signal, threading, granular

def double(x):
    return 2 * x

def interrupt():
    while not begun.wait(0.02):
        os.killpg(0, signal.SIGINT)

if __name__ == '__main__':
    begun, interrupts = threading.Event(), []
    signal.signal(signal.SIGINT, lambda *_: interrupts.append(1))
    options = granular.grain.MultiprocessingOptions(2, start_method='spawn')
    stream = iter(granular.MapDataset.range(8).map(double).to_iter_dataset().mp_prefetch(options))
    thread = threading.Thread(target=interrupt)
    thread.start()
    elements = [next(stream)]
    begun.set()
    thread.join()
    print(elements + list(stream), len(interrupts) > 2)
"""


def test_interrupts_of_a_terminal_do_not_end_workers_that_start(tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(CTRL_C)
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=250, start_new_session=True,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ('[0, 2, 4, 6, 8, 10, 12, 14] True\n', '')

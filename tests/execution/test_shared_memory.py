"""The memory in which worker processes send items: it is used again, but never while anybody can still see it."""

import functools
import itertools
import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest

import granular
from granular import MapDataset
from granular.grain import MultiprocessingOptions
from tests.support.tables import each_value

pytestmark = pytest.mark.filterwarnings('ignore:.*multi-threaded.*:DeprecationWarning')
METHODS = ('fork', 'forkserver', 'spawn')
SIZES = ((40,), (40, 41, 39), (1, 200, 40, 0, 3), tuple(range(1, 90, 7)))


def expected(i, rows):
    return np.arange(rows * 500, dtype=np.int64) + i * 1_000_003


def datapoint(i, sizes=(40,)):
    rows = sizes[i % len(sizes)]
    return {'i': i, 'x': expected(i, rows).reshape(rows, 500)}


def stream(count, workers, sizes=(40,), method='fork'):
    function = functools.partial(datapoint, sizes=sizes)
    elements = MapDataset.range(count).map(function).to_iter_dataset()
    return elements.mp_prefetch(MultiprocessingOptions(workers, 3, method))


def equal(element, sizes=(40,)):
    rows = sizes[element['i'] % len(sizes)]
    return np.array_equal(element['x'].ravel(), expected(element['i'], rows))


def batches(count, workers=1, prefetch=2):
    """Return a Loader of batches of four datapoints, which all need the same memory."""
    source = granular.sources.Transform(range(4 * count), lambda i, seed: datapoint(i))
    return granular.Loader(source, 4, prefetch=prefetch, workers=workers, mp='fork')


def is_right(batch):
    """Return whether a batch is whole, whichever it is."""
    return all(equal({'i': int(i), 'x': x}) for i, x in zip(batch['i'], batch['x'], strict=True))


class Owned:
    """A function with an array, in which the first process that calls it writes its number."""

    def __init__(self):
        self.owner = np.zeros(1, np.int64)

    def __call__(self, i):
        self.owner[self.owner == 0] = os.getpid()
        return int(self.owner[0]), os.getpid()


class Matrix(np.ndarray):
    """A subclass, whose views have bases of their own."""


# What a program may keep of an array: pairs of what it keeps, and a function that returns the values of that.
KEPT = {
    'the array': lambda x: (x, np.asarray),
    'a slice of a slice': lambda x: (x[1:][::2], lambda kept: kept),
    'one value as an array': lambda x: (x[3, 4:5], lambda kept: kept),
    'another shape and dtype': lambda x: (x.reshape(-1).view(np.uint8)[8:], lambda kept: kept),
    'the transposed array': lambda x: (x.T, lambda kept: kept),
    'a subclass': lambda x: (x.view(Matrix)[2:], np.asarray),
    'a record array': lambda x: (x.view(np.recarray)[2:], np.asarray),
    'a memoryview': lambda x: (memoryview(x)[5:], np.asarray),
    'a memoryview of its base': lambda x: (memoryview(x.base), np.asarray),
    'bytes of a memoryview': lambda x: (memoryview(x).cast('B')[16:800], np.asarray),
    'an iterator': lambda x: (x.flat, lambda kept: kept.base.ravel()),
    'DLPack': lambda x: (np.from_dlpack(x), np.asarray),
    'the interface': lambda x: (np.asarray(Interface(x)), np.asarray),
    'a masked array': lambda x: (np.ma.masked_less(x, 3), lambda kept: kept.data),
    'broadcast': lambda x: (np.broadcast_to(x[:1], (5, x.shape[1])), lambda kept: kept[2]),
    'windows': lambda x: (np.lib.stride_tricks.sliding_window_view(x, 3, axis=0), lambda kept: kept[1:]),
    'ctypes': lambda x: (np.ctypeslib.as_ctypes(x), np.ctypeslib.as_array),
}


class Interface:
    def __init__(self, array):
        self.__array_interface__ = array.__array_interface__
        self.array = array


def test_what_a_program_keeps_of_a_batch_does_not_change():
    kept = []
    with batches(9 * len(KEPT)) as loader:
        for step, batch in enumerate(loader):
            if step % 3 == 0:
                name = list(KEPT)[step // 3 % len(KEPT)]
                held, values = KEPT[name](batch['x'][1])
                kept.append((name, held, values, values(held).copy()))
            del batch
    assert len(kept) == 3 * len(KEPT)
    for name, held, values, before in kept:
        assert np.array_equal(values(held), before), name


@pytest.mark.parametrize(('method', 'sizes'), each_value(itertools.product(METHODS, SIZES)), ids=str)
def test_elements_of_changing_sizes_that_are_kept_at_random_are_right(method, sizes):
    choices = random.Random(str(sizes) + method)
    kept = []
    with iter(stream(600, 2, sizes, method)) as elements:
        for step, element in enumerate(elements):
            assert element['i'] == step
            assert equal(element, sizes)
            if choices.random() < 0.4:
                kept.append(element)
            while kept and choices.random() < 0.35:
                kept.pop(choices.randrange(len(kept)))
            if step == 150:  # what was computed ahead is given back unread
                elements.set_state(elements.get_state())
            assert all(equal(element, sizes) for element in kept[-3:])
            del element
    assert all(equal(element, sizes) for element in kept)


@pytest.mark.parametrize('method', METHODS)
def test_arrays_of_functions_are_those_of_one_process(method):
    function = Owned()
    elements = MapDataset.range(40).map(function).to_iter_dataset()
    found = list(elements.mp_prefetch(MultiprocessingOptions(2, 1, method)))
    assert all(owner == process for owner, process in found)
    assert len(set(found)) == 2
    assert function.owner.tolist() == [0]


def test_more_batches_are_kept_than_there_are_files():
    with batches(200) as loader:
        kept = list(loader)
        assert [int(batch['i'][0]) for batch in kept] == list(range(0, 800, 4))
        assert all(map(is_right, kept))


def loader_of(function):
    source = granular.sources.Transform(range(6000), lambda i, seed: function(i))
    return granular.Loader(source, 4, prefetch=2, workers=1, mp='fork')


def data_loader_of(function):
    source, sampler = MapDataset.range(3000).map(function), granular.grain.samplers.SequentialSampler(3000)
    return granular.grain.DataLoader(data_source=source, sampler=sampler, worker_count=1, worker_buffer_size=2)


def stream_of(function):
    return iter(
        MapDataset.range(3000).map(function).to_iter_dataset().mp_prefetch(MultiprocessingOptions(1, 2, 'fork'))
    )


def file_of(array):
    """Return the number of the file that an array is mapped from."""
    address = array.__array_interface__['data'][0]
    with open('/proc/self/maps', 'rb') as maps:  # line by line: of thousands, the latest come among the first
        for line in maps:
            start, _, stop = line.partition(b' ')[0].partition(b'-')
            if int(start, 16) <= address < int(stop, 16):
                return int(line.split()[4])
    raise AssertionError(f'{address:x} is not mapped')


# A process sends 1,500 batches, or 3,000 elements in some 50 groups.
@pytest.mark.parametrize(('items', 'most'), [(loader_of, 300), (data_loader_of, 35), (stream_of, 35)])
def test_memory_of_items_that_are_gone_is_used_again(items, most):
    found = set()
    opened = items(functools.partial(datapoint, sizes=(5,)))
    with opened if hasattr(opened, '__exit__') else iter(opened) as elements:
        for element in elements:
            time.sleep(0.0003)  # the work of a program between items, in which what it has dropped is given back
            found.add(file_of(element['x']))
            del element
    assert len(found) <= most


def test_child_process_keeps_what_it_had_when_it_was_forked():
    with batches(100, workers=2) as loader:
        kept = {4 * step: next(loader) for step in range(4)}
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            code = 1
            try:
                os.read(reading, 1)  # the parent has read on
                if all(batch['i'][0] == first and is_right(batch) for first, batch in kept.items()):
                    code = 0
            finally:
                os._exit(code)
        kept.clear()
        assert all(map(is_right, loader))
        os.write(writing, b'x')
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.close(reading)
        os.close(writing)


# Other modules register functions for forks, too, and these may take their time: batches are taken meanwhile.
SLOW_FORKS = """
import os, threading, time
os.register_at_fork(before=lambda: time.sleep(PAUSE), after_in_parent=lambda: time.sleep(PAUSE))
PAUSE = 0
import numpy as np
import granular

def number(i, seed):
    return {'x': np.full(20_000, i)}

source = granular.sources.Transform(granular.sources.Epochs(range(4_000)), number)
with granular.Loader(source, 4, prefetch=2, workers=1, mp='fork') as loader:
    taken, ended = [next(loader)], threading.Event()

    def consume():
        while not ended.wait(0.002):
            taken[:] = [next(loader)]

    thread = threading.Thread(target=consume)
    thread.start()
    PAUSE, codes = 0.1, []
    for _ in range(5):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            batch = taken[0]['x']
            before = batch.copy()
            os.read(reading, 1)
            os._exit(not np.array_equal(batch, before))
        taken.clear()
        time.sleep(0.2)  # the parent reads on
        os.write(writing, b'x')
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    ended.set()
    thread.join()
print(codes)
"""

# Sockets that are made then do not block.
TIMEOUT = """
import socket
import numpy as np
import granular

def number(i, seed):
    socket.setdefaulttimeout(5)
    return {'x': np.full(20_000, i)}

socket.setdefaulttimeout(5)
for method in ('fork', 'spawn'):
    if __name__ == '__main__':
        kept, source = [], granular.sources.Transform(range(800), number)
        with granular.Loader(source, 1, prefetch=16, workers=2, mp=method) as loader:
            for i, batch in enumerate(loader):
                assert batch['x'][0, 0] == i
                kept.append(batch)  # so memory is sent for the next ones
                if len(kept) > 40:
                    kept.clear()
        print(i)
"""


@pytest.mark.parametrize(
    ('text', 'output'),
    [(SLOW_FORKS, '[0, 0, 0, 0, 0]\n'), (TIMEOUT, '799\n799\n')],
    ids=['slow forks', 'timeout of sockets'],
)
def test_programs_that_change_how_processes_work_get_their_batches(text, output, tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(text)
    command = [sys.executable, '-W', 'ignore', str(script)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.stdout == output, done.stderr

"""Functions that run in forked children, in a process of their own, as registrations last."""

import subprocess
import sys

import pytest

from tests import ROOT

CODE = """
import os
from granular.aio.runtime.forking import after_fork, each_after_fork

class File:
    pass

def fail():
    raise ValueError('a reset that fails')

after_fork(lambda: print('first', flush=True))
after_fork(fail)

def leave(file):
    print('file', flush=True)
    fail()

files = each_after_fork(leave)
after_fork(lambda: print('last', flush=True))
file, other, dropped = File(), File(), File()
files.update([file, other, dropped])
del dropped
pid = os.fork()
if pid:
    assert os.waitpid(pid, 0)[1] == 0
else:
    os._exit(0)
"""


def test_children_run_all_registered_functions_in_order_though_some_fail():
    done = subprocess.run([sys.executable, '-c', CODE], check=False, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0
    assert done.stdout == 'first\nfile\nfile\nlast\n'
    assert 'a reset that fails' in done.stderr


# Each pipeline has four pools of one process, which start at the same time.
POOLS = """
import os, threading
import granular

forking, overlaps = [], threading.Event()

def begin():
    if forking:
        overlaps.set()
    forking.append(threading.get_ident())
    overlaps.wait(0.05)  # another thread may begin

os.register_at_fork(before=begin, after_in_parent=forking.pop)
stream = granular.MapDataset.range(8).to_iter_dataset()
options = granular.grain.MultiprocessingOptions(4, start_method='fork')
assert sorted(stream.mp_prefetch(options, sequential_slice=True)) == list(range(8))
print('overlaps' if overlaps.is_set() else 'in turn')
"""


def test_worker_processes_are_forked_in_turn():
    done = subprocess.run([sys.executable, '-c', POOLS], check=False, capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stdout) == (0, 'in turn\n'), done.stderr


# Forks wherever a function of the library begins or ends while iterators are made: threads fork at any time.
CONSTRUCTION = """
import os, sys
import granular

folder = os.path.dirname(granular.__file__)
forks = 0

def fork(frame, event, _):
    global forks
    if event in ('call', 'return') and frame.f_code.co_filename.startswith(folder):
        sys.setprofile(None)
        forks += 1
        if not os.fork():
            os._exit(0)
        os.wait()
        sys.setprofile(fork)

dataset = granular.MapDataset.range(8)
sys.setprofile(fork)
stream = iter(dataset.to_iter_dataset())
loader = granular.Loader(granular.sources.Interleave([dataset.map(lambda i: {'i': i})]), 2)
sys.setprofile(None)
assert list(stream) == list(range(8)) and next(loader)['i'].tolist() == [0, 1]
print(forks > 50)
"""

# Forks where a thread has closed the descriptor of a pipe, and another one has opened two files since.
ENDS = """
import multiprocessing.connection, os, sys, threading
import granular

main, codes = os.getpid(), []

def closed(frame, event, function):
    pipes = multiprocessing.connection.__file__
    if event != 'c_return' or function is not os.close or frame.f_code.co_filename != pipes or os.getpid() != main:
        return
    sys.setprofile(None)
    opened = os.pipe()
    if not (child := os.fork()):
        whole = False
        try:
            whole = all(map(os.fstat, opened))
        finally:
            print(whole, flush=True)
            os._exit(0)
    os.waitpid(child, 0)
    for descriptor in opened:
        os.close(descriptor)
    sys.setprofile(closed)

threading.setprofile(closed)
sys.setprofile(closed)
options = granular.grain.MultiprocessingOptions(1, start_method='fork')
with iter(granular.MapDataset.range(8).to_iter_dataset().mp_prefetch(options)) as stream:
    assert list(stream) == list(range(8))
"""


@pytest.mark.parametrize('text', [CONSTRUCTION, ENDS], ids=['construction', 'ends of pipes'])
def test_children_of_forks_at_any_point_reset_what_is_complete(text):
    # From Python 3.12 on, a fork of a process with threads warns.
    command = [sys.executable, '-W', 'ignore::DeprecationWarning', '-c', text]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stderr) == (0, '')
    assert set(done.stdout.splitlines()) == {'True'}


def test_the_registry_is_the_only_hook_of_the_package():
    files = {file for file in (ROOT / 'granular').rglob('*.py') if 'register_at_fork' in file.read_text()}
    assert {file.name for file in files} == {'forking.py'}

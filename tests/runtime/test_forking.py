"""Functions that run in forked children, in a process of their own, as registrations last."""

import subprocess
import sys

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
files = each_after_fork(lambda file: print('file', flush=True))
after_fork(lambda: print('last', flush=True))
file, dropped = File(), File()
files.update([file, dropped])
del dropped
pid = os.fork()
if pid:
    assert os.waitpid(pid, 0)[1] == 0
else:
    os._exit(0)
"""


def test_children_run_all_registered_functions_in_order_though_one_fails():
    done = subprocess.run([sys.executable, '-c', CODE], check=False, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0
    assert done.stdout == 'first\nfile\nlast\n'
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
options = granular.MultiprocessingOptions(4, start_method='fork')
assert sorted(stream.mp_prefetch(options, sequential_slice=True)) == list(range(8))
print('overlaps' if overlaps.is_set() else 'in turn')
"""


def test_worker_processes_are_forked_in_turn():
    done = subprocess.run([sys.executable, '-c', POOLS], check=False, capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stdout) == (0, 'in turn\n'), done.stderr


def test_the_registry_is_the_only_hook_of_the_package():
    files = {file for file in (ROOT / 'granular').rglob('*.py') if 'register_at_fork' in file.read_text()}
    assert {file.name for file in files} == {'forking.py'}

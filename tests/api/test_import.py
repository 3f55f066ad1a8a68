"""`import granular` changes nothing in the program that imports it, and brings only what is used."""

import json

import numpy as np
import pytest

import granular
from tests.support.programs import run_python

# What a program has that an import could change; the C library is watched for calls of mallopt.
WATCH = """
import ctypes, gc, json, logging, os, resource, signal, sys, threading, warnings

class Library(ctypes.CDLL):
    def __getattr__(self, name):
        called.append(name)
        return super().__getattr__(name)

called, ctypes.CDLL = [], Library

def settings():
    signals = {number: str(signal.getsignal(number)) for number in signal.valid_signals()}
    hooks = [sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook, sys.meta_path, sys.path_hooks]
    limits = [resource.getrlimit(name) for name in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_STACK)]
    return json.dumps([
        signals, str(hooks), limits, gc.get_threshold(), gc.isenabled(), sys.getswitchinterval(),
        sys.getrecursionlimit(), str(warnings.filters), str(logging.getLogger().handlers), logging.getLogger().level,
        dict(os.environ), os.getcwd(), threading.active_count(), threading.stack_size(), 'mallopt' in called,
        len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task')),
    ])
"""


def test_import_brings_only_the_errors():
    program = "import sys, granular; print(*(name for name in sys.modules if name.partition('.')[0] == 'granular'))"
    assert set(run_python(program).stdout.split()) == {
        'granular',
        'granular._support',
        'granular._support.lazy',
        'granular.errors',
    }


def test_import_brings_no_heavy_module():
    program = 'import sys; before = set(sys.modules); import granular; print(*set(sys.modules) - before)'
    heavy = {
        'numpy',
        'asyncio',
        'ctypes',
        'ssl',
        'logging',
        'multiprocessing',
        'uvloop',
        'inspect',
        'json',
        'subprocess',
    }
    assert heavy & set(run_python(program).stdout.split()) == set()


@pytest.mark.parametrize('names', ['[]', 'granular.__all__'])
def test_import_changes_no_setting_and_starts_no_thread(names):
    program = f"""
{WATCH}
import numpy, asyncio, concurrent.futures
before = settings()
import granular
for name in {names}:
    getattr(granular, name)
print(json.dumps([before, settings()]))
"""
    before, after = json.loads(run_python(program).stdout)
    assert after == before


@pytest.mark.parametrize(('variable', 'expected'), [(None, True), ('0', False), ('1', True)])
def test_the_first_read_sets_the_allocator_unless_switched_off(tmp_path, monkeypatch, variable, expected):
    monkeypatch.delenv('MALLOC_ARENA_MAX', raising=False)
    if variable is not None:
        monkeypatch.setenv('GRANULAR_KEEP_FREED', variable)
    program = f"""
{WATCH}
import granular
with granular.DatasetWriter({str(tmp_path / 'data')!r}, {{'x': 'int'}}) as writer:
    writer.append({{'x': 1}})
before = 'mallopt' in called
assert granular.DatasetReader({str(tmp_path / 'data')!r}, granular.decoders).fetch([0] * 9) == [{{'x': 1}}] * 9
print(json.dumps([before, 'mallopt' in called]))
"""
    assert json.loads(run_python(program).stdout) == [False, expected]


def test_first_batch_imports_nothing_on_the_event_loop(tmp_path):
    program = """
import functools, http.server, sys, threading
import granular

class Watch:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread().name == 'granular-loop' and not name.startswith('uvloop'):
            print(name)

handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=sys.argv[1])
server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.meta_path.insert(-1, Watch())  # modules from files
with granular.DatasetReader(f'http://127.0.0.1:{server.server_port}', granular.decoders) as reader:
    with granular.Loader(granular.sources.Epochs(reader), 8) as loader:
        print(sorted(next(loader)['y'].tolist()))
"""
    with granular.DatasetWriter(tmp_path / 'data', {'x': 'array', 'y': 'int'}, granular.encoders) as writer:
        for i in range(8):
            writer.append({'x': np.arange(3), 'y': i})
    done = run_python(program, str(tmp_path / 'data'))
    assert done.stdout.splitlines() == [str(list(range(8)))], done.stderr


def test_handlers_of_the_program_at_exit_still_read(tmp_path):
    program = """
import atexit, functools, http.server, sys, threading
import granular

@atexit.register
def read():
    print(path.read_bytes())

handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=sys.argv[1])
server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
path = granular.Path(f'http://127.0.0.1:{server.server_port}/file')
print(path.read_bytes())
"""
    (tmp_path / 'file').write_bytes(b'data')
    done = run_python(program, str(tmp_path))
    assert done.stdout.split() == ["b'data'", "b'data'"], done.stderr

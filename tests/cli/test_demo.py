"""The demo runs as a program, against each store."""

import json
import pathlib
import re
import shutil

import pytest

import granular
from granular import testing
from tests.support.interpreters import Interpreter

# As `python -W error -m granular` does.
PROGRAM = """
import runpy, warnings
warnings.simplefilter('error')
runpy.run_module('granular', run_name='__main__', alter_sys=True)
"""


@pytest.fixture(scope='module')
def demo_interpreter():
    """An interpreter with what the demo imports, which takes seconds."""
    modules = 'aiohttp', 'moto.moto_server.werkzeug_app', 'sklearn.datasets'
    with Interpreter(*modules, options=['-W', 'error']) as interpreter:
        yield interpreter


def demo(interpreter, *arguments):
    """Run the demo, check what it says, and return that."""
    done = interpreter.run(PROGRAM, 'demo', *arguments)
    assert (done.returncode, done.stderr) == (0, '')
    assert 'reading 1,797 datapoints of 4 shards, 2 epochs' in done.stdout
    assert 'restored at step 1792' in done.stdout
    assert 'every datapoint once, in different orders' in done.stdout
    saved, ranges = re.search(r'saved by coalescing\s+([\d,]+) of ([\d,]+)', done.stdout).groups()
    assert 0 < int(saved.replace(',', '')) < int(ranges.replace(',', ''))
    return done.stdout


@pytest.mark.parametrize('store', ['s3', 'gcs'])
def test_demo_reads_each_datapoint_once_per_epoch(demo_interpreter, store):
    demo(demo_interpreter, '--store', store)


def test_demo_keeps_a_readable_dataset(demo_interpreter, granular_cli):
    path = re.search(r'granular info (\S+)', demo(demo_interpreter, '--store', 'local', '--keep'))[1]
    try:
        assert json.loads(granular_cli('info', path, '--json')[1])['datapoints'] == 1797
    finally:
        shutil.rmtree(pathlib.Path(path).parent)


@pytest.mark.parametrize(('scheme', 'server'), [('s3', testing.s3_server), ('gs', testing.gcs_server)])
def test_servers_are_reached_past_a_proxy(scheme, server, monkeypatch):
    for name in ('http_proxy', 'HTTP_PROXY'):
        monkeypatch.setenv(name, 'http://127.0.0.1:1')
    with server() as options:
        bucket = granular.Path(f'{scheme}://past-a-proxy', **options)
        bucket.mkdir()
        (bucket / 'x').write_bytes(b'1')
        assert (bucket / 'x').read_bytes() == b'1'

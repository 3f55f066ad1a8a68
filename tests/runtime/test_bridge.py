import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from granular import aio
from granular.aio.runtime.bridge import run
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.scope import scope
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import map_threads, offload
from granular.errors import GranularError
from tests.support.programs import INTERRUPTIBLE, program


def here():
    return threading.get_ident()


async def stay():
    return here()


async def hop():
    await ensure_event_loop()
    await asyncio.sleep(0)
    return here()


def test_what_never_waits_runs_on_the_callers_thread():
    assert run(stay()) == here()
    other = run(hop())
    assert other != here()
    assert run(hop()) == other


async def test_under_a_running_loop():
    # As in a notebook: the loop of this thread is not ours.
    assert run(stay()) == here()
    assert run(hop()) != here()
    assert asyncio.get_running_loop().is_running()


def test_from_many_threads():
    found = []
    threads = [threading.Thread(target=lambda: found.append(run(hop()))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 20


async def fail(after_hop):
    if after_hop:
        await ensure_event_loop()
        await asyncio.sleep(0)
    raise LookupError('mine')


@pytest.mark.parametrize('after_hop', [False, True])
def test_errors_come_through(after_hop):
    with pytest.raises(LookupError, match='mine'):
        run(fail(after_hop))


async def cleans_up(log):
    await ensure_event_loop()
    try:
        await asyncio.sleep(30)
    finally:
        log.append('cleaned up')


def test_cancelling_reaches_the_coroutine():
    log = []

    async def outer():
        await ensure_event_loop()
        task = asyncio.ensure_future(cleans_up(log))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(outer())
    assert log == ['cleaned up']


def test_a_blocking_call_on_the_librarys_own_loop_says_so():
    async def wrong():
        await ensure_event_loop()
        run(hop())

    with pytest.raises(GranularError, match=r'granular\.aio'):
        run(wrong())


def test_pools_and_gathering():
    async def several():
        await ensure_event_loop()
        assert await offload(here) != here()
        return await gather([hop(), hop()])

    assert len(run(several())) == 2
    assert run(offload(here)) == here()


async def test_calls_that_wait_get_all_of_the_pool():
    assert await map_threads(lambda i: i * i, 1000) == [i * i for i in range(1000)]
    began = time.monotonic()
    seen = set(await map_threads(lambda i: time.sleep(0.1) or here(), 8))
    assert len(seen) >= 7  # the first thread may come to a second one
    assert time.monotonic() - began < 0.7


async def test_the_first_error_ends_what_is_spread():
    called = []

    def call(i):
        called.append(i)
        if i == 3:
            raise LookupError('mine')
        time.sleep(0.001)

    with pytest.raises(LookupError, match='mine'):
        await map_threads(call, 10_000)
    assert len(called) < 100


async def test_the_first_error_ends_the_others():
    log = []
    with pytest.raises(LookupError):
        await gather([cleans_up(log), fail(True)])
    assert log == ['cleaned up']


async def test_resources_are_made_once():
    made = []

    async def make(opened):
        made.append(1)
        await asyncio.sleep(0.01)
        return object()

    opened = await scope()
    assert len({id(x) for x in await asyncio.gather(*(opened.get('key', make) for _ in range(9)))}) == 1
    assert len(made) == 1


async def test_a_resource_that_failed_is_tried_again():
    async def broken(opened):
        raise OSError('not now')

    async def works(opened):
        return 7

    opened = await scope()
    with pytest.raises(OSError, match='not now'):
        await opened.get('key2', broken)
    assert await opened.get('key2', works) == 7


async def test_aclose_closes_sessions(fakegcs):
    place = aio.Path(fakegcs.place())
    await place.write_bytes(b'x')
    await place.read_bytes()
    pool = (await place.store.client()).transport.pool
    assert pool.connections
    await aio.aclose()
    assert not pool.connections
    assert await place.read_bytes() == b'x'


# --- whole processes


# In development mode asyncio warns of callbacks that take long, as any may while the machine is busy.
QUIET = "import logging; logging.getLogger('asyncio').setLevel('ERROR')\n"


def python(code, *args, **kwargs):
    command = [sys.executable, '-X', 'dev', '-W', 'error', '-c', QUIET + textwrap.dedent(code), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, **kwargs)


SETUP = """
import asyncio, os, sys, json
import granular
options = json.loads(sys.argv[2])
place = granular.Path(sys.argv[1], **options)
"""


def arguments(server):
    import json

    place = server.place()
    place.write_bytes(b'content')
    return str(place), json.dumps(server.options)


@pytest.mark.parametrize('server', ['seaweed', 'fakegcs'])
def test_nothing_is_left_at_exit(server, request):
    code = (
        SETUP
        + """
assert place.read_bytes() == b'content'
async def main():
    assert await granular.aio.Path(place).read_bytes() == b'content'
asyncio.run(main())
loader = granular.Loader(granular.sources.Epochs([{'x': 1}] * 9), 3)
next(loader)
"""
    )
    done = python(code, *arguments(request.getfixturevalue(server)))
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


def test_after_fork(fakegcs):
    code = (
        SETUP
        + """
assert place.read_bytes() == b'content'
pid = os.fork()
if not pid:
    ok = place.read_bytes() == b'content'
    os._exit(0 if ok else 3)
assert os.waitpid(pid, 0)[1] == 0
assert place.read_bytes() == b'content'
"""
    )
    done = python(code, *arguments(fakegcs))
    assert (done.returncode, done.stderr) == (0, '')


def test_ctrl_c_ends_a_wait(tmp_path):
    code = """
import asyncio
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.bridge import run
async def wait():
    await ensure_event_loop()
    print('waiting', flush=True)
    try:
        await asyncio.sleep(30)
    finally:
        print('cleaned up', flush=True)
try:
    run(wait())
except KeyboardInterrupt:
    print('interrupted', flush=True)
"""
    with program([sys.executable, '-W', 'error', '-c', INTERRUPTIBLE + code]) as process:
        assert process.stdout.readline() == 'waiting\n'
        began = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert out == 'cleaned up\ninterrupted\n'
    assert (process.returncode, err) == (0, '')
    assert time.monotonic() - began < 10


@pytest.mark.parametrize('uvloop', [True, False])
@pytest.mark.parametrize('what', ['sys.exit(3)', 'signal.default_int_handler()', 'asyncio.get_running_loop().stop()'])
def test_the_loop_outlives_what_callbacks_do(what, uvloop):
    code = f"""
import asyncio, logging, signal, sys
if not {uvloop}:
    sys.modules['uvloop'] = None
logging.getLogger('asyncio').setLevel('CRITICAL')  # it tells of them
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.bridge import bridge, run
def callback():
    {what}
async def call_back():
    await ensure_event_loop()
    asyncio.get_running_loop().call_soon(callback)
    await asyncio.sleep(0.01)
    return asyncio.get_running_loop()
first = run(call_back())
assert run(call_back()) is first is bridge.loop()
"""
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


@pytest.mark.parametrize('uvloop', [True, False])
def test_a_loop_that_cannot_begin_fails_the_call(uvloop):
    code = f"""
import os, resource, sys
if not {uvloop}:
    sys.modules['uvloop'] = None
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.bridge import run
try:
    import uvloop  # now, as there are no descriptors to import it with below
except ImportError:
    import asyncio, selectors
async def hop():
    await ensure_event_loop()
    return 7
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) - 1, limits[1]))
try:
    run(hop())
except OSError as error:
    print(type(error).__name__)
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
assert run(hop()) == 7
"""
    done = python(code)
    assert (done.returncode, done.stdout) == (0, 'OSError\n'), done.stderr


def test_a_loop_that_ended_is_replaced_and_its_calls_fail():
    code = """
import asyncio, sys, threading
sys.modules['uvloop'] = None
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.bridge import bridge, run
from granular.errors import GranularError
threading.excepthook = lambda args: None  # it would tell of the loop's end
async def end():
    await ensure_event_loop()
    loop = asyncio.get_running_loop()
    loop.run_forever = None  # what the bridge goes on with
    loop.stop()
    await asyncio.Event().wait()
async def hop():
    await ensure_event_loop()
    return asyncio.get_running_loop()
first = run(hop())
try:
    run(end())
except GranularError as error:
    assert 'ended before this call was done' in str(error), error
assert run(hop()) is not first
assert run(hop()) is bridge.loop()
"""
    done = python(code)
    assert (done.returncode, done.stdout) == (0, ''), done.stderr


def test_without_uvloop():
    code = """
import sys
sys.modules['uvloop'] = None
import granular
granular.Path('memory://x/y').write_bytes(b'1')
assert granular.Path('memory://x/y').read_bytes() == b'1'
"""
    done = python(code)
    assert (done.returncode, done.stderr) == (0, '')


def test_a_missing_extra_is_named():
    code = """
import sys
sys.modules['botocore'] = sys.modules['google.auth'] = None
import granular
for url, extra in (('s3://b/x', 's3'), ('gs://b/x', 'gcs')):
    try:
        granular.Path(url).read_bytes()
    except granular.errors.MissingExtraError as error:
        assert f'granular-stream[{extra}]' in str(error), error
    else:
        raise SystemExit(3)
"""
    done = python(code)
    assert (done.returncode, done.stderr) == (0, '')

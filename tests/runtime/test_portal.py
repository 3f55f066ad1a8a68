"""The portal between threads and the event loop, and its behaviour in entire programs."""

import asyncio
import signal
import threading
import time

import pytest

from granular import aio
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.loop_resources import scope
from granular.aio.runtime.portal import run
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import map_threads, offload
from granular.errors import ClosedError, GranularError
from tests.support.programs import INTERRUPTIBLE


def current_thread():
    return threading.get_ident()


async def stay_on_thread():
    return current_thread()


async def switch_to_loop():
    await to_loop()
    await asyncio.sleep(0)
    return current_thread()


def test_only_an_immediate_coroutine_without_waits_runs_on_the_thread_of_the_caller():
    assert run(stay_on_thread(), immediate=True) == current_thread()
    other = run(stay_on_thread())
    assert run(switch_to_loop(), immediate=True) == other
    assert other != current_thread()
    assert run(switch_to_loop()) == other


async def test_run_works_under_a_running_loop():
    # As in a notebook, whose loop is not that of the portal.
    assert run(stay_on_thread(), immediate=True) != current_thread()
    assert run(switch_to_loop()) != current_thread()
    assert asyncio.get_running_loop().is_running()


def test_many_threads_share_one_loop():
    thread_ids = []
    threads = [threading.Thread(target=lambda: thread_ids.append(run(switch_to_loop()))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(thread_ids)) == 1
    assert len(thread_ids) == 20


async def fail(after_hop):
    if after_hop:
        await to_loop()
        await asyncio.sleep(0)
    raise LookupError('mine')


@pytest.mark.parametrize('after_hop', [False, True])
def test_errors_propagate(after_hop):
    with pytest.raises(LookupError, match='mine'):
        run(fail(after_hop))


async def cleans_up(log):
    await to_loop()
    log.append('started')
    try:
        await asyncio.sleep(30)
    finally:
        log.append('cleaned up')


def test_cancellation_reaches_the_coroutine():
    log = []

    async def outer():
        await to_loop()
        task = asyncio.ensure_future(cleans_up(log))
        while not log:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(outer())
    assert log == ['started', 'cleaned up']


def test_blocking_call_on_the_background_loop_is_an_error():
    async def wrong():
        await to_loop()
        run(switch_to_loop())

    with pytest.raises(GranularError, match=r'granular\.aio'):
        run(wrong())


def test_offload_and_gather():
    async def several():
        await to_loop()
        assert await offload(current_thread) != current_thread()
        return await gather([switch_to_loop(), switch_to_loop()])

    assert len(run(several())) == 2
    assert run(offload(current_thread), immediate=True) == current_thread()


async def test_blocking_calls_use_the_entire_pool():
    assert await map_threads(lambda i: i * i, 1000) == [i * i for i in range(1000)]
    others = threading.Barrier(7)  # they run at the same time, or none of them ends
    assert len(await map_threads(lambda i: others.wait() if i else time.sleep(0.1), 8)) == 8


async def test_first_error_stops_map_threads():
    called = []

    def call(i):
        called.append(i)
        if i == 3:
            raise LookupError('mine')
        time.sleep(0.001)

    with pytest.raises(LookupError, match='mine'):
        await map_threads(call, 10_000)
    assert len(called) < 100


async def test_first_error_cancels_gathered_tasks():
    log = []
    with pytest.raises(LookupError):
        await gather([cleans_up(log), fail(True)])
    assert log == ['started', 'cleaned up']


async def test_cancellation_of_gathered_tasks_leaves_them_the_time_to_end():
    ended = []

    async def end(steps):
        try:
            await asyncio.sleep(60)
        finally:
            for _ in range(steps):
                await asyncio.sleep(0)
            ended.append(steps)

    task = asyncio.create_task(gather([end(0), end(9)]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # both have begun
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [0, 9]


async def test_concurrent_requests_open_a_resource_once():
    opened_resources = []

    async def make(opened):
        opened_resources.append(1)
        await asyncio.sleep(0)
        return object()

    opened = await scope()
    assert len({id(x) for x in await asyncio.gather(*(opened.get('key', make) for _ in range(9)))}) == 1
    assert len(opened_resources) == 1


async def test_failed_resource_is_opened_again():
    async def broken(opened):
        raise OSError('not now')

    async def works(opened):
        return 7

    opened = await scope()
    with pytest.raises(OSError, match='not now'):
        await opened.get('key2', broken)
    assert await opened.get('key2', works) == 7


async def test_resource_whose_opening_was_cancelled_is_not_there():
    async def never(_):
        await asyncio.Event().wait()

    opened = await scope()
    waiting = asyncio.create_task(opened.get('resource', never))
    await asyncio.sleep(0)
    closing = asyncio.create_task(aio.aclose())
    while not closing.done():
        assert opened.peek('resource') is None
        await asyncio.sleep(0)
    with pytest.raises(ClosedError):
        await waiting


async def test_aclose_closes_connections(fakegcs):
    path = aio.Path(fakegcs.place())
    await path.write_bytes(b'x')
    await path.read_bytes()
    pool = (await path.store.client()).transport.pool
    assert pool.connections
    await aio.aclose()
    assert not pool.connections
    assert await path.read_bytes() == b'x'


async def test_closing_while_a_client_opens_is_no_cancellation(fakegcs):
    async def wait_for_ever(opened):
        await asyncio.Event().wait()

    opened = await scope()
    waiting = [asyncio.create_task(opened.get('key', wait_for_ever)) for _ in range(2)]
    path = aio.Path(fakegcs.place()) / 'file'
    reads = [asyncio.create_task(path.read_bytes()) for _ in range(2)]
    cancelled = asyncio.create_task(opened.get('key', wait_for_ever))
    await asyncio.sleep(0)
    cancelled.cancel()
    await aio.aclose()
    assert [type(error) for error in await asyncio.gather(*waiting, return_exceptions=True)] == [ClosedError] * 2
    assert all(isinstance(error, GranularError) for error in await asyncio.gather(*reads, return_exceptions=True))
    with pytest.raises(asyncio.CancelledError):
        await cancelled


# --- entire programs


@pytest.fixture
def python(interpreter):
    """Run a program in development mode."""
    return interpreter.run


SETUP = """
import asyncio, os, sys, json
import granular
options = json.loads(sys.argv[2])
place = granular.Path(sys.argv[1], **options)
"""


def arguments(server):
    import json

    path = server.place()
    path.write_bytes(b'content')
    return str(path), json.dumps(server.options)


@pytest.mark.parametrize('server', ['seaweed', 'fakegcs'])
def test_program_exits_without_warnings(server, request, python):
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


def test_forked_process_reads_a_bucket(fakegcs, python):
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


def test_keyboard_interrupt_ends_a_wait(interpreter):
    code = """
import asyncio
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.portal import run
async def wait():
    await to_loop()
    print('waiting', flush=True)
    try:
        await asyncio.sleep(3600)
    finally:
        print('cleaned up', flush=True)
try:
    run(wait())
except KeyboardInterrupt:
    print('interrupted', flush=True)
"""
    with interpreter.start(INTERRUPTIBLE + code) as process:
        assert process.stdout.readline() == 'waiting\n'
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert out == 'cleaned up\ninterrupted\n'
    assert (process.returncode, err) == (0, '')


@pytest.mark.parametrize('uvloop', [True, False])
@pytest.mark.parametrize('what', ['sys.exit(3)', 'signal.default_int_handler()', 'asyncio.get_running_loop().stop()'])
def test_loop_survives_callbacks_that_exit_or_stop_it(what, uvloop, python):
    code = f"""
import asyncio, logging, signal, sys
if not {uvloop}:
    sys.modules['uvloop'] = None
logging.getLogger('asyncio').setLevel('CRITICAL')  # it tells of them
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.portal import portal, run
def callback():
    {what}
async def call_back():
    await to_loop()
    asyncio.get_running_loop().call_soon(callback)
    await asyncio.sleep(0.01)
    return asyncio.get_running_loop()
first = run(call_back())
assert run(call_back()) is first is portal.loop()
"""
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


def test_blocking_call_of_an_object_that_is_dropped_while_a_pool_takes_a_call_is_an_error(python):
    code = """
import faulthandler, sys
from concurrent.futures import ThreadPoolExecutor
from granular.aio.runtime.pools import Threads
from granular.aio.runtime.portal import run
from granular.aio.runtime.threads import offload
from granular.errors import GranularError
faulthandler.dump_traceback_later(60, exit=True)
class Dropped:
    def __del__(self):
        try:
            run(offload(int, '7'))
        except GranularError as error:
            print(error)
dropped = [Dropped()]
def drop(frame, event, arg):
    if frame.f_code is ThreadPoolExecutor.submit.__code__:
        dropped.clear()
pool = Threads(1, 'pool')
sys.setprofile(drop)
call = pool.submit(run, offload(int, '7'))
sys.setprofile(None)
print(call.result())
"""
    done = python(code)
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.startswith('a blocking call while this thread passes a call to a pool')
    assert done.stdout.endswith('\n7\n')


def test_call_that_no_thread_could_make_is_not_made_later(python):
    code = """
import resource, threading
from granular.aio.runtime.pools import Threads
from granular.errors import GranularError
pool, called = Threads(1, 'pool'), []
limits, size = resource.getrlimit(resource.RLIMIT_AS), threading.stack_size(1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, limits[1]))
try:
    pool.submit(called.append, 'failed')
except GranularError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, limits)
threading.stack_size(size)
pool.submit(called.append, 'made').result()
print(called)
"""
    done = python(code)
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.startswith('no thread can be started')
    assert done.stdout.endswith("['made']\n")


@pytest.mark.parametrize('uvloop', [True, False])
def test_loop_that_cannot_start_fails_the_call(uvloop, python):
    code = f"""
import os, resource, sys
if not {uvloop}:
    sys.modules['uvloop'] = None
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.portal import run
try:
    import uvloop  # now, as there are no descriptors to import it with below
except ImportError:
    import asyncio, selectors
async def hop():
    await to_loop()
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


def test_ended_loop_is_replaced_and_its_calls_fail(python):
    code = """
import asyncio, sys, threading
sys.modules['uvloop'] = None
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.portal import portal, run
from granular.errors import GranularError
threading.excepthook = lambda args: None  # it would tell of the loop's end
async def end():
    await to_loop()
    loop = asyncio.get_running_loop()
    loop.run_forever = None  # what the portal goes on with
    loop.stop()
    await asyncio.Event().wait()
async def hop():
    await to_loop()
    return asyncio.get_running_loop()
first = run(hop())
try:
    run(end())
except GranularError as error:
    assert 'ended before this call completed' in str(error), error
assert run(hop()) is not first
assert run(hop()) is portal.loop()
"""
    done = python(code)
    assert (done.returncode, done.stdout) == (0, ''), done.stderr


def test_memory_paths_work_without_uvloop(python):
    code = """
import sys
sys.modules['uvloop'] = None
import granular
granular.Path('memory://x/y').write_bytes(b'1')
assert granular.Path('memory://x/y').read_bytes() == b'1'
"""
    done = python(code)
    assert (done.returncode, done.stderr) == (0, '')


def test_missing_extra_is_named(python):
    code = """
import sys
sys.modules['botocore'] = sys.modules['google.auth'] = None
import granular
for url, extra in (('s3://b/x', 's3'), ('gs://b/x', 'gcs')):
    try:
        granular.Path(url).read_bytes()
    except granular.errors.MissingExtraError as error:
        assert 'pip install ' in str(error) and f"[{extra}]'" in str(error), error
    else:
        raise SystemExit(3)
"""
    done = python(code)
    assert (done.returncode, done.stderr) == (0, '')

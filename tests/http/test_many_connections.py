"""More requests in flight than the process may open files, and more stores than there is memory for buffers."""

import subprocess
import sys
import tracemalloc

import pytest

import granular
from tests.support.faults import FaultServer
from tests.support.programs import run_python

PROGRAM = """
import asyncio, resource, sys
import granular

url, limit, concurrency = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


async def use_files():
    while True:
        with open('/dev/null'):
            await asyncio.sleep(0)


async def main():
    path = granular.aio.Path(url, config=granular.IOConfig(concurrency=concurrency, hedge=0))
    user = asyncio.create_task(use_files())
    records = await asyncio.gather(*(path.read_range(10, 26) for _ in range(2 * limit)))
    assert not user.done(), user.exception()
    user.cancel()
    print(len(set(records)), granular.io_stats()['retries'])
    await granular.aio.aclose()


asyncio.run(main())
"""


@pytest.mark.parametrize(('limit', 'concurrency'), [(64, 0), (64, 10_000), (200, 0), (200, 10_000)])
def test_requests_leave_descriptors_to_the_program(limit, concurrency):
    with FaultServer() as server:
        command = [sys.executable, '-c', PROGRAM, f'{server.endpoint}/object', str(limit), str(concurrency)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout, done.returncode) == ('1 0\n', 0), done.stderr
    warned = 'concurrency=10000 needs more open files than `ulimit -n` allows' in done.stderr
    assert warned == bool(concurrency)


MANY_STORES = """
    import resource, sys
    import granular

    url, limit = sys.argv[1], int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    for store in range(2 * limit):  # each keeps a connection for its next request
        assert len(granular.Path(url, headers={'X-Number': str(store)}).read_range(10, 26)) == 16
    files = [open('/dev/null') for _ in range(limit // 4)]
    for file in files:
        file.close()
    print(granular.io_stats()['retries'])
"""


@pytest.mark.parametrize('limit', [64, 128])
def test_idle_connections_of_many_stores_leave_descriptors_to_others(limit):
    with FaultServer() as server:
        done = run_python(MANY_STORES, f'{server.endpoint}/object', str(limit))
    assert (done.stdout, done.stderr, done.returncode) == ('0\n', '', 0)


async def test_stores_of_an_event_loop_share_their_buffers():
    with FaultServer() as server:
        tracemalloc.start()
        try:
            for i in range(40):
                path = granular.aio.Path(f'{server.endpoint}/object', headers={'X-Number': str(i)})
                assert len(await path.read_range(10, 26)) == 16
            assert tracemalloc.get_traced_memory()[0] < 40 * (100 << 10)
        finally:
            tracemalloc.stop()

"""Many range reads in one call: their results, errors and cancellation."""

import asyncio
import gc
import itertools

import pytest

import granular
from granular import aio
from granular.aio.http.download import Download
from granular.errors import NotFoundError, StoreError
from tests.support.faults import DATA, FaultServer

STARTS = list(range(0, 90_000, 300))
STOPS = [start + 200 for start in STARTS]
EXPECTED = [DATA[start:stop] for start, stop in zip(STARTS, STOPS, strict=True)]


class VaryingServer(FaultServer):
    """A server whose replies differ in their headers, so that each has another shape."""

    count = itertools.count()

    def _head(self, asked, status, length, **more):
        number = next(self.count)
        return super()._head(asked, status, length, **{f'X_{number % 40}': str(number)}, **more)


@pytest.fixture
def server():
    with FaultServer() as running:
        yield running


def path_on(server, **options):
    settings = {'max_gap': 0, 'hedge': 0.0, 'backoff': 0.001, 'concurrency': 8, **options}
    return aio.Path(f'{server.endpoint}/object', config=granular.IOConfig(**settings))


async def version_of(path):
    return (await path.stat()).version


async def test_more_ranges_than_may_be_in_flight_come_in_order(server):
    path = path_on(server)
    version = await version_of(path)
    assert await path.read_ranges(STARTS, STOPS, version=version) == EXPECTED
    assert server.connections <= 9
    await aio.aclose()


async def test_redirected_ranges_are_requested_as_ranges(server):
    path = path_on(server)
    version = await version_of(path)
    await path.read_ranges(STARTS[:20], STOPS[:20], version=version)  # it leaves idle connections
    with FaultServer() as other:
        server.script.extend([('redirect', f'{other.endpoint}/object')] * 5)
        assert await path.read_ranges(STARTS[:5], STOPS[:5], version=version) == EXPECTED[:5]
        assert sorted(other.ranges) == sorted(server.ranges[-5:])
    await aio.aclose()


async def test_faults_of_some_ranges_do_not_disturb_the_others(server):
    path = path_on(server)
    version = await version_of(path)
    faults = [('status', 503), 'reset', ('truncate', 50), 'shifted', 'then_close', ('chunked', 30), 'whole']
    server.script.extend(['good' if i % 5 else faults[i // 5 % len(faults)] for i in range(len(STARTS))])
    assert await path.read_ranges(STARTS, STOPS, version=version) == EXPECTED
    assert granular.io_stats()['in_flight'] == 0
    await aio.aclose()


async def test_replies_of_ever_other_shapes_are_read():
    with VaryingServer() as server:
        path = path_on(server)
        version = await version_of(path)
        for _ in range(2):
            assert await path.read_ranges(STARTS, STOPS, version=version) == EXPECTED
        await aio.aclose()


@pytest.mark.parametrize('line', [('status', 404), ('status', 418)])
async def test_the_first_error_ends_the_other_ranges(server, line):
    path = path_on(server)
    version = await version_of(path)
    await path.read_ranges(STARTS[:8], STOPS[:8], version=version)  # opens the connections
    server.script.extend(['hang', 'hang', line, *['hang'] * 10])
    with pytest.raises(NotFoundError if line[1] == 404 else StoreError):
        await asyncio.wait_for(path.read_ranges(STARTS, STOPS, version=version), 30)
    assert granular.io_stats()['in_flight'] == 0
    server.script.clear()
    assert await path.read_ranges(STARTS, STOPS, version=version) == EXPECTED
    await aio.aclose()


async def test_a_call_that_is_cancelled_as_it_fails_leaves_no_unretrieved_error(server):
    path, reported = path_on(server, concurrency=600), []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    version = await version_of(path)
    starts, stops = STARTS * 2, STOPS * 2
    await path.read_ranges(starts, stops, version=version)
    server.script.extend([('status', 404)] * 100_000)
    for steps in range(40):
        task = asyncio.ensure_future(path.read_ranges(starts, stops, version=version))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or isinstance(task.exception(), NotFoundError)
    del task
    gc.collect()
    assert reported == []
    await aio.aclose()


@pytest.mark.parametrize('warm', [True, False])
async def test_a_cancelled_call_gives_back_its_slots(server, warm):
    path = path_on(server)
    version = await version_of(path)
    if warm:
        await path.read_ranges(STARTS[:8], STOPS[:8], version=version)
    for steps in range(6):
        server.script.extend(['hang'] * 8)
        task = asyncio.ensure_future(path.read_ranges(STARTS, STOPS, version=version))
        for _ in range(steps):
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        server.script.clear()
        assert granular.io_stats()['in_flight'] == 0
    assert await asyncio.wait_for(path.read_ranges(STARTS, STOPS, version=version), 30) == EXPECTED
    await aio.aclose()


async def test_cancelling_one_call_leaves_the_others(server):
    path = path_on(server)
    version = await version_of(path)
    calls = [asyncio.ensure_future(path.read_ranges(STARTS, STOPS, version=version)) for _ in range(4)]
    await asyncio.sleep(0.01)
    calls[1].cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [result == EXPECTED for result in results] == [True, False, True, True]
    await aio.aclose()


async def test_a_reply_that_breaks_off_is_resumed(server):
    path = path_on(server, memory=200_000)
    version = await version_of(path)
    await path.read_ranges([0], [10], version=version)
    server.script.append(('truncate', 60_000))
    server.ranges.clear()
    assert await path.read_ranges([0], [90_000], version=version) == [DATA[:90_000]]
    assert server.ranges == ['bytes=0-89999', 'bytes=60000-89999']
    await aio.aclose()


@pytest.mark.parametrize('line', ['reset', ('truncate', 50), 'shifted', ('status', 503)], ids=str)
async def test_memory_of_a_read_that_was_retried_is_freed_with_its_result(server, line):
    path = path_on(server)
    version = await version_of(path)
    await path.read_ranges(STARTS, STOPS, version=version)
    gc.collect()
    gc.disable()  # so that only what no cycle refers to is freed
    try:
        server.script.extend([line, 'good'] * 8)
        assert await path.read_ranges(STARTS, STOPS, version=version) == EXPECTED
        await asyncio.sleep(0)
        assert await asyncio.to_thread(lambda: [o.name for o in gc.get_objects() if type(o) is Download]) == []
    finally:
        gc.enable()
    await aio.aclose()

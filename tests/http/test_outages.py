"""An outage of a whole store is bounded by time, and the failure of one object by attempts."""

import asyncio
import contextlib
import functools
import multiprocessing
import os
import re
import socket
import ssl
import urllib.parse

import pytest

import granular
from granular import aio
from granular.errors import GranularError, StoreError, WorkerError
from granular.grain import MultiprocessingOptions
from tests.support import seams
from tests.support.faults import DATA, FaultServer, md5_etag
from tests.support.outages import (
    DOMAIN,
    KINDS,
    OPERATIONS,
    FailedAttempts,
    OutageProxy,
    Outcome,
    Places,
    named,
    survive,
)

LONG = 15  # failed requests in a row, more than attempts
CONFIG = {'backoff': 0.001, 'backoff_cap': 0.002, 'retry_time': 600, 'hedge': 0}
PATIENT = granular.IOConfig(**CONFIG)
FAULTS = [('status', 500), ('status', 502), ('status', 503, 'SlowDown'), ('status', 504), 'reset']


@pytest.fixture
def server():
    with FaultServer() as server:
        yield server


def path(server, store, name='object', config=PATIENT):
    options = {'key': 'k', 'secret': 's'} if store == 's3' else {'token': 'anon'} if store == 'gs' else {}
    if store == 'http':
        return granular.Path(f'{server.endpoint}/bucket/{name}', config=config)
    return granular.Path(f'{store}://bucket/{name}', endpoint_url=server.endpoint, config=config, **options)


def attempts_of(error):
    return int(re.search(r'gave up after (\d+) attempt', error.__notes__[0])[1])


@pytest.mark.parametrize('store', ['s3', 'gs', 'http'])
@pytest.mark.parametrize('fault', FAULTS, ids=str)
def test_reads_survive_a_store_that_answers_no_request(server, store, fault):
    one = path(server, store)
    assert one.read_range(0, 5) == DATA[:5]
    server.script.extend([fault] * LONG)
    assert one.read_range(5, 10) == DATA[5:10]
    server.script.extend([fault] * LONG)
    assert one.read_ranges([0, 50_000], [10, 50_010]) == [DATA[:10], DATA[50_000:50_010]]


def test_reads_survive_a_store_that_is_silent(server):
    one = path(server, 's3', config=granular.IOConfig(first_byte_timeout=0.1, **CONFIG))
    assert one.read_range(0, 5) == DATA[:5]
    server.script.extend(['hang'] * 25)
    assert one.read_range(5, 10) == DATA[5:10]


@pytest.mark.parametrize('store', ['s3', 'http'])
@pytest.mark.parametrize('fault', [('status', 500), 'reset'], ids=str)
def test_metadata_survives_a_store_that_answers_no_request(server, store, fault):
    one = path(server, store)
    one.read_range(0, 5)
    server.script.extend([fault] * LONG)
    assert one.exists()


def test_outage_ends_with_its_time(server):
    config = granular.IOConfig(**{**CONFIG, 'retry_time': 2})
    one = path(server, 'http', config=config)
    one.read_range(0, 5)
    server.script.extend([('status', 500)] * 100_000)
    with pytest.raises(StoreError, match='status 500') as caught:
        one.read_range(0, 5)
    assert attempts_of(caught.value) > 20
    assert re.search(r'in [23]\.\d s: the store answers no request: check that it and', caught.value.__notes__[0])


def test_warnings_of_an_outage_become_rare(server, caplog):
    caplog.set_level('INFO', 'granular')
    one = path(server, 'http')
    one.read_range(0, 5)
    server.script.extend([('status', 500)] * 2 * LONG)
    assert one.read_range(0, 5) == DATA[:5]
    levels = [record.levelname for record in caplog.records if record.getMessage().startswith('attempt ')]
    assert levels[:3] == ['INFO', 'INFO', 'WARNING'] and levels.count('WARNING') == 1 and len(levels) > LONG


@pytest.mark.parametrize('attempts', [1, 2, 5])
def test_time_alone_bounds_an_outage_however_few_attempts_there_are(server, attempts):
    one = path(server, 'http', config=granular.IOConfig(attempts=attempts, **CONFIG))
    one.read_range(0, 5)
    server.script.extend([('status', 500)] * LONG)
    assert one.read_range(5, 10) == DATA[5:10]
    once = path(server, 'http', config=granular.IOConfig(attempts=attempts, **{**CONFIG, 'retry_time': 0}))
    once.read_range(0, 5)
    server.script.extend([('status', 500)] * LONG)
    with pytest.raises(StoreError):
        once.read_range(0, 5)
    assert len(server.script) >= LONG - 2  # the request, and the question whether the store answers


@pytest.mark.parametrize('store', ['s3', 'gs', 'http'])
@pytest.mark.parametrize('fault', [('status', 500), 'reset'], ids=str)
def test_failure_of_one_object_ends_after_its_attempts(server, store, fault):
    """The store answers others: here only the request by which it is asked whether it does."""
    config = granular.IOConfig(**{**CONFIG, 'attempts': 4})
    path(server, store, 'good', config).read_range(0, 5)
    server.aim = 'bad'
    server.script.extend([fault] * 1000)
    with pytest.raises(StoreError) as caught:
        path(server, store, 'bad', config).read_range(0, 5)
    assert attempts_of(caught.value) == 4
    assert caught.value.of_object


async def test_requests_that_find_no_connection_are_tried_while_others_are_answered(server):
    one = aio.Path(path(server, 'http', config=granular.IOConfig(attempts=2, **CONFIG)))
    await one.read_range(0, 5)
    asyncio.run_coroutine_threadsafe(server.refuse(False), server.loop).result(60)
    server.script.extend([('late', 0.02)] * 10_000)

    async def go_on(until):
        while not until.is_set():
            assert await one.read_range(0, 5) == DATA[:5]

    ended = asyncio.Event()
    with FailedAttempts() as failed:  # of two requests at a time, one has the connection that there is
        reading = asyncio.gather(go_on(ended), go_on(ended))
        await failed.reach('http://127', 6)
        asyncio.run_coroutine_threadsafe(server.listen(None), server.loop).result(60)
        ended.set()
        await reading
    await aio.aclose()


@pytest.mark.parametrize('scheme', ['http', 's3'])
def test_address_that_never_replied_fails_soon(scheme):
    with socket.create_server(('127.0.0.1', 0)) as listener:
        port = listener.getsockname()[1]
    config = granular.IOConfig(connect_timeout=0.5, **{**CONFIG, 'backoff_cap': 0.1})
    options = {'endpoint_url': f'http://127.0.0.1:{port}', 'key': 'k', 'secret': 's'} if scheme == 's3' else {}
    address = 's3://bucket/x' if scheme == 's3' else f'http://127.0.0.1:{port}/x'
    with pytest.raises(StoreError, match='check its address'):
        granular.Path(address, config=config, **options).read_bytes()
    assert (False, '127.0.0.1', port, None) not in seams.replied_servers()


def test_permanent_errors_end_at_once(server):
    one = path(server, 's3')
    one.read_range(0, 5)
    for status, code in ((403, 'AccessDenied'), (404, 'NoSuchBucket')):
        count = len(server.methods)
        server.script.append(('status', status, code))
        with pytest.raises(GranularError):
            one.read_range(0, 5)
        assert len(server.methods) == count + 1


def replied(_):
    return sorted(seams.replied_servers())


@pytest.mark.parametrize('method', ['spawn', 'fork'])
def test_workers_inherit_the_servers_that_have_replied(server, method, monkeypatch):
    path(server, 'http').read_range(0, 5)
    known = replied(None)
    assert known
    monkeypatch.setattr(multiprocessing, 'get_start_method', lambda *args, **kwargs: method)
    dataset = granular.MapDataset.range(2).map(replied).to_iter_dataset()
    options = MultiprocessingOptions(num_workers=1, start_method=method)
    assert set(known) <= set(next(iter(dataset.mp_prefetch(options))))


def read_or_die(url, died, step):
    """Read in one worker, end it, and return in its successor which servers have replied."""
    if step == 0:
        granular.Path(url).read_range(0, 5)
    elif step == 1 and not died.exists():
        died.touch()
        os._exit(1)
    return replied(step)


@pytest.mark.parametrize('method', ['spawn', 'fork'])
def test_successors_of_workers_inherit_the_servers_that_have_replied(server, method, tmp_path):
    port = urllib.parse.urlsplit(server.endpoint).port
    read = functools.partial(read_or_die, f'{server.endpoint}/bucket/object', tmp_path / 'died')
    options = MultiprocessingOptions(num_workers=1, start_method=method)
    with iter(granular.MapDataset.range(3).map(read).to_iter_dataset().mp_prefetch(options)) as steps:
        with pytest.raises(WorkerError):
            list(steps)
        assert (False, '127.0.0.1', port, None) in list(steps)[-1]


class Files:
    """A data source with a file for each element."""

    def __init__(self, files):
        self.files = files

    def __len__(self):
        return len(self.files)

    async def fetch(self, indices):
        return [await aio.Path(self.files[i]).read_range(0, 5) for i in indices]


@pytest.mark.parametrize('store', ['s3', 'gs', 'http'])
@pytest.mark.parametrize('in_function', [False, True])
@pytest.mark.parametrize('fault', [('status', 500), 'reset'], ids=str)
def test_one_bad_object_is_skipped_only_while_the_store_answers_for_others(server, store, in_function, fault):

    def elements(seconds):
        config = granular.IOConfig(**{**CONFIG, 'retry_time': seconds, 'attempts': 4})
        files = [path(server, store, f'{i}', config) for i in range(5)]
        files[0].read_range(0, 5)
        dataset = granular.MapDataset.source(Files(files))
        if in_function:
            dataset = granular.MapDataset.range(5).map(lambda i: files[i].read_range(0, 5))
        server.script.extend([fault] * 100_000)
        return iter(dataset.to_iter_dataset(on_error='skip'))

    server.aim = '3'
    with elements(600) as others:
        assert len(list(others)) == 4
        assert [index for index, _ in others.errors] == [3]
    server.aim = ''
    server.script.clear()
    with elements(0.2) as none, pytest.raises(StoreError):
        list(none)


def test_datasets_are_read_through_an_outage(tmp_path):
    with granular.DatasetWriter(tmp_path / 'd', {'x': 'int'}) as writer:
        for i in range(200):
            writer.append({'x': i})
    files = {f'd/{file.name}': file.read_bytes() for file in (tmp_path / 'd').iterdir()}
    with FaultServer(files=files) as server:
        server.etag_of = md5_etag
        server.modified = {'': 'Fri, 21 Nov 2025 20:00:00 GMT'}
        root = path(server, 's3', 'd')
        with granular.DatasetReader(root, granular.decoders) as reader:
            assert reader[1] == {'x': 1}
            for fault in FAULTS:
                server.script.extend([fault] * LONG)
                with granular.Loader(reader, 20) as loader:
                    assert sum(int(batch['x'].sum()) for _, batch in zip(range(10), loader, strict=False)) == 19900
                server.script.extend([fault] * LONG)
                stream = granular.MapDataset.source(reader).to_iter_dataset()
                assert sum(point['x'] for point in stream) == 19900
        server.script.extend([('status', 500)] * LONG)
        (root / 'x.bag').copy(tmp_path / 'copy')
        assert (tmp_path / 'copy').read_bytes() == files['d/x.bag']
        server.script.extend([('status', 500)] * LONG)
        granular.convert(root, tmp_path / 'converted')
        with granular.open(tmp_path / 'converted') as reader:
            assert len(reader) == 200


@pytest.mark.parametrize('kind', KINDS)
async def test_operations_lose_nothing_while_the_store_is_away(kind, fakegcs, authority, tmp_path):
    """The outage of each operation ends once a request has failed more often than attempts permit."""
    certificate, tls = tmp_path / 'authority.pem', ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.cert_pem.write_to_path(certificate)
    authority.issue_cert(f'*.{DOMAIN}').configure_cert(tls)
    settings, failures = {**CONFIG, 'concurrency': 3, 'backoff_cap': 0.02, 'first_byte_timeout': 60}, 11
    if kind == 'silence':  # a busy machine may not answer in time either, which is no outage
        settings, failures = {**settings, 'first_byte_timeout': 0.3, 'attempts': 10**6}, 4
    with contextlib.ExitStack() as stack:
        proxies = [stack.enter_context(OutageProxy(fakegcs.endpoint, kind, 502, tls)) for _ in OPERATIONS]
        stack.enter_context(named(proxies))
        failed = stack.enter_context(FailedAttempts())

        async def outcome(proxy, operation):
            direct = await asyncio.to_thread(fakegcs.new_bucket)
            options = {**fakegcs.options, 'endpoint_url': proxy.address, 'tls_verify': f'{certificate}'}
            proxied = aio.Path(f'{direct}', config=granular.IOConfig(**settings), **options)
            places = Places(proxied, direct)
            await asyncio.to_thread(places.prepare)
            return await survive(proxy, places, operation, failed.reach(f'{direct}', failures))

        outcomes = await asyncio.gather(*map(outcome, proxies, OPERATIONS))
    assert dict(zip(OPERATIONS, outcomes, strict=True)) == dict.fromkeys(OPERATIONS, Outcome(0, 0))

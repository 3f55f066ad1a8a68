"""Faults of a store during a read: retries, resumption, hedged requests and errors."""

import asyncio
import base64
import dataclasses
import hashlib
import re
import time
import zlib

import google_crc32c
import pytest

import granular
from granular import aio
from granular.errors import (
    AccessDeniedError,
    BadReplyError,
    ClosedError,
    NotFoundError,
    ObjectChangedError,
    OutOfRangeError,
    StoreError,
)
from tests.support.amazon import place_regions
from tests.support.faults import DATA, FaultServer
from tests.support.loop_server import LoopServer
from tests.support.servers import free_ports
from tests.support.tables import cover

# A busy machine takes its time: neither a timeout nor a hedge adds a request to those that are counted.
QUICK = granular.IOConfig(backoff=0.01, read_timeout=3.0, first_byte_timeout=3.0, attempts=4, hedge=0.0)
HASTY = granular.IOConfig(backoff=0.001, backoff_cap=0.002)


@pytest.fixture
def server():
    with FaultServer() as server:
        yield server


def path(server, config=QUICK):
    return granular.Path(f'{server.endpoint}/object', config=config)


@pytest.mark.parametrize('code', [408, 429, 500, 502, 503, 504])
def test_transient_statuses_are_retried(server, code):
    server.script.extend([('status', code)] * (1 if code in (429, 503) else 3))
    before = granular.io_stats()
    assert path(server).read_range(10, 50) == DATA[10:50]
    assert granular.io_stats()['retries'] - before['retries'] == len(server.ranges) - 1
    assert set(server.ranges) == {'bytes=10-49'}


@pytest.mark.parametrize(
    ('code', 'error'),
    [(400, StoreError), (401, AccessDeniedError), (403, AccessDeniedError), (404, NotFoundError),
     (412, ObjectChangedError), (501, StoreError)],
)  # fmt: skip
def test_permanent_statuses_fail_at_once(server, code, error):
    server.script.append(('status', code))
    with pytest.raises(error, match='object') as caught:
        path(server).read_range(10, 50)
    assert len(server.ranges) == 1
    assert f'{code}' in str(caught.value) or code == 412


PATIENT = {'attempts': 10**6, 'retry_time': 10**6, 'backoff': 0.01, 'backoff_cap': 0.02}


@pytest.mark.parametrize(
    ('url', 'message'),
    [('http://127.0.0.1:{}/object', 'no connection to 127.0.0.1:.* (Connection refused): check its address'),
     ('http://no-such-host.invalid:{}/object', "the host name 'no-such-host.invalid' cannot be resolved (.*): ch"),
     ('https://127.0.0.1:{}/object', 'no connection to 127.0.0.1:.* (Connection refused): check its address')],
)  # fmt: skip
def test_server_that_was_never_reached_fails_within_the_time_to_connect(url, message):
    config = granular.IOConfig(connect_timeout=1.0, **PATIENT)
    with pytest.raises(StoreError, match=message.replace('(', r'\(').replace(')', r'\)')) as caught:
        granular.Path(url.format(free_ports(1)[0]), config=config).read_bytes()
    assert 'gave up after' in caught.value.__notes__[0]


class PlainServer(LoopServer):
    async def serve(self, reader, writer):
        await reader.read(1)
        writer.write(b'HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n')
        await writer.drain()


def test_plain_server_that_is_taken_for_one_with_tls_fails_within_the_time_to_connect():
    config = granular.IOConfig(connect_timeout=1.0, **PATIENT)
    without_tls = 'no connection to .*(it answers without TLS|record layer failure)'  # by the version of OpenSSL
    with PlainServer() as plain, pytest.raises(StoreError, match=without_tls):
        granular.Path(f'{plain.endpoint}/object'.replace('http', 'https'), config=config).read_bytes()


def test_server_that_was_reached_keeps_its_patience():
    with FaultServer() as server:
        assert path(server).read_range(10, 50) == DATA[10:50]
        endpoint = server.endpoint
    config = granular.IOConfig(connect_timeout=0.2, **{**PATIENT, 'attempts': 10, 'retry_time': 2})
    with pytest.raises(StoreError) as caught:
        granular.Path(f'{endpoint}/object', config=config).read_bytes()
    assert int(re.search(r'gave up after (\d+) attempts', caught.value.__notes__[0])[1]) > 20
    assert 'check its address' not in str(caught.value)


def path_and_credentials(server, monkeypatch, tmp_path):
    """Return a path whose credentials come from a file, and that file."""
    (tmp_path / 'credentials').write_text('[default]\naws_access_key_id=OLD\naws_secret_access_key=x\n')
    monkeypatch.setenv('AWS_SHARED_CREDENTIALS_FILE', str(tmp_path / 'credentials'))
    return granular.Path('s3://bucket/object', endpoint_url=server.endpoint, config=QUICK), tmp_path / 'credentials'


@pytest.mark.parametrize('code', ['401', 'ExpiredToken'])
def test_expired_credentials_are_refreshed(server, monkeypatch, tmp_path, code):
    remote, file = path_and_credentials(server, monkeypatch, tmp_path)
    assert remote.read_range(0, 10) == DATA[:10]
    file.write_text(file.read_text().replace('OLD', 'NEW'))
    server.script.append(('status', 401) if code == '401' else ('status', 403, code))
    assert remote.read_range(10, 50) == DATA[10:50]
    assert [('OLD' in header, 'NEW' in header) for header in server.authorized] == [(True, False)] * 2 + [(False, True)]


def test_concurrent_readers_refresh_credentials_once(server, monkeypatch, tmp_path):
    from granular.aio.stores.s3.client import S3Client

    remote, _ = path_and_credentials(server, monkeypatch, tmp_path)
    calls = []
    find = S3Client.find_credentials

    async def counted(self):
        calls.append(1)
        return await find(self)

    monkeypatch.setattr(S3Client, 'find_credentials', counted)
    server.script.extend([('status', 401)] * 40)
    starts = list(range(0, 80_000, 2000))
    path = granular.Path(
        str(remote), endpoint_url=server.endpoint, config=granular.IOConfig(max_gap=0, max_request=2000, hedge=0.0)
    )
    assert path.read_ranges(starts, [start + 1000 for start in starts]) == [DATA[s : s + 1000] for s in starts]
    assert len(calls) == 1
    assert len(server.ranges) == 80


class Bytes:
    """The first bytes of a file, each read by a request."""

    def __init__(self, path):
        self.path = aio.Path(path)

    def __len__(self):
        return 100

    async def fetch(self, indices):
        return [{'x': (await self.path.read_range(i, i + 1))[0]} for i in indices]


async def test_loader_that_is_closed_does_not_end_the_refresh_of_credentials_for_others(server, monkeypatch, tmp_path):
    from granular.aio.stores.s3.client import S3Client

    remote, _ = path_and_credentials(server, monkeypatch, tmp_path)
    refused, both_refused, closed = [], asyncio.Event(), asyncio.Event()
    renew, find = S3Client.renew, S3Client.find_credentials

    async def counted(self):
        refused.append(1)
        if len(refused) == 2:
            both_refused.set()
        return await renew(self)

    async def delayed(self):
        await closed.wait()
        return await find(self)

    monkeypatch.setattr(S3Client, 'renew', counted)
    monkeypatch.setattr(S3Client, 'find_credentials', delayed)
    server.script.extend([('status', 401)] * 2)
    loaders = [aio.Loader(Bytes(remote), 1, prefetch=0) for _ in range(2)]
    first, second = (asyncio.create_task(anext(loader)) for loader in loaders)
    await both_refused.wait()
    await loaders[0].aclose()
    closed.set()
    with pytest.raises(ClosedError):
        await first
    assert (await second)['x'].tolist() == [DATA[0]]
    await loaders[1].aclose()


def test_credentials_refused_twice_are_an_error(server, monkeypatch, tmp_path):
    remote, _ = path_and_credentials(server, monkeypatch, tmp_path)
    server.script.extend([('status', 401)] * 2)
    with pytest.raises(AccessDeniedError, match='401') as caught:
        remote.read_range(0, 10)
    assert len(server.ranges) == 2
    assert 'OLD' not in str(caught.value)


def test_attempts_are_bounded(server):
    server.script.extend([('truncate', 1)] * 10)
    with pytest.raises(StoreError, match='after 1 bytes of the body') as caught:
        path(server).read_range(10, 50)
    assert len(server.ranges) == 4
    assert 'gave up after 4 attempts' in caught.value.__notes__[0]


def test_retry_time_is_bounded(server):
    server.script.extend([('status', 500)] * 100)
    config = granular.IOConfig(backoff=0.1, attempts=100, retry_time=0.5)
    with pytest.raises(StoreError, match='500'):
        path(server, config).read_range(10, 50)
    assert len(server.ranges) < 50


@pytest.mark.parametrize('fault', ['hang', 'reset', ('status', 503)])
@pytest.mark.parametrize('read', [lambda path: path.read_range(10, 50), lambda path: len(path.read_bytes())])
def test_time_in_which_the_process_was_stopped_does_not_count(server, read, fault, monkeypatch):
    stopped, monotonic, record = [0.0], time.monotonic, server.record

    def stop_and_record(*args):
        stopped[0] += 1000
        return record(*args)

    server.record = stop_and_record  # called with each request
    monkeypatch.setattr(time, 'monotonic', lambda: monotonic() + stopped[0])
    server.script.extend([fault] * 3)
    config = granular.IOConfig(first_byte_timeout=0.2, backoff=0.01)
    assert read(path(server, config)) in (DATA[10:50], len(DATA))


def test_retry_after_is_respected(server):
    server.script.append(('retry_after', 1))
    began = time.monotonic()
    assert path(server).read_range(10, 50) == DATA[10:50]
    assert time.monotonic() - began >= 1


@pytest.mark.parametrize('fault', ['truncate', 'stall'])
def test_interrupted_body_is_resumed(server, fault):
    server.script.append((fault, 30_000))
    assert path(server).read_range(1000, 91_000) == DATA[1000:91_000]
    assert server.ranges[0] == 'bytes=1000-90999'
    first, last = server.ranges[1].removeprefix('bytes=').split('-')
    assert 1000 < int(first) <= 31_000
    assert last == '90999'


def test_interrupted_suffix_is_resumed(server):
    server.script.append(('truncate', 5000))
    assert path(server).aio.store is not None
    with pytest.raises(granular.errors.CorruptBagError):
        granular.BagReader(path(server))  # its bytes are no bag, but all of them came
    assert any(asked.startswith('bytes=-') for asked in server.ranges)
    assert any(asked.endswith('-99999') and not asked.startswith('bytes=-') for asked in server.ranges)


def test_interrupted_body_without_a_version_is_restarted(server):
    server.etag = None
    server.script.append(('truncate', 30_000))
    assert path(server).read_range(1000, 91_000) == DATA[1000:91_000]
    assert server.ranges == ['bytes=1000-90999'] * 2


def test_pinned_object_that_was_replaced_is_an_error(server):
    assert path(server).read_ranges([0], [10], version='"one"') == [DATA[:10]]
    server.etag = '"two"'
    with pytest.raises(ObjectChangedError, match='replaced'):
        path(server).read_ranges([0], [10], version='"one"')


def test_full_object_in_reply_to_a_range_is_accepted(server):
    server.script.append('whole')
    assert path(server).read_range(1000, 2000) == DATA[1000:2000]
    server.script.append('whole')
    assert path(server).read_range(99_000) == DATA[99_000:]
    server.script.append('whole')
    with pytest.raises(OutOfRangeError, match='100000'):
        path(server).read_range(99_000, 100_001)
    server.script.append('whole')
    assert path(server).read_bytes() == DATA


def test_endless_object_in_reply_to_a_range_is_refused(server):
    head = b'HTTP/1.1 200 X\r\nETag: "one"\r\nTransfer-Encoding: chunked\r\n\r\nfffffff\r\n'
    server.script.extend([('raw', head + bytes((64 << 20) + 10))] * 2)
    patient = dataclasses.replace(QUICK, read_timeout=30.0, first_byte_timeout=30.0, hedge=0.0)
    with pytest.raises(BadReplyError, match='all of its object'):
        path(server, patient).read_range(10, 50)


@pytest.mark.parametrize(
    'fault',
    [('ranged', None), ('ranged', 'bytes 11-50/100000'), ('ranged', 'bytes 10-48/100000'), ('ranged', 'bytes 10-49/*'),
     ('ranged', 'nonsense'), 'long', ('whole', 'gzip')],
    ids=str,
)  # fmt: skip
def test_bad_reply_is_an_error_when_repeated(server, fault):
    server.script.append(fault)
    assert path(server).read_range(10, 50) == DATA[10:50]
    assert len(server.ranges) == 2
    server.script.extend([fault] * 2)
    with pytest.raises(BadReplyError, match='object'):
        path(server).read_range(10, 50)
    assert len(server.ranges) == 4


def open_connections(server):
    (sample,) = (sample for sample in granular.metrics.samples() if sample.name == 'connections')
    return sum(value for (store,), value in sample.values.items() if store == server.endpoint)


def test_connection_closed_while_idle_costs_no_retry(server):
    server.script.append('then_close')
    remote = path(server)
    before = granular.io_stats()['retries']
    assert remote.read_range(10, 50) == DATA[10:50]
    while open_connections(server):
        time.sleep(0.001)
    assert remote.read_range(10, 50) == DATA[10:50]
    assert granular.io_stats()['retries'] == before


def test_range_beyond_the_end_is_an_error(server):
    with pytest.raises(OutOfRangeError, match='99990 to 100010 were requested, but it has 100000'):
        path(server).read_range(99_990, 100_010)


def test_several_faults_among_many_ranges_are_survived(server):
    server.script.extend(['good', 'reset', ('status', 500), ('truncate', 100), 'good', ('ranged', None)])
    starts = list(range(0, 100_000, 10_000))
    config = granular.IOConfig(backoff=0.01, max_gap=0, max_request=4000)
    result = path(server, config).read_ranges(starts, [start + 9000 for start in starts])
    assert result == [DATA[start : start + 9000] for start in starts]


async def test_cancelled_read_leaves_no_task(server):
    import asyncio

    server.script.extend(['hang'] * 5)
    remote = granular.aio.Path(path(server))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(remote.read_ranges([0, 50_000], [10, 50_010]), 0.1)
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
    server.script.clear()
    assert await remote.read_range(5, 9) == DATA[5:9]


# --- slow replies


def test_read_below_min_rate_is_resumed(server):
    server.script.append(('drip', 0.01))
    config = granular.IOConfig(backoff=0.01, read_timeout=0.4, first_byte_timeout=0.4, min_rate=10_000)
    assert path(server, config).read_range(1000, 91_000) == DATA[1000:91_000]
    assert len(server.ranges) == 2
    assert 1000 < int(server.ranges[1].removeprefix('bytes=').split('-')[0]) < 2000


def test_slow_read_is_tolerated_without_min_rate(server):
    server.script.append(('drip', 0.015))
    config = granular.IOConfig(read_timeout=1.0, min_rate=0)
    assert path(server, config).read_range(1000, 1100) == DATA[1000:1100]
    assert len(server.ranges) == 1


SECOND = 0.1  # seconds: latencies are judged over a shorter time than the real one


@pytest.fixture
def warm_path(server, monkeypatch):
    """Return a function that opens a path to a store whose latency is known."""
    monkeypatch.setattr('granular.aio.http.pool.TICK', SECOND)

    def open_path(**settings):
        remote = path(server, granular.IOConfig(**{'backoff': 0.01, 'concurrency': 8, **settings}))
        for at in range(100):
            remote.read_range(at, at + 10)
        time.sleep(1.1 * SECOND)
        remote.read_range(0, 10)
        return remote

    return open_path


def count_hedges(fn):
    before = granular.io_stats()['hedges']
    began = time.monotonic()
    return fn(), granular.io_stats()['hedges'] - before, time.monotonic() - began


def test_slow_reply_is_hedged(server, warm_path):
    remote = warm_path()
    server.script.append(('late', 30))
    result, count, seconds = count_hedges(lambda: remote.read_range(10, 50_000))
    assert result == DATA[10:50_000]
    assert count == 1
    assert seconds < 20
    assert server.ranges[-2:] == ['bytes=10-49999'] * 2
    server.script.extend([('late', 0.4), ('late', 0.01)])  # the one that comes second is not taken for another's
    assert count_hedges(lambda: remote.read_range(60_000, 90_000))[:2] == (DATA[60_000:90_000], 1)
    time.sleep(0.5)
    assert remote.read_range(5, 9) == DATA[5:9]


@pytest.mark.parametrize('late, hedges', [(0, 0), (1, 1), (2, 2), (4, 2)])
def test_slow_reply_to_a_hedge_is_hedged_once_more(server, warm_path, late, hedges):
    remote = warm_path()
    server.script.extend([('late', 1.0)] * late)
    assert count_hedges(lambda: remote.read_range(10, 500))[:2] == (DATA[10:500], hedges)


def test_request_and_its_hedge_may_both_fail(server, warm_path):
    remote = warm_path(attempts=2)
    server.script.extend([('late', 0.3), 'reset', 'reset', 'reset'])
    assert count_hedges(lambda: remote.read_range(10, 500))[0] == DATA[10:500]


def test_hedging_can_be_disabled(server, warm_path):
    remote = warm_path(hedge=0.0)
    server.script.append(('late', 0.5))
    assert count_hedges(lambda: remote.read_range(10, 500))[:2] == (DATA[10:500], 0)


def test_throttled_requests_are_not_hedged(server, warm_path):
    remote = warm_path()
    server.script.extend([('status', 503), ('late', 0.5)])
    assert count_hedges(lambda: remote.read_range(10, 500))[:2] == (DATA[10:500], 0)


def test_hedges_are_bounded(server, warm_path):
    remote = warm_path()
    server.script.extend([('late', 0.3)] * 40)
    starts = list(range(0, 80_000, 2000))
    config = granular.IOConfig(max_gap=0, concurrency=8)
    remote = granular.Path(str(remote), config=config)
    _, count, _ = count_hedges(lambda: remote.read_ranges(starts, [start + 10 for start in starts]))
    assert count <= 5


def test_retry_budget_bounds_retries(server):
    server.script.extend([('status', 500)] * 100_000)
    starts = list(range(0, 100_000, 250))
    config = granular.IOConfig(backoff=0.001, attempts=10, retry_time=2, max_gap=0)
    with pytest.raises(StoreError, match='500'):
        path(server, config).read_ranges(starts, [start + 10 for start in starts])
    # 400 of them, 100 retries that the tokens allow, and those that drip in.
    assert len(server.ranges) < 400 + 100 + 40


# --- recoverable errors


@pytest.fixture
def regions(server, monkeypatch):
    """Two servers as two regions: the bucket is in the second one."""
    with FaultServer() as other:
        place_regions(monkeypatch, {'us-east-1': server, 'eu-west-3': other})
        monkeypatch.delenv('AWS_REGION', raising=False)
        monkeypatch.delenv('AWS_ENDPOINT_URL', raising=False)
        yield server, other


def in_bucket(**options):
    # A name of its own, as the client of a bucket is kept.
    return granular.Path(f's3://b{time.time_ns()}/object', key='AKIAPLANTED', secret='x', config=QUICK, **options)


def test_correct_region_is_looked_up_once(regions):
    wrong, right = regions
    wrong.script.append(('status', 301, 'PermanentRedirect', {'x-amz-bucket-region': 'eu-west-3'}))
    remote = in_bucket()
    assert remote.read_range(10, 50) == DATA[10:50]
    assert remote.read_range(10, 50) == DATA[10:50]
    assert (len(wrong.ranges), len(right.ranges)) == (1, 2)
    assert '/eu-west-3/s3/' in right.authorized[0]
    right.script.append(('status', 301, 'PermanentRedirect', {'x-amz-bucket-region': 'us-east-1'}))
    wrong.script.append(('status', 301, 'PermanentRedirect', {'x-amz-bucket-region': 'eu-west-3'}))
    with pytest.raises(StoreError, match='is in region eu-west-3'):
        remote.read_range(10, 50)


@pytest.mark.parametrize('name', ['evil.example/', 'eu-west-3.evil.example', '', 'us-east-1\tx', '../..'])
def test_invalid_region_is_not_followed(regions, name):
    wrong, right = regions
    wrong.script.extend([('status', 301, 'PermanentRedirect', {'x-amz-bucket-region': name})] * 2)
    with pytest.raises(StoreError, match='301'):
        in_bucket().read_range(10, 50)
    assert not right.ranges


def test_clock_skew_is_corrected_once(server):
    remote = granular.Path('s3://bucket/object', key='A', secret='x', endpoint_url=server.endpoint, config=QUICK)
    skewed = ('status', 403, 'RequestTimeTooSkewed', {'Date': 'Sun, 01 Jan 2034 10:00:00 GMT'})
    server.script.append(skewed)
    assert remote.read_range(10, 50) == DATA[10:50]
    assert not server.dates[0].startswith('2034')
    assert server.dates[1].startswith('20340101T1000')
    assert remote.read_range(10, 50) == DATA[10:50]
    server.script.extend([skewed] * 2)
    with pytest.raises(AccessDeniedError, match='Skewed'):
        remote.read_range(60, 90)


# --- full objects


def reply_with_checksum(header, value, data=DATA[:1000]):
    head = f'HTTP/1.1 200 OK\r\nContent-Length: {len(data)}\r\nETag: x\r\n{header}: {value}\r\n\r\n'
    return ('raw', head.encode() + data)


def base64_of(digest):
    return base64.b64encode(digest).decode()


GOOD = {
    'x-goog-hash': 'crc32c=' + base64_of(google_crc32c.value(DATA[:1000]).to_bytes(4, 'big')),
    'X-Goog-Hash': 'md5=' + base64_of(hashlib.md5(DATA[:1000]).digest()),
    'x-amz-checksum-crc32c': base64_of(google_crc32c.value(DATA[:1000]).to_bytes(4, 'big')),
    'x-amz-checksum-crc32': base64_of(zlib.crc32(DATA[:1000]).to_bytes(4, 'big')),
    'x-amz-checksum-sha256': base64_of(hashlib.sha256(DATA[:1000]).digest()),
    'x-amz-checksum-sha1': base64_of(hashlib.sha1(DATA[:1000]).digest()),
}


@pytest.mark.parametrize('header', GOOD)
def test_full_object_is_compared_with_its_checksum(server, header):
    server.script.append(reply_with_checksum(header, GOOD[header]))
    assert path(server).read_bytes() == DATA[:1000]
    assert server.ranges == [None]
    wrong = reply_with_checksum(header, GOOD[header], DATA[1:1001])
    server.script.extend([wrong, reply_with_checksum(header, GOOD[header])])
    assert path(server).read_bytes() == DATA[:1000]
    server.script.extend([wrong] * 2)
    with pytest.raises(BadReplyError, match='1000 bytes came with .* the store says'):
        path(server).read_bytes()


def test_checksums_of_parts_are_not_compared_with_the_object(server):
    server.script.append(reply_with_checksum('x-amz-checksum-crc32c', 'AAAAAA==-2'))
    assert path(server).read_bytes() == DATA[:1000]
    server.script.append(reply_with_checksum('x-amz-checksum-type', 'COMPOSITE\r\nx-amz-checksum-crc32c: AAAAAA=='))
    assert path(server).read_bytes() == DATA[:1000]


BREAKS = ('reset', ('truncate', 0), ('truncate', 20_000))
STATUSES = (('status', 500), ('status', 408))
BODIES = ('whole', ('chunked', 1000))
UNUSABLE = ('document', 'zipped', 'long', ('until_close', 50))
TWICE = BREAKS + STATUSES + BODIES + UNUSABLE
SECONDS = cover([TWICE], [BREAKS, STATUSES, BODIES, UNUSABLE])


@pytest.mark.parametrize('first', TWICE, ids=str)
def test_two_faults_of_one_read_are_survived(server, first):
    for second in [fault for other, fault in SECONDS if other == first]:
        # A bucket for each, as the retries of one are limited.
        remote = granular.Path(
            f's3://b{time.time_ns()}/object', key='k', secret='x', endpoint_url=server.endpoint, config=HASTY
        )
        for start, stop in ((10, 90_000), (0, None)):
            server.script.extend([first, second])
            try:
                assert remote.read_range(start, stop) == DATA[start:stop], (first, second)
            except BadReplyError:
                assert first in UNUSABLE and second in UNUSABLE
            server.script.clear()


def test_interrupted_full_object_is_resumed(server):
    server.script.append(('truncate', 30_000))
    assert path(server).read_bytes() == DATA
    assert server.ranges[0] is None
    assert server.ranges[1].endswith('-99999')


async def test_pinned_object_without_a_range_that_it_has_is_no_replaced_object(server):
    async with await aio.Path(path(server)).open() as file:
        assert await file.read(10) == DATA[:10]
        server.script.append('unsatisfiable')
        assert await file.read(10) == DATA[10:20]  # asked for once more
        server.script.extend(['unsatisfiable'] * 2)
        with pytest.raises(BadReplyError, match=r'object: status 416 for bytes 20 to 30 of version .*one.*, which has'):
            await file.read(10)


async def test_object_that_is_shorter_than_its_pinned_version_was_replaced(server):
    async with await aio.Path(path(server)).open() as file:
        assert await file.read(10) == DATA[:10]
        server.etag = None
        server.script.extend(['unsatisfiable'] * 2)
        with pytest.raises(
            ObjectChangedError, match='replaced while it was being read: version "one" no longer exists'
        ):
            await file.read(10)


def test_claimed_size_beyond_memory_is_an_error(server):
    for claim in ('9' * 17, '9' * 19):
        server.script.append(('raw', f'HTTP/1.1 200 OK\r\nContent-Length: {claim}\r\nETag: x\r\n\r\nabc'.encode()))
        with pytest.raises(StoreError, match='object: no memory for 9999'):
            path(server).read_bytes()

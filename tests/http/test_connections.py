"""Replies that HTTP/1.1 allows, and replies that it does not."""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import ssl
import threading
import time

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

import granular
from granular.aio.http.connection import Exchange
from granular.aio.http.messages import Chunks, ProtocolError, Target, parse
from granular.errors import BadReplyError, InvalidArgumentError, StoreError, StoreTimeoutError
from tests.support.event_loops import run_on
from tests.support.faults import DATA, FaultServer

# A busy machine takes its time: neither a timeout nor a hedge adds a request to those that are counted.
QUICK = granular.IOConfig(backoff=0.01, read_timeout=3.0, first_byte_timeout=3.0, attempts=4, hedge=0.0)
# With one request before, one request is hedged, and not twice, as soon as replies are known to be quick.
HEDGED_ONCE = granular.IOConfig(hedge=0.6)
QUICK_REPLIES = [0.001] * 100  # seconds
IMPATIENT = granular.IOConfig(backoff=0.01, read_timeout=0.5, first_byte_timeout=0.5, attempts=4)


@pytest.fixture
def server():
    with FaultServer() as server:
        yield server


def path(server, **options):
    return granular.Path(f'{server.endpoint}/object', config=QUICK, **options)


def retries(fn):
    before = granular.io_stats()['retries']
    return fn(), granular.io_stats()['retries'] - before


# --- replies


@pytest.mark.parametrize(
    'line', [('chunked', 7), ('chunked', 5000), ('chunked', 10**6), 'slowly', 'informed', 'until_close'], ids=str
)
def test_every_framing_is_parsed(server, line):
    server.script.extend([line] * 2)
    assert retries(lambda: path(server).read_range(10, 90_010)) == (DATA[10:90_010], 0)
    assert retries(lambda: path(server).read_range(5, 6)) == (DATA[5:6], 0)
    assert retries(lambda: path(server).read_range(7, 9)) == (DATA[7:9], 0)


@pytest.mark.parametrize('line', [('chunked', 7), 'slowly', 'informed', 'good'], ids=str)
def test_connection_is_reused(server, line):
    server.script.extend([line] * 3)
    remote = path(server)
    for at in (10, 200, 99_000):
        assert remote.read_range(at, at + 900) == DATA[at : at + 900]
    assert server.connections == 1


def test_old_idle_connections_are_closed_and_not_used_again(server, monkeypatch):
    monkeypatch.setattr('granular.aio.http.pool.KEEP', 0.0)
    # The server has a label of its own, however many others this process has read from.
    monkeypatch.setattr('granular.metrics.MAX_LABELS', 1 + len(granular.metrics.snapshot().stores))
    for at in (10, 200):
        assert path(server).read_range(at, at + 900) == DATA[at : at + 900]
    assert server.connections == 2
    while granular.metrics.snapshot().stores[server.endpoint].connections:  # a timer closes it, without a request
        time.sleep(0.01)


def test_chunks_that_end_early_are_retried(server):
    server.script.append(('chunked', 100, b'3\r\nabc\r\n0\r\n\r\n'))
    assert path(server).read_range(10, 500) == DATA[10:500]
    assert len(server.ranges) == 2


def test_short_body_until_close_is_resumed(server):
    server.script.append(('until_close', 100))
    assert path(server).read_range(10, 500) == DATA[10:500]
    assert server.ranges == ['bytes=10-499', 'bytes=110-499']


GARBAGE = [
    b'SSH-2.0-OpenSSH_9.2\r\n\r\n',
    b'HTTP/2 200 OK\r\n\r\n',
    b'HTTP/1.1 2x0 OK\r\n\r\n',
    b'HTTP/1.1 206 X\r\nContent-Length: -4\r\n\r\n',
    b'HTTP/1.1 206 X\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcde',
    b'HTTP/1.1 206 X\r\nno colon\r\n\r\n',
    b'HTTP/1.1 206 X\r\nfolded: a\r\n b\r\n\r\n',
    b'HTTP/1.1 206 X\r\nTransfer-Encoding: gzip\r\n\r\n',
    b'x' * 100_000,
]


@pytest.mark.parametrize('data', GARBAGE, ids=lambda data: data[:30].decode())
def test_garbage_in_place_of_a_reply_is_retried_once(server, data):
    server.script.append(('raw', data))
    assert path(server).read_range(10, 50) == DATA[10:50]
    server.script.extend([('raw', data)] * 2)
    with pytest.raises(BadReplyError, match='object'):
        path(server).read_range(10, 50)


@pytest.mark.parametrize('size', [b'x', b'-5', b'f' * 17, b'', b'1' * 5000])
def test_chunks_of_invalid_size_are_bad_replies(server, size):
    head = b'HTTP/1.1 206 X\r\nContent-Range: bytes 10-49/100000\r\nTransfer-Encoding: chunked\r\n\r\n'
    server.script.extend([('raw', head + size + b'\r\nabc')] * 2)
    with pytest.raises(BadReplyError, match='chunk'):
        path(server).read_range(10, 50)


@pytest.mark.parametrize(
    'reply',
    [b'Content-Length: 3\r\n\r\nabc', b'Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n'],
    ids=['length', 'chunks'],
)
def test_unsolicited_bytes_end_the_connection(server, reply):
    server.script.append(('raw', b'HTTP/1.1 206 X\r\nContent-Range: bytes 10-12/100000\r\n' + reply + b'HTTP'))
    remote = path(server)
    assert remote.read_range(10, 13) == b'abc'
    assert remote.read_range(10, 13) == DATA[10:13]
    assert server.connections == 2


def test_bytes_behind_a_reply_of_a_known_head_end_the_connection(server):
    remote = path(server)
    version = remote.stat().version
    for at in (10, 200, 3000):
        server.script.extend(['good', 'surplus'])
        for _ in range(2):
            read = functools.partial(remote.read_ranges, [at], [at + 900], version=version)
            assert retries(read) == ([DATA[at : at + 900]], 0)
    assert server.connections == 3


@pytest.mark.parametrize(
    'head',
    [
        b'HTTP/1.1 206 X\r\nConnection: close\r\nContent-Length: 3',
        b'HTTP/1.1 206 X\r\nConnection: Close, x\r\nContent-Length: 3',
        b'HTTP/1.0 206 X\r\nContent-Length: 3',
    ],
    ids=['close', 'list', 'HTTP/1.0'],
)
def test_connection_that_ends_with_its_reply_is_not_used_again(server, head):
    server.script.append(('raw', head + b'\r\nContent-Range: bytes 10-12/100000\r\n\r\nabc'))
    assert path(server).read_range(10, 13) == b'abc'
    assert retries(lambda: path(server).read_range(10, 13)) == (DATA[10:13], 0)
    assert server.connections == 2


def test_head_that_comes_twice_is_not_that_of_the_next_reply(server):
    head = b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\nETag: x\r\n\r\n'
    server.script.extend([('raw', head), ('raw', head + head + b'abcdefg'), ('raw', head + b'abcdefg')])
    remote = path(server)
    assert remote.stat().size == 7
    assert remote.read_bytes() == b'abcdefg'


def test_head_request_has_no_body(server):
    server.script.append(('raw', b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\nETag: x\r\n\r\n'))
    assert path(server).stat().size == 7
    assert server.methods == ['HEAD']
    assert path(server).read_range(0, 5) == DATA[:5]
    assert server.connections == 1


def test_head_request_with_a_body_ends_the_connection(server):
    server.script.append(('raw', b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\nETag: x\r\n\r\nabcdefg'))
    assert path(server).stat().size == 7
    assert retries(lambda: path(server).read_range(0, 5)) == (DATA[:5], 0)
    assert server.connections == 2


def test_empty_reason_and_http_1_0_are_accepted(server):
    server.script.append(('raw', b'HTTP/1.0 206\r\nContent-Range: bytes 0-2/9\r\nContent-Length: 3\r\n\r\nabc', True))
    assert path(server).read_range(0, 3) == b'abc'


async def pooled(server, config=QUICK):
    """Return the pool of an open client."""
    remote = granular.aio.Path(f'{server.endpoint}/object', config=config)
    await remote.read_range(1, 5)
    return remote, (await remote.store.client()).transport.pool


async def test_connection_lost_before_its_first_request_is_replaced(server, monkeypatch):
    remote, pool = await pooled(server)
    connect, lost = pool.connect, []

    async def unlucky(origin):
        connection = await connect(origin)
        if not lost:
            lost.append(connection)
            connection.transport.abort()
            await asyncio.sleep(0.05)
        return connection

    monkeypatch.setattr(pool, 'connect', unlucky)
    monkeypatch.setattr('granular.aio.http.pool.KEEP', 0.0)  # the idle connection is not used again
    async with asyncio.timeout(60):
        assert await remote.read_range(10, 50) == DATA[10:50]
    assert lost
    await granular.aio.aclose()


async def test_idle_connections_are_watched_after_a_connect(server, monkeypatch):
    remote, pool = await pooled(server, dataclasses.replace(IMPATIENT, retry_time=1.0))
    connect = pool.connect

    async def slowly(origin):
        for connection in list(pool.connections):
            connection.transport.abort()
        await asyncio.sleep(0.3)  # the timer finds nothing to watch, and ends
        return await connect(origin)

    monkeypatch.setattr(pool, 'connect', slowly)
    monkeypatch.setattr('granular.aio.http.pool.KEEP', 0.0)
    server.script.extend(['hang'] * 9)
    async with asyncio.timeout(60):
        with pytest.raises(StoreTimeoutError):
            await remote.read_range(10, 50)
    await granular.aio.aclose()


@pytest.mark.parametrize('turns', range(1, 7))
def test_close_that_is_cancelled_closes_the_connections_to_all_servers(server, turns):
    async def close(servers):
        pools = [(await pooled(each))[1] for each in servers]
        closing = asyncio.create_task(granular.aio.aclose())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        while any(pool.connections for pool in pools):
            await asyncio.sleep(0.01)

    with FaultServer() as other:
        asyncio.run(asyncio.wait_for(close([server, other]), 10))


# --- redirections


def test_redirects_of_web_servers_are_followed(server):
    with FaultServer() as other:
        server.script.append(('redirect', f'{other.endpoint}/elsewhere'))
        remote = path(server, headers={'Authorization': 'Bearer planted', 'X-Mine': 'kept'})
        assert remote.read_range(10, 50) == DATA[10:50]
        assert server.authorized == ['Bearer planted']
        assert other.authorized == ['']
        server.script.append(('redirect', f'{server.endpoint}/elsewhere'))
        assert remote.read_range(10, 50) == DATA[10:50]
        assert server.authorized == ['Bearer planted'] * 3


def test_circular_redirects_are_an_error(server):
    server.script.extend([('redirect', '/object')] * 30)
    with pytest.raises(BadReplyError, match='redirections'):
        path(server).read_range(10, 50)
    assert len(server.ranges) == 20


# --- connections


async def pool_of(server):
    store = granular.aio.Path(path(server)).store
    return (await store.client()).transport.pool, Target.of(f'{server.endpoint}/object', {})


def exchange_of(target, more=''):
    exchange = Exchange()
    exchange.target, exchange.request = target, target.request('GET', more)
    return exchange


@pytest.mark.parametrize('loop', ['asyncio', 'uvloop'])
def test_cancelled_read_does_not_touch_the_next_owner_of_its_connection(server, loop):
    async def main():
        pool, target = await pool_of(server)
        keep, later = pool.keep, []

        def kept(connection):
            # The reply of the first is there, and the second takes the connection before the first hears of its end.
            pool.keep = keep
            keep(connection)
            later.append(asyncio.ensure_future(pool.exchange(exchange_of(target))))
            first.cancel()

        pool.keep = kept
        first = asyncio.ensure_future(pool.exchange(exchange_of(target, 'Range: bytes=0-9\r\n')))
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (await asyncio.wait_for(later[0], 60)).status == 200

    run_on(loop, main)
    assert server.connections == 1


@pytest.mark.parametrize('loop', ['asyncio', 'uvloop'])
def test_connects_of_cancelled_requests_are_dropped(server, loop):
    async def main():
        pool, target = await pool_of(server)
        for ticks in range(12):
            task = asyncio.ensure_future(pool.exchange(exchange_of(target)))
            for _ in range(ticks):
                await asyncio.sleep(0.0002)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        server.hang_up()
        while pool.connections:
            await asyncio.sleep(0.001)

    run_on(loop, main)


@pytest.mark.parametrize('loop', ['asyncio', 'uvloop'])
def test_connection_closed_before_the_request_is_reset(server, loop):
    async def main():
        pool, target = await pool_of(server)
        connection = await pool.connect(target.origin)
        while not server.connections:
            await asyncio.sleep(0.01)
        server.hang_up()
        while not connection.transport.is_closing():
            await asyncio.sleep(0.001)
        exchange = exchange_of(target)
        exchange.future = asyncio.get_running_loop().create_future()
        connection.send(exchange)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(exchange.future, 60)

    run_on(loop, main)


@pytest.mark.parametrize('line', ['hang', ('truncate', 10), ('status', 503)], ids=str)
@pytest.mark.parametrize('pinned', [True, False])
async def test_reads_in_flight_fail_when_their_connections_are_closed(server, line, pinned):
    remote = granular.aio.Path(f'{server.endpoint}/object', config=granular.IOConfig(max_gap=0, backoff=0.01))
    version = (await remote.stat()).version if pinned else None
    await remote.read_ranges([0, 100], [10, 110], version=version)
    server.ranges.clear()
    server.each = [line] * 50
    starts = list(range(0, 90_000, 300))
    read = asyncio.ensure_future(remote.read_ranges(starts, [start + 200 for start in starts], version=version))
    while not server.ranges:
        await asyncio.sleep(0.001)
    await granular.aio.aclose()
    with pytest.raises(StoreError, match='object: the connections of its event loop were closed'):
        await asyncio.wait_for(read, 60)
    assert granular.io_stats()['in_flight'] == 0
    server.each = []
    assert await remote.read_ranges([0, 100], [10, 110], version=version) == [DATA[:10], DATA[100:110]]
    await granular.aio.aclose()


async def test_reads_that_wait_for_an_address_fail_when_the_pool_is_closed(server, monkeypatch):
    loop, asked = asyncio.get_running_loop(), asyncio.Event()

    async def look_up_forever(*args, **options):
        asked.set()
        await loop.create_future()

    monkeypatch.setattr(loop, 'getaddrinfo', look_up_forever, raising=False)
    remote = granular.aio.Path(f'{server.endpoint.replace("127.0.0.1", "localhost")}/object', config=QUICK)
    read = asyncio.ensure_future(remote.read_ranges([0, 100_000], [10, 100_010]))
    await asked.wait()
    await granular.aio.aclose()
    with pytest.raises(StoreError, match='connections of its event loop were closed'):
        await asyncio.wait_for(read, 60)


class HeldServer(FaultServer):
    """A server whose replies wait until they are released."""

    def __init__(self):
        super().__init__()
        self.released = threading.Event()

    async def held(self, writer, request, *line):
        await asyncio.to_thread(self.released.wait, 10)
        await getattr(self, line[0])(writer, request, *line[1:])

    async def then_speak(self, writer, request):
        await self.good(writer, request)
        await asyncio.to_thread(self.released.wait, 10)
        writer.write(b'HTTP')

    async def held_within(self, writer, request):
        writer.write(self._good_head(request, len(request.content)) + request.content[:1000])
        await asyncio.to_thread(self.released.wait, 10)
        writer.write(request.content[1000:])


async def test_request_is_hedged_once_while_a_connection_is_opened_for_it():
    with HeldServer() as server:
        server.script.append(('held', 'good'))
        remote = granular.aio.Path(f'{server.endpoint}/object', config=granular.IOConfig(hedge=1.0))
        pool = (await remote.store.client()).transport.pool
        connect, attempts, opened = pool.connect, [], asyncio.Event()

        async def connect_late(origin):
            attempts.append(origin)
            if len(attempts) > 1:
                await opened.wait()
            return await connect(origin)

        pool.connect = connect_late
        pool.latencies.extend(QUICK_REPLIES)
        read = asyncio.ensure_future(remote.read_range(10, 50))
        while len(attempts) < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        assert len(attempts) == 2
        opened.set()
        server.released.set()
        assert await read == DATA[10:50]
        await granular.aio.aclose()


async def test_connection_on_which_the_server_speaks_unasked_is_closed():
    with HeldServer() as server:
        server.script.append('then_speak')
        remote = granular.aio.Path(f'{server.endpoint}/object')
        pool = (await remote.store.client()).transport.pool
        assert await remote.read_range(10, 50) == DATA[10:50]
        server.released.set()
        async with asyncio.timeout(60):
            while pool.connections:
                await asyncio.sleep(0.001)
        await granular.aio.aclose()


async def test_first_reply_to_a_hedged_request_ends_the_others():
    with HeldServer() as server:
        remote, pool = await pooled(server, HEDGED_ONCE)
        server.script.extend([('held', 'good'), 'held_within'])
        pool.latencies.extend(QUICK_REPLIES)
        read = asyncio.ensure_future(remote.read_range(10, 50_000))
        while not any(connection.begun for connection in pool.connections):
            await asyncio.sleep(0.001)
        assert [connection.exchange is not None for connection in pool.connections] == [True]
        server.released.set()
        assert await read == DATA[10:50_000]
        await granular.aio.aclose()


async def test_hedge_is_not_sent_to_the_server_that_redirected_the_request():
    with HeldServer() as old, HeldServer() as new:
        remote, pool = await pooled(old, HEDGED_ONCE)
        old.script.append(('held', 'redirect', f'{new.endpoint}/object'))
        new.script.append(('held', 'good'))
        pool.latencies.extend(QUICK_REPLIES)
        (waiting,) = pool.connections
        connect, hedging, connected = pool.connect, asyncio.Event(), asyncio.Event()

        async def connect_late(origin):
            connection = await connect(origin)
            if origin == waiting.origin:
                hedging.set()
                await connected.wait()
            return connection

        pool.connect = connect_late
        read = asyncio.ensure_future(remote.read_range(10, 50))
        await hedging.wait()
        old.released.set()
        while not new.ranges:
            await asyncio.sleep(0.001)
        connected.set()
        for _ in range(10):  # turns of the loop, in which the hedge would be sent
            await asyncio.sleep(0)
        assert [connection.exchange is not None for connection in pool.connections].count(True) == 1
        new.released.set()
        assert await read == DATA[10:50]
        await granular.aio.aclose()


# --- TLS


def tls(authority, name):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    return context


@pytest.fixture
def authority(tmp_path, monkeypatch):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / 'authority.pem'))
    monkeypatch.setenv('SSL_CERT_FILE', str(tmp_path / 'authority.pem'))
    return authority


def test_reads_over_tls(authority):
    with FaultServer(tls(authority, '127.0.0.1')) as server:
        config = granular.IOConfig(max_gap=0)
        remote = granular.Path(f'{server.endpoint}/object', config=config)
        starts = list(range(0, 100_000, 10_000))
        assert remote.read_ranges(starts, [s + 9000 for s in starts]) == [DATA[s : s + 9000] for s in starts]
        server.script.extend([('truncate', 3000), 'then_close'])
        assert remote.read_range(0, 50_000) == DATA[:50_000]
        assert remote.read_bytes() == DATA


async def test_reads_over_tls_on_a_standard_loop(authority):
    with FaultServer(tls(authority, '127.0.0.1')) as server:
        remote = granular.aio.Path(f'{server.endpoint}/object')
        starts = list(range(0, 100_000, 20_000))
        assert await remote.read_ranges(starts, [s + 10_000 for s in starts]) == [DATA[s : s + 10_000] for s in starts]
        await granular.aio.aclose()


@pytest.mark.parametrize('loop', ['asyncio', 'uvloop'])
def test_connection_of_a_cancelled_request_leaves_no_socket_over_tls(authority, loop, recwarn):
    async def main():
        pool, target = await pool_of(server)
        opened = pool.opened

        def opened_in_vain(connection):
            opened(connection)
            read.cancel()

        pool.opened = opened_in_vain
        read = asyncio.ensure_future(pool.exchange(exchange_of(target)))
        with pytest.raises(asyncio.CancelledError):
            await read
        assert not pool.connections

    with FaultServer(tls(authority, '127.0.0.1')) as server:
        run_on(loop, main)
        gc.collect()
    assert [str(warning.message) for warning in recwarn if warning.category is ResourceWarning] == []


class PromptServer(FaultServer):
    """A server that says when it has sent a whole object in reply to a range."""

    def __init__(self, tls):
        super().__init__(tls)
        self.sent = threading.Event()

    async def whole(self, writer, request):
        writer.transport.set_write_buffer_limits(0)
        await super().whole(writer, request)
        await writer.drain()
        self.sent.set()


@pytest.mark.parametrize('loop', ['asyncio', 'uvloop'])
def test_rest_of_a_reply_over_tls_is_not_read(authority, loop):
    # A TLS transport that is closed delivers what it has decrypted, before the call that closes it returns.
    errors = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        remote = granular.aio.Path(f'{server.endpoint}/object', config=QUICK)
        version = (await remote.stat()).version
        for _ in range(10):
            server.script.append('whole')
            server.sent.clear()
            read = asyncio.ensure_future(remote.read_ranges([10], [50], version=version))
            while not read.done() and len(server.script):
                await asyncio.sleep(0)
            server.sent.wait(10)  # without the loop, so that it receives everything at once
            assert await asyncio.wait_for(read, 60) == [DATA[10:50]]
        await granular.aio.aclose()

    with PromptServer(tls(authority, '127.0.0.1')) as server:
        run_on(loop, main)
    assert not errors


# --- pure functions


@given(st.binary(max_size=300), st.integers(1, 40), st.lists(st.integers(1, 60), min_size=1))
def test_chunks_are_parsed_however_they_arrive(data, size, cuts):
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    sent = b''.join(b'%X\r\n%b\r\n' % (len(piece), piece) for piece in pieces) + b'0\r\n\r\n'
    chunks, out, at = Chunks(), b'', 0
    while at < len(sent):
        step = cuts[at % len(cuts)]
        assert not chunks.ended
        out += b''.join(chunks.feed(memoryview(sent)[at : at + step]))
        at += step
    assert out == data
    assert chunks.ended


@given(st.binary(max_size=200))
def test_head_is_parsed_or_refused(data):
    with contextlib.suppress(ProtocolError):
        assert 0 <= parse(b'HTTP/1.1 ' + data).status <= 999


@pytest.mark.parametrize(
    ('url', 'host', 'path'),
    [('http://a.b/c?d=e', 'a.b', '/c?d=e'), ('https://[::1]:8443', '[::1]:8443', '/'), ('https://a:443/x', 'a', '/x'),
     ('http://bücher.example/', 'xn--bcher-kva.example', '/')],
)  # fmt: skip
def test_targets_of_urls(url, host, path):
    target = Target.of(url, {})
    assert target.request('GET').startswith(f'GET {path} HTTP/1.1\r\nHost: {host}\r\n'.encode())


def test_user_in_the_url_is_sent_as_basic_authorization():
    assert b'Authorization: Basic dTpwIDE=\r\n' in Target.of('http://u:p%201@host/', {}).request('GET')


@pytest.mark.parametrize('headers', [{'X': 'a\r\nY: b'}, {'X\n': 'a'}, {'X': 'ü'}])
def test_headers_with_line_breaks_are_refused(headers):
    with pytest.raises(InvalidArgumentError, match='characters'):
        Target.of('http://host/', headers)


async def test_exchange_that_is_sent_again_on_its_connection_may_be_hedged(server):
    pool, target = await pool_of(server)
    exchange = exchange_of(target, 'Range: bytes=0-9\r\n')
    await pool.exchange(exchange)
    connection = exchange.first
    server.script.append(('late', 0.2))
    again = asyncio.ensure_future(pool.exchange(exchange))
    await asyncio.sleep(0)
    assert exchange.first is connection
    assert exchange.waits()
    assert (await again).status == 206
    await pool.aclose()

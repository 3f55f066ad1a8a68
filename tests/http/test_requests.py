"""Requests other than range reads: their bodies, replies, retries and timeouts."""

import asyncio
import contextlib
import hashlib

import pytest

import granular
from granular.aio.http.messages import Target
from granular.aio.http.transport import Outgoing, Transport
from granular.errors import BadReplyError, NotFoundError, StoreError, StoreTimeoutError

QUICK = granular.IOConfig(backoff=0.01, read_timeout=0.5, first_byte_timeout=0.5, attempts=3)
OK = b'HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok'


class Server:
    """A server of scripted replies that records request lines and body digests.

    Args:
      reading: read the bodies of requests.
      early: how many requests are answered before their bodies are read.
    """

    def __init__(self, *replies: bytes, reading: bool = True, early: int = 0) -> None:
        self.replies, self.reading, self.early = list(replies), reading, early
        self.requests: list[str] = []
        self.bodies: list[str] = []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, '127.0.0.1', 0)
        self.url = f'http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}'
        self._writers = []
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader, writer):
        self._writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b'\r\n\r\n')).decode()
                self.requests.append(head.partition(' HTTP')[0])
                lengths = [line[16:] for line in head.split('\r\n') if line.startswith('Content-Length: ')]
                if not self.reading:
                    return
                if early := self.early > 0:
                    self.early -= 1
                    await self._reply(writer)
                if lengths:
                    digest, left = hashlib.sha256(), int(lengths[0])
                    while left:
                        chunk = await reader.readexactly(min(left, 1 << 20))
                        digest.update(chunk)
                        left -= len(chunk)
                    self.bodies.append(digest.hexdigest())
                if not early:
                    await self._reply(writer)

    async def _reply(self, writer):
        writer.write(self.replies.pop(0) if self.replies else OK)
        await writer.drain()


@contextlib.asynccontextmanager
async def sender(server):
    """Return a function that sends a request, all of them over the same connections."""

    async def recover(kind, detail):
        return False

    async def call(method='GET', body=b'', path='/object', check=lambda answer: answer.body, **options):
        async def make():
            return Outgoing(Target.of(f'{server.url}{path}', {}), method, body)

        return await transport.call(make, recover, 's3://bucket/object', check, **options)

    transport = Transport(QUICK, 'http://test', 'etag', bucket=True)
    try:
        yield call
    finally:
        await transport.aclose()


async def send(server, *args, **options):
    async with sender(server) as call:
        return await call(*args, **options)


@pytest.mark.parametrize('size', [0, 1, 65_536, 65_537, 20_000_000])
async def test_bodies_arrive_complete(size):
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    async with Server() as server:
        assert await send(server, 'PUT', body) == b'ok'
        assert await send(server, 'PUT', memoryview(body)) == b'ok'
        assert server.bodies == [hashlib.sha256(body).hexdigest()] * 2


@pytest.mark.parametrize('status', [500, 503, 429, 408])
async def test_transient_refusals_are_retried_with_the_full_body(status):
    async with Server(b'HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n' % status) as server:
        assert await send(server, 'PUT', b'data') == b'ok'
        assert server.bodies == [hashlib.sha256(b'data').hexdigest()] * 2


@pytest.mark.parametrize('status', [301, 302, 303, 307, 308])
async def test_redirects_are_not_followed(status):
    async with Server() as other, Server() as server:
        redirect = f'HTTP/1.1 {status} X\r\nLocation: {other.url}/\r\nContent-Length: 0\r\n\r\n'
        server.replies.append(redirect.encode())
        with pytest.raises(StoreError, match=str(status)):
            await send(server, 'PUT', b'data')
        assert other.requests == []


@pytest.mark.parametrize(
    'reply',
    [
        b'HTTP/1.1 200 OK\r\n\r\nhalf of it',
        b'HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n' + b'x' * 20,
        b'HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Encoding: gzip\r\n\r\nok',
        b'HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno',
        b'nonsense\r\n\r\n',
    ],
)
async def test_bad_replies_are_retried_once(reply):
    def check(answer):
        if answer.body != b'ok':
            raise BadReplyError('not what was asked for')
        return answer.body

    async with Server(reply) as server:
        server.replies.append(OK)
        assert await send(server, check=check, limit=10) == b'ok'
        server.replies += [reply, reply]
        with pytest.raises(BadReplyError):
            await send(server, check=check, limit=10)


async def test_expected_statuses_reach_the_check():
    async with Server(b'HTTP/1.1 412 X\r\nContent-Length: 0\r\n\r\n', b'HTTP/1.1 204 X\r\n\r\n') as server:
        assert await send(server, 'PUT', check=lambda answer: answer.head.status, statuses=(200, 412)) == 412
        assert await send(server, 'DELETE', check=lambda answer: answer.head.status, statuses=(204,)) == 204
        server.replies.append(b'HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n')
        with pytest.raises(NotFoundError, match='s3://bucket/object'):
            await send(server)


async def test_servers_that_read_no_body_time_out():
    async with Server(reading=False) as server:
        with pytest.raises(StoreTimeoutError):
            await send(server, 'PUT', bytes(50_000_000))
        assert len(server.requests) == QUICK.attempts


async def test_connection_that_replied_before_it_took_the_body_is_not_used_again():
    body = bytes(20_000_000)
    async with Server(b'HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n', early=1) as server:
        assert await send(server, 'PUT', body) == b'ok'
        assert server.bodies == [hashlib.sha256(body).hexdigest()]


@pytest.mark.parametrize('method', ['PUT', 'POST', 'DELETE'])
async def test_requests_that_are_answered_alike_are_not_sent_twice(method):
    async with Server() as server, sender(server) as call:
        for path in ('/a', '/b', '/a'):
            assert await call(method, path=path) == b'ok'
        assert server.requests == [f'{method} {path}' for path in ('/a', '/b', '/a')]

"""A proxy in front of a real store that fails single requests, before or after the store has carried them out."""

import asyncio
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from tests.support.loop_server import LoopServer

_DOCUMENTS: Final = {
    'html': ('text/html', b'<html><body>Sign in to continue</body></html>'),
    'xml': ('application/xml', b'<?xml version="1.0"?><Error><Code>InternalError</Code><Message>x</Message></Error>'),
    'json': ('application/json', b'{"error": {"code": 503, "message": "Backend Error"}}'),
    'empty': ('text/plain', b''),
}


class Call(NamedTuple):
    """A request as it was received.

    Attributes:
      number: the count of requests before it.
      method: such as ``PUT``.
      path: the path, unquoted.
      query: the arguments.
      headers: names in lower case.
      body: all of it.
    """

    number: int
    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


Plan = Callable[[Call], str]
"""Names the fault of a request, see ``FaultProxy``; '' for none."""


class FaultProxy(LoopServer):
    """A proxy that forwards requests to a store, except for the faults of a plan.

    The faults are words, of which the first may be ``after``: then the store has carried the request out before.

    - ``reset``: the connection ends without a reply.
    - ``hang``: no reply for a minute.
    - ``status 503``: a reply with that status.
    - ``page html``, ``page xml``, ``page json``, ``page empty``: a reply with status 200 that is no answer.
    - ``redirect URL``: a reply with status 307 that names another host.
    - ``half`` (after only): the reply, with half of its body, and the end of the connection.
    - ``cut`` (after only): the reply, with half of its body, framed as if that were all; that to a HEAD as it is.
    - ``dropped``: the body is forwarded without its last byte.
    - ``late``: no reply; the store carries the request out at a call of ``carry_out``, whether or not its client waits.

    Args:
      upstream: the address of the store, ``http://host:port``.
      plan: called with each request, on the proxy's thread. It can be replaced at any time.
    """

    def __init__(self, upstream: str, plan: Plan = lambda call: '') -> None:
        super().__init__()
        parts = urllib.parse.urlsplit(upstream)
        self._host, self._port = parts.hostname or '', parts.port or 80
        self.plan = plan
        self.calls: list[tuple[str, str]] = []
        """Method and path of each request."""
        self.faults: list[str] = []
        """The faults that were done."""
        self.keep_calls = True
        self.count = 0
        self._late, self._carried_out = asyncio.Event(), threading.Event()

    def carry_out(self) -> None:
        """Have the store carry out the late request, of which there must be one."""
        self.loop.call_soon_threadsafe(self._late.set)
        assert self._carried_out.wait(60)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await self._turn(reader, writer):
            await writer.drain()

    async def _turn(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; returns whether the connection goes on."""
        head = await reader.readuntil(b'\r\n\r\n')
        first, *rest = head.decode('latin-1').split('\r\n')
        method, target, _ = first.split(' ')
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(':') for line in rest if line)}
        if headers.get('expect', '').lower() == '100-continue':
            writer.write(b'HTTP/1.1 100 Continue\r\n\r\n')
        body = await _body(reader, headers)
        path, _, query = target.partition('?')
        arguments = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        call = Call(self.count, method, urllib.parse.unquote(path), arguments, headers, body)
        self.count += 1
        if self.keep_calls:
            self.calls.append((method, call.path))
        fault = self.plan(call)
        if fault:
            self.faults.append(fault)
        after, words = fault.startswith('after '), fault.removeprefix('after ').split(' ')
        if words[0] == 'dropped':
            body, words = body[:-1], ['']
        reply = b''
        if words == ['late']:
            await self._late.wait()
        if after or words[0] in ('', 'half', 'cut', 'late'):
            lines = [line for line in rest if line and line.partition(':')[0].lower() not in _FRAMING]
            lines += [f'Content-Length: {len(body)}'] * (bool(body) or method in ('PUT', 'POST'))
            lines.append('Connection: close')
            reply = await self._forward('\r\n'.join([first, *lines, '', '']).encode('latin-1') + body)
        if words == ['late']:
            self._carried_out.set()
        return await _reply(writer, words, reply, method)

    async def _forward(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(request)
            await writer.drain()
            return await reader.read()
        finally:
            writer.close()


_FRAMING: Final = ('content-length', 'transfer-encoding', 'connection', 'expect')


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if headers.get('transfer-encoding', '').lower() != 'chunked':
        return await reader.readexactly(int(headers.get('content-length', 0)))
    body = bytearray()
    while size := int((await reader.readuntil(b'\r\n')).partition(b';')[0], 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    while await reader.readuntil(b'\r\n') != b'\r\n':
        pass
    return bytes(body)


async def _reply(writer: asyncio.StreamWriter, words: list[str], reply: bytes, method: str) -> bool:
    if words == ['cut'] and method == 'HEAD':  # which has no body, and whose length is the object's
        words = ['']
    match words:
        case ['']:
            writer.write(reply)
            await writer.drain()
            return False  # the store's connection was closed, by which some replies end
        case ['half']:
            head, gap, body = reply.partition(b'\r\n\r\n')
            writer.write(head + gap + body[: len(body) // 2])
            return False
        case ['cut']:
            head, gap, body = reply.partition(b'\r\n\r\n')
            lines = [x for x in head.split(b'\r\n') if x.partition(b':')[0].lower().decode() not in _FRAMING]
            body = body[: len(body) // 2]
            writer.write(b'\r\n'.join([*lines, b'Content-Length: %d' % len(body)]) + gap + body)
            return True
        case ['hang']:
            await asyncio.sleep(60)
            return False
        case ['status', code]:
            writer.write(f'HTTP/1.1 {code} Fault\r\nContent-Length: 0\r\n\r\n'.encode())
            return True
        case ['page', kind]:
            mime, page = _DOCUMENTS[kind]
            head = f'HTTP/1.1 200 OK\r\nContent-Type: {mime}\r\nContent-Length: {len(page)}\r\n\r\n'
            writer.write(head.encode() + (b'' if method == 'HEAD' else page))
            return True
        case ['redirect', url]:
            writer.write(f'HTTP/1.1 307 Fault\r\nLocation: {url}\r\nContent-Length: 0\r\n\r\n'.encode())
            return True
    writer.transport.abort()
    return False

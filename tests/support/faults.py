"""A server that answers each request by the next line of its script: every fault of a store, on demand."""

import asyncio
import base64
import collections
import gzip
import hashlib
import json
import ssl
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from granular.formats.checksums import crc32c
from tests.support.loop_server import LoopServer

DATA = bytes(i * 7 % 256 for i in range(100_000))
_OTHER = bytes(255 - i for i in range(256))
# The lines of a script that give an object in a way of their own; an object that is missing is missing.
_GIVING = ('drip', 'whole', 'document', 'ranged', 'shifted', 'long', 'short', 'then_close', 'chunked', 'zipped')
_GIVING += ('before_start', 'until_close', 'slowly', 'slid', 'squeezed', 'partial', 'twice', 'bare', 'half', 'garbled')


class Request(NamedTuple):
    """A request for an object."""

    method: str
    key: str
    range_header: str | None
    google: bool
    data: bytes | None
    number: int = 0

    @property
    def body(self) -> bytes:
        """The full object."""
        return self.data or b''

    @property
    def byte_range(self) -> tuple[int, int]:
        """The requested bytes: start and stop."""
        size = len(self.body)
        if self.range_header is None:
            return 0, size
        left, right = self.range_header.removeprefix('bytes=').split('-')
        if not left:
            return max(0, size - int(right)), size
        return int(left), min(int(right) + 1, size) if right else size

    @property
    def content_range(self) -> str:
        """The Content-Range of the correct reply."""
        start, stop = self.byte_range
        return f'bytes {start}-{stop - 1}/{len(self.body)}'

    @property
    def content(self) -> bytes:
        """The body of the correct reply."""
        return self.body[slice(*self.byte_range)]


def md5_etag(data: bytes) -> str:
    """Return the ETag that S3 gives to an object of one part."""
    return f'"{hashlib.md5(data).hexdigest()}"'


class FaultServer(LoopServer):
    """A server of objects as S3, GCS and the web have them, in any bucket. Requests without a script line succeed.

    A line of the script is the name of a method, or a tuple of it and its arguments.

    Args:
      tls: serve over TLS.
      files: the objects by key, which may have a query; without them there is ``DATA`` at every path.
    """

    def __init__(self, tls: ssl.SSLContext | None = None, files: Mapping[str, bytes] | None = None) -> None:
        super().__init__(tls)
        self.files = files
        self.script: collections.deque[Any] = collections.deque()
        self.aim = ''  # how the keys end whose requests the script is for
        self.ranges: list[str | None] = []
        self.methods: list[str] = []
        self.authorized: list[str] = []
        self.dates: list[str] = []
        self.heads: list[dict[str, str]] = []
        self.targets: list[str] = []
        self.connections = 0
        self.etag: str | None = '"one"'
        self.encoding = ''  # the Content-Encoding that objects are stored with
        self.each: list[Any] = []  # the lines that each object and range meets before it is answered well
        self._number = 0  # of requests, as stores name each in its reply
        self._scripted: collections.Counter[tuple[str, str | None]] = collections.Counter()
        self.etag_of: Callable[[bytes], str] | None = None  # in place of ``etag``, that of an object's content
        self.modified: dict[str, str] = {}  # the Last-Modified header of objects, by key; '' is that of all others
        self.date = ''  # the Date header
        self.renew: Callable[[], object] = int  # called when the credentials of a request are said to have expired
        self._revoked: set[str] = set()
        self.tokens = 0  # that were asked for
        self.tokenless = 0  # of these, how many were answered by the end of the connection

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while True:
            head = (await reader.readuntil(b'\r\n\r\n')).decode()
            first, *rest = head.split('\r\n')
            method, target, _ = first.split(' ')
            lines = {name.lower(): value for name, value in (line.split(': ', 1) for line in rest if line)}
            self.heads.append(dict(line.split(': ', 1) for line in rest if line))
            self.targets.append(target)
            path, _, query = target.partition('?')
            if method == 'POST':
                await reader.readexactly(int(lines['content-length']))
                self.tokens += 1
                if self.tokens <= self.tokenless:
                    writer.transport.abort()
                    return
                token = {'access_token': f'token-{self.tokens}', 'expires_in': 3600}
                _send(writer, 'application/json', json.dumps(token))
            elif self.files is not None and (listed := self._parse_listing(path, query)) is not None:
                self._list(writer, *listed)
            else:
                request = self.parse(method, path, lines)
                if self.files is not None and (key := f'{request.key}?{query}') in self.files:
                    request = request._replace(key=key, data=self.files[key])
                await self._answer(writer, lines, request)
            await writer.drain()

    async def _answer(self, writer: asyncio.StreamWriter, lines: Mapping[str, str], request: Request) -> None:
        self.record(request, lines)
        self._number += 1
        request = request._replace(number=self._number)
        credential = _credential(lines)
        if credential in self._revoked:
            await self.status(writer, request, 403, 'ExpiredToken')
            return
        line = self.next_line() if request.key.endswith(self.aim) else 'good'
        count = self._scripted[request.key, request.range_header]
        if count < len(self.each):
            line, self._scripted[request.key, request.range_header] = self.each[count], count + 1
        name, *args = (line,) if isinstance(line, str) else line
        if name == 'expire':
            self._revoked.add(credential)
            self.renew()
            name, args = 'status', [401] if request.google else [403, 'ExpiredToken']
        if request.data is None and name in _GIVING:
            name, args = 'good', []
        await getattr(self, name)(writer, request, *args)

    def record(self, request: Request, lines: Mapping[str, str]) -> None:
        """Record a request."""
        self.methods.append(request.method)
        self.ranges.append(request.range_header)
        self.authorized.append(lines.get('authorization', ''))
        self.dates.append(lines.get('x-amz-date', ''))

    def next_line(self) -> Any:
        """Return the script line for the next request."""
        return self.script.popleft() if self.script else 'good'

    def parse(self, method: str, path: str, lines: Mapping[str, str]) -> Request:
        google = '/storage/v1/b/' in path
        key = path.partition('/o/')[2] if google else path.lstrip('/').partition('/')[2]
        key = urllib.parse.unquote(key)
        data = DATA if self.files is None else self.files.get(key)
        return Request(method, key, lines.get('range'), google, data)

    # --- listings

    def _parse_listing(self, path: str, query: str) -> tuple[bool, str, str] | None:
        """Return whether a listing is of GCS, its prefix and delimiter; None for other requests."""
        arguments = dict(urllib.parse.parse_qsl(query))
        google = path.startswith('/storage/v1/b/') and path.endswith('/o')
        return (
            (google, arguments.get('prefix', ''), arguments.get('delimiter', ''))
            if google or 'list-type' in arguments
            else None
        )

    def _list(self, writer: asyncio.StreamWriter, google: bool, prefix: str, delimiter: str) -> None:
        objects, folders = {}, {}
        for key, data in sorted((self.files or {}).items()):
            if key.startswith(prefix):
                before, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, '', '')
                if found:
                    folders[prefix + before + found] = 1
                else:
                    objects[key] = len(data)
        if google:
            items = [{'name': key, 'size': str(size), 'generation': '1'} for key, size in objects.items()]
            page = {'kind': 'storage#objects', 'items': items, 'prefixes': list(folders)}
            _send(writer, 'application/json', json.dumps(page))
            return
        body = '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><IsTruncated>false</IsTruncated>'
        body += ''.join(f'<Contents><Key>{key}</Key><Size>{size}</Size></Contents>' for key, size in objects.items())
        body += ''.join(f'<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>' for folder in folders)
        body += '</ListBucketResult>'
        _send(writer, 'application/xml', body)

    def _head(self, request: Request, status: int, length: int | None, **more: str) -> bytes:
        lines = [f'HTTP/1.1 {status} X'] + ([] if length is None else [f'Content-Length: {length}'])
        etag = self.etag if self.etag_of is None or status not in (200, 206) else self.etag_of(request.body)
        if etag:
            lines += [f'X-Goog-Generation: {etag}'] if request.google else [f'ETag: {etag}']
        if modified := self.modified.get(request.key, self.modified.get('')):
            lines.append(f'Last-Modified: {modified}')
        if self.date:
            lines.append(f'Date: {self.date}')
        lines.append(f'X-Request-Id: {request.number}')
        if self.encoding and request.google:
            lines.append(f'X-Goog-Stored-Content-Encoding: {self.encoding}')
        if self.encoding and 'Content_Encoding' not in more:
            lines.append(f'Content-Encoding: {self.encoding}')
        if request.google:
            digest = base64.b64encode(crc32c(request.body).to_bytes(4, 'big')).decode()
            lines.append(f'X-Goog-Hash: crc32c={digest}')
        lines += [f'{key.replace("_", "-")}: {value}' for key, value in more.items()]
        return '\r\n'.join([*lines, '', '']).encode()

    def _good_head(self, request: Request, length: int | None = None, **more: str) -> bytes:
        """Return the head of a correct reply."""
        if request.range_header is None:
            return self._head(request, 200, length, **more)
        return self._head(request, 206, length, Content_Range=request.content_range, **more)

    # --- the lines of a script

    async def good(self, writer: asyncio.StreamWriter, request: Request, cut: int | None = None) -> None:
        if request.data is None:
            await self.status(writer, request, 404, 'NoSuchKey')
        elif request.range_header is not None and not request.content:
            await self.unsatisfiable(writer, request, f'bytes */{len(request.data)}')
        else:
            body = b'' if request.method == 'HEAD' else request.content[:cut]
            writer.write(self._good_head(request, len(request.content)) + body)

    async def surplus(self, writer: asyncio.StreamWriter, request: Request) -> None:
        """A correct reply, and bytes behind it."""
        writer.write(self._good_head(request, len(request.content)) + request.content + b'HTTP')

    async def status(
        self,
        writer: asyncio.StreamWriter,
        request: Request,
        code: int,
        code_name: str = 'Scripted',
        more: Mapping[str, str] = {},
    ) -> None:
        body = f'<Error><Code>{code_name}</Code></Error>'.encode()
        writer.write(self._head(request, code, len(body), **more) + body)

    async def retry_after(self, writer: asyncio.StreamWriter, request: Request, seconds: int) -> None:
        await self.status(writer, request, 503, 'Scripted', {'Retry-After': str(seconds)})

    async def unsatisfiable(
        self, writer: asyncio.StreamWriter, request: Request, content_range: str | None = None
    ) -> None:
        await self.status(
            writer, request, 416, 'InvalidRange', {'Content-Range': content_range} if content_range else {}
        )

    async def reset(self, writer: asyncio.StreamWriter, request: Request) -> None:
        writer.transport.abort()

    async def hang(self, writer: asyncio.StreamWriter, request: Request) -> None:
        await asyncio.sleep(60)

    async def truncate(self, writer: asyncio.StreamWriter, request: Request, after: int | None = None) -> None:
        await self.good(writer, request, after)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()

    then_reset = truncate

    async def stall(self, writer: asyncio.StreamWriter, request: Request, after: int) -> None:
        await self.good(writer, request, after)
        await writer.drain()
        await asyncio.sleep(60)

    async def late(self, writer: asyncio.StreamWriter, request: Request, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.good(writer, request)

    async def drip(self, writer: asyncio.StreamWriter, request: Request, pause: float) -> None:
        writer.write(self._good_head(request, len(request.content)))
        for i in range(len(request.content)):
            writer.write(request.content[i : i + 1])
            await writer.drain()
            await asyncio.sleep(pause)

    async def whole(self, writer: asyncio.StreamWriter, request: Request, encoding: str = '') -> None:
        more = {'Content_Encoding': encoding} if encoding else {}
        writer.write(self._head(request, 200, len(request.body), **more) + request.body)

    async def document(self, writer: asyncio.StreamWriter, request: Request) -> None:
        """An error document in a reply of success, as long as the requested range."""
        body = b'<?xml version="1.0"?><Error><Code>InternalError</Code></Error>'.ljust(len(request.content))
        writer.write(f'HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n'.encode() + body)

    async def ranged(self, writer: asyncio.StreamWriter, request: Request, content_range: str | None) -> None:
        more = {} if content_range is None else {'Content_Range': content_range}
        writer.write(self._head(request, 206, len(request.content), **more) + request.content)

    async def before_start(self, writer: asyncio.StreamWriter, request: Request, more: int = 0) -> None:
        """The reply of Google's storage-testbench: an end that is longer than the object begins before it.

        Args:
          more: bytes by which the figures of the reply differ.
        """
        size = len(request.body)
        if not (request.range_header or '').startswith('bytes=-'):
            await self.good(writer, request)
            return
        start = size + int(request.range_header.removeprefix('bytes='))
        await self.ranged(writer, request, f'bytes {start + more}-{size - 1}/{size}')

    async def shifted(self, writer: asyncio.StreamWriter, request: Request) -> None:
        """Another range than requested, with a matching Content-Range."""
        start, stop = request.byte_range
        await self.ranged(writer, request, f'bytes {start + 1}-{stop}/{len(request.body)}')

    async def long(self, writer: asyncio.StreamWriter, request: Request) -> None:
        # Of an object that comes whole, nothing but its length says how long it is.
        more = 10 if request.range_header else 0
        writer.write(self._good_head(request, len(request.content) + more) + request.content + b'0123456789')

    async def short(self, writer: asyncio.StreamWriter, request: Request) -> None:
        """Fewer bytes than requested; only the length tells."""
        half = len(request.content) // 2
        writer.write(
            self._good_head(request, half if request.range_header else len(request.content)) + request.content[:half]
        )
        if request.range_header is None:
            await writer.drain()
            writer.close()

    async def then_close(self, writer: asyncio.StreamWriter, request: Request, connection: str = '') -> None:
        more = {'Connection': connection} if connection else {}
        writer.write(self._good_head(request, len(request.content), **more) + request.content)
        await writer.drain()
        writer.close()

    async def replaced(self, writer: asyncio.StreamWriter, request: Request) -> None:
        """Replace each object, from now on, by another one of the same size."""
        self.etag = '"two"'
        if self.files is not None:
            self.files = {key: data.translate(_OTHER) for key, data in self.files.items()}
            request = request._replace(data=self.files.get(request.key))
        await self.good(writer, request)

    async def garbled(self, writer: asyncio.StreamWriter, request: Request) -> None:
        """Wrong bytes under a correct head."""
        writer.write(self._good_head(request, len(request.content)) + request.content.translate(_OTHER))

    async def chunked(self, writer: asyncio.StreamWriter, request: Request, size: int, end: bytes = b'') -> None:
        writer.write(self._good_head(request, Transfer_Encoding='chunked'))
        for at in range(0, len(request.content), size):
            chunk = request.content[at : at + size]
            writer.write(b'%x;a=b\r\n%b\r\n' % (len(chunk), chunk))
        writer.write(end or b'0\r\nTrailer: x\r\n\r\n')

    async def zipped(self, writer: asyncio.StreamWriter, request: Request) -> None:
        """The requested bytes, compressed in transit."""
        body = gzip.compress(request.content)
        head = self._good_head(request, Transfer_Encoding='chunked', Content_Encoding='gzip')
        writer.write(head + b'%x\r\n%b\r\n0\r\n\r\n' % (len(body), body))

    async def until_close(self, writer: asyncio.StreamWriter, request: Request, length: int | None = None) -> None:
        writer.write(self._good_head(request) + request.content[:length])
        await writer.drain()
        writer.close()

    async def slowly(self, writer: asyncio.StreamWriter, request: Request) -> None:
        head = self._good_head(request, len(request.content))
        for i in range(len(head)):
            writer.write(head[i : i + 1])
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(request.content)

    async def raw(self, writer: asyncio.StreamWriter, request: Request, data: bytes, close: bool = False) -> None:
        writer.write(data)
        await writer.drain()
        if close:
            writer.close()

    async def informed(self, writer: asyncio.StreamWriter, request: Request) -> None:
        writer.write(b'HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n')
        await self.good(writer, request)

    async def slid(self, writer: asyncio.StreamWriter, request: Request) -> None:
        """The requested number of bytes from another position, under a correct head."""
        writer.write(self._good_head(request, len(request.content)) + request.content[1:] + request.content[:1])

    async def squeezed(self, writer: asyncio.StreamWriter, request: Request) -> None:
        """The requested bytes, compressed in transit to exactly as many bytes where possible."""
        body = gzip.compress(request.content)
        if 2 <= len(request.content) - len(body) < 60_000:
            extra = len(request.content) - len(body) - 2
            body = body[:3] + bytes([4]) + body[4:10] + extra.to_bytes(2, 'little') + bytes(extra) + body[10:]
            assert gzip.decompress(body) == request.content
        writer.write(self._good_head(request, len(body), Content_Encoding='gzip') + body)

    async def partial(self, writer: asyncio.StreamWriter, request: Request) -> None:
        """A part of an object in reply to a request for all of it."""
        if request.range_header is not None:
            await self.good(writer, request)
            return
        size = len(request.body)
        head = self._head(request, 206, size - 1, Content_Range=f'bytes 0-{size - 2}/{size}')
        writer.write(head + request.body[:-1])

    async def twice(self, writer: asyncio.StreamWriter, request: Request, pause: float = 0.0) -> None:
        """Two replies to one request; the second after a pause."""
        for _ in range(2):
            await self.good(writer, request)
            await writer.drain()
            await asyncio.sleep(pause)

    async def bare(self, writer: asyncio.StreamWriter, request: Request) -> None:
        """A head whose lines end in line feeds alone."""
        writer.write(self._good_head(request, len(request.content)).replace(b'\r\n', b'\n') + request.content)

    async def half(self, writer: asyncio.StreamWriter, request: Request) -> None:
        """The connection breaks after half of the requested bytes."""
        if len(request.content) < 2:
            await self.good(writer, request)
        else:
            await self.truncate(writer, request, len(request.content) // 2)

    async def redirect(self, writer: asyncio.StreamWriter, request: Request, location: str) -> None:
        writer.write(self._head(request, 307, 0, Location=location))


def _credential(lines: Mapping[str, str]) -> str:
    """Return the token, or the key of the signature."""
    return lines.get('authorization', '').partition('/')[0]


def _send(writer: asyncio.StreamWriter, kind: str, body: str) -> None:
    head = f'HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n'
    writer.write((head + body).encode())

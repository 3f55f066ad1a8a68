"""A proxy in front of an S3 server that forwards requests, except for planned faults."""

import asyncio
import collections
import datetime
import email.utils
import hashlib
import http.client
import re
import urllib.parse
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tests.support.loop_server import LoopServer, read_head

_HTML = b'<html><head><title>Welcome</title></head><body>Please log in.</body></html>'
_ERROR = b'<?xml version="1.0"?><Error><Code>InternalError</Code><Message>We failed</Message></Error>'
_EXPIRED = b'<?xml version="1.0"?><Error><Code>ExpiredToken</Code></Error>'
_SKEWED = b'<?xml version="1.0"?><Error><Code>RequestTimeTooSkewed</Code></Error>'
_MOVED = b'<?xml version="1.0"?><Error><Code>PermanentRedirect</Code></Error>'
_TOKEN = re.compile(rb'<NextContinuationToken>([^<]*)</NextContinuationToken>')


class Request(NamedTuple):
    """A request. ``kind`` is its S3 operation."""

    kind: str
    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def credential(self) -> str:
        """The key and the region that signed it."""
        return self.headers.get('authorization', '').partition(',')[0]


class Answer(NamedTuple):
    """A reply."""

    status: int
    headers: dict[str, str]
    body: bytes


def kind_of(method: str, target: str, headers: dict[str, str]) -> str:
    """Return the S3 operation of a request."""
    path, _, query = target.partition('?')
    names = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    in_bucket = path.strip('/').count('/') == 0
    match method:
        case 'GET' if 'list-type' in names:
            return 'list'
        case 'GET' if 'uploads' in names:
            return 'uploads'
        case 'GET' if 'uploadId' in names:
            return 'parts'
        case 'PUT' if 'partNumber' in names:
            return 'copy_part' if 'x-amz-copy-source' in headers else 'part'
        case 'PUT' if 'x-amz-copy-source' in headers:
            return 'copy'
        case 'PUT' if in_bucket:
            return 'bucket'
        case 'POST' if 'uploads' in names:
            return 'begin'
        case 'POST' if 'uploadId' in names:
            return 'join'
        case 'POST' if 'delete' in names:
            return 'deletes'
        case 'DELETE' if 'uploadId' in names:
            return 'abort'
    return method.lower()


class S3Proxy(LoopServer):
    """A proxy that forwards each request to the upstream server, unless a fault is planned for its kind.

    A fault is the name of a method, or a tuple of it and its arguments.

    Args:
      behind: the address of the server, which checks no signatures if faults change what is sent.
      page: the keys that a page of a listing has at most; 0 for as many as the server gives.
    """

    def __init__(self, upstream: str, page: int = 0) -> None:
        super().__init__()
        parts = urllib.parse.urlsplit(upstream)
        self._host, self._port, self._page = parts.hostname or '', parts.port, page
        self._once: dict[str, collections.deque[Any]] = {}
        self._stays: dict[str, Any] = {}
        self.kinds: list[str] = []  # the kinds of the requests
        self.requests: list[Request] = []
        self.opaque_etags = False  # whether ETags are no MD5s
        self.no_etags = False  # whether HEAD and GET say none
        self.aged = False  # whether objects are said to be a year old
        self.clock = datetime.timedelta()  # how far the server's is ahead
        self.region = ''  # where the bucket is, if elsewhere
        self.revoked: set[str] = set()
        self.renew: Callable[[], object] = int
        self._first_pages: dict[str, bytes] = {}
        self._real_etags: dict[str, str] = {}  # the server's ETags by the odd ones

    def plan(self, kind: str, faults: Iterable[Any] = (), stays: Any = 'good') -> None:
        """Plan faults for the next requests of a kind, and one for all following requests."""
        self._once[kind], self._stays[kind] = collections.deque(faults), stays

    def clear(self) -> None:
        """Forget all planned faults."""
        self._once.clear()
        self._stays.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            method, target, headers = await read_head(reader)
            body = await reader.readexactly(int(headers.get('content-length', 0)))
            request = Request(kind_of(method, target, headers), method, target, headers, body)
            self.kinds.append(request.kind)
            self.requests.append(request)
            answer = self._refusal(request) or await self._carry_out(request)
            if answer is None:
                writer.transport.abort()
                return
            writer.write(_written(request, answer))
            await writer.drain()

    async def _carry_out(self, request: Request) -> Answer | None:
        once = self._once.get(request.kind)
        line = once.popleft() if once else self._stays.get(request.kind, 'good')
        name, *args = (line,) if isinstance(line, str) else line
        answer: Answer | None = await getattr(self, name)(request, *args)
        return answer

    def _refusal(self, request: Request) -> Answer | None:
        """Refuse a request until the client corrects its credentials, clock or region."""
        if request.credential in self.revoked:
            return Answer(400 if request.method == 'HEAD' else 403, {}, _EXPIRED)
        now = datetime.datetime.now(datetime.UTC) + self.clock
        date = request.headers.get('x-amz-date')
        if date and abs((now - datetime.datetime.fromisoformat(date)).total_seconds()) > 900:
            return Answer(403, {'Date': email.utils.format_datetime(now, usegmt=True)}, _SKEWED)
        if self.region:
            return Answer(301, {'x-amz-bucket-region': self.region}, _MOVED)
        return None

    # --- the upstream server

    async def forward(self, request: Request) -> Answer:
        """Return the reply of the upstream server."""
        request = self._edited(request)
        answer = await asyncio.get_running_loop().run_in_executor(None, self._send, request)
        headers = dict(answer.headers)
        body = answer.body
        if self.no_etags and request.kind in ('head', 'get'):
            headers.pop('etag', None)
        if self.aged and 'last-modified' in headers:
            headers['last-modified'] = 'Fri, 21 Nov 2025 20:00:00 GMT'
        if self.opaque_etags:
            if 'etag' in headers:
                headers['etag'] = self._opaque(headers['etag'])
            body = re.sub(rb'"[0-9a-f]{32}(-\d+)?"|&quot;[0-9a-f]{32}(-\d+)?&quot;', self._opaque_bytes, body)
        return Answer(answer.status, headers, body)

    def _edited(self, request: Request) -> Request:
        if request.kind == 'list' and self._page:
            limit = '' if 'max-keys' in request.target else f'&max-keys={self._page}'
            request = request._replace(target=request.target + limit)
        if self.opaque_etags:
            body, headers = request.body, dict(request.headers)
            for opaque, real in self._real_etags.items():
                if request.kind == 'join':
                    body = body.replace(opaque.strip('"').encode(), real.strip('"').encode())
                headers = {name: value.replace(opaque, real) for name, value in headers.items()}
            request = request._replace(body=body, headers=headers | {'content-length': str(len(body))})
        return request

    def _send(self, request: Request) -> Answer:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=30)
        try:
            connection.request(request.method, request.target, request.body or None, request.headers)
            reply = connection.getresponse()
            headers = {
                k.lower(): v for k, v in reply.getheaders() if k.lower() not in ('connection', 'transfer-encoding')
            }
            return Answer(reply.status, headers, reply.read())
        finally:
            connection.close()

    def _opaque(self, etag: str) -> str:
        opaque = f'"{hashlib.sha256(etag.encode()).hexdigest()[:32]}"'
        self._real_etags[opaque] = etag
        return opaque

    def _opaque_bytes(self, match: re.Match[bytes]) -> bytes:
        mark = '"' if match[0].startswith(b'"') else '&quot;'
        return self._opaque(match[0].decode().replace(mark, '"')).replace('"', mark).encode()

    # --- faults

    async def good(self, request: Request) -> Answer | None:
        return await self.forward(request)

    async def empty(self, request: Request) -> Answer | None:
        return Answer(200, {}, b'')

    async def html(self, request: Request) -> Answer | None:
        return Answer(200, {'Content-Type': 'text/html'}, _HTML)

    async def error(self, request: Request, code: str = 'InternalError') -> Answer | None:
        """An error document in a reply of success."""
        return Answer(200, {'Content-Type': 'application/xml'}, _ERROR.replace(b'InternalError', code.encode()))

    async def undeleted(self, request: Request, code: str) -> Answer | None:
        """A deletion of many objects that left the last one."""
        keys = re.findall(rb'<Key>([^<]*)</Key>', request.body)
        results = [b'<Deleted><Key>%b</Key></Deleted>' % key for key in keys[:-1]]
        results.append(b'<Error><Key>%b</Key><Code>%b</Code></Error>' % (keys[-1], code.encode()))
        return Answer(200, {'Content-Type': 'application/xml'}, b'<DeleteResult>%b</DeleteResult>' % b''.join(results))

    async def late_error(self, request: Request) -> Answer | None:
        """The same, after the request was carried out."""
        await self.forward(request)
        return Answer(200, {'Content-Type': 'application/xml'}, _ERROR)

    async def lost_html(self, request: Request) -> Answer | None:
        """A page of HTML, after the request was carried out."""
        await self.forward(request)
        return Answer(200, {'Content-Type': 'text/html'}, _HTML)

    async def cut(self, request: Request) -> Answer | None:
        """Half of the document, with a matching length."""
        answer = await self.forward(request)
        return answer._replace(body=answer.body[: len(answer.body) // 2])

    async def redirect(self, request: Request, location: str) -> Answer | None:
        return Answer(307, {'Location': location + request.target}, b'')

    async def lost(self, request: Request) -> Answer | None:
        """The connection ends before the reply, after the request was carried out."""
        await self.forward(request)
        return None

    async def reset(self, request: Request) -> Answer | None:
        return None

    async def hang(self, request: Request) -> Answer | None:
        await asyncio.sleep(60)
        return None

    async def status(self, request: Request, code: int, body: bytes = b'') -> Answer | None:
        return Answer(code, {}, body)

    async def first_page(self, request: Request) -> Answer | None:
        """The first page of a listing, in reply to each request for a page."""
        listing = re.sub('&continuation-token=[^&]*', '', request.target)
        if 'continuation-token' not in request.target:
            answer = await self.forward(request)
            self._first_pages[listing] = answer.body
            return answer
        return Answer(200, {'Content-Type': 'application/xml'}, self._first_pages[listing])

    async def same_token(self, request: Request) -> Answer | None:
        """A page whose next token is the token of its request."""
        answer = await self.forward(request)
        if match := re.search('continuation-token=([^&]*)', request.target):
            again = urllib.parse.unquote(match[1]).encode()
            answer = answer._replace(
                body=_TOKEN.sub(b'<NextContinuationToken>%b</NextContinuationToken>' % again, answer.body)
            )
        return answer

    async def circles(self, request: Request) -> Answer | None:
        """A page of unfinished uploads whose successor is one of two."""
        names = dict(urllib.parse.parse_qsl(request.target.partition('?')[2]))
        following = names['prefix'] + ('/b' if names.get('key-marker', '').endswith('/a') else '/a')
        body = f'<IsTruncated>true</IsTruncated><NextKeyMarker>{following}</NextKeyMarker>'
        return Answer(200, {}, f'<ListMultipartUploadsResult>{body}</ListMultipartUploadsResult>'.encode())

    async def no_token(self, request: Request) -> Answer | None:
        answer = await self.forward(request)
        return answer._replace(body=_TOKEN.sub(b'', answer.body))

    async def drops_byte(self, request: Request) -> Answer | None:
        """The server stores one byte fewer than it received; its ETag is of the stored bytes."""
        return await self._damaged(request, request.body[:-1])

    async def flips_byte(self, request: Request) -> Answer | None:
        """The server stores a changed byte; its ETag is of the stored bytes."""
        return await self._damaged(request, bytes([request.body[0] ^ 1]) + request.body[1:])

    async def _damaged(self, request: Request, body: bytes) -> Answer | None:
        headers = {**request.headers, 'content-length': str(len(body))}
        headers.pop('content-md5', None)
        return await self.forward(request._replace(body=body, headers=headers))

    async def forgets(self, request: Request) -> Answer | None:
        """The server reports success and stores nothing."""
        if request.kind == 'join':
            key = urllib.parse.unquote(request.target.partition('?')[0].lstrip('/').partition('/')[2])
            body = f'<CompleteMultipartUploadResult><Key>{key}</Key><ETag>"{"0" * 32}-2"</ETag>'
            return Answer(200, {}, f'{body}</CompleteMultipartUploadResult>'.encode())
        return Answer(200, {'ETag': f'"{hashlib.md5(request.body).hexdigest()}"'}, b'')

    async def conditions_unknown(self, request: Request) -> Answer | None:
        """The server does not implement conditional requests."""
        if 'if-none-match' in request.headers:
            return Answer(501, {}, b'<Error><Code>NotImplemented</Code></Error>')
        return await self.forward(request)

    async def expire(self, request: Request) -> Answer | None:
        """The credentials of this request expire, and are renewed."""
        self.revoked.add(request.credential)
        self.renew()
        return self._refusal(request)


def _written(request: Request, answer: Answer) -> bytes:
    length = answer.headers.get('content-length', '0') if request.method == 'HEAD' else str(len(answer.body))
    lines = [f'{name}: {value}' for name, value in answer.headers.items() if name.lower() != 'content-length']
    head = '\r\n'.join([f'HTTP/1.1 {answer.status} X', f'Content-Length: {length}', *lines, '', ''])
    return head.encode() + (b'' if request.method == 'HEAD' else answer.body)

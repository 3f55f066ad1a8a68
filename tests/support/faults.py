"""A server that answers each request as the next line of its script says: every fault of a store, on demand."""

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
_GIVING += ('until_close', 'slowly', 'slid', 'squeezed', 'partial', 'twice', 'bare', 'half', 'garbled')


class Asked(NamedTuple):
    """A request for an object."""

    method: str
    key: str
    wanted: str | None
    google: bool
    data: bytes | None
    number: int = 0

    @property
    def body(self) -> bytes:
        """All of the object."""
        return self.data or b''

    @property
    def span(self) -> tuple[int, int]:
        """The bytes that are asked for."""
        size = len(self.body)
        if self.wanted is None:
            return 0, size
        left, right = self.wanted.removeprefix('bytes=').split('-')
        if not left:
            return max(0, size - int(right)), size
        return int(left), min(int(right) + 1, size) if right else size

    @property
    def said(self) -> str:
        """The Content-Range of its answer."""
        start, stop = self.span
        return f'bytes {start}-{stop - 1}/{len(self.body)}'

    @property
    def piece(self) -> bytes:
        """The body of its answer."""
        return self.body[slice(*self.span)]


def md5_etag(data: bytes) -> str:
    """The ETag that S3 gives to an object of one part."""
    return f'"{hashlib.md5(data).hexdigest()}"'


class FaultServer(LoopServer):
    """Objects as S3, GCS and web servers give them, whatever the bucket. What is not scripted is answered well.

    A line of the script is the name of a method, or a tuple of it and its arguments.

    Args:
      tls: serve over TLS.
      files: the objects by key; without them there is ``DATA`` at every path.
    """

    def __init__(self, tls: ssl.SSLContext | None = None, files: Mapping[str, bytes] | None = None) -> None:
        super().__init__(tls)
        self.files = files
        self.script: collections.deque[Any] = collections.deque()
        self.aim = ''  # how the keys end whose requests the script is for
        self.asked: list[str | None] = []
        self.methods: list[str] = []
        self.authorized: list[str] = []
        self.dates: list[str] = []
        self.heads: list[dict[str, str]] = []
        self.connections = 0
        self.etag: str | None = '"one"'
        self.encoding = ''  # the Content-Encoding that objects are stored with
        self.each: list[Any] = []  # the lines that each object and range meets before it is answered well
        self._number = 0  # of requests, as stores name each in its reply
        self._met: collections.Counter[tuple[str, str | None]] = collections.Counter()
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
            path, _, query = target.partition('?')
            if method == 'POST':
                await reader.readexactly(int(lines['content-length']))
                self.tokens += 1
                if self.tokens <= self.tokenless:
                    writer.transport.abort()
                    return
                token = {'access_token': f'token-{self.tokens}', 'expires_in': 3600}
                _say(writer, 'application/json', json.dumps(token))
            elif self.files is not None and (listed := self._listed(path, query)) is not None:
                self._list(writer, *listed)
            else:
                await self._answer(writer, lines, self._asked(method, path, lines))
            await writer.drain()

    async def _answer(self, writer: asyncio.StreamWriter, lines: Mapping[str, str], asked: Asked) -> None:
        self.note(asked, lines)
        self._number += 1
        asked = asked._replace(number=self._number)
        credential = _credential(lines)
        if credential in self._revoked:
            await self.status(writer, asked, 403, 'ExpiredToken')
            return
        line = self.next_line() if asked.key.endswith(self.aim) else 'good'
        count = self._met[asked.key, asked.wanted]
        if count < len(self.each):
            line, self._met[asked.key, asked.wanted] = self.each[count], count + 1
        name, *args = (line,) if isinstance(line, str) else line
        if name == 'expire':
            self._revoked.add(credential)
            self.renew()
            name, args = 'status', [401] if asked.google else [403, 'ExpiredToken']
        if asked.data is None and name in _GIVING:
            name, args = 'good', []
        await getattr(self, name)(writer, asked, *args)

    def note(self, asked: Asked, lines: Mapping[str, str]) -> None:
        """Keep what was asked for."""
        self.methods.append(asked.method)
        self.asked.append(asked.wanted)
        self.authorized.append(lines.get('authorization', ''))
        self.dates.append(lines.get('x-amz-date', ''))

    def next_line(self) -> Any:
        """What becomes of a request."""
        return self.script.popleft() if self.script else 'good'

    def _asked(self, method: str, path: str, lines: Mapping[str, str]) -> Asked:
        google = '/storage/v1/b/' in path
        key = path.partition('/o/')[2] if google else path.lstrip('/').partition('/')[2]
        key = urllib.parse.unquote(key)
        data = DATA if self.files is None else self.files.get(key)
        return Asked(method, key, lines.get('range'), google, data)

    # --- what buckets have beside objects

    def _listed(self, path: str, query: str) -> tuple[bool, str, str] | None:
        """Which kind of store is asked for a list, its prefix and delimiter."""
        said = dict(urllib.parse.parse_qsl(query))
        google = path.startswith('/storage/v1/b/') and path.endswith('/o')
        return (google, said.get('prefix', ''), said.get('delimiter', '')) if google or 'list-type' in said else None

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
            said = {'kind': 'storage#objects', 'items': items, 'prefixes': list(folders)}
            _say(writer, 'application/json', json.dumps(said))
            return
        body = '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><IsTruncated>false</IsTruncated>'
        body += ''.join(f'<Contents><Key>{key}</Key><Size>{size}</Size></Contents>' for key, size in objects.items())
        body += ''.join(f'<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>' for folder in folders)
        body += '</ListBucketResult>'
        _say(writer, 'application/xml', body)

    def _head(self, asked: Asked, status: int, length: int | None, **more: str) -> bytes:
        lines = [f'HTTP/1.1 {status} X'] + ([] if length is None else [f'Content-Length: {length}'])
        etag = self.etag if self.etag_of is None or status not in (200, 206) else self.etag_of(asked.body)
        if etag:
            lines += [f'X-Goog-Generation: {etag}'] if asked.google else [f'ETag: {etag}']
        if modified := self.modified.get(asked.key, self.modified.get('')):
            lines.append(f'Last-Modified: {modified}')
        if self.date:
            lines.append(f'Date: {self.date}')
        lines.append(f'X-Request-Id: {asked.number}')
        if self.encoding and asked.google:
            lines.append(f'X-Goog-Stored-Content-Encoding: {self.encoding}')
        if self.encoding and 'Content_Encoding' not in more:
            lines.append(f'Content-Encoding: {self.encoding}')
        if asked.google:
            digest = base64.b64encode(crc32c(asked.body).to_bytes(4, 'big')).decode()
            lines.append(f'X-Goog-Hash: crc32c={digest}')
        lines += [f'{key.replace("_", "-")}: {value}' for key, value in more.items()]
        return '\r\n'.join([*lines, '', '']).encode()

    def _part(self, asked: Asked, length: int | None = None, **more: str) -> bytes:
        """The head of a good answer."""
        if asked.wanted is None:
            return self._head(asked, 200, length, **more)
        return self._head(asked, 206, length, Content_Range=asked.said, **more)

    # --- the lines of a script

    async def good(self, writer: asyncio.StreamWriter, asked: Asked, cut: int | None = None) -> None:
        if asked.data is None:
            await self.status(writer, asked, 404, 'NoSuchKey')
        elif asked.wanted is not None and not asked.piece:
            await self.unsatisfiable(writer, asked, f'bytes */{len(asked.data)}')
        else:
            body = b'' if asked.method == 'HEAD' else asked.piece[:cut]
            writer.write(self._part(asked, len(asked.piece)) + body)

    async def status(
        self,
        writer: asyncio.StreamWriter,
        asked: Asked,
        code: int,
        says: str = 'Scripted',
        more: Mapping[str, str] = {},
    ) -> None:
        body = f'<Error><Code>{says}</Code></Error>'.encode()
        writer.write(self._head(asked, code, len(body), **more) + body)

    async def retry_after(self, writer: asyncio.StreamWriter, asked: Asked, seconds: int) -> None:
        await self.status(writer, asked, 503, 'Scripted', {'Retry-After': str(seconds)})

    async def unsatisfiable(self, writer: asyncio.StreamWriter, asked: Asked, said: str | None = None) -> None:
        await self.status(writer, asked, 416, 'InvalidRange', {'Content-Range': said} if said else {})

    async def reset(self, writer: asyncio.StreamWriter, asked: Asked) -> None:
        writer.transport.abort()

    async def hang(self, writer: asyncio.StreamWriter, asked: Asked) -> None:
        await asyncio.sleep(60)

    async def truncate(self, writer: asyncio.StreamWriter, asked: Asked, after: int) -> None:
        await self.good(writer, asked, after)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()

    async def then_reset(self, writer: asyncio.StreamWriter, asked: Asked) -> None:
        await self.good(writer, asked)
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.transport.abort()

    async def stall(self, writer: asyncio.StreamWriter, asked: Asked, after: int) -> None:
        await self.good(writer, asked, after)
        await writer.drain()
        await asyncio.sleep(60)

    async def late(self, writer: asyncio.StreamWriter, asked: Asked, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.good(writer, asked)

    async def drip(self, writer: asyncio.StreamWriter, asked: Asked, pause: float) -> None:
        writer.write(self._part(asked, len(asked.piece)))
        for i in range(len(asked.piece)):
            writer.write(asked.piece[i : i + 1])
            await writer.drain()
            await asyncio.sleep(pause)

    async def whole(self, writer: asyncio.StreamWriter, asked: Asked, encoding: str = '') -> None:
        more = {'Content_Encoding': encoding} if encoding else {}
        writer.write(self._head(asked, 200, len(asked.body), **more) + asked.body)

    async def document(self, writer: asyncio.StreamWriter, asked: Asked) -> None:
        """An error in a reply of success, just as long as what was asked for."""
        body = b'<?xml version="1.0"?><Error><Code>InternalError</Code></Error>'.ljust(len(asked.piece))
        writer.write(f'HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n'.encode() + body)

    async def ranged(self, writer: asyncio.StreamWriter, asked: Asked, said: str | None) -> None:
        more = {} if said is None else {'Content_Range': said}
        writer.write(self._head(asked, 206, len(asked.piece), **more) + asked.piece)

    async def shifted(self, writer: asyncio.StreamWriter, asked: Asked) -> None:
        """Another range than was asked for, and said so."""
        start, stop = asked.span
        await self.ranged(writer, asked, f'bytes {start + 1}-{stop}/{len(asked.body)}')

    async def long(self, writer: asyncio.StreamWriter, asked: Asked) -> None:
        # Of an object that comes whole, nothing but its length says how long it is.
        more = 10 if asked.wanted else 0
        writer.write(self._part(asked, len(asked.piece) + more) + asked.piece + b'0123456789')

    async def short(self, writer: asyncio.StreamWriter, asked: Asked) -> None:
        """Less than was asked for, and no word of it but the length."""
        half = len(asked.piece) // 2
        writer.write(self._part(asked, half if asked.wanted else len(asked.piece)) + asked.piece[:half])
        if asked.wanted is None:
            await writer.drain()
            writer.close()

    async def then_close(self, writer: asyncio.StreamWriter, asked: Asked, said: str = '') -> None:
        more = {'Connection': said} if said else {}
        writer.write(self._part(asked, len(asked.piece), **more) + asked.piece)
        await writer.drain()
        writer.close()

    async def replaced(self, writer: asyncio.StreamWriter, asked: Asked) -> None:
        """From here on each object is another one of the same size."""
        self.etag = '"two"'
        if self.files is not None:
            self.files = {key: data.translate(_OTHER) for key, data in self.files.items()}
            asked = asked._replace(data=self.files.get(asked.key))
        await self.good(writer, asked)

    async def garbled(self, writer: asyncio.StreamWriter, asked: Asked) -> None:
        """Other bytes than the object has, and no word of it."""
        writer.write(self._part(asked, len(asked.piece)) + asked.piece.translate(_OTHER))

    async def chunked(self, writer: asyncio.StreamWriter, asked: Asked, size: int, end: bytes = b'') -> None:
        writer.write(self._part(asked, Transfer_Encoding='chunked'))
        for at in range(0, len(asked.piece), size):
            piece = asked.piece[at : at + size]
            writer.write(b'%x;a=b\r\n%b\r\n' % (len(piece), piece))
        writer.write(end or b'0\r\nTrailer: x\r\n\r\n')

    async def zipped(self, writer: asyncio.StreamWriter, asked: Asked) -> None:
        """What was asked for, compressed on the way."""
        body = gzip.compress(asked.piece)
        head = self._part(asked, Transfer_Encoding='chunked', Content_Encoding='gzip')
        writer.write(head + b'%x\r\n%b\r\n0\r\n\r\n' % (len(body), body))

    async def until_close(self, writer: asyncio.StreamWriter, asked: Asked, length: int | None = None) -> None:
        writer.write(self._part(asked) + asked.piece[:length])
        await writer.drain()
        writer.close()

    async def slowly(self, writer: asyncio.StreamWriter, asked: Asked) -> None:
        head = self._part(asked, len(asked.piece))
        for i in range(len(head)):
            writer.write(head[i : i + 1])
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(asked.piece)

    async def raw(self, writer: asyncio.StreamWriter, asked: Asked, data: bytes, close: bool = False) -> None:
        writer.write(data)
        await writer.drain()
        if close:
            writer.close()

    async def informed(self, writer: asyncio.StreamWriter, asked: Asked) -> None:
        writer.write(b'HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n')
        await self.good(writer, asked)

    async def slid(self, writer: asyncio.StreamWriter, asked: Asked) -> None:
        """Bytes of another place, as many as were asked for, under a head that does not say so."""
        writer.write(self._part(asked, len(asked.piece)) + asked.piece[1:] + asked.piece[:1])

    async def squeezed(self, writer: asyncio.StreamWriter, asked: Asked) -> None:
        """What was asked for, compressed on the way to just as many bytes, if it can be."""
        body = gzip.compress(asked.piece)
        if 2 <= len(asked.piece) - len(body) < 60_000:
            extra = len(asked.piece) - len(body) - 2
            body = body[:3] + bytes([4]) + body[4:10] + extra.to_bytes(2, 'little') + bytes(extra) + body[10:]
            assert gzip.decompress(body) == asked.piece
        writer.write(self._part(asked, len(body), Content_Encoding='gzip') + body)

    async def partial(self, writer: asyncio.StreamWriter, asked: Asked) -> None:
        """A part of an object where all of it was asked for."""
        if asked.wanted is not None:
            await self.good(writer, asked)
            return
        size = len(asked.body)
        head = self._head(asked, 206, size - 1, Content_Range=f'bytes 0-{size - 2}/{size}')
        writer.write(head + asked.body[:-1])

    async def twice(self, writer: asyncio.StreamWriter, asked: Asked, pause: float = 0.0) -> None:
        """Two replies to one request; the second after a pause."""
        for _ in range(2):
            await self.good(writer, asked)
            await writer.drain()
            await asyncio.sleep(pause)

    async def bare(self, writer: asyncio.StreamWriter, asked: Asked) -> None:
        """A head whose lines end in line feeds alone."""
        writer.write(self._part(asked, len(asked.piece)).replace(b'\r\n', b'\n') + asked.piece)

    async def half(self, writer: asyncio.StreamWriter, asked: Asked) -> None:
        """The connection breaks at the half of what was asked for."""
        if len(asked.piece) < 2:
            await self.good(writer, asked)
            return
        writer.write(self._part(asked, len(asked.piece)) + asked.piece[: len(asked.piece) // 2])
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.transport.abort()

    async def redirect(self, writer: asyncio.StreamWriter, asked: Asked, location: str) -> None:
        writer.write(self._head(asked, 307, 0, Location=location))


def _credential(lines: Mapping[str, str]) -> str:
    """Who asks: the token, or the key of a signature."""
    return lines.get('authorization', '').partition('/')[0]


def _say(writer: asyncio.StreamWriter, kind: str, body: str) -> None:
    head = f'HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n'
    writer.write((head + body).encode())

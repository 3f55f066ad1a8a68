"""Requests and replies of HTTP/1.1 as values and pure functions, no I/O (RFC 9110 and 9112)."""

import contextlib
import datetime
import email.utils
import re
import urllib.parse
from collections.abc import Mapping
from typing import Final, NamedTuple

from granular._support.redact import hidden
from granular.aio.http.addresses import encoded
from granular.aio.http.proxies import Proxy, basic_authorization, proxy_of
from granular.aio.runtime.replied import Server
from granular.config import KiB
from granular.errors import InvalidArgumentError

_PUBLIC: Final = ('accept', 'accept-language', 'user-agent')  # headers that hold no secret, sent to any host
_LONGEST_LINE: Final = 4096  # bytes of a chunk's size and extensions
_LONGEST_TRAILER: Final = 64 * KiB
_AUTHORITY: Final = re.compile(r'((?:[A-Za-z][A-Za-z0-9+.-]*:)?(?://[^/?#]*)?)(.*)', re.DOTALL)
_CHUNK: Final = re.compile(rb'([0-9a-fA-F]{1,16})[ \t]*(?:;.*)?', re.DOTALL)


class ProtocolError(Exception):
    """The received data is not HTTP/1.1, or contradicts itself."""


class Origin(NamedTuple):
    """The server that a connection leads to, and the proxy on the way."""

    secure: bool
    host: str
    port: int
    proxy: Proxy | None = None

    def __str__(self) -> str:
        way = '' if self.proxy is None else f' through the proxy {self.proxy.host}:{self.proxy.port}'
        return f'{self.host}:{self.port}{way}'

    @property
    def server(self) -> Server:
        """The server by which the process remembers whether it has replied."""
        return self.secure, self.host, self.port, None if self.proxy is None else (self.proxy.host, self.proxy.port)

    @property
    def peer(self) -> tuple[str, int]:
        return (self.host, self.port) if self.proxy is None else self.proxy[:2]


class Target(NamedTuple):
    """The server, path and headers of a request: all but its method and the headers that differ between requests."""

    origin: Origin
    url: str
    path: str
    headers: Mapping[str, str]
    lines: bytes
    get: bytes
    """The head of a GET request, to which further header lines and an empty line are appended."""

    def __repr__(self) -> str:
        return f'Target({hidden(self.url)!r})'

    @classmethod
    def of(cls, url: str, headers: Mapping[str, str], proxies: Mapping[str, str] | None = None) -> 'Target':
        """Return the target of a URL whose path is already quoted. URL, headers and proxy must be valid in HTTP.

        ``proxies`` has addresses by scheme, in place of those that the environment names.
        """
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise InvalidArgumentError(f'{shown(url)}: expected an address, got an error: {error}') from None
        secure = parts.scheme == 'https'
        host = parts.hostname
        if parts.scheme not in ('http', 'https') or not host:
            raise InvalidArgumentError(f'{hidden(url)}: expected http:// or https:// and a host')
        with contextlib.suppress(UnicodeError):
            host = host if host.isascii() else host.encode('idna').decode()
        default = 443 if secure else 80
        port = default if port is None else port
        authority = (f'[{host}]' if ':' in host else host) + ('' if port == default else f':{port}')
        own = {'Host': authority, 'User-Agent': 'granular', 'Accept': '*/*', 'Accept-Encoding': 'identity'}
        if (authorization := basic_authorization(parts)) is not None:
            own['Authorization'] = authorization
        given = {name.lower() for name in headers}
        sent = {**{name: value for name, value in own.items() if name.lower() not in given}, **headers}
        path = (parts.path or '/') + (f'?{parts.query}' if parts.query else '')
        proxy = proxy_of(secure, host, port, proxies)
        lines = ''.join(f'{name}: {value}\r\n' for name, value in sent.items())
        if proxy is not None and not secure:
            path, lines = f'http://{authority}{path}', lines + proxy.line
        for name, value in (('address', path), *sent.items()):
            if not (name + value).isascii() or any(char in name + value for char in '\r\n\0'):
                part = name if name == 'address' else f'header {shown(name)}'
                raise InvalidArgumentError(
                    f'{authority[:200]}: the {part} has characters that are not allowed in HTTP, such as a newline'
                )
        get = f'GET {path} HTTP/1.1\r\n{lines}'
        return cls(Origin(secure, host, port, proxy), url, path, headers, lines.encode(), get.encode())

    def request(self, method: str, more: str = '') -> bytes:
        """Return the head of the request; ``more`` contains further header lines."""
        return b'%b %b HTTP/1.1\r\n%b%b\r\n' % (method.encode(), self.path.encode(), self.lines, more.encode())

    def follow(self, location: str) -> 'Target':
        """Return the target of a redirect; for another origin, without the headers that may hold credentials.

        It must not lead from TLS to plain HTTP, which others can read and change.
        """
        try:
            target = Target.of(urllib.parse.urljoin(self.url, _encoded(location)), {})
        except ValueError:  # from urljoin, and InvalidArgumentError
            raise ProtocolError(f'a redirection to {shown(location)}, which is not a URL') from None
        if target.origin == self.origin:
            return Target.of(target.url, self.headers)
        if self.origin.secure and not target.origin.secure:
            raise ProtocolError(f'a redirection from https to {hidden(target.url)}')
        return Target.of(target.url, {k: v for k, v in self.headers.items() if k.lower() in _PUBLIC})


def _encoded(location: str) -> str:
    """Return an address in a header as it is sent, given its bytes as Latin-1, and without a fragment."""
    host, rest = _AUTHORITY.match(location).groups()  # type: ignore[union-attr]
    return host + encoded(rest.partition('#')[0].encode('latin-1'))


class Head(NamedTuple):
    """The head of a reply. Header names are in lower case."""

    status: int
    reason: str
    headers: Mapping[str, str]

    @property
    def length(self) -> int | None:
        value = self.headers.get('content-length')
        return None if value is None or 'transfer-encoding' in self.headers else int(value)


def parse(head: bytes) -> Head:
    """Parse the head of a reply, without the empty line that ends it."""
    text = head.decode('latin-1')
    first, *lines = text.split('\r\n')
    if text.count('\n') != len(lines) or text.count('\r') != len(lines) or '\0' in text:
        raise ProtocolError(f'a head with a line end or a zero byte inside a line: {shown(text)}')
    version, _, rest = first.partition(' ')
    code, _, reason = rest.partition(' ')
    if not version.startswith('HTTP/1.') or len(code) != 3 or not (code.isascii() and code.isdigit()) or code < '100':
        raise ProtocolError(f'not a reply of HTTP/1.1: {shown(first)}')
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(':')
        if not colon or not name or name[0] in ' \t' or name[-1] in ' \t':
            raise ProtocolError(f'not a header of HTTP/1.1: {shown(line)}')
        name, value = name.lower(), value.strip(' \t')
        if name in headers:
            if name != 'content-length':
                value = f'{headers[name]}, {value}'
            elif value != headers[name]:
                raise ProtocolError(f'two lengths in one reply: {shown(headers[name])} and {shown(value)}')
        headers[name] = value
    length = headers.get('content-length')
    if length is not None and not (length.isascii() and length.isdigit() and len(length) < 20):
        raise ProtocolError(f'Content-Length {shown(length)}')
    if version == 'HTTP/1.0' and headers.get('connection', '').lower() != 'keep-alive':
        headers['connection'] = 'close'
    return Head(int(code), reason, headers)


def http_date(text: str) -> datetime.datetime | None:
    """Parse the time in a header such as Date or Last-Modified; None if it is not a date (RFC 9110, 5.6.7)."""
    try:
        time = email.utils.parsedate_to_datetime(text)
        # All dates of HTTP are in UTC, so a date without a zone is too.
        return time.replace(tzinfo=datetime.UTC) if time.tzinfo is None else time.astimezone(datetime.UTC)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


def shown(text: str) -> str:
    """Return the first characters of a text from a server, redacted, for an error."""
    return repr(hidden(text[:400])[:80])


class Chunks:
    """A decoder for chunked bodies (RFC 9112, 7.1)."""

    def __init__(self) -> None:
        self.rest: bytes = b''  # received and not decoded; once the body is complete, what came after it
        self._left = 0  # bytes of the chunk still to come, including its line end
        self._trailing = False
        self._trailer = 0  # bytes of the trailer section
        self.ended: bool = False  # True once the body is complete

    def feed(self, data: memoryview) -> list[bytes]:
        held, out, at = self.rest + data, [], 0
        size = len(held)
        while at < size and not self.ended:
            if self._left > 2:
                piece = held[at : at + self._left - 2]
                at += len(piece)
                self._left -= len(piece)
                out.append(piece)
                continue
            if self._left:
                if size - at < 2:
                    break
                if held[at : at + 2] != b'\r\n':
                    raise ProtocolError('a chunk is longer than its size')
                at, self._left = at + 2, 0
                continue
            end = held.find(b'\r\n', at)
            if end < 0:
                if size - at > _LONGEST_LINE:
                    raise ProtocolError('a chunk without a size')
                break
            line, at = held[at:end], end + 2
            if self._trailing:
                self.ended = not line
                self._trailer += len(line)
                if self._trailer > _LONGEST_TRAILER:
                    raise ProtocolError(f'the trailer of a body has more than {_LONGEST_TRAILER} bytes')
                continue
            match = _CHUNK.fullmatch(line)
            if match is None or len(line) > _LONGEST_LINE:
                raise ProtocolError(f'a chunk of size {line[:40]!r}')
            count = int(match[1], 16)
            self._left, self._trailing = (count + 2, False) if count else (0, True)
        self.rest = held[at:]
        return out

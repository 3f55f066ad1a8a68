"""Proxies named by the environment: ``HTTP_PROXY``, ``HTTPS_PROXY`` and ``NO_PROXY``."""

import asyncio
import base64
import functools
import ipaddress
import os
import socket
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Final, NamedTuple

from granular._support.redact import hidden
from granular.errors import AccessDeniedError, InvalidArgumentError

_VARIABLES: Final = ('http_proxy', 'https_proxy', 'no_proxy', 'HTTP_PROXY', 'HTTPS_PROXY', 'NO_PROXY', 'REQUEST_METHOD')
_LONGEST_HEAD: Final = 16 << 10
_REFUSALS: Final = (401, 403, 407)


class Proxy(NamedTuple):
    """The address of an HTTP proxy, and the header line that authorizes a request; empty if there is none."""

    host: str
    port: int
    line: str

    def __repr__(self) -> str:
        return f'Proxy({self.host!r}, {self.port})'


def basic_authorization(parts: urllib.parse.SplitResult) -> str | None:
    """Return the value of an authorization header for the user and password of a URL; None if it has none."""
    if parts.username is None:
        return None
    user, password = os.fsencode(parts.username), os.fsencode(parts.password or '')
    pair = urllib.parse.unquote_to_bytes(user) + b':' + urllib.parse.unquote_to_bytes(password)
    return 'Basic ' + base64.b64encode(pair).decode()


def proxy_of(secure: bool, host: str, port: int, given: Mapping[str, str] | None = None) -> Proxy | None:
    """Return the proxy for a server; None for a direct connection.

    It is one of those given by scheme, in place of those that the environment names. The latter do not serve loopback
    addresses.
    """
    if given is not None:
        scheme = 'https' if secure else 'http'
        return _parsed(given[scheme], f'proxies[{scheme!r}]') if given.get(scheme) else None
    lower, upper = ('https_proxy', 'HTTPS_PROXY') if secure else ('http_proxy', 'HTTP_PROXY')
    if not (os.environ.get(lower) or os.environ.get(upper)):
        return None
    return _proxy_of(tuple(os.environ.get(name) for name in _VARIABLES), secure, host, port)


@functools.lru_cache(1024)
def _proxy_of(settings: tuple[str | None, ...], secure: bool, host: str, port: int) -> Proxy | None:
    scheme = 'https' if secure else 'http'
    address = urllib.request.getproxies_environment().get(scheme, '')
    if not address or is_loopback(host) or urllib.request.proxy_bypass_environment(f'{host}:{port}'):  # type: ignore[attr-defined]
        return None
    return _parsed(address, f'{scheme}_proxy'.upper())


def _parsed(address: str, variable: str) -> Proxy:
    try:
        parts = urllib.parse.urlsplit(address if '://' in address else f'http://{address}')
        proxy_host, proxy_port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidArgumentError(f'{variable}: expected http://host:port, got {hidden(address)}: {error}') from None
    if parts.scheme != 'http' or not proxy_host:
        raise InvalidArgumentError(f'{variable}: expected http://host:port, got {hidden(address)}')
    authorization = basic_authorization(parts)
    line = '' if authorization is None else f'Proxy-Authorization: {authorization}\r\n'
    return Proxy(proxy_host, 80 if proxy_port is None else proxy_port, line)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is of this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == 'localhost' or host.endswith('.localhost')


async def open_tunnel(proxy: Proxy, address: str, host: str, port: int) -> socket.socket:
    """Return a socket that a proxy, at one of its addresses, has connected to a server (CONNECT, RFC 9110, 9.3.6)."""
    loop = asyncio.get_running_loop()
    sock = socket.socket(socket.AF_INET6 if ':' in address else socket.AF_INET)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, (address, proxy.port))
        name = f'[{host}]:{port}' if ':' in host else f'{host}:{port}'
        await loop.sock_sendall(sock, f'CONNECT {name} HTTP/1.1\r\nHost: {name}\r\n{proxy.line}\r\n'.encode())
        head = b''
        while b'\r\n\r\n' not in head:
            data = await loop.sock_recv(sock, _LONGEST_HEAD)
            head += data
            if not data or len(head) > _LONGEST_HEAD:
                raise ConnectionResetError(f'the proxy {proxy.host}:{proxy.port} closed the connection to {name}')
        version, _, rest = head.partition(b'\r\n')[0].partition(b' ')
        if not version.startswith(b'HTTP/1.') or not rest[:3].isdigit():
            raise ConnectionAbortedError(f'{proxy.host}:{proxy.port} is not an HTTP proxy: it replied {head[:80]!r}')
        status, reason = int(rest[:3]), hidden(rest.decode('latin-1'))[:80]
        if status in _REFUSALS:
            raise AccessDeniedError(f'{name}: the proxy {proxy.host}:{proxy.port} refused the connection: {reason}')
        if not 200 <= status < 300:
            raise ConnectionRefusedError(f'the proxy {proxy.host}:{proxy.port} did not connect to {name}: {reason}')
        if not head.endswith(b'\r\n\r\n'):  # a server waits for the client's first message of TLS
            raise ConnectionAbortedError(f'the proxy {proxy.host}:{proxy.port} sent data that {name} cannot have sent')
    except BaseException:
        sock.close()
        raise
    return sock

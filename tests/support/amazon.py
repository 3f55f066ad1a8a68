"""A proxy that answers for all hosts of Amazon, also over TLS, and records what arrives."""

import asyncio
import ssl
import urllib.parse
from collections.abc import Mapping
from typing import Any, NamedTuple

import trustme
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from granular.aio.stores.s3.route import route_of
from tests.support.faults import md5_etag
from tests.support.loop_server import LoopServer, read_head

DATA = b'content'
SECRETS = {'SESSION': 'secret-of-sessions', 'ROLE': 'secret-of-roles'}
"""The secrets of the keys that the server issues."""

_CREATED = (
    '<CreateSessionResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Credentials><AccessKeyId>SESSION</AccessKeyId>'
    '<SecretAccessKey>secret-of-sessions</SecretAccessKey><SessionToken>{token}</SessionToken><Expiration>{until}'
    '</Expiration></Credentials></CreateSessionResult>'
)
_ROLE = (
    '<{action}Response xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><{action}Result><Credentials><AccessKeyId>ROLE'
    '</AccessKeyId><SecretAccessKey>secret-of-roles</SecretAccessKey><SessionToken>token-of-roles</SessionToken>'
    '<Expiration>2999-01-01T00:00:00Z</Expiration></Credentials></{action}Result></{action}Response>'
)


_LISTING = b'<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>'


class Arrival(NamedTuple):
    """A request, and whether a client sent it to the proxy."""

    proxied: bool
    method: str
    url: str
    headers: dict[str, str]

    @property
    def scope(self) -> tuple[str, ...]:
        """The algorithm of the signature, the access key, the region and the service; empty if it is not signed."""
        algorithm, _, rest = self.headers.get('authorization', '').partition(' Credential=')
        key, *scope = rest.partition(',')[0].split('/')
        return (algorithm, key, *scope[1:-1]) if rest else ()

    def is_signed_by(self, secret: str) -> bool:
        """Return whether the signature is that of botocore, given the secret of the key."""
        _, key, region, service = self.scope
        fields = dict(field.split('=', 1) for field in self.headers['authorization'].partition(' ')[2].split(', '))
        signed = {name: self.headers[name] for name in fields['SignedHeaders'].split(';')}
        request = AWSRequest(self.method, self.url, headers=signed)
        request.context['timestamp'] = self.headers['x-amz-date']
        signer = S3SigV4Auth(Credentials(key, secret), service, region)
        text = signer.string_to_sign(request, signer.canonical_request(request))
        return signer.signature(text, request) == fields['Signature'] and 'host' in signed


class Amazon(LoopServer):
    """Buckets in which each key has the same bytes, and the service that issues keys of roles.

    ``expiry`` is when the sessions of directory buckets expire. ``script`` has the replies that come first: a status
    and a body for each request; ``refusals`` likewise for those that open a session.
    """

    def __init__(self) -> None:
        super().__init__()
        self.authority = trustme.CA()
        self.reset()
        self._contexts: dict[str, ssl.SSLContext] = {}

    def reset(self) -> None:
        """Forget what arrived, and what the replies are to be."""
        self.arrivals: list[Arrival] = []
        self.script: list[tuple[int, bytes]] = []
        self.refusals: list[tuple[int, bytes]] = []
        self.expiry = '2999-01-01T00:00:00Z'
        self.sessions = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        scheme, proxied = 'http', False
        while True:
            method, target, headers = await read_head(reader)
            if method == 'CONNECT':
                writer.write(b'HTTP/1.1 200 OK\r\n\r\n')
                await writer.start_tls(self._context(target.rpartition(':')[0]))
                scheme, proxied = 'https', True
                continue
            proxied = proxied or not target.startswith('/')
            url = target if not target.startswith('/') else f'{scheme}://{headers["host"]}{target}'
            body = await reader.readexactly(int(headers.get('content-length', 0)))
            self.arrivals.append(Arrival(proxied, method, url, headers))
            status, content = self._answer(method, url, body)
            if 'x-amz-copy-source' in headers:
                content = b'<CopyObjectResult><ETag>"x"</ETag></CopyObjectResult>'
            writer.write(
                f'HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\nx-amz-request-id: {len(self.arrivals)}\r\n'
                f'Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nETag: {md5_etag(body or DATA)}\r\n\r\n'.encode()
            )
            writer.write(b'' if method == 'HEAD' else content)
            await writer.drain()

    def _answer(self, method: str, url: str, body: bytes) -> tuple[int, bytes]:
        host, query = urllib.parse.urlsplit(url).hostname or '', urllib.parse.urlsplit(url).query
        if host.startswith('sts.'):
            action = dict(urllib.parse.parse_qsl(body.decode()))['Action']
            return 200, _ROLE.format(action=action).encode()
        if 'session' in urllib.parse.parse_qs(query, keep_blank_values=True):
            if self.refusals:
                return self.refusals.pop(0)
            self.sessions += 1
            return 200, _CREATED.format(token=f'token-{self.sessions}', until=self.expiry).encode()
        if self.script:
            return self.script.pop(0)
        if 'list-type=2' in query:
            return 200, _LISTING
        return 200, b'' if method == 'PUT' else DATA

    def _context(self, host: str) -> ssl.SSLContext:
        if host not in self._contexts:
            self._contexts[host] = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.authority.issue_cert(host).configure_cert(self._contexts[host])
        return self._contexts[host]


def sent_by(arrival: Arrival) -> Any:
    """Return what two clients must agree on in a request."""
    names = 'x-amz-request-payer', 'x-amz-security-token', 'x-amz-s3session-token'
    url = arrival.url.partition('?')[0] + ('?session' if 'session' in arrival.url.partition('?')[2] else '')
    return arrival.proxied, arrival.method, url, arrival.scope, [bool(arrival.headers.get(name)) for name in names]


def place_regions(monkeypatch: Any, servers: Mapping[str, Any]) -> None:
    """Let servers stand for regions of Amazon: the address of a region is not configurable."""

    def placed(root: str, options: Any, endpoint: Any, region: str) -> Any:
        route = route_of(root, options, endpoint, region)
        bucket = root.removeprefix('s3://')
        return route if endpoint.url else route._replace(base=f'{servers[region].endpoint}/{bucket}')

    monkeypatch.setattr('granular.aio.stores.s3.client.route_of', placed)

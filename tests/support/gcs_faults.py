"""A fault proxy for Google Cloud Storage: resumable uploads and copies as the store documents them, which its emulator
does otherwise, and replies that a test rewrites.

fake-gcs-server publishes an upload that is asked how far it is, appends a part that is sent twice, and knows no
conditions of uploads in parts and of copies.
"""

import base64
import dataclasses
import json
import secrets
import urllib.parse
from collections.abc import Callable

from granular.formats.checksums import crc32c
from tests.support.fault_proxy import Call, FaultProxy

_GRAIN = 256 * 1024  # bytes of which a multiple is kept of a part that is not the last


@dataclasses.dataclass
class _Session:
    description: dict
    condition: str
    data: bytearray
    reply: bytes = b''


class GCSFaultProxy(FaultProxy):
    """Forwards requests to fake-gcs-server, but keeps resumable uploads itself until they are complete.

    Args:
      upstream: the address of the emulator.
      plan: as for ``FaultProxy``.
    """

    def __init__(self, upstream: str, plan: Callable[[Call], str] = lambda call: '') -> None:
        super().__init__(upstream, plan)
        self.edit: Callable[[str, str, bytes], bytes] = lambda method, target, reply: reply
        """Called with method, target and reply of each request that is carried out, for the reply to be sent."""
        self.damage: Callable[[bytes], bytes] = lambda request: request
        """Called with each request that goes to the emulator, for what is to arrive there."""
        self.sessions: dict[str, _Session] = {}
        self.statuses = 0
        """Requests that asked how far an upload is."""

    async def _forward(self, request: bytes) -> bytes:
        head, _, body = request.partition(b'\r\n\r\n')
        first, *rest = head.decode('latin-1').split('\r\n')
        method, target, _ = first.split(' ')
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(':') for line in rest)}
        path, _, query = target.partition('?')
        arguments = dict(urllib.parse.parse_qsl(query))
        if 'upload_id' in arguments:
            reply = await self.continue_upload(method, path, arguments, headers, body)
        elif arguments.get('uploadType') == 'resumable':
            reply = self._begin(path, arguments, body)
        elif '/rewriteTo/' in path and await self._differs(path, arguments.get('ifSourceGenerationMatch')):
            reply = _reply(412, {'error': {'code': 412, 'message': 'conditionNotMet'}})
        else:
            reply = await self._upstream(request)
        return self.edit(method, target, reply)

    async def _upstream(self, request: bytes) -> bytes:
        return await super()._forward(self.damage(request))

    async def _differs(self, path: str, generation: str | None) -> bool:
        source = path.partition('/rewriteTo/')[0]
        reply = await self._upstream(f'GET {source} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n'.encode())
        return b' 200 ' in reply[:15] and generation not in (None, contents(reply)['generation'])

    def _begin(self, path: str, arguments: dict[str, str], body: bytes) -> bytes:
        name = secrets.token_hex(8)
        try:
            description = json.loads(body)
        except ValueError:
            return _reply(400, {'error': {'code': 400, 'message': 'Parse Error'}})
        self.sessions[name] = _Session(description, arguments.get('ifGenerationMatch', ''), bytearray())
        # The store may name itself otherwise than the client does.
        location = f'https://storage.invalid{path}?uploadType=resumable&upload_id={name}'
        return _reply(200, None, Location=location)

    async def continue_upload(
        self, method: str, path: str, arguments: dict[str, str], headers: dict[str, str], body: bytes
    ) -> bytes:
        session = self.sessions.get(arguments['upload_id'])
        if method == 'DELETE':
            self.sessions.pop(arguments['upload_id'], None)
            return _reply(499, None)
        if session is None:
            return _reply(404, {'error': {'code': 404, 'message': 'No such upload'}})
        if session.reply:
            return session.reply
        span, _, total = headers['content-range'].removeprefix('bytes ').partition('/')
        had = len(session.data)
        if span == '*':
            self.statuses += 1
        else:
            start = int(span.partition('-')[0])
            if start > had:
                return _reply(400, {'error': {'code': 400, 'message': 'A gap in the upload'}})
            session.data += body[had - start :]
        if total == str(len(session.data)):
            return await self._finish(session, path, headers)
        if total == '*':
            del session.data[len(session.data) // _GRAIN * _GRAIN :]
        more = {'Range': f'bytes=0-{len(session.data) - 1}'} if session.data else {}
        return _reply(308, None, **more)

    async def _finish(self, session: _Session, path: str, headers: dict[str, str]) -> bytes:
        digest = base64.b64encode(crc32c(bytes(session.data)).to_bytes(4, 'big')).decode()
        if headers.get('x-goog-hash', f'crc32c={digest}') != f'crc32c={digest}':
            return _reply(400, {'error': {'code': 400, 'message': 'The checksum does not match'}})
        edge = secrets.token_hex(8)
        parts = (('application/json', json.dumps(session.description).encode()), (_BINARY, bytes(session.data)))
        body = b''.join(
            f'--{edge}\r\nContent-Type: {kind}\r\n\r\n'.encode() + content + b'\r\n' for kind, content in parts
        )
        body += f'--{edge}--\r\n'.encode()
        condition = f'&ifGenerationMatch={session.condition}' if session.condition else ''
        head = (
            f'POST {path}?uploadType=multipart{condition} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n'
            f'Content-Type: multipart/related; boundary={edge}\r\nContent-Length: {len(body)}\r\n\r\n'
        )
        reply = await self._upstream(head.encode() + body)
        if reply.startswith(b'HTTP/1.1 200'):
            session.reply = reply
            session.data.clear()
        return reply


_BINARY = 'application/octet-stream'


def contents(reply: bytes) -> dict:
    """Return the JSON object in the body of a reply."""
    head, _, body = reply.partition(b'\r\n\r\n')
    if b'chunked' in head.lower():
        joined = b''
        while body and (size := int(body.partition(b'\r\n')[0], 16)):
            rest = body.partition(b'\r\n')[2]
            joined, body = joined + rest[:size], rest[size + 2 :]
        body = joined
    return json.loads(body)


def rewritten(status: int, document: object = None, **headers: str) -> Callable[[str, str, bytes], bytes]:
    """Return an edit that replaces each reply."""
    return lambda method, target, reply: _reply(status, document, **headers)


def _reply(status: int, document: object, **headers: str) -> bytes:
    body = b'' if document is None else json.dumps(document).encode()
    lines = [f'HTTP/1.1 {status} X', f'Content-Length: {len(body)}', 'Connection: close']
    lines += [f'{name}: {value}' for name, value in headers.items()]
    return '\r\n'.join([*lines, '', '']).encode() + body

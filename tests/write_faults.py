"""A proxy in front of a store's server that spoils one of the write requests that pass through it."""

import asyncio
import io
import re
import threading
from typing import Any, Final, Self

import aiohttp
from aiohttp import web
from yarl import URL

import granular
from tests.servers import Server

FAULTS: Final = ('lost', 'reset', 'error', 'html', 'nothing', 'dropped')
"""What happens to a write request.

``lost``: it is carried out and the connection ends without a reply. ``reset``: the connection ends before it is carried
out. ``error``: it is answered with status 500 and not carried out. ``html``, ``nothing``: it is answered with status
200 and a page of HTML, or an empty body, and not carried out. ``dropped``: it is carried out without the last byte.
"""

_HOP: Final = ('connection', 'transfer-encoding', 'content-length', 'expect', 'keep-alive')
_END: Final = re.compile(rb'\r\n--[0-9a-zA-Z=_-]+--\s*\Z')  # of a multipart/related body


class WriteProxy:
    """Passes all requests on, but for the ``step``-th write, to which ``fault`` happens ``times`` times.

    A request that is sent again after a fault counts as the same step: the fault is used up by then.

    Args:
      server: the store's server. Buckets that it made are reached through ``place``.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self.fault, self.step, self.times = '', -1, 0
        self.writes: list[str] = []
        self.down = False
        """Whether reads end without a reply, as after a ``last`` write, which is carried out and has none either."""

    def arm(self, fault: str, step: int, times: int = 1) -> None:
        """Have a fault happen to the ``step``-th write from now on."""
        self.fault, self.step, self.times = fault, step, times
        self.writes.clear()
        self.down = False

    def place(self, path: granular.Path, **config: Any) -> granular.Path:
        """The same place, reached through this proxy."""
        options = {**self._server.options, 'endpoint_url': self.endpoint}
        return granular.Path(str(path), config=granular.IOConfig(**config), **options)

    # --- serving

    def __enter__(self) -> Self:
        self._loop, ready = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._main, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait(10)
        return self

    def __exit__(self, *args: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _main(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._stop())
        self._loop.close()

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(auto_decompress=False)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route('*', '/{path:.*}', self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, '127.0.0.1', 0).start()
        self.endpoint = f'http://127.0.0.1:{self._runner.addresses[0][1]}'

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        fault = self._fault_of(request)
        if fault == 'reset' or (self.down and request.method in ('GET', 'HEAD')):
            return self._hang_up(request)
        if fault == 'error':
            return web.Response(status=500, text='<Error><Code>InternalError</Code></Error>')
        if fault in ('html', 'nothing'):
            page = b'<html><body>Welcome</body></html>' if fault == 'html' else b''
            return web.Response(body=page, content_type='text/html')
        if fault == 'dropped':
            end = match.start() if (match := _END.search(body)) else len(body)
            body = body[: max(0, end - 1)] + body[end:]
        headers = {name: value for name, value in request.headers.items() if name.lower() not in (*_HOP, 'host')}
        url = URL(self._server.endpoint + request.raw_path, encoded=True)
        data = io.BytesIO(body) if body or request.method in ('PUT', 'POST') else None
        async with self._session.request(
            request.method, url, headers=headers, data=data, allow_redirects=False,
            skip_auto_headers=('Content-Type', 'Accept-Encoding', 'User-Agent'),
        ) as reply:  # fmt: skip
            content = await reply.read()
        if fault in ('lost', 'last'):
            self.down = fault == 'last'
            return self._hang_up(request)
        return self._passed_on(request, reply, content)

    def _fault_of(self, request: web.Request) -> str:
        if request.method not in ('PUT', 'POST') or 'delete' in request.query:
            return ''
        self.writes.append(f'{request.method} {request.raw_path}')
        if len(self.writes) <= self.step or not self.times:
            return ''
        self.times -= 1
        return self.fault

    def _hang_up(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    def _passed_on(self, request: web.Request, reply: aiohttp.ClientResponse, content: bytes) -> web.Response:
        headers = [(name, value) for name, value in reply.headers.items() if name.lower() not in _HOP]
        headers = [(name, value.replace(self._server.endpoint, self.endpoint)) for name, value in headers]
        answer = web.Response(status=reply.status, headers=headers, body=content)
        if request.method == 'HEAD' and 'Content-Length' in reply.headers:
            answer.headers['Content-Length'] = reply.headers['Content-Length']
        return answer

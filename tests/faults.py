"""A server that answers each request as the next line of its script says: every fault of a store, on demand."""

import asyncio
import collections
import ssl
import threading
from collections.abc import Mapping
from typing import Any

DATA = bytes(i * 7 % 256 for i in range(100_000))


class FaultServer:
    """One object at every path. What is not scripted is answered well.

    A line of the script is the name of a method, or a tuple of it and its arguments.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._writers: set[asyncio.StreamWriter] = set()
        self.script: collections.deque[Any] = collections.deque()
        self.asked: list[str | None] = []
        self.methods: list[str] = []
        self.authorized: list[str] = []
        self.dates: list[str] = []
        self.heads: list[dict[str, str]] = []
        self.connections = 0
        self.etag: str | None = '"one"'

    def __enter__(self) -> 'FaultServer':
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._main, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait(10)
        return self

    def __exit__(self, *args: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _main(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, '127.0.0.1', 0, ssl=self._tls))
        scheme = 'https' if self._tls else 'http'
        self.endpoint = f'{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}'
        ready.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        for writer in self._writers:
            writer.transport.abort()
        self._loop.run_until_complete(asyncio.sleep(0.02))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b'\r\n\r\n')).decode()
                self.methods.append(head.split(' ')[0])
                lines = dict(line.split(': ', 1) for line in head.split('\r\n')[1:] if line)
                self.heads.append(lines)
                wanted = lines.get('Range')
                self.asked.append(wanted)
                self.authorized.append(lines.get('Authorization', ''))
                self.dates.append(lines.get('X-Amz-Date', ''))
                fault = self.script.popleft() if self.script else 'good'
                name, *args = (fault,) if isinstance(fault, str) else fault
                await getattr(self, name)(writer, wanted, *args)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.close()

    def _span(self, wanted: str | None) -> tuple[int, int]:
        if wanted is None:
            return 0, len(DATA)
        left, right = wanted.removeprefix('bytes=').split('-')
        if not left:
            return max(0, len(DATA) - int(right)), len(DATA)
        return int(left), min(int(right) + 1, len(DATA)) if right else len(DATA)

    def _head(self, status: int, length: int | None, **more: str) -> bytes:
        lines = [f'HTTP/1.1 {status} X'] + ([] if length is None else [f'Content-Length: {length}'])
        lines += [f'ETag: {self.etag}'] if self.etag else []
        lines += [f'{key.replace("_", "-")}: {value}' for key, value in more.items()]
        return '\r\n'.join([*lines, '', '']).encode()

    # --- the lines of a script

    async def good(self, writer: asyncio.StreamWriter, wanted: str | None, cut: int | None = None) -> None:
        start, stop = self._span(wanted)
        span = f'bytes {start}-{stop - 1}/{len(DATA)}'
        writer.write(self._head(206, stop - start, Content_Range=span) + DATA[start:stop][:cut])

    async def status(
        self,
        writer: asyncio.StreamWriter,
        wanted: str | None,
        code: int,
        says: str = 'Scripted',
        more: Mapping[str, str] = {},
    ) -> None:
        body = f'<Error><Code>{says}</Code></Error>'.encode()
        writer.write(self._head(code, len(body), **more) + body)

    async def retry_after(self, writer: asyncio.StreamWriter, wanted: str | None, seconds: int) -> None:
        await self.status(writer, wanted, 503, 'Scripted', {'Retry-After': str(seconds)})

    async def reset(self, writer: asyncio.StreamWriter, wanted: str | None) -> None:
        writer.transport.abort()

    async def hang(self, writer: asyncio.StreamWriter, wanted: str | None) -> None:
        await asyncio.sleep(60)

    async def truncate(self, writer: asyncio.StreamWriter, wanted: str | None, after: int) -> None:
        await self.good(writer, wanted, after)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()

    async def stall(self, writer: asyncio.StreamWriter, wanted: str | None, after: int) -> None:
        await self.good(writer, wanted, after)
        await writer.drain()
        await asyncio.sleep(60)

    async def late(self, writer: asyncio.StreamWriter, wanted: str | None, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.good(writer, wanted)

    async def drip(self, writer: asyncio.StreamWriter, wanted: str | None, pause: float) -> None:
        start, stop = self._span(wanted)
        span = f'bytes {start}-{stop - 1}/{len(DATA)}'
        writer.write(self._head(206, stop - start, Content_Range=span))
        for i in range(start, stop):
            writer.write(DATA[i : i + 1])
            await writer.drain()
            await asyncio.sleep(pause)

    async def whole(self, writer: asyncio.StreamWriter, wanted: str | None, encoding: str = '') -> None:
        writer.write(self._head(200, len(DATA), **({'Content_Encoding': encoding} if encoding else {})) + DATA)

    async def ranged(self, writer: asyncio.StreamWriter, wanted: str | None, said: str | None) -> None:
        start, stop = self._span(wanted)
        more = {} if said is None else {'Content_Range': said}
        writer.write(self._head(206, stop - start, **more) + DATA[start:stop])

    async def long(self, writer: asyncio.StreamWriter, wanted: str | None) -> None:
        start, stop = self._span(wanted)
        span = f'bytes {start}-{stop - 1}/{len(DATA)}'
        writer.write(self._head(206, stop - start + 10, Content_Range=span) + DATA[start : stop + 10])

    async def then_close(self, writer: asyncio.StreamWriter, wanted: str | None) -> None:
        await self.good(writer, wanted)
        await writer.drain()
        writer.close()

    async def replaced(self, writer: asyncio.StreamWriter, wanted: str | None) -> None:
        self.etag = '"two"'
        await self.good(writer, wanted)

    async def chunked(self, writer: asyncio.StreamWriter, wanted: str | None, size: int, end: bytes = b'') -> None:
        start, stop = self._span(wanted)
        span = f'bytes {start}-{stop - 1}/{len(DATA)}'
        writer.write(self._head(206, None, Content_Range=span, Transfer_Encoding='chunked'))
        for at in range(start, stop, size):
            piece = DATA[at : min(at + size, stop)]
            writer.write(b'%x;a=b\r\n%b\r\n' % (len(piece), piece))
        writer.write(end or b'0\r\nTrailer: x\r\n\r\n')

    async def until_close(self, writer: asyncio.StreamWriter, wanted: str | None, length: int | None = None) -> None:
        start, stop = self._span(wanted)
        span = f'bytes {start}-{stop - 1}/{len(DATA)}'
        writer.write(self._head(206, None, Content_Range=span) + DATA[start:stop][:length])
        await writer.drain()
        writer.close()

    async def slowly(self, writer: asyncio.StreamWriter, wanted: str | None) -> None:
        start, stop = self._span(wanted)
        span = f'bytes {start}-{stop - 1}/{len(DATA)}'
        head = self._head(206, stop - start, Content_Range=span)
        for i in range(len(head)):
            writer.write(head[i : i + 1])
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(DATA[start:stop])

    async def raw(self, writer: asyncio.StreamWriter, wanted: str | None, data: bytes, close: bool = False) -> None:
        writer.write(data)
        await writer.drain()
        if close:
            writer.close()

    async def informed(self, writer: asyncio.StreamWriter, wanted: str | None) -> None:
        writer.write(b'HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n')
        await self.good(writer, wanted)

    async def redirect(self, writer: asyncio.StreamWriter, wanted: str | None, location: str) -> None:
        writer.write(self._head(307, 0, Location=location))

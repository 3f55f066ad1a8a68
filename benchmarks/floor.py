"""The floor of a request: a bare asyncio protocol under uvloop.

Each connection sends a ranged GET and receives the body into fresh memory, which stays alive as long as that of a
program that reads some batches at a time. Nothing is checked, planned, retried or limited.
"""

import asyncio
import collections
import resource
import ssl
import time
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import uvloop

from granular.aio.runtime.buffers import blank

KEPT = 256  # bodies that stay alive


class Floor(asyncio.BufferedProtocol):
    """A connection that requests one range after the other."""

    def __init__(
        self, path: str, ranges: Iterator[tuple[int, int]], bodies: collections.deque[bytes], done: Callable[[], None]
    ) -> None:
        self._request = f'GET {path} HTTP/1.1\r\nHost: localhost\r\nRange: bytes=%d-%d\r\n\r\n'.encode()
        self._ranges, self._bodies, self._done = ranges, bodies, done
        self._scratch = memoryview(bytearray(65536))
        self._view: memoryview | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._send()

    def _send(self) -> None:
        wanted = next(self._ranges, None)
        if wanted is None:
            self._done()
        else:
            start, stop = wanted
            self._length = stop - start
            self._transport.write(self._request % (start, stop - 1))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch if self._view is None else self._view

    def buffer_updated(self, nbytes: int) -> None:
        view = self._view
        if view is None:
            at = bytes(self._scratch[: min(nbytes, 2048)]).index(b'\r\n\r\n') + 4
            if nbytes - at == self._length:
                self._bodies.append(bytes(self._scratch[at:nbytes]))
                self._send()
                return
            body, view = blank(self._length)
            self._bodies.append(body)
            nbytes -= at
            view[:nbytes] = self._scratch[at : at + nbytes]
        self._view = view[nbytes:] if nbytes < len(view) else None
        if self._view is None:
            self._send()


async def main(url: str, path: str, ranges: list[tuple[int, int]], inflight: int) -> dict[str, float]:
    loop, parts, left = asyncio.get_running_loop(), urllib.parse.urlsplit(url), inflight
    tls = ssl.create_default_context() if parts.scheme == 'https' else None
    finished, todo = loop.create_future(), iter(ranges)
    bodies: collections.deque[bytes] = collections.deque(maxlen=KEPT)

    def done() -> None:
        nonlocal left
        left -= 1
        if not left:
            finished.set_result(None)

    def connection() -> Floor:
        return Floor(f'/{path}', todo, bodies, done)

    started, used = time.perf_counter(), cpu()
    for _ in range(inflight):
        await loop.create_connection(connection, parts.hostname, parts.port, ssl=tls)
    await finished
    seconds = time.perf_counter() - started
    return {'cpu': (cpu() - used) / len(ranges) * 1e6, 'rate': len(ranges) / seconds}


def floor(job: dict[str, Any]) -> dict[str, float]:
    """Measure the processor time of a request in microseconds, and requests a second."""
    return uvloop.run(main(job['url'], job['path'], job['ranges'], job['inflight']))


def cpu() -> float:
    """Return the processor time of this process, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

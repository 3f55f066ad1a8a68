"""HTTP/1.1 as range reads need it: connections that stay open and receive a body right where it belongs.

A client of general use hands a body on in pieces, through a parser, a buffer and a stream; at 100 kB a reply that is
most of its time. Here the head of a reply is read in Python, and what follows is received by the system call into the
memory that the caller gave for it. Compression, pipelining and proxies are left out.
"""

import asyncio
import contextlib
import ipaddress
import itertools
import ssl
import time
from collections.abc import Iterable
from typing import Final

from granular.aio.http1 import Chunks, Head, Origin, ProtocolError, Target, parse
from granular.aio.threads import offload
from granular.config import KiB

_SCRATCH: Final = 64 * KiB  # received at a time where nobody has said yet where it belongs
_LONGEST_HEAD: Final = 64 * KiB
_KEEP: Final = 15.0  # seconds after which an idle connection is not trusted any more: routers drop them in silence
_NAMES_FOR: Final = 60.0  # seconds for which the addresses of a host are remembered
_TICK: Final = 1.0  # seconds between two looks at what stalls, at most

now = time.monotonic


class Sink:
    """Who receives a reply. ``got`` counts the bytes of its body; ``body`` has those that were collected."""

    got = 0
    body: bytearray

    def place(self, head: Head) -> memoryview | int:
        """Called with the head: the memory that the body is to fill exactly, or how many bytes to collect of it.

        What it raises ends the exchange.
        """
        return 4096


class _StaleError(ConnectionError):
    """A connection was closed while it was idle."""


class Connection(asyncio.BufferedProtocol):
    """One connection, with one request on it at a time."""

    def __init__(self, pool: 'Pool', origin: Origin) -> None:
        self._pool, self.origin = pool, origin
        self._scratch, self._scratch_view = pool.scratch, memoryview(pool.scratch)
        self.transport: asyncio.Transport
        self.moved = now()
        self._used = False
        self._sink: Sink | None = None
        self._future: asyncio.Future[Head]
        self._clear()

    def _clear(self) -> None:
        self._head: Head | None = None
        self._held = b''  # the beginning of a head
        self._view: memoryview | None = None  # where the rest of the body is received
        self._left: int | None = None  # bytes of the body still to come; None if it ends otherwise
        self._room: memoryview | int = 0
        self._want: int | None = None  # bytes that must come; None if what comes is collected
        self._chunks: Chunks | None = None
        self._last = False  # no request after this one
        self._bodiless = False

    @property
    def busy(self) -> bool:
        """Whether a reply is awaited."""
        return self._sink is not None

    def send(self, request: bytes, sink: Sink, bodiless: bool) -> asyncio.Future[Head]:
        """Ask; the future has the head once the body is where it belongs."""
        self._future = asyncio.get_running_loop().create_future()
        self._sink, self._bodiless = sink, bodiless
        sink.got = 0
        self.moved = now()
        self.transport.write(request)
        return self._future

    def fail(self, error: BaseException) -> None:
        """End the exchange, and the connection with it."""
        if self._sink is not None:
            self._sink = None
            if not self._future.done():
                self._future.set_exception(error)
        self._clear()
        self.transport.abort()

    # --- what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._pool.connections.add(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch_view if self._view is None else self._view

    def buffer_updated(self, nbytes: int) -> None:
        self.moved = now()
        view, sink = self._view, self._sink
        if view is None:
            if sink is None:
                self.transport.abort()  # nothing was asked for: what comes cannot be told from a later reply
                return
            try:
                self._take(nbytes)
            except Exception as error:
                self.fail(error)
            return
        sink.got += nbytes  # type: ignore[union-attr]
        self._left -= nbytes  # type: ignore[operator]
        if self._left:
            self._view = view[nbytes:]
        else:
            self._finish()

    def eof_received(self) -> None:
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        if self._sink is None:
            return
        if self._head is not None and self._left is None and self._chunks is None and exc is None:
            self._finish()
        elif self._head is not None:
            self.fail(ConnectionResetError(f'the connection was closed after {self._sink.got} bytes of the body'))
        elif self._used and not self._held:
            self.fail(_StaleError('closed while idle'))
        else:
            self.fail(exc or ConnectionResetError('the connection was closed before a reply came'))

    # --- a reply

    def _take(self, count: int) -> None:
        """Read on in a head, or in a body that is collected or comes in chunks."""
        if self._head is not None:
            self._deliver(self._scratch_view[:count])
            return
        if self._held:
            data: bytes | bytearray = self._held + self._scratch_view[:count]
            count = len(data)
        else:
            data = self._scratch
        at = 0
        while (end := data.find(b'\r\n\r\n', at, count)) >= 0:
            head = parse(bytes(data[at:end]))
            at = end + 4
            if head.status >= 200:
                self._begin(head, memoryview(data)[at:count])
                return
        self._held = bytes(data[at:count])
        if len(self._held) > _LONGEST_HEAD:
            raise ProtocolError(f'the head of a reply has more than {_LONGEST_HEAD} bytes')

    def _begin(self, head: Head, rest: memoryview) -> None:
        sink: Sink = self._sink  # type: ignore[assignment]
        self._head, self._held = head, b''
        headers = head.headers
        coding = headers.get('transfer-encoding', '').lower()
        self._last = 'close' in headers.get('connection', '').lower()
        if self._bodiless or head.status in (204, 304):
            self._left = 0
        elif coding:
            if coding != 'chunked':
                raise ProtocolError(f'a reply with Transfer-Encoding {coding!r}')
            self._chunks = Chunks()
        else:
            self._left = head.length
        room = self._room = sink.place(head)
        if isinstance(room, int):
            sink.body = bytearray()
        else:
            self._want = len(room)
        if self._left is not None and self._want not in (None, self._left):
            raise ProtocolError(f'Content-Length is {self._left} where {self._want} bytes were to come')
        if self._left == 0:
            self._finish(bool(rest))
        elif rest or isinstance(room, int):
            self._deliver(rest)
        elif self._left is not None:
            self._view = room

    def _deliver(self, data: memoryview) -> None:
        sink: Sink = self._sink  # type: ignore[assignment]
        pieces: Iterable[memoryview | bytes] = (data,) if self._chunks is None else self._chunks.feed(data)
        full = stray = False
        for piece in pieces:
            count = len(piece)
            if self._left is not None:
                if count > self._left:
                    piece, count, stray = piece[: self._left], self._left, True
                self._left -= count
            room = self._room
            if isinstance(room, int):
                sink.body += piece[: room - sink.got]
                sink.got += count
                if full := sink.got >= room and self._left != 0:
                    break  # the rest is not read: it would take as long as it is
            else:
                if count > len(room):
                    raise ProtocolError(f'{count - len(room)} bytes more than were asked for')
                room[:count] = piece
                self._room = room[count:]
                sink.got += count
        ended = self._chunks.ended if self._chunks is not None else self._left == 0
        if ended or full or (self._left is None and self._chunks is None and sink.got == self._want):
            self._finish(stray or full)
        elif self._left is not None and not isinstance(self._room, int):
            self._view = self._room

    def _finish(self, last: bool = False) -> None:
        head: Head = self._head  # type: ignore[assignment]
        sink: Sink = self._sink  # type: ignore[assignment]
        future, want = self._future, self._want
        last = last or self._last or (self._left is None and self._chunks is None)
        self._sink = None
        self._clear()
        self._used = True
        if last:
            self.transport.close()
        else:
            self._pool.keep(self)
        if future.done():
            return
        # Never is memory handed on that was not filled.
        if want is not None and sink.got != want:
            future.set_exception(ConnectionResetError(f'the body ended after {sink.got} bytes of {want}'))
        else:
            future.set_result(head)


class Pool:
    """The connections of one client, under one event loop.

    Args:
      connect_timeout: seconds until a connection stands, with the host's name looked up and TLS agreed upon.
      read_timeout: seconds without a byte after which an exchange fails.
    """

    def __init__(self, connect_timeout: float, read_timeout: float) -> None:
        self._connect_timeout, self._read_timeout = connect_timeout, read_timeout
        self.scratch = bytearray(_SCRATCH)
        self.connections: set[Connection] = set()
        self._idle: dict[Origin, list[Connection]] = {}
        self._names: dict[Origin, tuple[float, asyncio.Future[list[str]]]] = {}
        self._turn = itertools.count()
        self._context: asyncio.Future[ssl.SSLContext] | None = None
        self._loop = asyncio.get_running_loop()
        self._ticking: asyncio.TimerHandle | None = None
        self._closed = False
        self._empty = asyncio.Event()

    async def exchange(self, target: Target, request: bytes, sink: Sink, bodiless: bool = False) -> Head:
        """Send a request and have its reply received by the sink.

        Raises:
          ProtocolError: if what comes is not HTTP, or not as long as it says.
          ConnectionError, OSError, TimeoutError: if it breaks off, or nothing comes.
          ssl.SSLCertVerificationError: if the server is not who it says.
        """
        connection = self._take(target.origin) or await self._connect(target.origin)
        while True:
            future = connection.send(request, sink, bodiless)
            try:
                return await future
            except _StaleError:
                # As a store does that has not been asked for some seconds: nobody's fault, and no attempt is spent.
                connection = await self._connect(target.origin)
            except asyncio.CancelledError:
                connection.fail(ConnectionAbortedError('cancelled'))
                raise

    def _take(self, origin: Origin) -> Connection | None:
        idle, oldest = self._idle.get(origin), now() - _KEEP
        while idle:
            connection = idle.pop()
            if connection.moved > oldest and not connection.transport.is_closing():
                return connection
            connection.transport.close()
        return None

    def keep(self, connection: Connection) -> None:
        """Use a connection again."""
        self._idle.setdefault(connection.origin, []).append(connection)

    def forget(self, connection: Connection) -> None:
        """A connection is closed."""
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()
        if not connection.busy and connection in (idle := self._idle.get(connection.origin, [])):
            idle.remove(connection)

    async def _connect(self, origin: Origin) -> Connection:
        if self._ticking is None and not self._closed:
            self._ticking = self._loop.call_later(min(_TICK, self._read_timeout / 4), self._tick)
        async with asyncio.timeout(self._connect_timeout):
            addresses = await self._addresses(origin)
            context = await self._tls() if origin.secure else None
            first, failure = next(self._turn), OSError('no address')
            for i in range(len(addresses)):
                address = addresses[(first + i) % len(addresses)]
                try:
                    _, connection = await self._loop.create_connection(
                        lambda: Connection(self, origin), address, origin.port,
                        ssl=context, server_hostname=origin.host if origin.secure else None,
                    )  # fmt: skip
                except ssl.SSLCertVerificationError:
                    raise
                except OSError as error:
                    failure = error
                    continue
                if self._closed:
                    connection.transport.abort()
                    raise ConnectionAbortedError('the client is closed')
                return connection
            self._names.pop(origin, None)
            raise failure

    async def _addresses(self, origin: Origin) -> list[str]:
        """The addresses of a host, looked up by one for all that wait."""
        with contextlib.suppress(ValueError):
            return [str(ipaddress.ip_address(origin.host))]
        until, future = self._names.get(origin, (0.0, None))
        if future is None or now() > until or (future.done() and (future.cancelled() or future.exception())):
            future = asyncio.ensure_future(self._look_up(origin))
            self._names[origin] = (now() + _NAMES_FOR, future)
        return await asyncio.shield(future)

    async def _look_up(self, origin: Origin) -> list[str]:
        found = await self._loop.getaddrinfo(origin.host, origin.port, type=1)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    async def _tls(self) -> ssl.SSLContext:
        # Reading the certificates of all authorities takes tens of milliseconds: not on the loop, and once.
        if self._context is None:
            self._context = asyncio.ensure_future(offload(ssl.create_default_context))
        return await asyncio.shield(self._context)

    def _tick(self) -> None:
        """Fail what stalls, and close what has been idle for long: one timer for all, instead of one for each."""
        late, old = now() - self._read_timeout, now() - _KEEP
        for connection in list(self.connections):
            if connection.busy and connection.moved < late:
                connection.fail(TimeoutError(f'no byte for {self._read_timeout:g} s'))
            elif not connection.busy and connection.moved < old:
                connection.transport.close()
        busy = bool(self.connections) and not self._closed
        wait = min(_TICK, self._read_timeout / 4)
        self._ticking = self._loop.call_later(wait, self._tick) if busy else None

    async def aclose(self) -> None:
        """Close all connections; what waits for a reply fails."""
        self._closed = True
        if self._ticking is not None:
            self._ticking.cancel()
        pending = [future for _, future in self._names.values()] + ([] if self._context is None else [self._context])
        for future in pending:
            future.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        self._empty.clear()
        for connection in list(self.connections):
            connection.fail(ConnectionAbortedError('the client is closed'))
        if self.connections:
            with contextlib.suppress(TimeoutError):  # a peer of TLS that does not say goodbye
                await asyncio.wait_for(self._empty.wait(), 1.0)

"""HTTP/1.1 for range reads: connections that stay open and receive a body directly into its destination.

A general-purpose client passes a body on in pieces, through a parser, a buffer and a stream; for replies of 100 kB,
that takes most of the time. Here, only the head of a reply is parsed in Python, and the system call receives the body
into the memory that the caller provides. Compression, pipelining and proxies are not supported.
"""

import asyncio
import collections
import re
import select
import time
from collections.abc import Iterable
from typing import Final, Protocol

from granular.aio.http.messages import Chunks, Head, Origin, ProtocolError, Target, parse, shown
from granular.config import KiB

SCRATCH: Final = 64 * KiB  # received at a time while the destination is unknown
_LONGEST_HEAD: Final = 64 * KiB  # including the informational heads before it
_BEGINNING: Final = b'HTTP/1.'
_SAFE: Final = (b'GET ', b'HEAD ')  # requests that are safe to send again
_BARE: Final = re.compile(rb'(?<!\r)\n')
_PIECE: Final = 64 * KiB  # of a request's body, passed to the transport at a time

now = time.monotonic


class Sink:
    """The receiver of a reply. ``got`` counts the bytes of its body; ``body`` holds the bytes that were collected."""

    got = 0
    body: bytearray

    def place(self, head: Head) -> memoryview | int:
        """Return the memory that the body must fill exactly, or the number of its bytes to collect.

        Called with the head of a reply. An exception raised here ends the exchange.
        """
        return 4096


class StaleError(ConnectionError):
    """A reused connection that cannot serve another request, through no fault of the request."""


class Exchange:
    """A request and the destination of its reply: on one connection, or on two if it is hedged.

    Args:
      target: the server and the object.
      request: the head of the request.
      sink: the receiver of the reply.
      bodiless: True if the reply has no body regardless of its head, as for HEAD.
      body: the body of the request.
      hedged: True if the request may be hedged.
    """

    __slots__ = ('bodiless', 'body', 'future', 'hedged', 'on', 'request', 'sink', 'target')

    def __init__(
        self,
        target: Target,
        request: bytes,
        sink: Sink,
        bodiless: bool,
        body: bytes | memoryview = b'',
        hedged: bool = True,
    ) -> None:
        self.target, self.request, self.sink, self.bodiless = target, request, sink, bodiless
        self.body, self.hedged = body, hedged
        self.future: asyncio.Future[Head] = asyncio.get_running_loop().create_future()
        self.on: list[Connection] = []

    def drop(self, but: 'Connection | None' = None) -> None:
        """Remove the exchange from its connections, except ``but``, and close those that still serve it."""
        for connection in self.on:
            if connection is not but and connection.exchange is self:
                connection.drop()
        self.on = [] if but is None else [but]


class ConnectionPool(Protocol):
    """The interface of a pool that its connections use.

    Attributes:
      scratch: memory into which all connections receive heads, one after the other.
      latencies: seconds from each recent request to the head of its reply.
    """

    scratch: bytearray
    latencies: collections.deque[float]

    def opened(self, connection: 'Connection') -> None:
        """Register a connection that is established."""

    def keep(self, connection: 'Connection') -> None:
        """Take back a connection that can serve another request."""

    def forget(self, connection: 'Connection') -> None:
        """Remove a connection that is closed."""


class Connection(asyncio.BufferedProtocol):
    """A connection, with one request on it at a time."""

    def __init__(self, pool: ConnectionPool, origin: Origin) -> None:
        self._pool, self.origin = pool, origin
        self._scratch, self._scratch_view = pool.scratch, memoryview(pool.scratch)
        self.transport: asyncio.Transport
        self.moved = self.sent = now()
        self.mark = (0.0, 0)  # a time, and the bytes of the body received by then
        self._used = False
        self._previous = (b'', '', False)  # the head of the last reply, the requested path, and whether by HEAD
        self._poll = select.poll()
        self._paused = False  # True if the transport's send buffer is full
        self.exchange: Exchange | None = None
        self._clear()

    def _clear(self) -> None:
        self.head: Head | None = None
        self._held = b''  # the beginning of an incomplete head
        self._informed = 0  # bytes of informational heads
        self._view: memoryview | None = None  # the destination of the rest of the body
        self._left: int | None = None  # bytes of the body still to come; None if its end is marked otherwise
        self._room: memoryview | int = 0
        self._want: int | None = None  # bytes that must arrive; None if the body is collected
        self._chunks: Chunks | None = None
        self._last = False  # True if this is the last reply on the connection
        self.unsent: memoryview | None = None  # the rest of the request's body

    def send(self, exchange: Exchange) -> None:
        """Send a request; the exchange's future returns the head once the body has reached its destination."""
        self.exchange = exchange
        exchange.on.append(self)
        self.moved = self.sent = now()
        if self.transport.is_closing():  # connection_lost may have been called already
            self.fail(StaleError('closed while idle') if self._used else ConnectionResetError('closed at once'))
        else:
            self.transport.write(exchange.request)
            if exchange.body:
                self.unsent = memoryview(exchange.body).cast('B')
                self._send_on()

    def is_silent(self) -> bool:
        """Return whether no unread data is waiting, which would be taken for the reply to the next request."""
        return not self._poll.poll(0)

    def _send_on(self) -> None:
        """Send the body of a request as fast as the transport accepts it, in pieces, so that progress is observable."""
        while self.unsent and not self._paused and not self.transport.is_closing():
            piece, self.unsent = self.unsent[:_PIECE], self.unsent[_PIECE:]
            self.moved = self.sent = now()
            self.transport.write(piece)

    def fail(self, error: BaseException) -> None:
        """Close the connection, and fail the exchange unless it is still in flight on another connection."""
        exchange = self.exchange
        self.drop()
        if exchange is not None:
            exchange.on = [other for other in exchange.on if other is not self]
            if not exchange.on and not exchange.future.done():
                exchange.future.set_exception(error)

    def drop(self) -> None:
        """Close the connection."""
        self.exchange = None
        self._clear()
        self.transport.abort()

    # --- callbacks of the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._poll.register(transport.get_extra_info('socket').fileno(), select.POLLIN)
        self._pool.opened(self)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._send_on()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch_view if self._view is None else self._view

    def buffer_updated(self, nbytes: int) -> None:
        self.moved = now()
        view, exchange = self._view, self.exchange
        if view is None:
            if exchange is None:
                self.transport.abort()  # unsolicited data cannot be told from a later reply
                return
            try:
                self._take(exchange, nbytes)
            except Exception as error:
                self.fail(error)
            return
        exchange.sink.got += nbytes  # type: ignore[union-attr]
        self._left -= nbytes  # type: ignore[operator]
        if self._left:
            self._view = view[nbytes:]
        else:
            self._finish(exchange)  # type: ignore[arg-type]

    def eof_received(self) -> None:
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        exchange = self.exchange
        if exchange is None:
            return
        if self.head is not None and self._left is None and self._chunks is None and exc is None:
            self._finish(exchange)
        elif self.head is not None:
            self.fail(ConnectionResetError(f'the connection was closed after {exchange.sink.got} bytes of the body'))
        elif self._used and not self._held:
            self.fail(StaleError('closed while idle'))
        else:
            self.fail(exc or ConnectionResetError('the connection was closed before a reply came'))

    # --- replies

    def _take(self, exchange: Exchange, count: int) -> None:
        """Continue to receive a head, or a body that is collected or chunked."""
        if self.head is not None:
            self._deliver(exchange, self._scratch_view[:count])
            return
        size_before = len(self._held)
        if size_before:
            data: bytes | bytearray = self._held + self._scratch_view[:count]
            count = len(data)
        else:
            data = self._scratch
        at = 0
        while (end := data.find(b'\r\n\r\n', at, count)) >= 0:
            raw = bytes(data[at:end])
            head = parse(raw)
            at = end + 4
            if head.status >= 200:
                self._check_repeated(exchange, raw)
                self._begin(exchange, head, memoryview(data)[at:count])
                return
            if head.status == 101:
                raise ProtocolError('status 101, a protocol that was not asked for')
            self._informed += len(raw)
        # A server that ends its lines with a bare line feed would never end its head.
        if _BARE.search(data, max(at, size_before), count):
            raise ProtocolError('the head of a reply has a line that ends in a bare line feed')
        self._held = bytes(data[at:count])
        if not self._held.startswith(_BEGINNING[: len(self._held)]):
            raise ProtocolError(f'not a reply of HTTP/1.1: {shown(self._held[:80].decode("latin-1"))}')
        if len(self._held) + self._informed > _LONGEST_HEAD:
            raise ProtocolError(f'the head of a reply has more than {_LONGEST_HEAD} bytes')

    def _check_repeated(self, exchange: Exchange, raw: bytes) -> None:
        """Refuse a head that equals the previous one byte for byte although another path is requested.

        A server or proxy that sends a reply twice is out of step from then on, and the same range of another object
        would be taken for the requested one; or the body that follows a reply to HEAD would be taken for that of the
        object. A fresh connection settles the question: it has no previous reply.
        """
        previous, self._previous = self._previous, (raw, exchange.target.path, exchange.bodiless)
        if previous[0] == raw and previous[1:] != self._previous[1:] and exchange.request.startswith(_SAFE):
            raise StaleError('the same reply came twice')

    def _begin(self, exchange: Exchange, head: Head, rest: memoryview) -> None:
        sink = exchange.sink
        if len(exchange.on) > 1:
            exchange.drop(but=self)  # the first connection to reply wins
        self._pool.latencies.append(self.moved - self.sent)
        self.head, self._held, self.mark, sink.got = head, b'', (self.moved, 0), 0
        headers = head.headers
        coding = headers.get('transfer-encoding', '').lower()
        self._last = 'close' in headers.get('connection', '').lower()
        if exchange.bodiless or head.status in (204, 304):
            self._left = 0
        elif coding:
            if coding != 'chunked':
                raise ProtocolError(f'a reply with Transfer-Encoding {shown(coding)}')
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
            self._finish(exchange, bool(rest))
        elif rest or isinstance(room, int):
            self._deliver(exchange, rest)
        elif self._left is not None:
            self._view = room

    def _deliver(self, exchange: Exchange, data: memoryview) -> None:
        sink = exchange.sink
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
                    break  # the rest may be arbitrarily long, so it is not read
            else:
                if count > len(room):
                    raise ProtocolError(f'{count - len(room)} bytes more than were asked for')
                room[:count] = piece
                self._room = room[count:]
                sink.got += count
        ended = self._chunks.ended if self._chunks is not None else self._left == 0
        if ended or full or (self._left is None and self._chunks is None and sink.got == self._want):
            self._finish(exchange, stray or full)
        elif self._left is not None and not isinstance(self._room, int):
            self._view = self._room

    def _finish(self, exchange: Exchange, last: bool = False) -> None:
        head: Head = self.head  # type: ignore[assignment]
        future, want, got = exchange.future, self._want, exchange.sink.got
        last = last or self._last or bool(self.unsent) or (self._left is None and self._chunks is None)
        self.exchange = None
        self._clear()
        self._used = True
        if last:
            self.transport.close()
        elif self.origin.secure:
            # Data that TLS has decrypted beyond the reply is delivered in the loop's next round, before this callback.
            asyncio.get_running_loop().call_soon(self._keep)
        else:
            self._pool.keep(self)
        if future.done():
            return
        # Never return memory that was not filled.
        if want is not None and got != want:
            future.set_exception(ConnectionResetError(f'the body ended after {got} bytes of {want}'))
        else:
            future.set_result(head)

    def _keep(self) -> None:
        if not self.transport.is_closing():
            self._pool.keep(self)

"""HTTP/1.1 for range reads: connections that stay open and receive a body directly into its destination.

A general-purpose client passes a body on in pieces, through a parser, a buffer and a stream; for replies of 100 kB,
that takes most of the time. Here, only the head of a reply is parsed in Python, and the system call receives the body
into the memory that the caller provides. Compression and pipelining are not supported.
"""

import asyncio
import collections
import re
import select
import time
from collections.abc import Iterable
from typing import Final, Protocol

from granular.aio.http.messages import Chunks, Head, Origin, ProtocolError, Target, parse, shown
from granular.aio.runtime.replied import note_reply
from granular.config import KiB
from granular.metrics import Histogram

SCRATCH: Final = 64 * KiB  # received at a time while the destination is unknown
_HEAD: Final = 4 * KiB  # received first of a large body, because what comes with the head is copied
_LONGEST_HEAD: Final = 64 * KiB  # including the informational heads before it
_BEGINNING: Final = b'HTTP/1.'
_SAFE: Final = (b'GET ', b'HEAD ')  # requests that are safe to send again
_BARE: Final = re.compile(rb'(?<!\r)\n')
_PIECE: Final = 64 * KiB  # of a request's body, passed to the transport at a time
_HEDGES: Final = 2  # hedged requests of an exchange: the first may be as slow as the request

now = time.monotonic


class StaleError(ConnectionError):
    """A reused connection that cannot serve another request, through no fault of the request."""


class CutReplyError(ConnectionResetError):
    """The connection ended in the body of a reply."""


class StalledReplyError(TimeoutError):
    """The body of a reply came to a halt, or comes at less than the minimum rate."""


class PoolClosedError(ConnectionAbortedError):
    """The pool was closed before the request ended, so that no other attempt can succeed."""

    def __init__(self) -> None:
        super().__init__('the connections of its event loop were closed before it ended')


class Exchange:
    """A request and the receiver of its reply: on one connection, or on up to three if it is hedged."""

    __slots__ = (
        'bodiless', 'body', 'collected', 'first', 'future', 'got', 'hedged', 'large', 'others', 'request', 'target'
    )  # fmt: skip

    def __init__(self) -> None:
        self.target: Target  # the server and the object; known once it is sent, as the request
        self.request: bytes  # its head
        self.body: bytes | memoryview = b''  # of the request
        self.bodiless = False  # True if the reply has no body regardless of its head, as for HEAD
        self.hedged = True  # True if the request may be hedged
        self.large = False  # True if the body of the expected reply is larger than ``SCRATCH / 2``
        self.got = 0  # bytes of the reply's body that have arrived
        self.collected: bytearray  # the body, if it is collected
        self.future: asyncio.Future[Head] | None = None  # returns the head of the reply, if a coroutine awaits it
        self.first: Connection | None = None  # on which the request was sent, or the one that replies
        self.others: tuple[Connection, ...] = ()  # those of the hedged requests, in order

    def expects(self, head: bytes) -> int:
        """Return the length of the body, at least one byte, if a head is exactly that of the expected reply, else -1.

        The head has the end of its last line, but not the empty line.
        """
        return -1

    def parsed(self, raw: bytes, head: Head) -> None:
        """Called after ``place`` with a head that was parsed, and as bytes like those of ``expects``."""

    def allocate(self, length: int) -> memoryview:
        """Return the memory for the body of an expected reply."""
        raise NotImplementedError

    def filled(self, body: memoryview) -> None:
        """Take the whole body of an expected reply, from memory that is used for the next one afterwards."""
        raise NotImplementedError

    def place(self, head: Head) -> memoryview | int:
        """Return the memory that the body of a parsed reply must fill exactly, or the bytes to collect."""
        return 4096

    def succeeded(self, head: Head | None) -> None:
        """Called when the body is complete, with the head; None for that of an expected reply. It must not raise."""
        if self.future is not None and not self.future.done():
            self.future.set_result(head)  # type: ignore[arg-type]

    def failed(self, error: Exception) -> None:
        """Called when no connection serves the exchange any more. It must not raise."""
        if self.future is not None and not self.future.done():
            self.future.set_exception(error)

    def is_sent(self) -> bool:
        return self.first is not None and self.first.exchange is self

    def waits(self) -> bool:
        """Return whether the request was sent, may be hedged once more, and no reply has begun."""
        return len(self.others) < _HEDGES and self.is_sent() and not self.first.begun  # type: ignore[union-attr]

    def drop(self, but: 'Connection | None' = None) -> None:
        """Remove the exchange from its connections, except ``but``, and close those that still serve it."""
        for connection in (self.first, *self.others):
            if connection is not None and connection is not but and connection.exchange is self:
                connection.drop()
        self.first, self.others = but, ()


class ConnectionPool(Protocol):
    """The interface of a pool that its connections use."""

    scratch: bytearray
    """Memory into which all connections of a loop receive heads, one after the other."""
    latencies: collections.deque[float]
    """Seconds from each recent request to the head of its reply."""
    first_byte: Histogram
    """Counts these seconds, of all requests."""

    def opened(self, connection: 'Connection') -> None:
        """Register a connection that is established."""

    def keep(self, connection: 'Connection') -> None:
        """Take back a connection that can serve another request."""

    def forget(self, connection: 'Connection') -> None:
        """Remove a connection that is closed."""


class Connection(asyncio.BufferedProtocol):
    """A connection, with one request on it at a time."""

    surplus = False  # True if more data has arrived than TLS has delivered

    def __init__(self, pool: ConnectionPool, origin: Origin) -> None:
        self._pool, self.origin = pool, origin
        self._scratch, self._scratch_view = pool.scratch, memoryview(pool.scratch)
        self._head_view = self._scratch_view[:_HEAD]
        self._beginning = self._scratch_view  # the part that is received into next
        self.transport: asyncio.Transport  # that of the event loop, or ``TlsLayer``
        self.moved = self.sent = now()  # the times of the last byte and of the request
        self.mark_time, self.mark_got = 0.0, 0  # bytes of the body that had arrived at a time
        self._used = False
        self._previous = (b'', '', False)  # the head of the last reply, the requested path, and whether by HEAD
        self._poll = select.poll()
        self._paused = False  # True if the transport's send buffer is full
        self.exchange: Exchange | None = None
        self._clear()

    def _clear(self) -> None:
        self.begun = False  # True once the head of the reply has arrived
        self.destination: memoryview | None = None  # the memory for the rest of the body, once it is known
        self._left: int | None = None  # bytes of the body still to come; None if its end is marked otherwise
        self._reply: _ParsedReply | None = None  # unless the reply is exactly the expected one
        self._held = b''  # the beginning of an incomplete head
        self._informed = 0  # bytes of informational heads
        self.unsent: memoryview | None = None  # the rest of the request's body

    def send(self, exchange: Exchange, hedged: bool = False) -> None:
        """Send a request; if it is ``hedged``, another connection serves it already."""
        if hedged:
            exchange.others = (*exchange.others, self)
        else:
            exchange.first, exchange.others = self, ()
        self.exchange = exchange
        self._beginning = self._head_view if exchange.large else self._scratch_view
        self.moved = self.sent = now()
        if self.transport.is_closing():  # connection_lost may have been called already
            self.fail(StaleError('closed while idle') if self._used else ConnectionResetError('closed at once'))
            return
        self.transport.write(exchange.request)
        if exchange.body:
            self.unsent = memoryview(exchange.body).cast('B')
            self._send_on()

    def is_silent(self) -> bool:
        """Return whether no unread data is waiting, which would be taken for the reply to the next request."""
        return not self._poll.poll(0)

    def is_idle(self) -> bool:
        return self._used and self.exchange is None and not self.transport.is_closing()

    def _send_on(self) -> None:
        """Send the body of a request as fast as the transport accepts it, in pieces, so that progress is observable."""
        while self.unsent and not self._paused and not self.transport.is_closing():
            piece, self.unsent = self.unsent[:_PIECE], self.unsent[_PIECE:]
            self.moved = self.sent = now()
            self.transport.write(piece)

    def fail(self, error: Exception) -> None:
        """Close the connection, and fail the exchange unless it is still in flight on another connection."""
        exchange = self.exchange
        self.drop()
        if exchange is None:
            return
        served = [other for other in (exchange.first, *exchange.others) if other and other.exchange is exchange]
        if served:
            exchange.first, exchange.others = served[0], tuple(served[1:])
        else:
            exchange.failed(error)

    def drop(self) -> None:
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
        return self._beginning if self.destination is None else self.destination

    def buffer_updated(self, nbytes: int) -> None:
        self.moved = now()
        view, exchange = self.destination, self.exchange
        if view is not None:
            exchange.got += nbytes  # type: ignore[union-attr]
            self._left -= nbytes  # type: ignore[operator]
            if self._left:
                self.destination = view[nbytes:]
            elif self._reply is None:
                self._end_expected(exchange)  # type: ignore[arg-type]
            else:
                self._end(exchange, self._reply)  # type: ignore[arg-type]
            return
        if exchange is None:
            self.transport.abort()  # unsolicited data cannot be told from a later reply
            return
        try:
            if self._reply is not None:
                self._deliver(exchange, self._reply, self._scratch_view[:nbytes])
            elif self._held or not self._take_expected(exchange, nbytes):
                self._take_head(exchange, nbytes)
        except Exception as error:
            self.fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        exchange, reply = self.exchange, self._reply
        if exchange is None:
            return
        if reply is not None and self._left is None and reply.chunks is None and exc is None:
            self._end(exchange, reply)
        elif self.begun:
            self.fail(CutReplyError(f'the connection was closed after {exchange.got} bytes of the body'))
        elif self._used and not self._held:
            self.fail(StaleError('closed while idle'))
        else:
            self.fail(exc or ConnectionResetError('the connection was closed before a reply came'))

    # --- a reply whose head is exactly as expected: nothing else is parsed

    def _take_expected(self, exchange: Exchange, count: int) -> bool:
        view = self._scratch_view
        end = self._scratch.find(b'\r\n\r\n', 0, count) + 2
        if end == 1:
            return False
        head = bytes(view[:end])
        length = exchange.expects(head)
        arrived = count - end - 2
        if length < arrived or length < 0:
            return False
        self._begin(exchange, head)
        exchange.got = arrived
        if arrived == length:
            exchange.filled(view[end + 2 : count])
            self._end_expected(exchange)
            return True
        room = exchange.allocate(length)
        room[:arrived] = view[end + 2 : count]
        self.destination, self._left = room[arrived:], length - arrived
        return True

    def _end_expected(self, exchange: Exchange) -> None:
        self.exchange = None
        self.destination = None
        self._left = None
        self.begun = False
        self._informed = 0
        self._used = True
        self._reuse()
        exchange.succeeded(None)

    # --- any other reply

    def _take_head(self, exchange: Exchange, count: int) -> None:
        size_before = len(self._held)
        if size_before:
            data: bytes | bytearray = self._held + self._scratch_view[:count]
            count = len(data)
        else:
            data = self._scratch
        at = 0
        while (end := data.find(b'\r\n\r\n', at, count)) >= 0:
            raw = bytes(data[at : end + 2])
            head = parse(raw[:-2])
            at = end + 4
            if head.status >= 200:
                self._begin_parsed(exchange, raw, head, memoryview(data)[at:count])
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

    def _begin(self, exchange: Exchange, raw: bytes) -> None:
        """Take the head of a reply, unless it equals the previous one byte for byte although another path is requested.

        A server or proxy that sends a reply twice is out of step from then on, and the same range of another object
        would be taken for the requested one; or the body that follows a reply to HEAD would be taken for that of the
        object. A fresh connection settles the question: it has no previous reply.
        """
        previous, self._previous = self._previous, (raw, exchange.target.path, exchange.bodiless)
        if previous[0] == raw and previous != self._previous and exchange.request.startswith(_SAFE):
            raise StaleError('the same reply came twice')
        if not self._used:
            note_reply(self.origin.server)
        if exchange.others:
            exchange.drop(but=self)  # the first connection to reply wins
        seconds = self.moved - self.sent
        self._pool.latencies.append(seconds)
        self._pool.first_byte.observe(seconds)
        self.begun = True
        self.mark_time = self.moved
        self.mark_got = 0

    def _begin_parsed(self, exchange: Exchange, raw: bytes, head: Head, rest: memoryview) -> None:
        self._begin(exchange, raw)
        self._held = b''
        exchange.got = 0
        self._beginning = self._scratch_view
        bodiless = exchange.bodiless or head.status in (204, 304)
        reply = self._reply = _ParsedReply(head, bodiless)
        if bodiless:
            self._left = 0
        elif reply.chunks is None:
            self._left = head.length
        room = reply.room = exchange.place(head)
        exchange.parsed(raw, head)
        if isinstance(room, int):
            exchange.collected = bytearray()
        else:
            reply.expected = len(room)
        if self._left is not None and reply.expected not in (None, self._left):
            raise ProtocolError(f'expected a body of {reply.expected} bytes, got Content-Length {self._left}')
        if self._left == 0:
            self._end(exchange, reply, bool(rest))
        elif rest or isinstance(room, int):
            self._deliver(exchange, reply, rest)
        elif self._left is not None:
            self.destination = room

    def _deliver(self, exchange: Exchange, reply: '_ParsedReply', data: memoryview) -> None:
        """Take the next bytes of a body that is collected or chunked, or of which a part came with the head."""
        pieces: Iterable[memoryview | bytes] = (data,) if reply.chunks is None else reply.chunks.feed(data)
        full = stray = False
        for piece in pieces:
            count = len(piece)
            if self._left is not None:
                if count > self._left:
                    piece, count, stray = piece[: self._left], self._left, True
                self._left -= count
            room = reply.room
            if isinstance(room, int):
                exchange.collected += piece[: room - exchange.got]
                exchange.got += count
                if full := exchange.got >= room and self._left != 0:
                    break  # the rest may be arbitrarily long, so it is not read
            else:
                if count > len(room):
                    raise ProtocolError(f'{count - len(room)} bytes more than were asked for')
                room[:count] = piece
                reply.room = room[count:]
                exchange.got += count
        ended = self._left == 0
        if reply.chunks is not None:
            ended, stray = reply.chunks.ended, bool(reply.chunks.rest)
        if ended or full or (self._left is None and reply.chunks is None and exchange.got == reply.expected):
            self._end(exchange, reply, stray or full)
        elif self._left is not None and not isinstance(reply.room, int):
            self.destination = reply.room

    def _end(self, exchange: Exchange, reply: '_ParsedReply', last: bool = False) -> None:
        last = last or reply.last or bool(self.unsent) or (self._left is None and reply.chunks is None)
        self.exchange = None
        self._clear()
        self._used = True
        if last:
            self.transport.abort()
        else:
            self._reuse()
        # Never return memory that was not filled.
        if reply.expected is not None and exchange.got != reply.expected:
            exchange.failed(CutReplyError(f'the body ended after {exchange.got} bytes of {reply.expected}'))
        else:
            exchange.succeeded(reply.head)

    def _reuse(self) -> None:
        if self.surplus:
            # Data that TLS decrypts beyond the reply is delivered before this callback: the connection may end with it.
            asyncio.get_running_loop().call_soon(self._keep)
        else:
            self._pool.keep(self)

    def _keep(self) -> None:
        if not self.transport.is_closing():
            self._pool.keep(self)


class _ParsedReply:
    """A reply whose head was parsed, while its body arrives."""

    __slots__ = ('chunks', 'expected', 'head', 'last', 'room')

    def __init__(self, head: Head, bodiless: bool) -> None:
        coding = '' if bodiless else head.headers.get('transfer-encoding', '').lower()
        if coding not in ('', 'chunked'):
            raise ProtocolError(f'a reply with Transfer-Encoding {shown(coding)}')
        self.head = head
        self.chunks = Chunks() if coding else None  # the decoder of a chunked body
        self.last = 'close' in head.headers.get('connection', '').lower()  # on its connection
        self.room: memoryview | int = 0  # memory for the rest of the body, or the number of bytes to collect
        self.expected: int | None = None  # bytes that must arrive; None if the body is collected

"""The connections of one client: opened, reused, monitored, and hedged if a reply is slow."""

import asyncio
import collections
import contextlib
import ipaddress
import itertools
import socket
import ssl
import weakref
from collections.abc import Collection, Sequence
from typing import Any, Final, TypeVar

from granular._support.text import logger
from granular.aio.http.connection import (
    SCRATCH,
    Connection,
    Exchange,
    PoolClosedError,
    StaleError,
    StalledReplyError,
    now,
)
from granular.aio.http.governor import descriptors
from granular.aio.http.messages import Head, Origin
from granular.aio.http.proxies import open_tunnel
from granular.aio.http.tls import context_of
from granular.aio.http.tls_layer import RECEIVED, TlsLayer
from granular.aio.runtime.replied import has_replied
from granular.aio.runtime.tasks import has_failed, result_of, was_cancelled
from granular.aio.runtime.threads import offload
from granular.config import IOConfig
from granular.errors import GranularError
from granular.metrics import StoreMetrics

KEEP: Final = 15.0  # seconds after which an idle connection is not reused: routers drop them silently
_NAMES_FOR: Final = 60.0  # seconds for which the addresses of a host are cached
_OPENING: Final = 512  # connections that are opened at a time: thousands would keep the loop busy beyond the timeout
_NEXT_AFTER: Final = 0.5  # seconds after which another address of a host is tried as well
TICK: Final = 1.0  # maximum seconds between two checks for stalled connections
_SOONEST: Final = 0.02
_EARLY: Final = 0.1  # until the store's latency is known
_KNOWN: Final = 64  # replies after which the store's latency is known
_SLOW: Final = 0.05  # seconds after which a reply is slow, at the least
_MOST_HEDGES: Final = 16.0

_NO_NAME: Final = (socket.EAI_NONAME, socket.EAI_NODATA)

T = TypeVar('T')

_Buffers = tuple[bytearray, memoryview]
_buffers: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Buffers]] = weakref.WeakKeyDictionary()
"""Memory into which all connections of a loop receive heads, and that for TLS: a process may read from many hosts."""

_ByAge = weakref.WeakKeyDictionary[Connection, None]
_open: Final[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _ByAge]] = weakref.WeakKeyDictionary()
"""The connections of all pools of a loop."""


class UnreachableError(ConnectionError):
    """A server to which no connection could be established, or whose name could not be resolved."""

    def __init__(self, origin: Origin, reason: str, nameless: bool = False) -> None:
        self.known = has_replied(origin.server)  # True if it has replied to this process before
        self.nameless = nameless  # True if its name does not exist
        super().__init__(reason if self.known else f'{reason}: check its address, such as endpoint_url')


class ConnectTimeoutError(TimeoutError):
    """No connection was established in time."""


class Pool:
    """The connections of one client, under one event loop.

    A request whose reply has not begun after 1.5 times the 95th percentile of recent latencies is sent on another
    connection as well (hedged), after the same time on a third one, and the first reply wins. This applies only to a
    share of the requests, less those that the store throttles.
    """

    def __init__(self, config: IOConfig, metrics: StoreMetrics, tls_verify: bool | str) -> None:
        self._config = config
        self._metrics = metrics
        self._tls_verify = tls_verify
        self.first_byte = metrics.first_byte
        self.latencies: collections.deque[float] = collections.deque(maxlen=512)  # seconds until a reply began
        self._slow = float('inf')  # seconds after which a request is hedged
        self._spare = 0.0  # hedged requests still permitted
        self._judged = 0.0  # time of the last evaluation of latencies
        self._hedging: dict[Exchange, asyncio.Task[None]] = {}  # opens a connection for another request
        self.connections: dict[Connection, None] = {}  # by age: the order of hedged requests
        self._idle: dict[Origin, list[Connection]] = {}
        self._names: dict[Origin, tuple[float, asyncio.Future[list[str]]]] = {}
        self._turn = itertools.count()
        self._opening = asyncio.Semaphore(_OPENING)
        self._late: set[str] = set()  # addresses that failed, or did not answer soon: the others are tried before them
        self._context: asyncio.Future[ssl.SSLContext] | None = None
        self._loop = asyncio.get_running_loop()
        if self._loop not in _buffers:
            _buffers[self._loop] = bytearray(SCRATCH), memoryview(bytearray(RECEIVED))
        self.scratch, self._received = _buffers[self._loop]
        self._open_in_loop = _open.setdefault(self._loop, weakref.WeakKeyDictionary())
        self._ticking: asyncio.TimerHandle | None = None
        self._closed = False
        self._empty = asyncio.Event()
        self._last: Origin | None = None  # the server of the last request that needed a coroutine

    async def exchange(self, exchange: Exchange) -> Head:
        """Send a request and receive its reply.

        Raises:
          ProtocolError: if the reply is not HTTP, or does not have the length it states.
          OSError: if the connection breaks, stalls or cannot be established: ``UnreachableError``, ``PoolClosedError``,
            ``TimeoutError``, ``ssl.SSLCertVerificationError`` and others.
        """
        origin = self._last = exchange.target.origin
        connection = self.take(origin) or await self.connect(origin)
        while True:
            exchange.future = self._loop.create_future()
            connection.send(exchange)
            try:
                return await exchange.future
            except StaleError:  # a server may close a connection that was idle for seconds: that spends no attempt
                connection = await self.connect(origin)
            except asyncio.CancelledError:
                exchange.drop()
                raise

    def has_replied(self) -> bool:
        """Return whether the server of the last request has ever replied."""
        return self._last is not None and has_replied(self._last.server)

    def throttled(self) -> None:
        """Record a throttled request: one less is hedged."""
        self._spare = max(0.0, self._spare - 1)

    def take(self, origin: Origin) -> Connection | None:
        if self._spare < _MOST_HEDGES:
            self._spare += self._config.hedge
        idle, oldest = self._idle.get(origin), now() - KEEP
        while idle:
            connection = idle.pop()
            if connection.moved > oldest and not connection.transport.is_closing() and connection.is_silent():
                return connection
            connection.transport.abort()
        return None

    def opened(self, connection: Connection) -> None:
        self.connections[connection] = None
        self._metrics.connections += 1
        self._metrics.connects += 1
        self._open_in_loop[connection] = None
        if len(self._open_in_loop) > descriptors() // 3:
            self._close_an_idle_one()
        if self._ticking is None and not self._closed:
            self._ticking = self._loop.call_later(self._interval(), self._tick)

    def keep(self, connection: Connection) -> None:
        self._idle.setdefault(connection.origin, []).append(connection)

    def forget(self, connection: Connection) -> None:
        if connection in self.connections:
            del self.connections[connection], self._open_in_loop[connection]
            self._metrics.connections -= 1
        if not self.connections:
            self._empty.set()
        if connection.exchange is None and connection in (idle := self._idle.get(connection.origin, [])):
            idle.remove(connection)

    def _close_an_idle_one(self) -> None:
        """Leave file descriptors to connections to other hosts, and to the program."""
        for connection in self._open_in_loop:
            if connection.is_idle():
                connection.transport.abort()
                break

    async def connect(self, origin: Origin) -> Connection:
        """Open a connection; raise an ``OSError``, as ``exchange`` does, if that fails or takes too long."""
        async with self._opening:
            if self._closed:
                raise PoolClosedError
            seconds = self._config.connect_timeout
            deadline = self._loop.time() + seconds
            addresses = await self._resolved(origin, deadline)
            try:
                async with asyncio.timeout_at(deadline):
                    return await self._open_any(origin, addresses)
            except (TimeoutError, UnreachableError) as error:
                self._forget_names(origin, addresses)
                if str(error):
                    raise  # of the system
                raise ConnectTimeoutError(f'no connection to {origin} within {seconds:g} s') from None

    async def _open_any(self, origin: Origin, addresses: Sequence[str]) -> Connection:
        """Connect to one of the addresses of a host: to the next one as well if one fails, or does not answer soon."""
        context: ssl.SSLContext | None = None
        if origin.secure:
            context = await self._shared(self._tls())
        first = next(self._turn) % max(1, len(addresses))
        waiting = collections.deque(sorted([*addresses[first:], *addresses[:first]], key=self._late.__contains__))
        opening: dict[asyncio.Task[Connection | OSError], str] = {}
        failure = OSError('no address')
        try:
            while waiting or opening:
                if waiting:
                    address = waiting.popleft()
                    opening[self._loop.create_task(self._open(origin, address, context))] = address
                patience = _NEXT_AFTER if waiting else None
                done, _ = await asyncio.wait(opening, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    self._late.update(opening.values())
                for task in done:
                    address, opened = opening.pop(task), task.result()
                    if isinstance(opened, Connection):
                        self._late.discard(address)
                        self._check_new(opened)
                        return opened
                    self._late.add(address)
                    failure = opened
        finally:
            await _abort(opening)
        detail = failure.strerror or str(failure)
        if isinstance(failure, ssl.SSLError) and failure.reason == 'WRONG_VERSION_NUMBER':
            detail = 'it answers without TLS, as an http:// server does'
        raise UnreachableError(origin, f'no connection to {origin} ({detail})') from failure

    async def _resolved(self, origin: Origin, deadline: float) -> list[str]:
        try:
            async with asyncio.timeout_at(deadline):
                return await self._shared(self._addresses(origin))
        except OSError as error:
            if isinstance(error, PoolClosedError) or (isinstance(error, TimeoutError) and has_replied(origin.server)):
                raise
            detail = error.strerror or str(error) or f'no answer within {self._config.connect_timeout:g} s'
            reason = f'the host name {origin.peer[0][:80]!r} cannot be resolved ({detail})'
            nameless = isinstance(error, socket.gaierror) and error.errno in _NO_NAME
            raise UnreachableError(origin, reason, nameless) from error

    async def _open(self, origin: Origin, address: str, context: ssl.SSLContext | None) -> Connection | OSError:
        """Connect to an address. Returns the connection, or the error after which another address is worth a try."""
        connection = Connection(self, origin)
        layer = None if context is None else TlsLayer(connection, context, origin.host, self._received)
        protocol = layer or connection
        try:
            if origin.proxy is not None and origin.secure:
                tunnel = await open_tunnel(origin.proxy, address, origin.host, origin.port)
                await self._loop.create_connection(lambda: protocol, sock=tunnel)
            else:
                await self._loop.create_connection(lambda: protocol, address, origin.peer[1])
            if layer is not None:
                await layer.handshake()
        except BaseException as error:
            if layer is not None:
                layer.abort()
            if connection in self.connections:  # it is established, but no longer awaited: uvloop reports no loss then
                connection.transport.abort()
                self.forget(connection)
            if not isinstance(error, OSError) or isinstance(error, ssl.SSLCertVerificationError | GranularError):
                raise
            return error
        return connection

    def _check_new(self, connection: Connection) -> None:
        if self._closed:
            connection.transport.abort()
            raise PoolClosedError
        # Over TLS, the first data may be session tickets.
        if not connection.origin.secure and (connection.transport.is_closing() or not connection.is_silent()):
            connection.transport.abort()
            raise ConnectionResetError('the server spoke, or closed the connection, before it was asked')

    def _forget_names(self, origin: Origin, addresses: list[str]) -> None:
        """Let the next connection look up the addresses of a host again, unless one has done so since."""
        _, future = self._names.get(origin, (0.0, None))
        if future is not None and future.done() and not has_failed(future) and future.result() is addresses:
            del self._names[origin]

    def _addresses(self, origin: Origin) -> asyncio.Future[list[str]]:
        """Return the addresses of a host, resolved once for all callers that wait."""
        until, future = self._names.get(origin, (0.0, None))
        if future is None or now() > until or has_failed(future):
            future = asyncio.ensure_future(self._look_up(origin))
            self._names[origin] = (now() + _NAMES_FOR, future)
        return future

    async def _shared(self, future: asyncio.Future[T]) -> T:
        """Wait for a result that all requests share, and that closing the pool cancels."""
        try:
            return await result_of(future)
        except asyncio.CancelledError:
            if not self._closed or was_cancelled():
                raise
            raise PoolClosedError from None

    async def _look_up(self, origin: Origin) -> list[str]:
        host, port = origin.peer
        with contextlib.suppress(ValueError):
            return [str(ipaddress.ip_address(host))]
        try:
            entries = await self._loop.getaddrinfo(host, port, type=1)
        except ValueError as error:  # of a name that is too long, or has invalid characters
            raise OSError(f'not a host name: {error}') from None
        self._late.clear()
        return list(dict.fromkeys(str(entry[4][0]) for entry in entries))

    def _tls(self) -> asyncio.Future[ssl.SSLContext]:
        # Loading all CA certificates takes tens of milliseconds: do it in a thread, and once.
        if self._context is None or has_failed(self._context):
            self._context = asyncio.ensure_future(offload(context_of, self._tls_verify))
        return self._context

    def _interval(self) -> float:
        """Return the seconds until the next check for stalled connections."""
        config = self._config
        first = _EARLY if config.hedge and not self._judged else self._slow / 2
        return max(_SOONEST, min(TICK, config.read_timeout / 4, config.first_byte_timeout / 4, first))

    def _tick(self) -> None:
        """Fail stalled requests, hedge slow ones and close idle connections: one timer for all of them."""
        time = now()
        self._judge(time)
        for connection in list(self.connections):
            if (exchange := connection.exchange) is None:
                if connection.moved < time - KEEP:
                    connection.transport.abort()
            elif (stall := self._stall(connection, exchange, time)) is not None:
                connection.fail(StalledReplyError(stall) if connection.begun else TimeoutError(stall))
            elif self._is_slow(connection, exchange, time):
                self._hedge(exchange)
        busy = bool(self.connections) and not self._closed
        self._ticking = self._loop.call_later(self._interval(), self._tick) if busy else None

    def _judge(self, time: float) -> None:
        """Learn from recent latencies after how many seconds a reply is slow."""
        if self._config.hedge and time - self._judged > TICK and len(self.latencies) >= _KNOWN:
            self._judged = time
            self._slow = max(_SLOW, 1.5 * sorted(self.latencies)[len(self.latencies) * 95 // 100])

    def _stall(self, connection: Connection, exchange: Exchange, time: float) -> str | None:
        """Describe why the exchange of a connection has stalled; None if it has not."""
        config = self._config
        if connection.unsent or not connection.begun:
            seconds = config.read_timeout if connection.unsent else config.first_byte_timeout
            doing = 'the server took no byte' if connection.unsent else 'no reply'
            return f'{doing} for {seconds:g} s' if connection.sent < time - seconds else None
        if connection.moved < time - config.read_timeout:
            return f'no byte for {config.read_timeout:g} s'
        period = time - connection.mark_time
        if period <= config.read_timeout:
            return None
        size = exchange.got - connection.mark_got
        if size < config.min_rate * period:
            return f'{size} bytes in {period:.1f} s, less than {config.min_rate} a second'
        connection.mark_time, connection.mark_got = time, exchange.got
        return None

    def _is_slow(self, connection: Connection, exchange: Exchange, time: float) -> bool:
        if connection.begun or connection.unsent or time - connection.sent <= self._slow:
            return False
        if exchange.others and connection is not exchange.others[-1]:
            return False  # the hedged request has its time, too
        return self._spare >= 1 and exchange.hedged and exchange.waits() and exchange not in self._hedging

    def _hedge(self, exchange: Exchange) -> None:
        self._spare -= 1
        self._metrics.hedges += 1
        task = self._hedging[exchange] = self._loop.create_task(self._ask_again(exchange))
        task.add_done_callback(lambda _: self._hedging.pop(exchange))

    async def _ask_again(self, exchange: Exchange) -> None:
        origin = exchange.target.origin
        try:
            connection = self.take(origin) or await self.connect(origin)
        except OSError as error:
            logger.info('%s: not asked again: %s', origin.host, error)
            return
        if exchange.waits() and exchange.target.origin == origin:
            connection.send(exchange, hedged=True)
        else:  # the reply came in the meantime, and may have been a redirection
            self.keep(connection)

    async def aclose(self) -> None:
        """Close all connections; requests in flight fail."""
        self._closed = True
        if self._ticking is not None:
            self._ticking.cancel()
        pending: list[asyncio.Future[Any]] = [*self._hedging.values(), *(future for _, future in self._names.values())]
        pending += [] if self._context is None else [self._context]
        for future in pending:
            future.cancel()
        self._empty.clear()
        for connection in list(self.connections):  # before anything is awaited, as this may be cancelled
            connection.fail(PoolClosedError())
        await asyncio.gather(*pending, return_exceptions=True)
        if self.connections:
            with contextlib.suppress(TimeoutError):  # a TLS peer may not confirm the close
                await asyncio.wait_for(self._empty.wait(), 1.0)


async def _abort(opening: Collection[asyncio.Task[Connection | OSError]]) -> None:
    """End attempts to connect, also those that have just succeeded."""
    for task in opening:
        task.cancel()
    for opened in await asyncio.gather(*opening, return_exceptions=True):
        if isinstance(opened, Connection):
            opened.transport.abort()

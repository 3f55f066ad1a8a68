"""The connections of one client: opened, kept, watched, and asked a second time where one is slow."""

import asyncio
import collections
import contextlib
import ipaddress
import itertools
import logging
import ssl
from typing import Any, Final

from granular.aio.http.connection import SCRATCH, Connection, Exchange, Sink, StaleError, now
from granular.aio.http.messages import Head, Origin, Target
from granular.aio.http.reply import counters
from granular.aio.http.tls import context_of
from granular.aio.runtime.threads import offload
from granular.config import IOConfig

logger = logging.getLogger('granular')

_KEEP: Final = 15.0  # seconds after which an idle connection is not trusted any more: routers drop them in silence
_NAMES_FOR: Final = 60.0  # seconds for which the addresses of a host are remembered
_TICK: Final = 1.0  # seconds between two looks at what stalls, at most
_SOONEST: Final = 0.02
_EARLY: Final = 0.1  # until the store's pace is known
_KNOWN: Final = 64  # replies after which the store's pace is known
_SLOW: Final = 0.05  # seconds below which no reply is slow
_MOST_HEDGES: Final = 16.0
_QUIET: Final = 10.0  # seconds after throttling in which nothing is asked for twice


class Pool:
    """The connections of one client, under one event loop.

    An exchange whose reply has not begun after half as long again as 95 of 100 take is asked for on another connection
    as well, and the first who answers has it, but only for a share of the requests, and not while the store throttles.

    Args:
      config: its timeouts, its least rate, and the share of requests that may be asked twice.
      tls_verify: whether servers must be who they say, or the file of the authorities that say so.
    """

    def __init__(self, config: IOConfig, tls_verify: bool | str = True) -> None:
        self._config, self._tls_verify = config, tls_verify
        self.latencies: collections.deque[float] = collections.deque(maxlen=512)  # seconds until a reply began
        self._slow = float('inf')  # seconds after which one is asked for again
        self._spare = 0.0  # how many still may be
        self._quiet = 0.0  # until when none is
        self._judged = 0.0  # when that was last looked at
        self._tasks: set[asyncio.Task[None]] = set()
        self.scratch = bytearray(SCRATCH)
        self.connections: set[Connection] = set()
        self._idle: dict[Origin, list[Connection]] = {}
        self._names: dict[Origin, tuple[float, asyncio.Future[list[str]]]] = {}
        self._turn = itertools.count()
        self._context: asyncio.Future[ssl.SSLContext] | None = None
        self._loop = asyncio.get_running_loop()
        self._ticking: asyncio.TimerHandle | None = None
        self._closed = False
        self._empty = asyncio.Event()

    async def exchange(
        self,
        target: Target,
        request: bytes,
        sink: Sink,
        bodiless: bool = False,
        body: bytes | memoryview = b'',
        hedged: bool = True,
    ) -> Head:
        """Send a request and have its reply received by the sink. The arguments are those of ``Exchange``.

        Raises:
          ProtocolError: if what comes is not HTTP, or not as long as it says.
          ConnectionError, OSError, TimeoutError: if it breaks off, or nothing comes.
          ssl.SSLCertVerificationError: if the server is not who it says.
        """
        connection = self._take(target.origin) or await self._connect(target.origin)
        exchange = Exchange(target, request, sink, bodiless, body, hedged)
        self._spare = min(self._spare + self._config.hedge, _MOST_HEDGES)
        while True:
            connection.send(exchange)
            try:
                return await exchange.future
            except StaleError:
                # As a store does that has not been asked for some seconds: nobody's fault, and no attempt is spent.
                connection = await self._connect(target.origin)
                exchange = Exchange(target, request, sink, bodiless, body, hedged)
            except asyncio.CancelledError:
                exchange.drop()
                raise

    def throttled(self) -> None:
        """The store asked for patience: nothing is asked for twice for a while."""
        self._quiet = now() + _QUIET

    def _take(self, origin: Origin) -> Connection | None:
        idle, oldest = self._idle.get(origin), now() - _KEEP
        while idle:
            connection = idle.pop()
            if connection.moved > oldest and not connection.transport.is_closing() and connection.is_silent():
                return connection
            connection.transport.abort()
        return None

    def opened(self, connection: Connection) -> None:
        """A connection stands, and is watched from here on."""
        self.connections.add(connection)
        if self._ticking is None and not self._closed:
            self._ticking = self._loop.call_later(self._interval(), self._tick)

    def keep(self, connection: Connection) -> None:
        """Use a connection again."""
        self._idle.setdefault(connection.origin, []).append(connection)

    def forget(self, connection: Connection) -> None:
        """A connection is closed."""
        self.connections.discard(connection)
        if not self.connections:
            self._empty.set()
        if connection.exchange is None and connection in (idle := self._idle.get(connection.origin, [])):
            idle.remove(connection)

    async def _connect(self, origin: Origin) -> Connection:
        async with asyncio.timeout(self._config.connect_timeout):
            addresses = await self._addresses(origin)
            context = await self._tls() if origin.secure else None
            first, failure = next(self._turn), OSError('no address')
            for i in range(len(addresses)):
                address = addresses[(first + i) % len(addresses)]
                connection = Connection(self, origin)
                try:
                    await self._loop.create_connection(
                        lambda it=connection: it, address, origin.port,
                        ssl=context, server_hostname=origin.host if origin.secure else None,
                    )  # fmt: skip
                except BaseException as error:
                    self.forget(connection)  # uvloop does not say that it is lost, if nobody waits for it any more
                    if not isinstance(error, OSError) or isinstance(error, ssl.SSLCertVerificationError):
                        raise
                    failure = error
                    continue
                if self._closed:
                    connection.transport.abort()
                    raise ConnectionAbortedError('the client is closed')
                # Over TLS, what comes first may be tickets of its session.
                if not origin.secure and (connection.transport.is_closing() or not connection.is_silent()):
                    connection.transport.abort()
                    raise ConnectionResetError('the server spoke, or closed the connection, before it was asked')
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
        try:
            found = await self._loop.getaddrinfo(origin.host, origin.port, type=1)
        except ValueError as error:  # of a name that is too long, or has characters that names have not
            raise OSError(f'{origin.host[:80]!r} is no name of a host: {error}') from None
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    async def _tls(self) -> ssl.SSLContext:
        # Reading the certificates of all authorities takes tens of milliseconds: not on the loop, and once.
        if self._context is None:
            self._context = asyncio.ensure_future(offload(context_of, self._tls_verify))
        return await asyncio.shield(self._context)

    def _interval(self) -> float:
        """Seconds until the next look at what stalls."""
        config = self._config
        first = _EARLY if config.hedge and not self._judged else self._slow / 2
        return max(_SOONEST, min(_TICK, config.read_timeout / 4, config.first_byte_timeout / 4, first))

    def _tick(self) -> None:
        """Fail what stalls, ask again for what is slow, close what is idle: one timer for all of them."""
        time, config = now(), self._config
        if config.hedge and time - self._judged > _TICK and len(self.latencies) >= _KNOWN:
            self._judged = time
            self._slow = max(_SLOW, 1.5 * sorted(self.latencies)[len(self.latencies) * 95 // 100])
        hedging = self._spare >= 1 and time > self._quiet
        for connection in list(self.connections):
            if connection.exchange is None:
                if connection.moved < time - _KEEP:
                    connection.transport.close()
            elif connection.unsent:
                if connection.sent < time - config.read_timeout:
                    connection.fail(TimeoutError(f'the server took no byte for {config.read_timeout:g} s'))
            elif connection.head is None:
                waited = time - connection.sent
                if waited > config.first_byte_timeout:
                    connection.fail(TimeoutError(f'no reply for {config.first_byte_timeout:g} s'))
                elif (
                    hedging and connection.exchange.hedged and waited > self._slow and len(connection.exchange.on) == 1
                ):
                    self._hedge(connection.exchange)
                    hedging = self._spare >= 1
            elif connection.moved < time - config.read_timeout:
                connection.fail(TimeoutError(f'no byte for {config.read_timeout:g} s'))
            elif (period := time - connection.mark[0]) > config.read_timeout:
                came = connection.exchange.sink.got - connection.mark[1]
                if came < config.min_rate * period:
                    connection.fail(
                        TimeoutError(f'{came} bytes in {period:.1f} s, less than {config.min_rate} a second')
                    )
                else:
                    connection.mark = (time, connection.exchange.sink.got)
        busy = bool(self.connections) and not self._closed
        self._ticking = self._loop.call_later(self._interval(), self._tick) if busy else None

    def _hedge(self, exchange: Exchange) -> None:
        self._spare -= 1
        counters.hedges += 1
        counters.requests += 1
        task = self._loop.create_task(self._ask_again(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask_again(self, exchange: Exchange) -> None:
        try:
            connection = self._take(exchange.target.origin) or await self._connect(exchange.target.origin)
        except OSError as error:
            logger.info('%s: not asked for a second time: %s', exchange.target.origin.host, error)
            return
        if len(exchange.on) == 1 and exchange.on[0].head is None and not exchange.future.done():
            connection.send(exchange)
        else:  # it came meanwhile
            self.keep(connection)

    async def aclose(self) -> None:
        """Close all connections; what waits for a reply fails."""
        self._closed = True
        if self._ticking is not None:
            self._ticking.cancel()
        pending: list[asyncio.Future[Any]] = [*self._tasks, *(future for _, future in self._names.values())]
        pending += [] if self._context is None else [self._context]
        for future in pending:
            future.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        self._empty.clear()
        for connection in list(self.connections):
            connection.fail(ConnectionAbortedError('the client is closed'))
        if self.connections:
            with contextlib.suppress(TimeoutError):  # a peer of TLS that does not say goodbye
                await asyncio.wait_for(self._empty.wait(), 1.0)

"""TLS between a connection and its TCP transport, which decrypts a body directly into its destination.

The TLS of event loops decrypts into a buffer of its own and copies from there, with a call of the protocol for each
record of 16 KiB. Here, all that has arrived is received at once, and OpenSSL writes the records of a body one after the
other into the memory that they are for.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, Final

from granular.aio.http.connection import Connection
from granular.config import KiB

RECEIVED: Final = 128 * KiB  # encrypted bytes received at a time


class TlsLayer(asyncio.BufferedProtocol, asyncio.Transport):
    """The protocol of a TCP transport, and the transport of the connection above it.

    The server's certificate must be of the host. All connections of an event loop receive into the same buffer of
    ``RECEIVED`` bytes, one after the other.
    """

    def __init__(self, connection: Connection, context: ssl.SSLContext, host: str, buffer: memoryview) -> None:
        self._connection, self._buffer = connection, buffer
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._transport: asyncio.Transport | None = None
        self._established: asyncio.Future[None] | None = asyncio.get_running_loop().create_future()
        self._error: Exception | None = None  # why it was closed from here

    async def handshake(self) -> None:
        """Wait until the server has proven who it is, and the connection is made."""
        if self._established is not None:
            await self._established

    # --- the transport of the connection

    def write(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._tls.write(rest) :]
        except ssl.SSLError as error:
            self._fail(error)
            return
        self._flush()

    def is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def abort(self) -> None:
        if self._established is not None:
            self._established.cancel()
        if self._transport is not None:
            self._transport.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default if self._transport is None else self._transport.get_extra_info(name, default)

    # --- the protocol of the TCP transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._shake_hands()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._incoming.write(self._buffer[:nbytes])
        if self._established is not None and not self._shake_hands():
            return
        try:
            self._deliver()
        except ssl.SSLError as error:
            self._fail(error)
            return
        if self._outgoing.pending:  # keys are renewed
            self._flush()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        error = self._error or exc
        if self._established is None:
            connection = self._connection
            del self._connection, self._tls  # they refer to each other
            connection.connection_lost(error)
        elif not self._established.done():
            self._established.set_exception(error or ConnectionResetError('the connection was closed in the handshake'))

    # --- TLS

    def _shake_hands(self) -> bool:
        """Continue the handshake. Returns whether it is complete."""
        established = self._established
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return False
        except ssl.SSLError as error:
            self._fail(error)
            return False
        self._flush()
        if established is None or established.done():
            return False  # its caller has given up
        self._established = None
        self._connection.connection_made(self)
        established.set_result(None)
        return True

    def _deliver(self) -> None:
        """Decrypt what has arrived into the memory for the body if that is known, otherwise record by record."""
        connection, incoming, pending = self._connection, self._incoming, self._tls.pending
        read: Callable[[int, memoryview], int] = self._tls.read  # type: ignore[assignment]
        more = True
        while more and not self._transport.is_closing():  # type: ignore[union-attr]
            room = connection.get_buffer(-1)
            count, size = 0, len(room) if connection.destination is not None else 1
            try:
                while True:
                    got = read(len(room) - count, room[count:] if count else room)
                    count += got
                    more = bool(got) and bool(incoming.pending or pending())
                    if count >= size or not more:
                        break
            except ssl.SSLWantReadError:  # the rest of a record is still to come
                got, more = 1, False
            if count:
                connection.surplus = more
                connection.buffer_updated(count)
            if not got:  # the server has ended TLS
                self._transport.close()  # type: ignore[union-attr]

    def _flush(self) -> None:
        if self._outgoing.pending and self._transport is not None:
            self._transport.write(self._outgoing.read())

    def _fail(self, error: ssl.SSLError) -> None:
        """Close the connection after an error of TLS, of which the server is told."""
        self._error = error
        self._flush()
        if self._transport is not None:
            self._transport.abort()

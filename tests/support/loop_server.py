"""Base of the test servers that run on an event loop in a thread of their own."""

import asyncio
import contextlib
import socket
import ssl
import threading
from typing import Final, Self

_TURNS: Final = 10
"""Iterations of the loop within which each callback and task that is due has run."""


async def read_head(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str]]:
    """Return the method, the target and the headers of a request, whose names are in lower case."""
    first, *lines = (await reader.readuntil(b'\r\n\r\n')).decode('latin-1').split('\r\n')
    method, target, _ = first.split(' ')
    fields = (line.partition(':') for line in lines if line)
    return method, target, {name.lower(): value.strip() for name, _, value in fields}


class LoopServer:
    """A server on a free port of 127.0.0.1. ``endpoint`` is its address; subclasses answer in ``serve``.

    When it stops, every connection is closed: also one that was accepted a moment before.

    Args:
      tls: context with the server's certificate; plain HTTP without.
    """

    endpoint: str

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._transports: set[asyncio.BaseTransport] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection. It is closed when this returns or raises."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait(60)
        return self

    def __exit__(self, *args: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close all connections and end the thread. A second call has no effect."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(60)

    def hang_up(self) -> None:
        """Reset all connections."""
        self.loop.call_soon_threadsafe(self._hang_up)

    async def listen(self, tls: ssl.SSLContext | None) -> None:
        """Accept connections at the server's port, also those that were refused until now. To be awaited on its loop.

        Args:
          tls: as for the constructor.
        """
        self._listener = await self.loop.create_server(self._protocol, '127.0.0.1', self._own_port, ssl=tls)

    async def refuse(self, hang_up: bool = True) -> None:
        """Refuse new connections until ``listen``, and reset the others. To be awaited on the server's loop."""
        await self._stop_accepting()
        if hang_up:
            self._hang_up()

    def _hang_up(self) -> None:
        for transport in list(self._transports):
            transport.abort()

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        # It keeps the port while connections are refused.
        with socket.socket() as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(('127.0.0.1', 0))
            self._own_port = bound.getsockname()[1]
            self.loop.run_until_complete(self.listen(self._tls))
            scheme = 'https' if self._tls else 'http'
            self.endpoint = f'{scheme}://127.0.0.1:{self._own_port}'
            self.loop.call_soon(ready.set)
            self.loop.run_forever()
            self.loop.run_until_complete(self._end())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def _protocol(self) -> asyncio.StreamReaderProtocol:
        return _Protocol(self)

    async def _stop_accepting(self) -> None:
        # A connection of which the server has not heard when it closes, and a task that is cancelled before its first
        # step, never close their socket. So no more are accepted, and those that were become known first.
        for listening in self._listener.sockets:
            self.loop.remove_reader(listening.fileno())
        await self._settle()
        self._listener.close()

    def settle(self) -> None:
        """Wait until the requests that have arrived are begun, also those that a client no longer waits for."""
        asyncio.run_coroutine_threadsafe(self._settle(), self.loop).result(60)

    async def _settle(self) -> None:
        for _ in range(_TURNS):
            await asyncio.sleep(0)

    async def _end(self) -> None:
        await self._stop_accepting()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(2 * _TURNS):  # again and again, as a connection may be registered late
            self._hang_up()
            await asyncio.sleep(0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The protocol forgets its task when the client leaves: this reference keeps the task alive until it ends.
        self._tasks.add(task := asyncio.current_task())
        try:
            await self.serve(reader, writer)
        except (asyncio.IncompleteReadError, OSError):
            pass
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()
            self._tasks.discard(task)


class _Protocol(asyncio.StreamReaderProtocol):
    """Registers its transport with the server as soon as there is one, before any task runs."""

    def __init__(self, server: LoopServer) -> None:
        super().__init__(asyncio.StreamReader(loop=server.loop), server._connected, server.loop)
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._server._transports.add(transport)
        self._made = transport
        super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._server._transports.discard(self._made)
        super().connection_lost(error)

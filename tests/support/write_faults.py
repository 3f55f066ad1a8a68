"""A proxy that fails one of the write requests of a test."""

import asyncio
import re
from typing import Any, Final

import granular
from tests.support.fault_proxy import Call, FaultProxy
from tests.support.servers import Server

FAULTS: Final = {
    'lost': 'after reset',
    'reset': 'reset',
    'error': 'status 500',
    'html': 'page html',
    'nothing': 'page empty',
    'dropped': 'dropped',
}
"""Faults of a write request, by the names that the tests have for them."""

_END: Final = re.compile(rb'\r\n--[0-9a-zA-Z=_-]+--\s*\Z')  # of a multipart/related body


class WriteProxy(FaultProxy):
    """A proxy that forwards all requests, except for a fault of the write of number ``step``.

    Args:
      server: the store's server. Buckets that it made are reached through ``place``.

    Attributes:
      writes: the number of write requests since the last ``arm``.
      done: whether the fault has happened, and the store has carried out the write if the fault comes after that.
    """

    def __init__(self, server: Server) -> None:
        super().__init__(server.endpoint, self._choose)
        self._server = server
        self._dropping = False
        self._carried: asyncio.Task[Any] | None = None  # the task of a write that fails after the store has it
        self.arm('lost', -1)

    def arm(self, fault: str, step: int, down: bool = False) -> None:
        """Plan a fault for the write of that number, counted from now on.

        Args:
          fault: one of ``FAULTS``, or one of ``FaultProxy``.
          step: the number of the write, from 0 on; -1 for none.
          down: have all reads behind it fail, too.
        """
        self._fault, self._step, self._down = FAULTS.get(fault, fault), step, down
        self.writes, self.done = 0, False

    def place(self, path: granular.Path, config: granular.IOConfig | None = None) -> granular.Path:
        """Return the same path, reached through this proxy."""
        options = {**self._server.options, 'endpoint_url': self.endpoint}
        return granular.Path(str(path), config=config or granular.IOConfig(), **options)

    def _choose(self, call: Call) -> str:
        if call.method not in ('PUT', 'POST') or 'delete' in call.query:
            return 'reset' if self.done and self._down else ''
        number, self.writes = self.writes, self.writes + 1
        if number != self._step:
            return ''
        if self._fault.startswith('after '):
            self._carried = asyncio.current_task()
        else:
            self.done = True
        self._dropping = self._fault == 'dropped'
        return '' if self._dropping else self._fault

    async def _forward(self, request: bytes) -> bytes:
        if self._dropping:
            self._dropping = False
            request = _without_last_byte(request)
        reply = await super()._forward(request)
        if self._carried is asyncio.current_task():
            self._carried, self.done = None, True
        head, gap, body = reply.partition(b'\r\n\r\n')
        # The address of an upload in parts is one of the server.
        return head.replace(self._server.endpoint.encode(), self.endpoint.encode()) + gap + body


def _without_last_byte(request: bytes) -> bytes:
    """Return the request without the last byte of its data; a multipart body has more after it."""
    head, gap, body = request.partition(b'\r\n\r\n')
    end = match.start() if (match := _END.search(body)) else len(body)
    body = body[: max(0, end - 1)] + body[end:]
    return re.sub(rb'(?i)(content-length: )\d+', rb'\g<1>%d' % len(body), head) + gap + body

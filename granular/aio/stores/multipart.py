"""Base class for writing an object in parts, with several parts in flight."""

import abc
import asyncio
import base64
import uuid

from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.tasks import finish_within
from granular.aio.runtime.threads import offload
from granular.aio.stores.base import ObjectWriter, Store, check_object
from granular.config import MiB
from granular.formats.checksums import crc32c


class PartWriter(ObjectWriter):
    """An upload in parts of equal size, with a bounded number of them in flight.

    Memory is bounded by (``parallel`` + 2) parts. The part size doubles every 1,000 parts, so that the 10,000 parts
    that S3 allows reach 5 TiB.

    With ``new``, an existing object is an error. The token, which is part of the object's metadata, identifies the
    writer where the reply to an attempt was lost.
    """

    def __init__(self, store: Store, key: str, new: bool, parallel: int = 0) -> None:
        check_object(store, key)
        self._key = key
        self._name = store.url(key)
        self._new = new
        self._token = uuid.uuid4().hex
        self._config = store.config
        self._part_size, self._parallel = store.config.part_size, parallel or store.config.upload_concurrency
        self._buffer = bytearray()
        self._parts = 0
        self._started = False
        self._tasks: set[asyncio.Task[None]] = set()

    @abc.abstractmethod
    async def start(self) -> None:
        """Start a multipart upload."""

    @abc.abstractmethod
    async def send(self, number: int, data: bytes, last: bool) -> None:
        """Send a part, numbered from 0; ``last`` marks the final one."""

    @abc.abstractmethod
    async def finish(self) -> None:
        """Publish the object, once all parts are sent."""

    @abc.abstractmethod
    async def discard(self) -> None:
        """Discard the parts sent."""

    @abc.abstractmethod
    async def put(self, data: bytes) -> None:
        """Publish an object that is small enough for one request."""

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        rest = memoryview(data)
        # Hold at least one byte back, so that the last part is known as such when it is sent.
        while len(self._buffer) + len(rest) > self._part_size:
            count = self._part_size - len(self._buffer)
            part, rest = b''.join((self._buffer, rest[:count])), rest[count:]
            self._buffer.clear()
            await self._send_part(part, last=False)
        self._buffer += rest

    async def close(self) -> None:
        if self._started:
            await self._send_part(bytes(self._buffer), last=True)
            while self._tasks:
                await self._finish_one()
            await self.finish()
        else:
            await self.put(bytes(self._buffer))
        self._buffer.clear()

    async def abort(self) -> None:
        await to_loop()
        self._buffer.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._started:
            await self.discard()

    async def begin(self) -> None:
        """Start the upload, so that ``abort`` discards it also if its start was cancelled."""

        async def start() -> None:
            await self.start()
            self._started = True

        await finish_within(start())

    async def _send_part(self, part: bytes, last: bool) -> None:
        await to_loop()
        if not self._started:
            await self.begin()
        while len(self._tasks) >= self._parallel:
            await self._finish_one()
        self._tasks.add(asyncio.ensure_future(self.send(self._parts, part, last)))
        self._parts += 1
        if self._parts % 1000 == 0:
            self._part_size *= 2

    async def _finish_one(self) -> None:
        done, self._tasks = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*done)  # all have ended; it raises the first error, and retrieves the others


async def extend_crc(crc: int, data: bytes) -> int:
    """Continue a CRC32C over further bytes, off the event loop from 1 MiB on."""
    return crc32c(data, crc) if len(data) < MiB else await offload(crc32c, data, crc)


def encode_crc(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, 'big')).decode()

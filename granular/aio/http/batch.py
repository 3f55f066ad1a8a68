"""Many range reads that one caller awaits: a read that goes well needs neither a task nor a coroutine."""

import asyncio
import functools
from collections.abc import Sequence
from typing import Any, Final

from granular.aio.http.download import Download
from granular.aio.http.messages import Head
from granular.aio.http.transport import Provider, Transport
from granular.aio.runtime.tasks import outcome, retrieve_error, start_task

_AT_ONCE: Final = 16  # requests sent in one turn of the loop


class Batch:
    """Range reads that one caller awaits together.

    A read is an object that waits for its slot, is sent on an idle connection, and receives its own reply.
    A coroutine takes over where more is needed: to open a connection, to sign the request, to retry, to follow a
    redirect, or to verify a whole object.
    """

    def __init__(self, transport: Transport, provider: Provider, downloads: Sequence[Download]) -> None:
        self._transport = transport
        self._provider = provider
        self._downloads = downloads
        self._traffic = transport.traffic
        self._governor, self._metrics = self._traffic.governor, self._traffic.metrics
        self._left = len(downloads)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._future.add_done_callback(retrieve_error)  # if the caller is cancelled, the error is not awaited

    async def run(self) -> None:
        """Read everything, with the errors of ``Transport.read``. The first one cancels the other reads, waits for them
        and is raised as itself.

        Afterwards each download has its bytes in ``data``, unless it was given memory for them, and the version of the
        object in ``version``.
        """
        if not self._left:
            return
        governor = self._governor
        try:
            sent = 0
            for download in self._downloads:
                download.batch = self
                if governor.admit(download):
                    self.start(download)
                    sent += 1
                    if not sent % _AT_ONCE:
                        await asyncio.sleep(0)  # other callbacks of the loop, and other threads, have their turn
            await outcome(self._future)
        except BaseException:
            await self._cancel()
            raise

    async def _cancel(self) -> None:
        open_reads = [download for download in self._downloads if download.batch is not None]
        for download in open_reads:
            download.batch, download.withdrawn = None, True
        for download in open_reads:
            if download.is_sent():
                download.drop()
                self._metrics.in_flight -= 1
                self._metrics.failed('cancelled')
                self._governor.release(download.weight)
        self._governor.fill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def start(self, download: Download) -> None:
        """Send a read that has its slot. It does not raise."""
        try:
            target, lines = self._provider.ready(download.key), download.plain_request()
            connection = None if target is None or not lines else self._transport.pool.take(target.origin)
        except Exception as error:
            self._continue(download, error)
            return
        if target is None or connection is None:
            self._continue(download, None)
            return
        self._metrics.in_flight += 1
        download.target, download.request = target, target.get + lines
        connection.send(download)

    def ended(self, download: Download, reply: Head | Exception | None) -> None:
        metrics = self._metrics
        metrics.in_flight -= 1
        if reply is not None:
            self._continue(download, reply)
            return
        download.batch = None
        metrics.bytes += download.got
        self._transport.note_read(download.target)
        moved: float = download.first.moved  # type: ignore[union-attr]
        self._traffic.succeeded(moved)
        self._governor.measure_turn(moved)
        self._governor.release(download.weight)
        self._count()

    def _count(self) -> None:
        self._left -= 1
        if not self._left and not self._future.done():
            self._future.set_result(None)

    def _continue(self, download: Download, reply: Head | Exception | None) -> None:
        """Let a coroutine read what one expected reply cannot provide, from the outcome of that attempt on."""
        download.end_plain()
        task = start_task(self._transport.read(self._provider, download, reply))
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._finished, download, reply is not None))

    def _finished(self, download: Download, sent: bool, task: 'asyncio.Task[Any]') -> None:
        self._tasks.discard(task)
        if download.has_slot:  # the task was cancelled before its first step
            self._governor.release(download.weight)
            if sent:
                self._metrics.failed('cancelled')
        if task.cancelled():
            if not self._future.done():
                self._future.cancel()
        elif (error := task.exception()) is None:
            self._count()
        elif not self._future.done():
            self._future.set_exception(error)

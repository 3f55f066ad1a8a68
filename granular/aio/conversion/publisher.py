"""Publish the shards of a stream of records in the background."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from granular.aio.datasets.writer import DatasetWriter


class Publisher:
    """Publishes shards in the background, so many at a time, and closes or aborts all of them in the end."""

    def __init__(self, publish: Callable[[DatasetWriter], Coroutine[Any, Any, None]], parallel: int) -> None:
        self._publish, self._parallel = publish, parallel
        self._open: list[DatasetWriter] = []  # the first shard, and the one that is being filled
        self._tasks: dict[asyncio.Task[None], DatasetWriter] = {}

    def add(self, writer: DatasetWriter) -> DatasetWriter:
        """Take over a shard that is to be filled."""
        self._open.append(writer)
        return writer

    async def publish(self) -> None:
        """Start to publish the shard that was added last."""
        while len(self._tasks) >= self._parallel:
            ended, _ = await asyncio.wait(self._tasks, return_when='FIRST_COMPLETED')
            for task in ended:
                task.result()
                del self._tasks[task]
        writer = self._open.pop()
        self._tasks[asyncio.create_task(self._publish(writer))] = writer

    async def finish(self) -> None:
        """Publish the remaining shards."""
        await asyncio.gather(*self._tasks)
        while self._open:
            await self._publish(self._open.pop())

    async def abort(self, error: BaseException) -> None:
        """Abort the shards that are not full. The full ones are published, unless the conversion was cancelled."""
        if not isinstance(error, Exception):
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # A task that was cancelled before its first step has not closed its writer.
        for writer in (*self._tasks.values(), *self._open):
            await writer.abort()

"""Write shards in the workers of a Ray cluster: each shard is a task."""

import asyncio
import contextlib
import dataclasses
import os
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

from granular._support.lazy import import_extra
from granular.aio.conversion.record_source import Reading, RecordSource, open_source
from granular.aio.conversion.shard_writer import ShardWriter
from granular.aio.datasets.writer import DatasetWriter
from granular.aio.paths.guard import FolderGuard
from granular.aio.paths.path import Path
from granular.aio.paths.pure import PurePath
from granular.aio.pipeline.execution.failures import portable, remote
from granular.aio.pipeline.nodes.source import Source
from granular.aio.runtime.portal import run
from granular.aio.runtime.progress import ProgressReport
from granular.aio.runtime.tasks import for_each
from granular.aio.runtime.threads import offload_whole
from granular.aio.runtime.tracebacks import summary
from granular.errors import AlreadyExistsError, CorruptDatasetError, InvalidArgumentError, NotFoundError, WorkerError

T = TypeVar('T')

_RETRIES: Final = 3  # Ray repeats a task whose worker or node died so many times.
_ENDING: Final = 30.0  # seconds in which a worker that Ray considers dead releases its locks
_POLL: Final = 0.25

Count = Callable[[int, int, int], Awaitable[None]]
"""Awaited for a shard with its records, those of them that earlier runs had written, and the bytes written."""


class RayShards:
    """Writes shards as tasks of Ray, which retries those whose worker or node died.

    A task writes the whole shard again, and finds it finished if an earlier attempt published it. A worker that Ray
    considers dead may still be alive: in a bucket both write the same bytes, and the later one overwrites them; on a
    disk, the lock on the folder excludes one of them. The first shard is written at the same time as the others and
    published after them. Each worker opens the source for itself; ``opened`` is that of this process.
    """

    def __init__(self, writer: ShardWriter, source: Any, reading: Reading, opened: RecordSource) -> None:
        self._ray = import_extra('ray', 'ray')
        writer.directory = shared(writer.directory)
        writer.has_copies = True  # a worker that Ray considers dead may be alive, beside the one that replaces it
        expected, quiet = (len(opened), opened.size), dataclasses.replace(reading, warns=False)  # this process warns
        self.job = _Job(secrets.token_hex(8), writer, _shared_source(source), quiet, expected)
        self._running: dict[int, Any] = {}  # the results of the tasks

    async def write(
        self,
        ranges: Mapping[int, tuple[int, int]],
        parallel: int | None,
        count: Count | None,
        guard: FolderGuard | None = None,
    ) -> None:
        """Write shards. Raise the error of the first one that fails, once the other tasks are cancelled.

        ``ranges`` has the first record and the one after the last of each shard; shard 0 comes last. At most
        ``parallel`` are written at a time; None for as many as the cluster has room for. No shard is published without
        the right to the folder.
        """
        if not ranges:
            return
        self.job.guard = guard
        job, task = await offload_whole(self._start)

        async def write_shard(number: int) -> None:
            others = list(self._running.values()) if number == 0 else []
            result = self._running[number] = task.remote(job, number, *ranges[number], others)
            counts = await self._outcome(result, number)
            if count is not None:
                await count(*counts)
            del self._running[number]

        try:
            await for_each(ranges, write_shard, parallel or len(ranges))
        except BaseException:
            numbers = list(self._running)
            await offload_whole(self._cancel)
            for number in numbers:  # whose tasks may just have created their folders
                folder = self.job.writer.folder(number)
                with contextlib.suppress(NotFoundError):
                    await folder.store.delete_empty(folder.key)
            raise

    def _cancel(self) -> None:
        """Cancel the tasks that are left, and wait for them: in one thread, one after the other."""
        results = list(self._running.values())
        self._running.clear()
        for result in results:
            self._ray.cancel(result)
        if results:
            self._ray.wait(results, num_returns=len(results), timeout=_ENDING)

    def _start(self) -> tuple[list[Any], Any]:
        try:
            reference = self._ray.put(self.job)
        except TypeError as error:
            raise InvalidArgumentError(
                f'{self.job.writer.directory}: the source or an encoder cannot be pickled for the workers of Ray: '
                f'{error}'
            ) from error
        # In a list, so that Ray passes the reference: a worker loads the source once for all of its tasks.
        return [self.job.token, reference], self._ray.remote(max_retries=_RETRIES)(_write_shard)

    async def _outcome(self, result: Any, number: int) -> tuple[int, int, int]:
        errors, folder = self._ray.exceptions, self.job.writer.folder(number)
        try:
            outcome = await asyncio.wrap_future(result.future())
        except errors.RayTaskError as error:
            raise WorkerError(f'{folder}: its task failed in Ray: {error}') from error
        except errors.RayError as error:
            raise WorkerError(f'{folder}: its task did not finish after {_RETRIES} retries: {error}') from error
        if isinstance(outcome, _Failed):
            raise outcome.error()
        counts: tuple[int, int, int] = outcome
        return counts


class _Job:
    """The work that all tasks share; the source has the ``expected`` length, and size if known."""

    def __init__(
        self, token: str, writer: ShardWriter, source: Any, reading: Reading, expected: tuple[int, int | None]
    ) -> None:
        self.token = token
        self.writer = writer
        self._source = source
        self._reading = reading
        self._expected = expected
        self.guard: FolderGuard | None = None

    async def open(self) -> RecordSource:
        """Open the source in a worker, and check that it is the one of the driver."""
        opened = await open_source(self._source, self._reading)
        if (found := (len(opened), opened.size)) != self._expected or opened.source is None:
            await opened.aclose()
            raise CorruptDatasetError(
                f'{opened.name}: expected {self._expected[0]} records in {self._expected[1]} bytes, got {found[0]} in '
                f'{found[1]}: the source has changed, or is another one on this node'
            )
        return opened

    async def start(self, source: Source, number: int, start: int, stop: int) -> DatasetWriter | None:
        """Write a shard. Returns the writer that publishes it, or None if it is finished."""
        for _ in range(int(_ENDING / _POLL)):
            if await self._is_finished(number, stop - start):
                return None
            try:
                return await self.writer.start(source, number, start, stop, ProgressReport(None).add)
            except AlreadyExistsError as error:  # a worker whose node Ray gave up may hold the lock for a moment
                refused = error
                await asyncio.sleep(_POLL)
        raise refused

    async def publish(self, writer: DatasetWriter, number: int, expected: int) -> tuple[int, int, int]:
        """Publish a shard, unless a worker that Ray considers dead has. Returns the result of the task."""
        async with writer:
            if not self.writer.directory.store.local and await self._is_finished(number, expected):
                await writer.abort()
                return expected, expected, 0
            if self.guard is not None:
                await self.guard.check_owner()
        return expected, 0, writer.size

    async def _is_finished(self, number: int, expected: int) -> bool:
        try:
            length = await self.writer.length_of(number)
        except NotFoundError:
            return False  # some servers have no object for a moment while it is overwritten
        if length is not None and length != expected:
            raise CorruptDatasetError(f'{self.writer.folder(number)}: has {length} datapoints, expected {expected}')
        return length is not None


_latest: list[tuple[_Job, RecordSource]] = []  # the job that this worker has opened, and its source


class _Failed:
    """The result of a task that failed: Ray passes on neither all exceptions nor their classes."""

    def __init__(self, error: BaseException) -> None:
        self._portable = portable(error)

    def error(self) -> BaseException:
        try:
            return remote(*self._portable)
        except BaseException as error:  # the methods of its class may raise anything
            return WorkerError(f'the error of a task of Ray does not unpickle in this process: {summary(error)}')


def _write_shard(job: tuple[str, Any], number: int, start: int, stop: int, others: Sequence[Any]) -> Any:
    """Write a shard, as a task of Ray, which ends after the ``others``. Return the counts of it, or the failure."""
    ray = import_extra('ray', 'ray')
    writer: DatasetWriter | None = None
    try:
        work, source = _opened(job)
        writer = run(_carry(work.start(source, number, start, stop)))
        # On this thread, so that Ray lends the processor to other tasks meanwhile.
        failed = next((other for other in ray.get(others) if isinstance(other, _Failed)), None)
        if failed is not None:
            return failed
        if writer is None:
            return stop - start, stop - start, 0
        return run(_carry(work.publish(writer, number, stop - start)))
    except _FailedError as failure:
        return _Failed(failure.error)
    except ray.exceptions.RayError:
        raise  # The other tasks report theirs, and Ray a job that does not unpickle.
    except Exception as error:
        return _Failed(error)
    finally:
        if writer is not None:
            run(writer.abort())  # does nothing after it was published


class _FailedError(Exception):
    """Carries any exception of user functions out of a coroutine: of signals, exceptions of this thread remain."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


async def _carry(coro: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that calls user functions; raise ``_FailedError`` if it raises anything."""
    try:
        return await coro
    except asyncio.CancelledError:
        raise  # An interrupt of the waiting thread cancels it.
    except BaseException as error:
        raise _FailedError(error) from error


def _opened(job: tuple[str, Any]) -> tuple[_Job, Source]:
    """Return a job and its source, which is opened once per worker."""
    token, reference = job
    if not _latest or _latest[0][0].token != token:
        if _latest:
            run(_latest.pop()[1].aclose())
        work: _Job = import_extra('ray', 'ray').get(reference)
        _latest.append((work, run(_carry(work.open()))))
    work, opened = _latest[0]
    return work, cast(Source, opened.source)


def shared(path: Path) -> Path:
    """Return a path that is the same in processes with another working directory."""
    return Path.of(path.store, os.path.abspath(path.key)) if path.store.local else path


def _shared_source(source: Any) -> Any:
    if isinstance(source, str | os.PathLike | PurePath):
        return shared(Path(source))
    if isinstance(source, list | tuple) and source and all(isinstance(path, str | os.PathLike) for path in source):
        return [shared(Path(path)) for path in source]
    return source

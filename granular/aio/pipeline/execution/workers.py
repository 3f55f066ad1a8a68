"""A pool of worker processes: each has its own event loop and computes whole items, returned in shared memory."""

import asyncio
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

from granular.aio.pipeline.execution import shared_memory
from granular.aio.pipeline.execution.worker_main import Task
from granular.aio.pipeline.execution.worker_process import USED_UP, Request, Worker
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.pools import expect_exit
from granular.aio.runtime.tasks import settle
from granular.aio.runtime.threads import offload_whole
from granular.aio.runtime.tracebacks import summary
from granular.aio.runtime.worker_pickling import pickling_for_worker
from granular.errors import ClosedError, InvalidArgumentError, WorkerError

_METHODS: Final = multiprocessing.get_all_start_methods()


def start_context(context: Any) -> Any:
    """Return the context of :mod:`multiprocessing` of a start method, or the context that is given."""
    if context is None or context in _METHODS:
        return multiprocessing.get_context(context)
    if not hasattr(context, 'get_start_method'):
        raise InvalidArgumentError(
            f'expected a start method of processes ({", ".join(map(repr, _METHODS))}) or a context of multiprocessing, '
            f'got {context!r:.100}'
        )
    return context


class Workers:
    """A pool of processes that compute items.

    ``context`` is a start method or a context of :mod:`multiprocessing`. ``initialize`` is called in each process
    before its first item, with the number of the process and the count of all.
    """

    def __init__(
        self, task: Task, count: int, context: Any, initialize: Callable[[int, int], object] | None = None
    ) -> None:
        self._context = start_context(context)
        self._task = task
        self._count = count
        self._initialize = initialize
        self._stages = task.stages()
        self._workers: list[Worker] = []
        self._payload: Any = task, initialize
        self._parts: Sequence[memoryview] = ()  # the memory of the task's arrays, in a file that all workers map
        self._file = -1
        self._release: Callable[[], Any] | None = None  # closes the file
        self._turn = 0
        self._starting = asyncio.Lock()
        self._started = self._closed = False

    async def compute(self, *position: int) -> Any:
        """Return ``task.compute(*position)``, computed by the workers in turn; a worker that has died is replaced.

        Raise ``InvalidArgumentError`` if the task does not pickle, and ``WorkerError`` if the process dies, or the item
        or its error cannot be transferred.
        """
        await to_loop()
        number = self._turn % self._count
        self._turn += 1
        if not self._started or (not self._closed and self._workers[number].dead):
            async with self._starting:
                await self._ensure_alive(number)
        if self._closed:
            raise ClosedError('the workers are closed')
        return await self._workers[number].compute(position)

    def ask(self, position: int, count: int) -> Request | None:
        """Ask the next worker for an item; return None if ``compute`` must start or replace it first."""
        workers = self._workers
        if self._closed or not workers:
            return None
        request = workers[self._turn % self._count].ask((position, count))
        if request is not None:
            self._turn += 1
        return request

    async def _ensure_alive(self, number: int) -> None:
        if self._closed:
            return
        # A caller that is cancelled waits until the processes that it starts are known, and can be ended.
        if not self._started:
            await offload_whole(self._start)
        elif self._workers[number].dead:
            await self._workers[number].join()
            await offload_whole(self._replace, number)

    def _replace(self, number: int) -> None:
        self._workers[number] = self._worker(number)

    def _culprit(self) -> str:
        """Return the first stage that does not pickle, for an error."""
        for stage in reversed(self._task.stages()):  # a stage pickles with those before it
            try:
                shared_memory.split(stage, by_value=not _imports_main())
            except Exception:
                return f', {stage.describe()} does not'
        return ''

    def _start(self) -> None:
        if (process := multiprocessing.current_process()).daemon:
            raise WorkerError(
                f'{process.name} is a daemonic process, as the workers of granular and torch are, and cannot start '
                f'worker processes: use threads there, without mp_prefetch or mp='
            )
        if self._context.get_start_method() != 'fork':
            token = pickling_for_worker.set(True)
            try:
                work = self._task, self._initialize
                self._payload, self._parts = shared_memory.split(work, by_value=not _imports_main())
            except Exception as error:
                raise InvalidArgumentError(
                    f'worker processes need a source and functions that pickle{self._culprit()}: {summary(error)}'
                ) from error
            finally:
                pickling_for_worker.reset(token)
        if self._parts:
            self._file = shared_memory.write(self._parts)
            self._release = weakref.finalize(self, os.close, self._file)
        workers: list[Worker] = []
        try:
            for number in range(self._count):
                workers.append(self._worker(number))  # noqa: PERF401 - those before one that fails are killed
        except BaseException:
            for worker in workers:
                worker.kill()
            raise
        self._workers, self._started = workers, True
        expect_exit()  # handlers at exit kill the processes

    def _worker(self, number: int) -> Worker:
        sizes = [part.nbytes for part in self._parts]
        try:
            return Worker(self._context, number, self._count, self._payload, self._file, sizes, self._stages)
        except OSError as error:
            raise WorkerError(
                f'worker process {number + 1} of {self._count} cannot be started ({error}): {USED_UP}'
            ) from error

    async def aclose(self) -> None:
        """End all processes, and wait for them."""
        self._closed = True
        await to_loop()
        async with self._starting:
            workers, self._workers = self._workers, []
            for worker in workers:
                worker.stop()
            await settle([worker.join() for worker in workers])
            if self._release is not None:
                self._release()


def _imports_main() -> bool:
    """Return whether worker processes import ``__main__``: a script or module, but not a notebook."""
    main = sys.modules['__main__']
    return getattr(main, '__spec__', None) is not None or hasattr(main, '__file__')

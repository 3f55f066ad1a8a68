"""The main function of a worker process: it computes items on its own event loop and sends them to the consumer."""

import asyncio
import concurrent.futures
import contextlib
import os
import pickle
import queue
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np

from granular.aio.pipeline.execution import shared_memory
from granular.aio.pipeline.execution.failures import capturing, portable
from granular.aio.runtime.forking import after_fork
from granular.aio.runtime.replied import Server, inherit_replies, replied_servers
from granular.aio.runtime.tracebacks import summary
from granular.aio.runtime.user_functions import CONTROL, await_user, function_error
from granular.errors import WorkerError
from granular.formats.checksums import crc32c
from granular.metrics import PARTS, Metrics, counters, timing


class Stage(Protocol):
    """A stage of a pipeline, which is timed."""

    def describe(self) -> str: ...

    def spent_times(self) -> tuple[int, float]: ...

    def record_time(self, count: int, seconds: float) -> None: ...


Report = tuple[Metrics, list[tuple[int, float]], list[Server]]
"""The metrics of a worker process, and since the report before: what was added to the times of its stages, and the
servers that have replied to it."""


class Task(Protocol):
    """The work of the processes: picklable, it computes the item at a position."""

    captures: bool

    def stages(self) -> Sequence[Stage]:
        """Return the timed stages, in the same order in each process."""
        ...

    @property
    def compute(self) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Coroutine function from a position, one integer or several, to its item."""
        ...


_Outcome = tuple[BaseException | None, Any]


def work(
    pipe: Connection, payload: Any, sizes: Sequence[int], place: tuple[int, int], started: int, servers: list[Server]
) -> None:
    """Compute requested items, until the parent stops the worker or ends.

    Args:
      pipe: carries requests and replies.
      payload: the :class:`Task` and a function of ``place`` to call first, or None; or their pickle.
      sizes: the sizes of the task's arrays, in a file whose descriptor comes first.
      place: the number of this worker, and the number of workers.
      started: the number of workers that the parent has started before.
      servers: the servers that have replied to the parent.
    """
    inherit_replies(servers)
    _leave_signals()
    after_fork(pipe.close)  # while a child held it, the parent would wait for the rest of what this process was sending
    from granular.aio.runtime import pools
    from granular.aio.runtime.portal import portal

    task: Task | None = None
    failed: BaseException | None = None
    try:
        fd = shared_memory.receive_fd(pipe) if sizes else -1
        loaded, initialize = _loaded(payload, fd, sizes) if isinstance(payload, bytes) else payload
        _seed(started)
        if initialize is not None:
            initialize(*place)
        capturing.set(loaded.captures)
        task = loaded
    except BaseException as error:
        failed = function_error(error) if isinstance(error, CONTROL) else error
    outbox = _Outbox(pipe, [] if task is None else task.stages())
    running: dict[int, concurrent.futures.Future[_Outcome]] = {}
    done: queue.SimpleQueue[tuple[int, concurrent.futures.Future[_Outcome]]] = queue.SimpleQueue()

    def reply() -> None:
        try:
            while True:
                number, future = done.get()
                running.pop(number, None)
                if not future.cancelled():
                    outbox.reply(number, *future.result())
                del future
        except BaseException:  # a MemoryError may come anywhere: the parent reports this process as dead
            traceback.print_exc()
            os._exit(1)

    # Copying takes too long for the loop. The thread starts before there is work: later, it might be refused.
    pools.fix_depth()
    pools.start_thread(threading.Thread(target=reply, name='granular-reply', daemon=True))
    while True:
        try:
            request = pipe.recv()
        except (EOFError, OSError):
            break
        if request is None:
            break
        number, position, timing.on, unused = request
        outbox.memory.give_back(unused)
        if position is None:
            if (cancelled := running.get(number)) is not None:
                cancelled.cancel()
        elif task is None:
            outbox.reply(number, failed, None)
        else:
            future = running[number] = asyncio.run_coroutine_threadsafe(_attempt(task, position), portal.loop())
            future.add_done_callback(lambda future, number=number: done.put((number, future)))  # type: ignore[misc]
    for future in list(running.values()):
        future.cancel()
    portal.stop()
    _flush()
    os._exit(0)  # threads of user functions are not awaited


def _flush() -> None:
    """Write what functions have printed: the process ends without the end of Python, or is killed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it is None, closed, or an object of the user, which may raise anything
            stream.flush()


def _leave_signals() -> None:
    """Leave signals to the parent: an inherited handler of the user might write a checkpoint of its loader here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # its parent has blocked it
    signal.set_wakeup_fd(-1)  # by which a loop of the parent would take the signal for its own
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, lambda *_: None)  # what is ignored would be ignored by programs that functions run


def _seed(number: int) -> None:
    """Give the global random generators states of their own: forked processes all have those of their parent."""
    random.seed(random.getrandbits(64) + number)
    # Without the lock of the generator, which another thread may have held at the fork.
    generators: Any = np.random
    state = crc32c(pickle.dumps(generators.get_bit_generator().state))
    generators.set_bit_generator(np.random.MT19937([state, number]))
    if (torch := sys.modules.get('torch')) is not None:
        torch.manual_seed((torch.initial_seed() + number + 1) % (1 << 63))


def _loaded(payload: bytes, fd: int, sizes: Sequence[int]) -> Any:
    try:
        return shared_memory.join(payload, fd, sizes)
    except BaseException as error:  # the classes of unpickled objects may raise anything
        remedy = (
            ': the worker imports the main module, but what stands under '
            "`if __name__ == '__main__':` does not run there: define functions and classes above it"
        )
        raise WorkerError(
            f'the source and functions do not unpickle in a worker process: {summary(error)}'
            f'{remedy if isinstance(error, AttributeError) else ""}'
        ) from error


async def _attempt(task: Task, position: Sequence[int]) -> _Outcome:
    """Return the error, if any, and the item. Errors are not raised: asyncio would end the loop with some of them."""
    try:
        return None, await await_user(task.compute(*position))
    except asyncio.CancelledError:
        raise  # the consumer cancelled the item
    except BaseException as error:
        return error, None


class _Outbox:
    """The replies of this process, each with a report, and the memory that they are sent in."""

    def __init__(self, pipe: Connection, stages: Sequence[Stage]) -> None:
        self._pipe, self._stages = pipe, stages
        self._reported = [stage.spent_times() for stage in stages]  # stages pickle with their times
        self._servers = set(replied_servers())
        self._lock = threading.Lock()
        self.memory = shared_memory.Sender()

    def reply(self, number: int, error: BaseException | None, item: Any) -> None:
        parts: Sequence[Any] = ()
        try:
            head, parts = shared_memory.split(item if error is None else portable(error))
        except BaseException as unpicklable:  # the methods of its class may raise anything
            error = WorkerError(f'the item does not pickle: {summary(unpicklable)}')
            head = pickle.dumps(portable(error))
        _flush()
        try:
            with self._lock:
                sent, fd = self.memory.write(number, parts)
                self._pipe.send((number, error is None, head, sent, self._report()))
                if fd >= 0:
                    shared_memory.send_fd(self._pipe, fd)
        except OSError:
            os._exit(1)  # the parent has ended, or memory is exhausted: it reports this process as dead

    def _report(self) -> Report:
        metrics = counters.copy()
        # The others are added up by the stages of the process that started this one.
        metrics.stages = {name: times for name, times in metrics.stages.items() if name.startswith(PARTS)}
        now = [stage.spent_times() for stage in self._stages]
        added = [(a - c, b - d) for (a, b), (c, d) in zip(now, self._reported, strict=True)]
        self._reported = now
        servers = [server for server in replied_servers() if server not in self._servers]
        self._servers.update(servers)
        return metrics, added, servers

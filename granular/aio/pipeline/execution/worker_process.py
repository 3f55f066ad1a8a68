"""A worker process, the reader thread that receives its items, and the requests for these."""

import asyncio
import collections
import contextlib
import errno
import itertools
import multiprocessing.resource_tracker
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

from granular.aio.pipeline.execution import shared_memory
from granular.aio.pipeline.execution.failures import remote
from granular.aio.pipeline.execution.outbox import Outbox
from granular.aio.pipeline.execution.prefetch import NOT_READY, Item
from granular.aio.pipeline.execution.worker_main import Report, Stage, work
from granular.aio.runtime.forking import after_fork, fork_turn, inherited
from granular.aio.runtime.pools import exiting, start_thread
from granular.aio.runtime.replied import inherit_replies, replied_servers
from granular.aio.runtime.tracebacks import summary
from granular.errors import ClosedError, GranularError, WorkerError
from granular.metrics import Reports, timing

_GRACE: Final = 5.0  # seconds in which a worker may exit by itself
_POLL: Final = 0.01  # seconds between checks of a process that is to exit
_SILENCE: Final = 1.0  # seconds without a message after which to check the worker
USED_UP: Final = (
    'the limit of open files (`ulimit -n`), of processes (`ulimit -u`) or of the container is used up: raise it, or '
    'use fewer workers'
)
_GUARD: Final = "needs if __name__ == '__main__':"
_started: Final = itertools.count()  # numbers the worker processes

# This process's ends of all pipes, with the files of their descriptors. While a forked child holds one, the worker does
# not notice that this process died.
_ends: Final[weakref.WeakKeyDictionary[Connection, os.stat_result]] = weakref.WeakKeyDictionary()


class Request(Item[Any]):
    """An item that a worker was asked for. Its reader thread finishes it."""

    __slots__ = ('_errors', '_is_cancelled', '_is_done', '_waiting', '_worker', 'number', 'place')

    def __init__(self, worker: 'Worker', number: int, place: tuple[int, ...]) -> None:
        super().__init__(place[0])
        self._worker = weakref.ref(worker)
        self.number, self.place = number, place
        self._is_done = self._is_cancelled = False
        self._errors: list[BaseException] = []
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()

    @property
    def is_done(self) -> bool:
        return self._is_done

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def finish(self, value: Any, error: BaseException | None = None, is_cancelled: bool = False) -> None:
        """Set what became of it, once, and wake the callers that wait for it."""
        self.value, self._is_cancelled = value, is_cancelled
        if error is not None:
            self._errors.append(error)
        self._is_done = True
        while self._waiting:
            future = self._waiting.pop()
            with contextlib.suppress(RuntimeError):  # the loop ended, and with it the caller
                future.get_loop().call_soon_threadsafe(_complete, future)

    async def result(self) -> Any:
        if not self._is_done:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            if not self._is_done:  # otherwise the reader thread may not have seen it
                await future
        if self._errors:
            raise self._errors.pop()
        if self._is_cancelled:
            raise asyncio.CancelledError
        return self.value

    def cancel(self) -> None:
        if (worker := self._worker()) is not None:
            worker.cancel(self)


class Worker:
    """A worker process and its reader thread."""

    def __init__(
        self,
        context: Any,
        number: int,
        count: int,
        payload: Any,
        fd: int,
        sizes: Sequence[int],
        stages: Sequence[Stage],
    ) -> None:
        self._stages, self._reports = stages, Reports()
        with fork_turn():  # so that no worker is forked which would not close this end
            self.pipe, other_end = context.Pipe(duplex=True)
            _ends[self.pipe] = os.fstat(self.pipe.fileno())
        self._process = context.Process(
            target=work,
            args=(other_end, payload, sizes, (number, count), next(_started), replied_servers()),
            name=f'granular-worker-{number}',
            daemon=True,
        )
        method = context.get_start_method()
        starting = {'fork': fork_turn, 'spawn': _interrupts_blocked}.get(method, contextlib.nullcontext)
        with starting():
            try:
                self._process.start()
            except EOFError:
                raise WorkerError(
                    f'the server of the start method {method!r} ended before it started a worker'
                ) from None
            except RuntimeError:  # in a process that imports the script; Python's own error is long
                if method == 'fork':
                    raise
                name = multiprocessing.current_process().name
                raise WorkerError(f'{name} is starting, and cannot start processes: its script {_GUARD}') from None
        other_end.close()
        self._finalizer = weakref.finalize(self, _kill, self._process, os.getpid())
        # Without a lock, as an interrupt, or the handler of a signal that closes it, may come while a thread asks.
        self._pending: dict[int, Request] = {}
        self._numbers = itertools.count()
        self._stopped = self.dead = self._joined = False
        if fd >= 0:
            shared_memory.send_fd(self.pipe, fd)
        memory = shared_memory.Receiver()
        self._outbox = Outbox(self.pipe, self._process, memory)
        self._thread = threading.Thread(
            target=_listen,
            args=(self.pipe, self._process, memory, weakref.ref(self)),
            name=self._process.name,
            daemon=True,
        )
        start_thread(self._thread)

    def ask(self, position: tuple[int, ...]) -> Request | None:
        """Ask for an item; return None if the process has ended."""
        if self._stopped or self.dead:
            return None
        number = next(self._numbers)
        message = number, position, timing.on
        request = self._pending[number] = Request(self, number, position)
        try:
            self._outbox.send(message)
        except BaseException as error:
            self._pending.pop(number, None)
            # A pipe that a handler of a signal closes meanwhile raises anything.
            if isinstance(error, OSError) or (self._stopped and isinstance(error, Exception)):
                return None
            raise
        if self.dead and self._pending.pop(number, None) is not None:  # it is not among those that have failed
            return None
        return request

    async def compute(self, position: tuple[int, ...]) -> Any:
        if (request := self.ask(position)) is None:
            raise self._obituary(position)
        try:
            return await request.result()
        except asyncio.CancelledError:
            request.cancel()
            raise

    def cancel(self, request: Request) -> None:
        if self._pending.pop(request.number, None) is None:
            return
        with contextlib.suppress(OSError):  # it has ended
            if not self._stopped and not self._outbox.withdraw(request.number):
                self._outbox.send((request.number, None, timing.on))
        request.finish(NOT_READY, is_cancelled=True)

    def resolve(self, number: int, ok: bool, result: Any) -> None:
        """Pass an item, or an error, to its caller."""
        if (request := self._pending.pop(number, None)) is not None:
            request.finish(result if ok else NOT_READY, None if ok else result)

    def take_report(self, report: Report) -> None:
        metrics, added, servers = report
        self._reports.take(metrics)
        inherit_replies(servers)
        # A process that could not load the task reports no stages.
        for stage, (count, seconds) in zip(self._stages, added, strict=False):
            if count:
                stage.record_time(count, seconds)

    def ended(self) -> None:
        """Mark the process as dead, and fail the items in progress."""
        _join(self._process)
        self._reports.end()
        self.dead = True  # first: what is asked for afterwards is not among the requests that fail
        while self._pending:
            with contextlib.suppress(KeyError):  # another thread has taken the last one
                _, request = self._pending.popitem()
                request.finish(NOT_READY, self._obituary(request.place))

    def _obituary(self, position: tuple[int, ...]) -> GranularError:
        if exiting.is_set():
            return ClosedError('the interpreter is shutting down')
        code = self._process.exitcode
        how = 'was closed' if self._stopped else f'ended with exit code {code}'
        if code is not None and code < 0:
            how = f'was killed by {_name_of(-code)}'
        hint = ''
        if code == 1:
            hint = f': its traceback is on stderr; a script that starts processes {_GUARD}'
        elif code == -signal.SIGKILL:
            hint = ': usually for lack of memory: use fewer workers, smaller batches or less prefetching'
        process = self._process
        return WorkerError(
            f'worker process {process.name} (pid {process.pid}) {how} before it computed item {position[0]}{hint}'
        )

    def stop(self) -> None:
        """Ask the process to exit."""
        self._stopped = True
        with contextlib.suppress(OSError):  # it has exited already
            self._outbox.send(None)

    def kill(self) -> None:
        self._finalizer()

    async def join(self) -> None:
        """Wait until the process exits; kill it after a grace period. A second call has no effect."""
        if self._joined:
            return
        # No thread waits for it, as none can be started while the interpreter exits.
        until = time.monotonic() + _GRACE
        while self._process.is_alive() and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(_POLL)
        self._finalizer()
        while any(map(_is_alive, (self._thread, self._outbox.thread))) and time.monotonic() < until + _GRACE:  # noqa: ASYNC110
            await asyncio.sleep(_POLL)
        self.pipe.close()
        # At exit, multiprocessing joins its processes, which must be open. One within a call of the system may live on.
        if threading.main_thread().is_alive() and not self._process.is_alive():
            self._process.close()
        self._joined = True


def _name_of(number: int) -> str:
    """Return the name of a signal; Python has none for most of the real-time signals."""
    return signal.Signals(number).name if number in set(signal.Signals) else f'signal {number}'


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Start a process that Ctrl-C in a terminal, which all processes get, does not end before it can ignore that."""
    multiprocessing.resource_tracker.ensure_running()  # its start, within that of the first process, unblocks them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _close_ends() -> None:
    """Close all ends in a forked child. One that another thread was closing may be another file's by now."""
    for end, file in list(_ends.items()):
        with contextlib.suppress(OSError):
            if not end.closed and os.path.samestat(os.fstat(end.fileno()), file):
                end.close()
                continue
        inherited.append(end)  # it would close its descriptor when it is collected


after_fork(_close_ends)


def _is_alive(thread: threading.Thread | None) -> bool:
    return thread is not None and thread.is_alive()


def _kill(process: Any, parent: int) -> None:
    # A forked child collects what it inherits, and ends, as its parent would: the workers are not its own.
    if os.getpid() == parent and process.is_alive():
        process.kill()
        _join(process)


def _join(process: Any) -> None:
    """Wait until a process ends, as its ``join``, which also waits for the children of the process."""
    until = time.monotonic() + _GRACE
    while process.is_alive() and time.monotonic() < until:
        process.join(_POLL)


def _complete(future: 'asyncio.Future[None]') -> None:
    if not future.done():
        future.set_result(None)


def _listen(pipe: Connection, process: Any, memory: shared_memory.Receiver, worker: 'weakref.ref[Worker]') -> None:
    """The main function of the reader thread: pass on the replies of a worker, until it ends."""
    poll = select.poll()
    poll.register(pipe.fileno(), select.POLLIN)
    while True:
        try:
            _wait_for_reply(poll, process)
            number, ok, head, sent, report = pipe.recv()
            fd = shared_memory.receive_fd(pipe) if sent.new else -1
        except (EOFError, OSError):
            break
        except MemoryError:  # the reply does not fit, and the messages after it cannot be read
            process.kill()
            break
        ok, result = _unpickled(ok, memory, number, head, sent, fd)
        owner = worker()
        if owner is None:
            return
        try:
            owner.take_report(report)
        except BaseException as error:  # the name of a stage may be that of a user's class
            ok, result = False, error
        owner.resolve(number, ok, result)
        del owner, result
    if (owner := worker()) is not None:
        owner.ended()


def _wait_for_reply(poll: 'select.poll', process: Any) -> None:
    while not poll.poll(_SILENCE * 1000):
        if not process.is_alive():
            raise EOFError  # another process, such as its own child, holds its end of the pipe


def _unpickled(ok: bool, memory: shared_memory.Receiver, *received: Any) -> tuple[bool, Any]:
    """Return an item and True, or an error and False."""
    try:
        result = memory.join(*received)
        return ok, result if ok else remote(*result)
    except BaseException as error:  # the methods of its class may raise anything
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return False, WorkerError(f'the item of a worker process cannot be received ({error}): {USED_UP}')
        return False, WorkerError(f'the item of a worker process does not unpickle in this process: {summary(error)}')

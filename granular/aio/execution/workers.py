"""Worker processes: each has its own event loop and computes whole items, which are returned in shared memory.

Arrays are written into an anonymous file, whose descriptor is sent over the pipe; the consumer maps it, and the memory
is freed with the last array. Nothing has a name, so nothing can be left behind, however a process ends.
"""

import asyncio
import concurrent.futures
import contextlib
import itertools
import mmap
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final, Protocol

from granular.aio.execution.failures import capturing, portable, remote, summary
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.sharing import sharing
from granular.aio.runtime.tasks import settle
from granular.aio.runtime.threads import offload
from granular.aio.runtime.user_functions import await_user
from granular.errors import ClosedError, InvalidArgumentError, WorkerError

_ALIGN: Final = 64
_BEHIND: Final = 512  # buffers per system call
_GRACE: Final = 5.0  # seconds in which a worker may exit by itself
_LOOK: Final = 0.01  # seconds between checks of a process that is to exit
_SILENCE: Final = 1.0  # seconds without a message after which a worker is checked


class Task(Protocol):
    """The work of the processes: picklable, it computes the item at a position."""

    captures: bool

    async def make(self, position: int) -> Any:
        """Return the item at a position."""
        ...


class Workers:
    """A pool of processes that compute items.

    Args:
      task: the work of the processes.
      count: the number of processes.
      context: a start method ('spawn', 'forkserver', 'fork') or a context of :mod:`multiprocessing`.

    Raises:
      InvalidArgumentError: if the task does not pickle.
      WorkerError: (for an item) if its process died, or its result or error cannot be transferred.
    """

    def __init__(self, task: Task, count: int, context: Any) -> None:
        self._context = multiprocessing.get_context(context) if isinstance(context, str | type(None)) else context
        self._task, self._count = task, count
        self._workers: list[_Worker] = []
        self._payload: Any = task
        self._parts: Sequence[memoryview] = ()  # the memory of the task's arrays, in a file that all workers share
        self._file = -1
        self._release: Callable[[], Any] | None = None  # closes the file
        self._turns = itertools.count()
        self._beginning = asyncio.Lock()
        self._begun = self._closed = False

    async def make(self, position: int) -> Any:
        """Return the item at a position, computed by the workers in turn; a worker that has died is replaced."""
        await ensure_event_loop()
        number = next(self._turns) % self._count
        if not self._begun or (not self._closed and self._workers[number].dead):
            async with self._beginning:
                if not self._begun and not self._closed:
                    await offload(self._start)
                    self._begun = True
                elif not self._closed and self._workers[number].dead:
                    await self._replace(number)
        if self._closed:
            raise ClosedError('the workers are closed')
        return await self._workers[number].make(position)

    def _start(self) -> None:
        if self._context.get_start_method() != 'fork':
            token = sharing.set(True)
            try:
                self._payload, self._parts = _split(self._task)
            except Exception as error:
                raise InvalidArgumentError(
                    f'worker processes need a source and functions that pickle: {summary(error)}'
                ) from error
            finally:
                sharing.reset(token)
        if self._parts:
            self._file = _write(self._parts)
            self._release = weakref.finalize(self, os.close, self._file)
        workers: list[_Worker] = []
        try:
            for number in range(self._count):
                workers.append(self._worker(number, workers))
        except BaseException:
            for worker in workers:
                worker.kill()
            raise
        self._workers = workers

    async def _replace(self, number: int) -> None:
        dead = self._workers[number]
        await dead.join()
        self._workers[number] = await offload(
            self._worker, number, [worker for worker in self._workers if worker is not dead]
        )

    def _worker(self, number: int, others: Sequence['_Worker']) -> '_Worker':
        sizes = [part.nbytes for part in self._parts]
        return _Worker(self._context, number, [worker.pipe for worker in others], self._payload, self._file, sizes)

    async def aclose(self) -> None:
        """End all processes, and wait for them."""
        self._closed = True
        await ensure_event_loop()
        async with self._beginning:
            workers, self._workers = self._workers, []
            for worker in workers:
                worker.stop()
            await settle([worker.join() for worker in workers])
            if self._release is not None:
                self._release()


class _Worker:
    """A worker process and its reader thread."""

    def __init__(
        self, context: Any, number: int, ours: Sequence[Connection], payload: Any, fd: int, sizes: Sequence[int]
    ) -> None:
        self.pipe, theirs = context.Pipe(duplex=True)
        # A forked child also inherits our ends of all pipes; while it holds them, the death of this process goes
        # unnoticed.
        foreign = [*ours, self.pipe] if context.get_start_method() == 'fork' else []
        self._process = context.Process(
            target=_work, args=(theirs, payload, sizes, foreign), name=f'granular-worker-{number}', daemon=True
        )
        self._process.start()
        theirs.close()
        self._finalizer = weakref.finalize(self, _kill, self._process, os.getpid())
        self._pending: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Any], int]] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._stopped = self.dead = False
        if fd >= 0:
            _send_fd(self.pipe, fd)
        self._thread = threading.Thread(
            target=_listen, args=(self.pipe, self._process, weakref.ref(self)), name=self._process.name, daemon=True
        )
        self._thread.start()

    async def make(self, position: int) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        number = next(self._numbers)
        with self._lock:
            if self._stopped or self.dead:
                raise WorkerError(self._obituary(position))
            self._pending[number] = loop, future, position
            try:
                self.pipe.send((number, position))
            except OSError:
                del self._pending[number]
                raise WorkerError(self._obituary(position)) from None
        try:
            return await future
        except asyncio.CancelledError:
            with self._lock:
                if self._pending.pop(number, None) is not None and not self._stopped:
                    with contextlib.suppress(OSError):  # it died, and the callers that wait for it get an error
                        self.pipe.send((number, None))
            raise

    def answered(self, number: int, ok: bool, found: Any) -> None:
        """Pass an item, or an error, to its caller."""
        with self._lock:
            entry = self._pending.pop(number, None)
        if entry is not None:
            loop, future, _ = entry
            with contextlib.suppress(RuntimeError):  # the loop ended, and with it the caller
                loop.call_soon_threadsafe(_resolve, future, ok, found)

    def ended(self) -> None:
        """Mark the process as dead, and fail the items in progress."""
        self._process.join(_GRACE)
        with self._lock:
            self.dead = True
            pending, self._pending = self._pending, {}
        for loop, future, position in pending.values():
            with contextlib.suppress(RuntimeError):  # the loop ended, and with it the caller
                loop.call_soon_threadsafe(_resolve, future, False, WorkerError(self._obituary(position)))

    def _obituary(self, position: int) -> str:
        code = self._process.exitcode
        how = 'was closed' if self._stopped else f'ended with exit code {code}'
        if code is not None and code < 0:
            how = f'was killed by {signal.Signals(-code).name}'
        return f'worker process {self._process.name} (pid {self._process.pid}) {how} before it made item {position}'

    def stop(self) -> None:
        """Ask the process to exit."""
        with self._lock:
            self._stopped = True
            with contextlib.suppress(OSError):  # it has exited already
                self.pipe.send(None)

    def kill(self) -> None:
        """Kill the process."""
        self._finalizer()

    async def join(self) -> None:
        """Wait until the process exits; kill it after a grace period."""
        # Not in a thread: while the interpreter exits, none can be started.
        until = time.monotonic() + _GRACE
        while self._process.is_alive() and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK)
        self._finalizer()
        while self._thread.is_alive() and time.monotonic() < until + _GRACE:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK)
        self.pipe.close()
        self._process.close()


def _kill(process: Any, parent: int) -> None:
    # A forked child collects what it inherits, and ends, as its parent would: the workers are not its own.
    if os.getpid() == parent and process.is_alive():
        process.kill()
        process.join(_GRACE)


def _resolve(future: 'asyncio.Future[Any]', ok: bool, found: Any) -> None:
    if not future.done():
        if ok:
            future.set_result(found)
        else:
            future.set_exception(found)


def _listen(pipe: Connection, process: Any, worker: 'weakref.ref[_Worker]') -> None:
    """The main function of the reader thread: pass on what a worker sends, until it ends."""
    while True:
        try:
            while not pipe.poll(_SILENCE):
                if not process.is_alive():
                    raise EOFError  # another process, such as its own child, holds its end of the pipe
            number, ok, head, sizes = pipe.recv()
            fd = _receive_fd(pipe) if sizes else -1
        except (EOFError, OSError):
            break
        found: Any
        try:
            found = _join(head, fd, sizes)
        except BaseException as error:  # the methods of its class may raise anything
            said = summary(error)
            ok, found = False, WorkerError(f'what a worker process made cannot be unpickled here: {said}')
        owner = worker()
        if owner is None:
            return
        if isinstance(found, tuple) and not ok:
            found = remote(*found)
        owner.answered(number, ok, found)
        del owner, found
    if (owner := worker()) is not None:
        owner.ended()


# --- in the worker process


def _work(pipe: Connection, payload: Any, sizes: Sequence[int], foreign: Sequence[Connection]) -> None:
    """The main function of a worker: compute requested items, until told to stop or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent closes its workers when it is interrupted
    from granular.aio.runtime.bridge import bridge

    for end in foreign:
        end.close()
    task: Task | None = None
    failed: BaseException | None = None
    try:
        fd = _receive_fd(pipe) if sizes else -1
        task = _join(payload, fd, sizes) if isinstance(payload, bytes) else payload
        capturing.set(task.captures)
    except BaseException as error:  # the classes of unpickled objects may raise anything
        failed = error
    lock = threading.Lock()
    running: dict[int, concurrent.futures.Future[_Outcome]] = {}
    replies = concurrent.futures.ThreadPoolExecutor(1, 'granular-reply')  # copying takes too long for the loop

    def reply(number: int, future: 'concurrent.futures.Future[_Outcome]') -> None:
        running.pop(number, None)
        if not future.cancelled():
            _reply(pipe, lock, number, *future.result())

    while True:
        try:
            asked = pipe.recv()
        except (EOFError, OSError):
            break
        if asked is None:
            break
        number, position = asked
        if position is None:
            if (cancelled := running.get(number)) is not None:
                cancelled.cancel()
        elif task is None:
            _reply(pipe, lock, number, failed, None)
        else:
            future = running[number] = asyncio.run_coroutine_threadsafe(_attempt(task, position), bridge.loop())
            future.add_done_callback(lambda done, number=number: replies.submit(reply, number, done))  # type: ignore[misc]
    for future in list(running.values()):
        future.cancel()
    bridge.stop()
    os._exit(0)  # threads of user functions are not awaited


_Outcome = tuple[BaseException | None, Any]


async def _attempt(task: Task, position: int) -> _Outcome:
    """Return the error, if any, and the item. Errors are not raised: asyncio would end the loop with some of them."""
    try:
        return None, await await_user(task.make(position))
    except asyncio.CancelledError:
        raise  # the consumer cancelled the item
    except BaseException as error:
        return error, None


def _reply(pipe: Connection, lock: threading.Lock, number: int, error: BaseException | None, item: Any) -> None:
    parts: Sequence[Any] = ()
    try:
        head, parts = _split(item if error is None else portable(error))
    except BaseException as unpicklable:  # the methods of its class may raise anything
        error = WorkerError(f'what was made does not pickle: {summary(unpicklable)}')
        head = pickle.dumps(portable(error))
    with lock:
        try:
            fd = _write(parts) if parts else -1
            try:
                pipe.send((number, error is None, head, [part.nbytes for part in parts]))
                if fd >= 0:
                    _send_fd(pipe, fd)
            finally:
                if fd >= 0:
                    os.close(fd)
        except OSError:
            os._exit(1)  # the parent is gone, or memory is exhausted: it reports this process as dead


# --- shared memory


def _split(value: Any) -> tuple[bytes, list[Any]]:
    """Return a pickle of a value, and the memory of its arrays separately."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return head, [buffer.raw() for buffer in buffers]


def _offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    places, at = [], 0
    for size in sizes:
        places.append(at)
        at += -(-size // _ALIGN) * _ALIGN
    return places, at


def _write(parts: Sequence[Any]) -> int:
    """Return the descriptor of an anonymous file that contains these parts."""
    _, total = _offsets(part.nbytes for part in parts)
    if hasattr(os, 'memfd_create'):
        fd = os.memfd_create('granular', os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as opened:
            fd = os.dup(opened.fileno())
    try:
        os.ftruncate(fd, max(total, 1))
        vector = []
        for part in parts:
            vector += [part, bytes(-part.nbytes % _ALIGN)]
        at = 0
        for first in range(0, len(vector), _BEHIND):
            some = vector[first : first + _BEHIND]
            wanted = sum(memoryview(part).nbytes for part in some)
            if (written := os.pwritev(fd, some, at)) != wanted:  # large writes are split by the system
                joined = memoryview(b''.join(some))
                while written < wanted:
                    written += os.pwrite(fd, joined[written:], at + written)
            at += wanted
    except BaseException:
        os.close(fd)
        raise
    return fd


def _join(head: bytes, fd: int, sizes: Sequence[int]) -> Any:
    """Rebuild a value from the parts of ``_split``, over shared memory; closes the descriptor."""
    if fd < 0:
        return pickle.loads(head)
    try:
        places, total = _offsets(sizes)
        flags = mmap.MAP_SHARED | getattr(mmap, 'MAP_POPULATE', 0)
        view = memoryview(mmap.mmap(fd, max(total, 1), flags=flags))
    finally:
        os.close(fd)
    return pickle.loads(head, buffers=[view[at : at + size] for at, size in zip(places, sizes, strict=True)])


def _send_fd(pipe: Connection, fd: int) -> None:
    with socket.socket(fileno=os.dup(pipe.fileno())) as line:
        socket.send_fds(line, [b'f'], [fd])


def _receive_fd(pipe: Connection) -> int:
    with socket.socket(fileno=os.dup(pipe.fileno())) as line:
        _, fds, _, _ = socket.recv_fds(line, 1, 1)
    if not fds:
        raise EOFError
    return fds[0]

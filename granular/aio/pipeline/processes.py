"""Worker processes: each has an event loop of its own and makes whole items, which come back in shared memory.

Arrays are written into an anonymous file, whose descriptor travels over the pipe; the consumer maps it, and the memory
is gone with the last array. Nothing has a name, so nothing can be left behind, however a process ends.
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

from granular.aio.loops import await_user, need_loop, settle
from granular.aio.pipeline.source import capturing, portable, remote, summary
from granular.aio.snapshots import sharing
from granular.aio.threads import offload
from granular.errors import ClosedError, InvalidArgumentError, WorkerError

_ALIGN: Final = 64
_BEHIND: Final = 512  # buffers that one system call takes
_GRACE: Final = 5.0  # seconds in which a worker may end by itself
_LOOK: Final = 0.01  # seconds between looks at a process that is to end
_SILENCE: Final = 1.0  # seconds after which a worker that says nothing is looked after


class Task(Protocol):
    """What workers do: it pickles, and makes the item of a position."""

    captures: bool

    async def make(self, position: int) -> Any:
        """The item of a position."""
        ...


class Workers:
    """Processes that make items.

    Args:
      task: what they do.
      count: how many processes.
      context: a start method ('spawn', 'forkserver', 'fork') or a context of :mod:`multiprocessing`.

    Raises:
      InvalidArgumentError: if the task does not pickle.
      WorkerError: (of an item) if its process died, or raised what cannot be carried over.
    """

    def __init__(self, task: Task, count: int, context: Any) -> None:
        self._context = multiprocessing.get_context(context) if isinstance(context, str | type(None)) else context
        self._task, self._count = task, count
        self._workers: list[_Worker] = []
        self._payload: Any = task
        self._parts: Sequence[memoryview] = ()  # the memory of the task's arrays, in a file that all workers share
        self._file = -1
        self._release: Callable[[], Any] | None = None  # closes it
        self._turns = itertools.count()
        self._beginning = asyncio.Lock()
        self._begun = self._closed = False

    async def make(self, position: int) -> Any:
        """The item of a position, made by one of them in turn; one that has died is replaced."""
        await need_loop()
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
        await need_loop()
        async with self._beginning:
            workers, self._workers = self._workers, []
            for worker in workers:
                worker.stop()
            await settle([worker.join() for worker in workers])
            if self._release is not None:
                self._release()


class _Worker:
    """One process, and the thread that listens to it."""

    def __init__(
        self, context: Any, number: int, ours: Sequence[Connection], payload: Any, fd: int, sizes: Sequence[int]
    ) -> None:
        self.pipe, theirs = context.Pipe(duplex=True)
        # A forked child has our ends of all pipes as well; while it keeps them, nobody hears that this process is gone.
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
                    with contextlib.suppress(OSError):  # it died: whoever waits for it hears so
                        self.pipe.send((number, None))
            raise

    def answered(self, number: int, ok: bool, found: Any) -> None:
        """An item came, or an error."""
        with self._lock:
            entry = self._pending.pop(number, None)
        if entry is not None:
            loop, future, _ = entry
            with contextlib.suppress(RuntimeError):  # the loop ended, and with it whoever waited
                loop.call_soon_threadsafe(_resolve, future, ok, found)

    def ended(self) -> None:
        """Nothing more will come."""
        self._process.join(_GRACE)
        with self._lock:
            self.dead = True
            pending, self._pending = self._pending, {}
        for loop, future, position in pending.values():
            with contextlib.suppress(RuntimeError):  # the loop ended, and with it whoever waited
                loop.call_soon_threadsafe(_resolve, future, False, WorkerError(self._obituary(position)))

    def _obituary(self, position: int) -> str:
        code = self._process.exitcode
        how = 'was closed' if self._stopped else f'ended with exit code {code}'
        if code is not None and code < 0:
            how = f'was killed by {signal.Signals(-code).name}'
        return f'worker process {self._process.name} (pid {self._process.pid}) {how} before it made item {position}'

    def stop(self) -> None:
        """Have it end by itself."""
        with self._lock:
            self._stopped = True
            with contextlib.suppress(OSError):  # it has ended already
                self.pipe.send(None)

    def kill(self) -> None:
        """Have it end at once."""
        self._finalizer()

    async def join(self) -> None:
        """Wait for its end, and bring it about if need be."""
        # In no thread: as the interpreter ends, none begins any more.
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
    """In a thread: hand on what a worker sends, until it ends."""
    while True:
        try:
            while not pipe.poll(_SILENCE):
                if not process.is_alive():
                    raise EOFError  # its end of the pipe is held by another process, such as a child of its own
            number, ok, head, sizes = pipe.recv()
            fd = _receive_fd(pipe) if sizes else -1
        except (EOFError, OSError):
            break
        found: Any
        try:
            found = _join(head, fd, sizes)
        except BaseException as error:  # whatever the methods of its class raise
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


# --- in the process


def _work(pipe: Connection, payload: Any, sizes: Sequence[int], foreign: Sequence[Connection]) -> None:
    """The main function of a worker: makes what it is asked for, until it is told to stop or its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent closes its workers when it is interrupted
    from granular.bridge import bridge

    for end in foreign:
        end.close()
    task: Task | None = None
    failed: BaseException | None = None
    try:
        fd = _receive_fd(pipe) if sizes else -1
        task = _join(payload, fd, sizes) if isinstance(payload, bytes) else payload
        capturing.set(task.captures)
    except BaseException as error:  # whatever the classes of what is unpickled raise
        failed = error
    lock = threading.Lock()
    running: dict[int, concurrent.futures.Future[_Outcome]] = {}
    replies = concurrent.futures.ThreadPoolExecutor(1, 'granular-reply')  # as copying takes too long for the loop

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
    os._exit(0)  # threads of the user's functions are not waited for


_Outcome = tuple[BaseException | None, Any]


async def _attempt(task: Task, position: int) -> _Outcome:
    """An item, or the error: never raised, as asyncio would end the loop with some of them."""
    try:
        return None, await await_user(task.make(position))
    except asyncio.CancelledError:
        raise  # the consumer wants it no more
    except BaseException as error:
        return error, None


def _reply(pipe: Connection, lock: threading.Lock, number: int, error: BaseException | None, item: Any) -> None:
    parts: Sequence[Any] = ()
    try:
        head, parts = _split(item if error is None else portable(error))
    except BaseException as unpicklable:  # whatever the methods of its class raise
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
            os._exit(1)  # the parent is gone, or there is no memory left: it reports this process as dead


# --- shared memory


def _split(value: Any) -> tuple[bytes, list[Any]]:
    """A pickle, and the memory of its arrays beside it."""
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
    """An anonymous file that holds these parts."""
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
            if (written := os.pwritev(fd, some, at)) != wanted:  # a large one goes in pieces
                joined = memoryview(b''.join(some))
                while written < wanted:
                    written += os.pwrite(fd, joined[written:], at + written)
            at += wanted
    except BaseException:
        os.close(fd)
        raise
    return fd


def _join(head: bytes, fd: int, sizes: Sequence[int]) -> Any:
    """What ``_split`` took apart, over memory that is shared; takes the descriptor."""
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

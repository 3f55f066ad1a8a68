"""Event loops: switching to one, waiting for several coroutines, and resources that end with their loop.

A coroutine of this library that never waits needs no loop: a local read runs to its end on the calling thread
(:mod:`granular.aio.runtime.bridge`). A coroutine that must wait first does ``await ensure_event_loop()``, which costs
nothing under a running loop; elsewhere, the bridge takes over at that point.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import contextvars
import inspect
import os
import threading
import types
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Hashable, Iterable
from typing import Any, Final, Generic, Protocol, Self, TypeVar, TypeVarTuple, cast

from granular.errors import FunctionError, GranularError

T = TypeVar('T')
Ts = TypeVarTuple('Ts')


class SwitchToLoop:
    """Yielded by a coroutine that needs an event loop when none is running."""


SWITCH_TO_LOOP: Final = SwitchToLoop()

running_loop = asyncio._get_running_loop


@types.coroutine
def ensure_event_loop() -> Generator[Any, Any, None]:
    """Switch to an event loop: return at once if one is running, on the bridge's loop otherwise."""
    if running_loop() is None:
        yield SWITCH_TO_LOOP


class StartedCoroutine(Generic[T]):
    """The rest of a coroutine that started without a loop and asked for one; await it under a loop."""

    def __init__(self, coro: Coroutine[Any, Any, T]) -> None:
        self._coro = coro

    def close(self) -> None:
        """Close the coroutine."""
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, T]:
        # `yield from` refuses a coroutine that has started, so its steps are written out here.
        value: Any = None
        error: BaseException | None = None
        try:
            while True:
                try:
                    yielded = self._step(value, error)
                except StopIteration as end:
                    return cast(T, end.value)
                value, error = None, None
                try:
                    value = yield yielded
                except GeneratorExit:
                    raise
                except BaseException as thrown:
                    error = thrown
        finally:
            self._coro.close()

    def _step(self, value: Any, error: BaseException | None) -> Any:
        return self._coro.send(value) if error is None else self._coro.throw(error)


def start_coroutine(coro: Coroutine[Any, Any, T]) -> T | StartedCoroutine[T]:
    """Step a coroutine of the library without a loop. Returns its result, or the rest of it if it must wait."""
    outer = getattr(_stepped, 'coro', None)
    _stepped.coro = coro
    try:
        if coro.send(None) is not SWITCH_TO_LOOP:
            coro.close()
            raise GranularError('a coroutine waited without asking for a loop: this is a fault in granular')
    except StopIteration as end:
        return cast(T, end.value)
    finally:
        _stepped.coro = outer
    return StartedCoroutine(coro)


_stepped: Final = threading.local()  # the coroutine that `start_coroutine` runs on this thread


# --- user functions ---------------------------------------------------------------------------------------------------

CONTROL: Final = (
    StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError, concurrent.futures.CancelledError,
)  # fmt: skip
"""Exceptions that have a meaning for coroutines, futures and iterators other than that a function failed."""


computing: Final[contextvars.ContextVar[tuple[object, ...]]] = contextvars.ContextVar('computing', default=())
"""Tokens of the iterators whose elements this context computes: a function that it calls may not wait for them."""


def mark_computing(token: object) -> None:
    """Mark the context of the current task: it computes elements of the iterator with this token."""
    tokens = computing.get()
    if token not in tokens:
        computing.set((*tokens, token))


def function_error(error: BaseException) -> FunctionError:
    """Return the error to raise in place of an exception of ``CONTROL``, which becomes its cause."""
    said = f': {error}' if str(error) else ''
    made = FunctionError(f'a function that was given to granular raised {type(error).__name__}{said}')
    made.__cause__ = error
    return made


def call_user(fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call a user function. An exception that coroutines cannot pass on (``CONTROL``) becomes a ``FunctionError``."""
    try:
        return fn(*args)
    except CONTROL as error:
        raise function_error(error) from error


async def await_user(coro: Awaitable[T]) -> T:
    """Await a user's coroutine, as ``call_user`` calls a function. A cancellation of this task passes through."""
    try:
        return await coro
    except asyncio.CancelledError as error:
        task = None if running_loop() is None else asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise function_error(error) from error
    except GeneratorExit as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is None:
            raise  # this coroutine is being closed: the error does not come from the user's
        raise function_error(error) from error
    except CONTROL as error:
        raise function_error(error) from error
    except RuntimeError as error:
        if isinstance(cause := error.__cause__, StopIteration | StopAsyncIteration):  # Python wraps these in coroutines
            raise function_error(cause) from cause
        raise


# --- tasks ------------------------------------------------------------------------------------------------------------


class HeldError(Exception):
    """Carries SystemExit or KeyboardInterrupt out of a task; raised as itself, it would end the loop."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def start_task(coro: Coroutine[Any, Any, T]) -> 'asyncio.Task[T]':
    """Start a task whose exceptions never end the loop; await it by ``outcome``."""
    task = asyncio.create_task(_held(coro))
    task.add_done_callback(lambda _: coro.close())  # it may be cancelled before its first step
    return task


async def outcome(task: Awaitable[T]) -> T:
    """Return the result of a task started by ``start_task``, or of a future that represents it."""
    try:
        return await task
    except HeldError as held:
        error = held.error
    raise error


async def _held(coro: Coroutine[Any, Any, T]) -> T:
    try:
        return await coro
    except (SystemExit, KeyboardInterrupt) as error:
        raise HeldError(error) from error


# --- waiting for several coroutines ---------------------------------------------------------------------------------


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of coroutines, in order, run concurrently under a loop and one by one without.

    The first error cancels the others, waits for them and is raised as itself.
    """
    coros = list(coroutines)
    if len(coros) == 1 or running_loop() is None:
        try:
            return [await coro for coro in coros]
        finally:
            for coro in coros:
                coro.close()
    tasks = [start_task(coro) for coro in coros]
    try:
        return await outcome(asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def settle(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines to their ends, regardless of errors in the others, and raise the first error.

    For operations that cannot be undone halfway: a store may or may not have executed a request that was cancelled.
    """

    async def caught(coro: Coroutine[Any, Any, None]) -> Exception | None:
        try:
            await coro
        except Exception as error:
            return error
        return None

    coros = list(coroutines)
    try:
        for failed in await gather([caught(coro) for coro in coros]):
            if failed is not None:
                raise failed
    finally:
        for coro in coros:
            coro.close()  # those that an interrupt has kept from starting


async def end_tasks(tasks: Iterable['asyncio.Task[Any]']) -> None:
    """Cancel tasks and wait for them; tasks of other loops are only cancelled, and those of closed loops have ended.

    If there are none to wait for, it does not wait and needs no loop.
    """
    own: list[asyncio.Task[Any]] = []
    for task in tasks:
        if task.done() or (loop := task.get_loop()).is_closed():
            continue
        if loop is running_loop():
            task.cancel()
            own.append(task)
        else:
            with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
                loop.call_soon_threadsafe(task.cancel)
    if own:
        await asyncio.gather(*own, return_exceptions=True)


def background(coro: Coroutine[Any, Any, T]) -> 'asyncio.Task[T]':
    """Start a task under a loop; it is cancelled when the loop ends (:class:`Scope`). Await it by ``outcome``."""
    task = start_task(coro)
    task.add_done_callback(_seen)
    if (opened := peek_scope()) is not None:
        opened.tasks.add(task)
    return task


def shared_task(coro: Coroutine[Any, Any, None]) -> 'asyncio.Task[None]':
    """Start a task under a loop that several callers may await (:func:`wait_shared`); all of them get its error."""
    return background(coro)


async def wait_shared(tasks: 'set[asyncio.Task[None]]') -> None:
    """Wait for tasks that other callers may await too; a task that no caller awaits any more is cancelled."""
    for task in tasks:
        _waiters[task] = _waiters.get(task, 0) + 1
    try:
        for task in tasks:
            await outcome(asyncio.shield(task))
    finally:
        for task in tasks:
            _waiters[task] -= 1
            if not _waiters[task]:
                del _waiters[task]
                if not task.done():
                    task.cancel()


async def cancel_idle(tasks: 'set[asyncio.Task[None]]') -> None:
    """Cancel those of some shared tasks that no caller awaits."""
    idle = {task for task in tasks if task not in _waiters}
    for task in idle:
        task.cancel()
    await asyncio.gather(*idle, return_exceptions=True)


def _seen(task: 'asyncio.Task[Any]') -> None:
    # Retrieve the error: if no caller awaits the task, the next one to need its result starts another.
    if not task.cancelled():
        task.exception()


_waiters: dict[asyncio.Task[None], int] = {}


async def for_each(items: AsyncIterator[T], fn: Callable[[T], Coroutine[Any, Any, None]], limit: int) -> None:
    """Run a coroutine for each item as it arrives, at most ``limit`` at a time. The first error ends them all."""
    await ensure_event_loop()
    running: set[asyncio.Task[None]] = set()
    try:
        async for item in items:
            if len(running) >= limit:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    await outcome(task)
                running -= done
            running.add(start_task(fn(item)))
        await outcome(asyncio.gather(*running))
    except BaseException:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        raise


# --- locks ----------------------------------------------------------------------------------------------------------


class Lock:
    """A lock for coroutines of any event loops and threads, granted in the order of arrival.

    Use it by ``async with lock.turn()``. It contains no thread lock, so that a coroutine may leave it wherever the
    garbage collector ends it; its only state is a queue whose operations are atomic.
    """

    def __init__(self) -> None:
        self.line: collections.deque[Turn] = collections.deque()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def turn(self) -> 'Turn':
        """Return a turn in the queue, taken by ``async with``."""
        return Turn(self)

    @property
    def held(self) -> bool:
        """True if a coroutine holds the lock."""
        return bool(self.line)


class Turn:
    """A coroutine's turn in the queue of a lock; the first in the queue holds the lock."""

    __slots__ = ('_called', '_coro', '_lock', '_loop', '_process')

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._coro: Coroutine[Any, Any, Any] | None = None  # that came without a loop
        self._process = _processes[0]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._called: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        line, self._loop = self._lock.line, running_loop()
        if self._loop is None:
            self._coro = getattr(_stepped, 'coro', None)
        line.append(self)
        if line[0] is not self:
            try:
                await self._wait(line)
            except BaseException:
                self._leave()
                raise
        return self

    async def __aexit__(self, *args: object) -> None:
        self._leave()

    async def _wait(self, line: 'collections.deque[Turn]') -> None:
        await ensure_event_loop()
        self._loop = asyncio.get_running_loop()
        while True:
            self._called = self._loop.create_future()
            self._call_first()
            if line[0] is self:
                return
            # A wake-up is lost if an interrupt comes between leaving and waking, so check now and then.
            await asyncio.wait([self._called], timeout=_LOOK)

    def _leave(self) -> None:
        with contextlib.suppress(ValueError):  # it was removed because its loop is closed
            self._lock.line.remove(self)
        self._call_first()

    def _call_first(self) -> None:
        """Wake the first in the queue; remove those whose loop was closed, and those that were interrupted.

        An interrupt of the main thread (Ctrl-C) may come before or after any instruction, also in ``_leave``.
        """
        line = self._lock.line
        while line:
            try:
                first = line[0]
            except IndexError:
                return
            if not first._over():
                if first._called is not None:
                    with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
                        first._called.get_loop().call_soon_threadsafe(_wake, first._called)
                return
            with contextlib.suppress(ValueError):
                line.remove(first)

    def _over(self) -> bool:
        """Return whether its coroutine ended without leaving, or runs in the process that this one was forked from."""
        if self._process != _processes[0]:
            return True
        if self._loop is not None:
            return self._loop.is_closed()
        return self._coro is not None and inspect.getcoroutinestate(self._coro) == inspect.CORO_CLOSED


_processes: Final = [0]  # forks on the way from the first process to this one


def _wake(future: 'asyncio.Future[None]') -> None:
    if not future.done():
        future.set_result(None)


_LOOK: Final = 1.0  # seconds between checks


# --- resources that end with their loop -----------------------------------------------------------------------------


class Closable(Protocol):
    """An object with tasks under a loop."""

    def aclose(self) -> Coroutine[Any, Any, None]:
        """Close it."""
        ...


class Scope:
    """Resources opened under one event loop, such as HTTP sessions; closed when the loop ends or on :func:`aclose`.

    Attributes:
      tasks: background tasks beside a consumer.
      running: iterators, with their tasks, threads and processes.
      values: the values of each :class:`PerLoop`.
      keeper: the generator that closes this scope when it is closed itself.
    """

    def __init__(self) -> None:
        self._opened: dict[Hashable, asyncio.Future[Any]] = {}
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self.running: weakref.WeakSet[Closable] = weakref.WeakSet()
        self.values: weakref.WeakKeyDictionary[PerLoop[Any], Any] = weakref.WeakKeyDictionary()
        self.keeper: AsyncGenerator[None, None]

    async def get(self, key: Hashable, create: Callable[['Scope'], Coroutine[Any, Any, T]]) -> T:
        """Return the resource of that key; the first caller creates it while the others wait for it."""
        future = self._opened.get(key)
        if future is None:
            future = self._opened[key] = asyncio.ensure_future(create(self))
        elif future.done():
            return cast(T, future.result())
        try:
            # A caller that is cancelled must not cancel the resource for the others.
            return cast(T, await asyncio.shield(future))
        except BaseException:
            if future.done() and (future.cancelled() or future.exception()) and self._opened.get(key) is future:
                del self._opened[key]
            raise

    def peek(self, key: Hashable) -> Any | None:
        """Return the resource of that key if it is open, else None."""
        future = self._opened.get(key)
        return future.result() if future is not None and future.done() and not future.exception() else None

    def on_close(self, closer: Callable[[], Awaitable[None]]) -> None:
        """Register a function to call when the loop ends, in reverse order."""
        self._closers.append(closer)

    async def aclose(self) -> None:
        """Close all resources."""
        try:
            await settle([running.aclose() for running in self.running])
        finally:
            await end_tasks(list(self.tasks))
            for future in self._opened.values():
                future.cancel()
            await asyncio.gather(*self._opened.values(), return_exceptions=True)
            self._opened.clear()
            self.values.clear()
            while self._closers:
                await self._closers.pop()()


class PerLoop(Generic[T]):
    """A value for each event loop, created on first use there, that ends with the loop or with this object."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._begun = make, False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._make,)

    async def get(self) -> T:
        """Return the value of the running loop."""
        values, self._begun = (await scope()).values, True
        if self not in values:
            values[self] = self._make()
        return cast(T, values[self])

    async def peek(self) -> T | None:
        """Return the value of the running loop if it has one already, else None."""
        if not self._begun:
            return None
        await ensure_event_loop()
        opened = peek_scope()
        return None if opened is None else opened.values.get(self)


_SCOPE: Final = '_granular_scope'
_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
_graveyard: list[Any] = []  # objects that a forked child must neither use nor collect


def peek_scope() -> Scope | None:
    """Return the scope of the running loop if it has one already, else None."""
    return getattr(running_loop(), _SCOPE, None)


async def scope() -> Scope:
    """Return the scope of the running loop.

    It is an attribute of the loop, because it refers to the loop: both are collected together.
    """
    await ensure_event_loop()
    loop = asyncio.get_running_loop()
    opened: Scope | None = getattr(loop, _SCOPE, None)
    if opened is None:
        opened = Scope()
        opened.keeper = _keep(opened, weakref.ref(loop))
        vars(loop).update({_SCOPE: opened, 'close': _closing(loop)})
        _loops.add(loop)
        await anext(opened.keeper)
    return opened


async def _keep(opened: Scope, loop: weakref.ref[asyncio.AbstractEventLoop]) -> AsyncGenerator[None, None]:
    # asyncio.run and every other runner close a loop's async generators while it still runs: the only hook of a loop by
    # which to close sockets in time.
    try:
        yield
    finally:
        if (ended := loop()) is not None:
            _detach(ended)
        await opened.aclose()


def _closing(loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    """Return a ``close`` for the loop that first closes what was opened under it, if no runner did."""
    reference, close = weakref.ref(loop), loop.close

    def close_both() -> None:
        ended = reference()  # None while the loop is collected: nothing can run any more
        if ended is not None and not ended.is_running() and (opened := getattr(ended, _SCOPE, None)) is not None:
            outer = running_loop()
            asyncio._set_running_loop(None)  # it may be closed while another loop runs
            try:
                ended.run_until_complete(opened.keeper.aclose())
            finally:
                asyncio._set_running_loop(outer)
        close()

    return close_both


def _detach(loop: asyncio.AbstractEventLoop) -> Any:
    vars(loop).pop('close', None)
    return vars(loop).pop(_SCOPE, None)


async def aclose() -> None:
    """Close what this library opened under the running loop: its HTTP sessions and their sockets.

    Loops that end by ``asyncio.run``, or by their ``close``, do this themselves. Call it to release sockets earlier::

        async with granular.aio.DatasetReader('s3://bucket/data', granular.decoders) as reader:
            datapoints = await reader.fetch([3, 1, 2])
        await granular.aio.aclose()
    """
    if (opened := peek_scope()) is not None:
        await opened.keeper.aclose()


def after_fork() -> None:
    """Reset in a forked child, which must not use the sockets of its parent and has none of its threads."""
    _processes[0] += 1
    for loop in list(_loops):
        opened = _detach(loop)
        _graveyard.append((loop, opened, list(opened.running) if opened is not None else ()))
    _loops.clear()


os.register_at_fork(after_in_child=after_fork)

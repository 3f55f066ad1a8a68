"""What the async core needs of event loops: hopping onto one, waiting for several, and resources that end with one.

A coroutine of this library that never waits needs no loop: a local read runs to its end on the thread that asked
(:mod:`granular.bridge`). One that must wait says so first, with ``await need_loop()``; under a running loop that is
free, elsewhere it is where the bridge takes over.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
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


class Hop:
    """What a coroutine yields that needs a loop and has none."""


HOP: Final = Hop()

running_loop = asyncio._get_running_loop


@types.coroutine
def need_loop() -> Generator[Any, Any, None]:
    """Return under a running event loop: at once if there is one, on the bridge's otherwise."""
    if running_loop() is None:
        yield HOP


class Begun(Generic[T]):
    """What is left of a coroutine that has begun without a loop and asked for one: to be awaited under it."""

    def __init__(self, coro: Coroutine[Any, Any, T]) -> None:
        self._coro = coro

    def close(self) -> None:
        """Give it up."""
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, T]:
        # `yield from` refuses a coroutine that has begun, so this is what it does, by hand.
        coro, value = self._coro, None
        error: BaseException | None = None
        try:
            while True:
                try:
                    yielded = coro.send(value) if error is None else coro.throw(error)
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
            coro.close()


def begin(coro: Coroutine[Any, Any, T]) -> T | Begun[T]:
    """Step a coroutine of the library on a thread without a loop: its result, or what is left of it if it must wait."""
    outer = getattr(_stepped, 'coro', None)
    _stepped.coro = coro
    try:
        if coro.send(None) is not HOP:
            coro.close()
            raise GranularError('a coroutine waited without asking for a loop: this is a fault in granular')
    except StopIteration as end:
        return cast(T, end.value)
    finally:
        _stepped.coro = outer
    return Begun(coro)


_stepped: Final = threading.local()  # the coroutine that `begin` runs on this thread


# --- functions of the user's ------------------------------------------------------------------------------------------

CONTROL: Final = (
    StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError, concurrent.futures.CancelledError,
)  # fmt: skip
"""Exceptions that mean something else to coroutines, futures and iterators than that a function failed."""


def function_error(error: BaseException) -> FunctionError:
    """The error to raise in place of one of ``CONTROL``, with it as its cause."""
    said = f': {error}' if str(error) else ''
    made = FunctionError(f'a function that was given to granular raised {type(error).__name__}{said}')
    made.__cause__ = error
    return made


def call_user(fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call a function of the user's. What a coroutine cannot hand on is raised as a ``FunctionError``."""
    try:
        return fn(*args)
    except CONTROL as error:
        raise function_error(error) from error


async def await_user(coro: Awaitable[T]) -> T:
    """Await a coroutine of the user's, as ``call_user`` calls a function. A cancellation of this task passes."""
    try:
        return await coro
    except asyncio.CancelledError as error:
        task = None if running_loop() is None else asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise function_error(error) from error
    except GeneratorExit as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is None:
            raise  # this coroutine is being closed: the error does not come from the other one
        raise function_error(error) from error
    except CONTROL as error:
        raise function_error(error) from error
    except RuntimeError as error:
        if isinstance(cause := error.__cause__, StopIteration | StopAsyncIteration):  # so Python raises it elsewhere
            raise function_error(cause) from cause
        raise


# --- tasks ------------------------------------------------------------------------------------------------------------


class HeldError(Exception):
    """Carries SystemExit or KeyboardInterrupt out of a task: asyncio would end the loop with it."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def begin_task(coro: Coroutine[Any, Any, T]) -> 'asyncio.Task[T]':
    """A task that leaves the loop alone whatever its coroutine raises; wait for it by ``outcome``."""
    task = asyncio.create_task(_held(coro))
    task.add_done_callback(lambda _: coro.close())  # it may have been cancelled before its first step
    return task


async def outcome(task: Awaitable[T]) -> T:
    """The result of a task that ``begin_task`` made, or of a future that stands for it."""
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


# --- waiting for several --------------------------------------------------------------------------------------------


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of coroutines, in order, run concurrently under a loop and one by one without.

    The first error cancels the others, waits for them and is raised as itself.
    """
    coros = list(coroutines)
    if len(coros) == 1 or running_loop() is None:
        try:
            return [await coro for coro in coros]
        finally:
            for coro in coros:
                coro.close()
    tasks = [begin_task(coro) for coro in coros]
    try:
        return await outcome(asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def settle(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines to their ends, each whatever becomes of the others, and raise the first error.

    For what cannot be taken back halfway: nobody knows what a store made of a request that was cancelled.
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
            coro.close()  # that an interrupt has kept from beginning


async def end_tasks(tasks: Iterable['asyncio.Task[Any]']) -> None:
    """Cancel tasks and wait for their ends; those of another loop are cancelled there, those of a closed one are over.

    It waits for nothing, and needs no loop, if there is none to wait for.
    """
    own: list[asyncio.Task[Any]] = []
    for task in tasks:
        if task.done() or (loop := task.get_loop()).is_closed():
            continue
        if loop is running_loop():
            task.cancel()
            own.append(task)
        else:
            with contextlib.suppress(RuntimeError):  # it is closed meanwhile
                loop.call_soon_threadsafe(task.cancel)
    if own:
        await asyncio.gather(*own, return_exceptions=True)


def background(coro: Coroutine[Any, Any, T]) -> 'asyncio.Task[T]':
    """A task beside the caller's, under a loop, with which it ends (:class:`Scope`); wait for it by ``outcome``."""
    task = begin_task(coro)
    task.add_done_callback(_seen)
    if (opened := peek_scope()) is not None:
        opened.tasks.add(task)
    return task


def shared_task(coro: Coroutine[Any, Any, None]) -> 'asyncio.Task[None]':
    """A task that several may wait for (:func:`wait_shared`), under a loop. Whoever waits for it hears of its error."""
    return background(coro)


async def wait_shared(tasks: 'set[asyncio.Task[None]]') -> None:
    """Wait for tasks that others may wait for too; one for whom nobody waits any more is cancelled."""
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
    """Cancel those of some shared tasks that nobody waits for."""
    idle = {task for task in tasks if task not in _waiters}
    for task in idle:
        task.cancel()
    await asyncio.gather(*idle, return_exceptions=True)


def _seen(task: 'asyncio.Task[Any]') -> None:
    # If nobody waits for it, whoever asks next begins again.
    if not task.cancelled():
        task.exception()


_waiters: dict[asyncio.Task[None], int] = {}


async def for_each(items: AsyncIterator[T], fn: Callable[[T], Coroutine[Any, Any, None]], limit: int) -> None:
    """Run a coroutine for each item as they come, at most ``limit`` at a time. The first error ends them all."""
    await need_loop()
    running: set[asyncio.Task[None]] = set()
    try:
        async for item in items:
            if len(running) >= limit:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    await outcome(task)
                running -= done
            running.add(begin_task(fn(item)))
        await outcome(asyncio.gather(*running))
    except BaseException:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        raise


# --- one at a time --------------------------------------------------------------------------------------------------


class Lock:
    """Lets coroutines in one at a time, of any event loops and threads, in the order in which they came.

    ``async with lock.turn()``. There is no lock of threads in it, so that a coroutine may leave it wherever the garbage
    collector ends it; its only state is a queue whose operations are atomic.
    """

    def __init__(self) -> None:
        self.line: collections.deque[Turn] = collections.deque()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def turn(self) -> 'Turn':
        """A place in the line, taken by ``async with``."""
        return Turn(self)

    @property
    def held(self) -> bool:
        """Whether a coroutine is in it."""
        return bool(self.line)


class Turn:
    """A coroutine's place in the line of a lock, the first of which is in."""

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
        await need_loop()
        self._loop = asyncio.get_running_loop()
        while True:
            self._called = self._loop.create_future()
            self._call_first()
            if line[0] is self:
                return
            # A call may be lost, if an interrupt comes between leaving and calling: it looks now and then.
            await asyncio.wait([self._called], timeout=_LOOK)

    def _leave(self) -> None:
        with contextlib.suppress(ValueError):  # it was taken for dead, as its loop is closed
            self._lock.line.remove(self)
        self._call_first()

    def _call_first(self) -> None:
        """Wake the one whose turn it is. Passed over is one whose loop was closed under it, or that was interrupted.

        An interrupt of the main thread (Ctrl-C) may come before or after any instruction, of `_leave` too.
        """
        line = self._lock.line
        while line:
            try:
                first = line[0]
            except IndexError:
                return
            if not first._over():
                if first._called is not None:
                    with contextlib.suppress(RuntimeError):  # it is closed meanwhile
                        first._called.get_loop().call_soon_threadsafe(_wake, first._called)
                return
            with contextlib.suppress(ValueError):
                line.remove(first)

    def _over(self) -> bool:
        """Whether its coroutine has ended without leaving, or runs in the process that this one was forked from."""
        if self._process != _processes[0]:
            return True
        if self._loop is not None:
            return self._loop.is_closed()
        return self._coro is not None and inspect.getcoroutinestate(self._coro) == inspect.CORO_CLOSED


_processes: Final = [0]  # forks on the way from the first process to this one


def _wake(future: 'asyncio.Future[None]') -> None:
    if not future.done():
        future.set_result(None)


_LOOK: Final = 1.0  # seconds


# --- resources that end with their loop -----------------------------------------------------------------------------


class Closable(Protocol):
    """What has tasks under a loop."""

    def aclose(self) -> Coroutine[Any, Any, None]:
        """Close it."""
        ...


class Scope:
    """What was opened under one event loop, such as HTTP sessions, closed when the loop ends or on :func:`aclose`.

    Attributes:
      tasks: those that run beside a consumer.
      running: iterators, with their tasks, threads and processes.
    """

    def __init__(self) -> None:
        self._opened: dict[Hashable, asyncio.Future[Any]] = {}
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self.running: weakref.WeakSet[Closable] = weakref.WeakSet()
        self.values: weakref.WeakKeyDictionary[PerLoop[Any], Any] = weakref.WeakKeyDictionary()
        self.keeper: AsyncGenerator[None, None]

    async def get(self, key: Hashable, create: Callable[['Scope'], Coroutine[Any, Any, T]]) -> T:
        """The resource of that key, created by the first who asks while the others wait for it."""
        future = self._opened.get(key)
        if future is None:
            future = self._opened[key] = asyncio.ensure_future(create(self))
        elif future.done():
            return cast(T, future.result())
        try:
            # One who gives up waiting must not take the resource from the others.
            return cast(T, await asyncio.shield(future))
        except BaseException:
            if future.done() and (future.cancelled() or future.exception()) and self._opened.get(key) is future:
                del self._opened[key]
            raise

    def peek(self, key: Hashable) -> Any | None:
        """The resource of that key, if it is open."""
        future = self._opened.get(key)
        return future.result() if future is not None and future.done() and not future.exception() else None

    def on_close(self, closer: Callable[[], Awaitable[None]]) -> None:
        """Have something called when the loop ends, in reverse order."""
        self._closers.append(closer)

    async def aclose(self) -> None:
        """Close all that was opened."""
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
    """A value for each event loop, made when it is first asked for there, which ends with the loop, or with this."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._begun = make, False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._make,)

    async def get(self) -> T:
        """The running loop's."""
        values, self._begun = (await scope()).values, True
        if self not in values:
            values[self] = self._make()
        return cast(T, values[self])

    async def peek(self) -> T | None:
        """The running loop's, if it has one already."""
        if not self._begun:
            return None
        await need_loop()
        opened = peek_scope()
        return None if opened is None else opened.values.get(self)


_SCOPE: Final = '_granular_scope'
_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
_graveyard: list[Any] = []  # what a forked child must neither use nor collect


def peek_scope() -> Scope | None:
    """The running loop's scope, if it has one already."""
    return getattr(running_loop(), _SCOPE, None)


async def scope() -> Scope:
    """The running loop's scope.

    It is an attribute of the loop, as it refers to the loop: both are collected together.
    """
    await need_loop()
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
    # asyncio.run and every other runner close the async generators of a loop while it still runs: the one hook that
    # a loop has for those who want to leave no socket behind.
    try:
        yield
    finally:
        if (ended := loop()) is not None:
            _detach(ended)
        await opened.aclose()


def _closing(loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    """The loop's ``close``, which first closes what was opened under it, where no runner did."""
    reference, close = weakref.ref(loop), loop.close

    def close_both() -> None:
        ended = reference()  # None while it is collected: nothing can run any more
        if ended is not None and not ended.is_running() and (opened := getattr(ended, _SCOPE, None)) is not None:
            outer = running_loop()
            asyncio._set_running_loop(None)  # it may be closed under another one that runs
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

    Loops that end as ``asyncio.run`` ends them, or with ``close``, do it by themselves.
    """
    if (opened := peek_scope()) is not None:
        await opened.keeper.aclose()


def after_fork() -> None:
    """In a forked child: the parent's sockets are not ours, and those who hold its locks are not here."""
    _processes[0] += 1
    for loop in list(_loops):
        opened = _detach(loop)
        _graveyard.append((loop, opened, list(opened.running) if opened is not None else ()))
    _loops.clear()


os.register_at_fork(after_in_child=after_fork)

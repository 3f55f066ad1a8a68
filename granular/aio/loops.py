"""What the async core needs of event loops: hopping onto one, waiting for several, and resources that end with one.

A coroutine of this library that never waits needs no loop: a local read runs to its end on the thread that asked
(:mod:`granular.bridge`). One that must wait says so first, with ``await need_loop()``; under a running loop that is
free, elsewhere it is where the bridge takes over.
"""

import asyncio
import concurrent.futures
import os
import types
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Hashable, Iterable
from typing import Any, Final, Generic, TypeVar, TypeVarTuple, cast

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
    try:
        if coro.send(None) is not HOP:
            coro.close()
            raise GranularError('a coroutine waited without asking for a loop: this is a fault in granular')
    except StopIteration as end:
        return cast(T, end.value)
    return Begun(coro)


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


def shared_task(coro: Coroutine[Any, Any, None]) -> 'asyncio.Task[None]':
    """A task that several may wait for (:func:`wait_shared`), under a loop. Whoever waits for it hears of its error."""
    task = begin_task(coro)
    task.add_done_callback(_seen)
    return task


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


def _seen(task: 'asyncio.Task[None]') -> None:
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


def after_fork() -> None:
    """In a forked child: the parent's sockets are not ours."""
    _graveyard.append(dict(_scopes))
    _scopes.clear()


os.register_at_fork(after_in_child=after_fork)


# --- resources that end with their loop -----------------------------------------------------------------------------


class Scope:
    """What was opened under one event loop, such as HTTP sessions, closed when the loop ends or on :func:`aclose`."""

    def __init__(self) -> None:
        self._opened: dict[Hashable, asyncio.Future[Any]] = {}
        self._closers: list[Callable[[], Awaitable[None]]] = []

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
        for future in self._opened.values():
            future.cancel()
        await asyncio.gather(*self._opened.values(), return_exceptions=True)
        self._opened.clear()
        while self._closers:
            await self._closers.pop()()


_scopes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Scope, AsyncGenerator[None, None]]]
_scopes = weakref.WeakKeyDictionary()
_graveyard: list[Any] = []  # what a forked child must neither use nor collect


def peek_scope() -> Scope | None:
    """The running loop's scope, if it has one already."""
    loop = running_loop()
    entry = None if loop is None else _scopes.get(loop)
    return None if entry is None else entry[0]


async def scope() -> Scope:
    """The running loop's scope."""
    await need_loop()
    loop = asyncio.get_running_loop()
    entry = _scopes.get(loop)
    if entry is None:
        opened = Scope()
        keeper = _keep(opened, weakref.ref(loop))
        entry = _scopes[loop] = (opened, keeper)
        await anext(keeper)
    return entry[0]


async def _keep(opened: Scope, loop: weakref.ref[asyncio.AbstractEventLoop]) -> AsyncGenerator[None, None]:
    # asyncio.run and every other runner close the async generators of a loop while it still runs: the one hook that
    # a loop has for those who want to leave no socket behind.
    try:
        yield
    finally:
        if (ended := loop()) is not None:
            _scopes.pop(ended, None)
        await opened.aclose()


async def aclose() -> None:
    """Close what this library opened under the running loop: its HTTP sessions and their sockets.

    Loops that end as ``asyncio.run`` ends them do it by themselves.
    """
    loop = asyncio.get_running_loop()
    if (entry := _scopes.get(loop)) is not None:
        await entry[1].aclose()

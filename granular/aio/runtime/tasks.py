"""Tasks: starting them, waiting for several of them, and ending them."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable
from typing import Any, Final, TypeVar

from granular.aio.runtime.immediate import is_immediate, running_loop, to_loop

T = TypeVar('T')

_FINISH_TIMEOUT: Final = 1.0  # seconds in which a request that publishes something may end


class HeldError(Exception):
    """Carries an error out of code that would treat it as its own: SystemExit raised in a task would end the loop."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def start_task(coro: Coroutine[Any, Any, T]) -> 'asyncio.Task[T]':
    """Start a task whose exceptions never end the loop; await it by ``outcome``."""
    task = asyncio.create_task(_held(coro))
    task.add_done_callback(lambda _: coro.close())  # it may be cancelled before its first step
    return task


def retrieve_error(future: 'asyncio.Future[Any]') -> None:
    """Retrieve the error of a future that may never be awaited, which Python would print otherwise."""
    if not future.cancelled():
        future.exception()


def has_failed(future: 'asyncio.Future[Any]') -> bool:
    """Return whether a future has ended without a result."""
    return future.done() and (future.cancelled() or future.exception() is not None)


def was_cancelled() -> bool:
    """Return whether the current task was cancelled, and not only a task that it awaits."""
    task = None if running_loop() is None else asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def outcome(task: Awaitable[T]) -> T:
    """Return the result of a task started by ``start_task``, or of a future that represents it."""
    try:
        return await task
    except HeldError as held:
        error = held.error
    try:
        raise error
    finally:
        del error  # whose traceback refers to this frame


async def result_of(future: 'asyncio.Future[T]') -> T:
    """Return the result of a future that others may await too: cancelling the caller does not cancel it.

    ``asyncio.shield`` does the same, but from Python 3.14 on logs an error that comes after its caller was cancelled.
    """
    try:
        if not future.done():
            future.add_done_callback(retrieve_error)  # no task awaits it if all callers are cancelled
            await asyncio.wait([future])
        return future.result()
    finally:
        del future  # an error would keep its traceback, and with it all that its frames hold


async def finish_within(coro: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that is not cut at once: a cancelled caller first waits a second for its end.

    For a request that publishes something: cut, it may or may not be carried out, even later.
    """
    if is_immediate():
        return await coro
    task = start_task(coro)
    try:
        return await outcome(result_of(task))
    except asyncio.CancelledError:
        await wait_cancelled(task, _FINISH_TIMEOUT)
        await end_tasks([task])
        raise


async def wait_cancelled(future: 'asyncio.Future[Any]', seconds: float = math.inf) -> None:
    """Wait for a future in a caller that was cancelled, and that raises that in the end: not the future's error."""
    until = time.monotonic() + seconds
    while not future.done() and (left := until - time.monotonic()) > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future], timeout=None if left == math.inf else left)
    if future.done():
        retrieve_error(future)


async def _held(coro: Coroutine[Any, Any, T]) -> T:
    try:
        return await coro
    except (SystemExit, KeyboardInterrupt) as error:
        raise HeldError(error) from error


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of coroutines, in order, run concurrently under a loop and one by one without.

    The first error cancels the others, waits for them and is raised as itself.
    """
    coros, tasks = list(coroutines), list[asyncio.Task[T]]()
    try:
        if len(coros) == 1 or is_immediate():
            return [await coro for coro in coros]
        tasks += [start_task(coro) for coro in coros]
        return await outcome(asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            if not task.cancelling():  # one that was cancelled with the caller is not cut in what it does to end
                task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
        raise
    finally:
        if not tasks:
            for coro in coros:
                coro.close()


async def for_each(
    items: Collection[T] | AsyncIterator[T], fn: Callable[[T], Coroutine[Any, Any, None]], limit: int
) -> None:
    """Run a coroutine for each item, as ``gather`` does, but at most ``limit`` at a time.

    Items of an asynchronous iterator are taken as they arrive, under a loop.
    """
    if isinstance(items, AsyncIterator):
        await to_loop()
        todo = items
    else:
        limit, todo = min(limit, len(items)), _each(items)
    turn = asyncio.Lock()

    async def work() -> None:
        while True:
            async with turn:
                try:
                    item = await anext(todo)
                except StopAsyncIteration:
                    return
            await fn(item)

    await gather([work() for _ in range(limit)])


async def _each(items: Iterable[T]) -> AsyncIterator[T]:
    for item in items:
        yield item


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
                try:
                    raise failed
                finally:
                    del failed  # whose traceback refers to this frame
    finally:
        for coro in coros:
            coro.close()  # those that did not start


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

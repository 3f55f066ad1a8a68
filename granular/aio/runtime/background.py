"""Tasks that run beside their callers, and end with their loop."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from granular.aio.runtime.loop_resources import peek_scope
from granular.aio.runtime.tasks import retrieve_error, start_task
from granular.errors import StoreError

T = TypeVar('T')


def background(coro: Coroutine[Any, Any, T]) -> 'asyncio.Task[T]':
    """Start a task under a loop; it is cancelled when the loop's ``Scope`` is closed.

    Await it by ``outcome``, or by :func:`wait_shared` if several callers may wait.
    """
    task = start_task(coro)
    task.add_done_callback(retrieve_error)  # the next caller that needs the result starts another task
    if (scope := peek_scope()) is not None:
        scope.tasks.add(task)
    return task


async def wait_shared(tasks: 'set[asyncio.Task[Any]]') -> bool:
    """Wait for tasks that other callers may await too; a task that no caller awaits any more is cancelled.

    Returns whether all of them succeeded. If not, the caller does its part alone: the part of another caller may have
    failed. But a ``StoreError`` of a task is raised, as the part of the caller would fail as well.
    """
    for task in tasks:
        _waiters[task] = _waiters.get(task, 0) + 1
    try:
        if tasks:
            await asyncio.wait(tasks)
    finally:
        for task in tasks:
            _waiters[task] -= 1
            if not _waiters[task]:
                del _waiters[task]
                task.cancel()
    errors = [asyncio.CancelledError() if task.cancelled() else task.exception() for task in tasks]
    for error in errors:
        if isinstance(error, StoreError):
            raise error
    return all(error is None for error in errors)


async def cancel_idle(tasks: 'set[asyncio.Task[Any]]') -> None:
    """Cancel those of some shared tasks that no caller awaits."""
    idle = {task for task in tasks if task not in _waiters}
    for task in idle:
        task.cancel()
    await asyncio.gather(*idle, return_exceptions=True)


_waiters: Final[dict[asyncio.Task[Any], int]] = {}

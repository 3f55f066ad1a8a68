"""Threads beside the loop: what blocks is called there, and many calls are spread over them."""

import asyncio
import concurrent.futures
import contextvars
import itertools
import os
from collections.abc import Callable
from typing import Any, Final, TypeVar, TypeVarTuple

from granular.aio.loops import running_loop

T = TypeVar('T')
Ts = TypeVarTuple('Ts')

_CORES: Final = os.cpu_count() or 1


class Threads(concurrent.futures.ThreadPoolExecutor):
    """A pool that knows its width."""

    def __init__(self, width: int, name: str) -> None:
        super().__init__(width, name)
        self.width = width


_own: list[Threads] = []
current: contextvars.ContextVar[Threads | None] = contextvars.ContextVar('threads', default=None)
"""The threads of the loader whose batch is being read, if one is; the process's own otherwise."""


def threads() -> Threads:
    """The threads that decode, transform and wait for what blocks."""
    if (chosen := current.get()) is not None:
        return chosen
    if not _own:
        _own.append(Threads(min(32, 4 * _CORES), 'granular'))
    return _own[0]


os.register_at_fork(after_in_child=_own.clear)


async def offload(fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call a blocking function: in a thread under a loop, so that the loop is never blocked, and in place without."""
    loop = running_loop()
    if loop is None:
        return fn(*args)
    return await loop.run_in_executor(threads(), fn, *args)


async def spread(call: Callable[[int], T], count: int) -> list[T]:
    """``call(i)`` for i below count, in threads, in any order; in place if there is no loop.

    One thread begins, as threads that compute in Python take turns anyway. If it is not done after a millisecond, as
    with images, one per core goes on; if they are not after five, as calls that wait are not, all of the pool joins in.
    The first error ends them all, once the calls that run have returned.
    """
    loop = running_loop()
    if loop is None:
        return [call(i) for i in range(count)]
    out: list[Any] = [None] * count
    numbers = itertools.count()  # shared: its next() is atomic
    failed: list[BaseException] = []

    def work() -> None:
        while not failed and (i := next(numbers)) < count:
            try:
                out[i] = call(i)
            except BaseException as error:
                failed.append(error)

    pool = threads()
    running: set[asyncio.Future[None]] = set()
    try:
        for width, patience in ((1, 0.001), (_CORES, 0.005), (pool.width, None)):
            wanted = min(width, count) - len(running)
            running |= {loop.run_in_executor(pool, work) for _ in range(wanted)}
            if not running or not (await asyncio.wait(running, timeout=patience))[1]:
                break
    except BaseException as error:
        failed.append(error)  # who waited is gone: no thread begins another call
        raise
    if failed:
        raise failed[0]
    return out

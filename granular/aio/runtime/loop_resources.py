"""Resources that end with their event loop."""

import asyncio
import concurrent.futures
import contextlib
import functools
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Hashable
from typing import Any, Final, Generic, Protocol, TypeVar, cast

from granular.aio.runtime.forking import each_after_fork, inherited
from granular.aio.runtime.immediate import running_loop, to_loop
from granular.aio.runtime.tasks import end_tasks, has_failed, result_of, settle, was_cancelled
from granular.errors import ClosedError

T = TypeVar('T')


class Closable(Protocol):
    """An object with tasks under a loop."""

    async def aclose(self) -> None: ...


class Scope:
    """Resources opened under one event loop, such as HTTP sessions; closed when the loop ends or on :func:`aclose`."""

    def __init__(self) -> None:
        self._opened: dict[Hashable, asyncio.Future[Any]] = {}
        self._closers = contextlib.AsyncExitStack()
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()  # background tasks beside a consumer
        self.running: weakref.WeakSet[Closable] = weakref.WeakSet()  # iterators, with tasks, threads and processes
        self.values: weakref.WeakKeyDictionary[PerLoop[Any], Any] = weakref.WeakKeyDictionary()
        self.keeper: AsyncGenerator[None, None]  # closes this scope when it is closed itself

    async def get(self, key: Hashable, create: Callable[['Scope'], Coroutine[Any, Any, T]]) -> T:
        """Return the resource of that key; the first caller creates it while the others wait for it."""
        future = self._opened.get(key)
        if future is None or (has_failed(future) and not future.cancelled()):  # in this turn of the loop
            future = self._opened[key] = asyncio.ensure_future(create(self))
            future.add_done_callback(functools.partial(self._drop_failed, key))
        try:
            # A caller that is cancelled must not cancel the resource for the others.
            return cast(T, await result_of(future))
        except asyncio.CancelledError:
            if future.cancelled() and not was_cancelled():
                raise ClosedError('the connections of its event loop were closed before it ended') from None
            raise

    def _drop_failed(self, key: Hashable, future: asyncio.Future[Any]) -> None:
        """Let the next caller create the resource again, also if the caller that began was cancelled meanwhile."""
        if has_failed(future) and self._opened.get(key) is future:
            del self._opened[key]

    def peek(self, key: Hashable) -> Any | None:
        future = self._opened.get(key)
        return future.result() if future is not None and future.done() and not has_failed(future) else None

    def on_close(self, closer: Callable[[], Awaitable[None]]) -> None:
        """Register a function to call when the loop ends, in reverse order."""
        self._closers.push_async_callback(closer)

    async def aclose(self) -> None:
        """Close all resources, also if one of them fails to, or this is cancelled."""
        async with self._closers:
            try:
                await settle([running.aclose() for running in self.running])
            finally:
                await end_tasks(list(self.tasks))
                for future in self._opened.values():
                    future.cancel()
                await asyncio.gather(*self._opened.values(), return_exceptions=True)
                self._opened.clear()
                self.values.clear()


class PerLoop(Generic[T]):
    """A value for each event loop, created on first use there, that ends with the loop or with this object."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._begun = make, False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._make,)

    async def get(self) -> T:
        values, self._begun = (await scope()).values, True
        if self not in values:
            values[self] = self._make()
        return cast(T, values[self])

    async def peek(self) -> T | None:
        if not self._begun:
            return None
        await to_loop()
        opened = peek_scope()
        return None if opened is None else opened.values.get(self)


_SCOPE: Final = '_granular_scope'


def peek_scope() -> Scope | None:
    return getattr(running_loop(), _SCOPE, None)


async def scope() -> Scope:
    """Return the scope of the running loop.

    It is an attribute of the loop, because it refers to the loop: both are collected together.
    """
    await to_loop()
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
            if running_loop() is None:
                ended.run_until_complete(opened.keeper.aclose())
            else:  # another one runs in this thread
                with concurrent.futures.ThreadPoolExecutor(1) as other_thread:
                    other_thread.submit(ended.run_until_complete, opened.keeper.aclose()).result()
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


def _forget(loop: asyncio.AbstractEventLoop) -> None:
    """Detach a loop of the parent in a forked child, which must not use its sockets and has none of its threads."""
    opened = _detach(loop)
    inherited.append((loop, opened, list(opened.running) if opened is not None else ()))
    _loops.discard(loop)


_loops: Final = each_after_fork(_forget)  # those that have a scope

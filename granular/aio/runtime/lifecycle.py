"""Opening and closing, the same for every resource: readers, writers, loaders, and running iterators."""

import abc
import asyncio
import contextlib
import copy
import functools
import warnings
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Protocol, Self, TypeVar, cast

from granular._support.lazy import at_exit
from granular._support.other_names import Answering, Entered
from granular._support.text import logger
from granular.aio.runtime.forking import each_after_fork
from granular.aio.runtime.immediate import Rest, running_loop, to_loop
from granular.aio.runtime.lock import Lock, Turn
from granular.aio.runtime.loop_resources import Closable, scope
from granular.aio.runtime.portal import portal
from granular.aio.runtime.tasks import finish_within
from granular.aio.runtime.tracebacks import shorten
from granular.aio.runtime.user_functions import computing, refuse_own_use
from granular.errors import ClosedError, GranularError, InvalidArgumentError, UnsupportedError

T = TypeVar('T')
P = ParamSpec('P')


class AsyncResource(Answering, Entered, abc.ABC):
    """A resource that is opened once, by ``await X.open(...)``, ``async with X(...)`` or its first use, and closed."""

    def __init__(self) -> None:
        self._state = 'new'
        self._opening = Lock()

    @classmethod
    async def open(cls, *args: Any, **kwargs: Any) -> Self:
        """Construct a resource with these arguments and open it."""
        self = cls(*args, **kwargs)
        await self._ensure_open()
        return self

    @abc.abstractmethod
    async def _open(self) -> None: ...

    @abc.abstractmethod
    async def _close(self) -> None: ...

    async def _abort(self) -> None:
        await self._close()

    @property
    def closed(self) -> bool:
        """True if it was closed."""
        return self._state == 'closed'

    async def _ensure_open(self) -> None:
        if self._state != 'open':
            async with self._opening.turn():
                if self._state == 'new':
                    try:
                        await self._open()
                    except Exception as error:
                        shorten(error)
                        raise
                    if self._state == 'closed':  # it was closed while it opened
                        await self._abort()
                    else:
                        self._state = 'open'
            self._check_open()

    def _check_open(self) -> None:
        if self._state != 'open':
            state = 'is closed' if self._state == 'closed' else 'is not open yet: use `await open(...)` or `async with`'
            raise ClosedError(f'{self!r} {state}')

    async def aclose(self) -> None:
        """Close it; closing it again does nothing."""
        state, self._state = self._state, 'closed'
        if state == 'open':
            await self._close()

    async def abort(self) -> None:
        """Close it after an error: a writer discards what it has not published."""
        state, self._state = self._state, 'closed'
        if state == 'open':
            await self._abort()

    async def __aenter__(self) -> Self:
        await self._ensure_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await (self.aclose() if kind is None else self.abort())
        except BaseException:
            await self.abort()  # a cancellation may have come before it was closed
            raise


class Resource(Protocol):
    """A resource that an ``async with`` block closes."""

    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


R = TypeVar('R', bound=Resource)


class Opening(Entered, Coroutine[Any, Any, R]):
    """A coroutine that returns an open resource. An ``async with`` block may take it without ``await``.

    Attributes:
      coroutine: the coroutine itself.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, R]) -> None:
        self.coroutine = coroutine
        self._opened: R | None = None

    if not TYPE_CHECKING:  # type checkers refuse both by themselves

        def __len__(self):
            raise InvalidArgumentError('a coroutine that opens: use `reader = await ...` or `async with ... as reader`')

        def __getitem__(self, index):
            return len(self)

    def __bool__(self) -> bool:
        return True

    def send(self, value: Any, /) -> Any:
        return self.coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self.coroutine.throw(*error)

    def close(self) -> None:
        self.coroutine.close()

    def __await__(self) -> Generator[Any, Any, R]:
        return self.coroutine.__await__()

    async def __aenter__(self) -> R:
        self._opened = opened = await self.coroutine
        await opened.__aenter__()
        return opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await cast(R, self._opened).__aexit__(kind, error, trace)


def opening(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Opening[R]]:
    """Let an ``async with`` block take the call of a coroutine function that opens a resource without ``await``."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Opening[R]:
        return Opening(function(*args, **kwargs))

    return call


class Closing(abc.ABC):
    """A context manager that is closed at its end."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close it. Closing it again has no effect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextlib.asynccontextmanager
async def ending_with(clean_up: Callable[[], Awaitable[None]], doing: str) -> AsyncIterator[None]:
    """Clean up at the end of a block, whether it fails or not.

    If the block fails, its error is raised even if the clean-up fails, too, which is then a note of it.
    """
    try:
        yield
    except BaseException as error:
        try:
            await clean_up()
        except GranularError as failure:
            error.add_note(f'{doing} failed, too: {failure}')
        raise
    await clean_up()


async def ensure_open(resource: Any) -> None:
    """Open a resource, of either API, unless it is open; objects that are not resources need no opening."""
    opened = resource if isinstance(resource, AsyncResource) else getattr(resource, 'aio', None)
    if isinstance(opened, AsyncResource):
        await opened._ensure_open()


def check_open(resource: AsyncResource) -> None:
    resource._check_open()


class Publishing(AsyncResource):
    """A resource whose data is published when it is closed, and that reports its loss if it never is.

    It is closed once the operations that came before have ended; until then, a cancelled caller has not closed it.
    """

    _reports_loss, _state = False, 'new'  # `__del__` reads them even if the constructor fails

    def __init__(self) -> None:
        super().__init__()
        self._reports_loss = True
        self._turns = Lock()
        _writers.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        raise UnsupportedError(f'{self!r} is neither pickled nor copied: open another writer in each process')

    def _check_open(self) -> None:
        if self._state == 'inherited':
            raise ClosedError(
                f'{self!r} belongs to the process that this one was forked from: open another writer after the fork'
            )
        super()._check_open()

    async def _ensure_open(self) -> None:
        if self._state != 'open':
            await to_loop()
        await super()._ensure_open()

    async def aclose(self) -> None:
        if self._state == 'inherited':
            self._check_open()
        async with self._turns.turn():
            await super().aclose()

    async def abort(self) -> None:
        async with self._turns.turn():
            await finish_within(super().abort())  # else a second cancellation would leave files locked

    @abc.abstractmethod
    def _loss(self) -> str:
        """Describe what is lost if it is never closed; empty if nothing was appended."""

    def __del__(self) -> None:
        if self._state == 'open':
            self._report_loss()

    def _report_loss(self) -> None:
        """Log and warn if it is open, when it is dropped or at exit."""
        if not self._reports_loss or self._state != 'open':
            return
        self._reports_loss = False
        if not (loss := self._loss()):
            return
        message = f'{self!r} was never closed: {loss}: use `with`, or call its close'
        logger.error(message)
        warnings.warn(message, ResourceWarning, source=self, stacklevel=2)


def report_no_loss(writer: Publishing) -> None:
    """Let a writer report no loss, because another one owns it and reports the loss of both."""
    writer._reports_loss = False


def _disown(writer: Publishing) -> None:
    """In a forked child, leave a writer to the parent: what it has buffered or claimed belongs to one process."""
    if writer._state != 'closed':
        writer._state = 'inherited'


_writers: Final = each_after_fork(_disown)


def _report_losses() -> None:
    with contextlib.ExitStack() as stack:  # all losses are reported, even where warnings are errors
        for writer in list(_writers):
            stack.callback(writer._report_loss)


at_exit(_report_losses)


class Running(abc.ABC):
    """The working part of an iterator or cache: tasks, threads, processes, connections, bound to the first loop.

    The user holds a handle, to which nothing here refers (:meth:`close_with`): once the handle is dropped, this part is
    closed. Items are taken one at a time, in the order of the requests, by any number of threads or tasks.
    """

    _loop: asyncio.AbstractEventLoop | None = None
    _inherited = False  # True if tasks, threads and worker processes belong to the process that this was forked from
    _finalizer: 'weakref.finalize[..., object] | None' = None

    def __init__(self) -> None:
        self._lock = Lock()
        self.closed: bool = False
        # Stands for it in the contexts of its functions (:func:`mark_computing`), which may outlive it.
        self.token: object = object()

    def forked(self) -> None:
        """Give up, in a forked child, what belongs to its parent, where it runs or an operation is in progress."""
        self._inherited = self._inherited or self._loop is not None or bool(self._lock.queue)

    def __getstate__(self) -> dict[str, Any]:
        if self._loop is not None:
            raise UnsupportedError(
                'a started iterator or Loader is neither pickled nor copied, as its tasks are those of this process: '
                'save its state, and restore that in a new one'
            )
        return {**self.__dict__, '_finalizer': None}

    def turn(self) -> Turn:
        """Return the turn of an operation, in the order of the requests, taken by ``async with``."""
        refuse_own_use(self.token)
        return Turn(self._lock)

    def compute(self, coro: Coroutine[Any, Any, T]) -> Rest[T]:
        """Return a coroutine that calls functions of this iterator, to be awaited in any context."""
        return Computing(coro, self.token)

    def _is_elsewhere(self) -> bool:
        """Return whether it is bound to another loop than that on which this thread would wait."""
        if (own := self._loop) is None:
            return False
        loop = running_loop()
        return loop is not own if loop is not None else not portal.runs(own)

    def check(self) -> None:
        """Raise an error if it is closed, or bound to another loop than that on which this thread would wait."""
        if self.closed:
            raise ClosedError('the iterator is closed')
        if self._inherited:
            raise GranularError(
                'the iterator was started in the process that this one was forked from: start another one'
            )
        if self._is_elsewhere():
            raise GranularError(
                'the iterator was started under another event loop, where its tasks are: give each loop its own'
            )

    async def settle(self) -> None:
        """Bind it to the running loop, if there is one."""
        if self._loop is None and (loop := running_loop()) is not None:
            self._loop = loop
            (await scope()).running.add(self)

    def close_with(self, handle: object) -> None:
        """Close it once its handle is dropped; call it when both are complete, before it runs.

        A handle has the ``__copy__`` of :func:`copied`.
        """
        _running.add(self)  # not earlier: a fork may come at any point, and uses all of it
        self._finalizer = weakref.finalize(handle, self._dropped)
        self._finalizer.atexit = False  # at exit, its loop closes it

    def _dropped(self) -> None:
        # The garbage collector calls this in any thread at any point, so it must not wait.
        if self._loop is not None and not self._inherited:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its tasks have ended
                self._loop.call_soon_threadsafe(_close_soon, self)

    async def aclose(self) -> None:
        """End its tasks, threads and processes; closing it again does nothing."""
        self.closed = True
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._inherited or (self._loop is not None and self._loop.is_closed()):  # which has closed it
            return
        if self._is_elsewhere():
            self._dropped()
        else:
            await self._close()

    @abc.abstractmethod
    async def _close(self) -> None: ...


def copied(handle: T) -> T:
    """Return a copy of a handle, for ``copy.copy``, with a running part of its own, where that may be copied."""
    return copy.deepcopy(handle)


_running: Final[weakref.WeakSet[Running]] = each_after_fork(lambda running: running.forked())


class Computing(Rest[T]):
    """A coroutine that computes elements of an iterator.

    Its context is marked for each of its steps alone, as it may begin on one thread and resume on a loop.
    """

    def __init__(self, coro: Coroutine[Any, Any, T], token: object) -> None:
        super().__init__(coro)
        self._token = token

    def _step(self, value: Any, error: BaseException | None) -> Any:
        outer = computing.get()
        try:
            computing.set((*outer, self._token))  # in here, as an interrupt may come right after it
            return super()._step(value, error)
        finally:
            computing.set(outer)
            del error  # whose traceback refers to this frame


_closings: set[asyncio.Task[None]] = set()


def _close_soon(running: Closable) -> None:
    task = asyncio.ensure_future(running.aclose())
    _closings.add(task)
    task.add_done_callback(_closed)


def _closed(task: 'asyncio.Task[None]') -> None:
    _closings.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning('closing a dropped iterator or cache failed', exc_info=error)

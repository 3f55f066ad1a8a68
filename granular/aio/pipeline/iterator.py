"""A position in a running stream, and the asynchronous iterator over it."""

import abc
import itertools
import threading
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Self

from granular._typing import Element_co
from granular._words import counted
from granular.aio.execution.prefetch import END
from granular.aio.pipeline.describe import check_fingerprint, fingerprint, resizable_stages
from granular.aio.pipeline.position import VERSION, check_plain, restoring, version_of
from granular.aio.pipeline.streams.flow import Flow, restore_checked
from granular.aio.pipeline.streams.stream import Stream
from granular.aio.pipeline.streams.tracing import StageSummary, summary_of, trace_of, traced
from granular.aio.runtime.lifecycle import Running, copied
from granular.aio.runtime.user_functions import await_user
from granular.errors import InvalidArgumentError, OutOfRangeError, StateError
from granular.indexing import check_integer


class Cursor(Running):
    """The position in a stream: returns its elements one after another, and the state from which the next one follows.

    If an element fails, its error is raised and the state stays before it: the next call tries the element again. So
    does the next call of a thread that an interrupt (Ctrl-C) kept from receiving an element. An interrupt of the main
    thread comes where a function begins, or where a call returns: what must not be divided makes no calls.
    """

    # The next elements that need no operation: each is removed by taking it, in one step of C code, which neither
    # another thread nor Ctrl-C can divide. Empty during an operation, and in a forked child.
    page: Iterable[Any] = ()

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream
        trace = trace_of(stream)
        self.flow = stream.flow() if trace is None else traced(stream, trace.debug).flow()
        self._fingerprint = fingerprint(stream)
        self.flow.bind(self.token)
        self._calls_functions = _calls_functions(self.flow)
        self._moves = 0  # operations begun: each computes an element or restores a state
        self._before: Any = None  # the mark before the last of them
        self._astray = False  # True if the flow must go back to it: the last operation is unfinished, or it failed
        self._recipient = 0  # the thread to which the last element is on its way; 0 if it was received
        self._count = 0
        self._count_before = 0  # before the last operation
        self._ready: list[Any] = []  # the elements of the page
        self._shown = 0  # their number when they were shown
        self._next_page: Iterable[Any] = ()  # shown once the element before it was received
        self._left = 0, 0.0  # the thread and the time in which the last element was returned

    async def take(self) -> Any:
        """Return the next element, or ``END``; call ``received`` right before it is handed to the consumer."""
        recipient = threading.get_ident()
        async with self.turn():
            self.check()
            try:
                await self._begin_move(recipient)
                step = self.flow.next()
                element = await await_user(self.compute(step) if self._calls_functions else step)
                if self.closed:  # meanwhile: a stage may have taken a closed one before it for one that ended or begins
                    self.check()
                self._count += element is not END
                self._astray = False
            finally:
                if self._loop is None:
                    await self.settle()
            self._next_page = self._new_page()
            self._left = threading.get_ident(), time.perf_counter()
            return element

    def received(self) -> None:
        """Let the elements after the one that this thread took be taken, which reaches its consumer without a call.

        The time since ``take`` returned in another thread, from which the consumer woke up, counts as waiting.
        """
        thread, left = self._left
        this = threading.get_ident()
        if thread != this:
            self.flow.received(time.perf_counter() - left)
        if self._recipient == this:  # otherwise another thread has taken an element since
            self.page, self._recipient = self._next_page, 0

    def is_expected(self) -> bool:
        """Return whether the last element has not reached this thread yet, which asked for it."""
        return self._recipient == threading.get_ident()

    def take_back(self) -> None:
        """Let an element that did not reach this thread come again, unless another thread has taken one since."""
        this = threading.get_ident()
        if self._recipient == this:
            self._astray = True

    def _new_page(self) -> Iterable[Any]:
        """Return the elements that are ready, to be taken without an operation."""
        ready = self.flow.ready()
        page = map(list.pop, itertools.repeat(ready, len(ready))) if ready else ()
        shown = len(ready)
        self._ready, self._shown = ready, shown
        return page

    def forked(self) -> None:
        super().forked()
        self.hide()

    def hide(self) -> None:
        """Let elements be taken by operations only, and count those that were taken without one."""
        self.page = ()
        left = len(self._ready)
        self._count += self._shown - left
        self._shown = left

    async def _begin(self, recipient: int) -> None:
        """Begin an operation for a thread, before the last element unless it was received."""
        if self._loop is None:
            await self.settle()  # before there are tasks, which only their loop may end
        if self._recipient == recipient:
            self._astray = True
        self._recipient = 0
        self.hide()
        if self._astray:  # the last move failed: go back so late that neither errors nor cancellations prevent it
            await self.flow.restore(self._before)
            self._count, self._astray = self._count_before, False

    async def _begin_move(self, recipient: int) -> None:
        await self._begin(recipient)
        self._before, self._count_before = self.flow.mark(), self._count
        self._astray, self._recipient = True, recipient
        self._moves += 1

    def get_state(self) -> dict[str, Any]:
        """Return the state from which the next element follows: plain JSON with indices, not data.

        Until an element has reached its thread, this is the state before that element.
        """
        while True:
            moves = self._moves
            try:
                state = self.flow.unmark(self._before) if self._in_move() else self.flow.state()
            except Exception:
                if moves == self._moves:
                    raise
                continue  # another thread has changed what was looked at
            if moves == self._moves:
                return {'version': VERSION, 'state': state, 'pipeline': self._fingerprint}

    def _in_move(self) -> bool:
        """Return whether the last element was not received."""
        return self._astray or self._recipient != 0

    def next_index(self) -> int:
        return self._stream.index_of(self.get_state()['state'])

    async def seek(self, index: int) -> None:
        length = self._stream.length()
        index = check_integer('index', index, 0)
        if index > length:
            raise OutOfRangeError(f'index {index} is out of range: the stream has {counted(length, "element")}')
        await self.restore({'version': VERSION, 'state': self._stream.state_at(index)}, True)

    async def restore(self, state: Mapping[str, Any], strict: bool) -> None:
        """Continue from a state; with ``strict``, refuse that of a different pipeline."""
        check_plain(state)
        if not isinstance(state, Mapping) or 'state' not in state:
            raise StateError(f'expected what get_state() or granular.load_state(path) returned, got {state!r:.200}')
        terms = restoring.get()._replace(version=version_of(state))  # those of the caller's thread
        strict = strict and terms.strict
        recipient = threading.get_ident()
        async with self.turn():
            self.check()
            try:
                check_fingerprint(state.get('pipeline'), self._fingerprint, strict, resizable_stages(self._stream))
                self.flow.set_strict(strict)
                await self._begin_move(recipient)
                await restore_checked(self.flow, state['state'], terms)
                self._astray, self._recipient = False, 0
            finally:
                await self.settle()

    async def set_prefetch(self, size: int) -> None:
        size = check_integer('buffer_size', size, 0)
        recipient = threading.get_ident()
        async with self.turn():
            self.check()
            await self._begin(recipient)
            if not await self.flow.set_prefetch(size):
                raise InvalidArgumentError('the stream computes no elements ahead: add prefetch() to it')
            self.page = self._new_page()

    async def start_prefetch(self) -> None:
        recipient = threading.get_ident()
        async with self.turn():
            self.check()
            try:
                await self._begin(recipient)
                await self.compute(self.flow.begin())
            finally:
                await self.settle()

    def describe(self) -> str:
        return f'{self._stream.describe()}: {counted(self.elements(), "element")}'

    def elements(self) -> int:
        return self._count_before if self._in_move() else self._count + self._shown - len(self._ready)

    def stats(self) -> dict[str, float]:
        return {'elements': self.elements(), **self.flow.stats()}

    async def aclose(self) -> None:
        self.hide()
        self._ready, self._shown, self._next_page = [], 0, ()
        await super().aclose()

    async def _close(self) -> None:
        await self.flow.aclose()


def _calls_functions(flow: Flow) -> bool:
    return flow.calls_functions or any(map(_calls_functions, flow.parents))


class CursorHandle(abc.ABC):
    """Base of the iterators of ``for`` and ``async for``: a cursor, which is closed once its handle is dropped."""

    def __init__(self, parents: Any = ()) -> None:
        if not isinstance(parents, Stream):
            raise InvalidArgumentError('iterate a stream; subclasses are those of the sync API')
        self._cursor = Cursor(parents)
        self._cursor.close_with(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if '_cursor' in state:  # not of a subclass
            self._cursor.close_with(self)

    __copy__ = copied

    def __repr__(self) -> str:
        cursor: Cursor | None = getattr(self, '_cursor', None)  # none of a subclass
        return super().__repr__() if cursor is None else f'<{type(self).__name__} of {cursor.describe()}>'

    def _cursor_for(self, method: str) -> Cursor:
        """Return the cursor; of a subclass without one, raise an error that names the method."""
        return self._cursor

    def get_state(self) -> dict[str, Any]:
        """Return the state from which the next element follows: plain JSON with indices, not data."""
        return self._cursor.get_state()

    @abc.abstractmethod
    def set_state(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Continue from a state.

        Args:
          state: from ``get_state``.
          strict: True to refuse a state of a pipeline whose stages have other descriptions; False to continue from it
            with a warning, for a dataset that was copied elsewhere or a function that was renamed. If the pipelines
            give different elements, elements are repeated or left out.

        Raises:
          StateError: if this is not a state, or belongs to a different pipeline; the message names the differences.
        """

    def get_next_index(self) -> int:
        """Return the number of the next element, from 0 on.

        The stream must have random access to its end: MapDatasets that are mapped, batched, shuffled within windows,
        repeated, limited, prefetched, mixed or zipped. The elements of a shard have numbers of their own.

        Raises:
          InvalidArgumentError: if the elements have no fixed numbers, as behind a filter; the message names the stage.
          StateError: if the next element is between two numbers, because the stream resumed from a state of another
            number of shards, of another batch size, or of a mix of other streams or weights.
        """
        return self._cursor_for('get_next_index').next_index()

    @abc.abstractmethod
    def set_next_index(self, index: int) -> Any:
        """Continue with an element, by its number; those before it are not computed, except in its shuffled window.

        Raises:
          InvalidArgumentError: if the elements have no fixed numbers, as behind a filter; the message names the stage.
          OutOfRangeError: if there is no such element.
        """

    @abc.abstractmethod
    def start_prefetch(self) -> Any:
        """Start reading before the first element is requested."""

    @abc.abstractmethod
    def set_prefetch_buffer_size(self, buffer_size: int) -> Any:
        """Change the number of elements that are computed ahead, while the stream is running; 0 to compute none ahead.

        It is that of the last ``prefetch`` of the stream, and without one that of its ``ReadOptions``.
        """

    def stats(self) -> dict[str, float]:
        """Return the counters of this iterator.

        ``elements`` returned; ``read`` elements and ``bytes`` (estimated) of the sources; ``wait_seconds`` that the
        consumer waited for them, and ``consumer_seconds`` that it spent itself; chunks ``ready`` and ``in_flight``;
        failed elements (``errors``). What is read again, after an error, a state or an interrupt, counts again.
        """
        return self._cursor.stats()

    def execution_summary(self) -> list[StageSummary]:
        """Return, for each stage from the source to the output, its elements and where the time went.

        ::

            stream = stream.with_options(granular.DatasetOptions(stage_timing=True))
            with iter(stream) as iterator:
                next(iterator)
                slowest = max(iterator.execution_summary(), key=lambda stage: stage.seconds)

        Returns:
          Named tuples ``(stage, elements, seconds, wait_seconds)``: the description of the stage, the elements that it
          yielded, the seconds that it computed, over all threads, and those that it waited for the stages before it.

        Raises:
          InvalidArgumentError: if the stages are not timed.
        """
        if not (stages := summary_of(self._cursor_for('execution_summary').flow)):
            raise InvalidArgumentError(
                'the stages are not timed: call with_options(DatasetOptions(stage_timing=True)) of the stream'
            )
        return stages

    @property
    def errors(self) -> list[tuple[int, str]]:
        """Index and message of failed elements, the last 1,000 of each source, and of those that have ended."""
        return self._cursor.flow.failures()


class DatasetIterator(CursorHandle, AsyncIterator[Element_co]):
    """The elements of a stream, for ``async for``; its state can be saved and restored between any two elements.

    ::

        iterator = aiter(stream)
        element = await anext(iterator)
        state = iterator.get_state()  # plain JSON
        await iterator.set_state(state)  # continues after that element
    """

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Element_co:
        element: Element_co
        element = await self._cursor.take()
        self._cursor.received()
        if element is END:
            raise StopAsyncIteration
        return element

    async def set_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        await self._cursor.restore(state, strict)

    async def set_next_index(self, index: int) -> None:
        await self._cursor.seek(index)

    async def set_prefetch_buffer_size(self, buffer_size: int) -> None:
        await self._cursor.set_prefetch(buffer_size)

    async def start_prefetch(self) -> None:
        await self._cursor.start_prefetch()

    async def aclose(self) -> None:
        """Close the iterator: stop its tasks, threads and processes. Closing twice is allowed."""
        await self._cursor.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.aclose()

"""A position in a running stream, and the asynchronous iterator over it."""

import abc
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Self

from numpy.typing import ArrayLike

from granular._support.indexing import check_integer
from granular._support.other_names import OF_CURSORS, OtherNames
from granular._support.text import counted
from granular._support.typing import Element_co
from granular.aio.pipeline.changes import declared
from granular.aio.pipeline.cursor import Cursor
from granular.aio.pipeline.describe import check_lines, lines_of, resizable_stages
from granular.aio.pipeline.execution.prefetch import END
from granular.aio.pipeline.origins import Origins, Traceable, traced_elements
from granular.aio.pipeline.position import VERSION, check_plain, check_version, kind_of_state, restoring
from granular.aio.pipeline.streams.flow import restore_checked
from granular.aio.pipeline.streams.stream import RenumberedError, Stream
from granular.aio.pipeline.streams.tracing import Tracing, trace_of, traced
from granular.aio.pipeline.summary import ExecutionSummary
from granular.aio.runtime.lifecycle import copied
from granular.aio.runtime.threads import offload
from granular.errors import InvalidArgumentError, OutOfRangeError, StateError


class StreamCursor(Cursor):
    """The position in a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        trace = trace_of(stream)
        super().__init__(stream.flow() if trace is None else traced(stream, trace.debug).flow())
        self._lines = lines_of(stream)
        self._pipeline = [line.saved() for line in self._lines]
        self._outline = stream.outline()

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
                return {'version': VERSION, 'state': state, 'pipeline': self._pipeline, 'stages': self._outline}

    def next_index(self) -> int:
        try:
            return self._number()
        except RenumberedError as error:  # after which there is no number to continue at
            raise StateError(str(error)) from None
        except StateError as error:
            raise StateError(f'{error}: set_next_index continues at a number') from None

    def _number(self) -> int:
        return self.stream.index_of(self.get_state()['state'])

    def numbered(self) -> Stream:
        """Return the stream, whose elements have the numbers that they have from its start; raise ``StateError`` if
        others were taken, because it resumed with other weights.
        """
        try:
            self._number()
        except RenumberedError as error:
            raise StateError(str(error)) from None
        except StateError:  # between two elements
            pass
        return self.stream

    async def seek(self, index: int) -> None:
        length = self.numbered().length()
        index = check_integer('index', index, 0)
        if index > length:
            raise OutOfRangeError(f'index {index} is out of range: the stream has {counted(length, "element")}')
        await self.restore({'version': VERSION, 'state': self.stream.state_at(index)})

    async def restore(self, state: Mapping[str, Any], changes: Sequence[Any] = ()) -> None:
        """Continue from a state; refuse that of a pipeline which differs in more than the declared changes."""
        check_plain(state)
        if not isinstance(state, Mapping) or 'state' not in state:
            remedy = ': load it into a Loader, or call set_next_index with the number of the next element'
            raise StateError(
                f'expected what state_dict() of a stream or granular.load_state(path) returned, got '
                f'{kind_of_state(state)}{remedy if isinstance(state, Mapping) and "step" in state else ""}'
            )
        check_version(state)
        rules = restoring.get()  # those of the caller's thread
        rules = rules._replace(changes=(*(rules.changes or ()), *declared(changes)))
        async with self.turn():
            self.check()
            try:
                resizable = resizable_stages(self.stream)
                made = check_lines(state.get('pipeline'), self._lines, rules.changes or (), resizable)
                await self._go_back()
                self._move()
                rules = rules._replace(applied=(*rules.applied, *made))
                await restore_checked(self.flow, state['state'], rules)
                self._undelivered = self._expected = False
            finally:
                await self.settle()

    async def set_prefetch(self, size: int) -> None:
        size = check_integer('buffer_size', size, 0)
        async with self.turn():
            self.check()
            await self._go_back()
            if not await self.flow.set_prefetch(size):
                raise InvalidArgumentError('the stream computes no elements ahead: add prefetch() to it')
            self._page = self._ready = self.flow.ready()
            self._shown = len(self._page)

    async def start_prefetch(self) -> None:
        async with self.turn():
            self.check()
            try:
                await self._go_back()
                await self.compute(self.flow.begin())
            finally:
                await self.settle()

    def describe(self) -> str:
        return f'{self.stream.describe()}: {counted(self.elements(), "element")}'

    def stats(self) -> dict[str, float]:
        return {'elements': self.elements(), **self.flow.stats()}


class CursorHandle(Traceable, OtherNames):
    """Base of the iterators of ``for`` and ``async for``: a cursor, which is closed once its handle is dropped."""

    _answers = OF_CURSORS
    _runs = True  # False of a subclass, which has no cursor

    def __init__(self, parents: Any = ()) -> None:
        if not isinstance(parents, Stream):
            raise InvalidArgumentError('iterate a stream; subclasses are those of the sync API')
        self._cursor = StreamCursor(parents)
        self._cursor.close_with(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._runs:
            self._cursor.close_with(self)

    __copy__ = copied

    def __repr__(self) -> str:
        return f'<{type(self).__name__} of {self._cursor.describe()}>' if self._runs else super().__repr__()

    def _cursor_for(self, method: str) -> StreamCursor:
        """Return the cursor; of a subclass without one, raise an error that names the method."""
        return self._cursor

    def get_state(self) -> dict[str, Any]:
        """Return the state, as ``state_dict``, by Grain's name."""
        return self._cursor.get_state()

    @abc.abstractmethod
    def set_state(self, state: Mapping[str, Any], changes: Sequence[Any] = ()) -> Any:
        """Continue from a state, as ``load_state_dict``, by Grain's name."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which the next element follows: plain JSON with indices, not data."""
        return self.get_state()

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any], changes: Sequence[Any] = ()) -> Any:
        """Continue from a state.

        Args:
          state: from ``state_dict``.
          changes: what is different in this pipeline, as :mod:`granular.changes` declares it.

        Raises:
          StateError: if this is not a state, or belongs to a different pipeline; the message names the differences, and
            the changes to declare if they are meant.
          InvalidArgumentError: if ``changes`` is not a list of changes.
        """

    def get_next_index(self) -> int:
        """Return the number of the next element, from 0 on, in steps of the batch size of this stream.

        The stream must have random access to its end: MapDatasets that are mapped, batched, shuffled within windows,
        repeated, limited, prefetched, mixed or zipped. The elements of a shard have numbers of their own.

        Raises:
          InvalidArgumentError: if the elements have no fixed numbers, as behind a filter; the message names the stage.
          StateError: if the next element is between two numbers, because the stream resumed from a state of another
            number of shards or batch size: ``set_next_index`` continues at a number. Or if a mix resumed with other
            streams, weights or shards, after which its elements have none: to leave out the next ones, take them.
        """
        return self._cursor_for('get_next_index').next_index()

    @abc.abstractmethod
    def set_next_index(self, index: int) -> Any:
        """Continue with an element, by its number; those before it are not computed, except in its shuffled window.

        Raises:
          InvalidArgumentError: if the elements have no fixed numbers, as behind a filter; the message names the stage.
          StateError: if a mix resumed with other streams, weights or shards, after which its elements have none.
          OutOfRangeError: if there is no such element.
        """

    @abc.abstractmethod
    def indices(self, steps: ArrayLike) -> Any:
        """Return which datapoints elements are made of, from lengths alone: nothing is read.

        Args:
          steps: numbers of elements of this shard, from 0 on; an integer, a range or an array.

        Raises:
          InvalidArgumentError: if the elements have no fixed numbers, as behind a filter; the message names the stage.
          StateError: if a mix resumed with other streams, weights or shards, after which its elements have none.
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

    def execution_summary(self) -> ExecutionSummary:
        """Return where the time went: a table of reads, decoding, the stages from the source to the output, and the
        consumer.

        ::

            stream = stream.with_options(granular.grain.experimental.DatasetOptions(stage_timing=True))
            with iter(stream) as iterator:
                next(iterator)
                print(iterator.execution_summary())  # and its bottleneck

        Returns:
          A list of named tuples ``(stage, elements, seconds, wait_seconds)``: a description, the elements that were
          yielded, the seconds that they took, over all threads, and those of waiting for the stages before. Its
          ``bottleneck`` is the one that limits the rate.

        Raises:
          InvalidArgumentError: if the stages are not timed.
        """
        if not isinstance(flow := self._cursor_for('execution_summary').flow, Tracing):
            raise InvalidArgumentError(
                'the stages are not timed: call '
                'with_options(granular.grain.experimental.DatasetOptions(stage_timing=True)) of the stream'
            )
        return flow.summary()

    @property
    def errors(self) -> list[tuple[int, str]]:
        """Index and message of failed elements, the last 1,000 of each source, and of those that have ended."""
        return self._cursor.flow.failures()


def cursor_of(handle: CursorHandle) -> StreamCursor:
    """Return the cursor of an iterator that has one: of no subclass of the sync API."""
    return handle._cursor


class DatasetIterator(CursorHandle, AsyncIterator[Element_co]):
    """The elements of a stream, for ``async for``; its state can be saved and restored between any two elements.

    ::

        iterator = aiter(stream)
        element = await anext(iterator)
        state = iterator.state_dict()  # plain JSON
        await iterator.load_state_dict(state)  # continues after that element
    """

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Element_co:
        element: Element_co
        element = await self._cursor.take()
        self._cursor.received(element)
        if element is END:
            raise StopAsyncIteration
        return element

    async def set_state(self, state: Mapping[str, Any], changes: Sequence[Any] = ()) -> None:
        await self._cursor.restore(state, changes)

    async def load_state_dict(self, state: Mapping[str, Any], changes: Sequence[Any] = ()) -> None:
        await self.set_state(state, changes)

    async def set_next_index(self, index: int) -> None:
        await self._cursor.seek(index)

    async def indices(self, steps: ArrayLike) -> Origins:
        return await offload(traced_elements, self._cursor.numbered(), steps)

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

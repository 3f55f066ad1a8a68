"""Streams in turn: several are open at a time, and the next one replaces one that ends."""

from collections import deque
from collections.abc import Callable, Sequence, Set
from operator import methodcaller
from typing import Any, NamedTuple, cast

from granular.aio.pipeline.describe import check_lines, lines_of, resizable_stages, saved_lines
from granular.aio.pipeline.execution.failures import RECENT
from granular.aio.pipeline.execution.prefetch import END, Crew, Prefetch
from granular.aio.pipeline.nodes.indices import Repeat, Slice
from granular.aio.pipeline.nodes.source import Source
from granular.aio.pipeline.position import EARLIER, FREE, RestoreRules
from granular.aio.pipeline.shards import ShardOptions
from granular.aio.pipeline.streams.flow import (
    Flow,
    Outlasting,
    flag_of,
    number_of,
    of_reading,
    restore_checked,
    sum_stats,
)
from granular.aio.pipeline.streams.prefetching import Prefetching
from granular.aio.pipeline.streams.stream import Stream
from granular.aio.pipeline.transforms import MultiprocessingOptions, divided
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.pools import current
from granular.aio.runtime.tasks import settle
from granular.errors import ClosedError, StateError


class InterleaveSettings(NamedTuple):
    cycle: int  # streams that are open at a time
    threads: int  # threads that make datasets
    make_buffer: int  # datasets that are made and opened before their turn
    iter_buffer: int  # elements of each stream that are computed ahead


class Interleaved(Stream):
    """Elements of several streams in turn."""

    made_later = False  # True if the streams are not known beforehand, so that states have their lines

    def __init__(self, parents: Sequence[Any], settings: InterleaveSettings) -> None:
        super().__init__(*parents)
        self.settings = settings

    def __len__(self) -> int:
        return len(self.parents)

    def outline(self) -> dict[str, Any]:
        return {'stage': self.describe()}  # streams that have ended are not in a state

    async def open_stream(self, number: int) -> Stream | None:
        """Return a stream, or None if a filter dropped its dataset."""
        return cast(Stream, self.parents[number])

    def with_workers(self, options: MultiprocessingOptions) -> Stream:
        share = divided(options, min(self.settings.cycle, len(self)))
        return self.over_each(methodcaller('with_workers', share))

    def sliced(self, part: slice) -> Stream:
        return self.over(self.parents[part])

    def in_part(self, part: ShardOptions) -> Stream:
        return self.sliced(slice(part.shard_index, None, part.shard_count))

    def flow(self) -> Flow:
        return Interleaving(self)

    def describe(self) -> str:
        return f'interleave of {len(self)}, {self.settings.cycle} at a time'


class InterleavedSource(Interleaved):
    """Elements of several streams in turn. A function makes them one by one, of the datasets of a source."""

    made_later = True

    def __init__(self, source: Source, settings: InterleaveSettings, convert: Callable[[int, Any], Stream]) -> None:
        super().__init__([source], settings)
        self._convert = convert
        self._changes: tuple[Callable[[Any], Any], ...] = ()  # of each stream that is made

    def __len__(self) -> int:
        return len(self.parents[0])

    @property
    def hosts(self) -> int:
        return 0

    async def open_stream(self, number: int) -> Stream | None:
        dataset = (await self.parents[0].fetch([number]))[0]
        if dataset is None:
            return None
        stream = self._convert(number, dataset)
        for change in self._changes:
            stream = change(stream)
        return stream

    async def divisions(self) -> set[int]:
        for number in range(len(self)):
            if (stream := await self.open_stream(number)) is not None:
                return await stream.divisions()
        return {1}

    def over_each(self, change: Callable[[Any], Any], refusal: str = '') -> Stream:
        return self.replaced(_changes=(*self._changes, change))

    def sliced(self, part: slice) -> Stream:
        return self.over([Slice(self.parents[0], part)])

    def at_epoch(self, epoch: int) -> Stream:
        if not epoch:
            return self
        source, length = self.parents[0], len(self)
        part = slice(epoch * length, (epoch + 1) * length)
        return super().at_epoch(epoch).over([Slice(Repeat(source, None), part)])

    def keep_selections(self, warn: bool = True) -> Stream:
        # Each stream that is made would log the same warning.
        return super().keep_selections(warn).over_each(methodcaller('keep_selections', False))

    def roots(self) -> list[Any]:
        return []


class _Parts(NamedTuple):
    """The open streams in the state of an interleave."""

    states: dict[str, Any]  # by number
    waiting: list[int]  # the numbers of those that had no turn
    streams: dict[str, Any]  # their lines, by number
    late: Set[int]  # those that are not in step


class Interleaving(Outlasting):
    """Elements of several streams in turn. A stream is started shortly before its turn, and closed at its end."""

    calls_functions = True
    adapts = True  # streams that are made later may be mixes by name

    def __init__(self, stage: Interleaved) -> None:
        self._stage, self._count = stage, len(stage)
        cycle, threads, make_buffer, _ = stage.settings
        self._open: list[int | None] = [i if i < self._count else None for i in range(cycle)]
        self._turn, self._begun = 0, min(cycle, self._count)
        self._flows: dict[int, Flow] = {}  # of the open streams that had their turn
        self._saved: dict[int, Any] = {}  # states of open streams that did not have it since they were restored
        self._lines: dict[int, Any] = {}  # those of open streams as states have them
        self._started: dict[Flow, Stream] = {}  # all that are to be closed
        self._closed = False
        self._binding: tuple[object, Crew] = None, Crew()
        self._size: int | None = None  # of the read-ahead of each stream, once it was changed
        self._ahead: Prefetch[Flow | None] = Prefetch(self._start, None, 1, 1, threads, 'interleave', False)
        self._ahead.depth, self._ahead.stop = make_buffer, self._count
        # What states have of the open streams, but for the one that moved last: those of all streams would take longer
        # than an element. None if it is unknown.
        self._parts: _Parts | None = None
        self._moved: int | None = None  # the stream that moved last
        self._closed_stats: dict[str, float] = {}
        self._closed_failures: deque[tuple[int, str]] = deque(maxlen=RECENT)
        self._rules = FREE  # those under which the saved streams continue
        self._hosts = stage.hosts  # those that share the streams; 0 until one is made

    @property
    def parents(self) -> tuple[Flow, ...]:  # type: ignore[override]
        return tuple(self._flows.values())

    @property
    def hosts(self) -> int:
        return self._hosts

    @property
    def knows_host(self) -> bool:
        return bool(self._flows)

    def bind(self, token: object, crew: Crew) -> None:
        self._binding, self._ahead.token = (token, crew), token

    async def _start(self, number: int, _: int = 1) -> Flow | None:
        await to_loop()
        stream = await self._stage.open_stream(number)
        if stream is None:
            return None
        if self._closed:
            raise ClosedError('the iterator is closed')
        flow: Flow = stream.flow()
        if self._stage.settings.iter_buffer and stream.merged() is None:
            flow = Prefetching(flow, self._stage.settings.iter_buffer)
        flow.bind(*self._binding)
        flow.keep_host()  # hosts may advance unequally through the streams before or after it
        self._started[flow] = stream
        if self._size is not None:
            await flow.set_prefetch(self._size)
        current.set(None)  # only in this task: the functions of a stream run in the threads of this process
        try:
            await flow.begin()
        except BaseException:
            await self._close([flow])
            raise
        return flow

    async def next(self) -> Any:
        while True:
            number = self._open[self._turn]
            if number is None and self._begun < self._count:
                number = self._open[self._turn] = self._begun
                self._begun += 1
            if number is None:
                if not any(other is not None for other in self._open):
                    return END
                self._turn = (self._turn + 1) % len(self._open)
                continue
            flow = self._flows.get(number) or await self._first_turn(number)
            self._parts, self._moved = self._current_parts(), number
            element = END if flow is None else await flow.next()
            if element is END:
                self._open[self._turn], self._parts = None, None
                self._lines.pop(number, None)
                if flow is not None:
                    self._uneven, self._mixes = self._uneven or not flow.even, self._mixes_after(flow)
                    del self._flows[number]
                    await self._close([flow])
            self._turn = (self._turn + 1) % len(self._open)
            if element is not END:
                return element

    async def _first_turn(self, number: int) -> Flow | None:
        """Return the stream with a number, which is open and had no turn yet."""
        flow: Flow | None
        self._parts = None
        if number in self._saved or number != self._ahead.position:
            flow = await self._made_now(number)
        else:
            flow = await self._ahead.take()
        if flow is None and number in self._saved:
            raise StateError(
                f'{self._stage.describe()}, stream {number}: the state is within its elements, and its dataset is None '
                f'now: make the datasets as when the state was saved'
            )
        if flow is not None:
            self._flows[number] = flow  # first: it is used again, or closed, if it refuses the state
            if number in self._saved:
                await self._restore_stream(number, flow, self._saved[number])
            elif self._stage.made_later:
                self._lines[number] = saved_lines(self._started[flow])
            self._hosts = max(self._hosts, flow.hosts)
        self._saved.pop(number, None)
        return flow

    async def _restore_stream(self, number: int, flow: Flow, state: Any) -> None:
        """Continue a stream from its state; raise ``StateError`` if it was made of something else."""
        try:
            made: Sequence[Any] = ()
            if self._stage.made_later:
                stream = self._started[flow]
                changes = self._rules.changes or ()
                made = check_lines(self._lines.get(number), lines_of(stream), changes, resizable_stages(stream))
                self._lines[number] = saved_lines(stream)
            rules = self._rules._replace(applied=(*self._rules.applied, *made))
            await restore_checked(flow, state, rules)
        except StateError as error:
            raise StateError(f'{self._stage.describe()}, stream {number}: {error}') from error

    async def _made_now(self, number: int) -> Flow | None:
        ahead: Prefetch[Flow | None] = Prefetch(self._start, None, 1, 1, 1, 'interleave', False)
        ahead.token = self._ahead.token
        ahead.position = number
        ahead.stop = number + 1
        try:
            with of_reading():
                flow: Flow | None = await ahead.take()
        finally:
            await ahead.aclose()
        return flow

    async def _close(self, flows: Sequence[Flow]) -> None:
        """Close streams, and add up their counters. If that is interrupted, they are left to ``aclose``."""
        await settle([flow.aclose() for flow in flows])
        for flow in flows:
            self._started.pop(flow, None)
        self._closed_failures.extend(failure for flow in flows for failure in flow.failures())
        self._closed_stats = sum_stats([self._closed_stats, *(flow.stats() for flow in flows)])
        self._closed_stats.update(ready=0, in_flight=0)

    async def set_prefetch(self, size: int) -> bool:
        self._size = size
        for flow in list(self._started):
            await flow.set_prefetch(size)
        return True

    def stats(self) -> dict[str, float]:
        return sum_stats([self._closed_stats, super().stats()])

    def failures(self) -> list[tuple[int, str]]:
        return [*self._closed_failures, *super().failures()]

    def keep_host(self) -> None:
        super().keep_host()
        self._parts = None

    def received(self, seconds: float) -> None:
        if (flow := self._flows.get(-1 if self._moved is None else self._moved)) is not None:
            flow.received(seconds)

    def _current_parts(self) -> '_Parts':
        """Return what states have of the open streams."""
        if self._parts is not None:
            states, waiting, streams, late = self._parts
            number = self._moved
            if number is None or number not in self._flows:
                return self._parts
            flow = self._flows[number]
            late = late - {number} if flow.in_step else late | {number}
            return _Parts({**states, str(number): flow.state()}, waiting, streams, late)
        states = {
            str(number): self._flows[number].state() if number in self._flows else self._saved[number]
            for number in self._open
            if number in self._flows or number in self._saved
        }
        waiting = [number for number in self._open if number is not None and str(number) not in states]
        streams = {number: {'pipeline': self._lines[int(number)]} for number in states if int(number) in self._lines}
        late = {number for number, flow in self._flows.items() if not flow.in_step}
        return _Parts(states, waiting, streams, late)

    def state(self) -> Any:
        parts = self._current_parts()
        state = {
            'open': list(self._open), 'turn': self._turn, 'begun': self._begun, 'parents': dict(parts.states),
            'waiting': list(parts.waiting),
        }  # fmt: skip
        if self._stage.made_later:
            state['streams'] = dict(parts.streams)
        if self._mixes:
            state['mixes'] = self._mixes
        if self._hosts > 1:
            state['hosts'] = self._hosts
            if self._uneven or parts.late:
                state['uneven'] = True
        elif self._hosts and not any(number is not None for number in self._open):
            state['hosts'] = 1  # which no stream names
        return state

    async def restore(self, state: Any, rules: RestoreRules = FREE) -> None:
        numbers, begun = list(state['open']), number_of(state, 'begun')
        if len(numbers) != len(self._open):
            raise StateError(f'{self._stage.describe()}: expected {len(self._open)} streams, got {len(numbers)}')
        if not all(number is None or (type(number) is int and 0 <= number < begun) for number in numbers):
            raise StateError(f'{self._stage.describe()}: expected numbers of {begun} streams, got {numbers!r:.200}')
        turn = number_of(state, 'turn', len(numbers))
        states = {int(number): saved for number, saved in state['parents'].items()}
        opened = {number for number in numbers if number is not None}
        if states.keys() | set(state['waiting']) != opened:
            raise StateError(
                f'{self._stage.describe()}: expected states of the streams {sorted(opened)}, got those of '
                f'{sorted(states)}: {EARLIER}'
            )
        self._uneven, self._mixes = flag_of(state, 'uneven'), number_of({'mixes': 0, **state}, 'mixes')
        if self._uneven:
            rules = rules.of(self._stage.describe(), 'interleave, shards of unequal length', False)
        flows = self._flows
        self._rules = rules
        self._parts = None
        self._moved = None
        self._lines = {int(number): part['pipeline'] for number, part in state.get('streams', {}).items()}
        self._saved = {number: states[number] for number in numbers if number in states}
        self._flows = {number: flow for number, flow in flows.items() if number in self._saved}
        self._open = numbers
        self._turn = turn
        self._begun = begun
        for number, flow in self._flows.items():
            await self._restore_stream(number, flow, self._saved[number])
            del self._saved[number]
        # Streams that begin are made in order, before their turn.
        while begun and begun - 1 in numbers and begun - 1 not in states:
            begun -= 1
        if begun != self._ahead.position:
            await self._ahead.seek(begun)
            await self._close([flow for flow in self._started if flow not in self._flows.values()])
        else:
            await self._close([flow for number, flow in flows.items() if number not in self._flows])
        for number in list(self._saved):  # now, so that a state that does not fit is refused at once
            await self._first_turn(number)
        saved = number_of(state, 'hosts') if 'hosts' in state else None
        decides = rules.held or not rules.in_step
        if decides or not any(number is not None for number in numbers):
            await self._learn_hosts((saved or 1) if decides else 1)
        if saved is not None:
            rules.check_hosts(saved, self._hosts or 1)

    async def _learn_hosts(self, saved: int) -> None:
        """Make streams until as many hosts as those of a state share one of them, or there are no more."""
        for number in range(self._count):
            if self._hosts >= saved:
                return
            if (flow := await self._made_now(number)) is not None:
                self._hosts = max(self._hosts, flow.hosts)
                await self._close([flow])

    async def begin(self) -> None:
        await to_loop()
        for number in self._open:
            if number is not None and number not in self._flows and number not in self._saved:
                await self._first_turn(number)

    async def aclose(self) -> None:
        self._closed = True
        try:
            await self._ahead.aclose()
        finally:
            await settle([flow.aclose() for flow in self._started])

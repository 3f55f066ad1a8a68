"""Tracing: the time of each stage of a stream, and a log of what each stage yields."""

import functools
import time
from collections.abc import Iterator
from typing import Any

from granular._support.text import logger
from granular.aio.pipeline.execution.prefetch import END
from granular.aio.pipeline.nodes.blocks import BlockBuffer
from granular.aio.pipeline.nodes.elements import Element, Handled
from granular.aio.pipeline.nodes.indices import Wrapped
from granular.aio.pipeline.nodes.source import Node, Source
from granular.aio.pipeline.position import FREE, RestoreRules
from granular.aio.pipeline.streams.flow import Flow
from granular.aio.pipeline.streams.interleaving import InterleavedSource
from granular.aio.pipeline.streams.read import Read
from granular.aio.pipeline.streams.stream import Stream, Unchanged
from granular.aio.pipeline.summary import ExecutionSummary, StageSummary, Times
from granular.aio.pipeline.transforms import DatasetOptions
from granular.formats.display import outline
from granular.metrics import timing


def traced(stage: Stream, debug: bool) -> Stream:
    """Return the same stream, whose stages are timed, and logged if ``debug``."""
    if isinstance(stage, Traced):
        return stage  # a stage before an iterator of the user's
    read = stage.merged()
    if type(read) is Read and debug:
        return Traced(read.replaced(parents=(_logged(read.source),), workers=None), debug, stage)
    if read is not None:
        return Traced(read, debug, stage)
    if isinstance(stage, InterleavedSource) and not debug:
        return Traced(stage, debug, stage)  # its streams come and go
    return Traced(stage.over_each(functools.partial(traced, debug=debug)), debug, stage)


def trace_of(stage: Stream) -> DatasetOptions | None:
    """Return the options by which a stream is to be traced; None if it is not."""
    if stage.dataset_options.debug or stage.dataset_options.stage_timing:
        return stage.dataset_options
    traces = (trace_of(parent) for parent in stage.parents if isinstance(parent, Stream))
    return next((trace for trace in traces if trace is not None), None)


class Traced(Unchanged):
    """A stage over stages that are timed, which is timed, too; ``untraced`` is the stage as it was."""

    def __init__(self, stage: Stream, debug: bool, untraced: Stream) -> None:
        super().__init__(stage)
        self._debug, self.untraced = debug, untraced

    def flow(self) -> Flow:
        return Tracing(self.parent, self._debug)

    def describe(self) -> str:
        return self.parent.describe()


class Tracing(Flow):
    passes = True

    def __init__(self, stage: Stream, debug: bool) -> None:
        self.stage, self._debug = stage, debug
        flow: Flow = stage.flow()
        self.parents: tuple[Flow, ...] = (flow,)
        self._flow = flow
        self.elements, self.total = 0, 0.0
        self._consumed = 0.0  # seconds between two elements
        self._returned: float | None = None  # when the last element was returned
        self._sources = self.sources() if isinstance(stage, Read) else []
        self._times = Times(self._sources)
        if self._sources:
            timing.on = True  # for the rest of the program: it costs little

    async def next(self) -> Any:
        began = time.perf_counter()
        if self._returned is not None:
            self._consumed += max(0.0, began - self._returned)
        try:
            element = await self._flow.next()
        finally:
            self._returned = time.perf_counter()
            self.total += self._returned - began
        if element is not END:
            self.elements += 1
            if self._debug:
                logger.info('%s: element %d: %s', self.stage.describe(), self.elements - 1, outline(element))
        return element

    def received(self, seconds: float) -> None:
        super().received(seconds)
        self.total += seconds
        if self._returned is not None:
            self._returned += seconds

    def state(self) -> Any:
        return self._flow.state()

    def mark(self) -> Any:
        return self._flow.mark()

    def unmark(self, mark: Any) -> Any:
        return self._flow.unmark(mark)

    async def restore(self, state: Any, rules: RestoreRules = FREE) -> None:
        await self._flow.restore(state, rules)

    def ahead(self) -> Iterator[StageSummary]:
        """Yield a summary of each stage that was merged into this one."""
        return self._times.stages(self._sources)

    def own_summary(self) -> StageSummary:
        before = list(_tracings(self._flow))
        waited = self._flow.stats()['wait_seconds'] if isinstance(self.stage, Read) else sum(t.total for t in before)
        return StageSummary(self.stage.describe(), self.elements, max(0.0, self.total - waited), waited)

    def summary(self) -> ExecutionSummary:
        """Return the summary of a stream of which this is the last stage."""
        stages = [*_all_tracings(self)]
        ahead = [row for stage in stages for row in stage.ahead()]
        consumer = StageSummary('consumer', self.elements, self._consumed, self.total)
        return ExecutionSummary([*self._times.parts(), *ahead], [*(stage.own_summary() for stage in stages), consumer])


def _all_tracings(flow: Flow) -> Iterator[Tracing]:
    """Yield the timed stages of a stream, from the source to the output."""
    for parent in flow.inputs():
        yield from _all_tracings(parent)
    if isinstance(flow, Tracing):
        yield flow


def _tracings(flow: Flow) -> Iterator[Tracing]:
    """Yield the stages that a stage takes its elements from."""
    for parent in flow.inputs():
        if isinstance(parent, Tracing):
            yield parent
        else:
            yield from _tracings(parent)


class _Logged(Element):
    """A stage of a MapDataset whose elements are logged."""

    def record_time(self, count: int, seconds: float) -> None:
        pass  # the time of the log is that of no stage

    def call(self, datapoint: Any, index: int) -> Any:
        logger.info('%s: step %d: %s', self.describe(), index, outline(datapoint))
        return datapoint

    def describe(self) -> str:
        return self.parents[0].describe()


def _logged(source: Source) -> Source:
    """Return the same source, each of whose stages logs its elements."""
    if not isinstance(source, Node) or isinstance(source, Wrapped):
        return _Logged(source)
    copy = source.copy_over(*map(_logged, source.parents))
    return copy if isinstance(source, BlockBuffer | Handled) else _Logged(copy)

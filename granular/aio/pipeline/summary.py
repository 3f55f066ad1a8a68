"""Summaries of pipelines: one table of the time of reads, decoding, functions, waiting and the consumer."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from granular.aio.pipeline.nodes.source import Source, stages_of
from granular.aio.runtime.pools import CORES
from granular.metrics import PARTS, READ, StageMetrics, snapshot

_LITTLE: Final = 0.1  # of the elapsed time: a consumer that waits for less is not limited by what is computed ahead
_FULL: Final = 0.75  # of the cores: threads that compute leave little of them

_NOTHING: Final = StageMetrics()


class StageSummary(NamedTuple):
    """The elements and times of a stage, of reads, of decoding, or of the consumer.

    Attributes:
      stage: its description; ``read s3://bucket`` and ``decode jpg`` for what data sources do, in all pipelines of the
        process; ``consumer`` for the program.
      elements: the number of elements that it yielded, of ranges that were read, or of values that were decoded.
      seconds: seconds that it took, summed over all threads and worker processes, and over reads at a time.
      wait_seconds: seconds that it waited for the stages before it, or for data that is read ahead.
    """

    stage: str
    elements: int
    seconds: float
    wait_seconds: float


class ExecutionSummary(list[StageSummary]):
    """Summaries of all stages from the source to the output, and last that of the consumer; ``print`` shows a table.

    Args:
      ahead: the stages that are computed ahead, in any number of threads.
      later: those that the consumer waits for, as they take turns with it, and the consumer.
    """

    def __init__(self, ahead: Iterable[StageSummary], later: Sequence[StageSummary]) -> None:
        super().__init__([*ahead, *later])
        self._later = len(later)

    @property
    def elapsed(self) -> float:
        """Seconds of the consumer, from its first request on."""
        return self[-1].seconds + self[-1].wait_seconds

    @property
    def bottleneck(self) -> StageSummary:
        """The summary of what limits the rate.

        If the consumer, and the stages that take turns with it, waited for less than a tenth of the time, it is that of
        them with the most seconds. Otherwise it is that of the stages before, without reads if the others kept three
        quarters of the cores busy.
        """
        ahead, later = self[: -self._later], self[-self._later :]
        waited = self.elapsed - sum(stage.seconds for stage in later)
        if waited < _LITTLE * self.elapsed or not ahead:
            return max(later, key=_seconds)
        computing = [stage for stage in ahead if not stage.stage.startswith(READ)]
        is_full = sum(map(_seconds, computing)) >= _FULL * CORES * self.elapsed
        return max(computing if is_full else ahead, key=_seconds)

    def __str__(self) -> str:
        width, elapsed = max(len(stage.stage) for stage in self), max(self.elapsed, 1e-9)
        lines = [f'{"stage":<{width}}  {"elements":>10}  {"seconds":>9}  {"threads":>7}  {"waited":>9}']
        for name, elements, seconds, waited in self:
            threads = seconds / elapsed
            lines.append(f'{name:<{width}}  {elements:>10,}  {seconds:>9.3f}  {threads:>7.2f}  {waited:>9.3f}')
        return '\n'.join([*lines, f'bottleneck: {self.bottleneck.stage}'])


def _seconds(stage: StageSummary) -> float:
    return stage.seconds


def _timed_stages(sources: Iterable[Source]) -> list[Source]:
    """Return the stages of some sources, each once, in the order of the pipeline."""
    return list(dict.fromkeys(stage for source in sources for stage in stages_of(source) if isinstance(stage, Source)))


class Times:
    """The times of the stages of some sources, and of all reads and decoding, from a moment on."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._before = {stage: stage.spent_times() for stage in _timed_stages(sources)}
        self._parts_before = snapshot().stages

    def parts(self) -> Iterator[StageSummary]:
        """Yield summaries of the reads and of decoding."""
        for begin in PARTS:
            for name, now in snapshot().stages.items():
                before = self._parts_before.get(name, _NOTHING)
                if name.startswith(begin) and now.count > before.count:
                    yield StageSummary(name, now.count - before.count, now.seconds - before.seconds, 0.0)

    def stages(self, sources: Iterable[Source]) -> Iterator[StageSummary]:
        """Yield summaries of the timed stages of sources, each once."""
        for stage in _timed_stages(sources):
            (made, seconds), (made_before, seconds_before) = stage.spent_times(), self._before.get(stage, (0, 0.0))
            if made > made_before:
                yield StageSummary(stage.describe(), made - made_before, seconds - seconds_before, 0.0)

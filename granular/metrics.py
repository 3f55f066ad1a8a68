"""Metrics: counters, gauges and latency histograms of this process and of its worker processes.

::

    for name, store in granular.metrics.snapshot().stores.items():
        print(name, store.outcomes, store.first_byte.quantile(0.99))

:mod:`granular.integrations.prometheus` and :mod:`granular.integrations.opentelemetry` export them. Labels are the
buckets and hosts (never keys, queries or users), outcomes, and stages of pipelines; their number is bounded.
"""

import dataclasses
import itertools
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple, ParamSpec, Self, TypeVar

from granular._support.redact import hidden
from granular._support.text import counted

__all__ = [
    'BOUNDS',
    'MAX_LABELS',
    'OTHER',
    'Histogram',
    'Metrics',
    'Sample',
    'StageMetrics',
    'StoreMetrics',
    'io_stats',
    'samples',
    'snapshot',
    'time_stages',
]

P = ParamSpec('P')
T = TypeVar('T')

BOUNDS: Final = tuple(2.0**power for power in range(-14, 7))
"""Upper bounds of the buckets of a histogram, in seconds: powers of two from 61 us to 64 s. The last has no bound."""

OTHER: Final = 'other'
"""Label of the stores and stages that came after the first ``MAX_LABELS``."""
MAX_LABELS: Final = 64

_LONGEST_LABEL: Final = 80


_NUMBERS: Final = (int, float)


class _Export(NamedTuple):
    """How exporters see a field; see ``Sample``.

    Attributes:
      name: by default, that of the field.
      labels: those of the keys of a dict, behind the label of the store or stage that has the field.
      attribute: the attribute that has the values, if not the field.
    """

    description: str
    name: str = ''
    unit: str = ''
    kind: Literal['counter', 'gauge', 'histogram'] = 'counter'
    labels: tuple[str, ...] = ()
    attribute: str = ''


_EXPORT: Final = 'export'


def _exported(description: str, **export: Any) -> dict[str, _Export]:
    """Declare that exporters have a field, of a number, of a histogram or of a dict of these."""
    return {_EXPORT: _Export(description, **export)}


class _Fields:
    """Base of the classes of metrics: their fields are numbers, lists of these, and dicts of these or of metrics."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers send them with each item, and the state of a dataclass with slots pickles slowly.
        return type(self), tuple(getattr(self, name) for name in self.__slots__)

    def copy(self) -> Self:
        """Return a copy that does not change."""
        return type(self)(*[_copy(getattr(self, name)) for name in self.__slots__])

    def add(self, other: Self, gauges: bool = True) -> None:
        """Add other metrics; without gauges, if their process has ended."""
        for name in self.__slots__:
            own, value = getattr(self, name), getattr(other, name)
            if isinstance(value, _Fields):
                own.add(value, gauges)
            elif isinstance(value, dict):
                for label, item in list(value.items()):
                    label = _bounded(label, own)
                    if isinstance(item, int):
                        own[label] = own.get(label, 0) + item
                    else:
                        own.setdefault(label, type(item)()).add(item, gauges)
            elif isinstance(value, list):
                setattr(self, name, [mine + theirs for mine, theirs in zip(own, value, strict=True)])
            elif gauges or name not in _GAUGES:
                setattr(self, name, own + value)

    def clear(self) -> None:
        """Begin at zero. Dicts of metrics keep these, to which other modules refer."""
        fresh = type(self)()
        for name in self.__slots__:
            value = getattr(self, name)
            parts = [part for part in value.values() if isinstance(part, _Fields)] if isinstance(value, dict) else []
            for part in parts:
                part.clear()
            if not parts:
                setattr(self, name, getattr(fresh, name))


def _copy(value: Any) -> Any:
    if isinstance(value, _NUMBERS):
        return value
    if isinstance(value, dict):
        return {label: _copy(item) for label, item in list(value.items())}
    return value.copy()


@dataclasses.dataclass(slots=True, repr=False)
class Histogram(_Fields):
    """Counts of times in fixed buckets, which grow by a factor of two.

    Attributes:
      counts: for each bucket, the number of times that were at most its bound of ``BOUNDS`` and more than the one
        before; the last bucket has those above all bounds.
      sum: the sum of all times in seconds.
    """

    counts: list[int] = dataclasses.field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    sum: float = 0.0

    def __repr__(self) -> str:
        return f'<Histogram: {counted(self.count, "time")}, mean {self.mean:.6f} s>'

    def observe(self, seconds: float) -> None:
        """Count a time."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    @property
    def count(self) -> int:
        """The number of times."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """The mean in seconds; 0 if there is none."""
        return self.sum / max(1, self.count)

    def cumulative(self) -> list[tuple[str, int]]:
        """Return the number of times up to each bound, as text, as exporters need it; the last bound is ``+Inf``."""
        return list(zip([*map(str, BOUNDS), '+Inf'], itertools.accumulate(self.counts), strict=True))

    def quantile(self, share: float) -> float:
        """Return an upper bound of a quantile in seconds: less than twice as much, above 61 us.

        Args:
          share: from 0 to 1, such as 0.99.

        Returns:
          The bound of the bucket that contains it; infinity above all bounds, and 0 if nothing was counted.
        """
        rank, total = share * self.count, 0
        if not rank:
            return 0.0
        for bound, count in zip(BOUNDS, self.counts, strict=False):
            total += count
            if total >= rank:
                return bound
        return float('inf')


@dataclasses.dataclass(slots=True)
class StoreMetrics(_Fields):
    """Metrics of a bucket, a host, or of all local files.

    Attributes:
      ok: attempts that succeeded. An attempt is a request, with its hedged request and redirections.
      failures: attempts that failed, by outcome: ``throttled``, ``server_error``, ``timeout``, ``connection``, ``tls``,
        ``bad_reply``, ``changed``, ``not_found``, ``denied``, ``out_of_range``, ``expired``, ``region``, ``skewed``,
        ``credentials``, ``cancelled``, ``error``.
      retries: attempts that were repeated, by the outcome of the attempt before.
      hedges: hedged requests, sent again because the first was slow.
      bytes: bytes of replies.
      in_flight: requests in flight.
      connections: open connections.
      connects: connections opened.
      first_byte: seconds until a reply began.
    """

    ok: int = 0
    failures: dict[str, int] = dataclasses.field(
        default_factory=dict,
        metadata=_exported(
            'Requests that ended, by outcome.', name='requests', labels=('outcome',), attribute='outcomes'
        ),
    )
    retries: dict[str, int] = dataclasses.field(
        default_factory=dict, metadata=_exported('Attempts repeated, by cause.', labels=('cause',))
    )
    hedges: int = dataclasses.field(default=0, metadata=_exported('Requests sent again because the first was late.'))
    bytes: int = dataclasses.field(default=0, metadata=_exported('Bytes of replies.', name='received', unit='bytes'))
    in_flight: int = dataclasses.field(
        default=0, metadata=_exported('Requests in flight.', name='requests_in_flight', kind='gauge')
    )
    connections: int = dataclasses.field(default=0, metadata=_exported('Open connections.', kind='gauge'))
    connects: int = dataclasses.field(default=0, metadata=_exported('Connections opened.'))
    first_byte: Histogram = dataclasses.field(
        default_factory=Histogram, metadata=_exported('Time until a reply began.', unit='seconds', kind='histogram')
    )

    @property
    def outcomes(self) -> dict[str, int]:
        """Attempts that ended, by outcome: ``ok``, and those of ``failures``."""
        return {'ok': self.ok, **self.failures}

    @property
    def requests(self) -> int:
        """Requests sent: attempts that ended, hedged requests, and those in flight."""
        return self.ok + sum(list(self.failures.values())) + self.hedges + self.in_flight

    def failed(self, outcome: str) -> None:
        """Count an attempt that failed."""
        self.failures[outcome] = self.failures.get(outcome, 0) + 1

    def retried(self, outcome: str) -> None:
        """Count an attempt that is repeated."""
        self.retries[outcome] = self.retries.get(outcome, 0) + 1


@dataclasses.dataclass(slots=True)
class StageMetrics(_Fields):
    """Time spent in a stage of pipelines, while ``time_stages`` is on.

    Attributes:
      count: datapoints, or batches, that were produced; values that were decoded; byte ranges that were read.
      seconds: seconds, summed over threads and processes, and over the reads that are in progress at a time.
    """

    count: int = dataclasses.field(
        default=0, metadata=_exported('Datapoints computed by a timed stage.', name='stage_items')
    )
    seconds: float = dataclasses.field(
        default=0.0, metadata=_exported('Time in a timed stage.', name='stage', unit='seconds')
    )


@dataclasses.dataclass(slots=True)
class Metrics(_Fields):
    """All metrics of a process, or of several.

    Attributes:
      stores: metrics by bucket (``s3://bucket``), host, or ``file``.
      ranges: byte ranges requested, such as records.
      cached: datapoints whose block was already loaded or in flight when they were requested, or that a cache had.
      block_hits: blocks of objects read from the block cache.
      block_misses: blocks fetched for it.
      wait: seconds that consumers waited for an item, by ``loader``, ``stream`` and ``interleave`` (for the next of the
        interleaved streams).
      consumer: seconds that they spent between two items, likewise.
      stages: time in stages of pipelines, by description; of decoding, by type, as ``decode jpg``; and of reads, by
        store, as ``read s3://bucket``.
    """

    stores: dict[str, StoreMetrics] = dataclasses.field(default_factory=dict)
    ranges: int = dataclasses.field(default=0, metadata=_exported('Byte ranges requested.'))
    cached: int = dataclasses.field(default=0, metadata=_exported('Datapoints that a cache or a buffer had.'))
    block_hits: int = dataclasses.field(default=0, metadata=_exported('Blocks read from the block cache.'))
    block_misses: int = dataclasses.field(default=0, metadata=_exported('Blocks fetched for it.'))
    wait: dict[str, Histogram] = dataclasses.field(
        default_factory=dict,
        metadata=_exported(
            'Time that a consumer waited for an item.', unit='seconds', kind='histogram', labels=('iterator',)
        ),
    )
    consumer: dict[str, Histogram] = dataclasses.field(
        default_factory=dict,
        metadata=_exported('Time between two items.', unit='seconds', kind='histogram', labels=('iterator',)),
    )
    stages: dict[str, StageMetrics] = dataclasses.field(default_factory=dict)

    def store(self, root: str) -> StoreMetrics:
        """Return the metrics of a store, by an address without a key."""
        return self.stores.setdefault(_label(root, self.stores), StoreMetrics())

    def stage(self, description: str) -> StageMetrics:
        """Return the metrics of a stage."""
        return self.stages.setdefault(_label(description, self.stages), StageMetrics())

    def times(self, kind: Literal['loader', 'stream', 'interleave']) -> tuple[Histogram, Histogram]:
        """Return the histograms of waiting and of the consumer's times."""
        return self.wait.setdefault(kind, Histogram()), self.consumer.setdefault(kind, Histogram())

    def total(self, name: str) -> int:
        """Return the sum of a counter over all stores."""
        return sum(getattr(store, name) for store in list(self.stores.values()))

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data, for JSON; histograms as ``counts`` and ``sum``."""
        return dataclasses.asdict(self)


_EXPORTS: Final = {
    kind: {field.name: field.metadata[_EXPORT] for field in dataclasses.fields(kind) if _EXPORT in field.metadata}
    for kind in (StoreMetrics, Metrics, StageMetrics)
}
_GAUGES: Final = {name for exports in _EXPORTS.values() for name, export in exports.items() if export.kind == 'gauge'}

READ: Final = 'read '
"""Begin of the names of stages that are reads, each of a store."""
DECODE: Final = 'decode '
"""Begin of the names of stages that decode, each values of a type."""
ASSEMBLE: Final = 'assemble batches'
"""The name of the assembly of batches in Loaders."""
PARTS: Final = (READ, DECODE, ASSEMBLE)
"""Begins of the names of what is timed for all pipelines of a process."""


class Timing:
    """Switch for stage timing, which costs about 0.2 us per datapoint and stage."""

    on: bool = False


def _label(text: str, existing: Mapping[str, object]) -> str:
    return _bounded(hidden(text)[:_LONGEST_LABEL], existing)


def _bounded(label: str, existing: Mapping[str, object]) -> str:
    return label if label in existing or len(existing) < MAX_LABELS else OTHER


counters: Final = Metrics()
"""The metrics of this process, without its worker processes."""
timing: Final = Timing()
local_files: Final = counters.store('file')
"""The metrics of local files: counted after a read."""

_workers: dict['Reports', Metrics] = {}  # the last report of each worker process that lives
_ended: Final = Metrics()  # the sum of the reports of those that have ended
_lock = threading.RLock()  # the handler of a signal may take a snapshot meanwhile


def snapshot() -> Metrics:
    """Return a copy of all metrics since the process started, with those of its worker processes.

    Worker processes of granular (of Loaders and streams) report with their items; those of other frameworks, such as
    PyTorch's DataLoader, have metrics of their own.
    """
    total = counters.copy()
    with _lock:
        for report in (_ended, *_workers.values()):
            total.add(report)
    return total


def time_stages(on: bool = True) -> None:
    """Measure the time that each stage of a pipeline takes, or stop to do so; also in worker processes.

    It costs about 0.2 us per datapoint and stage, so it is off by default.
    """
    timing.on = on


def io_stats() -> dict[str, int]:
    """Return counters of the reads since the process started, over all stores, and also in its worker processes.

    The keys are ``ranges``, ``requests`` (including retries and hedged requests), ``retries``, ``hedges``, ``bytes``,
    ``in_flight``, ``cached``, ``block_hits`` and ``block_misses``; :func:`granular.metrics.snapshot` has more. Reads of
    local files, and of schemes that go through fsspec, count as one request each::

        before = granular.io_stats()['bytes']
        reader.fetch(range(1000))
        print(granular.io_stats()['bytes'] - before, 'bytes received')
    """
    now = snapshot()
    return {
        'ranges': now.ranges,
        'requests': now.total('requests'),
        'retries': sum(sum(store.retries.values()) for store in now.stores.values()),
        **{name: now.total(name) for name in ('hedges', 'bytes', 'in_flight')},
        'cached': now.cached,
        'block_hits': now.block_hits,
        'block_misses': now.block_misses,
    }


def record_time(stage: str, count: int, seconds: float) -> None:
    """Add to the time of a stage in which it produced so many datapoints, batches, values or ranges."""
    times = counters.stage(stage)
    times.count += count
    times.seconds += seconds


def timed(stage: str, call: Callable[P, T]) -> Callable[P, T]:
    """Return a function that adds the time of each of its calls to that of a stage, if stages are timed."""
    if not timing.on:
        return call

    def counted_call(*args: P.args, **options: P.kwargs) -> T:
        began = time.perf_counter()
        try:
            return call(*args, **options)
        finally:
            record_time(stage, 1, time.perf_counter() - began)

    return counted_call


class Sample(NamedTuple):
    """A metric with its labels, for exporters.

    Attributes:
      name: such as ``requests``.
      kind: ``counter``, ``gauge`` or ``histogram``.
      unit: such as ``seconds``; empty for a number of things.
      description: one sentence.
      labels: the names of the labels.
      values: the value, or the histogram, for the values of the labels.
    """

    name: str
    kind: Literal['counter', 'gauge', 'histogram']
    unit: str
    description: str
    labels: tuple[str, ...]
    values: dict[tuple[str, ...], Any]


def samples() -> Iterator[Sample]:
    """Yield every metric of a snapshot. The names and labels are always the same; there may be no values yet."""
    now = snapshot()
    parts: dict[Any, tuple[tuple[str, ...], dict[tuple[str, ...], Any]]] = {
        StoreMetrics: (('store',), {(label,): store for label, store in now.stores.items()}),
        Metrics: ((), {(): now}),
        StageMetrics: (('stage',), {(label,): stage for label, stage in now.stages.items()}),
    }
    for kind, exports in _EXPORTS.items():
        labels, owners = parts[kind]
        for field, export in exports.items():
            values: dict[tuple[str, ...], Any] = {}
            for own, owner in owners.items():
                value = getattr(owner, export.attribute or field)
                values |= {(*own, key): item for key, item in value.items()} if export.labels else {own: value}
            yield Sample(
                export.name or field, export.kind, export.unit, export.description, labels + export.labels, values
            )


class Reports:
    """The reports of a worker process, in the process that started it."""

    def take(self, report: Metrics) -> None:
        """Take the snapshot of the worker, which replaces the one before."""
        with _lock:
            _workers[self] = report

    def end(self) -> None:
        """Keep the counters of a worker that has ended."""
        with _lock:
            if (last := _workers.pop(self, None)) is not None:
                _ended.add(last, gauges=False)


def reset() -> None:
    """Begin at zero, in a forked process. Its stores keep their objects, to which other modules refer."""
    global _lock  # noqa: PLW0603
    _lock = threading.RLock()
    _workers.clear()
    for metrics in (counters, _ended):
        metrics.stages.clear()
        metrics.clear()

"""A running stage of a stream."""

import abc
import contextlib
import json
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from granular._support.text import logger
from granular.aio.pipeline.execution.prefetch import Crew
from granular.aio.pipeline.nodes.source import Source, nullable_keys_of
from granular.aio.pipeline.position import FITS, FREE, Fit, RestoreRules, Turns
from granular.aio.pipeline.transforms import DatasetOptions
from granular.aio.runtime.tasks import settle
from granular.errors import DatapointError, StateError
from granular.formats.checksums import crc32c

T = TypeVar('T')

_WINDOW: Final = 1000  # elements that a filter is judged by
_WARN_EVERY: Final = 60.0  # seconds
_OF_READING: Final = '_granular_of_reading'  # an attribute of errors


def number_of(state: Any, name: str, stop: int = 1 << 63) -> int:
    """Return a number in the state of a stage; raise ``StateError`` if it is not an integer from 0 to ``stop - 1``."""
    number = state.get(name) if isinstance(state, Mapping) else None
    if type(number) is not int or not 0 <= number < stop:
        raise StateError(f'not a state of this pipeline: expected {name!r} from 0 to {stop - 1}, got {state!r:.200}')
    return number


def flag_of(state: Mapping[str, Any], name: str, absent: bool | None = False) -> bool:
    """Return a flag in the state of a stage, or ``absent``; raise ``StateError`` if it is neither True nor False."""
    flag = state.get(name, absent)
    if type(flag) is not bool:
        raise StateError(f'not a state of this pipeline: expected True or False for {name!r}, got {flag!r:.200}')
    return flag


class Counter:
    """Counts what a stage has computed, elements or batches, to name the next one in errors."""

    def __init__(self, stage: str, unit: str = 'element') -> None:
        self._stage = stage
        self._unit = unit
        self._count = 0
        self._resumed = ''

    @property
    def has_none(self) -> bool:
        """True if the stage has computed nothing since it began, which was not at a state."""
        return not self._count and not self._resumed

    def restart(self) -> None:
        """Count from 0 on, after a state was restored."""
        self._count, self._resumed = 0, ' since a state was restored'

    async def count(self, computing: Awaitable[T]) -> T:
        """Return what is computed. An error gets a note that names its number and the stage."""
        try:
            computed = await computing
        except Exception as error:
            error.add_note(f'while computing {self._unit} {self._count}{self._resumed}, in {self._stage}')
            raise
        self._count += 1
        return computed


class FilterCheck:
    """Counts the elements that a filter drops, in windows of 1,000; warns or raises if they are too many."""

    def __init__(self, options: DatasetOptions, stage: str) -> None:
        self._stage = stage
        self._warn, self._raise = options.filter_warn_threshold_ratio, options.filter_raise_threshold_ratio
        self._seen = self._dropped = 0
        self._alone = True  # False once these are not the first elements
        self._warned: float | None = None

    def count(self, dropped: bool) -> None:
        """Count an element; raise ``DatapointError`` if it completes a window in which too many were dropped."""
        self._seen += 1
        self._dropped += dropped
        if self._seen < _WINDOW:
            return
        number = self._dropped
        self.restart()
        message = f'{self._stage} dropped {number} of {_WINDOW} consecutive elements'
        if self._raise is not None and number >= self._raise * _WINDOW:
            raise DatapointError(
                f'{message}: filter_raise_threshold_ratio is {self._raise}. Filter before training, or change it with '
                f'with_options(granular.grain.experimental.DatasetOptions(...))'
            )
        now = time.monotonic()
        due = self._warned is None or now - self._warned >= _WARN_EVERY
        if due and self._warn is not None and number >= self._warn * _WINDOW:
            self._warned = now
            logger.warning('%s: filter_warn_threshold_ratio is %s', message, self._warn)

    def restart(self) -> None:
        """Begin a window, after elements that were not counted, or a state that was restored."""
        self._seen = self._dropped = 0
        self._alone = False

    def end(self) -> None:
        """Warn if all elements were dropped, which were too few for a window."""
        if self._alone and self._seen and self._seen == self._dropped and self._warn is not None:
            logger.warning(
                '%s dropped all %d elements: a function returned None, or a filter False', self._stage, self._seen
            )
        self.restart()


class Flow(abc.ABC):
    """A running stage of a stream."""

    parents: 'tuple[Flow, ...]' = ()  # the previous stages
    kind = ''  # its name in ``FITS``; '' if it advances equally on all hosts, and holds nothing
    fit: Fit  # the entry there, of a class with a kind
    calls_functions = False  # True if the stage calls user functions itself, and not in the tasks of a prefetch
    turns = Turns(0, 1)  # those of the hosts that share what this stage itself divides
    keeps_host = False  # True if states name this host
    passes = False  # True if its elements are those of its parents

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if 'fit' in vars(cls):
            FITS[cls.kind] = cls.fit

    @property
    def adapts(self) -> bool:
        """True if a stage before may continue with other weights than those of its state."""
        return any(parent.adapts for parent in self.parents)

    @property
    def hosts(self) -> int:
        """The number of hosts that share the elements; 0 if it is not known before the stage begins."""
        return max((flow.hosts for flow in self.inputs()), default=1) * self.turns.count

    @property
    def knows_host(self) -> bool:
        """False until streams that are made later tell the number of this host."""
        return all(flow.knows_host for flow in self.inputs())

    @property
    def host(self) -> int:
        """The number of this host among them."""
        shared = max(self.inputs(), key=lambda flow: flow.hosts, default=None)
        return self.turns.index if shared is None else shared.host + shared.hosts * self.turns.index

    @property
    def apart(self) -> bool:
        """True if hosts do not advance equally through it, so that each has states of its own."""
        own = self.kind != '' and not FITS[self.kind].in_step
        return self.hosts > 1 and (own or any(flow.apart for flow in self.inputs()))

    @property
    def in_step(self) -> bool:
        """True unless this host has taken part in a last round of shards of unequal length, which others may lack."""
        return all(parent.in_step for parent in self.parents)

    @property
    def even(self) -> bool:
        """True if all hosts get equally many elements."""
        if self.kind and not FITS[self.kind].in_step:
            return self.hosts == 1
        return all(parent.even for parent in self.parents)

    def keep_host(self) -> None:
        """Let states name this host, because a later stage does not take equally many elements on all hosts."""
        self.keeps_host = True
        for parent in self.parents:
            parent.keep_host()

    def inputs(self) -> 'Sequence[Flow]':
        """Return the stages whose elements this one uses: its parents, or those that an iterator of the user's runs."""
        return self.parents

    def sources(self) -> list[Source]:
        """Return the sources that are read."""
        return [source for flow in self.inputs() for source in flow.sources()]

    def mixes(self) -> list[Any]:
        """Return the weights of the mixes by name that the elements come from, and checksums of those that ended."""
        return [mix for flow in self.inputs() for mix in flow.mixes()]

    async def nullable_keys(self) -> frozenset[str]:
        """Return the keys of which some values may be None, as ``Source.nullable_keys``."""
        return await nullable_keys_of(self.parents) if self.passes else frozenset()

    def row_source(self) -> 'Flow | None':
        """Return the stage that packs the rows of this one, if every host packs all rows; None for other stages."""
        return None

    @abc.abstractmethod
    async def next(self) -> Any:
        """Return the next element, or ``END``."""

    @abc.abstractmethod
    def state(self) -> Any:
        """Return the state from which the next element follows: plain JSON."""

    @abc.abstractmethod
    async def restore(self, state: Any, rules: RestoreRules = FREE) -> None:
        """Continue from a state; raise ``StateError`` if it is not one of this pipeline, or later stages exclude it."""

    def ready(self) -> list[Any]:
        """Return the next elements that need no further work, in reverse: removing the last one takes it.

        The state counts how many are left. An operation of this stage may return another list.
        """
        return []

    def mark(self) -> Any:
        """Return the state in the cheapest form, for this flow only, to restore it if the next element fails."""
        return self.state()

    def unmark(self, mark: Any) -> Any:
        return mark

    def bind(self, token: object, crew: Crew) -> None:
        """Bind the stage to the iterator with this token, which its functions may not use, and to the threads of it.

        Call it before it starts.
        """
        for parent in self.parents:
            parent.bind(token, crew)

    async def begin(self) -> None:
        """Start the read-ahead."""
        for parent in self.parents:
            await parent.begin()

    async def set_prefetch(self, size: int) -> bool:
        """Change the number of elements that are computed ahead. Returns False if the stage computes none."""
        return any([await parent.set_prefetch(size) for parent in self.parents])

    def stats(self) -> dict[str, float]:
        """Return the counters of all reads that the stage begins with."""
        return sum_stats([parent.stats() for parent in self.parents])

    def received(self, seconds: float) -> None:
        """Count the seconds that the last element took to reach its consumer, in another thread, as waiting."""
        for parent in self.parents:
            parent.received(seconds)

    def failures(self) -> list[tuple[int, str]]:
        """Return index and message of the last elements that failed."""
        return [failure for parent in self.parents for failure in parent.failures()]

    async def aclose(self) -> None:
        await settle([parent.aclose() for parent in self.parents])


class Outlasting(Flow):
    """A stage that continues when one of its parents ends: with another one, or with this one from its start."""

    _uneven = False  # True if hosts have returned different numbers of elements of parents that ended
    _mixes = 0  # a checksum of the weights of all mixes by name in these

    @property
    def even(self) -> bool:
        return super().even and not self._uneven

    @property
    def in_step(self) -> bool:
        return super().in_step and not self._uneven

    def mixes(self) -> list[Any]:
        return [self._mixes, *super().mixes()] if self._mixes else super().mixes()

    def _mixes_after(self, ended: Flow) -> int:
        """Return the checksum after a parent, for states: its elements cannot be read again with other weights."""
        mixes = ended.mixes()
        return crc32c(json.dumps([self._mixes, mixes]).encode()) if mixes else self._mixes


STATS = ('read', 'bytes', 'wait_seconds', 'consumer_seconds', 'ready', 'in_flight', 'errors')


def sum_stats(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add up the counters of several reads, which share one consumer."""
    total = {name: sum(part.get(name, 0) for part in parts) for name in STATS}
    total['consumer_seconds'] = max((part.get('consumer_seconds', 0.0) for part in parts), default=0.0)
    return total


@contextlib.contextmanager
def of_reading(doing: str = '') -> Iterator[None]:
    """Mark errors of what is read while a state is restored, with a note if any: they say nothing about the state."""
    try:
        yield
    except Exception as error:
        if doing:
            error.add_note(doing)
        error.__dict__[_OF_READING] = True
        raise


async def restore_checked(flow: Flow, state: Any, rules: RestoreRules) -> None:
    """Continue from a state that may be another flow's, or no state at all, for which it raises ``StateError``."""
    try:
        await flow.restore(state, rules)
    except StateError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if _OF_READING in error.__dict__:
            raise
        raise StateError(f'not a state of this pipeline: {type(error).__name__}: {error}') from error

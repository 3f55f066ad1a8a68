"""A running stage of a stream."""

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from granular.aio.pipeline.position import FITS, FREE, Terms
from granular.aio.runtime.tasks import settle
from granular.aio.runtime.threads import offload
from granular.errors import StateError

_OF_READING: Final = '_granular_of_reading'  # an attribute of errors


def number_of(state: Any, name: str, stop: int = 1 << 63) -> int:
    """Return a number in the state of a stage.

    Raises:
      StateError: if it is not an integer from 0 up to but not including ``stop``.
    """
    number = state.get(name) if isinstance(state, Mapping) else None
    if type(number) is not int or not 0 <= number < stop:
        raise StateError(f'not a state of this pipeline: expected {name!r} from 0 to {stop - 1}, got {state!r:.200}')
    return number


def flag_of(state: Mapping[str, Any], name: str, absent: bool | None = False) -> bool:
    """Return a flag in the state of a stage; if there is none, ``absent``.

    Raises:
      StateError: if it is neither True nor False.
    """
    flag = state.get(name, absent)
    if type(flag) is not bool:
        raise StateError(f'not a state of this pipeline: expected True or False for {name!r}, got {flag!r:.200}')
    return flag


class Counter:
    """Counts the elements that a stage has begun to compute, to name them in errors."""

    def __init__(self, stage: str) -> None:
        self._stage, self._count, self._resumed = stage, 0, ''

    def restart(self) -> None:
        """Count from 0 on, after a state was restored."""
        self._count, self._resumed = 0, ' since a state was restored'

    async def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call a user function for the next element. An error gets a note that names stage and element."""
        self._count += 1
        try:
            return await offload(fn, *args)
        except Exception as error:
            error.add_note(f'while computing element {self._count - 1}{self._resumed}, in {self._stage}')
            raise


class Flow(abc.ABC):
    """A running stage of a stream.

    Attributes:
      parents: the previous stages.
      kind: its name in ``FITS``; '' if it advances equally on all hosts, and holds nothing.
      calls_functions: True if the stage calls user functions itself, and not in the tasks of a prefetch.
      strict: True if ``restore`` refuses the state of a different pipeline.
      adapts: True if a stage before may continue with other weights than those of its state.
      hosts: the number of hosts that share the elements; 0 if it is not known before the stage begins.
      even: True if all of them get equally many.
    """

    parents: 'tuple[Flow, ...]' = ()
    kind = ''
    calls_functions = False
    strict = True

    @property
    def adapts(self) -> bool:
        return any(parent.adapts for parent in self.parents)

    @property
    def hosts(self) -> int:
        return max((parent.hosts for parent in self.parents), default=1)

    @property
    def in_step(self) -> bool:
        """True unless this host has taken part in a last round of shards of unequal length, which others may lack."""
        return all(parent.in_step for parent in self.parents)

    @property
    def even(self) -> bool:
        if self.kind and not FITS[self.kind].in_step:
            return self.hosts == 1
        return all(parent.even for parent in self.parents)

    def keep_host(self) -> None:
        """Let states name this host, because a later stage does not take equally many elements on all hosts."""
        for parent in self.parents:
            parent.keep_host()

    def inputs(self) -> 'Sequence[Flow]':
        """Return the stages whose elements this one uses: its parents, or those that an iterator of the user's runs."""
        return self.parents

    @abc.abstractmethod
    async def next(self) -> Any:
        """Return the next element, or ``END``."""

    @abc.abstractmethod
    def state(self) -> Any:
        """Return the state from which the next element follows: plain JSON."""

    @abc.abstractmethod
    async def restore(self, state: Any, terms: Terms = FREE) -> None:
        """Continue from a state, under the terms of the later stages.

        Raises:
          StateError: if it is not one of this pipeline, or the terms exclude it.
        """

    def ready(self) -> list[Any]:
        """Return the next elements that need no further work, in reverse: removing the last one takes it.

        The state counts how many are left. An operation of this stage may return another list.
        """
        return []

    def mark(self) -> Any:
        """Return the state in the cheapest form, for this flow only, to restore it if the next element fails."""
        return self.state()

    def unmark(self, mark: Any) -> Any:
        """Return the state for a mark."""
        return mark

    def bind(self, token: object) -> None:
        """Bind the stage to the iterator with this token, which its functions may not use. Call it before it starts."""
        for parent in self.parents:
            parent.bind(token)

    def set_strict(self, strict: bool) -> None:
        """Set whether this stage and those before it refuse the state of a different pipeline."""
        self.strict = strict
        for parent in self.parents:
            parent.set_strict(strict)

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
        """Stop the stage."""
        await settle([parent.aclose() for parent in self.parents])


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


async def restore_checked(flow: Flow, state: Any, terms: Terms) -> None:
    """Continue from a state that may be another flow's, or no state at all.

    Raises:
      StateError: if it is not one of this flow.
      Exception: errors of what is read for it, unchanged.
    """
    try:
        await flow.restore(state, terms)
    except StateError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if _OF_READING in error.__dict__:
            raise
        raise StateError(f'not a state of this pipeline: {type(error).__name__}: {error}') from error

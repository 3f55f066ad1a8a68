"""What becomes of datapoints that cannot be made: raised, left out, or replaced; counted, and known by their index."""

import collections
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from granular.aio.pipeline.nodes.source import Failure, summary
from granular.aio.runtime.loops import call_user
from granular.errors import InvalidArgumentError

logger = logging.getLogger('granular')

OnError = Literal['raise', 'skip'] | Callable[[int, Exception], Any]

_KEPT: Final = 1000


class Errors:
    """Decides, and keeps count.

    Args:
      on_error: 'raise', 'skip', or a function of index and error which gives what takes the datapoint's place, or None
        for nothing, or raises.

    Attributes:
      count: datapoints that could not be made.
      recent: the last thousand of them, as (index, what went wrong).
    """

    def __init__(self, on_error: OnError) -> None:
        if on_error not in ('raise', 'skip') and not callable(on_error):
            raise InvalidArgumentError(f"on_error is {on_error!r}: want 'raise', 'skip', or a function")
        self.on_error = on_error
        self.count = 0
        self.recent: collections.deque[tuple[int, str]] = collections.deque(maxlen=_KEPT)

    @property
    def raises(self) -> bool:
        """Whether the first one ends it all."""
        return self.on_error == 'raise'

    def resolve(self, failure: Failure) -> Any:
        """What takes its place; None for nothing."""
        if self.on_error == 'raise':
            raise failure.error
        return call_user(self.on_error, failure.step, failure.error) if callable(self.on_error) else None

    def report(self, failed: Sequence[tuple[int, str]]) -> None:
        """Count what could not be made."""
        for step, said in failed:
            self.count += 1
            self.recent.append((step, said))
            logger.warning('the datapoint at step %d could not be made: %s', step, said)


def outline(failure: Failure) -> tuple[int, str]:
    """A failure, as it is counted and carried over."""
    return failure.step, summary(failure.error)

"""What becomes of datapoints that cannot be made: raised, left out, or replaced; counted, and known by their index."""

import collections
import contextvars
import logging
import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from granular.aio.runtime.loops import call_user
from granular.errors import ClosedError, FunctionError, InvalidArgumentError, WorkerError

logger = logging.getLogger('granular')

OnError = Literal['raise', 'skip'] | Callable[[int, Exception], Any]

_KEPT: Final = 1000


capturing: contextvars.ContextVar[bool] = contextvars.ContextVar('capturing', default=False)
"""Whether a fetch gives a ``Failure`` for a datapoint that cannot be made, rather than raise for all of them."""


class Failure:
    """What stands for a datapoint that could not be made, where the consumer decides what becomes of it.

    Attributes:
      step: of the source that failed.
      error: why.
    """

    __slots__ = ('error', 'step')

    def __init__(self, step: int, error: Exception) -> None:
        self.step, self.error = step, error

    def __reduce__(self) -> tuple[Any, ...]:
        return _carried, (self.step, *portable(self.error))


def of_datapoint(error: Exception) -> bool:
    """Whether ``on_error`` decides about an error: not if it is of the store, or ends the program."""
    if isinstance(error, FunctionError):
        return isinstance(error.__cause__, Exception)
    return not isinstance(error, OSError | ClosedError)


class RemoteError(Exception):
    """Where an error came from, in another process."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def portable(error: BaseException) -> tuple[list[BaseException], str]:
    """An error and what caused it, one after the other, such that they pickle, and its traceback as text."""
    text = ''.join(traceback.format_exception(error))
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    return [_pickling(link) for link in chain], text


def _pickling(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))  # many exceptions pickle, and cannot be made again
    except BaseException:  # whatever the methods of its class raise
        return WorkerError(summary(error))
    return error


def summary(error: BaseException) -> str:
    """The class and message of an error, whatever its class makes of ``str``."""
    try:
        return f'{type(error).__name__}: {error}'
    except Exception:
        return type(error).__name__


def remote(chain: Sequence[BaseException], text: str) -> BaseException:
    """An error that came from another process."""
    for error, cause in zip(chain, (*chain[1:], RemoteError(text)), strict=True):
        error.__cause__ = cause
    return chain[0]


def _carried(step: int, chain: Sequence[Exception], text: str) -> Failure:
    remote(chain, text)
    return Failure(step, chain[0])


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

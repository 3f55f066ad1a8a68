"""Datapoints that fail: raised, skipped or replaced; counted, and identified by their index."""

import collections
import contextvars
import importlib
import itertools
import logging
import pickle
import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, TypeVar

from numpy.typing import ArrayLike

from granular._support.text import counted, logger
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.threads import offload
from granular.aio.runtime.tracebacks import RemoteError, shorten, summary, tells_all
from granular.aio.runtime.user_functions import call_checked, call_user, refuse_deferred
from granular.errors import ClosedError, FunctionError, GranularError, InvalidArgumentError, StoreError, WorkerError

T = TypeVar('T')

OnError = Literal['raise', 'skip'] | Callable[[int, Exception], Any]

RECENT: Final = 1000
_REASONS: Final = 100  # reasons that a summary tells apart
_OTHER: Final = 'other reasons'
_VALUE: Final = re.compile(r"""\bb'[^']*'|\bb"[^"]*"|\d+(?!\d*://)""")  # what differs between errors of one reason


capturing: contextvars.ContextVar[bool] = contextvars.ContextVar('capturing', default=False)
"""True if a fetch returns a ``Failure`` for a datapoint that fails, instead of raising for all of them."""


class Failure:
    """Placeholder for a datapoint that failed, when the consumer handles errors."""

    index: int  # in the stage that failed
    # False in place of a further element of a datapoint, which was to become several: it is raised, but neither counted
    # nor replaced.
    counts: bool
    handled: bool  # True if it failed before the ``on_error`` of its stream, and operations follow that
    message: str  # class and message of the error, taken where it was raised, as its ``str`` may raise anything
    # In place of a batch: the indices of what failed in the stage that was batched. Empty in place of a datapoint.
    batched: tuple[int, ...]

    __slots__ = ('_held', 'batched', 'counts', 'handled', 'index', 'message')

    def __init__(
        self,
        index: int,
        error: BaseException,
        counts: bool = True,
        handled: bool = False,
        message: str = '',
        batched: tuple[int, ...] = (),
    ) -> None:
        self.index = index
        self.counts = counts
        self.handled = handled
        self.batched = batched
        self.message = message or summary(error)
        self._held = [error]

    @property
    def error(self) -> BaseException:
        return self._held[0] if self._held else GranularError(self.message)

    def at(self, index: int, counts: bool) -> 'Failure':
        """Return the failure as that of another stage, at its index there."""
        failure = Failure(index, self.error, counts, message=self.message, batched=self.batched)
        failure._held = self._held
        return failure

    def of_batch(self, batched: Iterable[int]) -> 'Failure':
        """Return the failure as that of a batch, with the indices of all that failed in it."""
        failure = self.at(self.index, self.counts)
        failure.batched = (*self.batched, *batched)
        return failure

    def release(self) -> BaseException:
        """Return the error and keep it no longer, as the frames of its traceback may hold the failure."""
        error = self.error
        self._held.clear()
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        told = self.index, self.counts, self.handled, self.message, self.batched
        return _unpickled, (*told, *portable(self.error))


def of_datapoint(error: Exception) -> bool:
    """Return whether ``on_error`` applies to an error: not if it comes from the store or the machine.

    It does to the failure of one object, while the store answers for others.
    """
    if isinstance(error, StoreError):
        return error.of_object
    return not ends_program(error) and not isinstance(error, OSError | MemoryError | ClosedError)


def of_function(error: BaseException) -> bool:
    """Return whether ``on_error`` applies to an error of a user function, which may read from a store itself."""
    if isinstance(error, StoreError):
        return error.of_object
    return not isinstance(error, MemoryError | ClosedError)


class Handler:
    """Replaces the datapoints that fail in a batch, or leaves them out, while the batch is fetched again.

    Args:
      errors: the policy, which is not to raise.
      failure: the one in place of the batch.

    Attributes:
      known: the indices that failed before, and are read apart from the others.
      failed: index and message of those that failed.
    """

    def __init__(self, errors: 'Errors', failure: Failure) -> None:
        self._errors = errors
        self.known: tuple[int, ...] = failure.batched
        self.failed: list[tuple[int, str]] = []

    async def replaced(self, failure: Failure) -> Any:
        """Return the replacement of a datapoint; None to leave it out."""
        if ends_program(failure.error):
            raise failure.release()
        replacement = await offload(self._errors.resolve, failure)
        if failure.counts:
            self.failed.append((failure.index, failure.message))
        failure.release()
        return replacement

    async def fetch(self, source: Any, index: int) -> Any:
        """Return the element of a source at an index, with the failed datapoints of its batches replaced."""
        await to_loop()
        before = handling.set(self)
        try:
            return (await fetch_capturing(source, [index]))[0]
        finally:
            handling.reset(before)


handling: contextvars.ContextVar[Handler | None] = contextvars.ContextVar('handling', default=None)
"""Function that replaces datapoints that fail in batches; None to return a ``Failure`` in place of a batch."""


async def fetch_capturing(source: Any, indices: ArrayLike) -> list[Any]:
    """Fetch datapoints from a source, with a ``Failure`` in place of each that fails."""
    await to_loop()  # in whose context the variable is set
    before = capturing.set(True)
    try:
        datapoints: list[Any] = await source.fetch(indices)
        return datapoints
    finally:
        capturing.reset(before)


def ends_program(error: BaseException) -> bool:
    """Return whether a function of the user raised an error that is no ``Exception``, to which no policy applies."""
    return not isinstance(error.__cause__ if isinstance(error, FunctionError) else error, Exception)


def without_failures(datapoints: list[T]) -> list[T]:
    """Return datapoints to the user; raise the error of a ``Failure``, which a read under an ``on_error`` returns."""
    for datapoint in datapoints:
        if isinstance(datapoint, Failure):
            raise datapoint.release()
    return datapoints


def portable(error: BaseException) -> tuple[list[bytes], str]:
    """Return an error and its causes, pickled one after the other, and its traceback as text, for ``remote``.

    The text is empty where the message says all. Classes that cannot be imported are pickled by value.
    """
    shorten(error)
    text = '' if tells_all(error) else ''.join(traceback.format_exception(error))
    text = text.removesuffix(''.join(traceback.format_exception_only(error)))  # which the receiver prints, too
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    return [_pickled(link) for link in chain], text


def _pickled(error: BaseException) -> bytes:
    for module in ('pickle', 'cloudpickle'):
        try:
            pickled: bytes = importlib.import_module(module).dumps(error)
            pickle.loads(pickled)  # many exceptions pickle, but do not unpickle
        except BaseException:  # the methods of its class may raise anything
            continue
        return pickled
    return pickle.dumps(WorkerError(summary(error)))


def remote(pickled: Sequence[bytes], text: str) -> BaseException:
    """Restore an error from another process, with its causes."""
    chain = [*map(pickle.loads, pickled), *([RemoteError(text)] if text else [])]
    for error, cause in itertools.pairwise(chain):
        error.__cause__ = cause
    first: BaseException = chain[0]
    return first


def _unpickled(
    index: int,
    counts: bool,
    handled: bool,
    message: str,
    batched: tuple[int, ...],
    pickled: Sequence[bytes],
    text: str,
) -> Failure:
    return Failure(index, remote(pickled, text), counts, handled, message, batched)


class Errors:
    """Applies an ``on_error`` policy and counts failures.

    Args:
      on_error: 'raise', 'skip', or a function of index and error that returns a replacement for the datapoint, or None
        to skip it, or raises.
      unit: what the first of its arguments is: the index of the datapoint in a stage, or the step of a Loader.
    """

    def __init__(self, on_error: OnError, unit: Literal['index', 'step'] = 'index') -> None:
        if on_error not in ('raise', 'skip') and not callable(on_error):
            raise InvalidArgumentError(f"on_error: expected 'raise', 'skip', or a function, got {on_error!r}")
        refuse_deferred(on_error)
        self.on_error, self._unit = on_error, unit
        self.count: int = 0  # of the datapoints that failed
        self.recent: collections.deque[tuple[int, str]] = collections.deque(maxlen=RECENT)  # (index or step, message)
        self._reasons: collections.Counter[str] = collections.Counter()

    def raises_for(self, failure: Failure) -> bool:
        """Return whether a failure is raised: any without a policy, otherwise one that means an end to the program."""
        return self.raises or ends_program(failure.error)

    @property
    def raises(self) -> bool:
        """True if the first failure is raised."""
        return self.on_error == 'raise'

    def resolve(self, failure: Failure) -> Any:
        """Return the replacement of a failed datapoint that is not raised; None to skip it.

        The failure is to be released once nothing can fail any more after which it would be replaced again.
        """
        if failure.counts and callable(self.on_error):  # to errors that are no Exception, no policy applies
            call = 'on_error calls fn(index, error)'
            return call_user(call_checked, call, self.on_error, failure.index, failure.error)
        return None

    def report(self, failed: Sequence[tuple[int, str]]) -> None:
        """Count datapoints that failed, and log the first one of each reason."""
        for number, message in failed:
            self.count += 1
            self.recent.append((number, message))
            reason = _VALUE.sub('…', message)
            known = reason in self._reasons or len(self._reasons) < _REASONS
            level = logging.WARNING if known and reason not in self._reasons else logging.DEBUG
            logger.log(level, 'the datapoint at %s %d failed: %s', self._unit, number, message)
            self._reasons[reason if known else _OTHER] += 1

    def summarise(self) -> None:
        """Log how many datapoints failed since the last summary, one line for each reason that several had."""
        reasons, self._reasons = self._reasons, collections.Counter()
        for reason, count in reasons.most_common():
            if count == 1 and reason != _OTHER:  # it was logged when it failed
                continue
            replaced = '' if self.on_error == 'skip' else ' or replaced'
            logger.warning('on_error skipped%s %s: %s', replaced, counted(count, 'datapoint'), reason)

"""Base of the device batches of all frameworks: batches are converted ahead, and the state does not count those."""

import abc
import collections
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, Self

from granular.aio.execution.prefetch import END
from granular.aio.loader.loader import LoaderHandle
from granular.aio.runtime.lifecycle import copied
from granular.aio.runtime.user_functions import call_user
from granular.errors import ClosedError, InvalidArgumentError
from granular.indexing import check_integer
from granular.sync.iteration import Closing

ANSWERS: Final = {
    'batch_size': 'to_iter_dataset().batch(64)',
    'num_workers': 'to_iter_dataset().batch(64), with mp_prefetch(8) for processes',
}
"""Arguments of other libraries, and what to pass to ``Batches`` instead."""


class _Sent(NamedTuple):
    """A converted batch, or the error of its conversion, and the loader's state after it."""

    batch: Any
    state: Any
    error: Exception | None = None


class Batches(Closing, Iterator[Any]):
    """Converted batches of a loader; the next ones are converted before they are requested.

    The state is the loader's state after the last batch that was returned, however many were converted ahead. Iterated
    again after its end, it iterates the loader again.

    Args:
      batches: a :class:`granular.Loader`, or any iterable of batches; other elements are converted one by one.
      buffer: number of batches to convert ahead, which bounds the memory in addition to the loader's own.
    """

    def __init__(self, batches: Any, buffer: int) -> None:
        self._source, self._batches = batches, iter(batches)
        self._buffer = check_integer('buffer', buffer, 0)
        self._sent: collections.deque[_Sent] = collections.deque()
        self._ended = self._closed = False  # True once the loader has ended, or this is closed
        self._told = False  # True once the consumer was told the end
        self._keeps = all(hasattr(self._batches, name) for name in ('state_dict', 'load_state_dict'))
        self._state: Any = self._batches.state_dict() if self._keeps else None
        self._before: Any = None  # the state before the batch that is being sent, to which an interrupt leads back

    __copy__ = copied

    @abc.abstractmethod
    def _convert(self, batch: Any) -> Any:
        """Convert a batch to the framework's type and start its transfer to the device."""

    def __iter__(self) -> Self:
        if self._told:
            again = iter(self._source)
            if again is self._batches and not isinstance(again, LoaderHandle):
                raise InvalidArgumentError(
                    f'a {type(again).__name__} is an iterator, which cannot begin again: pass what it iterates'
                )
            self._batches = again
            self._state = self._batches.state_dict() if self._keeps else None
            self._ended = self._told = False
        return self

    def __next__(self) -> Any:
        if self._closed:
            raise ClosedError('the batches are closed')
        if self._before is not None:
            self._batches.load_state_dict(self._before)
            self._before = None
        while not self._ended and len(self._sent) <= self._buffer and not (self._sent and self._sent[-1].error):
            self._send()
        if not self._sent:
            self._told = True
            raise StopIteration
        batch, state, error = self._sent[0]
        del self._sent[0]  # without a call, after which an interrupt might come
        self._state = state
        if error is not None:
            raise error
        return batch

    def _send(self) -> None:
        before = self._batches.state_dict() if self._keeps else None
        self._before = before
        batch: Any = END
        sent: tuple[_Sent, ...] = ()
        try:
            batch = next(self._batches, END)
            if batch is not END:
                batch = call_user(self._convert, batch)
        except Exception as error:
            # Return the batches before it first. The loader stays at the batch that failed, and so does the state.
            if batch is not END and self._keeps:
                self._batches.load_state_dict(before)
            sent = (_Sent(None, before, error),)
        else:
            self._ended = batch is END
            state = self._batches.state_dict() if self._keeps else None
            if not self._ended:
                sent = (_Sent(batch, state),)
        self._sent += sent  # without a call, after which an interrupt might come
        self._before = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the next batch.

        Raises:
          InvalidArgumentError: if the iterable has no state.
        """
        self._check('state', self._keeps)
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Resume from a state; batches converted ahead are discarded.

        Args:
          state: from ``state_dict``.
          strict: as for the loader.

        Raises:
          InvalidArgumentError: if the iterable has no state.
          StateError: if it is not a state of this loader.
        """
        self._check('state', self._keeps)
        self._batches.load_state_dict(state, **({} if strict else {'strict': False}))
        self._before = None
        self._sent.clear()
        self._ended = self._told = False
        self._state = self._batches.state_dict()

    get_state, set_state = state_dict, load_state_dict

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the loader or stream, which count also what was converted ahead."""
        self._check('stats', hasattr(self._batches, 'stats'))
        return dict(self._batches.stats())

    @property
    def errors(self) -> list[tuple[int, str]]:
        """The datapoints that the loader or stream skipped, as pairs of index and error."""
        self._check('errors', hasattr(self._batches, 'errors'))
        return list(self._batches.errors)

    def _check(self, name: str, has: bool) -> None:
        if not has:
            raise InvalidArgumentError(
                f'{type(self._batches).__name__} has no {name}: expected a Loader, or an iterator'
            )

    def close(self) -> None:
        """Discard the batches converted ahead and close the loader."""
        self._closed = True
        self._sent.clear()
        if (close := getattr(self._batches, 'close', None)) is not None:
            close()

"""What batches on the devices of any framework have in common: the next ones are on their way, and not in its state."""

import abc
import collections
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

from granular.aio.execution.prefetch import END
from granular.aio.runtime.loops import call_user
from granular.errors import InvalidArgumentError


class _Sent(NamedTuple):
    """A batch on its way, or what making it failed with, and the state behind it."""

    batch: Any
    state: Any
    error: Exception | None = None


class Batches(Iterator[Any], abc.ABC):
    """Batches of a loader, converted, the next ones before they are asked for.

    Its state is that of the loader behind the last batch that was handed out, whatever is on its way.

    Args:
      batches: a :class:`granular.Loader`, or anything to iterate.
      buffer: batches that are converted ahead, which bounds what is held beside the loader's own.
    """

    def __init__(self, batches: Any, buffer: int) -> None:
        if not isinstance(buffer, int) or buffer < 0:
            raise InvalidArgumentError(f'buffer is {buffer!r}: want an integer from 0 on')
        self._batches = iter(batches)
        self._buffer = buffer
        self._sent: collections.deque[_Sent] = collections.deque()
        self._ended = False
        self._keeps = all(hasattr(self._batches, name) for name in ('state_dict', 'load_state_dict'))
        self._state: Any = self._batches.state_dict() if self._keeps else None

    @abc.abstractmethod
    def _convert(self, batch: Any) -> Any:
        """A batch as the framework has it, begun to be moved to its device."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        while not self._ended and len(self._sent) <= self._buffer and not (self._sent and self._sent[-1].error):
            self._send()
        if not self._sent:
            raise StopIteration
        batch, self._state, error = self._sent.popleft()
        if error is not None:
            raise error
        return batch

    def _send(self) -> None:
        before = self._batches.state_dict() if self._keeps else None
        try:
            batch = next(self._batches, END)
            if batch is not END:
                batch = call_user(self._convert, batch)
        except Exception as error:
            # Those before it come first. The loader stays where it was, and so does the state.
            self._sent.append(_Sent(None, before, error))
            return
        self._ended = batch is END
        if not self._ended:
            self._sent.append(_Sent(batch, self._batches.state_dict() if self._keeps else None))

    def state_dict(self) -> dict[str, Any]:
        """From where the next batch follows.

        Raises:
          InvalidArgumentError: if what it iterates has no states.
        """
        self._check()
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; what is on its way is dropped.

        Raises:
          InvalidArgumentError: if what it iterates has no states.
          StateError: if it is none of this loader's.
        """
        self._check()
        self._batches.load_state_dict(state)
        self._sent.clear()
        self._ended, self._state = False, self._batches.state_dict()

    def _check(self) -> None:
        if not self._keeps:
            raise InvalidArgumentError(f'{type(self._batches).__name__} has no state: want a Loader, or an iterator')

    def close(self) -> None:
        """End: what is on its way is dropped, and the loader closed."""
        self._sent.clear()
        self._ended = True
        if (close := getattr(self._batches, 'close', None)) is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

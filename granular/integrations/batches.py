"""Base of the device batches of all frameworks: batches are converted ahead, and the state does not count those."""

import abc
import collections
import contextlib
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Self

from granular.aio.loader.loader import LoaderHandle
from granular.aio.runtime.bridge import call_uninterrupted, may_wait
from granular.aio.runtime.forking import each_after_fork
from granular.aio.runtime.lifecycle import Closing, copied
from granular.aio.runtime.threads import Threads
from granular.aio.runtime.user_functions import call_user, computing
from granular.errors import ClosedError, GranularError, InvalidArgumentError, UnsupportedError
from granular.indexing import check_integer

ANSWERS: Final = {
    'batch_size': 'to_iter_dataset().batch(64)',
    'num_workers': 'to_iter_dataset().batch(64), with mp_prefetch(8) for processes',
}
"""Arguments of other libraries, and what to pass to ``Batches`` instead."""

_CHECK_INTERVAL: Final = 1.0  # seconds between checks for interrupts


class _Conversion:
    """A batch that is being converted.

    It is no future, because an interrupt (Ctrl-C) of a thread that waits for one can leave its lock locked.
    """

    def __init__(self, convert: Callable[[Any], Any], batch: Any) -> None:
        self._convert: Callable[[], Any] | None = functools.partial(convert, batch)
        self.value: Any = None
        self.error: BaseException | None = None
        self._done = False
        self._thread = 0  # that converts it
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # gets an item when it is done

    def start(self, thread: Threads) -> None:
        """Convert it in a thread, whose pool has locks: call it where no interrupt comes."""
        try:
            thread.submit(self.run, BaseException)
        except BaseException as error:
            self._end(None, error)

    def run(self, kept: type[BaseException]) -> None:
        """Convert it on this thread. Errors of the given type are kept, others are raised."""
        self._thread = threading.get_ident()
        value, error = None, None
        try:
            value = self._convert and call_user(self._convert)
        except kept as failure:
            error = failure
        self._end(value, error)
        del self, error  # which would refer to each other by the traceback

    def _end(self, value: Any, error: BaseException | None) -> None:
        self.value, self.error, self._convert, self._done = value, error, None, True
        self._news.put(None)

    def wait(self) -> BaseException | None:
        """Wait for its end, and return its error; do not wait in its own thread, where garbage may be closed."""
        while not self._done and self._thread != threading.get_ident():
            with contextlib.suppress(queue.Empty):
                # Python misses an interrupt that comes right before it waits, so it wakes up now and then.
                self._news.get(timeout=_CHECK_INTERVAL)
        self._news.put(None)  # for another thread that waits
        return self.error


class _Sent(NamedTuple):
    """A batch that is being converted, or the error of that, and the loader's states before and after it."""

    conversion: _Conversion | None
    before: Any
    after: Any
    error: BaseException | None = None


class Batches(Closing, Iterator[Any]):
    """Converted batches of a loader; the next ones are converted in a thread before they are requested.

    A batch is taken from the loader once the one before it is converted, so that a Loader may use the memory of a
    converted batch again. The state is the loader's state after the last batch that was returned, however many were
    converted ahead. Iterated again after its end, it iterates the loader again. Each batch is returned once, to one of
    any number of threads.

    Args:
      batches: a :class:`granular.Loader`, or any iterable of batches; other elements are converted one by one.
      buffer: number of batches to convert ahead, which bounds the memory in addition to the loader's own.
    """

    def __init__(self, batches: Any, buffer: int) -> None:
        try:
            self._source, self._batches = batches, iter(batches)
        except TypeError:
            if hasattr(type(batches), '__iter__'):
                raise
            raise InvalidArgumentError(f'Batches: expected a Loader or a stream, got {batches!r:.100}') from None
        self._buffer = check_integer('buffer', buffer, 0)
        self._thread: Threads | None = None
        self._inherited = False  # True if the thread belongs to the process that this one was forked from
        self._lock = threading.RLock()  # held by one call at a time, except of close
        self._holder = 0  # the thread that holds it in next
        self._sent: collections.deque[_Sent] = collections.deque()
        self._ended = self._closed = False  # True once the loader has ended, or this is closed
        self._told = False  # True once the consumer was told the end
        self._keeps = all(hasattr(self._batches, name) for name in ('state_dict', 'load_state_dict'))
        self._state: Any = self._batches.state_dict() if self._keeps else None
        # While a batch is being sent: the state before it, to which an interrupt leads back; without states, the batch.
        self._before: Any = None
        self._taken: tuple[Any, ...] = ()
        # The batch on its way to its consumer, which an interrupt may keep from it; the state before; 0, or its thread.
        self._left: Any = None
        self._left_before: Any = None
        self._recipient = 0
        _all.add(self)

    __copy__ = copied

    def __getstate__(self) -> dict[str, Any]:
        if self._thread is not None:
            raise UnsupportedError(
                'started batches are neither pickled nor copied: save their state, and restore that in new ones'
            )
        return {**self.__dict__, '_lock': None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())
        _all.add(self)

    def forked(self) -> None:
        self._inherited, self._lock, self._holder = self._thread is not None, threading.RLock(), 0
        if self._inherited:
            self._sent = collections.deque()  # no thread ends them here

    def _prepare(self, batch: Any) -> Any:
        """Return what ``_convert`` gets for a batch, on the consumer's thread."""
        return batch

    @abc.abstractmethod
    def _convert(self, batch: Any) -> Any:
        """Convert a batch to the framework's type and start its transfer to the device."""

    def _hand_over(self, converted: Any) -> Any:
        """Return what the consumer gets, on its thread, for what ``_convert`` returned."""
        return converted

    def __iter__(self) -> Self:
        with self._lock:
            if self._told:
                again = iter(self._source)
                if again is self._batches and not isinstance(again, LoaderHandle):
                    raise InvalidArgumentError(
                        f'a {type(again).__name__} is an iterator, which cannot begin again: pass what it iterates'
                    )
                self._batches = again
                self._state = self._batches.state_dict() if self._keeps else None
                self._ended, self._told, self._before = False, False, None
        return self

    def __next__(self) -> Any:
        this = threading.get_ident()
        if self._holder not in (0, this) and computing.get():
            raise GranularError(
                'batches were used by a function that computes elements, while another thread waits for a batch, maybe '
                'for these elements: use another iterator there'
            )
        with self._lock:
            self._holder = this
            try:
                batch = self._left if self._recipient == this else self._next(self._sent, this)
            finally:
                self._holder = 0
        # Without a call, after which an interrupt might come.
        if self._recipient == this:  # otherwise another thread has taken a batch since
            self._left, self._recipient = None, 0
        return batch

    def _next(self, sent: collections.deque[_Sent], recipient: int) -> Any:
        if self._closed:
            raise ClosedError('the batches are closed')
        if self._inherited:
            raise GranularError('the batches were started in the process that this one was forked from: start others')
        if self._before is not None:
            self._batches.load_state_dict(self._before)
            self._before, self._taken = None, ()
        if not sent and not self._ended:
            self._send(sent)
        if not sent:
            if self._closed:  # meanwhile: what is closed may seem to have ended
                raise ClosedError('the batches are closed')
            self._told = True
            raise StopIteration
        if len(sent) == 1:
            self._failed(sent)
        conversion, before, after, error = sent[0]
        batch = None if conversion is None else self._hand_over(conversion.value)
        # Only then, as it wakes up threads that share the interpreter with this one.
        while not self._ended and len(sent) <= self._buffer and not self._failed(sent):
            self._send(sent)
        del sent[0]  # without a call, after which an interrupt might come
        if error is not None:
            self._state = before
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame, and so would keep everything alive
        self._left, self._left_before, self._state, self._recipient = batch, before, after, recipient
        return batch

    def _send(self, sent: collections.deque[_Sent]) -> None:
        """Take the next batch, and start its conversion; without a buffer, convert it on this thread."""
        before = self._batches.state_dict() if self._keeps else None
        self._before = before
        more: tuple[_Sent, ...] = ()
        try:
            # In a loop, and below without a call, after which an interrupt might come.
            for batch in map(next, () if self._taken else (self._batches,)):
                self._taken = (batch,)
                break
        except Exception as error:
            more = (_Sent(None, before, None, error),)
        else:
            self._ended = not self._taken
            if not self._ended:
                after = self._batches.state_dict() if self._keeps else None
                more = (_Sent(self._start(*self._taken), before, after),)
        sent += more
        del more  # the traceback of its error refers to this frame
        self._before, self._taken = None, ()

    def _start(self, batch: Any) -> _Conversion:
        conversion = _Conversion(self._convert, self._prepare(batch))
        if not self._buffer:
            conversion.run(Exception)
            return conversion
        if self._thread is None:
            self._thread = Threads(1, 'granular_convert')
        call_uninterrupted(functools.partial(conversion.start, self._thread))
        return conversion

    def _failed(self, sent: collections.deque[_Sent]) -> bool:
        """Wait for the last conversion. Returns whether it, or the loader, failed.

        The batches before it are returned first. The loader stays at the batch that failed, and so does the state.
        """
        if (error := _settle(sent)) is None:
            return sent[-1].error is not None
        conversion, before = sent[-1].conversion, sent[-1].before
        self._before = before
        if self._keeps:
            self._batches.load_state_dict(before)
        sent[-1] = _Sent(None, before, None, error)
        if conversion is not None:
            conversion.error = None  # the frames of its traceback refer to it
        self._before, self._ended = None, False
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the next batch.

        Raises:
          InvalidArgumentError: if the iterable has no state.
        """
        self._check('state', self._keeps)
        return dict(self._left_before if self._recipient else self._state)

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
        with self._lock:
            _settle(self._sent)
            before, sent = self.state_dict(), collections.deque[_Sent]()
            # Until it is loaded, an interrupt, which might come after any call, leads back to the state before.
            self._state = self._before = before
            self._sent, self._taken, self._left, self._recipient, self._ended = sent, (), None, 0, False
            self._batches.load_state_dict(state, **({} if strict else {'strict': False}))
            after = self._batches.state_dict()
            self._before, self._state, self._told = None, after, False

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
        if waits := may_wait():
            _settle(self._sent)
        self._sent = collections.deque()  # anew, as another thread may be in next
        self._left, self._recipient = None, 0
        if self._thread is not None and waits and not self._inherited:
            self._thread.retire()
        if (close := getattr(self._batches, 'close', None)) is not None:
            close()


def _settle(sent: collections.deque[_Sent]) -> BaseException | None:
    """Wait for the last conversion, after which none reads the loader's memory. Returns its error."""
    conversion = sent[-1].conversion if sent else None
    return None if conversion is None else conversion.wait()


_all: Final[weakref.WeakSet[Batches]] = each_after_fork(lambda batches: batches.forked())

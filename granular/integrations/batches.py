"""Base of the device batches of all frameworks: batches are converted ahead, and the state does not count those."""

import abc
import collections
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

from granular._support.indexing import check_integer
from granular._support.other_names import OtherNames
from granular.aio.pipeline.execution.hand_over import HandOver, exclusively
from granular.aio.pipeline.execution.prefetch import END
from granular.aio.pipeline.loader.loader import EpochSampler, warn_of_batch_ahead
from granular.aio.runtime.forking import each_after_fork
from granular.aio.runtime.lifecycle import Closing, copied
from granular.aio.runtime.pools import Threads
from granular.aio.runtime.portal import call_on_loop, has_news, may_wait
from granular.aio.runtime.user_functions import call_user, computing
from granular.errors import ClosedError, GranularError, InvalidArgumentError, UnsupportedError
from granular.sync.loops import loop_of

ANSWERS: Final = {
    'batch_size': 'to_iter_dataset().batch(64)',
    'shuffle': 'shuffle(seed=0).to_iter_dataset().batch(64)',
    'num_workers': 'to_iter_dataset().batch(64), with mp_prefetch(8) for processes',
}
"""Arguments of other libraries, and what to pass to ``Batches`` instead."""


_OF_ITERATORS: Final = dict.fromkeys(
    ('get_next_index', 'set_next_index', 'indices'),
    'call it of the Loader or of iter(stream), and pass its state_dict() to load_state_dict of the batches',
)


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
        self.value = value
        self.error = error
        self._convert = None
        self._done = True
        self._news.put(None)

    def wait(self) -> BaseException | None:
        """Wait for its end, and return its error; do not wait in its own thread, where garbage may be closed."""
        while not self._done and self._thread != threading.get_ident():
            has_news(self._news)
        self._news.put(None)  # for another thread that waits
        return self.error


class _Sent(NamedTuple):
    """A batch that is being converted, or the error of that, and the loader's marks before and after it."""

    conversion: _Conversion | None
    before: Any
    after: Any
    error: BaseException | None = None


class Batches(HandOver[Any], OtherNames, Closing):
    """Converted batches of a loader; the next ones are converted in a thread before they are requested.

    A batch is taken from the loader once the one before it is converted, so that a Loader may use the memory of a
    converted batch again. The state is the loader's state after the last batch that was returned, however many were
    converted ahead. Loops, epochs and length are those of a Loader; over a stream, each loop begins again. Each batch
    is returned once, to one of any number of threads.

    Args:
      batches: a :class:`granular.Loader`, or any iterable of batches; other elements are converted one by one.
      buffer: number of batches to convert ahead, which bounds the memory in addition to the loader's own.
    """

    _answers = _OF_ITERATORS

    def __init__(self, batches: Any, buffer: int) -> None:
        super().__init__()
        self._loop = loop_of(batches)
        self._seen = self._loop.changes
        self._buffer = check_integer('buffer', buffer, 0)
        self._thread: Threads | None = None
        self._inherited = False  # True if the thread belongs to the process that this one was forked from
        self._sent: collections.deque[_Sent] = collections.deque()
        self._ended = self._closed = False  # True once the loader has ended, or this is closed
        self._goal: tuple[Any, ...] = ()  # the mark from which the next batch is to be taken, if not from where it is
        self._taken: tuple[Any, ...] = ()  # the batch that was taken and is not sent yet
        _all.add(self)

    __copy__ = copied

    def __getstate__(self) -> dict[str, Any]:
        if self._thread is not None:
            raise UnsupportedError(
                'started batches are neither pickled nor copied: save their state, and restore that in new ones'
            )
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _all.add(self)

    def forked(self) -> None:
        self._inherited = self._thread is not None
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

    def __len__(self) -> int:
        """Return the number of batches of an epoch.

        Raises:
          TypeError: if it is not known, as behind a filter, or if there is no end.
        """
        return self._loop.length()

    def __bool__(self) -> bool:
        return True

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, as ``Loader.epoch``; of a stream, the one that was set."""
        return self._loop.epoch

    @property
    def batch_sampler(self) -> EpochSampler:
        """An object with ``set_epoch``, where Lightning and others look for one, if these batches have a length.

        Without one, Lightning calls it after the first batch.
        """
        try:
            len(self)
        except TypeError as error:
            warn_of_batch_ahead(type(self).__name__)
            raise AttributeError(f'{type(self).__name__} has no batch_sampler, as it has no length: {error}') from None
        return EpochSampler(self)

    def set_epoch(self, epoch: int) -> None:
        """Let the next loop be an epoch, as ``Loader.set_epoch``; of a stream, in which it is shuffled otherwise.

        Args:
          epoch: the number of the epoch, from 0 on.

        Raises:
          InvalidArgumentError: if what is iterated has no epochs.
        """
        epoch = check_integer('epoch', epoch, 0)
        exclusively(self, lambda: self._set_epoch(epoch))

    def _set_epoch(self, epoch: int) -> None:
        _settle(self._sent)
        self._loop.set_epoch(epoch)
        self._discard()

    def _discard(self) -> None:
        """Forget what was converted ahead, as the next batches are others."""
        self._sent = collections.deque()
        self._taken = ()
        self._goal = ()
        self._ended = False
        self._last = None
        self._seen = self._loop.changes

    def __iter__(self) -> Self:
        exclusively(self, self._begin)
        return self

    def _begin(self) -> None:
        if self._loop.begin():
            _settle(self._sent)
            self._discard()

    def _check_caller(self) -> None:
        if self._calls.busy and computing.get():
            raise GranularError(
                'batches were used by a function that computes elements, while another thread waits for a batch, maybe '
                'for these elements: use another iterator there'
            )
        super()._check_caller()

    def _take(self) -> Any:
        self._check()
        if self._inherited:
            raise GranularError('the batches were started in the process that this one was forked from: start others')
        if self._loop.changes != self._seen:  # the Loader was told another place
            _settle(self._sent)
            self._discard()
        sent = self._sent
        if not sent and not self._ended:
            self._send(sent)
        if not sent:
            self._check()  # meanwhile: what is closed may seem to have ended
            self._loop.end()
            return END
        if len(sent) == 1:
            self._failed(sent)
        conversion, _, after, error = first = sent[0]
        batch = None if conversion is None else self._hand_over(conversion.value)
        # Only then, as it wakes up threads that share the interpreter with this one.
        while not self._ended and len(sent) <= self._buffer and not self._failed(sent):
            self._send(sent)
        if error is not None:
            sent.popleft()
            self._loop.fail()
            try:
                raise error
            finally:
                del error, first  # its traceback refers to this frame, and so would keep everything alive
        self._last = first, self._loop.told
        self._moves += 1
        sent.popleft()
        self._loop.give(after)
        return batch

    def _take_back(self) -> None:
        if self._last is None:
            return
        first, told = self._last
        if not self._sent or self._sent[0] is not first:
            self._sent.appendleft(first)
        self._loop.told, self._last = told, None

    def _check(self) -> None:
        if self._closed:
            raise ClosedError('the batches are closed')

    def _send(self, sent: collections.deque[_Sent]) -> None:
        """Take the next batch, and start its conversion; without a buffer, convert it on this thread.

        If that fails or is interrupted, it is taken again or, of what has no marks, kept.
        """
        if self._goal:
            self._loop.go_back(*self._goal)
            self._goal = ()
        before = self._loop.mark()
        more: _Sent | None = None
        try:
            try:
                if not self._taken:
                    for batch in self._loop.taking():  # no call, whose result an interrupt could keep from this
                        self._taken = (batch,)
                        break
            except Exception as error:
                more = _Sent(None, before, None, error)
            else:
                if self._taken:
                    more = _Sent(self._start(*self._taken), before, self._loop.mark())
            if more is None:
                self._ended = True
            else:
                sent.append(more)
        finally:
            if self._ended or (sent and sent[-1] is more):
                self._taken = ()
            elif self._loop.has_states:
                self._taken, self._goal = (), (before,)
            del more  # the traceback of its error refers to this frame

    def _start(self, batch: Any) -> _Conversion:
        conversion = _Conversion(self._convert, self._prepare(batch))
        if not self._buffer:
            conversion.run(Exception)
            return conversion
        if self._thread is None:
            self._thread = Threads(1, 'granular_convert')
        call_on_loop(functools.partial(conversion.start, self._thread))
        return conversion

    def _failed(self, sent: collections.deque[_Sent]) -> bool:
        """Wait for the last conversion. Returns whether it, or the loader, failed.

        The batches before it are returned first. The loader stays at the batch that failed, and so does the state.
        """
        if (error := _settle(sent)) is None:
            return sent[-1].error is not None
        conversion, before = sent[-1].conversion, sent[-1].before
        if self._loop.has_states:
            self._goal = (before,)
        sent[-1] = _Sent(None, before, None, error)
        if conversion is not None:
            conversion.error = None  # the frames of its traceback refer to it
        self._ended = False
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the next batch.

        Raises:
          InvalidArgumentError: if the iterable has no state.
        """
        return self._loop.state(self._loop.place)

    def load_state_dict(self, state: Mapping[str, Any], changes: Sequence[Any] = ()) -> None:
        """Resume from a state; batches converted ahead are discarded.

        Args:
          state: from ``state_dict``.
          changes: as for the loader.

        Raises:
          InvalidArgumentError: if the iterable has no state.
          StateError: if it is not a state of this loader.
        """
        exclusively(self, lambda: self._load(state, changes))

    def _load(self, state: Mapping[str, Any], changes: Sequence[Any]) -> None:
        _settle(self._sent)
        place = self._loop.place
        self._discard()
        if self._loop.has_states:
            self._goal = (place,)  # where an interrupt leads, until it is loaded
        self._loop.load(state, changes)
        self._discard()

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the loader or stream, which count also what was converted ahead."""
        return dict(self._of_iterator('stats')())

    @property
    def errors(self) -> list[tuple[int, str]]:
        """The datapoints that the loader or stream skipped, as pairs of index and error."""
        return list(self._of_iterator('errors'))

    def _of_iterator(self, name: str) -> Any:
        iterator = self._loop.iterator
        if not hasattr(iterator, name):
            raise InvalidArgumentError(f'{type(iterator).__name__} has no {name}: expected a Loader or a stream')
        return getattr(iterator, name)

    def close(self) -> None:
        """Discard the batches converted ahead and close the loader."""
        self._closed = True
        if waits := may_wait():
            _settle(self._sent)
        self._sent = collections.deque()  # anew, as another thread may be in next
        self._last, self._taken = None, ()
        if self._thread is not None and waits and not self._inherited:
            self._thread.retire()
        if (close := getattr(self._loop.iterator, 'close', None)) is not None:
            close()


def _settle(sent: collections.deque[_Sent]) -> BaseException | None:
    """Wait for the last conversion, after which none reads the loader's memory. Returns its error."""
    conversion = sent[-1].conversion if sent else None
    return None if conversion is None else conversion.wait()


_all: Final[weakref.WeakSet[Batches]] = each_after_fork(lambda batches: batches.forked())

"""Loops over what makes batches, driven by something that takes them ahead of its consumer.

A driver takes elements, and says which ones its consumer got. From that follow the state, where the next loop begins,
and the epoch: not from what was taken. Marks lead back to an element that was taken; they are no states of the user.
"""

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from granular.aio.pipeline.epochs import Loops
from granular.aio.pipeline.iter_dataset import IterDataset, stream_of
from granular.aio.pipeline.loader.loader import running_part
from granular.aio.pipeline.nodes.indices import LONGEST
from granular.aio.pipeline.position import check_plain
from granular.aio.pipeline.streams.flow import number_of
from granular.aio.pipeline.streams.stream import Stream
from granular.errors import GranularError, InvalidArgumentError
from granular.sync.loader import Loader


class Loop(abc.ABC):
    """A loop over an object, whose consumer gets elements later than they are taken.

    Attributes:
      has_states: True if it has marks and states; else what was taken cannot be taken again.
      told: where the loops of its consumer stand. Set it to an earlier one to take back what did not reach that.
    """

    has_states: ClassVar[bool] = True
    iterator: Any  # that elements are taken from
    told: Loops

    @property
    def changes(self) -> int:
        """The number of changes from outside, upon which elements that were taken are not those that come next."""
        return self.told.changes

    @property
    def place(self) -> Any:
        """The mark of the element that the consumer gets next."""
        return self.told.step

    def give(self, following: Any) -> None:
        """Note that the consumer got the element before a mark."""
        self.told = self.told.give(following)

    def end(self) -> None:
        """Note that the consumer was told the end."""
        self.told = self.told.end()

    def fail(self) -> None:
        """Note that the consumer was told an error."""
        self.told = self.told.fail()

    @abc.abstractmethod
    def begin(self) -> bool:
        """Begin a loop for the consumer. Returns whether elements that were taken do not belong to it."""

    @abc.abstractmethod
    def taking(self) -> Iterator[Any]:
        """Return the iterator that takes elements."""

    @abc.abstractmethod
    def mark(self) -> Any:
        """Return the mark of the element that is taken next."""

    @abc.abstractmethod
    def go_back(self, mark: Any) -> None:
        """Take elements from a mark on."""

    @abc.abstractmethod
    def length(self) -> int:
        """Return the number of elements of an epoch; raise ``TypeError`` if it is not known."""

    @abc.abstractmethod
    def state(self, mark: Any) -> dict[str, Any]:
        """Return the state of a mark."""

    @abc.abstractmethod
    def load(self, state: Mapping[str, Any], changes: Sequence[Any]) -> None:
        """Continue from a state."""

    @property
    @abc.abstractmethod
    def epoch(self) -> int:
        """The epoch of the element that the consumer gets next."""

    @abc.abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Let the next loop begin an epoch."""


def loop_of(source: Any) -> Loop:
    """Return the loop over a Loader, a stream, another object whose iterators have states, or any iterable."""
    if isinstance(source, Loader):
        return LoopOfLoader(source)
    try:
        iterator = iter(source)
    except TypeError:
        if hasattr(type(source), '__iter__'):
            raise
        raise InvalidArgumentError(f'Batches: expected a Loader or a stream, got {source!r:.100}') from None
    has_states = all(hasattr(iterator, name) for name in ('state_dict', 'load_state_dict'))
    return LoopOfStream(source, iterator) if has_states else LoopOfIterable(source, iterator)


class LoopOfLoader(Loop):
    """A loop over a Loader, which counts what its driver gave to the consumer, and is used by nothing else."""

    def __init__(self, loader: Loader) -> None:
        self.iterator, self._core = loader, running_part(loader)

    @property
    def told(self) -> Loops:
        return self._core.loops

    @told.setter
    def told(self, told: Loops) -> None:
        self._core.loops = told

    def begin(self) -> bool:
        if begins := self.told.given > 0:
            self._core.begin_loop()
        return begins

    def taking(self) -> Iterator[Any]:
        self._core.driven = True
        return self

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self.iterator)

    def mark(self) -> int:
        return self._core.reading

    def go_back(self, mark: int) -> None:
        self._core.flow.read_from(mark)

    def length(self) -> int:
        return len(self.iterator)

    def state(self, mark: int) -> dict[str, Any]:
        return {**self.iterator.state_dict(), 'step': mark}

    def load(self, state: Mapping[str, Any], changes: Sequence[Any]) -> None:
        self.iterator.load_state_dict(state, changes)

    @property
    def epoch(self) -> int:
        return self._core.epoch

    def set_epoch(self, epoch: int) -> None:
        self.iterator.set_epoch(epoch)


class LoopOfStream(Loop):
    """A loop over an object whose iterators have states: each loop begins with a new one, of the same epoch.

    Once epochs are set, the loop after one that ended is the next epoch.
    """

    def __init__(self, source: Any, iterator: Any) -> None:
        self._source, self.iterator = source, iterator
        self._epoch, self._counts_epochs = 0, False
        self._kept: Stream | None = None  # the stream in whose later epochs selections stay, once it was asked for
        self._over = False
        self._resumed = False  # True until an element was taken after a state was loaded
        self.told = Loops(iterator.state_dict())  # the loaded state is its epoch and place

    @property
    def _begins_anew(self) -> bool:
        return self._source is not self.iterator

    def begin(self) -> bool:
        if self._over and not self._begins_anew:
            raise InvalidArgumentError(
                f'a {type(self.iterator).__name__} is an iterator, which cannot begin again: pass what it iterates'
            )
        anew = self._over or (self.told.given > 0 and not self.told.failed and self._begins_anew)
        if anew:
            self._renew()
        self.told, self._over = self.told._replace(given=0, failed=False), False
        return anew

    def _renew(self) -> None:
        """Begin at the first element of the epoch."""
        last, self.iterator = self.iterator, self._new()
        self.told, self._resumed = self.told._replace(step=self.iterator.state_dict()), False
        _close(last)

    def _new(self) -> Any:
        if not self._epoch:
            return iter(self._source)
        if self._kept is None:
            self._kept = stream_of(self._source).keep_selections()
        return iter(IterDataset(self._kept.at_epoch(self._epoch)))

    def taking(self) -> Iterator[Any]:
        return self if self._resumed else self.iterator

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Take an element. A loop that continues from the end of an epoch is the next one, so that none is empty."""
        try:
            element = next(self.iterator)
        except StopIteration:
            if not (self._resumed and self._begins_anew):
                raise
            self._epoch += self._counts_epochs
            self._renew()
            element = next(self.iterator)
        self._resumed = False
        return element

    def mark(self) -> Any:
        return self.iterator.state_dict()

    def go_back(self, mark: Any) -> None:
        self.iterator.load_state_dict(mark)

    def end(self) -> None:
        super().end()
        if self._begins_anew and not self._over:  # the state is that of the next loop
            self._epoch += self._counts_epochs
            first = self._new()
            self.told = self.told._replace(step=first.state_dict())
            _close(first)
        self._over = True

    def length(self) -> int:
        try:
            length = stream_of(self._source).length() if isinstance(self._source, IterDataset) else len(self._source)
        except GranularError as error:
            raise TypeError(f'a stream whose length is not known: {error}') from error
        if length > LONGEST:
            raise TypeError('an endless stream has no length')
        return length

    def state(self, mark: Any) -> dict[str, Any]:
        return {**mark, 'epoch': self._epoch} if self._counts_epochs else dict(mark)

    def load(self, state: Mapping[str, Any], changes: Sequence[Any]) -> None:
        check_plain(state)
        epoch, counts = self._epoch, self._counts_epochs
        if isinstance(state, Mapping) and 'epoch' in state and isinstance(self._source, IterDataset):
            epoch, counts = number_of(state, 'epoch'), True
            state = {name: value for name, value in state.items() if name != 'epoch'}
        self._load(epoch, state, changes)
        self._counts_epochs = counts
        self.told = self.told._replace(loaded=(self._epoch, self.place))
        self._resumed = True

    def _load(self, epoch: int, state: Any, changes: Sequence[Any]) -> None:
        options = {'changes': changes} if changes else {}
        before = self._epoch
        if epoch != before:
            self._epoch = epoch
            try:
                self._renew()
                self.iterator.load_state_dict(state, **options)
            except BaseException:
                self._epoch = before
                self._renew()
                raise
        else:
            self.iterator.load_state_dict(state, **options)
        self.told, self._over = self.told.go(self.iterator.state_dict(), self.told.loaded), False

    @property
    def epoch(self) -> int:
        if self._resumed and self._counts_epochs:  # at the end of an epoch, the next one follows
            mark = self.iterator.state_dict()
            try:
                next(self.iterator)
            except StopIteration:
                self._epoch += 1
                self._renew()
                self.told = self.told._replace(loaded=None, changes=self.changes + 1)
            except Exception:  # the loop raises it again
                self.iterator.load_state_dict(mark)
            else:
                self.iterator.load_state_dict(mark)
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        if not isinstance(self._source, IterDataset):
            raise InvalidArgumentError(
                f'set_epoch: a {type(self._source).__name__} has no epochs: pass a Loader or a stream, or call it of '
                f'what makes its elements'
            )
        self._counts_epochs = True
        if self.told.loaded is not None and self.told.loaded[0] == epoch:
            self._load(epoch, self.told.loaded[1], ())
            self._resumed = False  # a program that counts epochs itself continues even from the end of one
            return
        self._epoch = epoch
        self._renew()
        self.told, self._over = self.told.go(self.place, self.told.loaded), False


def _close(iterator: Any) -> None:
    if (close := getattr(iterator, 'close', None)) is not None:
        close()


class LoopOfIterable(Loop):
    """A loop over any iterable, without states: an iterator goes on, all else begins again."""

    has_states = False

    iterator: Iterator[Any]

    def __init__(self, source: Any, iterator: Iterator[Any]) -> None:
        self._source, self.iterator = source, iterator
        self.told, self._over = Loops(None), False

    def begin(self) -> bool:
        if (not self.told.given or self.told.failed) and not self._over:
            self.told = Loops(None)
            return False
        again = iter(self._source)
        if again is self.iterator:
            if self._over:
                raise InvalidArgumentError(
                    f'a {type(again).__name__} is an iterator, which cannot begin again: pass what it iterates'
                )
            return False
        self.iterator = again
        self.told = Loops(None)
        self._over = False
        return True

    def taking(self) -> Iterator[Any]:
        return self.iterator

    def mark(self) -> None:
        return None

    def go_back(self, mark: None) -> None: ...

    def end(self) -> None:
        self._over = True

    def length(self) -> int:
        return len(self._source)

    def state(self, mark: None) -> dict[str, Any]:
        raise InvalidArgumentError(
            f'{type(self._source).__name__} has no state: expected a Loader, a stream, or another object whose '
            f'iterators have state_dict and load_state_dict'
        )

    def load(self, state: Mapping[str, Any], changes: Sequence[Any]) -> None:
        self.state(None)

    @property
    def epoch(self) -> int:
        return 0

    def set_epoch(self, epoch: int) -> None:
        set_epoch = getattr(self._source, 'set_epoch', None)
        if set_epoch is None:
            raise InvalidArgumentError(
                f'set_epoch: a {type(self._source).__name__} has no epochs: pass a Loader or a stream'
            )
        set_epoch(epoch)

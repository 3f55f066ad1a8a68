"""Loops and epochs: where loops over a finite source begin and end. Pure arithmetic, of which states are made.

Step ``epoch * length + place`` of a source is datapoint ``place`` of an epoch, in the order of that epoch. One loop is
one epoch: it ends with the last whole round of its epoch, and the next one begins at the first step of the next epoch.
"""

from typing import Any, NamedTuple

from granular.aio.pipeline.position import Turns


class Epochs(NamedTuple):
    """The epochs of a source of ``length`` datapoints, at least a round, over which ``turns`` are taken."""

    length: int
    turns: Turns

    def epoch_of(self, step: int) -> int:
        return step // self.length

    def first(self, epoch: int) -> int:
        """Return the first step of an epoch."""
        return epoch * self.length

    def stop(self, step: int) -> int:
        """Return the step at which a loop ends that begins at ``step``."""
        epoch, place = divmod(step, self.length)
        return self.first(epoch) + self.turns.stop(place, self.length)

    def settled(self, step: int) -> int:
        """Return the step of the next round: that of the next epoch if this one has no whole round left."""
        epoch, place = divmod(step, self.length)
        return step if place + self.turns.stride <= self.length else self.first(epoch + 1)

    def rounds(self, step: int) -> int:
        """Return the number of rounds that are left in the epoch of a step."""
        return self.turns.rounds(step % self.length, self.length)


class Loops(NamedTuple):
    """Position of the loops over a source, for one consumer; each event returns the next position.

    A loop that was left in the middle is not continued: the next one begins the next epoch, unless nothing was handed
    out since the last loop, state or ``set_epoch``, or the loop failed, which is tried again. The epochs are None for
    an endless source, whose loops continue each other.

    Attributes:
      step: the step of the next element that the consumer gets, or another mark of it.
      changes: the number of times that it was set from outside of a loop.
      given: the number of elements handed out since the last loop, state or ``set_epoch``.
      failed: True after an error, until the next element.
      loaded: the step of the loaded state, None for none, until a loop took more than one element from there.
    """

    step: Any = 0
    changes: int = 0
    given: int = 0
    failed: bool = False
    loaded: Any = None

    def begin(self, epochs: Epochs | None) -> 'Loops':
        """Begin a loop."""
        step = self.step
        if epochs is not None and self.given and not self.failed and step % epochs.length:
            step = epochs.first(epochs.epoch_of(step) + 1)
        return self.go(step, self.loaded)

    def give(self, following: Any) -> 'Loops':
        """Note that an element was handed out, after which the next one is at the step ``following``."""
        loaded = None if self.given else self.loaded  # one alone may have been a look at a first batch
        return Loops(following, self.changes, self.given + 1, False, loaded)

    def end(self) -> 'Loops':
        """Note that the consumer was told the end of its loop."""
        return self._replace(loaded=None)

    def fail(self) -> 'Loops':
        return self._replace(failed=True)

    def load(self, step: int) -> 'Loops':
        """Continue from the step of a state."""
        return self.go(step, step)

    def set_epoch(self, epoch: int, epochs: Epochs) -> 'Loops':
        """Let the next loop begin an epoch, at its first step or, if the loaded state lies in it, there."""
        loaded = self.loaded
        inside = loaded is not None and epochs.epoch_of(loaded) == epoch
        return self.go(loaded if loaded is not None and inside else epochs.first(epoch), loaded)

    def go(self, step: Any, loaded: Any) -> 'Loops':
        """Continue from another step."""
        return Loops(step, self.changes + 1, 0, False, loaded)

"""Elements that a stage has read and not given out yet, saved by reference."""

from collections.abc import Mapping
from typing import Any

from granular.aio.execution.prefetch import END
from granular.aio.pipeline.position import FITS, FREE, Terms, same_position
from granular.aio.pipeline.streams.flow import Flow, number_of, restore_checked
from granular.errors import StateError


class Held:
    """The elements of its parent that a stage holds back.

    Their state is that of the parent before them, by which they are read again. Behind a mix by name, which may
    continue with other weights, the state also has their number and the state after them: they are read again with the
    weights of the state, and the parent then continues from there with its own.

    Args:
      parent: the stage before.
      stage: the description of the stage that holds them, for errors.
      kind: its name in ``FITS``.
      last: True if ``release`` may keep the last element.

    Attributes:
      before: the state of the parent before the elements.
      adapts: True if states need more than that.
      again: what is to be read again and compared with a state, until it is; otherwise None.
    """

    def __init__(self, parent: Flow, stage: str, kind: str, last: bool = False) -> None:
        self._parent, self._stage, self._kind, self._last = parent, stage, kind, last
        self.adapts: bool = parent.adapts
        self.before: Any = parent.state()
        self._previous: Any = self.before  # before the last element
        self._after: Any = None  # after the last element; None until it is requested
        self._count, self._ended = 0, False  # elements since ``before``, and True if the parent ended after them
        self.again: Mapping[str, Any] | None = None
        self._terms: Terms = FREE  # those under which the parent continues after it
        self._current: Terms = FREE  # those under which it continues now
        if not FITS[kind].in_step:
            parent.keep_host()

    async def next(self) -> Any:
        """Return the next element of the parent, or ``END``; it is held until ``release`` is called."""
        if not self._count:
            self.before = self._parent.state()  # which may name the hosts by now
        if self._last:
            self._previous = self._parent.state()
        self._after = None
        element = await self._parent.next()
        self._ended = element is END
        self._count += not self._ended
        if self.again is not None:
            await self._go_on(self.again)
        return element

    async def _go_on(self, again: Mapping[str, Any]) -> None:
        """Let the parent continue with its own weights once all elements were read again."""
        missing = number_of(again, 'count') - self._count
        if missing > 0 and not self._ended:
            return
        if not missing and again['ended'] and not self._ended:
            return
        if missing or not same_position(self._parent.state(), again['after']):
            raise StateError(
                f'{self._stage}: the elements that it held could not be read again: {self._count} of '
                f'{again["count"]} were found, and then {self._parent.state()!r:.200}, not {again["after"]!r:.200}: '
                f'continue with the weights and the number of hosts that saved the state'
            )
        self.again, self._current = None, self._terms
        await restore_checked(self._parent, again['after'], self._terms)

    async def go_back(self, state: Any) -> None:
        """Let the parent continue from its state after the last element, because the next one failed."""
        await self._parent.restore(state, self._current)

    def release(self, last: bool = False) -> None:
        """Hold no element, or only the last one."""
        if last:
            self.before, self._count = self._previous, 1
        else:
            self.before, self._count = self._parent.state(), 0
        self._ended = False

    def state(self, holds: bool, **own: Any) -> dict[str, Any]:
        """Return the state of the stage.

        Args:
          holds: True if some of what the elements contain was given out already.
          own: what the stage itself counts.
        """
        own['parent'] = self.before
        if holds and self.adapts:
            if self.again is None and self._after is None:
                self._after = self._parent.state()
            own['held'] = self.again or {'count': self._count, 'ended': self._ended, 'after': self._after}
        return own

    async def restore(self, state: Mapping[str, Any], holds: bool, terms: Terms) -> None:
        """Continue before the elements of a state."""
        again = state.get('held') if holds else None
        if again is not None:
            number_of(again, 'count')
            if 'after' not in again or type(again.get('ended')) is not bool:
                raise StateError(f'{self._stage}: expected what it held, got {again!r:.200}')
        self._current = terms.of(self._stage, self._kind, holds)
        await self._parent.restore(state['parent'], self._current)
        # What is held is read again on as many hosts as before; otherwise hosts and weights are those of this pipeline.
        self.before = state['parent'] if holds else self._parent.state()
        self._previous, self._after = self.before, None
        self._count, self._ended, self.again = 0, False, again
        self._terms = terms.of(self._stage, self._kind, False)

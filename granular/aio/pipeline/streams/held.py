"""Elements that a stage has read and not given out yet, saved by reference."""

from collections import deque
from collections.abc import Mapping
from typing import Any

from granular.aio.pipeline.execution.prefetch import END
from granular.aio.pipeline.position import FITS, FREE, RestoreRules, same_position
from granular.aio.pipeline.streams.flow import Flow, number_of, of_reading, restore_checked
from granular.errors import StateError


class Held:
    """The elements of its parent that a stage holds back.

    Their state is that of the parent before them, by which they are read again. Behind a mix by name, which may
    continue with other weights, the state also has their number, the state after them, and where the weights changed
    among them: they are read again with the weights of the state, and the parent then continues with its own.

    ``stage`` describes the stage that holds them, and ``kind`` is its name in ``FITS``.
    """

    def __init__(self, parent: Flow, stage: str, kind: str, last: bool = False) -> None:
        self._parent = parent
        self._stage = stage
        self._kind = kind
        self._last = last  # True if ``release`` may keep the last element
        if not FITS[kind].in_step:
            parent.keep_host()
        self.before: Any = parent.state()  # the state of the parent before the elements
        self.adapts: bool = parent.adapts  # True if states need more than that
        self._previous: Any = self.before  # before the last element
        self._after: Any = None  # after the last element; None until it is requested
        self._begun = False  # True if the parent has begun to read since it was restored
        self._count, self._ended = 0, False  # elements since ``before``, and True if the parent ended after them
        self._changes: list[list[Any]] = []  # after how many, with the end, it went on from which other state
        self._again: deque[Any] = deque()  # those that were read again, and not taken since
        self._rules: RestoreRules = FREE  # those under which the parent continues

    @property
    def holds(self) -> bool:
        return self._count > 0 or self._ended

    def begun(self) -> None:
        """Take the state of the parent again, which has begun to read: it names the hosts, and the bytes of files."""
        if not self.holds:
            self.before = self._parent.state()

    async def next(self) -> Any:
        """Return the next element of the parent, or ``END``; it is held until ``release`` is called."""
        return self._again.popleft() if self._again else await self._read()

    async def _read(self) -> Any:
        if not self._count:
            if self.adapts or not self._begun:
                await self._parent.begin()
                self._begun = True
            self.begun()
        if self._last:
            self._previous = self._parent.state()
        self._after = None
        element = await self._parent.next()
        self._ended = element is END
        self._count += not self._ended
        if not self._count:
            self.before = self._parent.state()  # the same at each request behind the end
        return element

    def place(self) -> tuple[Any, int]:
        """Return the place after the last element: the state of the parent, and the number of elements held."""
        return self._parent.state(), self._count

    async def go_back(self, place: tuple[Any, int]) -> None:
        """Continue from the place after the last element, because the next one failed or was interrupted."""
        await self._parent.restore(place[0], self._rules)
        self._after = None
        self._count = place[1]
        self._ended = False

    def take_again(self) -> tuple[list[Any], bool]:
        """Return all elements that were read again, and True if the parent ended after them."""
        again, self._again = self._again, deque()
        return [element for element in again if element is not END], self._ended

    def forget(self) -> None:
        """Free the elements that were read again: none is taken any more."""
        self._again.clear()

    def check_place(self, place: int, count: int) -> None:
        """Raise ``StateError`` if a state was saved after more than there is again of what was held."""
        if place > count:
            raise StateError(
                f'{self._stage}: the state was saved after {place} parts of what it held, and there are {count} now: '
                f'the data or a function has changed'
            )

    def release(self, last: bool = False) -> None:
        """Hold no element, or only the last one; raise ``StateError`` if elements of a state are left."""
        if self._again:
            raise StateError(f'{self._stage}: the state holds {len(self._again)} elements more than this stage does')
        if last:
            self._changes = [[1, state] for count, state in self._changes if count == self._count]
            self.before, self._count = self._previous, 1
        else:
            self.before = self._parent.state()
            self._count = 0
            self._changes = []
        self._ended = False

    def state(self, holds: bool, **own: Any) -> dict[str, Any]:
        """Return the state of the stage, with what it counts; it holds some if part of the elements was given out."""
        own['parent'] = self.before
        if holds and self.adapts:
            if self._after is None:
                self._after = self._parent.state()
            own['held'] = {'count': self._count, 'ended': self._ended, 'after': self._after}
            if self._changes:
                own['held']['changes'] = list(self._changes)
        return own

    async def restore(self, state: Mapping[str, Any], holds: bool, rules: RestoreRules) -> None:
        """Continue before the elements of a state. Those from a mix by name are read again now."""
        self._rules = rules.of(self._stage, self._kind, holds)
        self._begun = False
        await self._parent.restore(state['parent'], self._rules)
        self._rules = self._rules.later()
        # Held elements are read again on as many hosts as before; otherwise this pipeline decides hosts and weights.
        self.before = state['parent'] if holds else self._parent.state()
        self._previous, self._after = self.before, None
        self._count = 0
        self._ended = False
        self._changes = []
        self._again = deque()
        if holds and state.get('held') is not None:
            await self._read_again(state['held'], rules.of(self._stage, self._kind, False))

    async def _read_again(self, held: Mapping[str, Any], rules: RestoreRules) -> None:
        """Read what a state holds, with its weights, and let the parent go on from there under the given rules."""
        changes, after = held.get('changes', ()), held.get('after')
        again: deque[Any] = deque()
        for count, changed in [*changes, [number_of(held, 'count') + held['ended'], None]]:
            while len(again) < count and not self._ended:
                with of_reading(f'while reading element {len(again)} again, which {self._stage} held'):
                    again.append(await self._read())
            if changed is not None:
                await restore_checked(self._parent, changed, self._rules)
                self._changes.append([count, changed])
        found = self._parent.state()
        same = same_position(found, after, reread=True)
        if self._count != held['count'] or self._ended != held['ended'] or not same:
            raise StateError(
                f'{self._stage}: the elements that it held could not be read again: {self._count} of '
                f'{held["count"]} were found, and then {found!r:.200}, not {after!r:.200}: continue with the weights '
                f'and the number of hosts that saved the state'
            )
        self._again, self._rules = again, rules.later()
        await restore_checked(self._parent, after, rules)
        self._after = self._parent.state()
        if not same_position(self._after, after):
            self._changes.append([len(again), self._after])


class Holding(Flow):
    """A stage that holds elements of its parent back."""

    def __init__(self, parent: Flow, stage: str, last: bool = False) -> None:
        self.parents: tuple[Flow, ...] = (parent,)
        self._stage, self._held = stage, Held(parent, stage, self.kind, last)

    def keep_host(self) -> None:
        super().keep_host()
        self._held.begun()

    async def begin(self) -> None:
        await super().begin()
        self._held.begun()

    async def aclose(self) -> None:
        try:
            await super().aclose()
        finally:
            self._forget()

    def _forget(self) -> None:
        """Free the elements of a stage that is closed, as the iterator may live on; its state remains."""
        self._held.forget()

"""A running stage of a stream."""

import abc
from typing import Any


class Flow(abc.ABC):
    """A running stage of a stream.

    Attributes:
      parents: the previous stages.
      calls_functions: True if the stage calls user functions itself, and not in the tasks of a prefetch.
      strict: True if ``restore`` refuses the state of a different pipeline.
    """

    parents: 'tuple[Flow, ...]' = ()
    calls_functions = False
    strict = True

    @abc.abstractmethod
    async def next(self) -> Any:
        """Return the next element, or ``END``."""

    @abc.abstractmethod
    def state(self) -> Any:
        """Return the state from which the next element follows: plain JSON."""

    @abc.abstractmethod
    async def restore(self, state: Any) -> None:
        """Continue from a state."""

    def ready(self) -> list[Any]:
        """Return the next elements that need no further work, in reverse: removing the last one takes it.

        The state counts how many are left. An operation of this stage may return another list.
        """
        return []

    def mark(self) -> Any:
        """Return the state in the cheapest form, for this flow only, to restore it if the next element fails."""
        return self.state()

    def unmark(self, mark: Any) -> Any:
        """Return the state for a mark."""
        return mark

    def bind(self, token: object) -> None:
        """Bind the stage to the iterator with this token, which its functions may not use. Call it before it starts."""
        for parent in self.parents:
            parent.bind(token)

    def set_strict(self, strict: bool) -> None:
        """Set whether this stage and those before it refuse the state of a different pipeline."""
        self.strict = strict
        for parent in self.parents:
            parent.set_strict(strict)

    async def begin(self) -> None:
        """Start the read-ahead."""
        for parent in self.parents:
            await parent.begin()

    async def aclose(self) -> None:
        """Stop the stage."""
        for parent in self.parents:
            await parent.aclose()

"""A stage of a stream that runs."""

import abc
from typing import Any


class Flow(abc.ABC):
    """A stage that runs."""

    parents: 'tuple[Flow, ...]' = ()

    @abc.abstractmethod
    async def next(self) -> Any:
        """The next element, or ``END``."""

    @abc.abstractmethod
    def state(self) -> Any:
        """From where the next element follows: plain JSON."""

    @abc.abstractmethod
    async def restore(self, state: Any) -> None:
        """Go on from a state."""

    def mark(self) -> Any:
        """As ``state``, but for this flow alone, to return to if the next element fails: of what form is cheapest."""
        return self.state()

    def unmark(self, mark: Any) -> Any:
        """The state that a mark stands for."""
        return mark

    async def begin(self) -> None:
        """Begin to read ahead."""
        for parent in self.parents:
            await parent.begin()

    async def aclose(self) -> None:
        """End."""
        for parent in self.parents:
            await parent.aclose()

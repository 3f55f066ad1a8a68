"""Calls of a user's progress function: one at a time, in the order of the reports, and never on an event loop."""

from collections.abc import Callable

from granular.aio.runtime.lock import Lock
from granular.aio.runtime.threads import offload_whole
from granular.aio.runtime.user_functions import call_user
from granular.errors import InvalidArgumentError


class ProgressReport:
    """Passes amounts to a progress function, in a thread under a loop, as the function may block.

    The caller of ``add`` or ``finish`` awaits the call, also if it is cancelled meanwhile, and gets the error that the
    function raises: the function never runs after its caller has ended. Amounts below ``least`` are added up until
    ``finish``.
    """

    def __init__(self, progress: Callable[[int], object] | None, least: int = 1) -> None:
        if progress is not None and not callable(progress):
            raise InvalidArgumentError(f'progress: expected a function, got {progress!r:.100}')
        self._progress, self._least = progress, least
        self._amount = 0
        self._turns = Lock()

    async def add(self, amount: int) -> None:
        """Report what was done since the last call."""
        self._amount += amount
        if self._amount >= self._least:
            await self.finish()

    async def finish(self) -> None:
        amount, self._amount = self._amount, 0  # reset before it waits, so that no amount is reported twice
        if self._progress is not None and amount:
            async with self._turns.turn():
                await offload_whole(call_user, self._progress, amount)

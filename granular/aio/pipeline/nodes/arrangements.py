"""The orders of a plan in the epochs that are read: each is made once, and the next one ahead."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

from granular._support.indexing import Ints
from granular._support.lru import LRU
from granular.aio.runtime.background import background, cancel_idle
from granular.aio.runtime.forking import each_after_fork
from granular.aio.runtime.immediate import running_loop
from granular.aio.runtime.loop_resources import PerLoop
from granular.aio.runtime.threads import offload, offload_whole
from granular.aio.runtime.user_functions import call_user
from granular.aio.runtime.worker_pickling import pickling_for_worker

_KEPT: Final = 2  # epochs: one that ends while the next begins


class Arrangement(NamedTuple):
    """The order of a plan in one epoch."""

    table: NDArray[Any]  # the position in the epoch of each slot; where documents are concatenated, their ends
    units: NDArray[Any] | None = None  # the row, or group of batches, at each place; None for their own order
    divided: tuple[NDArray[Any], Ints] | None = None  # positions of divided documents, and the ends of their whole rows
    indices: NDArray[Any] | None = None  # those in the source, where the table has none

    def of_source(self, indices: NDArray[Any]) -> 'Arrangement':
        """Return the arrangement with indices of the source in place of positions."""
        divided = None if self.divided is None else (indices[self.divided[0]], self.divided[1])
        return self._replace(table=indices[self.table], divided=divided)


Make = Callable[[int, threading.Event], Arrangement]
"""Makes the arrangement of an epoch, unless the event is set meanwhile: then it may raise any error."""


class Arrangements:
    """The arrangements of at most two epochs. Worker processes map those that their parent has made."""

    def __init__(self, made: Mapping[int, Arrangement] | None = None) -> None:
        self._made: LRU[int, Arrangement] = LRU(_KEPT)
        for epoch, arranged in (made or {}).items():
            self._made.put(epoch, arranged)
        self.lock = threading.Lock()
        self._ahead = PerLoop[dict[int, asyncio.Task[Arrangement]]](dict)  # the last that was begun under a loop
        _all.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ((dict(self._made.items()),) if pickling_for_worker.get() else ())

    async def get(self, epoch: int, make: Make, is_quick: bool) -> Arrangement:
        """Return the arrangement of an epoch; a quick one is made on the event loop."""
        if (arranged := self._made.get(epoch)) is not None:  # without the lock, held while another epoch is made
            return arranged
        if is_quick:
            return call_user(self.compute, epoch, make)
        return await offload(self.compute, epoch, make)

    def compute(self, epoch: int, make: Make, stop: threading.Event | None = None) -> Arrangement:
        """Return the arrangement of an epoch, which takes seconds for millions of elements."""
        with self.lock:
            if (arranged := self._made.get(epoch)) is None:
                arranged = make(epoch, stop or threading.Event())
                self._made.put(epoch, arranged)
            return arranged

    def compute_first(self, make: Make) -> None:
        """Make the arrangement of the first epoch, if there is none of any."""
        if not self._made:
            self.compute(0, make)

    async def begin(self, epoch: int, make: Make) -> None:
        """Begin to make the arrangement of an epoch in a thread, if this runs under a loop."""
        if running_loop() is None or epoch in self._made:
            return
        ahead = await self._ahead.get()
        if epoch not in ahead:
            await self.release()
            stop = threading.Event()
            # The fetch that needs the epoch makes it again after an error, and raises that.
            ahead[epoch] = background(offload_whole(self.compute, epoch, make, stop, stop=stop.set))

    async def release(self) -> None:
        """End what is made ahead under this loop."""
        if ahead := await self._ahead.peek():
            tasks = set(ahead.values())
            ahead.clear()
            await cancel_idle(tasks)


def _renew(arrangements: Arrangements) -> None:
    arrangements.lock = threading.Lock()  # a thread of the parent that forked may have held the one before


_all: Final = each_after_fork(_renew)

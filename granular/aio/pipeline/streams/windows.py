"""Windows of consecutive elements, each shuffled."""

from typing import Any, cast

import numpy as np

from granular._support.indexing import Ints
from granular.aio.pipeline.execution.prefetch import END
from granular.aio.pipeline.lines import Line
from granular.aio.pipeline.nodes.indices import seed_in_epoch
from granular.aio.pipeline.orders import permute
from granular.aio.pipeline.origins import Picked
from granular.aio.pipeline.position import FREE, Fit, RestoreRules
from granular.aio.pipeline.streams.flow import Flow, flag_of, number_of
from granular.aio.pipeline.streams.held import Holding
from granular.aio.pipeline.streams.stream import Staged, Stream
from granular.errors import StateError


class WindowShuffled(Staged):
    def __init__(self, parent: Stream, size: int, seed: int, epoch: int = 0) -> None:
        line = Line(f'window_shuffle({size}, seed={seed}{f", epoch={epoch}" if epoch else ""})')
        super().__init__(parent, line, WindowShuffling, size, seed_in_epoch(seed, epoch))
        self._size, self._seed = size, seed

    def reseeded(self, epoch: int) -> Stream:
        return WindowShuffled(self.parent, self._size, self._seed, epoch)

    def length(self) -> int:
        return self.parent.length()

    def index_of(self, state: Any) -> int:
        first = super().index_of(state['parent'])
        if first not in (state['window'] * self._size, self.length()):
            raise StateError(
                f'{self.describe()}: elements have no index since the stream resumed with window {state["window"]} at '
                f'element {first}: expected element {state["window"] * self._size}'
            )
        return first + cast(int, state['place'])

    def state_at(self, index: int) -> Any:
        window, place = divmod(index, self._size)
        return {'parent': super().state_at(window * self._size), 'window': window, 'place': place}

    def traced_back(self, picked: Picked) -> list[tuple[Any, Picked]]:
        windows, places = np.divmod(picked.indices, self._size)
        inner = np.empty_like(picked.indices)
        for window in np.unique(windows).tolist():
            chosen = windows == window
            first = window * self._size
            count = min(self._size, self.length() - first)
            inner[chosen] = first + _order_of(window, count, self._args[1])[places[chosen]]
        return [(self.parent, picked._replace(indices=inner))]


def _order_of(number: int, count: int, seed: int) -> Ints:
    """Return the places in a window of the elements that it yields."""
    return permute(np.arange(count), count, seed + number)[::-1]


class WindowShuffling(Holding):
    """Windows of consecutive elements, each shuffled, in the order of Google Grain."""

    kind = 'window_shuffle'
    fit = Fit(True, 'a window', remedy='call window_shuffle of the MapDataset, or save between windows')
    passes = True

    def __init__(self, parent: Flow, stage: str, size: int, seed: int) -> None:
        super().__init__(parent, stage)
        self._size, self._seed = size, seed
        self._window: list[Any] = []
        self._number = 0
        self._length = 0
        self._skipped = 0  # elements of the next window that came before a state that was restored
        self._uneven = False  # True once the last window was read, which may be longer on other hosts
        if not parent.even:
            self.keep_host()

    async def next(self) -> Any:
        if not self._window and not await self._fill():
            return END
        element = self._window.pop()
        if not self._window:
            self._number += 1
            self._held.release()
        return element

    async def _fill(self) -> bool:
        window: list[Any] = []
        while len(window) < self._size and (element := await self._held.next()) is not END:
            window.append(element)
        self._held.check_place(self._skipped, len(window))
        self._uneven = self._uneven or (0 < len(window) < self._size and not self.even)
        order = _order_of(self._number, len(window), self._seed)[::-1].tolist()
        self._window, self._length = [window[position] for position in order], len(window)
        del self._window[len(window) - self._skipped :]
        self._skipped = 0
        if not self._window:
            self._held.release()
        return bool(self._window)

    def state(self) -> Any:
        place = self._length - len(self._window) if self._window else self._skipped
        own = {'uneven': True} if self._uneven else {}
        return self._held.state(place > 0, window=self._number, place=place, **own)

    async def restore(self, state: Any, rules: RestoreRules = FREE) -> None:
        number, skipped = number_of(state, 'window'), number_of(state, 'place', self._size)
        uneven = flag_of(state, 'uneven')
        if uneven:
            rules = rules.of(self._stage, 'window_shuffle, shards of unequal length', False)
        await self._held.restore(state, skipped > 0, rules)
        self._window = []
        self._number = number
        self._skipped = skipped
        self._uneven = uneven

    def _forget(self) -> None:
        super()._forget()
        self._window = [None] * len(self._window)

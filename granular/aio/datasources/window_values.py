"""The values of windows: what is read of each key, and where in it the values of a window are."""

import abc
import copy
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import Ints
from granular.aio.datasets.steps import Steps, Values
from granular.errors import DatapointError

_NUMBERS: Final = (np.ndarray, np.generic, int, float)


class WindowValues(abc.ABC):
    """A key of some windows."""

    wanted: Steps
    """The steps that are read."""

    @abc.abstractmethod
    def values(self, i: int, read: Values, name: str) -> Any:
        """Return the values of a window."""

    def pads(self, i: int) -> NDArray[np.bool_] | None:
        """Return which values of a window are beyond its episode; None for a value that all steps share."""
        return None


def values_of(
    key: str, offsets: range | Ints | None, starts: Ints, episodes: Ints, steps: Ints, fps: float | None
) -> WindowValues:
    """Return the values of a key in windows at some steps of episodes.

    ``offsets`` are those from the steps, or None for a value that all steps share; ``starts`` has the number of steps
    before each episode, and that of all.
    """
    if offsets is None:
        once, again = np.unique(episodes, return_inverse=True)
        return _Shared(Steps(key, once, np.diff(starts)[once]), again)
    if isinstance(offsets, range):
        return _Range(key, starts, episodes, steps, offsets, fps)
    return _Picked(key, starts, episodes, steps, offsets, fps)


class _Shared(WindowValues):
    """A value that all steps of an episode share."""

    def __init__(self, wanted: Steps, places: NDArray[Any]) -> None:
        self.wanted = wanted
        self._places = places

    def values(self, i: int, read: Values, name: str) -> Any:
        return copy.deepcopy(read[self._places[i]])  # windows of an episode share no memory


class _Range(WindowValues):
    """Values at consecutive steps: those of windows that overlap are one run."""

    def __init__(self, key: str, starts: Ints, episodes: Ints, steps: Ints, offsets: range, fps: float | None) -> None:
        lasts = starts[episodes + 1] - starts[episodes] - 1
        self._count = len(offsets)
        self._lasts = lasts
        self._from = steps + offsets[0]
        begins = np.clip(self._from, 0, lasts)
        self._sizes = np.clip(self._from + self._count - 1, 0, lasts) + 1 - begins
        codes = starts[episodes] + begins  # of steps of all episodes, one behind the other
        order = np.argsort(codes, kind='stable')
        reached = np.maximum.accumulate((codes + self._sizes)[order])
        is_first = np.append(True, codes[order][1:] >= reached[:-1])
        firsts, ends = codes[order][is_first], reached[np.append(is_first[1:], True)]
        owners = np.searchsorted(starts, firsts, side='right') - 1
        lengths = starts[owners + 1] - starts[owners]
        self.wanted = Steps(key, owners, lengths, firsts - starts[owners], ends - starts[owners], fps)
        before = np.append(0, np.cumsum(ends - firsts))[np.cumsum(is_first) - 1]
        self._places = np.empty_like(order)
        self._places[order] = before + codes[order] - firsts[np.cumsum(is_first) - 1]

    def values(self, i: int, read: Values, name: str) -> Any:
        place, size = int(self._places[i]), int(self._sizes[i])
        values = read[place : place + size]
        if size == self._count:
            return values.copy() if isinstance(values, np.ndarray) else _stacked(values, name)
        left = min(max(0, int(-self._from[i])), self._count - 1)
        repeated = np.clip(np.arange(self._count) - left, 0, size - 1)
        if isinstance(values, np.ndarray):
            return values[repeated]
        return _stacked([values[k] for k in repeated.tolist()], name)

    def pads(self, i: int) -> NDArray[np.bool_]:
        steps = self._from[i] + np.arange(self._count)
        pads: NDArray[np.bool_] = (steps < 0) | (steps > self._lasts[i])
        return pads


class _Picked(WindowValues):
    """Values at some steps."""

    def __init__(self, key: str, starts: Ints, episodes: Ints, steps: Ints, offsets: Ints, fps: float | None) -> None:
        wanted = steps[:, None] + offsets
        inside = np.clip(wanted, 0, (starts[episodes + 1] - starts[episodes] - 1)[:, None])
        self._pads: NDArray[np.bool_] = wanted != inside
        once, places = np.unique(starts[episodes][:, None] + inside, return_inverse=True)
        self._places = places.reshape(wanted.shape)
        owners = np.searchsorted(starts, once, side='right') - 1
        begins = once - starts[owners]
        self.wanted = Steps(key, owners, starts[owners + 1] - starts[owners], begins, begins + 1, fps)

    def values(self, i: int, read: Values, name: str) -> Any:
        places = self._places[i]
        return read[places] if isinstance(read, np.ndarray) else _stacked([read[k] for k in places.tolist()], name)

    def pads(self, i: int) -> NDArray[np.bool_]:
        pads: NDArray[np.bool_] = self._pads[i]
        return pads


def _stacked(values: list[Any], name: str) -> Any:
    """Return numbers and arrays along a new first axis, and other values as they are."""
    if not isinstance(values[0], _NUMBERS):
        return copy.deepcopy(values)  # windows that overlap share no memory
    try:
        return np.stack(values)
    except ValueError:
        shapes = sorted({np.shape(value) for value in values})
        raise DatapointError(
            f'{name}: expected values of one shape, got {shapes!s:.100}: store them with one, or as a type such as '
            f"'tree[]', whose values are not stacked"
        ) from None

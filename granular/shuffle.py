"""Orders: which datapoint comes at a step, as a pure function of seed and step, for whole arrays of steps at once."""

from typing import Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_KEPT: Final = 2  # epochs: of two, one is ending while the other begins


@runtime_checkable
class Order(Protocol):
    """A permutation of ``range(length)`` for every epoch."""

    def lookup(self, places: Ints, length: int, seed: int, epoch: int) -> Ints:
        """The indices that come at these places of an epoch."""
        ...

    def is_ready(self, length: int, seed: int, epoch: int) -> bool:
        """Whether a lookup in that epoch is quick enough for an event loop."""
        ...


class Permutation:
    """numpy's permutation, the order of granular 0.21: 8 bytes per datapoint, for the two epochs looked up last."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int, int], Ints] = {}

    def __reduce__(self) -> tuple[type['Permutation'], tuple[()]]:
        return type(self), ()

    def lookup(self, places: Ints, length: int, seed: int, epoch: int) -> Ints:
        """The indices that come at these places of an epoch."""
        key = length, seed, epoch
        permutation = self._kept.get(key)
        if permutation is None:
            permutation = np.random.default_rng(seed=[seed, epoch]).permutation(np.arange(length))
            while len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)), None)
            self._kept[key] = permutation
        return permutation[places]

    def is_ready(self, length: int, seed: int, epoch: int) -> bool:
        """Whether a lookup in that epoch is quick; the first one takes half a second for ten million datapoints."""
        return (length, seed, epoch) in self._kept


class Sequential:
    """The order in which the datapoints are stored."""

    def lookup(self, places: Ints, length: int, seed: int, epoch: int) -> Ints:
        """The places themselves."""
        return places

    def is_ready(self, length: int, seed: int, epoch: int) -> bool:
        """Always."""
        return True

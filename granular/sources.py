"""Sources, with a ``fetch`` that blocks: the synchronous face of :mod:`granular.aio.sources`.

Each takes a reader, another source, a callable, or anything that can be indexed, and gives at a step what granular
0.21 gives: ``source(step)``, ``source[step]``, ``source.fetch(steps)``.
"""

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import ArrayLike

from granular.aio import sources as core
from granular.aio.runtime.bridge import run
from granular.shuffle import Order
from granular.sync.base import Batched


class Source(Batched):
    """A lazy sequence of datapoints.

    Attributes:
      aio: the asynchronous twin, which does the work.
    """

    aio: core.Source

    def __len__(self) -> int:
        return len(self.aio)

    @property
    def endless(self) -> bool:
        """Whether every step is answered, however large; otherwise those below ``len`` are."""
        return self.aio.endless

    @property
    def seed(self) -> int:
        """What makes its order, for the state of a loader; 0 where nothing is random."""
        return self.aio.seed

    def get(self, index: int) -> Any:
        """The datapoint at a step."""
        return run(self.aio.get(index))

    def __call__(self, step: int) -> Any:
        return run(self.aio.get(step))

    def __getitem__(self, step: int) -> Any:
        return run(self.aio.get(step))

    def fetch(self, indices: ArrayLike) -> list[Any]:
        """The datapoints at many steps, in the order asked, in one fan-out."""
        return run(self.aio.fetch(indices))


class Epochs(Source):
    """All datapoints, again and again, in a new order every epoch.

    Args:
      source: what to draw from.
      length: how many of its datapoints make an epoch; all of them by default.
      shuffle: True for numpy's permutation, the order of granular 0.21; False for none; or an order of
        :mod:`granular.shuffle`.
      seed: the epochs' orders are functions of (seed, epoch).
    """

    def __init__(self, source: Any, length: int | None = None, shuffle: bool | Order = True, seed: int = 0) -> None:
        self.aio = core.Epochs(source, length, shuffle, seed)


class Transform(Source):
    """A function of each datapoint: ``fn(datapoint, seed=[seed, step])``, called in threads."""

    def __init__(self, source: Any, fn: Callable[..., Any], seed: int = 0) -> None:
        self.aio = core.Transform(source, fn, seed)


class Sample(Source):
    """Datapoints drawn at random with replacement, each a function of (seed, step)."""

    def __init__(self, source: Any, length: int | None = None, seed: int = 0) -> None:
        self.aio = core.Sample(source, length, seed)


class Truncate(Source):
    """The first ``limit`` datapoints, again and again."""

    def __init__(self, source: Any, limit: int, length: int | None = None) -> None:
        self.aio = core.Truncate(source, limit, length)


class Interleave(Source):
    """A datapoint of each source in turn. Its length is what the shortest source allows."""

    def __init__(self, sources: Sequence[Any]) -> None:
        self.aio = core.Interleave(sources)


class Mix(Source):
    """Each step from a source drawn with these weights, at the same step of it. Its length is the shortest source's.

    Args:
      sources: what to draw from.
      weights: how often each is drawn, of any sum.
      seed: the draws are functions of (seed, step).
    """

    def __init__(self, sources: Sequence[Any], weights: Sequence[float], seed: int = 0) -> None:
        self.aio = core.Mix(sources, weights, seed)

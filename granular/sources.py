"""Sources with a blocking ``fetch``: the sync API of :mod:`granular.aio.sources`.

Each takes a reader, another source, a callable, or any indexable object, and returns the same datapoint at a step as
granular 0.21: ``source(step)``, ``source[step]``, ``source.fetch(steps)``.
"""

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import ArrayLike

from granular.aio import sources as core
from granular.aio.runtime.bridge import run
from granular.shuffle import Order
from granular.sync.base import Batched, blocking


class Source(Batched):
    """A lazy sequence of datapoints.

    Attributes:
      aio: the source of the async API that does the work.
    """

    aio: core.Source

    def __len__(self) -> int:
        return len(self.aio)

    @property
    def endless(self) -> bool:
        """True if the source has a datapoint at every step, however large; otherwise only at steps < ``len``."""
        return self.aio.endless

    @property
    def seed(self) -> int:
        """The seed of its order, for the state of a loader; 0 if nothing is random."""
        return self.aio.seed

    get = blocking(core.Source.get)

    def __call__(self, step: int) -> Any:
        return run(self.aio.get(step))

    def __getitem__(self, step: int) -> Any:
        return run(self.aio.get(step))

    def fetch(self, indices: ArrayLike) -> list[Any]:
        """Return the datapoints at many steps, in the order requested, read concurrently."""
        return run(self.aio.fetch(indices))


class Epochs(Source):
    """All datapoints, repeated in a new order every epoch.

    ::

        source = granular.sources.Epochs(reader, shuffle=True, seed=0)
        datapoint = source(1500)  # the epoch has 1000 datapoints: one of the second epoch

    Args:
      source: the source of the datapoints.
      length: number of its datapoints in an epoch; all of them by default.
      shuffle: True for numpy's permutation, the order of granular 0.21; False for none; or an order of
        :mod:`granular.shuffle`.
      seed: the order of an epoch is a function of (seed, epoch).
    """

    def __init__(self, source: Any, length: int | None = None, shuffle: bool | Order = True, seed: int = 0) -> None:
        self.aio = core.Epochs(source, length, shuffle, seed)


class Transform(Source):
    """A function applied to each datapoint: ``fn(datapoint, seed=[seed, step])``, called in threads.

    ::

        def flip(datapoint, seed):
            rng = np.random.default_rng(seed)
            return {'image': datapoint['image'][:, :: rng.choice([1, -1])]}

        source = granular.sources.Transform(granular.sources.Epochs(reader), flip)
    """

    def __init__(self, source: Any, fn: Callable[..., Any], seed: int = 0) -> None:
        self.aio = core.Transform(source, fn, seed)


class Sample(Source):
    """Datapoints drawn at random with replacement, each a function of (seed, step).

    ::

        source = granular.sources.Sample(reader, seed=0)
    """

    def __init__(self, source: Any, length: int | None = None, seed: int = 0) -> None:
        self.aio = core.Sample(source, length, seed)


class Truncate(Source):
    """The first ``limit`` datapoints, repeated.

    ::

        overfit = granular.sources.Truncate(reader, limit=64)
    """

    def __init__(self, source: Any, limit: int, length: int | None = None) -> None:
        self.aio = core.Truncate(source, limit, length)


class Interleave(Source):
    """Datapoints from each source in turn. The length is limited by the shortest source.

    ::

        source = granular.sources.Interleave([web, books])  # web[0], books[0], web[1], ...
    """

    def __init__(self, sources: Sequence[Any]) -> None:
        self.aio = core.Interleave(sources)


class Mix(Source):
    """Datapoints from sources drawn by weight, each at the same step of its source. As long as the shortest source.

    ::

        source = granular.sources.Mix([web, books], weights=[0.9, 0.1], seed=0)

    Args:
      sources: the sources to draw from.
      weights: relative frequency of each source; they need not sum to 1.
      seed: the draw at a step is a function of (seed, step).
    """

    def __init__(self, sources: Sequence[Any], weights: Sequence[float], seed: int = 0) -> None:
        self.aio = core.Mix(sources, weights, seed)

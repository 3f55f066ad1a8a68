"""Sources with a blocking ``fetch``: the sync API of :mod:`granular.aio.sources`.

Each takes a reader, another source, a callable, or any indexable object, and returns the same datapoint at a step as
granular 0.21: ``source(step)``, ``source[step]``, ``source.fetch(steps)``.
"""

from typing import Any

from numpy.typing import ArrayLike

from granular.aio import sources as core
from granular.aio.pipeline.execution.failures import without_failures
from granular.aio.runtime.portal import run
from granular.sync.base import Batched, Blocking, blocking, constructing


class Source(Blocking, Batched):
    """A lazy sequence of datapoints.

    Attributes:
      aio: the source of the async API that does the work.
    """

    aio: core.Source

    @property
    def endless(self) -> bool:
        """True if the source has a datapoint at every step, however large; otherwise only at steps < ``len``."""
        return self.aio.endless

    @property
    def seed(self) -> int:
        """The seed of its order, for the state of a loader; 0 if nothing is random."""
        return self.aio.seed

    get = blocking(core.Source.get, immediate=True)

    def __call__(self, step: int) -> Any:
        return run(self.aio.get(step), immediate=True)

    __getitem__ = __call__

    def fetch(self, indices: ArrayLike) -> list[Any]:
        """Return the datapoints at many steps, in the order requested, read concurrently."""
        return without_failures(run(self.aio.fetch(indices), immediate=True))


class Epochs(Source):
    @constructing(core.Epochs)
    def __init__(self) -> None: ...


class Transform(Source):
    @constructing(core.Transform)
    def __init__(self) -> None: ...


class Sample(Source):
    @constructing(core.Sample)
    def __init__(self) -> None: ...


class Truncate(Source):
    @constructing(core.Truncate)
    def __init__(self) -> None: ...


class Interleave(Source):
    @constructing(core.Interleave)
    def __init__(self) -> None: ...


class Mix(Source):
    @constructing(core.Mix)
    def __init__(self) -> None: ...

"""The sources of granular 0.21: the datapoint at a step depends only on the step and the seed.

They are nodes of the same pipelines as those of :class:`granular.aio.MapDataset`, with different names.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from granular._support.indexing import Ints, check_integer
from granular.aio.pipeline.lines import Line
from granular.aio.pipeline.nodes import combinations
from granular.aio.pipeline.nodes.adapters import convert
from granular.aio.pipeline.nodes.combinations import SourceChoice
from granular.aio.pipeline.nodes.elements import Element
from granular.aio.pipeline.nodes.indices import Shuffle, Wrapped
from granular.aio.pipeline.nodes.source import Node, Source, length_of, steps_of
from granular.aio.pipeline.orders import Order, Permutation, Sequential
from granular.aio.runtime.threads import offload
from granular.aio.runtime.user_functions import call_checked, name_of, refuse_deferred
from granular.errors import InvalidArgumentError

__all__ = ['Epochs', 'Interleave', 'Mix', 'Sample', 'Source', 'Transform', 'Truncate', 'convert']


class Epochs(Shuffle):
    """All datapoints, repeated without end, in a new order every epoch.

    ::

        source = sources.Epochs(reader, seed=0)

    Args:
      length: number of datapoints per epoch; all of them by default.
      shuffle: True for numpy's permutation, the order of granular 0.21; False for the stored order; or an order of
        :mod:`granular.shuffle`.
      seed: the order of an epoch depends only on (seed, epoch).
    """

    def __init__(self, source: Any, length: int | None = None, shuffle: bool | Order = True, seed: int = 0) -> None:
        epoch = Wrapped(source, None if length is None else check_integer('length', length, 1))
        if len(epoch) < 1:
            raise InvalidArgumentError(f'expected one datapoint or more per epoch, got length {len(epoch)}')
        order = shuffle if not isinstance(shuffle, bool) else Permutation() if shuffle else Sequential()
        super().__init__(epoch, order, check_integer('seed', seed, 0))
        self.endless = True
        self._given = '' if length is None else f', length={length}'

    def _steps(self, indices: ArrayLike) -> Ints:
        return steps_of(indices)

    def describe(self) -> str:
        return f'Epochs(seed={self.seed}, {self.order!r}{self._given})'


class Transform(Element):
    """A function of each datapoint: ``fn(datapoint, seed=[seed, step])``, called in threads.

    ::

        def flip(datapoint, seed):
            rng = np.random.default_rng(seed)
            return {'image': datapoint['image'][:, :: rng.choice([1, -1])]}

        source = sources.Transform(sources.Epochs(reader), flip)

    The ``seed`` is the first of the two that the function receives.
    """

    def __init__(self, source: Any, fn: Callable[..., Any], seed: int = 0) -> None:
        if not callable(fn):
            raise InvalidArgumentError(f'{fn!r:.100} is not a function')
        refuse_deferred(fn)
        super().__init__(convert(source))
        self.fn, self._own_seed = fn, seed

    def call(self, datapoint: Any, index: int) -> Any:
        call = 'Transform calls fn(datapoint, seed=[seed, step])'
        return call_checked(call, self.fn, datapoint, seed=[self._own_seed, index])

    def line(self) -> Line:
        seed = self._own_seed if type(self._own_seed) is int else str(self._own_seed)
        return Line('Transform', function=name_of(self.fn), seed=seed)

    def describe(self) -> str:
        return str(self.line())


class Sample(Node):
    """Datapoints drawn at random with replacement; each draw depends only on (seed, step).

    ::

        source = sources.Sample(reader, seed=0)

    Args:
      length: number of datapoints to draw from, from the start; all of them by default.
    """

    seed: int
    endless: bool
    passes_epochs = False

    def __init__(self, source: Any, length: int | None = None, seed: int = 0) -> None:
        super().__init__(convert(source))
        self._length = length_of(self.parents[0]) if length is None else check_integer('length', length, 1)
        self.seed, self.endless = check_integer('seed', seed, 0), True
        self._given = '' if length is None else f', length={length}'
        if self._length < 1:
            raise InvalidArgumentError(f'expected one datapoint or more to sample from, got length {self._length}')

    def __len__(self) -> int:
        return self._length

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        return await self.parents[0].fetch(await offload(self._draws, steps_of(indices)))

    def _draws(self, steps: Ints) -> list[int]:
        # About 15 us per draw: in a large batch, too long for the event loop.
        return [int(np.random.default_rng(seed=[self.seed, step]).choice(self._length)) for step in steps.tolist()]

    def describe(self) -> str:
        return f'Sample(seed={self.seed}{self._given})'


class Truncate(Wrapped):
    """The first ``limit`` datapoints, repeated without end.

    ::

        overfit = sources.Truncate(reader, limit=64)

    Args:
      length: number of datapoints of the source; its ``len`` by default.
    """

    unlisted = False

    def __init__(self, source: Any, limit: int, length: int | None = None) -> None:
        source = convert(source)
        length = length_of(source) if length is None else check_integer('length', length, 0)
        super().__init__(source, min(length, check_integer('limit', limit, 0)))
        self.endless = True
        if len(self) < 1:
            raise InvalidArgumentError(
                f'expected a limit >= 1 and a source that is not empty, got {len(self)} datapoints'
            )

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        return await super().fetch(steps_of(indices))

    def describe(self) -> str:
        return f'Truncate({len(self)})'


class Interleave(combinations.Interleave):
    """One datapoint of each source in turn. Its length is the number of sources times the shortest length.

    ::

        source = sources.Interleave([web, books])  # web[0], books[0], web[1], ...
    """

    def __init__(self, sources: Sequence[Any]) -> None:
        super().__init__(sources)

    def choose(self, indices: Ints) -> tuple[Ints, Ints]:
        return super().choose(steps_of(indices))


class Mix(SourceChoice):
    """Datapoints of a source chosen at random for each step, at the same step of it. As long as the shortest source.

    ::

        source = sources.Mix([web, books], weights=[0.9, 0.1], seed=0)

    Args:
      weights: relative probabilities of the sources, with any sum.
      seed: each choice depends only on (seed, step).
    """

    def __init__(self, sources: Sequence[Any], weights: Sequence[float], seed: int = 0) -> None:
        super().__init__(sources)
        try:
            with np.errstate(over='ignore'):
                p = np.asarray(weights, np.float32)
                total = p.sum()
        except (TypeError, ValueError):
            raise InvalidArgumentError(f'expected {len(self.parents)} weights, got {weights!r:.100}') from None
        if p.shape != (len(self.parents),) or not np.isfinite(total) or (p < 0).any() or not total > 0:
            raise InvalidArgumentError(
                f'expected {len(self.parents)} weights >= 0, not all of them 0, got {weights!r:.100}'
            )
        # Single precision as in 0.21, because the draws depend on it.
        self._weights = p / total
        self.seed = check_integer('seed', seed, 0)
        self.varies = True

    def __len__(self) -> int:
        return min(length_of(source) for source in self.parents)

    def choose(self, indices: Ints) -> tuple[Ints, Ints]:
        steps = steps_of(indices)
        return np.array([self._draw(step) for step in steps.tolist()], np.int64), steps

    def _draw(self, step: int) -> int:
        return int(np.random.default_rng(seed=[self.seed, step]).choice(len(self.parents), p=self._weights))

    def describe(self) -> str:
        return f'Mix of {len(self.parents)}, weights {self._weights.tolist()}, seed={self.seed}'

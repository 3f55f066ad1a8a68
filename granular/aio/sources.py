"""Sources: lazy sequences over readers, whose unit of I/O is the batch.

An operation on indices maps the whole array of steps with numpy and fetches below once; an operation on elements
fetches below once and runs its function in the pool. However long the chain, one batch reaches the reader as one
``fetch``. What a source gives at a step depends on the step and the seed alone, as granular 0.21 defines it.
"""

import abc
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from granular.aio.indexing import indices_of
from granular.aio.loops import gather, need_loop
from granular.aio.threads import offload, spread
from granular.errors import InvalidArgumentError, OutOfRangeError
from granular.shuffle import Order, Permutation, Sequential

Ints = NDArray[np.int64]


class Source(abc.ABC):
    """A sequence of datapoints, fetched many at a time.

    Attributes:
      endless: whether every step is answered, however large; otherwise those below ``len`` are.
      seed: what makes its order, for the state of a loader; 0 where nothing is random.
    """

    endless = False
    seed = 0

    @abc.abstractmethod
    async def fetch(self, indices: ArrayLike) -> list[Any]:
        """The datapoints at many steps, in the order asked."""

    async def get(self, index: SupportsIndex) -> Any:
        """The datapoint at a step."""
        return (await self.fetch([operator.index(index)]))[0]

    @abc.abstractmethod
    def __len__(self) -> int: ...


def convert(source: Any) -> Source:
    """Anything that can be a source, as one.

    In this order: a source; the synchronous face of something asynchronous; something with an asynchronous ``fetch``,
    such as a reader of :mod:`granular.aio`; something with a blocking ``fetch`` or ``__getitems__`` of many indices; a
    callable; something that can be indexed. What blocks is called in the pool.
    """
    if isinstance(source, Source):
        return source
    if (core := getattr(source, 'aio', None)) is not None:
        return convert(core)
    fetch = getattr(source, 'fetch', None)
    if inspect.iscoroutinefunction(fetch):
        return _Fetching(source)
    for name in ('fetch', '__getitems__'):
        if callable(many := getattr(source, name, None)):
            return _Blocking(source, many)
    if callable(source):
        return _Called(source, source)
    if hasattr(source, '__getitem__'):
        return _Called(source, source.__getitem__)
    raise InvalidArgumentError(f'{type(source).__name__} is no source: want a reader, a callable, or an indexable')


class _Adapter(Source):
    def __init__(self, source: Any) -> None:
        self._source = source
        self.endless = not hasattr(source, '__len__')
        self.seed = getattr(source, 'seed', 0)

    def __len__(self) -> int:
        return length_of(self._source)


class _Fetching(_Adapter):
    async def fetch(self, indices: ArrayLike) -> list[Any]:
        found: list[Any] = await self._source.fetch(indices)
        return found

    def __len__(self) -> int:
        return length_of(self._source)


class _Blocking(_Adapter):
    def __init__(self, source: Any, many: Callable[[list[int]], Sequence[Any]]) -> None:
        super().__init__(source)
        self._many = many

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        steps = np.asarray(indices).tolist()
        return list(await offload(self._many, steps))


class _Called(_Adapter):
    def __init__(self, source: Any, fn: Callable[[int], Any]) -> None:
        super().__init__(source)
        self._fn = fn

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        steps = np.asarray(indices).tolist()
        points: list[Any] = await map_in_threads(self._fn, [(step,) for step in steps], 'loading', steps)
        return points


def length_of(source: Any) -> int:
    """The length of a source.

    Raises:
      InvalidArgumentError: if it has none.
    """
    try:
        return len(source)
    except TypeError:
        raise InvalidArgumentError(f'{type(source).__name__} has no length: pass length=') from None


async def map_in_threads(fn: Callable[..., Any], rows: Sequence[tuple[Any, ...]], doing: str, steps: list[int]) -> Any:
    """Call a user's function for each row, in threads; an error gets a note of its step."""

    def call(i: int) -> Any:
        try:
            return fn(*rows[i])
        except Exception as error:
            error.add_note(f'while {doing} the datapoint at step {steps[i]}')
            raise

    return await spread(call, len(rows))


def _steps_of(indices: ArrayLike) -> Ints:
    steps = indices_of(indices, np.iinfo(np.int64).max, 'steps')
    if (np.asarray(indices) < 0).any():
        raise OutOfRangeError('steps count from 0')
    return steps


# --- the sources of granular 0.21 -------------------------------------------------------------------------------------


class Epochs(Source):
    """All datapoints, again and again, in a new order every epoch.

    Args:
      source: what to draw from.
      length: how many of its datapoints make an epoch; all of them by default.
      shuffle: True for numpy's permutation, the order of granular 0.21; False for none; or an order of
        :mod:`granular.shuffle`.
      seed: the epochs' orders are functions of (seed, epoch).
    """

    endless = True

    def __init__(self, source: Any, length: int | None = None, shuffle: bool | Order = True, seed: int = 0) -> None:
        self._source = convert(source)
        self._length = length_of(self._source) if length is None else length
        self.seed = seed
        self._order = shuffle if not isinstance(shuffle, bool) else Permutation() if shuffle else Sequential()
        if self._length < 1:
            raise InvalidArgumentError(f'an epoch needs datapoints, got length {self._length}')
        if not isinstance(self._order, Order):
            raise InvalidArgumentError(f'shuffle is {shuffle!r}: want True, False or an order of granular.shuffle')

    def __len__(self) -> int:
        return self._length

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        steps = _steps_of(indices)
        epochs = np.unique(steps // self._length).tolist()
        if all(self._order.is_ready(self._length, self.seed, epoch) for epoch in epochs):
            return await self._source.fetch(self.lookup(steps))
        return await self._source.fetch(await offload(self.lookup, steps))

    def lookup(self, indices: ArrayLike) -> Ints:
        """The indices below that stand at these steps."""
        epochs, places = np.divmod(_steps_of(indices), self._length)
        out = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            out[here] = self._order.lookup(places[here], self._length, self.seed, epoch)
        return out


class Transform(Source):
    """A function of each datapoint: ``fn(datapoint, seed=[seed, step])``, called in the pool."""

    def __init__(self, source: Any, fn: Callable[..., Any], seed: int = 0) -> None:
        if not callable(fn):
            raise InvalidArgumentError(f'{fn!r:.100} is no function')
        self._source, self._fn, self._own_seed = convert(source), fn, seed
        self.endless, self.seed = self._source.endless, self._source.seed

    def __len__(self) -> int:
        return length_of(self._source)

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        steps = np.asarray(indices).tolist()
        points = await self._source.fetch(indices)
        rows = list(zip(points, steps, strict=True))
        made: list[Any] = await map_in_threads(self._apply, rows, 'transforming', steps)
        return made

    def _apply(self, point: Any, step: int) -> Any:
        return self._fn(point, seed=[self._own_seed, step])


class Sample(Source):
    """Datapoints drawn at random with replacement, each a function of (seed, step)."""

    endless = True

    def __init__(self, source: Any, length: int | None = None, seed: int = 0) -> None:
        self._source = convert(source)
        self._length = length_of(self._source) if length is None else length
        self.seed = seed
        if self._length < 1:
            raise InvalidArgumentError(f'a sample needs datapoints, got length {self._length}')

    def __len__(self) -> int:
        return self._length

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        return await self._source.fetch(await offload(self._draws, _steps_of(indices)))

    def _draws(self, steps: Ints) -> list[int]:
        # Some 15 us each: too long for a loop, in a large batch.
        return [int(np.random.default_rng(seed=[self.seed, step]).choice(self._length)) for step in steps.tolist()]


class Truncate(Source):
    """The first ``limit`` datapoints, again and again."""

    endless = True

    def __init__(self, source: Any, limit: int, length: int | None = None) -> None:
        self._source = convert(source)
        self._limit = min(length_of(self._source) if length is None else length, limit)
        self.seed = self._source.seed
        if self._limit < 1:
            raise InvalidArgumentError(f'nothing is left of a source truncated to {self._limit}')

    def __len__(self) -> int:
        return self._limit

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        return await self._source.fetch(_steps_of(indices) % self._limit)


class _Several(Source):
    """Several sources, of which each step chooses one."""

    def __init__(self, sources: Sequence[Any]) -> None:
        self._sources = [convert(source) for source in sources]
        if not self._sources:
            raise InvalidArgumentError('want one source or more')
        self.endless = all(source.endless for source in self._sources)
        self.seed = self._sources[0].seed

    @abc.abstractmethod
    def choose(self, steps: Ints) -> tuple[Ints, Ints]:
        """Which source answers each step, and at which step of its own."""

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        owners, inner = await offload(self.choose, _steps_of(indices))
        chosen = np.unique(owners).tolist()
        if len(chosen) > 1:
            await need_loop()
        found = await gather([self._sources[owner].fetch(inner[owners == owner]) for owner in chosen])
        out: list[Any] = [None] * len(owners)
        for owner, points in zip(chosen, found, strict=True):
            for place, point in zip(np.flatnonzero(owners == owner).tolist(), points, strict=True):
                out[place] = point
        return out


class Interleave(_Several):
    """A datapoint of each source in turn. Its length is what the shortest source allows."""

    def __len__(self) -> int:
        return len(self._sources) * min(length_of(source) for source in self._sources)

    def choose(self, steps: Ints) -> tuple[Ints, Ints]:
        inner, owners = np.divmod(steps, len(self._sources))
        return owners, inner


class Mix(_Several):
    """Each step from a source drawn with these weights, at the same step of it. Its length is the shortest source's.

    Args:
      sources: what to draw from.
      weights: how often each is drawn, of any sum.
      seed: the draws are functions of (seed, step).
    """

    def __init__(self, sources: Sequence[Any], weights: Sequence[float], seed: int = 0) -> None:
        super().__init__(sources)
        p = np.asarray(weights, np.float32)
        if p.shape != (len(self._sources),) or not np.isfinite(p).all() or (p < 0).any() or not p.sum() > 0:
            raise InvalidArgumentError(
                f'want {len(self._sources)} weights that are not negative and not all zero, got {list(weights)}'
            )
        # In single precision, as 0.21 has it: the draws depend on it.
        self._weights = p / p.sum()
        self.seed = seed

    def __len__(self) -> int:
        return min(length_of(source) for source in self._sources)

    def choose(self, steps: Ints) -> tuple[Ints, Ints]:
        return np.array([self._draw(step) for step in steps.tolist()], np.int64), steps

    def _draw(self, step: int) -> int:
        return int(np.random.default_rng(seed=[self.seed, step]).choice(len(self._sources), p=self._weights))

"""Nodes that transform datapoints: a chain of them fetches from its source once and runs in one thread-pool task."""

import abc
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from granular.aio.execution.failures import Failure
from granular.aio.pipeline.nodes.source import Node, Source, estimate_nbytes, map_in_threads, timed
from granular.aio.pipeline.transforms import FilterTransform, MapTransform, MapWithIndexTransform, RandomMapTransform
from granular.aio.runtime.threads import offload
from granular.errors import DatapointError, InvalidArgumentError, UnknownKeyError
from granular.indexing import check_integer

_IN_PLACE: Final = 1 << 18  # bytes; smaller batches are stacked on the event loop
_NUMBERS: Final = (  # types for which np.array gives the result of np.stack in a tenth of the time
    int, float, bool, str, np.int64, np.int32, np.uint8, np.float64, np.float32, np.bool_,
)  # fmt: skip


class Element(Node):
    """A function of each datapoint. None passes through unchanged."""

    _doing = 'transforming'

    @abc.abstractmethod
    def _call(self, datapoint: Any, index: int) -> Any:
        """Return the transformed datapoint."""

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        chain: list[Element] = [self]
        while isinstance(source := chain[-1].parents[0], Element):
            chain.append(source)
        steps = np.asarray(indices).tolist()
        datapoints = await source.fetch(indices)
        return await map_in_threads(
            [timed(node, node._call) for node in reversed(chain)], datapoints, self._doing, steps
        )


class Map(Element):
    """``fn(datapoint)``."""

    def __init__(self, parent: Source, fn: MapTransform | Callable[[Any], Any], label: str = 'map') -> None:
        super().__init__(parent)
        self._fn, self._label = method_of(fn, 'map'), label

    def _call(self, datapoint: Any, index: int) -> Any:
        return self._fn(datapoint)

    def describe(self) -> str:
        return f'{self._label}({name_of(self._fn)})'


class MapWithIndex(Element):
    """``fn(index, datapoint)``."""

    def __init__(self, parent: Source, fn: MapWithIndexTransform | Callable[[int, Any], Any]) -> None:
        super().__init__(parent)
        self._fn = method_of(fn, 'map_with_index')

    def _call(self, datapoint: Any, index: int) -> Any:
        return self._fn(index, datapoint)

    def describe(self) -> str:
        return f'map_with_index({name_of(self._fn)})'


class RandomMap(Element):
    """``fn(datapoint, generator)``, with the random numbers of Google Grain, which depend only on seed and index."""

    def __init__(
        self, parent: Source, fn: RandomMapTransform | Callable[[Any, np.random.Generator], Any], seed: int
    ) -> None:
        super().__init__(parent)
        self._fn = method_of(fn, 'random_map')
        self._seed = int(seed)
        self._key = np.random.Philox(self._seed).state['state']['key']

    def _call(self, datapoint: Any, index: int) -> Any:
        return self._fn(datapoint, generator(self._key, index))

    def describe(self) -> str:
        return f'random_map({name_of(self._fn)}, seed={self._seed})'


def generator(key: Any, index: int) -> np.random.Generator:
    """Return the random generator of an index: Philox with a counter that starts at the index."""
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, index % (1 << 64)], np.uint64)))


class Filter(Element):
    """None for each datapoint for which ``fn(datapoint)`` is false."""

    _doing = 'filtering'

    def __init__(self, parent: Source, fn: FilterTransform | Callable[[Any], bool]) -> None:
        super().__init__(parent)
        self._fn = method_of(fn, 'filter')
        self.sparse = True

    def _call(self, datapoint: Any, index: int) -> Any:
        return datapoint if self._fn(datapoint) else None

    def describe(self) -> str:
        return f'filter({name_of(self._fn)})'


class Select(Element):
    """Some fields of each datapoint, for sources that cannot select fields before reading."""

    def __init__(self, parent: Source, fields: Sequence[str]) -> None:
        super().__init__(parent)
        self._fields = tuple(fields)

    def _call(self, datapoint: Any, index: int) -> Any:
        try:
            return {field: datapoint[field] for field in self._fields}
        except KeyError as error:
            raise UnknownKeyError(f'index {index}: unknown field {error}: there are {sorted(datapoint)}') from None

    def describe(self) -> str:
        return f'select({", ".join(self._fields)})'


def selected(source: Source, fields: Sequence[str]) -> Source:
    """Restrict a source to some fields of each datapoint, and read only those if the source can."""
    selection = source.select(fields)
    return Select(source, fields) if selection is None else selection


class Batch(Node):
    """Batches of consecutive datapoints, which are all fetched at once."""

    def __init__(
        self, parent: Source, size: int, drop_remainder: bool, batch_fn: Callable[[Sequence[Any]], Any] | None
    ) -> None:
        super().__init__(parent)
        size = check_integer('batch_size', size, 1)
        if parent.sparse:
            raise InvalidArgumentError(
                'batches of a filtered dataset would not be full: call to_iter_dataset() before batch()'
            )
        self.size, self._drop, self._fn = size, drop_remainder, batch_fn or stack
        self._source_length = len(parent)
        self._length = self._source_length // size if drop_remainder else -(-self._source_length // size)

    def __len__(self) -> int:
        return self._length

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        steps = np.asarray(indices, np.int64)
        epochs, positions = np.divmod(steps, self._length)
        starts = positions * self.size
        stops = np.minimum(starts + self.size, self._source_length)
        bases = epochs * self._source_length
        inner = np.concatenate([np.arange(a, b) + c for a, b, c in zip(starts, stops, bases, strict=True)] or [steps])
        datapoints = await self.parents[0].fetch(inner)
        cuts = np.cumsum(stops - starts)
        batches = [datapoints[b - a : b] for a, b in zip((stops - starts).tolist(), cuts.tolist(), strict=True)]
        if self._fn is stack and estimate_nbytes(datapoints) < _IN_PLACE:
            make = timed(self, self.make)
            return [make(batch, step) for batch, step in zip(batches, steps.tolist(), strict=True)]
        return await map_in_threads([timed(self, self.make)], batches, 'batching', steps.tolist())

    def make(self, datapoints: list[Any], index: int) -> Any:
        """Return a batch, or the first ``Failure`` among its datapoints."""
        for datapoint in datapoints:
            if type(datapoint) is Failure:
                return datapoint
        return self._fn(datapoints)

    def describe(self) -> str:
        batch_fn = '' if self._fn is stack else f', batch_fn={name_of(self._fn)}'
        return f'batch({self.size}{", drop_remainder=True" if self._drop else ""}{batch_fn})'


def stack(datapoints: Sequence[Any]) -> Any:
    """Stack datapoints of one structure (dicts, tuples, lists of arrays and numbers), each leaf along a new first axis.

    Bytes become an array of objects, because numpy's bytes dtype drops trailing zeros.

    Raises:
      DatapointError: if structures or shapes differ.
    """
    first = datapoints[0]
    if isinstance(first, Mapping):
        keys = first.keys()
        for i, datapoint in enumerate(datapoints):
            if not isinstance(datapoint, Mapping) or datapoint.keys() != keys:
                raise DatapointError(f'datapoint {i} of a batch is {_outline(datapoint)}, the first {_outline(first)}')
        return {key: _stacked(key, [datapoint[key] for datapoint in datapoints]) for key in keys}
    if isinstance(first, tuple | list):
        for i, datapoint in enumerate(datapoints):
            if type(datapoint) is not type(first) or len(datapoint) != len(first):
                raise DatapointError(f'datapoint {i} of a batch is {_outline(datapoint)}, the first {_outline(first)}')
        parts = [_stacked(i, [datapoint[i] for datapoint in datapoints]) for i in range(len(first))]
        return type(first)(*parts) if hasattr(first, '_fields') else type(first)(parts)
    if isinstance(first, bytes | bytearray):
        out = np.empty(len(datapoints), object)
        out[:] = datapoints
        return out
    try:
        return np.array(datapoints) if type(first) in _NUMBERS else np.stack(datapoints)
    except ValueError:
        odd = next(i for i, datapoint in enumerate(datapoints) if np.shape(datapoint) != np.shape(first))
        raise DatapointError(
            f'datapoint {odd} of a batch has shape {np.shape(datapoints[odd])}, the first {np.shape(first)}: '
            f'make them equal in a map, or pass batch_fn'
        ) from None


def _stacked(key: Any, datapoints: list[Any]) -> Any:
    try:
        return stack(datapoints)
    except DatapointError as error:
        raise DatapointError(f'{key!r}: {error}') from None


def _outline(datapoint: Any) -> str:
    if isinstance(datapoint, Mapping):
        return f'a dict of {sorted(map(str, datapoint))}'
    return (
        f'a {type(datapoint).__name__} of {len(datapoint)}'
        if isinstance(datapoint, tuple | list)
        else f'a {type(datapoint).__name__}'
    )


def method_of(transform: Any, name: str) -> Callable[..., Any]:
    """Return the method of a transformation with the given name, or the transformation itself if it has none."""
    method = getattr(transform, name, None) if not isinstance(transform, type) else None
    fn = method if callable(method) else transform
    if not callable(fn):
        raise InvalidArgumentError(f'{transform!r:.100} is neither a function nor an object with a method {name!r}')
    return fn  # type: ignore[no-any-return]


def name_of(fn: Any) -> str:
    """Return the name of a function for printed pipelines."""
    owner = getattr(fn, '__self__', None)
    if owner is not None and not isinstance(owner, type | types.ModuleType):
        return type(owner).__qualname__
    fn = getattr(fn, 'func', fn)  # unwrap a functools.partial
    return getattr(fn, '__qualname__', type(fn).__qualname__).replace('<locals>.', '')


def identity_of(fn: Any) -> str:
    """Return what identifies a decoder for a cache that outlives the process: its name, and a partial's arguments."""
    if isinstance(fn, functools.partial):
        return f'{name_of(fn)} {fn.args!r} {sorted(fn.keywords.items())!r}'
    return name_of(fn)


async def stacked(fn: Callable[[Sequence[Any]], Any], datapoints: list[Any]) -> Any:
    """Combine datapoints to a batch, on the event loop if they are small and in a thread otherwise."""
    if fn is stack and estimate_nbytes(datapoints) < _IN_PLACE:
        return stack(datapoints)
    return await offload(fn, datapoints)

"""Nodes that transform datapoints: a chain of them fetches from its source once and runs in one thread-pool task."""

import abc
import copy
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike

from granular.aio.execution.failures import Failure
from granular.aio.pipeline.nodes.source import Node, Source, check_not_empty, estimate_nbytes, map_in_threads, timed
from granular.aio.pipeline.transforms import (
    FilterTransform,
    FlatMapTransform,
    MapTransform,
    MapWithIndexTransform,
    RandomMapTransform,
)
from granular.aio.runtime.threads import offload
from granular.aio.runtime.user_functions import call_user
from granular.errors import DatapointError, InvalidArgumentError, UnknownKeyError
from granular.indexing import Seed, check_integer, check_seed

_IN_PLACE: Final = 1 << 18  # bytes; smaller batches are stacked on the event loop
_NUMBERS: Final = (  # types for which np.array gives the result of np.stack in a tenth of the time
    int, float, bool, str, np.int64, np.int32, np.uint8, np.float64, np.float32, np.bool_,
)  # fmt: skip


class KeptNone:
    """The type of ``NONE``."""

    def __reduce__(self) -> str:
        return 'NONE'


NONE: Final = KeptNone()
"""Placeholder for a None that a function of a stream returned: an element, unlike the None that a filter leaves."""


class Element(Node):
    """A function of each datapoint. None passes through unchanged."""

    _doing = 'transforming'

    @abc.abstractmethod
    def _call(self, datapoint: Any, index: int) -> Any:
        """Return the transformed datapoint."""

    def _over(self, parent: Source) -> Source:
        return self._copy_over(parent)

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
        try:
            return self._fn(datapoint)
        except TypeError as error:
            refuse_misfit(error, f'{self._label} calls fn(element)', self._fn, datapoint)
            raise

    def describe(self) -> str:
        return f'{self._label}({name_of(self._fn)})'


class MapWithIndex(Element):
    """``fn(index, datapoint)``."""

    def __init__(self, parent: Source, fn: MapWithIndexTransform | Callable[[int, Any], Any]) -> None:
        super().__init__(parent)
        self._fn = method_of(fn, 'map_with_index')

    def _call(self, datapoint: Any, index: int) -> Any:
        try:
            return self._fn(index, datapoint)
        except TypeError as error:
            refuse_misfit(error, 'map_with_index calls fn(index, element)', self._fn, index, datapoint)
            raise

    def describe(self) -> str:
        return f'map_with_index({name_of(self._fn)})'


class RandomMap(Element):
    """``fn(datapoint, generator)``, with the random numbers of Google Grain, which depend only on seed and index."""

    def __init__(
        self, parent: Source, fn: RandomMapTransform | Callable[[Any, np.random.Generator], Any], seed: Seed
    ) -> None:
        super().__init__(parent)
        self._fn = method_of(fn, 'random_map')
        self._seed = check_seed(seed)
        self._key = np.random.Philox(self._seed).state['state']['key']

    def _call(self, datapoint: Any, index: int) -> Any:
        rng = generator(self._key, index)
        try:
            return self._fn(datapoint, rng)
        except TypeError as error:
            refuse_misfit(error, 'random_map calls fn(element, rng)', self._fn, datapoint, rng)
            raise

    def describe(self) -> str:
        return f'random_map({name_of(self._fn)}, seed={self._seed})'


def generator(key: Any, index: int) -> np.random.Generator:
    """Return the random generator of an index: Philox with a counter that starts at the index."""
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, index % (1 << 64)], np.uint64)))


class Streamed(Element):
    """An operation of a stream, where a function may return None as an element."""

    def __init__(self, node: Element) -> None:
        super().__init__(*node.parents)
        self._node = node

    def _call(self, datapoint: Any, index: int) -> Any:
        if datapoint is NONE:
            return NONE
        out = self._node._call(datapoint, index)
        return NONE if out is None else out

    def describe(self) -> str:
        return self._node.describe()


class Filter(Element):
    """None for each datapoint for which ``fn(datapoint)`` is false."""

    _doing = 'filtering'

    def __init__(self, parent: Source, fn: FilterTransform | Callable[[Any], bool]) -> None:
        super().__init__(parent)
        self._fn = method_of(fn, 'filter')
        self.sparse = True

    def _call(self, datapoint: Any, index: int) -> Any:
        try:
            return datapoint if self._fn(None if datapoint is NONE else datapoint) else None
        except TypeError as error:
            refuse_misfit(error, 'filter calls fn(element)', self._fn, datapoint)
            raise

    def describe(self) -> str:
        return f'filter({name_of(self._fn)})'


class FlatMap(Node):
    """A fixed number of datapoints for each one: those that ``fn(datapoint)`` returns, and None for the rest."""

    def __init__(self, parent: Source, fn: FlatMapTransform | Callable[[Any], Sequence[Any]], max_fan_out: int) -> None:
        super().__init__(parent)
        self._fn, self._fan_out = method_of(fn, 'flat_map'), check_integer('max_fan_out', max_fan_out, 1)
        self.sparse = True

    def __len__(self) -> int:
        return min(sys.maxsize, self._fan_out * len(self.parents[0]))

    def _over(self, parent: Source) -> Source:
        return self._copy_over(parent)

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        steps, positions = np.divmod(np.asarray(indices, np.int64), self._fan_out)
        unique, inverse = np.unique(steps, return_inverse=True)
        datapoints = await self.parents[0].fetch(unique)
        parts = await map_in_threads([timed(self, self._call)], datapoints, 'splitting', unique.tolist())
        return [_part(parts[i], position) for i, position in zip(inverse.tolist(), positions.tolist(), strict=True)]

    def _call(self, datapoint: Any, index: int) -> Any:
        try:
            parts = self._fn(datapoint)
        except TypeError as error:
            refuse_misfit(error, 'flat_map calls fn(element)', self._fn, datapoint)
            raise
        parts = parts_of(parts, self.describe())
        if len(parts) > self._fan_out:
            raise DatapointError(
                f'{self.describe()}: expected at most {self._fan_out} elements for the datapoint at index {index}, '
                f'got {len(parts)}: raise max_fan_out'
            )
        return parts

    def describe(self) -> str:
        return f'flat_map({name_of(self._fn)}, max_fan_out={self._fan_out})'


def parts_of(parts: Any, stage: str) -> list[Any]:
    """Return what the function of a flat_map returned as a list.

    Raises:
      DatapointError: if it is not iterable.
    """
    try:
        return list(parts)
    except TypeError:
        raise DatapointError(f'{stage}: expected a sequence of elements, got {parts!r:.100}') from None


def _part(parts: Any, position: int) -> Any:
    if type(parts) is Failure:
        return None if position else parts
    return parts[position] if parts is not None and position < len(parts) else None


class Computed(Node):
    """The datapoints that an indexable object computes, which reads its sources itself."""

    def __init__(self, parents: Sequence[Source], dataset: Any, length: Callable[[], int] | None) -> None:
        super().__init__(*parents)
        self._dataset, self._measure = dataset, length
        self.endless = False

    def __len__(self) -> int:
        return len(self.parents[0]) if self._measure is None else call_user(self._measure)

    def _copy_over(self, *parents: Source) -> Self:
        # The object reads its ``_parents``.
        dataset = copy.copy(self._dataset)
        dataset._parents = tuple(
            type(parent)._of(source) for parent, source in zip(dataset._parents, parents, strict=True)
        )
        dataset._node = type(self)(parents, dataset, None if self._measure is None else dataset.__len__)
        return dataset._node  # type: ignore[no-any-return]

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        steps = np.asarray(indices).tolist()
        calls = [timed(self, lambda _, step: self._dataset[step])]
        return await map_in_threads(calls, [...] * len(steps), 'computing', steps)

    @property
    def _user_functions(self) -> tuple[Any, ...]:
        return (self._dataset.__getitem__,)

    def describe(self) -> str:
        return type(self._dataset).__qualname__.replace('<locals>.', '')


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

    size: int

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

    def _over(self, parent: Source) -> Source:
        return Batch(parent, self.size, self._drop, self._fn)

    def stored_nbytes(self) -> float | None:
        stored = super().stored_nbytes()
        return None if stored is None else stored * self.size

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        steps = np.asarray(indices, np.int64)
        check_not_empty(self, self._length, steps)
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

    Bytes become an array of objects, because numpy's bytes dtype drops trailing zeros. A leaf that is None in every
    datapoint stays None.

    Raises:
      DatapointError: if structures or shapes differ.
    """
    return combine(datapoints, _stack_leaves)


def combine(datapoints: Sequence[Any], combine_leaves: Callable[[Sequence[Any]], Any]) -> Any:
    """Combine datapoints of one structure: the result has this structure, with a function's result for each leaf.

    Raises:
      DatapointError: if structures differ.
    """
    first = datapoints[0]
    if isinstance(first, Mapping):
        keys = first.keys()
        for i, datapoint in enumerate(datapoints):
            if not isinstance(datapoint, Mapping) or datapoint.keys() != keys:
                raise DatapointError(f'datapoint {i} of a batch is {_outline(datapoint)}, the first {_outline(first)}')
        return {key: _combined(key, [datapoint[key] for datapoint in datapoints], combine_leaves) for key in keys}
    if isinstance(first, tuple | list):
        for i, datapoint in enumerate(datapoints):
            if type(datapoint) is not type(first) or len(datapoint) != len(first):
                raise DatapointError(f'datapoint {i} of a batch is {_outline(datapoint)}, the first {_outline(first)}')
        parts = [_combined(i, [datapoint[i] for datapoint in datapoints], combine_leaves) for i in range(len(first))]
        return type(first)(*parts) if hasattr(first, '_fields') else type(first)(parts)
    return combine_leaves(datapoints)


def _stack_leaves(datapoints: Sequence[Any]) -> Any:
    first = datapoints[0]
    if isinstance(first, bytes | bytearray):
        out = np.empty(len(datapoints), object)
        out[:] = datapoints
        return out
    kinds = set(map(type, datapoints))
    try:
        if type(first) in _NUMBERS:
            out = np.array(datapoints)
        else:
            out = (np.ma.stack if np.ma.MaskedArray in kinds else np.stack)(datapoints)
    except TypeError:  # of dtypes that have none in common
        _check_dtypes(datapoints)
        raise
    except ValueError:
        odd = next(i for i, datapoint in enumerate(datapoints) if np.shape(datapoint) != np.shape(first))
        raise DatapointError(
            f'datapoint {odd} of a batch has shape {np.shape(datapoints[odd])}, the first {np.shape(first)}: '
            f'make them equal in a map, or pass batch_fn'
        ) from None
    if out.dtype.kind in 'SU' and kinds != {str}:
        _check_dtypes(datapoints)
    return out


def _check_dtypes(datapoints: Sequence[Any]) -> None:
    """Raise an error if only some are text, or dates: numpy would turn numbers among texts into text, 1 into '1'."""
    dtypes = [np.asarray(datapoint).dtype for datapoint in datapoints]
    for i, dtype in enumerate(dtypes):
        if dtype.kind != dtypes[0].kind:
            raise DatapointError(
                f'datapoint {i} of a batch has dtype {dtype}, the first {dtypes[0]}: make them equal in a map, or pass '
                f'batch_fn'
            ) from None


def batch_and_pad(values: Sequence[Any], *, batch_size: int, pad_value: Any = 0) -> Any:
    """Stack elements to a batch of a fixed size, padded at its end: a ``batch_fn`` that keeps a smaller last batch.

    ::

        import functools

        pad = functools.partial(granular.batch_and_pad, batch_size=64)
        batches = dataset.batch(64, batch_fn=pad)

    Args:
      values: the elements, at most ``batch_size``.
      batch_size: rows of the batch.
      pad_value: value of the rows after those of the elements, in each array.

    Raises:
      DatapointError: if there are too many elements, their structures or shapes differ, or a number does not fit into
        the dtype of an array.
    """
    batch_size = check_integer('batch_size', batch_size, 1)
    if not 0 < len(values) <= batch_size:
        raise DatapointError(f'batch_and_pad: cannot combine {len(values)} elements into a batch of {batch_size}')

    def pad(leaves: Sequence[Any]) -> Any:
        rows = _stack_leaves(leaves)
        padding = np.empty((batch_size - len(rows), *rows.shape[1:]), rows.dtype)
        if isinstance(leaves[0], bytes | bytearray):
            padding[:] = pad_value if isinstance(pad_value, bytes) else str(pad_value).encode()
        elif padding.size:
            with np.errstate(all='ignore'):
                padding[:] = np.asarray(pad_value).astype(rows.dtype)
            if rows.dtype.kind in 'biuf' and padding.flat[0] != pad_value and pad_value == pad_value:  # noqa: PLR0124
                raise DatapointError(f'the padding {pad_value!r:.100} does not fit into {rows.dtype}')
        return np.concatenate([rows, padding])

    return combine(values, pad)


def _combined(key: Any, datapoints: list[Any], combine_leaves: Callable[[Sequence[Any]], Any]) -> Any:
    if datapoints[0] is None and all(datapoint is None for datapoint in datapoints):
        return None
    try:
        return combine(datapoints, combine_leaves)
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


def refuse_misfit(error: TypeError, call: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Raise an error that shows the call, if a TypeError comes from arguments that a function does not accept.

    Args:
      error: the TypeError, caught in the frame that called the function.
      call: the call, in words.
      fn: the function.
      args: the positional arguments of the call.
      kwargs: its keyword arguments.
    """
    if error.__traceback__ is None or error.__traceback__.tb_next is not None:
        return  # the function was entered
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as misfit:
        raise InvalidArgumentError(f'{call}, which {name_of(fn)}{signature} does not accept: {misfit}') from None


def name_of(fn: Any) -> str:
    """Return the name of a function for printed pipelines."""
    owner = getattr(fn, '__self__', None)
    if owner is not None and not isinstance(owner, type | types.ModuleType):
        return type(owner).__qualname__
    fn = getattr(fn, 'func', fn)  # unwrap a functools.partial
    return getattr(fn, '__qualname__', type(fn).__qualname__).replace('<locals>.', '')


async def stacked(fn: Callable[[Sequence[Any]], Any], datapoints: list[Any]) -> Any:
    """Combine datapoints to a batch, on the event loop if they are small and in a thread otherwise."""
    if fn is stack and estimate_nbytes(datapoints) < _IN_PLACE:
        return stack(datapoints)
    return await offload(fn, datapoints)

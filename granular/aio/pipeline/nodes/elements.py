"""Nodes that transform datapoints: a chain of them fetches from its source once and runs in one thread-pool task."""

import abc
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from granular._support.indexing import MOST, Ints, Seed, check_integer, indices_of
from granular.aio.pipeline.execution.failures import Failure, Handler, capturing, handling, of_datapoint
from granular.aio.pipeline.lines import Line
from granular.aio.pipeline.nodes.indices import IndexNode, beneath, check_finite, find, in_epochs
from granular.aio.pipeline.nodes.patterns import Pattern
from granular.aio.pipeline.nodes.source import Node, Source, check_not_empty, map_in_threads, timed
from granular.aio.pipeline.nodes.stacking import is_small, line_of_batch, stack
from granular.aio.pipeline.transforms import FlatMapFunction, Predicate, RandomFunction
from granular.aio.runtime.immediate import is_immediate
from granular.aio.runtime.user_functions import call_checked, call_user, function_or, method_of, name_of
from granular.errors import DatapointError, InvalidArgumentError, UnknownKeyError
from granular.formats.checksums import crc32c


class KeptNone:
    """The type of ``NONE``."""

    def __reduce__(self) -> str:
        return 'NONE'


LEFT_OUT: Final = object()
"""Placeholder for a datapoint that failed and is left out of its batch."""

NONE: Final = KeptNone()
"""Placeholder for a None that a function of a stream returned: an element, unlike the None that a filter leaves."""


class Element(Node):
    """A function of each datapoint. None passes through unchanged."""

    divides = True
    elementwise = True
    keeps_turns = True
    _doing = 'transforming'

    @abc.abstractmethod
    def call(self, datapoint: Any, index: int) -> Any:
        """Return the transformed datapoint."""

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        chain: list[Element] = [self]
        while isinstance(source := chain[-1].parents[0], Element):
            chain.append(source)
        steps = np.asarray(indices).tolist()
        calls = [timed(node, node.call) for node in reversed(chain)]
        source, inner = await find(source, indices)
        if not is_immediate():
            # Decoding and the functions share one hop to a thread.
            decoding, decoded = await source.fetch_undecoded(inner), list[Any]()
            if decoding is not None:
                try:
                    return await map_in_threads(calls, decoded, self._doing, steps, decoding.then(decoded.extend))
                except Exception as error:
                    if decoded or not capturing.get() or not of_datapoint(error):
                        raise
                # Not decoded: ``fetch`` tells apart the datapoints that fail.
        return await map_in_threads(calls, await source.fetch(inner), self._doing, steps)


class Function(Element):
    """A function of the user's of each datapoint."""

    operation: str

    def __init__(self, parent: Source, fn: Any) -> None:
        super().__init__(parent)
        self.fn = method_of(fn, self.operation)

    def line(self) -> Line:
        return Line(self.operation, function=name_of(self.fn))

    def describe(self) -> str:
        return str(self.line())


class Map(Function):
    operation = 'map'

    def call(self, datapoint: Any, index: int) -> Any:
        return call_checked('map calls fn(element)', self.fn, datapoint)


class MapWithIndex(Function):
    operation = 'map_with_index'

    def call(self, datapoint: Any, index: int) -> Any:
        return call_checked('map_with_index calls fn(index, element)', self.fn, index, datapoint)


class RandomMap(Function):
    """``fn(datapoint, generator)``, with the random numbers of Google Grain, which depend only on seed and index."""

    operation = 'random_map'

    def __init__(self, parent: Source, fn: RandomFunction[Any, Any], seed: Seed) -> None:
        super().__init__(parent, fn)
        self._seed = seed
        self._key = np.random.Philox(seed).state['state']['key']

    def call(self, datapoint: Any, index: int) -> Any:
        return call_checked('random_map calls fn(element, rng)', self.fn, datapoint, generator(self._key, index))

    def line(self) -> Line:
        return super().line().changed(seed=self._seed)


def generator(key: Any, index: int) -> np.random.Generator:
    """Return the random generator of an index: Philox with a counter that starts at the index."""
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, index % (1 << 64)], np.uint64)))


class Streamed(Element):
    """An operation of a stream, where a function may return None as an element."""

    def __init__(self, node: Element) -> None:
        super().__init__(*node.parents)
        self.node = node

    def call(self, datapoint: Any, index: int) -> Any:
        if datapoint is NONE:
            return NONE
        out = self.node.call(datapoint, index)
        return NONE if out is None else out

    def line(self) -> Line:
        return self.node.line()

    def describe(self) -> str:
        return self.node.describe()


class Filter(Function):
    """None for each datapoint for which ``fn(datapoint)`` is false."""

    operation = 'filter'
    _doing = 'filtering'

    def __init__(self, parent: Source, fn: Predicate[Any]) -> None:
        super().__init__(parent, fn)
        self.sparse = True

    async def nullable_keys(self) -> frozenset[str]:
        return await self.parents[0].nullable_keys()

    def call(self, datapoint: Any, index: int) -> Any:
        element = None if datapoint is NONE else datapoint
        return datapoint if call_checked('filter calls fn(element)', self.fn, element) else None


class Excluded(Node):
    """None for datapoints that are left out, which are not read."""

    divides = False  # its indices are those of the whole
    keeps_turns = True

    def __init__(self, parent: Source, indices: Sequence[int] | Ints) -> None:
        super().__init__(parent)
        check_finite(parent, 'exclude', 'call exclude() before repeat()')
        self._excluded = np.unique(indices_of(indices, len(parent), 'exclude'))
        self.sparse = self.sparse or len(self._excluded) > 0

    async def nullable_keys(self) -> frozenset[str]:
        return await self.parents[0].nullable_keys()

    @property
    def leaves_out(self) -> int:
        """The number of elements that are left out."""
        return len(self._excluded)

    @property
    def leaves_none(self) -> bool:
        """True if all elements are left out."""
        return len(self._excluded) == len(self)

    def remaining(self, indices: Ints) -> NDArray[np.bool_]:
        """Return whether each index is not left out."""
        return ~np.isin(indices % max(1, len(self)), self._excluded)

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        steps = np.asarray(indices, np.int64)
        chosen = np.flatnonzero(self.remaining(steps))
        out: list[Any] = [None] * len(steps)
        for position, datapoint in zip(chosen.tolist(), await self.parents[0].fetch(steps[chosen]), strict=True):
            out[position] = datapoint
        return out

    def line(self) -> Line:
        checksum = crc32c(np.ascontiguousarray(self._excluded, '<i8').tobytes())
        return Line('exclude', excluded=f'{len(self._excluded)} indices, CRC32C {checksum:08x}')

    def describe(self) -> str:
        return str(self.line())


OPERATIONS: Final[Mapping[str, Callable[..., Function]]] = {
    kind.operation: kind for kind in (Map, MapWithIndex, RandomMap, Filter)
}
"""Functions of single elements, by name: each is made of a source, the user's function, and a seed for random ones."""


class Handled(Node):
    """The place of the ``on_error`` of a stream: it applies to failures before it, not in the operations after it."""

    unlisted = True
    keeps_turns = True

    async def nullable_keys(self) -> frozenset[str]:
        return await self.parents[0].nullable_keys()

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        datapoints = await self.parents[0].fetch(indices)
        for datapoint in datapoints:
            if type(datapoint) is Failure:
                datapoint.handled = True
        return datapoints


def before_handled(source: Source) -> Source:
    """Return the source up to the ``Handled`` in it; all of it if there is none."""
    chain = after_handled(source)
    return chain[0].parents[0] if chain else source


def after_handled(source: Source) -> list[Element]:
    """Return the operations of a source after the ``Handled`` that they begin with; none if there is none."""
    chain: list[Element] = []
    while isinstance(source, Element):
        chain.append(source)
        source = source.parents[0]
    return chain[::-1] if isinstance(source, Handled) else []


async def replaced(chain: Sequence[Element], replacement: Any, index: int) -> Any:
    """Return what becomes of the replacement of a failed datapoint in the operations after ``Handled``."""
    calls = [timed(node, node.call) for node in chain]
    return (await map_in_threads(calls, [replacement], 'transforming', [index]))[0]


class FlatMap(Node):
    """A fixed number of datapoints for each one: those that ``fn(datapoint)`` returns, and None for the rest."""

    divides = True

    def __init__(self, parent: Source, fn: FlatMapFunction[Any, Any], max_fan_out: int) -> None:
        super().__init__(parent)
        self.fn, self._fan_out = method_of(fn, 'flat_map'), check_integer('max_fan_out', max_fan_out, 1, MOST)
        self.sparse = True

    def __len__(self) -> int:
        return min(sys.maxsize, self._fan_out * len(self.parents[0]))

    def pattern(self) -> Pattern | None:
        pattern = self.parents[0].pattern()
        return None if pattern is None else pattern.stretched(self._fan_out)

    def owners(self, indices: Ints) -> Ints:
        return self.parents[0].owners(indices // self._fan_out)

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        chosen = np.asarray(indices, np.int64)
        _, firsts = np.unique(chosen, return_index=True)
        if len(firsts) < len(chosen):  # each element is an object of its own, which functions may change
            again = np.delete(np.arange(len(chosen)), firsts)
            elements = [*await self.fetch(chosen[firsts]), *await self.fetch(chosen[again])]
            return [elements[i] for i in np.argsort(np.concatenate((firsts, again))).tolist()]
        steps, positions = np.divmod(chosen, self._fan_out)
        unique, inverse = np.unique(steps, return_inverse=True)
        datapoints = await self.parents[0].fetch(unique)
        parts = await map_in_threads([timed(self, self._call)], datapoints, 'splitting', unique.tolist())
        return [_part(parts[i], position) for i, position in zip(inverse.tolist(), positions.tolist(), strict=True)]

    def _call(self, datapoint: Any, index: int) -> Any:
        parts = parts_of(call_checked('flat_map calls fn(element)', self.fn, datapoint), self.describe())
        if len(parts) > self._fan_out:
            raise DatapointError(
                f'{self.describe()}: expected at most {self._fan_out} elements for the datapoint at index {index}, '
                f'got {len(parts)}: raise max_fan_out'
            )
        return parts

    def line(self) -> Line:
        return Line('flat_map', function=name_of(self.fn), max_fan_out=self._fan_out)

    def describe(self) -> str:
        return str(self.line())


def parts_of(parts: Any, stage: str) -> list[Any]:
    """Return what the function of a flat_map returned as a list; raise ``DatapointError`` if it is not iterable."""
    try:
        return list(parts)
    except TypeError:
        raise DatapointError(f'{stage}: expected a sequence of elements, got {parts!r:.100}') from None


def _part(parts: Any, position: int) -> Any:
    if type(parts) is Failure:
        return parts.at(parts.index, counts=False) if position else parts
    return parts[position] if parts is not None and position < len(parts) else None


def _remaining(batch: list[Any], step: int) -> Any:
    """Return the elements of a batch that are not left out; if there are none, what stands for a batch left out."""
    remaining = [element for element in batch if element is not LEFT_OUT]
    if remaining or not batch:
        return remaining
    return Failure(step, DatapointError(f'all elements of the batch at index {step} failed'), counts=False)


def _failure_of(batch: list[Any], indices: Ints) -> Any:
    """Return a batch, or the first ``Failure`` in it, with the indices of all."""
    failed = [i for i, element in enumerate(batch) if type(element) is Failure]
    if not failed:
        return batch
    known = [index for i in failed for index in (*batch[i].batched, int(indices[i]))]
    return batch[failed[0]].of_batch(known)


class Computed(Node):
    """The datapoints that an indexable object computes, which reads its sources, the parents, itself.

    ``length`` returns their number, by default that of the first source; ``rebuild`` the stage of a copy of the object
    that reads other sources.
    """

    def __init__(
        self,
        parents: Sequence[Source],
        dataset: Any,
        length: Callable[[], int] | None,
        rebuild: 'Callable[[Any, Sequence[Source]], Computed]',
    ) -> None:
        super().__init__(*parents)
        self._dataset = dataset
        self._measure = length
        self._rebuild = rebuild
        self.endless = False

    def __len__(self) -> int:
        return len(self.parents[0]) if self._measure is None else call_user(self._measure)

    def copy_over(self, *parents: Source) -> 'Computed':
        return self._rebuild(self._dataset, parents)

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        steps = np.asarray(indices).tolist()
        calls = [timed(self, lambda _, step: self._element(step))]
        return await map_in_threads(calls, [...] * len(steps), 'computing', steps)

    def _element(self, step: int) -> Any:
        """Return an element; in a later epoch that of the first one, if the object has none beyond its length."""
        try:
            return self._dataset[step]
        except IndexError:
            if self._measure is None or step < (length := len(self)) or not length:
                raise
            return self._dataset[step % length]

    def user_functions(self) -> tuple[Any, ...]:
        return (self._dataset.__getitem__,)

    def describe(self) -> str:
        return type(self._dataset).__qualname__.replace('<locals>.', '')


class Select(Element):
    """Some fields of each datapoint, for sources that cannot select fields before reading."""

    def __init__(self, parent: Source, fields: Sequence[str]) -> None:
        super().__init__(parent)
        self._fields = tuple(fields)

    async def nullable_keys(self) -> frozenset[str]:
        return await self.parents[0].nullable_keys()

    def call(self, datapoint: Any, index: int) -> Any:
        try:
            return {field: datapoint[field] for field in self._fields}
        except KeyError as error:
            raise UnknownKeyError(f'index {index}: unknown field {error}: there are {list(datapoint)}') from None
        except (TypeError, IndexError) as error:
            fields = ', '.join(map(repr, self._fields))
            raise DatapointError(
                f'index {index}: expected a dict with {fields}, got {type(datapoint).__name__}'
            ) from error

    def describe(self) -> str:
        return f'select({", ".join(map(str, self._fields))})'


def selected(source: Source, fields: Sequence[str]) -> Source:
    """Restrict a source to some fields of each datapoint, and read only those if the source can."""
    selection = source.select(fields)
    return Select(source, fields) if selection is None else selection


class Batch(Node):
    """Batches of consecutive datapoints, which are all fetched at once."""

    divides = True
    size: int
    drop_remainder: bool
    _nullable: frozenset[str] | None = None  # once they are known

    def __init__(
        self, parent: Source, size: int, drop_remainder: bool, batch_fn: Callable[[Sequence[Any]], Any] | None
    ) -> None:
        super().__init__(parent)
        size = check_integer('batch_size', size, 1, MOST)
        if parent.sparse:
            raise InvalidArgumentError(
                'batches of a filtered dataset would not be full: call to_iter_dataset() before batch()'
            )
        self.size, self.drop_remainder = size, drop_remainder
        self.fn = function_or('batch_fn', batch_fn, stack)
        self.source_length = len(parent)
        self._length = self.source_length // size if drop_remainder else -(-self.source_length // size)

    def __len__(self) -> int:
        return self._length

    def copy_over(self, *parents: Source) -> 'Batch':
        return Batch(parents[0], self.size, self.drop_remainder, self.fn)

    def stored_nbytes(self) -> float | None:
        stored = super().stored_nbytes()
        return None if stored is None else stored * self.size

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        steps = np.asarray(indices, np.int64)
        check_not_empty(self, self._length, steps)
        epochs, positions = np.divmod(steps, self._length)
        starts = positions * self.size
        stops = np.minimum(starts + self.size, self.source_length)
        bases = in_epochs(np.zeros_like(steps), epochs, self.source_length)
        inner = np.concatenate([np.arange(a, b) + c for a, b, c in zip(starts, stops, bases, strict=True)] or [steps])
        handler = handling.get()
        datapoints = await (self.parents[0].fetch(inner) if handler is None else self._fetch_handled(inner, handler))
        cuts = np.cumsum(stops - starts)
        slices = [slice(b - a, b) for a, b in zip((stops - starts).tolist(), cuts.tolist(), strict=True)]
        batches: list[Any] = [datapoints[part] for part in slices]
        if handler is not None:
            batches = [_remaining(batch, step) for batch, step in zip(batches, steps.tolist(), strict=True)]
        elif Failure in set(map(type, datapoints)):
            batches = [_failure_of(batch, inner[part]) for batch, part in zip(batches, slices, strict=True)]
        if self._nullable is None:
            self._nullable = await self.parents[0].nullable_keys() if self.fn is stack else frozenset()
        if self.fn is stack and is_small(datapoints):
            combine = timed(self, self._combine)
            with contextlib.suppress(Exception):  # it is raised, or captured, below
                return [combine(batch, step) for batch, step in zip(batches, steps.tolist(), strict=True)]
        return await map_in_threads([timed(self, self._combine)], batches, 'batching', steps.tolist())

    async def _fetch_handled(self, inner: Ints, handler: Handler) -> list[Any]:
        """Return what is batched, with those replaced that fail, or ``LEFT_OUT``."""
        source, apart = self.parents[0], np.isin(inner, handler.known)
        groups = [positions for positions in (np.flatnonzero(~apart), np.flatnonzero(apart)) if len(positions)]
        fetched = [await source.fetch(inner[positions]) for positions in groups]
        datapoints: list[Any] = [None] * len(inner)
        for positions, part in zip(groups, fetched, strict=True):
            for position, datapoint in zip(positions.tolist(), part, strict=True):
                if type(datapoint) is Failure:
                    datapoint = await handler.replaced(datapoint)
                    datapoint = LEFT_OUT if datapoint is None else datapoint
                datapoints[position] = datapoint
        return datapoints

    def _combine(self, datapoints: list[Any], index: int) -> Any:
        return stack(datapoints, self._nullable or ()) if self.fn is stack else self.fn(datapoints)

    def arguments(self) -> dict[str, Any]:
        return {'size': self.size, 'drop': self.drop_remainder}

    def line(self) -> Line:
        return line_of_batch(self.size, self.drop_remainder, self.fn)

    def describe(self) -> str:
        return str(self.line())


def beneath_functions(source: Source) -> tuple[Source, list[str]]:
    """Return the next source that does more than to map indices, or single elements, and the functions before it."""
    functions = []
    while isinstance(source, IndexNode) or source.elementwise:
        if source.elementwise and not isinstance(source, Select):
            functions.append(source.describe())
        source = source.parents[0]
    return source, functions


async def measured(source: Source, path: Sequence[str]) -> Ints | None:
    """Return the sizes of a value of all elements of a source in the first epoch; None if they are not known."""
    base, functions = beneath_functions(source)
    sizes = None if functions else await base.measure(path)
    if sizes is None:
        return None
    _, indices = beneath(source, np.arange(len(source)))
    own: Ints = sizes[indices % max(1, len(base))]
    return own

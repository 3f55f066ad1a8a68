"""Origins: the datapoints that the elements of a pipeline are made of, from lengths alone. Nothing is read."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from granular._support.indexing import Ints, grouped, integers_of
from granular._support.text import counted
from granular.aio.pipeline.nodes.batches import Batch
from granular.aio.pipeline.nodes.blocks import BlockBuffer
from granular.aio.pipeline.nodes.combinations import SourceChoice, Zip, choices_of
from granular.aio.pipeline.nodes.elements import Excluded, Filter, Handled, Streamed
from granular.aio.pipeline.nodes.indices import IndexNode, in_epochs, inner_indices
from granular.aio.pipeline.nodes.planned import Planned
from granular.aio.pipeline.nodes.source import Source, parents_of
from granular.aio.pipeline.planning import ranges
from granular.errors import InvalidArgumentError, OutOfRangeError

T = TypeVar('T')
_SHOWN: Final = 10  # datapoints in a text


@dataclasses.dataclass(frozen=True, eq=False)
class Origins:
    """The datapoints that steps are made of: arrays with an entry for each datapoint, in the order of the steps.

    ::

        origins = await dataset.indices(range(1234, 1334))
        print(origins.counts())  # {'range(0, 1000)': 100}

    Attributes:
      step: the step, as it was asked for, int64.
      row: the row in the batch of the step, from 0 on; 0 if a step is no batch.
      source: the number of the source in ``sources``.
      index: the index of the datapoint in its source.
      begin: the first value of the datapoint that a row of ``pack`` has, as in ``value[begin:stop]``.
      stop: the one after the last; -1 for a datapoint whose size is not known, as it is not packed or batched by size.
      sources: the names of the sources: those of a mix by name, and otherwise the numbers of the datasets that are
        mixed, concatenated or zipped, joined by '/'; the description of the source if there is one only.
    """

    step: Ints
    row: Ints
    source: Ints
    index: Ints
    begin: Ints
    stop: Ints
    sources: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.step)

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by name, with the names of the sources in place of their numbers, as for a DataFrame."""
        arrays = {name: getattr(self, name) for name in ('step', 'row', 'source', 'index', 'begin', 'stop')}
        return {**arrays, 'source': np.array(self.sources, object)[self.source]}

    def counts(self) -> dict[str, int]:
        """Return the number of datapoints of each source, by its name; one that is in several rows counts in each."""
        counts = np.bincount(self.source, minlength=len(self.sources)).tolist()
        return dict(zip(self.sources, counts, strict=True))

    def __str__(self) -> str:
        columns = self.columns()
        rows = [list(columns), *([str(column[i]) for column in columns.values()] for i in range(len(self))[:_SHOWN])]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ['  '.join(value.rjust(width) for value, width in zip(row, widths, strict=True)) for row in rows]
        more = [f'and {counted(len(self) - _SHOWN, "datapoint")} more'] if len(self) > _SHOWN else []
        return '\n'.join([*lines, *more])


class Traceable(abc.ABC):
    """The operation of datasets and loaders whose elements are traced to datapoints."""

    @abc.abstractmethod
    def indices(self, steps: ArrayLike) -> Any:
        """Return which datapoints elements are made of, from lengths alone: nothing is read.

        ::

            origins = await dataset.indices(range(1234, 1334))
            print(origins)  # the step, row, source and index of each datapoint

        They are found through shuffles, selections, mixes, epochs, batches, ``pack`` and ``batch_by_size``.

        Args:
          steps: indices of elements; an integer, a range or an array.

        Raises:
          InvalidArgumentError: if a stage, such as ``filter``, makes them known only when they are read; the message
            names the stage.
        """


class Picked(NamedTuple):
    """Elements of a stage that are traced to their sources: an entry for each.

    Attributes:
      places: the place, among the elements that were asked for, of the one that it is a part of.
      rows: its row there.
      indices: its index in the stage.
      begins, stops: the values of it that are taken; ``stops`` is -1 if that is not known.
    """

    places: Ints
    rows: Ints
    indices: Ints
    begins: Ints
    stops: Ints

    @classmethod
    def of(cls, indices: Ints) -> 'Picked':
        """Return elements that were asked for."""
        zeros = np.zeros_like(indices)
        return cls(np.arange(len(indices)), zeros, indices, zeros, zeros - 1)

    def chosen(self, positions: Any) -> 'Picked':
        """Return some of them."""
        return Picked(*(part[positions] for part in self))

    def divided(self, parents: Sequence[T], owners: Ints, inner: Ints) -> list[tuple[T, 'Picked']]:
        """Return those of each of several parents, given the number of the parent and the index in it of each."""
        within, groups, none = self._replace(indices=inner), dict(grouped(owners)), np.zeros(0, np.int64)
        return [(parent, within.chosen(groups.get(i, none))) for i, parent in enumerate(parents)]

    def unbatched(self, size: int, length: int, numbers: Ints, bases: Any = 0) -> 'Picked':
        """Return the elements of batches, given the number of each in its epoch of a length, which has a base."""
        starts = numbers * size
        counts = np.minimum(size, length - starts)
        rows = np.repeat(self.rows * size, counts) + ranges(np.zeros_like(starts), counts)
        places, begins, stops = (np.repeat(part, counts) for part in (self.places, self.begins, self.stops))
        return Picked(places, rows, ranges(starts + bases, counts), begins, stops)


class Stage(abc.ABC):
    """A stage of a stream, which is traced by its own arithmetic."""

    parents: tuple[Any, ...]

    @abc.abstractmethod
    def length(self) -> int: ...

    @abc.abstractmethod
    def traced_back(self, picked: Picked) -> list[tuple[Any, Picked]]:
        """Return what elements are made of: elements of each parent."""


def traced_elements(stream: Stage, steps: Any) -> Origins:
    """Return the datapoints of elements of a stream, by their numbers."""
    steps, length = steps_of(steps), stream.length()
    if len(outside := steps[(steps < 0) | (steps >= length)]):
        raise OutOfRangeError(
            f'indices: step {outside[0]} is out of range: the stream has {counted(length, "element")}'
        )
    return origins_of(steps, stream, Picked.of(steps))


def traced(source: Source, steps: Any) -> Origins:
    """Return the datapoints of elements of a source; raise ``InvalidArgumentError`` for a stage that makes them
    unknowable, which it names.
    """
    steps = steps_of(steps)
    return origins_of(steps, source, Picked.of(steps))


def left_out(source: Source, indices: Ints) -> Origins | None:
    """Return the datapoints of elements that the last ``exclude`` of a dataset leaves out; None if it is not known."""
    picked = Picked.of(indices)
    try:
        while not isinstance(source, Excluded):
            if len(source.parents) != 1:
                return None
            source, picked = _traced_to_one(source, picked)
        return traced(source.parents[0], picked.indices[~source.remaining(picked.indices)])
    except InvalidArgumentError:  # a stage that makes them unknowable
        return None


def steps_of(steps: Any) -> Ints:
    """Return the argument of ``indices``, an integer or several, as an array."""
    if isinstance(steps, range):
        return np.arange(steps.start, steps.stop, steps.step, dtype=np.int64)
    return integers_of([steps] if np.ndim(steps) == 0 else steps, 'indices')


def origins_of(steps: Ints, source: Source | Stage, picked: Picked) -> Origins:
    """Return the datapoints of elements of a source, whose places are those of the steps."""
    found: list[tuple[Picked, int]] = []
    _trace(source, picked, 0, found)
    found = found or [(picked.chosen(slice(0)), 0)]
    whole = Picked(*map(_joined, zip(*(part for part, _ in found), strict=True)))
    sources = _joined([np.full(len(part.places), number) for part, number in found])
    if len(found) > 1:
        order = _order_of(whole.places, whole.rows)
        whole, sources = whole.chosen(order), sources[order]
    names = tuple(name for name, _ in names_of(source))
    return Origins(steps[whole.places], whole.rows, sources, whole.indices, whole.begins, whole.stops, names)


def _order_of(places: Ints, rows: Ints) -> Ints:
    """Return the positions of entries by place and row, those of one row in their order."""
    keys = places * (int(rows.max(initial=0)) + 1) + rows
    size = int(keys.max(initial=0)) + 1
    if size <= 2 * len(keys):  # which are the numbers of few others: without a sort
        order = np.full(size, -1)
        order[keys] = np.arange(len(keys))
        order = order[order >= 0]
        if len(order) == len(keys):
            return order
    return np.argsort(keys, kind='stable')


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def names_of(source: Any, path: str = '') -> list[tuple[str, str]]:
    """Return the name and the description of each source that a stage is computed from, in their order."""
    if not (parents := _parents_of(source)):
        return [(path or source.describe(), source.describe())]
    labels = getattr(source, 'names', map(str, range(len(parents))) if len(parents) > 1 else ('',))
    paths = ['/'.join(filter(None, (path, label))) for label in labels]
    return [pair for parent, below in zip(parents, paths, strict=True) for pair in names_of(parent, below)]


def _parents_of(source: Any) -> tuple[Any, ...]:
    return source.parents if isinstance(source, Stage) else parents_of(source)


def _trace(source: Any, picked: Picked, first: int, found: list[tuple[Picked, int]]) -> None:
    """Trace elements of a stage, whose first leaf has a number, to the leaves."""
    while _parents_of(source):
        parts = source.traced_back(picked) if isinstance(source, Stage) else _traced_back(source, picked)
        if len(parts) > 1:
            for parent, part in parts:
                if len(part.places):
                    _trace(parent, part, first, found)
                first += len(names_of(parent))
            return
        ((source, picked),) = parts
    found.append((picked, first))


def _traced_back(source: Source, picked: Picked) -> list[tuple[Source, Picked]]:
    """Return what elements of a dataset are made of: elements of each source of it."""
    if isinstance(source, SourceChoice):
        return picked.divided(source.parents, *choices_of(source, picked.indices))
    if isinstance(source, Zip):
        return [(parent, picked) for parent in source.parents]
    return [_traced_to_one(source, picked)]


def _traced_to_one(source: Source, picked: Picked) -> tuple[Source, Picked]:
    """Return the source of a stage that has only one, and what of it the elements are made of."""
    parent = source.parents[0]
    if isinstance(source, IndexNode):
        return parent, picked._replace(indices=inner_indices(source, picked.indices))
    if isinstance(source, Excluded):
        return parent, picked.chosen(source.remaining(picked.indices))
    if isinstance(source, BlockBuffer | Handled) or (
        source.elementwise and not isinstance(source.node if isinstance(source, Streamed) else source, Filter)
    ):
        return parent, picked
    if isinstance(source, Batch):
        epochs, numbers = np.divmod(picked.indices, max(1, len(source)))
        bases = in_epochs(np.zeros_like(numbers), epochs, source.source_length)
        return parent, picked.unbatched(source.size, source.source_length, numbers, bases)
    if isinstance(source, Planned):
        made = source.made_of(picked.indices)
        rows = np.repeat(picked.rows, made.counts) if made.rows is None else made.rows
        return made.source, Picked(np.repeat(picked.places, made.counts), rows, made.indices, made.begins, made.stops)
    raise InvalidArgumentError(
        f'indices: {source.describe()} makes the datapoints of a step known only when they are read: call indices() of '
        f'the dataset before it'
    )

"""Origins: the datapoints that the elements of a pipeline are made of, from lengths alone. Nothing is read."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from granular._support.indexing import Ints, integers_of
from granular._support.text import counted
from granular.aio.pipeline.nodes.blocks import BlockBuffer
from granular.aio.pipeline.nodes.combinations import SourceChoice, Zip, choices_of
from granular.aio.pipeline.nodes.elements import Batch, Filter, Handled
from granular.aio.pipeline.nodes.indices import IndexNode, in_epochs, inner_indices
from granular.aio.pipeline.nodes.planned import Planned
from granular.aio.pipeline.nodes.source import Source
from granular.aio.pipeline.planning import ranges
from granular.errors import InvalidArgumentError

_SHOWN = 10  # datapoints in a text


@dataclasses.dataclass(frozen=True, eq=False)
class Origins:
    """The datapoints that steps are made of: arrays with an entry for each datapoint, in the order of the steps.

    ::

        origins = dataset.indices(range(1234, 1334))
        pandas.DataFrame(origins.columns())

    Attributes:
      step: the step, as it was asked for, int64.
      row: the row in the batch of the step, from 0 on; 0 if a step is no batch.
      source: the number of the source in ``sources``.
      index: the index of the datapoint in its source.
      begin, stop: the values of the datapoint that a row of ``pack`` has, as in ``value[begin:stop]``; ``stop`` is -1
        for a datapoint whose size is not known, as it is not packed or batched by size.
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
        """Return the arrays by name, with the names of the sources in place of their numbers, as for a table."""
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

            origins = dataset.indices(range(1234, 1334))
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


def traced(source: Source, steps: Any) -> Origins:
    """Return the datapoints of elements of a source; raise ``InvalidArgumentError`` for a stage that makes them
    unknowable, which it names.
    """
    steps = steps_of(steps)
    return origins_of(steps, steps, [(source, Picked.of(steps), 0)], names_of(source))


def steps_of(steps: Any) -> Ints:
    """Return the argument of ``indices``, an integer or several, as an array."""
    if isinstance(steps, range):
        return np.arange(steps.start, steps.stop, steps.step, dtype=np.int64)
    return integers_of([steps] if np.ndim(steps) == 0 else steps, 'indices')


def origins_of(
    steps: Ints, asked: Ints, parts: Sequence[tuple[Source, Picked, int]], names: Sequence[tuple[str, str]]
) -> Origins:
    """Trace elements of several sources, each with the number of its first leaf, and sort them by place and row."""
    found: list[tuple[Picked, int]] = []
    for source, picked, first in parts:
        _trace(source, picked, first, found)
    numbers = [np.full(len(picked.places), number) for picked, number in found]
    whole = Picked(*(_joined([part[i] for part, _ in found]) for i in range(len(Picked._fields))))
    sources = _joined(numbers)
    if len(found) > 1:
        order = np.lexsort((whole.rows, whole.places))
        whole, sources = whole.chosen(order), sources[order]
    return Origins(
        asked[whole.places], whole.rows, sources, whole.indices, whole.begins, whole.stops, tuple(name for name, _ in names)
    )


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def names_of(source: Source, path: str = '') -> list[tuple[str, str]]:
    """Return the name and the description of each source that a stage is computed from, in their order."""
    several = len(source.parents) > 1
    names = [
        pair
        for i, parent in enumerate(source.parents)
        for pair in names_of(parent, _joined_path(path, str(i)) if several else path)
    ]
    return names if source.parents else [(path or source.describe(), source.describe())]


def _joined_path(*parts: str) -> str:
    return '/'.join(filter(None, parts))


def _trace(source: Source, picked: Picked, first: int, found: list[tuple[Picked, int]]) -> None:
    """Trace elements of a stage, whose first leaf has a number, to the leaves."""
    while source.parents:
        if isinstance(source, SourceChoice):
            owners, inner = choices_of(source, picked.indices)
            for number, parent in enumerate(source.parents):
                chosen = np.flatnonzero(owners == number)
                if len(chosen):
                    _trace(parent, picked._replace(indices=inner).chosen(chosen), first, found)
                first += len(names_of(parent))
            return
        if isinstance(source, Zip):
            for parent in source.parents:
                _trace(parent, picked, first, found)
                first += len(names_of(parent))
            return
        source, picked = _traced_back(source, picked)
    found.append((picked, first))


def _traced_back(source: Source, picked: Picked) -> tuple[Source, Picked]:
    """Return the source of a stage that has only one, and what of it the elements are made of."""
    parent = source.parents[0]
    if isinstance(source, IndexNode):
        return parent, picked._replace(indices=inner_indices(source, picked.indices))
    if isinstance(source, BlockBuffer | Handled) or (source.elementwise and not isinstance(source, Filter)):
        return parent, picked
    if isinstance(source, Batch):
        return parent, _unbatched(source, picked)
    if isinstance(source, Planned):
        made = source.made_of(picked.indices)
        rows = np.repeat(picked.rows, made.counts) if made.rows is None else made.rows
        return made.source, Picked(np.repeat(picked.places, made.counts), rows, made.indices, made.begins, made.stops)
    raise InvalidArgumentError(
        f'indices: {source.describe()} makes the datapoints of a step known only when they are read: call indices() of '
        f'the dataset before it'
    )


def _unbatched(source: Batch, picked: Picked) -> Picked:
    epochs, numbers = np.divmod(picked.indices, max(1, len(source)))
    starts = numbers * source.size
    counts = np.minimum(source.size, source.source_length - starts)
    inner = ranges(starts + in_epochs(np.zeros_like(starts), epochs, source.source_length), counts)
    rows = np.repeat(picked.rows * source.size, counts) + ranges(np.zeros_like(starts), counts)
    return Picked(np.repeat(picked.places, counts), rows, inner, *(np.repeat(part, counts) for part in picked[3:]))

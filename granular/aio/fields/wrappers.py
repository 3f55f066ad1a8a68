"""Wrappers of datasets of fields: select, repeat and reorder datapoints.

Each wrapper is a dataset of fields itself. The indices are computed by :mod:`granular.filters`.
"""

import abc
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from granular import filters
from granular.aio.fields.fields import Ctx, Fields, fields_of
from granular.aio.pipeline.nodes.selection import describe_classes
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import offload
from granular.errors import ClosedError, InvalidArgumentError
from granular.indexing import Ints, indices_of


class IndexWrapper(Fields):
    """A wrapper that maps each index to an index of the wrapped dataset."""

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        wrapped = fields_of(dataset)
        self.parents: tuple[Any, ...] = (wrapped,)
        self._pure = wrapped._pure

    @property
    def fields(self) -> tuple[str, ...] | None:
        """Names of the fields, sorted; None if they are unknown."""
        fields: tuple[str, ...] | None = self.parents[0].fields
        return fields

    def has(self, field: str) -> bool:
        """Return whether the field exists; True if that is unknown."""
        return bool(self.parents[0].has(field))

    @abc.abstractmethod
    def _lookup(self, indices: Ints) -> Ints: ...

    async def _load(self, fields: Sequence[str], indices: Ints, ctxs: Sequence[Ctx]) -> list[list[Any]]:
        """Return, for each field, its values in the order of the indices."""
        columns: list[list[Any]] = await self.parents[0]._load(fields, self._lookup(indices), ctxs)
        return columns

    def _inherit(self) -> None:
        if self.parents[0].known_labels:
            indices = self._lookup(np.arange(len(self)))
            known = self.parents[0].known_labels
            self.known_labels.update({field: labels[indices] for field, labels in known.items()})


class _SelectionWrapper(IndexWrapper):
    """Datapoints at selected indices, stored with 8 bytes per index."""

    _indices: Ints | None = None

    def _selected_indices(self) -> Ints:
        if self._indices is None:
            raise ClosedError(f'{self.describe()} is not open yet: use `await open(...)`')
        return self._indices

    def __len__(self) -> int:
        return len(self._selected_indices())

    def _lookup(self, indices: Ints) -> Ints:
        return self._selected_indices()[indices]


class SubsetWrapper(_SelectionWrapper):
    """The datapoints at the given indices, in that order.

    ::

        dataset = SubsetWrapper(reader, [0, 2, -1])

    Args:
      dataset: a dataset of fields, or a reader.
      indices: integers, which may repeat, negative ones counted from the end; or a slice or range. Field methods
        receive nonnegative indices only; KappaData passes negative ones on.
    """

    def __init__(self, dataset: Any, indices: Any) -> None:
        super().__init__(dataset)
        self._indices = indices_of(indices, len(self.parents[0]), 'SubsetWrapper')
        self._inherit()

    def describe(self) -> str:
        """Describe the dataset in one line."""
        return f'SubsetWrapper({len(self)} indices)'


class PercentFilterWrapper(IndexWrapper):
    """A contiguous part of the datapoints. Adjacent ranges neither share nor omit datapoints.

    ::

        train, test = PercentFilterWrapper(reader, to_percent=0.9), PercentFilterWrapper(reader, from_percent=0.9)

    A bound within 1e-15 of a whole datapoint is rounded to it: 0.29 of 100 is 29; KappaData truncates the
    floating-point product to 28. ``to_percent=0`` is an empty part; in KappaData it is the whole dataset.

    Args:
      dataset: a dataset of fields, or a reader.
      from_percent: start of the part, from 0 to 1; None for 0.
      to_percent: end of the part, from 0 to 1; None for 1.
    """

    def __init__(self, dataset: Any, from_percent: float | None = None, to_percent: float | None = None) -> None:
        super().__init__(dataset)
        self._start, self._stop = filters.percent_range(len(self.parents[0]), from_percent, to_percent)
        self._inherit()

    def __len__(self) -> int:
        return self._stop - self._start

    def _lookup(self, indices: Ints) -> Ints:
        return indices + self._start

    def describe(self) -> str:
        """Describe the dataset in one line."""
        return f'PercentFilterWrapper([{self._start}:{self._stop}])'


class RepeatWrapper(IndexWrapper):
    """All datapoints, repeated as a whole. Pass either ``repetitions`` or ``min_size``.

    ::

        dataset = RepeatWrapper(reader, repetitions=3)

    Args:
      dataset: a dataset of fields, or a reader; not empty.
      repetitions: number of repetitions.
      min_size: minimum number of datapoints, rounded up to whole repetitions.
    """

    def __init__(self, dataset: Any, repetitions: int | None = None, min_size: int | None = None) -> None:
        super().__init__(dataset)
        self._times = filters.repetitions_of(len(self.parents[0]), repetitions, min_size)
        self._inherit()

    def __len__(self) -> int:
        return self._times * len(self.parents[0])

    def _lookup(self, indices: Ints) -> Ints:
        return indices % len(self.parents[0])

    def describe(self) -> str:
        """Describe the dataset in one line."""
        return f'RepeatWrapper({self._times})'


class ShuffleWrapper(_SelectionWrapper):
    """All datapoints in shuffled order, that of KappaData for the same seed.

    ::

        dataset = ShuffleWrapper(reader, seed=0)

    Args:
      dataset: a dataset of fields, or a reader.
      seed: integer >= 0; required, because an order without a seed could not be reproduced.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        super().__init__(dataset)
        self._seed = seed
        self._indices = filters.shuffled(len(self.parents[0]), seed)
        self._inherit()

    def describe(self) -> str:
        """Describe the dataset in one line."""
        return f'ShuffleWrapper(seed={self._seed})'


class _ByLabel(_SelectionWrapper):
    """Datapoints selected by their labels."""

    _field = ''

    @classmethod
    async def open(cls, *args: Any, **kwargs: Any) -> Self:
        """Create the wrapper with the constructor's arguments, and read the labels."""
        self = cls(*args, **kwargs)
        labels = await self.parents[0]._labels(self._field)
        self._indices = await offload(self._choose, labels)
        self._inherit()
        return self

    @abc.abstractmethod
    def _choose(self, labels: filters.Labels) -> Ints: ...


class ClassFilterWrapper(_ByLabel):
    """The datapoints of some classes, or of all other classes. Reads only the labels, once, in bulk.

    ::

        dataset = await ClassFilterWrapper.open(reader, valid_classes=[3, 5], field='label')

    A datapoint with several classes stays if any of them is in ``valid_classes``, or none of them in
    ``invalid_classes``.

    Args:
      dataset: a dataset of fields, or a reader.
      valid_classes: classes to keep: a list, range or array of integers or strings.
      invalid_classes: classes to remove, instead of ``valid_classes``.
      field: field of the label.
    """

    def __init__(
        self, dataset: Any, valid_classes: Any = None, invalid_classes: Any = None, field: str = 'label'
    ) -> None:
        super().__init__(dataset)
        self._description = describe_classes(valid_classes, invalid_classes)
        self._valid, self._invalid, self._field = valid_classes, invalid_classes, field

    def _choose(self, labels: filters.Labels) -> Ints:
        return filters.by_class(labels, self._valid, self._invalid, self._field)

    def describe(self) -> str:
        """Describe the dataset in one line."""
        return f'ClassFilterWrapper({self._description}, field={self._field!r})'


class OversamplingWrapper(_ByLabel):
    """Datapoints with those of rare classes repeated. Reads only the labels, once, in bulk.

    ::

        dataset = await OversamplingWrapper.open(reader, strategy='exact', field='label')

    Datapoints without a label are kept. Classes without datapoints are ignored; KappaData's ``'exact'`` never ends on
    them.

    Args:
      dataset: a dataset of fields, or a reader.
      strategy: ``'multiply'``, as KappaData defines it: each datapoint appears k times, where k is how often its class
        fits into the largest class; ``'exact'``: datapoints of each class are repeated until it is as large as the
        largest class.
      field: field of the label, one per datapoint.
      unlabeled: label that means "no class": its datapoints appear once. None if there is no such label.
    """

    def __init__(
        self,
        dataset: Any,
        strategy: filters.Strategy = 'multiply',
        field: str = 'label',
        unlabeled: int | str | None = -1,
    ) -> None:
        super().__init__(dataset)
        self._strategy, self._field, self._unlabeled = strategy, field, unlabeled

    def _choose(self, labels: filters.Labels) -> Ints:
        return filters.oversampled(labels, self._strategy, self._unlabeled, self._field)

    def describe(self) -> str:
        """Describe the dataset in one line."""
        return f'OversamplingWrapper({self._strategy!r}, field={self._field!r})'


class FieldConcat(Fields):
    """Datasets of fields, concatenated. A batch fetches once from each dataset involved, concurrently.

    ::

        dataset = FieldConcat([reader, ShuffleWrapper(reader, seed=0)])

    Args:
      datasets: datasets of fields, or readers. The result has the fields that all of them have.
    """

    def __init__(self, datasets: Sequence[Any]) -> None:
        super().__init__()
        self.parents: tuple[Any, ...] = tuple(map(fields_of, datasets))
        if not self.parents:
            raise InvalidArgumentError('expected one dataset or more, got none')
        self._pure = all(part._pure for part in self.parents)
        self._lengths = np.array([len(part) for part in self.parents], np.int64)
        self._stops = np.cumsum(self._lengths)
        for field in set.intersection(*(set(part.known_labels) for part in self.parents)):
            self.known_labels[field] = np.concatenate([part.known_labels[field] for part in self.parents])

    def __len__(self) -> int:
        return int(self._stops[-1])

    @property
    def fields(self) -> tuple[str, ...] | None:
        """Names of the fields that all datasets have, sorted; None if they are unknown."""
        fields = [set(part.fields) for part in self.parents if part.fields is not None]
        return tuple(sorted(set.intersection(*fields))) if len(fields) == len(self.parents) else None

    def has(self, field: str) -> bool:
        """Return whether all datasets have the field; True if that is unknown."""
        return all(part.has(field) for part in self.parents)

    async def _load(self, fields: Sequence[str], indices: Ints, ctxs: Sequence[Ctx]) -> list[list[Any]]:
        """Return, for each field, its values in the order of the indices."""
        owners = np.searchsorted(self._stops, indices, side='right')
        inner = indices - (self._stops - self._lengths)[owners]
        groups = [np.flatnonzero(owners == owner) for owner in np.unique(owners)]  # positions, by dataset
        if len(groups) > 1:
            await ensure_event_loop()
        loaded = await gather(
            [
                self.parents[owners[group[0]]]._load(fields, inner[group], [ctxs[i] for i in group.tolist()])
                for group in groups
            ]
        )
        out: list[list[Any]] = [[None] * len(indices) for _ in fields]
        for group, columns in zip(groups, loaded, strict=True):
            for column, values in zip(out, columns, strict=True):
                for i, value in zip(group.tolist(), values, strict=True):
                    column[i] = value
        return out

    def describe(self) -> str:
        """Describe the dataset in one line."""
        return f'FieldConcat of {len(self.parents)}'

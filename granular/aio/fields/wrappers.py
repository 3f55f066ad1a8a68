"""Wrappers of datasets of fields, which choose samples, repeat them and put them in another order.

Each is a dataset of fields itself. What they do is computed by :mod:`granular.filters`.
"""

import abc
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from granular import filters
from granular.aio.fields.fields import Ctx, Fields, fields_of
from granular.aio.pipeline.nodes.selection import said_of
from granular.aio.runtime.loops import gather, need_loop
from granular.aio.runtime.threads import offload
from granular.errors import ClosedError, InvalidArgumentError
from granular.indexing import Ints, indices_of


class Mapped(Fields):
    """Each index stands for another one below."""

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        below = fields_of(dataset)
        self.parents, self.pure = (below,), below.pure

    @property
    def fields(self) -> tuple[str, ...] | None:
        """The fields that there are, sorted; None if it cannot be known."""
        known: tuple[str, ...] | None = self.parents[0].fields
        return known

    def has(self, field: str) -> bool:
        """Whether there is such a field, as far as one can know."""
        return bool(self.parents[0].has(field))

    @abc.abstractmethod
    def _lookup(self, indices: Ints) -> Ints: ...

    async def load(self, fields: Sequence[str], indices: Ints, ctxs: Sequence[Ctx]) -> list[list[Any]]:
        """Of each field its values, in the order of the indices."""
        found: list[list[Any]] = await self.parents[0].load(fields, self._lookup(indices), ctxs)
        return found

    def _inherit(self) -> None:
        if self.parents[0].known:
            indices = self._lookup(np.arange(len(self)))
            self.known = {field: labels[indices] for field, labels in self.parents[0].known.items()}


class _Chosen(Mapped):
    """Samples at some indices, which are kept: 8 bytes each."""

    _indices: Ints | None = None

    def _chosen(self) -> Ints:
        if self._indices is None:
            raise ClosedError(f'{self.describe()} is not open yet: use `await open(...)`')
        return self._indices

    def __len__(self) -> int:
        return len(self._chosen())

    def _lookup(self, indices: Ints) -> Ints:
        return self._chosen()[indices]


class SubsetWrapper(_Chosen):
    """The samples at some indices, in the order given.

    Args:
      dataset: a dataset of fields, or a reader.
      indices: integers, negative ones from the end, which may repeat; or a slice or range. Loaders see none that is
        negative, where KappaData hands them on.
    """

    def __init__(self, dataset: Any, indices: Any) -> None:
        super().__init__(dataset)
        self._indices = indices_of(indices, len(self.parents[0]), 'SubsetWrapper')
        self._inherit()

    def describe(self) -> str:
        """What it does, in one line."""
        return f'SubsetWrapper({len(self)} indices)'


class PercentFilterWrapper(Mapped):
    """A part of the samples. Ranges that meet share no sample and leave out none.

    A bound within 1e-15 of a whole sample is that sample: 0.29 of 100 is 29, where KappaData, which cuts off what
    floating point gives, comes to 28. ``to_percent=0`` is empty, where it has all.

    Args:
      dataset: a dataset of fields, or a reader.
      from_percent: from 0 to 1, where the part begins; None for 0.
      to_percent: from 0 to 1, where it ends; None for 1.
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
        """What it does, in one line."""
        return f'PercentFilterWrapper([{self._start}:{self._stop}])'


class RepeatWrapper(Mapped):
    """All samples several times, one time after the other.

    Args:
      dataset: a dataset of fields, or a reader; not empty.
      repetitions: how often.
      min_size: in place of it, how many samples there are to be, or somewhat more, as repetitions are whole.
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
        """What it does, in one line."""
        return f'RepeatWrapper({self._times})'


class ShuffleWrapper(_Chosen):
    """All samples in another order, that of KappaData for the same seed.

    Args:
      dataset: a dataset of fields, or a reader.
      seed: from 0 on. There is no order without one, as no run could be repeated.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        super().__init__(dataset)
        self._seed = seed
        self._indices = filters.shuffled(len(self.parents[0]), seed)
        self._inherit()

    def describe(self) -> str:
        """What it does, in one line."""
        return f'ShuffleWrapper(seed={self._seed})'


class _ByLabel(_Chosen):
    """Samples that were chosen by their labels."""

    _field = ''

    @classmethod
    async def open(cls, *args: Any, **kwargs: Any) -> Self:
        """Make one with the constructor's arguments, and read the labels."""
        self = cls(*args, **kwargs)
        labels = await self.parents[0].labels(self._field)
        self._indices = await offload(self._choose, labels)
        self._inherit()
        return self

    @abc.abstractmethod
    def _choose(self, labels: filters.Labels) -> Ints: ...


class ClassFilterWrapper(_ByLabel):
    """The samples of some classes, or of all others: ``await ClassFilterWrapper.open(...)``.

    Labels are read once, in bulk, and no other field. A sample with several classes stays if any of them is valid, or
    none of them invalid.

    Args:
      dataset: a dataset of fields, or a reader.
      valid_classes: those that stay: a list, a range or an array of integers or strings.
      invalid_classes: in place of it, those that do not.
      field: that of the labels.
    """

    def __init__(
        self, dataset: Any, valid_classes: Any = None, invalid_classes: Any = None, field: str = 'label'
    ) -> None:
        super().__init__(dataset)
        self._said = said_of(valid_classes, invalid_classes)
        self._valid, self._invalid, self._field = valid_classes, invalid_classes, field

    def _choose(self, labels: filters.Labels) -> Ints:
        return filters.by_class(labels, self._valid, self._invalid, self._field)

    def describe(self) -> str:
        """What it does, in one line."""
        return f'ClassFilterWrapper({self._said}, field={self._field!r})'


class OversamplingWrapper(_ByLabel):
    """Samples of rare classes repeated: ``await OversamplingWrapper.open(...)``. Labels are read once, in bulk.

    Where a class has no samples, there is nothing to repeat, and ``'exact'`` ends, as KappaData's does not. What has no
    label is kept.

    Args:
      dataset: a dataset of fields, or a reader.
      strategy: ``'multiply'``, as KappaData defines it: a class that fits k times into the largest one comes k times;
        ``'exact'``: each class comes to the count of the largest one exactly.
      field: that of the labels, one for each sample.
      unlabeled: the label that stands for no class; its samples come once. None if there is none.
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
        """What it does, in one line."""
        return f'OversamplingWrapper({self._strategy!r}, field={self._field!r})'


class FieldConcat(Fields):
    """Datasets of fields one after the other. A batch is one fetch of each that it touches, at the same time.

    Args:
      datasets: datasets of fields, or readers. Its fields are those that all of them have.
    """

    def __init__(self, datasets: Sequence[Any]) -> None:
        super().__init__()
        self.parents = tuple(map(fields_of, datasets))
        if not self.parents:
            raise InvalidArgumentError('want one dataset or more')
        self.pure = all(part.pure for part in self.parents)
        self._lengths = np.array([len(part) for part in self.parents], np.int64)
        self._stops = np.cumsum(self._lengths)
        for field in set.intersection(*(set(part.known) for part in self.parents)):
            self.known[field] = np.concatenate([part.known[field] for part in self.parents])

    def __len__(self) -> int:
        return int(self._stops[-1])

    @property
    def fields(self) -> tuple[str, ...] | None:
        """The fields that all of them have, sorted; None if it cannot be known."""
        known = [set(part.fields) for part in self.parents if part.fields is not None]
        return tuple(sorted(set.intersection(*known))) if len(known) == len(self.parents) else None

    def has(self, field: str) -> bool:
        """Whether all of them have such a field, as far as one can know."""
        return all(part.has(field) for part in self.parents)

    async def load(self, fields: Sequence[str], indices: Ints, ctxs: Sequence[Ctx]) -> list[list[Any]]:
        """Of each field its values, in the order of the indices."""
        owners = np.searchsorted(self._stops, indices, side='right')
        inner = indices - (self._stops - self._lengths)[owners]
        places = [np.flatnonzero(owners == owner) for owner in np.unique(owners)]
        if len(places) > 1:
            await need_loop()
        found = await gather(
            [self.parents[owners[at[0]]].load(fields, inner[at], [ctxs[i] for i in at.tolist()]) for at in places]
        )
        out: list[list[Any]] = [[None] * len(indices) for _ in fields]
        for at, columns in zip(places, found, strict=True):
            for column, values in zip(out, columns, strict=True):
                for i, value in zip(at.tolist(), values, strict=True):
                    column[i] = value
        return out

    def describe(self) -> str:
        """What it does, in one line."""
        return f'FieldConcat of {len(self.parents)}'

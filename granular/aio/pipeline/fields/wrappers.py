"""Wrappers of datasets of fields: select, repeat and reorder datapoints.

Each wrapper is a dataset of fields itself. A node of a pipeline selects among the positions of its datapoints.
"""

import abc
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np

from granular._support.indexing import Ints, check_integer, indices_of
from granular.aio.pipeline import filters
from granular.aio.pipeline.fields.fields import fields_of, original
from granular.aio.pipeline.fields.interface import Ctx, Fields, labels_of
from granular.aio.pipeline.nodes.combinations import Concatenate, Interleave, fetch_by_owner
from granular.aio.pipeline.nodes.indices import IndexNode, Repeat, Slice, Wrapped, look_up
from granular.aio.pipeline.nodes.selection import describe_classes, describe_unlabeled, filtered, oversampled
from granular.errors import ClosedError, InvalidArgumentError, UnknownKeyError


class _Arranged(Fields):
    """Datapoints of one or several datasets in another order."""

    def __init__(self, datasets: Sequence[Any]) -> None:
        super().__init__()
        self.parents: tuple[Any, ...] = tuple(map(fields_of, datasets))
        self._pure = all(part._pure for part in self.parents)

    @property
    def fields(self) -> tuple[str, ...] | None:
        """Names of the fields that all wrapped datasets have, sorted; None if they are unknown."""
        fields = [set(part.fields) for part in self.parents if part.fields is not None]
        return tuple(sorted(set.intersection(*fields))) if len(fields) == len(self.parents) else None

    def has(self, field: str) -> bool:
        """Return whether all wrapped datasets have the field; True if that is unknown."""
        return all(part.has(field) for part in self.parents)

    def _loads_all(self, field: str) -> bool:
        return all(part._loads_all(field) for part in self.parents)

    async def _load_all(self, field: str) -> list[Any]:
        if not self._loads_all(field):
            return await super()._load_all(field)
        values = [value for part in self.parents for value in await part._load_all(field)]
        return [values[i] for i in self._flat().tolist()]

    def _keep_labels(self) -> None:
        """Take over the labels that are known of all wrapped datasets."""
        for field in set.intersection(*(set(part.known_labels) for part in self.parents)):
            labels = [part.known_labels[field] for part in self.parents]
            if len({part.dtype.kind for part in labels}) == 1:  # numpy would turn integers among texts into texts
                self.known_labels[field] = np.concatenate(labels)[self._flat()]

    @abc.abstractmethod
    def _flat(self) -> Ints:
        """Return the positions of all datapoints in the concatenation of the wrapped datasets."""


class IndexWrapper(_Arranged):
    """A wrapper that maps each index to an index of the wrapped dataset."""

    _node: IndexNode | None = None  # selects among the positions of the wrapped dataset

    def __init__(self, dataset: Any) -> None:
        super().__init__([dataset])
        self.dataset: Any = original(dataset)  # as it was passed
        self._positions = Wrapped(range(len(self.parents[0])))

    def _wraps(self) -> Sequence[Any]:
        return (self.dataset,)

    def __len__(self) -> int:
        return len(self._selected())

    @property
    def indices(self) -> Ints:
        """The index in the wrapped dataset of each datapoint: int64 of shape ``(len(self),)``."""
        return self._flat()

    def _lookup(self, indices: Ints) -> Ints:
        return look_up(self._selected(), indices)[1]

    def _flat(self) -> Ints:
        return self._lookup(np.arange(len(self)))

    def _selected(self) -> IndexNode:
        if self._node is None:
            raise ClosedError(f'{self.describe()} is not open yet: use `await open(...)`')
        return self._node

    async def _load(self, fields: Sequence[str], indices: Ints, ctxs: Sequence[Ctx]) -> list[list[Any]]:
        columns: list[list[Any]] = await self.parents[0]._load(fields, self._lookup(indices), ctxs)
        return columns

    def _select(self, node: IndexNode) -> None:
        """Take the datapoints at the positions that a node selects, with their known labels."""
        self._node = node
        self._keep_labels()


class SubsetWrapper(IndexWrapper):
    """The datapoints at the given indices, in that order; or those of a range, given by its bounds.

    ::

        dataset = SubsetWrapper(reader, [0, 2, -1])
        second_half = SubsetWrapper(reader, start_percent=0.5)

    Args:
      dataset: a dataset of fields, or a reader.
      indices: integers, which may repeat, negative ones counted from the end; or a slice or range. Field methods
        receive nonnegative indices only; KappaData passes negative ones on.
      start_index: alternatively the first index, >= 0; None for 0.
      end_index: the index behind the last one, at most the length; None for the length. 0 is empty; in KappaData it is
        the whole dataset.
      start_percent: alternatively the start of the part, from 0 to 1, as of ``PercentFilterWrapper``.
      end_percent: its end.
    """

    def __init__(
        self,
        dataset: Any,
        indices: Any = None,
        start_index: int | None = None,
        end_index: int | None = None,
        start_percent: float | None = None,
        end_percent: float | None = None,
    ) -> None:
        super().__init__(dataset)
        length = len(self.parents[0])
        given = [
            indices is not None,
            start_index is not None or end_index is not None,
            start_percent is not None or end_percent is not None,
        ]
        if sum(given) != 1:
            raise InvalidArgumentError(
                'SubsetWrapper: expected either indices, or start_index and end_index, or start_percent and end_percent'
            )
        if given[1]:
            start = 0 if start_index is None else check_integer('start_index', start_index, 0)
            stop = length if end_index is None else min(length, check_integer('end_index', end_index, 0))
            if start > stop:
                raise InvalidArgumentError(
                    f'SubsetWrapper: expected start_index <= end_index <= {length}, got {start_index} and {end_index}'
                )
            indices = range(start, stop)
        elif given[2]:
            indices = range(*filters.percent_range(length, start_percent, end_percent))
        self._select(Slice(self._positions, indices_of(indices, length, 'SubsetWrapper')))

    def describe(self) -> str:
        return f'SubsetWrapper({self._selected().describe().removeprefix("slice of ")})'


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
      ceil_from_index: True to round the start up to a whole datapoint in place of down.
      ceil_to_index: True to round the end up.
    """

    def __init__(
        self,
        dataset: Any,
        from_percent: float | None = None,
        to_percent: float | None = None,
        ceil_from_index: bool = False,
        ceil_to_index: bool = False,
    ) -> None:
        super().__init__(dataset)
        self._start, self._stop = filters.percent_range(
            len(self._positions), from_percent, to_percent, ceil_from_index, ceil_to_index
        )
        self._select(Slice(self._positions, slice(self._start, self._stop)))

    def describe(self) -> str:
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
        self._times = filters.repetitions_of(len(self._positions), repetitions, min_size)
        self._select(Repeat(self._positions, self._times))

    def describe(self) -> str:
        return f'RepeatWrapper({self._times})'


class ShuffleWrapper(IndexWrapper):
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
        self._select(Slice(self._positions, filters.shuffled(len(self._positions), seed)))

    def describe(self) -> str:
        return f'ShuffleWrapper(seed={self._seed})'


class _ByLabel(IndexWrapper):
    """Datapoints selected by their labels."""

    def __init__(self, dataset: Any, field: str | None) -> None:
        super().__init__(dataset)
        if field is None:
            names = self.parents[0].fields or ()
            if 'class' in names and 'label' in names:
                shown = self.parents[0].describe()
                raise InvalidArgumentError(f"{shown}: has fields 'class' and 'label': pass field= to choose one")
            field = 'class' if 'class' in names else 'label'  # KappaData's name, or that of most datasets
        self._field = field

    @classmethod
    async def open(cls, *args: Any, **kwargs: Any) -> Self:
        """Create the wrapper with the constructor's arguments, and read the labels."""
        self = cls(*args, **kwargs)
        await read_labels(self)
        return self

    @abc.abstractmethod
    async def _choose(self, labels: filters.Labels) -> IndexNode: ...


async def read_labels(wrapper: _ByLabel) -> None:
    """Read the labels of a wrapper, and select the datapoints by them."""
    wrapper._select(await wrapper._choose(await labels_of(wrapper.parents[0], wrapper._field)))


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
      field: field of the label; None for ``'label'``, or ``'class'`` if the dataset has that one.
      valid_class_names: names of the classes to keep; their positions in the dataset's ``class_names`` are the classes.
      invalid_class_names: names of the classes to remove.

    Raises:
      UnknownKeyError: if a name is not one of ``class_names``. KappaData ignores it.
    """

    def __init__(
        self,
        dataset: Any,
        valid_classes: Any = None,
        invalid_classes: Any = None,
        field: str | None = None,
        valid_class_names: Sequence[str] | None = None,
        invalid_class_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(dataset, field)
        if sum(x is not None for x in (valid_classes, invalid_classes, valid_class_names, invalid_class_names)) != 1:
            raise InvalidArgumentError(
                'ClassFilterWrapper: expected either valid_classes, invalid_classes, valid_class_names or '
                'invalid_class_names'
            )
        if valid_class_names is not None:
            valid_classes = _classes_of(self.parents[0], valid_class_names)
        if invalid_class_names is not None:
            invalid_classes = _classes_of(self.parents[0], invalid_class_names)
        self._description = describe_classes(valid_classes, invalid_classes)
        self._valid, self._invalid = valid_classes, invalid_classes

    async def _choose(self, labels: filters.Labels) -> IndexNode:
        return await filtered(self._positions, self._field, self._valid, self._invalid, labels)

    def describe(self) -> str:
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
      field: field of the label, one per datapoint; None for ``'label'``, or ``'class'`` if the dataset has that one.
      unlabeled: label that means "no class": its datapoints appear once. None if there is no such label.
      mode: the name of ``strategy`` in KappaData 1; it replaces it.
    """

    def __init__(
        self,
        dataset: Any,
        strategy: filters.Strategy = 'multiply',
        field: str | None = None,
        unlabeled: int | str | None = -1,
        mode: filters.Strategy | None = None,
    ) -> None:
        super().__init__(dataset, field)
        self._strategy, self._unlabeled = strategy if mode is None else mode, unlabeled

    async def _choose(self, labels: filters.Labels) -> IndexNode:
        return await oversampled(self._positions, self._field, self._strategy, self._unlabeled, labels)

    def describe(self) -> str:
        return f'OversamplingWrapper({self._strategy!r}, field={self._field!r}{describe_unlabeled(self._unlabeled)})'


class KDConcatDataset(_Arranged):
    """Datasets of fields, concatenated. A batch fetches once from each dataset involved, concurrently.

    ::

        dataset = KDConcatDataset([reader, ShuffleWrapper(reader, seed=0)])

    Attributes:
      datasets: the datasets, as they were passed. Attributes that pass through are those of the first one.

    Args:
      datasets: datasets of fields, or readers. The result has the fields that all of them have.
      balanced_sampling: True to take a datapoint of each dataset in turn, starting again with those that end, until the
        longest one has been read. In KappaData it then has no length.
    """

    def __init__(self, datasets: Sequence[Any], balanced_sampling: bool = False) -> None:
        given = list(datasets) if isinstance(datasets, Iterable) else []
        if not given:
            raise InvalidArgumentError(f'KDConcatDataset: expected one dataset or more, got {datasets!r:.100}')
        super().__init__(given)
        self.datasets: list[Any] = [original(dataset) for dataset in given]
        positions = [Wrapped(range(len(part))) for part in self.parents]
        lengths = [len(part) for part in positions]
        if balanced_sampling and not all(lengths):
            raise InvalidArgumentError(
                f'KDConcatDataset: expected datapoints in every dataset, got none in number {lengths.index(0)}'
            )
        self._length = max(lengths) * len(lengths) if balanced_sampling else sum(lengths)
        self._chosen = Interleave(positions) if balanced_sampling else Concatenate(positions)
        self._keep_labels()

    def __len__(self) -> int:
        return self._length

    def _wraps(self) -> Sequence[Any]:
        return self.datasets

    def _listed(self) -> bool:
        return False

    def _choose(self, indices: Ints) -> tuple[Ints, Ints]:
        owners, inner = self._chosen.choose(indices)
        return owners, inner % np.array([len(part) for part in self._chosen.parents])[owners]

    def _flat(self) -> Ints:
        owners, inner = self._choose(np.arange(len(self)))
        stops = np.cumsum([len(part) for part in self._chosen.parents])
        return np.concatenate([[0], stops])[owners] + inner

    async def _load(self, fields: Sequence[str], indices: Ints, ctxs: Sequence[Ctx]) -> list[list[Any]]:
        owners, inner = self._choose(indices)

        async def fetch(owner: int, at: Ints) -> list[tuple[Any, ...]]:
            columns = await self.parents[owner]._load(fields, inner[at], [ctxs[i] for i in at.tolist()])
            return list(zip(*columns, strict=True)) if fields else [()] * len(at)

        rows = await fetch_by_owner(owners, fetch)
        return [[row[i] for row in rows] for i in range(len(fields))]

    def describe(self) -> str:
        return f'KDConcatDataset of {len(self.parents)}{", balanced" if isinstance(self._chosen, Interleave) else ""}'


def _classes_of(dataset: Fields, names: Sequence[str]) -> list[int]:
    known = getattr(dataset, 'class_names', None)
    if known is None:
        raise InvalidArgumentError(f'{dataset.describe()}: has no class_names: choose classes by number')
    listed = [str(name) for name in known]
    several = isinstance(names, Iterable) and not isinstance(names, str)
    wanted = set(map(str, names if several else [names]))
    if missing := sorted(wanted.difference(listed)):
        raise UnknownKeyError(f'{dataset.describe()}: unknown classes {missing}: expected some of {listed[:20]}')
    return [number for number, name in enumerate(listed) if name in wanted]

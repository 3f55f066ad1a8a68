"""The sync API of :mod:`granular.aio.fields`: datasets of fields and their wrappers."""

import functools
import inspect
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, SupportsIndex

from granular import filters
from granular.aio.fields import fields as core
from granular.aio.fields import mode_wrapper, wrappers
from granular.aio.fields.fields import FieldDataset
from granular.aio.pipeline.nodes.source import Source
from granular.aio.runtime.bridge import run
from granular.aio.runtime.threads import current, secondary_threads
from granular.sync.base import Batched, blocking
from granular.sync.pipeline import MapDataset

__all__ = [
    'ClassFilterWrapper',
    'FieldConcat',
    'FieldDataset',
    'FieldWrapper',
    'ModeWrapper',
    'OversamplingWrapper',
    'PercentFilterWrapper',
    'RepeatWrapper',
    'ShuffleWrapper',
    'SubsetWrapper',
]


class Fields:
    """A dataset whose fields are read separately, with ``getitem_x(index, ctx=None)`` and ``getitems_x(indices)``.

    Attributes:
      aio: the async counterpart, which does the work.
    """

    aio: core.Fields

    def __len__(self) -> int:
        return len(self.aio)

    @property
    def fields(self) -> tuple[str, ...] | None:
        """The names of the fields, sorted; None if they cannot be determined."""
        return self.aio.fields

    def has(self, field: str) -> bool:
        """Return whether the field exists, as far as this can be determined."""
        return self.aio.has(field)

    def __getitem__(self, index: Any) -> Any:
        raise core.no_elements(self)

    def __repr__(self) -> str:
        return repr(self.aio)

    def __getattr__(self, name: str) -> Any:
        if name.startswith('_') or name == 'aio':
            raise AttributeError(f'{type(self).__name__!r} object has no attribute {name!r}')
        of = self.aio.dataset if isinstance(self.aio, core.Methods) else None
        if not name.startswith(('getitem_', 'getitems_')):
            return getattr(of, name)  # class names and other attributes
        if isinstance(self.aio, core.Methods) and hasattr(type(of), name):
            method = getattr(of, name)
            if not inspect.iscoroutinefunction(method) and name in self.aio.own.values():
                return method
        return functools.partial(_blocking, getattr(self.aio, name))


class FieldWrapper(core.FieldWrapper):
    """A dataset that overrides some fields of another one by methods of its own and passes on all others.

    ::

        class Scaled(granular.FieldWrapper):
            def getitem_image(self, index, ctx=None):
                return self.dataset.getitem_image(index, ctx) / 255

    Fields that are passed on are still read in batches. A method reads the wrapped dataset with
    ``self.dataset.getitem_x(index, ctx)``, which blocks, or, for a batch, with ``self.dataset.getitems_x(indices,
    ctxs)``, which reads concurrently if the dataset is a reader.

    Args:
      dataset: a dataset of fields, or a reader, whose fields are its keys.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset if isinstance(dataset, Fields) else _Wrapped(dataset)


class _Wrapped(Fields):
    """The dataset that a wrapper wraps."""

    def __init__(self, dataset: Any) -> None:
        self.aio = core.fields_of(dataset)


class SubsetWrapper(Fields):
    """The datapoints at some indices, in the order given.

    ::

        first_and_last = granular.SubsetWrapper(reader, [0, -1])

    Args:
      dataset: a dataset of fields, or a reader.
      indices: integers, negative ones from the end, which may repeat; or a slice or range. Loaders only see
        non-negative indices, whereas KappaData passes negative ones on.
    """

    def __init__(self, dataset: Any, indices: Any) -> None:
        self.aio = wrappers.SubsetWrapper(dataset, indices)


class PercentFilterWrapper(Fields):
    """A contiguous part of the datapoints. Adjacent ranges neither share nor omit a datapoint.

    ::

        train = granular.PercentFilterWrapper(reader, to_percent=0.9)
        test = granular.PercentFilterWrapper(reader, from_percent=0.9)

    A bound within 1e-15 of a whole datapoint is rounded to it: 0.29 of 100 is 29, whereas KappaData truncates the
    floating-point product to 28. ``to_percent=0`` is empty, whereas KappaData returns all datapoints.

    Args:
      dataset: a dataset of fields, or a reader.
      from_percent: start of the part, from 0 to 1; None for 0.
      to_percent: end of the part, from 0 to 1; None for 1.
    """

    def __init__(self, dataset: Any, from_percent: float | None = None, to_percent: float | None = None) -> None:
        self.aio = wrappers.PercentFilterWrapper(dataset, from_percent, to_percent)


class RepeatWrapper(Fields):
    """All datapoints several times, one repetition after the other.

    ::

        three_epochs = granular.RepeatWrapper(reader, repetitions=3)

    Args:
      dataset: a dataset of fields, or a reader; not empty.
      repetitions: number of repetitions.
      min_size: alternatively, the minimum number of datapoints; rounded up to whole repetitions.
    """

    def __init__(self, dataset: Any, repetitions: int | None = None, min_size: int | None = None) -> None:
        self.aio = wrappers.RepeatWrapper(dataset, repetitions, min_size)


class ShuffleWrapper(Fields):
    """All datapoints in shuffled order, the same as KappaData's for the same seed.

    ::

        images = granular.ModeWrapper(granular.ShuffleWrapper(reader, seed=0), 'image')

    Args:
      dataset: a dataset of fields, or a reader.
      seed: an integer >= 0. Required, because a run without a seed could not be repeated.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.aio = wrappers.ShuffleWrapper(dataset, seed)


class ClassFilterWrapper(Fields):
    """The datapoints of some classes, or of all others.

    ::

        digits = granular.ClassFilterWrapper(reader, valid_classes=[3, 5], field='label')
        images = granular.ModeWrapper(digits, 'image')

    Labels are read once, in one fetch, and no other field is. A datapoint with several classes stays if any of them is
    valid, or none of them invalid.

    Args:
      dataset: a dataset of fields, or a reader.
      valid_classes: the classes to keep: a list, a range or an array of integers or strings.
      invalid_classes: alternatively, the classes to drop.
      field: the field of the labels.
    """

    def __init__(
        self, dataset: Any, valid_classes: Any = None, invalid_classes: Any = None, field: str = 'label'
    ) -> None:
        self.aio = run(wrappers.ClassFilterWrapper.open(dataset, valid_classes, invalid_classes, field))


class OversamplingWrapper(Fields):
    """The datapoints, with those of rare classes repeated. Labels are read once, in one fetch.

    ::

        balanced = granular.OversamplingWrapper(reader, strategy='exact', field='label')

    A class without datapoints is skipped; KappaData's ``'exact'`` does not terminate for one. Datapoints without a
    label are kept.

    Args:
      dataset: a dataset of fields, or a reader.
      strategy: ``'multiply'``, as defined by KappaData: a class that fits k times into the largest one appears k times;
        ``'exact'``: each class is repeated to exactly the count of the largest one.
      field: the field of the labels, one per datapoint.
      unlabeled: the label that stands for no class; its datapoints appear once. None if there is none.
    """

    def __init__(
        self,
        dataset: Any,
        strategy: filters.Strategy = 'multiply',
        field: str = 'label',
        unlabeled: int | str | None = -1,
    ) -> None:
        self.aio = run(wrappers.OversamplingWrapper.open(dataset, strategy, field, unlabeled))


class FieldConcat(Fields):
    """Datasets of fields, one after the other. A batch is one fetch from each dataset that it touches, concurrently.

    ::

        both = granular.FieldConcat([reader, granular.ShuffleWrapper(reader, seed=0)])

    Args:
      datasets: datasets of fields, or readers. The result has the fields that all of them have.
    """

    def __init__(self, datasets: Sequence[Any]) -> None:
        self.aio = wrappers.FieldConcat(datasets)


class ModeWrapper(Batched):
    """Loads exactly the fields of each datapoint that a mode names, in its order.

    ::

        dataset = granular.ModeWrapper(reader, 'image label')
        image, label = dataset[0]
        pairs = dataset.fetch([3, 1, 4])

    An element is the field's value if the mode names one field, and a tuple of values if it names several; with
    ``return_ctx`` it is a pair of that and the datapoint's context dict. A batch is loaded field by field; from a
    reader, all fields that are keys are read concurrently. Memory: the elements of one fetch, and during iteration
    those that the stream prefetches.

    Besides the dataset's fields, ``index`` is the datapoint's index, from 0 on, and ``ctx.name`` the value that loaders
    have stored in the context dict under that name. Each datapoint gets a new dict, even without ``return_ctx``, so
    that loaders need not check for None, which KappaData passes in that case.

    Args:
      dataset: a dataset of fields, a reader, whose fields are its keys, or a MapDataset of dicts.
      mode: field names separated by spaces, or a sequence of names. A repeated name is loaded repeatedly.
      return_ctx: return the context dict with each element.

    Attributes:
      aio: the async counterpart, which does the work.

    Raises:
      UnknownKeyError: for a field that does not exist; the message lists the existing ones.
    """

    def __init__(self, dataset: Any, mode: str | Sequence[str], return_ctx: bool = False) -> None:
        self.aio = mode_wrapper.ModeWrapper(dataset, mode, return_ctx)

    @property
    def mode(self) -> str:
        """The names of the fields, separated by spaces."""
        return self.aio.mode

    @property
    def return_ctx(self) -> bool:
        """True if elements come with their context dict."""
        return self.aio.return_ctx

    @property
    def node(self) -> Source:
        """The pipeline source that pipelines and loaders read from."""
        return self.aio.node

    def __len__(self) -> int:
        return len(self.aio)

    def __repr__(self) -> str:
        return repr(self.aio)

    def __str__(self) -> str:
        return str(self.aio)

    get = blocking(mode_wrapper.ModeWrapper.get)

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        return run(self.aio.get(index))

    fetch = blocking(mode_wrapper.ModeWrapper.fetch)

    def __iter__(self) -> Iterator[Any]:
        return iter(MapDataset.source(self).to_iter_dataset(allow_nones=True))


def _blocking(loads: Any, *args: Any, **kwargs: Any) -> Any:
    """Read a field from inside a loader method.

    The method may occupy a thread of the pool, so values are decoded in secondary threads: waiting for the same pool
    could deadlock.
    """
    read: Coroutine[Any, Any, Any] = loads(*args, **kwargs)
    token = current.set(secondary_threads())
    try:
        return run(read)
    finally:
        current.reset(token)

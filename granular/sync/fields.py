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
from granular.sync.base import Batched, blocking, sync_doc
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
    __doc__ = sync_doc(wrappers.SubsetWrapper)

    aio: wrappers.SubsetWrapper

    def __init__(self, dataset: Any, indices: Any) -> None:
        self.aio = wrappers.SubsetWrapper(dataset, indices)


class PercentFilterWrapper(Fields):
    __doc__ = sync_doc(wrappers.PercentFilterWrapper)

    aio: wrappers.PercentFilterWrapper

    def __init__(self, dataset: Any, from_percent: float | None = None, to_percent: float | None = None) -> None:
        self.aio = wrappers.PercentFilterWrapper(dataset, from_percent, to_percent)


class RepeatWrapper(Fields):
    __doc__ = sync_doc(wrappers.RepeatWrapper)

    aio: wrappers.RepeatWrapper

    def __init__(self, dataset: Any, repetitions: int | None = None, min_size: int | None = None) -> None:
        self.aio = wrappers.RepeatWrapper(dataset, repetitions, min_size)


class ShuffleWrapper(Fields):
    __doc__ = sync_doc(wrappers.ShuffleWrapper)

    aio: wrappers.ShuffleWrapper

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

    aio: wrappers.ClassFilterWrapper

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

    aio: wrappers.OversamplingWrapper

    def __init__(
        self,
        dataset: Any,
        strategy: filters.Strategy = 'multiply',
        field: str = 'label',
        unlabeled: int | str | None = -1,
    ) -> None:
        self.aio = run(wrappers.OversamplingWrapper.open(dataset, strategy, field, unlabeled))


class FieldConcat(Fields):
    __doc__ = sync_doc(wrappers.FieldConcat)

    aio: wrappers.FieldConcat

    def __init__(self, datasets: Sequence[Any]) -> None:
        self.aio = wrappers.FieldConcat(datasets)


class ModeWrapper(Batched):
    __doc__ = sync_doc(mode_wrapper.ModeWrapper)

    aio: mode_wrapper.ModeWrapper

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

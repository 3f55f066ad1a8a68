"""The sync API of datasets of fields and their wrappers."""

import functools
import inspect
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, SupportsIndex

from numpy.typing import ArrayLike

from granular import filters
from granular.aio.fields import fields as core
from granular.aio.fields import mode_wrapper as coremode
from granular.aio.fields import wrappers as corewrappers
from granular.aio.fields.fields import FieldDataset
from granular.aio.pipeline.nodes.source import Source
from granular.aio.runtime.bridge import run
from granular.aio.runtime.threads import beside, current
from granular.sync.base import Batched
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
    """A dataset of fields, each of which is had by itself: ``getitem_x(index, ctx=None)``, and ``getitems_x(indices)``.

    Attributes:
      aio: the asynchronous twin, which does the work.
    """

    aio: core.Fields

    def __len__(self) -> int:
        return len(self.aio)

    @property
    def fields(self) -> tuple[str, ...] | None:
        """The fields that there are, sorted; None if it cannot be known."""
        return self.aio.fields

    def has(self, field: str) -> bool:
        """Whether there is such a field, as far as one can know."""
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
            return getattr(of, name)  # class names and the like
        if isinstance(self.aio, core.Methods) and hasattr(type(of), name):
            method = getattr(of, name)
            if not inspect.iscoroutinefunction(method) and name in self.aio.own.values():
                return method
        return functools.partial(_blocking, getattr(self.aio, name))


class FieldWrapper(core.FieldWrapper):
    """A dataset over another one: some fields are methods of its own, all others are those of the dataset below.

    What is passed on stays in bulk. A method of its own reads below by ``self.dataset.getitem_x(index, ctx)``, which
    blocks, or for a batch by ``self.dataset.getitems_x(indices, ctxs)``, which over a reader is one fan-out.

    Args:
      dataset: a dataset of fields, or a reader, whose fields are its keys.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset if isinstance(dataset, Fields) else _Below(dataset)


class _Below(Fields):
    """What a wrapper has below it."""

    def __init__(self, dataset: Any) -> None:
        self.aio = core.fields_of(dataset)


class SubsetWrapper(Fields):
    """The samples at some indices, in the order given.

    Args:
      dataset: a dataset of fields, or a reader.
      indices: integers, negative ones from the end, which may repeat; or a slice or range. Loaders see none that is
        negative, where KappaData hands them on.
    """

    def __init__(self, dataset: Any, indices: Any) -> None:
        self.aio = corewrappers.SubsetWrapper(dataset, indices)


class PercentFilterWrapper(Fields):
    """A part of the samples. Ranges that meet share no sample and leave out none.

    A bound within 1e-15 of a whole sample is that sample: 0.29 of 100 is 29, where KappaData, which cuts off what
    floating point gives, comes to 28. ``to_percent=0`` is empty, where it has all.

    Args:
      dataset: a dataset of fields, or a reader.
      from_percent: from 0 to 1, where the part begins; None for 0.
      to_percent: from 0 to 1, where it ends; None for 1.
    """

    def __init__(self, dataset: Any, from_percent: float | None = None, to_percent: float | None = None) -> None:
        self.aio = corewrappers.PercentFilterWrapper(dataset, from_percent, to_percent)


class RepeatWrapper(Fields):
    """All samples several times, one time after the other.

    Args:
      dataset: a dataset of fields, or a reader; not empty.
      repetitions: how often.
      min_size: in place of it, how many samples there are to be, or somewhat more, as repetitions are whole.
    """

    def __init__(self, dataset: Any, repetitions: int | None = None, min_size: int | None = None) -> None:
        self.aio = corewrappers.RepeatWrapper(dataset, repetitions, min_size)


class ShuffleWrapper(Fields):
    """All samples in another order, that of KappaData for the same seed.

    Args:
      dataset: a dataset of fields, or a reader.
      seed: from 0 on. There is no order without one, as no run could be repeated.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.aio = corewrappers.ShuffleWrapper(dataset, seed)


class ClassFilterWrapper(Fields):
    """The samples of some classes, or of all others.

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
        self.aio = run(corewrappers.ClassFilterWrapper.open(dataset, valid_classes, invalid_classes, field))


class OversamplingWrapper(Fields):
    """Samples of rare classes repeated. Labels are read once, in bulk.

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
        self.aio = run(corewrappers.OversamplingWrapper.open(dataset, strategy, field, unlabeled))


class FieldConcat(Fields):
    """Datasets of fields one after the other. A batch is one fetch of each that it touches, at the same time.

    Args:
      datasets: datasets of fields, or readers. Its fields are those that all of them have.
    """

    def __init__(self, datasets: Sequence[Any]) -> None:
        self.aio = corewrappers.FieldConcat(datasets)


class ModeWrapper(Batched):
    """Loads those fields of each sample that a mode names, in its order, and nothing else.

    A sample is the value of the field if there is one, and a tuple of them if there are several; with ``return_ctx``
    the pair of that and the sample's dict. A batch is loaded field by field; of a reader, in one fan-out over these
    keys. In memory are the samples of one fetch, and while iterating those that a stream reads ahead.

    Beside the fields of the dataset, ``index`` is the index of the sample, from 0 on, and ``ctx.name`` what the loaders
    have put into its dict under that name. Every sample has a fresh dict, whether it is returned or not, so that
    loaders need not ask; KappaData passes None if it is not.

    Args:
      dataset: a dataset of fields, a reader, whose fields are its keys, or a MapDataset of dicts.
      mode: names of fields with spaces between them, or a sequence of names. A name may come twice: it is loaded twice.
      return_ctx: whether a sample comes with its dict.

    Attributes:
      aio: the asynchronous twin, which does the work.

    Raises:
      UnknownKeyError: for a field that there is not; it names those that there are.
    """

    def __init__(self, dataset: Any, mode: str | Sequence[str], return_ctx: bool = False) -> None:
        self.aio = coremode.ModeWrapper(dataset, mode, return_ctx)

    @property
    def mode(self) -> str:
        """The names of the fields, with spaces between them."""
        return self.aio.mode

    @property
    def return_ctx(self) -> bool:
        """Whether a sample comes with its dict."""
        return self.aio.return_ctx

    @property
    def node(self) -> Source:
        """The source that pipelines and loaders read."""
        return self.aio.node

    def __len__(self) -> int:
        return len(self.aio)

    def __repr__(self) -> str:
        return repr(self.aio)

    def __str__(self) -> str:
        return str(self.aio)

    def get(self, index: SupportsIndex | slice) -> Any:
        """A sample, or a list of them for a slice; as ``wrapper[index]``.

        Raises:
          OutOfRangeError: an ``IndexError``, for an index beyond what is there.
        """
        return run(self.aio.get(index))

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        return run(self.aio.get(index))

    def fetch(self, indices: ArrayLike | slice) -> list[Any]:
        """Many samples, in the order asked, each field of all of them at once.

        Args:
          indices: a 1-D sequence of integers, in any order, repeated or negative; or a slice or range.
        """
        return run(self.aio.fetch(indices))

    def __iter__(self) -> Iterator[Any]:
        return iter(MapDataset.source(self).to_iter_dataset(allow_nones=True))


def _blocking(loads: Any, *args: Any, **kwargs: Any) -> Any:
    """A field, read for a method that may hold a thread of the pool: what is decoded for it has other threads."""
    read: Coroutine[Any, Any, Any] = loads(*args, **kwargs)
    token = current.set(beside())
    try:
        return run(read)
    finally:
        current.reset(token)

"""The sync API of :mod:`granular.aio.pipeline.fields`: datasets of fields and their wrappers."""

import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Final, Generic, Self, SupportsIndex, cast

from granular._support.indexing import Ints
from granular._support.other_names import Elementless
from granular.aio.pipeline.fields import fields as core
from granular.aio.pipeline.fields import interface, mode_wrapper, wrappers
from granular.aio.pipeline.fields.navigation import Nested
from granular.aio.pipeline.nodes.source import Source
from granular.aio.runtime.portal import run
from granular.sync.base import A, Batched, Blocking, blocking, constructing, passed_on
from granular.sync.pipeline import MapDataset

_LOADING: Final = (interface.ONE, interface.MANY, interface.ALL)


class Disposable(Blocking, Nested, Generic[A]):
    """A context manager that disposes of the wrapped datasets at its end."""

    aio: A

    def _wraps(self) -> Sequence[Any]:
        return cast(Sequence[Any], self.aio._wraps())

    def _listed(self) -> bool:
        return cast(bool, self.aio._listed())

    def dispose(self) -> None:
        """Dispose of the wrapped datasets: close those that are readers."""
        _blocking(self.aio.dispose)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.dispose()


class Fields(Elementless, Disposable[A]):
    """A dataset whose fields are read separately: ``getitem_x(index, ctx=None)``, ``getitems_x(indices)``, and
    ``getall_x()`` for all datapoints.
    """

    fields: tuple[str, ...] | None = passed_on(interface.Fields.fields)

    @property
    def parents(self) -> tuple[Any, ...]:
        """The wrapped datasets."""
        return tuple(self._wraps())

    def has(self, field: str) -> bool:
        """Return whether the field exists, as far as this can be determined."""
        return bool(self.aio.has(field))

    def __getattr__(self, name: str) -> Any:
        if name.startswith('_') or name == 'aio':
            raise AttributeError(f'{type(self).__name__!r} object has no attribute {name!r}')
        if not name.startswith(_LOADING):
            # Class names and other attributes are the dataset's own, for which an adapter stands.
            adapter = isinstance(self.aio, core.Adapter)
            return getattr(self.aio.dataset, name) if adapter else getattr(self.aio, name)
        if isinstance(self.aio, core.Methods) and hasattr(type(self.aio.dataset), name):
            method = getattr(self.aio.dataset, name)
            if not inspect.iscoroutinefunction(method) and name in self.aio.own.values():
                return method
        return functools.partial(_blocking, getattr(self.aio, name))


class KDWrapper(core.KDWrapper):
    """A dataset that overrides some fields of another one by methods of its own and passes on all others.

    ::

        class Scaled(granular.kappadata.KDWrapper):
            def getitem_image(self, index, ctx=None):
                return self.dataset.getitem_image(index, ctx) / 255

    Fields that are passed on are still read in batches. A method reads the wrapped dataset with
    ``self.dataset.getitem_x(index, ctx)``, which blocks, or, for a batch, with ``self.dataset.getitems_x(indices,
    ctxs)``, which reads concurrently if the dataset is a reader.

    Args:
      dataset: a dataset of fields, or a reader, whose fields are its keys.

    Attributes:
      dataset: the wrapped dataset; a reader, and a dataset with coroutine functions, is given the methods above.
    """

    def __init__(self, dataset: Any) -> None:
        blocking = isinstance(dataset, Fields) or core.is_blocking(dataset)
        self.dataset = dataset if blocking else _Wrapped(dataset)

    def dispose(self) -> None:  # type: ignore[override]
        _blocking(super().dispose)

    def _load_all(self, field: str) -> Any:
        return _blocking(core.fields_of(self)._load_all, field)


class _Wrapped(Fields[interface.Fields]):
    def __init__(self, dataset: Any) -> None:
        self.aio = core.fields_of(dataset)


class _Indexed(Fields[A]):
    """A wrapper that maps each index to an index of the wrapped dataset."""

    indices: Ints = passed_on(wrappers.IndexWrapper.indices)


class SubsetWrapper(_Indexed[wrappers.SubsetWrapper]):
    @constructing(wrappers.SubsetWrapper)
    def __init__(self) -> None: ...


class PercentFilterWrapper(_Indexed[wrappers.PercentFilterWrapper]):
    @constructing(wrappers.PercentFilterWrapper)
    def __init__(self) -> None: ...


class RepeatWrapper(_Indexed[wrappers.RepeatWrapper]):
    @constructing(wrappers.RepeatWrapper)
    def __init__(self) -> None: ...


class ShuffleWrapper(_Indexed[wrappers.ShuffleWrapper]):
    @constructing(wrappers.ShuffleWrapper)
    def __init__(self) -> None: ...


class _ByLabel(_Indexed[A]):
    """A wrapper that selects datapoints by their labels, which it reads when it is constructed."""

    def _open(self, counterpart: Any) -> None:
        run(wrappers.read_labels(counterpart))
        super()._open(counterpart)


class ClassFilterWrapper(_ByLabel[wrappers.ClassFilterWrapper]):
    @constructing(wrappers.ClassFilterWrapper)
    def __init__(self) -> None: ...


class OversamplingWrapper(_ByLabel[wrappers.OversamplingWrapper]):
    @constructing(wrappers.OversamplingWrapper)
    def __init__(self) -> None: ...


class KDConcatDataset(Fields[wrappers.KDConcatDataset]):
    @constructing(wrappers.KDConcatDataset)
    def __init__(self) -> None: ...


class ModeWrapper(Disposable[mode_wrapper.ModeWrapper], Batched):
    @constructing(mode_wrapper.ModeWrapper)
    def __init__(self) -> None: ...

    mode: str = passed_on(mode_wrapper.ModeWrapper.mode)
    return_ctx: bool = passed_on(mode_wrapper.ModeWrapper.return_ctx)
    node: Source = passed_on(mode_wrapper.ModeWrapper.node)

    def __str__(self) -> str:
        return str(self.aio)

    get = blocking(mode_wrapper.ModeWrapper.get, immediate=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith('_') or name == 'aio':
            raise AttributeError(f'{type(self).__name__!r} object has no attribute {name!r}')
        value = getattr(self.aio, name)
        return functools.partial(_blocking, value) if name.startswith(_LOADING) else value

    def __getitem__(self, index: SupportsIndex | slice | Sequence[SupportsIndex]) -> Any:
        return run(self.aio.get(index), immediate=True)

    fetch = blocking(mode_wrapper.ModeWrapper.fetch, immediate=True)

    def __iter__(self) -> Iterator[Any]:
        return iter(MapDataset.source(self).to_iter_dataset(allow_nones=True))


def _blocking(loads: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a coroutine function that a loader method, or any other blocking code, calls."""
    return run(loads(*args, **kwargs))

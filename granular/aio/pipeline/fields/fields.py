"""Datasets of fields that are loaded separately, by methods such as ``getitem_x`` and ``getitem_y``.

The names are those of KappaData (https://pypi.org/project/kappadata). In addition, a batch is loaded field by field,
each in bulk, so that over a reader it is one fan-out over the requested keys.
"""

import abc
import functools
import inspect
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set, Sized
from typing import Any, Final, Self

from granular._support.indexing import Ints
from granular._support.other_names import Elementless
from granular._support.text import counted
from granular.aio.pipeline.execution.failures import without_failures
from granular.aio.pipeline.fields.interface import ALL, MANY, ONE, Ctx, Fields
from granular.aio.pipeline.fields.navigation import Nested, dispose_of
from granular.aio.pipeline.nodes.adapters import convert, takes_mask
from granular.aio.pipeline.nodes.elements import selected
from granular.aio.pipeline.nodes.indices import check_finite
from granular.aio.pipeline.nodes.source import Source
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.portal import run
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import call_or_await, map_threads
from granular.aio.runtime.user_functions import await_user
from granular.errors import DatapointError, InvalidArgumentError
from granular.metrics import DECODE, timed

_DEEP: Final = 32  # maximum depth of nested wrappers of another library


class KDDataset(Elementless, Nested, abc.ABC):
    """A dataset whose fields are methods; a :class:`ModeWrapper` calls those of the requested fields.

    ::

        class Squares(KDDataset):
            def __len__(self):
                return 100

            def getitem_x(self, index, ctx=None):
                return index**2

    ``getitem_x(self, index, ctx=None)`` returns field ``x`` of a datapoint. It is a blocking method, called in threads,
    or a coroutine function, run concurrently for a batch. ``ctx`` is a dict of this datapoint: a method may store
    random values in it, such as the parameters of an augmentation, for fields that are loaded later and for the caller.

    ``getitems_x(self, indices, ctxs)``, if defined, returns field ``x`` of a whole batch: a list, for a list of indices
    and a list of their dicts. Of the two methods, the one defined in the most derived class is used, so that overriding
    either of them in a subclass takes effect. ``getall_x(self)``, if defined, returns field ``x`` of all datapoints,
    and is preferred where a wrapper needs all labels; every dataset can be asked for ``getall_x()``.

    ``dispose`` releases resources, such as open files; a wrapper passes it on, and the dataset is a context manager
    that calls it. ``getshape_x(self)`` returns the shape of field ``x``, for a class ``(number of classes,)``; then
    ``getdim_x()`` is its only dimension. Other attributes, such as ``class_names``, are those of every wrapper.
    """

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @property
    def fields(self) -> tuple[str, ...] | None:
        """Names of the fields, sorted; None if they are unknown."""
        return tuple(sorted(_methods(type(self))))

    def dispose(self) -> Any:
        """Release resources, such as open files; subclasses override it."""

    def __enter__(self) -> Self:
        if inspect.iscoroutinefunction(self.dispose):
            raise InvalidArgumentError(f'{type(self).__name__}: its dispose is a coroutine function: use `async with`')
        return self

    def __exit__(self, *exception: object) -> None:
        self.dispose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await dispose_of(self)

    def _listed(self) -> bool:
        return bool(self._wraps())

    def __getattr__(self, name: str) -> Any:
        if name.startswith(ALL) and fields_of(self).has(field := name.removeprefix(ALL)):
            return functools.partial(self._load_all, field)
        if name.startswith((ONE, MANY)) and name.partition('_')[2] in _methods(type(self)):
            return functools.partial(self._load_by, name)  # the other one of the two methods is defined
        return self._inherited(name)

    def _load_by(self, name: str, *args: Any) -> Any:
        return run(getattr(fields_of(self), name)(*args), immediate=True)

    def _load_all(self, field: str) -> Any:
        return run(fields_of(self)._load_all(field), immediate=True)

    def __repr__(self) -> str:
        return f'{type(self).__qualname__}()'


class KDWrapper(KDDataset):
    """A dataset that wraps another one: its own methods load some fields, the wrapped dataset loads all others.

    ::

        class Normalized(KDWrapper):
            async def getitem_image(self, index, ctx=None):
                return (await self.dataset.getitem_image(index, ctx)) / 255

    Fields of the wrapped dataset are still loaded in bulk. A method that reads them is a coroutine function, which
    awaits ``self.dataset.getitem_x(index, ctx)``, or for a batch ``self.dataset.getitems_x(indices, ctxs)``, which over
    a reader is one fan-out.

    Args:
      dataset: a dataset of fields, or a reader, whose fields are its keys.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset: Any = fields_of(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def fields(self) -> tuple[str, ...] | None:
        """Names of its own fields and those of the wrapped dataset, sorted; None if the latter are unknown."""
        wrapped = fields_of(self.dataset).fields
        return None if wrapped is None else tuple(sorted({*_methods(type(self)), *wrapped}))

    def __getattr__(self, name: str) -> Any:
        if name == 'dataset':  # before __init__, or while it is unpickled
            raise AttributeError(f'{type(self).__name__!r} object has no attribute {name!r}')
        # Only fields without a method of this class are delegated.
        if name.startswith((ONE, MANY)) and name.partition('_')[2] not in _methods(type(self)):
            return getattr(self.dataset, name)
        return super().__getattr__(name)

    def _wraps(self) -> Sequence[Any]:
        return (original(self.dataset),)

    async def dispose(self) -> None:
        """Dispose of the wrapped dataset: close it, if it is a reader."""
        await dispose_of(original(self.dataset))

    def _load_all(self, field: str) -> Any:
        return fields_of(self)._load_all(field)


class Adapter(Fields):
    """A ``dataset`` of the user as a dataset of fields."""

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self.dataset = dataset

    def _wraps(self) -> Sequence[Any]:
        return (self.dataset,)

    def _listed(self) -> bool:
        return False


class Keys(Adapter):
    """The keys of the datapoints of a source, which are mappings, as fields: only requested keys are read."""

    unlisted = True  # it has the description of the source

    def __init__(self, dataset: Any, names: tuple[str, ...] | None) -> None:
        super().__init__(dataset)
        source = convert(dataset)
        if source.sparse:
            raise InvalidArgumentError(
                'elements removed by a filter have no fields: select datapoints by class or index instead'
            )
        check_finite(source, 'wrapping', 'wrap the dataset before repeat()')
        self.parents: tuple[Any, ...] = (source,)
        self._names, self._length = names, len(source)
        self._selected: dict[tuple[str, ...], Source] = {}  # by requested keys

    def __len__(self) -> int:
        return self._length

    @property
    def fields(self) -> tuple[str, ...] | None:
        return self._names

    async def _load(self, fields: Sequence[str], indices: Ints, ctxs: Sequence[Ctx]) -> list[list[Any]]:
        keys = tuple(dict.fromkeys(fields))
        source = self._selected.get(keys)
        if source is None:
            source = self._selected[keys] = selected(self.parents[0], keys)
        datapoints = without_failures(await source.fetch(indices))
        return [[datapoint[field] for datapoint in datapoints] for field in fields]

    def describe(self) -> str:
        return str(self.parents[0].describe())


class Methods(Adapter):
    """The fields for which an object has methods."""

    _pure = False

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self._wrapped = fields_of(dataset.dataset) if isinstance(dataset, KDWrapper) else None
        # The name of the method for each field of the object itself, without those of a wrapped dataset.
        self.own: dict[str, str] = _methods(type(dataset))
        self.parents: tuple[Any, ...] = () if self._wrapped is None else (self._wrapped,)

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def fields(self) -> tuple[str, ...] | None:
        if isinstance(self.dataset, KDDataset):
            return self.dataset.fields
        return tuple(sorted(_all_methods(self.dataset)))

    def has(self, field: str) -> bool:
        """Return whether the field exists. Objects of other libraries may create its method dynamically."""
        if isinstance(self.dataset, KDDataset):
            return super().has(field)
        return callable(getattr(self.dataset, ONE + field, None))

    async def _load(self, fields: Sequence[str], indices: Ints, ctxs: Sequence[Ctx]) -> list[list[Any]]:
        wrapped = self._wrapped
        passed = [wrapped is not None and field not in self.own for field in fields]
        positions = list(range(len(fields)))
        if wrapped is not None and wrapped._pure:
            positions.sort(key=lambda position: not passed[position])  # pure fields first, in one load
        out: list[list[Any]] = [[] for _ in fields]
        for passed_on, group in itertools.groupby(positions, key=passed.__getitem__):
            members = list(group)
            if passed_on and wrapped is not None:
                columns = await wrapped._load([fields[position] for position in members], indices, ctxs)
            else:
                columns = [await self._call(fields[position], indices, ctxs) for position in members]
            for position, column in zip(members, columns, strict=True):
                out[position] = column
        return out

    def _loads_all(self, field: str) -> bool:
        for base in type(self.dataset).__mro__:
            names = vars(base)
            if ALL + field in names:
                return True
            if ONE + field in names or MANY + field in names:
                return False
        return self._wrapped is not None and self._wrapped._loads_all(field)

    async def _load_all(self, field: str) -> list[Any]:
        if not self._loads_all(field):
            return await super()._load_all(field)
        if not hasattr(type(self.dataset), name := ALL + field):
            return await fields_of(self._wrapped)._load_all(field)
        return await self._call_once(name, len(self))

    async def _call_once(self, name: str, count: int, *args: Any) -> list[Any]:
        """Return the values of some datapoints, which one call of a method returns."""
        values = await call_or_await(getattr(self.dataset, name), *args)
        sized = isinstance(values, Sized) and isinstance(values, Iterable)
        listed = sized and not isinstance(values, Mapping | Set | str | bytes)
        if not listed or len(values) != count:
            shown = counted(len(values), 'value') if listed else f'a {type(values).__name__}'
            raise DatapointError(f'{name} returned {shown} for {counted(count, "datapoint")}')
        return list(values)

    async def _call(self, field: str, indices: Ints, ctxs: Sequence[Ctx]) -> list[Any]:
        numbers = indices.tolist()
        name = self.own.get(field, ONE + field)
        if name.startswith(MANY):
            return await self._call_once(name, len(numbers), numbers, ctxs)
        method = getattr(self.dataset, name)

        def add_note(error: Exception, i: int) -> None:
            error.add_note(f'while loading field {field!r} of datapoint {numbers[i]} of {self.describe()}')

        def call(i: int) -> Any:
            try:
                return method(numbers[i], ctxs[i])
            except Exception as error:
                add_note(error, i)
                raise

        async def wait(i: int) -> Any:
            try:
                return await await_user(method(numbers[i], ctxs[i]))
            except Exception as error:
                add_note(error, i)
                raise

        if not inspect.iscoroutinefunction(method):
            return await map_threads(timed(f'{DECODE}field {field}', call), len(numbers))
        await to_loop()
        return await gather([wait(i) for i in range(len(numbers))])

    def user_functions(self) -> tuple[Any, ...]:
        return tuple(getattr(self.dataset, name) for name in self.own.values())

    def describe(self) -> str:
        shown = repr(self.dataset)
        return type(self.dataset).__qualname__ if ' at 0x' in shown else shown


def fields_of(dataset: Any) -> Fields:
    """Convert an object to a dataset of fields; raise ``InvalidArgumentError`` if the object has no fields.

    Accepts datasets of fields, objects with ``getitem_...`` methods, and pipelines and objects whose ``fetch`` has a
    ``mask``, such as readers, whose fields are the keys of their datapoints.
    """
    if isinstance(dataset, Fields):
        return dataset
    core = inspect.getattr_static(dataset, 'aio', None)  # bypass __getattr__, which may delegate to a wrapped object
    if isinstance(core, Fields):
        return core
    if isinstance(dataset, KDDataset) or _all_methods(dataset):
        return Methods(dataset)
    lazy = any(isinstance(one, Source) for one in (dataset, core, getattr(dataset, 'node', None)))
    if lazy or takes_mask(dataset) or takes_mask(core):
        spec = getattr(dataset, 'spec', None)
        return Keys(dataset, tuple(sorted(spec)) if isinstance(spec, Mapping) else None)
    raise InvalidArgumentError(
        f'{type(dataset).__name__} has no fields: expected a dataset with methods such as getitem_x, or a reader; a '
        f'cache goes around a ModeWrapper'
    )


def is_blocking(dataset: Any) -> bool:
    """Return whether the fields of a dataset are loaded by blocking methods of its own."""
    if not isinstance(dataset, KDDataset):
        return False
    methods = (getattr(type(dataset), name) for name in _methods(type(dataset)).values())
    return not any(map(inspect.iscoroutinefunction, methods))


def original(dataset: Any) -> Any:
    """Return the user's dataset behind an adapter, and any other object as it is."""
    core = inspect.getattr_static(dataset, 'aio', dataset)
    return core.dataset if isinstance(core, Adapter) else dataset


def _methods(kind: type) -> dict[str, str]:
    """Return the method for each field: of the most derived class, and there ``getitems_`` before ``getitem_``."""
    methods: dict[str, str] = {}
    for base, prefix in itertools.product(kind.__mro__, (MANY, ONE)):
        for name in vars(base):
            if name.startswith(prefix):
                methods.setdefault(name.removeprefix(prefix), name)
    return methods


def _all_methods(dataset: Any) -> set[str]:
    """Return the fields of an object of another library, and of the datasets that it wraps."""
    fields: set[str] = set()
    for _ in range(_DEEP):
        fields |= {name.removeprefix(ONE) for name in dir(dataset) if name.startswith(ONE)}
        datasets = getattr(dataset, 'datasets', None)
        wrapped = datasets[0] if isinstance(datasets, list | tuple) and datasets else getattr(dataset, 'dataset', None)
        if wrapped is None or wrapped is dataset:
            break
        dataset = wrapped
    return fields

"""The interface of all datasets of fields, for the wrappers and adapters of this package."""

import abc
import functools
from collections.abc import Sequence
from typing import Any, Final, SupportsIndex

from granular._support.indexing import Ints, check_field, indices_of
from granular._support.other_names import Elementless
from granular.aio.pipeline import filters
from granular.aio.pipeline.fields.navigation import Disposable
from granular.aio.pipeline.lines import Line
from granular.aio.pipeline.nodes.selection import read_labels
from granular.aio.runtime.threads import offload
from granular.errors import UnknownKeyError

Ctx = dict[str, Any]

ONE: Final = 'getitem_'
MANY: Final = 'getitems_'
ALL: Final = 'getall_'


class Fields(Elementless, Disposable, abc.ABC):
    """The internal interface of all datasets of fields."""

    parents: tuple[Any, ...] = ()  # the wrapped datasets or sources, for printed pipelines
    _pure = True  # the fields never receive the dict of a datapoint, so they can be loaded in any order

    def __init__(self) -> None:
        self.known_labels: dict[str, filters.Labels] = {}  # those that were already read, by field

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, 'known_labels': {}}

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @property
    @abc.abstractmethod
    def fields(self) -> tuple[str, ...] | None:
        """Names of the fields, sorted; None if they are unknown."""

    def has(self, field: str) -> bool:
        """Return whether the field exists; True if that is unknown."""
        return self.fields is None or field in self.fields

    @abc.abstractmethod
    async def _load(self, fields: Sequence[str], indices: Ints, ctxs: Sequence[Ctx]) -> list[list[Any]]:
        """Return, for each field, its values in the order of the indices, which are integers >= 0."""

    def user_functions(self) -> tuple[Any, ...]:
        """Return the methods of the user that load its fields."""
        return ()

    @abc.abstractmethod
    def describe(self) -> str:
        """Describe the dataset in one line."""

    def line(self) -> Line:
        """Return the description, by which a state belongs to a pipeline."""
        return Line(self.describe())

    def __repr__(self) -> str:
        return self.describe()

    async def release(self) -> None:
        """Cancel read-ahead that has no consumer left."""
        for parent in self.parents:
            await parent.release()

    def _loads_all(self, field: str) -> bool:
        """Return whether the user's dataset has a method that loads the field of all datapoints."""
        return False

    async def _load_all(self, field: str) -> list[Any]:
        """Return the field of all datapoints."""
        return await self._load_many(field, slice(None))

    def __getattr__(self, name: str) -> Any:
        if name in ('dataset', 'datasets'):  # before __init__, or while it is unpickled
            raise AttributeError(f'{type(self).__name__!r} object has no attribute {name!r}')
        for prefix, loads in ((ONE, self._load_one), (MANY, self._load_many), (ALL, self._load_all)):
            if name.startswith(prefix):
                if self.has(field := name.removeprefix(prefix)):
                    return functools.partial(loads, field)
                raise AttributeError(f'{type(self).__name__!r} object has no attribute {name!r}')
        return self._inherited(name)

    async def _load_one(self, field: str, index: SupportsIndex, ctx: Ctx | None = None) -> Any:
        return (await self._load_many(field, [index], None if ctx is None else [ctx]))[0]

    async def _load_many(self, field: str, indices: Any, ctxs: Sequence[Ctx] | None = None) -> list[Any]:
        positions = indices_of(indices, len(self), self.describe())
        return (await self._load([field], positions, [{} for _ in positions] if ctxs is None else ctxs))[0]


async def load_fields(dataset: Fields, fields: Sequence[str], indices: Ints, ctxs: Sequence[Ctx]) -> list[list[Any]]:
    """Return, for each field, its values at indices, which are integers >= 0, each with a dict in ``ctxs``."""
    return await dataset._load(fields, indices, ctxs)


async def labels_of(dataset: Fields, field: str) -> filters.Labels:
    """Return the labels of all datapoints, which are read once, in bulk."""
    if check_field(field) not in dataset.known_labels:
        check_fields(dataset, [field])

        async def read(indices: Ints) -> list[Any]:
            return (await dataset._load([field], indices, [{} for _ in indices]))[0]

        if dataset._loads_all(field):
            labels = await offload(filters.as_labels, await dataset._load_all(field), field)
        else:
            labels = await read_labels(read, len(dataset), field)
        dataset.known_labels[field] = labels
    return dataset.known_labels[field]


def check_fields(dataset: Fields, wanted: Sequence[str], builtin: Sequence[str] = ()) -> None:
    """Raise ``UnknownKeyError`` unless a dataset has the given fields."""
    for field in wanted:
        if not dataset.has(field):
            available = ', '.join(map(repr, [*(dataset.fields or ()), *builtin]))
            raise UnknownKeyError(f'{dataset.describe()}: unknown field {field!r}: there are {available or "none"}')

"""Base classes of the readers of the sync API."""

from collections.abc import Iterator
from typing import Any, Final, Generic, Self, SupportsIndex, overload

from granular._support.other_names import OF_READERS, OtherNames
from granular._support.typing import Datapoint_co
from granular.aio.bags.reader import BagReader
from granular.aio.pipeline.data_source import MaskedSource, OpenedDataSource
from granular.aio.runtime.portal import run
from granular.formats.display import Samples, html_summary
from granular.sync.base import A, Batched, Blocking, SyncObject, documented_by, reopened, wrapping
from granular.sync.iteration import Iteration

_FACTS: Final = ('layout', 'shards', 'spec', 'columns', 'fields', 'size')
_SAMPLES: Final = 3


class Reader(OtherNames, SyncObject[A], Generic[A, Datapoint_co]):
    """Base of readers, which pickle to their address and options and are reopened when unpickled.

    If the data was replaced in between, reopening raises ``ObjectChangedError``.
    """

    _answers = OF_READERS

    def __reduce__(self) -> tuple[Any, ...]:
        return reopened, (type(self), self.aio)

    def __iter__(self) -> Iterator[Datapoint_co]:
        return Iteration(self.aio.__aiter__)

    @documented_by(OpenedDataSource.take)
    def take(self, count: int) -> list[Datapoint_co]:
        elements: list[Datapoint_co] = run(self.aio.take(count), immediate=True)
        return elements

    @documented_by(OpenedDataSource.head)
    def head(self, count: int = 5) -> Samples[Datapoint_co]:
        samples: Samples[Datapoint_co] = run(self.aio.head(count), immediate=True)
        return samples

    def _repr_html_(self) -> str:
        """Return sizes, spec and the first elements, for notebooks."""
        facts = [(name, getattr(self.aio, name)) for name in _FACTS if hasattr(self.aio, name)]
        return html_summary(repr(self), [('length', len(self)), *facts], self.take(_SAMPLES))


class Copyable(Blocking):
    """Base of readers that can be copied."""

    def copy(self) -> Self:
        """Return an independently closable reader of the same data that shares its caches."""
        return wrapping(type(self), self.aio.copy())


class RecordReader(Reader[A, Datapoint_co]):
    """A reader of records, which are read whole."""

    @overload
    def get(self, index: SupportsIndex) -> Datapoint_co: ...
    @overload
    def get(self, index: slice | range) -> list[Datapoint_co]: ...
    @documented_by(BagReader.get)
    def get(self, index: SupportsIndex | slice | range) -> Any:
        return run(self.aio.get(index), immediate=True)

    __getitem__ = get

    @documented_by(OpenedDataSource.fetch)
    def fetch(self, indices: Any) -> list[Datapoint_co]:
        records: list[Datapoint_co] = run(self.aio.fetch(indices), immediate=True)
        return records


class DatapointReader(Reader[A, Datapoint_co], Copyable, Batched):
    """A reader of datapoints that are dicts, with access to single fields."""

    @overload
    def __getitem__(self, index: SupportsIndex) -> Datapoint_co: ...
    @overload
    def __getitem__(self, index: tuple[SupportsIndex, Any]) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice | range | tuple[slice | range, Any]) -> dict[str, list[Any]]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple) and len(index) == 2:
            return run(self.aio.get(*index), immediate=True)
        return run(self.aio.get(index), immediate=True)

    @overload
    def get(self, index: SupportsIndex, mask: Any) -> dict[str, Any]: ...
    @overload
    def get(self, index: SupportsIndex, mask: None = None) -> Datapoint_co: ...
    @overload
    def get(self, index: slice | range, mask: Any = None) -> dict[str, list[Any]]: ...
    @documented_by(MaskedSource.get)
    def get(self, index: SupportsIndex | slice | range, mask: Any = None) -> Any:
        return run(self.aio.get(index, mask), immediate=True)

    @overload
    def fetch(self, indices: Any, mask: Any) -> list[dict[str, Any]]: ...
    @overload
    def fetch(self, indices: Any, mask: None = None) -> list[Datapoint_co]: ...
    @documented_by(MaskedSource.fetch)
    def fetch(self, indices: Any, mask: Any = None) -> list[Any]:
        return run(self.aio.fetch(indices, mask), immediate=True)

"""Base classes of the sync API: each object wraps an async counterpart in ``.aio`` and can be closed."""

import functools
import operator
import re
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, SupportsIndex, TypeVar, overload

from granular._typing import Datapoint_co
from granular.aio.runtime.bridge import run
from granular.aio.runtime.lifecycle import AsyncResource, ensure_open
from granular.formats.display import Samples, html_summary
from granular.sync.iteration import Iteration

A = TypeVar('A', bound=Any)
_FACTS: Final = ('layout', 'shards', 'spec', 'columns', 'fields', 'size')
_SAMPLES: Final = 3

B = TypeVar('B', bound='Blocking')
P = ParamSpec('P')
R = TypeVar('R')


def sync_doc(thing: object) -> str:
    """Return the docstring of an object of the async API, with examples for the sync API."""
    doc = (thing.__doc__ or '').replace('granular.aio.', 'granular.').replace('async with ', 'with ')
    doc = re.sub(r'await (\w+)\.get\((-?\w+)\)', r'\1[\2]', doc)
    doc = re.sub(r'await ([A-Z]\w+)\.open\(', r'\1(', doc)
    return doc.replace('async for ', 'for ').replace('await ', '')


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> Callable[Concatenate[Any, P], R]:
    """Make a sync method of an async one: it calls the method of that name of ``self.aio`` and waits for the result.

    The types, signature and docstring are those of the async method. It costs about 0.5 us a call more than a method
    that is written out.

    ::

        class Path(PurePath):
            stat = blocking(core.Path.stat)
    """
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        coroutine: Coroutine[Any, Any, R] = getattr(self.aio, name)(*args, **kwargs)
        return run(coroutine)

    call.__doc__ = sync_doc(method)
    return call


def passed_on(member: Any) -> Any:
    """Make a property of the sync API of one of the async API, with its docstring; annotate it with its type.

    ::

        class BagWriter(SyncObject[writer.BagWriter]):
            size: int = passed_on(writer.BagWriter.size)
    """
    return property(operator.attrgetter(f'aio.{member.fget.__name__}'), doc=sync_doc(member))


def constructing(core: Callable[P, Any]) -> Callable[[Callable[[Any], None]], Callable[Concatenate[Any, P], None]]:
    """Make the constructor of a ``Blocking`` class of that of its async counterpart, with its types and signature.

    It decorates an empty ``__init__``, because type checkers take no other assignment for a constructor. The class has
    the docstring of its counterpart, too, unless it has its own.

    ::

        class BagWriter(SyncObject[writer.BagWriter]):
            @constructing(writer.BagWriter)
            def __init__(self) -> None: ...
    """

    def decorate(_: Callable[[Any], None]) -> Callable[Concatenate[Any, P], None]:
        @functools.wraps(getattr(core, '__init__'))  # noqa: B009 - which mypy refuses otherwise
        def construct(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            self._open(core(*args, **kwargs))

        construct.__dict__['core'] = core
        return construct

    return decorate


class Blocking:
    """Base of the objects that block until their async counterpart has done the work.

    Attributes:
      aio: the async counterpart, which does the work.
    """

    aio: Any

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        core = getattr(cls.__init__, 'core', None)
        if core is not None and cls.__doc__ is None:
            cls.__doc__ = sync_doc(core)

    def _open(self, counterpart: Any) -> None:
        self.aio = counterpart

    def __len__(self) -> int:
        return len(self.aio)

    def __repr__(self) -> str:
        # The same in both APIs: pipelines describe their sources by it, so that a state fits readers of either.
        return repr(self.aio)


def wrapping(kind: type[B], counterpart: Any) -> B:
    """Return an object of the sync API, given its async counterpart, which opens when it is first used."""
    wrapped = kind.__new__(kind)
    wrapped.aio = counterpart
    return wrapped


class SyncObject(Blocking, Generic[A]):
    """Base of objects that open when they are constructed."""

    aio: A

    def _open(self, counterpart: A) -> None:
        self.aio = counterpart
        try:
            run(ensure_open(counterpart))
        except BaseException:
            run(counterpart.abort())  # an interrupt may have come after it was opened
            raise

    closed: bool = passed_on(AsyncResource.closed)

    def close(self) -> None:
        """Close the object. Closing it again has no effect."""
        run(self.aio.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            run(self.aio.aclose() if kind is None else self.aio.abort())
        except BaseException:
            run(self.aio.abort())  # an interrupt may have come before it was closed
            raise


class Batched:
    """Batch access under the names that PyTorch and Grain look for."""

    def fetch(self, indices: Any) -> list[Any]:
        """Return the elements at many indices, in the order requested, with concurrent reads."""
        raise NotImplementedError

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        # PyTorch's DataLoader calls this method to get a batch.
        return self.fetch(indices)

    def _getitems(self, indices: Sequence[int]) -> list[Any]:
        # Grain's loaders call this one.
        return self.fetch(indices)


class Reader(SyncObject[A], Generic[A, Datapoint_co]):
    """Base of readers, which pickle to their address and options and are reopened when unpickled.

    If the data was replaced in between, reopening raises ``ObjectChangedError``.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return reopened, (type(self), self.aio)

    def __iter__(self) -> Iterator[Datapoint_co]:
        return Iteration(self.aio.__aiter__)

    def take(self, count: int) -> list[Datapoint_co]:
        """Return the first ``count`` elements, or all if there are fewer, read as by ``fetch``."""
        elements: list[Datapoint_co] = run(self.aio.take(count))
        return elements

    def head(self, count: int = 5) -> Samples[Datapoint_co]:
        """Return the first elements, as ``take``, in a list that notebooks show as a table with thumbnails."""
        samples: Samples[Datapoint_co] = run(self.aio.head(count))
        return samples

    def _repr_html_(self) -> str:
        """Return sizes, spec and the first elements, for notebooks."""
        facts = [(name, getattr(self.aio, name)) for name in _FACTS if hasattr(self.aio, name)]
        return html_summary(repr(self), [('length', len(self)), *facts], self.take(_SAMPLES))


def reopened(kind: type[Reader[A, Any]], counterpart: A) -> Reader[A, Any]:
    """Return an open reader of the sync API, given its async counterpart."""
    reader = kind.__new__(kind)
    reader._open(counterpart)
    return reader


def copy_of(reader: B) -> B:
    """Return a reader of the same data whose async counterpart is a copy."""
    return wrapping(type(reader), reader.aio.copy())


class RecordReader(Reader[A, Datapoint_co]):
    """A reader of records, which are read whole."""

    @overload
    def get(self, index: SupportsIndex) -> Datapoint_co: ...
    @overload
    def get(self, index: slice | range) -> list[Datapoint_co]: ...
    def get(self, index: SupportsIndex | slice | range) -> Any:
        """Return the record at an index, negative from the end, or the records of a slice; like ``reader[index]``.

        Raises:
          OutOfRangeError: an ``IndexError``.
        """
        return run(self.aio.get(index))

    __getitem__ = get

    def fetch(self, indices: Any) -> list[Datapoint_co]:
        """Return the records at many indices, in the order requested; neighbouring ones share a request.

        Args:
          indices: a 1-D sequence of integers, in any order, repeated or negative; or a slice or range.
        """
        records: list[Datapoint_co] = run(self.aio.fetch(indices))
        return records


class DatapointReader(Reader[A, Datapoint_co], Batched):
    """A reader of datapoints that are dicts, with access to single fields."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return self.aio.size  # type: ignore[no-any-return]

    @overload
    def __getitem__(self, index: SupportsIndex) -> Datapoint_co: ...
    @overload
    def __getitem__(self, index: tuple[SupportsIndex, Any]) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice | range | tuple[slice | range, Any]) -> dict[str, list[Any]]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple):
            return run(self.aio.get(*index))
        return run(self.aio.get(index))

    @overload
    def get(self, index: SupportsIndex, mask: Any) -> dict[str, Any]: ...
    @overload
    def get(self, index: SupportsIndex, mask: None = None) -> Datapoint_co: ...
    @overload
    def get(self, index: slice | range, mask: Any = None) -> dict[str, list[Any]]: ...
    def get(self, index: SupportsIndex | slice | range, mask: Any = None) -> Any:
        """Return a datapoint, or ``{key: [values]}`` for a slice; like ``reader[index, mask]``.

        Args:
          index: an integer, negative from the end, or a slice.
          mask: the keys to read. For a dataset, also a mapping from keys to True, or to a range of positions in a
            sequence, which is clipped to the sequence's length.

        Raises:
          OutOfRangeError: an ``IndexError``, for an index past the end, or a mask's range that starts past the end.
          UnknownKeyError: a ``KeyError``, for a key that does not exist.
        """
        return run(self.aio.get(index, mask))

    @overload
    def fetch(self, indices: Any, mask: Any) -> list[dict[str, Any]]: ...
    @overload
    def fetch(self, indices: Any, mask: None = None) -> list[Datapoint_co]: ...
    def fetch(self, indices: Any, mask: Any = None) -> list[Any]:
        """Return many datapoints. All values are requested concurrently, and neighbouring ones share a request.

        Args:
          indices: a 1-D sequence of integers, in any order, repeated or negative; or a slice or range.
          mask: as for ``get``.

        Returns:
          The datapoints, in the order requested.
        """
        return run(self.aio.fetch(indices, mask))

    def copy(self) -> Self:
        """Return an independently closable reader of the same data that shares its caches."""
        return copy_of(self)

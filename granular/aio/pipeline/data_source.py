"""Data sources: what they may tell of themselves, and those that are opened and closed."""

import abc
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Generic, Self, SupportsIndex, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import Ints, check_integer, index_of, indices_of
from granular._support.other_names import OF_READERS, Answering, Awaited, OtherNames
from granular._support.typing import Datapoint_co
from granular.aio.runtime.lifecycle import AsyncResource
from granular.aio.runtime.readahead import pages
from granular.aio.runtime.threads import Calls
from granular.formats.display import Samples

R = TypeVar('R')
Fields = TypeVar('Fields')

Selection = bool | range | slice | Sequence[int] | NDArray[Any]
"""True for all values of a sequence, or the frames of a video; or which of them."""
Mask = Mapping[str, Selection] | Iterable[str] | None


class DataSource(Answering):
    """Facts about a source, beside its length and its datapoints, for which pipelines, loaders and caches ask.

    It is the base of all readers and data sources, and may be that of yours. Each attribute and method has a default::

        class Rows(granular.DataSource):
            def __init__(self, rows, version):
                self.rows, self.version = rows, version

            def __len__(self):
                return len(self.rows)

            def fetch(self, indices):
                return [self.rows[i] for i in indices]

            def identity(self):
                return ['rows', self.version]

    Attributes:
      seed: seed of the order, part of the state of a loader; 0 if nothing is random.
      sparse: True if some datapoints may be None.
    """

    seed: int = 0
    sparse: bool = False

    def identity(self) -> Any:
        """Return plain values that differ if the data differs, which caches compare; None if there are none."""
        return None

    def user_functions(self) -> tuple[Callable[..., Any], ...]:
        """Return the functions, such as decoders, that datapoints depend on. Caches compare their code."""
        return ()

    def nbytes(self, mask: Any = None) -> int | None:
        """Return the bytes of all datapoints as they are stored, which give the size of blocks; None if unknown.

        With a ``mask``, only these fields count.
        """
        return None

    def _file_bytes(self, mask: Any) -> int | None:
        return None

    async def _array_parts(self, key: str, indices: Ints, begins: Ints, stops: Ints) -> list[NDArray[Any]] | None:
        return None

    def _kin(self) -> Any:
        """Return a value that is equal for sources whose datapoints can be fetched together; None if there are none."""
        return None

    def _joined(self, others: Sequence[Any]) -> 'Joint':
        """Return this source and others with an equal ``_kin`` as one."""
        raise NotImplementedError

    async def _fetch_undecoded(self, indices: Any, mask: Any) -> Calls[list[Any]] | None:
        """Read datapoints, and return the calls that decode them, for threads; None if they can only be fetched."""
        return None

    async def _nullable_keys(self, mask: Collection[str] | None) -> frozenset[str]:
        """Return the keys, all or those of a mask, of which some values may be None, or of another type."""
        return frozenset()


class _HuggingFace(DataSource):
    def __init__(self, fingerprint: str) -> None:
        self._value = fingerprint

    def identity(self) -> str:
        return self._value


def as_data_source(source: Any) -> DataSource:
    """Return what an object tells of itself; of an object that is no :class:`DataSource`, the defaults."""
    if isinstance(source, DataSource):
        return source
    fingerprint = getattr(source, '_fingerprint', None)
    return _HuggingFace(fingerprint) if isinstance(fingerprint, str) else DataSource()


def kin_of(source: DataSource) -> Any:
    """Return a value that is equal for sources whose datapoints can be fetched together; None if there are none."""
    return source._kin()


def fetch_undecoded(source: DataSource, indices: Any, mask: Any) -> Coroutine[Any, Any, Calls[list[Any]] | None]:
    """Read datapoints, and return the calls that decode them, for threads; None if they can only be fetched."""
    return source._fetch_undecoded(indices, mask)


class Joint(abc.ABC):
    """Sources with an equal ``kin_of``, whose datapoints are fetched together."""

    @abc.abstractmethod
    def fits(self, sources: Sequence[Any]) -> bool:
        """Return whether it has all of these sources, as they are now. Otherwise make another one by ``join``."""

    @abc.abstractmethod
    async def fetch(self, sources: Sequence[Any], counts: Sequence[int], indices: Ints, mask: Any) -> list[Any]:
        """Return so many datapoints of each of some sources that fit, by their indices there, one source behind the
        other.
        """

    @abc.abstractmethod
    async def fetch_undecoded(
        self, sources: Sequence[Any], counts: Sequence[int], indices: Ints, mask: Any
    ) -> Calls[list[Any]]:
        """Read datapoints, as ``fetch``, and return the calls that decode them, for threads."""


def join(sources: Sequence[DataSource]) -> Joint:
    """Return sources with an equal ``kin_of`` as one."""
    return sources[0]._joined(sources[1:])


class OpenedDataSource(DataSource, Awaited, OtherNames, AsyncResource, Generic[Datapoint_co]):
    """A data source that is opened and closed. Its first datapoints can be taken."""

    _answers = OF_READERS

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    async def fetch(self, indices: Any) -> list[Any]:
        """Return many datapoints, in the order of the indices, read concurrently; neighbouring ones share a request.

        Args:
          indices: a 1-D sequence of integers, in any order, repeated or negative; or a slice or range.
        """

    async def _identify(self) -> None:
        """Read what ``identity`` needs and opening did not read."""

    def _file_bytes(self, mask: Any) -> int | None:
        return self.nbytes(mask)

    async def _reading(self) -> tuple[int, bool]:
        """Return about how many bytes all datapoints take, and whether they are read without waiting."""
        return self.nbytes() or 0, False

    async def __aiter__(self, start: int = 0) -> AsyncIterator[Datapoint_co]:
        await self._ensure_open()
        size, local = await self._reading()
        async with contextlib.aclosing(pages(self.fetch, len(self), size, local, start)) as datapoints:
            async for datapoint in datapoints:
                yield datapoint

    def _copied(self, **changes: Any) -> Self:
        """Return an independently closable copy with other attributes."""
        self._check_open()
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__, **changes)
        return copy

    async def take(self, count: int) -> list[Datapoint_co]:
        """Return the first ``count`` elements, or all if there are fewer, read as by ``fetch``."""
        await self._ensure_open()
        return await self.fetch(range(min(check_integer('count', count, 0), len(self))))

    async def head(self, count: int = 5) -> Samples[Datapoint_co]:
        """Return the first elements, as ``take``, in a list that notebooks show as a table with thumbnails."""
        return Samples(await self.take(count))


class MaskedSource(OpenedDataSource[Datapoint_co], Generic[Fields, Datapoint_co]):
    """A data source whose datapoints are dicts, of which a mask selects keys."""

    _name: str  # for errors

    @abc.abstractmethod
    def _chosen(self, mask: Mask) -> Fields:
        """Return the fields that a mask selects."""

    @abc.abstractmethod
    async def _read_rows(self, positions: Ints, fields: Fields) -> list[Any]:
        """Return some fields of datapoints, which exist."""

    @abc.abstractmethod
    async def _read_columns(self, positions: Ints, fields: Fields) -> dict[str, list[Any]]:
        """Return the values of some fields of datapoints, which exist, by key."""

    def _read_now(self, index: SupportsIndex, mask: Mask) -> Any:
        """Return a datapoint, if it is read without waiting; otherwise None."""
        return None

    @overload
    async def get(self, index: SupportsIndex, mask: Mapping[str, Selection] | Iterable[str]) -> dict[str, Any]: ...
    @overload
    async def get(self, index: SupportsIndex, mask: None = None) -> Datapoint_co: ...
    @overload
    async def get(self, index: slice | range, mask: Mask = None) -> dict[str, list[Any]]: ...
    async def get(self, index: SupportsIndex | slice | range, mask: Mask = None) -> Any:
        """Return a datapoint, or ``{key: [values]}`` for a slice, of which every datapoint must have all keys.

        Args:
          index: an integer, negative from the end, or a slice.
          mask: the keys to read; a datapoint that lacks one is returned without it. For a reader of a dataset, it may
            be a mapping from keys to True, or to some values of a sequence or frames of a video: a list of their
            indices, or a range, which is clipped to their number.

        Raises:
          OutOfRangeError: an ``IndexError``, for an index out of range, or a mask's range that begins beyond the end.
          UnknownKeyError: a ``KeyError``, for a key that no datapoint has, or that one of a slice lacks.
        """
        if self._state != 'open':
            await self._ensure_open()
        if isinstance(index, slice | range):
            return await self._read_columns(indices_of(index, len(self), self._name), self._chosen(mask))
        if (datapoint := self._read_now(index, mask)) is not None:
            return datapoint
        positions = np.array([index_of(index, len(self), self._name)])
        return (await self._read_rows(positions, self._chosen(mask)))[0]

    @overload
    async def fetch(self, indices: Any, mask: Mapping[str, Selection] | Iterable[str]) -> list[dict[str, Any]]: ...
    @overload
    async def fetch(self, indices: Any, mask: None = None) -> list[Datapoint_co]: ...
    async def fetch(self, indices: Any, mask: Mask = None) -> list[Any]:
        """Return many datapoints, read in one fan-out over all keys and files, neighbours in one request.

        Args:
          indices: a 1-D sequence of integers, in any order, repeated or negative; or a slice or range.
          mask: as for ``get``.

        Returns:
          The datapoints, in the order of ``indices``.
        """
        if self._state != 'open':
            await self._ensure_open()
        return await self._read_rows(indices_of(indices, len(self), self._name), self._chosen(mask))


async def identify(source: OpenedDataSource[Any]) -> None:
    """Read what the identity of an open source needs and opening did not read."""
    await source._identify()


def file_bytes(source: DataSource, mask: Any) -> int | None:
    """Return the bytes of the files of an open source, for some fields if it can tell them; None for other sources."""
    return source._file_bytes(mask)


def parts_of(
    source: DataSource, key: str, indices: Ints, begins: Ints, stops: Ints
) -> Coroutine[Any, Any, list[NDArray[Any]] | None]:
    """Return parts of the arrays of a key, without reading the rest; None if they can only be read whole."""
    return source._array_parts(key, indices, begins, stops)


async def nullable_keys(source: DataSource, mask: Collection[str] | None) -> frozenset[str]:
    """Return the keys, all or those of a mask, of which some values may be None, or of another type; none of an object
    of the user's.
    """
    return await source._nullable_keys(mask)


def restored(kind: type[R], args: tuple[Any, ...], options: Mapping[str, Any], attributes: Mapping[str, Any]) -> R:
    """Unpickle a data source: construct it, and set attributes that it had when it was pickled."""
    source = kind(*args, **options)
    vars(source).update(attributes)
    return source

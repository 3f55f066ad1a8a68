"""Objects of other types as the sources of pipelines."""

import abc
import contextlib
import functools
import inspect
import os
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence, Set
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from granular._support.indexing import Ints, cut_into, integers_of
from granular._support.other_names import Elementless, Unindexed
from granular._support.text import counted
from granular.aio.pipeline.data_source import (
    Joint,
    OpenedDataSource,
    as_data_source,
    fetch_undecoded,
    file_bytes,
    join,
    kin_of,
    nullable_keys,
    parts_of,
)
from granular.aio.pipeline.execution.failures import Failure, capturing, of_datapoint
from granular.aio.pipeline.lines import Line
from granular.aio.pipeline.nodes.source import Source, estimate_nbytes, length_of, map_in_threads, timed
from granular.aio.runtime.buffers import read_only
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import Calls, call_or_await, offload
from granular.aio.runtime.user_functions import await_user, refuse_deferred
from granular.errors import (
    ClosedError,
    DatapointError,
    InvalidArgumentError,
    NotFoundError,
    ObjectChangedError,
    OutOfRangeError,
    StoreError,
    UnknownKeyError,
)
from granular.formats.arrow_values import rows_of
from granular.formats.checksums import crc32c
from granular.metrics import timing

_SHOWN: Final = 200  # characters of a source in its description
_ROWS: Final = {'pandas': "to_dict('records')", 'polars': 'to_dicts()', 'pyarrow': 'to_pylist()'}  # of a table


def convert(source: Any) -> Source:
    """Convert an object to a source.

    The first match decides: a source; a MapDataset; the sync API of an async object; an object with an async ``fetch``,
    such as a reader of :mod:`granular.aio`; an object with a blocking ``fetch``, ``__getitems__`` or ``_getitems`` of
    many indices; a sequence in memory; a callable; an object with ``__getitem__``. Blocking methods are called in the
    thread pool.
    """
    if isinstance(source, Source):
        return source
    if isinstance(source, str | os.PathLike):  # a text has a length and an index, but its letters are not datapoints
        raise InvalidArgumentError(
            f'expected a source, got the address {source!r:.200}: open it with granular.open(...)'
        )
    if isinstance(node := getattr(source, 'node', None), Source):
        return node
    if (core := getattr(source, 'aio', None)) is not None:
        return convert(core)
    if inspect.iscoroutinefunction(getattr(source, 'fetch', None)):
        return Fetching(source)
    if isinstance(source, Mapping) and any(isinstance(key, str) for key in source):
        raise InvalidArgumentError(
            f'{type(source).__name__} maps names to several datasets: choose one of {list(source)!r:.200}'
        )
    for name in ('fetch', '__getitems__', '_getitems'):
        if callable(method := getattr(source, name, None)):
            refuse_deferred(method, yields=True)
            form = getattr(source, 'format', None)
            is_arrow = name == '__getitems__' and isinstance(form, Mapping) and form.get('type') == 'arrow'
            return _Tables(source, name) if is_arrow else _Blocking(source, name)
    if type(source) in (list, tuple, range) or isinstance(source, np.ndarray):
        return _InMemory(source)
    if callable(source):
        refuse_deferred(source)
        return _Called(source, '__call__')
    if getattr(type(source), '__getitem__', None) is Elementless.__getitem__:
        source[0]  # raises the error
    if hasattr(source, 'columns') and (rows := _ROWS.get(type(source).__module__.partition('.')[0])):
        raise InvalidArgumentError(f'{type(source).__name__} has columns by index, not rows: pass its {rows}')
    if hasattr(source, '__getitem__') and not isinstance(source, Unindexed):
        refuse_deferred(source.__getitem__)
        return _Called(source, '__getitem__')
    remedy = ''
    if hasattr(source, 'get_state') or hasattr(source, 'to_iter_dataset') or hasattr(source, 'mp_prefetch'):
        remedy = ': iterate over a stream itself, after its batch(...)'
    elif hasattr(source, '__iter__') or hasattr(source, '__aiter__'):
        remedy = ': make a list of it, or a dataset with granular.convert(...)'
    raise InvalidArgumentError(
        f'{type(source).__name__} is not a source: expected a reader, a callable, or an indexable object{remedy}'
    )


class _Adapter(Source):
    """An object of another type, ``root``, wrapped as a source."""

    _is_own = False  # True for a reader of this package, whose reads and decoding are timed where they are made

    def __init__(self, source: Any, method: str = '', mask: Sequence[str] | None = None) -> None:
        self.root = source
        self._method = method
        self._mask = mask
        # True if states name its length and bytes, which its description does not.
        self.measures_root: bool = not isinstance(source, range | list | tuple | np.ndarray)
        self.endless = not hasattr(source, '__len__')
        self._told = as_data_source(source)
        self.seed, self.sparse = self._told.seed, self._told.sparse
        self._file_bytes: int | None = None  # once they are known
        self.largest = 0  # bytes of its largest datapoint so far, about

    def __len__(self) -> int:
        return length_of(self.root)

    def line(self) -> Line:
        if isinstance(self.root, range):
            return Line(repr(self.root))
        if not self.measures_root:
            return Line('source', source=type(self.root).__name__, elements=len(self.root))
        shown = ' '.join(repr(self.root).split())  # the repr of a Hugging Face dataset has several lines
        if ' at 0x' in shown:
            shown = type(self.root).__name__
        elif len(shown) > _SHOWN:
            # The whole repr of a reader of granular tells it from others, such as windows of other episodes.
            rest = f'... {crc32c(shown.encode()):08x}' if isinstance(self.root, OpenedDataSource) else ''
            shown = f'{shown[:_SHOWN]}{rest}'
        return Line('source', source=shown, part=None if self._mask is None else f', keys {", ".join(self._mask)}')

    def describe(self) -> str:
        return str(self.line())

    def select(self, fields: Sequence[str]) -> Self | None:
        if not takes_mask(self.root):
            return None
        known: Any = self._mask
        if known is None:
            with contextlib.suppress(ClosedError):  # a reader that is not open yet
                known = getattr(self.root, 'spec', None)
        if isinstance(known, Mapping | Sequence) and (unknown := sorted({*fields} - {*known}, key=str)):
            owner = 'the spec' if self._mask is None else 'an earlier select'
            raise UnknownKeyError(f'{self.root!r}: unknown fields {unknown}: {owner} has {list(known)}')
        return type(self)(self.root, self._method, tuple(fields))

    async def nullable_keys(self) -> frozenset[str]:
        return await nullable_keys(self._told, self._mask)

    def stored_nbytes(self) -> float | None:
        size = self._told.nbytes(self._mask)
        return None if size is None else size / max(1, len(self))

    async def measure(self, path: Sequence[str]) -> Ints | None:
        sizes = getattr(self.root, 'sizes', None)
        if len(path) > 1 or not callable(sizes):
            return None
        told = await call_or_await(sizes, path[0])
        return None if told is None else integers_of(told, f'{self.describe()}: sizes')

    async def parts(self, key: str, indices: Ints, begins: Ints, stops: Ints) -> list[NDArray[Any]] | None:
        return await parts_of(self._told, key, indices, begins, stops)

    def file_bytes(self) -> int | None:
        """Return the bytes of the files that are read; None if there are none, or if they are not open."""
        if self._file_bytes is None:
            self._file_bytes = file_bytes(self._told, self._mask)
        return self._file_bytes

    def _count(self, datapoints: list[Any]) -> None:
        if self._is_own and timing.on:
            self.record_time(len(datapoints), 0.0)
        if datapoints:
            self.largest = max(self.largest, estimate_nbytes(datapoints) // len(datapoints))

    def _record(self, count: int, began: float) -> None:
        """Add the time since calls of the object began, which returned so many datapoints."""
        if timing.on:
            self.record_time(count, time.perf_counter() - began)

    def _metrics_label(self) -> str:
        return type(self.root).__name__  # its description may have an address, or data

    def _one_for_each(self, indices: Any, datapoints: Any) -> list[Any]:
        """Return what a user's method returned for many indices; raise ``DatapointError`` for another number."""
        several = isinstance(datapoints, Iterable) and not isinstance(datapoints, Mapping | Set | str | bytes)
        found = list(datapoints) if several else []
        if not several or len(found) != len(indices):
            shown = counted(len(found), 'datapoint') if several else f'a {type(datapoints).__name__}'
            raise DatapointError(
                f'{self.describe()}: its {self._method} returned {shown}, expected a list of {len(indices)}, '
                f'for the indices {np.asarray(indices).tolist()!s:.100}'
            )
        return found

    @abc.abstractmethod
    def _fetch(self, indices: ArrayLike) -> Awaitable[list[Any]]: ...

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        try:
            datapoints = await self._fetch(indices)
            self._count(datapoints)
            return datapoints
        except Exception as error:
            if not capturing.get() or not of_datapoint(error):
                raise
            failed = error
        # Behind the handler, in which the errors of the parts would have this one as their context.
        steps = np.asarray(indices)
        if len(steps) == 1:
            return [Failure(int(steps[0]), failed)]
        # An object that fails takes all its attempts in each part that it is in, so there is one round of them.
        parts = np.array_split(steps, len(steps) if isinstance(failed, StoreError) else 2)
        return [datapoint for part in await gather([self.fetch(part) for part in parts]) for datapoint in part]


class Fetching(_Adapter):
    """An object with an async ``fetch``, such as a reader."""

    def __init__(self, source: Any, method: str = 'fetch', mask: Sequence[str] | None = None) -> None:
        super().__init__(source, method, mask)
        self._is_own = (getattr(source.fetch, '__module__', None) or '').startswith('granular.')

    def kin(self) -> Any:
        """Return a value that is equal for sources that are fetched together; None for one that is fetched alone."""
        kin = kin_of(self._told) if self._is_own else None
        return None if kin is None else (kin, self._mask)

    async def fetch_undecoded(self, indices: ArrayLike) -> Calls[list[Any]] | None:
        if not self._is_own:
            return None
        try:
            calls = await fetch_undecoded(self._told, indices, self._mask)
        except Exception as error:
            if not capturing.get() or not of_datapoint(error):
                raise
            return None  # ``fetch`` tells apart the datapoints that fail
        return None if calls is None else calls.then(self._counted)

    def _counted(self, datapoints: list[Any]) -> list[Any]:
        self._count(datapoints)
        return datapoints

    @staticmethod
    def join(sources: Iterable['Fetching']) -> Joint:
        """Return sources that are kin as one."""
        return join([source._told for source in sources])

    async def fetch_with(self, joint: Joint, sources: Sequence['Fetching'], indices: Sequence[Ints]) -> list[list[Any]]:
        """Return datapoints of several sources that are kin, by the indices in each, in one fan-out."""
        try:
            return _divided(sources, indices, await joint.fetch(*_joined(sources, indices), self._mask))
        except Exception as error:
            if not _are_read_alone_after(error):
                raise
        # Alone, each reads again what was replaced, and tells apart the datapoints that fail.
        await to_loop()
        return await gather([source.fetch(own) for source, own in zip(sources, indices, strict=True)])

    async def fetch_undecoded_with(
        self, joint: Joint, sources: Sequence['Fetching'], indices: Sequence[Ints]
    ) -> Calls[list[list[Any]]]:
        """Read datapoints as ``fetch_with``, and return the calls that decode them, for threads."""
        try:
            calls = await joint.fetch_undecoded(*_joined(sources, indices), self._mask)
        except Exception as error:
            if not _are_read_alone_after(error):
                raise
        else:
            return calls.then(lambda datapoints: _divided(sources, indices, datapoints))
        return Calls.none(await self.fetch_with(joint, sources, indices))

    def _fetch(self, indices: ArrayLike) -> Awaitable[list[Any]]:
        options: dict[str, Any] = {} if self._mask is None else {'mask': self._mask}
        fetch = self.root.fetch
        return fetch(indices, **options) if self._is_own else self._awaited(indices, options)

    async def _awaited(self, indices: ArrayLike, options: dict[str, Any]) -> list[Any]:
        await to_loop()  # most awaits of a user's coroutine need one
        began = time.perf_counter()
        datapoints = self._one_for_each(indices, await await_user(self.root.fetch(indices, **options)))
        self._record(len(datapoints), began)
        return datapoints


def _joined(sources: Sequence[Fetching], indices: Sequence[Ints]) -> tuple[list[Any], list[int], Ints]:
    """Return the readers of some sources, the number of datapoints of each, and the indices of all."""
    return [source.root for source in sources], list(map(len, indices)), np.concatenate(indices)


def _divided(sources: Sequence[Fetching], indices: Sequence[Ints], datapoints: list[Any]) -> list[list[Any]]:
    """Return the datapoints of each source, of those of all, and count them."""
    parts = cut_into(datapoints, list(map(len, indices)))
    for source, own in zip(sources, parts, strict=True):
        source._count(own)
    return parts


def _are_read_alone_after(error: Exception) -> bool:
    """Return whether sources that failed together are read each alone."""
    return (capturing.get() and of_datapoint(error)) or isinstance(error, ObjectChangedError | NotFoundError)


class _Blocking(_Adapter):
    """An object with a blocking method that takes many indices."""

    async def _fetch(self, indices: ArrayLike) -> list[Any]:
        method = getattr(self.root, self._method)
        if self._mask is not None:
            method = functools.partial(method, mask=self._mask)
        steps = np.asarray(indices).tolist()

        def call() -> Any:
            began = time.perf_counter()
            datapoints = method(steps)
            self._record(len(steps), began)
            return datapoints

        return self._one_for_each(steps, await offload(call))

    def select(self, fields: Sequence[str]) -> Self | None:
        if takes_mask(self.root):
            return super().select(fields)
        # A Hugging Face dataset then decodes the selected columns only.
        column_names = getattr(self.root, 'column_names', None)
        select_columns = getattr(self.root, 'select_columns', None)
        if not isinstance(column_names, list) or not callable(select_columns):
            return None
        if unknown := [field for field in fields if field not in column_names]:
            raise UnknownKeyError(f'unknown columns {unknown}: there are {column_names}')
        return type(self)(select_columns(list(fields)), self._method)


class _Tables(_Blocking):
    """A Hugging Face dataset with the format of Arrow, which has tables: rows have values as of Parquet files."""

    async def _fetch(self, indices: ArrayLike) -> list[Any]:
        steps = np.asarray(indices).tolist()
        return await offload(lambda: rows_of(self.root[steps]))


class _Called(_Adapter):
    """An object that returns one datapoint at a time."""

    async def _fetch(self, indices: ArrayLike) -> list[Any]:
        steps = np.asarray(indices).tolist()
        method = self.root if self._method == '__call__' else getattr(self.root, self._method)
        return await map_in_threads([timed(self, lambda _, step: method(step))], [...] * len(steps), 'loading', steps)


class _InMemory(_Adapter):
    @functools.cached_property
    def gapless(self) -> bool:
        """True if no datapoint is None."""
        if isinstance(self.root, list | tuple):
            return all(value is not None for value in self.root)
        return isinstance(self.root, range) or self.root.dtype != object

    async def measure(self, path: Sequence[str]) -> Ints:
        return await offload(self._measured, path)

    def _measured(self, path: Sequence[str]) -> Ints:
        sizes = np.empty(len(self.root), np.int64)
        for i, value in enumerate(self.root):
            try:
                for key in path:
                    value = value[key]
            except (KeyError, TypeError, IndexError):
                raise DatapointError(f'index {i}: no {".".join(path)!r} in {value!r:.100}', index=i) from None
            sizes[i] = len(value) if hasattr(value, '__len__') and getattr(value, 'shape', True) != () else 1
        return sizes

    async def _fetch(self, indices: ArrayLike) -> list[Any]:
        source, steps = self.root, np.asarray(indices).tolist()
        if isinstance(source, np.ndarray):
            source = read_only(source)
        began = time.perf_counter()
        try:
            datapoints = [source[step] for step in steps]
            self._record(len(steps), began)
            return datapoints
        except IndexError:
            outside = next(step for step in steps if not -len(source) <= step < len(source))
            size = counted(len(source), 'element') if len(source) else 'no elements'
            raise OutOfRangeError(f'index {outside} is out of range: the source has {size}') from None


def takes_mask(source: Any) -> bool:
    """Return whether the source's ``fetch`` has a ``mask`` argument, which restricts it to some fields."""
    fetch = getattr(source, 'fetch', None)
    return callable(fetch) and 'mask' in inspect.signature(fetch).parameters

"""Base of the caches: a batch is looked up in one go, and the missing values are read from the source in one fetch."""

import abc
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, SupportsIndex

import numpy as np

from granular._support.indexing import index_of, indices_of
from granular._support.other_names import Awaited
from granular.aio.http.reply import stands_in
from granular.aio.pipeline.data_source import DataSource, OpenedDataSource, as_data_source, identify
from granular.aio.pipeline.describe import fingerprint
from granular.aio.pipeline.execution.failures import Failure, without_failures
from granular.aio.pipeline.nodes.adapters import convert
from granular.aio.pipeline.nodes.identities import identity_of
from granular.aio.pipeline.nodes.source import length_of, map_in_threads, stages_of
from granular.aio.pipeline.transforms import MapTransform
from granular.aio.runtime.lifecycle import AsyncResource, ensure_open
from granular.aio.runtime.threads import offload
from granular.aio.runtime.user_functions import method_of, name_of
from granular.config import MiB
from granular.errors import EncodeError, InvalidArgumentError
from granular.formats.serialization import decode, encode
from granular.metrics import DECODE, counters, timed

Function = Callable[[Any], Any] | MapTransform[Any, Any]
_NONE: Final = encode(None)
_INLINE: Final = MiB  # up to this many bytes of records, decode on the event loop


class Cache(DataSource, Awaited, AsyncResource):
    """A source and the cached values of it.

    Its options are the further arguments of the constructor, of which a copy in another process is made.
    """

    def __init__(
        self,
        source: Any,
        transform: Function | None,
        pack: Function | None,
        unpack: Function | None,
        fingerprint: str | None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self._source = source
        self._upstream = convert(source)
        self._print = fingerprint
        self._options = {**options, 'transform': transform, 'pack': pack, 'unpack': unpack}
        self._transform = _called(transform)
        self._pack = _called(pack)
        self._unpack = _called(unpack)
        self._plain = transform is None and unpack is None  # without functions of the user, which run in threads
        self._length = -1
        self.sparse: bool = self._upstream.sparse

    def __repr__(self) -> str:
        suffix = '' if self._transform is None else f', transform={name_of(self._transform)}'
        return f'{type(self).__name__}({self._upstream.describe()}{suffix})'

    def _copy_args(self, **attributes: Any) -> tuple[Any, ...]:
        """Return the arguments of ``restored``, to pickle the cache with further attributes."""
        options = {**self._options, 'fingerprint': self._print}
        return type(self), (self._source,), options, {'_length': self._length, **attributes}

    async def _open(self) -> None:
        # A reader that opens at its first read has no length before.
        await ensure_open(self._source)
        length = length_of(self._upstream)
        if self._length not in (-1, length):
            raise InvalidArgumentError(f'{self!r}: expected a source of {self._length} elements, got {length}')
        self._length = length
        await self._connect()

    @abc.abstractmethod
    async def _connect(self) -> None:
        """Open the backend of the cache, once the length is known."""

    @abc.abstractmethod
    async def _find(self, indices: Sequence[int]) -> list[Any]:
        """Return for each index the cached record (an object with a length, for ``_record``), or None."""

    @abc.abstractmethod
    async def _fill(self, missing: Sequence[int]) -> Mapping[int, Any]:
        """Read missing values from the source, cache them and return their records."""

    def _record(self, entry: Any) -> bytes:
        record: bytes = entry
        return record

    async def _nullable_keys(self, mask: Collection[str] | None) -> frozenset[str]:
        is_same = self._transform is None and self._unpack is None
        return await self._upstream.nullable_keys() if is_same else frozenset()

    def __len__(self) -> int:
        if self._length < 0:
            self._check_open()
        return self._length

    async def get(self, index: SupportsIndex) -> Any:
        """Return the value at an index, negative from the end."""
        if self._state != 'open':
            await self._ensure_open()
        return without_failures(await self.fetch([index_of(index, self._length, repr(self))]))[0]

    async def fetch(self, indices: Any) -> list[Any]:
        """Return the values at many indices, in the order requested. Missing ones are read from the source in one
        fetch.

        Args:
          indices: a 1-D sequence of integers, in any order, repeated or negative.

        Raises:
          EncodeError: for a value that cannot be cached: see ``pack``.
        """
        if self._state != 'open':
            await self._ensure_open()
        positions = indices_of(indices, self._length, repr(self)).tolist()
        unique = list(dict.fromkeys(positions))
        entries = dict(zip(unique, await self._find(unique), strict=True))
        if missing := [position for position, entry in entries.items() if entry is None]:
            entries.update(await self._fill(missing))
        counters.cached += len(unique) - len(missing)
        requested, value = [entries[position] for position in positions], timed(f'{DECODE}cache', self._value)
        if self._plain and sum(len(entry) for entry in requested if isinstance(entry, range | bytes)) <= _INLINE:
            return [value(entry, 0) if isinstance(entry, range | bytes) else entry for entry in requested]
        doing = 'reading' if self._transform is None else 'transforming'
        return await map_in_threads([value], requested, doing, positions)

    async def _read(self, missing: Sequence[int]) -> dict[int, Any]:
        """Read values from the source and return their records; a Failure for each value that failed to load."""
        values = await self._upstream.fetch(np.array(missing, np.int64))
        records = await map_in_threads([self._encoded], values, 'caching', missing)
        return {i: _NONE if record is None else record for i, record in zip(missing, records, strict=True)}

    def _encoded(self, value: Any, index: int) -> bytes:
        packed = value if self._pack is None else self._pack(value)
        if packed is None and self._unpack is not None:  # which it would not be given
            raise EncodeError(
                f'{self!r}: index {index} cannot be cached: pack returned None, which stands for an element that a '
                f'filter removed: return another value'
            )
        try:
            return encode(packed)
        except EncodeError as error:
            raise EncodeError(f'{self!r}: index {index} cannot be cached; pass pack= to convert it: {error}') from error

    def _value(self, entry: Any, index: int) -> Any:
        """Decode a record into a value that shares no memory with the cache."""
        value = decode(self._record(entry))
        if value is None:  # a filter removed this element
            return None
        if self._unpack is not None:
            value = self._unpack(value)
        return value if self._transform is None else self._transform(value)

    async def _fingerprint(self, lasting: bool) -> bytes:
        """Return 16 bytes that identify the source: its stages and length, its readers, and its functions.

        An object without an identity of its own, or without versions, is refused if the values are lasting, beyond the
        processes; otherwise it is identified by the values that it holds.
        """
        await self._identify()
        return await offload(lambda: digest(repr(self._identities(lasting)))[:16])

    async def _identify(self) -> None:
        for root in _roots(self._upstream):
            if isinstance(root, Cache):
                await root._identify()
            elif isinstance(root, OpenedDataSource):
                await identify(root)

    def _file_bytes(self, mask: Any) -> int | None:
        sizes = [stage.file_bytes() for stage in stages_of(self._upstream) if getattr(stage, 'measures_root', False)]
        return sum(filter(None, sizes)) if sizes and None not in sizes else None

    def _identities(self, lasting: bool) -> list[Any]:
        parts: list[Any] = [fingerprint(self._upstream), self._length]
        # By their roles: the same functions in other roles are applied in another order, or to other values.
        functions = [[fn for stage in stages_of(self._upstream) for fn in stage.user_functions()], [self._pack]]
        for root in _roots(self._upstream):
            source = as_data_source(root)
            functions.append([*source.user_functions()])
            if isinstance(root, Cache):
                parts.append(root._identities(lasting))
                functions.append([root._transform, root._unpack])
            elif (identity := source.identity()) is not None:
                if lasting and isinstance(source, OpenedDataSource) and _has_substitutes(identity):
                    raise InvalidArgumentError(
                        f'{self!r}: its store gives files no versions, by which to detect that one was replaced: pass '
                        f'fingerprint='
                    )
                parts.append(identity)
            elif not lasting:
                functions[-1].append(root)
            elif not _shows_all(root):
                raise InvalidArgumentError(
                    f'{self!r}: a {type(root).__name__} has no identity of its own: pass fingerprint='
                )
        try:
            return [parts, [[None if fn is None else identity_of(fn) for fn in group] for group in functions]]
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f'{self!r}: {error}: pass fingerprint=') from error


def _called(function: Function | None) -> Callable[..., Any] | None:
    return None if function is None else method_of(function, 'map')


def _roots(stage: Any) -> Iterator[Any]:
    """Yield the data sources that a pipeline reads."""
    for root in [root for stage in stages_of(stage) if (root := getattr(stage, 'root', None)) is not None]:
        yield getattr(root, 'aio', root)


def _shows_all(root: Any) -> bool:
    """Return whether the text of an object tells it from others: that of an array has rounded numbers, or no middle."""
    if isinstance(root, list | tuple) or hasattr(root, '__array__'):
        return False
    text = repr(root)
    return ' at 0x' not in text and '...' not in text


def _has_substitutes(identity: Any) -> bool:
    if isinstance(identity, Mapping):
        return any(map(_has_substitutes, identity.values()))
    if isinstance(identity, list | tuple):
        return any(map(_has_substitutes, identity))
    return isinstance(identity, str) and stands_in(identity)


def storable(records: Mapping[int, Any]) -> list[tuple[int, bytes]]:
    """Return what can be cached: the records of values that did not fail to load, with their indices."""
    return [(index, record) for index, record in records.items() if type(record) is not Failure]


def digest(text: str) -> bytes:
    """Return 32 bytes that identify a text."""
    return hashlib.sha256(text.encode()).digest()

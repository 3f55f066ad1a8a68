"""The new values of a key in a rewrite: from a table, from a mapping of some indices, or from a function of keys."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import msgpack
import numpy as np

from granular._support.indexing import Ints, cut_into
from granular.aio.bags.records import Adjacent
from granular.aio.conversion.array_rows import has_records, records_of
from granular.aio.conversion.infer import RecordMapping
from granular.aio.datasets.codec import Decoders, Encoders, Field, decode_now, encode_now, fields_of
from granular.aio.pipeline.nodes import adapters
from granular.aio.pipeline.nodes.source import Source
from granular.aio.runtime.threads import offload
from granular.aio.runtime.user_functions import call_user, refuse_deferred
from granular.errors import EncodeError, InvalidArgumentError, OutOfRangeError, UnknownKeyError
from granular.formats.checksums import crc32c
from granular.formats.layout import Layout, Spec

KEPT: Final = object()
"""The place of a value that stays as it is stored."""

_PLAIN: Final = (int, float, bool, str)  # of which a mapping of records changes none
_BYTES: Final = 1 << 26  # of an array that are hashed at a time


class KeyFunction:
    """A function of the user whose parameters are named after keys."""

    def __init__(self, argument: str, fn: Callable[..., Any], spec: Spec, decoders: Decoders, name: str) -> None:
        refuse_deferred(fn)
        self._argument = argument
        self._fn = fn
        self._name = name
        self.keys: list[str] = _parameters(argument, fn)
        if unknown := [key for key in self.keys if key not in spec]:
            raise UnknownKeyError(
                f'{argument}: its function has the parameters {unknown}, which are to be keys of {name}: it has '
                f'{list(spec)}'
            )
        # Values are decoded as a reader does, of sequences one by one.
        self._fields = fields_of({key: spec[key] for key in sorted(self.keys)}, decoders, 'refs', name)

    def call(self, records: Mapping[str, list[Any]], indices: Ints) -> list[Any]:
        """Return the results for datapoints, given by their records."""
        arguments = {field.key: self._decoded(field, records[field.key], indices) for field in self._fields}
        out = []
        for index, row in zip(indices.tolist(), zip(*arguments.values(), strict=True), strict=True):
            try:
                out.append(call_user(self._call, dict(zip(arguments, row, strict=True))))
            except Exception as error:
                error.add_note(f'{self._argument}: raised for datapoint {index} of {self._name}')
                raise
        return out

    def _call(self, arguments: dict[str, Any]) -> Any:
        return self._fn(**arguments)

    def _decoded(self, field: Field, records: list[Any], indices: Ints) -> list[Any]:
        if not field.many:
            return decode_now(field, records, lambda _, position: (self._name, int(indices[position])))
        counts = [len(own) for own in records]
        owners = indices.repeat(counts)
        flat = [record for own in records for record in own]
        values = decode_now(field, flat, lambda _, position: (self._name, int(owners[position])))
        return cut_into(values, counts) if counts else []


def _parameters(argument: str, fn: Callable[..., Any]) -> list[str]:
    expected = f'{argument}: expected a function whose parameters are named after keys, such as lambda label: ...'
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f'{expected}, got {fn!r:.100}, whose parameters are not known') from error
    if other := [each for each in parameters if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]:
        raise InvalidArgumentError(f'{expected}, got the parameter {other[0]}')
    names = [each.name for each in parameters if each.default is each.empty]
    if not names:
        raise InvalidArgumentError(f'{expected}, got {fn!r:.100}, which has none')
    return names


class NewValues:
    """The new values of a key of the result.

    ``origin`` is the key of the source whose values they replace, None for a new key. ``given`` is the type of the
    key, None to infer it.
    """

    def __init__(
        self, key: str, values: Any, origin: str | None, given: str | None, spec: Spec, decoders: Decoders, name: str,
        length: int,
    ) -> None:  # fmt: skip
        self.key = key
        self.origin = origin
        self._name = name
        self._argument = f'values[{key!r}]'
        self._given = given if given is not None or origin is None else spec[origin]
        self._function: KeyFunction | None = None
        self._table: Source | None = None
        self._some: Mapping[Any, Any] | None = None
        self._mapping: Any = None
        self._field: Any = None
        self._by_rows = False  # True if the records of an array are encoded together
        if isinstance(values, Mapping):
            self._some = self._checked(values, length)
            if origin is None or self._given != spec[origin]:
                self._refuse_missing(length)
        elif callable(values) and not hasattr(values, '__len__'):
            self._function = KeyFunction(self._argument, values, spec, decoders, name)
        else:
            self._table = self._opened(values, length)
        self._values = values

    def _checked(self, values: Mapping[Any, Any], length: int) -> Mapping[int, Any]:
        """Return a mapping from indices, with those that count from the end resolved."""
        out: dict[int, Any] = {}
        for index, value in values.items():
            if isinstance(index, bool) or not isinstance(index, int | np.integer):
                raise InvalidArgumentError(
                    f'{self._argument}: expected indices as keys of the mapping, got {index!r:.60}'
                )
            if not -length <= index < length:
                raise OutOfRangeError(
                    f'{self._argument}: index {index} is out of range: {self._name} has {length} datapoints',
                    index=int(index),
                )
            place = int(index) % length
            if place in out:
                raise InvalidArgumentError(
                    f'{self._argument}: has two values for datapoint {place}: {place - length} is it, too'
                )
            out[place] = value
        return out

    def _refuse_missing(self, length: int) -> None:
        some = self._some or {}
        if len(some) < length:
            missing = next(index for index in range(length) if index not in some)
            raise InvalidArgumentError(
                f'{self._argument}: has {len(some)} values, none for datapoint {missing}: a key that is new, or has '
                f'another type, needs one for each of the {length} datapoints of {self._name}'
            )

    def _opened(self, values: Any, length: int) -> Source:
        try:
            table = adapters.convert(values)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f'{self._argument}: {error}') from None
        if table.sparse:
            raise InvalidArgumentError(
                f'{self._argument}: leaves datapoints out by a filter: expected a value for each of the {length} of '
                f'{self._name}'
            )
        if table.endless or len(table) != length:
            count = 'no end' if table.endless else f'{len(table)} values'
            raise InvalidArgumentError(
                f'{self._argument}: has {count}, and {self._name} has {length} datapoints: expected a value for each '
                f'of them, also of those that are left out; a mapping from indices has some'
            )
        return table

    @property
    def keys(self) -> Collection[str]:
        """The keys of the source that are read for them."""
        own = () if self._function is None else self._function.keys
        return {*own, *(() if self._some is None or self.origin is None else (self.origin,))}

    def keeps(self, indices: Ints) -> bool:
        """Return whether the values of some datapoints stay as they are."""
        return self._some is not None and self.origin is not None and not any(i in self._some for i in indices.tolist())

    async def fetch(self, indices: Ints, records: Mapping[str, list[Any]]) -> list[Any]:
        """Return the values of datapoints, given by the records of ``keys``; ``KEPT`` for those that stay."""
        if self._table is not None:
            return list(await self._table.fetch(indices))
        if self._function is not None:
            return await offload(self._function.call, records, indices)
        some = self._some or {}
        return [some.get(index, KEPT) for index in indices.tolist()]

    def infer(self, sample: Sequence[Any], layout: Layout, encoders: Encoders) -> str:
        """Infer the type of the key from some of its values, unless it is given, and return it."""
        given = {} if self._given is None else {self.key: self._given}
        records = [{self.key: value} for value in sample if value is not KEPT]
        self._mapping = RecordMapping(records, given, layout, self._argument)
        kind: str = self._mapping.spec[self.key]
        # Of the mapping's spec there is only this key.
        (self._field,) = fields_of({self.key: kind}, self._mapping.encoders(encoders), layout, self._argument)
        self._by_rows = has_records(self._values, kind, encoders)
        return kind

    def rows(self, indices: Ints) -> Callable[[], Adjacent] | None:
        """Return a function that returns the records of datapoints; None if they are encoded one by one."""
        if not self._by_rows:
            return None
        return functools.partial(records_of, self._values, self._field.kind, indices)

    def encode(self, values: Sequence[Any], indices: Ints, records: Sequence[Any]) -> list[Any]:
        """Return the records of datapoints; those that stay are among the stored ``records``."""
        out: list[Any] = []
        for i, (index, value) in enumerate(zip(indices.tolist(), values, strict=True)):
            if value is KEPT:
                out.append(records[i])
                continue
            try:
                point = {self.key: value}
                if type(value) not in _PLAIN:
                    point = self._mapping.datapoint(point)
                (encoded,) = encode_now([self._field], point, self._argument, index)
            except EncodeError as error:
                raise EncodeError(
                    f'{error}: pass another value, or another type of the key with spec',
                    path=self._name, key=self.key, index=index,
                ) from error.__cause__  # fmt: skip
            out.append(encoded if self._field.many else encoded[0])
        return out

    def digest(self) -> str:
        """Return a digest of all values that are in memory, by which a changed table is found; else an empty text."""
        values = self._values
        if isinstance(values, np.ndarray) and values.dtype != object:
            rows = max(1, _BYTES // max(1, values.nbytes // max(1, len(values))))
            found = 0
            for start in range(0, len(values), rows):
                found = crc32c(np.ascontiguousarray(values[start : start + rows]).tobytes(), found)
            return f'{values.dtype} {values.shape} {found:08x}'
        if isinstance(values, list | tuple | np.ndarray):
            return f'{crc32c(_packed(list(values))):08x}'
        if self._some is not None:
            return f'{crc32c(_packed(sorted((int(index), value) for index, value in self._some.items()))):08x}'
        return ''


def _packed(values: Any) -> bytes:
    """Return what identifies values: of integers beyond 64 bits and invalid text, which msgpack refuses, their repr."""
    try:
        packed: bytes = msgpack.packb(values, default=_plain)
    except (OverflowError, UnicodeEncodeError):
        return repr(values).encode(errors='backslashreplace')
    return packed


def _plain(value: Any) -> Any:
    """Return what identifies a value that msgpack does not have; of others than arrays, only their type."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        return [value.dtype.str, value.shape, value.tobytes()]
    return type(value).__qualname__

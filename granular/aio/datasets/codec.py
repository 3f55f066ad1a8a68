"""Run encoders and decoders: inline if they are cheap, in the thread pool if they would block the event loop."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from granular import formats
from granular._support.indexing import cut_into
from granular._support.other_names import type_named
from granular.aio.runtime.immediate import is_immediate
from granular.aio.runtime.threads import Calls, map_threads, offload
from granular.aio.runtime.tracebacks import message_of
from granular.aio.runtime.user_functions import call_user
from granular.config import MiB
from granular.errors import DatapointKeysError, DecodeError, EncodeError, InvalidArgumentError, UnknownTypeError
from granular.formats import layout
from granular.formats.base import Decoder, Encoder
from granular.metrics import DECODE, record_time, timed, timing

Encoders = Mapping[str, Encoder] | None
Decoders = Mapping[str, Decoder] | None

_VIDEOS: Final = ('mp4', 'webm')
_INLINE: Final = MiB  # bytes that cheap decoders may process on the event loop: well under a millisecond


class Field(NamedTuple):
    key: str
    kind: str  # its type, as in the spec
    many: bool  # True for a sequence
    fn: Callable[[Any], Any]  # its encoder or decoder
    light: bool  # True if it is cheap enough for an event loop


Locate = Callable[[Field, int], tuple[str, int | str]]
"""Returns the datapoint of the record of a field at a position, such as ``./digits: datapoint 7``."""


def raw(value: Any) -> Any:
    """Return the value: the encoder or decoder of raw bytes."""
    return value


def is_video(field: Field) -> bool:
    """Return whether values of a field are videos, of which some frames can be decoded."""
    return field.kind in _VIDEOS and field.fn is formats.decoders[field.kind]


def check_decoders(decoders: Decoders) -> Mapping[str, Decoder]:
    """Return a mapping of functions, empty for None; raise ``InvalidArgumentError`` if it is none."""
    if decoders is None:
        return {}
    if not isinstance(decoders, Mapping) or not all(fn is None or callable(fn) for fn in decoders.values()):
        raise InvalidArgumentError(
            f'decoders: expected a mapping of functions such as granular.decoders, got {decoders!r:.100}'
        )
    return decoders


def fields_of(spec: Mapping[str, str], table: Mapping[str, Any] | None, how: layout.Layout, name: str) -> list[Field]:
    """Return the fields of a sorted spec with their encoders or decoders; without a table of these, of raw bytes."""
    fields = []
    for key, kind in spec.items():
        many = how == 'refs' and layout.is_sequence(kind)
        element = layout.element(kind) if many else kind
        if table is None:
            fields.append(Field(key, kind, many, raw, True))
            continue
        try:
            fn = table[element]
        except KeyError:
            types = (
                ', '.join(map(str, table)) or 'none, as no functions are given: {**granular.decoders, ...} adds some'
            )
            hint = f'; {keys} are keys, not types' if (keys := _keys_in(table, spec)) else ''
            hint += f'; for {element}, pass {ours}' if (ours := type_named(element)) not in ('', element) else ''
            if element in formats.decoders and table and not hint:
                hint += f': pass {{**granular.decoders, ...}}, which has {element!r}'
            raise UnknownTypeError(
                f'{name}: key {key!r} has type {element!r}, expected one of: {types}{hint}'
            ) from None
        except (TypeError, IndexError):
            raise InvalidArgumentError(
                f'{name}: expected a mapping of functions such as granular.decoders, got {type(table).__name__}'
            ) from None
        fields.append(field_of(key, kind, many, fn, f'{name}: expected a function for type {element!r}'))
    if keys := _keys_in(table or {}, spec):
        # Without the name of the dataset, so that Python shows it once for all shards.
        warnings.warn(
            f'encoders and decoders are found by type: those of {keys} have no effect, as these are keys of the spec, '
            f'and no types: pass them for types such as {layout.element(spec[keys[0]])!r}',
            UserWarning,
            stacklevel=2,
        )
    return fields


def _keys_in(table: Mapping[str, Any], spec: Mapping[str, str]) -> list[str]:
    """Return the names in a table of encoders or decoders that are keys of a spec, and no types."""
    types = {*formats.encoders, *map(layout.element, spec.values())}
    return [key for key in spec if key in table and key not in types]


def field_of(key: str, kind: str, many: bool, fn: Any, expectation: str) -> Field:
    """Return a field with an encoder or decoder; None stands for raw bytes."""
    if fn is None or fn is formats.decode_bytes:  # records are bytes already
        fn = raw
    if not callable(fn):
        raise InvalidArgumentError(f'{expectation}, got {fn!r:.100}')
    return Field(key, kind, many, fn, fn is raw or formats.inline_safe(fn))


async def decode_records(
    fields: Sequence[Field], columns: Sequence[Sequence[bytes]], locate: Locate
) -> list[list[Any]]:
    """Return the values of each field, in order; raise ``DecodeError`` if a decoder rejects a record."""
    pairs = list(zip(fields, columns, strict=True))
    cheap = [_is_cheap(*pair) for pair in pairs]
    costly = [pair for pair, is_cheap in zip(pairs, cheap, strict=True) if not is_cheap]
    # Together, as passing calls to a thread takes longer than decoding many a record.
    decoded = iter(await _decode(costly, locate) if costly else ())
    return [
        decode_now(*pair, locate) if is_cheap else next(decoded) for pair, is_cheap in zip(pairs, cheap, strict=True)
    ]


def decoding(fields: Sequence[Field], columns: Sequence[Sequence[bytes]], locate: Locate) -> Calls[list[list[Any]]]:
    """Return the calls that ``decode_records`` makes, all in threads."""
    pairs = list(zip(fields, columns, strict=True))
    costly = [pair for pair in pairs if not pair[0].light]

    def finish(values: list[Any]) -> list[list[Any]]:
        decoded = iter(_by_field(values, costly))
        return [decode_now(*pair, locate) if pair[0].light else next(decoded) for pair in pairs]

    return Calls(*_decoding(costly, locate), finish)


def _is_cheap(field: Field, records: Sequence[bytes]) -> bool:
    """Return whether records may be decoded on this thread."""
    if not field.light:
        return False
    return field.fn is raw or is_immediate() or sum(map(len, records)) <= _INLINE


def decode_now(field: Field, records: Sequence[bytes], locate: Locate) -> list[Any]:
    """Return the values of records of a field, decoded on this thread; raise ``DecodeError`` for one that fails."""
    if field.fn is raw:
        return list(records)
    out: list[Any] = []
    began = time.perf_counter() if timing.on else None
    try:
        out.extend(map(field.fn, records))
    except MemoryError:
        raise
    except Exception as error:
        # The list has the values decoded before the failure, so its length is the index.
        raise decode_error(*locate(field, len(out)), field, records[len(out)], error) from error
    finally:
        if began is not None:
            record_time(_stage(field), len(out), time.perf_counter() - began)
    return out


async def _decode(pairs: Sequence[tuple[Field, Sequence[bytes]]], locate: Locate) -> list[list[Any]]:
    """Return the values of records of some fields, decoded in threads."""
    return _by_field(await map_threads(*_decoding(pairs, locate)), pairs)


def _decoding(pairs: Sequence[tuple[Field, Sequence[bytes]]], locate: Locate) -> tuple[Callable[[int], Any], int]:
    """Return a function that decodes one of the records of all of some fields, and their number."""
    calls = [timed(_stage(field), _decoder(field, records, locate)) for field, records in pairs]
    owners = [(call, i) for call, (_, records) in zip(calls, pairs, strict=True) for i in range(len(records))]

    def decode(number: int) -> Any:
        call, i = owners[number]
        return call(i)

    return decode, len(owners)


def _by_field(values: list[Any], pairs: Sequence[tuple[Field, Sequence[bytes]]]) -> list[list[Any]]:
    return cut_into(values, [len(records) for _, records in pairs])


def _decoder(field: Field, records: Sequence[bytes], locate: Locate) -> Callable[[int], Any]:
    """Return a function that decodes one of the records of a field."""

    def call(i: int) -> Any:
        try:
            return field.fn(records[i])
        except MemoryError:  # The machine is short of memory, whatever the record is.
            raise
        except Exception as error:
            raise decode_error(*locate(field, i), field, records[i], error) from error

    return call


def _stage(field: Field) -> str:
    """Return the name of decoding values of a field, for its time."""
    return DECODE + field.kind


def decode_error(name: str, index: int | str, field: Field, record: bytes, error: Exception) -> DecodeError:
    failure = DecodeError(
        f'{name}: datapoint {index!r}, key {field.key!r} ({len(record)} bytes): not decoded as {field.kind!r}: '
        f'{describe_error(error)}',
        path=name,
        key=field.key,
        index=index if isinstance(index, int) else None,
    )
    # As a note, it is in tracebacks, but not in the log of a pipeline that skips it, nor in what commands print.
    failure.add_note("on_error='skip' of a pipeline leaves such datapoints out")
    return failure


def describe_error(error: BaseException) -> str:
    """Return the message of an error, or the name of its type if it has none."""
    return message_of(error) or type(error).__name__


def keys_error(
    spec: Mapping[str, str], datapoint: Mapping[str, Any], name: str, index: int, hint: str = ''
) -> DatapointKeysError:
    missing, extra = sorted(spec.keys() - datapoint.keys()), sorted(datapoint.keys() - spec.keys(), key=str)
    texts = [f'{text} {keys}' for text, keys in (('missing keys', missing), ('unknown keys', extra)) if keys]
    expected = f'{name}: expected the keys {sorted(spec)}'
    return DatapointKeysError(f'{expected}: datapoint {index}: {", ".join(texts)}{hint}')


async def encode_datapoint(
    fields: Sequence[Field], datapoint: Mapping[str, Any], name: str, index: int
) -> list[list[bytes]]:
    """Return the records of one datapoint, by field; a field that is not a sequence has one record."""
    if all(field.light for field in fields):
        return call_user(encode_now, fields, datapoint, name, index)
    return await offload(encode_now, fields, datapoint, name, index)


def encode_now(fields: Sequence[Field], datapoint: Mapping[str, Any], name: str, index: int) -> list[list[bytes]]:
    """Return the records of one datapoint, encoded on this thread. If one value fails, none are returned."""
    out = []
    for field in fields:
        value = datapoint[field.key]
        if field.many:
            out.append([_encode_one(field, item, name, index) for item in _values_of(field, value, name, index)])
        else:
            out.append([_encode_one(field, value, name, index)])
    return out


def _values_of(field: Field, value: Any, name: str, index: int) -> Iterator[Any]:
    try:
        if not isinstance(value, str | bytes | Mapping):
            return iter(value)
    except TypeError:  # it cannot be iterated
        pass
    raise _encode_error(
        field, name, index, f'expected a sequence of values for {field.kind!r}, got {type(value).__name__}'
    )


def _encode_one(field: Field, value: Any, name: str, index: int) -> bytes:
    try:
        record = field.fn(value)
    except MemoryError:
        raise
    except Exception as error:
        problem = f'not encoded as {field.kind!r}: {describe_error(error)}'
        raise _encode_error(field, name, index, problem) from error
    if not isinstance(record, bytes):
        problem = f'expected bytes from the encoder of {field.kind!r}, got {type(record).__name__}'
        raise _encode_error(field, name, index, problem)
    return record


def _encode_error(field: Field, name: str, index: int, problem: str) -> EncodeError:
    message = f'{name}: datapoint {index}, key {field.key!r}: {problem}'
    return EncodeError(message, path=name, key=field.key, index=index)

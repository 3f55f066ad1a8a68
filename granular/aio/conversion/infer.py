"""Infer a spec, with a type for each key, from a sample of records."""

import collections
import contextlib
import datetime
import decimal
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from granular import formats
from granular.aio.conversion.file_values import JSONText, NumpyFile
from granular.aio.conversion.sizes import Sizes
from granular.aio.pipeline.execution.failures import Failure
from granular.errors import DatapointError, DecodeError, EncodeError, InvalidArgumentError
from granular.formats.base import as_array, outline_of
from granular.formats.codecs.audio import audio_type
from granular.formats.codecs.images import image_type
from granular.formats.codecs.videos import video_type
from granular.formats.layout import Layout, Spec, check_spec, element

_PLAIN: Final = ('int', 'float', 'bool', 'utf8', 'bytes', 'msgpack')  # types that msgpack can represent
_BAD: Final = re.compile(r'[^A-Za-z0-9_.-]')
_DEPTH: Final = 64
FILE: Final = {'bytes', 'path'}  # of an image in Parquet files of Hugging Face
_IMAGES: Final = ('jpg', 'png')
_FILES: Final = (*_IMAGES, 'mp4', 'webm', 'wav', 'flac')  # types of files, which are stored as they are
_DAMAGED: Final = {'damaged array': ('array', 'bytes'), 'damaged json': ('json', 'utf8')}
"""The type of files that most of them are, and of all of them if most are damaged."""
# Types that take more values, such as None, by type.
_WIDER: Final = {
    **dict.fromkeys(_FILES, 'bytes'), **dict.fromkeys(('int', 'float', 'bool', 'utf8', 'bytes'), 'msgpack'),
    'json': 'utf8', 'array': 'tree', 'msgpack': 'tree',
}  # fmt: skip
_EMPTY: Final = 'empty list'
_NAMED: Final = 20  # bad records that an error names


class FileRecord(dict[str, Any]):
    """A record that is a file, which errors name by its path."""

    path: str  # its address
    file: str  # its path in the folder that is converted


class RecordMapping:
    """The mapping from records to datapoints of a granular dataset, with the types that ``convert`` names.

    Bytes of which most are image files, or that have the name of one, are images: the other ones are bad. Keys with
    values of several other types get a type that can represent all: ``jpg``, ``bytes``, ``msgpack`` or ``tree``.

    ``spec`` has types that override the inferred ones, by key: with that of a key ``file``, it has the names of the
    files of images, and ``utf8`` is also the type of bytes. ``images`` are the fields that are images by these names.
    ``columns`` is what the schema of the source tells of fields: the type if no value is missing, or an empty text if
    the sample decides, and whether values may be None. ``sizes`` are keys whose sizes are stored, each under
    ``size_key``.
    """

    def __init__(
        self,
        sample: Sequence[Any],
        spec: Mapping[str, str] | None,
        layout: Layout,
        name: str,
        images: Sequence[str] = (),
        columns: Mapping[str, tuple[str, bool]] | None = None,
        sizes: Sequence[str] = (),
    ) -> None:
        self._name = name
        self._names_files = 'file' in (spec or ())
        records = [self._mapping(record) for record in sample if not isinstance(record, Failure)]
        names = list(dict.fromkeys(field for record in records for field in record))
        self._keys = {field: _key_of(field, layout) for field in names}
        fields: dict[str, str] = {}
        for field, key in self._keys.items():
            if key in fields:
                raise InvalidArgumentError(
                    f'{name}: fields {fields[key]!r} and {field!r} would both be key {key!r}: rename one in the source'
                )
            fields[key] = field
        # The keys of fields whose names cannot be keys, by field.
        self.renamed: dict[str, str] = {field: key for field, key in self._keys.items() if field != key}
        counts = {
            key: collections.Counter(type_of_value(self._plain_of(field, record.get(field))) for record in records)
            for field, key in self._keys.items()
        }
        lists = layout == 'refs'  # the layout that has sequences
        types, by_schema = dict[str, str](), set[str]()
        for field, key in self._keys.items():
            declared, nullable = (columns or {}).get(field, ('', False))
            if declared.endswith('[]') and not lists:
                declared = 'msgpack'
            if declared:
                by_schema.add(key)
                types[key] = common_type({declared, 'msgpack'} if nullable else {declared})
            else:
                counted = counts[key] + collections.Counter({'msgpack': int(nullable)})
                types[key] = _type_of(counted, field in images, lists)
        given = {self._keys.get(field, field): kind for field, kind in (spec or {}).items()}
        if len(given) < len(spec or {}):
            raise InvalidArgumentError(
                f'{name}: spec names a field twice, by its name and by its key: {dict(spec or {})}'
            )
        if records and (unknown := sorted(set(given) - set(types), key=str)):
            raise InvalidArgumentError(f'{name}: spec names keys {unknown}, the records have {sorted(types)}')
        types.update(given)
        if unfit := sorted(key for key, kind in types.items() if not kind):
            examples = {key: type(records[0].get(fields[key])).__name__ for key in unfit[:5]}
            raise InvalidArgumentError(f'{name}: no type fits these keys: {examples}: pass one with spec')
        if not types:
            raise InvalidArgumentError(f'{name}: has no records to infer a spec from: pass spec')
        self._sizes = Sizes(sizes, types, name)
        types.update(self._sizes.types)
        self.spec: Spec = check_spec(types, layout)
        # By key, the types that the sample has, or that its type was given.
        self.reasons: dict[str, str] = {
            key: 'of sizes' if key in self._sizes.types
            else 'given' if key in given
            else 'of the schema' if key in by_schema
            else f'of {len(records)} sampled: {_listed(counts[key])}'
            for key in self.spec
        }  # fmt: skip
        # The remedy for a value that does not fit its type, by key.
        self.hints: dict[str, str] = {key: _hint(key, kind, key in given) for key, kind in self.spec.items()}
        self._texts = {key for key, kind in given.items() if element(kind) == 'utf8'}
        self._optional = {key for key, kind in self.spec.items() if kind in ('msgpack', 'tree')}
        self.mean: int = mean_size(records)
        images = [field for field, key in self._keys.items() if self.spec[key] in _IMAGES]
        is_files = all(isinstance(_plain(record.get(field)), bytes) for record in records for field in images)
        self._images = images if is_files else []  # whose files are checked
        self._damaged = [
            (field, kind) for field, key in self._keys.items() for kind, (good, _) in _DAMAGED.items()
            if counts[key][kind] and self.spec[key] == good
        ]  # fmt: skip

    def refuse_bad(self, sample: Sequence[Any]) -> None:
        """Raise an ``EncodeError`` that names all sampled records whose images are not image files, if any."""
        for field in self._images:
            bad = [
                (number, record) for number, record in enumerate(sample)
                if isinstance(record, Mapping) and not image_type(_plain(record[field]))
            ]  # fmt: skip
            if not bad:
                continue
            names = [
                f'{getattr(record, "path", f"record {number} of the sample")} ({outline_of(_plain(record[field]))})'
                for number, record in bad[:_NAMED]
            ]
            more = f', and {len(bad) - _NAMED} more' if len(bad) > _NAMED else ''
            key = self._keys[field]
            raise EncodeError(
                f'{self._name}: key {key!r}: {len(bad)} of {len(sample)} sampled files are not a JPEG, PNG, WebP, GIF '
                f'or BMP: {", ".join(names)}{more}{self.hints[key]}',
                path=getattr(bad[0][1], 'path', self._name),
                key=key,
            )
        for field, kind in self._damaged:
            key = self._keys[field]
            names = [
                f'{self._name_of(record, field, number)} ({_reason(record[field])})'
                for number, record in enumerate(sample)
                if isinstance(record, Mapping) and type_of_value(record.get(field)) == kind
            ]
            more = f', and {len(names) - _NAMED} more' if len(names) > _NAMED else ''
            raise EncodeError(
                f'{self._name}: key {key!r}: {len(names)} of {len(sample)} sampled files are damaged: '
                f'{", ".join(names[:_NAMED])}{more}{self.hints[key]}',
                path=self._name,
                key=key,
            )

    def _name_of(self, record: Mapping[str, Any], field: str, number: int) -> str:
        return f'{record["__key__"]}.{field}' if '__key__' in record else f'record {number} of the sample'

    def encoders(self, custom: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the encoders. Those for images and JSON leave files as they are."""
        out: dict[str, Any] = {**formats.encoders, 'json': _encode_json, 'array': _encode_array}
        for kind in ('utf8', 'msgpack', 'tree'):
            out[kind] = functools.partial(_encode_simplified, out[kind])
        for kind in _IMAGES:
            out[kind] = functools.partial(_encode_image, out[kind])
        return {**out, **(custom or {})}

    def datapoint(self, record: Any) -> dict[str, Any]:
        keys, fields = self._keys, self._mapping(record)
        out = {keys.get(field, field): self._plain_of(field, value) for field, value in fields.items()}
        if len(out) < len(fields):
            field, key = next(pair for pair in self.renamed.items() if fields.keys() >= set(pair))
            raise DatapointError(
                f'{self._name}: fields {key!r} and {field!r} would both be key {key!r}: rename one in the source'
            )
        for key in self._texts.intersection(out):
            out[key] = _as_text(out[key])
        for key in self._optional:
            value: Any = out.get(key)  # missing values become None
            is_scalar = isinstance(value, np.generic) and self.spec[key] == 'msgpack'
            out[key] = value.item() if is_scalar else value
        for key, value in out.items():
            kind = self.spec.get(key)
            if isinstance(value, NumpyFile) and kind == 'tree':
                out[key] = value.array()
            elif isinstance(value, JSONText) and kind in ('msgpack', 'tree'):
                out[key] = self._parsed(key, value)
        self._sizes.add(out)
        return out

    def _parsed(self, key: str, text: JSONText) -> Any:
        try:
            return formats.decode_json(text.encode())
        except DecodeError as error:
            raise EncodeError(f'{self._name}: key {key!r}: {error}', path=self._name, key=key) from error

    def _plain_of(self, field: str, value: Any) -> Any:
        try:
            return _plain(value)
        except EncodeError as error:
            raise EncodeError(f'{self._name}: field {field!r}: {error}', path=self._name, key=field) from error

    def _mapping(self, record: Any) -> Mapping[str, Any]:
        if self._names_files and isinstance(record, FileRecord) and 'file' not in record:
            return {**record, 'file': record.file}
        if isinstance(record, Mapping):
            return record
        if isinstance(record, bytes | bytearray | memoryview | str | int | float | np.ndarray | np.generic):
            return {'data': record}
        raise DatapointError(
            f'{self._name}: a record is of type {type(record).__name__}: expected mappings: create them with '
            f'MapDataset.source(...).map(...) or a generator'
        )


def _encode_image(encode: Callable[[Any], bytes], value: Any) -> bytes:
    """Encode arrays and PIL images, and leave image files as they are."""
    return formats.encode_image_file(value) if isinstance(value, bytes) else encode(value)


def _encode_simplified(encode: Callable[[Any], bytes], value: Any) -> bytes:
    """Encode arrays of objects as lists, PIL images as files, and decimals and times of day as text unless the type has
    these, at any depth.
    """
    try:
        return encode(value)
    except EncodeError:  # others are not searched, which takes longer
        return encode(_simplified(value))


def _simplified(value: Any, depth: int = 0) -> Any:
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.tolist()
    if isinstance(value, list | tuple) and depth < _DEPTH:
        return [_simplified(item, depth + 1) for item in value]
    if isinstance(value, dict) and depth < _DEPTH:
        return {key: _simplified(item, depth + 1) for key, item in value.items()}
    if isinstance(value, np.bool_):
        return bool(value)
    if _is_pil(value):
        return formats.encoders['png'](value)
    return str(value) if isinstance(value, decimal.Decimal | datetime.time) else _time(value)


def _time(value: Any) -> Any:
    """Return the ``datetime64`` or ``timedelta64`` of a date, timestamp (in UTC) or duration; others as they are."""
    if not isinstance(value, datetime.date | datetime.timedelta):
        return value
    if hasattr(value, 'to_numpy'):  # of pandas, with nanoseconds
        return value.to_numpy()
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        value = value.astimezone(datetime.UTC).replace(tzinfo=None)
    return np.timedelta64(value) if isinstance(value, datetime.timedelta) else np.datetime64(value)


def _encode_json(value: Any) -> bytes:
    if not isinstance(value, JSONText):
        return formats.encode_json(value)
    content = value.encode()
    try:
        formats.decode_json(content)
    except DecodeError as error:
        raise EncodeError(f'{error}') from error
    return content


def _encode_array(value: Any) -> bytes:
    return formats.encode_array(value.array() if isinstance(value, NumpyFile) else value)


def _key_of(field: Any, layout: Layout) -> str:
    key = _BAD.sub('_', str(field))
    if not re.match(r'[a-z_]', key):
        key = key[0].lower() + key[1:] if re.match(r'[A-Z]', key) else f'_{key}'
    return 'refs_' if key == 'refs' and layout == 'refs' else key


def _plain(value: Any) -> Any:
    """Convert a value to a supported type, such as a tensor of another library to an array."""
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.str_):
        return str.__str__(value)  # numpy's own drops zeros at the end
    if isinstance(value, np.bytes_ | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping) and value.keys() == FILE and isinstance(value['bytes'], bytes):
        return value['bytes']
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object):
        is_list = len(value) > 0 and all(isinstance(item, Mapping) and item.keys() == FILE for item in value)
        return [_plain(item) for item in value] if is_list else value
    if hasattr(value, '__array__') and not isinstance(value, np.ndarray | np.generic) and not _is_pil(value):
        return as_array(value)
    return _time(value)


def _as_text(value: Any) -> Any:
    """Convert bytes, also in a list, to the text that they are in UTF-8; leave other bytes and values as they are."""
    if isinstance(value, list | tuple):
        return [_as_text(item) for item in value]
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode()
    return value


def _is_pil(value: Any) -> bool:
    return type(value).__module__.startswith('PIL.')


def type_of_value(value: Any, depth: int = 0) -> str:
    """Return the type that fits a value; empty if none does."""
    match value:
        case np.ndarray() if value.dtype == object:
            return type_of_value(value.tolist(), depth)
        case np.ndarray():
            return 'array' if value.dtype.kind in 'biufcmMSUV' and value.dtype.names is None else ''
        case np.timedelta64():  # a subclass of integers
            return 'array'
        case np.integer() if not depth and value.dtype == np.int64:
            return 'int'
        case bool() | np.bool_():
            return 'bool'
        case float():
            return 'float'
        case None:
            return 'msgpack'
        case int():
            return 'int' if value.bit_length() < 128 else ''
        case np.generic():
            return 'array'
        case JSONText():
            try:
                _encode_json(value)
            except EncodeError:
                return 'damaged json'
            return 'json'
        case NumpyFile():
            try:
                return type_of_value(value.array()) or 'damaged array'
            except EncodeError:
                return 'damaged array'
        case str():
            return 'utf8'
        case decimal.Decimal() | datetime.time():
            return 'tree'
        case datetime.date() | datetime.timedelta():
            return 'array'
        case bytes():
            return file_type(value) or 'bytes'
        case list() | tuple() if not depth and not value:
            return _EMPTY
        case list() | tuple() if not depth and (kinds := _kinds_of_files(value)):
            return 'jpg[]' if len(kinds) > 1 else f'{kinds.pop()}[]'
        case list() | tuple() | dict():
            items = [*value, *value.values()] if isinstance(value, dict) else value
            return (
                common_type({'msgpack', *(type_of_value(item, depth + 1) for item in items)}) if depth < _DEPTH else ''
            )
    return 'png' if _is_pil(value) else ''


def _reason(file: Any) -> str:
    """Return why a file is damaged."""
    try:
        (_encode_array if isinstance(file, NumpyFile) else _encode_json)(file)
    except EncodeError as error:
        return f'{error}'
    return 'of another type'


def file_type(data: bytes) -> str:
    """Return the type of a file of an image, a video or sound by its first bytes; empty for other bytes."""
    return image_type(data) or video_type(data) or audio_type(data)


def _kinds_of_files(values: Sequence[Any]) -> set[str]:
    """Return the types of the files in a list; none if it has other values, or files that have no type in common."""
    kinds = {type_of_value(value, 1) if isinstance(value, bytes) or _is_pil(value) else '' for value in values}
    return kinds if kinds <= set(_IMAGES) or (len(kinds) == 1 and kinds <= set(_FILES)) else set()


def _listed(counts: Mapping[str, int]) -> str:
    return ', '.join(f'{count} {kind}' for kind, count in sorted(counts.items(), key=lambda pair: -pair[1]))


def _hint(key: str, kind: str, is_given: bool) -> str:
    reason = '' if is_given else f': {kind!r} was inferred from a sample'
    other = 'another type' + (f', such as {key}={_WIDER[kind]}' if kind in _WIDER else '')
    if kind in _IMAGES:
        other = f'{key}=bytes'
    if is_given and element(kind) == 'utf8':
        other = f'{key}={kind.replace("utf8", "bytes")} for bytes that are not UTF-8'
    return f"{reason}: repair or remove it, skip it (on_error='skip', or --on-error skip), or pass {other} (spec)"


def _type_of(counts: Mapping[str, int], is_image: bool, lists: bool) -> str:
    """Return the type for values of which so many have each type; empty if none fits.

    One damaged file does not decide: the type is that of most files, and the others are bad.
    """
    kinds, total = set(counts), sum(counts.values())
    for damaged, (good, otherwise) in _DAMAGED.items():
        if damaged in kinds:
            most = kinds == {damaged, good} and 2 * counts[good] > total
            kinds = {good} if most else kinds - {damaged, 'json' if otherwise == 'utf8' else ''} | {otherwise}
    if kinds <= {*_FILES, 'bytes'}:
        files = sum(counts.get(kind, 0) for kind in _FILES)
        if 2 * files > total or is_image:
            kinds = (kinds - {'bytes'}) or {'jpg'}
    elements = {kind.removesuffix('[]') for kind in kinds if kind.endswith('[]')}
    if lists and elements and kinds - {_EMPTY} == {f'{kind}[]' for kind in elements}:
        element = common_type(elements)
        return f'{element}[]' if element in _FILES else 'msgpack'
    return common_type({'msgpack' if kind.endswith('[]') or kind == _EMPTY else kind for kind in kinds})


def common_type(kinds: set[str]) -> str:
    """Return a type that fits values of all the given types; empty if none does."""
    if kinds == {'json'}:
        return 'json'
    kinds = {'utf8' if kind == 'json' else kind for kind in kinds}
    if len(kinds) == 1:
        return kinds.pop()
    if kinds <= set(_IMAGES):
        return 'jpg'
    if kinds <= {*_FILES, 'bytes'}:
        return 'bytes'
    if kinds <= {*_PLAIN, *_FILES}:
        return 'msgpack'
    return 'tree' if kinds <= {*_PLAIN, *_FILES, 'array', 'tree'} else ''


def mean_size(records: Sequence[Mapping[str, Any]]) -> int:
    """Return the mean size of records in bytes, at least 1."""
    return max(1, sum(map(_size, records)) // max(1, len(records)))


def _size(value: Any) -> int:
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.tolist()
    if isinstance(value, Mapping | list | tuple):
        return sum(map(_size, value.values() if isinstance(value, Mapping) else value))
    return len(value) if isinstance(value, bytes | str) else int(getattr(value, 'nbytes', 8))

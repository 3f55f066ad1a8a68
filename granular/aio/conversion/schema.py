"""Types of keys from the schema of a source, rather than from a sample of its values."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from granular._support.lazy import import_extra
from granular.aio.conversion.infer import FILE, common_type
from granular.formats.arrow_values import has_null


class Column(NamedTuple):
    """Type of a field in a schema."""

    kind: str  # its type if no value is missing; empty if the values decide
    nullable: bool  # True if a value may be None


def column_of(types: Sequence[Any], is_missing: bool, has_nulls: bool) -> Column:
    """Return what the types in Arrow of a field tell, which may differ in several files.

    ``is_missing`` is True if a value is a null, ``has_nulls`` if one may be, or be in a list or struct.
    """
    kinds = {_kind(kind, has_nulls) for kind in types}
    nullable = is_missing and not all(map(has_null, types))
    return Column('' if '' in kinds else common_type(kinds), nullable)


def has_nulls(column: Any) -> bool:
    """Return whether a column in Arrow, or its lists and structs, have nulls."""
    return any(_nulls_in(chunk) for chunk in column.chunks)


def _nulls_in(array: Any) -> bool:
    pa = import_extra('pyarrow', 'parquet')
    if isinstance(array.type, pa.BaseExtensionType):
        return _nulls_in(array.storage)
    if array.null_count:
        return True
    if pa.types.is_struct(array.type):
        return any(map(_nulls_in, array.flatten()))
    return pa.types.is_nested(array.type) and not pa.types.is_map(array.type) and _nulls_in(array.flatten())


def _kind(kind: Any, has_nulls: bool, depth: int = 0) -> str:
    """Return the type for values that ``values_of`` returns; empty for bytes that may be files, and unknown types."""
    types = import_extra('pyarrow', 'parquet').types
    if types.is_dictionary(kind):
        return _kind(kind.value_type, has_nulls, depth)
    if hasattr(kind, 'storage_type'):
        return _kind(kind.storage_type, has_nulls, depth)
    if types.is_boolean(kind):
        return 'bool'
    if _is_number(kind):
        plain = {'int64': 'int', 'double': 'float'}.get(f'{kind}', 'array')
        return 'array' if depth and plain == 'int' else plain
    if _is_time(kind):
        return 'array'
    if _is_text(kind):
        return 'utf8'
    if types.is_decimal(kind) or types.is_time(kind):
        return 'tree'
    if types.is_null(kind):
        return 'msgpack'
    if types.is_struct(kind):
        if not depth and _is_file(kind):
            return ''
        return common_type({'msgpack', *(_kind(field.type, has_nulls, depth + 1) for field in kind)})
    if types.is_map(kind):
        parts = (kind.key_type, kind.item_type)
        return common_type({'msgpack', *(_kind(part, has_nulls, depth + 1) for part in parts)})
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _kind_of_list(kind.value_type, has_nulls, depth)
    return 'bytes' if depth else ''


def _kind_of_list(item: Any, has_nulls: bool, depth: int) -> str:
    types = import_extra('pyarrow', 'parquet').types
    if types.is_boolean(item):
        return 'tree' if has_nulls else 'array'  # an array of objects, if one of its values is a null
    if _is_number(item) or _is_time(item):
        return 'array'
    if not depth and (_is_bytes(item) or _is_file(item)):
        return ''  # a list of files of images has a type of its own
    return common_type({'msgpack', _kind(item, has_nulls, depth + 1)})


def _is_float(kind: Any) -> bool:
    return bool(import_extra('pyarrow', 'parquet').types.is_floating(kind))


def _is_number(kind: Any) -> bool:
    return bool(import_extra('pyarrow', 'parquet').types.is_integer(kind)) or _is_float(kind)


def _is_time(kind: Any) -> bool:
    types = import_extra('pyarrow', 'parquet').types
    return bool(types.is_date(kind) or types.is_timestamp(kind) or types.is_duration(kind))


def _is_text(kind: Any) -> bool:
    return f'{kind}' in ('string', 'large_string', 'string_view')


def _is_bytes(kind: Any) -> bool:
    return f'{kind}' in ('binary', 'large_binary', 'binary_view') or f'{kind}'.startswith('fixed_size_binary')


def _is_file(kind: Any) -> bool:
    """Return whether a type is that of files in Hugging Face datasets."""
    types = import_extra('pyarrow', 'parquet').types
    return bool(types.is_struct(kind)) and {field.name for field in kind} == FILE

"""Converts Arrow columns into the values of rows: numpy scalars and arrays, and Python values where numpy has none."""

import itertools
from typing import Any

from granular._support.lazy import import_extra


def values_of(column: Any) -> list[Any]:
    """Return the values of an Arrow array or chunked array.

    Numbers and booleans become numpy scalars of the column's type; dates, times and durations ``datetime64`` and
    ``timedelta64``; strings, bytes, decimals and times of day Python values. A list becomes a new array (1-D), or a
    list if numpy has no type for its values; a struct a dict, a map a list of lists of a key and a value.
    Dictionary-encoded values are looked up, and an extension type becomes its storage type.

    Google Grain returns the same values, except for nulls, and for lists, of which it makes arrays of objects if numpy
    has no type for their values. A null is NaN in a float column, NaT in a date or time column, and None otherwise, so
    that the integers and booleans beside it keep their type. A list of integers with a null becomes float64 with NaN,
    because an integer array cannot hold None; a ``ValueError`` if it rounds. One of booleans with a null is a list.
    """
    pa = import_extra('pyarrow', 'parquet')
    if isinstance(column, pa.ChunkedArray):
        return [value for chunk in column.chunks for value in values_of(chunk)]
    kind, types = column.type, pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return values_of(column.storage)
    if types.is_dictionary(kind):
        return values_of(column.dictionary_decode())
    if types.is_struct(kind):
        names = [field.name for field in kind]
        if len(set(names)) < len(names):
            raise ValueError(f'a struct has several fields of one name: {names}')
        rows = zip(*map(values_of, column.flatten()), strict=True) if names else [()] * len(column)
        return _masked(column, [dict(zip(names, row, strict=True)) for row in rows])
    if types.is_map(kind):
        limits = _limits(column.offsets)
        first, last = (limits[0][0], limits[-1][1]) if limits else (0, 0)
        children = (child.slice(first, last - first) for child in (column.keys, column.items))
        pairs = list(map(list, zip(*map(values_of, children), strict=True)))
        return _masked(column, [pairs[start - first : stop - first] for start, stop in limits])
    if types.is_list(kind) or types.is_large_list(kind):
        return _lists(column, _limits(column.offsets), column.values)
    if types.is_fixed_size_list(kind):
        size, first = kind.list_size, column.offset
        limits = [((first + i) * size, (first + i + 1) * size) for i in range(len(column))]
        return _lists(column, limits, column.values)
    if column.null_count and (types.is_integer(kind) or types.is_boolean(kind)):
        return _masked(column, list(column.fill_null(pa.scalar(0).cast(kind)).to_numpy(zero_copy_only=False)))
    values = column.to_numpy(zero_copy_only=False)
    return values.tolist() if values.dtype == object else list(values)  # numbers stay numpy scalars


def has_null(kind: Any) -> bool:
    """Return whether a null of a type is a value of numpy, NaN or NaT, rather than None."""
    types = import_extra('pyarrow', 'parquet').types
    is_time = types.is_date(kind) or types.is_timestamp(kind) or types.is_duration(kind)
    return bool(is_time or types.is_floating(kind))


def rows_of(table: Any) -> list[dict[str, Any]]:
    """Return the rows of an Arrow table, with values as ``values_of`` returns."""
    names = table.column_names
    return [dict(zip(names, row, strict=True)) for row in zip(*map(values_of, table.columns), strict=True)]


def _limits(offsets: Any) -> list[tuple[int, int]]:
    """Return the start and end of each list in the flattened values."""
    return list(itertools.pairwise(offsets.to_numpy(zero_copy_only=False).tolist()))


def _lists(column: Any, limits: list[tuple[int, int]], child: Any) -> list[Any]:
    pa = import_extra('pyarrow', 'parquet')
    if not limits:
        return []
    first = min(start for start, _ in limits)
    child = child.slice(first, max(stop for _, stop in limits) - first)
    limits = [(start - first, stop - first) for start, stop in limits]
    types, kind = pa.types, child.type
    whole = types.is_integer(kind) or types.is_boolean(kind)
    if whole and child.null_count:
        parts = (child.slice(start, stop - start) for start, stop in limits)
        rows = [_with_nulls(part) if part.null_count else part.to_numpy(zero_copy_only=False) for part in parts]
    elif whole or types.is_floating(kind) or (types.is_temporal(kind) and not types.is_time(kind)):
        array = child.to_numpy(zero_copy_only=False)
        rows = [array[start:stop] for start, stop in limits]
    else:
        values = values_of(child)
        rows = [values[start:stop] for start, stop in limits]
    return _masked(column, [row.copy() for row in rows])


def _with_nulls(part: Any) -> Any:
    """Return the array for integers, or the list of booleans, with nulls."""
    pa = import_extra('pyarrow', 'parquet')
    if pa.types.is_boolean(part.type):
        return values_of(part)
    try:
        return part.cast(pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid as error:
        raise ValueError(f'{error}, in a list with a null, which becomes float64') from error


def _masked(column: Any, values: list[Any]) -> list[Any]:
    """Return the values, with None for nulls."""
    if not column.null_count:
        return values
    valid = column.is_valid().to_numpy(zero_copy_only=False).tolist()
    return [value if is_valid else None for value, is_valid in zip(values, valid, strict=True)]

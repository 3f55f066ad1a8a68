"""Conversion between bytes of bags and datasets and numpy: pure functions, no I/O. docs/format.md describes the bytes.

The *limits* of a bag are an int64 array of N + 1 offsets, the first of them 0, so that record i is the bytes
``limits[i]`` to ``limits[i + 1]``, in every version of the format.
"""

import bisect
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgpack
import numpy as np

from granular._support.indexing import Ints
from granular.errors import CorruptBagError, CorruptDatasetError, InvalidArgumentError, SpecError
from granular.formats.base import parse_json
from granular.formats.checksums import SUFFIX as CHECKSUMS

Layout = Literal['refs', 'columns']
Spec = dict[str, str]

MAX_RECORDS: Final = 2**32 - 1
LIMIT: Final = 8  # bytes of a limit
SUFFIXES: Final = ('.bag', '.idx', CHECKSUMS)  # of the files of a bag

_KEY: Final = re.compile(r'[a-z_][A-Za-z0-9_.-]*')
_KIND: Final = re.compile(r'[a-z_]')
_SHARD: Final = re.compile(r'[0-9]{6}|[1-9][0-9]{6}')
PADDED: Final = 10**6  # shards whose names have six digits


# --- bags ---------------------------------------------------------------------------------------------------------


def table_start(tail: bytes, size: int, name: str) -> int:
    """Return the position of the table of a bag of version 1 or 2, from its last 8 bytes or more."""
    if size < LIMIT:
        raise CorruptBagError(f'{name}: expected a bag, which ends with a table of 8-byte limits, got {size} bytes')
    start = int.from_bytes(tail[-LIMIT:], 'little')
    if start > size - LIMIT or (size - start) % LIMIT:
        raise CorruptBagError(
            f'{name}: its last 8 bytes declare a table that starts at {start}, which leaves no integral number of '
            f'limits in a file of {size} bytes: it is truncated, or is not a bag'
        )
    check_count((size - start) // LIMIT, name)
    return start


def check_count(limits: int, name: str) -> int:
    """Return the number of limits of a table; raise ``CorruptBagError`` for more than a bag may have."""
    if limits > MAX_RECORDS + 1:
        raise CorruptBagError(f'{name}: expected at most {MAX_RECORDS} records, got a table of {limits} limits')
    return limits


def blank_limits(count: int, name: str) -> Ints:
    """Return an array for ``count`` limits as in a file, after a zero: fill ``[1:]``, then call ``check_limits``."""
    try:
        limits = np.empty(check_count(count, name) + 1, np.int64)
    except MemoryError as error:
        raise CorruptBagError(f'{name}: not enough memory for its {count} limits') from error
    limits[0] = 0
    return limits


def check_limits(limits: Ints, datasize: int, name: str) -> Ints:
    """Return the limits after checking that they do not decrease and stay within the data."""
    falls = np.flatnonzero(limits[1:] < limits[:-1])
    if falls.size:
        i = int(falls[0])
        raise CorruptBagError(f'{name}: the limits of record {i} decrease, from {limits[i]} to {limits[i + 1]}')
    if limits[-1] > datasize:
        raise CorruptBagError(f'{name}: its last limit is {limits[-1]}, but it has only {datasize} bytes of records')
    return limits


def last_limit(tail: bytes, size: int) -> int:
    """Return the last whole limit of an ``.idx`` file of ``size`` bytes, from its last bytes; 0 if it has none."""
    return int.from_bytes(tail[: len(tail) - size % LIMIT][-LIMIT:], 'little')


def table_of(ends: Ints, version: int) -> bytes:
    """Return the table that a writer appends to the records (versions 1, 2) or writes into the ``.idx`` file (3)."""
    table = ends.astype('<i8', copy=False).tobytes()
    return bytes(LIMIT) + table if version == 1 else table


# --- refs ---------------------------------------------------------------------------------------------------------


def pack_refs(refs: list[Any]) -> bytes:
    """Encode one datapoint for ``refs.bag``: an index per scalar, ``[first, count]`` or ``[]`` per sequence."""
    packed: bytes = msgpack.packb(refs)
    return packed


def _scalar_refs(unpack: Callable[[bytes], Any], records: Sequence[bytes], keys: int) -> Ints | None:
    """Return references without sequences; None if there are none, or if one does not have an integer for each key."""
    try:
        numbers = np.array([unpack(record) for record in records])
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
        return None
    return numbers if numbers.dtype == np.int64 and numbers.shape[1:] == (keys,) else None


def unpack_refs(records: Iterable[bytes], spec: Mapping[str, str], name: str) -> tuple[Ints, Ints]:
    """Return the first record and the number of records of datapoints, int64 of shape (datapoints, keys), from their
    records in ``refs.bag``; raise ``CorruptDatasetError`` if one does not fit the spec, which is sorted.
    """
    sequence = [is_sequence(kind) for kind in spec.values()]
    flat: list[tuple[int, ...]] = []
    # Accept only numbers, in lists no longer than the spec, or than two: a list declared as longer is not
    # allocated.
    unpack = functools.partial(
        msgpack.unpackb, max_array_len=max(2, len(sequence)), max_map_len=0, max_ext_len=0, max_bin_len=0, max_str_len=0
    )
    records = list(records)
    if not any(sequence) and (numbers := _scalar_refs(unpack, records, len(sequence))) is not None:
        return numbers, np.ones_like(numbers)
    for i, record in enumerate(records):
        try:
            refs = unpack(record)
            row = [
                (tuple(ref) or (0, 0)) if many else (ref + 0, 1)  # raises TypeError for what is neither list nor number
                for many, ref in zip(sequence, refs, strict=True)
            ]
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise CorruptDatasetError(
                f'{name}: reference {i} of those read does not match the spec {dict(spec)!r:.200}'
            ) from error
        flat.extend(row)
    if not flat:
        return np.zeros((0, len(sequence)), np.int64), np.zeros((0, len(sequence)), np.int64)
    try:
        table = np.array(flat)  # without a given dtype, which would truncate a fraction to an integer
    except (ValueError, OverflowError) as error:
        raise CorruptDatasetError(f'{name}: expected pairs of integers as references') from error
    if table.dtype != np.int64 or table.ndim != 2 or table.shape[1] != 2:
        raise CorruptDatasetError(f'{name}: expected pairs of integers below 2**63 as references, got {table.dtype}')
    table = table.reshape(-1, len(sequence), 2)
    return table[:, :, 0], table[:, :, 1]


# --- datasets -----------------------------------------------------------------------------------------------------


def size_key(key: str) -> str:
    """Return the key of type ``int`` that has the sizes of the values of another key, where the format does not."""
    return f'{key}_size'


def is_sequence(kind: str) -> bool:
    """Return whether a type is a sequence, such as ``utf8[]``. Only the refs layout has such types."""
    return kind.endswith('[]')


def element(kind: str) -> str:
    """Return the type of the values in a sequence, or the type itself."""
    return kind[:-2] if is_sequence(kind) else kind


def check_spec(spec: Mapping[str, str], layout: Layout) -> Spec:
    """Return the spec of a new dataset, checked and sorted by key."""
    if layout not in ('refs', 'columns'):
        raise InvalidArgumentError(f"layout: expected 'refs' or 'columns', got {layout!r}")
    checked = _sorted_spec(spec)
    if layout == 'refs' and 'refs' in checked:
        raise SpecError("key 'refs' is reserved: the refs layout stores its references in refs.bag")
    for key, kind in checked.items():
        if layout == 'columns' and is_sequence(kind):
            raise SpecError(
                f'key {key!r} has type {kind!r}: the columns layout does not support sequences, the refs layout does'
            )
    return checked


def dump_spec(spec: Spec) -> bytes:
    """Return the content of ``spec.json``."""
    return json.dumps(spec).encode()


def parse_spec(content: bytes, name: str) -> Spec:
    """Return the content of ``spec.json``, checked and sorted by key."""
    try:
        return _sorted_spec(parse_json(content))
    except SpecError as error:
        raise CorruptDatasetError(f'{name}: {error}') from error
    except ValueError as error:
        raise CorruptDatasetError(f'{name}: is not JSON: {error}') from error


def _sorted_spec(spec: Any) -> Spec:
    if not isinstance(spec, Mapping) or not spec:
        raise SpecError(f'expected a mapping from keys to types as the spec, got {spec!r:.200}')
    if bad := [key for key in spec if not isinstance(key, str) or not _KEY.fullmatch(key)]:
        raise SpecError(f'keys {bad!r:.200} cannot be file names: expected [a-z_] and then [A-Za-z0-9_.-]')
    for key, kind in spec.items():
        if not isinstance(kind, str) or not _KIND.match(kind):
            raise SpecError(f'type of key {key!r}: expected a name such as "utf8" or "utf8[]", got {kind!r:.200}')
    return dict(sorted(spec.items()))


def shard_name(number: int) -> str:
    """Return the name of a shard's folder."""
    return f'{number:06}'


def shard_number(name: str) -> int | None:
    """Return the shard of a folder name, or None if it is not a shard's name, such as the date 20240101."""
    return int(name) if _SHARD.fullmatch(name) else None


def shard_numbers(names: Iterable[str]) -> list[int]:
    """Return the shards among the names of sibling folders, sorted.

    A name of six digits is a shard. A name of seven digits is a shard beside at least half a million of those, also
    behind a gap, which the caller reports: beside fewer, it is something else, such as a date.
    """
    numbers = sorted({number for name in names if (number := shard_number(name)) is not None})
    padded = bisect.bisect_left(numbers, PADDED)
    return numbers if padded >= PADDED // 2 else numbers[:padded]

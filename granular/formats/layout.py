"""Conversion between bytes of bags and datasets and numpy: pure functions, no I/O. docs/format.md describes the bytes.

The *limits* of a bag are an int64 array of N + 1 offsets, the first of them 0, so that record i is the bytes
``limits[i]`` to ``limits[i + 1]``, in every version of the format.
"""

import bisect
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgpack
import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import Ints
from granular._support.other_names import type_named
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
_NOTHING: Final = 0x90  # how msgpack begins an empty list, and with its length added one of fewer than 16 items
_PAIR: Final = _NOTHING | 2
_WIDE: Final = {1: 0xCC, 2: 0xCD, 4: 0xCE, 8: 0xCF}  # how msgpack begins a number of so many bytes
_LEAST: Final = (1 << 7, 1 << 8, 1 << 16, 1 << 32)  # from which on a number has so many bytes
_LONGEST: Final = 9  # more than the bytes of any number
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


def pack_many_refs(firsts: Ints, counts: Ints, many: Sequence[bool]) -> tuple[bytes, Ints]:
    """Return what ``pack_refs`` returns for each of many datapoints, one behind the other, and where each begins and
    ends.

    Args:
      firsts: the first records, of shape (datapoints, keys).
      counts: the numbers of records, likewise; 1 for a key that is no sequence.
      many: True for each key that is a sequence.
    """
    head = _refs_head(len(many))
    tokens: list[tuple[Ints, Ints]] = []  # a number each, and its bytes: 0 if the datapoint has none
    for first, count, is_many in zip(firsts.T, counts.T, many, strict=True):
        if not is_many:
            tokens.append((first, _packed_sizes(first)))
            continue
        filled = count > 0
        tokens.append((np.where(filled, _PAIR, _NOTHING), np.ones_like(first)))
        tokens += [(numbers, np.where(filled, _packed_sizes(numbers), 0)) for numbers in (first, count)]
    sizes = len(head) + sum(size for _, size in tokens)
    limits = np.append(0, np.cumsum(sizes))
    out = np.empty(int(limits[-1]), np.uint8)
    at = limits[:-1].copy()
    for byte in head:
        out[at] = byte
        at += 1
    for numbers, size in tokens:
        own = size == 1
        out[at[own]] = numbers[own]
        for width, tag in _WIDE.items():
            own = np.flatnonzero(size == 1 + width)
            if len(own):
                begins, values = at[own], numbers[own]
                out[begins] = tag
                for i in range(width):
                    out[begins + 1 + i] = values >> 8 * (width - 1 - i) & 255
        at += size
    return out.tobytes(), limits


def _refs_head(keys: int) -> bytes:
    """Return how the references of a datapoint begin, as msgpack begins a list."""
    return bytes([_NOTHING | keys]) if keys < 16 else b'\xdc' + keys.to_bytes(2, 'big')


def _packed_sizes(numbers: Ints) -> Ints:
    """Return the bytes that msgpack takes for numbers >= 0."""
    return np.array([1, *(1 + width for width in _WIDE)])[np.searchsorted(_LEAST, numbers, side='right')]


def unpack_many_refs(data: bytes, limits: Ints, spec: Mapping[str, str], name: str) -> tuple[Ints, Ints]:
    """Return the result of ``unpack_refs`` for many records that begin and end at some offsets in ``data``."""
    if (refs := _many_refs(data, limits, [is_sequence(kind) for kind in spec.values()])) is not None:
        return refs
    bounds = limits.tolist()
    return unpack_refs([data[start:stop] for start, stop in itertools.pairwise(bounds)], spec, name)


def _many_refs(data: bytes, limits: Ints, sequence: Sequence[bool]) -> tuple[Ints, Ints] | None:
    """Return the references of datapoints as ``pack_many_refs`` packs them; None for any that were packed otherwise."""
    buffer = np.frombuffer(data + bytes(_LONGEST), np.uint8)
    at, ends = limits[:-1].copy(), limits[1:]
    head = _refs_head(len(sequence))
    if (ends - at < len(head)).any():
        return None
    for byte in head:
        if (buffer[at] != byte).any():
            return None
        at += 1
    firsts, counts = np.zeros((2, len(at), len(sequence)), np.int64)
    for key, is_many in enumerate(sequence):
        if not is_many:
            counts[:, key] = 1
            if not _take_numbers(buffer, at, ends, np.arange(len(at)), firsts[:, key]):
                return None
            continue
        tags = buffer[at]
        if not np.isin(tags, (_NOTHING, _PAIR)).all():
            return None
        at += 1
        filled = np.flatnonzero(tags == _PAIR)
        if not all(_take_numbers(buffer, at, ends, filled, out[:, key]) for out in (firsts, counts)):
            return None
    return (firsts, counts) if (at == ends).all() else None


def _take_numbers(buffer: NDArray[np.uint8], at: Ints, ends: Ints, own: Ints, out: Ints) -> bool:
    """Read a number of each of some datapoints, and move on behind it; return False if there is none."""
    begins = at[own]
    tags = buffer[begins].astype(np.int64)
    widths = np.where(tags < _LEAST[0], 0, _LONGEST)
    values = tags.copy()
    for width, tag in _WIDE.items():
        some = np.flatnonzero(tags == tag)
        if len(some):
            widths[some], values[some] = width, 0
            for i in range(width):
                values[some] = values[some] << 8 | buffer[begins[some] + 1 + i]
    at[own] = begins + 1 + widths
    out[own] = values
    return not ((widths == _LONGEST) | (at[own] > ends[own]) | (values < 0)).any()


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
            ours = type_named(getattr(kind, '__name__', ''))
            remedy = ours and f': pass {ours!r}'
            raise SpecError(
                f'type of key {key!r}: expected a name such as "utf8" or "utf8[]", got {kind!r:.200}{remedy}'
            )
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

"""A scan of small fields, in steps: each looks at a part of the dataset, and says how far it came.

A scan finds the datapoints that meet all conditions, and returns what they are sorted by, or counts their classes.
"""

import collections
import contextlib
import math
import operator
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from granular.aio.runtime.pools import CORES
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import offload
from granular.config import MiB
from granular.errors import InvalidArgumentError, MissingExtraError, UnknownKeyError, UnsupportedError
from granular.formats import decoders
from granular.formats.layout import is_sequence
from granular.view.kinds import MAGIC, family_of
from granular.view.names import Names
from granular.view.pictures import MOST, picture
from granular.view.previews import compact
from granular.view.sources import Source, Value

MATCHES: Final = 200
"""Datapoints after which a step ends, with the window in which they are."""

_SECONDS: Final = 1.5  # of a step
_WINDOW: Final = 4096  # datapoints read at a time
_WHOLE: Final = 16  # of which all values are decoded, before their sizes are known
_BYTES: Final = 8 * MiB
_PART: Final = 32 * MiB  # of a window of which all values are decoded
_LARGE: Final = 64 * 1024  # bytes of a value that is not small
_KEY: Final = 100  # characters of the name of a class
_ALL: Final = 1 << 40  # values of a sequence
_MEASURES: Final = ('bytes', 'length')

_COMPARISONS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    '=': operator.eq, '!=': operator.ne, '<': operator.lt, '<=': operator.le, '>': operator.gt, '>=': operator.ge,
}  # fmt: skip


class Condition(NamedTuple):
    key: str  # empty for any key, of which one is damaged
    # A comparison such as ``!=``; one behind ``bytes`` or ``length``, for the size of a value or the length of a
    # sequence; ``has`` for a part of a text, in any case; or ``damaged``.
    relation: str
    text: str  # what it is compared with


class _Scan:
    def __init__(self, source: Source, names: Names) -> None:
        self._source, self._names = source, names
        self.read = 0
        self.skipped: set[int] = set()

    async def passing(self, condition: Condition, indices: Sequence[int]) -> list[int]:
        key, relation, text = condition
        if relation == 'damaged':
            return await self._damaged([key] if key else list(self._source.spec), indices)
        measure = next((name for name in _MEASURES if relation.startswith(name)), '')
        relation = relation.removeprefix(measure)
        classes = self._names.classes.get(key, ())
        kind = self._source.spec[key]
        kind = 'int' if measure else 'utf8' if self._names.family(key, kind) == 'text' else kind
        # A column of another file has no type of its own: each value has one.
        test = None if kind == 'value' else _comparison(kind, relation, text, classes)

        def check(kind: str, value: Any) -> bool:
            return (test or _comparison(kind, relation, text, classes))(value)

        found = await self.each(key, measure, indices, check)
        return [index for index in indices if found.get(index)]

    async def each(
        self, key: str, measure: str, indices: Sequence[int], use: Callable[[str, Any], Any]
    ) -> dict[int, Any]:
        """Return what a function makes of the type and the value, or the ``measure`` of it, of each datapoint."""
        source, sequence = self._source, is_sequence(self._source.spec[key])
        if sequence != (measure == 'length'):
            raise InvalidArgumentError(
                f'filter: key {key!r} of type {source.spec[key]!r} has no {measure or "single values"} to compare'
            )
        rows = (await source.locate([key], indices, head=0 if measure else _LARGE))[key]
        if sequence:
            return {index: use('int', row.length or 0) for index, row in zip(indices, rows, strict=True)}
        values = [(index, row.values[0]) for index, row in zip(indices, rows, strict=True)]
        if measure:
            return {index: use('int', value.size) for index, value in values}
        small = [(index, value) for index, value in values if value.size <= _LARGE and not value.error]
        out: dict[int, Any] = {}
        async for batch in source.read_batches([value for _, value in small], _BYTES):
            self.read += sum(len(record) for _, record in batch)
            out |= await offload(self._used, key, [(*small[i], record) for i, record in batch], use)
        self.skipped |= {index for index, _ in values} - out.keys()
        return {index: value for index, value in out.items() if value is not None}

    def _used(
        self, key: str, group: Sequence[tuple[int, Value, bytes]], use: Callable[[str, Any], Any]
    ) -> dict[int, Any]:
        out: dict[int, Any] = {}
        for index, value, record in group:
            family = self._names.family(key, value.kind)
            if family not in ('number', 'text', 'json'):  # a column of another file may hold such values as null
                out[index] = None
                continue
            try:
                if value.kind == 'array':
                    decoded: Any = self._names.text(key, record, len(record))
                else:
                    decoded = decoders['utf8' if family == 'text' else value.kind](record)
            except Exception:  # a decoder may raise anything: the value counts as damaged
                continue
            out[index] = use('utf8' if value.kind == 'array' else value.kind, decoded)
        return out

    async def _damaged(self, keys: Sequence[str], indices: Sequence[int]) -> list[int]:
        damaged: set[int] = set()
        for key in keys:
            rows = (await self._source.locate([key], indices, 0, _ALL))[key]
            values = [(index, value) for index, row in zip(indices, rows, strict=True) for value in row.values]
            damaged |= {index for index, value in values if value.error}
            fit = [(index, value) for index, value in values if value.size <= MOST and not value.error]
            self.skipped |= {index for index, value in values if value.size > MOST}
            async for batch in self._source.read_batches([value for _, value in fit]):
                self.read += sum(len(record) for _, record in batch)
                parts = [[(*fit[i], record) for i, record in batch[n::CORES]] for n in range(CORES)]
                for bad, unclear in await gather([offload(_damaged_of, part) for part in parts]):
                    damaged |= bad
                    self.skipped |= unclear
        return sorted(damaged)


async def search(
    source: Source,
    names: Names,
    conditions: Sequence[Condition],
    start: int,
    end: int,
    *,
    sort: str = '',
    count: str = '',
) -> dict[str, Any]:
    """Scan for datapoints from ``start`` to before ``end`` that meet all conditions, until enough are found or the time
    of a step is over.

    Returns:
      ``matches``, the index ``next`` from which to go on, the number of datapoints that were ``skipped`` because a
      value is damaged, or larger than 64 KiB, and the bytes ``read``; with ``sort``, ``order``: texts that sort as the
      values do, of which None belongs to the end; with ``count``, ``counts``: values, their names, their numbers.
    """
    compared = (one.key for one in conditions if one.key or one.relation != 'damaged')
    for key in [*compared, *filter(None, (sort, count))]:
        if key not in source.spec:
            raise UnknownKeyError(f'filter: expected a key of {list(source.spec)}, got {key!r:.80}')
    # Conditions that read little come first: later ones read the datapoints that are left.
    ordered = sorted(conditions, key=lambda one: (one.relation == 'damaged', not one.relation.startswith(_MEASURES)))
    whole = any(one.relation == 'damaged' for one in conditions)
    window = _WHOLE if whole else _WINDOW
    kind = source.spec.get(sort, '')
    by_value = names.family(sort, kind) in ('number', 'text') or kind == 'value'
    measure = 'length' if is_sequence(kind) else '' if by_value else 'bytes'
    scan = _Scan(source, names)
    matches: list[int] = []
    order: list[str | None] = []
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    at, until = start, time.monotonic() + _SECONDS
    end = min(end, source.length)
    while at < end and len(matches) < MATCHES and time.monotonic() < until:
        stop = min(at + window, end)
        left, before = list(range(at, stop)), scan.read
        for condition in ordered:
            left = await scan.passing(condition, left)
        matches += left
        if sort:
            keys = await scan.each(sort, measure, left, lambda _, value: _sort_key(value))
            order += [keys.get(index) for index in left]
        if count:
            found = await scan.each(count, '', left, lambda _, value: (f'{value}'[:_KEY], names.name(count, value)))
            counts.update(found.values())
        if whole:
            window = max(1, min(_WINDOW, source.portion, _PART * window // (scan.read - before + 1)))
        at = stop
    out = {'matches': matches, 'next': at, 'length': source.length, 'skipped': len(scan.skipped), 'read': scan.read}
    if sort:
        out['order'] = order
    if count:
        out['counts'] = [[text, name, number] for (text, name), number in counts.items()]
    return out


def _sort_key(value: Any) -> str | None:
    """Return a text that sorts as a number or text does; None for what is no number."""
    if isinstance(value, str):
        return f'b{value}'
    if math.isnan(value):
        return None
    try:
        number = float(value)
    except OverflowError:
        number = float('inf') if value > 0 else -float('inf')
    (bits,) = struct.unpack('>Q', struct.pack('>d', number + 0.0))
    bits = bits ^ (1 << 64) - 1 if bits >> 63 else bits | 1 << 63
    # Integers from 2**53 on share a double with their neighbours.
    rest = value - int(number) if isinstance(value, int) and abs(number) < 2**80 else 0
    return f'a{bits:016x}{rest + 10**15:016d}'


def _damaged_of(group: Sequence[tuple[int, Value, bytes]]) -> tuple[set[int], set[int]]:
    """Return the indices of values that cannot be decoded (of videos, the first frame), and of unclear ones."""
    damaged, unclear = set(), set()
    for index, value, data in group:
        family = family_of(value.kind, data[:MAGIC], len(data))
        try:
            if family in ('image', 'video'):
                picture(value.kind, data, 64)
            elif family == 'text' or value.kind in decoders:
                decoders['utf8' if family == 'text' else value.kind](data)
        except MissingExtraError:
            raise
        except (UnsupportedError, MemoryError):
            unclear.add(index)
        except Exception:  # a decoder may raise anything
            damaged.add(index)
    return damaged, unclear


def _comparison(kind: str, relation: str, text: str, classes: Sequence[str] = ()) -> Callable[[Any], bool]:
    """Return a function that compares a decoded value of a type with a number, a text, or the name of a class."""
    family = family_of(kind)
    if relation == 'has' and family in ('text', 'json'):
        part, shown = text.casefold(), _shown_json if family == 'json' else str
        return lambda value: part in shown(value).casefold()
    if relation not in _COMPARISONS or family not in ('number', 'text'):
        raise InvalidArgumentError(f'filter: a field of type {kind!r} has no relation {relation!r:.20}')
    compare = _COMPARISONS[relation]
    if family == 'text':
        return lambda value: compare(value, text)
    wanted = classes.index(text) if text in classes else _number(kind, text, classes)
    return lambda value: compare(value, wanted)


def _shown_json(value: Any) -> str:
    try:
        return compact(value)
    except RecursionError:  # the page does not show it either
        return ''


def _number(kind: str, text: str, classes: Sequence[str]) -> Any:
    if kind == 'bool':
        words = {'true': True, '1': True, 'false': False, '0': False}
        if (word := text.strip().lower()) not in words:
            raise InvalidArgumentError(f'filter: expected true or false, got {text!r:.80}')
        return words[word]
    for convert in (int, float):
        with contextlib.suppress(ValueError):
            return convert(text)
    names = f' or one of the classes {", ".join(classes):.200}' if classes else ''
    raise InvalidArgumentError(f'filter: expected a number{names}, got {text!r:.80}')

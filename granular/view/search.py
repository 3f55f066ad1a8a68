"""A filter on a small field, in steps: each scans a part of the dataset and says how far it came."""

import operator
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from granular.aio.runtime.threads import offload
from granular.config import MiB
from granular.errors import InvalidArgumentError, UnknownKeyError
from granular.formats import decoders
from granular.formats.layout import is_sequence
from granular.view.kinds import family_of
from granular.view.sources import Source, Value

MATCHES: Final = 200
"""Datapoints after which a step ends, with the window in which they are."""

_SECONDS: Final = 1.5  # of a step
_WINDOW: Final = 4096  # datapoints read at a time
_BYTES: Final = 8 * MiB
_LARGE: Final = 64 * 1024  # bytes of a value that is not small

_COMPARISONS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    '=': operator.eq, '!=': operator.ne, '<': operator.lt, '<=': operator.le, '>': operator.gt, '>=': operator.ge,
}  # fmt: skip


def condition(kind: str, relation: str, text: str) -> Callable[[Any], bool]:
    """Return a function that tests a decoded value.

    Args:
      kind: the type of the field.
      relation: ``=``, ``!=``, ``<``, ``<=``, ``>``, ``>=``, or ``has`` for a part of a text, in any case.
      text: what it is compared with.

    Raises:
      InvalidArgumentError: if the field cannot be compared so.
    """
    family = family_of(kind)
    if relation == 'has' and family in ('text', 'json'):
        part = text.casefold()
        return lambda value: part in str(value).casefold()
    if relation not in _COMPARISONS or family not in ('number', 'text'):
        raise InvalidArgumentError(f'filter: a field of type {kind!r} has no relation {relation!r:.20}')
    compare = _COMPARISONS[relation]
    if family == 'text':
        return lambda value: compare(value, text)
    wanted = _number(kind, text)
    return lambda value: compare(value, wanted)


def _number(kind: str, text: str) -> Any:
    if kind == 'bool':
        words = {'true': True, '1': True, 'false': False, '0': False}
        if (word := text.strip().lower()) not in words:
            raise InvalidArgumentError(f'filter: expected true or false, got {text!r:.80}')
        return words[word]
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    raise InvalidArgumentError(f'filter: expected a number, got {text!r:.80}')


async def search(source: Source, key: str, relation: str, text: str, start: int) -> dict[str, Any]:
    """Scan datapoints from an index on, until enough are found or the time of a step is over.

    Returns:
      ``matches``, the index ``next`` from which to go on, and the number of values that were ``skipped`` because they
      are damaged, or larger than 64 KiB.
    """
    if key not in source.spec:
        raise UnknownKeyError(f'filter: expected a key of {list(source.spec)}, got {key!r:.80}')
    if is_sequence(source.spec[key]):
        raise InvalidArgumentError(f'filter: key {key!r} has sequences, expected a key with single values')
    kind = source.spec[key]
    test = None if kind == 'value' else condition(kind, relation, text)
    matches: list[int] = []
    skipped, at, until = 0, start, time.monotonic() + _SECONDS
    while at < source.length and len(matches) < MATCHES and time.monotonic() < until:
        stop = min(at + _WINDOW, source.length)
        rows = (await source.locate([key], range(at, stop), head=_LARGE))[key]
        values = [row.values[0] for row in rows]
        small = [(i, value) for i, value in enumerate(values, at) if value.size <= _LARGE and not value.error]
        skipped += len(values) - len(small)
        async for batch in source.read_batches([value for _, value in small], _BYTES):
            group = [(*small[i], record) for i, record in batch]
            found, damaged = await offload(_matching, group, test, relation, text)
            matches += found
            skipped += damaged
        at = stop
    return {'matches': matches, 'next': at, 'length': source.length, 'skipped': skipped}


def _matching(
    group: Sequence[tuple[int, Value, bytes]],
    test: Callable[[Any], bool] | None,
    relation: str,
    text: str,
) -> tuple[list[int], int]:
    """Return the indices of the values that pass the test, and the number of values that are damaged."""
    found, damaged = [], 0
    for index, value, record in group:
        family = family_of(value.kind)
        if family not in ('number', 'text', 'json'):  # a column of another file may hold such values as null
            continue
        decoder = decoders['utf8' if family == 'text' else value.kind]
        try:
            decoded = decoder(record)
        except Exception:  # a decoder may raise anything: the value counts as damaged
            damaged += 1
            continue
        # A column of another file has no type of its own: each value has one.
        if (test or condition(value.kind, relation, text))(decoded):
            found.append(index)
    return found, damaged

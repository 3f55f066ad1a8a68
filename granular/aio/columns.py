"""Many datapoints of many datasets at once: where their values lie, and one fan-out for all of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from granular.aio.bag import BagReader, read_records
from granular.aio.codec import Field, decode
from granular.errors import OutOfRangeError
from granular.layout import unpack_refs

if TYPE_CHECKING:
    from granular.aio.dataset import DatasetReader

Ints = NDArray[np.int64]
Datapoint = dict[str, Any]
Part = tuple['DatasetReader', Ints]


class Choice(NamedTuple):
    """A field that is to be read, where its reference stands, and how much of it."""

    field: Field
    place: int
    want: bool | range | slice


async def fetch_points(parts: Sequence[Part], chosen: Sequence[Choice]) -> list[Datapoint]:
    """The datapoints of all parts, one part after the other, in one fan-out. The parts share a spec and a store."""
    columns = await read_columns(parts, chosen)
    keys = [choice.field.key for choice in chosen]
    if not columns:
        return [{} for _, places in parts for _ in range(len(places))]
    return [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]


async def read_columns(parts: Sequence[Part], chosen: Sequence[Choice]) -> list[list[Any]]:
    """By choice, the values of all parts' datapoints."""
    name = parts[0][0]._name if len(parts) == 1 else f'{parts[0][0]._name} and {len(parts) - 1} more'
    spans = await locate(parts)
    wanted: list[tuple[BagReader, Ints]] = []
    counts: list[list[Ints]] = [[] for _ in chosen]
    for i, choice in enumerate(chosen):
        for (reader, places), (firsts, many) in zip(parts, spans, strict=True):
            bag = reader._bags[choice.field.key]
            records, count = _records(reader, places, choice, firsts, many)
            bad = (records < 0) | (records >= bag._length)
            if bad.any():
                reader._check_ref(choice.field.key, int(places[0]), int(records[bad][0]), int(records[bad][0]) + 1)
            wanted.append((bag, records))
            counts[i].append(count)
    pieces = await read_records(wanted)
    flat = [_chain(pieces[i * len(parts) : (i + 1) * len(parts)]) for i in range(len(chosen))]
    columns = await decode([choice.field for choice in chosen], flat, name)
    return [
        _split(column, np.concatenate(count).tolist()) if choice.field.many else column
        for choice, column, count in zip(chosen, columns, counts, strict=True)
    ]


async def locate(parts: Sequence[Part]) -> list[tuple[Ints, Ints]]:
    """Of each part the first record and the number of records, both of shape (datapoints, keys)."""
    asked = [(reader._refs, places) for reader, places in parts if reader._refs is not None and reader._spans is None]
    brought = iter(await read_records(asked)) if asked else iter(())
    out = []
    for reader, places in parts:
        if reader._refs is None:
            out.append((places[:, None], np.ones((1, 1), np.int64)))
        elif reader._spans is not None:
            out.append((reader._spans[0][places], reader._spans[1][places]))
        else:
            out.append(unpack_refs(next(brought), reader._spec, reader._refs.name))
    return out


def span(ref: tuple[int, int], want: bool | range | slice, key: str, place: int, name: str) -> tuple[int, int]:
    """The first record and the number of records that are wanted of a sequence."""
    first, count = ref
    if want is True:
        return first, count
    if isinstance(want, slice):
        start, stop, _ = want.indices(count)
        return first + start, max(0, stop - start)
    if not isinstance(want, range) or want.stop > count:
        raise OutOfRangeError(f'{name}: datapoint {place}, key {key!r}: the mask wants {want}, it has {count} values')
    return first + want.start, want.stop - want.start


def _records(reader: 'DatasetReader', places: Ints, choice: Choice, firsts: Ints, many: Ints) -> tuple[Ints, Ints]:
    """The records of a choice, one after the other, and how many of them each datapoint has."""
    if reader._refs is None:
        return places, many[:, 0]
    first, count = firsts[:, choice.place], many[:, choice.place]
    if not choice.field.many:
        return first, count
    if choice.want is not True:
        rows = zip(first.tolist(), count.tolist(), places.tolist(), strict=True)
        cut = [span((f, c), choice.want, choice.field.key, place, reader._name) for f, c, place in rows]
        first, count = np.array(cut, np.int64).reshape(-1, 2).T
    ends = np.cumsum(count)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - ends + count, count), count


def _chain(pieces: Sequence[list[bytes]]) -> list[bytes]:
    return pieces[0] if len(pieces) == 1 else [record for piece in pieces for record in piece]


def _split(values: list[Any], counts: list[int]) -> list[list[Any]]:
    out, at = [], 0
    for count in counts:
        out.append(values[at : at + count])
        at += count
    return out

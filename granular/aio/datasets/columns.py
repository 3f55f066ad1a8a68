"""The columns of an opened dataset, and reads of many datapoints from many datasets in one fan-out."""

import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from granular.aio.bags.index_cache import Snapshot
from granular.aio.bags.reader import BagReader, once_more, read_records
from granular.aio.datasets.codec import Field, decode, describe_error
from granular.aio.runtime.threads import offload
from granular.aio.runtime.user_functions import CONTROL, function_error
from granular.aio.stores.local.files import IN_PLACE
from granular.errors import CorruptDatasetError, DecodeError, ObjectChangedError, OutOfRangeError
from granular.formats.layout import Spec, is_sequence, unpack_refs
from granular.indexing import Ints

Datapoint = dict[str, Any]

_WINDOW: Final = 1 << 15  # references unpacked at a time


class Choice(NamedTuple):
    """A field to read, the position of its reference in the list of fields, and the part of it to read."""

    field: Field
    place: int
    want: bool | range | slice


class Spans:
    """The references of all datapoints, by key. Keys whose datapoint i has record i, as for most scalars, are omitted.

    Memory: 8 bytes per datapoint for each of the other keys.
    """

    def __init__(self, kept: list[tuple[NDArray[np.uint32], NDArray[np.uint32]] | None]) -> None:
        self._kept = kept

    @classmethod
    async def load(cls, refs: BagReader, spec: Spec) -> 'Spans':
        """Read and unpack a whole ``refs.bag``."""
        if len(refs) * (len(spec) + 1) > refs.size:
            # Each reference takes at least one byte, and so does their number.
            raise CorruptDatasetError(
                f'{refs.name}: references of {len(refs)} datapoints to {len(spec)} keys cannot fit {refs.size} bytes'
            )
        firsts, counts = np.empty((2, len(spec), len(refs)), np.uint32)
        for start in range(0, len(refs), _WINDOW):
            stop = min(start + _WINDOW, len(refs))
            unpack = functools.partial(_unpacked, refs, spec, range(start, stop))
            first, count = await once_more(unpack, refs.is_remote)
            firsts[:, start:stop], counts[:, start:stop] = first.T, count.T
        places = np.arange(len(refs), dtype=np.uint32)
        plain = [not is_sequence(kind) and np.array_equal(firsts[i], places) for i, kind in enumerate(spec.values())]
        return cls([None if skip else (firsts[i].copy(), counts[i].copy()) for i, skip in enumerate(plain)])

    def at(self, places: Ints) -> tuple[Ints, Ints]:
        """Return the first record and the number of records, both of shape (datapoints, keys)."""
        firsts = np.empty((len(places), len(self._kept)), np.int64)
        counts = np.ones((len(places), len(self._kept)), np.int64)
        for row, kept in enumerate(self._kept):
            firsts[:, row] = places if kept is None else kept[0][places]
            if kept is not None:
                counts[:, row] = kept[1][places]
        return firsts, counts

    def at_one(self, place: int) -> list[tuple[int, int]]:
        """Return the first record and the number of records of each key of one datapoint."""
        return [(place, 1) if kept is None else (int(kept[0][place]), int(kept[1][place])) for kept in self._kept]


async def _unpacked(refs: BagReader, spec: Spec, places: range, fresh: bool) -> tuple[Ints, Ints]:
    records = (await read_records([(refs, np.arange(places.start, places.stop))], fresh))[0]
    first, count = await offload(unpack_refs, records, spec, refs.name)
    if (first < 0).any() or (count < 0).any() or (first + count >> 32).any():
        raise CorruptDatasetError(f'{refs.name}: references of datapoints {places.start} to {places.stop} lead nowhere')
    return first, count


class Columns:
    """The bags of an opened dataset.

    Attributes:
      name: the dataset, for errors.
      spec: the type of each key.
      bags: the bag of each key.
      refs: the references; None in the columns layout, where datapoint i is record i of every bag.
      spans: the unpacked references, if they are cached.
      snapshot: the snapshot that the columns were opened from; None if they were opened from the store.
      length: the number of datapoints.
    """

    def __init__(self, name: str, spec: Spec, bags: dict[str, BagReader], refs: BagReader | None) -> None:
        self.name, self.spec, self.bags, self.refs = name, spec, bags, refs
        self.spans: Spans | None = None
        self.snapshot: Snapshot | None = None
        self.length = 0

    def copy(self) -> 'Columns':
        """Return the same columns with independently closable bags."""
        refs = None if self.refs is None else self.refs.copy()
        twin = Columns(self.name, self.spec, {key: bag.copy() for key, bag in self.bags.items()}, refs)
        twin.spans, twin.snapshot, twin.length = self.spans, self.snapshot, self.length
        return twin

    async def aclose(self) -> None:
        """Close the bags."""
        for bag in (*self.bags.values(), *([] if self.refs is None else [self.refs])):
            await bag.aclose()
        self.spans = None

    # --- one datapoint, on this thread, from memory or a local disk

    @property
    def immediate(self) -> bool:
        """True if datapoints can be read without waiting."""
        known = self.refs is None or self.spans is not None or self.refs.immediate
        return known and all(bag.immediate for bag in self.bags.values())

    def is_small(self, place: int, chosen: Sequence[Choice]) -> bool:
        """Return whether a datapoint is small enough to be read inline on an event loop."""
        if self.refs is not None:
            return False
        return sum(self.bags[choice.field.key].length_of(place) for choice in chosen) <= IN_PLACE

    def get_now(self, place: int, chosen: Sequence[Choice]) -> Datapoint:
        """Return a datapoint of immediate columns."""
        bags = self.bags
        refs = None if self.refs is None else self._refs_now(self.refs, place)
        point: Datapoint = {}
        for field, column, want in chosen:
            key = field.key
            if refs is None:
                record = bags[key].get_now(place)
            else:
                first, count = refs[column]
                self.check_span(key, place, first, count)
                if field.many:
                    first, count = span((first, count), want, key, place, self.name)
                    records = [bags[key].get_now(i) for i in range(first, first + count)]
                    point[key] = [self._decode_now(field, item, place) for item in records]
                    continue
                record = bags[key].get_now(first)
            try:
                point[key] = field.fn(record)
            except Exception as error:
                raise self._refused(field, place, error) from error
            except CONTROL as error:
                raise function_error(error) from error
        return point

    def _decode_now(self, field: Field, record: bytes, place: int) -> Any:
        try:
            return field.fn(record)
        except Exception as error:
            raise self._refused(field, place, error) from error
        except CONTROL as error:
            raise function_error(error) from error

    def _refused(self, field: Field, place: int, error: Exception) -> DecodeError:
        return DecodeError(
            f'{self.name}: datapoint {place}, key {field.key!r}: not decoded as {field.kind!r}: {describe_error(error)}'
        )

    def _refs_now(self, refs: BagReader, place: int) -> list[tuple[int, int]]:
        if self.spans is not None:
            return self.spans.at_one(place)
        firsts, counts = unpack_refs([refs.get_now(place)], self.spec, refs.name)
        return list(zip(firsts[0].tolist(), counts[0].tolist(), strict=True))

    # --- references

    def check_span(self, key: str, place: int, first: int, count: int) -> None:
        """Check that a reference points to existing records."""
        if first < 0 or count < 0 or first + count > self.bags[key]._length:
            raise CorruptDatasetError(
                f'{self.name}: datapoint {place} refers to {count} records from {first} on of key {key!r}, whose bag '
                f'has {self.bags[key]._length}'
            )

    def _check_apart(self, key: str, places: Ints, counts: Ints, length: int) -> None:
        """Reject overlapping sequences: few references could otherwise expand to unbounded memory."""
        _, once = np.unique(places, return_index=True)
        if (total := int(counts[once].sum())) > length:
            raise CorruptDatasetError(
                f'{self.name}: {len(once)} datapoints refer to {total} records of key {key!r}, whose bag has {length}'
            )

    def records(self, places: Ints, choice: Choice, firsts: Ints, counts: Ints) -> tuple[Ints, Ints]:
        """Return the records of a field, one after the other, and their number for each datapoint."""
        if self.refs is None:
            return places, counts[:, 0]
        key, first, count = choice.field.key, firsts[:, choice.place], counts[:, choice.place]
        length = self.bags[key]._length
        bad = (first < 0) | (count < 0) | (first > length - count)
        if bad.any():
            i = int(np.argmax(bad))
            self.check_span(key, int(places[i]), int(first[i]), int(count[i]))
        if not choice.field.many:
            return first, count
        if choice.want is not True:
            rows = zip(first.tolist(), count.tolist(), places.tolist(), strict=True)
            cut = [span((f, c), choice.want, key, place, self.name) for f, c, place in rows]
            first, count = np.array(cut, np.int64).reshape(-1, 2).T
        if count.sum() > length:
            self._check_apart(key, places, count, length)
        ends = np.cumsum(count)
        return np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - ends + count, count), count


def span(ref: tuple[int, int], want: bool | range | slice, key: str, place: int, name: str) -> tuple[int, int]:
    """Return the first record and the number of records that a mask selects, cut to the sequence's length.

    Raises:
      OutOfRangeError: for a range that begins beyond the end of the sequence.
    """
    first, count = ref
    if want is True:
        return first, count
    if isinstance(want, slice):
        start, stop, _ = want.indices(count)
        return first + start, max(0, stop - start)
    if not isinstance(want, range) or want.start > count:
        raise OutOfRangeError(f'{name}: datapoint {place}, key {key!r}: the mask wants {want}, it has {count} values')
    return first + want.start, min(want.stop, count) - want.start


# --- many datapoints of many datasets

Part = tuple[Columns, Ints]


async def fetch_points(parts: Sequence[Part], chosen: Sequence[Choice]) -> list[Datapoint]:
    """Read the datapoints of all parts, in order, in one fan-out. The parts share a spec and a store."""
    columns = await read_columns(parts, chosen)
    keys = [choice.field.key for choice in chosen]
    points: list[Datapoint] = [{} for _, places in parts for _ in range(len(places))]
    # Key by key, which takes half the time of building each dict from its row.
    for key, column in zip(keys, columns, strict=True):
        for point, value in zip(points, column, strict=True):
            point[key] = value
    return points


async def read_columns(parts: Sequence[Part], chosen: Sequence[Choice]) -> list[list[Any]]:
    """Return the values of all parts' datapoints, by field."""
    try:
        return await once_more(lambda fresh: _read_columns(parts, chosen, fresh), _are_remote(parts))
    except ObjectChangedError:
        for columns, _ in parts:
            if columns.snapshot is not None:
                await columns.snapshot.forget()
        raise


async def _read_columns(parts: Sequence[Part], chosen: Sequence[Choice], fresh: bool) -> list[list[Any]]:
    name = parts[0][0].name if len(parts) == 1 else f'{parts[0][0].name} and {len(parts) - 1} more'
    spans = await locate(parts, fresh)
    wanted: list[tuple[BagReader, Ints]] = []
    counts: list[list[Ints]] = [[] for _ in chosen]
    for i, choice in enumerate(chosen):
        for (columns, places), found in zip(parts, spans, strict=True):
            records, count = columns.records(places, choice, *found)
            wanted.append((columns.bags[choice.field.key], records))
            counts[i].append(count)
    pieces = await read_records(wanted, fresh)
    flat = [_chain(pieces[i * len(parts) : (i + 1) * len(parts)]) for i in range(len(chosen))]
    values = await decode([choice.field for choice in chosen], flat, name)
    return [
        _split(column, np.concatenate(count).tolist()) if choice.field.many else column
        for choice, column, count in zip(chosen, values, counts, strict=True)
    ]


def _are_remote(parts: Sequence[Part]) -> bool:
    return any(bag.is_remote for columns, _ in parts for bag in columns.bags.values())


async def locate(parts: Sequence[Part], fresh: bool = False) -> list[tuple[Ints, Ints]]:
    """Return the first record and the number of records for each part, both of shape (datapoints, keys).

    In the columns layout, the shapes are (datapoints, 1) and (1, 1). ``fresh`` bypasses the store's caches.
    """
    asked = [(columns.refs, places) for columns, places in parts if columns.refs is not None and columns.spans is None]
    brought = iter(await read_records(asked, fresh)) if asked else iter(())
    out = []
    for columns, places in parts:
        if columns.refs is None:
            out.append((places[:, None], np.ones((1, 1), np.int64)))
        elif columns.spans is not None:
            out.append(columns.spans.at(places))
        else:
            out.append(unpack_refs(next(brought), columns.spec, columns.refs.name))
    return out


def _chain(pieces: Sequence[list[bytes]]) -> list[bytes]:
    return pieces[0] if len(pieces) == 1 else [record for piece in pieces for record in piece]


def _split(values: list[Any], counts: list[int]) -> list[list[Any]]:
    out, at = [], 0
    for count in counts:
        out.append(values[at : at + count])
        at += count
    return out

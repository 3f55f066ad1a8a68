"""Read records of many bags in one fan-out."""

import itertools
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import Ints, cut_into, owner_of, sums_of
from granular.aio.bags.bag import Bag
from granular.aio.bags.index_cache import Proof, proven
from granular.aio.bags.tables import ArrayTables, PackedTables, Tables
from granular.aio.runtime.threads import offload
from granular.aio.stores.base import Target
from granular.aio.stores.fanout import read_ranges
from granular.config import MiB
from granular.errors import CorruptBagError
from granular.formats.checksums import Sums, check, checksums_in, compare

FEW: Final = 8
"""Datapoints, or records, up to which each is read on its own if that need not wait, as planning would take longer;
unless stages are timed."""


class Bags:
    """Bags of one store, by number, with what a batch needs of each in arrays, as it has few records of many bags.

    Not every number has a bag. What an opened bag has does not change until it is closed.
    """

    __slots__ = (
        '_bags', '_has_special', '_next', '_positions', '_sources', '_special', '_targets',
        'datasizes', 'lengths', 'numbers', 'tables',
    )  # fmt: skip

    def __init__(self, count: int) -> None:
        self._bags: list[Any] = [None] * count
        self._targets: list[Any] = [None] * count
        self.lengths: Ints = np.zeros(count, np.int64)
        self.datasizes: Ints = np.zeros(count, np.int64)  # bytes of records
        # Those that have the limits, by position, and their positions; None for those that are read from the bags.
        self.tables: dict[int, Tables | None] = {}
        self._positions: dict[Tables | None, int] = {}
        self._next = itertools.count()
        self._sources = np.zeros(count, np.int64)  # the position of the tables of each bag
        self.numbers: Ints = np.zeros(count, np.int64)  # under which they have the limits of each bag
        self._special = np.zeros(count, np.bool_)  # True for bags with data in memory, checksums or a proof
        self._has_special = False  # True once there is one

    @classmethod
    def of(cls, bags: Sequence[Bag]) -> Self:
        """Return bags, each at its position."""
        out = cls(len(bags))
        for number, bag in enumerate(bags):
            out.put(number, bag)
        return out

    def put(self, number: int, bag: Bag) -> None:
        """Add an opened bag; raise ``ClosedError`` if it is closed."""
        tables = bag.tables
        if (position := self._positions.get(tables)) is None:
            position = self._positions.setdefault(tables, next(self._next))
        self.tables[position] = tables  # each time, as another thread may not have got here yet
        self._sources[number], self.numbers[number] = position, bag.number
        self.lengths[number], self.datasizes[number] = bag.length, bag.datasize
        if bag.data is not None or bag.sums is not None or bag.proof is not None:
            self._special[number] = self._has_special = True
        self._bags[number], self._targets[number] = bag, bag.target
        bag.check_open()  # last, as another thread may have closed it

    def join_tables(self, most: int) -> None:
        """Join the tables in arrays, if they have at most so many bytes, to look up limits in all of them at once.

        Call it before the bags are read.
        """
        arrays = {i: tables for i, tables in self.tables.items() if isinstance(tables, ArrayTables)}
        if len(arrays) < 2 or sum(tables.nbytes for tables in arrays.values()) > most:
            return
        joined, firsts = ArrayTables.joined(list(arrays.values()))
        into = next(self._next)
        for position, first in zip(arrays, firsts, strict=True):
            its = self._sources == position
            self.numbers[its] += first
            self._sources[its] = into
            del self._positions[self.tables.pop(position)]
        self.tables[into], self._positions[joined] = joined, into

    def some(self, owners: Ints) -> list[Bag]:
        bags = self._bags
        return [bags[owner] for owner in owners.tolist()]

    def targets(self, owners: Ints) -> list[Target]:
        targets = self._targets
        return [targets[owner] for owner in owners.tolist()]

    def special(self, owners: Ints) -> list[Bag]:
        """Return the bags of which more than limits and a file is needed to read them, or to check what is read."""
        return self.some(owners[self._special[owners]]) if self._has_special else []

    def source(self, owners: Ints) -> Tables | None:
        """Return the tables that have the limits of all these bags; None if there are several, or none."""
        if len(self.tables) == 1:
            (only,) = self.tables.values()
            return only
        sources = self._sources[owners]
        return self.tables[sources[0]] if (sources == sources[0]).all() else None

    def by_source(self, owners: Ints) -> list[tuple[Tables | None, NDArray[np.bool_]]]:
        """Return the tables that have limits of these bags, and for each bag whether they have its limits."""
        sources = self._sources[owners]
        return [(self.tables[source], sources == source) for source in sorted(set(sources.tolist()))]


class Rows(NamedTuple):
    """Records of many bags of one store: so many of each bag, given by their indices, one bag behind the other."""

    bags: Bags
    owners: Ints  # the number of each bag
    counts: Ints
    indices: Ints

    @classmethod
    def of(cls, bag: Bag, indices: Ints) -> Self:
        """Return records of one bag."""
        return cls(Bags.of([bag]), np.zeros(1, np.int64), np.array([len(indices)]), indices)

    def each(self) -> list[tuple[Bag, Ints]]:
        """Return each bag with its indices."""
        ends = np.cumsum(self.counts).tolist()
        bags = self.bags.some(self.owners)
        return [(bag, self.indices[a:b]) for bag, a, b in zip(bags, [0, *ends], ends, strict=False)]


class Adjacent(NamedTuple):
    """Records that lie one behind the other."""

    data: bytes
    limits: Ints  # the offsets in ``data`` at which they begin and end, shape (records + 1,)
    sums: Sums | None = None  # the checksum of each, if they were computed

    @classmethod
    def of(cls, records: Sequence[bytes]) -> Self:
        return cls(b''.join(records), _limits_of(np.fromiter(map(len, records), np.int64, len(records))))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the records of some parts, at least one; with checksums if all parts have them."""
        if len(parts) == 1:
            return parts[0]
        sizes = np.concatenate([np.diff(part.limits) for part in parts])
        sums = [part.sums for part in parts if part.sums is not None]
        joined = np.concatenate(sums) if len(sums) == len(parts) else None
        return cls(b''.join([part.data for part in parts]), _limits_of(sizes), joined)

    def split(self) -> list[bytes]:
        limits = self.limits.tolist()
        return [self.data[start:stop] for start, stop in itertools.pairwise(limits)]

    def taken(self, order: Ints) -> Self:
        """Return the records at some positions, in their order."""
        starts, stops = self.limits[order], self.limits[order + 1]
        parts = map(memoryview(self.data).__getitem__, map(slice, starts.tolist(), stops.tolist()))
        return type(self)(b''.join(parts), _limits_of(stops - starts), None if self.sums is None else self.sums[order])


async def read_records(rows: Rows) -> list[bytes]:
    """Read records of many bags: one fan-out for the limits that are not in memory, one for the data."""
    bags, owners, counts, indices = rows
    if not len(indices):
        return []
    starts, stops = await read_limits(rows)
    totals, most = sums_of(stops - starts, counts), bags.datasizes[owners]
    if (totals > most).any():
        for (bag, own), total in zip(rows.each(), totals.tolist(), strict=True):
            if total > bag.datasize and len(np.unique(own)) == len(own):
                raise CorruptBagError(f'{bag.name}: {len(own)} records have {total} bytes of {bag.datasize}')
        return await _read_distinct(rows)
    records = await read_parts(bags, owners, counts, starts, stops)
    if [bag for bag in bags.special(owners) if bag.sums is not None]:
        for (bag, own), parts in zip(rows.each(), cut_into(records, counts.tolist()), strict=True):
            if bag.sums is None:
                continue
            if sum(map(len, parts)) <= MiB:
                check(bag.sums, own, parts, bag.name)
            else:
                await offload(check, bag.sums, own, parts, bag.name)
    return records


async def read_joined(rows: Rows) -> Adjacent:
    """Read records of many bags as ``read_records``, into one buffer, without comparing their checksums.

    Neighbours, and the gaps between them, are not told apart before they are in memory.
    """
    bags, owners, counts, indices = rows
    if not len(indices):
        return Adjacent(b'', np.zeros(1, np.int64))
    starts, stops = await read_limits(rows)
    if (sums_of(stops - starts, counts) > bags.datasizes[owners]).any():  # some repeat, or are damaged
        return Adjacent.of(await read_records(rows))
    limits, numbers = _limits_of(stops - starts), np.arange(len(owners)).repeat(counts)
    (bag,) = bags.some(owners[:1])
    max_gap = 0 if bag.path is None else bag.path.store.merge.max_gap
    gaps, apart = starts[1:] - stops[:-1], numbers[1:] != numbers[:-1]
    is_first = np.append(True, apart | (gaps < 0) | (gaps > max_gap))  # of a span
    is_last = np.append(is_first[1:], True)
    begins = starts[is_first]
    spans = await read_parts(bags, owners, sums_of(is_first.astype(np.int64), counts), begins, stops[is_last])
    begins_run = np.append(True, apart | (gaps != 0))
    if begins_run.sum() > len(spans):
        ends_run, of_span = np.append(begins_run[1:], True), np.cumsum(is_first) - 1
        own = of_span[begins_run]
        bounds = [(limit - begins[own]).tolist() for limit in (starts[begins_run], stops[ends_run])]
        views = [memoryview(span) for span in spans]
        spans = [views[i][start:stop] for i, start, stop in zip(own.tolist(), *bounds, strict=True)]
    return Adjacent(spans[0] if len(spans) == 1 else await offload(b''.join, spans), limits)


def compared(rows: Rows, records: Adjacent, summed: bool) -> Adjacent:
    """Compare records with the checksums of those of their bags that have some. With ``summed``, or if they were
    compared, return them with their checksums.
    """
    bags = rows.bags.special(rows.owners)
    if not summed and not any(bag.sums is not None for bag in bags):
        return records
    found, at = checksums_in(records.data, records.limits), 0
    for bag, own in rows.each():
        if bag.sums is not None:
            compare(bag.sums, own, found[at : at + len(own)], bag.name)
        at += len(own)
    return records._replace(sums=found)


def _limits_of(sizes: Ints) -> Ints:
    limits = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=limits[1:])
    return limits


async def read_adjacent(bag: Bag, indices: Ints) -> Adjacent | None:
    """Read records, at least one, that lie one behind the other, without slicing them, nor comparing checksums; return
    None if they do not.
    """
    starts, stops = await read_limits(Rows.of(bag, indices))
    if not np.array_equal(starts[1:], stops[:-1]):
        return None
    [data] = await read_parts(Bags.of([bag]), np.zeros(1, np.int64), np.array([1]), starts[:1], stops[-1:])
    return Adjacent(data, np.append(starts, stops[-1]) - starts[0])


async def read_parts(bags: Bags, owners: Ints, counts: Ints, starts: Ints, stops: Ints) -> list[bytes]:
    """Read byte ranges of many bags of one store in one fan-out, without checking them: so many of each bag."""
    if not (special := bags.special(owners)) or not [bag for bag in special if bag.data is not None]:
        return await _fetch(bags, owners, bags.targets(owners), counts, starts, stops)
    ends = np.cumsum(counts).tolist()
    bounds = list(zip([0, *ends], ends, strict=False))
    some = zip(bags.some(owners), bounds, strict=True)
    kept = [bag.cached_records(starts[a:b], stops[a:b]) for bag, (a, b) in some]
    others = [i for i, records in enumerate(kept) if records is None]
    if others:
        own = owners[others]
        ranges = [np.concatenate([limits[slice(*bounds[i])] for i in others]) for limits in (starts, stops)]
        fetched = await _fetch(bags, own, bags.targets(own), counts[others], *ranges)
        for i, records in zip(others, cut_into(fetched, counts[others].tolist()), strict=True):
            kept[i] = records
    return list(itertools.chain.from_iterable(filter(None, kept)))


async def read_limits(rows: Rows) -> tuple[Ints, Ints]:
    """Return where records begin and end in their bags."""
    bags, owners, counts, indices = rows
    if (only := bags.source(owners)) is not None:
        return await _look_up(only, rows)
    starts, stops = np.empty((2, len(indices)), np.int64)
    for source, some in bags.by_source(owners):
        chosen = some.repeat(counts)
        own = Rows(bags, owners[some], counts[some], indices[chosen])
        starts[chosen], stops[chosen] = await (_read_tables(own) if source is None else _look_up(source, own))
    return starts, stops


async def _look_up(tables: Tables, rows: Rows) -> tuple[Ints, Ints]:
    """Return the limits of records of bags that have them in the same tables."""
    bags, owners, counts, indices = rows
    starts, stops = await tables.read(bags.numbers[owners].repeat(counts), indices)
    if not isinstance(tables, PackedTables):  # whose limits were checked when they were opened
        return starts, stops
    most = bags.datasizes[owners].repeat(counts)
    bad = (starts < 0) | (stops < starts) | (stops > most)
    if bad.any():
        i = int(bad.argmax())
        (bag,) = bags.some(owners[[owner_of(counts, i)]])
        raise CorruptBagError(
            f'{bag.name}: the index of its dataset has a record from {starts[i]} to {stops[i]}, of {most[i]} bytes: '
            f'run `granular index` on the dataset'
        )
    return starts, stops


async def _read_tables(rows: Rows) -> tuple[Ints, Ints]:
    """Return the limits of records of bags that have them in their own files, by one fan-out."""
    parts = rows.each()
    reads = [bag.limits_read(own) for bag, own in parts]
    starts, stops = (np.concatenate([read[i] for read in reads]) for i in (1, 2))
    entries = await _fetch(rows.bags, rows.owners, [read[0] for read in reads], rows.counts, starts, stops)
    limits = [
        bag.parse_limits(own, some)
        for (bag, own), some in zip(parts, cut_into(entries, rows.counts.tolist()), strict=True)
    ]
    starts, stops = (np.concatenate([own[i] for own in limits]) for i in (0, 1))
    return starts, stops


def _fetch(
    bags: Bags, owners: Ints, objects: Sequence[Target], counts: Ints, starts: Ints, stops: Ints
) -> Coroutine[Any, Any, list[bytes]]:
    (bag,) = bags.some(owners[:1])
    reading = read_ranges(bag.require_path().store, objects, counts, starts, stops)
    proofs = proofs_of(bags.special(owners))
    return proven(proofs, reading) if proofs else reading


def proofs_of(bags: Iterable[Bag]) -> set[Proof]:
    """Return what proves that bags which were opened from a snapshot are those that it describes."""
    proofs = {bag.proof for bag in bags}
    return {proof for proof in proofs if proof is not None}


async def _read_distinct(rows: Rows) -> list[bytes]:
    """Read records as ``read_records``, for indices that repeat: each record is read and stored once."""
    distinct = [np.unique(own, return_inverse=True) for _, own in rows.each()]
    counts = np.array([len(once) for once, _ in distinct])
    records = await read_records(Rows(rows.bags, rows.owners, counts, np.concatenate([once for once, _ in distinct])))
    before = np.cumsum(counts) - counts
    again = np.concatenate([inverse + first for (_, inverse), first in zip(distinct, before.tolist(), strict=True)])
    return [records[i] for i in again.tolist()]

"""Read records of many bags in one fan-out."""

import itertools
import operator
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, NamedTuple, Self

import numpy as np

from granular.aio.bags.bag import Bag
from granular.aio.bags.index_cache import Proof, proven
from granular.aio.bags.tables import PackedTables, Tables
from granular.aio.runtime.threads import offload
from granular.aio.stores.base import Target
from granular.aio.stores.fanout import read_ranges
from granular.config import MiB
from granular.errors import CorruptBagError
from granular.formats.checksums import check
from granular.indexing import Ints, cut_into, owner_of, sums_of

_number: Final[Callable[[Bag], int]] = operator.attrgetter('number')
_datasize: Final[Callable[[Bag], int]] = operator.attrgetter('datasize')

FEW: Final = 8
"""Datapoints, or records, up to which each is read on its own if that need not wait, as planning would take longer;
unless stages are timed."""


class Rows(NamedTuple):
    """Records of many bags of one store: so many of each bag, given by their indices, one bag behind the other."""

    bags: Sequence[Bag]
    counts: Ints
    indices: Ints

    @classmethod
    def of(cls, bag: Bag, indices: Ints) -> Self:
        """Return records of one bag."""
        return cls([bag], np.array([len(indices)]), indices)

    def datasizes(self) -> Ints:
        """Return the bytes of the records of each bag."""
        return np.fromiter(map(_datasize, self.bags), np.int64, len(self.bags))

    def each(self) -> list[tuple[Bag, Ints]]:
        """Return each bag with its indices."""
        ends = np.cumsum(self.counts).tolist()
        return [(bag, self.indices[a:b]) for bag, a, b in zip(self.bags, [0, *ends], ends, strict=False)]


class Adjacent(NamedTuple):
    """Records that lie one behind the other."""

    data: bytes
    limits: Ints  # the offsets in ``data`` at which they begin and end, shape (records + 1,)

    def split(self) -> list[bytes]:
        limits = self.limits.tolist()
        return [self.data[start:stop] for start, stop in itertools.pairwise(limits)]


async def read_records(rows: Rows) -> list[bytes]:
    """Read records of many bags: one fan-out for the limits that are not in memory, one for the data."""
    bags, counts, indices = rows
    if not len(indices):
        return []
    starts, stops = await read_limits(rows)
    totals, most = sums_of(stops - starts, counts), rows.datasizes()
    if (totals > most).any():
        for (bag, own), total in zip(rows.each(), totals.tolist(), strict=True):
            if total > bag.datasize and len(np.unique(own)) == len(own):
                raise CorruptBagError(f'{bag.name}: {len(own)} records have {total} bytes of {bag.datasize}')
        return await _read_distinct(rows)
    records = await read_parts(bags, counts, starts, stops)
    if [bag for bag in bags if bag.sums is not None]:
        for (bag, own), parts in zip(rows.each(), cut_into(records, counts.tolist()), strict=True):
            if bag.sums is None:
                continue
            if sum(map(len, parts)) <= MiB:
                check(bag.sums, own, parts, bag.name)
            else:
                await offload(check, bag.sums, own, parts, bag.name)
    return records


async def read_adjacent(bag: Bag, indices: Ints) -> Adjacent | None:
    """Read records, at least one, that lie one behind the other, without slicing them, nor comparing checksums; return
    None if they do not.
    """
    starts, stops = await read_limits(Rows.of(bag, indices))
    if not np.array_equal(starts[1:], stops[:-1]):
        return None
    [data] = await read_parts([bag], np.array([1]), starts[:1], stops[-1:])
    return Adjacent(data, np.append(starts, stops[-1]) - starts[0])


async def read_parts(bags: Sequence[Bag], counts: Ints, starts: Ints, stops: Ints) -> list[bytes]:
    """Read byte ranges of many bags of one store in one fan-out, without checking them: so many of each bag."""
    if not [bag for bag in bags if bag.data is not None]:
        return await _fetch(bags, [bag.target for bag in bags], counts, starts, stops)
    ends = np.cumsum(counts).tolist()
    bounds = list(zip([0, *ends], ends, strict=False))
    kept = [bag.cached_records(starts[a:b], stops[a:b]) for bag, (a, b) in zip(bags, bounds, strict=True)]
    others = [i for i, records in enumerate(kept) if records is None]
    if others:
        own = [bags[i] for i in others]
        ranges = [np.concatenate([limits[slice(*bounds[i])] for i in others]) for limits in (starts, stops)]
        fetched = await _fetch(own, [bag.target for bag in own], counts[others], *ranges)
        for i, records in zip(others, cut_into(fetched, counts[others].tolist()), strict=True):
            kept[i] = records
    return list(itertools.chain.from_iterable(filter(None, kept)))


async def read_limits(rows: Rows) -> tuple[Ints, Ints]:
    """Return where records begin and end in their bags."""
    bags, counts, indices = rows
    # Another thread may close the reader: the tables of all bags are taken now.
    tables = [bag.tables for bag in bags]
    sources = dict.fromkeys(tables)
    if len(sources) == 1 and tables[0] is not None:
        return await _look_up(tables[0], rows)
    numbers = {source: i for i, source in enumerate(sources)}
    owners = np.array([numbers[source] for source in tables])
    of_record = owners.repeat(counts)
    starts, stops = np.empty((2, len(indices)), np.int64)
    for source, number in numbers.items():
        some, chosen = np.flatnonzero(owners == number).tolist(), np.flatnonzero(of_record == number)
        own = Rows([bags[i] for i in some], counts[some], indices[chosen])
        starts[chosen], stops[chosen] = await (_read_tables(own) if source is None else _look_up(source, own))
    return starts, stops


async def _look_up(tables: Tables, rows: Rows) -> tuple[Ints, Ints]:
    """Return the limits of records of bags that have them in the same tables."""
    bags, counts, indices = rows
    numbers = np.fromiter(map(_number, bags), np.int64, len(bags))
    starts, stops = await tables.read(numbers.repeat(counts), indices)
    if not isinstance(tables, PackedTables):  # whose limits were checked when they were opened
        return starts, stops
    most = rows.datasizes().repeat(counts)
    bad = (starts < 0) | (stops < starts) | (stops > most)
    if bad.any():
        i = int(bad.argmax())
        bag = bags[owner_of(counts, i)]
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
    entries = await _fetch(rows.bags, [read[0] for read in reads], rows.counts, starts, stops)
    limits = [
        bag.parse_limits(own, some)
        for (bag, own), some in zip(parts, cut_into(entries, rows.counts.tolist()), strict=True)
    ]
    starts, stops = (np.concatenate([own[i] for own in limits]) for i in (0, 1))
    return starts, stops


def _fetch(
    bags: Iterable[Bag], objects: Sequence[Target], counts: Ints, starts: Ints, stops: Ints
) -> Coroutine[Any, Any, list[bytes]]:
    reading = read_ranges(next(bag.path for bag in bags if bag.path is not None).store, objects, counts, starts, stops)
    proofs = proofs_of(bags)
    return proven(proofs, reading) if proofs else reading


def proofs_of(bags: Iterable[Bag]) -> set[Proof]:
    """Return what proves that bags which were opened from a snapshot are those that it describes."""
    proofs = {bag.proof for bag in bags}
    return {proof for proof in proofs if proof is not None}


async def _read_distinct(rows: Rows) -> list[bytes]:
    """Read records as ``read_records``, for indices that repeat: each record is read and stored once."""
    distinct = [np.unique(own, return_inverse=True) for _, own in rows.each()]
    counts = np.array([len(once) for once, _ in distinct])
    records = await read_records(Rows(rows.bags, counts, np.concatenate([once for once, _ in distinct])))
    before = np.cumsum(counts) - counts
    again = np.concatenate([inverse + first for (_, inverse), first in zip(distinct, before.tolist(), strict=True)])
    return [records[i] for i in again.tolist()]

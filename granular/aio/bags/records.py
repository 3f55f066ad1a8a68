"""Read records of many bags in one fan-out."""

import itertools
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from granular.aio.bags.bag import Bag
from granular.aio.bags.index_cache import Proof, proven
from granular.aio.bags.index_tables import read_tables
from granular.aio.runtime.threads import offload
from granular.aio.stores import Request
from granular.aio.stores.fanout import read_all
from granular.config import MiB
from granular.errors import CorruptBagError
from granular.formats.checksums import check
from granular.indexing import Ints, sums_of


class Adjacent(NamedTuple):
    """Records that lie one behind the other."""

    data: bytes
    limits: Ints  # the offsets in ``data`` at which they begin and end, shape (records + 1,)

    def split(self) -> list[bytes]:
        limits = self.limits.tolist()
        return [self.data[start:stop] for start, stop in itertools.pairwise(limits)]


async def read_records(requests: Sequence[tuple[Bag, Ints]]) -> list[list[bytes]]:
    """Read records of many bags of one store: one fan-out for the limits that are not in memory, one for the data."""
    if not requests:
        return []
    limits = await read_limits(requests)
    starts, stops = (np.concatenate(bounds) for bounds in zip(*limits, strict=True))
    totals = sums_of(stops - starts, [len(indices) for _, indices in requests])
    for i in np.flatnonzero(totals > [bag.datasize for bag, _ in requests]).tolist():
        bag, indices = requests[i]
        if len(np.unique(indices)) == len(indices):
            raise CorruptBagError(f'{bag.name}: {len(indices)} records have {totals[i]} bytes of {bag.datasize}')
        return await _read_distinct(requests)
    cached, reads = _reads_of([(bag, *bounds) for (bag, _), bounds in zip(requests, limits, strict=True)])
    out = _filled(cached, await _fetch((bag for bag, _ in requests), reads) if reads else [])
    for (bag, indices), records in zip(requests, out, strict=True):
        if bag.sums is not None:
            if sum(map(len, records)) <= MiB:
                check(bag.sums, indices, records, bag.name)
            else:
                await offload(check, bag.sums, indices, records, bag.name)
    return out


async def read_adjacent(bag: Bag, indices: Ints) -> Adjacent | None:
    """Read records, at least one, that lie one behind the other, without slicing them, nor comparing checksums; return
    None if they do not.
    """
    [(starts, stops)] = await read_limits([(bag, indices)])
    if not np.array_equal(starts[1:], stops[:-1]):
        return None
    [[data]] = await read_parts([(bag, starts[:1], stops[-1:])])
    return Adjacent(data, np.append(starts, stops[-1]) - starts[0])


async def read_parts(requests: Sequence[tuple[Bag, Ints, Ints]]) -> list[list[bytes]]:
    """Read byte ranges of many bags of one store in one fan-out, without checking them."""
    cached, reads = _reads_of(requests)
    return _filled(cached, await _fetch((bag for bag, _, _ in requests), reads) if reads else [])


def _reads_of(requests: Sequence[tuple[Bag, Ints, Ints]]) -> tuple[list[list[bytes] | None], list[Request]]:
    """Return what is in memory of the byte ranges of bags, and the reads of the others."""
    cached = [bag.cached_records(starts, stops) for bag, starts, stops in requests]
    reads = [
        bag.records_read(starts, stops)
        for (bag, starts, stops), parts in zip(requests, cached, strict=True)
        if parts is None
    ]
    return cached, reads


def _filled(cached: Sequence[list[bytes] | None], fetched: Sequence[list[bytes]]) -> list[list[bytes]]:
    others = iter(fetched)
    return [next(others) if parts is None else parts for parts in cached]


async def read_limits(requests: Sequence[tuple[Bag, Ints]]) -> list[tuple[Ints, Ints]]:
    cached = [bag.limits(indices) for bag, indices in requests]
    if any(bag.packed is not None for bag, _ in requests):
        await _read_packed(requests, cached)
    missing = [request for request, limits in zip(requests, cached, strict=True) if limits is None]
    if not missing:
        return [limits for limits in cached if limits is not None]
    tables = await _fetch((bag for bag, _ in missing), [bag.limits_read(indices) for bag, indices in missing])
    parsed = (bag.parse_limits(indices, table) for (bag, indices), table in zip(missing, tables, strict=True))
    return [next(parsed) if limits is None else limits for limits in cached]


async def _read_packed(requests: Sequence[tuple[Bag, Ints]], limits: list[tuple[Ints, Ints] | None]) -> None:
    """Fill in the limits of the bags that have them in the index of their dataset."""
    packed = {
        i: (table, indices)
        for i, (bag, indices) in enumerate(requests)
        if limits[i] is None and (table := bag.packed) is not None
    }
    if not packed:
        return  # another thread has closed their reader
    numbers, results = list(packed), await read_tables(list(packed.values()))
    starts = np.concatenate([starts for starts, _ in results])
    stops = np.concatenate([stops for _, stops in results])
    most = np.repeat([requests[i][0].datasize for i in numbers], [len(starts) for starts, _ in results])
    bad = (starts < 0) | (stops < starts) | (stops > most)
    if bad.any():
        i = int(np.argmax(bad))
        ends = np.cumsum([len(starts) for starts, _ in results])
        bag, _ = requests[numbers[int(np.searchsorted(ends, i, side='right'))]]
        raise CorruptBagError(
            f'{bag.name}: the index of its dataset has a record from {starts[i]} to {stops[i]}, of {most[i]} bytes: '
            f'run `granular index` on the dataset'
        )
    for i, result in zip(numbers, results, strict=True):
        limits[i] = result


def _fetch(bags: Iterable[Bag], reads: Sequence[Request]) -> Coroutine[Any, Any, list[list[bytes]]]:
    files = [bag for bag in bags if bag.path is not None]
    reading = read_all(files[0].require_path().store, reads)
    proofs = proofs_of(files)
    return proven(proofs, reading) if proofs else reading


def proofs_of(bags: Iterable[Bag]) -> set[Proof]:
    """Return what proves that bags which were opened from a snapshot are those that it describes."""
    return {bag.proof for bag in bags if bag.proof is not None}


async def _read_distinct(requests: Sequence[tuple[Bag, Ints]]) -> list[list[bytes]]:
    """Read records as ``read_records``, for indices that repeat: each record is read and stored once."""
    distinct = [np.unique(indices, return_inverse=True) for _, indices in requests]
    out = await read_records([(bag, once) for (bag, _), (once, _) in zip(requests, distinct, strict=True)])
    return [[records[i] for i in again.tolist()] for records, (_, again) in zip(out, distinct, strict=True)]

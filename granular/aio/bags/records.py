"""Read records of many bags in one fan-out."""

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeVar

import numpy as np

from granular.aio.bags.bag import Bag
from granular.aio.runtime.threads import offload
from granular.aio.stores import Store
from granular.aio.stores.fanout import read_all
from granular.config import MiB
from granular.errors import CorruptBagError, CorruptError
from granular.formats.checksums import check
from granular.indexing import Ints

T = TypeVar('T')

logger: Final = logging.getLogger('granular')


async def retry_if_corrupt(read: Callable[[bool], Awaitable[T]], remote: bool) -> T:
    """Return ``read(False)``, or, if that raises CorruptError, ``read(True)``, which bypasses the store's caches.

    An intact file may arrive damaged, or be damaged in a cache. A local disk is read only once: a retry would return
    the same bytes.
    """
    try:
        return await read(False)
    except CorruptError as error:
        if not remote:
            raise
        logger.warning('corrupt data, read once more from the store: %s', error)
        return await read(True)


async def read_records(requests: Sequence[tuple[Bag, Ints]], fresh: bool = False) -> list[list[bytes]]:
    """Read records of many bags of one store: one fan-out for the limits that are not in memory, one for the data.

    Args:
      requests: the bags, each with the indices of its records.
      fresh: bypass the store's caches.
    """
    limits = await read_limits(requests, fresh)
    for (bag, indices), (starts, stops) in zip(requests, limits, strict=True):
        if (total := int((stops - starts).sum())) > bag.datasize:
            if len(np.unique(indices)) == len(indices):
                raise CorruptBagError(f'{bag.name}: {len(indices)} records have {total} bytes of {bag.datasize}')
            return await _read_distinct(requests, fresh)
    out = await read_parts([(bag, *bounds) for (bag, _), bounds in zip(requests, limits, strict=True)], fresh)
    for (bag, indices), records in zip(requests, out, strict=True):
        if bag.sums is not None:
            if sum(map(len, records)) <= MiB:
                check(bag.sums, indices, records, bag.name)
            else:
                await offload(check, bag.sums, indices, records, bag.name)
    return out


async def read_parts(requests: Sequence[tuple[Bag, Ints, Ints]], fresh: bool = False) -> list[list[bytes]]:
    """Read byte ranges of many bags of one store in one fan-out, without checking them.

    Args:
      requests: the bags, each with the starts and stops of its ranges.
      fresh: bypass the store's caches.
    """
    cached = [bag.cached_records(starts, stops) for bag, starts, stops in requests]
    reads = [
        bag.records_read(starts, stops)
        for (bag, starts, stops), parts in zip(requests, cached, strict=True)
        if parts is None
    ]
    fetched = iter(await read_all(_store_of(bag for bag, _, _ in requests), reads, fresh) if reads else ())
    return [next(fetched) if parts is None else parts for parts in cached]


async def read_limits(requests: Sequence[tuple[Bag, Ints]], fresh: bool) -> list[tuple[Ints, Ints]]:
    """Return the starts and stops of records."""
    cached = [bag.limits(indices) for bag, indices in requests]
    missing = [request for request, limits in zip(requests, cached, strict=True) if limits is None]
    if not missing:
        return [limits for limits in cached if limits is not None]
    tables = await read_all(
        _store_of(bag for bag, _ in missing), [bag.limits_read(indices) for bag, indices in missing], fresh
    )
    parsed = (bag.parse_limits(indices, table) for (bag, indices), table in zip(missing, tables, strict=True))
    return [next(parsed) if limits is None else limits for limits in cached]


def _store_of(bags: Iterable[Bag]) -> Store:
    return next(bag.path.store for bag in bags if bag.path is not None)


async def _read_distinct(requests: Sequence[tuple[Bag, Ints]], fresh: bool) -> list[list[bytes]]:
    """Read records as ``read_records``, for indices that repeat: each record is read and stored once."""
    distinct = [np.unique(indices, return_inverse=True) for _, indices in requests]
    out = await read_records([(bag, once) for (bag, _), (once, _) in zip(requests, distinct, strict=True)], fresh)
    return [[records[i] for i in again.tolist()] for records, (_, again) in zip(out, distinct, strict=True)]

"""Concurrent reads of byte ranges from many objects, with a single plan for all of them."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from granular.aio.http.buffers import keep_freed
from granular.aio.stores import Request, Store, ranges
from granular.errors import OutOfRangeError
from granular.indexing import Ints
from granular.metrics import counters

# Objects are mapped into one address space, 64 TiB apart, so that one plan covers all of them.
_BITS: Final = 46
_MOST: Final = 1 << (62 - _BITS)

keep_freed()


class Job(NamedTuple):
    """Byte ranges to read from one object, which must have the given version unless that is None."""

    key: str
    starts: Ints
    stops: Ints
    version: str | None


async def read_all(store: Store, jobs: Sequence[Job], fresh: bool = False) -> list[list[bytes]]:
    """Read the byte ranges of all jobs; return a list per job, in order.

    Neighbouring ranges share requests, and all requests are sent at once. With ``fresh``, they are read from the store
    itself, replacing these bytes in its caches.
    """
    if len(jobs) > _MOST:
        return await read_all(store, jobs[:_MOST], fresh) + await read_all(store, jobs[_MOST:], fresh)
    for job in jobs:
        if len(job.stops) and job.stops.max() >> _BITS:
            raise OutOfRangeError(f'{store.url(job.key)}: no object has {job.stops.max()} bytes')
    counts = [len(job.starts) for job in jobs]
    base = np.repeat(np.arange(len(jobs), dtype=np.int64) << _BITS, counts)
    starts = base + np.concatenate([job.starts for job in jobs]) if jobs else base
    stops = base + np.concatenate([job.stops for job in jobs]) if jobs else base
    plan = ranges.plan(starts, stops, max_gap=store.merge.max_gap)
    counters.ranges += len(starts)
    owners = plan.starts >> _BITS
    zero = owners << _BITS
    left, right = (plan.starts - zero).tolist(), (plan.stops - zero).tolist()
    bounds = np.searchsorted(owners, np.arange(len(jobs) + 1)).tolist()
    requests = [
        Request(job.key, left[a:b], right[a:b], job.version)
        for job, a, b in zip(jobs, bounds, bounds[1:], strict=False)
        if a < b
    ]
    read = store.read_fresh if fresh else store.read_many
    pieces = ranges.cut(plan, await read(requests) if requests else [])
    if len(jobs) == 1:
        return [pieces]
    out, at = [], 0
    for count in counts:
        out.append(pieces[at : at + count])
        at += count
    return out

"""Concurrent reads of byte ranges from many objects, with a single plan for all of them."""

import contextvars
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import numpy as np

from granular._words import logger
from granular.aio.runtime.buffers import keep_freed
from granular.aio.runtime.immediate import to_loop
from granular.aio.stores import Request, Store, ranges
from granular.errors import CorruptError, OutOfRangeError
from granular.metrics import READ, counters, record_time, timing

T = TypeVar('T')

# Objects are mapped into one address space, 64 TiB apart, so that one plan covers all of them.
_BITS: Final = 46
_MOST: Final = 1 << (62 - _BITS)


past_caches: Final[contextvars.ContextVar[bool]] = contextvars.ContextVar('past_caches', default=False)
"""True where corrupt data is read once more: all caches are passed by, and get the bytes that the store has."""


async def once_more(remote: bool, read: Callable[[], Awaitable[T]]) -> T:
    """Return what a function reads; if that is corrupt, let it read once more, past all caches.

    An intact file may arrive damaged, or be damaged in a cache. A local disk is read only once: a retry would return
    the same bytes.
    """
    try:
        return await read()
    except CorruptError as error:
        if not remote or past_caches.get():
            raise
        logger.warning('corrupt data, read once more from the store: %s', error)
    await to_loop()  # before the context is changed: it is that of the thread, without a loop
    past_caches.set(True)
    try:
        return await read()
    finally:
        past_caches.set(False)


async def read_all(store: Store, requests: Sequence[Request]) -> list[list[bytes]]:
    """Read the byte ranges of all requests; return a list per request, in order.

    Neighbouring ranges share requests to the store, all of which are sent at once.
    """
    keep_freed()
    if len(requests) > _MOST:
        return await read_all(store, requests[:_MOST]) + await read_all(store, requests[_MOST:])
    if not requests:
        return []
    counts = [len(request.starts) for request in requests]
    base = np.repeat(np.arange(len(requests), dtype=np.int64) << _BITS, counts)
    starts, stops = (np.concatenate(bounds) for bounds in zip(*((r.starts, r.stops) for r in requests), strict=True))
    if len(stops) and (highest := stops.max()) >= 1 << _BITS:
        key = requests[int(np.searchsorted(np.cumsum(counts), np.argmax(stops), side='right'))].key
        raise OutOfRangeError(f'{store.url(key)}: no object has {highest} bytes')
    plan = ranges.plan(base + starts, base + stops, max_gap=store.merge.max_gap)
    counters.ranges += len(starts)
    owners = plan.starts >> _BITS
    zero = owners << _BITS
    left, right = (plan.starts - zero).tolist(), (plan.stops - zero).tolist()
    bounds = np.searchsorted(owners, np.arange(len(requests) + 1)).tolist()
    merged = [
        Request(request.key, left[a:b], right[a:b], request.version)
        for request, a, b in zip(requests, bounds, bounds[1:], strict=False)
        if a < b
    ]
    read = store.read_fresh if past_caches.get() else store.read_many
    began = time.perf_counter()
    replies = await read(merged) if merged else []
    if timing.on:
        record_time(READ + (store.root or 'file'), len(starts), time.perf_counter() - began)
    pieces = ranges.cut(plan, replies)
    if len(requests) == 1:
        return [pieces]
    out, at = [], 0
    for count in counts:
        out.append(pieces[at : at + count])
        at += count
    return out

"""Concurrent reads of byte ranges from many objects, with a single plan for all of them."""

import contextvars
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import numpy as np

from granular._support.indexing import Ints, cut_into, owner_of
from granular._support.text import logger
from granular.aio.runtime.buffers import keep_freed
from granular.aio.runtime.immediate import to_loop
from granular.aio.stores import Request, Store, ranges
from granular.aio.stores.base import Spans, Target
from granular.errors import CorruptError, OutOfRangeError
from granular.metrics import READ, counters, record_time, timing

T = TypeVar('T')

# Objects are mapped into one address space, 64 TiB apart, so that one plan covers all of them.
_BITS: Final = 46
_MOST: Final = 1 << (62 - _BITS)
# Fewer ranges of each local file, on average, are read as they are: planning takes longer than reading them.
_SPARSE: Final = 2


past_caches: Final[contextvars.ContextVar[bool]] = contextvars.ContextVar('past_caches', default=False)
"""True where corrupt data is read once more: all caches are passed by, and get the bytes that the store has."""


async def retry_if_corrupt(remote: bool, read: Callable[[], Awaitable[T]]) -> T:
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
    if not requests:
        return []
    counts = [len(request.starts) for request in requests]
    starts, stops = (np.concatenate(bounds) for bounds in zip(*((r.starts, r.stops) for r in requests), strict=True))
    objects = [Target(request.key, request.version) for request in requests]
    return cut_into(await read_ranges(store, objects, np.array(counts), starts, stops), counts)


async def read_ranges(store: Store, objects: Sequence[Target], counts: Ints, starts: Ints, stops: Ints) -> list[bytes]:
    """Read byte ranges of many objects, as ``read_all`` does: so many of each, one object behind the other.

    The same object may be given again.
    """
    keep_freed()
    if len(objects) > _MOST:
        half = int(counts[:_MOST].sum())
        first = await read_ranges(store, objects[:_MOST], counts[:_MOST], starts[:half], stops[:half])
        return first + await read_ranges(store, objects[_MOST:], counts[_MOST:], starts[half:], stops[half:])
    if not len(starts):
        return []
    if (highest := int(stops.max())) >= 1 << _BITS:
        key = objects[owner_of(counts, int(stops.argmax()))].key
        raise OutOfRangeError(f'{store.url(key)}: no object has {highest} bytes')
    counters.ranges += len(starts)
    numbers, plan = np.arange(len(objects)).repeat(counts), None
    if store.local and len(starts) < _SPARSE * len(objects) and (stops > starts).all() and int(starts.min()) >= 0:
        spans = Spans(objects, numbers.tolist(), starts.tolist(), stops.tolist())
    else:
        base = numbers << _BITS
        plan = ranges.plan(base + starts, base + stops, max_gap=store.merge.max_gap)
        if not len(plan.starts):
            return [b''] * len(starts)
        owners = plan.starts >> _BITS
        zero = owners << _BITS
        spans = Spans(objects, owners.tolist(), (plan.starts - zero).tolist(), (plan.stops - zero).tolist())
    began = time.perf_counter()
    replies = await store.read_spans(spans, past_caches.get())
    if timing.on:
        record_time(READ + (store.root or 'file'), len(starts), time.perf_counter() - began)
    return replies if plan is None else ranges.cut(plan, replies)

"""Measurement of a store: latency, throughput by requests in flight and by size, what limits it, and settings."""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal

import numpy as np

import granular
from granular import aio, metrics
from granular._support.redact import hidden
from granular.aio.runtime.portal import run
from granular.aio.runtime.tasks import gather
from granular.aio.stores.base import Request
from granular.aio.stores.remote import RemoteStore
from granular.config import KiB, MiB
from granular.errors import InvalidArgumentError, NotFoundError, StoreTimeoutError

IN_FLIGHT: Final = (1, 4, 16, 64, 256)
_MOST: Final = 1e18  # seconds or bytes
SIZES: Final = (64 * KiB, MiB, 4 * MiB)

_FILES: Final = 64  # objects that are listed and read
_TINY: Final = KiB
_SMALL: Final = 4 * KiB
_BUSY: Final = 0.85  # share of the time in which the thread of the loop computes, from which it is the limit
_FLAT: Final = 1.15  # of a rate: less than this for four times the requests in flight is no improvement
_FEWEST: Final = 4  # requests of a measurement, unless its time is up before

Limit = Literal['latency', 'bandwidth', 'this core', 'the store', 'unknown']


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Reads of one size with one number of requests in flight."""

    in_flight: int
    size: int  # bytes of a request
    requests: int  # that ended
    requests_per_second: float
    bytes_per_second: float
    cpu: float  # share of the time in which the thread that reads computed; 0 if no request ended
    cpu_per_request: float  # seconds of that for one request; 0 if none ended


@dataclasses.dataclass(frozen=True)
class Result:
    """The measurements of a store."""

    url: str
    tls: bool  # True if connections are encrypted
    objects: int  # that were read, as the requests and bytes
    seconds: float  # that it took
    requests: int
    bytes: int
    # Seconds until a reply of 4 KiB is complete, with one request in flight; None if the time was too short for any.
    first_byte_p50: float | None
    first_byte_p99: float | None
    by_in_flight: list[Measurement]  # of 4 KiB: large ones use up the bandwidth with few in flight
    # With the best number of requests in flight; with fewer of a size of which the bounds of bytes and seconds allow
    # less than two for each.
    by_size: list[Measurement]
    connection_bytes_per_second: float  # of one connection with the largest size
    bytes_per_second: float  # that a host can receive, by the reads of large ranges; see ``bandwidth``
    # The rate of the best number in flight; if latency limits that, which more in flight outweigh, as many as the
    # processor time permits.
    requests_per_second: float
    throttled: int  # replies that asked for fewer requests (429, 503)
    retries: int  # requests sent again
    hedges: int  # requests sent twice
    limit: Limit  # ``unknown`` if the bounds permitted too few requests to tell
    settings: dict[str, int]  # that follow, as keyword arguments of ``IOConfig``
    advice: list[str]  # sentences with reasons
    complete: bool  # False if the bound of seconds or bytes ended the measurements early


def bench(path: granular.Path, seconds: float = 20.0, nbytes: float = 1 << 30) -> Result:
    """Measure the store of a path by reading random ranges of the objects under it. It writes nothing.

    Args:
      path: a file, or a folder such as a dataset, at any depth of which there are files.
      seconds: the time that the measurements take, at most; a request in flight at the end is cancelled.
      nbytes: bytes that are requested, at most.

    Raises:
      InvalidArgumentError: if the path is not in a remote store, or a bound is not a positive number.
      StoreTimeoutError: if no object was read within the time.
      NotFoundError: if there is no object that is not empty.
    """
    store = path.store
    if not isinstance(store, RemoteStore):
        kind = 'a local one' if store.local else type(store).__name__
        raise InvalidArgumentError(f'{path}: expected a path in a bucket or on a web server, got {kind}')
    for name, bound, least in (('seconds', seconds, 1e-3), ('bytes', nbytes, _SMALL)):
        if not least <= bound <= _MOST:
            raise InvalidArgumentError(f'{name}: expected a number from {least:g} to {_MOST:g}, got {bound:g}')
    # Each measurement sets its own number of requests in flight. Nothing is cached, hedged or split.
    config = dataclasses.replace(
        store.config, concurrency=max(IN_FLIGHT), hedge=0.0, cache_dir='', index_cache='', max_request=64 * MiB
    )
    return run(_Bench(store.with_config(config), path.key, seconds, int(nbytes)).run())


class _Bench:
    def __init__(self, store: RemoteStore[Any], key: str, seconds: float, nbytes: int) -> None:
        self._store, self._path = store, aio.Path.of(store, key)
        self._seconds = seconds
        self._until = 0.0
        self._budget = nbytes
        self._complete = True
        self._opened = 0
        self._tls = False
        self._random = np.random.default_rng()
        self._objects: list[tuple[str, int, str | None]] = []  # key, size and version

    async def run(self) -> Result:
        began, before = time.monotonic(), _totals()
        self._until = began + self._seconds
        if not await _within(self._seconds, self._find) and not self._objects:
            raise StoreTimeoutError(f'{self._path}: no object was read within {self._seconds:g} s')
        # Each measurement gets a share of all seconds, and of the bytes that are left.
        times: list[float] = []
        share = 0.5 / len(IN_FLIGHT)
        by_in_flight = [
            await self._read(count, _SMALL, share, share * self._seconds, times if count == 1 else None)
            for count in IN_FLIGHT
        ]
        best = saturating(by_in_flight)
        largest = max(size for _, size, _ in self._objects)
        sizes = [size for size in SIZES if size <= largest] or [largest]
        by_size: list[Measurement] = []
        for i, size in enumerate(sizes):
            seconds = self._left() / (len(sizes) - i + 2)
            share = 0.25 / len(sizes)
            # So many at a time that each of them is followed by another one: fewer would not be the rate of that many.
            # Larger requests may bring more bytes, unless more small ones in flight have brought none.
            most = max(one.bytes_per_second for one in (best, *by_size)) * (4 if best is by_in_flight[-1] else 1)
            affordable = int(min(share * self._budget, seconds * most)) // (2 * size)
            in_flight = max(1, min(best.in_flight, affordable))
            by_size.append(await self._read(in_flight, size, share, seconds))
        single = await self._read(1, sizes[-1], 0.5, self._left() / 2)
        after = _totals()
        change = {name: after[name] - before[name] for name in after}
        median = _quantile(times, 50)
        rate = max(bandwidth(one, median or 0.0) for one in (*by_size, single))
        limit = limit_of(best, by_in_flight, by_size, rate, change['throttled'])
        settings, advice = advise(limit, best, rate, change['throttled'])
        requests = 1 / best.cpu_per_request if limit == 'latency' else best.requests_per_second
        return Result(
            hidden(str(self._path)), self._tls, len(self._objects), time.monotonic() - began, change['requests'],
            change['bytes'], median, _quantile(times, 99), by_in_flight, by_size, single.bytes_per_second,
            rate, requests, change['throttled'], change['retries'], change['hedges'], limit, settings, advice,
            self._complete,
        )  # fmt: skip

    async def _find(self) -> None:
        """Find objects, and learn their versions from a first read."""
        keys: list[str] = []
        if await self._path.is_file():
            keys.append(self._path.key)
        else:
            async for entry in self._store.scan_tree(self._path.key):
                if not entry.is_dir:
                    keys.append(entry.key)
                if len(keys) >= _FILES:
                    break

        async def find(key: str) -> None:
            reply = await self._store.read(key, -_SMALL)
            self._tls |= (await (await self._store.client()).prepare(key)).origin.secure
            self._budget -= len(reply.data)
            if reply.size:
                self._objects.append((key, reply.size, reply.version))

        await gather(map(find, keys[: self._budget // _SMALL]))
        if not self._objects:
            raise NotFoundError(f'{self._path}: expected files that are not empty, to read from them')

    def _left(self) -> float:
        return self._until - time.monotonic()

    async def _read(
        self, in_flight: int, size: int, share: float, seconds: float, times: list[float] | None = None
    ) -> Measurement:
        """Read random ranges of a size for some seconds, and for a share of the bytes that are left.

        Requests in flight then have as much time again: cancelling them would close their connections.
        """
        size = min(size, max(length for _, length, _ in self._objects))
        large = [found for found in self._objects if found[1] >= size]
        allowance = int(min(self._budget, max(share * self._budget, _FEWEST * size)))
        done = 0

        async def fetch(nbytes: int) -> None:
            key, length, version = large[self._random.integers(len(large))]
            start = int(self._random.integers(length - nbytes + 1))
            await self._store.read_many([Request(key, [start], [start + nbytes], version)])

        async def one() -> None:
            nonlocal allowance, done
            while allowance >= size and time.monotonic() < until:
                allowance -= size
                self._budget -= size
                began = time.perf_counter()
                await fetch(size)
                done += 1
                if times is not None:
                    times.append(time.perf_counter() - began)

        if in_flight > self._opened and self._budget > 2 * in_flight * _TINY:
            # Opens connections, and looks up credentials, before the clock starts.
            self._budget -= in_flight * _TINY
            self._opened = in_flight
            reads = [min(_TINY, size)] * in_flight
            await _within(min(seconds, self._left()), lambda: gather(map(fetch, reads)))
        until = time.monotonic() + seconds
        began, computed = time.perf_counter(), time.thread_time()
        allowed = min(2 * seconds, self._left())
        finished = await _within(allowed, lambda: gather([one() for _ in range(in_flight)]))
        elapsed, cpu = max(time.perf_counter() - began, 1e-9), time.thread_time() - computed
        if not finished:
            self._opened = 0
            self._complete &= self._left() > 0
        if not done:
            return Measurement(in_flight, size, 0, 0.0, 0.0, 0.0, 0.0)
        return Measurement(in_flight, size, done, done / elapsed, done * size / elapsed, cpu / elapsed, cpu / done)


def limit_of(
    best: Measurement, by_in_flight: list[Measurement], by_size: list[Measurement], rate: float, throttled: int
) -> Limit:
    """Return what limits the rate of reads.

    Args:
      best: the fewest requests in flight from which on more of them hardly help.
      by_in_flight, by_size: the measurements.
      rate: the bytes a second of large ranges.
      throttled: replies that asked for fewer requests.
    """
    if throttled:
        return 'the store'
    by_size = [one for one in by_size if one.requests]  # large requests to a slow server may outlast the time
    if not by_size or min(one.requests for one in by_in_flight) == 0:
        return 'unknown'
    if max((one.cpu for one in (best, *by_size) if one.requests >= _FEWEST), default=0.0) >= _BUSY:
        return 'this core'
    if by_size[-1].size > 2 * best.size and rate < 2 * best.bytes_per_second:
        return 'bandwidth'  # large requests bring hardly more bytes
    return 'latency' if best is by_in_flight[-1] else 'the store'


def bandwidth(one: Measurement, latency: float) -> float:
    """Return the bytes a second of replies, without the time in which there was only latency.

    A loop of requests is slowed down by latency in each of its rounds if a round of replies arrives within it, and
    otherwise in the first. Processor time is a bound, and a tenth of the time the least that bytes can have taken.
    """
    if not one.requests:
        return 0.0
    elapsed, rounds = one.requests / one.requests_per_second, max(1.0, one.requests / one.in_flight)
    waited = latency if elapsed - latency >= rounds * latency else rounds * latency
    return one.requests * one.size / max(elapsed - waited, elapsed / 10, one.requests * one.cpu_per_request)


async def _within(seconds: float, work: Callable[[], Awaitable[object]]) -> bool:
    """Do work for at most some seconds. Returns whether it ended."""
    if seconds <= 0:
        return False
    try:
        async with asyncio.timeout(seconds) as scope:
            await work()
    except TimeoutError:
        if not scope.expired():
            raise
        return False
    return True


def saturating(by_in_flight: list[Measurement]) -> Measurement:
    """Return the measurement with the fewest requests in flight from which on more of them hardly help."""
    best = by_in_flight[0]
    for one in by_in_flight[1:]:
        if one.requests_per_second > _FLAT * best.requests_per_second:
            best = one
    return best


def advise(limit: Limit, best: Measurement, rate: float, throttled: int) -> tuple[dict[str, int], list[str]]:
    """Return the settings that follow from the measurements, and the reasons."""
    settings: dict[str, int] = {}
    advice: list[str] = []
    match limit:
        case 'unknown':
            return {}, ['too few requests ended: allow more seconds or bytes']
        case 'latency':
            advice.append(
                f'the rate grows up to {best.in_flight} requests in flight, the most that were tried: leave '
                f'concurrency at 0, which adapts, and let loaders prefetch enough batches'
            )
        case 'this core':
            advice.append(
                'the thread that reads is busy: read in several processes (mp=) or hosts, or in larger requests '
                '(shuffle.Blocks)'
            )
        case 'the store' if throttled:
            advice.append(
                f'the store throttled {throttled} requests: send fewer (shuffle.Blocks, cache_dir), or spread data '
                f'over more prefixes; leave concurrency at 0, as a reader limits its rate'
            )
        case 'the store':
            settings['concurrency'] = best.in_flight
            advice.append('the store answers no more requests a second: larger ones (shuffle.Blocks) bring more bytes')
        case 'bandwidth':
            advice.append(
                'the network or the store sends no more bytes a second: a block cache (cache_dir) avoids some'
            )
    # So many bytes cost as much as a request: its processor time, or its share of a rate that does not grow.
    if best.requests and rate and not throttled:
        seconds = best.cpu_per_request if limit in ('latency', 'this core') else 1 / best.requests_per_second
        gap = max(1, int(rate * seconds) - best.size)
        settings['max_gap'] = max(4 * KiB, min(MiB, 1 << gap.bit_length() - 1))
        advice.append(f'a request costs as much as {settings["max_gap"] // KiB} KiB: read such gaps along (max_gap)')
    return settings, advice


def _quantile(times: list[float], percent: float) -> float | None:
    return float(np.percentile(times, percent)) if times else None


def _totals() -> dict[str, int]:
    now = metrics.snapshot()
    remote = [store for name, store in now.stores.items() if name != 'file']
    return {
        'requests': sum(store.requests for store in remote),
        'bytes': sum(store.bytes for store in remote),
        'throttled': sum(store.failures.get('throttled', 0) for store in remote),
        'retries': sum(sum(store.retries.values()) for store in remote),
        'hedges': sum(store.hedges for store in remote),
    }

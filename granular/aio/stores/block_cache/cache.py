"""Block cache: what was read from a bucket once is then read from the local disk, by all processes on a machine.

A read that names the version of its object, as those of readers do, is divided into blocks. Cached blocks are read
inline, like any local file. The others are fetched whole, neighbours in one request, each by one process and one task
at a time, and cached. If anything goes wrong with the folder, reads go to the store as if there were no cache; but a
folder that belongs to another user is rejected.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

from granular._support.text import logger
from granular.aio.runtime.buffers import Space, blank
from granular.aio.runtime.forking import after_fork
from granular.aio.runtime.immediate import is_immediate
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import map_inline_then_threads, offload, on_this_loop
from granular.aio.stores.base import Request, Store
from granular.aio.stores.block_cache.blocks import Blocks
from granular.aio.stores.block_cache.objects import BLOCK, SHIFT, CachedObject
from granular.aio.stores.block_cache.versions import note, size_of
from granular.aio.stores.local.files import IN_PLACE
from granular.config import IOConfig
from granular.errors import GranularError
from granular.metrics import counters

FETCH_TIMEOUT: Final = 20.0  # seconds to wait for what another process or task fetches
_PAUSE: Final = 30.0  # seconds in which no blocks are added after the folder failed

T = TypeVar('T')


class ByteRange(NamedTuple):
    key: str
    start: int
    stop: int
    version: str

    @property
    def blocks(self) -> range:
        return range(self.start >> SHIFT, ((self.stop - 1) >> SHIFT) + 1)


class BlockRun(NamedTuple):
    key: str
    version: str
    cached: CachedObject
    first: int
    length: int

    @property
    def first_lock(self) -> int:
        """The position of its first block among the locks of blocks in flight."""
        return self.cached.first_lock + self.first

    @property
    def start(self) -> int:
        return self.first << SHIFT

    @property
    def stop(self) -> int:
        return min((self.first + self.length) << SHIFT, self.cached.size)


# The identity of the object, as a damaged table may give one position to two objects, and the block's number.
BlockId = tuple[int, int]


class BlockCache:
    """A cache of blocks in one folder, of at most ``limit`` bytes on the disk, for the objects of any stores."""

    def __init__(self, folder: str, limit: int) -> None:
        self._blocks = Blocks(folder, limit)
        self._locks = self._blocks.folder.block_locks
        self._in_flight: dict[BlockId, _Fetch] = {}
        self._registering: dict[tuple[str, str, str], concurrent.futures.Future[None]] = {}
        self._paused = 0.0  # time until which no blocks are added, by the monotonic clock

    async def read_many(self, upstream: Store, requests: Sequence[Request]) -> list[bytes]:
        """Read the byte ranges of all requests, which name versions; return them in order, request by request."""
        ranges = [
            ByteRange(key, start, stop, version or '')
            for key, starts, stops, version in requests
            for start, stop in zip(starts, stops, strict=True)
        ]
        read = functools.partial(self._read_cached, upstream.fingerprint, ranges)
        if not is_immediate() and sum(byte_range.stop - byte_range.start for byte_range in ranges) > IN_PLACE:
            pieces = await offload(map_inline_then_threads, read, len(ranges))
        else:
            pieces = map_inline_then_threads(read, len(ranges))
        missing = [i for i, piece in enumerate(pieces) if piece is None]
        if missing:
            await upstream.ready()
            fetched = await self._read_missing(upstream, [ranges[i] for i in missing])
            for i, piece in zip(missing, fetched, strict=True):
                pieces[i] = piece
        return [piece for piece in pieces if piece is not None]

    def forget(self, identity: str, requests: Sequence[Request]) -> None:
        """Mark the blocks of all requests as absent, because their bytes turned out to be wrong."""
        for key, starts, stops, version in requests:
            if version is None or (cached := self._find(identity, key, version)) is None:
                continue
            for start, stop in zip(starts, stops, strict=True):
                for block in ByteRange(key, start, min(stop, cached.size), version).blocks:
                    self._blocks.forget(cached, block)

    def _find(self, identity: str, key: str, version: str) -> CachedObject | None:
        """Return the registered object, if the store has told this process its size, else None."""
        size = size_of(identity, key, version)
        return None if size is None else self._blocks.objects.find(identity, key, version, size)

    def _peek(self, identity: str, key: str, version: str) -> CachedObject | None:
        """Return what ``_find`` does, without reading files: None if this process has not found the object before."""
        size = size_of(identity, key, version)
        return None if size is None else self._blocks.objects.peek(identity, key, version, size)

    def _read_cached(self, identity: str, ranges: Sequence[ByteRange], i: int) -> bytes | None:
        key, start, stop, version = ranges[i]
        if (cached := self._find(identity, key, version)) is None:
            return None
        try:
            piece = self._blocks.read(cached, start, stop)
        except OSError as error:
            self._pause(error)
            return None
        if piece is not None:
            counters.block_hits += ((stop - 1) >> SHIFT) - (start >> SHIFT) + 1
        return piece

    def _pause(self, error: OSError) -> None:
        """Stop adding blocks for a while, because the folder failed."""
        if time.monotonic() >= self._paused:
            folder = self._blocks.folder.path
            logger.warning('%s: adding to the block cache is disabled for %g s: %s', folder, _PAUSE, error)
        self._paused = time.monotonic() + _PAUSE

    # --- missing blocks

    async def _read_missing(self, upstream: Store, ranges: Sequence[ByteRange]) -> list[bytes]:
        objects: dict[tuple[str, str], CachedObject | None] = {}
        if time.monotonic() >= self._paused:
            objects = {(key, version): self._peek(upstream.fingerprint, key, version) for key, _, _, version in ranges}
            unknown = [name for name, cached in objects.items() if cached is None]
            registered = await gather([self._register(upstream, *name) for name in unknown])
            objects |= dict(zip(unknown, registered, strict=True))
        owners = [objects.get((key, version)) for key, _, _, version in ranges]
        blocks = await self._fetch(upstream, ranges, owners)
        # Allocated on this thread, as the data it receives is: each thread keeps its own freed memory.
        targets = [blank(byte_range.stop - byte_range.start, upstream.url(byte_range.key)) for byte_range in ranges]
        pieces = await offload(self._assemble, ranges, owners, blocks, targets)
        uncached = [i for i, piece in enumerate(pieces) if piece is None]
        if uncached:
            requests = [_request_of(ranges[i]) for i in uncached]
            for i, piece in zip(uncached, await upstream.read_uncached(requests), strict=True):
                pieces[i] = piece
        return [piece for piece in pieces if piece is not None]

    async def _register(self, upstream: Store, key: str, version: str) -> CachedObject | None:
        """Return the registered object, after asking the store for its size, and so its version, once per process."""
        name = upstream.fingerprint, key, version
        own: concurrent.futures.Future[None] = concurrent.futures.Future()
        first = self._registering.setdefault(name, own)
        try:
            if first is not own:
                await _settled(first, FETCH_TIMEOUT)
            elif size_of(*name) is None:
                note(*name, (await upstream.read(key, 0, 1, version)).size)
            size = size_of(*name)
            if size is None:
                return None  # the other task failed: a read without the cache raises the reason
            objects = self._blocks.objects
            return await self._try(
                lambda: objects.find(*name, size) or objects.register(*name, size, upstream.url(key))
            )
        finally:
            if first is own:
                del self._registering[name]
                own.set_result(None)

    async def _try(self, call: Callable[[], T]) -> T | None:
        """Run a call on the folder in a thread. If it fails, pause the cache and return None."""
        try:
            return await offload(call)
        except OSError as error:
            self._pause(error)
            return None

    async def _fetch(
        self, upstream: Store, ranges: Sequence[ByteRange], owners: Sequence[CachedObject | None]
    ) -> dict[BlockId, memoryview]:
        """Fetch the blocks that are missing, each once for all tasks and processes that request it."""
        fetch = _Fetch(upstream)
        to_fetch: list[tuple[ByteRange, CachedObject, int]] = []
        awaited: dict[BlockId, _Fetch] = {}  # the blocks that other tasks fetch
        for byte_range, cached, block in _blocks_of(ranges, owners):
            name = (cached.seed, block)
            if name in fetch.names or self._blocks.has(cached, block):
                continue
            if (other := self._in_flight.setdefault(name, fetch)) is fetch:
                fetch.names.add(name)
                to_fetch.append((byte_range, cached, block))
            else:
                awaited[name] = other
        runs = _block_runs(to_fetch)
        try:
            claimed = self._claim(fetch, runs)
            unclaimed = [run for run in runs if run not in fetch.claimed]
            await gather([self._fetch_claimed(fetch, claimed), self._fetch_unclaimed(fetch, unclaimed)])
            # Blocks that another process has cached since: tell the tasks that wait for them before waiting for those
            # of other tasks, which may wait for these.
            fetch.finish()
            until = time.monotonic() + FETCH_TIMEOUT
            for name, other in awaited.items():
                if (view := await other.wait(name, until - time.monotonic())) is not None:
                    fetch.blocks[name] = view
        finally:
            for name in fetch.names:
                self._in_flight.pop(name, None)
            fetch.finish()
            self._release(fetch, runs)  # also if the task that was to fetch them was cancelled before it started
        return fetch.blocks

    async def _fetch_claimed(self, fetch: '_Fetch', runs: Sequence[BlockRun]) -> None:
        try:
            # Another process may have cached them before this one claimed them.
            missing = [run for run in runs if not self._has_all(run)]
            counters.block_misses += sum(run.length for run in missing)
            contents = await fetch.upstream.read_uncached([_request_of(run) for run in missing])
            for run, data in zip(missing, contents, strict=True):
                fetch.add(run, memoryview(data))
            await self._try(lambda: self._write(missing, contents))
        finally:
            self._release(fetch, runs)

    async def _fetch_unclaimed(self, fetch: '_Fetch', runs: Sequence[BlockRun]) -> None:
        """Wait for blocks that other processes fetch; fetch those that they release without caching them.

        In the end, fetch those of a process that was stopped: two processes may cache the same block.
        """
        deadline, pause = time.monotonic() + FETCH_TIMEOUT, 0.002
        while (runs := [run for run in runs if not self._has_all(run)]) and time.monotonic() < deadline:
            if claimed := self._claim(fetch, runs):
                await self._fetch_claimed(fetch, claimed)
                runs = [run for run in runs if run not in claimed]
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, 0.05)
        if runs:
            await self._fetch_claimed(fetch, runs)

    def _claim(self, fetch: '_Fetch', runs: Iterable[BlockRun]) -> list[BlockRun]:
        """Claim blocks for fetching. Returns the runs of which no other process holds a block."""
        claimed = [run for run in runs if self._locks.lock(run.first_lock, run.length)]
        fetch.claimed.update(claimed)
        return claimed

    def _release(self, fetch: '_Fetch', runs: Iterable[BlockRun]) -> None:
        for run in fetch.claimed.intersection(runs):
            fetch.claimed.discard(run)
            self._locks.unlock(run.first_lock, run.length)

    def _has_all(self, run: BlockRun) -> bool:
        return all(self._blocks.has(run.cached, run.first + i) for i in range(run.length))

    def _write(self, runs: Sequence[BlockRun], contents: Sequence[bytes]) -> None:
        if time.monotonic() >= self._paused:
            self._blocks.write((run.cached, run.first, data) for run, data in zip(runs, contents, strict=True))

    def _assemble(
        self,
        ranges: Sequence[ByteRange],
        owners: Sequence[CachedObject | None],
        blocks: dict[BlockId, memoryview],
        targets: list[Space],
    ) -> list[bytes | None]:
        """Return the byte ranges, from fetched and cached blocks; None for a range of which a block is missing."""
        return [
            target.owner
            if cached is not None
            and byte_range.stop <= cached.size
            and self._join(byte_range, cached, blocks, target.view)
            else None
            for byte_range, cached, target in zip(ranges, owners, targets, strict=True)
        ]

    def _join(
        self, byte_range: ByteRange, cached: CachedObject, blocks: dict[BlockId, memoryview], target: memoryview
    ) -> bool:
        """Fill memory with a byte range. Returns False if a block is missing."""
        at = byte_range.start  # the position up to which the target is filled
        for block in byte_range.blocks:
            view = blocks.get((cached.seed, block))
            if view is None:
                continue  # cached: read with its neighbours
            begin = block << SHIFT
            left, right = max(byte_range.start - begin, 0), min(byte_range.stop - begin, BLOCK)
            if not self._read_into(cached, at, begin + left, byte_range.start, target):
                return False
            at = begin + right
            target[begin + left - byte_range.start : at - byte_range.start] = view[left:right]
        return self._read_into(cached, at, byte_range.stop, byte_range.start, target)

    def _read_into(self, cached: CachedObject, start: int, stop: int, origin: int, target: memoryview) -> bool:
        """Read cached bytes into memory that begins at ``origin`` of the object. Returns False if some are missing."""
        try:
            return self._blocks.read_into(cached, start, stop, target[start - origin : stop - origin])
        except OSError as error:
            self._pause(error)
            return False


class _Fetch:
    def __init__(self, upstream: Store) -> None:
        self.upstream = upstream
        self.names: set[BlockId] = set()
        self.claimed: set[BlockRun] = set()  # runs that this process has claimed
        self.blocks: dict[BlockId, memoryview] = {}  # that arrived, here or in other reads of this process
        self._lock = threading.Lock()  # other reads may run under other loops
        self._futures: dict[BlockId, concurrent.futures.Future[None]] = {}  # of the blocks that other reads wait for
        self._finished = False

    def add(self, run: BlockRun, data: memoryview) -> None:
        for i in range(run.length):
            name = (run.cached.seed, run.first + i)
            with self._lock:
                self.blocks[name] = data[i << SHIFT : (i + 1) << SHIFT]
                future = self._futures.pop(name, None)
            if future is not None:
                future.set_result(None)

    def finish(self) -> None:
        """Tell other reads that no further blocks will arrive."""
        with self._lock:
            self._finished = True
            futures, self._futures = self._futures, {}
        for future in futures.values():
            future.set_result(None)

    async def wait(self, name: BlockId, seconds: float) -> memoryview | None:
        """Return a block when it has arrived; None if it will not arrive, or not in time."""
        future = None
        with self._lock:
            if name not in self.blocks and not self._finished:
                future = self._futures.setdefault(name, concurrent.futures.Future())
        if future is not None:
            await _settled(future, seconds)
        return self.blocks.get(name)


async def _settled(future: 'concurrent.futures.Future[None]', seconds: float) -> None:
    """Wait for a future of another task, but not for long: that may be under a loop that does not run any more."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await on_this_loop(future)


def _request_of(part: ByteRange | BlockRun) -> Request:
    return Request(part.key, [part.start], [part.stop], part.version)


def _blocks_of(
    ranges: Iterable[ByteRange], owners: Iterable[CachedObject | None]
) -> Iterator[tuple[ByteRange, CachedObject, int]]:
    for byte_range, cached in zip(ranges, owners, strict=True):
        if cached is not None and byte_range.stop <= cached.size:
            for block in byte_range.blocks:
                yield byte_range, cached, block


def _block_runs(blocks: Iterable[tuple[ByteRange, CachedObject, int]]) -> list[BlockRun]:
    """Group blocks into as few runs as possible."""
    runs: list[BlockRun] = []
    for byte_range, cached, block in sorted(blocks, key=lambda item: (item[1].seed, item[2])):
        last = runs[-1] if runs else None
        if last is not None and last.cached is cached and last.first + last.length == block:
            runs[-1] = last._replace(length=last.length + 1)
        else:
            runs.append(BlockRun(byte_range.key, byte_range.version, cached, block, 1))
    return runs


_caches: Final[dict[tuple[str, int], BlockCache | None]] = {}


def cache_of(config: IOConfig) -> BlockCache | None:
    """Return the block cache that a config names, one per folder and limit; None if it fails to open."""
    name = config.cache_dir, config.cache_bytes
    if name not in _caches:
        try:
            _caches.setdefault(name, BlockCache(os.path.expanduser(config.cache_dir), config.cache_bytes))
        except GranularError:
            raise  # a rejected folder is not a disk failure
        except OSError as error:
            logger.warning('%s: continuing without a block cache: %s', config.cache_dir, error)
            _caches.setdefault(name, None)
    return _caches[name]


after_fork(_caches.clear)  # a child appends to packs of its own, and claims blocks separately from its parent

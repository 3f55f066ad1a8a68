"""Block cache: what was read from a bucket once is then read from the local disk, by all processes on a machine.

A read that names the version of its object, as those of readers do, is divided into blocks. Cached blocks are read
inline, like any local file. The others are fetched whole, neighbours in one request, each by one process and one task
at a time, and cached. If anything goes wrong with the folder, reads go to the store as if there were no cache; but a
folder that belongs to another user is rejected.
"""

import asyncio
import concurrent.futures
import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

from granular.aio.http.reply import Reply, counters
from granular.aio.runtime.forking import after_fork
from granular.aio.runtime.loops import running_loop
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import map_inline_then_threads, offload
from granular.aio.stores.base import Request
from granular.aio.stores.block_cache.packs import BLOCK, SHIFT, Cached, Packs
from granular.aio.stores.local.files import IN_PLACE
from granular.config import IOConfig
from granular.errors import GranularError

_PATIENCE: Final = 20.0  # seconds to wait for a block that another process fetches
_PAUSE: Final = 30.0  # seconds in which no blocks are added after the folder failed

T = TypeVar('T')

logger = logging.getLogger('granular')


class Below(Protocol):
    """The upstream store, from which missing blocks are fetched."""

    root: str

    def url(self, key: str) -> str:
        """Return the address of a key, for display."""
        ...

    async def ready(self) -> None:
        """Switch to the event loop if calls may wait."""
        ...

    async def read(self, key: str, start: int = 0, stop: int | None = None, version: str | None = None) -> Reply:
        """Read one byte range."""
        ...

    async def fetch_many(self, requests: Sequence[Request]) -> list[bytes]:
        """Read the byte ranges of all requests."""
        ...


class Span(NamedTuple):
    """A requested byte range of an object."""

    key: str
    start: int
    stop: int
    version: str | None


class Run(NamedTuple):
    """Consecutive blocks of an object to fetch."""

    key: str
    version: str
    cached: Cached
    first: int
    length: int


# The identity of the object, as a damaged table may give one position to two objects, and the block's number.
Name = tuple[int, int]
Blocks = dict[Name, memoryview]
Flight = concurrent.futures.Future[memoryview | None]


class BlockCache:
    """A cache of blocks in one folder, for the objects of any stores.

    Args:
      folder: the local folder.
      limit: maximum bytes on the disk.
    """

    def __init__(self, folder: str, limit: int) -> None:
        self._packs = Packs(folder, limit)
        self._flying: dict[Name, Flight] = {}
        self._meeting: dict[tuple[str, str, str], concurrent.futures.Future[None]] = {}
        self._paused = 0.0

    async def read_many(self, below: Below, identity: str, requests: Sequence[Request]) -> list[bytes]:
        """Read the byte ranges of all requests; return them in order, request by request."""
        spans = [
            Span(key, start, stop, version)
            for key, starts, stops, version in requests
            for start, stop in zip(starts, stops, strict=True)
        ]
        look = functools.partial(self._look, identity, spans)
        if running_loop() is not None and sum(span.stop - span.start for span in spans) > IN_PLACE:
            found = await offload(map_inline_then_threads, look, len(spans))
        else:
            found = map_inline_then_threads(look, len(spans))
        missing = [i for i, piece in enumerate(found) if piece is None]
        if missing:
            await below.ready()
            pieces = await self._fill(below, identity, [spans[i] for i in missing])
            for i, piece in zip(missing, pieces, strict=True):
                found[i] = piece
        return [piece for piece in found if piece is not None]

    def forget(self, identity: str, requests: Sequence[Request]) -> None:
        """Mark the blocks of all requests as absent, because their bytes turned out to be wrong."""
        for key, starts, stops, version in requests:
            cached = self._known(identity, key, version)
            if cached is None:
                continue
            for start, stop in zip(starts, stops, strict=True):
                for block in range(start >> SHIFT, ((min(stop, cached.size) - 1) >> SHIFT) + 1):
                    self._packs.forget(cached, block)

    def _known(self, identity: str, key: str, version: str | None) -> Cached | None:
        """Return the registered object, if the store has told this process its size, else None."""
        size = None if version is None else _sizes.get((identity, key, version))
        return None if version is None or size is None else self._packs.known(identity, key, version, size)

    def _look(self, identity: str, spans: Sequence[Span], i: int) -> bytes | None:
        key, start, stop, version = spans[i]
        if (cached := self._known(identity, key, version)) is None:
            return None
        try:
            piece = self._packs.read(cached, start, stop)
        except OSError as error:
            self._fails(error)
            return None
        if piece is not None:
            counters.block_hits += ((stop - 1) >> SHIFT) - (start >> SHIFT) + 1
        return piece

    def _fails(self, error: OSError) -> None:
        if time.monotonic() >= self._paused:
            logger.warning('%s: the block cache is not used for a while: %s', self._packs.folder, error)
        self._paused = time.monotonic() + _PAUSE

    # --- missing blocks

    async def _fill(self, below: Below, identity: str, spans: Sequence[Span]) -> list[bytes]:
        objects: dict[tuple[str, str], Cached | None] = {}
        if time.monotonic() >= self._paused:
            for span in spans:
                if span.version is not None:
                    objects[span.key, span.version] = None
            found = await gather([self._meet(below, identity, *name) for name in objects])
            objects = dict(zip(objects, found, strict=True))
        owners = [None if span.version is None else objects.get((span.key, span.version)) for span in spans]
        fetched = await self._fetch(below, spans, owners)
        out = await offload(self._assemble, spans, owners, fetched)
        plain = [i for i, piece in enumerate(out) if piece is None]
        if plain:
            asked = [Request(spans[i].key, [spans[i].start], [spans[i].stop], spans[i].version) for i in plain]
            for i, piece in zip(plain, await below.fetch_many(asked), strict=True):
                out[i] = piece
        return [piece for piece in out if piece is not None]

    async def _meet(self, below: Below, identity: str, key: str, version: str) -> Cached | None:
        """Return the registered object, after asking the store for its size, and so its version, once per process."""
        name = identity, key, version
        mine: concurrent.futures.Future[None] = concurrent.futures.Future()
        meeting = self._meeting.setdefault(name, mine)
        try:
            if meeting is not mine:
                await asyncio.shield(asyncio.wrap_future(meeting))
            elif name not in _sizes:
                note(*name, (await below.read(key, 0, 1, version)).size)
            size = _sizes.get(name)
            if size is None:
                return None  # the other task failed: a read without the cache raises the reason
            return await self._tried(
                lambda: self._packs.known(*name, size) or self._packs.register(*name, size, below.url(key))
            )
        finally:
            if meeting is mine:
                del self._meeting[name]
                mine.set_result(None)

    async def _tried(self, call: Callable[[], T]) -> T | None:
        """Run a call on the folder in a thread. If it fails, pause the cache and return None."""
        try:
            return await offload(call)
        except OSError as error:
            self._fails(error)
            return None

    async def _fetch(self, below: Below, spans: Sequence[Span], owners: Sequence[Cached | None]) -> Blocks:
        """Fetch the blocks that are missing, each once for all tasks and processes that request it."""
        job = _Job(below)
        mine: list[tuple[Span, Cached, int]] = []
        others: dict[Name, Flight] = {}
        for span, cached in zip(spans, owners, strict=True):
            if cached is None or span.stop > cached.size:
                continue
            for block in range(span.start >> SHIFT, ((span.stop - 1) >> SHIFT) + 1):
                name = (cached.seed, block)
                if name in job.in_flight or self._packs.has(cached, block):
                    continue
                flight = Flight()
                if (other := self._flying.setdefault(name, flight)) is flight:
                    job.in_flight[name] = flight
                    mine.append((span, cached, block))
                else:
                    others[name] = other
        runs = _runs(mine)
        try:
            free: list[Run] = []
            taken: list[Run] = []
            for run in runs:
                (free if self._packs.claim(*run[2:]) else taken).append(run)
            await gather([self._get(job, free), self._await(job, taken)])
            # Those that were there after all are waited for by others, whose blocks are waited for below.
            for flight in job.in_flight.values():
                if not flight.done():
                    flight.set_result(None)
            for name, other in others.items():
                if (view := await asyncio.shield(asyncio.wrap_future(other))) is not None:
                    job.blocks[name] = view
        finally:
            for name, flight in job.in_flight.items():
                self._flying.pop(name, None)
                if not flight.done():
                    flight.set_result(None)
            self._land(runs)  # also if the task that was to fetch them was cancelled before it started
        return job.blocks

    async def _get(self, job: '_Job', runs: Sequence[Run]) -> None:
        """Fetch and cache blocks that this process has claimed."""
        try:
            # Another process may have cached them before this one claimed them.
            wanted = [run for run in runs if not self._there(run)]
            counters.block_misses += sum(run.length for run in wanted)
            limits = [(run.first << SHIFT, min((run.first + run.length) << SHIFT, run.cached.size)) for run in wanted]
            found = await job.below.fetch_many(
                [Request(run.key, [a], [b], run.version) for run, (a, b) in zip(wanted, limits, strict=True)]
            )
            for run, data in zip(wanted, found, strict=True):
                view = memoryview(data)
                for i in range(run.length):
                    name = (run.cached.seed, run.first + i)
                    job.blocks[name] = view[i << SHIFT : (i + 1) << SHIFT]
                    job.in_flight[name].set_result(job.blocks[name])
            await self._tried(lambda: self._keep(wanted, found))
        finally:
            self._land(runs)

    def _land(self, runs: Iterable[Run]) -> None:
        for run in runs:
            self._packs.release(*run[2:])

    def _there(self, run: Run) -> bool:
        return all(self._packs.has(run.cached, run.first + i) for i in range(run.length))

    def _keep(self, runs: Sequence[Run], found: Sequence[bytes]) -> None:
        if time.monotonic() >= self._paused:
            for run, data in zip(runs, found, strict=True):
                self._packs.write(run.cached, run.first, data)

    async def _await(self, job: '_Job', runs: Sequence[Run]) -> None:
        """Wait for blocks that other processes fetch; fetch those that they release without caching them."""
        until, pause = time.monotonic() + _PATIENCE, 0.002
        while (runs := [run for run in runs if not self._there(run)]) and time.monotonic() < until:
            free = [run for run in runs if self._packs.claim(*run[2:])]
            if free:
                await self._get(job, free)
                runs = [run for run in runs if run not in free]
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, 0.05)

    def _assemble(self, spans: Sequence[Span], owners: Sequence[Cached | None], blocks: Blocks) -> list[bytes | None]:
        """Return the byte ranges, from fetched and cached blocks; None for a range of which a block is missing."""
        return [
            None if cached is None or span.stop > cached.size else self._joined(span, cached, blocks)
            for span, cached in zip(spans, owners, strict=True)
        ]

    def _joined(self, span: Span, cached: Cached, blocks: Blocks) -> bytes | None:
        parts: list[bytes | memoryview] = []
        for block in range(span.start >> SHIFT, ((span.stop - 1) >> SHIFT) + 1):
            at = block << SHIFT
            left, right = max(span.start - at, 0), min(span.stop - at, BLOCK)
            view = blocks.get((cached.seed, block))
            try:
                part = self._packs.read(cached, at + left, at + right) if view is None else view[left:right]
            except OSError as error:
                self._fails(error)
                return None
            if part is None:
                return None
            parts.append(part)
        return b''.join(parts)


class _Job:
    """The blocks that one read fetches.

    Attributes:
      below: the upstream store.
      flights: a future for each block that this read fetches, for other reads of it.
      blocks: the blocks that arrived.
    """

    def __init__(self, below: Below) -> None:
        self.below = below
        self.in_flight: dict[Name, Flight] = {}
        self.blocks: Blocks = {}


def _runs(wanted: Iterable[tuple[Span, Cached, int]]) -> list[Run]:
    """Group blocks into as few runs as possible."""
    runs: list[Run] = []
    for span, cached, block in sorted(wanted, key=lambda item: (item[1].seed, item[2])):
        last = runs[-1] if runs else None
        if last is not None and last.cached is cached and last.first + last.length == block:
            runs[-1] = last._replace(length=last.length + 1)
        else:
            runs.append(Run(span.key, span.version or '', cached, block, 1))
    return runs


_REMEMBERED: Final = 1 << 18  # sizes of objects, of about 300 bytes each
_sizes: Final[dict[tuple[str, str, str], int]] = {}


def note(identity: str, key: str, version: str, size: int) -> None:
    """Record a version of an object and its size, as the store has reported them to this process.

    No object is served from a cache before this. So an object that was replaced, or two objects of different size with
    the same version, are detected wherever the version comes from.
    """
    if len(_sizes) >= _REMEMBERED:
        _sizes.clear()
    _sizes[identity, key, version] = size


def doubt(identity: str, prefix: str) -> None:
    """Forget the versions of a folder's objects, which come from an index cache: the store must confirm them first."""
    for name in [name for name in list(_sizes) if name[0] == identity and name[1].startswith(prefix)]:
        _sizes.pop(name, None)


_caches: Final[dict[tuple[str, int], BlockCache | None]] = {}


def cache_of(config: IOConfig) -> BlockCache | None:
    """Return the block cache that a config names, one per folder and limit; None if there is none or it fails to open.

    Raises:
      AccessDeniedError: if its folder belongs to another user, or contains symbolic links.
    """
    name = config.cache_dir, config.cache_bytes
    try:
        return _caches[name]
    except KeyError:
        pass
    try:
        opened = BlockCache(os.path.expanduser(config.cache_dir), config.cache_bytes)
    except GranularError:
        raise  # a rejected folder is not a disk failure
    except OSError as error:
        logger.warning('%s: there will be no block cache: %s', config.cache_dir, error)
        return _caches.setdefault(name, None)
    return _caches.setdefault(name, opened)


after_fork(_caches.clear)  # a child appends to packs of its own, and claims blocks separately from its parent

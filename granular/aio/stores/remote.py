"""Base classes for buckets and web servers: one client per event loop, whose reads are plain GET requests."""

import abc
import asyncio
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from granular._support.redact import without_user
from granular.aio.http.batch import Batch
from granular.aio.http.download import Download
from granular.aio.http.messages import Target, http_date
from granular.aio.http.refusals import RecoverableKind
from granular.aio.http.reply import Reply, check_same, stands_in
from granular.aio.http.tls import verify_of
from granular.aio.http.transport import Answer, Outgoing, Transport
from granular.aio.runtime.buffers import Space, blank
from granular.aio.runtime.loop_resources import Scope
from granular.aio.runtime.tasks import result_of
from granular.aio.runtime.threads import offload
from granular.aio.stores import ranges
from granular.aio.stores.base import Request
from granular.aio.stores.clients import Bucket, ClientStore
from granular.config import IOConfig
from granular.errors import AccessDeniedError, BadReplyError, NotFoundError

if TYPE_CHECKING:
    from granular.aio.stores.block_cache.cache import BlockCache

_REMEMBERED: Final = 65536  # signed requests per bucket, of about 2 KB each
_JUST_NOW: Final = 5.0  # seconds after a renewal in which requests that were signed before it may still be refused


class Client(abc.ABC):
    """Access to a store under one event loop, with the signed requests of its objects."""

    transport: Transport
    signed_for: float = 240.0
    """Seconds for which a signed request is used: the signature of S3 is valid for 15 minutes, and a token is renewed
    some minutes before it expires."""

    def __init__(self, store: 'RemoteStore[Any]') -> None:
        self.store = store
        self.tls_verify: bool | str = store.tls_verify
        self._ready: dict[str, tuple[float, Target]] = {}
        self._swept = time.monotonic()  # when expired requests were last removed
        self._renewing: asyncio.Future[bool] | None = None
        self._renewed = 0.0  # time of the last successful renewal, by the monotonic clock

    @abc.abstractmethod
    async def sign(self, key: str) -> tuple[str, Mapping[str, str]]:
        """Return the URL of an object and the signed headers that read it, valid for some minutes and any range."""

    def target(self, url: str, headers: Mapping[str, str]) -> Target:
        """Return the target of a request to the store."""
        return Target.of(url, headers)

    def ready(self, key: str) -> Target | None:
        """Return the signed target of an object if it was signed a short time ago, else None."""
        entry = self._ready.get(key)
        return entry[1] if entry is not None and time.monotonic() - entry[0] < self.signed_for else None

    async def prepare(self, key: str) -> Target:
        """Return the signed target of an object, cached for ``signed_for`` seconds."""
        if (target := self.ready(key)) is not None:
            return target
        signed = self.target(*await self.sign(key))
        self.remember(key, signed)
        return signed

    def remember(self, key: str, signed: Target) -> None:
        """Cache the signed target of an object for ``signed_for`` seconds."""
        now = time.monotonic()
        if len(self._ready) >= _REMEMBERED:
            self._ready.clear()
        elif now - self._swept > self.signed_for:
            self._swept = now
            self._ready = {name: entry for name, entry in self._ready.items() if now - entry[0] < self.signed_for}
        self._ready[key] = (now, signed)

    def forget(self, keys: Iterable[str]) -> None:
        """Forget the signed targets of objects."""
        for key in keys:
            self._ready.pop(key, None)

    async def find_credentials(self) -> bool:
        """Look for credentials again, off the event loop. Return False if there are none to look for."""
        return False

    async def move(self, region: str) -> bool:
        """Switch to the region that the store named. Return False if that is not possible."""
        return False

    def set_clock(self, date: str) -> bool:
        """Sign by the store's clock. Return False if signatures have no time, or the date is unusable."""
        return False

    async def recover(self, kind: RecoverableKind, detail: str) -> bool:
        """Recover from a request error that the store reported. Return whether another attempt is worthwhile."""
        match kind:
            case 'expired':
                return await self.renew()
            case 'region':
                recovered = await self.move(detail)
            case 'skewed':
                recovered = self.set_clock(detail)
        if recovered:
            self._ready.clear()
        return recovered

    async def renew(self) -> bool:
        """Renew the credentials, once for all requests refused at the same time. Return whether there are any."""
        if time.monotonic() - self._renewed < _JUST_NOW:
            return True
        if self._renewing is None:
            self._renewing = asyncio.ensure_future(self._renew())
        return await result_of(self._renewing)

    async def _renew(self) -> bool:
        try:
            available = await self.find_credentials()
            self._ready.clear()
            self._renewed = time.monotonic() if available else 0.0
            return available
        finally:
            self._renewing = None

    async def read(self, key: str, start: int, stop: int | None, version: str | None) -> Reply:
        download = Download(key, self.store.url, start, stop, version, self.transport.versions)
        return await self.transport.read(self, download)


def _date(answer: Answer) -> float:
    date = answer.head.headers.get('date', '')
    if (moment := http_date(date)) is None:
        raise BadReplyError(f'expected the time in the Date header of an answer, got {date[:100]!r}')
    return moment.timestamp()


C = TypeVar('C', bound=Client)


class RemoteStore(ClientStore[C]):
    """A store that is read over HTTP."""

    absent = (NotFoundError, AccessDeniedError)  # a bucket that may not be listed denies access to missing keys
    version_header = 'ETag'
    """Reply header that identifies the version of an object."""

    def __init__(self, root: str, config: IOConfig, options: Mapping[str, Any]) -> None:
        super().__init__(root, config, options)
        self.tls_verify: bool | str = verify_of(root, self.options)

    @property
    def bucket(self) -> str:
        return self.root.partition('://')[2]

    @abc.abstractmethod
    async def make_client(self) -> C:
        """Create a client for the running event loop, without its transport."""

    async def _open_client(self, opened: Scope) -> C:
        client = await self.make_client()
        client.transport = Transport(
            self.config, without_user(self.root), self.version_header, isinstance(self, Bucket), client.tls_verify
        )
        opened.on_close(client.transport.aclose)
        return client

    async def read(self, key: str, start: int = 0, stop: int | None = None, version: str | None = None) -> Reply:
        client = await self.client()
        reply = await client.read(key, start, stop, version)
        if reply.version is not None and self.config.cache_dir:
            from granular.aio.stores.block_cache.versions import note

            note(self.fingerprint, key, reply.version, reply.size)
        return reply

    async def now(self, key: str) -> float:
        client = await self.client()

        async def make() -> Outgoing:
            return Outgoing(await client.prepare(key or 'spec.json'), 'HEAD')

        # Any status will do: only the Date header is used.
        return await client.transport.call(make, client.recover, self.url(key), _date, statuses=range(200, 500))

    def _cache(self, versions: Iterable[str | None] = ()) -> 'BlockCache | None':
        """Return the block cache on the local disk; None without, or if one of the versions does not prove content."""
        if not self.config.cache_dir or any(version is None or stands_in(version) for version in versions):
            return None
        from granular.aio.stores.block_cache.cache import cache_of

        return cache_of(self.config)

    async def read_into(
        self, key: str, start: int, stop: int, version: str | None, target: memoryview, largest: int = 0
    ) -> None:
        # Read in steps: a table may be larger than the memory limit of requests in flight.
        wave = max(self.config.memory // 2, self.merge.max_request)
        if self._cache([version]) is not None:
            for at in range(start, stop, wave):
                end = min(at + wave, stop)
                target[at - start : end - start] = (await self.read_many([Request(key, [at], [end], version)]))[0]
            return
        client = await self.client()
        wave = max(wave, 2 * largest)
        for at in range(start, stop, wave):
            space = Space(target, target[at - start : min(at + wave, stop) - start])
            reads = self._parts(client, key, at, min(at + wave, stop), version, space, largest)
            await Batch(client.transport, client, reads).run()

    def _parts(
        self, client: C, key: str, start: int, stop: int, version: str | None, space: Space, largest: int = 0
    ) -> list[Download]:
        """Return the reads of a range that is larger than one request may be."""
        url, versions = self.url, client.transport.versions
        return [
            Download(key, url, left, right, version, versions, space.part(left - start, right - start))
            for left, right in ranges.split(start, stop, max(largest, self.merge.max_request))
        ]

    async def read_fresh(self, requests: Sequence[Request]) -> list[bytes]:
        cache = self._cache()
        if cache is not None:
            await offload(cache.forget, self.fingerprint, requests)
        return await self.read_many(requests)

    def read_many(self, requests: Sequence[Request]) -> Coroutine[Any, Any, list[bytes]]:
        cache = self._cache(request.version for request in requests)
        return self.read_uncached(requests) if cache is None else cache.read_many(self, requests)

    async def read_uncached(self, requests: Sequence[Request]) -> list[bytes]:
        client = await self.client()
        largest, url, versions = self.merge.max_request, self.url, client.transport.versions
        values: list[bytes] = []
        reads: list[Download] = []
        single: list[tuple[int, Download]] = []  # reads of whole ranges, with the indices of their values
        unpinned: list[list[Download]] = []  # the reads of each request that has no version
        for key, starts, stops, version in requests:
            first = len(reads)
            for start, stop in zip(starts, stops, strict=True):
                if stop - start <= largest:
                    read = Download(key, url, start, stop, version, versions)
                    single.append((len(values), read))
                    values.append(b'')
                    reads.append(read)
                else:
                    data, view = blank(stop - start, url(key))
                    values.append(data)
                    reads += self._parts(client, key, start, stop, version, Space(data, view))
            if version is None and len(starts):
                unpinned.append(reads[first:])
        await Batch(client.transport, client, reads).run()
        for index, read in single:
            values[index] = read.data
        for group in unpinned:
            check_same(group[0].name, [read.version for read in group])
        return values

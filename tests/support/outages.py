"""Outages: a proxy in front of a store that is away for a while, in one of several ways, and what happens meanwhile."""

import asyncio
import contextlib
import itertools
import logging
import re
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

import granular
from granular import aio
from tests.support.fault_proxy import Call, FaultProxy

KINDS: Final = ('status', 'refused', 'reset', 'DNS', 'TLS', 'silence')
"""A reply with a status, connections that are refused or reset, a name that has no address, handshakes that fail, and
requests that get no reply."""

DOMAIN: Final = 'store.test'
"""Of the names of the stores, each of which is of one proxy: processes remember which servers have replied."""

COUNT: Final = 120
"""Datapoints of each dataset."""

_numbers: Final = itertools.count()
_FAULTS: Final = {'reset': 'reset', 'silence': 'hang'}


class OutageProxy(FaultProxy):
    """A proxy to a store, whose host name only ``named`` knows.

    Args:
      upstream: the address of the store, ``http://host:port``.
      kind: one of ``KINDS``: how the store is away between ``arm`` and ``end``.
      status: that of its replies, if it sends some.
      tls: a context with the certificate of all names in ``DOMAIN``.
    """

    def __init__(self, upstream: str, kind: str, status: int = 503, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(upstream, self._choose)
        self.kind = kind
        self.host = f'{next(_numbers)}.{DOMAIN}'
        self.keep_calls = False
        self._tls = tls if kind == 'TLS' else None
        self._fault = _FAULTS.get(kind, f'status {status}')
        self._until: float = float('inf')  # requests until the outage
        self.began = threading.Event()
        self.nameless = False
        self._refusing: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """The address of the store, by its name."""
        return self.endpoint.replace('127.0.0.1', self.host)

    def arm(self, requests: int) -> None:
        """Let the outage begin at the request behind so many."""
        self._until = self.count + requests
        self.began.clear()

    def end(self) -> None:
        """End the outage."""
        self._until = float('inf')
        self.began.set()
        if self._refusing is not None:
            asyncio.run_coroutine_threadsafe(self._return(self._refusing), self.loop).result(60)
            self._refusing, self.nameless = None, False

    async def _return(self, refusing: 'asyncio.Task[None]') -> None:
        await refusing
        await self.refuse()
        await self.listen(self._tls)

    async def _refuse(self) -> None:
        self.nameless = self.kind == 'DNS'
        await self.refuse()
        if self.kind == 'TLS':
            await self.listen(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # without a certificate, no handshake succeeds

    def _choose(self, call: Call) -> str:
        if call.number < self._until:
            return ''
        refuses = self.kind not in ('status', *_FAULTS)
        if not self.began.is_set():
            self._hang_up()
            if refuses:
                self._refusing = self.loop.create_task(self._refuse())
            self.began.set()
        return 'reset' if refuses else self._fault


@contextlib.contextmanager
def named(proxies: Sequence[OutageProxy]) -> Iterator[None]:
    """Resolve the names of proxies in the event loops of asyncio, but for those of which there is none at the time."""
    look_up, hosts = socket.getaddrinfo, {proxy.host: proxy for proxy in proxies}

    def resolve(host: Any, *args: Any, **kwargs: Any) -> Any:
        if (proxy := hosts.get(host)) is None:
            return look_up(host, *args, **kwargs)
        if proxy.nameless:
            raise socket.gaierror(socket.EAI_AGAIN, 'Temporary failure in name resolution')
        return look_up('127.0.0.1', *args, **kwargs)

    socket.getaddrinfo = resolve
    try:
        yield
    finally:
        socket.getaddrinfo = look_up


class Outcome(NamedTuple):
    """Items that an operation left out or changed, and those that it returned or stored twice."""

    lost: int
    twice: int

    @classmethod
    def of(cls, found: Sequence[Any], expected: Sequence[Any]) -> Self:
        return cls(len(set(found) ^ set(expected)), len(found) - len(set(found)))


class Places(NamedTuple):
    """A folder of a bucket, through a proxy and past it."""

    proxied: aio.Path
    direct: granular.Path

    def prepare(self) -> None:
        """Write what the operations read."""
        with granular.ShardedDatasetWriter(self.direct / 'data', SPEC, shardlen=40) as writer:
            for i in range(COUNT):
                writer.append(datapoint(i))
        for i in range(8):
            (self.direct / 'files' / f'{i}' / 'file').write_bytes(b'%d' % i * 5000)

    async def stored(self, name: str) -> Outcome:
        """Read a dataset past the proxy, after it was written through it."""
        return await asyncio.to_thread(self._stored, name)

    def _stored(self, name: str) -> Outcome:
        with granular.ShardedDatasetReader(self.direct / name, granular.decoders) as reader:
            return _compared((point['n'], point['data']) for point in reader)


SPEC: Final = {'n': 'int', 'data': 'bytes'}


def datapoint(i: int) -> dict[str, Any]:
    return {'n': i, 'data': bytes([i % 251]) * 3000}


def _compared(found: Any) -> Outcome:
    return Outcome.of(list(found), [(i, datapoint(i)['data']) for i in range(COUNT)])


async def load(places: Places) -> Outcome:
    async with aio.ShardedDatasetReader(places.proxied / 'data', granular.decoders) as reader:
        async with aio.Loader(aio.MapDataset.source(reader).shuffle(seed=1), 8, prefetch=2) as loader:
            batches = [await anext(loader) for _ in range(COUNT // 8)]
    return _compared(point for batch in batches for point in zip(batch['n'].tolist(), batch['data'], strict=True))


async def stream(places: Places) -> Outcome:
    async with aio.ShardedDatasetReader(places.proxied / 'data', granular.decoders) as reader:
        dataset = aio.MapDataset.source(reader).shuffle(seed=2).to_iter_dataset(granular.ReadOptions(8, 16))
        async with aiter(dataset) as elements:
            return _compared([(element['n'], element['data']) async for element in elements])


async def write(places: Places) -> Outcome:
    async with aio.ShardedDatasetWriter(places.proxied / 'written', SPEC, shardlen=30) as writer:
        for i in range(COUNT):
            await writer.append(datapoint(i))
    return await places.stored('written')


async def listing(places: Places) -> Outcome:
    found = [f'{path}' async for path in (places.proxied / 'files').rglob('*')]
    async for folder, _, files in (places.proxied / 'files').walk():
        found += [f'{folder / file}/' for file in files]
    return Outcome.of(found, [f'{places.proxied}/files/{i}{end}' for i in range(8) for end in ('', '/file', '/file/')])


async def copy(places: Places) -> Outcome:
    await (places.proxied / 'data').copy(places.proxied / 'copied')
    return await places.stored('copied')


async def convert(places: Places) -> Outcome:
    await aio.convert(places.proxied / 'data', places.proxied / 'converted', shardlen=30)
    return await places.stored('converted')


OPERATIONS: Final[Mapping[str, tuple[Callable[[Places], Awaitable[Outcome]], int]]] = {
    'Loader': (load, 60), 'stream': (stream, 120), 'writer': (write, 50), 'listing': (listing, 5), 'copy': (copy, 50),
    'convert': (convert, 90),
}  # fmt: skip
"""Each operation, and the requests before its outage: about half of those that it sends."""


class FailedAttempts(logging.Handler):
    """Learns from the log how often each request to a store has failed."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._waiting: list[tuple[str, int, asyncio.Future[None]]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if (match := _FAILED.match(record.getMessage())) is None:
            return
        for root, count, future in self._waiting:
            if match[2] == root and int(match[1]) >= count and not future.done():
                future.set_result(None)

    async def reach(self, root: str, count: int) -> None:
        """Wait until a request to a store has failed that often in this event loop."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((root, count, future))
        await future

    def __enter__(self) -> Self:
        logger = logging.getLogger('granular')
        logger.addHandler(self)
        self._before = logger.level
        logger.setLevel(logging.INFO)  # warnings become rare during an outage
        return self

    def __exit__(self, *args: object) -> None:
        logger = logging.getLogger('granular')
        logger.setLevel(self._before)
        logger.removeHandler(self)


_FAILED: Final = re.compile(r'attempt (\d+) failed, .*? s: (\w+://[\w-]+)')


async def survive(proxy: OutageProxy, places: Places, operation: str, away: Awaitable[object]) -> Outcome:
    """Return the outcome of an operation during an outage that begins in its middle and ends once ``away`` does."""
    run, requests = OPERATIONS[operation]
    proxy.arm(requests)
    task, ending = asyncio.ensure_future(run(places)), asyncio.ensure_future(away)
    try:
        await asyncio.wait([task, ending], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            raise AssertionError(f'{operation}: ended in {task} before the outage did')
        proxy.end()
        return await task
    finally:
        proxy.end()
        for one in (task, ending):
            one.cancel()
        await asyncio.gather(task, ending, return_exceptions=True)

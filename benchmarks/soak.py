"""Soak test: an hour of random reads and writes while one request in a hundred fails: ``python -m benchmarks.soak``.

Reads and listings go to a server that injects random faults, with and without caches. Writers, copies and
deletions go to SeaweedFS and fake-gcs-server through a proxy that fails requests before or after they were carried out;
what they leave is read past the proxy.
"""

import argparse
import asyncio
import collections
import contextlib
import functools
import itertools
import json
import os
import pathlib
import random
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import numpy as np
import trustme

import granular
from benchmarks.bars import ROOT
from granular.errors import GranularError, NotFoundError
from granular.formats.checksums import crc32c
from tests.support.credentials import AmazonKeys, google_key
from tests.support.fault_proxy import Call, FaultProxy
from tests.support.faults import FaultServer, Request
from tests.support.gcs_faults import GCSFaultProxy
from tests.support.servers import FakeGCSServer, SeaweedServer

SHARE = 0.01  # share of all requests
POINTS, SHARDLEN = 1600, 200
SPEC = {'columns': {'data': 'bytes', 'label': 'int'}, 'refs': {'data': 'bytes', 'frames': 'bytes[]', 'label': 'int'}}
WARM = 5.0  # minutes that the slope of memory excludes
IDLE = 20.0  # seconds after which idle connections are closed
AUTHORITY = 'authority.pem'
RENEWED = 30.0  # minimal lifetime of credentials in seconds

# Every fault that a read survives.
FAULTS: tuple[Any, ...] = (
    'reset', 'then_reset', ('truncate', 0), ('truncate', 100), ('truncate', 20_000), 'hang', ('stall', 0),
    ('stall', 1000), ('drip', 0.01), ('late', 2), ('status', 408), ('status', 429), ('status', 500), ('status', 502),
    ('status', 503), ('status', 504), ('retry_after', 1), 'whole', ('whole', 'gzip'), 'document', 'zipped', 'long',
    'short', 'shifted', ('ranged', None), ('chunked', 1000), ('chunked', 1000, b'0\r\n\r\n'), 'until_close',
    ('until_close', 50), 'then_close', ('then_close', 'close'), 'slowly', 'informed', 'expire',
    ('raw', b'SSH-2.0-OpenSSH_9.2\r\n\r\n'), ('raw', b'\x16\x03\x01' * 50, True),
)  # fmt: skip

# Invalid pages of a listing.
PAGES = ('reset', '', '<html><body>Sign in to continue</body></html>', '{"error": {"code": 503}}', '<Error/>')
PAGES += ('<?xml version="1.0"?><ListBucketResult><IsTruncated>fal', '{"kind": "storage#objects", "items": [')

# Faults of requests that write, list or delete, before or after the store has carried them out.
WRITE_FAULTS = (
    'reset', 'status 500', 'status 503', 'page html', 'page xml', 'page json', 'page empty', 'dropped',
    'after reset', 'after status 500', 'after page html', 'after page xml', 'after page json', 'after page empty',
    'after half', 'after cut',
)  # fmt: skip
CACHE_BYTES = 16 << 20  # less than the datasets, so that blocks are evicted


class Faulty(FaultServer):
    """A server that injects a fault into a share of all requests, and an invalid page into a share of all listings."""

    def __init__(self, files: Mapping[str, bytes], tls: ssl.SSLContext | None = None) -> None:
        super().__init__(tls, files)
        self.count = 0
        self.met: collections.Counter[str] = collections.Counter()
        self._dice = random.Random(0)
        self._expired = 0.0

    def record(self, request: Request, lines: Mapping[str, str]) -> None:
        self.count += 1  # only counted, to bound the memory of an hour

    def next_line(self) -> Any:
        if self._dice.random() >= SHARE:
            return 'good'
        line = self._dice.choice(FAULTS)
        if line == 'expire':
            if time.monotonic() - self._expired < RENEWED:
                return 'good'
            self._expired = time.monotonic()
        self.met[line if isinstance(line, str) else ' '.join(str(word)[:20] for word in line)] += 1
        return line

    def _list(self, writer: asyncio.StreamWriter, google: bool, prefix: str, delimiter: str) -> None:
        if self._dice.random() >= SHARE:
            super()._list(writer, google, prefix, delimiter)
            return
        page = self._dice.choice(PAGES)
        self.met[f'listing: {page[:20] or "empty"}'] += 1
        if page == 'reset':
            writer.transport.abort()
            return
        writer.write(f'HTTP/1.1 200 OK\r\nContent-Length: {len(page)}\r\n\r\n{page}'.encode())


def plan(share: float, seed: int) -> Callable[[Call], str]:
    """Return a fault for a share of the requests."""
    dice = random.Random(seed)
    return lambda call: dice.choice(WRITE_FAULTS) if dice.random() < share else ''


def serve(folder: pathlib.Path, encrypted: bool) -> None:
    """The server process: prints its addresses, and, when its input ends, its counts."""
    data = folder / 'data'
    files = {str(file.relative_to(data)): file.read_bytes() for file in data.rglob('*') if file.is_file()}
    keys = AmazonKeys(folder / 'credentials')
    tls = None
    if encrypted:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(folder / AUTHORITY))
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert('127.0.0.1').configure_cert(tls)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Faulty(files, tls))
        server.renew = keys.renew
        stores, proxies = {}, []
        for number, store in enumerate((SeaweedServer(), FakeGCSServer())):
            stack.enter_context(store)
            proxy_class = GCSFaultProxy if store.scheme == 'gs' else FaultProxy
            proxy = stack.enter_context(proxy_class(store.endpoint, plan(SHARE, number)))
            proxy.keep_calls = False
            proxies.append(proxy)
            stores[str(store.new_bucket())] = [store.options, proxy.endpoint]
        sources = {'endpoint': server.endpoint, 'account': google_key(folder, server), 'stores': stores}
        print(json.dumps(sources), flush=True)
        sys.stdin.read()
        met = server.met + collections.Counter(f'write: {fault}' for proxy in proxies for fault in proxy.faults)
        print(json.dumps({'requests': server.count + sum(proxy.count for proxy in proxies), 'met': met}), flush=True)


@functools.cache
def point(index: int, layout: str) -> dict[str, Any]:
    """Return the expected datapoint."""
    rng = np.random.default_rng(index)
    data = rng.bytes(int(10 ** rng.uniform(1, 5)))
    frames = {'frames': [rng.bytes(500 * k) for k in range(index % 4)]} if layout == 'refs' else {}
    return {'data': data, 'label': index, **frames}


def summed(datapoint: Mapping[str, Any], seed: Any) -> dict[str, int]:
    """Convert a datapoint for the Loader: a label, and a checksum of all its bytes."""
    return {'label': datapoint['label'], 'crc': crc32c(datapoint['data'] + b''.join(datapoint.get('frames', ())))}


def difference(actual: Any, expected: Any) -> str:
    """Describe the first difference of two values."""
    if not (isinstance(actual, list) and isinstance(expected, list)):
        return f'{str(actual)[:100]} instead of {str(expected)[:100]}'
    pairs = itertools.zip_longest(actual, expected)
    first = next(i for i, (one, other) in enumerate(pairs) if one != other)
    return f'{len(actual)} instead of {len(expected)}, the first at {first}: {str(actual[first : first + 1])[:200]}'


class Soak:
    """The reads and writes, their results, and the resources of the process."""

    def __init__(
        self,
        sources: Mapping[str, list[granular.Path]],
        buckets: list[tuple[granular.Path, granular.Path]],
        minutes: float,
        share: float,
    ) -> None:
        self.sources, self.buckets, self.share = sources, buckets, share
        self.written: collections.Counter[str] = collections.Counter()
        self.started = time.monotonic()
        self.end = self.started + 60 * minutes
        self.burnt = time.process_time()
        self.reads = self.mismatches = self.batches = self.opened = 0
        self.errors: collections.Counter[str] = collections.Counter()
        self.running: dict[object, float] = {}  # start of each read in progress
        self.longest = 0.0  # seconds per read
        self.samples: list[tuple[float, float, int, int]] = []

    def compare(self, actual: Any, expected: Any, where: str) -> None:
        """Compare a datapoint with the expected one."""
        self.reads += 1
        if actual != expected:
            self.mismatches += 1
            print(f'MISMATCH {where}: {difference(actual, expected)}', flush=True)

    def failed(self, error: GranularError) -> None:
        """Count a read that failed, for example because a retry failed as well."""
        self.errors[type(error).__name__] += 1
        print(f'error {type(error).__name__}: {str(error)[:300]} {getattr(error, "__notes__", "")}', flush=True)

    async def pace(self) -> None:
        """Wait until the share of processor time is below its limit."""
        while time.process_time() - self.burnt > self.share * (time.monotonic() - self.started + 1):
            await asyncio.sleep(0.05)

    async def worker(self, layout: str, place: granular.Path, seed: int) -> None:
        """Read through one reader, reopened from time to time."""
        dice, path = random.Random(seed), granular.aio.Path(place)
        while time.monotonic() < self.end:
            try:
                async with granular.aio.ShardedDatasetReader(path, granular.decoders) as reader:
                    self.opened += 1
                    for _ in range(dice.randrange(50, 500)):
                        if time.monotonic() > self.end:
                            return
                        with self.counted(), self.timed():
                            await self.read(reader, path, layout, dice)
                        await self.pace()
            except GranularError as error:
                self.failed(error)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Read; failures are counted."""
        try:
            yield
        except GranularError as error:
            self.failed(error)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count a read and its duration."""
        mark = object()
        self.running[mark] = time.monotonic()
        try:
            yield
        finally:
            self.longest = max(self.longest, time.monotonic() - self.running.pop(mark))

    async def read(self, reader: Any, path: Any, layout: str, dice: random.Random) -> None:
        """Read in a random way, and compare."""
        where, kind = dice.randrange(POINTS), dice.random()
        if kind < 0.5:
            self.compare(await reader.get(where), point(where, layout), f'{path} {where}')
        elif kind < 0.8:
            indices = [dice.randrange(POINTS) for _ in range(16)]
            for index, actual in zip(indices, await reader.fetch(indices), strict=True):
                self.compare(actual, point(index, layout), f'{path} {index}')
        elif kind < 0.9:
            labels = (await reader.get(slice(where, where + 20), ('label',)))['label']
            self.compare(labels, list(range(where, min(where + 20, POINTS))), f'{path} {where} to {where + 20}')
        else:
            shard, local = divmod(where, SHARDLEN)
            first = [len(point(i, layout)['data']) for i in range(shard * SHARDLEN, where)]
            start, data = sum(first), point(where, layout)['data']
            actual = await (path / f'{shard:06d}' / 'data.bag').read_ranges(
                [start, start], [start + len(data), start + len(data) // 2]
            )
            self.compare(actual, [data, data[: len(data) // 2]], f'{path} {shard} {local}')

    async def writer(self, faulty: granular.Path, direct: granular.Path, seed: int) -> None:
        """Write, copy and delete through the proxy, and compare the result without the proxy."""
        dice = random.Random(seed)
        for turn in itertools.count():
            await self.pace()
            if time.monotonic() > self.end:
                return
            name, layout = f'{seed}-{turn}', dice.choice(list(SPEC))
            through, past = granular.aio.Path(faulty) / name, granular.aio.Path(direct) / name
            with self.timed():
                if turn % 4 == 0:
                    await self.write_file(through, past, dice)
                else:
                    await self.write_dataset(through, past, layout, dice)
                await self.delete(through, past)

    async def tried(self, action: str, work: Awaitable[Any]) -> bool:
        """Await an operation and count its failure. Returns whether it succeeded."""
        try:
            await work
        except GranularError as error:
            self.written[f'{action}: {type(error).__name__}'] += 1
            print(f'error {action} {type(error).__name__}: {str(error)[:300]}', flush=True)
            return False
        except Exception as error:
            self.mismatches += 1
            print(f'MISMATCH {action}: not an error of granular: {error!r}', flush=True)
            return False
        self.written[action] += 1
        return True

    async def write_file(self, through: Any, past: Any, dice: random.Random) -> None:
        """Write a file in parts, and copy it."""
        data = dice.randbytes(dice.randrange(20 << 20))
        if await self.tried('file written', (through / 'file').write_bytes(data)):
            self.compare(await (past / 'file').read_bytes(), data, f'{past} file')
            if await self.tried('file copied', (through / 'file').copy(through / 'copy')):
                self.compare(await (past / 'copy').read_bytes(), data, f'{past} copy')

    async def write_dataset(self, through: Any, past: Any, layout: str, dice: random.Random) -> None:
        """Write a dataset of several shards: complete if its writer succeeds, else correct where readable."""
        count = dice.randrange(1, 200)

        async def write() -> None:
            async with granular.aio.ShardedDatasetWriter(
                through, SPEC[layout], granular.encoders, 50, layout=layout
            ) as writer:
                for index in range(count):
                    await writer.append(point(index, layout), flush=False)

        complete = await self.tried('dataset written', write())
        actual = await self.everything(past)
        self.compare(actual, [point(index, layout) for index in range(count if complete else len(actual))], str(past))
        if not complete:
            return
        target = through.parent / f'{through.name}-copy'
        if await self.tried('dataset copied', through.copy(target)):
            actual = await self.everything(past.parent / target.name)
            self.compare(actual, [point(index, layout) for index in range(count)], f'{past} copied')
        await self.delete(target, past.parent / target.name)

    async def everything(self, place: Any) -> list[Any]:
        """Return all datapoints of a dataset, none if it does not exist, or the text of the error."""
        try:
            async with granular.aio.ShardedDatasetReader(place, granular.decoders) as reader:
                return await reader.fetch(range(len(reader)))
        except NotFoundError:
            return []
        except GranularError as error:
            return [f'{type(error).__name__}: {error}']

    async def delete(self, through: Any, past: Any) -> None:
        """Delete the folder, and check that nothing remains if that succeeds."""
        if await past.exists() and await self.tried('deleted', through.rmtree()):
            self.compare(await past.exists(), False, f'{past} deleted')
        if await past.exists():
            await past.rmtree()

    async def loader(self, layout: str, place: granular.Path, seed: int) -> None:
        """Run a Loader of the sync API for some batches, from time to time."""
        for turn in itertools.count(seed):
            await asyncio.to_thread(self.load, layout, place, turn)
            await asyncio.sleep(20)
            await self.pace()
            if time.monotonic() > self.end:
                return

    def load(self, layout: str, place: granular.Path, turn: int) -> None:
        """Compare the batches of a Loader."""
        with self.counted(), granular.ShardedDatasetReader(place, granular.decoders) as reader:
            self.opened += 1
            epochs = granular.sources.Epochs(reader, seed=turn)
            order = granular.sources.Epochs(range(POINTS), seed=turn)
            source = granular.sources.Transform(epochs, summed)
            with granular.Loader(source, 32, prefetch=2) as loader:
                for step in range(0, 32 * 20, 32):
                    with self.timed():
                        batch = next(loader)
                    indices = order.fetch(range(step, step + 32))
                    expected = [summed(point(index, layout), None)['crc'] for index in indices]
                    self.compare([batch['label'].tolist(), batch['crc'].tolist()], [indices, expected], f'batch {step}')
                    self.batches += 1

    def oldest(self) -> float:
        """Return the age of the oldest read in progress, in seconds."""
        return time.monotonic() - min(list(self.running.values()), default=time.monotonic())

    def sample(self) -> None:
        """Print and keep the memory in MB, and the numbers of descriptors and threads."""
        pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
        minutes = (time.monotonic() - self.started) / 60
        sample = minutes, pages * os.sysconf('SC_PAGE_SIZE') / 1e6, _entries('fd'), _entries('task')
        self.samples.append(sample)
        busy = (time.process_time() - self.burnt) / (time.monotonic() - self.started)
        print(
            f'{minutes:5.1f} min  {self.reads:>9,} reads  {sum(self.errors.values())} errors  {self.mismatches} '
            f'mismatches  {sample[1]:.1f} MB  {sample[2]} descriptors  {sample[3]} threads  {busy:.2f} cores  '
            f'longest read {max(self.longest, self.oldest()):.0f} s',
            flush=True,
        )

    async def sampler(self) -> None:
        """Take a sample each minute."""
        while (left := self.end - time.monotonic()) > 0:
            self.sample()
            await asyncio.sleep(min(60, left))
        self.sample()
        while self.running:  # detects reads that never end
            print(f'{len(self.running)} reads go on, {self.oldest():.0f} s', flush=True)
            await asyncio.sleep(10)

    async def run(self) -> None:
        """Run all tasks."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.sampler())
            for number, (faulty, direct) in enumerate(self.buckets):
                group.create_task(self.writer(faulty, direct, number))
            for seed, (layout, sources) in enumerate(self.sources.items()):
                for number, place in enumerate(sources):
                    for k in range(2):
                        group.create_task(self.worker(layout, place, 100 * seed + 10 * number + k))
                    group.create_task(self.loader(layout, place, 100 * seed + 10 * number))

    def report(self, server: Mapping[str, Any]) -> str:
        """Return the figures."""
        warm = [(minutes, size) for minutes, size, _, _ in self.samples[:-1] if minutes >= WARM]
        slope = (
            60 * np.polyfit([when for when, _ in warm], [size for _, size in warm], 1)[0]
            if len(warm) > 2
            else float('nan')
        )
        (begin, first, *_), (*_, last, over) = self.samples, self.samples
        faults = server['met']
        lines = [
            f'{last[0]:.0f} minutes, {self.opened:,} readers opened, {self.batches:,} batches of Loaders',
            f'{self.reads:,} comparisons, {self.mismatches} mismatches, the longest read took {self.longest:.1f} s',
            f'{server["requests"]:,} requests, {sum(faults.values()):,} faults of {len(faults)} kinds',
            f'written through the proxies: {dict(sorted(self.written.items()))}',
            f'errors raised: {dict(self.errors) or "none"}; {granular.io_stats()}',
            f'memory {first[1]:.1f} MB after a minute, {last[1]:.1f} MB after the last, {slope:+.2f} MB an hour '
            f'from minute {WARM:g} on',
            f'descriptors: {begin[2]} before, {first[2]} after a minute, {last[2]} after the last, {over[2]} when all '
            f'is closed; threads: {begin[3]}, {first[3]}, {last[3]}, {over[3]}',
            *(f'  {count:>6,}  {name!r}' for name, count in sorted(faults.items(), key=lambda item: -item[1])),
        ]
        return '\n'.join(lines)


def _entries(what: str) -> int:
    return len(os.listdir(f'/proc/self/{what}'))


def write(folder: pathlib.Path) -> None:
    """Write the datasets."""
    for layout in ('columns', 'refs'):
        place = folder / 'data' / layout
        writer = granular.ShardedDatasetWriter(place, SPEC[layout], granular.encoders, SHARDLEN, layout=layout)
        with writer:
            for index in range(POINTS):
                writer.append(point(index, layout), flush=False)


def main() -> None:
    """Print the figures. The exit status is 0 if every datapoint was correct."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--minutes', type=float, default=60)
    parser.add_argument('--share', type=float, default=0.2, help='of a core that the reads may take')
    parser.add_argument('--tls', action='store_true', help='read over TLS')
    parser.add_argument('--serve', type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.tls)
        return
    with tempfile.TemporaryDirectory(prefix='granular-soak-') as temporary:
        folder = pathlib.Path(temporary)
        write(folder)
        command = [sys.executable, '-m', 'benchmarks.soak', '--serve', temporary, *(['--tls'] if args.tls else [])]
        pipe: Callable[..., Any] = functools.partial(subprocess.Popen, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with pipe(command, text=True, cwd=ROOT) as server:
            addresses = json.loads(server.stdout.readline())
            os.environ['AWS_SHARED_CREDENTIALS_FILE'] = str(folder / 'credentials')
            if args.tls:
                os.environ['SSL_CERT_FILE'] = os.environ['REQUESTS_CA_BUNDLE'] = str(folder / AUTHORITY)
            cached = granular.IOConfig(
                cache_dir=str(folder / 'blocks'), cache_bytes=CACHE_BYTES, index_cache=str(folder / 'indices')
            )
            roots = [
                root
                for config in (granular.IOConfig(), cached)
                for root in (
                    granular.Path('s3://soak', endpoint_url=addresses['endpoint'], config=config),
                    granular.Path(
                        'gs://soak', endpoint_url=addresses['endpoint'], token=addresses['account'], config=config
                    ),
                )
            ]
            buckets = [
                (granular.Path(bucket, **{**options, 'endpoint_url': proxy}), granular.Path(bucket, **options))
                for bucket, (options, proxy) in addresses['stores'].items()
            ]
            soak = Soak(
                {layout: [root / layout for root in roots] for layout in SPEC}, buckets, args.minutes, args.share
            )
            asyncio.run(soak.run())
            time.sleep(IDLE)
            soak.sample()
            print(soak.report(json.loads(server.communicate()[0])))
    sys.exit(soak.mismatches > 0)


if __name__ == '__main__':
    main()

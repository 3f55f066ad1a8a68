"""Random reads and writes for an hour, of which one request in a hundred fails: ``python -m benchmarks.soak``.

Reads go to a server that draws its faults, with and without the caches, its listings among them. Writers, copies and
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
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import numpy as np

import granular
from benchmarks.bars import ROOT
from granular.errors import GranularError, NotFoundError
from granular.formats.checksums import crc32c
from tests.support.credentials import AmazonKeys, google_key
from tests.support.fault_proxy import Call, FaultProxy
from tests.support.faults import FaultServer, Request
from tests.support.gcs_faults import GCSFaultProxy
from tests.support.servers import FakeGCSServer, SeaweedServer

SHARE = 0.01  # of all requests
POINTS, SHARDLEN = 1600, 200
SPEC = {'columns': {'data': 'bytes', 'label': 'int'}, 'refs': {'data': 'bytes', 'frames': 'bytes[]', 'label': 'int'}}
WARM = 5.0  # minutes that the slope of memory leaves out
IDLE = 20.0  # seconds after which connections that are not used are closed
RENEWED = 30.0  # seconds for which credentials are good at least

# Every fault that a read survives.
FAULTS: tuple[Any, ...] = (
    'reset', 'then_reset', ('truncate', 0), ('truncate', 100), ('truncate', 20_000), 'hang', ('stall', 0),
    ('stall', 1000), ('drip', 0.01), ('late', 2), ('status', 408), ('status', 429), ('status', 500), ('status', 502),
    ('status', 503), ('status', 504), ('retry_after', 1), 'whole', ('whole', 'gzip'), 'document', 'zipped', 'long',
    'short', 'shifted', ('ranged', None), ('chunked', 1000), ('chunked', 1000, b'0\r\n\r\n'), 'until_close',
    ('until_close', 50), 'then_close', ('then_close', 'close'), 'slowly', 'informed', 'expire',
    ('raw', b'SSH-2.0-OpenSSH_9.2\r\n\r\n'), ('raw', b'\x16\x03\x01' * 50, True),
)  # fmt: skip

# Pages of a listing that are none.
PAGES = ('reset', '', '<html><body>Sign in to continue</body></html>', '{"error": {"code": 503}}', '<Error/>')
PAGES += ('<?xml version="1.0"?><ListBucketResult><IsTruncated>fal', '{"kind": "storage#objects", "items": [')

# Faults of a request that writes, lists or deletes, which the store has carried out or not.
WRITE_FAULTS = (
    'reset', 'status 500', 'status 503', 'page html', 'page xml', 'page json', 'page empty', 'dropped',
    'after reset', 'after status 500', 'after page html', 'after page xml', 'after page json', 'after page empty',
    'after half', 'after cut',
)  # fmt: skip
CACHE_BYTES = 16 << 20  # less than the datasets have, so that blocks are dropped


class Faulty(FaultServer):
    """Draws a fault for a share of all requests, and a page that is none for a share of all listings."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(files=files)
        self.count = 0
        self.met: collections.Counter[str] = collections.Counter()
        self._dice = random.Random(0)
        self._expired = 0.0

    def record(self, request: Request, lines: Mapping[str, str]) -> None:
        self.count += 1  # and nothing is kept, for an hour's requests

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
    """Draw a fault for a share of the requests."""
    dice = random.Random(seed)
    return lambda call: dice.choice(WRITE_FAULTS) if dice.random() < share else ''


def serve(folder: pathlib.Path) -> None:
    """The server's process: says where it is, and, when its input ends, what it did."""
    data = folder / 'data'
    files = {str(file.relative_to(data)): file.read_bytes() for file in data.rglob('*') if file.is_file()}
    keys = AmazonKeys(folder / 'credentials')
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Faulty(files))
        server.renew = keys.renew
        stores, proxies = {}, []
        for number, store in enumerate((SeaweedServer(), FakeGCSServer())):
            stack.enter_context(store)
            proxy_class = GCSFaultProxy if store.scheme == 'gs' else FaultProxy
            proxy = stack.enter_context(proxy_class(store.endpoint, plan(SHARE, number)))
            proxy.keep_calls = False
            proxies.append(proxy)
            stores[str(store.new_bucket())] = [store.options, proxy.endpoint]
        places = {'endpoint': server.endpoint, 'account': google_key(folder, server), 'stores': stores}
        print(json.dumps(places), flush=True)
        sys.stdin.read()
        met = server.met + collections.Counter(f'write: {fault}' for proxy in proxies for fault in proxy.faults)
        print(json.dumps({'requests': server.count + sum(proxy.count for proxy in proxies), 'met': met}), flush=True)


@functools.cache
def point(index: int, layout: str) -> dict[str, Any]:
    """What a datapoint must be."""
    rng = np.random.default_rng(index)
    data = rng.bytes(int(10 ** rng.uniform(1, 5)))
    frames = {'frames': [rng.bytes(500 * k) for k in range(index % 4)]} if layout == 'refs' else {}
    return {'data': data, 'label': index, **frames}


def summed(found: Mapping[str, Any], seed: Any) -> dict[str, int]:
    """A datapoint for the Loader, whose checksum covers all of it."""
    return {'label': found['label'], 'crc': crc32c(found['data'] + b''.join(found.get('frames', ())))}


def difference(found: Any, wanted: Any) -> str:
    """Describe the first difference of two values."""
    if not (isinstance(found, list) and isinstance(wanted, list)):
        return f'{str(found)[:100]} instead of {str(wanted)[:100]}'
    pairs = itertools.zip_longest(found, wanted)
    first = next(i for i, (one, other) in enumerate(pairs) if one != other)
    return f'{len(found)} instead of {len(wanted)}, the first at {first}: {str(found[first : first + 1])[:200]}'


class Soak:
    """The reads, what they brought, and what the process took."""

    def __init__(
        self,
        places: Mapping[str, list[granular.Path]],
        buckets: list[tuple[granular.Path, granular.Path]],
        minutes: float,
        share: float,
    ) -> None:
        self.places, self.buckets, self.share = places, buckets, share
        self.written: collections.Counter[str] = collections.Counter()
        self.began = time.monotonic()
        self.end = self.began + 60 * minutes
        self.burnt = time.process_time()
        self.reads = self.mismatches = self.batches = self.opened = 0
        self.errors: collections.Counter[str] = collections.Counter()
        self.running: dict[object, float] = {}  # when each read that goes on began
        self.longest = 0.0  # seconds of a read
        self.samples: list[tuple[float, float, int, int]] = []

    def compare(self, found: Any, wanted: Any, where: str) -> None:
        """One datapoint beside what it must be."""
        self.reads += 1
        if found != wanted:
            self.mismatches += 1
            print(f'MISMATCH {where}: {difference(found, wanted)}', flush=True)

    def failed(self, error: GranularError) -> None:
        """A read ended with an error, as one whose second reply is broken as well does."""
        self.errors[type(error).__name__] += 1
        print(f'error {type(error).__name__}: {str(error)[:300]} {getattr(error, "__notes__", "")}', flush=True)

    async def pace(self) -> None:
        """Wait until the processor has had its rest."""
        while time.process_time() - self.burnt > self.share * (time.monotonic() - self.began + 1):
            await asyncio.sleep(0.05)

    async def worker(self, layout: str, place: granular.Path, seed: int) -> None:
        """Reads through a reader of its own, opened anew every now and then."""
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
        """Reads that may end with an error."""
        try:
            yield
        except GranularError as error:
            self.failed(error)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """A read that is to end."""
        mark = object()
        self.running[mark] = time.monotonic()
        try:
            yield
        finally:
            self.longest = max(self.longest, time.monotonic() - self.running.pop(mark))

    async def read(self, reader: Any, path: Any, layout: str, dice: random.Random) -> None:
        """One of the ways to read, compared."""
        where, kind = dice.randrange(POINTS), dice.random()
        if kind < 0.5:
            self.compare(await reader.get(where), point(where, layout), f'{path} {where}')
        elif kind < 0.8:
            indices = [dice.randrange(POINTS) for _ in range(16)]
            for index, found in zip(indices, await reader.fetch(indices), strict=True):
                self.compare(found, point(index, layout), f'{path} {index}')
        elif kind < 0.9:
            labels = (await reader.get(slice(where, where + 20), ('label',)))['label']
            self.compare(labels, list(range(where, min(where + 20, POINTS))), f'{path} {where} to {where + 20}')
        else:
            shard, local = divmod(where, SHARDLEN)
            first = [len(point(i, layout)['data']) for i in range(shard * SHARDLEN, where)]
            start, data = sum(first), point(where, layout)['data']
            found = await (path / f'{shard:06d}' / 'data.bag').read_ranges(
                [start, start], [start + len(data), start + len(data) // 2]
            )
            self.compare(found, [data, data[: len(data) // 2]], f'{path} {shard} {local}')

    async def writer(self, faulty: granular.Path, direct: granular.Path, seed: int) -> None:
        """Writes, copies and deletes through the proxy, and compares past it what is there."""
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
        """Do something that may end with an error; returns whether it did not."""
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
        """A file in parts, and a copy of it."""
        data = dice.randbytes(dice.randrange(20 << 20))
        if await self.tried('file written', (through / 'file').write_bytes(data)):
            self.compare(await (past / 'file').read_bytes(), data, f'{past} file')
            if await self.tried('file copied', (through / 'file').copy(through / 'copy')):
                self.compare(await (past / 'copy').read_bytes(), data, f'{past} copy')

    async def write_dataset(self, through: Any, past: Any, layout: str, dice: random.Random) -> None:
        """A dataset of some shards: whole if its writer succeeds, and right as far as it can be read if not."""
        count = dice.randrange(1, 200)

        async def write() -> None:
            async with granular.aio.ShardedDatasetWriter(
                through, SPEC[layout], granular.encoders, 50, layout=layout
            ) as writer:
                for index in range(count):
                    await writer.append(point(index, layout), flush=False)

        whole = await self.tried('dataset written', write())
        found = await self.everything(past)
        self.compare(found, [point(index, layout) for index in range(count if whole else len(found))], str(past))
        if not whole:
            return
        target = through.parent / f'{through.name}-copy'
        if await self.tried('dataset copied', through.copy(target)):
            found = await self.everything(past.parent / target.name)
            self.compare(found, [point(index, layout) for index in range(count)], f'{past} copied')
        await self.delete(target, past.parent / target.name)

    async def everything(self, place: Any) -> list[Any]:
        """All datapoints of a dataset; none if there is no dataset, and an error's text if it cannot be read."""
        try:
            async with granular.aio.ShardedDatasetReader(place, granular.decoders) as reader:
                return await reader.fetch(range(len(reader)))
        except NotFoundError:
            return []
        except GranularError as error:
            return [f'{type(error).__name__}: {error}']

    async def delete(self, through: Any, past: Any) -> None:
        """Delete all of it: nothing is left if that succeeds."""
        if await past.exists() and await self.tried('deleted', through.rmtree()):
            self.compare(await past.exists(), False, f'{past} deleted')
        if await past.exists():
            await past.rmtree()

    async def loader(self, layout: str, place: granular.Path, seed: int) -> None:
        """A synchronous Loader for some batches, every now and then."""
        for turn in itertools.count(seed):
            await asyncio.to_thread(self.load, layout, place, turn)
            await asyncio.sleep(20)
            await self.pace()
            if time.monotonic() > self.end:
                return

    def load(self, layout: str, place: granular.Path, turn: int) -> None:
        """Batches of a Loader, compared."""
        with self.counted(), granular.ShardedDatasetReader(place, granular.decoders) as reader:
            self.opened += 1
            epochs = granular.sources.Epochs(reader, seed=turn)
            order: Any = epochs.aio
            source = granular.sources.Transform(epochs, summed)
            with granular.Loader(source, 32, prefetch=2) as loader:
                for step in range(0, 32 * 20, 32):
                    with self.timed():
                        batch = next(loader)
                    indices = order.lookup(np.arange(step, step + 32)).tolist()
                    wanted = [summed(point(index, layout), None)['crc'] for index in indices]
                    self.compare([batch['label'].tolist(), batch['crc'].tolist()], [indices, wanted], f'batch {step}')
                    self.batches += 1

    def oldest(self) -> float:
        """Seconds that the oldest read takes that goes on."""
        return time.monotonic() - min(list(self.running.values()), default=time.monotonic())

    def sample(self) -> None:
        """Memory in MB, descriptors and threads."""
        pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
        minutes = (time.monotonic() - self.began) / 60
        sample = minutes, pages * os.sysconf('SC_PAGE_SIZE') / 1e6, _entries('fd'), _entries('task')
        self.samples.append(sample)
        busy = (time.process_time() - self.burnt) / (time.monotonic() - self.began)
        print(
            f'{minutes:5.1f} min  {self.reads:>9,} reads  {sum(self.errors.values())} errors  {self.mismatches} '
            f'mismatches  {sample[1]:.1f} MB  {sample[2]} descriptors  {sample[3]} threads  {busy:.2f} cores  '
            f'longest read {max(self.longest, self.oldest()):.0f} s',
            flush=True,
        )

    async def sampler(self) -> None:
        """A sample each minute."""
        while (left := self.end - time.monotonic()) > 0:
            self.sample()
            await asyncio.sleep(min(60, left))
        self.sample()
        while self.running:  # whatever does not end is seen
            print(f'{len(self.running)} reads go on, {self.oldest():.0f} s', flush=True)
            await asyncio.sleep(10)

    async def run(self) -> None:
        """All of it."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.sampler())
            for number, (faulty, direct) in enumerate(self.buckets):
                group.create_task(self.writer(faulty, direct, number))
            for seed, (layout, places) in enumerate(self.places.items()):
                for number, place in enumerate(places):
                    for k in range(2):
                        group.create_task(self.worker(layout, place, 100 * seed + 10 * number + k))
                    group.create_task(self.loader(layout, place, 100 * seed + 10 * number))

    def report(self, server: Mapping[str, Any]) -> str:
        """The figures."""
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
    """The datasets."""
    for layout in ('columns', 'refs'):
        place = folder / 'data' / layout
        writer = granular.ShardedDatasetWriter(place, SPEC[layout], granular.encoders, SHARDLEN, layout=layout)
        with writer:
            for index in range(POINTS):
                writer.append(point(index, layout), flush=False)


def main() -> None:
    """Print the figures; the exit status says whether every datapoint was right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--minutes', type=float, default=60)
    parser.add_argument('--share', type=float, default=0.2, help='of a core that the reads may take')
    parser.add_argument('--serve', type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    with tempfile.TemporaryDirectory(prefix='granular-soak-') as temporary:
        folder = pathlib.Path(temporary)
        write(folder)
        command = [sys.executable, '-m', 'benchmarks.soak', '--serve', temporary]
        pipe: Callable[..., Any] = functools.partial(subprocess.Popen, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with pipe(command, text=True, cwd=ROOT) as server:
            said = json.loads(server.stdout.readline())
            os.environ['AWS_SHARED_CREDENTIALS_FILE'] = str(folder / 'credentials')
            cached = granular.IOConfig(
                cache_dir=str(folder / 'blocks'), cache_bytes=CACHE_BYTES, index_cache=str(folder / 'indices')
            )
            roots = [
                root
                for config in (granular.IOConfig(), cached)
                for root in (
                    granular.Path('s3://soak', endpoint_url=said['endpoint'], config=config),
                    granular.Path('gs://soak', endpoint_url=said['endpoint'], token=said['account'], config=config),
                )
            ]
            buckets = [
                (granular.Path(bucket, **{**options, 'endpoint_url': proxy}), granular.Path(bucket, **options))
                for bucket, (options, proxy) in said['stores'].items()
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

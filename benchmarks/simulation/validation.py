"""The simulator against real processes: the same hosts read from a server with a delay and a limited rate.

``python -m benchmarks.simulation.validation [HOSTS RATE SECONDS]`` prints the rate, requests and retries of both, and
whether their ratios are within 0.9 to 1.1 with a confidence of 95 %. The default takes half an hour.
"""

import asyncio
import collections
import itertools
import json
import logging
import multiprocessing
import pathlib
import random
import sys
import tempfile
import time
from typing import Any, Final

import numpy as np

import granular
from granular import aio
from granular.metrics import counters
from tests.support.loop_server import LoopServer
from tests.support.simulation.bucket import Bucket, Model
from tests.support.simulation.objects import Objects
from tests.support.simulation.world import World

SEEDS: Final = 3  # simulated runs
BLOCKS: Final = 15  # of the second half of a run, whose differences give the confidence
MODEL = Model(burst=0.2, latency=(0.03, 0.0), tail=(0.0, 1.0), refusal=0.001)


class Server(LoopServer):
    """A server on real sockets that answers after a delay, and refuses more than a rate.

    Args:
      objects: the objects.
      rate: requests a second.
    """

    def __init__(self, objects: Objects, rate: float) -> None:
        super().__init__()
        self._objects, self._rate, self._number = objects, rate, 0
        self._level, self._at = 0.0, 0.0  # a bucket that leaks, as in nginx

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await reader.readuntil(b'\r\n\r\n')
            method, target, _ = request[: request.index(b'\r\n')].decode().split(' ')
            now = time.monotonic()
            self._level = max(0.0, self._level - (now - self._at) * self._rate)
            self._at, self._number = now, self._number + 1
            if self._level + 1 > self._rate * MODEL.burst:
                head, body = b'HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n', memoryview(b'')
            else:
                self._level += 1
                await asyncio.sleep(MODEL.latency[0])
                head, body = self._objects.reply(method, target, request)
            writer.write(b'%bX-Request-Id: %d\r\n\r\n%b' % (head, self._number, body))


async def reading(url: str, number: int) -> None:
    """Read records of a bag in a random order, 64 in a batch, 8 batches at a time."""
    chance = random.Random(number)
    async with aio.BagReader(aio.Path(url, config=granular.IOConfig(max_gap=0))) as bag:

        async def work() -> None:
            while True:
                await bag.fetch(np.array(chance.sample(range(len(bag)), 64)))

        await asyncio.gather(*[work() for _ in range(8)])


async def _count(seconds: float) -> list[collections.Counter[str]]:
    """Return the counts of each block in the second half of a run. The hosts of a world share their counters."""

    def total() -> collections.Counter[str]:
        store = next(iter(counters.stores.values()))
        retries = sum(store.retries.values())
        return collections.Counter(answered=store.ok, requests=store.requests - store.in_flight, retries=retries)

    await asyncio.sleep(seconds / 2)
    counts = [total()]
    for _ in range(BLOCKS):
        await asyncio.sleep(seconds / 2 / BLOCKS)
        counts.append(total())
    return [after - before for before, after in itertools.pairwise(counts)]


def _process(url: str, number: int, began: float, seconds: float, results: Any) -> None:
    counters.stores.clear()  # of the process that this one was forked from

    async def main() -> None:
        await asyncio.sleep(max(0.0, began - time.time()))
        task = asyncio.ensure_future(reading(url, number))
        results.put(await _count(seconds))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def real(root: pathlib.Path, hosts: int, rate: int, seconds: float) -> list[collections.Counter[str]]:
    """Return the counts of each block of a run with processes and sockets."""
    context = multiprocessing.get_context('fork')
    results = context.Queue()
    began = time.time() + 3
    with Server(Objects(root), rate) as server:
        url = f'{server.endpoint}/{root.name}/data.bag'
        processes = [
            context.Process(target=_process, args=(url, number, began, seconds, results), daemon=True)
            for number in range(hosts)
        ]
        for process in processes:
            process.start()
        found = [results.get(timeout=2 * seconds + 60) for _ in processes]
        for process in processes:
            process.join()
    return [sum(blocks, collections.Counter[str]()) for blocks in zip(*found, strict=True)]


def virtual(root: pathlib.Path, hosts: int, rate: int, seconds: float, seed: int) -> list[collections.Counter[str]]:
    """Return the same counts of a run in virtual time."""
    counters.stores.clear()
    world = World(seed)
    MODEL.rate = rate
    with world.begun():
        Bucket(world, Objects(root), MODEL)
        for number in range(hosts):
            host = world.host()
            host.start(reading(f'http://127.0.0.1:9000/{root.name}/data.bag', hosts * seed + number))
        counting = host.start(_count(seconds))
        world.run(seconds + 1)
        found: list[collections.Counter[str]] = counting.result()
        return found


def compare(there: list[float], here: list[float]) -> dict[str, Any]:
    """Return the means of two samples, their ratio with an interval of 95 %, and what follows."""
    means = [float(np.mean(values)) for values in (there, here)]
    errors = [np.std(values, ddof=1) / max(1e-9, np.mean(values)) / len(values) ** 0.5 for values in (there, here)]
    ratio = means[0] / max(1e-9, means[1])
    width = 2 * ratio * float(np.hypot(*errors))
    low, high = ratio - width, ratio + width
    verdict = 'agrees' if low >= 0.9 and high <= 1.1 else 'differs' if high < 0.9 or low > 1.1 else 'undecided'
    figures = {'simulated': means[0], 'real': means[1], 'ratio': ratio, 'from': low, 'to': high}
    return {**{name: round(value, 3) for name, value in figures.items()}, 'verdict': verdict}


def main() -> None:
    """Print both for a block, and the ratios."""
    hosts, rate, seconds = map(int, sys.argv[1:] or (8, 88, 1800))
    logging.disable()
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder) / 'bucket'
        root.mkdir()
        with granular.BagWriter(root / 'data.bag') as writer:
            for number in range(4096):
                writer.append(number.to_bytes(4, 'little') * 256, flush=False)
        there = [block for seed in range(SEEDS) for block in virtual(root, hosts, rate, seconds, seed)]
        here = real(root, hosts, rate, seconds)
    for name in ('answered', 'requests', 'retries'):
        print(name, json.dumps(compare([block[name] for block in there], [block[name] for block in here])))


if __name__ == '__main__':
    main()

"""What the rivals have in common: their job, their datapoints, their figures. It imports no package."""

import json
import os
import pathlib
import random
import sys
import time

job = json.loads(pathlib.Path(sys.argv[-1]).read_text())


def tell(**figures):
    """Print the figures and end, without waiting for threads and processes of the rival."""
    print(json.dumps(figures), flush=True)
    os._exit(0)


def records(count):
    """Yield random records of 50 to 150 kB."""
    rng = random.Random(0)
    block = rng.randbytes(64 << 20)
    for _ in range(count):
        size = rng.randint(50_000, 150_000)
        at = rng.randrange(len(block) - size)
        yield block[at : at + size]


def rate(items, count, each=1, warm=0):
    """Measure the datapoints per second of an iterator, after its first items."""
    for _ in range(warm):
        next(items)
    started = time.perf_counter()
    for _ in range(count):
        next(items)
    return count * each / (time.perf_counter() - started)


async def read_all(read):
    """Measure reads of all ranges of the job, as many at a time as it has in flight.

    Args:
      read: a coroutine function that returns the bytes of a range, as the job has it.
    """
    import asyncio

    todo = iter(job['ranges'])

    async def work():
        got = 0
        for wanted in todo:
            got += len(await read(*wanted))
        return got

    started = time.perf_counter()
    got = sum(await asyncio.gather(*(work() for _ in range(job['inflight']))))
    seconds = time.perf_counter() - started
    return {'rate': len(job['ranges']) / seconds, 'bytes': got / seconds}

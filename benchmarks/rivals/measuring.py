"""The common part of the rivals: their job, their datapoints, their figures. It imports no package."""

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


async def read_all(read):
    """Measure the reads of all ranges of the job per second, as many at a time as it has in flight."""
    import asyncio

    todo = iter(job['ranges'])

    async def work():
        for wanted in todo:
            await read(*wanted)

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(job['inflight'])))
    return len(job['ranges']) / (time.perf_counter() - started)

"""The time that ``granular plan`` predicts, beside that of a Loader."""

import itertools
import math
import time

import granular
from benchmarks.bars import Bar, Result
from benchmarks.data import Data
from benchmarks.nginx import Server
from granular import shuffle
from granular.cli.model import Rates
from granular.cli.plan import Run, plan
from tests.support.servers import HTTPServer

SERVERS = (0.1, math.inf), (0.05, 2e6), (0.02, 1e7)  # latency in seconds, and bytes per second
RECORDS = (4_000, 512, 16), (100_000, 32, 2)  # their size and number, and those of a batch
ORDERS = {'full': shuffle.Index(), 'sequential': shuffle.Sequential(), 'blocks:4,8': shuffle.Blocks(4, 8)}
CALM = granular.IOConfig(max_gap=0, hedge=0)


def planning(data: Data, server: Server) -> Result:
    """Compare the times of small runs with the predicted ones, on three servers of known latency and bandwidth."""
    folder, worst, case = data.folder / 'planning', 1.0, ''
    for size, length, _ in RECORDS:
        if not (folder / f'{size}').exists():
            with granular.ShardedDatasetWriter(folder / f'{size}', {'x': 'bytes'}, shardlen=length // 2) as writer:
                for _ in range(length):
                    writer.append({'x': bytes(size)}, flush=False)
    for (delay, rate), (size, _, batch), order in itertools.product(SERVERS, RECORDS, ORDERS):
        with HTTPServer(folder, delay, rate) as slow:
            path = granular.Path(f'{slow.endpoint}/{size}', config=CALM)
            rates = Rates(None if rate == math.inf else rate, 5000, delay)
            (one,) = plan(path, Run(batch, prefetch=3), [order], rates=rates).plans
            seconds = min(measured(path, batch, order) for _ in range(data.runs()))
        ratio = max(seconds / (one.seconds or math.nan), (one.seconds or math.nan) / seconds)
        if not ratio <= worst:
            worst, case = ratio, f'{seconds:.2f} s / {one.seconds:.2f} s: {order}, {size:,} bytes, {delay * 1e3:.0f} ms'
    return [Bar('time of a Loader / that of granular plan, worst of 18', worst, 1.5, case, at_most=True)], []


def measured(path: granular.Path, batch: int, order: str) -> float:
    """Return the seconds of an epoch, opening included."""
    began = time.perf_counter()
    with granular.ShardedDatasetReader(path) as reader:
        dataset = granular.MapDataset.source(reader).shuffle(seed=0, order=ORDERS[order])
        with granular.Loader(dataset, batch, prefetch=3) as loader:
            for _ in loader:
                pass
    return time.perf_counter() - began

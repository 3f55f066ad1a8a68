"""Programs of hosts: loaders over a dataset in the bucket, and what was measured of them."""

import asyncio
import dataclasses
import pathlib
from collections.abc import Callable

import numpy as np

import granular
from granular import aio
from tests.support.simulation.bucket import Bucket, Model
from tests.support.simulation.objects import Objects
from tests.support.simulation.world import Host, World

ROOT = 'http://127.0.0.1:9000'


def write(folder: pathlib.Path, shards: int = 16, records: int = 256, size: int = 4096) -> None:
    """Write a dataset of records of the same size."""
    with granular.ShardedDatasetWriter(folder, {'data': 'bytes'}, granular.encoders, shardlen=records) as writer:
        for number in range(shards * records):
            writer.append({'data': number.to_bytes(4, 'little') * (size // 4)}, flush=False)


def address(dataset: str, config: granular.IOConfig | None = None) -> granular.aio.Path:
    """Return the path of a dataset in the bucket ``bucket`` of the world."""
    options = {'endpoint_url': ROOT, 'anon': True}
    return aio.Path(f'gs://bucket/{dataset}', config=config or granular.IOConfig(), **options)


@dataclasses.dataclass
class Program:
    """A training program: it takes a batch, computes for some time, and takes the next one.

    Attributes:
      dataset: the dataset's name.
      batch: records in a batch.
      prefetch: batches read ahead.
      step: seconds of computation for a batch.
      config: the settings.
    """

    dataset: str
    batch: int = 64
    prefetch: int = 7
    step: float = 0.0
    config: granular.IOConfig = dataclasses.field(default_factory=lambda: granular.IOConfig(max_gap=0))

    async def run(self, host: Host, waits: list[float]) -> None:
        """Run on a host. The seconds that each batch took are appended to ``waits``."""
        reader = await aio.ShardedDatasetReader.open(address(self.dataset, self.config), granular.decoders)
        source = aio.sources.Epochs(reader, shuffle=True, seed=host.number)
        loader = aio.Loader(source, batch=self.batch, prefetch=self.prefetch)
        while True:
            began = host.time()
            await anext(loader)
            waits.append(host.time() - began)
            if self.step:
                await asyncio.sleep(self.step)


def indexed(folder: pathlib.Path) -> Objects:
    """Return the objects of a bucket, in which the dataset has an index."""
    objects, builder = Objects(folder), World()
    with builder.begun():
        Bucket(builder, objects, Model(rate=1e9))
        building = builder.host().start(aio.build_index(address('data')))
        while not building.done():
            builder.run(1)
    return objects


class Run:
    """Hosts that read one dataset.

    Args:
      folder: the bucket.
      count: hosts.
      model: the bucket.
      program: what the hosts run.
      seed: of all chance.
    """

    def __init__(self, folder: pathlib.Path, count: int, model: Model, program: Program, seed: int = 0) -> None:
        self.world = World(seed)
        self.bucket = Bucket(self.world, indexed(folder), model)
        self.count, self.program = count, program
        self.waits: list[list[float]] = []
        self.done: list[list[int]] = []  # requests that were answered well, of each host, at each second
        self.at: int = 0

    def start(self, host: Host) -> None:
        self.waits.append([])
        host.start(self.program.run(host, self.waits[-1]))

    def run(self, seconds: int, each: Callable[[int], None] | None = None) -> 'Run':
        """Start all hosts at once, and let time pass."""
        with self.world.begun():
            for _ in range(self.count):
                self.start(self.world.host())
            for number in range(seconds):
                self.world.run(1)
                self.done.append([host.done for host in self.world.hosts])
                self.at = number + 1
                if each is not None:
                    each(number + 1)
        return self

    def line(self, name: str) -> list[float]:
        """Return the counts of each second."""
        return [float(getattr(self.bucket.seconds[number], name)) for number in range(self.at)]

    def share(self, first: int, last: int) -> dict[str, float]:
        """Return the figures of some seconds, for all hosts that lived as long."""
        requests, done = (sum(self.line(name)[first:last]) for name in ('requests', 'done'))
        each = np.array(self.done[last - 1], float)
        each[: len(self.done[first - 1])] -= np.array(self.done[first - 1], float) if first else 0
        limit = self.bucket.model.rate * self.bucket.model.partitions
        return {
            'goodput / limit': done / (last - first) / limit,
            'wasted requests': 1 - done / max(1, requests),
            'Jain': each.sum() ** 2 / len(each) / max(1e-9, (each**2).sum()),
            'failed hosts': sum(host.error is not None for host in self.world.hosts),
        }

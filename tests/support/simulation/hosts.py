"""Programs of hosts: loaders over a dataset in the bucket, and what was measured of them."""

import asyncio
import dataclasses
import pathlib

import granular
from granular import aio
from tests.support.simulation.world import Host

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

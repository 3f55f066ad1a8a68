"""Requests of windows over episodes of a robot: of a batch, and of its windows one at a time."""

import pathlib
from typing import Any

import numpy as np

import granular
from benchmarks.bars import Bar, Result
from benchmarks.data import Data
from benchmarks.nginx import Server

EPISODES, STEPS, BATCH = 20, 1000, 64
WINDOWS = {'state': (-31, 1), 'action': 32, 'left': (-31, 1), 'right': (-31, 1)}
SPEC = {'state': 'array', 'action': 'array', 'left': 'jpg[]', 'right': 'jpg[]'}


def write(target: pathlib.Path) -> None:
    """Write episodes of two cameras, with images of about 15 kB."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 255, (32, 15, 20, 3), dtype=np.uint8).repeat(16, 1).repeat(16, 2)
    images = [granular.encoders['jpg'](image) for image in blocks]
    with granular.ShardedDatasetWriter(target, SPEC, shardlen=5) as writer:
        for _ in range(EPISODES):
            cameras = {key: [images[i] for i in rng.integers(0, len(images), STEPS)] for key in ('left', 'right')}
            writer.append(
                {key: rng.normal(size=(STEPS, 7)).astype(np.float32) for key in ('state', 'action')} | cameras
            )


def episodes(data: Data, server: Server) -> Result:
    """Measure the requests of batches of windows in the order of blocks and fully shuffled, 25 ms away."""
    target = data.once('episodes', write)
    bars = []
    config = granular.IOConfig(hedge=0)  # the requests of a busy machine are not sent twice
    path = granular.Path(f'{server.delayed}/{target.name}', config=config)
    with granular.open(path, {**granular.decoders, 'jpg': None}) as reader:  # without the time of decoding
        windows = granular.Windows(reader, WINDOWS)
        windows.fetch(range(0, len(windows), STEPS))  # reads the heads of the arrays
        for order, name, bound in (
            (granular.shuffle.Blocks(), 'shuffle.Blocks', 0.1),
            (granular.shuffle.Index(), 'fully shuffled', 1.0),
        ):
            dataset = granular.MapDataset.source(windows).shuffle(seed=0, order=order)
            batches = dataset.batch(BATCH, batch_fn=list)
            together = counted(lambda batches=batches: [batches[i] for i in range(2)])
            alone = counted(lambda dataset=dataset: [dataset[i] for i in range(2 * BATCH)])
            figures = f'{together / 2:.1f} requests for {BATCH} windows, {alone / 2:.0f} one at a time'
            bars.append(
                Bar(f'requests of a batch of windows / one at a time, {name}', together / alone, bound, figures, True)
            )
    return bars, []


def counted(read: Any) -> int:
    """Return how many requests a function sends."""
    before = granular.io_stats()['requests']
    read()
    return int(granular.io_stats()['requests'] - before)

"""Local data beside loaders that decode images, and Lance, which takes random rows: processor time of a record."""

import functools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import granular
from benchmarks.bars import Bar, Result
from benchmarks.data import Data
from benchmarks.nginx import Server
from benchmarks.remote import in_turns, ours, rival, table

BATCH = 32
TAKEN = 256


def local_rivals(data: Data, server: Server) -> Result:
    """Compare JPEG images of 500 by 375 with SPDL, datago and Megatron-Energon, and 256 random records with Lance."""
    images, files = _images(data)

    def write(target: pathlib.Path) -> None:
        rival(data, 'energon', 'energon', 'write', files=str(files), folder=str(target))

    tars = data.once('energon', write)
    job = {'batch': BATCH, 'batches': data.count(400)}
    decoding = _in_turns(
        data,
        'images of 500 by 375, decoded, batch 32, both cores',
        {
            'granular Loader': functools.partial(ours, data, 'decode', None, 'local_rivals', url=str(images), **job),
            **{
                who: functools.partial(rival, data, name, name, 'read', core=None, folder=str(folder), **job)
                for who, name, folder in (
                    ('SPDL', 'spdl', files),
                    ('datago', 'datago', files),
                    ('Megatron-Energon', 'energon', tars),
                )
            },
        },
    )
    job = {'count': data.count(10_000)}
    folder = data.once('lance', lambda target: rival(data, 'lance', 'lance', 'write', folder=str(target), **job))
    job = {'batch': TAKEN, 'batches': data.count(200)}
    taking = _in_turns(
        data,
        '256 random records of 100 kB from a local disk',
        {
            'granular fetch': functools.partial(
                ours, data, 'take', None, 'local_rivals', url=str(data.medium()), **job
            ),
            'Lance take': functools.partial(
                rival, data, 'lance', 'lance', 'read', core=None, folder=f'{folder}', **job
            ),
        },
    )
    bars = [
        Bar(f'CPU of a {what} / {who}', mine / theirs, 1.0, f'{mine:,.0f} us / {theirs:,.0f} us', at_most=True)
        for what, whose, (mine, *others) in (
            ('JPEG of 500 x 375 through the Loader', ('SPDL', 'datago', 'Megatron-Energon'), decoding.values()),
            ('random record of 100 kB, local disk', ('Lance',), taking.values()),
        )
        for who, theirs in zip(whose, others, strict=True)
    ]
    title = 'Processor time on local data, both cores'
    return bars, [table('local_rivals', title, 'us/record', decoding | taking)]


def _in_turns(data: Data, what: str, who: dict[str, Callable[[], dict[str, float]]]) -> dict[str, float]:
    runs = {f'{name}: {what}': lambda run=run: run()['cpu'] for name, run in who.items()}
    return in_turns(data.runs(), runs)


def _images(data: Data) -> tuple[pathlib.Path, pathlib.Path]:
    """Return 1,000 photographs of 500 by 375: a dataset, and the same as files."""
    from PIL import Image

    def write(target: pathlib.Path) -> None:
        rng = np.random.default_rng(0)
        target.mkdir()
        for i in range(data.count(1000)):
            small = rng.integers(0, 255, (24, 32, 3), np.uint8)
            Image.fromarray(small).resize((500, 375)).save(target / f'{i:06}.jpg', quality=90)

    files = data.once('photographs', write)

    def convert(target: pathlib.Path) -> None:
        with granular.DatasetWriter(target, {'image': 'jpg'}, granular.encoders) as writer:
            for file in sorted(files.glob('*.jpg')):
                writer.append({'image': file.read_bytes()}, flush=False)

    return data.once('photographs-dataset', convert), files


def _measured(take: Callable[[], Any], count: int, batches: int) -> dict[str, float]:
    """Measure the processor time of a record in microseconds."""
    for _ in range(10):
        take()
    used = time.process_time()
    for _ in range(batches):
        take()
    return {'cpu': (time.process_time() - used) / (batches * count) * 1e6}


def decode(job: dict[str, Any]) -> dict[str, float]:
    """Measure decoded batches of the Loader, in order, as SPDL reads its files."""
    reader = granular.DatasetReader(job['url'], granular.decoders)
    source = granular.sources.Epochs(reader, shuffle=False)
    with granular.Loader(source, job['batch']) as loader:
        shape = next(loader)['image'].shape
        if shape != (job['batch'], 375, 500, 3):
            raise RuntimeError(f'expected RGB images, got {shape}')
        return _measured(functools.partial(next, loader), job['batch'], job['batches'])


def take(job: dict[str, Any]) -> dict[str, float]:
    """Measure random records of 100 kB."""
    reader = granular.DatasetReader(job['url'], granular.decoders)
    rng = np.random.default_rng(1)

    def fetch() -> None:
        reader.fetch(rng.choice(len(reader), job['batch'], replace=False), mask=['data'])

    return _measured(fetch, job['batch'], job['batches'])

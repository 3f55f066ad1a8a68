"""Training loops of torch and JAX with real steps: how long an accelerator waits for data, and what its host computes.

Without a GPU, a step is a sleep, in which the interpreter is as free as while one waits for a GPU.
"""

import concurrent.futures
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil

import granular
from benchmarks.bars import Bar, Result, Table, medians
from benchmarks.data import Data, ranges_of
from benchmarks.nginx import Server
from benchmarks.remote import ours, rival
from benchmarks.rivals.ranges import Records
from benchmarks.rivals.steps import STEP, has_gpu, torch_step
from benchmarks.rivals.timing import train

BATCHES = {'image': 256, 'tokens': 8}
READERS = 8
PROCESSES = max(1, (os.cpu_count() or 1) // 4)
Job = Mapping[str, Any]


def accelerator(data: Data, server: Server) -> Result:
    """Measure the share of a step for which the loop waits for data, and the host's processor time of a step."""
    bars, rows, workers = [], [], os.cpu_count() or 1
    processes = 'a worker process' if PROCESSES == 1 else f'{PROCESSES} worker processes'
    for key, place in (('image', data.images(224, 224)), ('tokens', data.tokens())):
        job = {'url': f'{server.delayed}/{place.name}', 'key': key, 'steps': data.count(100)}
        # It takes seconds for a batch of images.
        plain = {'steps': data.count(20), 'workers': workers, 'ranges': ranges_of(place, 20_000, f'{key}.bag')}
        threads = {**plain, 'inflight': 64, 'batch': BATCHES[key]}
        for who, consumer, more in (
            ('granular, torch', 'torch', {}),
            (f'granular, torch, {processes}', 'torch', {'mp': True}),
            ('granular, JAX', 'jax', {}),
            (f'torch DataLoader, a request for each in {workers} workers', 'plain', plain),
            ('SPDL, a request for each in 64 threads', 'spdl', threads),
            ('Grain, a request for each in 64 threads', 'grain', threads),
        ):
            this, is_ours = {**job, **more, 'consumer': consumer}, consumer in ('torch', 'jax')
            if consumer in ('spdl', 'grain'):
                run = functools.partial(rival, data, consumer, consumer, 'train', core=None, **this)
            else:
                run = functools.partial(ours, data, 'loop', None, 'accelerator', **this)
            got = medians([run() for _ in range(data.runs(3 if is_ours else 1))])
            name, behind = f'{BATCHES[key]} {key}, {who}', described(got)
            rows.append((name, got['waits'], behind))
            if is_ours:
                bars.append(Bar(f'% of a step that waits for data, {name}', got['waits'], 1, behind, at_most=True))
    if workers > READERS:
        name, got = f'{READERS} processes, 256 image each, granular, torch', readers(data, server)
        rows.append((name, got['waits'], described(got)))
        bars.append(Bar(f'% of a step that waits for data, {name}', got['waits'], 1, described(got), at_most=True))
    return bars, [Table('accelerator', f'Steps of {device()}, 25 ms server: waiting for data', '%', rows)]


def device() -> str:
    """Return what computes the steps."""
    if not has_gpu():
        return f'{STEP * 1e3:.0f} ms'
    import torch

    return str(torch.cuda.get_device_name())


def described(got: Mapping[str, float]) -> str:
    """Describe the processor time and the duration of a step."""
    cpu, step, alone = (got[name] * 1e3 for name in ('cpu', 'step', 'alone'))
    return f'{cpu:.0f} ms of CPU a step; {step:.1f} ms, without data {alone:.1f}'


def readers(data: Data, server: Server) -> dict[str, float]:
    """Measure processes that each read, decode and transfer as many images as one GPU needs, in steps that sleep."""
    job = {'url': f'{server.delayed}/{data.images(224, 224).name}', 'key': 'image', 'steps': data.count(100)}
    run = functools.partial(ours, data, 'loop', None, 'accelerator', **job, consumer='torch', sleeps=True)
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        return medians([ended.result() for ended in [pool.submit(run) for _ in range(READERS)]])


def loop(job: Job) -> dict[str, float]:
    """Measure steps after the first tenth: the percentage that waits for data, and seconds of processor time."""
    batches, step = {'torch': begin_torch, 'plain': begin_plain, 'jax': begin_jax}[job['consumer']](job)
    return train(batches, step, job['steps'], cpu)


def cpu() -> float:
    """Return the processor time of this process and its children, in seconds."""
    this = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (this, *this.children(recursive=True)))


def loader(job: Job) -> granular.Loader:
    """Return a Loader over the endless, shuffled dataset."""
    reader = granular.DatasetReader(job['url'], granular.decoders)
    source = granular.MapDataset.source(reader).select([job['key']]).shuffle(seed=0).repeat()
    mp = 'spawn' if job.get('mp') else None
    return granular.Loader(source, BATCHES[job['key']], mp=mp, **({'workers': PROCESSES} if mp else {}))


def begin_torch(job: Job) -> tuple[Iterator[Any], Callable[[Any], None]]:
    """Return batches as tensors, on a GPU if there is one, and a step."""
    from granular.integrations.torch import Batches

    step = torch_step(job['key'], sleeps=job.get('sleeps', False))
    return iter(Batches(loader(job), 'cuda' if has_gpu() else None)), step


def begin_plain(job: Job) -> tuple[Iterator[Any], Callable[[Any], None]]:
    """Return the same from torch's DataLoader: a request for each record, and Pillow, in each of its workers."""
    import torch

    records: Any = Records(f'{job["url"]}/{job["key"]}.bag', job['ranges'], job['key'])
    device = 'cuda' if has_gpu() else 'cpu'
    batches = torch.utils.data.DataLoader(
        records, BATCHES[job['key']], num_workers=job['workers'], pin_memory=has_gpu()
    )
    step = torch_step(job['key'], sleeps=False)
    return ({job['key']: batch.to(device, non_blocking=True)} for batch in batches), step


def begin_jax(job: Job) -> tuple[Iterator[Any], Callable[[Any], None]]:
    """Return batches as arrays of JAX, and a step."""
    import jax
    from jax import numpy as jnp

    from granular.integrations.jax import Batches

    mesh = jax.sharding.Mesh(jax.devices(), ('data',))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
    key, weights = job['key'], jnp.ones((4096, 4096), jnp.bfloat16)

    @jax.jit
    def compute(value: Any) -> Any:
        rows = jnp.broadcast_to(value.reshape(len(value), -1)[:, :4096].astype(jnp.bfloat16), (len(value), 4096))
        return jax.lax.fori_loop(0, 4000, lambda _, x: jnp.tanh(x @ weights), rows).sum()

    def step(batch: Any) -> None:
        if jax.default_backend() == 'cpu':
            time.sleep(STEP)
        else:
            compute(batch[key]).block_until_ready()

    return iter(Batches(loader(job), sharding)), step

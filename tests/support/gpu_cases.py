"""Transfers to a GPU: ``python -m tests.support.gpu_cases`` compares each batch there with what the Loader returned.

The consumer enqueues its work and drops each batch at once, so memory that is used again too early gives other sums.
"""

import itertools

import jax
import numpy as np
import torch
from jax import numpy as jnp

import granular
import granular.integrations.jax
from granular.integrations.torch import Batches

COUNT, BATCH = 400, 16
LOADERS = {
    'threads': {},
    'threads, memory used again': {'recycle_after': True},
    'a worker process': {'mp': 'spawn', 'workers': 1},
}


def datapoint(i):
    return {'i': i, 'bytes': np.full((256, 256), i % 251, np.uint8), 'floats': np.random.default_rng(i).random(5000)}


def loader(**options):
    return granular.Loader(granular.MapDataset.range(COUNT * BATCH).map(datapoint).shuffle(seed=1), BATCH, **options)


def sums(batch):
    return [float(batch[key].sum()) for key in ('i', 'bytes', 'floats')]


def check(name, found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-9, err_msg=name)
    print(f'{len(found)} batches as they should be: {name}', flush=True)


def torch_sums(batches, weights):
    totals = []
    for batch in itertools.islice(batches, COUNT):
        weights @ weights  # the GPU is behind its host
        totals.append(torch.stack([batch[key].sum().double() for key in ('i', 'bytes', 'floats')]))
        del batch
    return torch.stack(totals).cpu().numpy()


def jax_sums(batches, weights):
    totals = []
    for batch in itertools.islice(batches, COUNT):
        weights @ weights
        totals.append(jnp.stack([batch[key].sum(dtype=float) for key in ('i', 'bytes', 'floats')]))
        del batch
    return np.asarray(jnp.stack(totals))


def main():
    with loader() as batches:
        expected = [sums(batch) for batch in itertools.islice(batches, COUNT)]
    weights = torch.ones(4096, 4096, device='cuda')
    for (name, options), buffer in itertools.product(LOADERS.items(), (0, 1, 3)):
        if buffer < 2 or 'recycle_after' not in options:
            with Batches(loader(**options), 'cuda', buffer) as batches:
                check(f'torch, {name}, buffer {buffer}', torch_sums(batches, weights), expected)
    del weights
    torch.cuda.empty_cache()
    with Batches(loader(), 'cuda') as batches:
        state = [next(batches) and batches.state_dict() for _ in range(5)][2]
        batches.load_state_dict(state)
        rest = [sums(batch) for batch in itertools.islice(batches, 20)]
        check('torch, a state', rest, expected[3:23])
    jax.config.update('jax_enable_x64', True)
    weights, devices = jnp.ones((4096, 4096)), jax.devices()
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, ('data',)), jax.sharding.PartitionSpec('data'))
    for name in ('threads', 'a worker process'):
        with granular.integrations.jax.Batches(loader(**LOADERS[name]), sharding) as batches:
            check(f'JAX on {devices[0].platform}, {name}', jax_sums(batches, weights), expected)
    stream = granular.MapDataset.range(COUNT * BATCH).map(datapoint).batch(BATCH).to_iter_dataset()
    expected = [sums(batch) for batch in stream]
    with iter(granular.integrations.jax.device_put(stream, devices[0])) as batches:
        check(f'device_put on {devices[0].platform}', jax_sums(batches, weights), expected)


if __name__ == '__main__':
    main()

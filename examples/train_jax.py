"""Train a small CNN on digits that stream from S3, with JAX, over all devices.

Each batch is one global array over the devices. The next batch is transferred while the current one is used.
"""

import argparse

import jax
import numpy as np
from digits import bucket, prepare
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import granular
from granular.grain.sharding import ShardByJaxProcess
from granular.integrations.jax import Batches

SHAPES = {'first': (3, 3, 1, 16), 'second': (3, 3, 16, 32), 'last': (512, 10)}


def init(seed: int) -> dict[str, np.ndarray]:
    """Draw random weights."""
    rng = np.random.default_rng(seed)
    scales = {name: (2 / np.prod(shape[:-1])) ** 0.5 for name, shape in SHAPES.items()}
    return {name: rng.normal(0, scales[name], shape).astype(np.float32) for name, shape in SHAPES.items()}


def scores(params: dict[str, jax.Array], image: jax.Array) -> jax.Array:
    """Return the scores of ten digits for images of shape (batch, 1, 8, 8)."""
    x = image.reshape(-1, 8, 8, 1)
    for name in ('first', 'second'):
        x = jax.lax.conv_general_dilated(x, params[name], (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC'))
        x = jax.nn.relu(x)
    x = x.reshape(-1, 4, 2, 4, 2, 32).max((2, 4))
    return x.reshape(-1, 512) @ params['last']


def loss_of(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """Return the cross entropy."""
    logits = jax.nn.log_softmax(scores(params, batch['image']))
    return -(logits * jax.nn.one_hot(batch['label'], 10)).sum(1).mean()


@jax.jit
def step(params, momentum, batch):
    """Take a step of gradient descent with momentum."""
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.03 * m, params, momentum), momentum, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        '--url', help='a folder for the digits in any store (default: an S3 server that this program starts)'
    )
    parser.add_argument('--epochs', type=int, default=3)
    args = parser.parse_args()
    mesh = Mesh(jax.devices(), ('data',))
    sharding = NamedSharding(mesh, PartitionSpec('data'))
    shard = ShardByJaxProcess()
    params = jax.device_put(init(0), NamedSharding(mesh, PartitionSpec()))
    momentum = jax.tree.map(jax.numpy.zeros_like, params)
    with bucket(args.url) as path, granular.DatasetReader(path / 'train', granular.decoders) as reader:
        source = granular.MapDataset.source(reader).map(prepare).shuffle(seed=0).repeat(args.epochs)
        loader = granular.Loader(source, 64, shard_id=shard.shard_index, num_shards=shard.shard_count)
        with Batches(loader, sharding) as batches:
            for number, batch in enumerate(batches):
                params, momentum, loss = step(params, momentum, batch)
                if number % 50 == 0:
                    print(f'step {number}: loss {loss:.3f} on {len(mesh.devices)} devices')
        with granular.DatasetReader(path / 'test', granular.decoders) as reader:
            test = granular.MapDataset.source(reader).map(prepare).batch(len(reader))[0]
        correct = scores(params, test['image']).argmax(1) == test['label']
        print(f'accuracy on the test set: {correct.mean():.3f}')


if __name__ == '__main__':
    main()

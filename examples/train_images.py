"""Train a small CNN on a folder of images, and continue exactly after a kill, on one rank or several.

    python examples/train_images.py --images s3://bucket/photos --out s3://bucket/run
    torchrun --nproc-per-node=2 examples/train_images.py

The images, in a folder per class, are converted once. Started again, after a kill at any time, the program continues
from its checkpoint, with any number of ranks that divides the batch: the ranks share each batch.
"""

import argparse
import functools
import io
import os

import numpy as np
import torch
import torch.distributed as group
from digits import write_images
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import granular
from granular.integrations.torch import Batches

SIZE, BATCH, EVERY = (
    8,
    32,
    10,
)  # pixels; images of a step, over all ranks; steps between two checkpoints


def crop(datapoint: dict, rng: np.random.Generator) -> dict:
    """Cut a random square out of an image, as floats of shape (3, SIZE, SIZE)."""
    image = datapoint['image']
    y, x = (rng.integers(0, size - SIZE + 1) for size in image.shape[:2])
    square = image[y : y + SIZE, x : x + SIZE].transpose(2, 0, 1)
    return {'image': square.astype(np.float32) / 255, 'label': datapoint['label']}


def cnn(classes: int) -> nn.Module:
    """Build a model from squares to the scores of classes."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * SIZE * SIZE, classes),
    )  # fmt: skip


def train(data: granular.Path, checkpoint: granular.Path, epochs: int, rank: int, ranks: int) -> None:
    """Train from the checkpoint on, if there is one."""
    device = torch.device('cuda', int(os.environ.get('LOCAL_RANK', '0'))) if torch.cuda.is_available() else 'cpu'
    rgb = functools.partial(granular.formats.decode_image, mode='RGB')  # gray images and those with alpha, too
    reader = granular.open(data, {**granular.decoders, 'jpg': rgb, 'png': rgb})
    classes = 1 + max(datapoint['label'] for datapoint in reader.fetch(range(len(reader)), ('label',)))
    torch.manual_seed(0)
    model = cnn(classes).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    dataset = granular.MapDataset.source(reader).select(['image', 'label']).seed(0).shuffle().repeat()
    loader = granular.Loader(dataset.random_map(crop), BATCH // ranks, shard_id=rank, num_shards=ranks)
    with reader, Batches(loader, device) as batches:
        first, last = 0, epochs * len(reader) // BATCH
        if checkpoint.exists():
            saved = torch.load(io.BytesIO(checkpoint.read_bytes()), device)
            model.load_state_dict(saved['model'])
            optimizer.load_state_dict(saved['optimizer'])
            batches.load_state_dict(saved['data'])
            first = saved['step']
        parallel = DistributedDataParallel(model) if ranks > 1 else model
        for step, batch in zip(range(first + 1, last + 1), batches, strict=False):
            torch.manual_seed(step * ranks + rank)  # of dropout, which then does not depend on earlier steps
            loss = nn.functional.cross_entropy(parallel(batch['image']), batch['label'])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0:
                print(f'process {os.getpid()}, step {step}: loss {loss.item()}', flush=True)
            if rank == 0 and step % EVERY == 0:
                file, state = io.BytesIO(), {'step': step, 'data': batches.state_dict()}
                torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict(), **state}, file)
                checkpoint.write_bytes(file.getvalue())  # one file, replaced as a whole, for all ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--images', help='images in a folder per class (default: digits, written to OUT/images)')
    parser.add_argument('--out', default='train_images', help='a folder for the dataset and the checkpoint')
    parser.add_argument('--epochs', type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)  # more only slow down a model this small
    rank, ranks = int(os.environ.get('RANK', '0')), int(os.environ.get('WORLD_SIZE', '1'))  # set by torchrun
    out = granular.Path(args.out)
    if ranks > 1:
        group.init_process_group('nccl' if torch.cuda.is_available() else 'gloo')
    if rank == 0:
        granular.convert(args.images or write_images(out / 'images'), out / 'data', shardlen=500)
    if ranks > 1:
        group.barrier()
    train(out / 'data', out / 'checkpoint', args.epochs, rank, ranks)
    if ranks > 1:
        group.destroy_process_group()


if __name__ == '__main__':
    main()

"""Train a small CNN on digits from S3 in several processes (DistributedDataParallel, gloo), each with its own shard.

The processes share the batches of one shuffled order, and take equally many steps.
"""

import argparse
import multiprocessing
import pathlib
import tempfile

import torch
import torch.distributed as group
from digits import bucket
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from train_torch import accuracy, cnn, dataset

import granular
from granular.integrations.torch import IterableDataset


def train(rank: int, processes: int, rendezvous: str, path: granular.Path, epochs: int) -> None:
    """Train in one process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    group.init_process_group('gloo', init_method=rendezvous, rank=rank, world_size=processes)
    batches = dataset(path / 'train').map_with_index(numbered).shuffle(seed=0).batch(32)
    part = IterableDataset(batches, granular.ShardByTorchRank(drop_remainder=True))
    model = DistributedDataParallel(cnn())
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for epoch in range(epochs):
        part.set_epoch(epoch)
        indices: list[int] = []
        for batch in DataLoader(part, batch_size=None):
            loss = nn.functional.cross_entropy(model(batch['image']), batch['label'].long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            indices += batch['index'].tolist()
        gathered: list = [None] * processes
        group.all_gather_object(gathered, indices)
        if rank == 0:
            different = len({index for part in gathered for index in part})
            counts = ' + '.join(str(len(part)) for part in gathered)
            print(f'epoch {epoch}: {counts} digits, {different} different ones')
    if rank == 0:
        print(f'accuracy on the test set: {accuracy(model.module, path / "test"):.3f}')
    group.destroy_process_group()


def numbered(index: int, datapoint: dict) -> dict:
    """Add the index to a datapoint."""
    return {**datapoint, 'index': index}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        '--url', help='a folder for the digits in any store (default: an S3 server that this program starts)'
    )
    parser.add_argument('--epochs', type=int, default=3)
    parser.add_argument('--processes', type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, bucket(args.url) as path:
        rendezvous = (pathlib.Path(folder) / 'meeting').as_uri()
        job = args.processes, rendezvous, path, args.epochs
        context = multiprocessing.get_context('spawn')
        workers = [context.Process(target=train, args=(rank, *job), daemon=True) for rank in range(1, args.processes)]
        for process in workers:
            process.start()
        train(0, *job)
        for process in workers:
            process.join()


if __name__ == '__main__':
    main()

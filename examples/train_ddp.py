"""Train a small CNN on digits from S3 in several processes (DistributedDataParallel, gloo), each with its own part.

Each process gets other batches of the one shuffled order, and all of them take as many steps.
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


def train(rank: int, processes: int, meeting: str, place: granular.Path, epochs: int) -> None:
    """What one process does."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    group.init_process_group('gloo', init_method=meeting, rank=rank, world_size=processes)
    batches = dataset(place / 'train').map_with_index(numbered).shuffle(seed=0).batch(32)
    part = IterableDataset(batches, granular.ShardByTorchRank(drop_remainder=True))
    model = DistributedDataParallel(cnn())
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for epoch in range(epochs):
        part.set_epoch(epoch)
        seen: list[int] = []
        for batch in DataLoader(part, batch_size=None):
            loss = nn.functional.cross_entropy(model(batch['image']), batch['label'].long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += batch['index'].tolist()
        parts: list = [None] * processes
        group.all_gather_object(parts, seen)
        if rank == 0:
            different = len({index for seen in parts for index in seen})
            print(f'epoch {epoch}: {" + ".join(str(len(seen)) for seen in parts)} digits, {different} different ones')
    if rank == 0:
        print(f'accuracy on the test set: {accuracy(model.module, place / "test"):.3f}')
    group.destroy_process_group()


def numbered(index: int, point: dict) -> dict:
    """A datapoint and its index."""
    return {**point, 'index': index}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--url', help='a folder for the digits in any store (by default an S3 server that starts here)')
    parser.add_argument('--epochs', type=int, default=3)
    parser.add_argument('--processes', type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, bucket(args.url) as place:
        meeting = (pathlib.Path(folder) / 'meeting').as_uri()
        job = args.processes, meeting, place, args.epochs
        context = multiprocessing.get_context('spawn')
        others = [context.Process(target=train, args=(rank, *job), daemon=True) for rank in range(1, args.processes)]
        for process in others:
            process.start()
        train(0, *job)
        for process in others:
            process.join()


if __name__ == '__main__':
    main()

"""Train a small CNN on digits that stream from S3, with PyTorch's own DataLoader.

The loader asks the dataset for each batch at once (``__getitems__``), which is one fan-out to the bucket.
"""

import argparse

import torch
from digits import bucket, prepare
from torch import nn
from torch.utils.data import DataLoader

import granular


def cnn() -> nn.Module:
    """Build a model from images of 8 by 8 to the scores of ten digits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def dataset(path: granular.Path) -> granular.MapDataset:
    """Open the datapoints of a folder, prepared for a model."""
    reader = granular.DatasetReader(path, granular.decoders, cache_keys=('refs', 'label'))
    return granular.MapDataset.source(reader).map(prepare)


def accuracy(model: nn.Module, path: granular.Path) -> float:
    """Return the share of correctly classified digits of a dataset."""
    test = dataset(path)
    batch = next(iter(DataLoader(test, batch_size=len(test))))
    with torch.no_grad():
        return (model(batch['image']).argmax(1) == batch['label']).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        '--url', help='a folder for the digits in any store (default: an S3 server that this program starts)'
    )
    parser.add_argument('--epochs', type=int, default=3)
    parser.add_argument('--workers', type=int, default=0, help="processes of PyTorch's loader")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more only slow down a model this small
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    model = cnn().to(device)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    with bucket(args.url) as path:
        loader = DataLoader(
            dataset(path / 'train'), batch_size=64, shuffle=True, num_workers=args.workers, pin_memory=device == 'cuda'
        )
        for epoch in range(args.epochs):
            for batch in loader:
                image, label = batch['image'].to(device), batch['label'].to(device)
                loss = nn.functional.cross_entropy(model(image), label.long())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f'epoch {epoch}: loss {loss.item():.3f}, {granular.io_stats()["requests"]:,} requests so far')
        print(f'accuracy on the test set: {accuracy(model.cpu(), path / "test"):.3f}')


if __name__ == '__main__':
    main()

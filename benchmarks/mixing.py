"""Mixing of shuffled orders: distances of adjacent records, and labels per batch of a sorted dataset."""

import numpy as np
from numpy.typing import NDArray

from benchmarks.bars import Bar, Curves, Result, Table
from benchmarks.data import Data
from benchmarks.nginx import Server
from benchmarks.remote import rival
from granular import shuffle

COUNT, SHARD, LABELS, BATCH = 200_000, 2000, 100, 256
QUANTILES = (1, 5, 25, 50, 75, 95, 99)


def mixing(data: Data, server: Server) -> Result:
    """Compare our orders with those of mosaicml-streaming and webdataset, over 200,000 records sorted by 100 labels."""
    positions = np.arange(COUNT)
    default, unsized = (shuffle.Blocks().sized(nbytes) for nbytes in (4000, None))
    ours = {
        'numpy permutation (Epochs)': shuffle.Permutation(),
        'shuffle.Index (MapDataset)': shuffle.Index(),
        f'shuffle.Blocks({default.block}, {default.window}), the default for 4 kB': default,
        f'shuffle.Blocks({unsized.block}, {unsized.window}), the default for unknown sizes': unsized,
        'shuffle.Blocks(64, 128)': shuffle.Blocks(64, 128),
        'shuffle.Blocks(16, 128)': shuffle.Blocks(16, 128),
    }
    orders = {name: order.lookup(positions, COUNT, 1, 0) for name, order in ours.items()}
    for name, package in (('mosaicml-streaming', 'streaming'), ('webdataset', 'webdataset')):
        found = rival(data, package, 'mixing', package, core=None, count=COUNT, shard=SHARD)
        orders |= {f'{name} {how}': np.array(order) for how, order in found.items()}
    labels = {name: _labels(order) for name, order in orders.items()}
    near = {name: float((np.abs(np.diff(order)) < SHARD).mean()) for name, order in orders.items()}
    rows = [
        (name, labels[name], f'{near[name]:.1%} of neighbours are less than a shard of {SHARD:,} apart')
        for name in orders
    ]
    lines = {name: np.percentile(np.abs(np.diff(order)) / COUNT, QUANTILES).tolist() for name, order in orders.items()}
    title = f'Labels in a batch of {BATCH}, of {LABELS} of a sorted dataset'
    return [bar for which in (default, unsized) for bar in _bars(which)], [
        Table('mixing', title, 'labels', sorted(rows, key=lambda row: -row[1])),
        Curves(
            'distances',
            'Distance of neighbours in an epoch',
            'as a share of the length',
            'percentile',
            [f'{q} %' for q in QUANTILES],
            lines,
        ),
    ]


def _labels(order: NDArray[np.int64]) -> float:
    """Return the mean number of labels in a batch."""
    labels = order[: COUNT // BATCH * BATCH].reshape(-1, BATCH) * LABELS // COUNT
    return float(np.mean([len(np.unique(batch)) for batch in labels]))


def _bars(blocks: shuffle.Blocks) -> list[Bar]:
    """Compare an order with numpy's permutations, over several epochs of both."""
    positions, epochs = np.arange(COUNT), range(4)
    orders = [blocks.lookup(positions, COUNT, 1, epoch) for epoch in epochs]
    permutations = [shuffle.Permutation().lookup(positions, COUNT, 1, epoch) for epoch in epochs]
    got, uniform = (float(np.mean([_labels(order) for order in each])) for each in (orders, permutations))
    ours, expected = (
        np.mean([np.percentile(np.abs(np.diff(order)), QUANTILES) for order in each], axis=0)
        for each in (orders, permutations)
    )
    apart = float(np.abs(ours / expected - 1).max())
    name = f'shuffle.Blocks({blocks.block}, {blocks.window})'
    bound = 0.99 if blocks.window >= 512 else 0.97
    return [
        Bar(f'labels in a batch, {name} / uniform', got / uniform, bound, f'{got:.2f} / {uniform:.2f}'),
        Bar(f'distance of neighbours, {name}, largest deviation', apart, 0.05, 'of 7 quantiles', at_most=True),
    ]

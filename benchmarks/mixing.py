"""Mixing of shuffled orders: distances of adjacent records, and labels per batch of a sorted dataset."""

import numpy as np

from benchmarks.bars import Curves, Result, Table
from benchmarks.data import Data
from benchmarks.nginx import Server
from benchmarks.remote import rival
from granular import shuffle

COUNT, SHARD, LABELS, BATCH = 200_000, 2000, 100, 256
QUANTILES = (1, 5, 25, 50, 75, 95, 99)


def mixing(data: Data, server: Server) -> Result:
    """Compare our orders with those of mosaicml-streaming and webdataset, over 200,000 records sorted by 100 labels."""
    places = np.arange(COUNT)
    ours = {
        'numpy permutation (Epochs)': shuffle.Permutation(),
        'shuffle.Index (MapDataset)': shuffle.Index(),
        'shuffle.Blocks(64, 128), the default': shuffle.Blocks(),
        'shuffle.Blocks(64, 512)': shuffle.Blocks(64, 512),
        'shuffle.Blocks(16, 128)': shuffle.Blocks(16, 128),
    }
    orders = {name: order.lookup(places, COUNT, 1, 0) for name, order in ours.items()}
    for name, package in (('mosaicml-streaming', 'streaming'), ('webdataset', 'webdataset')):
        found = rival(data, package, 'mixing', package, core=None, count=COUNT, shard=SHARD)
        orders |= {f'{name} {how}': np.array(order) for how, order in found.items()}
    rows, lines = [], {}
    for name, order in orders.items():
        labels = order[: COUNT // BATCH * BATCH].reshape(-1, BATCH) * LABELS // COUNT
        distinct = float(np.mean([len(np.unique(batch)) for batch in labels]))
        near = float((np.abs(np.diff(order)) < SHARD).mean())
        rows.append((name, distinct, f'{near:.1%} of neighbours are less than a shard of {SHARD:,} apart'))
        lines[name] = np.percentile(np.abs(np.diff(order)) / COUNT, QUANTILES).tolist()
    title = f'Labels in a batch of {BATCH}, of {LABELS} of a sorted dataset'
    return [], [
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

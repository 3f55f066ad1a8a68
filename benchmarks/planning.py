"""Plans of rows and batches: padding, companions of documents, time and memory."""

import time
import tracemalloc
from collections.abc import Sequence
from typing import Any

import numpy as np

import granular
from benchmarks.bars import Bar, Result
from benchmarks.data import Data
from benchmarks.nginx import Server
from granular._support.indexing import Ints

MANY, DOCUMENTS, EPOCHS, ROW = 10_000_000, 100_000, 20, 2048


class Sized(granular.DataSource):
    """Documents of some sizes, made when they are read."""

    def __init__(self, sizes: Ints) -> None:
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def sizes(self, key: str) -> Ints:
        """Return the sizes."""
        return self._sizes

    def fetch(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return documents whose values are their indices."""
        return [{'tokens': np.full(self._sizes[i], i, np.int32)} for i in indices]


def lognormal(count: int, median: float, sigma: float, most: int) -> Ints:
    """Return sizes whose logarithms are normal."""
    sizes: Ints = np.random.default_rng(0).lognormal(np.log(median), sigma, count).astype(np.int64).clip(1, most)
    return sizes


def documents(sizes: Ints) -> granular.MapDataset[Any]:
    """Return shuffled documents."""
    return granular.MapDataset.source(Sized(sizes)).shuffle(seed=1)


def planning(data: Data, server: Server) -> Result:
    """Measure plans of 10 million documents, and rows and batches of 100,000."""
    bars = []
    many = documents(lognormal(MANY, 600, 1.1, 8192))
    for strategy in ('best_fit', 'concat_then_split'):
        began = time.process_time()
        many.pack({'tokens': 8192}, strategy=strategy)[0]
        bars.append(Bar(f'plan of 10 million documents, {strategy}, s', time.process_time() - began, 5, '', True))
        tracemalloc.start()
        many.pack({'tokens': 8192}, strategy=strategy)[0]
        peak = tracemalloc.get_traced_memory()[1] / MANY
        tracemalloc.stop()
        bars.append(Bar(f'bytes a document, {strategy}', peak, 40, '', True))
    for name, sizes in {
        'lognormal(600, 1.1)': lognormal(DOCUMENTS, 600, 1.1, ROW),
        'lognormal(800, 0.6)': lognormal(DOCUMENTS, 800, 0.6, ROW),
        'Zipf': np.random.default_rng(0).zipf(1.5, DOCUMENTS).clip(1, ROW),
    }.items():
        padding = 1 - sizes.sum() / ROW / len(documents(sizes).pack({'tokens': ROW}))
        bars.append(Bar(f'padding of whole documents, {name}, %', 100 * padding, 1, '', True))
        batches = documents(sizes).batch_by_size('tokens', 1 << 16, buckets=64)
        tops = np.array([top for _, top in batches.shapes])
        padded = int(tops[np.searchsorted(tops, sizes)].sum())
        bars.append(Bar(f'padding in 64 buckets, {name}, %', 100 * (1 - sizes.sum() / padded), 4.5, '', True))
    bars.append(Bar('companions of a document / of a free shuffle', _companions(), 0.8))
    bars.append(Bar("CPU of a planned row / of the stream's pack", _cpu(), 0.5, '', True))
    return bars, []


def _companions() -> float:
    """Return how many of the pairs of documents that meet in rows meet once in all epochs."""
    rows = documents(lognormal(DOCUMENTS, 600, 1.1, ROW)).pack({'tokens': ROW})
    met = []
    for epoch in range(EPOCHS):
        for start in range(0, len(rows), 1000):
            for row in rows.fetch(np.arange(start, min(start + 1000, len(rows))) + epoch * len(rows)):
                own = np.unique(row['tokens'][row['tokens_segment_ids'] > 0])
                first, second = np.triu_indices(len(own), 1)
                met.append(own[first].astype(np.int64) * DOCUMENTS + own[second])
    pairs = np.concatenate(met)
    return len(np.unique(pairs)) / len(pairs)


def _cpu() -> float:
    docs = documents(lognormal(20_000, 600, 1.1, ROW))
    seconds = []
    for rows in (docs.to_iter_dataset().pack({'tokens': ROW}, strategy='best_fit'), docs.pack({'tokens': ROW})):
        began, count = time.process_time(), sum(1 for _ in rows)
        seconds.append((time.process_time() - began) / count)
    return seconds[1] / seconds[0]

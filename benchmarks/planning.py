"""Plans of rows and batches: padding, companions of documents, time and memory."""

import pathlib
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import granular
from benchmarks.bars import Bar, Result, ratio
from benchmarks.clients import Job, open_reader
from benchmarks.data import Data
from benchmarks.nginx import Server
from benchmarks.remote import in_turns, ours, rival
from granular._support.indexing import Ints

MANY, DOCUMENTS, EPOCHS, ROW = 10_000_000, 100_000, 20, 2048
ALIGN = 64


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
    bars.append(Bar("cost of a step's dearest rank / mean, aligned", _dearest(), 1.05, '1, 2, 8 and 64 ranks', True))
    return bars, []


def padding(data: Data, server: Server) -> Result:
    """Compare the padding with that of others for the same sizes."""
    bars = []
    for name, sizes in {
        'texts': lognormal(data.count(200_000), 600, 1.1, 8192),
        'clips': lognormal(data.count(200_000), 8 * 16_000, 0.6, 30 * 16_000),
    }.items():
        job = {'sizes': sizes.tolist(), 'budget': 16 * int(sizes.max()), 'buckets': 8, 'length': 8192}
        own = documents(sizes).batch_by_size('tokens', job['budget'], buckets=8)
        tops = np.array([top for _, top in own.shapes])
        own_padding = 1 - int(sizes.sum()) / int(tops[np.searchsorted(tops, sizes)].sum())
        for rival_name in ('torch', 'lhotse'):
            theirs = rival(data, 'lhotse', 'padding', rival_name, core=None, **job)['padding']
            behind = f'{own_padding:.1%} / {theirs:.1%}'
            bars.append(Bar(f'padding of {name} in 8 buckets / {rival_name}', own_padding / theirs, 1.1, behind, True))
        if name == 'texts':
            own_padding = 1 - int(sizes.sum()) / 8192 / len(documents(sizes).pack({'tokens': 8192}))
            theirs = rival(data, 'grain', 'padding', 'grain', core=None, **job)['padding']
            bars.append(
                Bar('padding of rows / Grain', own_padding / theirs, 0.5, f'{own_padding:.2%} / {theirs:.2%}', True)
            )
    return bars, []


def tokens(data: Data, server: Server) -> Result:
    """Compare planned rows of documents of 1,000 tokens and more with batches of them, over the 25 ms server."""

    def write(target: pathlib.Path) -> None:
        sizes = lognormal(data.count(50_000), 2000, 0.6, 8192).clip(1000)
        with granular.DatasetWriter(target, {'tokens': 'array'}, granular.encoders, layout='columns') as writer:
            for i, size in enumerate(sizes.tolist()):
                writer.append({'tokens': np.full(size, i, np.uint32)}, flush=False)

    place = data.once('documents', write)
    job = {'url': f'{server.delayed}/{place.name}', 'batches': data.count(600), 'cache_keys': []}
    rate = in_turns(
        data.runs(3),
        {what: lambda what=what: ours(data, what, module='planning', **job)['rate'] for what in ('rows', 'batches')},
    )
    return [
        ratio('tokens of planned rows / of batches, 25 ms server', rate['rows'], rate['batches'], 0.9),
        Bar('tokens of planned rows, millions a second, 25 ms server', rate['rows'] / 1e6, 5),
    ], []


def rows(job: Job) -> dict[str, float]:
    """Measure the tokens per second of planned rows."""
    reader = open_reader(job)
    planned = granular.MapDataset.source(reader).shuffle(seed=1).pack({'tokens': 8192}).repeat().batch(8)
    return _rate(planned, job['batches'], lambda batch: int((batch['tokens_segment_ids'] > 0).sum()))


def batches(job: Job) -> dict[str, float]:
    """Measure the tokens per second of batches of as many documents as eight rows have."""
    reader = open_reader(job)
    each = round(8 * 8192 / float(np.mean(reader.sizes('tokens'))))
    plain = granular.MapDataset.source(reader).shuffle(seed=1).repeat().batch(each, batch_fn=list)
    return _rate(plain, job['batches'], lambda batch: sum(len(element['tokens']) for element in batch))


def _rate(dataset: granular.MapDataset[Any], count: int, tokens_of: Callable[[Any], int]) -> dict[str, float]:
    iterator, found = iter(dataset), 0
    for _ in range(20):
        next(iterator)
    began = time.perf_counter()
    for _ in range(count):
        found += tokens_of(next(iterator))
    return {'rate': found / (time.perf_counter() - began)}


def _dearest() -> float:
    """Return the largest ratio of the cost of a step's dearest rank to the mean, of attention over padded elements."""
    docs = documents(lognormal(20_000, 600, 1.1, ROW))
    plan = docs.batch_by_size('tokens', ROW**2, cost=lambda elements, top: elements * top**2, align=ALIGN)
    shapes = [batch['tokens'].shape for batch in plan]
    costs = np.array([elements * top**2 for elements, top in shapes], np.float64)
    return max(
        float((each.max(axis=1) / each.mean(axis=1)).max())
        for each in (costs.reshape(-1, ranks) for ranks in (1, 2, 8, 64))
    )


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

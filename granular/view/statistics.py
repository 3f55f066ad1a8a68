"""Histograms of sizes and numbers, from a sample of the datapoints."""

import collections
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from granular.aio.runtime.threads import offload
from granular.formats import decoders
from granular.formats.layout import is_sequence
from granular.indexing import Ints
from granular.view.kinds import family_of
from granular.view.sources import Located, Source

SAMPLE: Final = 2048
"""Datapoints of a sample."""

_RUN: Final = 32  # neighbours, whose limits are read in one request
_BINS: Final = 24
_FEW: Final = 16  # different numbers that are counted each
_SMALL: Final = 16  # bytes of a number


def sample(length: int, seed: int = 0) -> Ints:
    """Return ascending indices: all of a small dataset, else runs of neighbours, one from each part of the dataset."""
    if length <= SAMPLE:
        return np.arange(length)
    runs = SAMPLE // _RUN
    edges = np.linspace(0, length, runs + 1).astype(np.int64)
    spare = np.maximum(np.diff(edges) - _RUN, 0)
    starts = edges[:-1] + (np.random.default_rng(seed).random(runs) * (spare + 1)).astype(np.int64)
    return np.unique(starts[:, None] + np.arange(_RUN))


async def histograms(source: Source) -> dict[str, Any]:
    """Return histograms by key: of the sizes of values, of the lengths of sequences, and of numbers."""
    indices = sample(source.length)
    located = await source.locate(list(source.spec), indices.tolist(), head=_SMALL + 1)
    numbers = [
        (key, value)
        for key, rows in located.items()
        for row in rows
        for value in row.values
        if family_of(value.kind) == 'number'
    ]
    # A damaged number may be of any size.
    records = await source.read([(value, 0, min(value.size, _SMALL + 1)) for _, value in numbers])
    return await offload(_summarise, source.spec, located, numbers, records, len(indices), source.length)


def _summarise(
    spec: dict[str, str],
    located: dict[str, list[Located]],
    numbers: Sequence[tuple[str, Any]],
    records: Sequence[bytes],
    sampled: int,
    length: int,
) -> dict[str, Any]:
    decoded: dict[str, list[Any]] = {}
    damaged: collections.Counter[str] = collections.Counter()
    for (key, value), record in zip(numbers, records, strict=True):
        try:
            decoded.setdefault(key, []).append(decoders[value.kind](record))
        except Exception:  # a decoder may raise anything: the value counts as damaged
            damaged[key] += 1
    keys = []
    for key, rows in located.items():
        row: dict[str, Any] = {'key': key, 'charts': []}
        if is_sequence(spec[key]):
            row['charts'].append(_histogram('values per sequence', [located.length or 0 for located in rows]))
        if values := decoded.get(key):
            row['charts'].append(_histogram('values', values))
        else:
            sizes = [value.size for located in rows for value in located.values]
            row['charts'].append(_histogram('bytes', sizes))
        row['damaged'] = damaged[key]
        keys.append(row)
    return {'sampled': sampled, 'length': length, 'keys': keys}


def _histogram(title: str, values: Sequence[Any]) -> dict[str, Any]:
    """Return a histogram: a bar for each of a few values, else for each of equal intervals."""
    if not values:
        return {'title': title, 'bars': [], 'count': 0}
    counts = collections.Counter(values)
    if len(counts) <= _FEW:
        bars = [[str(value), str(value), count] for value, count in sorted(counts.items(), key=lambda item: item[0])]
        return {'title': title, 'bars': bars, 'count': len(values), 'exact': True}
    array = np.array([float(value) for value in values])
    finite = array[np.isfinite(array)]
    least, greatest = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    # The range is computed of halves, as that of two finite doubles may not be finite.
    width = greatest / 2 - least / 2
    if not width or not np.isfinite(least / width):
        bars = [[f'{least:.6g}', f'{greatest:.6g}', int(finite.size)]]
    else:
        positions = np.minimum(((finite / 2 - least / 2) / width * _BINS).astype(int), _BINS - 1)
        edges = least + (np.arange(_BINS + 1) / _BINS) * 2 * width
        heights = np.bincount(positions, minlength=_BINS)
        bars = [
            [f'{low:.6g}', f'{high:.6g}', int(height)]
            for low, high, height in zip(edges, edges[1:], heights, strict=False)
        ]
    out = {'title': title, 'bars': bars, 'count': len(values), 'mean': f'{finite.mean():.5g}' if finite.size else ''}
    if finite.size < array.size:
        out['strange'] = int(array.size - finite.size)
    return out

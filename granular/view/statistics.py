"""Histograms of sizes and numbers, from a sample of the datapoints."""

import collections
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from granular._support.indexing import Ints
from granular.aio.pipeline.planning import paddings
from granular.aio.runtime.threads import offload
from granular.formats import decoders
from granular.formats.layout import is_sequence
from granular.view.kinds import family_of
from granular.view.names import Names
from granular.view.sources import Located, Source, Value

SAMPLE: Final = 2048
"""Datapoints of a sample."""

_RUN: Final = 32  # neighbours, whose limits are read in one request
_BINS: Final = 24
_FEW: Final = 16  # different numbers that are counted each
_CLASSES: Final = 200  # different texts that are counted each
_SMALL: Final = 100  # bytes of a number, or of a text that may be a class


def sample(length: int, seed: int = 0) -> Ints:
    """Return ascending indices: all of a small dataset, else runs of neighbours, one from each part of the dataset."""
    if length <= SAMPLE:
        return np.arange(length)
    runs = SAMPLE // _RUN
    edges = np.linspace(0, length, runs + 1).astype(np.int64)
    spare = np.maximum(np.diff(edges) - _RUN, 0)
    starts = edges[:-1] + (np.random.default_rng(seed).random(runs) * (spare + 1)).astype(np.int64)
    return np.unique(starts[:, None] + np.arange(_RUN))


async def histograms(source: Source, names: Names) -> dict[str, Any]:
    """Return histograms by key: of the sizes of values, of the lengths of sequences, of numbers, and of classes."""
    indices = sample(source.length)
    located = await source.locate(list(source.spec), indices.tolist(), head=_SMALL + 1)
    small = [
        (key, value)
        for key, rows in located.items()
        for row in rows
        for value in row.values
        if family_of(value.kind) == 'number' or (family_of(value.kind) == 'text' and value.size <= _SMALL)
    ]
    # A damaged number may be of any size.
    records = await source.read([(value, 0, min(value.size, _SMALL + 1)) for _, value in small])
    return await offload(_summarise, source, names, located, small, records, len(indices))


def _summarise(
    source: Source,
    names: Names,
    located: dict[str, list[Located]],
    small: Sequence[tuple[str, Value]],
    records: Sequence[bytes],
    sampled: int,
) -> dict[str, Any]:
    decoded: dict[str, list[Any]] = {}
    damaged: collections.Counter[str] = collections.Counter()
    unclear: collections.Counter[str] = collections.Counter()
    for (key, value), record in zip(small, records, strict=True):
        try:
            decode = decoders['utf8' if family_of(value.kind) == 'text' else value.kind]
            decoded.setdefault(key, []).append(decode(record))
        except MemoryError:
            unclear[key] += 1
        except Exception:  # a decoder may raise anything: the value counts as damaged
            damaged[key] += 1
    keys = []
    for key, rows in located.items():
        charts = []
        first = 'first ' if is_sequence(source.spec[key]) else ''
        if first:
            charts.append(_of_sizes('values per sequence', [located.length or 0 for located in rows]))
        values, sizes = decoded.get(key, []), [value.size for located in rows for value in located.values]
        texts = sum(family_of(value.kind) == 'text' for located in rows for value in located.values)
        texts -= damaged[key] + unclear[key]
        if values and (_are_numbers(values) or _are_classes(values, texts)):
            charts.append(_histogram(f'{first}values', values, [names.name(key, value) for value in values]))
        else:
            charts.append(_of_sizes(f'bytes{first and " of first values"}', sizes))
        keys.append({'key': key, 'charts': charts, 'damaged': damaged[key]})
    return {'sampled': sampled, 'length': source.length, 'keys': keys}


def _are_numbers(values: Sequence[Any]) -> bool:
    return not any(isinstance(value, str) for value in values)


def _are_classes(values: Sequence[Any], total: int) -> bool:
    return len(values) == total and len(set(values)) <= min(_CLASSES, len(values) // 2)


def _of_sizes(title: str, sizes: Sequence[int]) -> dict[str, Any]:
    """Return a histogram of sizes, with the padding of plans of them."""
    parts = paddings(np.array(sizes, np.int64))
    return {**_histogram(title, sizes), 'padding': {plan: f'{part:.1%}' for plan, part in parts.items()}}


def _histogram(title: str, values: Sequence[Any], names: Sequence[str] = ()) -> dict[str, Any]:
    """Return a histogram: a bar for each of a few values or classes, else for each of equal intervals.

    A bar has two edges, as the text that a filter takes, a number of values, and the name of a class. Of the values,
    those from the first edge to below the second are in it; in the last bar also those at the second.
    """
    if not values:
        return {'title': title, 'bars': [], 'count': 0}
    counts = collections.Counter(zip(values, names or [''] * len(values), strict=True))
    if len(counts) <= _FEW or any(names) or not _are_numbers(values):
        ordered = sorted(counts.items(), key=lambda item: (isinstance(item[0][0], str), item[0][0]))
        bars = [[str(value), str(value), count, name] for (value, name), count in ordered]
        return {'title': title, 'bars': bars, 'count': len(values), 'exact': True}
    array = np.array([float(value) for value in values])
    finite = array[np.isfinite(array)]
    least, greatest = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    # The range is computed of halves, as that of two finite doubles may not be finite.
    width = greatest / 2 - least / 2
    if not width or not np.isfinite(least / width):
        edges = np.array([least, greatest])
    else:
        edges = least + (np.arange(_BINS + 1) / _BINS) * 2 * width
        edges[-1] = greatest
    # A filter for the edges of a bar finds as many values.
    positions = np.clip(np.searchsorted(edges, finite, 'right') - 1, 0, len(edges) - 2)
    heights = np.bincount(positions, minlength=len(edges) - 1)
    bars = [
        [_text(low), _text(high), int(height), '']
        for low, high, height in zip(edges[:-1], edges[1:], heights, strict=True)
    ]
    out = {'title': title, 'bars': bars, 'count': len(values), 'mean': f'{finite.mean():.5g}' if finite.size else ''}
    if finite.size < array.size:
        out['strange'] = int(array.size - finite.size)
    return out


def _text(edge: Any) -> str:
    return repr(float(edge)).removesuffix('.0')

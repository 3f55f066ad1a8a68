"""Choose the datapoints of a rewrite, and divide them into shards."""

import contextlib
import itertools
from typing import Any, Final

import numpy as np

from granular._support.indexing import Ints, check_integer, indices_of
from granular.aio.conversion.dataset_sources import DatasetSources
from granular.aio.conversion.new_values import KeyFunction
from granular.aio.datasets.codec import Decoders
from granular.aio.runtime.readahead import whole_pages
from granular.aio.runtime.threads import offload
from granular.config import MiB
from granular.errors import InvalidArgumentError

_CHUNK: Final = 8 * MiB
_MAX_CHUNK: Final = 4096

AHEAD: Final = 2
"""Reads in flight."""

Chosen = Any
"""Indices, an array of booleans with one for each datapoint, or a function of keys that returns a boolean."""


def chunk_of(sources: DatasetSources, keys: Any, rows: Ints | None = None) -> int:
    """Return how many datapoints are read at a time, of which some keys are read: by default neighbours."""
    mean = sources.size_of(keys) // max(1, len(sources))
    if rows is not None and len(rows):  # what lies between them is read, too, unless it is large
        gap = mean * (int(rows.max()) - int(rows.min()) + 1 - len(rows)) // len(rows)
        mean += gap if gap <= sources.max_gap else 0
    return max(1, min(_MAX_CHUNK, _CHUNK // max(1, mean)))


def cut_evenly(count: int, most: int) -> int:
    """Return how many of some datapoints are read at a time, at most so many, if all but the last read have as many."""
    return max(1, -(-count // max(1, -(-count // most))))


async def choose(sources: DatasetSources, keep: Chosen, exclude: Chosen, decoders: Decoders) -> Ints:
    """Return the indices of the datapoints that are kept, in the order of ``keep`` if that is indices."""
    rows = np.arange(len(sources)) if keep is None else await _indices('keep', keep, sources, decoders)
    if exclude is None:
        return rows
    excluded = np.zeros(len(sources), np.bool_)
    excluded[await _indices('exclude', exclude, sources, decoders)] = True
    kept: Ints = rows[~excluded[rows]]
    return kept


async def _indices(argument: str, chosen: Chosen, sources: DatasetSources, decoders: Decoders) -> Ints:
    length = len(sources)
    if callable(chosen):
        function = KeyFunction(argument, chosen, sources.spec, decoders, sources.name)
        return np.flatnonzero(await _results(argument, function, sources))
    if isinstance(chosen, set | frozenset):
        chosen = sorted(chosen)
    mask = np.asarray(chosen) if not isinstance(chosen, range | slice) else None
    if mask is not None and mask.dtype == np.bool_ and mask.ndim == 1:
        if len(mask) != length:
            raise InvalidArgumentError(
                f'{argument}: has {len(mask)} booleans, and {sources.name} has {length} datapoints: expected one each'
            )
        return np.flatnonzero(mask)
    rows = indices_of(chosen, length, f'{argument}: {sources.name}')
    values, counts = np.unique(rows, return_counts=True)
    if len(values) < len(rows):
        index = int(values[counts > 1][0])
        first, second = np.flatnonzero(rows == index)[:2].tolist()
        raise InvalidArgumentError(
            f'{argument}: index {index} is there twice, at {first} and {second}: a datapoint is written once; '
            f'MapDataset.subset repeats datapoints, and granular.convert writes what it returns'
        )
    return rows


async def _results(argument: str, function: KeyFunction, sources: DatasetSources) -> np.ndarray[Any, Any]:
    """Return the results of a function for all datapoints, which are to be booleans."""
    keys, step = function.keys, chunk_of(sources, function.keys)
    sources = await sources.verifying(dict.fromkeys(range(len(sources.shards)), keys))
    out: list[bool] = []

    async def call(indices: range) -> list[Any]:
        rows = np.arange(indices.start, indices.stop)
        return await offload(function.call, await sources.fetch(rows, keys), rows)

    async with contextlib.aclosing(whole_pages(call, len(sources), step, AHEAD)) as pages:
        async for results in pages:
            if bad := [i for i, result in enumerate(results) if not isinstance(result, bool | np.bool_)]:
                raise InvalidArgumentError(
                    f'{argument}: its function returned {results[bad[0]]!r:.60} for datapoint {len(out) + bad[0]} of '
                    f'{sources.name}: expected True or False'
                )
            out += results
    return np.array(out, np.bool_)


def divide(sources: DatasetSources, rows: Ints, shards: int | None, shardlen: int | None) -> dict[int, tuple[int, int]]:
    """Return the first row of each shard and the one after the last; shard 0 comes last.

    By default, a shard has what is kept of one shard, or dataset without shards; there is none for those of which
    nothing is kept.
    """
    count = len(rows)
    if shards is not None and shardlen is not None:
        raise InvalidArgumentError(f'shards, shardlen: expected one of them, got {shards} and {shardlen}')
    if shards is not None:
        number = check_integer('shards', shards, 1)
        if number > max(1, count):
            raise InvalidArgumentError(
                f'shards: expected at most one for each of the {count} datapoints that are kept, got {number}'
            )
        bounds = [count * i // number for i in range(number + 1)]
    elif shardlen is not None:
        bounds = [*range(0, count, check_integer('shardlen', shardlen, 1)), count]
    else:
        if (falls := np.flatnonzero(rows[1:] < rows[:-1])).size:
            i = int(falls[0])
            raise InvalidArgumentError(
                f'keep: index {rows[i + 1]} comes after {rows[i]}: in another order, datapoints are divided into '
                f'shards anew: pass shardlen or shards'
            )
        owners = np.searchsorted(sources.stops, rows, 'right')
        bounds = [0, *(np.flatnonzero(owners[1:] != owners[:-1]) + 1).tolist(), count]
    ranges = [(0, 0)] if not count else list(itertools.pairwise(bounds))
    return {number: ranges[number] for number in (*range(1, len(ranges)), 0)}

"""Nodes that combine several sources: each index maps to one of them, or to all.

Mix and concatenate have the order and semantics that Google Grain documents.
"""

import abc
import math
import operator
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from granular.aio.execution.failures import Failure
from granular.aio.pipeline.nodes.adapters import convert
from granular.aio.pipeline.nodes.indices import ENDLESS, check_finite, check_length, in_epochs
from granular.aio.pipeline.nodes.source import Node, Source, check_not_empty, length_of
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import offload
from granular.errors import InvalidArgumentError, OutOfRangeError
from granular.indexing import Ints, grouped, placed


class SourceChoice(Node):
    """Several sources; each index maps to one of them."""

    selects = True

    def __init__(self, parents: Sequence[Any]) -> None:
        if not isinstance(parents, Iterable) or not parents:
            raise InvalidArgumentError(f'expected one source or more, got {parents!r:.100}')
        super().__init__(*map(convert, parents))

    @abc.abstractmethod
    def choose(self, indices: Ints) -> tuple[Ints, Ints]:
        """Return, for each index, the number of the source and the index in that source."""

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        owners, inner = await offload(self.choose, np.asarray(indices, np.int64))
        return await fetch_by_owner(owners, lambda owner, at: self.parents[owner].fetch(inner[at]))


async def fetch_by_owner(owners: Ints, fetch: Callable[[int, Ints], Coroutine[Any, Any, Sequence[Any]]]) -> list[Any]:
    """Fetch from several sources concurrently, and return the datapoints in the order of their owners.

    ``fetch`` returns the datapoints of a source, given its number and the positions in ``owners``.
    """
    groups = grouped(owners)
    if len(groups) > 1:
        await ensure_event_loop()
    return placed(groups, await gather([fetch(owner, positions) for owner, positions in groups]), len(owners))


class Interleave(SourceChoice):
    """One datapoint of each source in turn."""

    def choose(self, indices: Ints) -> tuple[Ints, Ints]:
        inner, owners = np.divmod(indices, len(self.parents))
        return owners, inner

    def __len__(self) -> int:
        return min(ENDLESS, len(self.parents) * min(length_of(source) for source in self.parents))

    def describe(self) -> str:
        return f'Interleave of {len(self.parents)}'


class Proportional(SourceChoice):
    """Sources mixed evenly in proportion to their weights; ends when the first of them is exhausted."""

    def __init__(self, parents: Sequence[Source], weights: Sequence[float] | None) -> None:
        super().__init__(parents)
        self._weights = proportions(len(parents), weights)
        for i, parent in enumerate(parents):
            if not len(parent):
                raise InvalidArgumentError(f'mix: dataset {i} is empty: {parent.describe()}')
        total = sum(self._weights)
        shares = [len(parent) / (weight / total) for parent, weight in zip(parents, self._weights, strict=True)]
        self._length = min(ENDLESS, int(min(shares)))

    def __len__(self) -> int:
        return self._length

    def choose(self, indices: Ints) -> tuple[Ints, Ints]:
        return turns(indices, self._weights)

    def describe(self) -> str:
        return f'mix of {len(self.parents)}, weights {":".join(map(str, self._weights))}'


def proportions(count: int, weights: Sequence[float] | None) -> tuple[int, ...]:
    """Scale weights to integers, the smallest of which is 100; without weights, 1 for each source."""
    if weights is None:
        return (1,) * count
    try:
        if len(weights) == count and all(math.isfinite(weight) and weight > 0 for weight in weights):
            scale = 100 / min(weights)
            return tuple(int(weight * scale) for weight in weights)
    except (TypeError, ValueError, OverflowError):  # no sequence, not of numbers, or too far apart
        pass
    raise InvalidArgumentError(
        f'expected {count} weights > 0, each below 1e300 times any other, got {weights!r:.200}: leave datasets out '
        f'that are not to be read'
    )


def turns(indices: Ints, weights: Sequence[int]) -> tuple[Ints, Ints]:
    """Return, for each index, the number of the source and how often that source was chosen before.

    Of the first k choices, the first source gets ``k - k * (sum - weight) // sum``; the other sources divide the rest
    in the same way.
    """
    owners, inner = np.full_like(indices, -1), np.zeros_like(indices)
    left = sum(weights)
    if left * (int(np.abs(indices).max(initial=0)) + 1) >= 1 << 63:
        indices = indices.astype(object)  # the products are larger than 64 bits
    now, then = indices, indices + 1
    for i, weight in enumerate(weights):
        rest, rest_then = now * (left - weight) // left, then * (left - weight) // left
        had, has = now - rest, then - rest_then
        its = (owners < 0) & (had != has)
        owners[its], inner[its] = i, has[its] - 1
        left -= weight
        now, then = rest, rest_then
    return owners, inner


def turns_before(index: int, weights: Sequence[int]) -> list[int]:
    """Return how often ``turns`` chooses each source before an index of any size."""
    counts, left = [], sum(weights)
    for weight in weights:
        rest = index * (left - weight) // left
        counts.append(index - rest)
        index, left = rest, left - weight
    return counts


class Concatenate(SourceChoice):
    """One source after another; an epoch contains one epoch of each."""

    def __init__(self, parents: Sequence[Source]) -> None:
        super().__init__(parents)
        for parent in parents:
            check_finite(parent, 'concatenate', 'call concatenate() before repeat()')
        check_length(sum(map(len, parents)), 'concatenate')
        self._lengths = np.array([len(parent) for parent in parents], np.int64)
        self._stops = np.cumsum(self._lengths)

    def __len__(self) -> int:
        return int(self._stops[-1])

    def choose(self, indices: Ints) -> tuple[Ints, Ints]:
        check_not_empty(self, len(self), indices)
        epochs, positions = np.divmod(indices, len(self))
        owners = np.searchsorted(self._stops, positions, side='right')
        return owners, positions - (self._stops - self._lengths)[owners] + epochs * self._lengths[owners]

    def describe(self) -> str:
        return f'concatenate {len(self.parents)}'


class Selection(SourceChoice):
    """Sources mixed by a function from index to (source, index in the source)."""

    def __init__(self, parents: Sequence[Source], chooser: Callable[[int], tuple[int, int]], length: int) -> None:
        super().__init__(parents)
        self._chooser, self._length = chooser, length

    def __len__(self) -> int:
        return self._length

    def choose(self, indices: Ints) -> tuple[Ints, Ints]:
        check_not_empty(self, self._length, indices)
        epochs, positions = np.divmod(indices, self._length)
        chosen = [self._chooser(position) for position in positions.tolist()]
        try:
            pairs = np.array([tuple(map(operator.index, pair)) for pair in chosen], np.int64).reshape(len(chosen), 2)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgumentError(
                f'the selection map: expected pairs of integers, (dataset, index), got {chosen!r:.100}: {error}'
            ) from error
        owners = pairs[:, 0]
        for i in np.flatnonzero((owners < 0) | (owners >= len(self.parents))).tolist():
            raise OutOfRangeError(
                f'the selection map chooses dataset {owners[i]} at index {indices[i]}: there are {len(self.parents)}'
            )
        lengths = np.array([len(parent) for parent in self.parents], np.int64)
        return owners, in_epochs(pairs[:, 1], epochs, lengths[owners])

    def user_functions(self) -> tuple[Any, ...]:
        return (self._chooser,)

    def describe(self) -> str:
        return f'select from {len(self.parents)}'


class Zip(Node):
    """Tuples of the datapoints at the same index of each source."""

    def __init__(self, parents: Sequence[Source]) -> None:
        lengths = [len(parent) for parent in parents]
        if not lengths or len(set(lengths)) > 1:
            raise InvalidArgumentError(f'expected datasets of equal length, got {lengths}')
        super().__init__(*parents)

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        if len(self.parents) > 1:
            await ensure_event_loop()
        fetched = await gather([parent.fetch(indices) for parent in self.parents])
        rows: list[Any] = list(zip(*fetched, strict=True))
        if any(Failure in set(map(type, column)) for column in fetched):
            rows = [next((part for part in row if type(part) is Failure), row) for row in rows]
        return rows

    def describe(self) -> str:
        return f'zip of {len(self.parents)}'

"""Nodes that map indices: each maps a whole array of indices with numpy and fetches from its source once.

Index ``len + i`` is datapoint ``i`` of the next epoch, and negative indices belong to earlier epochs, at every node of
the chain. Shuffle, mix and concatenate have the order and semantics that Google Grain documents.
"""

import abc
import functools
import operator
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike

from granular.aio.pipeline.nodes.blocks import BlockBuffer
from granular.aio.pipeline.nodes.source import Node, Source, check_not_empty, convert, length_of
from granular.aio.pipeline.transforms import ShardOptions
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import offload
from granular.aio.runtime.user_functions import call_user
from granular.errors import InvalidArgumentError, OutOfRangeError
from granular.formats.checksums import crc32c
from granular.indexing import Ints, Seed, check_integer, integers_of
from granular.shuffle import MAX_SEED, Blocks, Order, Permutation, permute

ENDLESS: Final = sys.maxsize
"""The length of an infinitely repeated dataset."""


class IndexNode(Node):
    """A node that maps each index to an index of its source."""

    @abc.abstractmethod
    def _lookup(self, indices: Ints) -> Ints:
        """Return the indices in the source."""

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        source, steps = look_up(self.parents[0], self._lookup(np.asarray(indices, np.int64)))
        return await source.fetch(steps)

    def select(self, fields: Sequence[str]) -> Self | None:
        source = self.parents[0].select(fields)
        return None if source is None else self.copy_over(source)

    def over(self, parent: Source) -> Source:
        return self.copy_over(parent)


def look_up(source: Source, indices: Ints) -> tuple[Source, Ints]:
    """Return the next source that does more than to map indices, and its indices."""
    while isinstance(source, IndexNode) and type(source).fetch is IndexNode.fetch:
        indices = source._lookup(indices)
        source = source.parents[0]
    return source, indices


class Wrapped(IndexNode):
    """Any source, repeated without end: the root of every chain.

    Args:
      source: anything that :func:`convert` accepts.
      length: number of datapoints per epoch; all of them by default.
    """

    unlisted = True

    def __init__(self, source: Any, length: int | None = None) -> None:
        super().__init__(convert(source))
        self._length = length_of(self.parents[0]) if length is None else length
        self.endless = False

    def __len__(self) -> int:
        return self._length

    def _lookup(self, indices: Ints) -> Ints:
        return indices % self._length if self._length else indices

    def describe(self) -> str:
        return self.parents[0].describe()


def check_finite(source: Source, operation: str, remedy: str) -> None:
    """Check that a source has an end, for an operation that needs its length.

    Raises:
      InvalidArgumentError: if it is repeated infinitely.
    """
    if len(source) >= ENDLESS:
        raise InvalidArgumentError(f'{operation}: the dataset is repeated infinitely: {remedy}')


def check_length(length: int, operation: str) -> int:
    """Return a length, which may not exceed that of an infinitely repeated dataset.

    Raises:
      InvalidArgumentError: if it does.
    """
    if length > ENDLESS:
        raise InvalidArgumentError(
            f'{operation}: expected at most {ENDLESS} elements, got {length}: pass a smaller number'
        )
    return length


class Shuffle(IndexNode):
    """The datapoints of the source, in a different order every epoch."""

    order: Blocks | Order
    seed: int

    def __init__(self, parent: Source, order: Order, seed: int) -> None:
        if not isinstance(order, Order) or isinstance(order, type):
            call = ': call it' if isinstance(order, type) else ''
            raise InvalidArgumentError(
                f'expected an order of granular.shuffle, such as shuffle.Blocks(), got {order!r:.100}{call}'
            )
        if isinstance(order, Permutation):
            check_finite(parent, f'shuffle with {order!r}', 'call shuffle() before repeat(), or pass shuffle.Index()')
        if isinstance(order, Blocks):
            order = order.sized(parent.stored_nbytes())
            parent = BlockBuffer(parent, order.block)
        super().__init__(parent)
        self.order, self.seed = order, int(seed)

    def _steps(self, indices: ArrayLike) -> Ints:
        return np.asarray(indices, np.int64)

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        steps = self._steps(indices)
        length, source = len(self), self.parents[0]
        check_not_empty(self, length, steps)
        if isinstance(self.order, Blocks) and isinstance(source, BlockBuffer) and len(steps):
            await source.read_ahead(self.order, self.seed, steps, self.endless)
        if all(self.order.is_ready(length, self.seed, epoch) for epoch in _epochs_of(steps, length)):
            steps = call_user(self._lookup, steps)
        else:
            steps = await offload(self._lookup, steps)
        source, steps = look_up(source, steps)
        return await source.fetch(steps)

    def _lookup(self, indices: Ints) -> Ints:
        return shuffled(indices, len(self), self.order, self.seed)

    def describe(self) -> str:
        return f'shuffle(seed={self.seed}, {self.order!r})'


def shuffled(indices: Ints, length: int, order: Order, seed: int) -> Ints:
    """Return what is at these indices of epochs of a length in an order; each epoch stays where it is."""
    chosen = _epochs_of(indices, length)
    if len(chosen) == 1:
        base = chosen[0] * length
        return order.lookup(indices - base, length, seed, chosen[0]) + base
    epochs, positions = np.divmod(indices, length)
    out = np.empty_like(positions)
    for epoch in chosen:
        mask = epochs == epoch
        out[mask] = order.lookup(positions[mask], length, seed, epoch) + epoch * length
    return out


def _epochs_of(steps: Ints, length: int) -> list[int]:
    """Return the epochs of steps, sorted."""
    if not len(steps):
        return []
    first, last = int(steps.min()) // length, int(steps.max()) // length
    epochs: list[int] = [first] if first == last else np.unique(steps // length).tolist()
    return epochs


class Slice(IndexNode):
    """A part of the source, given by a slice or by indices."""

    def __init__(self, parent: Source, part: slice | Sequence[int] | Ints) -> None:
        super().__init__(parent)
        if not isinstance(part, slice):
            check_finite(parent, 'selection by indices', 'pass a slice, or select before repeat()')
        self._part: range | Ints
        if isinstance(part, slice):
            self._part = range(*part.indices(len(parent)))
        else:
            indices = integers_of(part, 'slice')
            if ((indices < -len(parent)) | (indices >= len(parent))).any():
                raise InvalidArgumentError(f'slice: expected indices from {-len(parent)} to {len(parent) - 1}')
            self._part = indices % max(1, len(parent))

    def __len__(self) -> int:
        return len(self._part)

    def over(self, parent: Source) -> Source:
        return Node.over(self, parent)  # its indices are those of the whole

    def _lookup(self, indices: Ints) -> Ints:
        check_not_empty(self, len(self), indices)
        epochs, positions = np.divmod(indices, len(self))
        part = self._part
        inner = part.start + positions * part.step if isinstance(part, range) else part[positions]
        # An infinitely repeated source has no next epoch.
        return inner if len(self.parents[0]) >= ENDLESS else inner + epochs * len(self.parents[0])

    def describe(self) -> str:
        part = self._part
        if isinstance(part, range):
            return f'[{part.start}:{part.stop}:{part.step}]'
        return f'slice of {self._described_part}'

    @functools.cached_property
    def _described_part(self) -> str:
        return describe_indices(np.asarray(self._part))


def describe_indices(indices: Ints) -> str:
    """Return the number of indices and their checksum: other indices have another description."""
    return f'{len(indices)} indices, CRC32C {crc32c(np.ascontiguousarray(indices, "<i8").tobytes()):08x}'


class Repeat(IndexNode):
    """Several epochs as one."""

    def __init__(self, parent: Source, epochs: int | None, reseed: bool = True) -> None:
        super().__init__(parent)
        if epochs is not None:
            epochs = check_integer('num_epochs', epochs, 1)
        check_finite(parent, 'repeat', 'call repeat() once')
        check_length((epochs or 1) * len(parent), 'repeat')
        self._epochs, self._reseed = epochs, reseed

    def __len__(self) -> int:
        if self._epochs is None:
            return ENDLESS if len(self.parents[0]) else 0
        return self._epochs * len(self.parents[0])

    def _lookup(self, indices: Ints) -> Ints:
        return indices if self._reseed else indices % len(self.parents[0])

    def describe(self) -> str:
        return f'repeat({self._epochs if self._reseed else f"{self._epochs}, reseed_each_epoch=False"})'


class WindowShuffle(IndexNode):
    """The datapoints of the source, shuffled within windows; the last window of an epoch may be smaller."""

    def __init__(self, parent: Source, size: int, seed: int) -> None:
        super().__init__(parent)
        self._size, self._seed = check_integer('window_size', size, 1), seed

    def _lookup(self, indices: Ints) -> Ints:
        length, size = len(self), self._size
        epochs, positions = np.divmod(indices, max(1, length))
        windows, offsets = np.divmod(positions, size)
        numbers = windows + epochs * -(-length // size)
        out = indices - offsets
        for number in np.unique(numbers).tolist():
            mask = numbers == number
            window = min(size, length - int(windows[mask][0]) * size)
            out[mask] += permute(offsets[mask], window, (self._seed + number) % (MAX_SEED + 1))
        return out

    def describe(self) -> str:
        return f'window_shuffle({self._size}, seed={self._seed})'


class Seeded(IndexNode):
    """A node that sets the default seed for random operations after it."""

    def __init__(self, parent: Source, seed: Seed) -> None:
        super().__init__(parent)
        self.declared_seed = seed

    def _lookup(self, indices: Ints) -> Ints:
        return indices

    def describe(self) -> str:
        return f'seed({self.declared_seed})'


def part_of(source: Source, part: ShardOptions) -> Source:
    """Return the same source over one of several contiguous parts of the data.

    Raises:
      InvalidArgumentError: if a stage selects or combines elements by their indices in the whole.
    """
    if isinstance(source, Wrapped):
        return Slice(source, slice(*part.split(len(source))))
    if not isinstance(source, Node) or len(source.parents) != 1:
        raise InvalidArgumentError(f'{source.describe()} cannot be divided into contiguous parts')
    return source.over(part_of(source.parents[0], part))


class SourceChoice(Node):
    """Several sources; each index maps to one of them."""

    def __init__(self, parents: Sequence[Any]) -> None:
        if not parents:
            raise InvalidArgumentError('expected one source or more, got none')
        super().__init__(*map(convert, parents))

    @abc.abstractmethod
    def choose(self, indices: Ints) -> tuple[Ints, Ints]:
        """Return, for each index, the number of the source and the index in that source."""

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        owners, inner = await offload(self.choose, np.asarray(indices, np.int64))
        return await fetch_by_owner(owners, lambda owner, at: self.parents[owner].fetch(inner[at]))


async def fetch_by_owner(owners: Ints, fetch: Callable[[int, Ints], Coroutine[Any, Any, Sequence[Any]]]) -> list[Any]:
    """Fetch from several sources concurrently, and return the datapoints in the order of their owners.

    Args:
      owners: the number of the source of each datapoint.
      fetch: returns the datapoints of a source, given its number and the positions in ``owners``.
    """
    groups = {owner: np.flatnonzero(owners == owner) for owner in np.unique(owners).tolist()}
    if len(groups) > 1:
        await ensure_event_loop()
    fetched = await gather([fetch(owner, positions) for owner, positions in groups.items()])
    out: list[Any] = [None] * len(owners)
    for positions, datapoints in zip(groups.values(), fetched, strict=True):
        for position, datapoint in zip(positions.tolist(), datapoints, strict=True):
            out[position] = datapoint
    return out


class Interleave(SourceChoice):
    """One datapoint of each source in turn."""

    def choose(self, indices: Ints) -> tuple[Ints, Ints]:
        inner, owners = np.divmod(indices, len(self.parents))
        return owners, inner

    def __len__(self) -> int:
        return len(self.parents) * min(length_of(source) for source in self.parents)

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
        valid = len(weights) == count and all(np.isfinite(weight) and weight > 0 for weight in weights)
    except TypeError:  # no sequence, or not of numbers
        valid = False
    if not valid:
        raise InvalidArgumentError(f'expected {count} weights > 0, got {weights!r:.200}')
    scale = 100 / min(weights)
    return tuple(int(weight * scale) for weight in weights)


def turns(indices: Ints, weights: Sequence[int]) -> tuple[Ints, Ints]:
    """Return, for each index, the number of the source and how often that source was chosen before.

    Of the first k choices, the first source gets ``k - k * (sum - weight) // sum``; the other sources divide the rest
    in the same way.
    """
    owners, inner = np.full_like(indices, -1), np.zeros_like(indices)
    left = sum(weights)
    if len(indices) and left * (int(np.abs(indices).max()) + 1) >= 1 << 63:
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
        # An infinitely repeated source has no next epoch.
        lengths = np.array([len(parent) % ENDLESS for parent in self.parents], np.int64)
        return owners, (pairs[:, 1] + epochs * lengths[owners]).astype(np.int64, copy=False)

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
        return list(zip(*fetched, strict=True))

    def describe(self) -> str:
        return f'zip of {len(self.parents)}'


def default_seed(parents: Sequence[Any]) -> int | None:
    """Derive a seed for a random operation from the preceding ``seed`` nodes, as Grain does.

    Uses the nearest ``seed`` on each path upstream, and its distance. Returns None if there is no such node.
    """
    words: list[int] = []
    level, depth = list(parents), 1
    while level:
        seeds = [getattr(node, 'declared_seed', None) for node in level]
        for seed in seeds:
            # numpy up to 2.4 flattens nested sequences to the same words; 2.5 rejects them.
            words += [] if seed is None else [*(seed if isinstance(seed, tuple) else (seed,)), depth]
        level = [
            upstream
            for node, seed in zip(level, seeds, strict=True)
            if seed is None
            for parent in node.parents
            for upstream in (parent.parents if isinstance(parent, BlockBuffer) else (parent,))
        ]
        depth += 1
    return int(np.random.SeedSequence(words).generate_state(1, dtype=np.uint32)[0]) if words else None

"""Nodes that map indices: each maps a whole array of indices with numpy and fetches from its source once.

Index ``len + i`` is datapoint ``i`` of the next epoch, and negative indices belong to earlier epochs, at every node of
the chain. Shuffle has the order and semantics that Google Grain documents.
"""

import abc
import functools
import operator
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from granular._support.indexing import MOST, Ints, Seed, check_integer, check_seed, indices_of, range_of
from granular._support.text import logger
from granular.aio.pipeline.nodes.adapters import convert
from granular.aio.pipeline.nodes.blocks import BlockBuffer
from granular.aio.pipeline.nodes.patterns import Pattern
from granular.aio.pipeline.nodes.source import Node, Source, check_not_empty, length_of, varying_stage
from granular.aio.pipeline.orders import Blocks, Order, Permutation, Sequential, permute
from granular.aio.pipeline.shards import ShardOptions
from granular.aio.runtime.threads import Calls, offload
from granular.aio.runtime.user_functions import call_user
from granular.errors import InvalidArgumentError
from granular.formats.checksums import crc32c

ENDLESS: Final = sys.maxsize
LONGEST: Final = 1 << 48
"""The length of the longest source that is not made of parts or batches of one that is repeated infinitely."""
"""The length of an infinitely repeated dataset."""


class IndexNode(Node):
    """A node that maps each index to an index of its source."""

    divides = True
    selects = True

    @abc.abstractmethod
    def _lookup(self, indices: Ints) -> Ints: ...

    def owners(self, indices: Ints) -> Ints:
        return self.parents[0].owners(self._lookup(indices))

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        source, steps = look_up(self.parents[0], self._lookup(np.asarray(indices, np.int64)))
        return await source.fetch(steps)

    def chosen(self, indices: Ints) -> Ints | None:
        """Return the indices of the source at these; None if ``fetch`` does more than to look them up. It may take as
        long as a user's order.
        """
        return self._lookup(indices) if type(self).fetch is IndexNode.fetch else None


def inner_indices(node: IndexNode, indices: Ints) -> Ints:
    """Return the indices of the source of a node at these of its own."""
    check_not_empty(node, len(node), indices)
    inner: Ints = call_user(node._lookup, indices)
    return inner


def looked_up(source: Source, indices: Ints) -> tuple[Source, Ints]:
    """Return the next source that does more than to map indices, and its indices, also behind a shuffle."""
    while isinstance(source, IndexNode) and (inner := source.chosen(indices)) is not None:
        source, indices = source.parents[0], inner
    return source, indices


def looked_up_now(source: Source, indices: Ints) -> tuple[Source, Ints] | None:
    """Return the result of ``looked_up``; None if that takes too long for an event loop."""
    while isinstance(source, IndexNode):
        if isinstance(source, Shuffle) and not source._is_ready(indices):
            return None
        if (inner := source.chosen(indices)) is None:
            break
        source, indices = source.parents[0], inner
    return source, indices


def look_up(source: Source, indices: Ints) -> tuple[Source, Ints]:
    """Return the next source that does more than to map indices, and its indices."""
    while isinstance(source, IndexNode) and type(source).fetch is IndexNode.fetch:
        indices = source._lookup(indices)
        source = source.parents[0]
    return source, indices


def beneath(source: Source, indices: Ints) -> tuple[Source, Ints]:
    """Return the next source that does more than to map indices, or single elements, and its indices."""
    while isinstance(source, IndexNode) or source.elementwise:
        if isinstance(source, IndexNode):
            indices = source._lookup(indices)
        source = source.parents[0]
    return source, indices


class Wrapped(IndexNode):
    """Any source, repeated without end: the root of every chain. An epoch has ``length`` datapoints, or all."""

    unlisted = True
    passes_epochs = False
    keeps_turns = True

    def __init__(self, source: Any, length: int | None = None) -> None:
        super().__init__(convert(source))
        self._length = length_of(self.parents[0]) if length is None else length
        self.endless = False

    def __len__(self) -> int:
        return self._length

    def _lookup(self, indices: Ints) -> Ints:
        return indices % self._length if self._length else indices


def recurring(source: Source) -> Source:
    """Return a source whose indices from its length on are those of later epochs; one without epochs repeats itself."""
    if source.endless or isinstance(source, Wrapped):
        return source
    if not isinstance(source, Node):
        return Wrapped(source)
    parents = [recurring(parent) for parent in source.parents]
    return source if all(map(operator.is_, parents, source.parents)) else source.copy_over(*parents)


def in_epochs(positions: Ints, epochs: Ints, length: Any) -> Ints:
    """Return the indices of positions in epochs of a source. So late epochs that their indices exceed 63 bits are
    earlier ones again; a source that is repeated infinitely has a single epoch.
    """
    out: Ints = positions + np.fmod(epochs, ENDLESS // np.maximum(1, length)) * length
    return out


def check_finite(source: Source, operation: str, remedy: str) -> None:
    """Refuse a source that is repeated infinitely, for an operation that needs its length."""
    if len(source) >= ENDLESS:
        raise InvalidArgumentError(f'{operation}: the dataset is repeated infinitely: {remedy}')


def check_length(length: int, operation: str) -> None:
    """Refuse a length that exceeds that of an infinitely repeated dataset."""
    if length > ENDLESS:
        raise InvalidArgumentError(
            f'{operation}: expected at most {ENDLESS} elements, got {length}: pass a smaller number'
        )


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
        self.order, self.seed = order, 0 if isinstance(order, Sequential) else int(seed)
        self.varies = not isinstance(order, Sequential)

    def in_first_epoch(self) -> Source:
        stage = super().in_first_epoch()
        if not self.varies or not isinstance(stage, Shuffle):
            return stage
        order = self.order
        return stage.changed(order=order.in_first_epoch() if isinstance(order, Blocks) else _FirstEpoch(order))

    def _steps(self, indices: ArrayLike) -> Ints:
        return np.asarray(indices, np.int64)

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        source, steps = await find(*await self._find(indices))
        return await source.fetch(steps)

    async def fetch_undecoded(self, indices: ArrayLike) -> Calls[list[Any]] | None:
        source, steps = await find(*await self._find(indices))
        return await source.fetch_undecoded(steps)

    def _is_ready(self, steps: Ints) -> bool:
        """Return whether these are looked up fast enough for an event loop."""
        length = len(self)
        return all(self.order.is_ready(length, self.seed, epoch) for epoch in _epochs_of(steps, length))

    async def _find(self, indices: ArrayLike) -> tuple[Source, Ints]:
        """Return the result of ``look_up``, computed in a thread if the order takes long."""
        steps = self._steps(indices)
        length, source = len(self), self.parents[0]
        check_not_empty(self, length, steps)
        if isinstance(self.order, Blocks) and isinstance(source, BlockBuffer) and len(steps):
            await source.read_ahead(self.order, self.seed, steps, self.endless)
        if self._is_ready(steps):
            steps = call_user(self._lookup, steps)
        else:
            steps = await offload(self._lookup, steps)
        return look_up(source, steps)

    def chosen(self, indices: Ints) -> Ints | None:
        if isinstance(self.parents[0], BlockBuffer):
            return None
        check_not_empty(self, len(self), indices)
        return self._lookup(self._steps(indices))

    def _lookup(self, indices: Ints) -> Ints:
        return shuffled(indices, len(self), self.order, self.seed)

    def arguments(self) -> dict[str, Any]:
        return {'seed': self.seed, 'order': repr(self.order)}

    def describe(self) -> str:
        return f'shuffle(seed={self.seed}, {self.order!r})'


async def find(source: Source, indices: ArrayLike) -> tuple[Source, Ints]:
    """Return the next source that does more than to map indices, and its indices, also behind a shuffle."""
    source, steps = look_up(source, np.asarray(indices, np.int64))
    while isinstance(source, Shuffle):
        source, steps = await source._find(steps)
    return source, steps


class _FirstEpoch:
    """The order of the first epoch of another one, in every epoch."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def __repr__(self) -> str:
        return repr(self._order)

    def lookup(self, positions: Ints, length: int, seed: int, epoch: int) -> Ints:
        return self._order.lookup(positions, length, seed, 0)

    def is_ready(self, length: int, seed: int, epoch: int) -> bool:
        return self._order.is_ready(length, seed, 0)


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

    divides = False  # its indices are those of the whole
    keeps_turns = True

    def __init__(self, parent: Source, part: slice | Sequence[int] | Ints, name: str = 'slice') -> None:
        super().__init__(parent)
        self._part: range | Ints
        if isinstance(part, slice):
            self._part = range_of(part, len(parent), name)
        else:
            check_finite(parent, 'selection by indices', 'pass a slice, or select before repeat()')
            self._part = indices_of(part, len(parent), name)
        self.passes_epochs = len(parent) < ENDLESS

    def __len__(self) -> int:
        return len(self._part)

    def _lookup(self, indices: Ints) -> Ints:
        check_not_empty(self, len(self), indices)
        epochs, positions = np.divmod(indices, len(self))
        part = self._part
        inner = part.start + positions * part.step if isinstance(part, range) else part[positions]
        return in_epochs(inner, epochs, len(self.parents[0]))

    def keep_selections(self, warn: bool = True) -> Source:
        if (stage := self.varying()) is None:
            return super().keep_selections(warn)
        if warn:
            logger.warning(
                '%s is a selection behind %s, which would have other elements in each epoch: all epochs have those of '
                'the first one, in its order: slice before shuffle for a new order in each epoch',
                self.describe(),
                stage.describe(),
            )
        return self.copy_over(self.parents[0].in_first_epoch())

    def pattern(self) -> Pattern | None:
        pattern = super().pattern()
        if pattern is None:
            return None
        return pattern.every(self._part.step) if isinstance(self._part, range) else Pattern(pattern.datasets, 0)

    def arguments(self) -> dict[str, Any]:
        part = self._part
        return {'part': [part.start, part.stop, part.step]} if isinstance(part, range) else {}

    def varying(self) -> Source | None:
        """Return a stage because of which this one selects other elements in each epoch; None if it does not."""
        if not self.passes_epochs or self._selects_all:
            return None
        return varying_stage(self.parents[0])

    @functools.cached_property
    def _selects_all(self) -> bool:
        length = len(self.parents[0])
        if len(self._part) != length or isinstance(self._part, range):
            return len(self._part) == length
        return len(np.unique(self._part)) == length

    def describe(self) -> str:
        part = self._part
        if isinstance(part, range):
            return f'[{part.start}:{part.stop}:{part.step}]'
        return f'slice of {len(part)} indices, CRC32C {self._checksum:08x}'

    @functools.cached_property
    def _checksum(self) -> int:
        return crc32c(np.ascontiguousarray(self._part, '<i8').tobytes())


class Repeat(IndexNode):
    """Several epochs as one."""

    keeps_turns = True

    def __init__(self, parent: Source, epochs: int | None, reseed: bool = True) -> None:
        super().__init__(parent)
        if epochs is not None:
            epochs = check_integer('num_epochs', epochs, 1)
        check_finite(parent, 'repeat', 'call repeat() once')
        check_length((epochs or 1) * len(parent), 'repeat')
        self._epochs, self._reseed = epochs, reseed
        self.passes_epochs = reseed and epochs == 1

    def pattern(self) -> Pattern | None:
        pattern = super().pattern()
        if pattern is None or not pattern.datasets or not pattern.repeats or not len(self):
            return pattern
        # The pattern may begin again in each epoch, before it has ended.
        places = np.arange(pattern.period)
        second = self.owners(places + len(self.parents[0]))
        continues = np.array_equal(second, self.owners((places + len(self.parents[0])) % pattern.period))
        return pattern if continues else Pattern(pattern.datasets, 0)

    def __len__(self) -> int:
        if self._epochs is None:
            return ENDLESS if len(self.parents[0]) else 0
        return self._epochs * len(self.parents[0])

    def _lookup(self, indices: Ints) -> Ints:
        return indices if self._reseed else indices % max(1, len(self.parents[0]))

    def arguments(self) -> dict[str, Any]:
        return {'epochs': self._epochs, 'reseed': self._reseed}

    def describe(self) -> str:
        return f'repeat({self._epochs if self._reseed else f"{self._epochs}, reseed_each_epoch=False"})'


class WindowShuffle(IndexNode):
    """The datapoints of the source, shuffled within windows; the last window of an epoch may be smaller."""

    def __init__(self, parent: Source, size: int, seed: int) -> None:
        super().__init__(parent)
        self._size, self._seed = check_integer('window_size', size, 1, MOST), seed
        self.varies = True

    def _lookup(self, indices: Ints) -> Ints:
        length, size = len(self), self._size
        epochs, positions = np.divmod(indices, max(1, length))
        windows, offsets = np.divmod(positions, size)
        numbers = windows + (0 if self.kept else epochs) * -(-length // size)
        out = indices - offsets
        for number in np.unique(numbers).tolist():
            mask = numbers == number
            window = min(size, length - int(windows[mask][0]) * size)
            out[mask] += permute(offsets[mask], window, self._seed + number)
        return out

    def arguments(self) -> dict[str, Any]:
        return {'size': self._size, 'seed': self._seed}

    def describe(self) -> str:
        return f'window_shuffle({self._size}, seed={self._seed})'


class Seeded(IndexNode):
    """A node that sets the default seed for random operations after it, whose descriptions have it."""

    stateless = True

    keeps_turns = True

    def __init__(self, parent: Source, seed: Seed) -> None:
        super().__init__(parent)
        self.declared_seed = seed

    def _lookup(self, indices: Ints) -> Ints:
        return indices

    def describe(self) -> str:
        return f'seed({self.declared_seed})'


def part_of(source: Source, part: ShardOptions) -> Source:
    """Return the same source over one of several contiguous parts of the data; refuse one with a stage that selects or
    combines elements by their indices in the whole.
    """
    if isinstance(source, Wrapped):
        return Slice(source, slice(*part.split(len(source))))
    if isinstance(source, Node) and len(source.parents) == 1:
        parent = part_of(source.parents[0], part)
        if source.divides:
            return source.copy_over(parent)
    raise InvalidArgumentError(f'{source.describe()} cannot be divided into contiguous parts')


def seed_in_epoch(seed: Seed, epoch: int) -> Seed:
    """Return the seed of a random stage of a stream in an epoch, as large as those of orders; its own in epoch 0."""
    if not epoch:
        return seed
    words = seed if isinstance(seed, tuple) else (seed,)
    return int(np.random.SeedSequence([*words, epoch]).generate_state(1, dtype=np.uint32)[0])


def seed_of(seed: int | Sequence[int] | None, stage: Any, operation: str) -> Seed:
    """Return the seed of a random operation after a stage; one of None is derived from earlier stages, as in Grain.

    It follows from the nearest ``seed`` on each path upstream, and its distance.
    """
    if seed is not None:
        return check_seed(seed)
    words: list[int] = []
    level, depth = [stage], 1
    while level:
        declared = [getattr(node, 'declared_seed', None) for node in level]
        for own in declared:
            # numpy up to 2.4 flattens nested sequences to the same words; 2.5 rejects them.
            words += [] if own is None else [*(own if isinstance(own, tuple) else (own,)), depth]
        level = [
            upstream
            for node, own in zip(level, declared, strict=True)
            if own is None
            for parent in node.parents
            for upstream in (parent.parents if isinstance(parent, BlockBuffer) else (parent,))
        ]
        depth += 1
    if not words:
        raise InvalidArgumentError(f'{operation} requires a seed: pass seed=, or call seed() first')
    return int(np.random.SeedSequence(words).generate_state(1, dtype=np.uint32)[0])

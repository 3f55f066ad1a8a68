"""Orders, and the permutations that they are made of; the public module is :mod:`granular.shuffle`."""

import functools
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import MOST, Ints, check_integer
from granular._support.lru import LRU

MAX_SEED: Final = 2**32 - 1  # of pipelines, as in Grain: the keys of its cipher come from 32 bits

_MAX_CACHED: Final = 2  # epochs: one that ends while the next begins
_CHUNK: Final = 1 << 15  # lookups at a time, so that intermediate results stay in the CPU cache
_MIN_BITS: Final = 16  # minimum bits of a block of the cipher; fewer mix badly
_MAX_TABLE: Final = 4096  # datapoints up to which a permutation is computed as a whole
_ORDERS: Final = 2048  # whose keys and tables, of 8 kB at most, are kept: each of many sources may have one
_WINDOW_BYTES: Final = 256 << 20  # of a window by default: two of them are half of what a source buffers
_MAX_BLOCK: Final = 64  # datapoints by default
_MAX_WINDOW: Final = 512  # blocks by default: with more, batches are hardly more random
_UNSIZED_WINDOW: Final = 256  # blocks by default, if the size of datapoints is unknown
_CACHED_WINDOWS: Final = 4  # per epoch: one that ends while the next begins, and prefetching
_GROUP: Final = 256  # datapoints that are prefetched together
_ROUNDS: Final = 24  # after which one block in 2**24 has not been moved
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio: its products have all bits mixed
_HALF, _TOP = np.uint64(32), np.uint64(63)


@runtime_checkable
class Order(Protocol):
    """A permutation of ``range(length)`` for every epoch."""

    def lookup(self, positions: Ints, length: int, seed: int, epoch: int) -> Ints:
        """Return the indices at these positions of an epoch."""
        ...

    def is_ready(self, length: int, seed: int, epoch: int) -> bool:
        """Return whether a lookup in that epoch is fast enough for an event loop."""
        ...


class _Ready:
    """An order whose lookups are always fast enough for an event loop: about 20 million a second."""

    def is_ready(self, length: int, seed: int, epoch: int) -> bool:
        """Return True."""
        return True


class Permutation:
    """numpy's permutation, the order of granular 0.21. Takes 8 bytes per datapoint, for each of the last two epochs.

    ::

        source = granular.sources.Epochs(reader, shuffle=granular.shuffle.Permutation(), seed=0)
    """

    def __init__(self) -> None:
        self._cached: LRU[tuple[int, int, int], Ints] = LRU(_MAX_CACHED)

    def __reduce__(self) -> tuple[type['Permutation'], tuple[()]]:
        return type(self), ()

    def __repr__(self) -> str:
        return 'Permutation()'

    def lookup(self, positions: Ints, length: int, seed: int, epoch: int) -> Ints:
        """Return the indices at these positions of an epoch."""
        key = length, seed, epoch
        permutation = self._cached.get(key)
        if permutation is None:
            permutation = np.random.default_rng(seed=[seed, epoch % (1 << 64)]).permutation(np.arange(length))
            self._cached.put(key, permutation)
        return permutation[positions]

    def is_ready(self, length: int, seed: int, epoch: int) -> bool:
        """Return whether a lookup in that epoch is fast; the first takes half a second for ten million datapoints."""
        return (length, seed, epoch) in self._cached


class Sequential(_Ready):
    """The order in which the datapoints are stored."""

    def __repr__(self) -> str:
        return 'Sequential()'

    def lookup(self, positions: Ints, length: int, seed: int, epoch: int) -> Ints:
        """Return the positions unchanged."""
        return positions


class Index(_Ready):
    """The order of Google Grain's ``shuffle``, in O(1) memory: each index is computed independently.

    Four rounds of the Simon block cipher (https://eprint.iacr.org/2013/404) over as many bits as an index has, with
    keys that C++'s ``std::seed_seq`` derives from ``seed + epoch``; results out of range are enciphered again (cycle
    walking). For ``2**n + 1`` datapoints, n even and 16 or more, Grain returns one datapoint twice and never the last;
    here these lengths have their own order.
    """

    def __repr__(self) -> str:
        return 'Index()'

    def lookup(self, positions: Ints, length: int, seed: int, epoch: int) -> Ints:
        """Return the indices at these positions of an epoch."""
        return permute(positions, length, seed + epoch)


class Blocks(_Ready):
    """An order for buckets: blocks of neighbours are read together, and datapoints from all of the dataset are mixed.

    ::

        dataset = dataset.shuffle(seed=0, order=granular.shuffle.Blocks(block=64, window=512))

    The dataset is divided into ``window`` strata of equal length. Each window of an epoch consists of one block of each
    stratum, drawn at random without replacement, and its datapoints are fully mixed: however the dataset is sorted,
    each window represents all of it. One range request reads a whole block, and a source reads at most one window
    ahead. Any step can be looked up independently. docs/performance.md shows how well it mixes.

    By default the settings follow the mean size of the source's datapoints, as they are stored: blocks of 64 and
    windows of 512, smaller powers of two if a window would take more than 256 MiB, first for the block. They are 64 and
    256 if the size is unknown. A pipeline with other settings refuses a state.

    Args:
      block: number of neighbouring datapoints that are read together; None to choose it.
      window: number of blocks that are mixed; None to choose it.
    """

    def __init__(self, block: int | None = None, window: int | None = None) -> None:
        self._block = None if block is None else check_integer('block', block, 1, MOST)
        self._window = None if window is None else check_integer('window', window, 1, MOST)

    @property
    def block(self) -> int:
        """The number of datapoints of a block."""
        return _MAX_BLOCK if self._block is None else self._block

    @property
    def window(self) -> int:
        """The number of blocks that are mixed."""
        return _UNSIZED_WINDOW if self._window is None else self._window

    def __repr__(self) -> str:
        # A part of states. The orders of granular before stratified windows were Blocks(block=64, window=128).
        return f'Blocks(block={self.block}, window={self.window}, stratified)'

    def sized(self, nbytes: float | None) -> 'Blocks':
        """Return this order with all settings chosen, for datapoints of ``nbytes`` on average, None if unknown."""
        if nbytes is None:
            return Blocks(self.block, self.window)
        fitting = _WINDOW_BYTES / max(1.0, nbytes)  # datapoints
        block = self._block or _power_of_two(fitting / (self._window or _MAX_WINDOW), _MAX_BLOCK)
        return Blocks(block, self._window or _power_of_two(fitting / block, _MAX_WINDOW))

    def in_first_epoch(self) -> 'Blocks':
        """Return the order that has the permutation of the first epoch in every epoch."""
        return _FirstBlocks(self._block, self._window)

    def lookup(self, positions: Ints, length: int, seed: int, epoch: int) -> Ints:
        """Return the indices at these positions of an epoch."""
        if not len(positions):
            return np.empty_like(positions)
        strata = self._strata(length, seed, epoch)
        first, last = strata.windows_of(np.array([positions.min(), positions.max()])).tolist()
        if first == last:
            return strata.indices(first)[positions - strata.start(first)]
        windows = strata.windows_of(positions)
        indices = np.empty(positions.shape, np.int64)
        for window in np.unique(windows).tolist():
            mask = windows == window
            indices[mask] = strata.indices(window)[positions[mask] - strata.start(window)]
        return indices

    def group_ahead(self, step: int, length: int) -> int:
        """Return the number of the last group of blocks to prefetch when a step is read: one window ahead of it.

        Groups are numbered over all epochs, and contain blocks in the order in which windows need them.
        """
        epoch, position = divmod(step + self._strata_of(length) * self.block, length)
        return (epoch * -(-length // self.block) + position // self.block) // self._group

    def group(self, number: int, length: int, seed: int) -> Ints:
        """Return the blocks of a group; block ``i`` of an epoch is ``epoch * blocks_per_epoch + i``."""
        count = -(-length // self.block)
        epochs, slots = np.divmod(np.arange(number * self._group, (number + 1) * self._group), count)
        blocks = np.empty_like(slots)
        for epoch in set(epochs.tolist()):
            mask = epochs == epoch
            blocks[mask] = self._strata(length, seed, epoch).blocks_at(slots[mask])
        numbers: Ints = blocks + epochs * count
        return numbers

    def groups_per_window(self, length: int) -> int:
        """Return the number of groups that are prefetched while a window is read."""
        return -(-self._strata_of(length) // self._group)

    def _strata(self, length: int, seed: int, epoch: int) -> '_Strata':
        return _strata(length, self.block, self.window, seed, epoch)

    def _strata_of(self, length: int) -> int:
        """Return the number of blocks of a window: ``window``, or fewer so that all windows have about as many."""
        count = -(-length // self.block)
        return -(-count // -(-count // self.window))

    @property
    def _group(self) -> int:
        """Blocks that are prefetched together: reading several takes little more CPU time than reading one."""
        return max(1, min(_GROUP // self.block, self.window // 16))


class _FirstBlocks(Blocks):
    """The order of the first epoch in every epoch, and the blocks of it, which are read ahead."""

    def _strata(self, length: int, seed: int, epoch: int) -> '_Strata':
        return super()._strata(length, seed, 0)


class _Strata:
    """The windows of one epoch of :class:`Blocks`.

    ``count`` blocks are divided into ``strata`` runs of ``windows`` blocks or one less: ``lacking`` of them are
    shorter, and each of these is left out of one of the last windows. The last block may have fewer datapoints, and
    then so has the window that contains it; it is the last block of that window, as that of its last stratum.
    """

    def __init__(self, length: int, block: int, window: int, seed: int, epoch: int) -> None:
        self.block = block
        self.seed = seed
        self.epoch = epoch % (1 << 64)
        self.count = -(-length // block)
        self.windows = -(-self.count // window)
        self.strata = -(-self.count // self.windows)
        self.lacking = self.strata * self.windows - self.count  # fewer than windows, and than strata
        self._whole = self.windows - self.lacking  # windows with a block of each stratum
        self._missing = self.count * block - length  # datapoints that the last block lacks
        begins = np.array([i * self.count // self.strata for i in range(self.strata + 1)], np.int64)  # beyond 63 bits
        self._begins, self._sizes = begins[:-1], np.diff(begins)
        shorter = -(-np.arange(self.strata) * self.lacking // self.strata)  # strata before each one that are shorter
        self._left_out = np.where(self._sizes < self.windows, self._whole + shorter, self.windows)
        generator = np.random.PCG64([seed, self.epoch])
        self._keys = generator.random_raw(_ROUNDS * self.strata).reshape(_ROUNDS, self.strata)
        last = slice(self.strata - 1, self.strata)
        # The last stratum is never shorter, so that it has a block in each window.
        self._short_window = int(_swap_or_not(self._sizes[last] - 1, self._sizes[last], self._keys[::-1, last])[0])
        self._after_short = self.start(self._short_window + 1)
        self._indices: LRU[int, Ints] = LRU(_CACHED_WINDOWS)
        self._blocks: LRU[int, Ints] = LRU(_CACHED_WINDOWS)

    def start(self, window: int) -> int:
        """Return the position in the epoch at which a window begins."""
        return self._first_slot(window) * self.block - (self._missing if window > self._short_window else 0)

    def _first_slot(self, window: int) -> int:
        return window * self.strata - max(0, window - self._whole)

    def windows_of(self, positions: Ints) -> Ints:
        """Return the windows that contain these positions."""
        ahead = np.where(positions >= self._after_short, self.block - self._missing, self.block)
        return self._windows_of_slots((positions - ahead) // self.block + 1)  # a sum could exceed 63 bits

    def _windows_of_slots(self, slots: Ints) -> Ints:
        whole = self._whole * self.strata
        after = self._whole + (slots - whole) // max(1, self.strata - 1)
        return np.where(slots < whole, slots // self.strata, after)

    def blocks(self, window: int) -> Ints:
        """Return the blocks of a window, one of each stratum."""
        blocks = self._blocks.get(window)
        if blocks is None:
            present = np.flatnonzero(self._left_out != window)
            positions = window - (window > self._left_out[present])
            sizes = self._sizes[present]
            blocks = self._begins[present] + _swap_or_not(positions, sizes, self._keys[:, present])
            self._blocks.put(window, blocks)
        return blocks

    def blocks_at(self, slots: Ints) -> Ints:
        """Return blocks in the order of windows and strata."""
        windows = self._windows_of_slots(slots)
        out = np.empty_like(slots)
        for window in set(windows.tolist()):
            mask = windows == window
            out[mask] = self.blocks(window)[slots[mask] - self._first_slot(window)]
        return out

    def indices(self, window: int) -> Ints:
        """Return the datapoints of a window in their order."""
        indices = self._indices.get(window)
        if indices is None:
            blocks = self.blocks(window)
            size = len(blocks) * self.block - (self._missing if window == self._short_window else 0)
            order = np.random.default_rng(seed=[self.seed, self.epoch, window]).permutation(size)
            slots, within = np.divmod(order, self.block)
            indices = blocks[slots] * self.block + within
            self._indices.put(window, indices)
        return indices


@functools.lru_cache(8)
def _strata(length: int, block: int, window: int, seed: int, epoch: int) -> _Strata:
    return _Strata(length, block, window, seed, epoch)


def _power_of_two(value: float, most: int) -> int:
    """Return the largest power of two that is neither larger than a value nor than another number, and at least 1."""
    return 1 << (max(1, min(int(value), most)).bit_length() - 1)


def _swap_or_not(positions: Ints, sizes: Ints, keys: NDArray[np.uint64]) -> Ints:
    """Permute a position of each of several ranges, by a row of keys for each round; reversed rows undo it.

    The swap-or-not shuffle (https://eprint.iacr.org/2012/254): each round pairs all positions of a range at random, and
    swaps each pair with probability 1/2.
    """
    values, lengths = positions.astype(np.uint64), sizes.astype(np.uint64)
    for key in keys:
        partners = (key % lengths + lengths - values) % lengths
        bits = (np.maximum(values, partners) + key) * _ODD
        bits = (bits ^ bits >> _HALF) * _ODD
        values = np.where(bits >> _TOP, partners, values)
    return values.astype(np.int64)


def permute(positions: Ints, length: int, seed: int) -> Ints:
    """Return a permutation of ``range(length)`` at these positions; the seed is taken modulo 2**32."""
    if length <= 1:
        return np.zeros_like(positions)
    if length <= _MAX_TABLE:
        return _table(length, seed % (1 << 32))[positions].astype(np.int64)
    bits, keys = _bits(length), _keys(seed % (1 << 32))
    indices = np.empty(positions.shape, np.int64)
    flat_positions, flat_indices = positions.reshape(-1), indices.reshape(-1)
    for at in range(0, len(flat_positions), _CHUNK):
        flat_indices[at : at + _CHUNK] = _walk(flat_positions[at : at + _CHUNK], length, bits // 2, keys)
    return indices


@functools.lru_cache(_ORDERS)
def _table(length: int, seed: int) -> NDArray[np.uint16]:
    """Compute a small permutation as a whole: most of the cipher's numbers are out of range and need long walks."""
    following = _encipher(np.arange(1 << _MIN_BITS, dtype=np.uint32), _MIN_BITS // 2, _keys(seed)).astype(np.uint16)
    while (following[:length] >= length).any():
        following = np.where(following < length, following, following[following])
    return following[:length].copy()


def _bits(length: int) -> int:
    bits = (length - 1).bit_length() if (length - 1) & (length - 2) else max(1, (length - 2).bit_length())
    bits = max(_MIN_BITS, bits + bits % 2)
    # Grain takes the logarithm of the last index, which for a power of two gives one bit too few.
    return bits if length - 1 < 1 << bits else bits + 2


def _walk(indices: Ints, length: int, width: int, keys: tuple[int, ...]) -> Ints:
    kind = np.uint32 if 2 * width <= 32 else np.uint64
    values = _encipher(indices.astype(kind), width, keys)
    beyond = np.flatnonzero(values >= length)
    while len(beyond):
        again = _encipher(values[beyond], width, keys)
        values[beyond] = again
        beyond = beyond[again >= length]
    return values.astype(np.int64)


def _encipher(values: NDArray[Any], width: int, keys: tuple[int, ...]) -> NDArray[Any]:
    kind = values.dtype.type
    mask, shift = kind((1 << width) - 1), kind(width)
    left, right = values >> shift, values & mask
    for first, second in ((keys[0], keys[1]), (keys[2], keys[3])):
        left ^= _mix(right, width, mask) ^ (kind(first) & mask)
        right ^= _mix(left, width, mask) ^ (kind(second) & mask)
    out: NDArray[Any] = (left << shift) | right
    return out


def _mix(x: Any, width: int, mask: Any) -> Any:
    """Apply Simon's round function: three rotations."""

    def rotated(by: int) -> Any:
        return (x << by | x >> (width - by)) & mask

    return (rotated(1) & rotated(8)) ^ rotated(2)


@functools.lru_cache(_ORDERS)
def _keys(seed: int) -> tuple[int, ...]:
    """Return four keys from a seed, as C++'s ``std::seed_seq`` generates them (its standard, [rand.util.seedseq])."""
    full = (1 << 32) - 1
    state = [0x8B8B8B8B] * 4

    def scramble(x: int) -> int:
        x &= full
        return x ^ x >> 27

    for k, added in enumerate((1, 1 + seed, 2, 3)):
        near, far = (k + 1) % 4, (k + 2) % 4
        first = 1664525 * scramble(state[k] ^ state[near] ^ state[k - 1]) & full
        second = first + added & full
        state[near] = state[near] + first & full
        state[far] = state[far] + second & full
        state[k] = second
    for k in range(4):
        near, far = (k + 1) % 4, (k + 2) % 4
        third = 1566083941 * scramble(state[k] + state[near] + state[k - 1]) & full
        fourth = third - k & full
        state[near] ^= third
        state[far] ^= fourth
        state[k] = fourth
    return tuple(state)

"""Orders: the datapoint at each step as a pure function of seed and step, for whole arrays of steps at once."""

import functools
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from granular.indexing import Ints, check_integer

MAX_SEED: Final = 2**32 - 1  # of pipelines, as in Grain: the keys of its cipher come from 32 bits

_MAX_CACHED: Final = 2  # epochs: one that ends while the next begins
_CHUNK: Final = 1 << 15  # lookups at a time, so that intermediate results stay in the CPU cache
_MIN_BITS: Final = 16  # minimum bits of a block of the cipher; fewer mix badly
_MAX_TABLE: Final = 4096  # datapoints up to which a permutation is computed as a whole


@runtime_checkable
class Order(Protocol):
    """A permutation of ``range(length)`` for every epoch."""

    def lookup(self, places: Ints, length: int, seed: int, epoch: int) -> Ints:
        """Return the indices at these positions of an epoch."""
        ...

    def is_ready(self, length: int, seed: int, epoch: int) -> bool:
        """Return whether a lookup in that epoch is fast enough for an event loop."""
        ...


class Permutation:
    """numpy's permutation, the order of granular 0.21. Takes 8 bytes per datapoint, for each of the last two epochs.

    ::

        source = granular.sources.Epochs(reader, shuffle=granular.shuffle.Permutation(), seed=0)
    """

    def __init__(self) -> None:
        self._cached: dict[tuple[int, int, int], Ints] = {}

    def __reduce__(self) -> tuple[type['Permutation'], tuple[()]]:
        return type(self), ()

    def __repr__(self) -> str:
        return 'Permutation()'

    def lookup(self, places: Ints, length: int, seed: int, epoch: int) -> Ints:
        """Return the indices at these positions of an epoch."""
        key = length, seed, epoch
        permutation = self._cached.get(key)
        if permutation is None:
            permutation = np.random.default_rng(seed=[seed, epoch]).permutation(np.arange(length))
            while len(self._cached) >= _MAX_CACHED:
                self._cached.pop(next(iter(self._cached)), None)
            self._cached[key] = permutation
        return permutation[places]

    def is_ready(self, length: int, seed: int, epoch: int) -> bool:
        """Return whether a lookup in that epoch is fast; the first takes half a second for ten million datapoints."""
        return (length, seed, epoch) in self._cached


class Sequential:
    """The order in which the datapoints are stored."""

    def __repr__(self) -> str:
        return 'Sequential()'

    def lookup(self, places: Ints, length: int, seed: int, epoch: int) -> Ints:
        """Return the positions unchanged."""
        return places

    def is_ready(self, length: int, seed: int, epoch: int) -> bool:
        """Return True."""
        return True


class Index:
    """The order of Google Grain's ``shuffle``, in O(1) memory: each index is computed independently.

    Four rounds of the Simon block cipher (https://eprint.iacr.org/2013/404) over as many bits as an index has, with
    keys that C++'s ``std::seed_seq`` derives from ``seed + epoch``; results out of range are enciphered again (cycle
    walking). For ``2**n + 1`` datapoints, n even and 16 or more, Grain returns one datapoint twice and never the last;
    here these lengths have their own order.
    """

    def __repr__(self) -> str:
        return 'Index()'

    def lookup(self, places: Ints, length: int, seed: int, epoch: int) -> Ints:
        """Return the indices at these positions of an epoch."""
        return permute(places, length, seed + epoch)

    def is_ready(self, length: int, seed: int, epoch: int) -> bool:
        """Return True: about 20 million lookups a second."""
        return True


class Blocks:
    """An order for buckets: blocks of neighbours are read together, and the datapoints of a window of blocks are mixed.

    ::

        dataset = dataset.shuffle(seed=0, order=granular.shuffle.Blocks(block=64, window=128))

    The blocks of an epoch come in the order of :class:`Index`; the datapoints of each ``window`` of blocks are then
    fully mixed by numpy's permutation. One range request therefore reads a whole block, and a source reads at most
    ``window * block`` datapoints ahead. Memory is that of a few windows' permutations, whatever the length, and any
    step can be looked up independently. docs/performance.md shows how well it mixes.

    Args:
      block: number of neighbouring datapoints that are read together.
      window: number of blocks that are mixed.
    """

    def __init__(self, block: int = 64, window: int = 128) -> None:
        self.block, self.window = check_integer('block', block, 1), check_integer('window', window, 1)

    def __repr__(self) -> str:
        return f'Blocks(block={self.block}, window={self.window})'

    def lookup(self, places: Ints, length: int, seed: int, epoch: int) -> Ints:
        """Return the indices at these positions of an epoch."""
        count = -(-length // self.block)
        full = self.window * self.block
        # The last block may be short. The window that contains it is smaller by the missing datapoints, and has it
        # last.
        lacking = count * self.block - length
        slot = int(_unpermute(count - 1, count, seed + epoch))
        short_window = slot // self.window
        windows = (
            np.where(places < short_window * full, places, np.maximum(places + lacking, short_window * full)) // full
        )
        # Positions of that window before the missing datapoints were shifted too far or not at all: assign both to it.
        windows = np.where(
            (places >= short_window * full) & (places < (short_window + 1) * full - lacking), short_window, windows
        )
        indices = np.empty_like(places)
        for window in set(windows.tolist()):
            mask = windows == window
            first = window * self.window
            last = min(first + self.window, count)
            short = window == short_window
            size = (last - first) * self.block - (lacking if short else 0)
            begin = window * full - (lacking if window > short_window else 0)
            slots, within = np.divmod(_mixture(size, seed, epoch, window)[places[mask] - begin], self.block)
            if short:  # swap the window's last slot and that of the short block
                own, end = slot - first, last - first - 1
                slots = np.where(slots == end, own, np.where(slots == own, end, slots))
            indices[mask] = permute(slots + first, count, seed + epoch) * self.block + within
        return indices

    def is_ready(self, length: int, seed: int, epoch: int) -> bool:
        """Return True."""
        return True

    def upcoming(self, steps: Ints, length: int, seed: int) -> tuple[Ints, Ints]:
        """Return the epochs and numbers of the blocks to prefetch now, so that they are available one window later."""
        epochs, places = np.divmod(steps + self.window * self.block, length)
        count = -(-length // self.block)
        epochs, slots = np.divmod(np.unique(epochs * count + places // self.block), count)
        blocks = np.empty_like(slots)
        for epoch in set(epochs.tolist()):
            mask = epochs == epoch
            blocks[mask] = permute(slots[mask], count, seed + epoch)
        return epochs, blocks


def permute(places: Ints, length: int, seed: int) -> Ints:
    """Return a permutation of ``range(length)`` at these positions; the seed is taken modulo 2**32."""
    if length <= 1:
        return np.zeros_like(places)
    if length <= _MAX_TABLE:
        return _table(length, seed % (1 << 32))[places]
    bits, keys = _bits(length), _keys(seed % (1 << 32))
    indices = np.empty_like(places)
    flat_places, flat_indices = places.reshape(-1), indices.reshape(-1)
    for at in range(0, len(flat_places), _CHUNK):
        flat_indices[at : at + _CHUNK] = _walk(flat_places[at : at + _CHUNK], length, bits // 2, keys)
    return indices


@functools.lru_cache(64)
def _table(length: int, seed: int) -> Ints:
    """Compute a small permutation as a whole: most of the cipher's numbers are out of range and need long walks."""
    following = _encipher(np.arange(1 << _MIN_BITS, dtype=np.uint32), _MIN_BITS // 2, _keys(seed)).astype(np.int64)
    while (following[:length] >= length).any():
        far = np.flatnonzero(following >= length)
        following[far] = following[following[far]]
    return following[:length].copy()


@functools.lru_cache(64)
def _unpermute(index: int, length: int, seed: int) -> int:
    """Return the position at which ``permute`` has an index."""
    if length <= 1:
        return 0
    width, keys = _bits(length) // 2, _keys(seed % (1 << 32))
    mask = (1 << width) - 1
    while True:
        left, right = index >> width, index & mask
        for first, second in ((keys[2], keys[3]), (keys[0], keys[1])):
            right ^= (_mix(left, width, mask) ^ second) & mask
            left ^= (_mix(right, width, mask) ^ first) & mask
        index = left << width | right
        if index < length:
            return index


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


@functools.lru_cache(64)
def _keys(seed: int) -> tuple[int, ...]:
    """Return four keys from a seed, as C++'s ``std::seed_seq`` generates them (its standard, [rand.util.seedseq])."""
    count, seeds = 4, (seed,)
    full = (1 << 32) - 1
    state = [0x8B8B8B8B] * count
    lag, rounds = (count - 1) // 2, max(len(seeds) + 1, count)
    near = (count - lag) // 2
    far = near + lag

    def scramble(x: int) -> int:
        x &= full
        return x ^ x >> 27

    for k in range(rounds):
        first_index, second_index = k % count, (k + near) % count
        first = 1664525 * scramble(state[first_index] ^ state[second_index] ^ state[k - 1 if k else -1 % count]) & full
        second = first + (len(seeds) if k == 0 else first_index + (seeds[k - 1] if k <= len(seeds) else 0)) & full
        state[second_index] = state[second_index] + first & full
        state[(k + far) % count] = state[(k + far) % count] + second & full
        state[first_index] = second
    for k in range(rounds, rounds + count):
        first_index, second_index = k % count, (k + near) % count
        third = 1566083941 * scramble(state[first_index] + state[second_index] + state[(k - 1) % count]) & full
        fourth = third - first_index & full
        state[second_index] ^= third
        state[(k + far) % count] ^= fourth
        state[first_index] = fourth
    return tuple(state)


@functools.lru_cache(16)
def _mixture(size: int, seed: int, epoch: int, window: int) -> Ints:
    """Return the permutation of one window."""
    order: Ints = np.random.default_rng(seed=[seed, epoch, window]).permutation(size)
    return order

"""Patterns: from which datasets the elements of a mix come in turn, and how hosts share them out evenly."""

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import Ints
from granular._support.lru import LRU
from granular.aio.pipeline.orders import permute

# Another number here is another division, which states do not fit that were saved within a window.
_LONGEST: Final = 2048  # rounds of a period that is shared out as a whole
_BLOCK: Final = 512  # rounds that are shared out at a time without a period, or with a longer one
_KEPT: Final = 4  # blocks that are kept: the next ones are read ahead
_UNEVEN: Final = 2  # elements of a dataset that a host may have more or less than its share
_RANDOM: Final = 1 << 20  # rounds after which random shares repeat


class Pattern(NamedTuple):
    """The pattern in which the elements of a stage come from several datasets."""

    datasets: int  # their number; 0 if it is not known which elements are of which
    period: int  # number of indices after which it repeats; 0 if it does not, or that is not known

    @property
    def repeats(self) -> bool:
        """True if it repeats so soon that a period is shared out as a whole."""
        return 0 < self.period <= _LONGEST

    def every(self, step: int) -> 'Pattern':
        """Return the pattern of each ``step``-th element."""
        return Pattern(self.datasets, self.period // math.gcd(self.period, step))

    def stretched(self, times: int) -> 'Pattern':
        """Return the pattern in which each element stands so many times."""
        return Pattern(self.datasets, self.period * times)


def mixed(weights: Sequence[int], parts: Sequence[Pattern | None]) -> Pattern:
    """Return the pattern of a mix by ``turns``, given those of its datasets, None for one that has none."""
    divisor = math.gcd(*weights)
    shares = [weight // divisor for weight in weights]
    # A dataset is asked for so many elements in each period of the weights; its own pattern repeats after a multiple.
    repeats = [
        1 if part is None or not part.datasets else part.period // math.gcd(part.period, share)
        for part, share in zip(parts, shares, strict=True)
    ]
    return Pattern(sum(map(size_of, parts)), sum(shares) * math.lcm(*repeats))  # lcm is 0 if one period is not known


def size_of(part: Pattern | None) -> int:
    """Return the number of datasets that are told apart in a part of a mix: 1 if it has no pattern of its own."""
    return 1 if part is None else max(1, part.datasets)


class Shares:
    """The shares of several hosts in elements of several datasets: in each round, one element each.

    Hosts that take turns may get some datasets only: of a mix of two, one on even hosts, the other on odd ones. Where
    turns are not even, each dataset's elements of a round go to the hosts that have got the fewest of it so far. Where
    it is not known which elements are of which dataset, the turns of each round begin at a random host.

    So the elements of a round stay the same, and the element of a host is a pure function of the round: all hosts
    compute the same, from any round on.

    Args:
      host: the number of this host.
      hosts: the number of all.
      pattern: that of the elements.
      owners: returns the number of the dataset of each index.
      outer: the shares of hosts, if the elements of one of them are shared among its parts, such as workers.
    """

    def __init__(
        self, host: int, hosts: int, pattern: Pattern, owners: Callable[[Ints], Ints], outer: 'Shares | None' = None
    ) -> None:
        self._host = host
        self._hosts = hosts
        self._pattern = pattern
        self._outer = outer
        self._owners = owners
        self._outer_stride: int = 1 if outer is None else outer.stride
        self.stride: int = hosts * self._outer_stride
        # The share of a share repeats much later, and takes the rounds of many blocks if the outer one does not repeat.
        self._repeats = outer is None and pattern.repeats
        self._random = not pattern.datasets or (outer is not None and not outer._repeats)
        self._size = pattern.period * -(-_BLOCK // pattern.period) if self._repeats else _BLOCK  # rounds of a block
        self._blocks: LRU[tuple[int, int, int], tuple[Ints | None]] = LRU(_KEPT)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, '_blocks': LRU(_KEPT)}

    def taken(self, rounds: Ints) -> Ints:
        """Return the element that this host takes in rounds, given the element that each begins with.

        The rounds are those of one run: they differ by multiples of ``stride``.
        """
        if not len(rounds):
            return rounds
        units, within = rounds // self._outer_stride, int(rounds[0]) % self._outer_stride
        if self._hosts > 1:
            units = units + self._offsets(units // self._hosts, int(units[0]) % self._hosts, within)
        return self._of_units(units, within)

    def _of_units(self, units: Ints, within: int) -> Ints:
        """Return the indices of elements of the outer host, by their numbers."""
        outer = self._outer
        return units if outer is None else outer.taken(within + units * self._outer_stride)

    def _offsets(self, numbers: Ints, phase: int, within: int) -> Ints:
        """Return the elements of rounds that this host takes, by the numbers of the rounds."""
        if self._random:
            firsts: Ints = (self._host + permute(numbers % _RANDOM, _RANDOM, self._outer_stride)) % self._hosts
            return firsts
        blocks, places = np.divmod(numbers, self._size)
        # Hosts change places from block to block, so that none has more of a dataset at the end of each of them.
        columns = (self._host + blocks) % self._hosts
        tables = np.zeros_like(blocks) if self._repeats else blocks
        offsets = np.full_like(numbers, self._host)
        for number in np.unique(tables).tolist():
            if (table := self._block(number, phase, within)) is not None:
                mask = tables == number
                offsets[mask] = table[places[mask], columns[mask]]
        return offsets

    def _block(self, block: int, phase: int, within: int) -> Ints | None:
        """Return the element that each host takes in each round of a block; None if turns are even."""
        key = block, phase, within
        if (known := self._blocks.get(key)) is not None:
            return known[0]
        firsts = np.arange(block * self._size, (block + 1) * self._size) * self._hosts + phase
        units = (firsts[:, None] + np.arange(self._hosts)).reshape(-1)
        owners = self._owners(self._of_units(units, within)).reshape(self._size, self._hosts)
        table = shared(owners)
        self._blocks.put(key, (table,))
        return table


def nested(parts: Sequence[tuple[int, int]], pattern: Pattern, owners: Callable[[Ints], Ints]) -> Shares:
    """Return the shares of a host that is a part of others: the number of each part, and of all, from the outermost."""
    shares = Shares(*parts[0], pattern, owners)
    for number, count in parts[1:]:
        shares = Shares(number, count, pattern, owners, shares)
    return shares


def shared(owners: Ints) -> Ints | None:
    """Return the element of each round that each host takes, given the dataset of each element of each round; None if
    hosts that take turns have their shares.
    """
    rounds, hosts = owners.shape
    _, owners, sizes = np.unique(owners, return_inverse=True, return_counts=True)
    rarity = np.argsort(np.argsort(sizes, kind='stable'), kind='stable')  # of each dataset; 0 for the rarest
    owners = rarity[owners].reshape(rounds, hosts)
    if all(_is_even(owners == owner) for owner in range(len(sizes))):
        return None
    cells = (owners + np.arange(rounds)[:, None] * len(sizes)).reshape(-1)
    counts = np.bincount(cells, minlength=rounds * len(sizes)).reshape(rounds, -1)
    totals, by_owner = np.cumsum(counts, axis=0), np.argsort(owners, axis=1, kind='stable')
    table = np.empty((rounds, hosts), np.int64)
    taken = np.zeros((len(sizes), hosts), np.int64)
    for number in range(rounds):
        present = counts[number].nonzero()[0]
        need = totals[number, present][:, None] - taken[present] * hosts
        # A host whose need of a later dataset is larger leaves this one to others.
        later = np.maximum.accumulate(need[::-1])[::-1]
        elements, free = by_owner[number], np.arange(hosts)
        for i, owner in enumerate(present.tolist()):
            count, takers = int(counts[number, owner]), free
            if i + 1 < len(present):
                by_need = (later[i + 1] - need[i])[free].argsort(kind='stable')
                takers, free = free[by_need[:count]], np.sort(free[by_need[count:]])
            table[number, takers], elements = elements[:count], elements[count:]
            taken[owner, takers] += 1
    return table


def _is_even(chosen: NDArray[np.bool_]) -> bool:
    """Return whether hosts that take turns have their share of the elements that are chosen, after each round."""
    hosts = chosen.shape[1]
    taken = np.cumsum(chosen, axis=0)
    excess = np.abs(taken * hosts - taken.sum(axis=1, keepdims=True))
    return bool(excess.max() < _UNEVEN * hosts and excess[-1].max() < hosts)

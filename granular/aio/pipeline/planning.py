"""Plans of rows and batches, made of the counts of sizes alone: no element is read, and none is named.

A plan has classes of sizes, so many elements of each. It tells which *slots* a row or batch takes. Slot ``i`` is the
``i``-th element of an epoch sorted by class, each class in the order of the epoch. As all epochs have the same counts,
they have the same plan, and as many rows.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import Ints, sums_of

POINTS: Final = 512  # classes, at most, by default; and sizes among which tops are chosen
_CLASSES: Final = 64, 200  # by default: for few elements, and with 1 % of padding
_IN_A_CLASS: Final = 100, 250  # elements in a class, so that one has other companions: up to that padding, and for less
_SCALE: Final = 1 << 10  # of square roots, which are rounded to integers
_LARGEST: Final = 1 << 61


def ranges(starts: NDArray[Any], counts: Ints) -> Ints:
    """Return the integers of many ranges, one behind the other: so many from each start on."""
    ends = np.cumsum(counts)
    out: Ints = np.repeat(starts - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)
    return out


# --- classes


def default_classes(elements: int, most: int = POINTS) -> int:
    """Return the number of classes that leaves enough elements in each, if there are many."""
    least, some = _CLASSES
    few, many = _IN_A_CLASS
    return max(least, min(some, elements // few), min(most, elements // many))


def class_tops(values: Ints, counts: Ints, classes: int) -> Ints:
    """Choose at most so many of some sizes, to which all are rounded up: the last size of each class.

    Rounding adds least where the width of a class is in proportion to the square root of the gaps between elements, so
    the square roots of count times gap are divided into equal parts.

    Args:
      values: the sizes, ascending.
      counts: the number of elements of each.
      classes: the number of classes.
    """
    if len(values) <= classes:
        return values
    gaps = np.diff(values, prepend=values[0] - 1)
    shares = np.cumsum(np.sqrt(counts * gaps.astype(np.float64)) * _SCALE + 1, dtype=np.float64).astype(np.int64)
    parts = (shares - 1) * classes // shares[-1]
    tops: Ints = values[np.append(parts[1:] != parts[:-1], True)]
    return tops


def bucket_tops(values: Ints, counts: Ints, buckets: int) -> Ints:
    """Return the tops, of at most so many buckets, with the least padding: elements are padded to the next top.

    They are found by dynamic programming, in integers, over at most ``POINTS`` of the sizes.

    Args:
      values: the sizes, ascending.
      counts: the number of elements of each.
      buckets: the number of buckets.
    """
    tops = class_tops(values, counts, POINTS)
    if len(tops) <= buckets:
        return tops
    before = np.append(0, np.cumsum(counts)[np.searchsorted(values, tops)])
    # cost[i, j]: of a bucket from the i-th point on, with the j-th as its top.
    cost = (before[None, 1:] - before[:-1, None]) * tops
    cost[np.tril_indices(len(tops), -1)] = _LARGEST
    least, begins = cost[0], []
    for _ in range(buckets - 1):
        totals = cost.copy()
        totals[1:] += least[:-1, None]
        begins.append(totals.argmin(axis=0))
        least = totals.min(axis=0)
    chosen, last = [], len(tops) - 1
    for begin in reversed(begins):
        chosen.append(last)
        last = int(begin[last]) - 1
        if last < 0:
            break
    else:
        chosen.append(last)
    return tops[chosen[::-1]]


# --- rows of whole documents


class DocumentRows(NamedTuple):
    """Rows of whole documents: rows of one pattern have equally many documents of each class.

    The arrays ``firsts`` and ``counts`` have an entry for each class of each pattern: the first slot, which belongs to
    the first row of the pattern, and the number of documents in each row.
    """

    stops: Ints  # the number of rows up to the end of each pattern
    entries: Ints  # the first entry of each pattern, and the number of all
    firsts: Ints
    counts: Ints

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.stops[-1]) if len(self.stops) else 0

    @property
    def segments(self) -> int:
        """The largest number of documents in a row."""
        return int(sums_of(self.counts, np.diff(self.entries)).max(initial=0))

    def slots(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the slots of rows, one row behind the other, and the number of those of each row."""
        patterns = np.searchsorted(self.stops, rows, side='right')
        within = rows - np.append(0, self.stops)[patterns]
        sizes = self.entries[patterns + 1] - self.entries[patterns]
        chosen = ranges(self.entries[patterns], sizes)
        counts = self.counts[chosen]
        return ranges(self.firsts[chosen] + np.repeat(within, sizes) * counts, counts), sums_of(counts, sizes)


def fit(
    sizes: Ints, counts: Ints, lengths: Ints, alignments: Ints | None = None, max_segments: int | None = None
) -> DocumentRows:
    """Put whole documents into rows: the largest first, each into the fullest row that has enough space.

    Args:
      sizes: the size of the documents of each class, by feature: of shape (classes, features). None is longer than a
        row, and none is empty.
      counts: the number of documents of each class.
      lengths: the length of a row, by feature.
      alignments: documents begin at multiples of these, by feature.
      max_segments: the largest number of documents in a row.
    """
    most = _LARGEST if max_segments is None else max_segments
    steps = sizes if alignments is None else -(-sizes // alignments) * alignments
    order = np.lexsort((sizes.sum(axis=1), (sizes / lengths).max(axis=1)))[::-1]
    rows = _OpenRows(len(lengths))
    for number in order.tolist():
        size, step, left = sizes[number], steps[number], int(counts[number])
        fitting = rows.fitting(size, most)
        if len(fitting) and left:
            each = np.minimum(_documents(rows.space[fitting], size, step), most - rows.used[fitting])
            taken = np.cumsum(rows.rows[fitting] * each)
            full = int(np.searchsorted(taken, left, side='right'))  # groups of rows that take as many as they can
            rows.put(fitting[:full], number, each[:full], step)
            left -= int(taken[full - 1]) if full else 0
            if full < len(fitting):
                left = _divide(rows, int(fitting[full]), number, left, int(each[full]), step)
        if left:
            each_new = min(int(_documents(lengths[None], size, step)[0]), most)
            _divide(rows, rows.open(-(-left // each_new), lengths), number, left, each_new, step)
    return rows.result()


def _documents(space: Ints, size: Ints, step: Ints) -> Ints:
    """Return how many documents of a size fit into rows with this space, of shape (rows, features)."""
    present = size > 0
    fitting: Ints = ((space[:, present] - size[present]) // step[present] + 1).min(axis=1)
    return fitting


def _divide(rows: '_OpenRows', group: int, number: int, left: int, each: int, step: Ints) -> int:
    """Put the last documents of a class into a group of rows, not all of which are needed; return 0, for none left."""
    full, rest = divmod(left, each)
    if rest:
        rows.put(np.array([rows.split(group, 1)]), number, np.array([rest]), step)
    if full:
        part = group if full == rows.rows[group] else rows.split(group, full)
        rows.put(np.array([part]), number, np.array([each]), step)
    return 0


class _OpenRows:
    """Groups of rows with documents of the same classes: their space, and their last entry."""

    def __init__(self, features: int) -> None:
        self.groups = 0
        self.space = np.zeros((64, features), np.int64)
        self.used = np.zeros(64, np.int64)  # documents in a row
        self.rows = np.zeros(64, np.int64)
        self._last = np.full(64, -1, np.int64)
        self._entries: list[tuple[Ints, Ints, Ints]] = []  # of the entries: the one before, class, documents in a row
        self._count = 0

    def fitting(self, size: Ints, most: int) -> Ints:
        """Return the groups with space for a document, the fullest first."""
        n = self.groups
        fits = (self.space[:n] >= size).all(axis=1) & (self.used[:n] < most) & (self.rows[:n] > 0)
        chosen = np.flatnonzero(fits)
        return chosen[np.argsort(self.space[chosen].sum(axis=1), kind='stable')]

    def put(self, groups: Ints, number: int, each: Ints, step: Ints) -> None:
        """Put so many documents of a class into each row of some groups."""
        if not len(groups):
            return
        self._entries.append((self._last[groups], np.full(len(groups), number), each))
        self._last[groups] = np.arange(self._count, self._count + len(groups))
        self._count += len(groups)
        self.space[groups] -= each[:, None] * step
        self.used[groups] += each

    def open(self, rows: int, lengths: Ints) -> int:
        """Return a new group of empty rows."""
        return self._add(rows, lengths, 0, -1)

    def split(self, group: int, rows: int) -> int:
        """Return a new group of some of the rows of another one."""
        self.rows[group] -= rows
        return self._add(rows, self.space[group], int(self.used[group]), int(self._last[group]))

    def _add(self, rows: int, space: Ints, used: int, last: int) -> int:
        group = self.groups
        if group == len(self.rows):
            self.space = _doubled(self.space)
            self.used = _doubled(self.used)
            self.rows = _doubled(self.rows)
            self._last = _doubled(self._last)
        self.space[group] = space
        self.used[group] = used
        self.rows[group] = rows
        self._last[group] = last
        self.groups += 1
        return group

    def result(self) -> DocumentRows:
        """Return the rows, with the entries of each group in the order in which they were put."""
        none = np.zeros(0, np.int64)
        before, numbers, each = (np.concatenate([none, *(part[i] for part in self._entries)]) for i in range(3))
        groups = np.flatnonzero(self.rows[: self.groups])
        rows, last = self.rows[groups], self._last[groups]
        owners, entries, depths = [none], [none], [none]
        own, depth = np.arange(len(groups)), 0
        while len(own):
            owners.append(own)
            entries.append(last)
            depths.append(np.full(len(own), -depth))
            last = before[last]
            own, last, depth = own[last >= 0], last[last >= 0], depth + 1
        owner, entry = np.concatenate(owners), np.concatenate(entries)
        order = np.lexsort((np.concatenate(depths), owner))
        owner, entry = owner[order], entry[order]
        classes, counted = numbers[entry], each[entry]
        # The slots of a class go to its entries in turn.
        by_class = np.argsort(classes, kind='stable')
        taken = (counted * rows[owner])[by_class]
        starts = np.cumsum(taken) - taken
        firsts = np.empty(len(entry), np.int64)
        firsts[by_class] = starts
        pointers = np.append(0, np.cumsum(np.bincount(owner, minlength=len(groups))))
        return DocumentRows(np.cumsum(rows), pointers, firsts, counted)


def _doubled(array: Ints) -> Ints:
    return np.concatenate([array, np.zeros_like(array)])


def most_segments(sizes: Ints, counts: Ints, length: int) -> int:
    """Return a number of pieces that no row of concatenated documents exceeds: of the shortest, and one more at its
    end.

    Args:
      sizes: the sizes, ascending and positive.
      counts: the number of documents of each.
      length: positions of a row.
    """
    if not len(sizes):
        return 0
    total = np.cumsum(sizes * counts)
    whole = int(np.searchsorted(total, length, side='right'))  # sizes of which all documents fit into one row
    fitting = int(counts[:whole].sum())
    if whole < len(sizes):
        fitting += (length - (int(total[whole - 1]) if whole else 0)) // int(sizes[whole])
    return fitting + 2


# --- batches of a budget


class Budget(NamedTuple):
    """Batches of elements of one bucket each: groups of ``align`` batches. The elements of a bucket are divided evenly
    over its batches, which have at most ``per_batch``.
    """

    elements: Ints  # in the batches, by bucket
    firsts: Ints  # the first slot of each bucket
    stops: Ints  # the number of groups up to the end of each bucket
    align: int

    @classmethod
    def of(cls, per_batch: Ints, counts: Ints, align: int, drop_remainder: bool) -> 'Budget':
        """Return the batches of so many elements of each bucket; those of few elements may have none."""
        size = per_batch * align
        groups = counts // size if drop_remainder else -(-counts // size)
        return cls(np.minimum(counts, groups * size), np.cumsum(counts) - counts, np.cumsum(groups), align)

    @property
    def groups(self) -> int:
        """The number of groups."""
        return int(self.stops[-1]) if len(self.stops) else 0

    @property
    def most(self) -> Ints:
        """The largest number of elements of a batch, by bucket; 1 if it has no batches."""
        batches = np.maximum(1, np.diff(self.stops, prepend=0) * self.align)
        most: Ints = np.maximum(1, -(-self.elements // batches))
        return most

    def slots(self, groups: Ints, within: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the slots of batches, each given by its group and its number there; the number of elements of each,
        and its bucket.
        """
        buckets = np.searchsorted(self.stops, groups, side='right')
        before = np.append(0, self.stops)
        numbers = (groups - before[buckets]) * self.align + within
        each, more = np.divmod(self.elements[buckets], (self.stops - before[:-1])[buckets] * self.align)
        starts = self.firsts[buckets] + numbers * each + np.minimum(numbers, more)
        counts = each + (numbers < more)
        return ranges(starts, counts), counts, buckets


def paddings(sizes: Ints, buckets: Sequence[int] = (8, 64)) -> dict[str, float]:
    """Return the parts of plans of some sizes that are padding: of whole documents in rows four times as long as the
    longest, and of batches in numbers of buckets.
    """
    values, counts = np.unique(sizes[sizes > 0], return_counts=True)
    total = int((values * counts).sum())
    if not total:
        return {}
    length = 1 << (4 * int(values[-1]) - 1).bit_length()
    classes = class_tops(values, counts, default_classes(len(sizes)))
    of_classes = np.bincount(np.searchsorted(classes, values), counts).astype(np.int64)
    rows = fit(classes[:, None], of_classes, np.array([length])).rows
    shares = {f'rows of {length}': 1 - total / (rows * length)}
    for number in buckets:
        tops = bucket_tops(values, counts, number)
        shares[f'{number} buckets'] = 1 - total / int((tops[np.searchsorted(tops, values)] * counts).sum())
    return shares


def sorted_by_class(classes: NDArray[Any]) -> NDArray[Any]:
    """Return the positions of an epoch, sorted by class: the element of each slot."""
    order = np.argsort(classes, kind='stable')
    return order.astype(np.int32) if len(classes) <= np.iinfo(np.int32).max else order

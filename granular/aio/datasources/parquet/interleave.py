"""The order in which rows of several files are interleaved, computed arithmetically, without listing rows."""

import bisect
import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from granular._support.indexing import Ints


class RowOrder:
    """Takes one row from each open file in turn; a file that ends is replaced by the next, as in
    ``IterDataset.interleave``.

    Each round takes one row from each of ``cycle`` slots. A slot whose file has ended yields no row in that round, and
    opens the next file in the following one. Between two rounds in which files open or end, the set of open files is
    constant, so that a division converts a position into its file and row. Memory: 8 bytes for each slot and file.
    ``lengths`` has the rows of each file, ``cycle`` the number of files that are open at a time.
    """

    def __init__(self, lengths: Sequence[int], cycle: int) -> None:
        self.lengths = list(lengths)
        self._slots: list[int] = []
        self.begins: list[int] = []  # the round in which each file opens
        free = [(0, slot) for slot in range(min(cycle, len(self.lengths)))]
        changes: dict[int, set[int]] = {0: set()}  # the files that open or end in a round
        for number, length in enumerate(self.lengths):
            opened, slot = heapq.heappop(free)
            self.begins.append(opened)
            self._slots.append(slot)
            heapq.heappush(free, (opened + length + 1, slot))
            for edge in (opened, opened + length):
                changes.setdefault(edge, set()).symmetric_difference_update([number])
        edges = sorted(changes)
        self._open: list[list[int]] = []  # the files that are open from each edge on, by slot
        current: set[int] = set()
        for edge in edges:
            current ^= changes[edge]
            self._open.append(sorted(current, key=self._slots.__getitem__))
        self._counts = np.array([max(1, len(numbers)) for numbers in self._open], np.int64)
        self._table = np.zeros((len(edges), int(self._counts.max())), np.int64)
        for i, numbers in enumerate(self._open):
            self._table[i, : len(numbers)] = numbers
        rows = np.diff(edges) * [len(numbers) for numbers in self._open[:-1]]
        self._bases = np.cumsum([0, *rows], dtype=np.int64)  # the position of the first row from each edge on
        self._edges, self._begin_array = np.array(edges, np.int64), np.array([*self.begins, 0], np.int64)

    def lookup(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the file of each position, and the row in that file."""
        stretch = np.searchsorted(self._bases, positions, side='right') - 1
        turns, slot = np.divmod(positions - self._bases[stretch], self._counts[stretch])
        files = self._table[stretch, slot]
        return files, self._edges[stretch] + turns - self._begin_array[files]

    def consumed(self, position: int) -> tuple[dict[int, int], int]:
        """Return, for a position, the rows taken from each open file, and the first unopened file.

        A file before the first unopened one that is not among the open ones has been read completely.
        """
        stretch = int(np.searchsorted(self._bases, position, side='right')) - 1
        numbers = self._open[stretch]
        turns, slot = divmod(position - int(self._bases[stretch]), max(1, len(numbers)))
        now = int(self._edges[stretch]) + turns
        taken = {number: now - self.begins[number] + (i < slot) for i, number in enumerate(numbers)}
        return taken, bisect.bisect_right(self.begins, now)

    def upcoming(self, position: int, blocks: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
        """Yield the blocks of rows that begin after a position, as (file, block), in the order in which they are
        needed; those of each file are given by their ends, which increase.
        """
        taken, unopened = self.consumed(position)
        coming: list[tuple[int, int, int, int]] = []  # round, slot, file, block

        def push(number: int, block: int) -> None:
            stops = blocks[number]
            if block < len(stops):
                first = stops[block - 1] if block else 0
                heapq.heappush(coming, (self.begins[number] + first, self._slots[number], number, block))

        for number, row in taken.items():
            push(number, bisect.bisect_right(blocks[number], row - 1) + 1 if row else 0)
        while coming or unopened < len(self.lengths):
            while unopened < len(self.lengths) and (not coming or self.begins[unopened] <= coming[0][0]):
                push(unopened, 0)
                unopened += 1
            if coming:
                _, _, number, block = heapq.heappop(coming)
                yield number, block
                push(number, block + 1)

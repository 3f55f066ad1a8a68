"""The order in which rows of several files are interleaved, computed arithmetically, without listing rows."""

import bisect
import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from granular.indexing import Ints


class RowOrder:
    """Takes one row from each open file in turn; a file that ends is replaced by the next, as in
    ``IterDataset.interleave``.

    Each round takes one row from each of ``cycle`` slots. A slot whose file has ended yields no row in that round, and
    opens the next file in the following one. Between two rounds in which files open or end, the set of open files is
    constant, so that a division converts a position into its file and row. Memory: 8 bytes for each slot and file.

    Args:
      lengths: rows of each file.
      cycle: number of files that are open at a time.
    """

    def __init__(self, lengths: Sequence[int], cycle: int) -> None:
        self.lengths = list(lengths)
        begins: list[int] = []  # the round in which each file opens
        slots: list[int] = []
        free = [(0, slot) for slot in range(min(cycle, len(self.lengths)))]
        for length in self.lengths:
            opened, slot = heapq.heappop(free)
            begins.append(opened)
            slots.append(slot)
            heapq.heappush(free, (opened + length + 1, slot))
        self.begins, self._slots = begins, slots
        ends = [opened + length for opened, length in zip(begins, self.lengths, strict=True)]
        self._edges = sorted({0, *begins, *ends})
        open_files: list[list[int]] = []
        current: set[int] = set()
        opening: dict[int, list[int]] = {}
        closing: dict[int, list[int]] = {}
        for number, (opened, ended) in enumerate(zip(begins, ends, strict=True)):
            if opened < ended:
                opening.setdefault(opened, []).append(number)
                closing.setdefault(ended, []).append(number)
        for edge in self._edges:
            current |= set(opening.get(edge, ()))
            current -= set(closing.get(edge, ()))
            open_files.append(sorted(current, key=slots.__getitem__))
        self._open = open_files
        self._counts = np.array([max(1, len(numbers)) for numbers in open_files], np.int64)
        self._table = np.zeros((len(open_files), max(1, int(self._counts.max()))), np.int64)
        for i, numbers in enumerate(open_files):
            self._table[i, : len(numbers)] = numbers
        rounds = np.diff(self._edges)
        rows = [len(numbers) * count for numbers, count in zip(open_files, rounds.tolist(), strict=False)]
        self._bases = np.concatenate([[0], np.cumsum(np.array(rows, np.int64))]).astype(np.int64)
        self._bases_list = self._bases.tolist()
        self._edge_array, self._begin_array = np.array(self._edges, np.int64), np.array([*begins, 0], np.int64)

    def __len__(self) -> int:
        return sum(self.lengths)

    def lookup(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the file of each position, and the row in that file."""
        stretch = np.searchsorted(self._bases, positions, side='right') - 1
        turns, slot = np.divmod(positions - self._bases[stretch], self._counts[stretch])
        files = self._table[stretch, slot]
        return files, self._edge_array[stretch] + turns - self._begin_array[files]

    def consumed(self, position: int) -> tuple[dict[int, int], int]:
        """Return, for a position, the rows taken from each open file, and the first unopened file.

        A file before the first unopened one that is not among the open ones has been read completely.
        """
        stretch = bisect.bisect_right(self._bases_list, position) - 1
        numbers = self._open[stretch]
        turns, slot = divmod(position - self._bases_list[stretch], max(1, len(numbers)))
        now = self._edges[stretch] + turns
        taken = {number: now - self.begins[number] + (i < slot) for i, number in enumerate(numbers)}
        return taken, bisect.bisect_right(self.begins, now)

    def upcoming(self, position: int, blocks: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
        """Yield the blocks of rows that begin after a position, as (file, block), in the order in which they are
        needed.

        The blocks of each file are given by their ends, which increase.
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

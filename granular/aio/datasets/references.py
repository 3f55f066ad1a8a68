"""References of the refs layout: for each datapoint and key, the first record and the number of records."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import Ints, cut_into
from granular.aio.bags.bag import Bag
from granular.aio.bags.records import Adjacent, Rows, compared, read_joined
from granular.aio.runtime.threads import offload
from granular.aio.stores.fanout import retry_if_corrupt
from granular.errors import CorruptDatasetError
from granular.formats.bit_packing import pack
from granular.formats.checksums import crc32c
from granular.formats.dataset_index import ANY, RUNS, SAME, digest_of
from granular.formats.layout import Spec, is_sequence, unpack_many_refs, unpack_refs

Referenced = tuple[Ints, Ints]
"""The first record and the number of records of datapoints, both of shape (datapoints, keys); in the columns layout, of
shapes (datapoints, 1) and (1, 1).
"""

_SPAN: Final = 1 << 15  # datapoints whose references are unpacked at a time


class References:
    """The references of all datapoints: for each key, the first records and the numbers of records, which take 8 bytes
    per datapoint; None for a key whose datapoint i has record i, as for most scalars.
    """

    def __init__(self, tables: list[tuple[NDArray[np.uint32], NDArray[np.uint32]] | None]) -> None:
        self.tables = tables

    @classmethod
    async def load(cls, refs: Bag, spec: Spec) -> 'References':
        """Read and unpack a whole ``refs.bag``."""
        if refs.length * (len(spec) + 1) > refs.size:
            # Each reference takes at least one byte, and so does their number.
            raise CorruptDatasetError(
                f'{refs.name}: references of {refs.length} datapoints to {len(spec)} keys cannot fit {refs.size} bytes'
            )
        firsts, counts = np.empty((2, len(spec), refs.length), np.uint32)
        for start in range(0, refs.length, _SPAN):
            stop = min(start + _SPAN, refs.length)
            first, count = await _read_references(refs, spec, range(start, stop))
            firsts[:, start:stop], counts[:, start:stop] = first.T, count.T
        return cls._of(firsts, counts, spec)

    @classmethod
    def unpack(cls, records: list[bytes], spec: Spec, name: str) -> 'References':
        """Unpack all records of a ``refs.bag``."""
        first, count = unpack_refs(records, spec, name)
        _check(first, count, name)
        return cls._of(first.T.astype(np.uint32), count.T.astype(np.uint32), spec)

    @classmethod
    def _of(cls, firsts: NDArray[np.uint32], counts: NDArray[np.uint32], spec: Spec) -> 'References':
        """Make references of the first records and the numbers of records, both of shape (keys, datapoints)."""
        indices = np.arange(firsts.shape[1], dtype=np.uint32)
        same = [not is_sequence(kind) and np.array_equal(firsts[i], indices) for i, kind in enumerate(spec.values())]
        return cls([None if omitted else (firsts[i].copy(), counts[i].copy()) for i, omitted in enumerate(same)])

    def pack(self, spec: Spec) -> tuple[list[int], list[list[bytes]]]:
        """Return the kind of the references of each key, and the pages of two tables for each, as in an index."""
        kinds: list[int] = []
        tables: list[list[bytes]] = []
        for kind, pair in zip(spec.values(), self.tables, strict=True):
            if pair is None:
                kinds.append(SAME)
                tables += [[], []]
                continue
            firsts, counts = (column.astype(np.int64) for column in pair)
            ends = np.cumsum(counts)
            if is_sequence(kind) and ((firsts == ends - counts) | (counts == 0)).all():
                kinds.append(RUNS)
                tables += [pack(np.append(0, ends)), []]
            else:
                kinds.append(ANY)
                tables += [pack(_extended(firsts)), pack(_extended(counts))]
        return kinds, tables

    def digest(self, spec: Spec) -> str:
        """Return the digest that an index has of the references."""
        kinds, tables = self.pack(spec)
        return digest_of([*kinds, *(crc32c(page) for pages in tables for page in pages)])

    def at(self, indices: Ints) -> tuple[Ints, Ints]:
        """Return the first record and the number of records, both of shape (datapoints, keys)."""
        firsts = np.empty((len(indices), len(self.tables)), np.int64)
        counts = np.ones((len(indices), len(self.tables)), np.int64)
        for key, table in enumerate(self.tables):
            firsts[:, key] = indices if table is None else table[0][indices]
            if table is not None:
                counts[:, key] = table[1][indices]
        return firsts, counts

    def at_one(self, index: int) -> list[tuple[int, int]]:
        """Return the first record and the number of records of each key of one datapoint."""
        return [(index, 1) if table is None else (int(table[0][index]), int(table[1][index])) for table in self.tables]


def _extended(numbers: Ints) -> Ints:
    """Return numbers with the last one repeated, as a table has one number more than records."""
    return np.append(numbers, numbers[-1:] if len(numbers) else 0)


def unpack_rows(rows: Rows, records: list[bytes], spec: Spec) -> tuple[Ints, Ints]:
    """Return the results of ``unpack_refs`` for the records of many bags, which are unpacked together."""
    try:
        return unpack_refs(records, spec, 'references')
    except CorruptDatasetError:
        for (bag, _), own in zip(rows.each(), cut_into(records, rows.counts.tolist()), strict=True):
            unpack_refs(own, spec, bag.name)  # raises an error that names the bag
        raise


def unpack_joined(rows: Rows, records: Adjacent, spec: Spec) -> tuple[Ints, Ints]:
    """Return the result of ``unpack_rows`` for many records, after they were compared with their checksums."""
    compared(rows, records, False)
    try:
        return unpack_many_refs(records.data, records.limits, spec, 'references')
    except CorruptDatasetError:
        return unpack_rows(rows, records.split(), spec)  # raises an error that names the bag


async def _read_references(refs: Bag, spec: Spec, indices: range) -> tuple[Ints, Ints]:
    async def read() -> tuple[Ints, Ints]:
        rows = Rows.of(refs, np.arange(indices.start, indices.stop))
        first, count = await offload(unpack_joined, rows, await read_joined(rows), spec)
        _check(first, count, f'{refs.name}: datapoints {indices.start} to {indices.stop}')
        return first, count

    return await retry_if_corrupt(refs.is_remote, read)


def _check(firsts: Ints, counts: Ints, name: str) -> None:
    if (firsts < 0).any() or (counts < 0).any() or (firsts + counts >> 32).any():
        raise CorruptDatasetError(f'{name}: references point to no records')

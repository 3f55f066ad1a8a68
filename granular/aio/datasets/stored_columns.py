"""Many datapoints, given by their records, for the bags of a dataset that is being written."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from granular._support.indexing import Ints
from granular.aio.bags.output import BagOutput
from granular.aio.paths.path import Path
from granular.errors import CorruptDatasetError
from granular.formats.layout import LIMIT, Spec, is_sequence, pack_refs

StoredColumn = Sequence[Any] | tuple[Ints, Ints]
"""The records of datapoints for a key, or lists of records for a sequence; or, of a bag that is copied, the first
record and the number of records of each datapoint."""


def add_columns(
    bags: Mapping[str, BagOutput], refs: BagOutput | None, spec: Spec, columns: Mapping[str, StoredColumn]
) -> None:
    """Add datapoints, at least one, to the buffers of their bags, without writing them."""
    references: list[Any] = []
    for key, kind in spec.items():
        column: Any = columns[key]
        bag = bags[key]
        many = refs is not None and is_sequence(kind)
        if isinstance(column, tuple):
            firsts, counts = column
        else:
            totals = [len(records) for records in column] if many else [1] * len(column)
            counts = np.array(totals, np.int64)
            firsts = bag.length + np.cumsum(counts) - counts
            bag.extend([record for records in column for record in records] if many else column)
        if many:
            pairs = zip(firsts.tolist(), counts.tolist(), strict=True)
            references.append([[first, count] if count else [] for first, count in pairs])
        else:
            references.append(firsts.tolist())
    if refs is not None:
        refs.extend(list(map(pack_refs, map(list, zip(*references, strict=True)))))


async def check_ahead(name: str, path: Path, index: int, record: bytes) -> None:
    """Check that a column which is longer than the others holds the record that is appended again."""
    entry = LIMIT * index
    table = await path.with_suffix('.idx').read_range(max(0, entry - LIMIT), entry + LIMIT)
    start = int.from_bytes(table[:LIMIT], 'little') if entry else 0
    stop = int.from_bytes(table[-LIMIT:], 'little')
    if await path.read_range(start, stop) != record:
        raise CorruptDatasetError(
            f'{name}: datapoint {index}, key {path.stem!r}: the column holds {stop - start} bytes that are '
            f'not the {len(record)} appended: append the same datapoints as the previous writer'
        )

"""Many datapoints, given by their records, for the bags of a dataset that is being written."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from granular._support.indexing import Ints
from granular.aio.bags.output import BagOutput
from granular.aio.bags.records import Adjacent
from granular.aio.datasets.column_reads import JoinedColumn
from granular.aio.paths.path import Path
from granular.errors import CorruptDatasetError
from granular.formats.layout import LIMIT, Spec, is_sequence, pack_many_refs

StoredColumn = JoinedColumn | Sequence[Any] | tuple[Ints, Ints]
"""The records of datapoints for a key, in one buffer, or a list of them, or of lists of them for a sequence; or, of a
bag that is copied, the first record and the number of records of each datapoint."""


def add_columns(
    bags: Mapping[str, BagOutput], refs: BagOutput | None, spec: Spec, columns: Mapping[str, StoredColumn]
) -> None:
    """Add datapoints, at least one, to the buffers of their bags, without writing them."""
    many = [refs is not None and is_sequence(kind) for kind in spec.values()]
    references: list[tuple[Ints, Ints]] = []
    for key, is_many in zip(spec, many, strict=True):
        column, bag = columns[key], bags[key]
        if type(column) is tuple:
            references.append(column)
            continue
        records, counts = column if isinstance(column, JoinedColumn) else _joined(column, is_many)
        counts = np.ones(len(records.limits) - 1, np.int64) if counts is None else counts
        references.append((bag.length + np.cumsum(counts) - counts, counts))
        bag.extend(records)
    if refs is not None:
        firsts, counts = (np.stack([pair[i] for pair in references], axis=1) for i in (0, 1))
        refs.extend(Adjacent(*pack_many_refs(firsts, counts, many)))


def _joined(column: Any, many: bool) -> JoinedColumn:
    if not many:
        return JoinedColumn(Adjacent.of(column))
    counts = np.fromiter(map(len, column), np.int64, len(column))
    return JoinedColumn(Adjacent.of([record for records in column for record in records]), counts)


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

"""Read columns of many datapoints of many datasets in one fan-out."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple, Self, TypeVar

import numpy as np

from granular._support.indexing import Ints, cut_into, owner_of, sums_of
from granular.aio.bags.records import Adjacent, Rows, compared, read_adjacent, read_joined, read_records
from granular.aio.datasets.codec import Field, decode_records, decoding, raw
from granular.aio.datasets.columns import Choice, Columns, Datapoint
from granular.aio.datasets.masks import picked
from granular.aio.datasets.picks import BAGS, MEMORY, Picks
from granular.aio.datasets.references import Referenced, unpack_joined, unpack_rows
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import Calls, offload
from granular.aio.stores.fanout import retry_if_corrupt

T = TypeVar('T')
Read = Callable[[Picks, Sequence[Choice]], Coroutine[Any, Any, T]]
"""Reads some fields of datapoints."""

_MANY: Final = 1024  # datapoints from which on their references are unpacked as arrays


class JoinedColumn(NamedTuple):
    """The records of a field of datapoints, one behind the other, as they are stored."""

    records: Adjacent
    counts: Ints | None = None  # of the records of each datapoint; None if it is not a sequence

    def by_datapoint(self) -> list[Any]:
        """Return the record, or the list of records, of each datapoint."""
        records = self.records.split()
        return records if self.counts is None else cut_into(records, self.counts.tolist())

    def taken(self, order: Ints) -> Self:
        """Return the records of the datapoints at some positions, in their order."""
        if self.counts is None:
            return self._replace(records=self.records.taken(order))
        firsts, counts = np.cumsum(self.counts) - self.counts, self.counts[order]
        places = np.arange(counts.sum()) + np.repeat(firsts[order] - np.cumsum(counts) + counts, counts)
        return self._replace(records=self.records.taken(places), counts=counts)


def join_columns(columns: Sequence[JoinedColumn]) -> JoinedColumn:
    """Return the records of some columns of a field, at least one."""
    counts = [column.counts for column in columns if column.counts is not None]
    return JoinedColumn(
        Adjacent.joined([column.records for column in columns]), np.concatenate(counts) if counts else None
    )


def as_datapoints(
    columns: Sequence[list[Any]], choices: Sequence[Choice], count: int, order: Ints | None = None
) -> list[Datapoint]:
    """Return so many datapoints for the values of their fields; ``order`` has the position of each in the result."""
    datapoints: list[Datapoint] = [{} for _ in range(count)]
    filled = datapoints if order is None else [datapoints[i] for i in order.tolist()]
    # Key by key, which takes half the time of building each dict from its row.
    for choice, column in zip(choices, columns, strict=True):
        key = choice.field.key
        for datapoint, value in zip(filled, column, strict=True):
            datapoint[key] = value
    return datapoints


class StoredColumns(NamedTuple):
    """The records of some fields of datapoints, as they are stored."""

    picks: Picks
    fields: list[Field]
    records: list[list[bytes]]  # of each field
    counts: list[Ints | None]  # for each field, of the records of each datapoint; None if it is not a sequence

    async def decode(self) -> list[list[Any]]:
        """Return the values, by field."""
        return self._by_datapoint(await decode_records(self.fields, self.records, self._locate))

    def decoding(self) -> Calls[list[list[Any]]]:
        """Return calls for threads that have the result of ``decode``."""
        return decoding(self.fields, self.records, self._locate).then(self._by_datapoint)

    def _by_datapoint(self, values: list[list[Any]]) -> list[list[Any]]:
        return [
            column if own is None else cut_into(column, own.tolist())
            for own, column in zip(self.counts, values, strict=True)
        ]

    def _locate(self, field: Field, position: int) -> tuple[str, int]:
        if (own := self.counts[self.fields.index(field)]) is not None:
            position = owner_of(own, position)
        columns, index = self.picks.locate(position)
        return columns.name, index


def read_stored(picks: Picks, choices: Sequence[Choice]) -> Coroutine[Any, Any, StoredColumns]:
    """Return the records of datapoints, by field, in one fan-out."""
    return retry_if_corrupt(picks.is_remote, lambda: _read_stored(picks, choices))


def read_columns(picks: Picks, choices: Sequence[Choice]) -> Coroutine[Any, Any, list[list[Any]]]:
    """Return the values of datapoints, by field, in one fan-out."""
    return retry_if_corrupt(picks.is_remote, lambda: _read_columns(picks, choices))


def read_buffers(
    columns: Columns, indices: Ints, choices: Sequence[Choice]
) -> Coroutine[Any, Any, dict[str, list[Any] | Adjacent]]:
    """Return the values of datapoints, at least one, by key: raw records as one buffer if they lie in it anyway."""
    return retry_if_corrupt(columns.is_remote, lambda: _read_buffers(columns, Picks.of(columns, indices), choices))


async def read_joined_columns(picks: Picks, choices: Sequence[Choice], summed: bool) -> list[JoinedColumn]:
    """Return the records of datapoints, by field; with ``summed``, with the checksums of all."""

    async def read() -> list[JoinedColumn]:
        references = await read_references(picks)
        fields = [record_rows(picks, choice, references) for choice in choices]
        records = await gather([read_joined(rows) for rows, _ in fields])

        def compare() -> list[JoinedColumn]:
            pairs = zip(fields, records, strict=True)
            return [JoinedColumn(compared(rows, own, summed), counts) for (rows, counts), own in pairs]

        return await offload(compare)

    return await retry_if_corrupt(picks.is_remote, read)


async def _read_buffers(columns: Columns, picks: Picks, choices: Sequence[Choice]) -> dict[str, list[Any] | Adjacent]:
    references = await read_references(picks)
    out: dict[str, list[Any] | Adjacent] = {}

    async def read_values(some: Sequence[Choice]) -> None:
        values = await _read_columns(picks, some, references)
        out.update({choice.field.key: column for choice, column in zip(some, values, strict=True)})

    async def read_raw(choice: Choice) -> None:
        rows, _ = record_rows(picks, choice, references)
        buffer = await read_adjacent(columns.bags[choice.field.key], rows.indices)
        if buffer is None:
            await read_values([choice])
        else:
            out[choice.field.key] = buffer

    raws = [
        choice
        for choice in choices
        if choice.field.fn is raw and not choice.field.many and columns.bags[choice.field.key].sums is None
    ]
    others = [choice for choice in choices if choice not in raws]
    await gather([*map(read_raw, raws), *([read_values(others)] if others else [])])
    return out


async def _read_columns(
    picks: Picks, choices: Sequence[Choice], references: Referenced | None = None
) -> list[list[Any]]:
    return await (await _read_stored(picks, choices, references)).decode()


async def _read_stored(
    picks: Picks, choices: Sequence[Choice], references: Referenced | None = None
) -> 'StoredColumns':
    if not choices:
        return StoredColumns(picks, [], [], [])
    references = references or await read_references(picks)
    rows, counts = rows_of(picks, choices, references)
    records = await read_records(rows)
    totals = [len(picks.indices) if own is None else int(own.sum()) for own in counts]
    return StoredColumns(picks, [choice.field for choice in choices], cut_into(records, totals), counts)


def rows_of(picks: Picks, choices: Sequence[Choice], references: Referenced) -> tuple[Rows, list[Ints | None]]:
    """Return the results of ``record_rows`` for several fields, at least one: the records of all, one field behind the
    other.
    """
    if (rows := _single_rows(picks, choices, references)) is not None:
        return rows, [None] * len(choices)
    return join_rows([record_rows(picks, choice, references) for choice in choices])


def _single_rows(picks: Picks, choices: Sequence[Choice], references: Referenced) -> Rows | None:
    """Return the records of fields that have one for each datapoint, of all fields in one computation.

    None if there are sequences, or references that point to no records, which ``record_rows`` tells of.
    """
    if any(choice.field.many for choice in choices):
        return None
    datasets, numbers, counts, indices = picks
    keys = [choice.number for choice in choices]
    owners = np.concatenate([datasets.owners(key, numbers) for key in keys])
    if datasets.first.refs is None:
        positions = np.concatenate([indices] * len(keys))
    else:
        first, count = (numbers.T[keys] for numbers in references)
        lengths = datasets.bags.lengths[owners].reshape(len(keys), -1).repeat(counts, axis=1)
        if ((first < 0) | (count < 0) | (first > lengths - count)).any():
            return None
        positions = first.ravel()
    return Rows(datasets.bags, owners, np.concatenate([counts] * len(keys)), positions)


def join_rows(parts: Sequence[tuple[Rows, Ints | None]]) -> tuple[Rows, list[Ints | None]]:
    """Return the results of ``record_rows`` for several fields: the records of all, one field behind the other."""
    rows = [own for own, _ in parts]
    if len(rows) == 1:
        return rows[0], [parts[0][1]]
    owners, counts, indices = (np.concatenate([own[i] for own in rows]) for i in (1, 2, 3))
    return Rows(rows[0].bags, owners, counts, indices), [counts for _, counts in parts]


def record_rows(picks: Picks, choice: Choice, references: Referenced) -> tuple[Rows, Ints | None]:
    """Return the records of a field of some datapoints, and for a sequence the number of those of each datapoint.

    All datasets are computed together, as a batch has few datapoints of each of many shards. Raises
    ``CorruptDatasetError`` for references, those of ``read_references``, that point to no records.
    """
    key, (datasets, _, sizes, indices) = choice.field.key, picks
    bags, owners = datasets.bags, picks.record_owners(choice.number)
    if datasets.first.refs is None:
        return Rows(bags, owners, sizes, indices), None
    first, count = (numbers[:, choice.number] for numbers in references)
    lengths = bags.lengths[owners]
    bad = (first < 0) | (count < 0) | (first > lengths.repeat(sizes) - count)
    if bad.any():
        i = int(np.argmax(bad))
        columns, index = picks.locate(i)
        columns.check_reference(key, index, int(first[i]), int(count[i]))
    if not choice.field.many:
        return Rows(bags, owners, sizes, first), None
    if choice.selection is not True:
        names = (picks.columns(i).name for i, size in enumerate(sizes.tolist()) for _ in range(size))
        rows = zip(count.tolist(), indices.tolist(), names, strict=True)
        chosen = [picked(c, choice.selection, key, index, name) for c, index, name in rows]
        count = np.array([len(own) for own in chosen], np.int64)
        records = first.repeat(count) + np.concatenate([*chosen, first[:0]])
        return Rows(bags, owners, sums_of(count, sizes), records), count
    totals, ends = sums_of(count, sizes), np.cumsum(sizes)
    for i in np.flatnonzero(totals > lengths).tolist():
        own = slice(ends[i] - sizes[i], ends[i])
        picks.columns(i).check_distinct(key, indices[own], count[own])
    records = np.arange(totals.sum()) + np.repeat(first - np.cumsum(count) + count, count)
    return Rows(bags, owners, totals, records), count


async def read_references(picks: Picks) -> Referenced:
    """Return the first record and the number of records of datapoints."""
    datasets, numbers, counts, indices = picks
    if datasets.first.refs is None:
        return indices[:, None], np.ones((1, 1), np.int64)
    sources = datasets.sources[numbers]
    if (sources == sources[0]).all():
        return await _read_references(picks, int(sources[0]))
    out = np.empty((2, len(indices), len(datasets.first.spec)), np.int64)
    places, reads = [], []
    for source in sorted(set(sources.tolist())):
        some = sources == source
        chosen = some.repeat(counts)
        places.append(chosen)
        reads.append(_read_references(Picks(datasets, numbers[some], counts[some], indices[chosen]), source))
    for chosen, own in zip(places, await gather(reads), strict=True):
        out[:, chosen] = own
    return out[0], out[1]


async def _read_references(picks: Picks, source: int) -> Referenced:
    """Return the references of datasets that all have them in the same source."""
    datasets, numbers, counts, indices = picks
    if source == BAGS:
        spec = datasets.first.spec
        rows = Rows(datasets.bags, picks.record_owners(len(spec)), counts, indices)
        if len(indices) < _MANY:
            return unpack_rows(rows, await read_records(rows), spec)
        return await offload(unpack_joined, rows, await read_joined(rows), spec)
    if source != MEMORY:
        return await datasets.read_packed(numbers, counts, indices)
    parts = np.split(indices, np.cumsum(counts[:-1]))
    cached: list[Any] = [datasets.references[number] for number in numbers.tolist()]
    both = [references.at(own) for references, own in zip(cached, parts, strict=True)]
    firsts, totals = (np.concatenate([pair[i] for pair in both]) for i in (0, 1))
    return firsts, totals


async def checked_references(columns: Columns, indices: Ints) -> Referenced:
    """Return the result of ``read_references``; raise ``CorruptDatasetError`` if it points to no records."""
    picks = Picks.of(columns, indices)

    async def read() -> Referenced:
        references = await read_references(picks)
        for choice in columns.choices:
            record_rows(picks, choice, references)
        return references

    return await retry_if_corrupt(columns.is_remote, read)


async def available(columns: Columns, index: int) -> dict[str, bool | range]:
    """Return, by key, what a mask can select from a datapoint: True, or for a sequence the range of its values."""
    if columns.refs is None:
        return dict.fromkeys(columns.spec, True)
    _, counts = await checked_references(columns, np.array([index]))
    return {field.key: range(int(counts[0, i])) if field.many else True for field, i, _ in columns.choices}

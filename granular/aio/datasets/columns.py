"""The columns of an opened dataset, and reads of many datapoints from many datasets in one fan-out."""

import bisect
import copy
import itertools
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from granular.aio.bags.bag import Bag
from granular.aio.bags.index_cache import Snapshot
from granular.aio.bags.index_tables import PackedReferences, read_tables
from granular.aio.bags.records import Adjacent, read_adjacent, read_records
from granular.aio.datasets.codec import Field, decode_error, decode_records, raw
from granular.aio.datasets.references import References, clip, unpack_groups
from granular.aio.runtime.immediate import is_immediate
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.user_functions import CONTROL, raise_control
from granular.aio.stores.fanout import once_more
from granular.aio.stores.local.files import IN_PLACE
from granular.errors import CorruptDatasetError, InvalidArgumentError, UnknownKeyError
from granular.formats.layout import Layout, Spec, unpack_refs
from granular.indexing import Ints, sums_of

Datapoint = dict[str, Any]
Mask = Mapping[str, bool | range | slice] | Iterable[str] | None


class Choice(NamedTuple):
    field: Field
    number: int  # its position in the spec, which is that of its references
    selection: bool | range | slice  # True for all values; otherwise the part of a sequence


class Columns:
    """The bags of an opened dataset.

    ``refs`` is the bag of references; None in the columns layout, where datapoint i is record i of every bag.
    """

    def __init__(self, name: str, spec: Spec, fields: Sequence[Field], bags: dict[str, Bag], refs: Bag | None) -> None:
        self.name: str = name
        self.spec: Spec = spec
        self.bags: dict[str, Bag] = bags
        self.refs: Bag | None = refs
        self.choices: list[Choice] = [Choice(field, i, True) for i, field in enumerate(fields)]  # all fields
        self._light = all(field.light for field in fields)
        self.references: References | PackedReferences | None = None  # if they are cached
        self.snapshot: Snapshot | None = None  # that has these columns
        self.length: int = 0  # the number of datapoints
        self.immediate: bool = False  # True if datapoints can be read without waiting

    def complete(self, references: References | PackedReferences | None = None) -> None:
        """Complete the columns once their bags are opened, with references that are available without a read."""
        self.references = references
        self.length = min(bag.length for bag in self.bags.values()) if self.refs is None else self.refs.length
        bags = (self.all_bags if references is None else self.bags).values()
        self.immediate = all(bag.immediate for bag in bags)

    @property
    def all_bags(self) -> dict[str, Bag]:
        """The bags by key, with ``'refs'`` in the refs layout."""
        return self.bags if self.refs is None else {'refs': self.refs, **self.bags}

    @property
    def layout(self) -> Layout:
        return 'columns' if self.refs is None else 'refs'

    def size_of(self, mask: Mask = None) -> int:
        """Return the bytes of the bags that a mask selects, tables included."""
        if mask is None:
            return sum(bag.size for bag in self.all_bags.values())
        return sum(self.bags[choice.field.key].size for choice in self.choose(mask))

    @property
    def is_remote(self) -> bool:
        return any(bag.is_remote for bag in self.bags.values())

    def copy(self) -> Self:
        columns = copy.copy(self)
        columns.refs = None if self.refs is None else self.refs.copy()
        columns.bags = {key: bag.copy() for key, bag in self.bags.items()}
        return columns

    def close(self) -> None:
        for bag in self.all_bags.values():
            bag.close()
        self.references = self.snapshot = None

    def difference(self, spec: Mapping[str, str], layout: Layout, other: str) -> str | None:
        """Compare the dataset with the spec and layout of another one; None if they agree."""
        if self.spec == spec and self.layout == layout:
            return None
        return f'spec {self.spec} in layout {self.layout!r}, but {other} has {spec} in {layout!r}'

    def check_spec(self, spec: Spec, layout: Layout, other: str) -> None:
        """Check that the dataset has the spec and layout of another one; raise ``CorruptDatasetError`` if not."""
        if (difference := self.difference(spec, layout, other)) is not None:
            raise CorruptDatasetError(f'{self.name}: has {difference}')

    def choose(self, mask: Mask) -> list[Choice]:
        """Return the fields that a mask selects; raise ``UnknownKeyError`` for a key that is not in the spec, and
        ``InvalidArgumentError`` for a range of a key that is not a sequence, or a range with a step.
        """
        if mask is None:
            return self.choices
        selections: Mapping[str, bool | range | slice]
        keys = [mask] if isinstance(mask, str) else mask
        try:
            selections = keys if isinstance(keys, Mapping) else dict.fromkeys(keys, True)
        except TypeError:
            raise InvalidArgumentError(
                f'{self.name}: expected keys, or a mapping of keys, as mask, got {mask!r:.100}'
            ) from None
        if unknown := [key for key in selections if key not in self.spec]:
            raise UnknownKeyError(f'{self.name}: the mask has {unknown}, the spec has {list(self.spec)}')
        chosen = []
        for choice in self.choices:
            selection = selections.get(choice.field.key, False)
            if selection is False:
                continue
            if selection is not True:
                _check_selection(selection, choice.field, self.name)
            chosen.append(choice._replace(selection=selection))
        return chosen

    # --- one datapoint, on this thread, from memory or a local disk

    def read_now(self, index: int, choices: Sequence[Choice]) -> Datapoint | None:
        """Return a datapoint of immediate columns; None if it is too large to be read inline on the running loop."""
        if not is_immediate() and not (self._light and self._is_small(index, choices)):
            return None
        bags = self.bags
        refs = None if self.refs is None else self._references_now(self.refs, index)
        datapoint: Datapoint = {}
        for field, number, selection in choices:
            key, record, records = field.key, b'', None
            if refs is None:
                record = bags[key].read_now(index)
            else:
                first, count = refs[number]
                self.check_reference(key, index, first, count)
                if field.many:
                    first, count = clip(first, count, selection, key, index, self.name)
                    records = [bags[key].read_now(i) for i in range(first, first + count)]
                else:
                    record = bags[key].read_now(first)
            try:
                datapoint[key] = field.fn(record) if records is None else [field.fn(record := item) for item in records]
            except MemoryError:
                raise
            except Exception as error:
                raise decode_error(self.name, index, field, record, error) from error
            except CONTROL as error:
                raise_control(error)
        return datapoint

    def _is_small(self, index: int, choices: Sequence[Choice]) -> bool:
        if self.refs is not None:
            return False
        return sum(self.bags[choice.field.key].size_of(index) for choice in choices) <= IN_PLACE

    def _references_now(self, refs: Bag, index: int) -> list[tuple[int, int]]:
        if (references := self.references) is not None:
            return references.at_one(index)
        firsts, counts = unpack_refs([refs.read_now(index)], self.spec, refs.name)
        return list(zip(firsts[0].tolist(), counts[0].tolist(), strict=True))

    # --- references

    async def checked_references(self, indices: Ints) -> tuple[Ints, Ints]:
        """Return the result of ``read_references``; raise ``CorruptDatasetError`` if it points to no records."""
        group = self, indices

        async def read() -> tuple[Ints, Ints]:
            references = await read_references([group])
            for choice in self.choices:
                record_requests([group], choice, references)
            return references[0]

        return await once_more(self.is_remote, read)

    async def available(self, index: int) -> dict[str, bool | range]:
        """Return, by key, what a mask can select from a datapoint: True, or for a sequence the range of its values."""
        if self.refs is None:
            return dict.fromkeys(self.spec, True)
        _, counts = await self.checked_references(np.array([index]))
        return {field.key: range(int(counts[0, i])) if field.many else True for field, i, _ in self.choices}

    def check_reference(self, key: str, index: int, first: int, count: int) -> None:
        if first < 0 or count < 0 or first + count > self.bags[key].length:
            raise CorruptDatasetError(
                f'{self.name}: datapoint {index} refers to {count} records from {first} on of key {key!r}, whose bag '
                f'has {self.bags[key].length}'
            )

    def check_distinct(self, key: str, indices: Ints, counts: Ints) -> None:
        """Reject overlapping sequences: few references could otherwise expand to unbounded memory."""
        length = self.bags[key].length
        _, once = np.unique(indices, return_index=True)
        if (total := int(counts[once].sum())) > length:
            raise CorruptDatasetError(
                f'{self.name}: {len(once)} datapoints refer to {total} records of key {key!r}, whose bag has {length}'
            )


def _check_selection(selection: Any, field: Field, name: str) -> None:
    if not field.many:
        raise InvalidArgumentError(
            f'{name}: key {field.key!r} is not a sequence: expected True in the mask, got {selection!r}'
        )
    if not isinstance(selection, range | slice) or selection.step not in (None, 1):
        raise InvalidArgumentError(
            f'{name}: key {field.key!r}: expected True or a range without a step, got {selection!r}'
        )
    if not all(limit is None or hasattr(limit, '__index__') for limit in (selection.start, selection.stop)):
        raise InvalidArgumentError(f'{name}: key {field.key!r}: expected integers as limits, got {selection!r:.100}')
    if isinstance(selection, range) and not 0 <= selection.start <= selection.stop:
        raise InvalidArgumentError(f'{name}: key {field.key!r}: expected 0 <= start <= stop, got {selection!r}')


# --- many datapoints of many datasets

Group = tuple[Columns, Ints]
"""A dataset and the indices of the datapoints to read from it."""


def as_datapoints(columns: Sequence[list[Any]], choices: Sequence[Choice], count: int) -> list[Datapoint]:
    """Return so many datapoints for the values of their fields."""
    datapoints: list[Datapoint] = [{} for _ in range(count)]
    # Key by key, which takes half the time of building each dict from its row.
    for choice, column in zip(choices, columns, strict=True):
        key = choice.field.key
        for datapoint, value in zip(datapoints, column, strict=True):
            datapoint[key] = value
    return datapoints


def read_columns(groups: Sequence[Group], choices: Sequence[Choice]) -> Coroutine[Any, Any, list[list[Any]]]:
    """Return the values of all groups' datapoints, by field, in one fan-out. The groups share a spec and a store."""
    return once_more(any(columns.is_remote for columns, _ in groups), lambda: _read_columns(groups, choices))


def read_buffers(group: Group, choices: Sequence[Choice]) -> Coroutine[Any, Any, dict[str, list[Any] | Adjacent]]:
    """Return the values of datapoints, at least one, by key: raw records as one buffer if they lie in it anyway."""
    return once_more(group[0].is_remote, lambda: _read_buffers(group, choices))


async def _read_buffers(group: Group, choices: Sequence[Choice]) -> dict[str, list[Any] | Adjacent]:
    columns, references = group[0], await read_references([group])
    out: dict[str, list[Any] | Adjacent] = {}

    async def read_values(some: Sequence[Choice]) -> None:
        values = await _read_columns([group], some, references)
        out.update({choice.field.key: column for choice, column in zip(some, values, strict=True)})

    async def read_raw(choice: Choice) -> None:
        [request], _ = record_requests([group], choice, references)
        buffer = await read_adjacent(*request)
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
    groups: Sequence[Group], choices: Sequence[Choice], references: Sequence[tuple[Ints, Ints]] = ()
) -> list[list[Any]]:
    references = references or await read_references(groups)
    requests: list[tuple[Bag, Ints]] = []
    counts: dict[str, Ints] = {}
    for choice in choices:
        own, counts[choice.field.key] = record_requests(groups, choice, references)
        requests += own
    records = await read_records(requests)
    flat = [_chain(records[i * len(groups) : (i + 1) * len(groups)]) for i in range(len(choices))]
    values = await decode_records(
        [choice.field for choice in choices],
        flat,
        lambda field, position: _locate(groups, counts[field.key] if field.many else None, position),
    )
    return [
        _split(column, counts[choice.field.key].tolist()) if choice.field.many else column
        for choice, column in zip(choices, values, strict=True)
    ]


def _locate(groups: Sequence[Group], counts: Ints | None, position: int) -> tuple[str, int]:
    """Return the dataset and the index in it of a value's datapoint, of which each has ``counts`` values, or one."""
    if counts is not None:
        position = int(np.searchsorted(np.cumsum(counts), position, side='right'))
    for columns, indices in groups:
        if position < len(indices):
            return columns.name, int(indices[position])
        position -= len(indices)
    raise IndexError(position)


def record_requests(
    groups: Sequence[Group], choice: Choice, references: Sequence[tuple[Ints, Ints]]
) -> tuple[list[tuple[Bag, Ints]], Ints]:
    """Return the bag of a field and the record indices, one after the other, for each group; and their number for each
    datapoint of all groups.

    The groups are computed together, as a batch has few datapoints of each of many shards. Raises
    ``CorruptDatasetError`` for references, those of ``read_references``, that point to no records.
    """
    key, sizes = choice.field.key, [len(indices) for _, indices in groups]
    ends = list(itertools.accumulate(sizes, initial=0))
    if groups[0][0].refs is None:
        return [(columns.bags[key], indices) for columns, indices in groups], np.ones(ends[-1], np.int64)
    first, count = (np.concatenate([pair[i][:, choice.number] for pair in references]) for i in (0, 1))
    bags = [columns.bags[key] for columns, _ in groups]
    lengths = [bag.length for bag in bags]
    bad = (first < 0) | (count < 0) | (first > np.repeat(lengths, sizes) - count)
    if bad.any():
        i = int(np.argmax(bad))
        at = bisect.bisect_right(ends, i) - 1
        columns, indices = groups[at]
        columns.check_reference(key, int(indices[i - ends[at]]), int(first[i]), int(count[i]))
    if choice.field.many:
        if choice.selection is not True:
            owners = ((columns.name, index) for columns, indices in groups for index in indices.tolist())
            rows = zip(first.tolist(), count.tolist(), owners, strict=True)
            clipped = [clip(f, c, choice.selection, key, index, name) for f, c, (name, index) in rows]
            first, count = np.array(clipped, np.int64).reshape(-1, 2).T
        totals = sums_of(count, sizes)
        for i in np.flatnonzero(totals > lengths).tolist():
            groups[i][0].check_distinct(key, groups[i][1], count[ends[i] : ends[i + 1]])
        behind = np.cumsum(count)
        first = np.arange(totals.sum()) + np.repeat(first - behind + count, count)
        ends = [0, *np.cumsum(totals).tolist()]
    return [(bag, first[start:stop]) for bag, start, stop in zip(bags, ends, ends[1:], strict=False)], count


async def read_references(groups: Sequence[Group]) -> list[tuple[Ints, Ints]]:
    """Return the first record and the number of records for each group, both of shape (datapoints, keys); in the
    columns layout, of shapes (datapoints, 1) and (1, 1).
    """
    if groups[0][0].refs is None:
        return [(indices[:, None], np.ones((1, 1), np.int64)) for _, indices in groups]
    cached = [columns.references for columns, _ in groups]  # now, as another thread may close the reader
    requests = [
        (columns.refs, indices)
        for (columns, indices), references in zip(groups, cached, strict=True)
        if columns.refs and references is None
    ]
    unpacked = unpack_groups(requests, await read_records(requests), groups[0][0].spec)
    packed = [
        (indices, references)
        for (_, indices), references in zip(groups, cached, strict=True)
        if isinstance(references, PackedReferences)
    ]
    wanted = [(table, indices) for indices, references in packed for tables in references.tables for table in tables]
    numbers = iter(await read_tables(wanted)) if wanted else iter(())
    every, keys = np.concatenate([np.zeros(0, np.int64), *(indices for indices, _ in packed)]), len(groups[0][0].spec)
    firsts, counts = np.repeat(every[:, None], keys, axis=1), np.ones((len(every), keys), np.int64)
    out, stop = [], 0
    for (columns, indices), references in zip(groups, cached, strict=True):
        if isinstance(references, PackedReferences):
            columns.refs.check_open()  # type: ignore[union-attr]
            start, stop = stop, stop + len(indices)
            references.fill(firsts[start:stop], counts[start:stop], numbers)
            out.append((firsts[start:stop], counts[start:stop]))
        else:
            out.append(next(unpacked) if references is None else references.at(indices))
    return out


def _chain(groups: Sequence[list[bytes]]) -> list[bytes]:
    return groups[0] if len(groups) == 1 else [record for records in groups for record in records]


def _split(values: list[Any], counts: list[int]) -> list[list[Any]]:
    return [values[end - count : end] for end, count in zip(itertools.accumulate(counts), counts, strict=True)]

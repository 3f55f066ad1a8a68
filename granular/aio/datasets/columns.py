"""The columns of an opened dataset, and reads of many datapoints from many datasets in one fan-out."""

import copy
import functools
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

import numpy as np

from granular._support.indexing import Ints, cut_into, owner_of, sums_of
from granular.aio.bags.bag import Bag
from granular.aio.bags.index_cache import Snapshot
from granular.aio.bags.records import Adjacent, Bags, Rows, read_adjacent, read_records
from granular.aio.bags.tables import PackedReferences, read_packed_references
from granular.aio.datasets.codec import Field, decode_error, decode_records, raw
from granular.aio.datasets.masks import Mask, Selection, check_selection, picked
from granular.aio.datasets.references import References, unpack_rows
from granular.aio.runtime.immediate import is_immediate
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.user_functions import CONTROL, raise_control
from granular.aio.stores.fanout import retry_if_corrupt
from granular.aio.stores.local.files import IN_PLACE
from granular.errors import CorruptDatasetError, InvalidArgumentError, UnknownKeyError
from granular.formats.frames import decode_frames
from granular.formats.layout import Layout, Spec, unpack_refs

Datapoint = dict[str, Any]


_MASKS: Final = 16  # whose fields are remembered

BAGS: Final = 0
"""References are read from their bags."""
MEMORY: Final = 1
"""References are in memory: ``References``."""
PACKED: Final = 2
"""References are in the index: ``PackedReferences``."""


class Choice(NamedTuple):
    field: Field
    number: int  # its position in the spec, which is that of its references
    selection: Selection


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
        self._chosen: dict[tuple[str, ...], list[Choice]] = {}  # for masks that were used
        self._light = all(field.light for field in fields)
        self.references: References | PackedReferences | None = None  # if they are cached
        self.snapshot: Snapshot | None = None  # that has these columns
        self.length: int = 0  # the number of datapoints
        self.immediate: bool = False  # True if datapoints can be read without waiting
        self._alone: Datasets | None = None

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
        return next(iter(self.bags.values())).is_remote

    def copy(self) -> Self:
        columns = copy.copy(self)
        columns.refs = None if self.refs is None else self.refs.copy()
        columns.bags = {key: bag.copy() for key, bag in self.bags.items()}
        columns._alone = None
        return columns

    def close(self) -> None:
        for bag in self.all_bags.values():
            bag.close()
        self.references = self.snapshot = self._alone = None

    @property
    def alone(self) -> 'Datasets':
        """This dataset, with number 0."""
        if (alone := self._alone) is None:
            alone = Datasets(self, 1)
            alone.put(0, self)
            self._alone = alone
        return alone

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
        ``InvalidArgumentError`` for a part of a value that is neither a sequence nor a video.
        """
        if mask is None:
            return self.choices
        if type(mask) is not tuple:
            return self._choose(mask)
        try:
            if (known := self._chosen.get(mask)) is not None:
                return known
        except TypeError:  # not of strings
            return self._choose(mask)
        chosen = self._choose(mask)
        if len(self._chosen) < _MASKS:
            self._chosen[mask] = chosen
        return chosen

    def _choose(self, mask: Mapping[str, Selection] | Iterable[str]) -> list[Choice]:
        selections: Mapping[str, Selection]
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
                check_selection(selection, choice.field, self.name)
                if not choice.field.many:
                    fn = functools.partial(decode_frames, frames=selection)
                    chosen.append(choice._replace(field=choice.field._replace(fn=fn)))
                    continue
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
                    chosen = picked(count, selection, key, index, self.name)
                    records = [bags[key].read_now(first + int(i)) for i in chosen]
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
        picks = Picks.of(self, indices)

        async def read() -> tuple[Ints, Ints]:
            references = await read_references(picks)
            for choice in self.choices:
                record_rows(picks, choice, references)
            return references

        return await retry_if_corrupt(self.is_remote, read)

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


# --- many datapoints of many datasets


class Datasets:
    """Datasets that share a spec, a layout and a store, by number, with what a batch needs of each in arrays.

    Not every number has a dataset; ``first`` is any of them.
    """

    __slots__ = ('_columns', '_filled', '_kinds', '_tables', 'bags', 'first', 'references', 'sources')

    def __init__(self, first: Columns, count: int) -> None:
        self.first = first
        self._columns: list[Any] = [None] * count
        self._filled = np.zeros(count, np.bool_)
        # Key by key, those of one key in the order of the datasets, and the references behind those of all keys.
        self.bags = Bags(count * len(first.all_bags))
        self.references: list[References | PackedReferences | None] = [None] * count
        self.sources: Ints = np.full(count, BAGS)  # of the references
        self._tables: Ints = np.zeros(count, np.int64)  # the first one, and kinds, of ``PackedReferences``
        self._kinds = np.zeros((count, len(first.spec)), np.uint8)

    @classmethod
    def of(cls, datasets: Sequence[Columns]) -> Self:
        """Return datasets, each at its position."""
        out = cls(datasets[0], len(datasets))
        for number, columns in enumerate(datasets):
            out.put(number, columns)
        return out

    def missing(self, numbers: Ints) -> list[int]:
        """Return those of some numbers that have no dataset."""
        filled = self._filled[numbers]
        return [] if filled.all() else numbers[~filled].tolist()

    def put(self, number: int, columns: Columns) -> None:
        """Add an opened dataset; raise ``ClosedError`` if it is closed."""
        references = columns.references
        self._columns[number], self.references[number] = columns, references
        if isinstance(references, PackedReferences):
            self.sources[number] = PACKED
            self._tables[number], self._kinds[number] = references.first, references.kinds
        elif references is not None:
            self.sources[number] = MEMORY
        bags = [columns.bags[key] for key in self.first.spec]
        for i, bag in enumerate(bags if columns.refs is None else [*bags, columns.refs]):
            self.bags.put(i * len(self._columns) + number, bag)
        self._filled[number] = True  # last, as another thread may read it then

    def columns(self, number: int) -> Columns:
        columns: Columns = self._columns[number]
        return columns

    def owners(self, key: int, numbers: Ints) -> Ints:
        """Return the numbers of the bags of a key, by its position in the spec; one behind the last for references."""
        return numbers + key * len(self._columns)

    async def read_packed(self, numbers: Ints, counts: Ints, indices: Ints) -> 'Referenced':
        """Return the references of datapoints of shards of one index."""
        packed: Any = self.references[numbers[0]]
        first, kinds = self._tables[numbers], self._kinds[numbers]
        return await read_packed_references(packed.tables, kinds, first, counts, indices)


class Picks(NamedTuple):
    """Datapoints of many datasets: so many of each, given by their indices, one dataset behind the other."""

    datasets: Datasets
    numbers: Ints  # of each dataset
    counts: Ints
    indices: Ints

    @classmethod
    def of(cls, columns: Columns, indices: Ints) -> Self:
        """Return datapoints of one dataset."""
        return cls(columns.alone, np.zeros(1, np.int64), np.array([len(indices)]), indices)

    @classmethod
    def of_several(cls, datasets: Sequence[Columns], counts: Ints, indices: Ints) -> Self:
        """Return so many datapoints of each of some datasets."""
        return cls(Datasets.of(datasets), np.arange(len(datasets)), counts, indices)

    @property
    def is_remote(self) -> bool:
        return self.datasets.first.is_remote

    def locate(self, position: int) -> tuple[Columns, int]:
        """Return the dataset of the datapoint at a position, and its index in it."""
        return self.columns(owner_of(self.counts, position)), int(self.indices[position])

    def columns(self, position: int) -> Columns:
        """Return the dataset at a position among those of ``numbers``."""
        return self.datasets.columns(int(self.numbers[position]))

    def record_owners(self, key: int) -> Ints:
        return self.datasets.owners(key, self.numbers)


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


def read_columns(picks: Picks, choices: Sequence[Choice]) -> Coroutine[Any, Any, list[list[Any]]]:
    """Return the values of datapoints, by field, in one fan-out."""
    return retry_if_corrupt(picks.is_remote, lambda: _read_columns(picks, choices))


def read_buffers(
    columns: Columns, indices: Ints, choices: Sequence[Choice]
) -> Coroutine[Any, Any, dict[str, list[Any] | Adjacent]]:
    """Return the values of datapoints, at least one, by key: raw records as one buffer if they lie in it anyway."""
    return retry_if_corrupt(columns.is_remote, lambda: _read_buffers(columns, Picks.of(columns, indices), choices))


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


Referenced = tuple[Ints, Ints]
"""The first record and the number of records of datapoints, both of shape (datapoints, keys); in the columns layout, of
shapes (datapoints, 1) and (1, 1).
"""


async def _read_columns(
    picks: Picks, choices: Sequence[Choice], references: Referenced | None = None
) -> list[list[Any]]:
    if not choices:
        return []
    references = references or await read_references(picks)
    rows, counts = join_rows([record_rows(picks, choice, references) for choice in choices])
    records = await read_records(rows)
    totals = [len(picks.indices) if own is None else int(own.sum()) for own in counts]
    numbers = {choice.field.key: own for choice, own in zip(choices, counts, strict=True)}

    def locate(field: Field, position: int) -> tuple[str, int]:
        if (own := numbers[field.key]) is not None:
            position = owner_of(own, position)
        columns, index = picks.locate(position)
        return columns.name, index

    values = await decode_records([choice.field for choice in choices], cut_into(records, totals), locate)
    return [
        column if own is None else cut_into(column, own.tolist()) for own, column in zip(counts, values, strict=True)
    ]


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
    for source in sorted(set(sources.tolist())):
        some = sources == source
        chosen = some.repeat(counts)
        own = Picks(datasets, numbers[some], counts[some], indices[chosen])
        out[:, chosen] = await _read_references(own, source)
    return out[0], out[1]


async def _read_references(picks: Picks, source: int) -> Referenced:
    """Return the references of datasets that all have them in the same kind of source."""
    datasets, numbers, counts, indices = picks
    if source == PACKED:
        return await datasets.read_packed(numbers, counts, indices)
    if source == BAGS:
        spec = datasets.first.spec
        rows = Rows(datasets.bags, picks.record_owners(len(spec)), counts, indices)
        return unpack_rows(rows, await read_records(rows), spec)
    parts = np.split(indices, np.cumsum(counts[:-1]))
    cached: list[Any] = [datasets.references[number] for number in numbers.tolist()]
    both = [references.at(own) for references, own in zip(cached, parts, strict=True)]
    firsts, totals = (np.concatenate([pair[i] for pair in both]) for i in (0, 1))
    return firsts, totals

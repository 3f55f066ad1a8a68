"""The columns of an opened dataset, and the read of one datapoint."""

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

import numpy as np

from granular._support.indexing import Ints
from granular.aio.bags.bag import Bag
from granular.aio.bags.index_cache import Snapshot
from granular.aio.bags.tables import PackedReferences
from granular.aio.datasets.codec import Field, decode_error
from granular.aio.datasets.masks import check_selection, picked
from granular.aio.datasets.references import References
from granular.aio.pipeline.data_source import Mask, Selection
from granular.aio.runtime.immediate import is_immediate
from granular.aio.runtime.user_functions import CONTROL, raise_control
from granular.aio.stores.local.files import IN_PLACE
from granular.errors import CorruptDatasetError, InvalidArgumentError, UnknownKeyError
from granular.formats.frames import decode_frames
from granular.formats.layout import Layout, Spec, unpack_refs

Datapoint = dict[str, Any]


_MASKS: Final = 16  # whose fields are remembered


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
        self.alone: Any = None  # these columns as ``Datasets``, once they were read

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
        columns.alone = None
        return columns

    def close(self) -> None:
        for bag in self.all_bags.values():
            bag.close()
        self.references = None
        self.snapshot = None
        self.alone = None

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

"""Padded batches of elements of about equal size, within a budget, planned before anything is read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import MOST, Ints, check_integer, integers_of, sums_of
from granular.aio.pipeline.nodes.arrangements import Arrangement
from granular.aio.pipeline.nodes.planned import (
    Composition,
    Pieces,
    Planned,
    Row,
    check_plannable,
    compact,
    counts_of,
    digest_of,
    index_of_first,
    looked_up,
    rounded,
    sizes_of,
    warn_of_left_out,
)
from granular.aio.pipeline.nodes.source import Source
from granular.aio.pipeline.nodes.stacking import combine, concatenate, memory_for, stack
from granular.aio.pipeline.planning import Budget, bucket_tops, ranges
from granular.aio.pipeline.streams.rows import TEXT, shape_of
from granular.aio.runtime.threads import offload
from granular.aio.runtime.user_functions import call_checked, function_or, name_of
from granular.errors import DatapointError, InvalidArgumentError

Cost = Callable[[int, int], float]
"""Returns the cost of a batch, for its number of elements and the size to which they are padded."""


def _padded_values(elements: int, top: int) -> int:
    return elements * top


class BudgetArguments:
    """The arguments of ``MapDataset.batch_by_size``, checked."""

    def __init__(
        self,
        key: Any,
        max_size: Any,
        buckets: Any,
        cost: Cost | None,
        max_elements: int | None,
        align: int,
        drop_remainder: bool,
    ) -> None:
        self.keys = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, Sequence) else ()
        if not self.keys or not all(isinstance(own, str) for own in self.keys):
            raise InvalidArgumentError(f'key: expected a key, or several of equal sizes, got {key!r:.100}')
        if isinstance(max_size, bool) or not isinstance(max_size, int | float | np.number) or not max_size > 0:
            raise InvalidArgumentError(f'max_size: expected a number > 0, got {max_size!r:.100}')
        self.max_size = max_size
        self.cost = function_or('cost', cost, _padded_values)
        self.max_elements = MOST if max_elements is None else check_integer('max_elements', max_elements, 1)
        self.align = check_integer('align', align, 1, 1 << 20)
        self.drop_remainder = bool(drop_remainder)
        self.number, self.tops = 0, np.zeros(0, np.int64)
        if isinstance(buckets, Sequence | np.ndarray) and not isinstance(buckets, str):
            self.tops = np.unique(integers_of(buckets, 'buckets'))
            if not len(self.tops) or self.tops[0] < 1:
                raise InvalidArgumentError(
                    f'buckets: expected a number of buckets, or their tops, got {buckets!r:.100}'
                )
        else:
            self.number = check_integer('buckets', buckets, 1)
        shown = {
            'buckets': (self.number or self.tops.tolist(), 8), 'cost': (cost and name_of(cost), None),
            'max_elements': (max_elements, None), 'align': (self.align, 1), 'drop_remainder': (drop_remainder, False),
        }  # fmt: skip
        changed = [f', {name}={value!r}' for name, (value, default) in shown.items() if value != default]
        self.description = f'batch_by_size({key!r}, {max_size}{"".join(changed)}'

    def fitting(self, top: int, available: int) -> int:
        """Return how many of the elements that there are fit into a batch, if they are padded to this size: its cost is
        taken to grow with their number.
        """

        def fits(elements: int) -> bool:
            cost = call_checked('batch_by_size calls cost(elements, top)', self.cost, elements, top)
            if isinstance(cost, bool) or not isinstance(cost, int | float | np.number) or np.isnan(cost):
                raise InvalidArgumentError(f'cost: expected a number for ({elements}, {top}), got {cost!r:.100}')
            return bool(cost <= self.max_size)

        largest = min(self.max_elements, available)
        least, most = 0, 1
        while most <= largest and fits(most):
            least, most = most, most * 2
        most = min(most, largest + 1)
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if fits(middle) else (least, middle)
        return least


async def batched_by_size(parent: Source, arguments: BudgetArguments, sizes: Any) -> 'SizeBatches':
    """Plan batches of the elements of a source, with given sizes, or those that it tells."""
    check_plannable(parent, 'batch_by_size')
    measured = compact(await sizes_of(parent, (arguments.keys[0],), sizes, 'batch_by_size'))
    return await offload(SizeBatches.planned, parent, arguments, measured)


class SizeBatches(Planned):
    """Batches of elements of one bucket each, padded to its top."""

    _doing = 'batching'

    def __init__(
        self,
        parent: Source,
        arguments: BudgetArguments,
        sizes: NDArray[Any],
        classes: NDArray[Any],
        counts: Ints,
        plan: Budget,
        per_batch: Ints,
        tops: Ints,
    ) -> None:
        super().__init__(parent, [sizes], classes, counts, plan.groups, arguments.align)
        self._arguments = arguments
        self._plan = plan
        self._per_batch = per_batch
        self._tops = tops
        self._digest = f'sizes {digest_of([sizes])}, plan {digest_of([tops, per_batch])}'

    @classmethod
    def planned(cls, parent: Source, arguments: BudgetArguments, sizes: NDArray[Any]) -> 'SizeBatches':
        """Choose the buckets, and plan the batches of each."""
        in_epoch = looked_up(parent, sizes, 0)
        values, counted = counts_of(in_epoch)
        warn_of_left_out('batch_by_size', int((in_epoch == 0).sum()))
        tops = arguments.tops if len(arguments.tops) else bucket_tops(values, counted, arguments.number)
        buckets = np.searchsorted(tops, np.minimum(values, tops[-1] if len(tops) else 0))
        counts = np.bincount(buckets, counted, minlength=len(tops)).astype(np.int64)
        pairs = zip(tops.tolist(), counts.tolist(), strict=True)
        per_batch = np.array([arguments.fitting(top, max(1, count)) for top, count in pairs], np.int64)
        largest = int(values[-1]) if len(values) else 0
        fitting = int(tops[per_batch > 0].max(initial=0))
        if largest > fitting:
            index = index_of_first(parent, sizes > fitting)
            where = f'batch_by_size: index {index}: {sizes[index]} in {arguments.keys[0]!r}'
            if len(tops) and largest > tops[-1]:
                raise InvalidArgumentError(f'{where} is larger than the last top of buckets={tops.tolist()}: add one')
            raise InvalidArgumentError(
                f'{where} is larger than a batch: one element, padded to {tops[np.searchsorted(tops, sizes[index])]}, '
                f'costs more than {arguments.max_size}: pass a larger max_size, or leave the element out by '
                f'subset(indices)'
            )
        classes = rounded(sizes, tops)
        plan = Budget.of(np.maximum(1, per_batch), counts, arguments.align, arguments.drop_remainder)
        counts = np.append(counts, len(parent) - counts.sum())
        return cls(parent, arguments, sizes, classes, counts, plan, plan.most, tops)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys whose values are padded."""
        return self._arguments.keys

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The shapes of batches: elements, and the size to which they are padded."""
        groups = np.diff(self._plan.stops, prepend=0)
        pairs = zip(self._per_batch.tolist(), self._tops.tolist(), groups.tolist(), strict=True)
        return [(elements, top) for elements, top, count in pairs if count]

    def stored_nbytes(self) -> float | None:
        stored = super().stored_nbytes()
        return None if stored is None else stored * len(self.parents[0]) / max(1, len(self))

    def describe(self) -> str:
        return f'{self._arguments.description}, {self._digest})'

    def _pieces(self, units: Ints, within: Ints, arranged: Arrangement) -> Pieces:
        slots, counts, buckets = self._plan.slots(units, within)
        if counts.all():
            return Pieces(counts, arranged.table[slots].astype(np.int64), buckets=buckets)
        # A batch without elements has the structure of an element of its bucket.
        empty, counts = counts == 0, np.maximum(counts, 1)
        are_kept = np.repeat(~empty, counts)
        positions = np.empty(len(are_kept), np.int64)
        positions[are_kept] = arranged.table[slots]
        positions[~are_kept] = arranged.table[self._plan.firsts[buckets[empty]]]
        return Pieces(counts, positions, are_kept - 1, buckets=buckets)

    def _composition(self, source: Source, pieces: Pieces, documents: Ints) -> Composition:
        whole = super()._composition(source, pieces, documents)
        rows = ranges(np.zeros_like(pieces.counts), pieces.counts)
        if pieces.begins is None:
            return whole._replace(rows=rows)
        kept = pieces.begins >= 0  # others give a batch without elements its structure
        return Composition(
            source, sums_of(kept.astype(np.int64), pieces.counts), *(part[kept] for part in (*whole[2:5], rows))
        )

    def _build(self, row: Row, index: int) -> Any:
        elements, keys = row.elements, self._arguments.keys
        top, size = int(self._tops[row.wanted.bucket]), int(self._per_batch[row.wanted.bucket])
        added = f'{keys[0]}_sizes'
        for k, element in enumerate(elements):
            if not isinstance(element, Mapping) or not {*keys} <= element.keys():
                got = sorted(map(str, element)) if isinstance(element, Mapping) else type(element).__name__
                raise self._error(row, k, keys[0], f'expected a dict with {list(keys)}, got {got!s:.200}')
            if added in element:
                raise self._error(row, k, added, 'is also the name of the sizes that a batch has: rename it in a map')
        others = [{name: value for name, value in element.items() if name not in keys} for element in elements]
        begins = row.wanted.begins
        count = 0 if begins is not None and begins[0] < 0 else len(elements)
        padded = {key: self._padded(row, key, (size, top), count) for key in keys}
        stacked = combine([stack(others)], lambda leaves: _extended(leaves[0], count, size))
        batch = {key: padded[key] if key in padded else stacked[key] for key in elements[0]}
        sizes = np.zeros(size, np.int64)
        sizes[:count] = row.wanted.sizes[0][:count]
        return {**batch, added: sizes}

    def _padded(self, row: Row, key: str, shape: tuple[int, int], count: int) -> NDArray[Any]:
        arrays: list[NDArray[Any]] = []
        for k, (element, expected) in enumerate(zip(row.elements, row.wanted.sizes[0].tolist(), strict=True)):
            try:
                array = np.asarray(element[key])
            except ValueError as error:
                raise self._error(row, k, key, f'it is not an array: {error}') from error
            if array.dtype.kind in TEXT:
                got = array.dtype if array.ndim else type(element[key]).__name__
                problem = f'expected an array or a list of numbers, got {got}: convert it in a map, and pass sizes='
                raise self._error(row, k, key, problem)
            length = len(array) if array.ndim else 1
            if length != expected:
                problem = f'expected {expected} values, as its size says, got {length}: pass the sizes of this dataset'
                raise self._error(row, k, key, problem)
            if arrays and (array.dtype != arrays[0].dtype or array.shape[1:] != arrays[0].shape[1:]):
                first = arrays[0]
                raise self._error(
                    row, k, key,
                    f'expected {first.dtype} of shape {shape_of(first.shape[1:])} as in the elements before, got '
                    f'{array.dtype} of {shape_of(array.shape[1:])}',
                )  # fmt: skip
            arrays.append(array)
        out = memory_for((*shape, *arrays[0].shape[1:]), arrays[0].dtype)
        for k, array in enumerate(arrays[:count]):
            length = len(array) if array.ndim else 1
            out[k, :length], out[k, length:] = array, 0
        out[count:] = 0
        return out

    def _error(self, row: Row, k: int, key: str, problem: str) -> DatapointError:
        at = self.index_in_source(int(row.wanted.documents[k]))
        return DatapointError(f'batch_by_size: index {at}: {key!r}: {problem}', key=key, index=at)


def _extended(rows: Any, count: int, size: int) -> Any:
    """Return the first stacked values of a key, with zeros or empty texts in the rows without an element."""
    if not isinstance(rows, np.ndarray) or count == size:
        return rows
    missing = np.zeros((size - count, *rows.shape[1:]), rows.dtype)
    if rows.dtype == object:
        missing[...] = type(rows[0])() if isinstance(rows[0], str | bytes) else None
    return concatenate([rows[:count], missing])

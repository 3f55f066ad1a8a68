"""Rows of fixed lengths with documents that are chosen by their sizes, before anything is read."""

import abc
import functools
import math
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import Ints, cut_into, sums_of
from granular.aio.pipeline.execution.failures import capturing, of_datapoint
from granular.aio.pipeline.nodes.arrangements import Arrangement
from granular.aio.pipeline.nodes.planned import (
    CHUNK,
    Composition,
    Pieces,
    Planned,
    Row,
    Wanted,
    check_plannable,
    chunks,
    compact,
    counts_by_class,
    counts_of,
    digest_of,
    index_of_first,
    looked_up,
    rounded,
    sizes_of,
    warn_of_left_out,
)
from granular.aio.pipeline.nodes.source import Source
from granular.aio.pipeline.planning import POINTS, DocumentRows, class_tops, default_classes, fit, most_segments, ranges
from granular.aio.pipeline.streams.packing_options import Feature, PlannedRecipe, value_for
from granular.aio.pipeline.streams.rows import TEXT, array_of, check_value, fill, shape_of
from granular.aio.runtime.threads import offload
from granular.errors import DatapointError, InvalidArgumentError

_SEVERAL: Final = 8  # times as many classes for documents with several features
_REMEDY: Final = "pass longer='cut', 'drop' or 'divide', or a larger length"


async def packed(parent: Source, recipe: PlannedRecipe, sizes: Any) -> 'PackedRows':
    """Plan rows of the elements of a source, with given sizes, or those that it tells."""
    check_plannable(parent, 'pack')
    recipe.check_option('sizes', sizes)
    measured = [
        compact(await sizes_of(parent, feature.path, value_for(feature.path, sizes, None, 'sizes'), 'pack'))
        for feature in recipe.features
    ]
    narrowed = parent.select(list(dict.fromkeys(feature.path[0] for feature in recipe.features)))
    kind = FittedRows if recipe.strategy == 'best_fit' else ConcatenatedRows
    rows = await offload(kind.planned, parent if narrowed is None else narrowed, recipe, measured)
    divided = recipe.strategy == 'concat_then_split' or recipe.longer == 'divide'
    rows.reads_parts = divided and sizes is None and len(recipe.features) == len(recipe.features[0].path) == 1
    return rows


class Part(NamedTuple):
    """The part of a document that is in a row."""

    values: NDArray[Any]


class PackedRows(Planned):
    """Rows that are filled with documents, or with parts of them."""

    _doing = 'packing'
    reads_parts = False  # True if only the parts that are in rows are read, where the source can

    def __init__(
        self,
        parent: Source,
        recipe: PlannedRecipe,
        sizes: Sequence[NDArray[Any]],
        classes: NDArray[Any],
        counts: Ints,
        rows: int,
        segments: int,
    ) -> None:
        super().__init__(parent, sizes, classes, counts, rows)
        self._recipe = recipe
        self._segments = segments
        self._by_position = recipe.documents
        self._digest = f'sizes {digest_of(sizes)}'
        self._checked: set[tuple[int, np.dtype[Any]]] = set()  # dtypes of features that all options are values of

    @functools.cached_property
    def _numbers(self) -> NDArray[np.int32]:
        return np.arange(max(self._recipe.lengths), dtype=np.int32)

    @classmethod
    @abc.abstractmethod
    def planned(cls, parent: Source, recipe: PlannedRecipe, sizes: Sequence[NDArray[Any]]) -> 'PackedRows':
        """Plan the rows."""

    def stored_nbytes(self) -> float | None:
        stored = super().stored_nbytes()
        return None if stored is None else stored * len(self.parents[0]) / max(1, len(self))

    def describe(self) -> str:
        return f'{self._recipe.description}, {self._digest})'

    def _limits(self, row: Row, i: int) -> tuple[list[int], list[int], list[int]]:
        """Return where the part of each document of a row begins and ends, its separator included, and its values."""
        wanted, recipe = row.wanted, self._recipe
        extra = int(recipe.separators[i] is not None)
        sizes = wanted.sizes[i]
        if wanted.begins is not None and wanted.stops is not None and wanted.begins[0] >= 0:
            return wanted.begins.tolist(), wanted.stops.tolist(), sizes.tolist()
        length = recipe.lengths[i]
        if recipe.longer == 'divide':
            begins = (np.maximum(sizes + extra, 1) - 1) // length * length
            return begins.tolist(), (sizes + extra).tolist(), sizes.tolist()
        ends = np.minimum(sizes, length - extra)
        if extra:
            return [0] * len(sizes), (ends + np.any([own > 0 for own in wanted.sizes], axis=0)).tolist(), ends.tolist()
        limits: list[int] = ends.tolist()
        return [0] * len(sizes), limits, limits

    def _composition(self, source: Source, pieces: Pieces, documents: Ints) -> Composition:
        recipe, extra = self._recipe, int(self._recipe.separators[0] is not None)
        sizes, length = self._sizes_of(documents)[0], self._recipe.lengths[0]
        begins, stops = np.zeros_like(sizes), np.minimum(sizes, length - extra)
        if recipe.longer == 'divide':  # the last part of each, which has less than a row
            begins, stops = (np.maximum(sizes + extra, 1) - 1) // length * length, sizes
        if pieces.begins is not None and pieces.stops is not None:
            are_parts = pieces.begins >= 0
            begins = np.where(are_parts, pieces.begins, begins)
            stops = np.where(are_parts, np.minimum(pieces.stops, sizes), stops)
        return Composition(source, pieces.counts, documents, begins, np.maximum(begins, stops), None)

    async def _read(self, wanted: Sequence[Wanted]) -> list[list[Any]]:
        source = self._source
        if not self.reads_parts or source is None:
            return await super()._read(wanted)
        limits = [self._limits(Row(own, ()), 0) for own in wanted]
        begins, stops, ends = (np.concatenate([own[i] for own in limits]).astype(np.int64) for i in range(3))
        documents, stops = np.concatenate([own.documents for own in wanted]), np.minimum(stops, ends)
        parts = None
        try:
            parts = await source.parts(self._recipe.features[0].name, documents, begins, np.maximum(begins, stops))
        except Exception as error:
            if not capturing.get() or not of_datapoint(error):
                raise
        if parts is None:  # whole documents, some of which may fail
            return await super()._read(wanted)
        return cut_into([Part(part) for part in parts], [len(own.documents) for own in wanted])

    def _build(self, row: Row, index: int) -> Any:
        out: dict[str, Any] = {}
        recipe = self._recipe
        for i, feature in enumerate(recipe.features):
            arrays = self._arrays(row, i, feature)
            kind = next((array for array in arrays if len(array)), arrays[0])
            dtype, shape, separator = kind.dtype, kind.shape[1:], recipe.separators[i]
            if (i, dtype) not in self._checked:
                for option, value in (('padding', feature.padding), ('bos', feature.bos), ('separator', separator)):
                    check_value(value, dtype, f'{option} of {feature.name!r}')
                self._checked.add((i, dtype))
            parts, replaced, are_parts = [], list[bool](), type(row.elements[0]) is Part
            for array, begin, stop, end in zip(arrays, *self._limits(row, i), strict=True):
                replaced.append(begin < end)  # otherwise its first value is the separator
                part = array if are_parts else array[begin : min(stop, end)]
                if separator is not None and stop > end >= begin:
                    part = np.concatenate([part, np.full((1, *shape), separator, dtype)])
                parts.append(part)
            length, name = recipe.lengths[i], feature.path[-1]
            values, ids, positions, begins = fill(feature, length, parts, dtype, shape, replaced, self._numbers)
            inner = out
            for key in feature.path[:-1]:
                inner = inner.setdefault(key, {})
            inner[name], inner[f'{name}_segment_ids'], inner[f'{name}_positions'] = values, ids, positions
            if recipe.documents:
                numbers = np.append(row.wanted.documents, -1)
                inner[f'{name}_documents'] = numbers[ids - 1]
            if recipe.cu_seqlens:
                out |= self._cumulative(begins, length)
        return out

    def _arrays(self, row: Row, i: int, feature: Feature) -> list[NDArray[Any]]:
        """Return a feature of the documents of a row; raise ``DatapointError`` if one is not what the plan expects."""
        if type(row.elements[0]) is Part:  # of arrays that are alike
            return [part.values for part in row.elements]
        arrays: list[NDArray[Any]] = []
        first: NDArray[Any] | None = None
        documents, sizes = row.wanted.documents, row.wanted.sizes[i].tolist()
        for k, (element, size) in enumerate(zip(row.elements, sizes, strict=True)):
            try:
                array = array_of(element, feature, '')
            except DatapointError as error:
                at = self.index_in_source(int(documents[k]))
                raise DatapointError(f'pack: index {at}{error}', key=feature.name, index=at) from None
            problem = ''
            if len(array) != size:
                problem = f'expected {size} values, as its size says, got {len(array)}: pass the sizes of this dataset'
            elif size and array.dtype.kind in TEXT:
                problem = f'expected numbers, got dtype {array.dtype}'
            elif size and first is not None and (array.dtype != first.dtype or array.shape[1:] != first.shape[1:]):
                problem = (
                    f'expected {first.dtype} of shape {shape_of(first.shape[1:])} as in the elements before, got '
                    f'{array.dtype} of {shape_of(array.shape[1:])}'
                )
            if problem:
                at = self.index_in_source(int(documents[k]))
                raise DatapointError(f'pack: index {at}: {feature.name!r}: {problem}', key=feature.name, index=at)
            first = array if first is None and size else first
            arrays.append(array)
        return arrays

    def _cumulative(self, begins: list[int], length: int) -> dict[str, Any]:
        """Return where sequences begin, as Hugging Face's collator names it; padding is the last of them."""
        cumulative = np.full(self._segments + 2, length, np.int32)
        cumulative[: len(begins)] = begins
        longest = int(np.diff(cumulative).max())
        return {
            'cu_seq_lens_q': cumulative, 'cu_seq_lens_k': cumulative.copy(),
            'max_length_q': longest, 'max_length_k': longest,
        }  # fmt: skip


class FittedRows(PackedRows):
    """Rows of whole documents: the largest first, each in the fullest row with enough space."""

    @classmethod
    def planned(cls, parent: Source, recipe: PlannedRecipe, sizes: Sequence[NDArray[Any]]) -> 'FittedRows':
        tapes, dropped = _tapes(parent, recipe, sizes)
        lengths = recipe.lengths
        apart = [
            i
            for i, (tape, feature) in enumerate(zip(tapes, recipe.features, strict=True))
            if not any(
                lengths[k] == lengths[i]
                and recipe.features[k].alignment == feature.alignment
                and np.array_equal(tapes[k], tape)
                for k in range(i)
            )
        ]
        tapes = [tapes[i] for i in apart]
        counted = [counts_of(looked_up(parent, tape, 0)) for tape in tapes]
        elements = len(parent)
        most = recipe.classes or default_classes(elements, POINTS if len(tapes) == 1 else POINTS * _SEVERAL)
        each = most if len(tapes) == 1 else math.ceil(most ** (1 / len(tapes)))
        tops = [class_tops(values, counts, each) for values, counts in counted]
        classes, sizes_of_classes, counts = _classes(parent, tapes, tops, *counted[0])
        warn_of_left_out('pack', int(counts[-1]) - dropped, dropped)
        alignments = np.array([recipe.features[i].alignment for i in apart])
        plan = fit(sizes_of_classes, counts[:-1], np.array(lengths)[apart], alignments, recipe.max_segments)
        if recipe.longer != 'divide':
            return cls(parent, recipe, sizes, classes, counts, plan, 0)
        whole = sum(int(_whole_rows(recipe, part).sum()) for part in chunks(looked_up(parent, sizes[0], 0)))
        return cls(parent, recipe, sizes, classes, counts, plan, whole)

    def __init__(
        self,
        parent: Source,
        recipe: PlannedRecipe,
        sizes: Sequence[NDArray[Any]],
        classes: NDArray[Any],
        counts: Ints,
        plan: DocumentRows,
        whole: int,
    ) -> None:
        super().__init__(parent, recipe, sizes, classes, counts, plan.rows + whole, max(1, plan.segments))
        self._plan, self._whole = plan, whole  # rows that a part of a document fills
        self._digest += f', plan {digest_of(plan)}'

    def _completed(self, arranged: Arrangement, epoch: int) -> Arrangement:
        if not self._whole:
            return arranged
        sizes = chunks(looked_up(self.parents[0], self._sizes[0], epoch))
        rows = np.concatenate([_whole_rows(self._recipe, part) for part in sizes])
        positions = np.flatnonzero(rows)
        return arranged._replace(divided=(positions, np.cumsum(rows[positions])))

    def _pieces(self, units: Ints, within: Ints, arranged: Arrangement) -> Pieces:
        apart = units >= self._plan.rows
        slots, some = self._plan.slots(units[~apart])
        if arranged.divided is None or not apart.any():
            return Pieces(some, arranged.table[slots].astype(np.int64))
        documents, ends = arranged.divided
        rows = units[apart] - self._plan.rows
        owners = np.searchsorted(ends, rows, side='right')
        counts = np.ones(len(units), np.int64)
        counts[~apart] = some
        are_parts = np.repeat(apart, counts)
        positions, begins = np.empty(len(are_parts), np.int64), np.full(len(are_parts), -1)
        positions[~are_parts], positions[are_parts] = arranged.table[slots], documents[owners]
        begins[are_parts] = (rows - np.append(0, ends)[owners]) * self._recipe.lengths[0]
        return Pieces(counts, positions, begins, begins + self._recipe.lengths[0])


def _tapes(parent: Source, recipe: PlannedRecipe, sizes: Sequence[NDArray[Any]]) -> tuple[list[NDArray[Any]], int]:
    """Return the positions that documents take in rows, by feature, 0 for those that are left out; and how many of an
    epoch are dropped.
    """
    extras = [int(separator is not None) for separator in recipe.separators]
    limits = [length - extra for length, extra in zip(recipe.lengths, extras, strict=True)]
    present = np.any([own > 0 for own in sizes], axis=0)
    long = np.any([own > limit for own, limit in zip(sizes, limits, strict=True)], axis=0)
    too_long = int(looked_up(parent, long, 0).sum()) if long.any() else 0
    if too_long and recipe.longer == 'raise':
        _refuse_long(parent, long, sizes, limits, recipe.features)
    kept = present & ~long if recipe.longer == 'drop' else present
    tapes = []
    for own, limit, length, extra in zip(sizes, limits, recipe.lengths, extras, strict=True):
        tape = np.empty(len(own), own.dtype)
        for start, part in zip(range(0, len(own), CHUNK), chunks(own), strict=True):
            if recipe.longer == 'divide':
                taken = (np.maximum(part + extra, 1) - 1) % length + 1
            else:
                taken = np.minimum(part, limit) + extra
            tape[start : start + CHUNK] = taken * kept[start : start + CHUNK]
        tapes.append(tape)
    return tapes, too_long if recipe.longer == 'drop' else 0


def _classes(
    parent: Source, tapes: Sequence[NDArray[Any]], tops: Sequence[Ints], values: Ints, counts: Ints
) -> tuple[NDArray[Any], Ints, Ints]:
    """Return the class of each element of the source, the sizes of each class, and the number of its elements, the last
    of which is that of the elements that are left out.

    Args:
      parent: the elements.
      tapes: the positions that they take, by feature, of each element of the source.
      tops: the classes of each feature.
      values, counts: the positions that elements of an epoch take of the first feature, and how many take them.
    """
    rounded_tapes = [rounded(tape, own) for tape, own in zip(tapes, tops, strict=True)]
    if len(tapes) == 1:
        own = np.bincount(np.searchsorted(tops[0], values), counts, minlength=len(tops[0])).astype(np.int64)
        return rounded_tapes[0], tops[0][:, None], np.append(own, len(parent) - own.sum())
    codes = np.zeros(len(tapes[0]), np.int64)
    for own, some in zip(rounded_tapes, tops, strict=True):
        codes = codes * (len(some) + 1) + own
    left_out = np.all([own == len(some) for own, some in zip(rounded_tapes, tops, strict=True)], axis=0)
    used = np.unique(looked_up(parent, np.where(left_out, -1, codes), 0))
    used = used[used >= 0]
    classes = np.where(left_out, len(used), np.searchsorted(used, codes))
    classes = classes.astype(np.uint16 if len(used) < 1 << 16 else np.int64)
    sizes_of_classes, rest = np.zeros((len(used), len(tapes)), np.int64), used
    for i in range(len(tapes) - 1, -1, -1):
        rest, part = np.divmod(rest, len(tops[i]) + 1)
        sizes_of_classes[:, i] = np.append(tops[i], 0)[part]
    return classes, sizes_of_classes, counts_by_class(looked_up(parent, classes, 0), len(used) + 1)


def _whole_rows(recipe: PlannedRecipe, sizes: Ints) -> Ints:
    """Return the number of rows that each document fills alone, before its last part."""
    extra = int(recipe.separators[0] is not None)
    rows: Ints = (np.maximum(sizes + extra, 1) - 1) // recipe.lengths[0]
    return rows


def _refuse_long(
    parent: Source,
    long: NDArray[np.bool_],
    sizes: Sequence[NDArray[Any]],
    limits: Sequence[int],
    features: Sequence[Feature],
) -> None:
    index = index_of_first(parent, long)
    for own, limit, feature in zip(sizes, limits, features, strict=True):
        if own[index] > limit:
            raise InvalidArgumentError(
                f'pack: index {index}: a sequence of {own[index]} in {feature.name!r} is longer than the {limit} '
                f'positions that a row has for it: {_REMEDY}'
            )


class ConcatenatedRows(PackedRows):
    """Rows of an epoch of documents one behind the other, which is divided into equal parts."""

    @classmethod
    def planned(cls, parent: Source, recipe: PlannedRecipe, sizes: Sequence[NDArray[Any]]) -> 'ConcatenatedRows':
        first = recipe.features[0]
        extras = [int(separator is not None) for separator in recipe.separators]
        for own, extra, feature in zip(sizes, extras, recipe.features, strict=True):
            if (feature.length, feature.alignment, extra) != (first.length, first.alignment, extras[0]):
                raise InvalidArgumentError(
                    f'pack: concat_then_split divides all features at the same places: expected the length, alignment '
                    f"and separator of {first.name!r} for {feature.name!r}: pass strategy='best_fit'"
                )
            if (unlike := own != sizes[0]).any():
                index = int(np.argmax(unlike))
                raise InvalidArgumentError(
                    f'pack: concat_then_split divides all features at the same places: index {index} has '
                    f'{sizes[0][index]} in {first.name!r} and {own[index]} in {feature.name!r}: pass '
                    f"strategy='best_fit'"
                )
        tape = np.zeros(len(sizes[0]), np.int64)
        for start, part in zip(range(0, len(tape), CHUNK), chunks(sizes[0]), strict=True):
            tape[start : start + CHUNK] = -(-(part + extras[0]) // first.alignment) * first.alignment * (part > 0)
        tape = compact(tape)
        values, counts = counts_of(in_epoch := looked_up(parent, tape, 0))
        warn_of_left_out('pack', int((in_epoch == 0).sum()))
        total = int((values * counts).sum())
        rows = max(int(total > 0), -(-(total - recipe.extra) // first.length))
        segments = most_segments(values, counts, recipe.lengths[0])
        return cls(parent, recipe, sizes, tape, np.array([total]), rows, segments)

    def _arrange(self, epoch: int, stop: threading.Event) -> Arrangement:
        indices = self._indices(epoch, stop)
        ends = np.cumsum(self._classes[indices], dtype=np.int64)
        self._check_epoch(epoch, ends[-1:])
        arranged = Arrangement(ends, indices=None if self._source is None else indices)
        return arranged if self._seed is None else self._in_order(arranged, epoch)

    def _pieces(self, units: Ints, within: Ints, arranged: Arrangement) -> Pieces:
        ends, length = arranged.table, self._recipe.features[0].length
        starts = units * length
        stops = np.minimum(starts + self._recipe.lengths[0], ends[-1])
        order = np.argsort(starts)  # in which the ends are found in a tenth of the time
        first, last = np.empty_like(starts), np.empty_like(starts)
        first[order] = np.searchsorted(ends, starts[order], side='right')
        last[order] = np.searchsorted(ends, stops[order], side='left')
        counts = last - first + 1
        positions = ranges(first, counts)
        before = np.where(positions > 0, ends[positions - 1], 0)
        present = before < ends[positions]
        begins = np.maximum(0, np.repeat(starts, counts) - before)
        until = np.minimum(ends[positions], np.repeat(stops, counts)) - before
        if arranged.indices is not None:
            positions = arranged.indices[positions].astype(np.int64)
        return Pieces(sums_of(present.astype(np.int64), counts), positions[present], begins[present], until[present])

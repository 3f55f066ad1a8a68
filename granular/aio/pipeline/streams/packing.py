"""Packing: sequences of various lengths combined into rows of fixed lengths."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from granular._lazy import is_masked
from granular.aio.execution.prefetch import END
from granular.aio.pipeline.position import FREE, Terms, Turns
from granular.aio.pipeline.streams.bins import Bins, Concatenated, Document, Segment, aligned
from granular.aio.pipeline.streams.flow import Flow
from granular.aio.pipeline.streams.held import Holding
from granular.aio.pipeline.streams.packing_options import Recipe
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.threads import offload
from granular.errors import DatapointError, StateError

_TEXT: Final = 'OSU'  # kinds of dtypes that are no numbers
_LONG: Final = 100  # rows that a document fills above which it is packed in a thread
_TURN: Final = 0.005  # seconds after which the event loop gets a turn


class Packing(Holding):
    """Sequences packed into rows of fixed lengths.

    A pack is computed as a whole, and its rows are built one by one. The state is the state before the pack, and the
    next row: its number is the position in the ``Turns`` of the shards of rows.
    """

    kind = 'pack'

    def __init__(self, parent: Flow, stage: str, recipe: Recipe) -> None:
        super().__init__(parent, stage, last=True)
        self._recipe, self._features, self.turns = recipe, recipe.features, Turns.of(recipe.shard)
        # Where the pack begins: in the first document that is held, at these offsets.
        self._base: dict[str, Any] = {'offsets': [0] * len(self._features), 'document': 0, 'rows': 0}
        self._row = 0  # the next row of all shards
        self._rows: list[list[Segment]] | None = None  # of the pack; None until it is computed
        self._after = self._base  # where the next pack begins
        self._pending: Document | None = None  # the document that the next pack begins with
        self._dtypes: list[tuple[Any, tuple[int, ...]] | None] = []
        self._positions = np.arange(max(feature.length for feature in self._features), dtype=np.int32)

    @property
    def in_step(self) -> bool:
        return self.hosts == 1  # how many rows there are is not known

    async def next(self) -> Any:
        row = self._row + self.turns.offset
        while True:
            if self._rows is None:
                await self._compute()
            if not self._rows:
                self._row = max(self._row, self._base['rows'])
                return END
            at = row - self._base['rows']
            if at < len(self._rows):
                break
            self._begin_next()
        element = self._build(self._rows[at])
        self._rows[at] = []  # free its documents
        self._row += self.turns.stride
        if self._row >= self._base['rows'] + len(self._rows):
            self._begin_next()
        return element

    def _begin_next(self) -> None:
        """Let the next pack follow, which begins with the document that had no space in this one."""
        self._base, self._rows = self._after, None
        self._held.release(last=self._pending is not None)

    async def _compute(self) -> None:
        """Compute the rows of the pack that begins at the base."""
        await ensure_event_loop()  # the thread of the consumer would compete with those that compute the documents
        recipe, features, base = self._recipe, self._features, self._base
        pack = Concatenated(recipe) if recipe.strategy == 'concat_then_split' else Bins(recipe)
        document, number = self._pending, base['document']
        self._pending, self._dtypes = None, [None] * len(features)
        if document is not None:
            self._check_dtypes(document, number)
        first = document is None
        longest, began = max(feature.length for feature in features), time.perf_counter()
        while True:
            if document is None:
                element = await self._held.next()
                if element is END:
                    break
                document = self._document(element, number)
                if first:  # a state may be in its middle
                    offsets = list(base['offsets'])
                    if any(offset > size for offset, size in zip(offsets, document.sizes, strict=True)):
                        raise StateError(f'pack: the state is at {offsets} of a document of {document.sizes} values')
                    document.offsets, first = offsets, False
            if max(document.sizes) > _LONG * longest:
                added = await offload(pack.add, document)  # it fills many rows
            else:
                added = pack.add(document)
            if not added:
                break
            if not number % 16 and time.perf_counter() - began > _TURN:
                await asyncio.sleep(0)  # let the loop do other work, such as reads
                began = time.perf_counter()
            document, number = None, number + 1
        if first and any(base['offsets']):
            raise StateError(f'pack: the state is in the middle of element {number}, and there is none')
        rows = pack.rows()
        if recipe.seed is not None:
            order = np.random.default_rng(recipe.seed + base['rows']).permuted(range(len(rows)))
            rows = [rows[i] for i in order.tolist()]
        self._after = {
            'offsets': [0] * len(features) if document is None else list(document.offsets),
            'document': number,
            'rows': base['rows'] + len(rows),
        }
        self._pending, self._rows = document, rows

    def _document(self, element: Any, number: int) -> Document:
        """Return an element as a document; raise ``DatapointError`` if it lacks a feature, or one does not fit."""
        arrays = []
        recipe = self._recipe
        split = recipe.split_long or recipe.strategy == 'concat_then_split'
        for feature in self._features:
            value = element
            try:
                for key in feature.path:
                    value = value[key]
            except (KeyError, TypeError, IndexError):
                keys = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
                raise DatapointError(f'pack: element {number} has no {feature.name!r}, only {keys!s:.200}') from None
            if type(value) is not np.ndarray:
                if is_masked(type(value)):
                    raise DatapointError(
                        f'pack: element {number}: {feature.name!r}: expected an array without a mask: call its filled()'
                    )
                try:
                    value = np.asarray(value)
                except ValueError as error:
                    raise DatapointError(
                        f'pack: element {number}: {feature.name!r} is not an array: {error}'
                    ) from error
            if value.ndim == 0:
                value = value.reshape(1)
            if len(value) > feature.length and (feature.meta or not split):
                remedy = 'which is a meta feature and cannot be split' if split else 'split it, or pass split_long=True'
                raise DatapointError(
                    f'pack: element {number}: a sequence of {len(value)} in {feature.name!r} is longer than a row of '
                    f'{feature.length}: {remedy}'
                )
            arrays.append(value)
        try:
            listed = [element[key] for key in recipe.listed]
        except KeyError as error:
            raise DatapointError(f'pack: element {number} has no {error}, only {sorted(map(str, element))}') from None
        document = Document(arrays, listed)
        self._check_dtypes(document, number)
        return document

    def _check_dtypes(self, document: Document, number: int) -> None:
        """Check that a feature has one dtype and shape within a pack: a conversion could change values."""
        for i, array in enumerate(document.arrays):
            expected = self._dtypes[i]
            if expected is not None and array.dtype is expected[0] and array.shape[1:] == expected[1]:
                continue
            if not len(array):  # an empty list has no dtype of its own
                continue
            feature = self._features[i]
            if expected is None:
                if array.dtype.kind in _TEXT:
                    raise DatapointError(
                        f'pack: element {number}: {feature.name!r}: expected numbers, got dtype {array.dtype}'
                    )
                for name, value in (('padding', feature.padding), ('bos', feature.bos)):
                    _check_value(value, array.dtype, f'{name} of {feature.name!r}')
                self._dtypes[i] = array.dtype, array.shape[1:]
            elif array.dtype != expected[0] or array.shape[1:] != expected[1]:
                raise DatapointError(
                    f'pack: element {number}: {feature.name!r}: expected {expected[0]} of shape '
                    f'{_shape(expected[1])} as in the elements before, got {array.dtype} of {_shape(array.shape[1:])}'
                )

    def _build(self, segments: Sequence[Segment]) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for i, feature in enumerate(self._features):
            out, length = row, feature.length
            for key in feature.path[:-1]:
                out = out.setdefault(key, {})
            parts = [segment.parts[i] for segment in segments]
            dtype, shape = self._dtypes[i] or (parts[0].dtype, parts[0].shape[1:])
            values = np.zeros((length, *shape), dtype)
            if feature.padding:
                values[...] = feature.padding
            ids, positions = np.zeros(length, np.int32), np.zeros(length, np.int32)
            start = 0
            for number, part in enumerate(parts, 1):
                if not (size := len(part)):
                    continue
                stop = start + size
                values[start:stop] = part
                if feature.bos is not None:
                    values[start] = feature.bos
                if not feature.meta:
                    ids[start:stop] = number
                    positions[start:stop] = self._positions[:size]
                start = stop if feature.alignment == 1 else aligned(stop, feature.alignment)
            name = feature.path[-1]
            out[name] = values
            if not feature.meta:
                out[f'{name}_segment_ids'], out[f'{name}_positions'] = ids, positions
        for i, key in enumerate(self._recipe.listed):
            row[key] = [segment.listed[i] for segment in segments]
        return row

    def state(self) -> Any:
        holds = self._row > self._base['rows'] or any(self._base['offsets'])
        row = self.turns.state(self._row, self.keeps_host)
        return self._held.state(holds, **self._base, row=row)

    async def restore(self, state: Any, terms: Terms = FREE) -> None:
        expected = {'parent', *self._base, 'row'}
        if not isinstance(state, Mapping) or not expected <= set(state) <= {*expected, 'held'}:
            keys = sorted(state) if isinstance(state, Mapping) else state
            raise StateError(
                f'pack: expected a state with {sorted(expected)}, got {keys!s:.200}: states saved by earlier '
                f'versions of granular cannot be continued: start again at the beginning of an epoch'
            )
        row = self.turns.at(state['row'], terms)
        offsets, numbers = state['offsets'], [state['document'], state['rows'], row]
        if len(offsets) != len(self._features):
            raise StateError(f'pack: expected {len(self._features)} offsets, got {offsets!r:.200}')
        if not all(type(number) is int and number >= 0 for number in [*offsets, *numbers]):
            raise StateError(f'pack: expected integers >= 0, got offsets {offsets!r:.200} and {numbers}')
        if row < state['rows']:
            raise StateError(f'pack: expected a row >= {state["rows"]}, got {row}')
        await self._held.restore(state, row > state['rows'] or any(offsets), terms)
        self._base = {key: state[key] for key in self._base}
        self._row, self._rows, self._pending = row, None, None

    def _forget(self) -> None:
        super()._forget()
        self._rows = self._pending = None


def _shape(trailing: tuple[int, ...]) -> str:
    return f'({", ".join(["n", *map(str, trailing)])})'


def _check_value(value: Any, dtype: np.dtype[Any], name: str) -> None:
    if value is None:
        return
    try:
        with np.errstate(all='ignore'):
            held = np.full((), value, dtype)
        same = bool(held == value) or bool(np.isnan(held) and np.isnan(value))
    except (OverflowError, TypeError, ValueError):
        same = False
    if not same:
        raise DatapointError(f'pack: {name}: {value!r:.100} is not a value of dtype {dtype}')

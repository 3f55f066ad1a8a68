"""Packing: sequences of various lengths combined into rows of fixed lengths."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np

from granular._support.text import counted
from granular.aio.pipeline.changes import Excluded, RowLength
from granular.aio.pipeline.execution.prefetch import END
from granular.aio.pipeline.nodes.indices import seed_in_epoch
from granular.aio.pipeline.origins import left_out
from granular.aio.pipeline.position import FREE, Fit, RestoreRules, Turns
from granular.aio.pipeline.streams.bins import Bins, Concatenated, Document, Segment
from granular.aio.pipeline.streams.flow import Flow
from granular.aio.pipeline.streams.held import Holding
from granular.aio.pipeline.streams.packing_options import Recipe
from granular.aio.pipeline.streams.read import Reading
from granular.aio.pipeline.streams.rows import TEXT, array_of, check_value, fill, shape_of
from granular.aio.pipeline.streams.stream import Staged, Stream
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.threads import offload
from granular.errors import DatapointError, InvalidArgumentError, StateError
from granular.formats.checksums import crc32c

_LONG: Final = 100  # rows that a document fills above which it is packed in a thread
_SHOWN: Final = 5  # datapoints in a message
_MOST_VALUES: Final = 1 << 62  # in all rows
_TURN: Final = 0.005  # seconds after which the event loop gets a turn


class Packed(Staged):
    """Rows that are filled with sequences."""

    def __init__(self, parent: Stream, recipe: Recipe, epoch: int = 0) -> None:
        line = recipe.line if recipe.seed is None else recipe.line.changed(epoch=epoch or None)
        seed = None if recipe.seed is None else seed_in_epoch(recipe.seed, epoch)
        super().__init__(parent, line, Packing, recipe, seed)
        self._recipe = recipe

    @property
    def hosts(self) -> int:
        return super().hosts * self._recipe.shard.shard_count

    async def divisions(self) -> set[int]:
        return {count * self._recipe.shard.shard_count for count in await super().divisions()}

    def expecting(self, parts: int) -> Stream:
        return super().expecting(parts // self._recipe.shard.shard_count)

    def length(self) -> int:
        raise InvalidArgumentError(
            f'{self.describe()}: elements of this stage have no index: pack of the MapDataset plans rows that have one'
        )

    def reseeded(self, epoch: int) -> Stream:
        return self if self._recipe.seed is None else Packed(self.parent, self._recipe, epoch)


class Documents(NamedTuple):
    """The documents of a pack, with the one that had no space, as states compare them."""

    number: int = 0
    ended: bool = False  # True if none came after them
    checksum: int = 0

    def with_next(self, document: Document) -> 'Documents':
        return Documents(self.number + 1, self.ended, crc32c(document.checksum.to_bytes(4, 'little'), self.checksum))

    @classmethod
    def of(cls, state: Any) -> 'Documents':
        """Return the documents of a state; raise ``StateError`` if it has none."""
        if isinstance(state, list | tuple) and list(map(type, state)) == [int, bool, int]:
            return cls(*state)
        raise StateError(f'pack: expected number, end and checksum of documents, got {state!r:.200}')


class Packing(Holding):
    """Sequences packed into rows of fixed lengths.

    A pack is computed as a whole, and its rows are built one by one. The state is the state before the pack, and the
    next row: its number is the position in the ``Turns`` of the shards of rows. If rows or parts of the pack were
    given out, the state also has checksums of its documents, which must be the same when they are read again.
    """

    kind = 'pack'
    fit = Fit(False, 'sequences', remedy='pack(..., shard_options=) instead of to_iter_dataset(shard_options=)')

    def __init__(self, parent: Flow, stage: str, recipe: Recipe, seed: Any) -> None:
        super().__init__(parent, stage, last=True)
        self._parent = parent
        self._seed = seed  # that shuffles the rows of a pack; None for their order
        self._recipe = recipe
        self._features = recipe.features
        self.turns = Turns.of(recipe.shard)
        # Where the pack begins: in the first document that is held, at these offsets.
        self._base: dict[str, Any] = {'offsets': [0] * len(self._features), 'document': 0, 'rows': 0}
        self._row = 0  # the next row of all shards
        # The values of each feature in all rows before some rows: the last one up to the next row for which they are
        # known, and later ones. None are after a state that does not have them.
        self._values: dict[int, list[int]] = {0: [0] * len(self._features)}
        self._place: int | None = None  # of the next row of this host from there on, if a mix decides it
        self._rows: list[list[Segment]] | None = None  # of the pack; None until it is computed
        self._after = self._base  # where the next pack begins
        self._pending: Document | None = None  # the document that the next pack begins with
        self._documents = Documents()  # those of the pack
        self._given: Documents | None = None  # those of which rows or parts were given out; None if there are none
        self._excludes = False  # True after a state of a pipeline that left out other documents
        self._dtypes: list[tuple[Any, tuple[int, ...]] | None] = []
        self._positions = np.arange(max(feature.length for feature in self._features), dtype=np.int32)

    @property
    def apart(self) -> bool:
        return self._parent.hosts > 1  # otherwise all hosts pack the same rows

    @property
    def even(self) -> bool:
        # How many rows there are is not known, but whether a round of them is complete.
        return self.hosts == 1 or (self.turns.whole and not self.apart)

    @property
    def in_step(self) -> bool:
        return self.even

    def row_source(self) -> Flow | None:
        return self if self.turns.count > 1 and not self.apart else None

    def set_place(self, place: int) -> None:
        """Let the next row be the one at this place behind the position, which ``advance`` moves from now on."""
        self._place = place

    async def next(self) -> Any:
        place = self.turns.offset if self._place is None else self._place
        row = await self._take(self._row + place)
        if row is None:
            return END
        element = self._build(row)
        if self._place is None:
            is_complete = await self.has(self.turns.stride)
            if self.turns.whole and not is_complete:
                return END  # other hosts have no row in this round
            self.advance(self.turns.stride if is_complete else 0)
        return element

    async def has(self, count: int) -> bool:
        """Return whether there are so many rows from the position on; if there are not, move it behind the last one.

        They are computed, and their values counted: hosts that take a round of rows come to the same state, behind the
        last one. A change that is declared for a state, such as elements that are excluded, so begins with the same row
        on all of them.
        """
        return await self._find(self._row + count - 1) is not None

    def advance(self, count: int) -> None:
        """Move the position on by so many rows that there are, which hosts have taken."""
        self._row += count
        known = max((row for row in self._values if row <= self._row), default=0)
        self._values = {row: values for row, values in self._values.items() if row >= known}
        if self._rows is None:
            return
        self._given = self._documents if count else self._given
        if self._row >= self._base['rows'] + len(self._rows):
            self._begin_next()

    async def _take(self, row: int) -> list[Segment] | None:
        """Return the segments of a row, and free them; None if there are no more rows."""
        at = await self._find(row)
        if at is None or self._rows is None:
            return None
        segments, self._rows[at] = self._rows[at], []
        self._given = self._documents
        return segments

    async def _find(self, row: int) -> int | None:
        """Compute packs until one has a row, and return its place there; None if there are no more rows."""
        while True:
            if self._rows is None:
                await self._compute()
            if not self._rows:
                self._row = max(self._row, self._base['rows'])
                return None
            if row < self._base['rows'] + len(self._rows):
                return row - int(self._base['rows'])
            self._begin_next()

    def _begin_next(self) -> None:
        """Let the next pack follow, which begins with the document that had no space in this one."""
        self._base = self._after
        self._rows = None
        self._given = None
        if self._pending is not None and any(self._base['offsets']):
            self._given = Documents().with_next(self._pending)
        self._held.release(last=self._pending is not None)

    async def _compute(self) -> None:
        """Compute the rows of the pack that begins at the base."""
        await to_loop()  # the thread of the consumer would compete with those that compute the documents
        recipe, features, base = self._recipe, self._features, self._base
        pack = Concatenated(recipe) if recipe.strategy == 'concat_then_split' else Bins(recipe)
        document, number = self._pending, base['document']
        self._pending, self._dtypes = None, [None] * len(features)
        documents = Documents()
        if document is not None:
            self._check_dtypes(document, number)
            documents = documents.with_next(document)
        first = document is None
        longest, began = max(feature.length for feature in features), time.perf_counter()
        while True:
            if document is None:
                element = await self._held.next()
                if element is END:
                    documents = documents._replace(ended=True)
                    break
                document = self._document(element, number)
                documents = documents.with_next(document)
                if first:  # a state may be in its middle
                    document.offsets, first = self._offsets(document, documents), False
                elif not self._check(documents):
                    self._refuse()
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
        if not self._check(documents, complete=True) or (first and any(base['offsets'])):
            self._refuse()
        rows = pack.rows()
        if self._seed is not None:
            order = np.random.default_rng(self._seed + base['rows']).permuted(range(len(rows)))
            rows = [rows[i] for i in order.tolist()]
        self._count_values(rows)
        self._after = {
            'offsets': [0] * len(features) if document is None else list(document.offsets),
            'document': number,
            'rows': base['rows'] + len(rows),
        }
        self._pending = document
        self._rows = rows
        self._documents = documents

    def _count_values(self, rows: Sequence[Sequence[Segment]]) -> None:
        """Count the values in the rows of a pack, from a row on before which they are known."""
        begin, features = int(self._base['rows']), range(len(self._features))
        sizes = [[0 for _ in features], *([sum(len(part.parts[i]) for part in row) for i in features] for row in rows)]
        sums = np.cumsum(sizes, axis=0)
        known = next((row for row in self._values if 0 <= row - begin < len(sums)), None)
        if known is not None:
            before = np.array(self._values[known]) - sums[known - begin]
            self._values |= {begin + i: own for i, own in enumerate((sums + before).tolist())}

    def _offsets(self, document: Document, documents: Documents) -> list[int]:
        """Return the numbers of values of the first document of the pack that were given out."""
        offsets = list(self._base['offsets'])
        beyond = any(offset > size for offset, size in zip(offsets, document.sizes, strict=True))
        if beyond or not self._check(documents):
            self._refuse()
        return offsets

    def _check(self, documents: Documents, complete: bool = False) -> bool:
        """Return whether documents, so far or all of the pack, are those of which rows or parts were given out."""
        given = self._given
        if given is None:
            return True
        if complete:
            return documents.number >= given.number and (not given.ended or documents == given)
        return documents.number != given.number or documents.checksum == given.checksum

    def _refuse(self) -> NoReturn:
        """Refuse the documents that were read again."""
        number, given = self._base['document'], self._given
        which = (
            f'{counted(given.number, "element")} from number {number} on' if given else f'a part of element {number}'
        )
        raise StateError(
            f'{self._stage}: holds {which}, and other elements were read in their place than when the state was saved'
            f'{self._left_out()}: continue with the same elements, or from a state that holds none of them'
        )

    def _left_out(self) -> str:
        """Name the datapoints of what was read again that are excluded since the state was saved, as far as known."""
        parent = self._parent
        if not self._excludes or not isinstance(parent, Reading):
            return ''
        turns = parent.turns
        start, stop = (turns.at(state, FREE) for state in (self._held.before, parent.state()))
        if type(start) is not int:  # of elements that were numbered by a later stage
            return ''
        found = left_out(parent.sources()[0], turns.taken(np.arange(start, stop, turns.stride)))
        if not found:
            return ''
        more = f' and {len(found) - _SHOWN} more' if len(found) > _SHOWN else ''
        return f', as exclude() leaves out {found.index[:_SHOWN].tolist()}{more} of {found.sources[0]}'

    def _document(self, element: Any, number: int) -> Document:
        """Return an element as a document; raise ``DatapointError`` if it lacks a feature, or one does not fit."""
        arrays = []
        recipe = self._recipe
        split = recipe.split_long or recipe.strategy == 'concat_then_split'
        for feature in self._features:
            value = array_of(element, feature, f'pack: element {number}')
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
                if array.dtype.kind in TEXT:
                    raise DatapointError(
                        f'pack: element {number}: {feature.name!r}: expected numbers, got dtype {array.dtype}'
                    )
                for name, value in (('padding', feature.padding), ('bos', feature.bos)):
                    check_value(value, array.dtype, f'{name} of {feature.name!r}')
                self._dtypes[i] = array.dtype, array.shape[1:]
            elif array.dtype != expected[0] or array.shape[1:] != expected[1]:
                raise DatapointError(
                    f'pack: element {number}: {feature.name!r}: expected {expected[0]} of shape '
                    f'{shape_of(expected[1])} as in the elements before, got {array.dtype} of '
                    f'{shape_of(array.shape[1:])}'
                )

    def _build(self, segments: Sequence[Segment]) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for i, feature in enumerate(self._features):
            out, length = row, feature.length
            for key in feature.path[:-1]:
                out = out.setdefault(key, {})
            parts = [segment.parts[i] for segment in segments]
            dtype, shape = self._dtypes[i] or (parts[0].dtype, parts[0].shape[1:])
            replaced = [self._recipe.bos_parts or segment.begins[i] for segment in segments]
            values, ids, positions, _ = fill(feature, length, parts, dtype, shape, replaced, self._positions)
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
        documents = {} if self._given is None else {'documents': list(self._given)}
        known = [row for row in self._values if row <= self._row]
        values = {'values': [known[-1], *self._values[known[-1]]]} if known else {}
        return self._held.state(holds, **self._base, row=row, **values, **documents)

    async def restore(self, state: Any, rules: RestoreRules = FREE) -> None:
        expected = {'parent', *self._base, 'row'}
        if not isinstance(state, Mapping) or not expected <= set(state) <= {*expected, 'held', 'documents', 'values'}:
            keys = sorted(state) if isinstance(state, Mapping) else state
            raise StateError(f'pack: expected a state with {sorted(expected)}, got {keys!s:.200}')
        row = self.turns.at(state['row'], rules)
        offsets, numbers = state['offsets'], [state['document'], state['rows'], row]
        if len(offsets) != len(self._features):
            raise StateError(f'pack: expected {len(self._features)} offsets, got {offsets!r:.200}')
        if not all(type(number) is int and number >= 0 for number in [*offsets, *numbers]):
            raise StateError(f'pack: expected integers >= 0, got offsets {offsets!r:.200} and {numbers}')
        values = state.get('values', ())
        are_counts = isinstance(values, list | tuple) and all(
            type(number) is int and 0 <= number < _MOST_VALUES for number in values
        )
        if not are_counts or len(values) not in (0, 1 + len(self._features)):
            raise StateError(
                f'pack: expected a row and {len(self._features)} numbers of values before it, got {values!r:.200}'
            )
        if row < state['rows']:
            raise StateError(f'pack: expected a row >= {state["rows"]}, got {row}')
        rules.check_held(RowLength, Excluded)  # of a later stage; this one compares what it holds
        self._excludes = any(isinstance(made.change, Excluded) for made in rules.applied)
        resized = any(isinstance(made.change, RowLength) for made in rules.applied)
        begun = row > state['rows'] or (any(offsets) and self._recipe.strategy != 'concat_then_split')
        if resized and begun:
            raise StateError(
                f'{self._stage}: {row - state["rows"]} rows of a pack were given out, which another length would fill '
                f'differently: load a state between two packs, as at the start of an epoch; only rows of '
                f"strategy='concat_then_split' continue at any token"
            )
        await self._held.restore(state, row > state['rows'] or any(offsets), rules)
        self._base = {key: state[key] for key in self._base}
        self._row = row
        self._values = {values[0]: list(values[1:])} if values else {}
        self._rows = None
        self._pending = None
        self._given = Documents.of(state['documents']) if 'documents' in state else None

    def _forget(self) -> None:
        super()._forget()
        self._rows = self._pending = None

"""Stages that combine elements by a plan of their sizes, which is known before anything is read."""

import abc
import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from granular._support.indexing import Ints, cut_into, grouped, integers_of, placed
from granular._support.text import counted, logger
from granular.aio.pipeline.execution.failures import Failure, without_failures
from granular.aio.pipeline.nodes.arrangements import Arrangement, Arrangements
from granular.aio.pipeline.nodes.elements import beneath_functions, selected
from granular.aio.pipeline.nodes.indices import IndexNode, Shuffle, Slice, Wrapped, beneath, check_finite, in_epochs
from granular.aio.pipeline.nodes.source import (
    Node,
    Source,
    all_stages,
    check_not_empty,
    map_in_threads,
    timed,
    varying_stage,
)
from granular.aio.pipeline.nodes.stacking import is_small
from granular.aio.pipeline.orders import Blocks, permute
from granular.aio.pipeline.planning import sorted_by_class
from granular.aio.runtime.worker_pickling import pickling_for_worker
from granular.errors import InvalidArgumentError
from granular.formats.checksums import crc32c

_INLINE: Final = 1 << 14  # elements up to which an epoch is arranged on the event loop
CHUNK: Final = 1 << 18  # elements that are looked up at a time
_TABLE: Final = 1 << 24  # sizes, at most, that are counted in a table
_PAGE: Final = 1 << 17  # sizes that are read at a time
_LATE: Final = 7 / 8  # of an epoch, after which the next one is arranged


class Pieces(NamedTuple):
    """The elements that rows or batches are made of, one row behind the other, or the parts of them."""

    counts: Ints  # of each row
    positions: Ints  # in the epoch, or in the source
    begins: Ints | None = None  # of the parts; None for whole elements
    stops: Ints | None = None
    buckets: Ints | None = None  # of batches


class Composition(NamedTuple):
    """The elements that several rows or batches are made of, or the parts of them."""

    source: Source  # that they are elements of
    counts: Ints  # of each row or batch
    indices: Ints  # in the source, one row behind the other
    begins: Ints  # of the values that are in the row
    stops: Ints
    rows: Ints | None  # in a batch; None if it is none


class Planned(Node):
    """Base of the stages with a plan.

    The order of the elements is that of the epoch. If it differs from epoch to epoch, rows are shuffled, too, by a seed
    that follows from the stages which vary; otherwise they are in the order of their first elements.

    Args:
      parent: the elements.
      sizes: the sizes of each value that has some, of all elements of the source beneath shuffles and selections.
      classes: the class of each element of that source.
      counts: the number of elements of each class in an epoch; those of the last class are left out.
      units: the number of rows, or of groups of batches, in an epoch.
      align: batches of a group.
    """

    _doing: str  # what is done, for errors
    _by_position = False  # True if rows have indices of the parent

    def __init__(
        self,
        parent: Source,
        sizes: Sequence[NDArray[Any]],
        classes: NDArray[Any],
        counts: Ints,
        units: int,
        align: int = 1,
    ) -> None:
        super().__init__(parent)
        self._sizes = sizes
        self._classes = classes
        self._counts = counts
        self._units, self._align = units, align
        varying = [stage.describe() for stage in all_stages(parent) if stage.varies]
        self.varies = varying_stage(parent) is not None
        self._seed = crc32c('\n'.join(varying).encode()) if self.varies else None
        self._arranged = Arrangements()

    def __getstate__(self) -> dict[str, Any]:
        if pickling_for_worker.get() and len(self):  # one epoch is arranged once for all workers, which map it
            self._arranged.compute_first(self._arrange)
        return self.__dict__

    def changed(self, **changes: Any) -> 'Planned':
        return super().changed(**changes, _arranged=Arrangements())

    def __len__(self) -> int:
        return self._units * self._align

    # --- epochs

    def _arrange(self, epoch: int, stop: threading.Event) -> Arrangement:
        """Compute what the plan is in an epoch, unless the event is set meanwhile."""
        indices = self._indices(epoch, stop)
        classes = self._classes[indices]
        self._check_epoch(epoch, counts_by_class(classes, len(self._counts)))
        arranged = self._in_order(self._completed(Arrangement(sorted_by_class(classes)), epoch), epoch)
        return arranged if self._source is None else arranged.of_source(indices)

    def _indices(self, epoch: int, stop: threading.Event) -> NDArray[Any]:
        """Return the index in the source of each element of an epoch."""
        count = len(self._classes)
        table = np.arange(count, dtype=np.int32 if count < 1 << 31 else np.int64)
        return looked_up(self.parents[0], table, epoch, stop)

    @property
    def _source(self) -> Source | None:
        """The source beneath shuffles and selections, which is read by its own indices; None if functions follow it."""
        stage = self.parents[0]
        while isinstance(stage, IndexNode) and not isinstance(stage, Wrapped):
            stage = stage.parents[0]
        return stage.parents[0] if isinstance(stage, Wrapped) and not self._by_position else None

    def _check_epoch(self, epoch: int, counts: Ints) -> None:
        if not np.array_equal(counts, self._counts):
            raise InvalidArgumentError(
                f'{self.describe()}: epoch {epoch} has elements of other sizes than the first one: select elements '
                f'before they are shuffled or mixed'
            )

    def _completed(self, arranged: Arrangement, epoch: int) -> Arrangement:
        """Add what else the plan is in an epoch."""
        return arranged

    def _in_order(self, arranged: Arrangement, epoch: int) -> Arrangement:
        """Shuffle rows or groups, or put them into the order of their first elements."""
        if self._seed is not None:
            return arranged._replace(units=compact(permute(np.arange(self._units), self._units, self._seed + epoch)))
        size = max(1, CHUNK // max(1, len(arranged.table) // max(1, self._units)))
        firsts = [np.zeros(0, np.int64)]
        for start in range(0, self._units, size):
            units = np.arange(start, min(start + size, self._units))
            pieces = self._pieces(np.repeat(units, self._align), np.tile(np.arange(self._align), len(units)), arranged)
            counts = pieces.counts.reshape(-1, self._align).sum(axis=1)
            firsts.append(np.minimum.reduceat(pieces.positions, np.cumsum(counts) - counts))
        return arranged._replace(units=np.argsort(np.concatenate(firsts), kind='stable'))

    @abc.abstractmethod
    def _pieces(self, units: Ints, within: Ints, arranged: Arrangement) -> Pieces:
        """Return what rows or batches consist of: of each, the row or group, and the number in its group."""

    def _placed(self, places: Ints, arranged: Arrangement) -> Pieces:
        """Return what the rows or batches at some places of an epoch consist of."""
        units, within = np.divmod(places, self._align)
        if arranged.units is not None:
            units = arranged.units[units].astype(np.int64)
        return self._pieces(units, within, arranged)

    # --- reading

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        steps = np.asarray(indices, np.int64)
        check_not_empty(self, len(self), steps)
        if not len(steps):
            return []
        epochs, places = np.divmod(steps, len(self))
        groups, plans = grouped(epochs), []
        is_quick = len(self.parents[0]) <= _INLINE
        for epoch, chosen in groups:
            own = epoch if self.varies and not self.kept else 0
            arranged = await self._arranged.get(own, self._arrange, is_quick)
            if self.varies and not is_quick and places[chosen].max() >= _LATE * len(self):
                await self._arranged.begin(epoch + 1, self._arrange)
            first = in_epochs(np.zeros(1, np.int64), np.array([epoch]), len(self.parents[0]))
            plans.append(self._wanted(self._placed(places[chosen], arranged), int(first[0])))
        wanted: list[Wanted] = placed(groups, plans, len(steps))
        elements = await self._read(wanted)
        rows = [Row(*pair) for pair in zip(wanted, elements, strict=True)]
        numbers = steps.tolist()
        datapoints = [row.failure(number) or row for row, number in zip(rows, numbers, strict=True)]
        if is_small([element for own in elements for element in own]) and Failure not in set(map(type, datapoints)):
            build = timed(self, self._build)
            with contextlib.suppress(Exception):  # it is raised, or captured, below
                return [build(row, number) for row, number in zip(rows, numbers, strict=True)]
        return await map_in_threads([timed(self, self._build)], datapoints, self._doing, numbers)

    def made_of(self, indices: Ints) -> Composition:
        """Return the elements of rows or batches, without reading them."""
        check_not_empty(self, len(self), indices)
        epochs, places = np.divmod(indices, max(1, len(self)))
        source = self.parents[0] if self._source is None else self._source
        groups, plans = grouped(epochs), []
        for epoch, chosen in groups:
            own = epoch if self.varies and not self.kept else 0
            pieces = self._placed(places[chosen], self._arranged.compute(own, self._arrange))
            documents = pieces.positions
            if self._source is None:
                documents = documents + in_epochs(np.zeros(1, np.int64), np.array([epoch]), len(self.parents[0]))[0]
            plans.append(self._composition(source, pieces, documents))
        if len(plans) == 1 and len(groups[0][1]) == len(indices):
            return plans[0]
        return _in_place(source, groups, plans)

    def _composition(self, source: Source, pieces: Pieces, documents: Ints) -> Composition:
        """Return what rows or batches are made of, all of the elements if a stage takes no parts of them."""
        sizes = self._sizes_of(documents)[0]
        return Composition(source, pieces.counts, documents, np.zeros_like(sizes), sizes, None)

    def _sizes_of(self, documents: Ints) -> list[Ints]:
        """Return the sizes of elements that are wanted, by value."""
        indices = documents if self._source is not None else beneath(self.parents[0], documents)[1]
        return [table[indices % len(table)].astype(np.int64) for table in self._sizes]

    async def release(self) -> None:
        await self._arranged.release()
        await super().release()

    def index_in_source(self, document: int) -> int:
        """Return the index in the source of an element that is wanted."""
        if self._source is not None:
            return document
        _, indices = beneath(self.parents[0], np.array([document]))
        return int(indices[0]) % len(self._classes)

    def _wanted(self, pieces: Pieces, first: int) -> 'list[Wanted]':
        """Return the elements of each row or batch; the epoch begins at ``first`` in the parent."""
        out = []
        documents = pieces.positions if self._source is not None else pieces.positions + first
        sizes = self._sizes_of(documents)
        ends = np.cumsum(pieces.counts)
        for i, (start, end) in enumerate(zip((ends - pieces.counts).tolist(), ends.tolist(), strict=True)):
            begins = None if pieces.begins is None else pieces.begins[start:end]
            stops = None if pieces.stops is None else pieces.stops[start:end]
            bucket = 0 if pieces.buckets is None else int(pieces.buckets[i])
            out.append(Wanted(documents[start:end], [own[start:end] for own in sizes], begins, stops, bucket))
        return out

    async def _read(self, wanted: 'Sequence[Wanted]') -> list[list[Any]]:
        """Return the elements of each row or batch."""
        documents = np.concatenate([own.documents for own in wanted])
        once, inverse = np.unique(documents, return_inverse=True)
        source = self._source
        fetched = await (self.parents[0] if source is None else source).fetch(once)
        return cut_into([fetched[i] for i in inverse.tolist()], [len(own.documents) for own in wanted])

    @abc.abstractmethod
    def _build(self, row: 'Row', index: int) -> Any:
        """Return a row or batch of its elements."""


def _in_place(source: Source, groups: Sequence[tuple[int, Ints]], plans: Sequence[Composition]) -> Composition:
    """Join what rows of several epochs are made of, given the places of the rows of each epoch."""
    places = np.concatenate([np.zeros(0, np.int64), *(chosen for _, chosen in groups)])
    counts = np.concatenate([np.zeros(0, np.int64), *(plan.counts for plan in plans)])
    order = np.argsort(np.repeat(places, counts), kind='stable')
    indices, begins, stops = (
        np.concatenate([np.zeros(0, np.int64), *(np.asarray(plan[i]) for plan in plans)])[order] for i in range(2, 5)
    )
    rows = None if not plans or plans[0].rows is None else np.concatenate([np.asarray(plan.rows) for plan in plans])
    return Composition(
        source, counts[np.argsort(places)], indices, begins, stops, None if rows is None else rows[order]
    )


class Wanted(NamedTuple):
    """The documents of a row or batch, and their sizes."""

    documents: Ints  # indices of the source, or of the parent if functions follow the source
    sizes: list[Ints]  # of each value that has sizes
    begins: Ints | None  # of the parts; None for whole elements
    stops: Ints | None
    bucket: int


class Row(NamedTuple):
    """A row or batch before it is built."""

    wanted: Wanted
    elements: Sequence[Any]

    def failure(self, index: int) -> Failure | None:
        """Return the first failure among the elements as that of the row."""
        failure = next((element for element in self.elements if type(element) is Failure), None)
        return None if failure is None else failure.at(index, failure.counts)


# --- sizes


def check_plannable(parent: Source, operation: str) -> None:
    """Refuse a parent whose epochs have other elements than the first one, or are not known before it is read."""
    check_finite(parent, operation, f'call {operation}() before repeat()')
    if parent.sparse:
        raise InvalidArgumentError(
            f'{operation}: a filtered dataset has fewer elements than sizes: select elements by subset(indices), or '
            f'call to_iter_dataset() and pack the stream'
        )
    for stage in all_stages(parent):
        if isinstance(stage, Shuffle) and isinstance(stage.order, Blocks):
            raise InvalidArgumentError(
                f'{operation}: the elements of a row come from all of the dataset, so that each would read a block of '
                f'{stage.describe()}: call shuffle(seed=...) without an order before {operation}(), or pack the '
                f'stream of to_iter_dataset(), which reads whole blocks'
            )
        if isinstance(stage, Slice) and (varying := stage.varying()) is not None:
            raise InvalidArgumentError(
                f'{operation}: {stage.describe()} is a selection behind {varying.describe()}, and has other elements '
                f'in each epoch: slice before shuffle'
            )
    base, _ = beneath(parent, np.zeros(0, np.int64))
    if (varying_base := varying_stage(base)) is not None:
        because = '' if varying_base is base else f', because of {varying_base.describe()}'
        raise InvalidArgumentError(
            f'{operation}: {base.describe()} has its elements in another order in each epoch, or others{because}: '
            f'call {operation}() before it'
        )


async def sizes_of(parent: Source, path: Sequence[str], given: Any, operation: str) -> Ints:
    """Return the sizes of a value of all elements of the source of the parent, beneath shuffles and selections.

    Args:
      parent: the elements.
      path: the keys that lead to the value in an element.
      given: the sizes as an array, or the key that has them; None to ask the source.
      operation: the operation that needs them, for errors.
    """
    name = '.'.join(path)
    base, functions = beneath_functions(parent)
    remedy = f'pass sizes=, an array of {len(base)}, one for each element of it, or the name of a key that has them'
    if given is None:
        if functions:
            raise InvalidArgumentError(
                f'{operation}: the sizes of {name!r} behind {functions[0]} are not known: {remedy}; or call '
                f'{operation}() before it'
            )
        sizes = await base.measure(path)
        if sizes is None:
            raise InvalidArgumentError(f'{operation}: {base.describe()} does not tell the sizes of {name!r}: {remedy}')
    elif isinstance(given, str):
        sizes = await _read_sizes(base, given, operation)
    else:
        sizes = integers_of(given, f'{operation}: sizes')
    if len(sizes) != len(base):
        raise InvalidArgumentError(
            f'{operation}: expected {len(base)} sizes, one for each element of {base.describe()}, got {len(sizes)}'
        )
    if (sizes < 0).any():
        index = int(np.argmax(sizes < 0))
        raise InvalidArgumentError(f'{operation}: expected sizes >= 0, got {sizes[index]} at index {index}')
    return sizes


async def _read_sizes(base: Source, key: str, operation: str) -> Ints:
    source = selected(base, [key])
    values: list[Any] = []
    for start in range(0, len(base), _PAGE):
        page = np.arange(start, min(start + _PAGE, len(base)))
        values += [element[key] for element in without_failures(await source.fetch(page))]
    return integers_of(values or np.zeros(0, np.int64), f'{operation}: sizes {key!r}')


def compact(sizes: Ints) -> NDArray[Any]:
    """Return sizes in as few bytes as they, and one more, need."""
    most = int(sizes.max(initial=0))
    return sizes.astype(next(dtype for dtype in (np.uint16, np.uint32, np.int64) if most < np.iinfo(dtype).max))


def chunks(sizes: NDArray[Any]) -> Iterator[Ints]:
    """Yield compact sizes as integers of 64 bits, some at a time."""
    for start in range(0, len(sizes), CHUNK):
        yield sizes[start : start + CHUNK].astype(np.int64)


def counts_of(sizes: NDArray[Any]) -> tuple[Ints, Ints]:
    """Return the sizes > 0 that there are, and how many of each."""
    most = int(sizes.max(initial=0))
    if most < _TABLE:
        counts = np.zeros(most + 1, np.int64)
        for part in chunks(sizes):
            counts += np.bincount(part, minlength=most + 1)
        values = np.flatnonzero(counts)
        counts = counts[values]
    else:
        values, counts = np.unique(sizes.astype(np.int64), return_counts=True)
    present = values > 0
    return values[present], counts[present]


def rounded(sizes: NDArray[Any], tops: Ints) -> NDArray[Any]:
    """Return the number of the first of some tops that is at least each size; their number for 0, and beyond all."""
    dtype = np.uint16 if len(tops) < 1 << 16 else np.int64
    most = int(sizes.max(initial=0))
    if most < _TABLE:
        table = np.searchsorted(tops, np.arange(most + 1)).astype(dtype)
        table[0] = len(tops)
        numbers: NDArray[Any] = table[sizes]
        return numbers
    return np.where(sizes > 0, np.searchsorted(tops, sizes), len(tops)).astype(dtype)


def counts_by_class(classes: NDArray[Any], number: int) -> Ints:
    """Return how many elements each class has."""
    counts = np.zeros(number, np.int64)
    for part in chunks(classes):
        counts += np.bincount(part, minlength=number)
    return counts


def looked_up(parent: Source, table: NDArray[Any], epoch: int, stop: threading.Event | None = None) -> NDArray[Any]:
    """Return the values in a table, by indices of the source of a parent, for all elements of an epoch.

    Raises:
      CancelledError: if the event is set meanwhile.
    """
    count = len(parent)
    out = np.empty(count, table.dtype)
    first = int(in_epochs(np.zeros(1, np.int64), np.array([epoch]), count)[0])
    for start in range(0, count, CHUNK):
        if stop is not None and stop.is_set():
            raise asyncio.CancelledError
        positions = np.arange(start, min(start + CHUNK, count))
        _, indices = beneath(parent, positions + first)
        out[positions] = table[indices % len(table)]
    return out


def digest_of(sizes: Sequence[NDArray[Any]]) -> str:
    """Return a checksum of sizes, or of what a plan is made of, for states."""
    checksum = 0
    for own in sizes:
        for start in range(0, len(own), CHUNK):
            checksum = crc32c(own[start : start + CHUNK].astype('<i8').tobytes(), checksum)
    return f'{checksum:08x}'


def index_of_first(parent: Source, chosen: NDArray[np.bool_]) -> int:
    """Return the index in the source of a parent of its first element that is chosen."""
    position = int(np.argmax(looked_up(parent, chosen, 0)))
    return int(beneath(parent, np.array([position]))[1][0]) % len(chosen)


def warn_of_left_out(operation: str, empty: int, long: int = 0) -> None:
    """Log how many elements a plan leaves out."""
    for count, kind in ((empty, 'empty'), (long, 'too long')):
        if count:
            verb = 'is' if count == 1 else 'are'
            logger.warning('%s: %s %s %s, and left out', operation, counted(count, 'element'), verb, kind)

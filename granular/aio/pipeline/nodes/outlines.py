"""Outlines of datasets, as states have them: from which sources elements come, and how many of each were taken.

An outline is plain JSON. A source is ``{'source': its description, 'length': datapoints of an epoch, 'elements': of all
epochs}``, each None if it is not known or endless; stages that neither choose between sources nor combine elements are
left out. Another stage is ``{'stage': its kind, 'of': the outlines of its sources}``, with its arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from granular._support.indexing import Ints
from granular.aio.pipeline.nodes.batches import Batch
from granular.aio.pipeline.nodes.blocks import BlockBuffer
from granular.aio.pipeline.nodes.combinations import (
    Concatenate,
    Interleave,
    Proportional,
    SourceChoice,
    Zip,
    choices_of,
    turns_before,
)
from granular.aio.pipeline.nodes.elements import Excluded, Filter, Handled, Streamed
from granular.aio.pipeline.nodes.indices import (
    ENDLESS,
    IndexNode,
    Repeat,
    Shuffle,
    Slice,
    WindowShuffle,
    Wrapped,
    inner_indices,
)
from granular.aio.pipeline.nodes.source import Source, parents_of
from granular.aio.pipeline.orders import Index, Order, Permutation, Sequential
from granular.errors import ClosedError, InvalidArgumentError

_CHUNK: Final = 1 << 20  # elements that are traced at a time
_ENDLESS: Final = 1 << 62  # elements of a source without end
_ORDERS: Final[Mapping[str, Order]] = {repr(order): order for order in (Index(), Permutation(), Sequential())}
_KINDS: Final[Mapping[type[Source], str]] = {
    Proportional: 'mix', Concatenate: 'concatenate', Interleave: 'interleave', Zip: 'zip', Batch: 'batch',
    Shuffle: 'shuffle', WindowShuffle: 'window_shuffle', Slice: 'slice', Repeat: 'repeat',
}  # fmt: skip


def outline_of(source: Source) -> dict[str, Any]:
    """Return the outline of a dataset."""
    if (leaf := _only_source(source)) is not None:
        return {'source': leaf.describe(), 'length': _epoch_of(source), 'elements': length_if_known(source)}
    of = [outline_of(parent) for parent in source.parents]
    kind = next((name for kind, name in _KINDS.items() if isinstance(source, kind)), None)
    if kind is None and len(of) == 1 and _is_passed_through(source):
        return of[0]
    arguments = source.arguments()
    unknown = kind is None or (kind == 'slice' and not arguments) or arguments.get('order', 'Index()') not in _ORDERS
    shape = {'length': length_if_known(source)} if unknown else {**arguments, **({'kept': True} if source.kept else {})}
    return {'stage': source.describe() if unknown else kind, **shape, 'of': of}


def _is_passed_through(source: Source) -> bool:
    """Return whether each element of a stage is made of the one at the same index of its source."""
    node = source.node if isinstance(source, Streamed) else source
    return isinstance(node, BlockBuffer | Excluded | Handled | IndexNode) or (
        node.elementwise and not isinstance(node, Filter)
    )


def _only_source(source: Source) -> Source | None:
    """Return the source of which each element is one datapoint; None if there are several, or elements combine some."""
    while parents := parents_of(source):
        if len(parents) > 1 or not (
            source.elementwise or isinstance(source, IndexNode | BlockBuffer | Excluded | Handled)
        ):
            return None
        source = parents[0]
    return source


def length_if_known(source: Source) -> int | None:
    """Return the length of a source; None if it is endless, or not known before it is open."""
    try:
        length = len(source)
    except (TypeError, ClosedError, InvalidArgumentError):
        return None
    return None if length >= ENDLESS else length


def _epoch_of(source: Source) -> int | None:
    """Return the number of datapoints that an epoch of a chain of stages over one source has."""
    while parents_of(source) and not isinstance(source, Slice):
        source = source.parents[0]
    beneath = source
    while parents_of(beneath):
        beneath = beneath.parents[0]
        if isinstance(beneath, Repeat):  # a selection of several epochs
            return _epoch_of(beneath)
    return length_if_known(source)


def sources_of(outline: Mapping[str, Any], path: str = '') -> list[tuple[str, Mapping[str, Any]]]:
    """Return the name and the outline of each source, as ``origins.names_of`` names them."""
    if 'of' not in outline:
        return [(path or outline['source'], outline)]
    several = len(outline['of']) > 1
    paths = [f'{path}/{i}' if path and several else str(i) if several else path for i in range(len(outline['of']))]
    return [pair for part, below in zip(outline['of'], paths, strict=True) for pair in sources_of(part, below)]


def taken_of(outline: Mapping[str, Any], start: int, stop: int) -> list[int | None]:
    """Return how many datapoints of each source some elements of a dataset were made of; None if that is not known.

    Args:
      outline: that of the dataset.
      start, stop: the first element, and the one after the last.
    """
    return _Counting.of(outline).taken(start, stop)


class _Counting:
    """A stage of an outline, made again over sources that have numbers only."""

    def __init__(self, kind: str, node: Source, of: 'Sequence[_Counting]') -> None:
        self._kind = kind
        self._node = node
        self._of = of

    @classmethod
    def of(cls, outline: Mapping[str, Any]) -> '_Counting':
        if 'of' not in outline:
            length = outline.get('elements')
            return cls('source', Wrapped(range(_ENDLESS if length is None else length)), ())
        of = [cls.of(part) for part in outline['of']]
        nodes = [part._node for part in of]
        make = _MAKERS.get(outline['stage'])
        if make is None:
            length = outline['length']
            return cls('unknown', Wrapped(range(_ENDLESS if length is None else length)), of)
        node = make(nodes, outline)
        return cls(outline['stage'], node.in_first_epoch() if outline.get('kept') else node, of)

    @property
    def _sources(self) -> int:
        return sum(part._sources for part in self._of) if self._of else 1

    @property
    def _is_known(self) -> bool:
        return self._kind != 'unknown' and all(part._is_known for part in self._of)

    def taken(self, start: int, stop: int) -> list[int | None]:
        """Return how many datapoints of each source the elements from one to another are made of."""
        if not self._of:
            return [stop - start]
        if start == stop:
            return [0] * self._sources
        node, of = self._node, self._of
        if self._kind == 'mix':
            weights = node.arguments()['weights']
            before, after = turns_before(start, weights), turns_before(stop, weights)
            return _flat(part.taken(a, b) for part, a, b in zip(of, before, after, strict=True))
        if self._kind == 'zip':
            return _flat(part.taken(start, stop) for part in of)
        if self._kind == 'interleave':
            count = len(of)
            return _flat(part.taken(-(-(start - i) // count), -(-(stop - i) // count)) for i, part in enumerate(of))
        if self._kind == 'repeat' and node.arguments()['reseed']:
            return of[0].taken(start, stop)
        length = len(of[0]._node if self._kind == 'repeat' else node)
        first, last = -(-start // length), stop // length  # whole epochs
        if first > last or (self._kind == 'slice' and last - first > 0):
            return self._traced(start, stop)
        whole = self._whole(first, last)
        return _sum([self._traced(start, first * length), whole, self._traced(last * length, stop)])

    def _whole(self, first: int, last: int) -> list[int | None]:
        """Return what is taken by some epochs."""
        node, of = self._node, self._of
        if self._kind == 'batch' and isinstance(node, Batch):
            if not node.drop_remainder:
                return of[0].taken(first * node.source_length, last * node.source_length)
            used, each = len(node) * node.size, node.source_length
            return _sum([[0] * self._sources, *(of[0].taken(i * each, i * each + used) for i in range(first, last))])
        if self._kind == 'unknown':
            return [None if last > first else 0] * self._sources
        if self._kind == 'repeat':  # the same epoch each time
            counts = of[0].taken(0, len(of[0]._node))
            return [None if count is None else count * (last - first) for count in counts]
        lengths = [len(part._node) for part in of]
        return _flat(part.taken(first * size, last * size) for part, size in zip(of, lengths, strict=True))

    def _traced(self, start: int, stop: int) -> list[int | None]:
        """Return what is taken by elements, each of which is looked up."""
        if start == stop:
            return [0] * self._sources
        if not self._is_known:
            return [None] * self._sources
        total = np.zeros(self._sources, np.int64)
        for at in range(start, stop, _CHUNK):
            self._count(np.arange(at, min(at + _CHUNK, stop)), total)
        return list(total.tolist())

    def _count(self, indices: Ints, total: Ints) -> None:
        if not self._of:
            total += len(indices)
            return
        node, first = self._node, 0
        owners, inner = None, indices
        if isinstance(node, SourceChoice):
            owners, inner = choices_of(node, indices)
        elif isinstance(node, Batch):
            epochs, numbers = np.divmod(indices, len(node))
            places = numbers[:, None] * node.size + np.arange(node.size)
            inner = (places + epochs[:, None] * node.source_length)[places < node.source_length]
        elif isinstance(node, IndexNode):
            inner = inner_indices(node, indices)
        for i, part in enumerate(self._of):
            part._count(inner if owners is None else inner[owners == i], total[first : first + part._sources])
            first += part._sources


def _flat(parts: Any) -> list[int | None]:
    return [count for part in parts for count in part]


def _sum(parts: Sequence[Sequence[int | None]]) -> list[int | None]:
    return [None if None in column else sum(filter(None, column)) for column in zip(*parts, strict=True)]


_MAKERS: Final[Mapping[str, Callable[[list[Source], Mapping[str, Any]], Source]]] = {
    'mix': lambda of, outline: Proportional(of, outline['weights']),
    'concatenate': lambda of, outline: Concatenate(of),
    'interleave': lambda of, outline: Interleave(of),
    'zip': lambda of, outline: Zip(of),
    'batch': lambda of, outline: Batch(of[0], outline['size'], outline['drop'], None),
    'shuffle': lambda of, outline: Shuffle(of[0], _ORDERS[outline['order']], outline['seed']),
    'window_shuffle': lambda of, outline: WindowShuffle(of[0], outline['size'], outline['seed']),
    'slice': lambda of, outline: Slice(of[0], slice(*_part(outline['part']))),
    'repeat': lambda of, outline: Repeat(of[0], outline['epochs'], outline['reseed']),
}


def _part(part: Sequence[int]) -> tuple[int, int | None, int]:
    start, stop, step = part
    return start, None if stop < 0 else stop, step

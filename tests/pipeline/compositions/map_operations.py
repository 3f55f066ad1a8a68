"""The operations of MapDatasets."""

from typing import Any, Final

import granular
from granular import MapDataset, shuffle
from tests.pipeline.compositions import functions as f
from tests.pipeline.compositions.atoms import Stream, atom
from tests.pipeline.compositions.plans import DOCUMENT, ITEM, Node, joined
from tests.pipeline.compositions.rules import Draw, Operation, drawn

_ENDLESS: Final = 1 << 60
LENGTH: Final = 12  # sources of several hosts are multiples of it, so that all hosts have equally many elements


def length_of(node: Node) -> int:
    return len(node.built)


def leaf(draw: Draw, kind: str | None = None, length: int | None = None) -> Node:
    """Return a source with a number of its own."""
    number, kind = next(draw.numbers), kind or draw.one_of(['item', 'item', 'doc'])
    if length is None:
        length = draw.number(1, 3) * LENGTH if draw.shard and draw.maybe(0.8) else draw.number(3, 18)
    leaves = ((number, frozenset[str]()),)
    if kind == 'item' and draw.maybe(0.25):
        step = atom(0, 1) - atom(0, 0)
        start, stop = atom(number, 0), atom(number, length)
        text = f'MapDataset.range(atom({number}, 0), atom({number}, {length}), {step})'
        return Node('MapDataset.range', text, lambda _, __: MapDataset.range(start, stop, step), leaves=leaves)
    data = Stream(number, length, documents=kind == 'doc')
    text, shape = f'MapDataset.source({data!r})', DOCUMENT if kind == 'doc' else ITEM
    return Node('MapDataset.source', text, lambda _, __: MapDataset.source(data), shape=shape, leaves=leaves)


def unified(nodes: list[Node]) -> list[Node]:
    """Convert pipelines to one shape of elements, if they have several."""
    shapes = {node.shape for node in nodes}
    if len(shapes) == 1 and nodes[0].shape.kind in ('item', 'doc'):
        return nodes
    combined = any(shape.combined for shape in shapes)
    sparse = any(shape.sparse for shape in shapes)
    return [node.then('map', f.as_document, shape=DOCUMENT.but(combined=combined, sparse=sparse)) for node in nodes]


def map_dataset(draw: Draw, depth: int = 1, stages: int | None = None) -> Node:
    """Return a random MapDataset."""
    node = _joined(draw, depth) if depth and draw.maybe(0.2) else leaf(draw)
    for _ in range(draw.number(0, 2) if stages is None else stages):
        before, node = node, drawn(draw, MAP_OPERATIONS, node)
        if not length_of(node):
            node = before
    return node


def _joined(draw: Draw, depth: int) -> Node:
    kind = draw.one_of(['concatenate', 'mix', 'zip', 'select_from_datasets'])
    if kind == 'zip':
        first = map_dataset(draw, depth - 1)
        parents = [first, leaf(draw, 'item', length_of(first))] if length_of(first) < _ENDLESS else [first]
        sparse = any(parent.shape.sparse for parent in parents)
        stackable = all(parent.shape.stackable for parent in parents) and not sparse
        shape = ITEM.but(kind='tuple', stackable=stackable, combined=True, sparse=sparse)
        return _join(kind, parents, lambda datasets, _: MapDataset.zip(datasets), shape, '')
    parents = unified([map_dataset(draw, depth - 1) for _ in range(draw.number(2, 3))])
    shape = parents[0].shape
    if kind == 'concatenate':
        parents = [parent for parent in parents if length_of(parent) < _ENDLESS] or [leaf(draw, shape.kind)]
        return _join(kind, parents, lambda datasets, _: MapDataset.concatenate(datasets), shape, '')
    if kind == 'mix':
        weights = [float(draw.number(1, 4)) for _ in parents]
        return _join(kind, parents, lambda datasets, _: MapDataset.mix(datasets, weights), shape, f', {weights}')
    turns = Turns([min(length_of(parent), 40) for parent in parents])
    select = MapDataset.select_from_datasets
    return _join(kind, parents, lambda datasets, _: select(datasets, turns), shape, f', {turns!r}')


def _join(name: str, parents: list[Node], make: Any, shape: Any, options: str) -> Node:
    text = f'MapDataset.{name}([{", ".join(parent.text for parent in parents)}]{options})'
    return joined(f'MapDataset.{name}', text, make, parents, shape)


class Turns:
    """A selection map: all elements of some datasets, in turn, from the last to the first."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths
        self._pairs = [
            (number, index)
            for index in range(max(lengths))
            for number in range(len(lengths))
            if index < lengths[number]
        ][::-1]

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self._pairs[index % len(self._pairs)]

    def __repr__(self) -> str:
        return f'Turns({self._lengths})'


def finite(draw: Draw, node: Node) -> bool:
    return length_of(node) < _ENDLESS


def dense(draw: Draw, node: Node) -> bool:
    return not node.shape.sparse


def labelled(draw: Draw, node: Node) -> bool:
    return node.shape.labelled and not node.shape.sparse and not node.shape.combined and finite(draw, node)


def _shuffle(draw: Draw, node: Node) -> Node:
    order = draw.one_of([None, shuffle.Index(), shuffle.Permutation(), shuffle.Blocks(2, 3)])
    if draw.maybe(0.3):
        return node.then('seed', draw.number(0, 2)).then('shuffle')
    return node.then('shuffle', draw.number(0, 2), order)  # few seeds: it takes a while to prepare one


def _filter(draw: Draw, node: Node) -> Node:
    return node.then('filter', f.is_kept, shape=node.shape.but(sparse=True, stackable=False))


def _flat_map(draw: Draw, node: Node) -> Node:
    shape = node.shape.but(sparse=True, stackable=False)
    return node.then('flat_map', f.parts, max_fan_out=4, shape=shape)


def _batch(draw: Draw, node: Node) -> Node:
    size, drop = draw.number(1, 4), draw.maybe(0.3)
    if drop and length_of(node) < size:
        drop = False
    if node.shape.stackable and draw.maybe(0.8):
        shape = node.shape.but(kind='array', stackable=drop, rows=True, combined=True, labelled=False)
        if draw.maybe(0.2):
            return node.then('apply', granular.grain.transforms.Batch(size, drop), shape=shape)
        return node.then('batch', size, drop_remainder=drop, shape=shape)
    shape = node.shape.but(kind='list', stackable=False, rows=False, combined=True, labelled=False)
    return node.then('batch', size, drop_remainder=drop, batch_fn=list, shape=shape)


def _random_map(draw: Draw, node: Node) -> Node:
    if draw.maybe():
        return node.then('seed', draw.number(0, 99)).then('random_map', f.at_random)
    return node.then('random_map', f.at_random, seed=draw.number(0, 99))


def _slice(draw: Draw, node: Node) -> Node:
    length = length_of(node)
    return node.then('slice', slice(draw.number(0, length // 3), length - draw.number(0, length // 3)))


def _item(draw: Draw, node: Node) -> Node:
    """Apply ``dataset[a::b]``."""
    start, step = draw.number(0, 2), draw.number(1, 2)
    return node.then('__getitem__', slice(start, None, step)).renamed('MapDataset.slice')


def _subset(draw: Draw, node: Node) -> Node:
    length = length_of(node)
    return node.then('subset', [draw.number(0, length - 1) for _ in range(draw.number(4, 12))])


def _repeat(draw: Draw, node: Node) -> Node:
    if draw.endless and draw.maybe(0.15):
        return node.then('repeat')
    return node.then('repeat', draw.number(1, 3), reseed_each_epoch=draw.maybe(0.8))


def piped(dataset: Any, function: Any) -> Any:
    """A function of a program's own in a chain of operations."""
    return dataset.map(function)


MAP_OPERATIONS: Final = [
    Operation(('shuffle', 'seed'), _shuffle, finite, share=2),
    Operation(('window_shuffle',), lambda d, n: n.then('window_shuffle', d.number(1, 8), d.number(0, 99)), finite),
    Operation(('slice',), _slice, finite),
    Operation(('slice',), _item, finite),
    Operation(('subset',), _subset, finite),
    Operation(('percent',), lambda d, n: n.then('percent', 0.25, 0.75), finite),
    Operation(('repeat',), _repeat, finite),
    Operation(('filter_classes',), lambda d, n: n.then('filter_classes', 'label', valid_classes=[0, 1]), labelled),
    Operation(('oversample',), lambda d, n: n.then('oversample', 'label'), labelled),
    Operation(('map',), lambda d, n: n.then('map', f.keep)),
    Operation(('map_with_index',), lambda d, n: n.then('map_with_index', f.with_index)),
    Operation(('random_map', 'seed'), _random_map),
    Operation(('filter',), _filter, lambda d, n: not n.shape.combined),
    Operation(('flat_map',), _flat_map, lambda d, n: n.shape.kind in ('item', 'doc') and finite(d, n)),
    Operation(
        ('select',),
        lambda d, n: n.then('select', ['tokens', 'ids'], shape=n.shape.but(labelled=False)),
        lambda d, n: n.shape.kind == 'doc' and not n.shape.sparse,
    ),
    Operation(('batch', 'apply'), _batch, dense, share=2),
    Operation(('apply',), lambda d, n: n.then('apply', [f.keep, f.keep])),
    Operation(('pipe',), lambda d, n: n.then('pipe', piped, f.keep)),
]

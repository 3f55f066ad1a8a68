"""The operations of IterDatasets."""

import dataclasses
import functools
from typing import Any, Final

import numpy as np

import granular
from granular import IterDataset, MapDataset
from granular.errors import InvalidArgumentError
from granular.grain import MultiprocessingOptions
from granular.grain.experimental import DatasetOptions
from tests.pipeline.compositions import functions as f
from tests.pipeline.compositions.atoms import Stream
from tests.pipeline.compositions.map_operations import map_dataset, unified
from tests.pipeline.compositions.plans import DOCUMENT, ITEM, By, Node, Setting, Shape, joined
from tests.pipeline.compositions.rules import Draw, Operation, drawn

READ: Final = By('read_options', lambda setting: setting.read)
SHARD: Final = By('ShardOptions(host, hosts)', lambda setting: setting.shard)
ROW: Final = Shape('row', stackable=True, combined=True)


def read(draw: Draw, node: Node) -> Node:
    """Convert a MapDataset to a stream."""
    options: dict[str, Any] = {'shard_options': SHARD} if draw.shard == 'read' else {}
    if draw.maybe(0.1):
        failing = f.fails_for_some if draw.maybe() else f.keep
        node, options['on_error'] = node.then('map', failing), draw.one_of(['skip', f.replaced])
    sparse = node.shape.sparse
    dense = node.shape.but(sparse=False, stackable=node.shape.stackable or node.shape.kind == 'item')
    nones = sparse and draw.maybe(0.2)
    options |= {'allow_nones': True} if nones else {}
    node = node.then('to_iter_dataset', READ, shape=dense, **options).renamed('MapDataset.to_iter_dataset')
    return node.then('filter', f.is_something) if nones else node


def stream(draw: Draw, depth: int = 1, stages: int | None = None) -> Node:
    """Return a random stream."""
    if depth and draw.maybe(0.35):
        node = drawn(draw, JOINS, read(draw, map_dataset(draw)))
    else:
        node = read(draw, map_dataset(draw))
    for _ in range(draw.number(0, 2) if stages is None else stages):
        node = drawn(draw, STREAM_OPERATIONS, node)
    return node


def mixed_by_name(draw: Draw, node: Node, depth: int = 0) -> Node:
    """Mix a stream with others, all of them by name."""
    others = [
        mixed_by_name(draw, stream(draw, 0, 0)) if depth and draw.maybe(0.3) else stream(draw, 0, draw.number(0, 1))
        for _ in range(draw.number(1, 2))
    ]
    parents = unified([node, *others])
    number = next(draw.numbers)
    names = [f'm{number}{letter}' for letter in 'abc'[: len(parents)]]
    weights = [[float(draw.number(1, 5)) for _ in parents] for _ in range(3)]
    shape = parents[0].shape

    def make(datasets: list[Any], setting: Setting) -> Any:
        chosen = dict(zip(names, datasets, strict=True))
        if setting.tracks is not None and not setting.tracks.isdisjoint(names):
            chosen = {name: chosen[name] for name in names if name in setting.tracks}
        own = dict(zip(names, weights[setting.weights], strict=True))
        return IterDataset.mix(chosen, {name: own[name] for name in chosen})

    listed = ', '.join(f'{name!r}: {parent.text}' for name, parent in zip(names, parents, strict=True))
    leaves = tuple(
        (leaf, tracks | {name})
        for name, parent in zip(names, parents, strict=True)
        for leaf, tracks in parent.leaves
    )  # fmt: skip
    return joined(
        'IterDataset.mix', f'IterDataset.mix({{{listed}}}, {weights})', make, parents, shape, mixed=True, leaves=leaves,
        loses=True,
    )  # fmt: skip


def _others(draw: Draw, node: Node) -> list[Node]:
    depth = 1 if draw.maybe(0.15) else 0
    return unified([node, *(stream(draw, depth, draw.number(0, 2)) for _ in range(draw.number(1, 2)))])


def _mix(draw: Draw, node: Node) -> Node:
    parents = _others(draw, node)
    weights = [float(draw.number(1, 3)) for _ in parents] if draw.maybe(0.7) else None
    return _join(
        'mix', parents, lambda datasets, _: IterDataset.mix(datasets, weights), parents[0].shape, f', {weights}',
        loses=True,
    )  # fmt: skip


def _interleave(draw: Draw, node: Node) -> Node:
    parents = _others(draw, node)
    cycle = draw.number(1, 3)
    options: dict[str, int] = {'iter_buffer_size': draw.number(0, 3)} if draw.maybe(0.3) else {}
    make = functools.partial(_interleaved, cycle_length=cycle, **options)
    return _join('interleave', parents, make, parents[0].shape, f', {cycle}, {options}')


def _interleaved(datasets: Any, setting: Setting, **options: Any) -> Any:
    return IterDataset.interleave(datasets, **options)


@dataclasses.dataclass(frozen=True)
class Parts:
    """A function from numbers to streams, as one of files."""

    stream: int
    shard: granular.ShardOptions | None = None
    window: int = 0

    def __call__(self, number: int) -> Any:
        length = 12 if self.shard is not None else 3 + 2 * (number % 3)
        part = MapDataset.source(Stream(self.stream + number, length)).to_iter_dataset(shard_options=self.shard)
        return part.window_shuffle(self.window, number) if self.window else part

    def __repr__(self) -> str:
        return f'Parts({self.stream}, window={self.window})'


def _interleave_lazily(draw: Draw, node: Node) -> Node:
    first, *_ = [next(draw.numbers) for _ in range(6)]
    count, cycle, window = draw.number(2, 6), draw.number(1, 3), draw.one_of([0, 0, 3])
    options = {'num_make_iter_threads': draw.number(1, 2), 'make_iter_buffer_size': draw.number(0, 3)}
    shuffled = draw.maybe()

    def make(_: list[Any], setting: Setting) -> Any:
        numbers = MapDataset.range(count).shuffle(1) if shuffled else MapDataset.range(count)
        parts = Parts(first, setting.shard if draw.shard == 'read' else None, window)
        return IterDataset.interleave(numbers.map(parts), cycle, **options)

    text = (
        f'IterDataset.interleave({"shuffled " * shuffled}{count} x Parts({first}, window={window}), {cycle}, {options})'
    )
    leaves = tuple((first + number, frozenset[str]()) for number in range(count))
    return Node('IterDataset.interleave', text, make, (), ITEM, leaves=leaves)


def _zip(draw: Draw, node: Node) -> Node:
    parents = [node, *(stream(draw, 0, draw.number(0, 2)) for _ in range(draw.number(1, 2)))]
    shape = Shape('tuple', all(p.shape.stackable for p in parents), all(p.shape.rows for p in parents), combined=True)
    shape = shape.but(rows=False)  # the first axes of its parts may differ
    return _join('zip', parents, lambda datasets, _: IterDataset.zip(datasets, strict=False), shape, '', loses=True)


def _join(name: str, parents: list[Node], make: Any, shape: Shape, options: str, **facts: Any) -> Node:
    text = f'IterDataset.{name}([{", ".join(parent.text for parent in parents)}]{options})'
    return joined(f'IterDataset.{name}', text, make, parents, shape, **facts)


def may_lose(draw: Draw, node: Node) -> bool:
    """Return whether the end of a stream may be dropped: how much of it depends on the hosts."""
    return not draw.shard or draw.maybe(0.15)


JOINS: Final = [
    Operation(('mix',), _mix, may_lose),
    Operation(('mix',), mixed_by_name, may_lose),
    Operation(('interleave',), _interleave),
    Operation(('interleave',), _interleave_lazily, lambda draw, node: not node.mixed, share=0.7),
    Operation(('zip',), _zip, may_lose),
]


def items(draw: Draw, node: Node) -> Node:
    if node.shape.kind == 'item':
        return node
    return node.then('flat_map', f.singles, shape=ITEM)


def _random_map(draw: Draw, node: Node) -> Node:
    if draw.maybe():
        return node.then('seed', draw.number(0, 99)).then('random_map', f.at_random)
    return node.then('random_map', f.at_random, seed=draw.number(0, 99))


def _filter(draw: Draw, node: Node) -> Node:
    # Whether an element of several datapoints is dropped would depend on which ones they are.
    return node.then('filter', f.any_element if draw.exact and node.shape.combined else f.is_kept)


def _flat_map(draw: Draw, node: Node) -> Node:
    if node.shape.kind in ('item', 'doc') and draw.maybe(0.7):
        return node.then('flat_map', f.parts, shape=node.shape)
    return node.then('flat_map', f.singles, shape=ITEM)


def _batch(draw: Draw, node: Node) -> Node:
    size, drop = draw.number(1, 5), not draw.exact and draw.maybe(0.25)
    facts = {'neutral': True, 'loses': drop}
    if node.shape.stackable and draw.maybe(0.85):
        shape = Shape('array', stackable=drop, rows=True, combined=True)
        if draw.maybe(0.15):
            return node.then('apply', granular.grain.transforms.Batch(size, drop), shape=shape, **facts)
        return node.then('batch', size, drop_remainder=drop, shape=shape, **facts)
    shape = Shape('list', combined=True)
    return node.then('batch', size, drop_remainder=drop, batch_fn=list, shape=shape, **facts)


def last_batch(draw: Draw, node: Node) -> Node:
    """Batch elements at the end of a pipeline, where states fit another size."""
    options: dict[str, Any] = {} if node.shape.stackable else {'batch_fn': list}
    size = By('batch', lambda setting: setting.batch)
    return node.then('batch', size, shape=Shape('list', combined=True), neutral=True, **options)


def _rebatch(draw: Draw, node: Node) -> Node:
    if not node.shape.rows:
        if not node.shape.stackable:
            node = items(draw, node)
        node = node.then('batch', draw.number(1, 4), shape=Shape('array', rows=True, combined=True), neutral=True)
    drop = not draw.exact and draw.maybe(0.25)
    shape = node.shape.but(stackable=drop)
    return node.then('rebatch', draw.number(1, 6), drop_remainder=drop, shape=shape, neutral=True, loses=drop)


def _pack(draw: Draw, node: Node) -> Node:
    return pack(draw, node)


def pack(draw: Draw, node: Node, shard: By | None = None) -> Node:
    if node.shape.kind != 'doc':
        node = node.then('map', f.as_document, shape=DOCUMENT.but(combined=node.shape.combined, labelled=True))
    strategy = draw.one_of(['first_fit', 'best_fit', 'concat_then_split'])
    size = draw.number(4, 12)
    length: dict[str, Any] = {'tokens': size}
    options: dict[str, Any] = {'strategy': strategy}
    if shard is not None:
        options['shard_options'] = shard
    if draw.maybe(0.3):
        length['ids'] = size
        options |= {'bos': {'ids': -1}} if draw.maybe() else {'padding': {'ids': -1}}
    if strategy != 'concat_then_split':
        options |= {'split_long': True, 'num_packing_bins': draw.number(1, 4)}
        if draw.maybe(0.4):
            options |= {'shuffle_bins': True, 'seed': draw.number(0, 99)}
        if draw.maybe(0.2):
            options['alignment'] = 2
    if draw.maybe(0.25):
        options['max_segments'] = draw.number(1, 3)
    shape = ROW
    if draw.maybe(0.15) and node.shape.labelled and strategy != 'concat_then_split':
        options['meta_features'], shape = ['label'], ROW.but(stackable=False)
    return node.then('pack', length, shape=shape, neutral=True, **options)


def _repeat(draw: Draw, node: Node) -> Node:
    if draw.endless and not draw.exact and draw.maybe(0.3):
        return node.then('repeat').then('limit', draw.number(1, 60), loses=True)
    epochs = draw.number(2, 3)
    return node.then('repeat', epochs, neutral=True, epochs=epochs)


def _workers(draw: Draw, node: Node) -> Node:
    return node.then('mp_prefetch', By('workers', lambda setting: setting.workers), neutral=True)


def _sequential(draw: Draw, node: Node) -> Node:
    two = MultiprocessingOptions(2, 2, 'fork')
    return _if_divisible(node, node.then('mp_prefetch', two, sequential_slice=True, neutral=True))


def divided(dataset: Any, part: slice) -> Any:
    dataset.set_slice(part)
    return dataset


def _set_slice(draw: Draw, node: Node) -> Node:
    start, step = draw.number(0, 1), draw.number(1, 2)
    sliced = node.then('pipe', divided, slice(start, None, step)).renamed('IterDataset.set_slice')
    return _if_divisible(node, sliced)


def _if_divisible(node: Node, divided: Node) -> Node:
    """Return the divided pipeline, or the whole one if a stage cannot be divided."""
    try:
        divided.build(Setting())
    except InvalidArgumentError:
        return node
    return divided


def is_read(draw: Draw, node: Node) -> bool:
    """Return whether nothing is between a source and this place that could not be divided."""
    return node.name == 'MapDataset.to_iter_dataset' and not draw.shard


def piped(dataset: Any, function: Any) -> Any:
    """A function of a program's own in a chain of operations."""
    return dataset.map(function)


LENGTH: Final = 60
NUMBERS: Final = MapDataset.range(LENGTH)
DOCUMENTS: Final = MapDataset.source([{'t': np.arange(10 * i, 10 * i + 3 + i % 5)} for i in range(1, 80)])


def twice(x: int) -> list[int]:
    return [2 * x, 2 * x + 1]


def length_of_parity(x: int) -> list[int]:
    return [x] * (1 + x % 2)


PREFETCH: Final = [By(f'{size} + prefetch', lambda setting, size=size: size + setting.prefetch) for size in range(4)]
OPTIONS: Final = [DatasetOptions(stage_timing=True), DatasetOptions(filter_warn_threshold_ratio=None)]

STREAM_OPERATIONS: Final = [
    Operation(('map',), lambda d, n: n.then('map', f.keep)),
    Operation(('map_with_index',), lambda d, n: n.then('map_with_index', f.with_index)),
    Operation(('random_map', 'seed'), _random_map),
    Operation(('filter',), _filter, share=1.5),
    Operation(('flat_map',), _flat_map, share=1.5, remedies={
        'MapDataset': (
            lambda s: NUMBERS.flat_map(twice, max_fan_out=2).to_iter_dataset(shard_options=s, allow_nones=True), 7,
        ),
        'of various lengths': (
            lambda s: NUMBERS.flat_map(length_of_parity, max_fan_out=2).to_iter_dataset(
                shard_options=s, allow_nones=True
            ), 7,
        ),
    }),
    Operation(('batch', 'apply'), _batch, share=1.5),
    Operation(('rebatch',), _rebatch, share=1.5, remedies={
        'batch': (lambda s: NUMBERS.to_iter_dataset(shard_options=s).batch(4), 2),
    }),
    Operation(('repeat', 'limit'), _repeat, lambda d, n: n.epochs == 1),
    Operation(('limit',), lambda d, n: n.then('limit', d.number(1, 40), loses=True), lambda d, n: not d.exact),
    Operation(('cache',), lambda d, n: n.then('cache', neutral=True), remedies={
        'without': (lambda s: NUMBERS.to_iter_dataset(shard_options=s).repeat(2), LENGTH // 2 + 4),
    }),
    Operation(('cache',), lambda d, n: n.then('cache', neutral=True).then('repeat', 2, neutral=True, epochs=2),
              lambda d, n: n.epochs == 1),
    Operation(('window_shuffle',), lambda d, n: n.then('window_shuffle', d.number(2, 8), d.number(0, 99), neutral=True),
              share=2, remedies={
        'MapDataset': (lambda s: NUMBERS.window_shuffle(8, seed=1).to_iter_dataset(shard_options=s), 5),
        'between windows': (lambda s: NUMBERS.to_iter_dataset(shard_options=s).window_shuffle(4, seed=1), 8),
    }),
    Operation(('pack',), _pack, share=2, remedies={
        'shard_options': (lambda s: DOCUMENTS.to_iter_dataset().pack({'t': 9}, shard_options=s), 7),
    }),
    Operation(('prefetch',), lambda d, n: n.then('prefetch', d.one_of(PREFETCH), neutral=True)),
    Operation(('mp_prefetch',), _workers, lambda d, n: d.processes, share=0.15),
    Operation(('mp_prefetch',), _sequential, lambda d, n: d.processes and is_read(d, n), share=0.2),
    Operation(('set_slice',), _set_slice, is_read, share=0.7),
    Operation(('with_options',), lambda d, n: n.then('with_options', d.one_of(OPTIONS)), share=0.5),
    Operation(('apply',), lambda d, n: n.then('apply', [f.keep, f.keep]), share=0.5),
    Operation(('pipe',), lambda d, n: n.then('pipe', piped, f.keep), share=0.5),
]  # fmt: skip

"""Random compositions by their number: the same ones in each process and with each Python."""

import random
from typing import Final

from tests.pipeline.compositions import stream_operations as s
from tests.pipeline.compositions.map_operations import map_dataset
from tests.pipeline.compositions.plans import Node
from tests.pipeline.compositions.rules import KINDS, OF_MAPS, OF_STREAMS, Draw, drawn

_SPREAD: Final = 1_000_003


def composition(kind: str, seed: int) -> tuple[Draw, Node]:
    """Return a random pipeline, and the random choices that a trial with it goes on with."""
    draw = Draw(random.Random(seed * _SPREAD + KINDS.index(kind)))
    if kind == 'weights':
        draw.mixes, draw.processes, draw.exact = True, False, draw.maybe(0.9)
        first = s.stream(draw, 0, draw.number(0, 2))
        node = s.mixed_by_name(draw, first, depth=1)
        if draw.maybe(0.15):
            node = s.drawn(draw, s.JOINS, node)
        return draw, _behind(draw, node)
    if kind == 'hosts':
        draw.endless, draw.processes, draw.exact = False, False, True
        draw.shard = draw.one_of(['read', 'read', 'read', 'pack'])
        if draw.shard == 'read':
            node = _behind(draw, s.stream(draw, 1, 0))
            return draw, s.last_batch(draw, node) if draw.maybe(0.4) else node
        return draw, _behind(draw, s.pack(draw, s.stream(draw, 1, draw.number(0, 2)), s.SHARD), most=2)
    if kind == 'consumers':
        draw.consumer = draw.one_of([*OF_MAPS, *OF_STREAMS, 'Loader', 'Loader'])
        draw.processes, draw.endless = False, draw.consumer == 'Loader' or 'Batches' in draw.consumer
        if draw.consumer in OF_MAPS:
            sparse = draw.consumer in ('torch.DataLoader', 'StatefulDataLoader')
            return draw, map_dataset(draw, 1, draw.number(0, 3)) if sparse else dense(draw)
        return draw, s.stream(draw, 1)
    if kind == 'killed' and draw.maybe(0.25):
        return draw, dense(draw)
    node = s.stream(draw, 2)
    return draw, _behind(draw, node)


def dense(draw: Draw) -> Node:
    """Return a MapDataset without None, for which batches of arrays have no place."""
    node = map_dataset(draw, 1, draw.number(0, 3))
    while node.shape.sparse:
        node = map_dataset(draw, 1, draw.number(0, 3))
    return node


def _behind(draw: Draw, node: Node, most: int = 4) -> Node:
    for _ in range(draw.number(0 if most < 4 else 1, most)):
        node = drawn(draw, s.STREAM_OPERATIONS, node)
    return node

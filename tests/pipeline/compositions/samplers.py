"""A sampler and operations for DataLoaders."""

from typing import Any

import numpy as np

import granular
from tests.pipeline.compositions import functions as f
from tests.pipeline.compositions.plans import Node
from tests.pipeline.compositions.rules import Draw
from tests.pipeline.compositions.saved_states.pipelines import AtRandom, IsKept, Parts


class Backwards:
    """A sampler of a program's own."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> granular.grain.RecordMetadata:
        if index >= self._length:
            raise IndexError(index)
        return granular.grain.RecordMetadata(index, self._length - 1 - index, np.random.default_rng(index))

    def __repr__(self) -> str:
        return f'Backwards({self._length})'


def operations(draw: Draw, node: Node) -> tuple[list[Any], Any]:
    """Return random operations and a policy for errors."""
    single: list[Any] = [made for made in (f.keep, AtRandom(), IsKept()) if draw.maybe()]
    policy: Any = 'raise'
    if draw.maybe(0.2):
        single, policy = [f.fails_for_some, *single], draw.one_of(['skip', f.replaced])
    if node.shape.kind in ('item', 'doc') and draw.maybe(0.3):
        single.append(Parts())
    single.append(f.as_row)
    return [
        *single,
        granular.grain.transforms.Batch(draw.number(1, 4), draw.maybe(0.3)),
    ] if draw.maybe() else single, policy

"""Rules for the parts of a composition, by the trial."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from tests.pipeline.compositions.plans import Node

T = TypeVar('T')

KINDS: Final = ('same', 'hosts', 'weights', 'workers', 'consumers', 'killed')
# What takes the elements, in the trials of the kind 'consumers': by what it takes, a MapDataset or a stream.
OF_MAPS: Final = ('Loader', 'torch.Batches', 'jax.Batches', 'DataLoader', 'torch.DataLoader', 'StatefulDataLoader')
OF_STREAMS: Final = ('StatefulDataLoader of a stream', 'torch.Batches of a stream', 'jax.device_put')


@dataclasses.dataclass
class Draw:
    """Random choices for one composition, and what it may hold.

    Attributes:
      chance: the random numbers.
      exact: False if a part of the elements may be dropped: by ``limit``, the end of a mix, or a smaller batch.
      mixes: True if the pipeline is to hold a mix by name.
      shard: None, or where hosts divide the work: 'read', at each source, or 'pack', at rows.
      endless: True if the pipeline may have no end.
      processes: True if there may be worker processes.
      consumer: what takes the elements; '' for the pipeline's own iterator.
    """

    chance: random.Random
    exact: bool = False
    mixes: bool = False
    shard: str | None = None
    endless: bool = True
    processes: bool = True
    consumer: str = ''
    numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def one_of(self, choices: Sequence[T]) -> T:
        return choices[int(self.chance.random() * len(choices))]

    def number(self, low: int, high: int) -> int:
        """Return a number from ``low`` to ``high``, both included."""
        return low + int(self.chance.random() * (high - low + 1))

    def maybe(self, probability: float = 0.5) -> bool:
        return self.chance.random() < probability


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation which a composition may apply, and when.

    Attributes:
      names: the public operations that it stands for.
      add: function from the choices and a pipeline to the pipeline with the operation.
      fits: condition on the choices and the pipeline.
      share: how often it is drawn, compared with others.
      remedies: pipelines of ``NUMBERS`` or ``DOCUMENTS`` in given shards that follow the remedy of its ``fit``, by what
        they do, each with the number of elements of a host after which a state is saved.
    """

    names: tuple[str, ...]
    add: Callable[[Draw, Node], Node]
    fits: Callable[[Draw, Node], Any] = lambda draw, node: True
    share: float = 1.0
    remedies: Mapping[str, tuple[Callable[[Any], Any], int]] = dataclasses.field(default_factory=dict)


def drawn(draw: Draw, operations: Sequence[Operation], node: Node) -> Node:
    """Apply one of the operations that fit."""
    fitting = [operation for operation in operations if operation.fits(draw, node)]
    place = draw.chance.random() * sum(operation.share for operation in fitting)
    for operation in fitting:
        place -= operation.share
        if place < 0:
            return operation.add(draw, node)
    return fitting[-1].add(draw, node)

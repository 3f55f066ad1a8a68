"""Sources of which nothing remains, because ``exclude`` leaves out all elements."""

from collections.abc import Callable
from typing import Final

import numpy as np

from granular._support.indexing import Ints
from granular.aio.pipeline.nodes.combinations import SourceChoice
from granular.aio.pipeline.nodes.elements import Excluded, Handled
from granular.aio.pipeline.nodes.indices import ENDLESS, IndexNode, inner_indices
from granular.aio.pipeline.nodes.source import Source

_LOOKED_UP: Final = 1 << 20  # elements at a time


def leaving_out(source: Source, chosen: Callable[[Ints], Ints] | None = None) -> set[Excluded]:
    """Return the stages that leave out all elements of a source, in every epoch; none if some may remain.

    Args:
      source: the source, which may have no end.
      chosen: a function from numbers of elements to the indices of those that a host takes; by default the same.
    """
    finite = source
    while len(finite) >= ENDLESS and finite.parents:
        finite = finite.parents[0]
    if len(finite) >= ENDLESS:
        return set()
    found, choice = set[Excluded](), None
    for begin in range(0, len(finite), _LOOKED_UP):  # of an order that does not vary, the same come after so many
        numbers = np.arange(begin, min(len(finite), begin + _LOOKED_UP))
        stage = _last_stage(source, numbers if chosen is None else chosen(numbers))
        if isinstance(stage, Excluded):
            found.add(stage)
        elif isinstance(stage, SourceChoice):
            choice = stage
        else:
            return set()
    if choice is not None:
        weights = choice.arguments().get('weights', [1] * len(choice.parents))
        parts = [leaving_out(parent) for parent, weight in zip(choice.parents, weights, strict=True) if weight]
        if not all(parts):
            return set()
        found.update(*parts)
    return found


def _last_stage(source: Source, indices: Ints) -> Source | None:
    """Return the ``exclude`` that leaves out all of some elements, in every epoch; else the choice among sources that
    some remain of; None if it is neither.
    """
    varies = False
    while not isinstance(source, SourceChoice):
        if len(source.parents) != 1 or not (isinstance(source, IndexNode | Excluded | Handled) or source.elementwise):
            return None
        varies = varies or source.varies
        if isinstance(source, Excluded):
            indices = indices[source.remaining(indices)]
            if not len(indices):
                return None if varies and not source.leaves_none else source
        elif isinstance(source, IndexNode):
            indices = inner_indices(source, indices)
        source = source.parents[0]
    return source

"""Selection of cases from large test tables: ``make test-full`` runs each table in full."""

import heapq
import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

Operation, Fault = TypeVar('Operation'), TypeVar('Fault')
Row = TypeVar('Row', bound=tuple)

FULL_TABLES: Final = os.environ.get('GRANULAR_FULL_TABLES') == '1'


def examples(count: int) -> int:
    """Return how many of the examples that Hypothesis may generate are tried: other ones each time, a third of them."""
    return count if FULL_TABLES else count // 3


def plans(count: int) -> int:
    """Return how many random plans a test compares with plain Python: ``GRANULAR_PLANS``, or as ``examples`` tells."""
    return int(os.environ.get('GRANULAR_PLANS', examples(count)))


def cover(groups: Iterable[Sequence[Operation]], families: Iterable[Sequence[Fault]]) -> list[tuple[Operation, Fault]]:
    """Pair each operation with a fault of each family, and each fault with an operation of each group.

    Args:
      groups: the operations, those of the same kind together.
      families: the faults, those that should have the same effect together.
    """
    families = list(families)
    return [pair for group in groups for family in families for pair in _combine(group, family)]


def _combine(group: Sequence[Operation], family: Sequence[Fault]) -> Iterable[tuple[Operation, Fault]]:
    if FULL_TABLES:
        return itertools.product(group, family)
    turns = range(max(len(group), len(family)) if group and family else 0)
    return ((group[turn % len(group)], family[turn % len(family)]) for turn in turns)


def pairwise(rows: Iterable[Row]) -> list[Row]:
    """Choose rows of a table that together hold every pair of values of two columns."""
    return _choose(list(rows), 2)


def each_value(rows: Iterable[Row]) -> list[Row]:
    """Choose rows of a table that together hold every value of each column."""
    return _choose(list(rows), 1)


def _choose(rows: list[Row], strength: int) -> list[Row]:
    if FULL_TABLES:
        return rows
    # Values need not be hashable: their text stands for them.
    combinations = [set(itertools.combinations(enumerate(map(repr, row)), strength)) for row in rows]
    missing, chosen = set().union(*combinations), []
    ranks = [(-len(found), i) for i, found in enumerate(combinations)]
    heapq.heapify(ranks)
    while missing:
        best = heapq.heappop(ranks)[1]
        rank = -len(combinations[best] & missing), best  # of the row by now: it never rises
        if ranks and rank > ranks[0]:
            heapq.heappush(ranks, rank)
            continue
        missing -= combinations[best]
        chosen.append(best)
    return [rows[i] for i in sorted(chosen)]

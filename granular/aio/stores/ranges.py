"""Planning of requests for byte ranges, and slicing of the replies: pure functions, no I/O.

``plan`` sorts the ranges and merges neighbours whose gap costs less than a request into spans; ``split`` divides a
span that is larger than one request may be. ``cut`` slices the bytes of each range out of the replies, in the order
requested. They work on numpy arrays, so that 100,000 ranges take milliseconds.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from granular._support.indexing import Ints
from granular.errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The spans to read, ascending and disjoint, and the location of each requested range in them."""

    starts: Ints  # of the spans
    stops: Ints
    span: Ints  # for each range that is not empty, the index of the span that contains it
    offset: Ints  # for each range, its first byte within the span
    length: Ints  # for each range, its bytes


def check(starts: ArrayLike, stops: ArrayLike) -> tuple[Ints, Ints]:
    """Validate byte ranges, which are integers with ``0 <= start <= stop``, and return their bounds as int64 arrays."""
    left, right = np.atleast_1d(np.asarray(starts)), np.atleast_1d(np.asarray(stops))
    if left.shape != right.shape or left.ndim != 1:
        raise InvalidArgumentError(f'starts and stops must be 1-D and equally long, got {left.shape} and {right.shape}')
    if left.size and (left.dtype.kind not in 'iu' or right.dtype.kind not in 'iu'):
        raise InvalidArgumentError(f'starts and stops must be integers, got {left.dtype} and {right.dtype}')
    left, right = left.astype(np.int64, copy=False), right.astype(np.int64, copy=False)
    if len(left) and (left.min() < 0 or (right < left).any()):
        i = int(np.argmax((left < 0) | (right < left)))
        raise InvalidArgumentError(f'expected 0 <= start <= stop, got range {i}: [{left[i]}, {right[i]})')
    return left, right


def plan(starts: ArrayLike, stops: ArrayLike, *, max_gap: int) -> Plan:
    """Plan the reads for byte ranges, which may be in any order, overlapping, repeated or empty.

    Ranges ``[start, stop)`` that are at most ``max_gap`` bytes apart are read together. Empty ranges cause no read.
    """
    left, right = check(starts, stops)
    length = right - left
    lower, upper = left, right
    if not length.all():
        filled = length > 0
        lower, upper = left[filled], right[filled]
    if not len(lower):
        none, zeros = np.empty(0, np.int64), np.zeros(len(left), np.int64)
        return Plan(none, none, zeros, zeros, length)
    order = lower.argsort(kind='stable')
    lower, upper = lower[order], np.maximum.accumulate(upper[order])
    begin = np.empty(len(lower), np.bool_)  # True for a range that begins a span
    begin[0] = True
    np.greater(lower[1:], upper[:-1] + max_gap, out=begin[1:])
    firsts = begin.nonzero()[0]
    begins, ends = lower[firsts], upper[np.append(firsts[1:], len(upper)) - 1]
    span = begins.searchsorted(left, side='right') - 1
    return Plan(begins, ends, span, left - begins[span], length)


def split(start: int, stop: int, max_request: int) -> list[tuple[int, int]]:
    """Split a span into even requests of at most ``max_request`` bytes: 3 + 3 MiB arrive sooner than 4 + 2 MiB."""
    count = -(-(stop - start) // max_request)
    step = -(-(stop - start) // max(1, count))
    return [(at, min(at + step, stop)) for at in range(start, stop, step)] if count else []


def cut(plan: Plan, spans: Sequence[bytes]) -> list[bytes]:
    """Slice the bytes of each requested range out of the plan's spans, in the order requested.

    A range smaller than its span is copied, so that a small range never keeps a large span in memory.
    """
    if len(plan.starts) == len(plan.span) == np.count_nonzero(plan.length):
        return [spans[span] for span in plan.span.tolist()]  # each range is a span of its own
    rows = zip(plan.span.tolist(), plan.offset.tolist(), plan.length.tolist(), strict=True)
    # A slice of a whole bytes object is the object itself, without a copy.
    return [spans[span][offset : offset + length] if length else b'' for span, offset, length in rows]

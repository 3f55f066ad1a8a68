"""Which requests bring these byte ranges, and how the replies are cut back into them: pure functions, no I/O.

``plan`` sorts the ranges, merges neighbours whose gap costs less than a request, and splits what is larger than one
good request. ``cut`` gives the bytes of each range back, in the order asked. Both work on numpy arrays, so that 100,000
ranges take milliseconds.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from granular.errors import InvalidArgumentError

Ints = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Requests and where each range lies in their replies.

    Attributes:
      starts, stops: the requests' byte ranges, ascending and disjoint, shape (requests,).
      first, last: of each range asked, the first and the last request that it touches, shape (ranges,).
      offset: of each range asked, where it begins in the reply of its first request, shape (ranges,).
      length: of each range asked, its bytes, shape (ranges,).
    """

    starts: Ints
    stops: Ints
    first: Ints
    last: Ints
    offset: Ints
    length: Ints

    @property
    def requests(self) -> list[tuple[int, int]]:
        """The byte ranges to ask for, as (start, stop)."""
        return list(zip(self.starts.tolist(), self.stops.tolist(), strict=True))


def check(starts: ArrayLike, stops: ArrayLike) -> tuple[Ints, Ints]:
    """The two sides of byte ranges as int64 arrays.

    Raises:
      InvalidArgumentError: if they differ in length, are no integers, or a range is negative or ends before it starts.
    """
    left, right = np.atleast_1d(np.asarray(starts)), np.atleast_1d(np.asarray(stops))
    if left.shape != right.shape or left.ndim != 1:
        raise InvalidArgumentError(f'starts and stops must be 1-D and equally long, got {left.shape} and {right.shape}')
    if left.size and (left.dtype.kind not in 'iu' or right.dtype.kind not in 'iu'):
        raise InvalidArgumentError(f'starts and stops must be integers, got {left.dtype} and {right.dtype}')
    left, right = left.astype(np.int64, copy=False), right.astype(np.int64, copy=False)
    bad = (left < 0) | (right < left)
    if bad.any():
        i = int(np.argmax(bad))
        raise InvalidArgumentError(f'range {i} is [{left[i]}, {right[i]}): want 0 <= start <= stop')
    return left, right


def plan(starts: ArrayLike, stops: ArrayLike, *, max_gap: int, max_request: int) -> Plan:
    """Plan the requests for byte ranges, in any order, overlapping, repeated or empty.

    Args:
      starts, stops: the ranges ``[start, stop)`` in bytes, 1-D integers.
      max_gap: ranges at most this many bytes apart are asked for together.
      max_request: no request is longer than this many bytes.

    Returns:
      The plan. Empty ranges cause no request.

    Raises:
      InvalidArgumentError: for ranges or knobs that cannot be.
    """
    if max_gap < 0 or max_request < 1:
        raise InvalidArgumentError(f'want max_gap >= 0 and max_request >= 1, got {max_gap} and {max_request}')
    left, right = check(starts, stops)
    length = right - left
    filled = length > 0
    if not filled.any():
        none, zeros = np.empty(0, np.int64), np.zeros(len(left), np.int64)
        return Plan(none, none, zeros, zeros, zeros, length)

    order = np.argsort(left[filled], kind='stable')
    lower, upper = left[filled][order], np.maximum.accumulate(right[filled][order])
    apart = np.flatnonzero(lower[1:] > upper[:-1] + max_gap) + 1
    begins = lower[np.concatenate(([0], apart))]
    ends = upper[np.concatenate((apart - 1, [len(upper) - 1]))]

    # Split evenly: two requests of 3 MiB arrive sooner than one of 4 and one of 2.
    size = ends - begins
    pieces = -(-size // max_request)
    step = -(-size // pieces)
    nth = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    request_starts = np.repeat(begins, pieces) + nth * np.repeat(step, pieces)
    request_stops = np.minimum(request_starts + np.repeat(step, pieces), np.repeat(ends, pieces))

    first = np.maximum(np.searchsorted(request_starts, left, side='right') - 1, 0)
    last = np.maximum(np.searchsorted(request_starts, right - 1, side='right') - 1, 0)
    return Plan(request_starts, request_stops, first, last, left - request_starts[first], length)


def cut(plan: Plan, replies: Sequence[bytes]) -> list[bytes]:
    """The bytes of each range asked, in the order asked, out of the replies to the plan's requests.

    What is smaller than its reply is copied out of it, so that a small range never keeps a large reply alive.
    """
    out: list[bytes] = []
    rows = zip(plan.first.tolist(), plan.last.tolist(), plan.offset.tolist(), plan.length.tolist(), strict=True)
    for first, last, offset, length in rows:
        if not length:
            out.append(b'')
        elif first == last:
            out.append(replies[first][offset : offset + length])
        else:
            parts = [memoryview(replies[i]) for i in range(first, last + 1)]
            parts[0] = parts[0][offset:]
            parts[-1] = parts[-1][: length - sum(map(len, parts[:-1]))]
            out.append(b''.join(parts))
    return out

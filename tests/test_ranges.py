import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from granular.aio.ranges import cut, plan
from granular.errors import InvalidArgumentError

RANGES = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 120)), max_size=40)
DATA = bytes(i % 251 for i in range(600))


def ask(ranges, gap, most):
    starts = np.array([a for a, _ in ranges], np.int64)
    stops = np.array([a + n for a, n in ranges], np.int64)
    planned = plan(starts, stops, max_gap=gap, max_request=most)
    return planned, [DATA[a:b] for a, b in planned.requests]


@given(RANGES, st.integers(0, 50), st.integers(1, 300))
def test_what_is_cut_is_what_was_asked(ranges, gap, most):
    planned, replies = ask(ranges, gap, most)
    assert cut(planned, replies) == [DATA[a : a + n] for a, n in ranges]


@given(RANGES, st.integers(0, 50), st.integers(1, 300))
def test_requests_are_bounded_disjoint_and_needed(ranges, gap, most):
    planned, _ = ask(ranges, gap, most)
    requests = planned.requests
    assert all(0 < b - a <= most for a, b in requests)
    assert all(left[1] <= right[0] for left, right in zip(requests, requests[1:], strict=False))
    wanted = {i for a, n in ranges for i in range(a, a + n)}
    brought = [i for a, b in requests for i in range(a, b)]
    assert wanted <= set(brought)
    assert len(brought) == len(set(brought))
    if gap == 0:
        assert wanted == set(brought)


@given(RANGES, st.integers(0, 50))
def test_no_more_requests_than_ranges(ranges, gap):
    planned, _ = ask(ranges, gap, 10_000)
    assert len(planned.requests) <= sum(n > 0 for _, n in ranges)


def test_neighbours_share_a_request_and_strangers_do_not():
    near = plan([0, 110], [100, 200], max_gap=10, max_request=1000)
    assert near.requests == [(0, 200)]
    far = plan([0, 111], [100, 200], max_gap=10, max_request=1000)
    assert far.requests == [(0, 100), (111, 200)]


def test_a_large_range_is_split_evenly():
    assert plan([0], [1000], max_gap=0, max_request=400).requests == [(0, 334), (334, 668), (668, 1000)]


def test_a_huge_range_beyond_32_bits():
    planned = plan([2**40], [2**40 + 5], max_gap=0, max_request=100)
    assert planned.requests == [(2**40, 2**40 + 5)]


def test_a_small_piece_does_not_keep_its_reply_alive():
    planned, replies = ask([(0, 500), (10, 5)], 0, 1000)
    whole, piece = cut(planned, replies)
    assert whole is replies[0]
    assert isinstance(piece, bytes)
    assert piece.__sizeof__() < 100


@pytest.mark.parametrize(('starts', 'stops'), [([-1], [1]), ([2], [1]), ([0, 1], [1]), ([0.5], [1.5]), ([[0]], [[1]])])
def test_ranges_that_cannot_be(starts, stops):
    with pytest.raises(InvalidArgumentError, match='range|starts'):
        plan(starts, stops, max_gap=0, max_request=1)


@pytest.mark.parametrize(('gap', 'most'), [(-1, 1), (0, 0)])
def test_knobs_that_cannot_be(gap, most):
    with pytest.raises(InvalidArgumentError, match='max_gap'):
        plan([0], [1], max_gap=gap, max_request=most)

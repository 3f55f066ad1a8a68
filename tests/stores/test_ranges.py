import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import granular
from granular.aio.stores.ranges import cut, plan, split
from granular.errors import InvalidArgumentError, OutOfRangeError

RANGES = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 120)), max_size=40)
DATA = bytes(i % 251 for i in range(600))


def spans_of(planned):
    return list(zip(planned.starts.tolist(), planned.stops.tolist(), strict=True))


def ask(ranges, gap):
    starts = np.array([a for a, _ in ranges], np.int64)
    stops = np.array([a + n for a, n in ranges], np.int64)
    planned = plan(starts, stops, max_gap=gap)
    return planned, [DATA[a:b] for a, b in spans_of(planned)]


@given(RANGES, st.integers(0, 50))
def test_cut_returns_the_requested_ranges(ranges, gap):
    planned, replies = ask(ranges, gap)
    assert cut(planned, replies) == [DATA[a : a + n] for a, n in ranges]


@given(RANGES, st.integers(0, 50))
def test_spans_are_disjoint_and_needed(ranges, gap):
    planned, _ = ask(ranges, gap)
    spans = spans_of(planned)
    assert all(a < b for a, b in spans)
    assert all(left[1] + gap < right[0] for left, right in zip(spans, spans[1:], strict=False))
    expected = {i for a, n in ranges for i in range(a, a + n)}
    brought = [i for a, b in spans for i in range(a, b)]
    assert expected <= set(brought)
    assert len(brought) == len(set(brought))
    if gap == 0:
        assert expected == set(brought)


@given(RANGES, st.integers(0, 50))
def test_no_more_spans_than_ranges(ranges, gap):
    planned, _ = ask(ranges, gap)
    assert len(spans_of(planned)) <= sum(n > 0 for _, n in ranges)


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 300))
def test_requests_of_a_span_are_bounded_even_and_complete(start, length, most):
    requests = split(start, start + length, most)
    sizes = [b - a for a, b in requests]
    assert all(0 < size <= most for size in sizes)
    assert [i for a, b in requests for i in range(a, b)] == list(range(start, start + length))
    assert len(requests) == -(-length // most)


def test_close_ranges_share_a_request_and_distant_ranges_do_not():
    near = plan([0, 110], [100, 200], max_gap=10)
    assert spans_of(near) == [(0, 200)]
    far = plan([0, 111], [100, 200], max_gap=10)
    assert spans_of(far) == [(0, 100), (111, 200)]


def test_large_range_is_split_evenly():
    assert split(0, 1000, 400) == [(0, 334), (334, 668), (668, 1000)]


def test_range_beyond_32_bits():
    planned = plan([2**40], [2**40 + 5], max_gap=0)
    assert spans_of(planned) == [(2**40, 2**40 + 5)]


def test_small_range_does_not_keep_its_reply_alive():
    planned, replies = ask([(0, 500), (10, 5)], 0)
    whole, piece = cut(planned, replies)
    assert whole is replies[0]
    assert isinstance(piece, bytes)
    assert piece.__sizeof__() < 100


@pytest.mark.parametrize(
    ('starts', 'stops'), [([-1], [1]), ([2], [1]), ([0, 1], [1]), ([0.5], [1.5]), ([0], [1.5]), ([[0]], [[1]])]
)
def test_invalid_ranges_are_refused(starts, stops):
    with pytest.raises(InvalidArgumentError, match='range|starts'):
        plan(starts, stops, max_gap=0)


def test_range_beyond_the_size_of_any_object_is_out_of_range(tmp_path):
    path = granular.Path(tmp_path / 'x')
    path.write_bytes(b'abc')
    for start in (3, 2**46 - 1, 2**46, 2**62):
        with pytest.raises(OutOfRangeError, match='x'):
            path.read_ranges([0, start], [1, start + 1])

"""Plans against plain Python: the largest document first, each in the fullest row; and tops with the least padding."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from granular.aio.pipeline.planning import bucket_tops, class_tops, fit, most_segments
from tests.support.tables import plans


def counted(sizes):
    return np.unique(np.array(sizes, np.int64), return_counts=True)


def spaces(sizes, length, alignment):
    """Return the space that is left in each row, negative where the last alignment exceeds it."""
    rows = []
    for size in sorted(sizes, reverse=True):
        fitting = [i for i, space in enumerate(rows) if space >= size]
        if not fitting:
            rows.append(length)
            fitting = [len(rows) - 1]
        row = min(fitting, key=lambda i: rows[i])
        rows[row] -= -(-size // alignment) * alignment
    return sorted(rows)


@settings(max_examples=plans(400))
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 90), st.integers(1, 7))
def test_best_fit_of_counts_is_that_of_documents(sizes, length, alignment):
    values, counts = counted(sizes)
    plan = fit(values[:, None], counts, np.array([length]), np.array([alignment]))
    slots, numbers = plan.slots(np.arange(plan.rows))
    assert sorted(slots.tolist()) == list(range(len(sizes)))
    of_slots, left = np.repeat(values, counts), []
    for row in np.split(slots, np.cumsum(numbers)[:-1]) if plan.rows else []:
        left.append(length - sum(-(-int(size) // alignment) * alignment for size in of_slots[row]))
    assert sorted(left) == spaces(sizes, length, alignment)


@settings(max_examples=plans(200))
@given(st.data())
def test_rows_with_several_features_and_few_segments(data):
    lengths = np.array(data.draw(st.lists(st.integers(10, 30), min_size=1, max_size=3)))
    size = st.tuples(*(st.integers(0, int(length)) for length in lengths)).filter(any)
    sizes = data.draw(st.lists(size, max_size=40))
    most = data.draw(st.none() | st.integers(1, 4))
    values, counts = np.unique(np.array(sizes, np.int64).reshape(-1, len(lengths)), axis=0, return_counts=True)
    plan = fit(values, counts, lengths, None, most)
    slots, numbers = plan.slots(np.arange(plan.rows))
    assert sorted(slots.tolist()) == list(range(len(sizes)))
    of_slots = np.repeat(values, counts, axis=0)
    for row in np.split(slots, np.cumsum(numbers)[:-1]) if plan.rows else []:
        assert (of_slots[row].sum(axis=0) <= lengths).all()
        assert 0 < len(row) <= (most or len(row))
    assert plan.segments == numbers.max(initial=0)
    some = np.arange(plan.rows)[::-2]
    assert plan.slots(some)[0].tolist() == [
        slot for row in some.tolist() for slot in plan.slots(np.array([row]))[0].tolist()
    ]


@settings(max_examples=plans(200))
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 4))
def test_tops_have_the_least_padding(sizes, buckets):
    values, counts = counted(sizes)

    def padded(tops):
        return int((np.array(tops)[np.searchsorted(tops, values)] * counts).sum())

    tops = bucket_tops(values, counts, buckets)
    assert len(tops) <= buckets
    assert tops[-1] == values[-1]
    smaller = values[:-1].tolist()
    choices = itertools.combinations(smaller, min(buckets - 1, len(smaller)))
    assert padded(tops) == min(padded([*choice, values[-1]]) for choice in choices)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=200), st.integers(1, 20))
def test_classes_round_up(sizes, classes):
    values, counts = counted(sizes)
    tops = class_tops(values, counts, classes)
    assert len(tops) <= classes
    assert tops[-1] == values[-1]
    assert np.isin(tops, values).all()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 30))
def test_no_row_of_concatenated_documents_has_more_pieces(sizes, length):
    tape = np.repeat(np.arange(len(sizes)), sorted(sizes))
    pieces = [len(set(tape[start : start + length].tolist())) for start in range(len(tape))]
    assert max(pieces) <= most_segments(*counted(sizes), length)

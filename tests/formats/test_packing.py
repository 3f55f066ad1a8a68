"""Bit-packed tables: any numbers come back, two neighbours at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from granular.errors import CorruptDatasetError
from granular.formats.bit_packing import (
    MAX_WORDS,
    PADDING,
    PAGE,
    WORD,
    check_pages,
    count_pages,
    pack,
    unpack,
    unpack_one,
)


def packed(numbers):
    """Return the words, starts, sizes and records of the pages of a table."""
    pages = pack(numbers)
    sizes = np.array([len(page) // WORD for page in pages], np.int64)
    records = np.minimum(PAGE, len(numbers) - 1 - PAGE * np.arange(len(pages)))
    words = np.frombuffer(b''.join(pages) + bytes(WORD * PADDING), '<u8')
    return words, np.cumsum(sizes) - sizes, sizes, records


def check(numbers):
    words, starts, sizes, records = packed(numbers)
    assert len(starts) == count_pages(np.array([len(numbers) - 1]))[0]
    assert sizes.max(initial=0) <= MAX_WORDS
    check_pages(words, starts, sizes, records, 'it')
    indices = np.arange(len(numbers) - 1)
    lefts, rights = unpack(words, starts[indices // PAGE], indices % PAGE)
    assert np.array_equal(lefts, numbers[:-1])
    assert np.array_equal(rights, numbers[1:])
    view = memoryview(words).cast('B').cast('Q')
    for i in indices[:: max(1, len(indices) // 20)].tolist():
        assert unpack_one(view, int(starts[i // PAGE]), i % PAGE) == (numbers[i], numbers[i + 1])
    return len(words) * WORD


sizes = st.sampled_from([1, 2, 100, 2**17, 2**31, 2**33, 2**44])


@given(st.integers(0, 9000), sizes, st.integers(0, 2**32))
def test_limits_of_records_of_any_size_are_packed(records, size, seed):
    lengths = np.random.default_rng(seed).integers(0, size, records)
    check(np.append(0, np.cumsum(lengths)))


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=400))
def test_any_numbers_are_packed(numbers):
    check(np.array(numbers, np.int64))


def test_records_of_50_to_150_kb_take_less_than_3_bytes():
    lengths = np.random.default_rng(0).integers(50_000, 150_000, 20_000)
    assert check(np.append(0, np.cumsum(lengths))) < 2.7 * 20_000
    assert check(np.arange(20_001) * 150_528) < 0.2 * 20_000  # of one size


@pytest.mark.parametrize('word', [2**64 - 1, 65 << 56, (64 << 56) | 100, 5000 << 32])
def test_blocks_outside_of_their_page_are_refused(word):
    words, starts, sizes, records = packed(np.arange(200) ** 2)
    words = words.copy()
    words[1] = word
    with pytest.raises(CorruptDatasetError, match='it: block 0'):
        check_pages(words, starts, sizes, records, 'it')


def test_pages_without_room_for_their_blocks_are_refused():
    words, starts, _, records = packed(np.arange(200))
    with pytest.raises(CorruptDatasetError, match='too small'):
        check_pages(words, starts, np.array([3]), records, 'it')

"""Bit-packed tables of numbers with random access: pure functions.

A *table* holds ``n + 1`` numbers, such as the limits of ``n`` records, and a lookup returns two neighbours, such as the
start and the stop of a record. A table of 0 records has no page. Blocks of 128 records hold 129 numbers, so that both
come from one block. A block is a line (base and slope) and the distances of its numbers from it, each of the same width
in bits. 32 blocks make a page, which has a checksum and is read as a whole: first the heads of its blocks, then their
distances, in words of 64 bits, which are little-endian. The head of a block is two words: an
``i64`` base, and ``u32`` slope, ``u24`` position of the distances in words from the start of the page, ``u8`` width.
Number ``j`` of a block is ``base + slope * j`` plus the ``width`` bits that begin at bit ``j * width`` of its
distances, counted from the lowest bit of the first word.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import Ints
from granular.errors import CorruptDatasetError

Words = NDArray[np.uint64]

BLOCK: Final = 128  # records in a block
PAGE: Final = 4096  # records in a page
WORD: Final = 8  # bytes of a word
HEAD: Final = 2  # words of the head of a block

_BLOCKS: Final = PAGE // BLOCK
PADDING: Final = 2  # words after the last page, which lookups may read without using them
MAX_WORDS: Final = _BLOCKS * (HEAD + BLOCK + 1)
"""Words of the largest page: numbers of 64 bits each."""

_CHUNK: Final = 1 << 14  # lookups whose intermediate results fit into a cache of the processor
_CHECKED: Final = 1 << 10  # pages that are checked at a time
_ALL: Final = np.uint64(2**64 - 1)
_SLOPE: Final = np.uint64(2**32 - 1)
_PAYLOAD: Final = np.uint64(2**24 - 1)


def count_pages(records: Ints) -> Ints:
    """Return the number of pages of tables with the given numbers of records."""
    return -(-records // PAGE)


def pack(numbers: Ints) -> list[bytes]:
    """Return the pages of a table of integers from 0 to 2**62, at least one: fewest bytes if they grow evenly."""
    records = len(numbers) - 1
    step = PAGE * 64  # records at a time, to bound the memory
    return [page for start in range(0, records, step) for page in _pack(numbers[start : start + step + 1])]


def _pack(numbers: Ints) -> list[bytes]:
    records = len(numbers) - 1
    blocks = -(-records // BLOCK)
    counts = np.minimum(BLOCK, records - np.arange(blocks) * BLOCK)
    column = np.minimum(np.arange(BLOCK + 1), counts[:, None])  # a block that is not full repeats its last number
    values = numbers[np.arange(blocks)[:, None] * BLOCK + column]
    slopes = np.clip((values[:, -1] - values[:, 0] + counts // 2) // counts, 0, int(_SLOPE))
    values -= slopes[:, None] * column
    bases = values.min(axis=1)
    distances = (values - bases[:, None]).view(np.uint64)
    # A float rounds to the nearest, so its exponent is never too small.
    widths = np.frexp(distances.max(axis=1).astype(np.float64))[1].astype(np.int64)
    sizes = -(-(counts + 1) * widths // 64)

    pages = np.arange(blocks) // _BLOCKS
    heads = np.minimum(_BLOCKS, blocks - pages * _BLOCKS) * HEAD
    ends = np.cumsum(sizes)
    firsts = np.arange(0, blocks, _BLOCKS)  # the first block of each page
    before = (ends - sizes)[firsts]
    payloads = heads + (ends - sizes) - before[pages]
    page_words = heads[firsts] + np.add.reduceat(sizes, firsts)
    page_ends = np.cumsum(page_words)
    page_starts = page_ends - page_words

    out = np.zeros(int(page_ends[-1]) + 1, np.uint64)
    head = page_starts[pages] + np.arange(blocks) % _BLOCKS * HEAD
    out[head] = bases.view(np.uint64)
    out[head + 1] = ((widths << 56) | (payloads << 32) | slopes).view(np.uint64)
    bits = np.arange(BLOCK + 1) * widths[:, None]
    word = (page_starts[pages] + payloads)[:, None] + (bits >> 6)
    shift = (bits & 63).view(np.uint64)
    stored = (np.arange(BLOCK + 1) <= counts[:, None]) & (widths[:, None] > 0)
    np.add.at(out, word[stored], (distances << shift)[stored])
    over = stored & ((bits & 63) + widths[:, None] > 64)
    np.add.at(out, word[over] + 1, (distances >> (np.uint64(64) - shift))[over])
    data = out.astype('<u8', copy=False).tobytes()
    bounds = zip(page_starts.tolist(), page_ends.tolist(), strict=True)
    return [data[start * WORD : stop * WORD] for start, stop in bounds]


def check_pages(words: Words, starts: Ints, sizes: Ints, records: Ints, name: str) -> None:
    """Check that the blocks of pages lie within their pages; raise ``CorruptDatasetError`` if one does not.

    Each page begins at a position in the array of words, and has a number of words and of records.
    """
    for start in range(0, len(starts), _CHECKED):
        part = slice(start, start + _CHECKED)
        _check_pages(words, starts[part], sizes[part], records[part], name)


def _check_pages(words: Words, starts: Ints, sizes: Ints, records: Ints, name: str) -> None:
    blocks = -(-records // BLOCK)
    if (bad := sizes < blocks * HEAD).any():
        raise CorruptDatasetError(f'{name}: a page of {sizes[bad][0]} words is too small for {blocks[bad][0]} blocks')
    owners = np.repeat(np.arange(len(starts)), blocks)
    number = np.arange(len(owners)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    info = words[starts[owners] + number * HEAD + 1]
    widths = (info >> np.uint64(56)).view(np.int64)
    payloads = (info >> np.uint64(32) & _PAYLOAD).view(np.int64)
    counts = np.minimum(BLOCK, records[owners] - number * BLOCK)
    ends = payloads + -(-(counts + 1) * widths // 64)
    if (bad := (widths > 64) | (ends > sizes[owners])).any():
        i = int(np.argmax(bad))
        raise CorruptDatasetError(
            f'{name}: block {number[i]} of a page of {sizes[owners[i]]} words ends at {ends[i]}, with {widths[i]} bits '
            f'a number'
        )


def unpack(words: Words, pages: Ints, records: Ints) -> tuple[Ints, Ints]:
    """Return two neighbouring numbers of each record, such as its start and its stop.

    The words are the pages, checked by ``check_pages``, and ``PADDING`` words after them; ``pages`` are the positions
    of the records' pages, and ``records`` their numbers in these.
    """
    lefts, rights = np.empty((2, len(records)), np.int64)
    for start in range(0, len(records), _CHUNK):
        part = slice(start, start + _CHUNK)
        _unpack(words, pages[part], records[part], lefts[part].view(np.uint64), rights[part].view(np.uint64))
    return lefts, rights


def _unpack(words: Words, pages: Ints, records: Ints, lefts: Words, rights: Words) -> None:
    head = (records >> 7) * HEAD + pages
    line = words.take(head)
    info = words.take(head + 1)
    column = (records & (BLOCK - 1)).view(np.uint64)
    widths, slopes = info >> np.uint64(56), info & _SLOPE
    bits = column * widths
    word = ((info >> np.uint64(32) & _PAYLOAD) + (bits >> np.uint64(6))).view(np.int64) + pages
    distances = _shifted(words, word, bits & np.uint64(63))
    masks = _ALL >> (np.uint64(64) - widths)
    line += slopes * column
    np.add(line, distances & masks, out=lefts)
    if len(widths) and int(widths.max()) > 32:
        bits += widths
        word = ((info >> np.uint64(32) & _PAYLOAD) + (bits >> np.uint64(6))).view(np.int64) + pages
        distances = _shifted(words, word, bits & np.uint64(63))
    else:
        distances >>= widths
    line += slopes
    np.add(line, distances & masks, out=rights)


def _shifted(words: Words, word: Ints, shift: Words) -> Words:
    """Return the 64 bits that begin ``shift`` bits after the beginning of each word."""
    out = words.take(word)
    out >>= shift
    # A shift by 64 bits leaves nothing, in numpy.
    out |= words.take(word + 1) << (np.uint64(64) - shift)
    return out


def unpack_one(words: memoryview, page: int, record: int) -> tuple[int, int]:
    """Return what ``unpack`` does for one record, from a memoryview of the words as ``Q``."""
    head = page + (record >> 7) * HEAD
    line, info = words[head], words[head + 1]
    if line >> 63:
        line -= 1 << 64
    column, width, slope = record & (BLOCK - 1), info >> 56, info & 0xFFFFFFFF
    bit = column * width
    word, shift = page + (info >> 32 & 0xFFFFFF) + (bit >> 6), bit & 63
    bits = (words[word] | words[word + 1] << 64) >> shift
    if shift + 2 * width > 128:
        bits |= words[word + 2] << (128 - shift)
    mask = (1 << width) - 1
    line += slope * column
    return line + (bits & mask), line + slope + (bits >> width & mask)

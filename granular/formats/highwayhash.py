"""HighwayHash-64 (https://github.com/google/highwayhash) of many buffers at once, in numpy.

The hash takes 32 bytes after the other, so that a single buffer is slow (about 1 MB/s). Buffers are independent, so
each step computes all of them.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from granular.formats.base import Buffer

Words = NDArray[np.uint64]

_PACKET: Final = 32
_MUL0: Final = np.array([0xDBE6D5D5FE4CCE2F, 0xA4093822299F31D0, 0x13198A2E03707344, 0x243F6A8885A308D3], np.uint64)
_MUL1: Final = np.array([0x3BD39E10CB0EF593, 0xC0ACF169B5F18A8C, 0xBE5466CF34E90C6C, 0x452821E638D01377], np.uint64)
_HALF: Final = np.uint64(32)
_LOW: Final = np.uint64(0xFFFFFFFF)
# The bytes of two words that are added to two others, in the order in which they are added.
_ZIPPER: Final = np.array([3, 12, 2, 5, 14, 1, 15, 0, 11, 4, 10, 13, 9, 6, 8, 7])


def highwayhash64(buffers: Sequence[Buffer], key: Words) -> Words:
    """Return the hash of each buffer, of any length, with a key of four words. Memory: a copy of the buffers."""
    count = len(buffers)
    sizes = np.array([len(buffer) for buffer in buffers], np.int64)
    order = np.argsort(-sizes, kind='stable')  # so that the buffers that have not ended are the first ones
    sizes = sizes[order]
    packets, rest = np.divmod(sizes, _PACKET)
    words, last = _packets([buffers[i] for i in order.tolist()], packets, rest)
    starts = 4 * (np.cumsum(packets) - packets)
    state = np.empty((4, count, 4), np.uint64)  # v0, v1, mul0, mul1
    state[2], state[3] = _MUL0, _MUL1
    state[0], state[1] = _MUL0 ^ key, _MUL1 ^ _swapped(key)
    lanes = np.arange(4)
    steps = int(packets[0]) if count else 0
    active = np.searchsorted(-packets, -np.arange(steps), side='left')  # the buffers with more packets than each step
    for step, number in enumerate(active.tolist()):
        _update(state[:, :number], words[starts[:number, None] + (4 * step + lanes)])
    partial = np.flatnonzero(rest)
    if len(partial):
        ends = state[:, partial]
        length = rest[partial, None].astype(np.uint64)
        ends[0] += (length << _HALF) + length
        ends[1] = _rotated(ends[1], length)
        _update(ends, last[partial])
        state[:, partial] = ends
    for _ in range(4):
        _update(state, _swapped(state[0][:, [2, 3, 0, 1]]))
    hashes = np.empty(count, np.uint64)
    hashes[order] = state[:, :, 0].sum(axis=0, dtype=np.uint64)
    return hashes


def _packets(buffers: Sequence[Buffer], packets: NDArray[np.int64], rest: NDArray[np.int64]) -> tuple[Words, Words]:
    """Return the whole packets of all buffers, as words, and the padded last one of each."""
    whole = b''.join(memoryview(buffer)[: _PACKET * n] for buffer, n in zip(buffers, packets.tolist(), strict=True))
    last = np.zeros((len(buffers), _PACKET), np.uint8)
    for i, (buffer, n, left) in enumerate(zip(buffers, packets.tolist(), rest.tolist(), strict=True)):
        tail = np.frombuffer(buffer, np.uint8)[_PACKET * n :]
        aligned, odd = left & ~3, left & 3
        last[i, :aligned] = tail[:aligned]
        if left & 16:
            last[i, 28:] = tail[left - 4 :]
        elif odd:
            last[i, 16:19] = tail[[aligned, aligned + (odd >> 1), aligned + odd - 1]]
    return np.frombuffer(whole, '<u8').astype(np.uint64, copy=False), last.view('<u8').astype(np.uint64, copy=False)


def _update(state: Words, packet: Words) -> None:
    """Add a packet to each state, of shape (4, buffers, 4), in place."""
    v0, v1, mul0, mul1 = state
    v1 += mul0
    v1 += packet
    mul0 ^= (v1 & _LOW) * (v0 >> _HALF)
    v0 += mul1
    mul1 ^= (v0 & _LOW) * (v1 >> _HALF)
    v0 += _zipped(v1)
    v1 += _zipped(v0)


def _zipped(words: Words) -> Words:
    pairs = np.ascontiguousarray(words).view(np.uint8).reshape(-1, 16)
    return np.take(pairs, _ZIPPER, axis=1).view(np.uint64).reshape(words.shape)


def _swapped(words: Words) -> Words:
    """Swap the halves of words."""
    return words >> _HALF | words << _HALF


def _rotated(words: Words, bits: Words) -> Words:
    """Rotate both halves of words by some bits, from 1 to 31."""
    low, high = words & _LOW, words >> _HALF
    low = (low << bits | low >> (_HALF - bits)) & _LOW
    high = (high << bits | high >> (_HALF - bits)) & _LOW
    return high << _HALF | low

"""Memory of large batches: it is used again once nothing refers to it, and a bounded part of it is kept."""

import tracemalloc

import numpy as np

from granular.aio.runtime.buffers import uninitialised

SIZE = 33 << 20


def test_memory_is_used_again_once_nothing_refers_to_it():
    import torch

    block = uninitialised(SIZE)
    block[:] = 7
    start = block.ctypes.data
    part = torch.from_numpy(block)[5:]  # which refers to it by other means than numpy
    del block
    other = uninitialised(SIZE)
    other[:] = 1
    assert bool((part == 7).all())
    del part
    again = uninitialised(SIZE)
    assert again.ctypes.data == start and np.all(again == 7)  # the system would have cleared it
    assert np.all(other == 1)


def test_memory_that_is_kept_is_bounded():
    tracemalloc.start()
    try:
        blocks = [uninitialised(SIZE) for _ in range(5)]
        del blocks
        assert tracemalloc.get_traced_memory()[0] < 2.5 * SIZE
        blocks = [uninitialised(2 * SIZE), uninitialised(2 * SIZE)]  # those of another size do not stay
        del blocks
        assert 3 * SIZE < tracemalloc.get_traced_memory()[0] < 4.5 * SIZE
    finally:
        tracemalloc.stop()
    huge = [uninitialised(300 << 20) for _ in range(2)]
    assert {array.base for array in huge} == {None}  # an array of its own, whose memory goes with it

"""HighwayHash against the test vectors of google/highwayhash, and against itself."""

import numpy as np

from granular.formats.highwayhash import highwayhash64


def test_vectors():
    # highwayhash/highwayhash_test.cc
    key = np.frombuffer(bytes(range(32)), '<u8').astype(np.uint64)
    assert highwayhash64([b'', b'\0', b'\0\1'], key).tolist() == [
        0x907A56DE22C26E53, 0x7EAB43AAC7CDDD78, 0xB8D0569AB0B53D62,
    ]  # fmt: skip
    assert highwayhash64([], key).tolist() == []


def test_buffers_are_independent_of_each_other():
    key = np.arange(4, dtype=np.uint64)
    rng = np.random.default_rng(0)
    buffers = [rng.bytes(size) for size in rng.permutation(200)]
    together = highwayhash64(buffers, key).tolist()
    assert together == [int(highwayhash64([buffer], key)[0]) for buffer in buffers]
    assert len(set(together)) == 200

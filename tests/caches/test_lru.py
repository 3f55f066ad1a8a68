"""What a process keeps up to a limit: that which was used least recently is evicted first."""

import concurrent.futures
import random

import hypothesis
from hypothesis import strategies as st

from granular._support.lru import LRU


@hypothesis.given(st.integers(1, 20), st.lists(st.tuples(st.sampled_from(['get', 'put', 'pop']), st.integers(0, 9))))
def test_values_used_last_are_kept(limit, calls):
    cache = LRU(limit, len)
    order = []  # of the keys, by their last use; the value of a key is as long as it is large
    for call, key in calls:
        known = key in order
        if known:
            order.remove(key)
        if call == 'put':
            cache.put(key, 'x' * key)
        else:
            assert (cache.get if call == 'get' else cache.pop)(key) == ('x' * key if known else None)
        if call == 'put' or (call == 'get' and known):
            order.append(key)
        while sum(order) > limit:
            order.pop(0)
        assert [key for key, _ in cache.items()] == order
        assert cache.weight == sum(order)
        assert len(cache) == len(order)


def test_values_in_use_are_kept_beyond_the_limit_and_evicted_ones_are_told():
    used, evicted = {1, 2}, []
    cache = LRU(2, in_use=lambda key, _: key in used, evicted=lambda key, value: evicted.append((key, value)))
    for key in (1, 2, 3):
        cache.put(key, f'{key}')
    assert (evicted, len(cache)) == ([(3, '3')], 2)
    used.add(4)
    cache.put(4, '4')
    assert (evicted, len(cache)) == ([(3, '3')], 3)
    used.clear()
    cache.trim(1)
    assert (evicted, cache.items()) == ([(3, '3'), (1, '1'), (2, '2')], [(4, '4')])
    cache.clear()
    assert not cache.items()


def test_threads_share_values_without_a_lock():
    cache = LRU(4)

    def use(seed):
        rng = random.Random(seed)
        for _ in range(20_000):
            key = rng.randrange(8)
            if rng.random() < 0.5:
                cache.put(key, f'{key}')
            else:
                assert cache.get(key) in (None, f'{key}')

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))
    cache.put(8, '8')
    assert len(cache) <= 4

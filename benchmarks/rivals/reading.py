"""Reads per second of a cache that several processes share, for granular and for rivals."""

import multiprocessing
import random
import time
from collections.abc import Callable
from typing import Any


def values(count: int, size: int) -> list[bytes]:
    """Return different bytes for each index."""
    rng = random.Random(0)
    return [rng.randbytes(size) for _ in range(count)]


def rate(read: Callable[[int], Any], count: int, workers: int, rounds: int) -> float:
    """Measure the reads per second of all workers, of which each reads every index in its own order.

    Args:
      read: returns the cached value of an index.
      count: the number of values.
      workers: processes, forked.
      rounds: the number of times that each worker reads all values.
    """
    context = multiprocessing.get_context('fork')
    barrier, ends = context.Barrier(workers + 1), context.SimpleQueue()
    processes = [context.Process(target=_work, args=(read, count, rounds, i, barrier, ends)) for i in range(workers)]
    for process in processes:
        process.start()
    barrier.wait()
    started = time.perf_counter()
    seconds = max(ends.get() for _ in range(workers)) - started
    for process in processes:
        process.join()
    return float(workers * rounds * count / seconds)


def _work(read: Callable[[int], Any], count: int, rounds: int, seed: int, barrier: Any, ends: Any) -> None:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    read(order[0])  # connects or maps, at the first read
    barrier.wait()
    for _ in range(rounds):
        for index in order:
            read(index)
    ends.put(time.perf_counter())

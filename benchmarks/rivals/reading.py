"""Reads a second of a cache that several processes share; for granular and for rivals alike."""

import multiprocessing
import random
import time
from collections.abc import Callable
from typing import Any


def values(count: int, size: int) -> list[bytes]:
    """Bytes to cache, each of them other ones."""
    rng = random.Random(0)
    return [rng.randbytes(size) for _ in range(count)]


def rate(read: Callable[[int], Any], count: int, workers: int, rounds: int) -> float:
    """Reads a second of all workers together, each of which reads every index in an order of its own.

    Args:
      read: gives the value of an index, which is cached already.
      count: how many there are.
      workers: processes, forked.
      rounds: times that each reads all.
    """
    context = multiprocessing.get_context('fork')
    barrier, ends = context.Barrier(workers + 1), context.SimpleQueue()
    processes = [context.Process(target=_work, args=(read, count, rounds, i, barrier, ends)) for i in range(workers)]
    for process in processes:
        process.start()
    barrier.wait()
    began = time.perf_counter()
    seconds = max(ends.get() for _ in range(workers)) - began
    for process in processes:
        process.join()
    return float(workers * rounds * count / seconds)


def _work(read: Callable[[int], Any], count: int, rounds: int, seed: int, barrier: Any, ends: Any) -> None:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    read(order[0])  # what is connected or mapped at the first read
    barrier.wait()
    for _ in range(rounds):
        for index in order:
            read(index)
    ends.put(time.perf_counter())

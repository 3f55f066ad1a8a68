"""Rates, durations and memory of a process, for granular and for rivals, by the standard library alone."""

import pathlib
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any


def best(fn: Callable[[], Any], repeats: int) -> float:
    """Return the least duration of several runs, in seconds."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        fn()
        times.append(time.perf_counter() - started)
    return min(times)


def rate(items: Iterable[Any], count: int, each: int = 1, warm: int = 0) -> float:
    """Measure the datapoints per second of an iterator, after its first items."""
    iterator = iter(items)
    for _ in range(warm):
        next(iterator)
    started = time.perf_counter()
    for _ in range(count):
        next(iterator)
    return count * each / (time.perf_counter() - started)


def train(
    batches: Iterator[Any], step: Callable[[Any], object], steps: int, used: Callable[[], float] = time.process_time
) -> dict[str, float]:
    """Measure a training loop after its first tenth: the percentage of a step that waits for data, seconds of processor
    time, as ``used`` counts it, and seconds of a step; also of one that has its batch already.
    """
    waits = started = before = 0.0
    warm = steps // 10
    for number in range(warm + steps):
        if number == warm:
            waits, started, before = 0.0, time.perf_counter(), used()
        asked = time.perf_counter()
        batch = next(batches)
        waits += time.perf_counter() - asked
        step(batch)
    took, spent = time.perf_counter() - started, used() - before
    for number in range(10):
        started = time.perf_counter() if number == 2 else started
        step(batch)
    alone = (time.perf_counter() - started) / 8
    return {'waits': 100 * waits / took, 'cpu': spent / steps, 'step': took / steps, 'alone': alone}


def memory() -> float:
    """Return the current memory of the process in bytes."""
    return float(pathlib.Path('/proc/self/statm').read_text().split()[1]) * resource.getpagesize()


def peak() -> float:
    """Return the peak memory of the process in bytes. That of getrusage would include the parent's."""
    lines = pathlib.Path('/proc/self/status').read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith('VmHWM'))

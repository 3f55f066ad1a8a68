"""Mixes and interleaves of many streams: the work for an element, and threads, do not grow with their number."""

import threading

import pytest

from granular import IterDataset, MapDataset, ReadOptions
from granular.grain import DatasetIterator
from tests.support.seams import CORES


def mixed(streams):
    return IterDataset.mix(streams)


def mixed_by_name(streams):
    return IterDataset.mix({f'{number}': stream for number, stream in enumerate(streams)})


def mixed_unevenly(streams):
    return IterDataset.mix(streams, range(1, len(streams) + 1))


def interleaved(streams):
    return IterDataset.interleave(streams, len(streams))


def interleaved_later(streams):
    source = MapDataset.range(len(streams)).map(lambda number: streams[number])
    return IterDataset.interleave(source, len(streams))


COMBINE = [mixed, mixed_by_name, mixed_unevenly, interleaved, interleaved_later]


@pytest.mark.parametrize('combine', COMBINE)
def test_threads_do_not_grow_with_the_number_of_streams(combine):
    count, threads = 3 * (CORES + 8), set()

    def note_thread(element):
        threads.add(threading.get_ident())
        return element

    options = ReadOptions(num_threads=4, prefetch_buffer_size=4)
    dataset = MapDataset.range(10).repeat().map(note_thread)
    with iter(combine([dataset.to_iter_dataset(options) for _ in range(count)])) as elements:
        for _ in range(3 * count):
            next(elements)
    # Those of functions, one for each core, the one before these, and those of the event loop and of the consumer.
    assert len(threads) <= 4 + CORES + 3


class Counted(IterDataset):
    """A stream that counts how often its state is asked for."""

    asked = 0

    def __iter__(self):
        return CountedIterator(self)


class CountedIterator(DatasetIterator):
    def __init__(self, stream):
        super().__init__()
        self._stream, self._next = stream, 0

    def __next__(self):
        self._next += 1
        return self._next - 1

    def get_state(self):
        type(self._stream).asked += 1
        return {'next': self._next}

    def set_state(self, state):
        self._next = state['next']


@pytest.mark.parametrize('combine', COMBINE)
def test_an_element_asks_the_stream_that_it_comes_from_for_its_state(combine):
    count, steps = 40, 400
    with iter(combine([Counted() for _ in range(count)])) as elements:
        for _ in range(count):
            next(elements)
        Counted.asked, taken, states = 0, [], []
        for _ in range(steps):
            taken.append(next(elements))
            states.append(elements.get_state())
        asked = Counted.asked
        for at in (0, 1, steps // 2, steps - 1):
            elements.set_state(states[at])
            assert [next(elements) for _ in range(steps - 1 - at)] == taken[at + 1 :]
    assert asked <= 4 * steps + count

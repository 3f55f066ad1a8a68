"""Handlers of signals that use the object which the interrupted call uses: an error, instead of a wait for itself."""

import itertools
import signal
import threading
import time

import numpy as np
import pytest

import granular
from granular.errors import EncodeError, GranularError

MESSAGE = 'in use by another call of this thread'


@pytest.fixture
def on_signal():
    """Set the handler of a signal, and return a function that sends it to the main thread."""
    former = signal.getsignal(signal.SIGUSR1)

    def install(handler):
        signal.signal(signal.SIGUSR1, lambda number, frame: handler())
        return lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    yield install
    signal.signal(signal.SIGUSR1, former)


@pytest.mark.parametrize('kind', ['DatasetWriter', 'ShardedDatasetWriter'])
@pytest.mark.parametrize('call', ['close', 'append', 'flush'])
def test_writer_is_not_used_within_its_own_append(kind, call, tmp_path, on_signal):
    def encode(value):
        if value == 3:
            send()
        return b'%d' % value

    def handle():
        writer.append({'n': 100}) if call == 'append' else getattr(writer, call)()

    send = on_signal(handle)
    writer = getattr(granular, kind)(tmp_path / 'x', {'n': 'number'}, {'number': encode})
    for n in range(3):
        writer.append({'n': n})
    with pytest.raises((EncodeError, GranularError), match=MESSAGE):
        writer.append({'n': 3})
    writer.append({'n': 4})
    writer.close()
    with granular.open(tmp_path / 'x', None) as reader:
        assert [one['n'] for one in reader] == [b'0', b'1', b'2', b'4']


def numbers_of(element):
    return np.ravel(element['n']).tolist()


@pytest.mark.parametrize('kind', ['stream', 'prefetch', 'Loader'])
def test_each_element_is_taken_once_also_within_the_call_that_waits_for_one(kind, on_signal):
    calls, taken, refused = itertools.count(), [], []

    def handle():
        try:
            taken.extend(numbers_of(next(iterator)))
        except GranularError as error:
            refused.append(str(error))
        except StopIteration:
            pass
        try:
            iterator.load_state_dict(iterator.state_dict())
        except GranularError as error:
            refused.append(str(error))

    send = on_signal(handle)

    def slow(n):
        if next(calls) % 10 == 5:
            send()
            time.sleep(0.01)
        return {'n': n}

    dataset = granular.MapDataset.range(60).map(slow)
    stream = dataset.to_iter_dataset(granular.ReadOptions(prefetch_buffer_size=0))
    iterator = {
        'stream': lambda: iter(stream),
        'prefetch': lambda: iter(stream.prefetch(2)),
        'Loader': lambda: granular.Loader(dataset, 4, prefetch=0),
    }[kind]()
    found = [n for element in iterator for n in numbers_of(element)]
    assert sorted(found + taken) == list(range(60))
    assert all(MESSAGE in message for message in refused)
    assert refused or kind == 'prefetch'

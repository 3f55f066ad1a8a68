"""Handlers of signals that use the object which the interrupted call uses: an error or a right answer, and no wait."""

import itertools
import signal
import threading
import time

import pytest

import granular
from granular.errors import EncodeError, GranularError
from tests.support.states import plain
from tests.support.streams import torch_batches

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

    send = on_signal(lambda: getattr(writer, call)(*[{'n': 100}] * (call == 'append')))
    writer = getattr(granular, kind)(tmp_path / 'x', {'n': 'number'}, {'number': encode})
    for n in range(3):
        writer.append({'n': n})
    with pytest.raises((EncodeError, GranularError), match=MESSAGE):
        writer.append({'n': 3})
    writer.append({'n': 4})
    writer.close()
    with granular.open(tmp_path / 'x', None) as reader:
        assert [one['n'] for one in reader] == [b'0', b'1', b'2', b'4']


@pytest.mark.parametrize(
    ('kind', 'call'),
    list(itertools.product(['stream', 'prefetch', 'Loader', 'Batches'], ['next', 'states', 'close'])),
)
def test_handler_that_uses_an_iterator_within_its_own_next_gets_an_error_or_a_right_answer(kind, call, on_signal):
    calls, taken, states, refused = itertools.count(), [], [], []

    def handle():
        try:
            if call == 'next':
                taken.extend(plain(next(iterator))['n'])
            elif call == 'states':
                states.append((len(found), iterator.state_dict()))
                iterator.load_state_dict(states[-1][1])
            else:
                iterator.close()
        except StopIteration:
            pass
        except GranularError as error:
            refused.append(str(error))

    def slow(n):
        if n < 40 and next(calls) % 10 == 5 and iterator is not None:  # before the loop's last batch
            send()
            time.sleep(0.01)
        return {'n': n}

    def make():
        dataset = granular.MapDataset.range(60).map(slow)
        if kind in ('Loader', 'Batches'):
            loader = granular.Loader(dataset, 4, prefetch=0)
            return loader if kind == 'Loader' else torch_batches(loader)
        stream = dataset.to_iter_dataset(granular.ReadOptions(prefetch_buffer_size=0)).batch(4)
        return iter(stream.prefetch(2) if kind == 'prefetch' else stream)

    send, iterator, found = on_signal(handle), None, []
    iterator = make()
    try:
        for batch in iterator:
            found.extend(plain(batch)['n'])
    except GranularError as error:
        assert call == 'close' and 'closed' in str(error)
    assert all(MESSAGE in message or 'closed' in message for message in refused)
    assert sorted(found + taken) == list(range(60)) or call == 'close' and found == list(range(len(found)))
    for position, state in states:
        resumed, iterator = make(), None
        resumed.load_state_dict(state)
        # A batch of a thread may be done, and the signal come, between `next` and what this loop does with its element.
        assert plain(next(resumed))['n'][0] - position in ((0, 4) if kind == 'Batches' else (0,))

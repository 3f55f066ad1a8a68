"""Batches of remote readers, whose decoders and functions share a hop to a thread: results and errors are as before."""

import collections
import contextvars

import numpy as np
import pytest

import granular
from granular.errors import DecodeError

COUNT = 20
decoded = contextvars.ContextVar('decoded', default=False)


def decode(record):
    decoded.set(True)  # for what is called in the same hop to a thread
    if record == b'7':
        raise ValueError('seven')
    return int(record)


@pytest.fixture
def reader(fakegcs):
    folder = fakegcs.place()
    with granular.ShardedDatasetWriter(folder, {'n': 'bytes', 'many': 'utf8[]'}, shardlen=6, layout='refs') as writer:
        for i in range(COUNT):
            writer.append({'n': f'{i}'.encode(), 'many': ['a'] * (i % 3)})
    with granular.open(folder, {**granular.decoders, 'bytes': decode}) as opened:
        yield opened


def test_a_batch_is_decoded_and_mapped_in_order(reader):
    calls = collections.Counter()

    def number(datapoint):
        calls[datapoint['n']] += 1
        return {'n': datapoint['n'], 'many': len(datapoint['many'])}

    dataset = granular.MapDataset.source(reader).shuffle(seed=2)
    order = [i for i in np.array(granular.MapDataset.range(COUNT).shuffle(seed=2).batch(COUNT)[0]).tolist() if i != 7]
    stream = dataset.map(number).map(lambda one: one['n'] * 10 + one['many']).to_iter_dataset(on_error='skip')
    assert [*stream] == [i * 10 + i % 3 for i in order]
    assert calls == dict.fromkeys(order, 1)


def test_a_record_that_is_not_decoded_is_named(reader):
    mapped = granular.MapDataset.source(reader).map(lambda one: one)
    with pytest.raises(DecodeError, match=r"000001: datapoint 1, key 'n' \(1 bytes\)"):
        mapped.batch(COUNT, batch_fn=list)[0]
    assert mapped[8] == {'n': 8, 'many': ['a', 'a']}


def test_a_function_that_fails_is_called_once_for_each_datapoint(reader):
    calls = []

    def fail(datapoint):
        calls.append(datapoint['n'])
        if datapoint['n'] % 5 == 0:
            raise KeyError(datapoint['n'])
        return datapoint['n']

    part = granular.MapDataset.source(reader)[8:]
    assert [*part.map(fail).to_iter_dataset(on_error='skip')] == [i for i in range(8, COUNT) if i % 5]
    assert sorted(calls) == [*range(8, COUNT)]
    with pytest.raises(KeyError) as caught:
        part.map(fail).batch(4, batch_fn=list)[0]
    assert 'while transforming the datapoint at index 2' in '\n'.join(caught.value.__notes__)


SETS = {
    'reader': lambda source: source[8:],
    'shuffled': lambda source: source[8:].shuffle(seed=1),
    'mix': lambda source: granular.MapDataset.mix([source[8:12], source[12:].shuffle(seed=1)], [0.3, 0.7]),
    'concatenated': lambda source: granular.MapDataset.concatenate([source[8:12], source[12:]]),
    'nested': lambda source: granular.MapDataset.mix([SETS['mix'](source), source[8:]]),
    'with others': lambda source: granular.MapDataset.mix([source[8:], granular.MapDataset.source([{'n': 8}] * 12)]),
}


@pytest.mark.parametrize('kind', SETS)
def test_decoders_and_functions_share_a_hop(reader, kind):
    dataset = SETS[kind](granular.MapDataset.source(reader))
    shared = []

    def note(datapoint):
        shared.append(decoded.get())
        return datapoint['n']

    with iter(dataset.map(note).to_iter_dataset(granular.ReadOptions(prefetch_buffer_size=1))) as elements:
        assert [*elements] == [one['n'] for one in dataset]
    assert any(shared)  # not the first ones, which begin without an event loop


def test_a_record_of_a_mix_that_is_not_decoded_is_left_out_alone(reader):
    source = granular.MapDataset.source(reader)
    mixed = granular.MapDataset.mix([source, source[5:]]).map(lambda one: one['n'])
    expected = [n for pair in zip(range(COUNT), range(5, COUNT), strict=False) for n in pair if n != 7]
    assert [*mixed.to_iter_dataset(on_error='skip')] == expected
    with pytest.raises(DecodeError, match='datapoint 1'):
        mixed.batch(len(mixed), batch_fn=list)[0]

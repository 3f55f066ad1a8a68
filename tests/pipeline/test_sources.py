"""Sources of granular 0.21: epochs, transforms, and one fetch for a chain."""

import json
import pathlib
import pickle

import numpy as np
import pytest

import granular
from granular import aio, shuffle, sources
from granular.errors import DatapointError, InvalidArgumentError, OutOfRangeError

DATA = list(range(100, 117))


def transform(datapoint, seed):
    return (datapoint, *seed)


def test_epochs_contain_each_element_once():
    source = sources.Epochs(DATA, seed=3)
    assert len(source) == 17
    first, second = source.fetch(range(17)), source.fetch(range(17, 34))
    assert sorted(first) == sorted(second) == DATA
    assert first != second
    assert first != sources.Epochs(DATA, seed=4).fetch(range(17))
    assert [source(i) for i in range(17)] == [source[i] for i in range(17)] == first
    assert source.fetch([20, 3, 20]) == [source(20), source(3), source(20)]
    assert sources.Epochs(DATA, shuffle=False).fetch([0, 17, 33]) == [100, 100, 116]
    assert sources.Epochs(DATA, shuffle=shuffle.Permutation(), seed=3).fetch(range(17)) == first


@pytest.mark.parametrize('seed', [0, 7])
def test_elements_equal_those_of_0_21(oracle21, seed):
    script = """
seed = int(sys.argv[1])
data = list(range(100, 117))
s = granular.sources
epochs = s.Epochs(data)
epochs.seed = seed  # 0.21 ignores its argument
made = {
    'Epochs': epochs, 'Sample': s.Sample(data, seed=seed), 'Truncate': s.Truncate(data, 5),
    'Interleave': s.Interleave([s.Epochs(data, shuffle=False), s.Epochs(data)]),
    'Mix': s.Mix([s.Epochs(data, shuffle=False), s.Sample(data)], [0.3, 0.7], seed=seed),
    'Transform': s.Transform(epochs, lambda x, seed: [int(x), *seed], seed=seed),
}
print(json.dumps({k: [v(i) if k == 'Transform' else int(v(i)) for i in range(60)] for k, v in made.items()}))
"""
    epochs = sources.Epochs(DATA, seed=seed)
    cases = {
        'Epochs': epochs,
        'Sample': sources.Sample(DATA, seed=seed),
        'Truncate': sources.Truncate(DATA, 5),
        'Interleave': sources.Interleave([sources.Epochs(DATA, shuffle=False), sources.Epochs(DATA)]),
        'Mix': sources.Mix([sources.Epochs(DATA, shuffle=False), sources.Sample(DATA)], [0.3, 0.7], seed=seed),
        'Transform': sources.Transform(epochs, transform, seed=seed),
    }
    reference = oracle21.run(script, str(seed))
    for name, source in cases.items():
        assert json.loads(json.dumps(source.fetch(range(60)))) == reference[name], name


def test_sources_are_shown_as_their_last_stage():
    source = sources.Epochs(DATA, seed=3)
    assert repr(source) == repr(source.aio) == '<Epochs(seed=3, Permutation())>'
    assert repr(sources.Truncate(source, 5)).startswith('<Truncate(')


def test_lengths():
    epochs = sources.Epochs(DATA)
    assert len(sources.Transform(epochs, transform)) == 17
    assert len(sources.Sample(DATA, length=5)) == 5
    assert len(sources.Truncate(DATA, 5)) == 5
    assert len(sources.Truncate(DATA, 50)) == 17
    assert len(sources.Interleave([DATA, DATA[:3]])) == 6
    assert len(sources.Mix([DATA, DATA[:3]], [1, 1])) == 3
    with pytest.raises(InvalidArgumentError, match='no length'):
        len(sources.Transform(lambda step: step, transform))


def test_sequences_callables_and_readers_are_sources(tmp_path):
    class Many:
        def __len__(self):
            return 17

        def __getitems__(self, indices):
            fetched.append(indices)
            return [DATA[i] for i in indices]

    fetched = []
    array = np.array(DATA)
    for source in (DATA, tuple(DATA), array, Many(), dict(enumerate(DATA))):
        assert [int(x) for x in sources.Epochs(source, shuffle=False).fetch([3, 1])] == [103, 101]
    assert fetched == [[3, 1]]
    assert sources.Epochs(lambda step: step * 2, length=5, shuffle=False).fetch([6]) == [2]
    with pytest.raises(InvalidArgumentError, match='not a source'):
        sources.Epochs(7)


def test_chain_is_one_fetch_of_the_reader(tmp_path, fetches):
    with granular.DatasetWriter(tmp_path / 'ds', {'a': 'int'}, granular.encoders) as writer:
        for i in range(30):
            writer.append({'a': i})
    reader = granular.DatasetReader(tmp_path / 'ds', granular.decoders)
    source = sources.Epochs(sources.Truncate(sources.Epochs(reader, seed=1), 20), seed=2)
    datapoints = sources.Transform(source, lambda datapoint, seed: datapoint['a']).fetch(range(20))
    assert fetches == [20]
    assert len(set(datapoints)) == 20
    reader.close()


def test_sources_pickle(tmp_path):
    with granular.DatasetWriter(tmp_path / 'ds', {'a': 'int'}, granular.encoders) as writer:
        for i in range(30):
            writer.append({'a': i})
    with granular.DatasetReader(tmp_path / 'ds', granular.decoders) as reader:
        source = sources.Transform(sources.Epochs(reader, seed=4), transform)
        twin = pickle.loads(pickle.dumps(source))
        assert twin.fetch(range(40)) == source.fetch(range(40))
        assert len(twin) == 30
        twin = pickle.loads(pickle.dumps(source.aio))
        assert len(twin) == 30


def test_one_fetch_spans_several_epochs():
    source = sources.Epochs(DATA, seed=1)
    steps = [40, 3, 20, 18, 0]
    assert source.fetch(steps) == [source(step) for step in steps]


@pytest.mark.parametrize(
    'make',
    [lambda: sources.Epochs([]), lambda: sources.Sample([]), lambda: sources.Truncate(DATA, 0),
     lambda: sources.Interleave([]), lambda: sources.Mix([DATA], [1, 2]), lambda: sources.Mix([DATA, DATA], [0, 0]),
     lambda: sources.Mix([DATA, DATA], [-1, 2]), lambda: sources.Epochs(DATA, shuffle='yes'),
     lambda: sources.Mix([DATA, DATA], [3e38, 3e38]), lambda: sources.Mix([DATA, DATA], [1e39, 1]),
     lambda: sources.Transform(DATA, 3)],
)  # fmt: skip
def test_invalid_sources_are_rejected(make):
    with pytest.raises(InvalidArgumentError):
        make()


@pytest.mark.parametrize('data', [[1, 2], (1, 2), range(2), np.arange(2), []])
def test_steps_beyond_values_in_memory_are_out_of_range(data):
    for source in (sources.Interleave([data, data]), sources.Transform(data, transform)):
        with pytest.raises(OutOfRangeError, match=r'index \d+ is out of range: the source has (2|no) elements'):
            source.fetch([0, 40] if len(data) else [40])


@pytest.mark.parametrize('kind', [str, pathlib.Path, granular.Path])
def test_address_is_not_a_source(tmp_path, kind):
    address = kind(str(tmp_path / 'data'))
    for take in (granular.MapDataset.source, sources.Epochs, lambda address: granular.Loader(address, 2)):
        with pytest.raises(InvalidArgumentError, match=r'got the address .*data.*: open it with granular\.open'):
            take(address)


def test_errors_name_the_step():
    def fail(datapoint, seed):
        raise KeyError('mine') if datapoint == 105 else RuntimeError('never')

    source = sources.Transform(sources.Truncate([105], 1), fail)
    with pytest.raises(KeyError, match='mine') as caught:
        source.fetch([7])
    (note,) = caught.value.__notes__
    assert note.startswith('while transforming the datapoint at index 7, in Transform(')


async def test_async_api():
    source = aio.sources.Transform(aio.sources.Epochs(DATA, seed=3), transform)
    assert await source.fetch([5]) == sources.Transform(sources.Epochs(DATA, seed=3), transform).fetch([5])
    assert await source.get(5) == (await source.fetch([5]))[0]


@pytest.mark.parametrize('name', ['fetch', 'async fetch', '__getitems__', '_getitems'])
@pytest.mark.parametrize(
    ('returned', 'got'),
    [(lambda indices: [i for i in indices if i != 3], '0 datapoints'), (lambda indices: [*indices, 0], '2 datapoints'),
     (lambda indices: {'x': indices}, 'a dict'), (lambda indices: None, 'a NoneType'), (set, 'a set'),
     (lambda indices: 'x', 'a str')],
    ids=['too few', 'too many', 'columns', 'nothing', 'no order', 'text'],
)  # fmt: skip
def test_a_source_returns_a_datapoint_for_each_index(name, returned, got):
    """Otherwise batches would be smaller, and datapoints would have the indices of others."""

    def fetch(self, indices):
        return returned(indices)

    async def fetch_async(self, indices):
        return returned(indices)

    name, method = ('fetch', fetch_async) if name == 'async fetch' else (name, fetch)
    source = type('Source', (), {'__len__': lambda self: 8, name: method})()
    with pytest.raises(DatapointError, match=rf'Source: its {name} returned {got}, expected a list of 1, for .* \[3\]'):
        granular.MapDataset.source(source)[3]
    with pytest.raises(DatapointError, match='Source: its'):
        granular.MapDataset.source(source).fetch(range(8))

"""480 expressions with the elements, dtypes and errors of Grain: arguments out of range, lengths 0 and 1,
functions that raise, None, ragged elements, texts and bytes.
"""

import json
from pathlib import Path

import pytest

import granular
from granular import IterDataset, MapDataset
from tests.support import grain_expressions
from tests.support.grain_expressions import expressions, outcome

# In Grain's words: with its package, and with our module of its names.
NAMES = """
M, I, X, T = grain.MapDataset, grain.IterDataset, grain.experimental, grain.transforms
def flat(d, f, n):
    class Flat(X.FlatMapTransform):
        max_fan_out = n
        def flat_map(self, x): return f(x)
    return X.FlatMapMapDataset(d, Flat())
def stream_flat(d, f):
    class Flat(X.FlatMapTransform):
        max_fan_out = 100
        def flat_map(self, x): return f(x)
    return X.FlatMapIterDataset(d, Flat())
class Double(T.Map):
    def map(self, x): return 2 * x
class Even(T.Filter):
    def filter(self, x): return x % 2 == 0
def loader(source, n, batch, **options):
    sampler = grain.samplers.IndexSampler(n, grain.sharding.NoSharding(), num_epochs=1, **options)
    return grain.DataLoader(data_source=source, sampler=sampler, operations=[T.Batch(batch)])
names = {
    'M': M, 'I': I, 'ReadOptions': grain.ReadOptions, 'flat': flat, 'stream_flat': stream_flat, 'loader': loader,
    'zipped': X.ZipMapDataset, 'stream_zipped': X.ZipIterDataset, 'limited': X.LimitIterDataset, 'pad': X.batch_and_pad,
    'repeated': X.RepeatIterDataset, 'cached': X.CacheIterDataset, 'rebatched': X.RebatchIterDataset,
    'windows': lambda d, n, seed: X.WindowShuffleMapDataset(d, window_size=n, seed=seed),
    'stream_windows': lambda d, n, seed: X.WindowShuffleIterDataset(d, window_size=n, seed=seed),
    'prefetched': lambda d, n: X.ThreadPrefetchIterDataset(d, prefetch_buffer_size=n),
    'interleaved': lambda d, n: X.InterleaveIterDataset(d, cycle_length=n), 'Double': Double, 'Even': Even,
}
"""
PRINT = 'print(json.dumps({name: outcome(source, text, names) for name, (source, text) in expressions().items()}))'


def our_names():
    scope = {'grain': granular.grain}
    exec(NAMES, scope)
    return scope['names']


def evaluated_by_grain(grain):
    return grain.run(Path(grain_expressions.__file__).read_text() + NAMES + PRINT)


def test_results_equal_those_of_grain(grain):
    theirs = evaluated_by_grain(grain)
    assert len(theirs) > 480
    ours_named, equal, failed = our_names(), 0, 0
    for name, (source, text) in expressions().items():
        ours, expected = json.loads(json.dumps(outcome(source, text, ours_named))), theirs[name]
        reason = different(name)
        if 'error' in expected and not (reason and 'error' not in ours):
            assert 'error' in ours, (name, ours, expected)
            kind = getattr(granular.errors, ours['error'], None)
            assert kind is not None or ours['error'] == expected['error'], (name, ours, expected)
            failed += 1
        elif reason:
            assert ours != expected, f'{name} is equal now: {reason}'
        else:
            assert ours == expected, (name, ours, expected)
            equal += 1
    assert equal > 380
    assert failed > 60


# Where the results differ on purpose, and why.
DIFFERENT = {
    'M.range(5).seed(-1)': 'refused where it is set, by Grain where it is used',
    'M.range(5).seed("a")': 'refused where it is set, by Grain where it is used',
    'M.concatenate([])': 'refused: probably a mistake',
    'stream_windows(M.range(5).to_iter_dataset(), 0, 1)': 'refused: Grain drops all elements',
    'M.mix([M.range(3), M.range(3)], [0, 1])': 'a dataset of weight 0 is left out: refused by Grain',
    'keys: stream, rebatch': 'refused: Grain drops the elements with other keys',
    'M.range(4).map(lambda x: [x] * x).batch(2)': 'refused: Grain drops the values of the longer list',
    'M.range(5).repeat()[3:9]': 'only indices beyond the length differ, which have no meaning',
    'M.range(5).repeat()[::2][:4]': 'only indices beyond the length differ, which have no meaning',
    'M.range(5).map(lambda x: {"x": x, "n": None}).batch(2)': 'None in all elements stays None',
    'M.range(5).map(lambda x: (x, None)).to_iter_dataset().batch(3)': 'None in all elements stays None',
    'M.range(4).map(lambda x: b"ab"[:x] * 0).batch(4)': 'bytes become objects',
}


def different(name):
    """Return why a result differs from that of Grain on purpose, or None if it does not."""
    source, _, operation = name.partition(': ')
    if (
        operation == 'window'
        and source not in ('none', 'one', 'steps', 'dicts', 'keys')
        or name == 'windows(M.range(5), 9, 1)'
    ):
        return "the last window of Grain's window_shuffle repeats some elements and drops others"
    if operation == 'select':
        return 'Grain asks the selection map for indices beyond its length, in epochs after the first'
    if source in ('bytes', 'texts') and operation in BATCHES:
        return 'bytes, and texts with zeros, become objects: the dtypes of Grain drop zeros at their end'
    return DIFFERENT.get(name)


BATCHES = (
    'batch', 'batch, drop', 'batch, more than there are', 'stream, batch', 'stream, batch, drop', 'stream, pad',
    'stream, rebatch',
)  # fmt: skip


@pytest.mark.parametrize(
    ('make', 'note'),
    [
        (lambda d, f: d.map(abs).map(f), 'while transforming the datapoint at index 3, in map(fail)'),
        (lambda d, f: d.filter(f), 'while filtering the datapoint at index 3, in filter(fail)'),
        (
            lambda d, f: d.random_map(lambda x, r: f(x), seed=1),
            'while transforming the datapoint at index 3, in random_map(',
        ),
        (lambda d, f: d.flat_map(f, max_fan_out=2), 'while splitting the datapoint at index 3, in flat_map(fail'),
        (lambda d, f: d.batch(2, batch_fn=lambda b: f(b[-1])), 'while batching the datapoint at index 1, in batch(2, '),
        (lambda d, f: d.to_iter_dataset().map(f), 'while transforming the datapoint at index 3, in map(fail)'),
        (lambda d, f: d.to_iter_dataset().batch(1).map(lambda b: f(b[0])), 'while computing element 3, in map('),
        (lambda d, f: d.to_iter_dataset().batch(1).filter(lambda b: f(b[0])), 'while computing element 3, in filter('),
        (lambda d, f: d.to_iter_dataset().flat_map(f), 'while computing element 3, in flat_map(fail)'),
        (
            lambda d, f: d.to_iter_dataset().batch(2, batch_fn=lambda b: f(b[-1])),
            'while computing batch 1, in batch(2, ',
        ),
    ],
)
def test_errors_name_stage_and_index(make, note):
    with pytest.raises(KeyError) as caught:
        list(make(MapDataset.range(5), fail))
    assert caught.value.__notes__[0].startswith(note)


def fail(x):
    if x == 3:
        raise KeyError('x')
    return [x]


def three(x):
    return 3


def test_errors_of_batches_name_the_batch():
    stream = MapDataset.source(['ab', 'cd', 'ef', [1]]).to_iter_dataset()
    with iter(stream.batch(2)) as iterator, pytest.raises(granular.errors.DatapointError) as caught:
        list(iterator)
    assert caught.value.__notes__ == ['while computing batch 1, in batch(2)']
    with pytest.raises(granular.errors.DatapointError, match=r'flat_map\(three\): expected a sequence .* got 3'):
        list(MapDataset.range(4, 3, -1).to_iter_dataset().flat_map(three))
    with pytest.raises(granular.errors.OutOfRangeError, match='index 0 is out of range: the source has no elements'):
        MapDataset.range(0)[0]
    for datasets in ([], {}):
        with pytest.raises(granular.errors.InvalidArgumentError, match='expected one dataset or more'):
            IterDataset.mix(datasets)

"""Operations of MapDatasets that are repeated infinitely: each works, or is refused by its name and with a remedy."""

import itertools

import numpy as np
import pytest

import granular
from granular import MapDataset, shuffle, sources
from granular.errors import InvalidArgumentError, OutOfRangeError

FINITE = MapDataset.range(25)


class Doubled(granular.grain.experimental.FlatMapTransform):
    max_fan_out = 2

    def flat_map(self, element):
        return [element, element]


def labeled(dataset):
    return dataset.map(lambda x: {'label': x % 3})


def documents(dataset):
    return dataset.map(lambda x: {'x': [x]})


OPERATIONS = {
    'apply': lambda d: d.apply([lambda x: x]),
    'batch': lambda d: d.batch(4),
    'batch_by_size': lambda d: documents(d).batch_by_size('x', 8, sizes=np.ones(len(FINITE), int)),
    'concatenate': lambda d: MapDataset.concatenate([FINITE, d]),
    'exclude': lambda d: d.exclude([1, 2]),
    'fetch': lambda d: d.fetch([3, 10**12]),
    'filter': lambda d: d.filter(lambda x: True),
    'filter_classes': lambda d: labeled(d).filter_classes(valid_classes=[1]),
    'flat_map': lambda d: d.flat_map(Doubled()),
    'indices': lambda d: d.indices([3, 10**12]).index.tolist(),
    'map': lambda d: d.map(abs),
    'map_with_index': lambda d: d.map_with_index(lambda index, x: x),
    'mix': lambda d: MapDataset.mix([d, FINITE], [1, 2]),
    'mix of endless': lambda d: MapDataset.mix([d, d]),
    'oversample': lambda d: labeled(d).oversample(),
    'pack': lambda d: documents(d).pack({'x': 8}, sizes=np.ones(len(FINITE), int)),
    'percent': lambda d: d.percent(0.5),
    'pipe': lambda d: d.pipe(lambda dataset: dataset.map(abs)),
    'random_map': lambda d: d.random_map(lambda x, rng: x, seed=1),
    'repeat': lambda d: d.repeat(2),
    'repeat, endless': lambda d: d.repeat(),
    'seed': lambda d: d.seed(1),
    'select': lambda d: labeled(d).select(['label']),
    'select_from_datasets': lambda d: MapDataset.select_from_datasets([d, FINITE], [(0, 10**12), (1, 2)]),
    'shuffle': lambda d: d.shuffle(seed=7),
    'shuffle, Blocks': lambda d: d.shuffle(7, shuffle.Blocks(4)),
    'shuffle, Permutation': lambda d: d.shuffle(7, shuffle.Permutation()),
    'shuffle, Sequential': lambda d: d.shuffle(7, shuffle.Sequential()),
    'slice': lambda d: d.slice(slice(5, None, 3)),
    'slice, part': lambda d: d[5:9],
    'slice, shard': lambda d: d[1::4],
    'slice, indices': lambda d: d.slice([1, 2]),
    'subset': lambda d: d.subset([1, 2]),
    'to_iter_dataset': lambda d: d.to_iter_dataset(),
    'to_iter_dataset, shard': lambda d: d.to_iter_dataset(shard_options=granular.ShardOptions(1, 3, True)),
    'window_shuffle': lambda d: d.window_shuffle(5, seed=1),
    'zip': lambda d: MapDataset.zip([d, d]),
}  # fmt: skip
REFUSED = {
    'batch_by_size': 'batch_by_size: ', 'pack': 'pack: ',
    'concatenate': 'concatenate: ', 'exclude': 'exclude: ',
    'filter_classes': 'selection by class: ', 'oversample': 'selection by class: ',
    'percent': 'percent: ', 'repeat': 'repeat: ', 'repeat, endless': 'repeat: ',
    'shuffle, Permutation': r'shuffle with Permutation\(\): ', 'slice, indices': 'selection by indices: ',
    'subset': 'selection by indices: ',
}  # fmt: skip
NOT_OPERATIONS = {'aio', 'node', 'parents', 'range', 'shapes', 'source'}


def test_table_has_all_operations():
    public = {name for name in dir(MapDataset) if not name.startswith('_')}
    assert {name.split(',')[0].split(' ')[0] for name in OPERATIONS} == public - NOT_OPERATIONS


@pytest.mark.parametrize('name', OPERATIONS)
def test_operation_on_an_endless_dataset_works_or_is_refused(name):
    endless = FINITE.repeat()
    if name in REFUSED:
        with pytest.raises(InvalidArgumentError, match=f'^{REFUSED[name]}the dataset is repeated infinitely: '):
            OPERATIONS[name](endless)
        return
    made = OPERATIONS[name](endless)
    if isinstance(made, MapDataset):
        found = [made[index] for index in (0, 1, 60, 10**9)]
        assert repr(made.fetch([0, 1, 60, 10**9])) == repr(found)
        made = made.to_iter_dataset()
    taken = list(zip(range(30), made, strict=False))
    assert len(taken) == (2 if name in ('fetch', 'indices') else 4 if name == 'slice, part' else taken[-1][0] + 1)


SOURCES = {
    'Epochs': lambda d: sources.Epochs(d, shuffle=shuffle.Index()),
    'Epochs, refused': sources.Epochs,
    'Interleave': lambda d: sources.Interleave([d, d.map(lambda x: {'x': -x['x']})]),
    'Interleave of one': lambda d: sources.Interleave([d]),
    'Interleave with a finite one': lambda d: sources.Interleave([d, d[:30]]),
    'Mix': lambda d: sources.Mix([d, d], [1, 2]),
    'Sample': sources.Sample,
    'Transform': lambda d: sources.Transform(d, lambda x, seed: x),
    'Truncate': lambda d: sources.Truncate(d, 40),
}  # fmt: skip


@pytest.mark.parametrize('name', SOURCES)
def test_source_of_an_endless_dataset_is_loaded_or_refused_when_it_is_constructed(name):
    endless = FINITE.map(lambda x: {'x': x}).repeat()
    if 'refused' in name:
        with pytest.raises(InvalidArgumentError, match=r'shuffle with Permutation\(\): the dataset is repeated inf'):
            SOURCES[name](endless)
        return
    source = SOURCES[name](endless)
    with granular.Loader(source, 30) as loader:
        assert next(loader)['x'].tolist() == [source[step]['x'] for step in range(30)]


def test_epochs_of_a_selection_are_those_of_its_datasets():
    chosen = [(1, 0), (0, 2), (0, 0)]
    sources = [MapDataset.range(3).shuffle(seed=1), MapDataset.range(5, 7).map(lambda x: -x)]
    selected = MapDataset.select_from_datasets(sources, chosen)
    expected = [sources[number][index + epoch * len(sources[number])] for epoch in range(4) for number, index in chosen]
    assert list(selected.repeat(4)) == expected
    assert selected.fetch([11, 0, 4]) == [expected[11], expected[0], expected[4]]


@pytest.mark.parametrize(
    'make',
    [
        lambda: FINITE.repeat(10**30),
        lambda: FINITE.repeat(min_size=10**30),
        lambda: MapDataset.concatenate([MapDataset.range(2**62)] * 3),
        lambda: MapDataset.range(10**30),
        lambda: MapDataset.select_from_datasets([FINITE], [(0, 10**30)])[0],
    ],
)
def test_lengths_and_indices_beyond_64_bits_are_refused(make):
    with pytest.raises(InvalidArgumentError):
        make()


def test_index_beyond_64_bits_is_out_of_range(tmp_path):
    with granular.BagWriter(tmp_path / 'x.bag') as writer:
        writer.append(b'x')
    with granular.BagReader(tmp_path / 'x.bag') as reader:
        for source in (FINITE, FINITE.repeat(), reader):
            for index in (2**70, -(2**70)):
                with pytest.raises(OutOfRangeError, match='out of range'):
                    source[index]
                with pytest.raises((OutOfRangeError, InvalidArgumentError)):
                    source.fetch(np.array([index], object))


@pytest.mark.parametrize(
    'make',
    [
        lambda numbers: numbers[3:5].map(lambda x: (x,)),
        lambda numbers: numbers.subset([4, 3]).map(lambda x: (x,)),
        lambda numbers: numbers.batch(5).map(lambda batch: tuple(batch.tolist())),
        lambda numbers: MapDataset.select_from_datasets([numbers], [(0, 3), (0, 4)]).map(lambda x: (x,)),
    ],
)
def test_late_epochs_of_a_smaller_dataset_have_its_elements(make):
    part = make(MapDataset.range(10))
    expected = {part[0], part[1]}
    shuffled = part.repeat().shuffle(seed=0)
    assert {shuffled[i] for i in range(50)} == expected
    assert set(part.fetch([-(2**63), 1 - 2**63, 2**63 - 2, 2**63 - 1])) == expected


def test_a_host_of_whose_elements_none_remain_is_an_error():
    def elements(dataset, host=0, hosts=2):
        return iter(dataset.repeat().to_iter_dataset(shard_options=granular.ShardOptions(host, hosts)))

    odd = MapDataset.range(10).exclude(range(0, 10, 2))
    with elements(odd) as iterator:
        for _ in range(2):
            with pytest.raises(InvalidArgumentError, match=r'exclude\(5 .* all elements of host 0 of 2, which'):
                next(iterator)
    with elements(odd, 1) as iterator:
        assert list(itertools.islice(iterator, 6)) == [1, 3, 5, 7, 9, 1]
    with elements(odd.shuffle(seed=1)) as iterator:
        assert len(list(itertools.islice(iterator, 30))) == 30
    none = MapDataset.range(10).exclude(range(10)).shuffle(seed=1).map(str)
    with elements(none, 0, 1) as iterator, pytest.raises(InvalidArgumentError, match='leaves out all elements, which'):
        next(iterator)
    rare = MapDataset.range(3000).exclude(range(2999))
    with elements(rare, 0, 1) as iterator:
        assert list(itertools.islice(iterator, 2)) == [2999, 2999]


@pytest.mark.parametrize('hosts', [1, 2])
def test_a_mix_of_whose_elements_none_remain_is_an_error(hosts):
    def none(count):
        return MapDataset.range(count).exclude(range(count))

    mixes = {
        'repeated': MapDataset.mix([none(10), none(20)]).repeat(),
        'of endless': MapDataset.mix([none(10).shuffle(seed=1).repeat(), none(20).repeat()], [3, 1]),
        'with the weight 0': MapDataset.mix([none(10).repeat(), MapDataset.range(5).repeat()], [1, 0]),
        'concatenated': MapDataset.concatenate([none(10), none(3)]).shuffle(seed=1).map(str).repeat(),
        'in turn': granular.MapDataset.select_from_datasets([none(9), none(8)], [(0, 1), (1, 2)]).repeat(),
        'behind': MapDataset.mix([MapDataset.range(4), MapDataset.range(4)]).exclude(range(8)).repeat(),
    }
    for dataset in mixes.values():
        stream = dataset.to_iter_dataset(shard_options=granular.ShardOptions(0, hosts))
        with iter(stream) as iterator, pytest.raises(InvalidArgumentError, match='leaves out all elements'):
            next(iterator)
    some = MapDataset.mix([none(2000).repeat(), MapDataset.range(2001).exclude(range(2000)).repeat()], [1, 2])
    with iter(some.to_iter_dataset(shard_options=granular.ShardOptions(0, hosts))) as iterator:
        assert list(itertools.islice(iterator, 2)) == [2000, 2000]
    streams = {name: none(10).repeat().to_iter_dataset() for name in ('web', 'books')}
    with iter(granular.IterDataset.mix(streams)) as iterator, pytest.raises(InvalidArgumentError, match='leaves out'):
        next(iterator)

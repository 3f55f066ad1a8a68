"""Hugging Face datasets as sources of pipelines and loaders."""

import numpy as np
import pytest

import granular
from granular import aio
from granular.errors import InvalidArgumentError, UnknownKeyError


def rows(count=100):
    return {
        'id': list(range(count)),
        'text': [f't{i}' for i in range(count)],
        'values': [[float(i)] * 3 for i in range(count)],
    }


@pytest.fixture(scope='module', params=['memory', 'disk', 'arrow'])
def dataset(request, tmp_path_factory):
    import datasets

    folder = tmp_path_factory.mktemp('data')
    created = datasets.Dataset.from_dict(rows())
    if request.param == 'memory':
        return created
    datasets.disable_progress_bars()
    created.save_to_disk(folder / 'saved', num_shards=2)
    if request.param == 'disk':
        return datasets.load_from_disk(folder / 'saved')
    return datasets.Dataset.from_file(str(next((folder / 'saved').glob('*.arrow'))))


def test_elements_equal_those_of_the_dataset(dataset):
    pipeline = granular.MapDataset.source(dataset)
    assert len(pipeline) == len(dataset)
    assert pipeline[3] == dataset[3]
    assert pipeline.fetch([7, 3, 3]) == [dataset[i] for i in (7, 3, 3)]
    assert list(pipeline) == list(dataset)
    assert '\n' not in pipeline.node.describe()


def test_batch_is_one_call(dataset, monkeypatch):
    calls = []
    original = type(dataset).__getitems__
    monkeypatch.setattr(type(dataset), '__getitems__', lambda self, keys: calls.append(keys) or original(self, keys))
    batch = granular.MapDataset.source(dataset).select(['id']).batch(16)[1]
    assert batch['id'].tolist() == list(range(16, 32))
    assert calls == [list(range(16, 32))]


def test_unselected_columns_are_not_decoded(tmp_path):
    import datasets

    created = datasets.Dataset.from_dict({'id': [0, 1], 'image': [{'bytes': b'no image', 'path': None}] * 2})
    created = created.cast_column('image', datasets.Image())
    pipeline = granular.MapDataset.source(created)
    with pytest.raises(Exception, match='image'):
        pipeline[0]
    assert list(pipeline.select(['id'])) == [{'id': 0}, {'id': 1}]
    with pytest.raises(UnknownKeyError, match='nothing'):
        pipeline.select(['nothing'])


def test_numpy_format_is_preserved(dataset):
    pipeline = granular.MapDataset.source(dataset.with_format('numpy')).select(['values', 'id'])
    assert pipeline[4]['values'].dtype in (np.float32, np.float64)
    batch = pipeline.shuffle(seed=1).batch(8)[0]
    assert batch['values'].shape == (8, 3)
    assert (batch['values'][:, 0] == batch['id']).all()


def test_arrow_format_has_rows(dataset):
    pipeline = granular.MapDataset.source(dataset.with_format('arrow'))
    assert pipeline[4]['id'] == 4 and pipeline[4]['values'].dtype == np.asarray(dataset[4]['values']).dtype
    batch = pipeline.select(['values', 'id']).shuffle(seed=1).batch(8)[0]
    assert batch.keys() == {'values', 'id'} and (batch['values'][:, 0] == batch['id']).all()


def double(row):
    return 2 * row['id']


def test_dataset_works_in_worker_processes(tmp_path):
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(rows()).save_to_disk(tmp_path / 'saved')
    stream = granular.MapDataset.source(datasets.load_from_disk(tmp_path / 'saved')).map(double).to_iter_dataset()
    with iter(stream.mp_prefetch(1)) as iterator:
        state = iterator.get_state()
        assert list(iterator) == [2 * i for i in range(100)]
    with iter(stream) as iterator:
        iterator.set_state(state)
        assert next(iterator) == 0


async def test_async_api(dataset):
    pipeline = aio.MapDataset.source(dataset).select('id')
    assert await pipeline.fetch([2, 1]) == [{'id': 2}, {'id': 1}]


def test_loader_reads_the_dataset(dataset):
    source = granular.sources.Epochs(dataset.select_columns(['id', 'values']), shuffle=False)
    with granular.Loader(source, batch=10) as loader:
        assert next(loader)['id'].tolist() == list(range(10))


def test_dictionary_of_splits_is_rejected_with_a_remedy():
    import datasets

    splits = datasets.DatasetDict({'train': datasets.Dataset.from_dict(rows(2))})
    with pytest.raises(InvalidArgumentError, match='train'):
        granular.MapDataset.source(splits)
    assert len(granular.MapDataset.source(splits['train'])) == 2

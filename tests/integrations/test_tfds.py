"""A dataset written by TensorFlow Datasets is a source, without TensorFlow."""

import io
import sys

import numpy as np
import pytest

import granular

COUNT = 90


@pytest.fixture(scope='session')  # its class may be registered once in a process
def folder(tmp_path_factory):
    import tensorflow_datasets as tfds

    class Tiny(tfds.core.GeneratorBasedBuilder):
        """A dataset of 90 elements."""

        VERSION = tfds.core.Version('1.0.0')
        code_path = None  # the lookup needs importlib_resources, which tfds does not install

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict(
                    {
                        'image': tfds.features.Image(shape=(4, 6, 3)),
                        'label': tfds.features.ClassLabel(num_classes=5),
                        'vector': tfds.features.Tensor(shape=(3,), dtype=np.float32),
                    }
                ),
            )

        def _split_generators(self, dl_manager):
            return {'train': self._generate_examples()}

        def _generate_examples(self):
            for i in range(COUNT):
                image = granular.encoders['png'](np.full((4, 6, 3), i, np.uint8))  # tfds needs TensorFlow for an array
                yield i, {'image': io.BytesIO(image), 'label': i % 5, 'vector': [i, i + 0.5, -i]}

    folder = tmp_path_factory.mktemp('tfds')
    config = tfds.download.DownloadConfig(num_shards=3)
    Tiny(data_dir=folder, file_format='array_record').download_and_prepare(download_config=config)
    return folder


def check(element):
    i = int(element['image'][0, 0, 0])
    assert element['image'].shape == (4, 6, 3)
    assert element['label'] == i % 5
    assert element['vector'].tolist() == [i, i + 0.5, -i]
    return i


def test_tfds_data_source_feeds_pipelines(folder):
    import tensorflow_datasets as tfds

    reference = tfds.data_source('tiny', split='train', data_dir=folder)
    assert 'tensorflow' not in sys.modules
    chain = granular.MapDataset.source(reference).shuffle(seed=7)
    order = granular.MapDataset.range(COUNT).shuffle(seed=7)
    assert len(chain) == COUNT
    assert sorted(map(check, chain)) == list(range(COUNT))
    assert [check(element) for element in chain] == [check(reference[i]) for i in order]
    batches = list(chain.batch(16).to_iter_dataset())
    assert [len(batch['label']) for batch in batches] == [16] * 5 + [10]
    images = np.concatenate([batch['image'] for batch in batches])
    assert (images == np.stack([reference[i]['image'] for i in order])).all()
    with granular.Loader(granular.sources.Epochs(reference, seed=1), 30) as loader:
        labels = np.concatenate([next(loader)['label'] for _ in range(3)])
    assert np.bincount(labels).tolist() == [18] * 5


def test_tfds_files_are_arrayrecord_sources(folder):
    import tensorflow_datasets as tfds

    # Read the same records by range requests, as from a bucket, and decode them with the dataset's features.
    split = tfds.builder('tiny', data_dir=folder).info.splits['train[10:70]']
    source = granular.ArrayRecordDataSource(split.file_instructions)
    reference = tfds.data_source('tiny', split='train[10:70]', data_dir=folder)
    assert len(split.file_instructions) == 3
    assert len(source) == len(reference) == 60
    features = tfds.builder('tiny', data_dir=folder).info.features
    chain = granular.MapDataset.source(source).map(features.deserialize_example_np)
    assert [check(element) for element in chain] == [check(element) for element in reference]

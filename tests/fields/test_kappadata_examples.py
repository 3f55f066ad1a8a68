"""The examples of KappaData's README, written anew for files that exist: only the import is ours."""

import os

import numpy as np
import pytest
from PIL import Image

import granular.kappadata as kappadata


class ImageClassificationDataset(kappadata.KDDataset):
    def __init__(self, image_paths):
        super().__init__()
        self.image_paths = image_paths

    def __len__(self):
        return len(self.image_paths)

    def getitem_x(self, idx, ctx=None):
        if ctx is not None:
            ctx['crop_parameters'] = (idx, idx, 4, 4)
        return np.asarray(Image.open(self.image_paths[idx]))[..., 0]

    def getitem_y(self, idx, ctx=None):
        return int(self.image_paths[idx].parent.name)


class WithAnother(kappadata.KDWrapper):
    def getitem_x(self, idx, ctx=None):
        other = (idx + 1) % len(self)
        return self.dataset.getitem_x(idx, ctx).astype(int) + self.dataset.getitem_x(other, ctx)


@pytest.fixture
def folder(tmp_path):
    for i in range(12):
        (tmp_path / f'{i % 3}').mkdir(exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), i, np.uint8)).save(tmp_path / f'{i % 3}/{i:02d}.png')
    return tmp_path


@pytest.fixture
def ds(folder):
    return ImageClassificationDataset(sorted(folder.rglob('*.png'), key=lambda path: path.name))


def values(dataset):
    return [int(x[0, 0]) for x in kappadata.ModeWrapper(dataset, mode='x')]


def test_fields_are_loaded_separately(ds):
    assert list(kappadata.ModeWrapper(ds, mode='y')) == [i % 3 for i in range(12)]
    assert [(int(x[0, 0]), y) for x, y in kappadata.ModeWrapper(ds, mode='x y')] == [(i, i % 3) for i in range(12)]
    for i, (_, ctx) in enumerate(kappadata.ModeWrapper(ds, mode='x', return_ctx=True)):
        assert ctx['crop_parameters'] == (i, i, 4, 4)
    for i, ((_, y), ctx) in enumerate(kappadata.ModeWrapper(ds, mode='x y', return_ctx=True)):
        assert (y, ctx['crop_parameters'][0]) == (i % 3, i)
    assert kappadata.ModeWrapper(ds, mode='y')[:] == [i % 3 for i in range(12)]
    assert kappadata.ModeWrapper(ds, mode='y')[5:-3:2] == [2, 1]


def test_wrappers_choose_and_change_samples(ds):
    assert values(kappadata.KDSubset(ds, [3, 1])) == [3, 1]
    assert values(kappadata.KDConcatDataset([kappadata.KDSubset(ds, [3]), ds])) == [3, *range(12)]
    assert values(WithAnother(ds)) == [*range(1, 23, 2), 11]
    assert values(kappadata.ClassFilterWrapper(kappadata.KDSubset(WithLabel(ds), range(12)), valid_classes=[0, 1])) == [
        i for i in range(12) if i % 3 < 2
    ]
    assert len(kappadata.OversamplingWrapper(WithLabel(ds))) == 12
    assert values(kappadata.PercentFilterWrapper(ds, from_percent=0.25, to_percent=0.75)) == [*range(3, 9)]
    assert values(kappadata.RepeatWrapper(ds, repetitions=2)) == [*range(12)] * 2
    assert len(kappadata.RepeatWrapper(ds, min_size=100)) >= 100
    assert sorted(values(kappadata.ShuffleWrapper(ds, seed=5))) == [*range(12)]
    assert kappadata.ShuffleWrapper(ds, seed=5).root_dataset is ds


class WithLabel(kappadata.KDWrapper):
    def getitem_class(self, idx, ctx=None):
        return self.dataset.getitem_y(idx, ctx)


class Folder:
    """As ``torchvision.datasets.ImageFolder(root, loader=raw_image_loader)``: bytes and a class."""

    def __init__(self, root):
        self.samples = [(path, int(path.parent.name)) for path in sorted(root.rglob('*.png'))]
        self.loads = 0

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.loads += 1
        path, label = self.samples[index]
        return kappadata.raw_image_loader(path), label


def test_encoded_images_are_kept_in_memory(folder):
    raw = Folder(folder)
    cached = kappadata.SharedDictDataset(raw, transform=kappadata.raw_image_folder_sample_to_pil_sample)
    for _ in range(2):
        pairs = [cached[i] for i in range(len(cached))]
        assert [(image.size, image.mode, label) for image, label in pairs] == [
            ((4, 4), 'RGB', label) for _, label in raw.samples
        ]
    assert raw.loads == cached.loads == 12


def test_folders_are_copied_once(folder, tmp_path):
    lines = []
    local = tmp_path / 'local'
    first = kappadata.copy_folder_from_global_to_local(folder, local, relative_path='1', log_fn=lines.append)
    again = kappadata.copy_folder_from_global_to_local(folder, local, relative_path='1')
    assert (first.was_copied, again.was_copied, len(lines)) == (True, False, 1)
    assert {'01.png', '04.png', '07.png', '10.png'} <= set(os.listdir(local / '1'))

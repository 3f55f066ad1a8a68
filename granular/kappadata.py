"""The names of KappaData 0.0.8 and 1.4: a program for KappaData changes its import alone.

::

    import granular.kappadata as kappadata

    for image, label in kappadata.ModeWrapper(reader, mode='image label'):
        ...

Fields and wrappers load batches in bulk, over a reader in one fan-out. The page "Coming from KappaData" lists what
differs, and what is absent. New programs use the operations of a :class:`granular.MapDataset`.
"""

import io
import os
from collections.abc import Callable
from typing import Any

from granular._support.lazy import import_extra
from granular._support.other_names import no_module_name
from granular.aio.conversion.local_copy import LocalCopy as CopyFolderResult
from granular.aio.pipeline.fields.fields import KDDataset
from granular.sync.caches import SharedMemoryCache
from granular.sync.fields import (
    ClassFilterWrapper,
    KDConcatDataset,
    KDWrapper,
    ModeWrapper,
    OversamplingWrapper,
    PercentFilterWrapper,
    RepeatWrapper,
    ShuffleWrapper,
    SubsetWrapper,
)
from granular.sync.functions import copy_to_local
from granular.sync.path import Path

__all__ = [
    'ClassFilterWrapper',
    'CopyFolderResult',
    'KDConcatDataset',
    'KDDataset',
    'KDSubset',
    'KDWrapper',
    'ModeWrapper',
    'OversamplingWrapper',
    'PercentFilterWrapper',
    'RepeatWrapper',
    'SharedDictDataset',
    'ShuffleWrapper',
    'SubsetWrapper',
    'copy_folder_from_global_to_local',
    'raw_image_folder_sample_to_pil_sample',
    'raw_image_loader',
]


KDSubset = SubsetWrapper


class SharedDictDataset:
    """A map-style dataset whose samples are kept in memory that all processes of the machine share.

    Args:
      dataset: any object with ``__len__`` and ``__getitem__``.
      transform: called with each sample at each access; what is kept is not transformed.
    """

    def __init__(self, dataset: Any, transform: Callable[[Any], Any] | None = None) -> None:
        self.dataset = dataset
        self.transform = transform
        self._cache = SharedMemoryCache(dataset)

    def __len__(self) -> int:
        return len(self._cache)

    def __getitem__(self, index: int) -> Any:
        sample = self._cache[index]
        return sample if self.transform is None else self.transform(sample)

    def __getattr__(self, name: str) -> Any:
        if name.startswith('_') or name == 'dataset':
            raise AttributeError(f'{type(self).__name__!r} object has no attribute {name!r}')
        return getattr(self.dataset, name)


def copy_folder_from_global_to_local(
    global_path: str | os.PathLike[str] | Path,
    local_path: str | os.PathLike[str] | Path,
    relative_path: str | os.PathLike[str] | None = None,
    num_workers: int = 0,
    log_fn: Callable[[str], object] | None = None,
) -> CopyFolderResult:
    """Copy a folder or archive, also from a bucket, to a disk, unless it is there: :func:`granular.copy_to_local`.

    Args:
      global_path: the folder, or the folder with the archive.
      local_path: the folder of the copy.
      relative_path: a path that is appended to both.
      num_workers: ignored: requests are concurrent in one process.
      log_fn: called with a line about what was done.
    """
    result = copy_to_local(global_path, local_path, relative_path)
    if log_fn is not None:
        log_fn(f'{result.path}: {result.files} files, {result.bytes} bytes copied')
    return result


def raw_image_loader(path: str | os.PathLike[str] | Path) -> bytes:
    """Return the bytes of an image file, for ``torchvision.datasets.ImageFolder(loader=...)``."""
    return Path(path).read_bytes()


def raw_image_folder_sample_to_pil_sample(sample: tuple[bytes, Any]) -> tuple[Any, Any]:
    """Decode the image of a sample of an ``ImageFolder`` whose loader is ``raw_image_loader`` (extra ``formats``)."""
    data, label = sample
    image = import_extra('PIL.Image', 'formats', 'images need Pillow').open(io.BytesIO(data))
    return image.convert('RGB'), label


def __getattr__(name: str) -> Any:
    raise no_module_name(__name__, name)

"""Handwritten digits of scikit-learn in a bucket, for the other examples."""

import contextlib
import os
from collections.abc import Callable, Iterator

import numpy as np

import granular
from granular import testing

SPEC = {'image': 'array', 'label': 'int'}
PARTS = {'train': lambda i: i % 6 > 0, 'test': lambda i: i % 6 == 0}


@contextlib.contextmanager
def bucket(url: str | None) -> Iterator[granular.Path]:
    """Open the folder of the digits, with ``train`` and ``test``. Writes them if they are missing.

    Args:
      url: a folder in any store, such as ``s3://bucket/digits``; None for an S3 server that runs as long as the block.
    """
    with contextlib.ExitStack() as stack:
        if url is None:
            options = stack.enter_context(testing.s3_server())
            # Readers are pickled without credentials: worker processes read them from the environment.
            os.environ.update(AWS_ACCESS_KEY_ID=options['key'], AWS_SECRET_ACCESS_KEY=options['secret'])
            path = granular.Path('s3://examples', **options)
            path.mkdir()
        else:
            path = granular.Path(url)
        for name, selected in PARTS.items():
            if not (path / name / 'spec.json').exists():
                write(path / name, selected)
        yield path


def write(path: granular.Path, selected: Callable[[int], bool] = lambda i: True) -> None:
    """Write the selected ones of the 1,797 digits: images of 8 by 8 pixels, and their labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images * 255 / 16).astype(np.uint8)
    with granular.DatasetWriter(path, SPEC, granular.encoders, checksums=True) as writer:
        for i in filter(selected, range(len(images))):
            writer.append({'image': images[i], 'label': int(digits.target[i])}, flush=False)


def write_images(folder: granular.Path) -> granular.Path:
    """Write the digits as files with a border, in a folder per class, unless they are there. Returns the folder."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    if not (folder / str(digits.target[-1]) / f'{len(digits.target) - 1}.png').exists():
        for i, image in enumerate((digits.images * 255 / 16).astype(np.uint8)):
            file = folder / str(digits.target[i]) / f'{i}.png'
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(granular.encoders['png'](np.pad(image, 1)))
    return folder


def prepare(datapoint: dict) -> dict:
    """Convert a datapoint for a model: floats of shape (1, 8, 8), and the label."""
    return {'image': datapoint['image'][None].astype(np.float32) / 255, 'label': np.int32(datapoint['label'])}

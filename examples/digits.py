"""scikit-learn's handwritten digits in a bucket, for the examples beside this file."""

import contextlib
import os
from collections.abc import Callable, Iterator

import numpy as np

import granular
from granular import testing

SPEC = {'image': 'png', 'label': 'int'}
PARTS = {'train': lambda i: i % 6 > 0, 'test': lambda i: i % 6 == 0}


@contextlib.contextmanager
def bucket(url: str | None) -> Iterator[granular.Path]:
    """Where the digits are, in ``train`` and ``test``; they are written there if they are not.

    Args:
      url: a folder in any store, such as ``s3://bucket/digits``; None for an S3 server that runs as long as the block.
    """
    with contextlib.ExitStack() as stack:
        if url is None:
            options = stack.enter_context(testing.s3_server())
            # Readers go to worker processes without credentials, which are found there as they are here.
            os.environ.update(AWS_ACCESS_KEY_ID=options['key'], AWS_SECRET_ACCESS_KEY=options['secret'])
            place = granular.Path('s3://examples', **options)
            place.mkdir()
        else:
            place = granular.Path(url)
        for name, wanted in PARTS.items():
            if not (place / name / 'spec.json').exists():
                write(place / name, wanted)
        yield place


def write(place: granular.Path, wanted: Callable[[int], bool] = lambda i: True) -> None:
    """Write those of the 1,797 digits that are wanted: images of 8 by 8 pixels, and what they show."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images * 255 / 16).astype(np.uint8)
    with granular.DatasetWriter(place, SPEC, granular.encoders, checksums=True) as writer:
        for i in filter(wanted, range(len(images))):
            writer.append({'image': images[i], 'label': int(digits.target[i])}, flush=False)


def prepare(point: dict) -> dict:
    """A datapoint for a model: floats of shape (1, 8, 8), and the label."""
    return {'image': point['image'][None].astype(np.float32) / 255, 'label': np.int32(point['label'])}

"""The sync API of :mod:`granular.aio.datasets.clean`: find and remove the leftovers of killed writers."""

from typing import Any

from granular.aio.datasets import clean as core
from granular.aio.datasets.clean import Leftover
from granular.aio.runtime.bridge import run
from granular.sync.path import Path

__all__ = ['Leftover', 'clean']


def clean(place: Path | str | Any, remove: bool = False, older: float = 3600.0, bags: bool = False) -> list[Leftover]:
    """Find, and optionally remove, what killed writers left in a folder.

    Leftovers are unfinished multipart uploads, temporary files, claims, and datasets and shards without a spec. Never
    touched are a dataset that has its ``spec.json``, the files of a writer running on this machine, and files that
    could be standalone bags: those in a folder without a ``refs.bag`` and without a finished shard beside it. Uploads
    to GCS cannot be listed; they expire after a week. Partial datasets in the columns layout are removed too, although
    a writer could resume them.

    ::

        for leftover in granular.clean('s3://bucket/data'):
            print(leftover.kind, leftover.size, leftover.place)

    Args:
      place: the folder. Nothing outside is touched, and links are not followed.
      remove: remove the leftovers.
      older: skip folders that were written to within this many seconds, by the store's clock. In a bucket, only this
        protects running writers. A writer of shards renews its claim every ten minutes, which protects all of its
        shards.
      bags: also report bags in any folder without a ``spec.json``, even if they may be standalone.

    Returns:
      The leftovers, sorted by path.

    Raises:
      NotFoundError: if a local folder does not exist.
      StoreError: if the store fails.
    """
    return run(core.clean(place, remove, older, bags))

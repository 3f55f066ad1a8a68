"""Finding and removing what killed writers left, with I/O that blocks."""

from typing import Any

from granular.aio.datasets import clean as core
from granular.aio.datasets.clean import Leftover
from granular.aio.runtime.bridge import run
from granular.sync.path import Path

__all__ = ['Leftover', 'clean']


def clean(place: Path | str | Any, remove: bool = False, older: float = 3600.0, bags: bool = False) -> list[Leftover]:
    """What killed writers left below a folder: uploads in parts, drafts, and datasets and shards without a spec.

    A dataset that has its ``spec.json`` is never touched, nor what a living writer of this machine holds, nor what
    cannot be told from bags that were written on their own: those lie in a folder without a ``refs.bag``, and not
    beside a finished shard. Uploads to GCS cannot be listed; they expire by themselves after a week. What a writer in
    the columns layout could go on with is removed like the rest.

    Args:
      place: the folder. Nothing outside is touched, and no link is followed.
      remove: remove what was found.
      older: only folders in which nothing was written for so many seconds. In a bucket, this is all that spares
        those who write right now.
      bags: also bags in any folder without a ``spec.json``, even if they may have been written on their own.

    Returns:
      What was found, sorted by place.

    Raises:
      NotFoundError: if there is no such folder on a disk.
      StoreError: if the store fails.
    """
    return run(core.clean(place, remove, older, bags))

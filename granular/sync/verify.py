"""Whether a dataset is whole, with I/O that blocks."""

from collections.abc import Callable
from typing import Any

from granular.aio.datasets import verify as core
from granular.aio.datasets.verify import Problem, Report
from granular.aio.runtime.bridge import run
from granular.sync.path import Path

__all__ = ['Problem', 'Report', 'verify']


def verify(place: Path | str | Any, progress: Callable[[int], None] | None = None) -> Report:
    """Read all of a dataset, with shards or without: its structure, its references, each record and its checksum.

    Args:
      place: the folder.
      progress: called with the bytes read since.

    Returns:
      The report; what is wrong with the data is in it, and does not end the reading.

    Raises:
      NotFoundError: if there is no dataset.
      StoreError: if the store fails.
    """
    return run(core.verify(place, progress))

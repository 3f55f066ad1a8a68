"""The sync API of :mod:`granular.aio.datasets.verify`: check that a dataset is complete and undamaged."""

from collections.abc import Callable
from typing import Any

from granular.aio.datasets import verify as core
from granular.aio.datasets.verify import Problem, Report
from granular.aio.runtime.bridge import run
from granular.sync.path import Path

__all__ = ['Problem', 'Report', 'verify']


def verify(place: Path | str | Any, progress: Callable[[int], None] | None = None) -> Report:
    """Read all of a dataset, sharded or not, and check its structure, references, records and checksums.

    ::

        report = granular.verify('s3://bucket/data')
        for problem in report.problems:
            print(problem.place, problem.message)

    Args:
      place: the folder.
      progress: called with the number of bytes read since the last call.

    Returns:
      The report. Problems of the data are listed in it, and do not stop the check.

    Raises:
      NotFoundError: if there is no dataset.
      StoreError: if the store fails.
    """
    return run(core.verify(place, progress))

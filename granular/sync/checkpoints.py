"""The sync API of :mod:`granular.aio.loader.checkpoints`: pipeline states in files."""

from collections.abc import Mapping
from typing import Any

from granular.aio.loader import checkpoints as core
from granular.aio.pipeline.transforms import ShardOptions
from granular.aio.runtime.bridge import run
from granular.sync.path import Path


def save_state(directory: Path | str | Any, state: Mapping[str, Any], process: ShardOptions | None = None) -> Path:
    """Write the state of a pipeline, as returned by ``get_state()``, ``save()`` or ``state_dict()``, to a file.

    The file appears complete or not at all, and replaces an older one.

    ::

        granular.save_state('s3://bucket/run/step_100', iterator.get_state())
        iterator.set_state(granular.load_state('s3://bucket/run/step_100'))

    Args:
      directory: the folder of the file, on any store.
      state: plain JSON.
      process: identifies one of several processes, each of which has a file of its own; by default the only one.

    Returns:
      The file, ``process_{index}-of-{count}.json``.

    Raises:
      StateError: if the state is not plain JSON.
    """
    return Path(run(core.save_state(directory, state, process)))


def load_state(directory: Path | str | Any, process: ShardOptions | None = None) -> dict[str, Any]:
    """Read a state that :func:`save_state` wrote.

    ::

        granular.save_state('./checkpoint', loader.save())
        loader.load(granular.load_state('./checkpoint'))

    If a different number of processes wrote the checkpoint, the state of any one of them is used: the order of a
    pipeline does not depend on the number of its shards.

    Raises:
      NotFoundError: if the folder holds no state.
      StateError: if the file is not a state, or the states of several processes are at different positions.
    """
    return run(core.load_state(directory, process))

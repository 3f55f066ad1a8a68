"""States of pipelines in files, for programs that block."""

from collections.abc import Mapping
from typing import Any

from granular.aio.loader import checkpoints as core
from granular.aio.pipeline.transforms import ShardOptions
from granular.aio.runtime.bridge import run
from granular.sync.path import Path


def save_state(directory: Path | str | Any, state: Mapping[str, Any], process: ShardOptions | None = None) -> Path:
    """Write the state of a pipeline, as ``get_state()``, ``save()`` or ``state_dict()`` gave it.

    The file appears whole or not at all, and takes the place of an older one.

    Args:
      directory: where, on any store.
      state: plain JSON.
      process: which of several processes this is, each of which has a file of its own; by default the only one.

    Returns:
      The file, ``process_{index}-of-{count}.json``.

    Raises:
      StateError: if the state is no plain JSON.
    """
    return Path(run(core.save_state(directory, state, process)))


def load_state(directory: Path | str | Any, process: ShardOptions | None = None) -> dict[str, Any]:
    """Read a state that :func:`save_state` wrote.

    Where it was written by another number of processes, any one of their states does: the order of a pipeline does not
    depend on the number of its shards.

    Raises:
      NotFoundError: if there is none.
      StateError: if the file is no state, or the states of several processes stand at different positions.
    """
    return run(core.load_state(directory, process))

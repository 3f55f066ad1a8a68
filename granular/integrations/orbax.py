"""Orbax (extra ``orbax``): the state of a pipeline in a checkpoint, together with a model.

::

    manager.save(step, args=ocp.args.Composite(model=ocp.args.StandardSave(params), data=CheckpointSave(iterator)))
    manager.restore(step, args=ocp.args.Composite(model=..., data=CheckpointRestore(iterator)))

Each process writes a file of its own, ``process_{index}-of-{count}.json``, like :func:`granular.save_state`.

The names are those of ``grain.checkpoint``; :mod:`granular.grain` has those of ``grain.python``, too.
"""

import dataclasses
import inspect
from typing import Any

from granular._support.lazy import import_extra
from granular.aio.pipeline.shards import ShardByJaxProcess
from granular.errors import InvalidArgumentError
from granular.sync.functions import load_state, save_state

__all__ = [
    'CheckpointHandler',
    'CheckpointRestore',
    'CheckpointSave',
]

ocp = import_extra('orbax.checkpoint', 'orbax')
_Handler: Any = ocp.CheckpointHandler
_Args: Any = ocp.args.CheckpointArgs


class CheckpointHandler(_Handler):  # type: ignore[misc]
    """Saves and restores objects with ``state_dict`` and ``load_state_dict``.

    These are a :class:`granular.Loader`, an iterator of a DataLoader, a MapDataset or an IterDataset, the batches of
    :mod:`granular.integrations`, and torchdata's loaders. The state is taken when :class:`CheckpointSave` is
    constructed: a checkpointer may write it later, while the loader continues.
    """

    def save(self, directory: Any, item: Any = None, args: Any = None) -> None:
        """Write the state of this process.

        Raises:
          InvalidArgumentError: if the item has no state.
          StateError: if its state is not plain JSON.
        """
        args = CheckpointSave(item) if args is None else args
        save_state(str(directory), args.state, ShardByJaxProcess())

    def restore(self, directory: Any, item: Any = None, args: Any = None) -> Any:
        """Restore an item from the state of this process, also if another number of processes saved it.

        Returns:
          The item.

        Raises:
          InvalidArgumentError: if the item has no state.
          NotFoundError: if the checkpoint contains no state.
          StateError: if the state belongs to another pipeline, or the processes were saved at different positions.
        """
        args = CheckpointRestore(item) if args is None else args
        restored = _checked(args.item)
        restored.load_state_dict(load_state(str(directory), ShardByJaxProcess()))
        return restored


@ocp.args.register_with_handler(CheckpointHandler, for_save=True)
@dataclasses.dataclass
class CheckpointSave(_Args):  # type: ignore[misc]
    """Arguments of a save.

    Args:
      item: the loader or iterator; its state is taken now, at its next element.

    Raises:
      InvalidArgumentError: if the item has no state.
    """

    item: Any

    def __post_init__(self) -> None:
        self.state: dict[str, Any] = _checked(self.item).state_dict()


@ocp.args.register_with_handler(CheckpointHandler, for_restore=True)
@dataclasses.dataclass
class CheckpointRestore(_Args):  # type: ignore[misc]
    """Arguments of a restore.

    Args:
      item: the loader or iterator to restore.
    """

    item: Any


def _checked(item: Any) -> Any:
    for name in ('state_dict', 'load_state_dict'):
        method = getattr(item, name, None)
        if not callable(method) or inspect.iscoroutinefunction(method):
            raise InvalidArgumentError(
                f'{type(item).__name__} has no state: expected a Loader, or an iterator of granular (not granular.aio)'
            )
    return item

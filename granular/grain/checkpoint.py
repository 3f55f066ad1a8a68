"""``grain.checkpoint`` (extra ``orbax``): the state of a pipeline in a checkpoint of Orbax."""

from granular.integrations.orbax import CheckpointHandler, CheckpointRestore, CheckpointSave

__all__ = [
    'CheckpointHandler',
    'CheckpointRestore',
    'CheckpointSave',
]

"""Changes of a pipeline that are declared when a state is loaded: everything else must be as it was saved.

::

    state = iterator.state_dict()
    iterator.load_state_dict(state, changes=[granular.changes.RowLength({'tokens': 4096})])

A pipeline that differs in something else is refused, and so is a change that is not declared: the error names the
declaration. One that has been made already is ignored, so that a program may leave it in place.
"""

from granular.aio.pipeline.changes import (
    Added,
    AugmentationSeed,
    BatchSize,
    Excluded,
    Grown,
    Moved,
    Removed,
    Renamed,
    RowLength,
)

__all__ = [
    'Added',
    'AugmentationSeed',
    'BatchSize',
    'Excluded',
    'Grown',
    'Moved',
    'Removed',
    'Renamed',
    'RowLength',
]

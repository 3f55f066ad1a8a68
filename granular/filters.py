"""Select datapoints: by class, by percentage, oversampled, repeated or shuffled. Pure numpy functions, no I/O.

They compute int64 indices into a dataset, and are shared by the methods of pipelines and the wrappers of field
datasets.
"""

from granular.aio.pipeline.filters import (
    Labels,
    Strategy,
    as_labels,
    by_class,
    chosen_classes,
    oversampled,
    percent_range,
    repetitions_of,
    shuffled,
)

__all__ = [
    'Labels',
    'Strategy',
    'as_labels',
    'by_class',
    'chosen_classes',
    'oversampled',
    'percent_range',
    'repetitions_of',
    'shuffled',
]

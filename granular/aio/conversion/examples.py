"""The values of ``tf.train.Example`` and ``SequenceExample`` messages, shaped as a sample of them is."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from granular.errors import DatapointError
from granular.formats.tfrecord import decode_sequence_example

_REMEDY = 'convert a MapDataset with a map of your own'


class ExampleValues:
    """Returns the features of an Example: without a list if they have one value in all sampled records.

    A sequence of a SequenceExample is an array of shape (steps, values), or (steps,) for one value in each, if its
    steps have the same number of numbers in all sampled records; a list of bytes if they have one value each; and
    otherwise a list with an array or a list for each step.
    """

    def __init__(self, sample: Sequence[bytes]) -> None:
        counts: dict[str, set[int]] = {}
        steps: dict[str, set[tuple[Any, int]]] = {}  # the dtypes and numbers of values, by sequence
        for record in sample:
            features, sequences = decode_sequence_example(record)
            for feature, value in features.items():
                counts.setdefault(feature, set()).add(_count(value))
            for name, values in sequences.items():
                steps.setdefault(name, set()).update((_dtype(value), _count(value)) for value in values)
        self._single = {feature for feature, numbers in counts.items() if numbers == {1}}
        self._shapes = {name: shapes.copy().pop() for name, shapes in steps.items() if len(shapes) == 1}

    def __call__(self, record: bytes) -> dict[str, Any]:
        features, sequences = decode_sequence_example(record)
        if both := features.keys() & sequences.keys():
            raise DatapointError(f'a feature and a sequence are both named {min(both)!r}: {_REMEDY}')
        values = {feature: self._value(feature, value) for feature, value in features.items()}
        return values | {name: self._sequence(name, steps) for name, steps in sequences.items()}

    def _value(self, feature: str, value: Any) -> Any:
        if feature not in self._single:
            return value
        if _count(value) != 1:
            raise DatapointError(
                f'feature {feature!r}: expected one value, as in all sampled records, got {_count(value)}: {_REMEDY}'
            )
        return value[0]

    def _sequence(self, name: str, steps: list[Any]) -> Any:
        if name not in self._shapes:
            return steps
        dtype, count = self._shapes[name]
        for number, value in enumerate(steps):
            if (_dtype(value), _count(value)) != (dtype, count):
                raise DatapointError(
                    f'sequence {name!r}: expected {count} values of {dtype or "bytes"} in each step, as in all sampled '
                    f'records, got {_count(value)} of {_dtype(value) or "bytes"} in step {number}: {_REMEDY}'
                )
        if dtype is None:
            return [value[0] for value in steps] if count == 1 else steps
        array = np.stack(steps) if steps else np.zeros((0, count), dtype)
        return array[:, 0] if count == 1 else array


def _count(value: Any) -> int:
    return 0 if value is None else len(value)


def _dtype(value: Any) -> np.dtype[Any] | None:
    return value.dtype if isinstance(value, np.ndarray) else None

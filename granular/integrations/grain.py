"""Google Grain (extra ``grain``): granular's readers in Grain datasets, with batches read at once.

Readers, sources and MapDatasets are valid Grain data sources: they have ``__len__``, ``__getitem__`` and ``_getitems``,
and pickle. But ``grain.MapDataset.batch`` (of 0.2.18) requests elements one by one; :func:`batch` requests all at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from granular._support.indexing import check_integer
from granular._support.lazy import import_extra
from granular._support.other_names import answering
from granular.aio.pipeline.nodes.stacking import stack
from granular.aio.pipeline.transforms import BATCH_ARGUMENTS
from granular.aio.runtime.user_functions import function_or
from granular.errors import InvalidArgumentError, OutOfRangeError

__all__ = ['batch']

MapDataset: Any = import_extra('grain', 'grain').MapDataset


@answering(**BATCH_ARGUMENTS)
def batch(
    dataset: Any,
    batch_size: int,
    *,
    drop_remainder: bool = False,
    batch_fn: Callable[[Sequence[Any]], Any] | None = None,
) -> Any:
    """Return the batches of a ``grain.MapDataset``, with all elements of a batch read concurrently.

    ::

        grain.MapDataset.source(reader).shuffle(seed=1).map(decode).pipe(batch, 64)

    The batches are the same as those of ``grain.MapDataset.batch``.

    Args:
      dataset: the dataset to batch; none of its elements may have been filtered out.
      batch_size: elements per batch.
      drop_remainder: drop the last batch if it is smaller.
      batch_fn: converts a list of elements into a batch; by default each leaf is stacked.

    Raises:
      InvalidArgumentError: for a batch size below 1, or a dataset that is not a ``grain.MapDataset``.
    """
    return _Batched(dataset, batch_size, drop_remainder, function_or('batch_fn', batch_fn, stack))


class _Batched(MapDataset):  # type: ignore[misc]
    """Batches of a ``grain.MapDataset``, each requested at once."""

    def __init__(self, parent: Any, size: int, drop: bool, fn: Callable[[Sequence[Any]], Any]) -> None:
        if not isinstance(parent, MapDataset):
            raise InvalidArgumentError(
                f'expected a grain.MapDataset, got {type(parent).__name__}: streams are batched by .batch()'
            )
        size = check_integer('batch_size', size, 1)
        super().__init__(parent)
        self._size, self._fn = size, fn
        self._parent_length = len(parent)
        self._length = self._parent_length // size if drop else -(-self._parent_length // size)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        if not self._length:
            raise OutOfRangeError(f'index {index}: {self._parent_length} elements make no batch of {self._size}')
        epoch, number = divmod(index, self._length)
        start = number * self._size
        wanted = np.arange(start, min(start + self._size, self._parent_length)) + epoch * self._parent_length
        elements = self._parent._getitems(wanted.tolist())
        for number, element in zip(wanted.tolist(), elements, strict=True):
            if element is None:
                raise InvalidArgumentError(
                    f'element {number} was filtered out, so its batch is not full: batch what to_iter_dataset() gives'
                )
        return self._fn(elements)

    def __str__(self) -> str:
        return f'granular.integrations.grain.batch({self._size})'

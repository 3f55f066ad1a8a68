"""Batches of consecutive datapoints of a source."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from granular._support.indexing import MOST, Ints, check_integer
from granular.aio.pipeline.execution.failures import Failure, Handler, handling
from granular.aio.pipeline.lines import Line
from granular.aio.pipeline.nodes.indices import in_epochs
from granular.aio.pipeline.nodes.source import Node, Source, check_not_empty, map_in_threads, timed
from granular.aio.pipeline.nodes.stacking import is_small, line_of_batch, stack
from granular.aio.runtime.user_functions import function_or
from granular.errors import DatapointError, InvalidArgumentError

_LEFT_OUT: Final = object()
"""Placeholder for a datapoint that failed and is left out of its batch."""


class Batch(Node):
    """Batches of consecutive datapoints, which are all fetched at once."""

    divides = True
    size: int
    drop_remainder: bool
    _nullable: frozenset[str] | None = None  # once they are known

    def __init__(
        self, parent: Source, size: int, drop_remainder: bool, batch_fn: Callable[[Sequence[Any]], Any] | None
    ) -> None:
        super().__init__(parent)
        size = check_integer('batch_size', size, 1, MOST)
        if parent.sparse:
            raise InvalidArgumentError(
                'batches of a filtered dataset would not be full: call to_iter_dataset() before batch()'
            )
        self.size, self.drop_remainder = size, drop_remainder
        self.fn = function_or('batch_fn', batch_fn, stack)
        self.source_length = len(parent)
        self._length = self.source_length // size if drop_remainder else -(-self.source_length // size)

    def __len__(self) -> int:
        return self._length

    def copy_over(self, *parents: Source) -> 'Batch':
        return Batch(parents[0], self.size, self.drop_remainder, self.fn)

    def stored_nbytes(self) -> float | None:
        stored = super().stored_nbytes()
        return None if stored is None else stored * self.size

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        steps = np.asarray(indices, np.int64)
        check_not_empty(self, self._length, steps)
        epochs, positions = np.divmod(steps, self._length)
        starts = positions * self.size
        stops = np.minimum(starts + self.size, self.source_length)
        bases = in_epochs(np.zeros_like(steps), epochs, self.source_length)
        inner = np.concatenate([np.arange(a, b) + c for a, b, c in zip(starts, stops, bases, strict=True)] or [steps])
        handler = handling.get()
        datapoints = await (self.parents[0].fetch(inner) if handler is None else self._fetch_handled(inner, handler))
        cuts = np.cumsum(stops - starts)
        slices = [slice(b - a, b) for a, b in zip((stops - starts).tolist(), cuts.tolist(), strict=True)]
        batches: list[Any] = [datapoints[part] for part in slices]
        if handler is not None:
            batches = [_remaining(batch, step) for batch, step in zip(batches, steps.tolist(), strict=True)]
        elif Failure in set(map(type, datapoints)):
            batches = [_failure_of(batch, inner[part]) for batch, part in zip(batches, slices, strict=True)]
        if self._nullable is None:
            self._nullable = await self.parents[0].nullable_keys() if self.fn is stack else frozenset()
        if self.fn is stack and is_small(datapoints):
            combine = timed(self, self._combine)
            with contextlib.suppress(Exception):  # it is raised, or captured, below
                return [combine(batch, step) for batch, step in zip(batches, steps.tolist(), strict=True)]
        return await map_in_threads([timed(self, self._combine)], batches, 'batching', steps.tolist())

    async def _fetch_handled(self, inner: Ints, handler: Handler) -> list[Any]:
        """Return what is batched, with those replaced that fail, or ``_LEFT_OUT``."""
        source, apart = self.parents[0], np.isin(inner, handler.known)
        groups = [positions for positions in (np.flatnonzero(~apart), np.flatnonzero(apart)) if len(positions)]
        fetched = [await source.fetch(inner[positions]) for positions in groups]
        datapoints: list[Any] = [None] * len(inner)
        for positions, part in zip(groups, fetched, strict=True):
            for position, datapoint in zip(positions.tolist(), part, strict=True):
                if type(datapoint) is Failure:
                    datapoint = await handler.replaced(datapoint)
                    datapoint = _LEFT_OUT if datapoint is None else datapoint
                datapoints[position] = datapoint
        return datapoints

    def _combine(self, datapoints: list[Any], index: int) -> Any:
        return stack(datapoints, self._nullable or ()) if self.fn is stack else self.fn(datapoints)

    def arguments(self) -> dict[str, Any]:
        return {'size': self.size, 'drop': self.drop_remainder}

    def line(self) -> Line:
        return line_of_batch(self.size, self.drop_remainder, self.fn)

    def describe(self) -> str:
        return str(self.line())


def _remaining(batch: list[Any], step: int) -> Any:
    """Return the elements of a batch that are not left out; if there are none, what stands for a batch left out."""
    remaining = [element for element in batch if element is not _LEFT_OUT]
    if remaining or not batch:
        return remaining
    return Failure(step, DatapointError(f'all elements of the batch at index {step} failed'), counts=False)


def _failure_of(batch: list[Any], indices: Ints) -> Any:
    """Return a batch, or the first ``Failure`` in it, with the indices of all."""
    failed = [i for i, element in enumerate(batch) if type(element) is Failure]
    if not failed:
        return batch
    known = [index for i in failed for index in (*batch[i].batched, int(indices[i]))]
    return batch[failed[0]].of_batch(known)


def weight_of(source: Source) -> int:
    """Return the number of datapoints per element of a source."""
    source_weight = max((weight_of(parent) for parent in source.parents), default=1)
    return source_weight * source.size if isinstance(source, Batch) else source_weight

"""Assembly of batches: datapoints are validated against the first one and copied into one array per key."""

import collections
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from granular._support.lazy import is_masked
from granular.aio.pipeline.execution.failures import Errors, Failure, OnError
from granular.aio.pipeline.nodes.batches import weight_of
from granular.aio.pipeline.nodes.source import Source, all_stages
from granular.aio.pipeline.nodes.stacking import (
    NUMBERS,
    NewArray,
    are_alike,
    array_of_texts,
    checked,
    memory_for,
    stack_arrays,
    stack_leaves,
)
from granular.aio.pipeline.streams.decoding import Decoding, measured_roots
from granular.aio.runtime.threads import offload
from granular.config import MiB
from granular.errors import DatapointError
from granular.formats.base import no_array
from granular.metrics import ASSEMBLE, timed

Batch = dict[str, NDArray[Any]]
Spec = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]

# Limits of a batch that the event loop assembles itself, in less than a millisecond: bytes and values.
_IN_PLACE: Final = MiB
_VALUES_IN_PLACE: Final = 512
_TEXT: Final = 'US'  # kinds of dtypes

DROPPED: Final = (
    'the source drops datapoints, by filter, flat_map or a function that returns None, and batches of a Loader would '
    'not be full: use dataset.to_iter_dataset().batch(64)'
)


class LoadedBatch(NamedTuple):
    """A batch, the number of its datapoints, its size in bytes, and the datapoints that failed, as (step, message)."""

    batch: Batch
    rows: int
    nbytes: int
    failed: list[tuple[int, str]]


class Counts(NamedTuple):
    """The numbers of what a consumer has received."""

    batches: int = 0
    datapoints: int = 0
    bytes: int = 0


class Assembly:
    """Loads batches of so many datapoints from a source, in this process or in a worker process.

    A batch of step ``n`` begins ``offset`` datapoints behind it. If memory is recycled, JAX must not use it as it is.
    ``memory`` limits the bytes of the batches that are ready or computed, at most ``prefetch + 1``, and of what is
    decoded for them; at least one is computed. It is divided among worker processes.
    """

    def __init__(
        self,
        source: Source,
        size: int,
        offset: int,
        on_error: OnError,
        recycles: bool,
        memory: int,
        prefetch: int,
        processes: int,
    ) -> None:
        self._source = source
        self._size = size
        self._offset = offset
        self._errors = Errors(on_error, 'step')
        self.spec: Spec = {}  # set before the first batch
        self.depth = prefetch  # by the sizes that are known
        self._memory = memory
        self._prefetch = prefetch
        self._most = prefetch + 1
        self._processes = processes
        self._roots, self._weight = measured_roots(source), weight_of(source)
        self._decoding: Decoding | None = None  # once one datapoint was too large
        self._new: NewArray = np.empty if recycles else memory_for
        # True if the source returns a ``Failure`` for a datapoint that fails instead of raising.
        self.captures: bool = not self._errors.raises
        self.recycled: collections.deque[Batch] = collections.deque()  # those whose memory may be reused

    def stages(self) -> Sequence[Source]:
        """Return the stages of the source, in a fixed order."""
        return all_stages(self._source)

    async def compute(self, step: int, _: int) -> LoadedBatch:
        first = step + self._offset
        indices = np.arange(first, first + self._size)
        if self._fits():
            datapoints = await self._source.fetch(indices)
        else:
            if self._decoding is None:
                left = self._memory - (self._most + 1) * self._nbytes
                share = max(self._memory // 4, min(self._memory // 2, left))
                self._decoding = Decoding(self._source, self._weight, share // self._processes)
            datapoints = await self._decoding.fetch(indices)
        self.find_depth()
        assemble = timed(ASSEMBLE, self._assemble)
        if self._is_small() and not any(type(datapoint) is Failure for datapoint in datapoints):
            return assemble(datapoints, first)
        return await offload(assemble, datapoints, first)

    def find_depth(self) -> None:
        """Set the number of batches to compute beyond the next one."""
        if self._fits():
            self.depth = self._prefetch
            return
        nbytes = max(1, self._nbytes)
        left = self._memory - self._memory // 4 - nbytes  # without what is decoded, and a batch that is assembled
        self.depth = max(0, min(self._most, left // nbytes) - 1)

    @property
    def _nbytes(self) -> int:
        """The bytes of a batch, without texts."""
        return self._size * sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.spec.values())

    def _fits(self) -> bool:
        """Return whether all batches ahead fit into the memory, together with the datapoints that they are made of."""
        nbytes = self._nbytes
        decoded = self._size * self._weight * max((root.largest for root in self._roots), default=0)
        return self._most * max(nbytes, decoded) + 2 * nbytes <= self._memory

    def _is_small(self) -> bool:
        return self._nbytes <= _IN_PLACE and self._size * len(self.spec) <= _VALUES_IN_PLACE

    def _assemble(self, datapoints: list[Any], first: int) -> LoadedBatch:
        failed: list[tuple[int, str]] = []
        if not self._errors.raises:
            datapoints = self._resolved(datapoints, first, failed)
        for i, datapoint in enumerate(datapoints):
            if type(datapoint) is not dict or datapoint.keys() != self.spec.keys():
                check_keys(datapoint, first + i, self.spec)
        memory: Batch = {}
        if len(datapoints) == self._size:
            with contextlib.suppress(IndexError):  # another thread may take the last one
                memory = self.recycled.popleft()
        batch = {
            key: self._column(key, [datapoint[key] for datapoint in datapoints], first, memory.get(key))
            for key in self.spec
        }
        return LoadedBatch(batch, len(datapoints), sum(array.nbytes for array in batch.values()), failed)

    def _column(self, key: str, values: list[Any], first: int, memory: NDArray[Any] | None) -> NDArray[Any]:
        """Stack the values of a key, in memory that is used again if there is some."""
        dtype, shape = self.spec[key]
        if dtype.kind in _TEXT and not dtype.itemsize:
            for i, value in enumerate(values):
                check_value(key, value, first + i, dtype, shape)
            texts = [text for value in values for text in _texts(value)]
            return array_of_texts(texts, dtype.kind == 'U').reshape(len(values), *shape)
        kinds = set(map(type, values))
        if not values:  # all failed
            return self._new((0, *shape), dtype)
        if not shape and len(kinds) == 1 and kinds <= NUMBERS:
            with contextlib.suppress(DatapointError):  # it is raised again for the one that is too large
                column: NDArray[Any] = stack_leaves(values)
                if column.dtype == dtype:
                    if memory is None:
                        return column
                    memory[:] = column
                    return memory
        if kinds != {np.ndarray} or not are_alike(values, dtype, shape):
            values = [check_value(key, value, first + i, dtype, shape) for i, value in enumerate(values)]
        return stack_arrays(values, self._new if memory is None else lambda *_: memory)

    def _resolved(self, datapoints: list[Any], first: int, failed: list[tuple[int, str]]) -> list[Any]:
        """Apply the ``on_error`` policy to datapoints that failed or differ from the spec; return the others."""
        out = []
        for step, datapoint in enumerate(datapoints, first):
            if type(datapoint) is not Failure:
                try:
                    check(datapoint, step, self.spec)
                except DatapointError as error:
                    datapoint = Failure(step, error)
            if type(datapoint) is Failure:
                if self._errors.raises_for(datapoint):
                    raise datapoint.release()
                if datapoint.counts:
                    index, message = datapoint.index, datapoint.message
                    failed.append((step, f'{message} (at index {index} of the stage)' if index != step else message))
                failure = datapoint.at(step, datapoint.counts)
                datapoint = self._errors.resolve(failure)
                if datapoint is not None:
                    check(datapoint, step, self.spec)
                failure.release()
            if datapoint is not None:
                out.append(datapoint)
        return out


def _as_array(key: str, value: Any, step: int) -> NDArray[Any]:
    if is_masked(type(value)):
        raise DatapointError(
            f'step {step}, key {key!r}: expected an array without a mask, which batches do not have: call its '
            f'filled(), or return the mask as another key'
        )
    try:
        array = np.asarray(value)
        return checked(array, list(_leaves(value))) if array.size and isinstance(value, list | tuple) else array
    except DatapointError:
        kinds = ' and '.join(sorted({type(leaf).__name__ for leaf in _leaves(value)}))
        raise DatapointError(
            f'step {step}, key {key!r}: numpy would change values of this {type(value).__name__} of {kinds}: make each '
            f'a key of its own in a transform, or make them equal'
        ) from None
    except (TypeError, RuntimeError) as error:
        raise DatapointError(f'step {step}, key {key!r}: {no_array(value, error)}') from error
    except ValueError as error:
        parts = ', '.join(getattr(value, '_fields', ['of different shapes']))  # a named tuple has names
        raise DatapointError(
            f'step {step}, key {key!r}: expected a number or an array of numbers, got {type(value).__name__} with '
            f'parts {parts}: make each a key of its own in a transform'
        ) from error


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what lists in lists contain."""
    if isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _texts(value: Any) -> Iterator[str | bytes]:
    """Yield the texts of a value: of one, of an array, or of lists of them."""
    for leaf in _leaves(value):
        if isinstance(leaf, str | bytes):
            yield leaf
        else:
            yield from np.asarray(leaf).ravel().tolist()


def spec_of(datapoint: Any, step: int) -> Spec:
    """Return the dtype and shape of each key, from the datapoint at a step, the first of a source.

    Raise ``DatapointError`` if it is not a dict of numbers and arrays.
    """
    check_keys(datapoint, step, datapoint)  # that it has keys
    arrays = {key: _as_array(key, value, step) for key, value in datapoint.items()}
    for key, value in arrays.items():
        if value.dtype == object:
            raise differing(key, value, step)
    return {key: (_dtype_of(array, datapoint[key]), array.shape) for key, array in arrays.items()}


def _dtype_of(array: NDArray[Any], value: Any) -> np.dtype[Any]:
    """Return the dtype of a value: of texts and bytes without their length, which may differ, unless in an array."""
    varies = array.dtype.kind in _TEXT and not (array.shape and isinstance(value, np.ndarray))
    return np.dtype(array.dtype.kind) if varies else array.dtype


def check(datapoint: Any, step: int, spec: Spec) -> None:
    """Raise ``DatapointError`` if keys, dtypes or shapes of a datapoint differ from those of the first."""
    check_keys(datapoint, step, spec)
    for key, (dtype, shape) in spec.items():
        check_value(key, datapoint[key], step, dtype, shape)


def check_value(key: str, value: Any, step: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return a value as an array; raise ``DatapointError`` if dtype or shape differ from those of the first."""
    array = _as_array(key, value, step)
    if _dtype_of(array, value) != dtype or array.shape != shape:
        raise differing(key, array, step, dtype, shape)
    return array


def check_keys(datapoint: Any, step: int, spec: Spec) -> None:
    if datapoint is None:
        raise DatapointError(f'step {step}: {DROPPED}')
    if not isinstance(datapoint, Mapping):
        raise DatapointError(f'step {step}: expected a dict, got {type(datapoint).__name__}')
    if datapoint.keys() != spec.keys():
        raise DatapointError(
            f'step {step}: keys are {sorted(datapoint, key=str)}, those of the first {sorted(spec, key=str)}'
        )


def differing(
    key: str, value: NDArray[Any], step: int, dtype: np.dtype[Any] | None = None, shape: tuple[int, ...] = ()
) -> DatapointError:
    if value.dtype == object:
        return DatapointError(
            f'step {step}, key {key!r}: expected a number or an array of numbers: remove the key in a transform'
        )
    return DatapointError(
        f'step {step}, key {key!r}: dtype {value.dtype} and shape {value.shape}, the first has {dtype} and {shape}: '
        f'make them equal in a transform'
    )

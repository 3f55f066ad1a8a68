"""Combine elements of one structure into batches."""

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import NoneType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import check_integer
from granular._support.lazy import is_masked
from granular._support.other_names import answering
from granular._support.text import logger
from granular.aio.pipeline.lines import Line
from granular.aio.pipeline.nodes.source import estimate_nbytes
from granular.aio.runtime.buffers import uninitialised
from granular.aio.runtime.threads import offload
from granular.aio.runtime.user_functions import name_of
from granular.errors import DatapointError, InvalidArgumentError
from granular.formats.base import no_array

_REMEDY: Final = 'make them equal in a map, or pass batch_fn'
_IN_PLACE: Final = 1 << 18  # bytes; smaller batches are stacked on the event loop
_ALIGNED: Final = 1 << 16  # bytes; smaller batches are copied in no time
_ALIGNMENT: Final = 64  # bytes, which JAX needs on a CPU to use memory as it is
_FAST: Final = 'biufc'  # kinds of dtypes, of which np.array gives the result of np.stack in a third of the time
NUMBERS: Final = frozenset((  # types for which it takes a tenth
    int, float, bool, str, np.int64, np.int32, np.uint8, np.float64, np.float32, np.bool_,
))  # fmt: skip
_EXACT: Final = 1 << 53  # up to which a float of 64 bits has all integers
_TEXTS: Final = (str, (bytes, bytearray))
_STRUCTURES: Final = (Mapping, list, tuple, np.ndarray)

NewArray = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]
"""Returns an array of a shape and a dtype, which is not initialised."""


def stack(datapoints: Sequence[Any], nullable: Collection[str] = ()) -> Any:
    """Stack datapoints of one structure (dicts, tuples, lists of arrays and numbers), each leaf along a new first axis.

    Bytes, and texts with zeros, become an array of objects, because numpy's dtypes of them drop trailing zeros. A leaf
    that is None in every datapoint stays None. Raise ``DatapointError`` if structures or shapes differ, or numpy would
    change a value to one of another kind.

    Numbers and texts of the nullable keys become an array of objects, also if none of these values is None.
    """
    return combine(datapoints, stack_leaves, nullable)


def memory_for(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array of a batch, which is not initialised; JAX can use a large one without a copy."""
    size = math.prod(shape) * dtype.itemsize
    if size < _ALIGNED or dtype.hasobject:
        return np.empty(shape, dtype)
    raw = uninitialised(size + _ALIGNMENT)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def combine(
    datapoints: Sequence[Any], combine_leaves: Callable[[Sequence[Any]], Any], nullable: Collection[str] = ()
) -> Any:
    """Combine datapoints of one structure: the result has this structure, with a function's result for each leaf, but
    for values of nullable keys, which become objects. Raise ``DatapointError`` if structures differ.
    """
    first = datapoints[0]
    if isinstance(first, Mapping):
        keys = first.keys()
        for i, datapoint in enumerate(datapoints):
            if not isinstance(datapoint, Mapping) or datapoint.keys() != keys:
                raise _unlike(i, datapoint, first)
        columns = {key: [datapoint[key] for datapoint in datapoints] for key in keys}
        return {
            key: _combined_or_objects(key, column, combine_leaves)
            if key in nullable
            else _combined(key, column, combine_leaves)
            for key, column in columns.items()
        }
    if isinstance(first, tuple | list):
        for i, datapoint in enumerate(datapoints):
            if type(datapoint) is not type(first) or len(datapoint) != len(first):
                raise _unlike(i, datapoint, first)
        parts = [_combined(i, [datapoint[i] for datapoint in datapoints], combine_leaves) for i in range(len(first))]
        return type(first)(*parts) if hasattr(first, '_fields') else type(first)(parts)
    return combine_leaves(datapoints)


def _unlike(i: int, datapoint: Any, first: Any) -> DatapointError:
    return DatapointError(f'datapoint {i} of a batch is {_outline(datapoint)}, the first {_outline(first)}: {_REMEDY}')


def stack_leaves(datapoints: Sequence[Any]) -> Any:
    """Stack leaves of datapoints, as ``stack`` does."""
    first = datapoints[0]
    kinds = set(map(type, datapoints))
    if kinds == {np.ndarray} and first.dtype.isnative and are_alike(datapoints, first.dtype, first.shape):
        return stack_arrays(datapoints, memory_for)
    for texts in _TEXTS:
        if any(issubclass(kind, texts) for kind in kinds):
            if not all(issubclass(kind, texts) or kind is NoneType for kind in kinds):
                _check_dtypes(datapoints)
                raise DatapointError(f'some values of a batch are text, others arrays: {_REMEDY}')
            return array_of_texts(datapoints, texts is str and NoneType not in kinds)
    stacked: Any
    try:
        if any(map(is_masked, kinds)):
            stacked = np.ma.stack(_with_masks(datapoints))
        elif type(first) in NUMBERS:
            stacked = np.array(datapoints)
        else:
            stacked = np.stack(datapoints)
    except (TypeError, RuntimeError) as error:
        raise _of_no_dtype(datapoints, error) from None
    except ValueError:
        odd = next((i for i, datapoint in enumerate(datapoints) if np.shape(datapoint) != np.shape(first)), None)
        if odd is None:
            raise
        raise DatapointError(
            f'datapoint {odd} of a batch has shape {np.shape(datapoints[odd])}, the first {np.shape(first)}: {_REMEDY}'
        ) from None
    stacked = checked(stacked, datapoints)
    if stacked.dtype.kind == 'O' and stacked.ndim == 1:  # numbers and dicts, for example
        _check_dtypes([datapoint for datapoint in datapoints if datapoint is not None])
    return stacked


def stack_arrays(arrays: Sequence[NDArray[Any]], new: NewArray) -> NDArray[Any]:
    """Stack arrays that are alike, at least one; ``new`` returns the memory for more than a number each."""
    size, dtype, shape = len(arrays), arrays[0].dtype, arrays[0].shape
    if not shape:
        return np.array(arrays, dtype) if dtype.kind in _FAST else np.stack(arrays)
    out = new((size, *shape), dtype)
    np.concatenate(arrays, out=out.reshape(size * shape[0], *shape[1:]))  # in less time than np.stack
    return out


def are_alike(arrays: Sequence[NDArray[Any]], dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    """Return whether all arrays have a dtype and a shape."""
    return all((array.dtype is dtype or array.dtype == dtype) and array.shape == shape for array in arrays)


def _with_masks(datapoints: Sequence[Any]) -> list[Any]:
    """Return datapoints with masked values in place of ``np.ma.masked``, whose dtype is always float64."""
    known = next((datapoint for datapoint in datapoints if datapoint is not np.ma.masked), np.ma.masked)
    masked = np.ma.array(np.zeros((), np.asarray(known).dtype), mask=True)
    return [masked if datapoint is np.ma.masked else datapoint for datapoint in datapoints]


def checked(out: Any, datapoints: Sequence[Any]) -> Any:
    """Return an array that was made of datapoints, if numpy has not changed them to other values, or to text."""
    if out.dtype.kind in 'SUmM':
        _check_dtypes(datapoints, out.dtype)
    elif out.dtype.kind in 'fO' and all(type(one) is int or _is_integer(one) for one in datapoints):
        if out.ndim == 1 and set(map(type, datapoints)) == {int}:
            with contextlib.suppress(OverflowError):
                return np.array(datapoints, np.uint64)
        raise DatapointError(f'the integers of a batch have no dtype of 64 bits in common: {_REMEDY}')
    elif out.dtype.kind == 'f':
        for i, one in enumerate(datapoints):
            if (type(one) is int or _is_integer(one)) and not _are_exact(np.asarray(one)):
                raise DatapointError(f'datapoint {i} of a batch has integers that {out.dtype} would round: {_REMEDY}')
    return out


def _is_integer(value: Any) -> bool:
    return getattr(getattr(value, 'dtype', None), 'kind', '') in ('i', 'u')


def _are_exact(integers: NDArray[Any]) -> bool:
    """Return whether integers keep their values as floats, to which numpy turns them."""
    large = integers[(integers > _EXACT) | (integers < -_EXACT)]
    return all(int(float(one)) == one for one in large.tolist())


def _check_dtypes(datapoints: Sequence[Any], common: np.dtype[Any] | None = None) -> None:
    """Raise an error if only some are text or dates, as numpy would turn 1 into '1', or if dates exceed the dtype."""
    arrays = list(map(np.asarray, datapoints))
    for i, array in enumerate(arrays):
        if array.dtype.kind != arrays[0].dtype.kind:
            raise DatapointError(
                f'datapoint {i} of a batch has dtype {array.dtype}, the first {arrays[0].dtype}: {_REMEDY}'
            ) from None
        dates = common is not None and common.kind in 'mM' and array.dtype != common
        if dates and not np.array_equal(array.astype(common).astype(array.dtype), array, equal_nan=True):
            raise DatapointError(f'datapoint {i} of a batch, of {array.dtype}, does not fit into {common}: {_REMEDY}')


def _of_no_dtype(datapoints: Sequence[Any], error: Exception) -> DatapointError:
    for i, datapoint in enumerate(datapoints):
        try:
            np.asarray(datapoint)
        except (TypeError, RuntimeError) as reason:
            return DatapointError(f'datapoint {i} of a batch: {no_array(datapoint, reason)}')
    _check_dtypes(datapoints)
    return DatapointError(f'the datapoints of a batch have no dtype in common: {error}: {_REMEDY}')


def array_of_texts(texts: Sequence[Any], plain: bool) -> NDArray[Any]:
    """Return an array of texts or bytes; of objects unless they are texts without zeros, which numpy would cut."""
    if plain and '\0' not in ''.join(texts):
        return np.array(texts, str)
    return _array_of_objects(texts)


def _array_of_objects(values: Sequence[Any]) -> NDArray[Any]:
    out = np.empty(len(values), object)
    out[:] = values
    return out


def concatenate(arrays: Sequence[NDArray[Any]]) -> Any:
    """Concatenate arrays, with their masks; raise ``DatapointError`` if only some are text, or dates."""
    try:
        out = (np.ma.concatenate if any(map(is_masked, map(type, arrays))) else np.concatenate)(arrays)
    except TypeError as error:
        raise _of_no_dtype(arrays, error) from None
    return checked(out, arrays)


@answering()
def batch_and_pad(values: Sequence[Any], *, batch_size: int, pad_value: Any = 0) -> Any:
    """Stack elements to a batch of a fixed size, padded at its end: a ``batch_fn`` that keeps a smaller last batch.

    ::

        import functools

        pad = functools.partial(granular.grain.experimental.batch_and_pad, batch_size=64)
        batches = dataset.batch(64, batch_fn=pad)

    Args:
      values: the elements, at most ``batch_size``.
      batch_size: rows of the batch.
      pad_value: value of the rows after those of the elements, in each array.

    Raises:
      DatapointError: if there are too many elements, their structures or shapes differ, or the padding does not fit.
    """
    batch_size = check_integer('batch_size', batch_size, 1)
    if not isinstance(values, Sequence | np.ndarray):
        raise InvalidArgumentError(
            f'batch_and_pad: expected a list of elements, got {type(values).__name__}: pass it as batch_fn: '
            f'batch({batch_size}, batch_fn=functools.partial('
            f'granular.grain.experimental.batch_and_pad, batch_size={batch_size}))'
        )
    if not 0 < len(values) <= batch_size:
        raise DatapointError(f'batch_and_pad: cannot combine {len(values)} elements into a batch of {batch_size}')

    def text(plain: bool) -> Any:
        return str(pad_value) if plain else pad_value if isinstance(pad_value, bytes) else str(pad_value).encode()

    def pad(leaves: Sequence[Any]) -> Any:
        missing = batch_size - len(leaves)
        if isinstance(leaves[0], str | bytes | bytearray):
            return stack_leaves([*leaves, *[text(isinstance(leaves[0], str))] * missing])
        rows = stack_leaves(leaves)
        if not missing:
            return rows
        kind = rows.dtype.kind
        if kind in 'SU':
            value = text(kind == 'U')
            if np.asarray(value).item() != value:  # it has zeros at its end
                raise DatapointError(f'the padding {pad_value!r:.100} does not fit into {rows.dtype}')
        else:
            value = _padding(pad_value, rows.dtype)
        dtype = None if kind in 'SU' else rows.dtype  # a text may be longer than those of the rows
        return concatenate([rows, np.full((missing, *rows.shape[1:]), value, dtype)])

    return combine(values, pad)


def _padding(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return a value as one of a dtype; raise ``DatapointError`` if it is another one there."""
    kind, fits = dtype.kind, False
    if kind not in 'biuf' or not np.iscomplexobj(value):
        with contextlib.suppress(TypeError, ValueError, OverflowError), np.errstate(all='ignore'):
            padding = np.full((), value, dtype)
            if kind == 'f':  # it may be rounded
                fits = bool(np.isfinite(padding) == np.isfinite(value))
            else:
                fits = kind not in 'biu' or padding.item() == value
    if not fits:
        raise DatapointError(f'the padding {value!r:.100} does not fit into {dtype}')
    return padding


def _combined(key: Any, datapoints: list[Any], combine_leaves: Callable[[Sequence[Any]], Any]) -> Any:
    if datapoints[0] is None and all(datapoint is None for datapoint in datapoints):
        return None
    try:
        return combine(datapoints, combine_leaves)
    except DatapointError as error:
        raise DatapointError(f'{key!r}: {error}') from None


def _combined_or_objects(key: Any, datapoints: list[Any], combine_leaves: Callable[[Sequence[Any]], Any]) -> Any:
    """Combine values of a nullable key: a type that does not depend on which values a batch has."""
    first = next((i for i, value in enumerate(datapoints) if isinstance(value, _STRUCTURES)), None)
    if first is None:
        return _array_of_objects(datapoints)
    if (missing := next((i for i, value in enumerate(datapoints) if value is None), None)) is not None:
        raise DatapointError(
            f'{key!r}: datapoint {missing} of a batch is None, datapoint {first} {_outline(datapoints[first])}: '
            f'{_REMEDY}'
        )
    return _combined(key, datapoints, combine_leaves)


def _outline(datapoint: Any) -> str:
    if isinstance(datapoint, Mapping):
        return f'a dict of {sorted(map(str, datapoint))}'
    size = f' of {len(datapoint)}' if isinstance(datapoint, tuple | list) else ''
    return f'a {type(datapoint).__name__}{size}'


def line_of_batch(size: int, drop_remainder: bool, fn: Callable[[Sequence[Any]], Any]) -> Line:
    """Return the line of a stage that makes batches."""
    batch_fn = None if fn is stack else name_of(fn)
    return Line('batch', batch_size=size, drop_remainder=drop_remainder or None, batch_fn=batch_fn)


def warn_of_no_batch(stage: str, rest: str) -> None:
    """Log that a stage with ``drop_remainder`` has no batch, as there are too few elements or rows for one."""
    logger.warning('%s: no batch of %s: pass a smaller size, or drop_remainder=False', stage, rest)


def is_small(datapoints: Sequence[Any]) -> bool:
    """Return whether elements are so small that they are stacked on the event loop."""
    return estimate_nbytes(datapoints) < _IN_PLACE


async def stacked(fn: Callable[[Sequence[Any]], Any], datapoints: list[Any], nullable: Collection[str]) -> Any:
    """Combine datapoints to a batch, on the event loop if they are small and in a thread otherwise."""
    if fn is not stack:
        return await offload(fn, datapoints)
    return stack(datapoints, nullable) if is_small(datapoints) else await offload(stack, datapoints, nullable)

"""Shapes and dtypes of the elements of a pipeline, computed from as little of it as possible."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np

from granular._support.other_names import answering
from granular.aio.pipeline.data_loader import DataLoader, dataset_of
from granular.aio.pipeline.execution.prefetch import END
from granular.aio.pipeline.iter_dataset import IterDataset, stream_of
from granular.aio.pipeline.nodes import elements
from granular.aio.pipeline.nodes.batches import Batch
from granular.aio.pipeline.nodes.indices import IndexNode, Wrapped
from granular.aio.pipeline.nodes.size_batches import SizeBatches
from granular.aio.pipeline.nodes.source import Source
from granular.aio.pipeline.nodes.stacking import combine, stack
from granular.aio.pipeline.streams.batches import BatchOf
from granular.aio.pipeline.streams.element_functions import ElementFunction
from granular.aio.pipeline.streams.read import Read
from granular.aio.pipeline.streams.repeating import Limited, Repeated
from granular.aio.pipeline.streams.stream import Stream, Unchanged
from granular.aio.pipeline.streams.windows import WindowShuffled
from granular.aio.runtime.threads import offload
from granular.aio.runtime.user_functions import name_of
from granular.errors import InvalidArgumentError

_UNCHANGED: Final = elements.Filter, elements.Handled, Unchanged, Limited, Repeated, WindowShuffled


@dataclasses.dataclass(frozen=True)
class ShapeDtypeStruct:
    """Shape and dtype of a leaf of an element.

    ::

        spec = granular.grain.experimental.get_element_spec(dataset)
        granular.grain.experimental.ShapeDtypeStruct(shape=(64, 32, 32, 3), dtype=np.dtype('uint8'))

    Attributes:
      shape: the lengths of its axes; None for one that differs between elements.
      dtype: its dtype; that of objects for a leaf that is neither an array nor a number, such as a text.
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        # A class such as np.int64 is a dtype, too.
        object.__setattr__(self, 'dtype', np.dtype(self.dtype))


@answering()
async def get_element_spec(ds: Any) -> Any:
    """Return the shapes and dtypes of the elements of a pipeline: an element with a ``ShapeDtypeStruct`` for each leaf.

    ::

        dataset = MapDataset.source([{'x': np.zeros((2, 3), np.uint8)}] * 10).shuffle(seed=0).batch(5)
        spec = await get_element_spec(dataset)  # {'x': ShapeDtypeStruct(shape=(None, 2, 3), dtype=dtype('uint8'))}

    What follows from the stages is not computed: shuffling, filtering, stacking of batches, and transformations with a
    method ``output_spec``, which returns the spec of their results for the spec of their elements. Elsewhere, the first
    element is read and computed, and others may have other shapes. As in Grain, the length of batches is None without
    ``drop_remainder=True``, as the last one may be shorter.

    Args:
      ds: a MapDataset, an IterDataset or a DataLoader.

    Raises:
      InvalidArgumentError: if it is neither, or has no elements.
    """
    if isinstance(ds, DataLoader):
        ds = dataset_of(ds)
    stage = stream_of(ds) if isinstance(ds, IterDataset) else getattr(ds, 'node', None)
    if not isinstance(stage, Stream | Source):
        raise InvalidArgumentError(f'expected a MapDataset, an IterDataset or a DataLoader, got {ds!r:.100}')
    return await _spec_of(stage)


async def _spec_of(stage: Any) -> Any:
    if isinstance(stage, Stream) and (read := stage.merged()) is not None:
        if type(read) is not Read:
            return await _of_first(stage)
        stage = read.source
    if isinstance(stage, elements.Streamed):
        stage = stage.node
    if isinstance(stage, IndexNode) and not isinstance(stage, Wrapped):
        if not len(stage):
            raise InvalidArgumentError(f'{stage.describe()} has no elements')
        return await _spec_of(stage.parents[0])
    if isinstance(stage, _UNCHANGED) or (isinstance(stage, ElementFunction) and stage.name == 'filter'):
        return await _spec_of(stage.parents[0])
    if isinstance(stage, Batch | BatchOf) and stage.fn is stack:
        size = stage.size if stage.drop_remainder else None
        is_known = not await _nullable_keys(stage.parents[0])
        spec = _batched(await _spec_of(stage.parents[0]), size) if is_known else None
        return _with_size(await _of_first(stage), size) if spec is None else spec
    if isinstance(stage, SizeBatches):
        return _with_sizes(await _of_first(stage), stage.keys)
    if isinstance(stage, elements.Function | ElementFunction):
        fn = stage.fn if isinstance(stage, elements.Function) else stage.method
        output_spec = getattr(getattr(fn, '__self__', fn), 'output_spec', None)
        if callable(output_spec):
            return _checked(await offload(output_spec, await _spec_of(stage.parents[0])), output_spec)
    return await _of_first(stage)


async def _nullable_keys(stage: Any) -> frozenset[str]:
    if isinstance(stage, Source):
        return await stage.nullable_keys()
    flow = stage.flow()
    try:
        return cast(frozenset[str], await flow.nullable_keys())
    finally:
        await flow.aclose()


async def _of_first(stage: Any) -> Any:
    """Return the spec of the first element of a stream, or of the first one of a source that is not None."""
    if isinstance(stage, Stream):
        flow = stage.flow()
        try:
            element = await flow.next()
        finally:
            await flow.aclose()
        if element is not END:
            return _spec_of_element(element)
    else:
        for index in range(len(stage)):
            element = (await stage.fetch([index]))[0]
            if element is not None:
                return _spec_of_element(element)
    raise InvalidArgumentError(f'{stage.describe()} has no elements')


def _checked(spec: Any, output_spec: Any) -> Any:
    """Return the spec of a method ``output_spec``; raise ``InvalidArgumentError`` for leaves that are no specs."""

    def check(leaves: Any) -> Any:
        if isinstance(leaves[0], type) or not (hasattr(leaves[0], 'shape') and hasattr(leaves[0], 'dtype')):
            raise InvalidArgumentError(
                f'{name_of(output_spec)}.output_spec: expected a '
                'granular.grain.experimental.ShapeDtypeStruct(shape, dtype) for each '
                f'leaf, got {leaves[0]!r:.100}'
            )
        return leaves[0]

    return None if spec is None else combine([spec], check)


def _spec_of_element(element: Any) -> Any:
    return None if element is None else combine([element], lambda leaves: _leaf(leaves[0]))


def _leaf(leaf: Any) -> ShapeDtypeStruct:
    if not isinstance(leaf, type) and hasattr(leaf, 'shape') and hasattr(leaf, 'dtype'):
        return ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)
    if isinstance(leaf, bool | int | float | complex):
        return ShapeDtypeStruct((), np.asarray(leaf).dtype)
    return ShapeDtypeStruct((), np.dtype(object))


def _with_size(batch: Any, size: int | None) -> Any:
    """Return the spec of a batch, with another size."""
    return combine([batch], lambda leaves: ShapeDtypeStruct((size, *leaves[0].shape[1:]), leaves[0].dtype))


def _with_sizes(batch: Any, keys: Sequence[str]) -> Any:
    """Return the spec of batches by size: all values have several, and those of some keys are padded to several."""
    spec = _with_size(batch, None)
    return {
        key: ShapeDtypeStruct((None, None, *value.shape[2:]), value.dtype) if key in keys else value
        for key, value in spec.items()
    }


def _batched(spec: Any, size: int | None) -> Any:
    """Return the spec of a batch of this size; None if it depends on the elements, as for texts."""
    if spec is None:
        return None
    objects: list[ShapeDtypeStruct] = []

    def batch(leaves: Any) -> ShapeDtypeStruct:
        if leaves[0].dtype.kind in 'OSU':  # texts may be longer than the first
            objects.append(leaves[0])
        return ShapeDtypeStruct((size, *leaves[0].shape), leaves[0].dtype)

    batched = combine([spec], batch)
    return None if objects else batched

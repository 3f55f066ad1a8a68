"""``grain.experimental``: operations by the names of Grain's classes, each a function that returns the dataset."""

import enum
import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from granular._support.indexing import check_integer
from granular._support.other_names import no_module_name
from granular.aio.pipeline.iter_dataset import IterDataset
from granular.aio.pipeline.nodes.stacking import batch_and_pad
from granular.aio.pipeline.orders import permute
from granular.aio.pipeline.spec import ShapeDtypeStruct
from granular.aio.pipeline.streams.packing_options import Strategy
from granular.aio.pipeline.transforms import DatasetOptions, FlatMapTransform, MapWithIndexTransform, Transformation
from granular.errors import InvalidArgumentError
from granular.sync.functions import get_element_spec
from granular.sync.pipeline import MapDataset
from granular.testing import assert_equal_output_after_checkpoint

if TYPE_CHECKING:
    from granular.aio.datasources.parquet.stream import ParquetIterDataset
    from granular.aio.datasources.tfrecord.stream import TFRecordIterDataset
    from granular.integrations.jax import device_put

__all__ = [
    'BOSHandling',
    'BestFitPackIterDataset',
    'CacheIterDataset',
    'ConcatThenSplitIterDataset',
    'DatasetOptions',
    'FirstFitPackIterDataset',
    'FlatMapIterDataset',
    'FlatMapMapDataset',
    'FlatMapTransform',
    'InterleaveIterDataset',
    'LimitIterDataset',
    'MapWithIndexTransform',
    'ParquetIterDataset',
    'RebatchIterDataset',
    'RepeatIterDataset',
    'ShapeDtypeStruct',
    'TFRecordIterDataset',
    'ThreadPrefetchIterDataset',
    'WindowShuffleIterDataset',
    'WindowShuffleMapDataset',
    'WithOptionsIterDataset',
    'ZipIterDataset',
    'ZipMapDataset',
    'apply_transformations',
    'assert_equal_output_after_checkpoint',
    'batch_and_pad',
    'device_put',
    'get_element_spec',
    'get_next_index',
    'index_shuffle',
    'set_next_index',
]

_OPTIONAL: Final = {  # what takes a package that may be absent
    'ParquetIterDataset': 'granular.aio.datasources.parquet.stream',
    'TFRecordIterDataset': 'granular.aio.datasources.tfrecord.stream',
    'device_put': 'granular.integrations.jax',
}


def __getattr__(name: str) -> Any:
    if name not in _OPTIONAL:
        raise no_module_name(__name__, name)
    return getattr(importlib.import_module(_OPTIONAL[name]), name)


def apply_transformations(ds: Any, transformations: Transformation | Sequence[Transformation]) -> Any:
    """Return ``ds.apply(transformations)``."""
    return ds.apply(transformations)


def get_next_index(ds_iter: Any) -> int:
    """Return the index of the next element of an iterator."""
    return int(ds_iter.get_next_index())


def set_next_index(ds_iter: Any, index: int) -> None:
    """Continue an iterator at an index."""
    ds_iter.set_next_index(index)


def index_shuffle(index: int, max_index: int, seed: int, rounds: int = 4) -> int:
    """Return the index in a permutation of ``range(max_index + 1)``.

    Raises:
      InvalidArgumentError: for another number of rounds than 4, or an index out of range.
    """
    if rounds != 4:
        raise InvalidArgumentError(f'rounds: expected 4, got {rounds!r:.100}')
    check_integer('index', index, 0, check_integer('max_index', max_index, 0))
    return int(permute(np.array([index]), max_index + 1, seed)[0])


# --- datasets


def FlatMapMapDataset(parent: MapDataset, transform: Any) -> MapDataset:  # noqa: N802
    """Return ``parent.flat_map(transform)``."""
    return parent.flat_map(transform)


def WindowShuffleMapDataset(parent: MapDataset, *, window_size: int, seed: int) -> MapDataset:  # noqa: N802
    """Return ``parent.window_shuffle(window_size, seed)``."""
    return parent.window_shuffle(window_size, seed)


def ZipMapDataset(parents: Sequence[MapDataset]) -> MapDataset:  # noqa: N802
    """Return ``MapDataset.zip(parents)``."""
    return MapDataset.zip(parents)


# --- streams


def CacheIterDataset(parent: IterDataset) -> IterDataset:  # noqa: N802
    """Return ``parent.cache()``."""
    return parent.cache()


def FlatMapIterDataset(parent: IterDataset, transform: Any) -> IterDataset:  # noqa: N802
    """Return ``parent.flat_map(transform)``."""
    return parent.flat_map(transform)


def InterleaveIterDataset(  # noqa: N802
    datasets: Any,
    *,
    cycle_length: int,
    num_make_iter_threads: int = 1,
    make_iter_buffer_size: int = 1,
    iter_buffer_size: int = 1,
) -> IterDataset:
    """Return ``IterDataset.interleave(datasets, cycle_length=..., ...)``."""
    return IterDataset.interleave(
        datasets,
        cycle_length=cycle_length,
        num_make_iter_threads=num_make_iter_threads,
        make_iter_buffer_size=make_iter_buffer_size,
        iter_buffer_size=iter_buffer_size,
    )


def LimitIterDataset(parent: IterDataset, count: int) -> IterDataset:  # noqa: N802
    """Return ``parent.limit(count)``."""
    return parent.limit(count)


def RebatchIterDataset(parent: IterDataset, batch_size: int, drop_remainder: bool = False) -> IterDataset:  # noqa: N802
    """Return ``parent.rebatch(batch_size, drop_remainder=drop_remainder)``."""
    return parent.rebatch(batch_size, drop_remainder=drop_remainder)


def RepeatIterDataset(parent: IterDataset, num_epochs: int | None = None) -> IterDataset:  # noqa: N802
    """Return ``parent.repeat(num_epochs)``."""
    return parent.repeat(num_epochs)


def ThreadPrefetchIterDataset(parent: IterDataset, *, prefetch_buffer_size: int) -> IterDataset:  # noqa: N802
    """Return ``parent.prefetch(prefetch_buffer_size)``."""
    return parent.prefetch(prefetch_buffer_size)


def WindowShuffleIterDataset(parent: IterDataset, *, window_size: int, seed: int) -> IterDataset:  # noqa: N802
    """Return ``parent.window_shuffle(window_size, seed)``."""
    return parent.window_shuffle(window_size, seed)


def WithOptionsIterDataset(parent: IterDataset, options: DatasetOptions) -> IterDataset:  # noqa: N802
    """Return ``parent.with_options(options)``."""
    return parent.with_options(options)


def ZipIterDataset(parents: Sequence[Any], *, strict: bool = True) -> IterDataset:  # noqa: N802
    """Return ``IterDataset.zip(parents, strict=strict)``."""
    return IterDataset.zip(parents, strict=strict)


# --- packing


def _packing(strategy: Strategy) -> Callable[..., IterDataset]:
    def pack(
        parent: IterDataset,
        *,
        length_struct: Any,
        num_packing_bins: int,
        seed: int = 0,
        shuffle_bins: bool = True,
        meta_features: Sequence[str] = (),
        pack_alignment_struct: Any = None,
        padding_struct: Any = None,
        max_sequences_per_bin: int | None = None,
    ) -> IterDataset:
        return parent.pack(
            length_struct,
            strategy=strategy,
            num_packing_bins=num_packing_bins,
            seed=seed,
            shuffle_bins=shuffle_bins,
            meta_features=meta_features,
            alignment=pack_alignment_struct,
            padding=padding_struct,
            max_segments=max_sequences_per_bin,
        )

    pack.__doc__ = f'Return ``parent.pack(length_struct, strategy={strategy!r}, ...)``.'
    return pack


FirstFitPackIterDataset: Final = _packing('first_fit')
BestFitPackIterDataset: Final = _packing('best_fit')


class BOSHandling(enum.Enum):
    """Treatment of the first token of each sequence of a row."""

    DO_NOTHING = enum.auto()
    REPLACE_FIRST_TOKEN_WITH_BOS = enum.auto()


def ConcatThenSplitIterDataset(  # noqa: N802
    parent: IterDataset,
    *,
    length_struct: Mapping[str, int],
    meta_features: Collection[str] = (),
    bos_handling: BOSHandling = BOSHandling.DO_NOTHING,
    bos_features: Collection[str] = (),
    bos_token_id: int | None = None,
) -> IterDataset:
    """Return ``parent.pack(length_struct, strategy='concat_then_split', ...)``.

    Raises:
      InvalidArgumentError: if a token is to be replaced, and ``bos_token_id`` or ``bos_features`` is missing.
    """
    bos = None
    if bos_handling is BOSHandling.REPLACE_FIRST_TOKEN_WITH_BOS:
        if bos_token_id is None or not bos_features:
            raise InvalidArgumentError('bos_handling: expected bos_token_id and bos_features with it')
        bos = dict.fromkeys(bos_features, bos_token_id)
    return parent.pack(length_struct, strategy='concat_then_split', meta_features=list(meta_features), bos=bos)
